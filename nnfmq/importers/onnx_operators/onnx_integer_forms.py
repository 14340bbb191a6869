"""Quantized results of operators whose inputs are quantized: operations on integers in place of those on floats.

A quantized model has floats only between a DequantizeLinear and the next QuantizeLinear. When that is converted, the
nodes between are known, and the integers of their inputs: a convolution, a product with constant weights, a sum and a
movement of elements become the HAL's quantized operations. The importer drops the operations on floats, which nothing
reads then. Results differ from ONNX Runtime's, which rounds once, by one step at most.
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
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.types import ChannelQuant, LifeTime, Operand, OperandType
from nnfmq.importers.onnx_operators import onnx_convolution, onnx_movement, onnx_pooling
from nnfmq.importers.onnx_values import Node, QuantizedForm, Value

__all__ = ["QUANTIZED_TYPES", "integer_form"]

Array: TypeAlias = npt.NDArray[Any]
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
    onnx_convolution.convolve(inner, filter, bias, target.quantization)
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
    name: {**onnx_movement.CONVERTERS, **onnx_pooling.CONVERTERS}[name]
    for name in ("Flatten", "MaxPool", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
}
_FORMS: Mapping[str, Callable[[Node, _Target], Value]] = {
    "Conv": _conv,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Relu": _relu,
    **dict.fromkeys(_MOVEMENTS, _movement),
}
