"""Operators on quantized tensors: dequantized, computed in float, and quantized again.

The results differ from ONNX Runtime's integer kernels by one step at most. Sums of products of bytes are exact in
float32 up to 2²⁴. Names of operators of ONNX Runtime itself begin with its domain.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.tflite_codes import TfliteOperation, operation_code
from nnfmq.hal.types import OperandType
from nnfmq.importers.onnx_operators.onnx_broadcasting import common_shape
from nnfmq.importers.onnx_operators.onnx_composition import Composition, applied, number
from nnfmq.importers.onnx_operators.onnx_integer_forms import QUANTIZED_TYPES
from nnfmq.importers.onnx_operators.onnx_movement import axis_of
from nnfmq.importers.onnx_operators.onnx_quantization import dequantized, quantized
from nnfmq.importers.onnx_values import Node, Value

__all__ = ["CONVERTERS", "dynamically_quantized", "without_zero_point"]

Array: TypeAlias = npt.NDArray[Any]
_LAST_AXIS_OPSET = 13
_SMALLEST = float(np.finfo(np.float32).tiny)


def _as_float(node: Node, position: int, axis: int = 0) -> Value:
    """Return the quantized tensor at `position`, before its scale and zero point, as floats."""
    value, scale = node.value(position), _scale(node, position + 1)
    zero_point = (
        node.constant(position + 2, "zero point") if node.given(position + 2) else np.zeros(scale.shape, value.dtype)
    )
    return dequantized(node, value, scale, zero_point, axis)


def _finish(node: Node, found: Value, position: int, adds_first: bool = False) -> None:
    """Quantize the result with the scale and the zero point from `position` on."""
    scale = _scale(node, position)
    zero_point = (
        node.constant(position + 1, "zero point") if node.given(position + 1) else np.zeros(scale.shape, np.uint8)
    )
    node.results[0] = quantized(node, found, scale, zero_point, adds_first)


def _scale(node: Node, position: int) -> Array:
    """Return the scale at `position`, as float32."""
    found: Array = node.constant(position, "scale").astype(np.float32)
    return found


def _bias(node: Node, position: int) -> Value | None:
    """Return the bias at `position`, whose scale is the product of those of the first two tensors."""
    if not node.given(position):
        return None
    scale = node.constant(1, "scale") * node.constant(4, "scale")
    return Value.of(node.constant(position, "bias").astype(np.float32) * scale.astype(np.float32).reshape(-1))


def _gemm(node: Node) -> None:
    transposed = node.attribute("transB", 0)
    values = [_as_float(node, 0), _as_float(node, 3, 0 if transposed else 1), _bias(node, 6)]
    found = applied(node, "Gemm", values)
    if not node.given(7):
        node.results[0] = found
        return
    _finish(node, found, 7)


def _matmul(node: Node) -> None:
    _finish(node, applied(node, "MatMul", [_as_float(node, 0), _as_float(node, 3, -1)]), 6)


def _arithmetic(operation: TfliteOperation, node: Node) -> None:
    """Convert QLinearAdd and QLinearMul to operations on quantized operands."""
    shape = common_shape(node.value(0), node.value(3))
    operands = [_quantized_operand(node, position) for position in (0, 3)]
    kind, scale = node.builder[operands[0]].type, float(_scale(node, 6).reshape(-1)[0])
    zero_point = int(node.constant(7, "zero point").reshape(-1)[0]) if node.given(7) else 0
    found = node.emit(operation_code(operation), operands, kind, (scale, zero_point))
    node.results[0] = Value(shape, node.value(0).dtype, node.reshaped(found, shape))


def _quantized_operand(node: Node, position: int) -> int:
    """Return the operand of a quantized tensor, which has its scale and zero point."""
    real = _as_float(node, position)
    form = real.quantized
    assert form is not None, "the result of `dequantized`"
    if form.value.operand is not None and node.builder[form.value.operand].type in QUANTIZED_TYPES.values():
        return form.value.operand
    return node.operand(quantized(node, real, form.scale, form.zero_point))


def _unary(operator: str, node: Node) -> None:
    _finish(node, applied(node, operator, [_as_float(node, 0)]), 3)


def _on_image(operator: str, quantization: int | None, node: Node) -> None:
    """Convert an operator on an image whose channels may come last; without `quantization` its type stays."""
    compose = Composition(node)
    x = _as_float(node, 0) if quantization is not None else node.value(0)
    is_last, rank = node.attribute("channels_last", 0) or node.operator.endswith("NhwcMaxPool"), len(x.shape)
    x = compose.transpose(x, 0, rank - 1, *range(1, rank - 1)) if is_last else x
    values = [x, _as_float(node, 3), _bias(node, 8)] if operator == "Conv" else [x]
    found = applied(node, operator, values)
    found = compose.transpose(found, 0, *range(2, rank), 1) if is_last else found
    if quantization is None:
        node.results[0] = found
    else:
        _finish(node, found, quantization, operator == "AveragePool")


def _concat(node: Node) -> None:
    """Convert inputs each of which has a scale and a zero point; those of the result are the first inputs."""
    values = [_as_float(node, position) for position in range(2, len(node.inputs), 3)]
    _finish(node, applied(node, "Concat", values), 0)


def _softmax(node: Node) -> None:
    """Convert a softmax that has the meaning of the opset in an attribute."""
    compose, x = Composition(node), _as_float(node, 0)
    axis, shape = axis_of(node.attribute("axis", -1), len(x.shape)), x.shape
    if node.attribute("opset", 0) >= _LAST_AXIS_OPSET:
        return _finish(node, compose("Softmax", x, axis=axis), 3)
    flat = compose.reshape(x, math.prod(shape[:axis]), math.prod(shape[axis:]))
    return _finish(node, compose.reshape(compose("Softmax", flat, axis=1), *shape), 3)


def _where(node: Node) -> None:
    _finish(node, applied(node, "Where", [node.value(0), _as_float(node, 1), _as_float(node, 4)]), 7)


def _dynamic(node: Node) -> None:
    """Quantize with the scale of the largest and smallest element: the results are floats that are integers."""
    steps, scale, zero_point = dynamically_quantized(node, node.value(0))
    for value in (steps, zero_point):
        value.dtype = np.dtype(np.uint8)
    node.results.update(enumerate((steps, scale, zero_point)))


def dynamically_quantized(node: Node, x: Value) -> tuple[Value, Value, Value]:
    """Return steps, scale and zero point, as DynamicQuantizeLinear has them, in float."""
    zero = number(0)
    highest, lowest = (
        applied(node, limit, [applied(node, f"Reduce{limit}", [x], {"keepdims": 0}), zero], {})
        for limit in ("Max", "Min")
    )
    extent = applied(node, "Sub", [highest, lowest], {})
    scale = applied(node, "Max", [applied(node, "Div", [extent, number(255)], {}), number(_SMALLEST)], {})
    zero_point = _bytes(node, applied(node, "Neg", [applied(node, "Div", [lowest, scale], {})], {}))
    steps = applied(node, "Round", [applied(node, "Div", [x, scale], {})], {})
    return _bytes(node, applied(node, "Add", [steps, zero_point], {})), scale, zero_point


def _bytes(node: Node, value: Value) -> Value:
    """Return a tensor rounded to integers from 0 to 255."""
    rounded = applied(node, "Round", [value], {})
    return applied(node, "Clip", [rounded, number(0), number(255)], {})


def _integer_product(operator: str, node: Node) -> None:
    """Convert a product of integers of 8 bits, whose result has 32 bits."""
    found = applied(node, operator, [without_zero_point(node, place, place + 2) for place in (0, 1)])
    node.result(node.emit(Op.CAST, [node.operand(found)], OperandType.TENSOR_INT32), found.shape, np.dtype(np.int32))


def without_zero_point(node: Node, position: int, zero_position: int) -> Value:
    """Return integers as floats, less their zero point, which may be missing."""
    value = node.value(position)
    zero_point = node.value(zero_position) if node.given(zero_position) else None
    if value.array is not None:
        zeros: Any = 0
        if zero_point is not None:
            zeros = node.constant(zero_position, "zero point").astype(np.int32)
            if position and zeros.size > 1 and node.operator == "ConvInteger":
                zeros = zeros.reshape(-1, *[1] * (value.array.ndim - 1))
        return Value.of((value.array.astype(np.int32) - zeros).astype(np.float32))
    value = _as_integral_float(node, value)
    if zero_point is None:
        return value
    zero_point = _as_integral_float(node, zero_point)
    if position and zero_point.size > 1 and node.operator == "ConvInteger":  # one for each output channel
        zero_point = Composition(node).reshape(zero_point, zero_point.size, *[1] * (len(value.shape) - 1))
    return applied(node, "Sub", [value, zero_point], {})


def _as_integral_float(node: Node, value: Value) -> Value:
    """Return a tensor of integers as floats."""
    if value.array is not None:
        return Value.of(value.array.astype(np.float32))
    x = node.operand(value)
    if node.builder[x].type == OperandType.TENSOR_INT32:
        x = node.emit(Op.CAST, [x], OperandType.TENSOR_FLOAT32)
    if node.builder[x].type != OperandType.TENSOR_FLOAT32:
        raise InvalidArgument("an input must be integers that are not quantized, or those of DynamicQuantizeLinear")
    return Value(value.shape, np.dtype(np.float32), x)


_MICROSOFT = "com.microsoft."
CONVERTERS: dict[str, Callable[[Node], None]] = {
    "ConvInteger": partial(_integer_product, "Conv"),
    "DynamicQuantizeLinear": _dynamic,
    "MatMulInteger": partial(_integer_product, "MatMul"),
    "QLinearConv": partial(_on_image, "Conv", 6),
    "QLinearMatMul": _matmul,
    f"{_MICROSOFT}NhwcMaxPool": partial(_on_image, "MaxPool", None),
    f"{_MICROSOFT}QGemm": _gemm,
    f"{_MICROSOFT}QLinearAdd": partial(_arithmetic, TfliteOperation.QLINEAR_ADD),
    f"{_MICROSOFT}QLinearAveragePool": partial(_on_image, "AveragePool", 3),
    f"{_MICROSOFT}QLinearConcat": _concat,
    f"{_MICROSOFT}QLinearConv": partial(_on_image, "Conv", 6),
    f"{_MICROSOFT}QLinearGlobalAveragePool": partial(_on_image, "GlobalAveragePool", 3),
    f"{_MICROSOFT}QLinearLeakyRelu": partial(_unary, "LeakyRelu"),
    f"{_MICROSOFT}QLinearMul": partial(_arithmetic, TfliteOperation.QLINEAR_MUL),
    f"{_MICROSOFT}QLinearSigmoid": partial(_unary, "Sigmoid"),
    f"{_MICROSOFT}QLinearSoftmax": _softmax,
    f"{_MICROSOFT}QLinearWhere": _where,
}
