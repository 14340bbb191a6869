"""QuantizeLinear and DequantizeLinear: QUANTIZE and DEQUANTIZE of 8 bits, and constants.

Constants are converted when the model is loaded, so that weights become floats. What is between a DequantizeLinear and
the next QuantizeLinear is computed in float; the integers that follow differ from an integer kernel's by one step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.types import Operand, OperandType
from nnfmq.importers.onnx_operators.onnx_movement import axis_of
from nnfmq.importers.onnx_values import Node, Value

__all__ = ["CONVERTERS", "dequantized", "quantized"]

Array: TypeAlias = npt.NDArray[Any]

_QUANTIZED = {
    "uint8": OperandType.TENSOR_QUANT8_ASYMM,
    "int8": OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
}
_FLOATS = (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16)


def _quantize(node: Node) -> None:
    value, scale = node.value(0), node.constant(1, "scale")
    zero_point = node.constant(2, "zero point") if node.given(2) else np.zeros(scale.shape, _default_type(node))
    axis = _axis(node)
    if value.array is not None:
        return node.constant_result(_quantized(value.array, *_for_channels(value.array, scale, zero_point, axis)))
    node.results[0] = quantized(node, value, scale, zero_point)
    return None


def _dequantize(node: Node) -> None:
    scale = node.constant(1, "scale")
    zero_point = node.constant(2, "zero point") if node.given(2) else np.zeros(scale.shape, node.value(0).dtype)
    node.results[0] = dequantized(node, node.value(0), scale, zero_point, _axis(node))


def _axis(node: Node) -> int:
    if node.attribute("block_size", 0):
        raise InvalidArgument("scales for blocks are not supported")
    axis: int = node.attribute("axis", 1)
    return axis


def _default_type(node: Node) -> type[np.uint8]:
    if node.attribute("output_dtype", 0):
        raise InvalidArgument("attribute output_dtype is not supported without a zero point")
    return np.uint8


def quantized(node: Node, value: Value, scale: Array, zero_point: Array) -> Value:
    """Return a tensor of floats quantized as a whole.

    Raises:
        InvalidArgument: If scale or zero point are not those of a tensor of 8 bits.
    """
    number, zero, dtype = _parameters(scale, zero_point)
    x = node.operand(value)
    if node.builder[x].type not in _FLOATS:
        raise InvalidArgument("only floats can be quantized")
    begin = node.builder.operation_count
    found = node.builder.operand(Operand(_QUANTIZED[dtype.name], (), number, zero))
    node.builder.operation(Op.QUANTIZE, [x], found)
    node.builder.infer_shapes(begin)
    return Value(value.shape, dtype, found)


def dequantized(node: Node, value: Value, scale: Array, zero_point: Array, axis: int = 0) -> Value:
    """Return a quantized tensor as floats; a constant may have a scale for each channel along `axis`.

    Raises:
        InvalidArgument: If scale or zero point do not fit the tensor.
    """
    if value.array is not None:
        factors, zeros = _for_channels(value.array, scale, zero_point, axis)
        return Value.of((value.array.astype(np.int64) - zeros).astype(np.float32) * factors)
    number, zero, dtype = _parameters(scale, zero_point)
    x = node.operand(value)
    if node.builder[x].type == OperandType.TENSOR_INT32:
        x = node.emit(Op.CAST, [x], OperandType.TENSOR_FLOAT32)
    operand = node.builder[x]
    if operand.type == OperandType.TENSOR_FLOAT32 and value.dtype == dtype:  # integers as floats: see `_gather`
        difference = node.emit(Op.SUB, [x, node.filled(operand.type, zero), node.builder.int32(0)])
        product = node.emit(Op.MUL, [difference, node.filled(operand.type, number), node.builder.int32(0)])
        return Value(value.shape, np.dtype(np.float32), product)
    if (operand.type, operand.scale, operand.zero_point) != (_QUANTIZED[dtype.name], number, zero):
        raise InvalidArgument("its scale and zero point must be those with which the tensor was quantized")
    return Value(value.shape, np.dtype(np.float32), node.emit(Op.DEQUANTIZE, [x], OperandType.TENSOR_FLOAT32))


def _quantized(array: Array, scale: Array, zero_point: Array) -> Array:
    """Return a constant quantized."""
    if zero_point.dtype.kind not in "iu":
        raise InvalidArgument(f"quantized tensors of {zero_point.dtype.name} are not supported")
    limits = np.iinfo(zero_point.dtype)
    with np.errstate(all="ignore"):
        steps = np.rint(array / scale) + zero_point
    found: Array = np.clip(steps, limits.min, limits.max).astype(zero_point.dtype)
    return found


def _for_channels(array: Array, scale: Array, zero_point: Array, axis: int) -> tuple[Array, Array]:
    """Return scale and zero point in a shape that broadcasts to a constant's."""
    if array.dtype.kind not in "iuf" or scale.dtype != np.float32 or zero_point.size != scale.size:
        raise InvalidArgument("types or shapes of its inputs are not supported")
    if scale.size == 1:
        return scale.reshape(()), zero_point.reshape(())
    axis = axis_of(axis, array.ndim)
    shape = [1] * array.ndim
    shape[axis] = array.shape[axis]
    if scale.shape != (array.shape[axis],):
        raise InvalidArgument(f"{scale.size} scales for {array.shape[axis]} channels")
    return scale.reshape(shape), zero_point.reshape(shape)


def _parameters(scale: Array, zero_point: Array) -> tuple[float, int, np.dtype[Any]]:
    """Return scale, zero point and type of a tensor that is quantized as a whole."""
    if scale.size != 1 or zero_point.size != 1:
        raise InvalidArgument("scales for each channel are supported only for constants")
    if zero_point.dtype.name not in _QUANTIZED:
        raise InvalidArgument(f"quantized tensors of {zero_point.dtype.name} are not supported")
    if scale.dtype != np.float32:
        raise InvalidArgument(f"scales of {scale.dtype.name} are not supported")
    return float(scale.reshape(-1)[0]), int(zero_point.reshape(-1)[0]), zero_point.dtype


CONVERTERS: dict[str, Callable[[Node], None]] = {"DequantizeLinear": _dequantize, "QuantizeLinear": _quantize}
