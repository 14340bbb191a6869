"""QuantizeLinear and DequantizeLinear: QUANTIZE_LINEAR and DEQUANTIZE of 8 bits, and constants.

Constants are converted when the model is loaded, so that weights become floats. What is between a DequantizeLinear and
the next QuantizeLinear is computed in float, unless `onnx_integer_forms` knows how to compute it from the integers; the
integers that follow differ from those of ONNX Runtime's kernels by one step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.tflite_codes import TfliteOperation, operation_code
from nnfmq.hal.types import Operand, OperandType
from nnfmq.importers.onnx_file import dtype_of
from nnfmq.importers.onnx_narrow_types import FLOAT_FORMATS, integer_limits
from nnfmq.importers.onnx_operators.onnx_broadcasting import broadcast_to
from nnfmq.importers.onnx_operators.onnx_integer_forms import QUANTIZED_TYPES, integer_form
from nnfmq.importers.onnx_operators.onnx_movement import axis_of
from nnfmq.importers.onnx_values import Node, QuantizedForm, Value

__all__ = ["CONVERTERS", "dequantized", "limited", "quantized"]

Array: TypeAlias = npt.NDArray[Any]

_FLOATS = (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16)


def _quantize(node: Node) -> None:
    if _is_computed(node):
        return _quantize_by_computed(node)
    value, scale = node.value(0), node.constant(1, "scale")
    zero_point = node.constant(2, "zero point") if node.given(2) else np.zeros(scale.shape, _default_type(node))
    axis = _axis(node)
    if value.array is not None and integer_limits(zero_point.dtype):
        return node.constant_result(_quantized(value.array, *_for_channels(value, scale, zero_point, axis)))
    if scale.size == 1 and zero_point.dtype.name in QUANTIZED_TYPES:
        node.results[0] = quantized(node, value, scale, zero_point)
        return None
    return _stepped(node, value, scale, zero_point, axis)


def _stepped(node: Node, value: Value, scale: Array, zero_point: Array, axis: int) -> None:
    """Quantize to a type, or with scales, that no quantized operand has: steps are INT32, or floats of 8 or 4 bits."""
    x, none = node.operand(value), node.builder.int32(0)
    if node.builder[x].type == OperandType.TENSOR_FLOAT16:
        x = node.emit(Op.CAST, [x], OperandType.TENSOR_FLOAT32)
    factors, zeros = (node.add_constant(each) for each in _as_floats(_for_channels(value, scale, zero_point, axis)))
    steps, limits = node.emit(Op.DIV, [x, factors, none]), integer_limits(zero_point.dtype)
    if limits is not None:
        return _finish_steps(node, steps, zeros if zero_point.any() else None, zero_point.dtype)
    node.result(node.emit(Op.ADD, [steps, zeros, none]) if zero_point.any() else steps, value.shape, zero_point.dtype)
    return None


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


def _quantize_by_computed(node: Node) -> None:
    """Quantize with one scale and zero point that the model computes."""
    dtype = node.value(2).dtype if node.given(2) else _default_type(node)
    if integer_limits(dtype) is None:
        raise InvalidArgument(f"its scale is not a constant: that is supported for integers, not {dtype.name}")
    x, scale, zeros = _computed_parts(node)
    _finish_steps(node, node.emit(Op.DIV, [x, scale, node.builder.int32(0)]), zeros, dtype)


def _dequantize_by_computed(node: Node) -> None:
    """Dequantize with one scale and zero point that the model computes."""
    (x, scale, zeros), none = _computed_parts(node), node.builder.int32(0)
    found = x if zeros is None else node.emit(Op.SUB, [x, zeros, none])
    found = node.emit(Op.MUL, [found, scale, none])
    dtype = node.value(1).dtype
    if dtype == np.float16:
        found = node.emit(Op.CAST, [found], OperandType.TENSOR_FLOAT16)
    node.result(found, node.value(0).shape, dtype)


def _computed_parts(node: Node) -> tuple[int, int, int | None]:
    """Return the input, the scale and the zero point, if there is one, as FLOAT32."""
    node.attributes_read |= {"axis", "block_size"}  # which one scale does not need
    for position in (1, 2):
        if node.given(position) and node.value(position).size != 1:
            raise InvalidArgument("scales or zero points that are no constants are supported if there is one")
    return _as_float32(node, 0), _as_float32(node, 1), _as_float32(node, 2) if node.given(2) else None


def _as_float32(node: Node, position: int) -> int:
    """Return an input's elements, or the stored ones of a quantized tensor, as FLOAT32."""
    x = node.operand(position)
    kind = OperandType.TENSOR_FLOAT32
    return x if node.builder[x].type == kind else node.emit(Op.CAST, [x], kind)


def limited(node: Node, steps: int, lowest: int, highest: int) -> int:
    """Return FLOAT32 limited to a range; NaN becomes the lowest number."""
    low, high = (node.filled(OperandType.TENSOR_FLOAT32, limit) for limit in (lowest, highest))
    is_number = node.emit(Op.GREATER, [steps, low], OperandType.TENSOR_BOOL8)
    above = node.emit(Op.SELECT, [is_number, steps, broadcast_to(node, low, node.shape(steps))], node.builder[low].type)
    return node.emit(Op.MINIMUM, [above, high])


def _as_floats(arrays: tuple[Array, Array]) -> tuple[Array, Array]:
    return arrays[0].astype(np.float32), arrays[1].astype(np.float32)


def _dequantize(node: Node) -> None:
    if _is_computed(node):
        return _dequantize_by_computed(node)
    scale = node.constant(1, "scale")
    zero_point = node.constant(2, "zero point") if node.given(2) else np.zeros(scale.shape, node.value(0).dtype)
    node.results[0] = dequantized(node, node.value(0), scale, zero_point, _axis(node))
    return None


