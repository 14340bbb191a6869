"""MobileNets on photos that are prepared as MLTS does: the compiling engine classifies them as LiteRT does.

Some photos for each model; `pytest --all-photos` runs all 300, which takes about ten minutes, most of them LiteRT's.
Quantized scores are equal to those of LiteRT's reference kernels, and for the NCHW model to the interpreter's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.both_runners import Theirs

from nnfmq import load
from nnfmq.engines import interpreter
from nnfmq.engines.compiled.partition import prepare
from nnfmq.hal.types import Model
from nnfmq.importers import LoadedModel
from nnfmq.media.images import read_image
from nnfmq.validation import validate_model

pytest.importorskip("PIL", reason="Pillow is not installed")

Array = npt.NDArray[Any]

COUNT = 300
CLASSIFIERS = {
    "mobilenet_v1_0.25_128": 5,
    "mobilenet_v1_0.25_128_quant": 5,
    "mobilenet_v1_0.75_192_quant": 50,
    "mobilenet_v2_1.0_224_quant": 60,
}
"""The step between the photos of a usual run, for each model."""
IN_NCHW = "micro/mobilenet_v2_int8_per_channel_224"


@pytest.fixture
def folder(data_dir: Path) -> Path:
    return data_dir / "models" / "image_classification"


def photos(folder: Path, shape: tuple[int, ...], dtype: str, numbers: range) -> list[Array]:
    return [read_image(folder / f"image-{number}.jpeg", shape, np.dtype(dtype)) for number in numbers]


def numbers(request: pytest.FixtureRequest, step: int) -> range:
    return range(0, COUNT, 1 if request.config.getoption("--all-photos") else step)


def scores(program: Any, loaded: LoadedModel, inputs: list[Array]) -> Array:
    result = loaded.outputs[0]
    found = np.empty((len(inputs), *result.shape[1:]), result.dtype)
    for number, array in enumerate(inputs):
        program.execute([array], [found[number : number + 1]])
    return found


def hits(scores: Array, truth: Array, count: int) -> int:
    """Return the number of photos whose class is among the `count` best; of equal scores the first is better."""
    best = np.argsort(-scores.astype(np.float64), axis=1, kind="stable")[:, :count]
    return int((best == truth[:, np.newaxis]).any(axis=1).sum())


def classes(folder: Path, wanted: range) -> Array:
    names = (folder / "labels.txt").read_text().splitlines()
    labels = (folder / "ground_truth_labels.txt").read_text().splitlines()
    return np.array([names.index(labels[number]) for number in wanted])


@pytest.mark.parametrize("model", CLASSIFIERS)
def test_photos_are_classified_as_by_litert(model: str, folder: Path, request: pytest.FixtureRequest) -> None:
    content = (folder.parent / f"{model}.tflite").read_bytes()
    loaded, litert = load(content), Theirs(content)
    validate_model(loaded.model)
    program, wanted = prepare(loaded.model), numbers(request, CLASSIFIERS[model])
    assert program.compiled_ops == every_operation(loaded.model)
    inputs = photos(folder, loaded.inputs[0].shape, loaded.inputs[0].dtype, wanted)
    found, expected = scores(program, loaded, inputs), np.concatenate([litert([one])[0] for one in inputs])

    truth = classes(folder, wanted)
    counts = [(hits(found, truth, count), hits(expected, truth, count)) for count in (1, 5)]
    print(f"{model}: {len(wanted)} photos, top 1 and top 5 of this engine and LiteRT: {counts}")  # -rP shows it
    if found.dtype == np.float32:
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        assert all(abs(compiled - reference) <= 1 for compiled, reference in counts)
    else:
        np.testing.assert_array_equal(found, expected)
        assert all(compiled == reference for compiled, reference in counts)
    assert counts[1][0] > len(wanted) / 3  # of 1,001 classes: the photos were prepared as the model expects


def test_scores_of_photos_in_nchw_match_the_interpreter(folder: Path, request: pytest.FixtureRequest) -> None:
    """LiteRT rounds differently with scales per channel: see test_micro_models.py."""
    loaded = load((folder.parent / f"{IN_NCHW}.tflite").read_bytes())
    program, wanted = prepare(loaded.model), numbers(request, 60)
    assert program.compiled_ops == every_operation(loaded.model)
    inputs = [
        np.ascontiguousarray(photo.transpose(0, 3, 1, 2)) for photo in photos(folder, (1, 224, 224, 3), "int8", wanted)
    ]
    found, expected = (scores(one, loaded, inputs) for one in (program, interpreter.prepare(loaded.model)))
    np.testing.assert_array_equal(found, expected)
    assert np.unique(found.argmax(axis=1)).size > len(wanted) / 3


def every_operation(model: Model) -> frozenset[int]:
    return frozenset(range(len(model.main.operations)))
