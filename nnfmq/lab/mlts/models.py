"""The models of MLTS's scoring benchmark as a table: what is executed, on which data, and what is expected.

A classifier occurs twice: on photos (`_topk`), and on two photos with golden outputs. File names are relative to the
folder of MLTS's models, and are those of AOSP's `test/mlts/models`. A file that is not there is reported as missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.media.images import read_image

__all__ = ["DataMissing", "DataSet", "InputSequence", "ScoringModel", "load_data", "model_path"]

PHOTO_COUNT = 1490
"""The photos of MLTS's image_classification data set."""
SEQUENCE_COUNT = 50
"""The golden sequences of each of MLTS's recurrent models."""


@dataclass(frozen=True, slots=True)
class ScoringModel:
    """One test of the benchmark.

    Attributes:
        name: The test's name, unique.
        file: The model's file, without `.tflite`.
        group: The heading in reports.
        golden: Pairs of files with inputs and golden outputs.
        golden_folder: Instead: the folder of these files, NAME.input and NAME.output.
        total: The number of photos or golden sequences that MLTS has for the test.
        expected_top1: The share of photos whose best class is right, as MLTS states it; 0 without photos.
        evaluator: The metric of the outputs: "top-k", "mel-cep-log-f0", "phone-error-rate", or "" for none but errors.
    """

    name: str
    file: str
    group: str
    golden: tuple[tuple[str, str], ...] = ()
    golden_folder: str = ""
    total: int = 0
    expected_top1: float = 0.0
    evaluator: str = ""

    @property
    def runs_on_photos(self) -> bool:
        """Whether the data are photos with labels."""
        return not self.golden and not self.golden_folder


_V1 = {  # width of the layers, side of the input: expected top-1 of the float and of the quantized model
    ("0.25", 128): (0.444, 0.402),
    ("0.5", 160): (0.582, 0.55),
    ("0.75", 192): (0.604, 0.582),
    ("1.0", 224): (0.617, 0.596),
}
_V2 = {
    ("0.35", 128): (0.516, None),
    ("0.5", 160): (0.583, None),
    ("0.75", 192): (0.617, None),
    ("1.0", 224): (0.639, 0.617),
}


def _classifiers() -> list[ScoringModel]:
    return [
        model
        for version, table in (("v1", _V1), ("v2", _V2))
        for is_quantized in (False, True)
        for (width, side), expected in table.items()
        if expected[is_quantized] is not None
        for model in _classifier(version, width, side, expected[is_quantized] or 0.0, is_quantized)
    ]


def _classifier(
    version: str, width: str, side: int, expected_top1: float, is_quantized: bool
) -> tuple[ScoringModel, ScoringModel]:
    """Return a classifier on photos and on its golden photos."""
    file = f"mobilenet_{version}_{width}_{side}{'_quant' if is_quantized else ''}"
    group = f"MobileNet {version} {'quantized' if is_quantized else 'float'}"
    folder = "mobilenet_quantized" if is_quantized else "mobilenet_float"
    label = f"{'v2_' if version == 'v2' else ''}{width}_{side}"
    golden = tuple((f"{folder}/{what}_{side}.input", f"{folder}/{what}_{label}.output") for what in ("cup", "banana"))
    return (
        ScoringModel(f"{file}_topk", file, group, (), "", PHOTO_COUNT, expected_top1, "top-k"),
        ScoringModel(file, file, group, golden, total=len(golden)),
    )


def _with_folder(file: str, group: str, total: int, evaluator: str = "") -> ScoringModel:
    return ScoringModel(file, file, group, golden_folder=file, total=total, evaluator=evaluator)


MODELS: tuple[ScoringModel, ...] = (
    *_classifiers(),
    _with_folder("ssd_mobilenet_v1_coco_float", "SSD MobileNet", 1),
    _with_folder("ssd_mobilenet_v1_coco_quantized", "SSD MobileNet", 1),
    _with_folder("tts_float", "Text to speech", SEQUENCE_COUNT, "mel-cep-log-f0"),
    _with_folder("asr_float", "Speech recognition", SEQUENCE_COUNT, "phone-error-rate"),
)
"""MLTS's tests, in the order of its list."""


