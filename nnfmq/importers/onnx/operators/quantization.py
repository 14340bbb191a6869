"""QuantizeLinear and DequantizeLinear: QUANTIZE_LINEAR and DEQUANTIZE of 8 bits, and constants.

Constants are converted when the model is loaded, so that weights become floats. What is between a DequantizeLinear and
the next QuantizeLinear is computed in float, unless it can be computed from the integers; the
integers that follow differ from those of ONNX Runtime's kernels by one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import TfliteOperation, operation_code
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.types import ChannelQuant, LifeTime, Operand, OperandType
from nnfmq.importers.onnx.file import FLOAT_FORMATS, dtype_of, integer_limits
from nnfmq.importers.onnx.operators import convolution, movement, pooling
from nnfmq.importers.onnx.operators.composition import Composition
from nnfmq.importers.onnx.operators.movement import axis_of, broadcast_to
from nnfmq.importers.onnx.operators.skip_normalization import embeddings
from nnfmq.importers.onnx.values import Node, QuantizedForm, Value
from nnfmq.operations.tflite_extension.blockwise import BLOCK_BITS, MAX_ROUNDED_BLOCK, MIN_BLOCK, unpack_bits

__all__ = ["CONVERTERS", "QUANTIZED_TYPES", "dequantized", "integer_form", "limited", "quantized"]


# ----------------------------------------------------------------------------------------------------------------------
# Quantized results of operators whose inputs are quantized: operations on integers in place of those on floats.
#
# A quantized model has floats only between a DequantizeLinear and the next QuantizeLinear. When that is converted, the
# nodes between are known, and the integers of their inputs: a convolution, a product with constant weights, a sum and a
# movement of elements become the HAL's quantized operations. The importer drops the operations on floats, which nothing
# reads then. Results differ from ONNX Runtime's, which rounds once, by one step at most.


QUANTIZED_TYPES = {
    "uint8": OperandType.TENSOR_QUANT8_ASYMM,
    "int8": OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
}
_SIGNIFICAND = 24  # bits of a float32
_RARE_SHIFT = 13  # of a multiplier with which one of 4,096 sums is halfway between two results
_MIDDLE = 128  # of uint8, less that of int8


@dataclass(frozen=True, slots=True)
class _Target:
    """Scale, zero point and type of a result."""

    scale: float
    zero_point: int
    dtype: np.dtype[Any]

    @property
    def quantization(self) -> tuple[float, int]:
        """Scale and zero point."""
        return self.scale, self.zero_point


def integer_form(value: Value, scale: float, zero_point: int, dtype: np.dtype[Any]) -> Value | None:
    """Return a tensor of floats quantized, computed from integers; None if it is not the result of such an operator."""
    node = value.node
    form = None if node is None else _FORMS.get(node.operator)
    if node is None or form is None:
        return None
    try:
        return form(node, _Target(scale, zero_point, dtype))
    except InvalidArgument:  # the HAL's operation on integers is more restricted than that on floats
        return None


def _input(node: Node, position: int, target: _Target) -> QuantizedForm:
    """Return the quantized form of an input that is no constant, of the result's type.

    Raises:
        InvalidArgument: If it has none.
    """
    form = node.value(position).quantized
    if form is None or form.value.operand is None or form.value.dtype != target.dtype or form.scale.size != 1:
        raise InvalidArgument(f"input {position} is not quantized to {target.dtype}")
    if node.builder[form.value.operand].type != QUANTIZED_TYPES[target.dtype.name]:
        raise InvalidArgument(f"input {position} has no quantized operand")
    return form


# -- weights -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Weights:
    """Integers in the type of a filter, and a scale for each output channel, which is axis 0."""

    array: Array
    scales: Array
    zero_point: int
    type: OperandType

    def operand(self, node: Node, array: Array, channel_axis: int) -> int:
        """Add a constant with these elements, whose output channels are along an axis."""
        builder = node.builder
        builder.reserve(array.nbytes)
        operand = Operand(self.type, array.shape, lifetime=LifeTime.CONSTANT_COPY)
        if self.type == OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL:
            quant = ChannelQuant(tuple(map(float, self.scales)), channel_axis)
            operand = replace(operand, channel_quant=quant)
        else:
            operand = replace(operand, scale=float(self.scales[0]), zero_point=self.zero_point)
        return builder.operand(replace(operand, location=builder.stored(array.tobytes())))


def _weights(value: Value, channel_axis: int, target: _Target) -> _Weights:
    """Return constant weights of 8 bits, with their output channels first, for an input of the target's type.

    Without zero points they have a scale for each channel; with one, the input's type and one scale.

    Raises:
        InvalidArgument: If they are no such constant.
    """
    form = value.quantized
    if form is None or form.value.array is None or form.value.dtype.name not in QUANTIZED_TYPES:
        raise InvalidArgument("the weights are no constant of 8 bits")
    if form.scale.size > 1 and (form.scale.ndim != 1 or form.axis % form.value.array.ndim != channel_axis):
        raise InvalidArgument("the weights have scales along another axis than the output channels")
    array, zero_points = np.moveaxis(form.value.array, channel_axis, 0), form.zero_point.reshape(-1).astype(int)
    middle = _MIDDLE if form.value.dtype == np.uint8 else 0
    signed, zero_points = (array.astype(np.int16) - middle).astype(np.int8), zero_points - middle
    scales = np.broadcast_to(form.scale.reshape(-1).astype(np.float32), len(array))
    if not zero_points.any():
        return _Weights(signed, scales, 0, OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL)
    if form.scale.size > 1 or zero_points.size > 1:
        raise InvalidArgument("the weights have a zero point for each channel")
    if target.dtype == np.int8:
        return _Weights(signed, scales, int(zero_points[0]), QUANTIZED_TYPES["int8"])
    unsigned = (signed.astype(np.int16) + _MIDDLE).astype(np.uint8)
    return _Weights(unsigned, scales, int(zero_points[0]) + _MIDDLE, QUANTIZED_TYPES["uint8"])


def _bias(node: Node, value: Value | None, input_scale: float, weights: _Weights) -> int:
    """Add the bias in units of the product of the scales of input and weights.

    Raises:
        InvalidArgument: If it is no constant with an element for each channel, or does not fit 32 bits.
    """
    scales = np.float32(input_scale) * weights.scales
    bias = np.zeros(len(scales)) if value is None else value.array
    if bias is None or bias.size != len(scales):
        raise InvalidArgument("the bias is no constant with an element for each channel")
    steps = np.round(bias.reshape(-1) / scales.astype(np.float64))
    if not (np.abs(steps) < 1 << 31).all():
        raise InvalidArgument("the bias does not fit 32 bits")
    is_per_channel = weights.type == OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL
    location = node.builder.stored(steps.astype("<i4").tobytes())
    scale = 0.0 if is_per_channel else float(scales[0])
    return node.builder.operand(
        Operand(OperandType.TENSOR_INT32, (len(scales),), scale, 0, LifeTime.CONSTANT_COPY, location)
    )


def _require_few_halves(input_scale: float, weights: _Weights, target: _Target) -> None:
    """Require that hardly a sum is halfway between two results, where the HAL's rounding and ONNX's differ.

    A multiplier of m / 2^e, with an odd m, makes one of the multiples of 2^(e-1) halfway, that is of 2^(e-1) sums.

    Raises:
        InvalidArgument: If more are, as with scales that are powers of 2.
    """
    multipliers = np.float32(input_scale) * weights.scales / np.float32(target.scale)
    fractions, exponents = np.frexp(multipliers.astype(np.float64))
    odd = (fractions * (1 << _SIGNIFICAND)).astype(np.int64)
    shifts = _SIGNIFICAND - exponents - np.log2(odd & -odd)
    if ((shifts > 0) & (shifts < _RARE_SHIFT)).any():
        raise InvalidArgument("many results are halfway between two integers")


# -- operators ---------------------------------------------------------------------------------------------------------


def _conv(node: Node, target: _Target) -> Value:
    x, weights = _input(node, 0, target), _weights(node.value(1), 0, target)
    _require_few_halves(float(x.scale.reshape(-1)[0]), weights, target)
    bias = _bias(node, node.value(2) if node.given(2) else None, float(x.scale.reshape(-1)[0]), weights)

    def filter(shape: tuple[int, ...], permutation: tuple[int, ...]) -> int:
        return weights.operand(node, weights.array.reshape(shape).transpose(permutation), permutation.index(0))

    inner = replace(node, inputs=[x.value, *node.inputs[1:]], results={})
    convolution.convolve(inner, filter, bias, target.quantization)
    return _result(inner, target)


def _matmul(node: Node, target: _Target) -> Value:
    if len(node.value(1).shape) != 2 or len(node.value(0).shape) < 2:
        raise InvalidArgument("the second matrix must have rank 2")
    return _product(node, 1, None, target)


def _gemm(node: Node, target: _Target) -> Value:
    attributes = {"alpha": 1.0, "beta": 1.0, "transA": 0}
    if any(node.attributes.get(name, usual) != usual for name, usual in attributes.items()):
        raise InvalidArgument("factors and a transposed first matrix are not supported")
    return _product(
        node, 0 if node.attributes.get("transB", 0) else 1, node.value(2) if node.given(2) else None, target
    )


def _product(node: Node, channel_axis: int, bias: Value | None, target: _Target) -> Value:
    """Return a product with constant weights, as a pointwise convolution: that may have a scale for each channel."""
    x, weights = _input(node, 0, target), _weights(node.value(1), channel_axis, target)
    _require_few_halves(float(x.scale.reshape(-1)[0]), weights, target)
    builder, shape = node.builder, node.value(0).shape
    rows = node.reshaped(node.operand(x.value), (1, 1, math.prod(shape[:-1]), shape[-1]))
    filter = weights.operand(node, weights.array.reshape(len(weights.array), 1, 1, -1), 0)
    arguments = [rows, filter, _bias(node, bias, float(x.scale.reshape(-1)[0]), weights)]
    window = [builder.int32(number) for number in (0, 0, 0, 0, 1, 1, 0)]
    found = node.emit(Op.CONV_2D, [*arguments, *window, builder.boolean(False)], quantization=target.quantization)
    shape = (*shape[:-1], len(weights.array))
    return Value(shape, target.dtype, node.reshaped(found, shape))


def _relu(node: Node, target: _Target) -> Value:
    """Return the input quantized, whose negative elements are clamped if the zero point is the lowest integer."""
    found = None
    if target.zero_point == np.iinfo(target.dtype).min:
        found = integer_form(node.value(0), target.scale, target.zero_point, target.dtype)
    if found is None:
        raise InvalidArgument("its input has no quantized form, or negative elements have")
    return found


def _movement(node: Node, target: _Target) -> Value:
    """Return elements in other places, or some of them; the result has the input's scale and zero point."""
    x = _input(node, 0, target)
    if (float(x.scale.reshape(-1)[0]), int(x.zero_point.reshape(-1)[0])) != target.quantization:
        raise InvalidArgument("the result has another scale or zero point")
    inner = replace(node, inputs=[x.value, *node.inputs[1:]], results={})
    _MOVEMENTS[node.operator](inner)
    return _result(inner, target)