def _axis(node: Node) -> int:
    node.attribute("block_size", 0)  # which follows from the shapes
    axis: int = node.attribute("axis", 1)
    return axis


def _default_type(node: Node) -> np.dtype[Any]:
    number = node.attribute("output_dtype", 0)
    return dtype_of(number) if number else np.dtype(np.uint8)


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
    found = _dequantized(node, value, scale, zero_point, axis)
    found.quantized = QuantizedForm(value, scale, zero_point, axis)
    return found


def _dequantized(node: Node, value: Value, scale: Array, zero_point: Array, axis: int) -> Value:
    if value.array is not None:
        factors, zeros = _for_channels(value, scale, zero_point, axis)
        wide = np.float32 if value.array.dtype.name in FLOAT_FORMATS else np.int64
        found = (value.array.astype(wide) - zeros.astype(wide)).astype(np.float32) * factors.astype(np.float32)
        return Value.of(found.astype(scale.dtype))
    x = node.operand(value)
    if node.builder[x].type == OperandType.TENSOR_INT32:
        x = node.emit(Op.CAST, [x], OperandType.TENSOR_FLOAT32)
    operand = node.builder[x]
    if operand.type == OperandType.TENSOR_FLOAT32 and value.dtype == zero_point.dtype:
        return _from_floats(node, Value(value.shape, value.dtype, x), scale, zero_point, axis)
    number, zero, dtype = _parameters(scale, zero_point)
    if (operand.type, operand.scale, operand.zero_point) != (QUANTIZED_TYPES[dtype.name], number, zero):
        raise InvalidArgument("its scale and zero point must be those with which the tensor was quantized")
    kind = OperandType.TENSOR_FLOAT16 if scale.dtype == np.float16 else OperandType.TENSOR_FLOAT32
    return Value(value.shape, scale.dtype, node.emit(Op.DEQUANTIZE, [x], kind))


def _from_floats(node: Node, value: Value, scale: Array, zero_point: Array, axis: int) -> Value:
    """Return steps that are FLOAT32, less their zero point, times their scale."""
    factors, zeros = (node.add_constant(each) for each in _as_floats(_for_channels(value, scale, zero_point, axis)))
    found = node.emit(Op.SUB, [node.operand(value), zeros, node.builder.int32(0)])
    found = node.emit(Op.MUL, [found, factors, node.builder.int32(0)])
    if scale.dtype == np.float16:
        found = node.emit(Op.CAST, [found], OperandType.TENSOR_FLOAT16)
    return Value(value.shape, scale.dtype, found)


def _quantized(array: Array, scale: Array, zero_point: Array) -> Array:
    """Return a constant quantized to integers."""
    limits = integer_limits(zero_point.dtype)
    if limits is None:
        raise InvalidArgument(f"quantized tensors of {zero_point.dtype.name} are not supported")
    with np.errstate(all="ignore"):
        steps = np.rint(array.astype(np.float32) / scale.astype(np.float32)) + zero_point.astype(np.float32)
    found: Array = np.clip(np.where(np.isnan(steps), limits[0], steps), *limits).astype(zero_point.dtype)
    return found


def _for_channels(value: Value, scale: Array, zero_point: Array, axis: int) -> tuple[Array, Array]:
    """Return scale and zero point in a shape that broadcasts to a value's; those of blocks are repeated."""
    if scale.dtype not in (np.float32, np.float16) or zero_point.size != scale.size:
        raise InvalidArgument("types or shapes of its inputs are not supported")
    if scale.size == 1:
        return scale.reshape(()), zero_point.reshape(())
    axis = axis_of(axis, len(value.shape))
    extent = value.shape[axis]
    if scale.ndim > 1:
        return _for_blocks(value, scale, axis), _for_blocks(value, zero_point.reshape(scale.shape), axis)
    shape = [1] * len(value.shape)
    shape[axis] = extent
    if scale.shape != (extent,):
        raise InvalidArgument(f"{scale.size} scales for {extent} channels")
    return scale.reshape(shape), zero_point.reshape(shape)


def _for_blocks(value: Value, numbers: Array, axis: int) -> Array:
    """Return the number of each element, of one for each block along an axis."""
    if numbers.ndim != len(value.shape) or numbers.shape[axis] == 0 or value.shape[axis] % numbers.shape[axis]:
        raise InvalidArgument(f"scales of shape {numbers.shape} for blocks of the shape {value.shape}")
    found = np.repeat(numbers, value.shape[axis] // numbers.shape[axis], axis)
    if found.shape != value.shape:
        raise InvalidArgument(f"scales of shape {numbers.shape} for blocks of the shape {value.shape}")
    return found


def _parameters(scale: Array, zero_point: Array) -> tuple[float, int, np.dtype[Any]]:
    """Return scale, zero point and type of a tensor that is quantized as a whole."""
    if scale.size != 1 or zero_point.size != 1:
        raise InvalidArgument("scales for each channel are supported only for constants")
    if zero_point.dtype.name not in QUANTIZED_TYPES:
        raise InvalidArgument(f"quantized tensors of {zero_point.dtype.name} are not supported")
    return float(np.float32(scale.reshape(-1)[0])), int(zero_point.reshape(-1)[0]), zero_point.dtype


CONVERTERS: dict[str, Callable[[Node], None]] = {
    "DequantizeLinear": _dequantize,
    "QuantizeLinear": _quantize,
    "com.microsoft.DequantizeLinear": _dequantize,
    "com.microsoft.QuantizeLinear": _quantize,
}