# ----------------------------------------------------------------------------------------------------------------------
# The data of the benchmark: photos with labels, golden inputs and outputs, and golden sequences.
#
# A data set is a list of sequences; a sequence is a list of steps, which a recurrent model executes one after the
# other. A photo is a sequence of one step. Golden files are little-endian arrays, one row for each step. What is
# missing is reported with the name of the file, and the rest of a data set is used.


Array: TypeAlias = npt.NDArray[Any]

PHOTOS = "image_classification"
MEAN_STD_DEV = "tts_float/tts_float.output_mean_std_dev"


class DataMissing(InvalidArgument):
    """A model or its data are not there; the message names the file."""


@dataclass(frozen=True, slots=True)
class InputSequence:
    """Inputs of consecutive steps; the golden output of each step, or the class of a photo."""

    steps: tuple[Array, ...]
    golden: tuple[Array, ...] = ()
    expected_class: int = -1


@dataclass(frozen=True, slots=True)
class DataSet:
    """The sequences that are there for a test, and for text to speech the mean and deviation of each output."""

    sequences: tuple[InputSequence, ...]
    mean_std_dev: Array | None = None

    @property
    def step_count(self) -> int:
        """The number of executions that the whole data set takes."""
        return sum(len(sequence.steps) for sequence in self.sequences)


def model_path(folder: Path, model: ScoringModel) -> Path:
    """Return the path of a model's file. Raises DataMissing if there is none."""
    return _existing(folder / f"{model.file}.tflite")


def load_data(folder: Path, model: ScoringModel, tensor: TensorInfo, photos: int | None = None) -> DataSet:
    """Return the data of a test that are in a folder, for the input `tensor`; at most `photos` photos. Blocks.

    Raises:
        DataMissing: If there are none.
        InvalidArgument: If a photo cannot be read, or Pillow is missing.
    """
    if model.runs_on_photos:
        return DataSet(tuple(_photos(folder, tensor, photos)))
    sequences = tuple(_golden(folder, model, tensor))
    needs_deviations = model.evaluator == "mel-cep-log-f0"
    return DataSet(sequences, _mean_std_dev(folder) if needs_deviations else None)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise DataMissing(f"there is no {path.parent.name}/{path.name}")
    return path


def _photos(folder: Path, tensor: TensorInfo, count: int | None) -> Iterator[InputSequence]:
    """Yield the photos that are there, in the order of their numbers.

    MLTS truncates v·2/255 - 1 to the scale of a quantized input; for those of its models that is the pixel itself.
    """
    folder = folder / PHOTOS
    names = _lines(folder / "labels.txt")
    labels = _lines(folder / "ground_truth_labels.txt")
    paths = [(folder / f"image-{number}.jpeg", label) for number, label in enumerate(labels)]
    found = [(path, label) for path, label in paths if path.is_file()][:count]
    if not found:
        raise DataMissing(f"there is no {folder.name}/image-0.jpeg, nor another photo")
    dtype = np.dtype(tensor.dtype)
    for path, label in found:
        yield InputSequence((read_image(path, tensor.shape, dtype),), expected_class=names.index(label))


def _lines(path: Path) -> list[str]:
    return _existing(path).read_text(encoding="utf-8").splitlines()


def _golden(folder: Path, model: ScoringModel, tensor: TensorInfo) -> Iterator[InputSequence]:
    pairs = [(folder / inputs, folder / outputs) for inputs, outputs in model.golden]
    if model.golden_folder:
        inputs = sorted((folder / model.golden_folder).glob("*.input"))
        pairs = [(path, path.with_suffix(".output")) for path in inputs]
    there = [pair for pair in pairs if all(path.is_file() for path in pair)]
    if not there:
        missing = model.golden[0][0] if model.golden else f"{model.golden_folder}/*.input with its .output"
        raise DataMissing(f"there is no {missing}")
    dtype = np.dtype(tensor.dtype).newbyteorder("<")
    for input_path, output_path in there:
        steps = np.fromfile(input_path, dtype).reshape(-1, *tensor.shape)
        golden = np.fromfile(output_path, dtype).reshape(len(steps), -1)
        yield InputSequence(tuple(steps), tuple(golden))


def _mean_std_dev(folder: Path) -> Array:
    """Return the mean and the standard deviation of each output, shape (outputs, 2)."""
    return np.fromfile(_existing(folder / MEAN_STD_DEV), "<f4").reshape(-1, 2)
