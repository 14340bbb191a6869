"""Operators on quantized tensors: dequantized, computed in float, and quantized again.

The results differ from ONNX Runtime's integer kernels by one step at most. Sums of products of bytes are exact in
float32 up to 2²⁴. Names of operators of ONNX Runtime itself begin with its domain.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import Scheme, TfliteOperation, extended_code, operation_code
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.types import Operand, OperandType
from nnfmq.importers.onnx.dynamic_products import DYNAMIC_CONV, ByteWeights
from nnfmq.importers.onnx.operators import convolution
from nnfmq.importers.onnx.operators.attention import self_attention
from nnfmq.importers.onnx.operators.composition import Composition, applied
from nnfmq.importers.onnx.operators.movement import axis_of, common_shape
from nnfmq.importers.onnx.operators.quantization import QUANTIZED_TYPES, dequantized, quantized
from nnfmq.importers.onnx.values import Node, Value

__all__ = ["CONVERTERS", "dynamically_quantized", "without_zero_point"]

Array: TypeAlias = npt.NDArray[Any]
_LAST_AXIS_OPSET = 13
_BYTE, _INT32, _FLOAT = (np.dtype(kind) for kind in (np.uint8, np.int32, np.float32))
_MIDDLE = 128  # of uint8, less that of int8
_HIGHEST = 255
_EXACT = 1 << 24  # float32 has all integers up to this one
_DIGIT = 32


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


def _bias(node: Node, position: int, factor: float = 1.0) -> Value | None:
    """Return the bias at `position`, whose scale is the product of `factor` and those of the first two tensors."""
    if not node.given(position):
        return None
    scale = np.float32(factor) * node.constant(1, "scale") * node.constant(4, "scale")
    return Value.of(node.constant(position, "bias").astype(np.float32) * scale.astype(np.float32).reshape(-1))


def _gemm(node: Node) -> None:
    transposed = node.attribute("transB", 0)
    bias = _bias(node, 6, node.attribute("alpha", 1.0))
    values = [_as_float(node, 0), _as_float(node, 3, 0 if transposed else 1), bias]
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
    if operator == "AveragePool" and node.attribute("ceil_mode", 0) and node.attribute("count_include_pad", 0):
        raise InvalidArgument("ceil_mode with count_include_pad: ONNX Runtime counts pixels beyond the padding, too")
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
    """Quantize with the scale of the largest and smallest element: bytes, and the same integers as floats."""
    steps, scale, zero_point = dynamically_quantized(node, node.value(0))
    node.results[0] = Value(steps.shape, _BYTE, steps.operand, forms=steps.forms)
    node.results[1] = scale
    node.results[2] = Value(zero_point.shape, _BYTE, zero_point.operand)


def dynamically_quantized(node: Node, x: Value) -> tuple[Value, Value, Value]:
    """Return steps, scale and zero point, as DynamicQuantizeLinear has them, in float.

    As in ONNX Runtime, NaN does not count in the range and becomes 0, the scale of zeros is 1, and the zero point of a
    range without a lower end is the highest step.
    """
    builder, begin = node.builder, node.builder.operation_count
    found = builder.operand(Operand(OperandType.TENSOR_QUANT8_ASYMM, (), 1.0, 0))
    scale, zero_point = (builder.operand(Operand(OperandType.TENSOR_FLOAT32, ())) for _ in range(2))
    code = operation_code(TfliteOperation.DYNAMIC_QUANTIZE_LINEAR)
    builder.operation(code, [node.operand(x)], found, scale, zero_point)
    builder.infer_shapes(begin)  # whether DEQUANTIZE is the HAL's depends on the rank
    steps = node.emit(Op.DEQUANTIZE, [found], OperandType.TENSOR_FLOAT32)
    forms = {OperandType.TENSOR_QUANT8_ASYMM: found}
    return Value(x.shape, _FLOAT, steps, forms=forms), Value((), _FLOAT, scale), Value((), _FLOAT, zero_point)


# -- products of integers ----------------------------------------------------------------------------------------------


def _exact_operands(node: Node, channel_axis: int) -> tuple[int, ByteWeights] | None:
    """Return the first input as bytes, and constant weights; None if the extension has no such product."""
    zeros = [node.value(position).array if node.given(position) else np.zeros(1, int) for position in (2, 3)]
    given, ones = node.value(0), np.ones(1, np.float32)
    if zeros[0] is None or zeros[1] is None or zeros[0].size != 1 or given.array is not None:
        return None
    filter = ByteWeights.of(node.value(1).array, ones, zeros[1], channel_axis)
    x = node.operand(0)
    if filter is None or node.builder[x].type not in (OperandType.TENSOR_INT32, OperandType.TENSOR_FLOAT32):
        return None
    zero_point = int(zeros[0].reshape(-1)[0])
    if given.dtype == np.int8:
        middle = node.filled(node.builder[x].type, _MIDDLE)
        x, zero_point = node.emit(Op.ADD, [x, middle, node.builder.int32(0)]), zero_point + _MIDDLE
    found, begin = Operand(OperandType.TENSOR_QUANT8_ASYMM, (), 1.0, zero_point), node.builder.operation_count
    bytes_ = node.builder.operand(found)
    node.builder.operation(Op.CAST, [x], bytes_)
    node.builder.infer_shapes(begin)
    return bytes_, filter


def _matmul_integer(node: Node) -> None:
    """Convert a product of matrices of 8 bits; unless the second is constant, in parts that float32 has exactly."""
    exact, shape = _exact_operands(node, 1), node.value(0).shape
    if exact is not None and shape and shape[-1] == len(exact[1].array):
        x, filter = exact
        length, count = filter.array.shape
        rows, none = node.reshaped(x, (math.prod(shape[:-1]), length)), node.builder.int32(0)
        operands = [rows, filter.operand(node.builder, filter.array.T), _no_bias(node, count), none]
        found = node.emit(extended_code(Op.FULLY_CONNECTED, Scheme.EXACT), operands, OperandType.TENSOR_INT32)
        return node.result(found, (*shape[:-1], count), _INT32)
    return _matmul_of_floats(node)


def _no_bias(node: Node, count: int) -> int:
    return node.add_constant(np.zeros(count, np.int32))


def _matmul_of_floats(node: Node) -> None:
    first, second = (without_zero_point(node, position, position + 2) for position in (0, 1))
    count, compose = first.shape[-1], Composition(node)
    parts = -(-_bound(second, -2 if len(second.shape) > 1 else 0) // _EXACT)
    ends = [count * part // parts for part in range(parts + 1)]
    axes = len(first.shape) - 1, max(len(second.shape) - 2, 0)
    pairs = list(zip((first, second), axes, strict=True))
    products = [
        compose("MatMul", *(compose.part(each, axis, *limits) for each, axis in pairs))
        for limits in itertools.pairwise(ends)
    ]
    _sum_of_integers(node, products)


def _conv_integer(node: Node) -> None:
    """Convert a convolution of 8 bits."""
    exact = _exact_operands(node, 0) if node.attribute("group", 1) == 1 else None
    if exact is None:
        return _conv_of_floats(node)
    x, filter = exact
    # The results have the type of the first input.
    node.inputs = [Value(node.value(0).shape, _INT32, x), *node.inputs[1:]]

    def operand(shape: tuple[int, ...], permutation: tuple[int, ...]) -> int:
        return filter.operand(node.builder, filter.array.reshape(shape).transpose(permutation))

    code, kind = extended_code(Op.CONV_2D, Scheme.EXACT), OperandType.TENSOR_INT32
    return convolution.convolve(node, operand, _no_bias(node, len(filter.array)), operation=code, kind=kind)


def _conv_of_floats(node: Node) -> None:
    """Convert it in float; weights are divided into digits if float32 may not have its sums exactly."""
    image, filters = (without_zero_point(node, position, position + 2) for position in (0, 1))
    bound = _bound(filters, tuple(range(1, len(filters.shape))))
    if bound <= _EXACT:
        return _sum_of_integers(node, [applied(node, "Conv", [image, filters])])
    if filters.array is None or bound > _EXACT * _DIGIT:
        raise InvalidArgument("sums of its products may be larger than the integers that float32 has")
    high = np.floor(filters.array / _DIGIT)
    digits = [Value.of((filters.array - _DIGIT * high).astype(np.float32)), Value.of(high.astype(np.float32))]
    low, upper = (applied(node, "Conv", [image, digit]) for digit in digits)
    return _sum_of_integers(node, [low, upper], _DIGIT)


def _bound(weights: Value, axes: int | tuple[int, ...]) -> int:
    """Return a bound of the sums of products along these axes of weights with numbers of up to 255."""
    if weights.array is not None:
        return int(_HIGHEST * np.abs(weights.array).sum(axis=axes, dtype=np.int64).max(initial=1))
    counted = [axes] if isinstance(axes, int) else axes
    return _HIGHEST * _HIGHEST * math.prod(weights.shape[axis] for axis in counted)


def _sum_of_integers(node: Node, products: list[Value], factor: int = 1) -> None:
    """Finish with the sum of integral floats, each of them times the last one's power of `factor`, as INT32."""
    kind, none = OperandType.TENSOR_INT32, node.builder.int32(0)
    total, *others = (node.emit(Op.CAST, [node.operand(product)], kind) for product in products)
    for other in others:
        scaled = other if factor == 1 else node.emit(Op.MUL, [other, node.filled(kind, factor), none])
        total = node.emit(Op.ADD, [total, scaled, none])
    node.result(total, products[0].shape, np.dtype(np.int32))


