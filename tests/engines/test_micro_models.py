"""The models of TensorFlow Lite Micro, which have no golden files, against LiteRT's reference kernels.

Where the HAL and TFLite define a layer alike, its codes are equal; what docs/explanation/reference-engine.md
lists as different is compared
with the HAL's own formula. Layers are compared one by one on LiteRT's own inputs, so that equality of all of them is
equality of the whole.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tflite
from support.both_runners import Layers, Ours, Theirs, ours
from support.tflite_differences import DIFFERENCES

from nnfmq.importers import load
from nnfmq.importers.tflite import file as tflite_file
from nnfmq.operations import packed_matmul, quantization
from nnfmq.operations.declaration import Tensor

pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")

Array = npt.NDArray[Any]
MOBILENET, PERSON = "mobilenet_v2_int8_per_channel_224", "person_detect"
CONVOLUTIONS = ("CONV_2D", "DEPTHWISE_CONV_2D")
FLOAT_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def read(data_dir: Path) -> Callable[[str], bytes]:
    return lambda name: (data_dir / "models" / "micro" / f"{name}.tflite").read_bytes()


@pytest.fixture
def tflite_multipliers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make convolutions multiply the scales of input and filter in float64, as TFLite does, instead of float32."""

    def multipliers(input: Tensor, filter: Tensor, bias: Tensor, output: Tensor) -> list[float]:
        scales = [filter.scale] if filter.channel_quant is None else filter.channel_quant.scales
        return [float(np.float32(input.scale)) * float(np.float32(s)) / float(np.float32(output.scale)) for s in scales]

    monkeypatch.setattr(quantization, "requantization_scales", multipliers)
    monkeypatch.setattr(packed_matmul, "requantization_scales", multipliers)


def codes(seed: int, shape: tuple[int, ...]) -> Array:
    return np.random.default_rng(seed).integers(-128, 128, shape).astype(np.int8)


def with_dimensions_in_range(content: bytes) -> bytes:
    """Return the file with every quantized dimension that is out of range set to 0, as LiteRT requires."""
    data = bytearray(content)
    graph = tflite.Model.GetRootAs(content, 0).Subgraphs(0)
    tensors = (graph.Tensors(index) for index in range(graph.TensorsLength()))
    for table, rank in ((tensor.Quantization(), tensor.ShapeLength()) for tensor in tensors):
        if table is not None and table.ScaleLength() > 1 and table.QuantizedDimension() >= rank:
            struct.pack_into("<i", data, table._tab.Pos + table._tab.Offset(16), 0)
    return bytes(data)


def compared(content: bytes, seed: int) -> Iterator[tuple[tflite_file.TfliteOperator, Array, Array, Theirs]]:
    """Yield each operator with the interpreter's and LiteRT's result for LiteRT's inputs."""
    litert, layers = Theirs(content, keep_all=True), Layers(content)
    litert([codes(seed, load(content).inputs[0].shape)])
    for operator in layers.operators:
        found = layers.run(operator, litert.tensor)
        yield operator, found, litert.tensor(operator.outputs[0]).reshape(found.shape), litert


def distance(found: Array, expected: Array) -> int:
    return int(np.abs(found.astype(int) - expected).max())


def connected_by_the_hal(file: tflite_file.TfliteFile, operator: tflite_file.TfliteOperator, values: Array) -> Array:
    """Return FULLY_CONNECTED of one row as the HAL defines it, in integers: both steps of the multiplier round."""
    x, weights, bias, y = (file.tensor(index) for index in (*operator.inputs, *operator.outputs))
    assert weights.data is not None
    assert bias.data is not None
    filter = np.frombuffer(weights.data, np.int8).reshape(weights.shape).astype(int)
    sums = filter @ (values.reshape(-1).astype(int) - x.zero_point) + np.frombuffer(bias.data, "<i4")
    real_multiplier = float(np.float32(x.scale) * np.float32(weights.scale))
    fraction, exponent = math.frexp(real_multiplier / float(np.float32(y.scale)))
    output_multiplier = math.floor(fraction * 2**31 + 0.5)
    least = y.zero_point if operator.options.FusedActivationFunction() == 1 else -128
    return np.array(
        [[min(max(rounded_twice(int(s), output_multiplier, -exponent) + y.zero_point, least), 127) for s in sums]]
    )


def rounded_twice(value: int, output_multiplier: int, shift: int) -> int:
    """Return value · multiplier / 2^31, rounded half up, then divided by 2^shift and rounded half away from zero."""
    high = (value * output_multiplier + (1 << 30)) >> 31
    half = (1 << shift) >> 1
    return (high + half) >> shift if high >= 0 else -((-high + half) >> shift)


def test_float_hello_world_matches_litert(read: Callable[[str], bytes]) -> None:
    mine, litert = ours(read("hello_world_float")), Theirs(read("hello_world_float"))
    for value in np.linspace(0, 2 * np.pi, 100, dtype=np.float32):
        np.testing.assert_allclose(mine([value.reshape(1, 1)]), litert([value.reshape(1, 1)]), atol=FLOAT_TOLERANCE)


