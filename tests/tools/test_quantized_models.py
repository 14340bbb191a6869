"""Real models, quantized: the packaged digits and MobileNet v1, against the float ones and LiteRT's reference."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from quantize import Result, quantize
from quantize_calibration import Estimator, measured, samples, shown
from quantize_graph import parameters, quantized
from support.interpreted import codes_of, interpreted
from support.litert_models import reference
from support.places import ROOT
from tflite_reader import read

import nnfmq
from nnfmq.cli.images import read_image

Array = npt.NDArray[Any]
CALIBRATION, PHOTOS = range(30), range(100, 300)
LAYERS_OF = range(100, 106)
OPERATOR_COUNT, POOL = 31, 27
# In int8 the two round halves of an average differently, and multiply the scales of a product in float32 (the HAL) or
# in float64, which now and then moves a code. What comes after the first difference is not comparable.
MAY_DIFFER = {"uint8": (), "int8": range(POOL + 1)}
ACCURACY_LOST = 0.043  # from float to quantized, by LiteRT on all photos: 0.444 - 0.401


@pytest.fixture(scope="module")
def digits() -> dict[str, Array]:
    with np.load(nnfmq.example_path("digits.npz"), allow_pickle=False) as archive:
        return {"x": archive["images"][..., None].astype(np.float32) / np.float32(16), "labels": archive["labels"]}


@pytest.fixture(scope="module")
def packaged() -> bytes:
    return nnfmq.example_path("digits_quant.tflite").read_bytes()


def scores(content: bytes, inputs: Array) -> Array:
    """Return what our interpreter makes of each input, as codes where the model has codes."""
    run, info = interpreted(content), nnfmq.load(content).inputs[0]
    return np.asarray([run(_input(x, info.shape, info))[0] for x in inputs])


def _input(values: Array, shape: tuple[int, ...], info: Any) -> Array:
    return (codes_of(values, info) if info.scale else values).reshape(shape)


def correct(found: Array, labels: Array) -> int:
    return int((found.reshape(len(labels), -1).argmax(axis=1) == labels).sum())


def test_the_quantized_digits_are_recognised_as_well_as_by_the_float_model(
    digits: dict[str, Array], packaged: bytes
) -> None:
    exact = correct(scores(nnfmq.example_path("digits.tflite").read_bytes(), digits["x"]), digits["labels"])
    found = correct(scores(packaged, digits["x"]), digits["labels"])
    assert abs(found - exact) <= 0.01 * len(digits["labels"])


def test_the_packaged_model_takes_and_gives_int8(packaged: bytes) -> None:
    loaded = nnfmq.load(packaged)
    (image,), (probabilities,) = loaded.inputs, loaded.outputs
    assert (image.dtype, image.scale, image.zero_point) == ("int8", float(np.float32(1 / 255)), -128)
    assert (probabilities.dtype, probabilities.scale, probabilities.zero_point) == ("int8", 1 / 256, -128)


def test_litert_gives_the_same_bytes_for_every_digit(digits: dict[str, Array], packaged: bytes) -> None:
    litert = pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")
    run, info = reference(litert, packaged), nnfmq.load(packaged).inputs[0]
    theirs = np.asarray([run(_input(x, info.shape, info))[0] for x in digits["x"]])
    np.testing.assert_array_equal(scores(packaged, digits["x"]), theirs, strict=True)


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed")
def test_the_packaged_model_is_what_the_tool_makes_of_the_float_one(packaged: bytes, tmp_path: Path) -> None:
    # In a process of its own: importing scikit-learn leaves threads of a second BLAS behind.
    command = [sys.executable, str(ROOT / "tools" / "train_digits.py"), "--only-quantized", "--out", str(tmp_path)]
    script_s_folder_on_path = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    subprocess.run(command, check=True, capture_output=True, timeout=120, env=script_s_folder_on_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"digits_quant.tflite": packaged}


@pytest.fixture(scope="module")
def mobilenet(data_dir: Path) -> bytes:
    return (data_dir / "models" / "mobilenet_v1_0.25_128.tflite").read_bytes()


@pytest.fixture(scope="module")
def photos(data_dir: Path) -> Callable[[range], Array]:
    pytest.importorskip("PIL", reason="Pillow is not installed")
    folder = data_dir / "models" / "image_classification"
    float32 = np.dtype(np.float32)

    def read_all(numbers: range) -> Array:
        return np.asarray([read_image(folder / f"image-{n}.jpeg", (1, 128, 128, 3), float32)[0] for n in numbers])

    return read_all


@pytest.fixture(scope="module")
def quantized_mobilenet(mobilenet: bytes, photos: Callable[[range], Array]) -> Result:
    return quantize(mobilenet, {"input": photos(CALIBRATION)}, per_channel=True, estimator=Estimator())


def test_a_quantized_mobilenet_agrees_with_the_float_one_on_most_photos(
    mobilenet: bytes, quantized_mobilenet: Result, photos: Callable[[range], Array], data_dir: Path
) -> None:
    """Models that are 40 % right and agree on nothing else agree on 40 % at most; two thirds is well beyond."""
    inputs = photos(PHOTOS)
    answers = [
        scores(model, inputs).reshape(len(inputs), -1).argmax(axis=1)
        for model in (mobilenet, quantized_mobilenet.content)
    ]
    assert (answers[0] == answers[1]).mean() >= 2 / 3
    folder = data_dir / "models" / "image_classification"
    names = np.array((folder / "labels.txt").read_text().splitlines())
    truth = np.array((folder / "ground_truth_labels.txt").read_text().splitlines())[PHOTOS.start : PHOTOS.stop]
    float_right, quantized_right = (float((names[found] == truth).mean()) for found in answers)
    assert float_right >= 0.35
    assert quantized_right >= float_right - ACCURACY_LOST


def test_a_quantized_mobilenet_is_less_than_a_third_as_large(mobilenet: bytes, quantized_mobilenet: Result) -> None:
    assert len(quantized_mobilenet.content) < len(mobilenet) / 3


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_litert_computes_each_layer_of_mobilenet_as_we_do(
    mobilenet: bytes, photos: Callable[[range], Array], dtype: str
) -> None:
    litert = pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")
    content = with_every_result(mobilenet, photos(range(5)), dtype)
    ours, theirs, info = interpreted(content), reference(litert, content), nnfmq.load(content).inputs[0]
    inputs = [codes_of(photo, info)[None] for photo in photos(LAYERS_OF)]
    apart = [difference for codes in inputs if (difference := first_difference(ours(codes), theirs(codes)))]
    assert all(number in MAY_DIFFER[dtype] for number, _, _ in apart)
    assert all(largest == 1 and (share < 1e-3 or number == POOL) for number, largest, share in apart)


def first_difference(ours: Sequence[Array], theirs: Sequence[Array]) -> tuple[int, int, float] | None:
    """Return the first operator whose codes differ, by how much at most, and what share of them; None: none differs."""
    assert len(ours) == len(theirs) == OPERATOR_COUNT
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        apart = np.abs(mine.astype(int) - other)
        if apart.any():
            return number, int(apart.max()), float((apart > 0).mean())
    return None


def with_every_result(model: bytes, inputs: Array, dtype: str) -> bytes:
    """Return a quantized model whose outputs are the results of all its operators."""
    graph = read(model)
    ranges = measured(graph, samples({"input": inputs}, graph), Estimator())
    made = quantized(graph, parameters(graph, ranges, dtype), per_channel=dtype == "int8")
    return shown(made.graph).written()