def _result(node: Node, target: _Target) -> Value:
    found = node.results[0]
    return Value(found.shape, target.dtype, found.operand)


_MOVEMENTS: Mapping[str, Callable[[Node], Any]] = {
    name: {**movement.CONVERTERS, **pooling.CONVERTERS}[name]
    for name in ("Flatten", "MaxPool", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
}
_FORMS: Mapping[str, Callable[[Node, _Target], Value]] = {
    "Conv": _conv,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Relu": _relu,
    **dict.fromkeys(_MOVEMENTS, _movement),
}


# ----------------------------------------------------------------------------------------------------------------------
# QuantizeLinear and DequantizeLinear: QUANTIZE_LINEAR and DEQUANTIZE of 8 bits, and constants.


Array: TypeAlias = npt.NDArray[Any]

_FLOATS = (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16)
_SINGLE: np.dtype[Any] = np.dtype(np.float32)
_PRECISIONS = ("float32", "float16", "bfloat16")
_PRECISION_OPSET = 23  # from which ONNX says in which type QuantizeLinear divides


def _quantize(node: Node) -> None:
    dtype = _integer_type(node)
    if _is_computed(node):
        return _quantize_by_computed(node, dtype)
    value, scale = node.value(0), node.constant(1, "scale")
    zero_point = node.constant(2, "zero point") if node.given(2) else np.zeros(scale.shape, dtype)
    axis, block, precision = node.attribute("axis", 1), node.attribute("block_size", 0), _precision(node)
    if value.array is not None and integer_limits(dtype):
        parts = _for_channels(value, scale, zero_point, axis, block)
        return node.constant_result(_quantized(value.array, *parts, precision))
    if scale.size == 1 and dtype.name in QUANTIZED_TYPES and precision == _SINGLE:
        node.results[0] = quantized(node, value, scale, zero_point)
        return None
    return _stepped(node, *_for_channels(value, scale, zero_point, axis, block), precision)


def _integer_type(node: Node) -> np.dtype[Any]:
    """Return the type of the results of QuantizeLinear; ONNX's inference requires that a node does not state two."""
    number = node.attribute("output_dtype", 0)
    if node.given(2):
        return node.value(2).dtype
    return dtype_of(number) if number else np.dtype(np.uint8)


def _precision(node: Node) -> np.dtype[Any]:
    """Return the type in which QuantizeLinear divides.

    Before opset 23, and in the domain com.microsoft, that is float32, as in ONNX Runtime: ONNX does not say.

    Raises:
        InvalidArgument: If it is another type than those of _PRECISIONS.
    """
    number = node.attribute("precision", 0)
    if node.operator != "QuantizeLinear" or node.opset < _PRECISION_OPSET:
        return _SINGLE
    return _require_real(dtype_of(number) if number else node.value(1).dtype)


def _require_real(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.name not in _PRECISIONS:
        raise InvalidArgument(f"arithmetic of {dtype.name} is not supported here; that of {', '.join(_PRECISIONS)} is")
    return dtype


def _rounded(node: Node, x: int, dtype: np.dtype[Any]) -> int:
    """Return FLOAT32 elements rounded to what a type has."""
    if dtype != np.float16:
        return node.narrowed(x, dtype)
    return node.emit(Op.CAST, [node.emit(Op.CAST, [x], OperandType.TENSOR_FLOAT16)], OperandType.TENSOR_FLOAT32)


def _quotients(node: Node, scale: int, precision: np.dtype[Any]) -> int:
    """Return the input divided by an operand with scales, as FLOAT32."""
    x = _as_float32(node, 0)
    x = x if node.value(0).dtype == precision else _rounded(node, x, precision)
    return _rounded(node, node.emit(Op.DIV, [x, scale, node.builder.int32(0)]), precision)


def _stepped(node: Node, scale: Array, zero_point: Array, precision: np.dtype[Any]) -> None:
    """Quantize to a type, or with scales, that no quantized operand has: steps are INT32, or floats of 8 or 4 bits."""
    dtype, shape = zero_point.dtype, node.value(0).shape
    steps = _quotients(node, node.add_constant(_in_precision(scale, precision)), precision)
    zeros = node.add_constant(zero_point.astype(np.float32)) if zero_point.any() else None
    if integer_limits(dtype) is not None:
        return _finish_steps(node, steps, zeros, dtype)
    found = steps if zeros is None else node.emit(Op.ADD, [steps, zeros, node.builder.int32(0)])
    return node.result(found, shape, dtype)


def _in_precision(array: Array, precision: np.dtype[Any]) -> Array:
    """Return the elements, rounded to those of a type, as float32."""
    rounded: Array = array.astype(precision).astype(np.float32)
    return rounded


def _finish_steps(node: Node, quotients: int, zeros: int | None, dtype: np.dtype[Any]) -> None:
    """Finish with INT32: the rounded quotients, plus zero points."""
    steps, limits = node.emit(operation_code(TfliteOperation.ROUND), [quotients]), integer_limits(dtype)
    assert limits is not None, "the type has integers"
    if zeros is not None:
        steps = node.emit(Op.ADD, [steps, zeros, node.builder.int32(0)])
    steps = node.emit(Op.CAST, [limited(node, steps, *limits)], OperandType.TENSOR_INT32)
    node.result(steps, node.value(0).shape, dtype)


# -- scales and zero points that the model computes --------------------------------------------------------------------


def _is_computed(node: Node) -> bool:
    """Return whether the scale or the zero point is no constant."""
    return any(node.given(position) and node.value(position).array is None for position in (1, 2))


def _quantize_by_computed(node: Node, dtype: np.dtype[Any]) -> None:
    """Quantize with one scale and zero point that the model computes."""
    if integer_limits(dtype) is None:
        raise InvalidArgument(f"its scale is not a constant: that is supported for integers, not {dtype.name}")
    precision, (scale, zeros) = _precision(node), _computed_parts(node)
    scale = scale if node.value(1).dtype == precision else _rounded(node, scale, precision)
    _finish_steps(node, _quotients(node, scale, precision), zeros, dtype)


def _dequantize_by_computed(node: Node, dtype: np.dtype[Any]) -> None:
    """Dequantize with one scale and zero point that the model computes."""
    (scale, zeros), none = _computed_parts(node), node.builder.int32(0)
    x = _as_float32(node, 0)
    found = x if zeros is None else node.emit(Op.SUB, [x, zeros, none])
    node.results[0] = _as_real(node, node.emit(Op.MUL, [found, scale, none]), node.value(0).shape, dtype)


def _computed_parts(node: Node) -> tuple[int, int | None]:
    """Return the scale and the zero point, if there is one, as FLOAT32."""
    node.attributes_read |= {"axis", "block_size"}  # which one scale does not need
    for position in (1, 2):
        if node.given(position) and node.value(position).size != 1:
            raise InvalidArgument("scales or zero points that are no constants are supported if there is one")
    return _as_float32(node, 1), _as_float32(node, 2) if node.given(2) else None


def _as_float32(node: Node, value: Value | int) -> int:
    """Return elements, or the stored ones of a quantized tensor, as FLOAT32, given the value or an input's position."""
    x = node.operand(value)
    kind = OperandType.TENSOR_FLOAT32
    return x if node.builder[x].type == kind else node.emit(Op.CAST, [x], kind)


def limited(node: Node, steps: int, lowest: int, highest: int) -> int:
    """Return FLOAT32 limited to a range; NaN becomes the lowest number."""
    low, high = (node.filled(OperandType.TENSOR_FLOAT32, limit) for limit in (lowest, highest))
    is_number = node.emit(Op.GREATER, [steps, low], OperandType.TENSOR_BOOL8)
    above = node.emit(Op.SELECT, [is_number, steps, broadcast_to(node, low, node.shape(steps))], node.builder[low].type)
    return node.emit(Op.MINIMUM, [above, high])


def _dequantize(node: Node) -> None:
    number = node.attribute("output_dtype", 0)
    dtype = _require_real(dtype_of(number) if number else node.value(1).dtype)
    if _is_computed(node):
        return _dequantize_by_computed(node, dtype)
    value, scale = node.value(0), node.constant(1, "scale")
    zero_point = node.constant(2, "zero point") if node.given(2) else np.zeros(scale.shape, value.dtype)
    axis, block = node.attribute("axis", 1), node.attribute("block_size", 0)
    found = _dequantized(node, value, *_for_channels(value, scale, zero_point, axis, block), dtype)
    found.quantized = QuantizedForm(value, scale, zero_point, axis)
    node.results[0] = found
    return None


def quantized(node: Node, value: Value, scale: Array, zero_point: Array, adds_first: bool = False) -> Value:
    """Return a tensor of floats quantized as a whole; `adds_first`: the zero point is added before it is rounded.

    Raises:
        InvalidArgument: If scale or zero point are not those of a tensor of 8 bits.
    """
    number, zero, dtype = _parameters(scale, zero_point)
    form = None if adds_first else integer_form(value, number, zero, dtype)
    if form is not None:
        return form
    x = node.operand(value)
    if node.builder[x].type not in _FLOATS:
        raise InvalidArgument("only floats can be quantized")
    begin = node.builder.operation_count
    found = node.builder.operand(Operand(QUANTIZED_TYPES[dtype.name], (), number, zero))
    node.builder.operation(
        operation_code(TfliteOperation.QUANTIZE_LINEAR), [x, node.builder.boolean(adds_first)], found
    )
    node.builder.infer_shapes(begin)
    return Value(value.shape, dtype, found)


def dequantized(node: Node, value: Value, scale: Array, zero_point: Array, axis: int = 0) -> Value:
    """Return a quantized tensor as floats; a constant may have a scale for each channel along `axis`.

    Raises:
        InvalidArgument: If scale or zero point do not fit the tensor.
    """
    found = _dequantized(node, value, *_for_channels(value, scale, zero_point, axis), scale.dtype)
    found.quantized = QuantizedForm(value, scale, zero_point, axis)
    return found


def _dequantized(node: Node, value: Value, scale: Array, zero_point: Array, dtype: np.dtype[Any]) -> Value:
    """Return the product in float32, rounded once; scale and zero point broadcast to the tensor."""
    if value.array is not None:
        wide = np.float32 if value.array.dtype.name in FLOAT_FORMATS else np.int64
        found = (value.array.astype(wide) - zero_point.astype(wide)).astype(np.float32) * scale.astype(np.float32)
        return Value.of(found.astype(dtype))
    operand = node.builder[node.operand(value)]
    if scale.size == 1 and operand.type == QUANTIZED_TYPES.get(value.dtype.name):
        number, zero, _ = _parameters(scale, zero_point)
        if (operand.scale, operand.zero_point) == (number, zero):
            kind = OperandType.TENSOR_FLOAT16 if dtype == np.float16 else OperandType.TENSOR_FLOAT32
            found = node.emit(Op.DEQUANTIZE, [node.operand(value)], kind)
            return Value(value.shape, dtype, node.narrowed(found, dtype))
    return _from_floats(node, value, scale, zero_point, dtype)


def _from_floats(node: Node, value: Value, scale: Array, zero_point: Array, dtype: np.dtype[Any]) -> Value:
    """Return integers, or what a quantized tensor stores, less their zero point, times their scale."""
    factors, zeros = (node.add_constant(each.astype(np.float32)) for each in (scale, zero_point))
    found = node.emit(Op.SUB, [_as_float32(node, value), zeros, node.builder.int32(0)])
    found = node.emit(Op.MUL, [found, factors, node.builder.int32(0)])
    return _as_real(node, found, value.shape, dtype)


def _as_real(node: Node, x: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Value:
    """Return FLOAT32 elements as a tensor of a type."""
    if dtype == np.float16:
        return Value(shape, dtype, node.reshaped(node.emit(Op.CAST, [x], OperandType.TENSOR_FLOAT16), shape))
    return Value(shape, dtype, node.reshaped(node.narrowed(x, dtype), shape))


def _quantized(array: Array, scale: Array, zero_point: Array, precision: np.dtype[Any]) -> Array:
    """Return a constant quantized to integers."""
    limits = integer_limits(zero_point.dtype)
    assert limits is not None, "the type has integers"
    with np.errstate(all="ignore"):
        quotients = _in_precision(array, precision) / _in_precision(scale, precision)
        steps = np.rint(_in_precision(quotients, precision)) + zero_point.astype(np.float32)
    found: Array = np.clip(np.where(np.isnan(steps), limits[0], steps), *limits).astype(zero_point.dtype)
    return found


def _for_channels(value: Value, scale: Array, zero_point: Array, axis: int, block: int = 0) -> tuple[Array, Array]:
    """Return scale and zero point in a shape that broadcasts to a value's; those of `block` elements are repeated."""
    if scale.dtype.name not in _PRECISIONS or zero_point.size != scale.size:
        raise InvalidArgument(
            f"{scale.size} scales of {scale.dtype.name} and {zero_point.size} zero points are not supported"
        )
    if scale.size == 1:
        return scale.reshape(()), zero_point.reshape(())
    axis = axis_of(axis, len(value.shape))
    if block or scale.ndim > 1:
        return _for_blocks(value, scale, axis, block), _for_blocks(value, zero_point, axis, block)
    shape = [1] * len(value.shape)
    shape[axis] = value.shape[axis]
    if scale.shape != (value.shape[axis],):
        raise InvalidArgument(f"{scale.size} scales for {value.shape[axis]} channels")
    return scale.reshape(shape), zero_point.reshape(shape)


def _for_blocks(value: Value, numbers: Array, axis: int, block: int) -> Array:
    """Return the number of each element, of one for each block along an axis; the last block may be shorter."""
    wanted = list(value.shape)
    wanted[axis] = -(-value.shape[axis] // block) if block > 0 else 0
    if numbers.shape != tuple(wanted):
        raise InvalidArgument(
            f"scales or zero points of the shape {numbers.shape} for blocks of {block} of the shape {value.shape}"
        )
    found: Array = np.take(numbers, np.arange(value.shape[axis]) // block, axis)
    return found


def _parameters(scale: Array, zero_point: Array) -> tuple[float, int, np.dtype[Any]]:
    """Return scale, zero point and type of a tensor that is quantized as a whole."""
    if scale.size != 1 or zero_point.size != 1:
        raise InvalidArgument("scales for each channel are supported only for constants")
    if zero_point.dtype.name not in QUANTIZED_TYPES:
        raise InvalidArgument(f"quantized tensors of {zero_point.dtype.name} are not supported")
    return float(np.float32(scale.reshape(-1)[0])), int(zero_point.reshape(-1)[0]), zero_point.dtype


_QUANTIZATION_CONVERTERS: dict[str, Callable[[Node], None]] = {
    "DequantizeLinear": _dequantize,
    "QuantizeLinear": _quantize,
    "com.microsoft.DequantizeLinear": _dequantize,
    "com.microsoft.QuantizeLinear": _quantize,
}


# ----------------------------------------------------------------------------------------------------------------------
# Constants of 2, 4 or 8 bits with a scale for each block: MatMulNBits, whose weights stay so, and GatherBlockQuantized.
#
# Also the tables of QEmbedLayerNormalization, each of which has one scale.


_BITS = BLOCK_BITS
_ROUNDS_INPUT = 4  # the value of accuracy_level that permits to round the input to 8 bits
_TABLES = range(2, 7)  # positions of inputs of QEmbedLayerNormalization
_TO_SCALE, _TO_ZERO_POINT = 6, 11


def _blockwise_matmul(node: Node) -> None:
    """Convert A · Bᵀ, whose rows B has in blocks of `block_size` numbers."""
    bits, block = _bits(node, 4), node.attribute("block_size", 0)
    columns, rows = node.attribute("K", 0), node.attribute("N", 0)
    rounds_input = node.attribute("accuracy_level", 0) == _ROUNDS_INPUT
    node.attribute("weight_prepacked", 0)
    packed = node.constant(1, "matrix")
    blocks = -(-columns // block) if block > 0 else 0
    if columns < 1 or rows < 1 or packed.size * (8 // bits) != rows * blocks * block:
        raise InvalidArgument(f"{packed.size} bytes do not have {rows} × {columns} numbers in blocks of {block}")
    matrix = _Blocks(packed.reshape(rows, blocks, -1), bits, node.constant(2, "scales").reshape(rows, blocks))
    if node.given(4) or block < MIN_BLOCK or block & (block - 1):
        return _product_of_floats(node, matrix, columns)
    return _product_of_blocks(node, matrix, columns, rounds_input)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Packed numbers (rows, blocks, bytes of a block) and the scale of each block."""

    packed: Array
    bits: int
    scales: Array


def _product_of_blocks(node: Node, matrix: _Blocks, columns: int, rounds_input: bool) -> None:
    """Convert the product to BLOCKWISE_MATMUL, which computes with float32.

    The input is rounded where ONNX Runtime's kernels of x86 do so.
    """
    x, kind, shape = node.operand(0), node.builder[node.operand(0)].type, node.value(0).shape
    if kind not in _FLOATS or not shape or shape[-1] != columns:
        raise InvalidArgument(f"an input of {kind.name} and the shape {shape} for a matrix of {columns} columns")
    if node.given(3):
        given = _zero_points(node, matrix)
        zeros = _bytes(node, given) if given.dtype == np.uint8 else node.add_constant(given.astype(np.float32))
    else:
        zeros = node.builder.omitted(OperandType.TENSOR_QUANT8_ASYMM)
    addend = node.value(5) if node.given(5) else None
    if addend is not None and addend.array is not None:
        bias = node.add_constant(addend.array.astype(np.float32).reshape(-1))
    else:
        bias = node.builder.omitted(OperandType.TENSOR_FLOAT32)
    weights, scales = _bytes(node, matrix.packed), node.add_constant(matrix.scales.astype(np.float32))
    is_rounded = rounds_input and matrix.bits > 2 and matrix.packed.shape[2] * 8 <= MAX_ROUNDED_BLOCK * matrix.bits
    is_rounded = is_rounded and node.builder[zeros].type == OperandType.TENSOR_QUANT8_ASYMM
    numbers = node.builder.int32(matrix.bits), node.builder.boolean(is_rounded)
    x = node.emit(Op.CAST, [x], OperandType.TENSOR_FLOAT32) if kind == OperandType.TENSOR_FLOAT16 else x
    code = operation_code(TfliteOperation.BLOCKWISE_MATMUL)
    found = node.emit(code, [x, weights, scales, zeros, bias, *numbers])
    found = node.emit(Op.CAST, [found], kind) if kind == OperandType.TENSOR_FLOAT16 else found
    node.result(found, (*shape[:-1], len(matrix.packed)))
    if addend is not None and addend.array is None:
        node.results[0] = Composition(node)("Add", node.results[0], addend)


def _bytes(node: Node, array: Array) -> int:
    """Add a constant of bytes."""
    node.builder.reserve(array.nbytes)
    location = node.builder.stored(np.ascontiguousarray(array).tobytes())
    kind = OperandType.TENSOR_QUANT8_ASYMM
    return node.builder.operand(Operand(kind, array.shape, 1.0, 0, LifeTime.CONSTANT_COPY, location))


def _product_of_floats(node: Node, matrix: _Blocks, columns: int) -> None:
    """Convert the product with a matrix that becomes floats, with the block of each column in an input."""
    rows, blocks, size = matrix.packed.shape
    node.builder.reserve(4 * rows * columns)  # before the matrix exists
    steps = unpack_bits(matrix.packed.reshape(rows, -1), matrix.bits)[:, :columns]
    zeros: Array = np.full((rows, blocks), 1 << (matrix.bits - 1), np.float32)
    if node.given(3):
        zeros = _zero_points(node, matrix).astype(np.float32)
    of_column = np.arange(columns) // (size * 8 // matrix.bits)
    if node.given(4):
        of_column = node.constant(4, "g_idx")
    numbers = (steps.astype(np.float32) - zeros[:, of_column]) * matrix.scales[:, of_column]
    compose = Composition(node)
    found = compose("MatMul", node.value(0), Value.of(numbers.T.astype(matrix.scales.dtype)))
    node.results[0] = compose("Add", found, node.value(5)) if node.given(5) else found


def _zero_points(node: Node, matrix: _Blocks) -> Array:
    """Return the zero point of each block of each row, which are packed bytes or floats."""
    given, (rows, blocks) = node.constant(3, "zero points"), matrix.scales.shape
    if given.dtype != np.uint8:
        return given.reshape(rows, blocks)
    return unpack_bits(given.reshape(rows, -1), matrix.bits)[:, :blocks]


def _bits(node: Node, default: int) -> int:
    bits: int = node.attribute("bits", default)
    if bits not in _BITS:
        raise InvalidArgument(f"numbers of {bits} bits are not supported; those of {_BITS} are")
    return bits


def _gather(node: Node) -> None:
    """Convert to a lookup in a table of floats."""
    table, scales, bits = node.constant(0, "table"), node.constant(2, "scales"), _bits(node, 4)
    block = node.attribute("block_size", 128)
    is_packed = table.dtype == np.uint8 and bits < 8
    extents = table.shape[:-1] + (table.shape[-1] * (8 // bits if is_packed else 1),)
    axis = axis_of(node.attribute("quantize_axis", 1), len(extents))
    if block < 1 or scales.ndim != len(extents) or scales.shape[axis] != -(-extents[axis] // block):
        raise InvalidArgument(f"scales of the shape {scales.shape} for blocks of {block} of {extents}")
    node.builder.reserve(4 * table.size * (8 // bits))  # before the table exists
    zeros: Array = np.full(scales.shape, 1 << (bits - 1) if table.dtype == np.uint8 else 0, np.float32)
    if node.given(3):
        zeros = node.constant(3, "zero points")
        zeros = unpack_bits(zeros, bits)[..., : scales.shape[-1]] if is_packed else zeros
    steps = unpack_bits(table, bits) if is_packed else table
    factors, offsets = (np.repeat(each, min(block, extents[axis]), axis)[_limited(extents)] for each in (scales, zeros))
    numbers = (steps.astype(np.float32) - offsets.astype(np.float32)) * factors
    found = Value.of(numbers.astype(scales.dtype))
    node.results[0] = Composition(node)("Gather", found, node.value(1), axis=node.attribute("gather_axis", 0))


def _limited(extents: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(extent) for extent in extents)


def _embeddings(node: Node) -> None:
    """Convert with tables, scale and bias as floats."""
    inputs = list(node.inputs)
    for position in _TABLES:
        if node.given(position):
            scale = node.constant(position + _TO_SCALE, "scale")
            zero_point = node.constant(position + _TO_ZERO_POINT, "zero point")
            inputs[position] = dequantized(node, Value.of(node.constant(position, "table")), scale, zero_point)
    node.inputs = inputs[:8]
    embeddings(node)


_MICROSOFT = "com.microsoft."
_BLOCKWISE_CONVERTERS: dict[str, Callable[[Node], None]] = {
    f"{_MICROSOFT}GatherBlockQuantized": _gather,
    f"{_MICROSOFT}MatMulNBits": _blockwise_matmul,
    f"{_MICROSOFT}QEmbedLayerNormalization": _embeddings,
}

CONVERTERS: dict[str, Callable[[Node], None]] = {**_QUANTIZATION_CONVERTERS, **_BLOCKWISE_CONVERTERS}
