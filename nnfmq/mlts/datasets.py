"""The data of the benchmark: photos with labels, golden inputs and outputs, and golden sequences.

A data set is a list of sequences; a sequence is a list of steps, which a recurrent model executes one after the other.
A photo is a sequence of one step. Golden files are little-endian arrays, one row for each step. What is missing is
reported with the name of the file, and the rest of a data set is used.
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
from nnfmq.images import read_image
from nnfmq.mlts.model_list import ScoringModel

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
