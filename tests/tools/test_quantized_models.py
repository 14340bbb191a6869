"""Quantized real models, the packaged digits and MobileNet v1, compared with float models and LiteRT's reference."""

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
from quantize import (
    Calibrator,
    QuantizationResult,
    calibrate,
    calibration_samples,
    choose_params,
    convert_graph,
    expose_intermediates,
    quantize,
    read,
)
from support.interpreted import interpreted
from support.interpreted import quantize as quantize_input
from support.litert_models import reference
from support.places import ROOT

import nnfmq
from nnfmq.media.images import read_image

Array = npt.NDArray[Any]
CALIBRATION, PHOTOS = range(30), range(100, 300)
LAYERS_OF = range(100, 106)
OPERATOR_COUNT, POOL = 31, 27
# In int8, the HAL and LiteRT round halves of an average differently, and the HAL multiplies input and weight scales in
# float32, LiteRT in float64, so that single quantized values differ by one. Results of operators after the first
# difference are not compared.
MAY_DIFFER = {"uint8": (), "int8": range(POOL + 1)}
MAX_ACCURACY_LOSS = 0.043  # of the quantized model; LiteRT's on all photos: 0.444 - 0.401


@pytest.fixture(scope="module")
def digits() -> dict[str, Array]:
    with np.load(nnfmq.example_path("digits.npz"), allow_pickle=False) as archive:
        return {"x": archive["images"][..., None].astype(np.float32) / np.float32(16), "labels": archive["labels"]}


@pytest.fixture(scope="module")
def packaged() -> bytes:
    return nnfmq.example_path("digits_quant.tflite").read_bytes()


def scores(content: bytes, inputs: Array) -> Array:
    """Return the output of nnfmq's interpreter for each input, quantized if the model is."""
    run, info = interpreted(content), nnfmq.load(content).inputs[0]
    return np.asarray([run(_input(x, info.shape, info))[0] for x in inputs])


def _input(values: Array, shape: tuple[int, ...], info: Any) -> Array:
    return (quantize_input(values, info) if info.scale else values).reshape(shape)


def correct(found: Array, labels: Array) -> int:
    return int((found.reshape(len(labels), -1).argmax(axis=1) == labels).sum())


def test_the_quantized_digits_model_is_as_accurate_as_the_float_model(
    digits: dict[str, Array], packaged: bytes
) -> None:
    exact = correct(scores(nnfmq.example_path("digits.tflite").read_bytes(), digits["x"]), digits["labels"])
    found = correct(scores(packaged, digits["x"]), digits["labels"])
    assert abs(found - exact) <= 0.01 * len(digits["labels"])


def test_the_packaged_model_has_int8_input_and_output(packaged: bytes) -> None:
    loaded = nnfmq.load(packaged)
    (image,), (probabilities,) = loaded.inputs, loaded.outputs
    assert (image.dtype, image.scale, image.zero_point) == ("int8", float(np.float32(1 / 255)), -128)
    assert (probabilities.dtype, probabilities.scale, probabilities.zero_point) == ("int8", 1 / 256, -128)


def test_litert_returns_the_same_bytes_for_every_digit(digits: dict[str, Array], packaged: bytes) -> None:
    litert = pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")
    run, info = reference(litert, packaged), nnfmq.load(packaged).inputs[0]
    expected = np.asarray([run(_input(x, info.shape, info))[0] for x in digits["x"]])
    np.testing.assert_array_equal(scores(packaged, digits["x"]), expected, strict=True)


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed")
def test_the_tool_converts_the_float_model_to_the_packaged_model(packaged: bytes, tmp_path: Path) -> None:
    # In a separate process, because importing scikit-learn starts threads of a second BLAS.
    command = [
        sys.executable,
        str(ROOT / "tools" / "example_models.py"),
        "digits",
        "--only-quantized",
        "--out",
        str(tmp_path),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    subprocess.run(command, check=True, capture_output=True, timeout=120, env=environment)
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
def quantized_mobilenet(mobilenet: bytes, photos: Callable[[range], Array]) -> QuantizationResult:
    return quantize(mobilenet, {"input": photos(CALIBRATION)}, per_channel=True, calibrator=Calibrator())


def test_a_quantized_mobilenet_agrees_with_the_float_model_on_most_photos(
    mobilenet: bytes, quantized_mobilenet: QuantizationResult, photos: Callable[[range], Array], data_dir: Path
) -> None:
    """Two unrelated models with an accuracy of 40 % would agree on about 40 % of the photos; these do on two thirds."""
    inputs = photos(PHOTOS)
    predictions = [
        scores(model, inputs).reshape(len(inputs), -1).argmax(axis=1)
        for model in (mobilenet, quantized_mobilenet.content)
    ]
    assert (predictions[0] == predictions[1]).mean() >= 2 / 3
    folder = data_dir / "models" / "image_classification"
    names = np.array((folder / "labels.txt").read_text().splitlines())
    truth = np.array((folder / "ground_truth_labels.txt").read_text().splitlines())[PHOTOS.start : PHOTOS.stop]
    float_accuracy, quantized_accuracy = (float((names[found] == truth).mean()) for found in predictions)
    assert float_accuracy >= 0.35
    assert quantized_accuracy >= float_accuracy - MAX_ACCURACY_LOSS


def test_a_quantized_mobilenet_is_less_than_a_third_as_large(
    mobilenet: bytes, quantized_mobilenet: QuantizationResult
) -> None:
    assert len(quantized_mobilenet.content) < len(mobilenet) / 3


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_litert_and_the_interpreter_agree_on_each_layer_of_mobilenet(
    mobilenet: bytes, photos: Callable[[range], Array], dtype: str
) -> None:
    litert = pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")
    content = with_every_result(mobilenet, photos(range(5)), dtype)
    run, run_litert, info = interpreted(content), reference(litert, content), nnfmq.load(content).inputs[0]
    inputs = [quantize_input(photo, info)[None] for photo in photos(LAYERS_OF)]
    apart = [difference for x in inputs if (difference := first_difference(run(x), run_litert(x)))]
    assert all(number in MAY_DIFFER[dtype] for number, _, _ in apart)
    assert all(largest == 1 and (share < 1e-3 or number == POOL) for number, largest, share in apart)


def first_difference(found: Sequence[Array], expected: Sequence[Array]) -> tuple[int, int, float] | None:
    """Return the first operator whose result differs, the maximum difference and the fraction of different elements."""
    assert len(found) == len(expected) == OPERATOR_COUNT
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        apart = np.abs(one.astype(int) - other)
        if apart.any():
            return number, int(apart.max()), float((apart > 0).mean())
    return None


def with_every_result(model: bytes, inputs: Array, dtype: str) -> bytes:
    """Return a quantized model whose outputs are the results of all its operators."""
    graph = read(model)
    ranges = calibrate(graph, calibration_samples({"input": inputs}, graph), Calibrator())
    converted = convert_graph(graph, choose_params(graph, ranges, dtype), per_channel=dtype == "int8")
    return expose_intermediates(converted.graph).to_bytes()
