"""Operators on the bits of integers, and cumulative sums and products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import TENSOR_INT64, TfliteOperation, operation_code
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.types import OperandType
from nnfmq.importers.onnx.file import dtype_of
from nnfmq.importers.onnx.operators.movement import axis_of, broadcast_to, common_shape, reversed_along
from nnfmq.importers.onnx.values import Node, operand_type_of

__all__ = ["CONVERTERS", "inverted"]

_I32 = OperandType.TENSOR_INT32
_ALL_BITS = -1
_MAX_SHIFTS = {_I32: 31, TENSOR_INT64: 63}  # of the types that have negative numbers
_FLOAT_BYTES = 4  # of the smallest floats whose bits an operand has
_MAX_STEPS = 512  # of a cumulative product, which is unrolled


def _emit(node: Node, operation: TfliteOperation, a: int, b: int) -> int:
    return node.emit(operation_code(operation), [a, b])


def _require_integers(node: Node) -> None:
    if node.value(0).dtype.kind not in "iu":
        raise InvalidArgument(f"elements of {node.value(0).dtype.name} are not supported")


def _bitwise(name: str, node: Node) -> None:
    """Convert And, Or and Xor of bits; a | b is (a ^ b) ^ (a & b)."""
    _require_integers(node)
    a, b = node.operand(0), node.operand(1)
    both = _emit(node, TfliteOperation.BITWISE_AND, a, b) if name != "Xor" else 0
    either = _emit(node, TfliteOperation.BITWISE_XOR, a, b) if name != "And" else 0
    found = {"And": both, "Xor": either}.get(name)
    if found is None:
        found = _emit(node, TfliteOperation.BITWISE_XOR, either, both)
    node.result(found, common_shape(node.value(0), node.value(1)))


def _bitwise_not(node: Node) -> None:
    _require_integers(node)
    node.result(inverted(node, node.operand(0)), node.value(0).shape)


def inverted(node: Node, operand: int) -> int:
    """Return integers with all bits inverted, which are in reverse order."""
    return _emit(node, TfliteOperation.BITWISE_XOR, operand, node.filled(node.builder[operand].type, _ALL_BITS))


def _bit_shift(node: Node) -> None:
    """Convert shifts; negative ones and those of all bits leave none but copies of the sign."""
    _require_integers(node)
    direction, shape = node.attribute("direction", ""), common_shape(node.value(0), node.value(1))
    x, bits = node.operand(0), node.operand(1)
    if direction == "LEFT":
        return node.result(_emit(node, TfliteOperation.LEFT_SHIFT, x, bits), shape)
    if direction != "RIGHT":
        raise InvalidArgument(f"direction {direction!r} is unknown")
    kind = node.builder[bits].type
    if kind in _MAX_SHIFTS:
        is_negative = node.emit(Op.LESS, [bits, node.filled(kind, 0)], OperandType.TENSOR_BOOL8)
        all_bits = broadcast_to(node, node.filled(kind, _MAX_SHIFTS[kind]), node.shape(bits))
        bits = node.emit(Op.SELECT, [is_negative, all_bits, bits], kind)
    return node.result(_emit(node, TfliteOperation.RIGHT_SHIFT, x, bits), shape)


def _bit_cast(node: Node) -> None:
    """Convert between types of the same size: integers wrap around, and floats of 32 and 64 bits keep their bits."""
    given, wanted = node.value(0).dtype, dtype_of(node.attribute("to", 0))
    x, shape, kind = node.operand(0), node.value(0).shape, operand_type_of(wanted)
    is_integral = given.kind in "iub" and wanted.kind in "iu"
    if given.itemsize != wanted.itemsize or (not is_integral and given.itemsize < _FLOAT_BYTES):
        raise InvalidArgument(
            f"bits of {given.name} as {wanted.name} are not supported: devices have none of such floats"
        )
    if node.builder[x].type != kind:
        x = node.emit(Op.CAST if is_integral else operation_code(TfliteOperation.BITCAST), [x], kind)
    node.result(x, shape, wanted)


def _cumulative_axis(node: Node) -> int:
    given = node.constant(1, "axis")
    if given.size != 1 or given.dtype.kind not in "iu":
        raise InvalidArgument("the axis must be one integer")
    return axis_of(int(given.reshape(-1)[0]), len(node.value(0).shape))


def _cumulative_sum(node: Node) -> None:
    axis, x = node.filled(_I32, _cumulative_axis(node)), node.operand(0)
    kind = node.builder[x].type
    flags = [node.builder.boolean(bool(node.attribute(name, 0))) for name in ("exclusive", "reverse")]
    x = node.emit(Op.CAST, [x], OperandType.TENSOR_FLOAT32) if kind == OperandType.TENSOR_FLOAT16 else x
    found = node.emit(operation_code(TfliteOperation.CUMSUM), [x, axis, *flags])
    node.result(found if node.builder[found].type == kind else node.emit(Op.CAST, [found], kind), node.value(0).shape)


def _cumulative_product(node: Node) -> None:
    """Convert to one multiplication for each place along the axis."""
    shape, axis, x = node.value(0).shape, _cumulative_axis(node), node.operand(0)
    if shape[axis] > _MAX_STEPS:
        raise InvalidArgument(f"products of more than {_MAX_STEPS} elements are not supported")
    is_exclusive, is_reverse = node.attribute("exclusive", 0), node.attribute("reverse", 0)
    x = reversed_along(node, x, axis) if is_reverse else x
    extents = (*shape[:axis], 1, *shape[axis + 1 :])
    places = [[place if at == axis else 0 for at in range(len(shape))] for place in range(shape[axis])]
    parts = [node.emit(Op.SLICE, [x, *map(node.builder.int32_vector, (place, extents))]) for place in places]
    if is_exclusive:
        parts = [broadcast_to(node, node.filled(node.builder[x].type, 1.0), extents), *parts[:-1]]
    products = parts[:1]
    for part in parts[1:]:
        products.append(node.emit(Op.MUL, [products[-1], part, node.builder.int32(0)]))
    found = node.emit(Op.CONCATENATION, [*products, node.builder.int32(axis)])
    node.result(reversed_along(node, found, axis) if is_reverse else found, shape)


CONVERTERS: dict[str, Callable[[Node], None]] = {
    **{f"Bitwise{name}": partial(_bitwise, name) for name in ("And", "Or", "Xor")},
    "BitwiseNot": _bitwise_not,
    "BitCast": _bit_cast,
    "BitShift": _bit_shift,
    "CumProd": _cumulative_product,
    "CumSum": _cumulative_sum,
}
