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
from nnfmq.importers.onnx_values import Node

__all__ = ["CONVERTERS"]

Array: TypeAlias = npt.NDArray[Any]

_QUANTIZED = {
    "uint8": OperandType.TENSOR_QUANT8_ASYMM,
    "int8": OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
}
_FLOATS = (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16)


def _quantize(node: Node) -> None:
    value = node.value(0)
    if value.array is not None:
        return node.constant_result(_quantized(node, value.array))
    scale, zero_point, dtype = _parameters(node)
    x = node.operand(0)
    if node.builder[x].type not in _FLOATS:
        raise InvalidArgument("only floats can be quantized")
    begin = node.builder.operation_count
    found = node.builder.operand(Operand(_QUANTIZED[dtype.name], (), scale, zero_point))
    node.builder.operation(Op.QUANTIZE, [x], found)
    node.builder.infer_shapes(begin)
    return node.result(found, value.shape, dtype)


def _dequantize(node: Node) -> None:
    value = node.value(0)
    if value.array is not None:
        scale, zero_point = _for_channels(node, value.array)
        return node.constant_result((value.array.astype(np.int64) - zero_point).astype(np.float32) * scale)
    number, zero, dtype = _parameters(node)
    x = node.operand(0)
    operand = node.builder[x]
    if (operand.type, operand.scale, operand.zero_point) != (_QUANTIZED[dtype.name], number, zero):
        raise InvalidArgument("its scale and zero point must be those with which the tensor was quantized")
    found = node.emit(Op.DEQUANTIZE, [x], OperandType.TENSOR_FLOAT32)
    return node.result(found, value.shape, np.dtype(np.float32))


def _quantized(node: Node, array: Array) -> Array:
    """Return a constant quantized."""
    scale, zero_point = _for_channels(node, array)
    dtype = node.constant(2, "zero point").dtype if node.given(2) else _default_type(node)
    if dtype.kind not in "iu":
        raise InvalidArgument(f"quantized tensors of {dtype.name} are not supported")
    limits = np.iinfo(dtype)
    with np.errstate(all="ignore"):
        steps = np.rint(array / scale) + zero_point
    found: Array = np.clip(steps, limits.min, limits.max).astype(dtype)
    return found


def _for_channels(node: Node, array: Array) -> tuple[Array, Array]:
    """Return scale and zero point in a shape that broadcasts to a constant's."""
    scale, axis = node.constant(1, "scale"), node.attribute("axis", 1)
    zero_point = node.constant(2, "zero point").astype(np.int64) if node.given(2) else np.zeros(scale.shape, np.int64)
    if node.attribute("block_size", 0):
        raise InvalidArgument("scales for blocks are not supported")
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


def _parameters(node: Node) -> tuple[float, int, np.dtype[Any]]:
    """Return scale, zero point and type of a tensor that is quantized as a whole."""
    for name in ("axis", "block_size"):
        node.attribute(name, 0)  # without effect if there is one scale
    scale = node.constant(1, "scale")
    given = node.constant(2, "zero point") if node.given(2) else np.zeros(scale.shape, _default_type(node))
    if scale.size != 1 or given.size != 1:
        raise InvalidArgument("scales for each channel are supported only for constants")
    if given.dtype.name not in _QUANTIZED:
        raise InvalidArgument(f"quantized tensors of {given.dtype.name} are not supported")
    if scale.dtype != np.float32:
        raise InvalidArgument(f"scales of {scale.dtype.name} are not supported")
    return float(scale.reshape(-1)[0]), int(given.reshape(-1)[0]), given.dtype


def _default_type(node: Node) -> np.dtype[Any]:
    """Return the type of the integers of a node without zero point."""
    is_quantizing = node.operator == "QuantizeLinear"
    if is_quantizing and node.attribute("output_dtype", 0):
        raise InvalidArgument("attribute output_dtype is not supported without a zero point")
    return np.dtype(np.uint8) if is_quantizing else node.value(0).dtype


CONVERTERS: dict[str, Callable[[Node], None]] = {"DequantizeLinear": _dequantize, "QuantizeLinear": _quantize}
