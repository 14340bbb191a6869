"""Removal of trailing arguments that have their default value.

Drivers of early versions reject an operation with more arguments than it had then, even if the further ones say nothing
new. So NNAPI removes layout flags, dilations and axes that are constant and have their default.

Source: NNAPI, ANeuralNetworksModel_finish; the HAL's argument lists by version (API-4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from nnfmq.hal.types import LifeTime, Operand, OperandType, Operation, OperationType, Subgraph

__all__ = ["without_default_arguments"]

_NHWC, _NO = b"\x00", b"\x00"  # a layout flag; align_corners and half_pixel_centers
_UNDILATED = (1).to_bytes(4, "little")
_LAST_AXIS = (-1).to_bytes(4, "little", signed=True)


@dataclass(frozen=True, slots=True)
class _OptionalArguments:
    """The optional arguments at the end of an argument list: the position of the first one, and their defaults.

    `form` is a position and a type there that distinguish the list from the operation's other one. The last `together`
    arguments are given or omitted together.
    """

    begin: int
    defaults: tuple[bytes, ...]
    form: tuple[int, OperandType] | None = None
    together: int = 1


def _windows(explicit: int, implicit: int, form_at: int, *dilations: bytes) -> tuple[_OptionalArguments, ...]:
    """Return the optional arguments of an operation on windows, with explicit and with implicit padding."""
    defaults, together = (_NHWC, *dilations), max(len(dilations), 1)
    return (
        _OptionalArguments(explicit, defaults, (form_at, OperandType.INT32), together),
        _OptionalArguments(implicit, defaults, (form_at, OperandType.BOOL), together),
    )


def _after(begin: int, *defaults: bytes) -> tuple[_OptionalArguments, ...]:
    return (_OptionalArguments(begin, defaults),)


_OPTIONAL: Mapping[OperationType, tuple[_OptionalArguments, ...]] = {
    OperationType.AVERAGE_POOL_2D: _windows(10, 7, 7),
    OperationType.L2_POOL_2D: _windows(10, 7, 7),
    OperationType.MAX_POOL_2D: _windows(10, 7, 7),
    OperationType.CONV_2D: _windows(10, 7, 7, _UNDILATED, _UNDILATED),
    OperationType.DEPTHWISE_CONV_2D: _windows(11, 8, 8, _UNDILATED, _UNDILATED),
    OperationType.DEPTH_TO_SPACE: _after(2, _NHWC),
    OperationType.SPACE_TO_DEPTH: _after(2, _NHWC),
    OperationType.BATCH_TO_SPACE_ND: _after(2, _NHWC),
    OperationType.SPACE_TO_BATCH_ND: _after(3, _NHWC),
    OperationType.RESIZE_BILINEAR: _after(3, _NHWC, _NO, _NO),
    OperationType.RESIZE_NEAREST_NEIGHBOR: _after(4, _NO, _NO),
    OperationType.L2_NORMALIZATION: _after(1, _LAST_AXIS),
    OperationType.LOCAL_RESPONSE_NORMALIZATION: _after(5, _LAST_AXIS),
    OperationType.SOFTMAX: _after(2, _LAST_AXIS),
}
_DEFAULT_TYPES = {1: OperandType.BOOL, 4: OperandType.INT32}  # of a default of so many bytes


def without_default_arguments(subgraph: Subgraph, operand_values: bytes | memoryview) -> Subgraph:
    """Return a valid subgraph without trailing arguments that are constants equal to their default.

    If there are none, that is `subgraph` itself. Constants in pools are not read. The operands remain.

    Args:
        subgraph: A subgraph that has been validated.
        operand_values: The values of its model's CONSTANT_COPY operands.
    """
    operations = tuple(
        _without_defaults(operation, subgraph.operands, operand_values) for operation in subgraph.operations
    )
    return subgraph if operations == subgraph.operations else replace(subgraph, operations=operations)


def _without_defaults(operation: Operation, operands: Sequence[Operand], values: bytes | memoryview) -> Operation:
    inputs = operation.inputs
    for optional in _OPTIONAL.get(operation.type, ()):
        if len(inputs) > optional.begin and _has_form(optional, inputs, operands):
            return replace(operation, inputs=inputs[: _kept(optional, inputs, operands, values)])
    return operation


def _has_form(optional: _OptionalArguments, inputs: Sequence[int], operands: Sequence[Operand]) -> bool:
    if optional.form is None:
        return True
    position, operand_type = optional.form
    return operands[inputs[position]].type == operand_type


def _kept(
    optional: _OptionalArguments, inputs: Sequence[int], operands: Sequence[Operand], values: bytes | memoryview
) -> int:
    """Return how many arguments remain."""
    kept = len(inputs)
    while kept > optional.begin:
        if not _is_equal(operands[inputs[kept - 1]], optional.defaults[kept - 1 - optional.begin], values):
            break
        kept -= 1
    last = optional.begin + len(optional.defaults)
    return len(inputs) if last - optional.together < kept < last else kept


def _is_equal(operand: Operand, default: bytes, values: bytes | memoryview) -> bool:
    begin, is_copy = operand.location.offset, operand.lifetime == LifeTime.CONSTANT_COPY
    return is_copy and operand.type == _DEFAULT_TYPES[len(default)] and values[begin : begin + len(default)] == default