def test_quantized_hello_world_follows_the_hal_and_differs_from_litert_by_one(
    read: Callable[[str], bytes],
) -> None:
    layers, litert = Layers(read("hello_world_int8")), Theirs(read("hello_world_int8"), keep_all=True)
    file = tflite_file.read(read("hello_world_int8"))
    for code in range(-128, 128):
        litert([np.array([[code]], np.int8)])
        for operator in layers.operators:
            found = layers.run(operator, litert.tensor)
            np.testing.assert_array_equal(
                found, connected_by_the_hal(file, operator, litert.tensor(operator.inputs[0]))
            )
            assert distance(found, litert.tensor(operator.outputs[0])) <= 1


@pytest.mark.parametrize("seed", range(20))
def test_micro_speech_matches_litert(read: Callable[[str], bytes], seed: int) -> None:
    spectrogram = codes(seed, (1, 1960))
    content = read("micro_speech_quantized")
    np.testing.assert_array_equal(ours(content)([spectrogram]), Theirs(content)([spectrogram]))


def test_the_trained_lstm_matches_litert_over_several_executions(read: Callable[[str], bytes]) -> None:
    mine, litert = ours(read("trained_lstm")), Theirs(read("trained_lstm"))
    rng = np.random.default_rng(3)
    for _ in range(5):
        digit = rng.uniform(0, 1, (1, 28, 28)).astype(np.float32)
        np.testing.assert_allclose(mine([digit]), litert([digit]), rtol=0, atol=FLOAT_TOLERANCE)


def test_litert_rejects_person_detect_with_a_reason(read: Callable[[str], bytes]) -> None:
    with pytest.raises(ValueError, match="quantized_dimension must be in range"):
        Theirs(read(PERSON))


def test_person_detect_is_loaded_despite_its_bias_dimensions(read: Callable[[str], bytes]) -> None:
    # The dimension of biases is out of range; NNAPI does not take it from the file.
    assert load(read(PERSON)) == load(with_dimensions_in_range(read(PERSON)))


@pytest.mark.parametrize("seed", range(3))
def test_person_detect_classifies_as_litert(read: Callable[[str], bytes], seed: int) -> None:
    image = codes(seed, (1, 96, 96, 1))
    (found,), (expected,) = ours(read(PERSON))([image]), Theirs(with_dimensions_in_range(read(PERSON)))([image])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", [MOBILENET, PERSON])
def test_every_layer_that_the_hal_and_tflite_define_alike_matches_litert(
    read: Callable[[str], bytes], name: str, seed: int, tflite_multipliers: None
) -> None:
    different = [
        operator.name
        for operator, found, expected, _ in compared(with_dimensions_in_range(read(name)), seed)
        if not np.array_equal(found, expected)
    ]
    assert {(name, "int8") for name in different} <= set(DIFFERENCES)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", [MOBILENET, PERSON])
def test_float32_multipliers_change_few_quantized_values_of_a_convolution_by_one(
    read: Callable[[str], bytes], name: str, seed: int
) -> None:
    results = [
        (np.count_nonzero(found != expected), expected.size, distance(found, expected))
        for operator, found, expected, _ in compared(with_dimensions_in_range(read(name)), seed)
        if operator.name in CONVOLUTIONS
    ]
    shifted, total, farthest = (column for column in zip(*results, strict=True))
    assert max(farthest) <= 1
    assert sum(shifted) <= sum(total) * 1e-6


def test_the_mean_follows_the_hal(read: Callable[[str], bytes]) -> None:
    ((operator, found, _, litert),) = (each for each in compared(read(MOBILENET), 0) if each[0].name == "MEAN")
    file = tflite_file.read(read(MOBILENET))
    x, y = file.tensor(operator.inputs[0]), file.tensor(operator.outputs[0])
    image = litert.tensor(x.index).astype(np.float64)
    assert (x.scale, x.zero_point) == (y.scale, y.zero_point)
    # int8 values are computed as unsigned ones: the sum over the count, truncated.
    expected = np.trunc((image + 128).mean(axis=(1, 2))) - 128
    np.testing.assert_array_equal(found.reshape(-1), expected.reshape(-1))


def test_the_logits_differ_only_because_of_the_mean(read: Callable[[str], bytes], tflite_multipliers: None) -> None:
    content = read(MOBILENET)
    image = codes(0, (1, 3, 224, 224))
    litert = Theirs(content, keep_all=True)
    (expected,), (found,) = litert([image]), Ours(load(content))([image])
    file = tflite_file.read(content)
    layers = Layers(content)
    mean, connected = (next(o for o in layers.operators if o.name == name) for name in ("MEAN", "FULLY_CONNECTED"))
    shifted = layers.run(mean, litert.tensor).reshape(-1).astype(int) - litert.tensor(mean.outputs[0]).reshape(-1)
    x, weights, y = (file.tensor(i) for i in (connected.inputs[0], connected.inputs[1], connected.outputs[0]))
    assert weights.data is not None
    filter = np.frombuffer(weights.data, np.int8).reshape(weights.shape).astype(int)
    shift = filter @ shifted * (x.scale * weights.scale / y.scale)
    # Both sides round a second time, and clamp.
    assert np.all(np.abs(found.astype(int) - expected - shift) <= 2)
    assert np.abs(shift).max() > 0
