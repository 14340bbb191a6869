"""Products and LSTMs of inputs that are quantized when the model runs: what ONNX Runtime computes from integers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.onnx_files import expected, file_of, results
from support.onnx_runtime import onnx

import nnfmq
from nnfmq.compat import onnxruntime as compatible
from nnfmq.hal.errors import UnsupportedModel

quantization: Any = pytest.importorskip("onnxruntime.quantization")
F32 = np.float32
make = onnx.helper.make_node
RNG = np.random.default_rng(8)
RANGES = {
    "both signs": F32([[1, -2, 0.3, 0]]),
    "zeros": np.zeros((2, 3), F32),
    "negative zeros": np.full((1, 2), -0.0, F32),
    "positive": F32([[1, 2, 3.3]]),
    "negative": F32([[-1, -2, -3.3]]),
    "one element": F32([[0.7]]),
    "one negative element": F32([[-0.7]]),
    "halves": F32([[0, 255, 127.5, 1.5, 2.5, 0.5]]),
    "halves around a zero point": F32([[-127, 128, 0.5, 1.5, -0.5, -1.5]]),
    "NaN": F32([[np.nan, 1, 2, np.nan]]),
    "infinity": F32([[np.inf, 1, -2]]),
    "beyond float32": F32([[3e38, -3e38]]),
}


def real(*shape: int, scale: float = 1.0) -> Any:
    return (RNG.standard_normal(shape) * scale).astype(F32)


def integers(dtype: Any, *shape: int) -> Any:
    return RNG.integers(0, 256, shape).astype(np.uint8).view(dtype)


@pytest.fixture(scope="module")
def client() -> Iterator[nnfmq.Client]:
    with nnfmq.connect() as connected:
        yield connected


def everywhere(client: nnfmq.Client, content: bytes, fed: dict[str, Any]) -> list[Any]:
    """Return the outputs on both devices and from the interface of ONNX Runtime."""
    found: list[Any] = []
    for device in ("reference", "compiled"):
        with client.device(device).prepare(nnfmq.load(content)) as model:
            found.append(model.execute(*(x.astype(i.dtype) for x, i in zip(fed.values(), model.inputs, strict=True))))
    return [*found, compatible.InferenceSession(content).run(None, fed)]


@pytest.mark.parametrize("values", RANGES)
def test_the_range_of_the_elements_decides_scale_and_zero_point(client: nnfmq.Client, values: str) -> None:
    fed = {"x": RANGES[values]}
    content = file_of([make("DynamicQuantizeLinear", ["x"], ["y", "s", "z"])], fed, ["y", "s", "z"])
    wanted = expected(content, fed)
    for found in everywhere(client, content, fed):
        for ours, theirs in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(np.reshape(ours, theirs.shape), theirs)


@pytest.mark.parametrize("weights", [np.int8, np.uint8])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("count", [64, 3000])
def test_products_of_integers_are_exact_whatever_their_number_of_terms(
    client: nnfmq.Client, count: int, dtype: Any, weights: Any
) -> None:
    """float32 does not have all sums of 3,000 products."""
    fed = {"a": integers(dtype, 5, count)}
    known = {"w": integers(weights, count, 7), "az": dtype(90), "bz": integers(weights, 7)}
    content = file_of([make("MatMulInteger", ["a", "w", "az", "bz"], ["y"])], fed, ["y"], known)
    wanted = fed["a"].astype(int) - 90
    wanted = wanted @ (known["w"].astype(int) - known["bz"])
    np.testing.assert_array_equal(expected(content, fed)[0], wanted)
    for (found,) in everywhere(client, content, fed):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("channels", [3, 200])
def test_convolutions_of_integers_are_exact(client: nnfmq.Client, channels: int) -> None:
    fed = {"a": integers(np.uint8, 1, channels, 6, 5)}
    known = {"w": np.full((4, channels, 3, 3), 255, np.uint8), "az": np.uint8(0), "wz": np.uint8(1)}
    known["w"][1:] = integers(np.uint8, 3, channels, 3, 3)
    content = file_of([make("ConvInteger", ["a", "w", "az", "wz"], ["y"], pads=[1, 0, 1, 0])], fed, ["y"], known)
    (wanted,) = expected(content, fed)
    for (found,) in everywhere(client, content, fed):
        np.testing.assert_array_equal(found, wanted)


def test_zero_points_for_each_row_are_refused() -> None:
    fed = {"a": integers(np.uint8, 4, 4)}
    known = {"w": integers(np.uint8, 4, 4), "az": integers(np.uint8, 4)}
    content = file_of([make("MatMulInteger", ["a", "w", "az"], ["y"])], fed, ["y"], known)
    with pytest.raises(UnsupportedModel, match="4 zero points"):
        results(content, fed)


@pytest.mark.parametrize("is_per_column", [False, True])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_a_product_quantizes_its_input(client: nnfmq.Client, dtype: Any, is_per_column: bool) -> None:
    """The input has an outlier, as those of transformers: its other elements become few steps."""
    fed = {"x": real(5, 64)}
    fed["x"][2, 7] = 60
    shape = (9,) if is_per_column else ()
    known = {"w": integers(dtype, 64, 9), "s": np.full(shape, 0.015, F32), "b": real(9)}
    known["z"] = np.full(shape, 128 if dtype is np.uint8 else 0, dtype)
    node = make("DynamicQuantizeMatMul", ["x", "w", "s", "z", "b"], ["y"], domain="com.microsoft")
    content = file_of([node], fed, ["y"], known)
    (wanted,) = expected(content, fed)
    floats = fed["x"] @ ((known["w"].astype(F32) - known["z"]) * known["s"]) + known["b"]
    assert np.abs(floats - wanted).max() > 1
    for (found,) in everywhere(client, content, fed):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("is_per_column", [False, True])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_an_lstm_quantizes_its_inputs_and_hidden_states(
    client: nnfmq.Client, dtype: Any, is_per_column: bool, directions: int
) -> None:
    steps, batch, size, units = 9, 2, 12, 20
    fed = {"x": real(steps, batch, size)}
    fed["x"][3, 0, 5] = 25  # an outlier: the other inputs become few steps
    columns = (directions, 4 * units) if is_per_column else (directions,)
    known = {"B": real(directions, 8 * units, scale=0.2)}
    for name, count in (("W", size), ("R", units)):
        known[name] = integers(dtype, directions, count, 4 * units)
        known[f"{name}s"] = RNG.uniform(0.004, 0.008, columns).astype(F32)
        known[f"{name}z"] = np.full(columns, 128 if dtype is np.uint8 else 0, dtype)
    names = ["x", "W", "R", "B", "", "", "", "", "Ws", "Wz", "Rs", "Rz"]
    attributes = {"hidden_size": units, "direction": "bidirectional" if directions == 2 else "forward"}
    node = make("DynamicQuantizeLSTM", names, ["y", "h", "c"], domain="com.microsoft", **attributes)
    content = file_of([node], fed, ["y", "h", "c"], known)
    wanted = expected(content, fed)
    for found in everywhere(client, content, fed):
        for ours, theirs in zip(found, wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-3)


def float_model(kind: str) -> tuple[bytes, dict[str, Any]]:
    """Return a float model that ONNX Runtime's quantizer is to quantize."""
    if kind == "LSTM":
        x = real(7, 1, 10, scale=2)
        known = {"W": real(1, 64, 10), "R": real(1, 64, 16), "B": real(1, 128)}
        nodes = [make("LSTM", ["x", "W", "R", "B"], ["y", "h"], hidden_size=16)]
        return file_of(nodes, {"x": x}, ["y", "h"], known), {"x": x}
    if kind == "Conv":
        x, known = real(1, 3, 9, 9), {"w": real(4, 3, 3, 3), "b": real(4)}
        return file_of([make("Conv", ["x", "w", "b"], ["y"])], {"x": x}, ["y"], known), {"x": x}
    x, known = real(3, 32), {"w": real(32, 24), "b": real(24), "v": real(24, 5)}
    nodes = [
        make("MatMul", ["x", "w"], ["a"]),
        make("Add", ["a", "b"], ["c"]),
        make("Relu", ["c"], ["d"]),
        make("MatMul", ["d", "v"], ["y"]),
    ]
    return file_of(nodes, {"x": x}, ["y"], known), {"x": x}