def without_zero_point(node: Node, position: int, zero_position: int) -> Value:
    """Return integers as floats, less their zero point, which may be missing."""
    value = node.value(position)
    zero_point = node.value(zero_position) if node.given(zero_position) else None
    if zero_point is not None and zero_point.size != 1:
        zero_point = _aligned(node, position, zero_point)
    if value.array is not None:
        zeros: Any = 0
        if zero_point is not None:
            zeros = node.constant(zero_position, "zero point").astype(np.int32).reshape(zero_point.shape)
        return Value.of((value.array.astype(np.int32) - zeros).astype(np.float32))
    value = _as_integral_float(node, value)
    if zero_point is None:
        return value
    return applied(node, "Sub", [value, _as_integral_float(node, zero_point)], {})


def _aligned(node: Node, position: int, zero_point: Value) -> Value:
    """Return several zero points in a shape that is broadcast to the input: of rows of the first, or channels."""
    shape = node.value(position).shape
    if not position:
        of_rows = (*shape[:-1], 1)
        if node.operator != "MatMulInteger" or zero_point.shape not in (shape[-2:-1], of_rows):
            raise InvalidArgument(f"{zero_point.size} zero points of the first input are not supported: one is")
        return zero_point if zero_point.shape == of_rows else _reshaped(node, zero_point, *shape[-2:-1], 1)
    if node.operator == "ConvInteger":
        return _reshaped(node, zero_point, zero_point.size, *[1] * (len(shape) - 1))
    return zero_point


