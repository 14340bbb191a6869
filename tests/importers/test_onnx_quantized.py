"""Quantized ONNX models in the three forms that ONNX Runtime's quantizer writes: at most one step from its results."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator
from support.onnx_files import assert_close, expected, file_of, results
from support.onnx_runtime import onnx

from nnfmq.hal.errors import UnsupportedModel
from nnfmq.importers import load
from nnfmq.importers.onnx.operators.quantized import _QUANTIZED_CONVERTERS

RNG = np.random.default_rng(5)
X, STEP = np.float32(1 / 127), np.float32(0.03)
node = onnx.helper.make_node


def real(*shape: int) -> Any:
    return RNG.uniform(-1, 1, shape).astype(np.float32)


def weights(*shape: int) -> Any:
    """Return int8 of 7 bits: ONNX Runtime saturates sums of two products with uint8 on x86 without VNNI."""
    return RNG.integers(-64, 64, shape).astype(np.int8)


def within_one_step(content: bytes, fed: dict[str, Any], step: float) -> None:
    (found,), (wanted,) = results(content, fed), expected(content, fed)
    steps = np.abs(found.astype(float) - wanted) / step
    assert found.shape == wanted.shape and np.abs(wanted).max() > 3 * step
    assert steps.max() < 1.01 and (steps > 0.5).mean() < 0.05


def quantized(kind: Any, channels: bool) -> tuple[bytes, dict[str, Any]]:
    """Return a convolution between QuantizeLinear and DequantizeLinear, with weights of 8 bits and biases of 32."""
    scales = np.float32([0.01, 0.02, 0.005]) if channels else np.float32(0.01)
    nodes = [
        node("QuantizeLinear", ["x", "xs", "xz"], ["xq"]),
        node("DequantizeLinear", ["xq", "xs", "xz"], ["xf"]),
        node("DequantizeLinear", ["w", "ws", "wz"], ["wf"], **({"axis": 0} if channels else {})),
        node("DequantizeLinear", ["b", "bs"], ["bf"], **({"axis": 0} if channels else {})),
        node("Conv", ["xf", "wf", "bf"], ["c"], pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"]),
        node("QuantizeLinear", ["r", "ys", "yz"], ["yq"]),
        node("MaxPool", ["yq"], ["p"], kernel_shape=[2, 2]),
        node("DequantizeLinear", ["p", "ys", "yz"], ["y"]),
    ]
    constants = {
        "xs": np.float32(1 / 127),
        "xz": kind(3),
        "w": weights(3, 2, 3, 3),
        "ws": scales,
        "wz": np.zeros(scales.shape, np.int8),
        "b": RNG.integers(-500, 500, 3).astype(np.int32),
        "bs": scales / np.float32(127),
        "ys": np.float32(0.03),
        "yz": kind(-9 if kind is np.int8 else 20),
    }
    fed = {"x": real(1, 2, 6, 6)}
    return file_of(nodes, fed, ["y"], constants), fed


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("kind", [np.uint8, np.int8])
def test_a_quantized_model_computes_what_onnx_runtime_computes_within_one_step(kind: Any, channels: bool) -> None:
    content, fed = quantized(kind, channels)
    within_one_step(content, fed, 0.03)


STEPS = {"Average": 0.005, "Sigmoid": STEP / 4, "Softmax": 1 / 256, "NhwcMaxPool": X}
A, B, Y = (["a", "xs", "xz"], ["b", "xs", "xz"], ["ys", "yz"])
W, V = (["w", "ws", "wz"], ["v", "ws", "wz"])
OPERATORS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "QLinearConv": ([*A, *W, *Y, "bias"], {"pads": [1, 1, 1, 1]}),
    "QLinearMatMul": ([*A, *V, *Y], {}),
    "com.microsoft.NhwcMaxPool": (["a"], {"kernel_shape": [2, 2], "strides": [2, 1]}),
    "com.microsoft.QGemm": ([*A, *V, "", *Y], {}),
    "com.microsoft.QGemm alpha": ([*A, *V, "offsets", *Y], {"alpha": 0.5}),
    "com.microsoft.QLinearAdd": ([*A, *B, *Y], {}),
    "com.microsoft.QLinearAveragePool": ([*A, *Y], {"kernel_shape": [2, 2], "pads": [1, 0, 0, 1]}),
    "com.microsoft.QLinearAveragePool channels_last": ([*A, *Y], {"kernel_shape": [2, 2], "channels_last": 1}),
    "com.microsoft.QLinearConcat": ([*Y, *A, *B], {"axis": 1}),
    "com.microsoft.QLinearConv": ([*A, *W, *Y, "bias"], {"pads": [1, 1, 1, 1]}),
    "com.microsoft.QLinearConv channels_last": ([*A, "u", "ws", "wz", *Y, "bias"], {"channels_last": 1}),
    "com.microsoft.QLinearGlobalAveragePool": ([*A, *Y], {}),
    "com.microsoft.QLinearGlobalAveragePool channels_last": ([*A, *Y], {"channels_last": 1}),
    "com.microsoft.QLinearLeakyRelu": ([*A, *Y], {"alpha": 0.1}),
    "com.microsoft.QLinearMul": ([*A, *B, *Y], {}),
    "com.microsoft.QLinearSigmoid": ([*A, *Y], {}),
    "com.microsoft.QLinearSoftmax": ([*A, *Y], {"axis": 1, "opset": 13}),
    "com.microsoft.QLinearSoftmax flat": ([*A, *Y], {"axis": 2, "opset": 12}),
    "com.microsoft.QLinearWhere": (["c", *A, *B, *Y], {}),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_on_quantized_tensors_is_within_one_step(name: str) -> None:
    names, attributes = OPERATORS[name]
    domain, _, operator = name.split()[0].rpartition(".")
    shape = (3, 8) if "v" in names else (1, 2, 4, 4)
    fed = {"x": real(*shape), "z": real(*shape)} if "b" in names else {"x": real(*shape)}
    nodes = [node("QuantizeLinear", [given, "xs", "xz"], [to]) for given, to in zip(fed, "ab", strict=False)]
    nodes.append(node(operator, names, ["q"], domain=domain, **attributes))
    nodes.append(node("DequantizeLinear", ["q", "ys", "yz"], ["y"]))
    small = next((step for part, step in STEPS.items() if part in name), STEP)
    step = np.float32(small)
    constants = {
        "xs": X,
        "xz": np.uint8(120),
        "w": weights(3, 2, 3, 3),
        "u": weights(3, 4, 1, 1),
        "v": weights(8, 5),
        "c": RNG.integers(0, 2, (1, 2, 4, 4)).astype(bool),
        "ws": np.float32(0.01),
        "wz": np.int8(0),
        "ys": step,
        "yz": np.uint8(0 if "Softmax" in name else 120 if "NhwcMaxPool" in name else 100),
        "bias": RNG.integers(-900, 900, 3).astype(np.int32),
        "offsets": np.arange(-9000, 9001, 4500, np.int32),
    }
    model = onnx.ModelProto.FromString(file_of(nodes, fed, ["y"], constants))
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    within_one_step(model.SerializeToString(), fed, float(step))


@pytest.mark.parametrize("operator", ["MatMulInteger", "ConvInteger"])
def test_a_model_that_is_quantized_when_it_runs_computes_what_onnx_runtime_computes(operator: str) -> None:
    is_product = operator == "MatMulInteger"
    kernel, zero = (weights(8, 5), np.int8(3)) if is_product else (weights(3, 2, 3, 3).view(np.uint8), np.uint8(7))
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["a", "s", "z"]),
        node(operator, ["a", "w", "z", "wz"], ["product"]),
        node("Cast", ["product"], ["float"], to=1),
        node("Mul", ["s", "ws"], ["scale"]),
        node("Mul", ["float", "scale"], ["y"]),
    ]
    constants = {"w": kernel, "wz": zero, "ws": np.float32(0.01)}
    for fed in (
        {"x": real(3, 8) if is_product else real(1, 2, 6, 6)},
        {"x": np.zeros((3, 8) if is_product else (1, 2, 6, 6), np.float32)},
    ):
        content = file_of(nodes, fed, ["y"], constants)
        assert_close(results(content, fed), expected(content, fed))


def test_a_quantized_table_is_looked_up() -> None:
    nodes = [node("Gather", ["table", "x"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["y"])]
    constants = {"table": weights(9, 4), "s": np.float32(0.02), "z": np.int8(-4)}
    fed = {"x": np.array([[1, 8], [0, 3]])}
    content = file_of(nodes, fed, ["y"], constants)
    assert_close(results(content, fed), expected(content, fed))


def test_constants_are_quantized_when_the_model_is_loaded() -> None:
    nodes = [
        node("QuantizeLinear", ["w", "s", "z"], ["q"], axis=0),
        node("DequantizeLinear", ["q", "s", "z"], ["f"], axis=0),
        node("Mul", ["x", "f"], ["y"]),
    ]
    constants = {"w": real(3, 4) * 2, "s": np.float32([0.01, 0.02, 0.015]), "z": np.int8([0, -5, 3])}
    fed = {"x": real(3, 4)}
    content = file_of(nodes, fed, ["y"], constants)
    assert len(load(content).model.main.operations) == 1
    assert_close(results(content, fed), expected(content, fed))


@pytest.mark.parametrize(
    ("constants", "message"),
    [
        ({"s": np.float32([0.1, 0.2]), "z": np.uint8([1, 2])}, "2 scales for 3 channels"),
        ({"s": np.float32(0.1), "z": np.uint8([1, 2])}, "for each channel"),
    ],
)
def test_quantization_that_the_hal_does_not_have_is_refused(constants: dict[str, Any], message: str) -> None:
    content = file_of([node("QuantizeLinear", ["x", "s", "z"], ["y"])], {"x": real(2, 3)}, ["y"], constants, 21)
    with pytest.raises(UnsupportedModel, match=message):
        load(content)


def same_bits(nodes: list[Any], fed: dict[str, Any], constants: dict[str, Any], opset: int, kind: Any) -> None:
    """Require the integers, or the bits of the floats, that ONNX Runtime computes, of a result `y`."""
    content = file_of(nodes, fed, {"y": np.empty(next(iter(fed.values())).shape, kind)}, constants, opset)
    (found,), (wanted,) = results(content, fed), expected(content, fed)
    np.testing.assert_array_equal(found.astype(float), wanted.astype(float))


def test_a_tensor_is_dequantized_with_another_scale_than_its_own() -> None:
    nodes = [node("QuantizeLinear", ["x", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "t", "u"], ["y"], axis=1)]
    for scales, zeros in ((np.float32(0.2), np.uint8(5)), (np.float32([0.2, 0.3, 0.4]), np.uint8([5, 0, 9]))):
        constants = {"s": np.float32(0.01), "z": np.uint8(100), "t": scales, "u": zeros}
        same_bits(nodes, {"x": real(2, 3)}, constants, 21, np.float32)


HALF, SINGLE = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
PRECISIONS: list[tuple[Any, Any, int, dict[str, int]]] = [
    (np.float16, np.float16, 21, {}),  # ONNX Runtime divides in float32
    (np.float16, np.float16, 23, {}),  # in float16
    (np.float32, np.float16, 23, {}),
    (np.float16, np.float32, 23, {}),
    (np.float16, np.float16, 24, {"precision": SINGLE}),
    (np.float32, np.float32, 25, {"precision": HALF}),
]


@pytest.mark.parametrize("form", ["scale", "scales", "computed scale", "constant"])
@pytest.mark.parametrize(("kind", "scale_kind", "opset", "attributes"), PRECISIONS)
def test_a_quotient_has_the_precision_that_its_version_says(
    kind: Any, scale_kind: Any, opset: int, attributes: dict[str, int], form: str
) -> None:
    numbers = (RNG.standard_normal((3, 2000)) * 20).astype(kind)  # a few dozen quotients are near a half
    scale = np.array([0.3] * 3 if form == "scales" else 0.3, scale_kind)
    nodes = [node("QuantizeLinear", ["x", "s", "z"], ["y"], axis=0, **attributes)]
    fed, constants = {"x": numbers}, {"z": np.ones(scale.shape, np.int8)}
    (fed if form == "computed scale" else constants)["s"] = scale
    if form == "constant":
        nodes = [node("QuantizeLinear", ["c", "s", "z"], ["q"], **attributes)]
        nodes += [node("Cast", ["q"], ["i"], to=onnx.TensorProto.INT32), node("Add", ["i", "x"], ["y"])]
        constants, fed = {**constants, "c": numbers}, {"x": np.zeros(numbers.shape, np.int32)}
    same_bits(nodes, fed, constants, opset, np.int32 if form == "constant" else np.int8)


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.int32])
@pytest.mark.parametrize("form", ["constant scale", "computed scale"])
@pytest.mark.parametrize(("scale_kind", "to"), [(np.float32, HALF), (np.float16, SINGLE), (np.float16, HALF)])
def test_dequantized_elements_have_the_type_that_the_node_states(
    kind: Any, form: str, scale_kind: Any, to: int
) -> None:
    limits = np.iinfo(np.int16 if kind is np.int32 else kind)
    fed = {"x": RNG.integers(limits.min, limits.max, 500).astype(kind)}
    scale = {"s": np.array(0.0123, scale_kind)}
    given, constants = ({**fed, **scale}, {}) if form == "computed scale" else (fed, scale)
    nodes = [node("DequantizeLinear", ["x", "s"], ["y"], output_dtype=to)]
    same_bits(nodes, given, constants, 23, {HALF: np.float16, SINGLE: np.float32}[to])


@pytest.mark.parametrize("operator", ["QuantizeLinear", "DequantizeLinear"])
def test_scales_of_bfloat16_have_the_results_of_the_definition(operator: str) -> None:
    kind = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16))
    fed = {"x": (RNG.standard_normal(500) * 20).astype(kind) if operator == "QuantizeLinear" else weights(500)}
    output = {"y": np.empty(500, np.int8 if operator == "QuantizeLinear" else kind)}
    constants = {"s": np.array(0.3, kind), "z": np.int8(3)}
    content = file_of([node(operator, ["x", "s", "z"], ["y"])], fed, output, constants, 23)
    (wanted,) = ReferenceEvaluator(onnx.load_from_string(content)).run(None, fed)
    (found,) = results(content, {"x": fed["x"].astype(np.float32) if operator == "QuantizeLinear" else fed["x"]})
    np.testing.assert_array_equal(found.astype(float), wanted.astype(float))


BLOCKS = [((6, 4), 0, 4, (2, 4)), ((5, 4), 0, 2, (3, 4)), ((2, 7), -1, 3, (2, 3)), ((7,), 0, 3, (3,))]


@pytest.mark.parametrize(("shape", "axis", "block", "scales"), BLOCKS)
def test_the_last_block_may_be_shorter(shape: tuple[int, ...], axis: int, block: int, scales: tuple[int, ...]) -> None:
    zeros = RNG.integers(0, 9, scales).astype(np.int8)
    constants = {"s": RNG.uniform(0.01, 0.02, scales).astype(np.float32), "z": zeros}
    quantize = node("QuantizeLinear", ["x", "s", "z"], ["y"], axis=axis, block_size=block, output_dtype=3)
    same_bits([quantize], {"x": real(*shape)}, constants, 21, np.int8)
    dequantize = node("DequantizeLinear", ["x", "s", "z"], ["y"], axis=axis, block_size=block)
    same_bits([dequantize], {"x": weights(*shape)}, constants, 21, np.float32)


@pytest.mark.parametrize(
    ("scales", "attributes", "message"),
    [
        ((2, 4), {"block_size": 2}, "shape (2, 4) for blocks of 2 of the shape (6, 4)"),
        ((2, 4), {}, "for blocks of 0"),
        ((), {"output_dtype": 2}, "output_dtype UINT8 does not match y_zero_point type INT8"),
        ((), {"precision": 6}, "arithmetic of int32 is not supported here"),
    ],
)
def test_quantization_without_a_meaning_is_refused(scales: Any, attributes: dict[str, int], message: str) -> None:
    constants = {"s": np.ones(scales, np.float32), "z": np.zeros(scales, np.int8)}
    nodes = [node("QuantizeLinear", ["x", "s", "z"], ["y"], axis=0, **attributes)]
    with pytest.raises(UnsupportedModel, match=re.escape(message)):
        load(file_of(nodes, {"x": real(6, 4)}, ["y"], constants, 23))


def test_every_operator_of_the_table_is_tested() -> None:
    tested = {*(name.split()[0] for name in OPERATORS), "MatMulInteger", "ConvInteger", "DynamicQuantizeLinear"}
    assert tested == set(_QUANTIZED_CONVERTERS)  # the others are in test_onnx_runtime_operators.py


def lstm(operator: str, weights: dict[str, Any], names: list[str], domain: str = "") -> tuple[bytes, dict[str, Any]]:
    """Return a model of one LSTM of hidden size 4, over x (5, 2, 3), and its input."""
    fed = {"x": RNG.uniform(-1, 1, (5, 2, 3)).astype(np.float32)}
    nodes = [node(operator, ["x", *names], ["y"], domain=domain, hidden_size=4)]
    model = onnx.load_model_from_string(file_of(nodes, fed, ["y"], weights))
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    return model.SerializeToString(), fed


@pytest.mark.parametrize("per_gate", [False, True])
def test_an_lstm_with_quantized_weights_rounds_inputs_and_states_as_onnx_runtime_does(per_gate: bool) -> None:
    count = 16 if per_gate else 1
    w, r = (weights(1, size, 16) for size in (3, 4))
    scales = {
        name: RNG.uniform(0.002, 0.004, (1, count)[-1 if not per_gate else 0 :]).astype(np.float32) for name in "ab"
    }
    zeros = {name: np.zeros(scales["a"].shape, np.int8) for name in "cd"}
    names = ["w", "r", "", "", "", "", "", "a", "c", "b", "d"]
    quantized, fed = lstm("DynamicQuantizeLSTM", {"w": w, "r": r, **scales, **zeros}, names, "com.microsoft")
    assert_close(results(quantized, fed), expected(quantized, fed))
