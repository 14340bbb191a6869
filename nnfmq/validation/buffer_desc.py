"""validate_buffer: what a driver is asked to allocate, against the models that it was prepared for.

Ids: N-DOM-1, 6, 7 by `validate_buffer_roles`; N-DOM-4, 5 roles out of range; N-DOM-8 ... 12 roles that disagree;
N-DOM-13 ... 15 a descriptor that disagrees with them. Whether the models belong to the device is for who holds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from nnfmq.hal.capabilities import BufferDesc, BufferRole
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import Model, Operand, is_scalar, merge_dimensions
from nnfmq.validation.values import validate_buffer_desc, validate_buffer_roles

__all__ = ["validate_buffer"]


def validate_buffer(
    desc: BufferDesc, models: Sequence[Model], inputs: Sequence[BufferRole], outputs: Sequence[BufferRole]
) -> Operand:
    """Return the operand that a buffer stands for in all of its roles: 0 and () where the dimensions stay unknown.

    Raises InvalidArgument that names the role and the rule.
    """
    validate_buffer_desc(desc)
    validate_buffer_roles(inputs, outputs)
    operands = [*_operands(models, inputs, "input"), *_operands(models, outputs, "output")]
    name, first = operands[0]
    for other_name, other in operands[1:]:
        first = _agreed(first, other, f"{name} and {other_name}")
    return _described(first, desc)


def _require(condition: bool, rule: str, message: str) -> None:
    if not condition:
        raise InvalidArgument(f"{rule}: {message}")


def _operands(models: Sequence[Model], roles: Sequence[BufferRole], kind: str) -> Iterator[tuple[str, Operand]]:
    for role in roles:
        count = len(models)
        _require(role.model_index < count, "N-DOM-4", f"{kind} role of model {role.model_index}, there are {count}")
        main = models[role.model_index].main
        indexes = main.input_indexes if kind == "input" else main.output_indexes
        found = f"{kind} {role.io_index} of model {role.model_index}"
        _require(role.io_index < len(indexes), "N-DOM-5", f"{found}, which has {len(indexes)}")
        yield found, main.operands[indexes[role.io_index]]


def _agreed(first: Operand, other: Operand, where: str) -> Operand:
    _require(first.type == other.type, "N-DOM-8", f"{where} are {first.type.name} and {other.type.name}")
    _require(first.scale == other.scale, "N-DOM-9", f"{where} have the scales {first.scale} and {other.scale}")
    points = first.zero_point, other.zero_point
    _require(points[0] == points[1], "N-DOM-10", f"{where} have the zero points {points[0]} and {points[1]}")
    extras = [(operand.channel_quant, operand.extension_data) for operand in (first, other)]
    _require(extras[0] == extras[1], "DOM-3", f"{where} have other extra parameters")
    dimensions = merge_dimensions(first.dimensions, other.dimensions)
    if dimensions is None:
        rule = "N-DOM-12" if len(first.dimensions) == len(other.dimensions) else "N-DOM-11"
        raise InvalidArgument(f"{rule}: {where} have the dimensions {first.dimensions} and {other.dimensions}")
    return replace(first, dimensions=dimensions)


def _described(operand: Operand, desc: BufferDesc) -> Operand:
    scalar = is_scalar(operand.type)
    _require(not scalar or not desc.dimensions, "N-DOM-15", f"a scalar with the dimensions {desc.dimensions}")
    dimensions = merge_dimensions(operand.dimensions, desc.dimensions)
    if dimensions is None:
        rule = "N-DOM-14" if len(operand.dimensions) == len(desc.dimensions) else "N-DOM-13"
        wanted, given = desc.dimensions, operand.dimensions
        raise InvalidArgument(f"{rule}: dimensions {wanted} are asked for, the roles have {given}")
    return replace(operand, dimensions=dimensions)