def _reshaped(node: Node, value: Value, *shape: int) -> Value:
    if value.array is not None:
        return Value.of(value.array.reshape(shape))
    return Composition(node).reshape(_as_integral_float(node, value), *shape)


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
_QUANTIZED_CONVERTERS: dict[str, Callable[[Node], None]] = {
    "ConvInteger": _conv_integer,
    "DynamicQuantizeLinear": _dynamic,
    "MatMulInteger": _matmul_integer,
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


# ----------------------------------------------------------------------------------------------------------------------
# Products of integers of 8 bits whose results are floats, and what ONNX Runtime's quantizer makes of attention.


def _product(node: Node) -> None:
    """Convert (A − its zero point) · (B − its zero point), times both scales, plus a bias."""
    if node.value(2).size != 1:
        raise InvalidArgument(f"{node.value(2).size} scales of the first matrix are not supported: one is")
    factors = [without_zero_point(node, 0, 4), without_zero_point(node, 1, 5)]
    node.results[0] = _scaled(node, factors, [node.value(2), node.value(3)], 6)


def _product_of_floats(node: Node) -> None:
    """Convert a product whose first factor is quantized when the model runs."""
    filter = _byte_weights(node, 1)
    if filter is not None and (not node.given(4) or _is_row(node.value(4), filter)):
        _product_of_bytes(node, filter)
        return
    steps, scale, zero_point = dynamically_quantized(node, node.value(0))
    factors = [Composition(node)("Sub", steps, zero_point), without_zero_point(node, 1, 3)]
    node.results[0] = _scaled(node, factors, [scale, node.value(2)], 4)


def _byte_weights(node: Node, channel_axis: int) -> ByteWeights | None:
    """Return the weights of a product, which are input 1, their scale and their zero point; None for others."""
    zeros = node.value(3).array if node.given(3) else None
    if node.given(3) and zeros is None:
        return None
    return ByteWeights.of(node.value(1).array, node.value(2).array, zeros, channel_axis)


def _product_of_bytes(node: Node, filter: ByteWeights) -> None:
    """Convert a product with a constant matrix, whose elements stay bytes."""
    shape, (length, count) = node.value(0).shape, filter.array.shape
    if not shape or shape[-1] != length:
        raise InvalidArgument(f"a matrix of shape {filter.array.shape} and an input of shape {shape}")
    rows = node.reshaped(node.operand(0), (math.prod(shape[:-1]), length))
    weights = filter.operand(node.builder, filter.array.T)
    bias = node.constant(4, "bias") if node.given(4) else np.zeros(count, np.float32)
    operands = [rows, weights, node.add_constant(bias.reshape(-1)), node.builder.int32(0)]
    found = node.emit(extended_code(Op.FULLY_CONNECTED, Scheme.DYNAMIC), operands)
    node.result(found, (*shape[:-1], count), np.dtype(np.float32))
    return


def _is_row(bias: Value, filter: ByteWeights) -> bool:
    return bias.array is not None and bias.shape == filter.array.shape[1:] and bias.dtype == np.float32


def _dynamic_conv(node: Node) -> None:
    """Convert ConvInteger of a quantized image, whose sums have a rounded bias, with their factor."""
    filter, count = _byte_weights(node, 0), node.value(1).shape[0]
    bias = node.constant(4, "bias") if node.given(4) else np.zeros(count, np.float32)
    if filter is None or node.attribute("group", 1) != 1 or bias.size != count:
        raise InvalidArgument("its weights, their groups or its bias are not supported")

    def operand(shape: tuple[int, ...], permutation: tuple[int, ...]) -> int:
        return filter.operand(node.builder, filter.array.reshape(shape).transpose(permutation))

    rounds_bias = node.builder.boolean(node.given(4))
    code = extended_code(Op.CONV_2D, Scheme.DYNAMIC)
    convolution.convolve(node, operand, node.add_constant(bias.reshape(-1)), operation=code, more=[rounds_bias])


def _attention(node: Node) -> None:
    factors = [without_zero_point(node, 0, 6), without_zero_point(node, 1, 7)]
    projected = _scaled(node, factors, [node.value(3), node.value(4)], 2)
    self_attention(node, projected, mask=5, past=8, bias=None)


def _scaled(node: Node, factors: list[Value], scales: list[Value], bias: int) -> Value:
    """Return the product of the factors and scales, plus the bias at a position if there is one."""
    compose = Composition(node)
    first, second = scales
    if first.array is not None and second.array is not None:
        scale = Value.of(np.asarray(first.array * second.array, np.float32))
    else:
        scale = compose("Mul", first, second)
    found = compose("Mul", compose("MatMul", *factors), scale)
    return compose("Add", found, node.value(bias)) if node.given(bias) else found


_INTEGER_PRODUCTS_CONVERTERS: dict[str, Callable[[Node], None]] = {
    f"{_MICROSOFT}DynamicQuantizeMatMul": _product_of_floats,
    f"{_MICROSOFT}MatMulIntegerToFloat": _product,
    f"{_MICROSOFT}QAttention": _attention,
}

CONVERTERS: dict[str, Callable[[Node], None]] = {
    **_QUANTIZED_CONVERTERS,
    **_INTEGER_PRODUCTS_CONVERTERS,
    DYNAMIC_CONV: _dynamic_conv,
}