@pytest.mark.parametrize("weights", ["QInt8", "QUInt8"])
@pytest.mark.parametrize("kind", ["MatMul", "Conv", "LSTM"])
def test_what_the_dynamic_quantizer_writes_has_onnx_runtime_s_results(
    client: nnfmq.Client, kind: str, weights: str, tmp_path: Path
) -> None:
    content, fed = float_model(kind)
    model = onnx.shape_inference.infer_shapes(onnx.ModelProto.FromString(content))
    to = str(tmp_path / "quantized.onnx")
    quantization.quantize_dynamic(model, to, weight_type=quantization.QuantType[weights])
    quantized = Path(to).read_bytes()
    operators = {node.op_type for node in onnx.ModelProto.FromString(quantized).graph.node}
    assert operators & {"MatMulInteger", "ConvInteger", "DynamicQuantizeLSTM"}
    wanted = expected(quantized, fed)
    for found in everywhere(client, quantized, fed):
        for ours, theirs in zip(found, wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-3 * np.abs(theirs).max())


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16])
def test_scale_and_zero_point_may_be_computed(client: nnfmq.Client, dtype: Any) -> None:
    fed = {"x": F32([0.25, 0.75, -1.25, 3.5, 400, -400, np.nan]), "s": F32([0.5]), "f": F32([3])}
    nodes = [
        make("Cast", ["f"], ["z"], to=onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))),
        make("Squeeze", ["s"], ["scale"]),
        make("Squeeze", ["z"], ["zero"]),
        make("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        make("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    model = onnx.ModelProto.FromString(file_of(nodes, fed, ["q", "y"], opset=21))
    model.ir_version = 10
    content = bytes(model.SerializeToString())
    wanted = expected(content, fed)
    for found in everywhere(client, content, fed):
        for ours, theirs in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_what_was_quantized_when_the_model_runs_is_dequantized(client: nnfmq.Client) -> None:
    fed = {"x": real(3, 9)}
    nodes = [
        make("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        make("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    content = file_of(nodes, fed, ["y"])
    (wanted,) = expected(content, fed)
    for (found,) in everywhere(client, content, fed):
        np.testing.assert_array_equal(found, wanted)
