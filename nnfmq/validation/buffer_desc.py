"""Validation of a managed buffer's description and roles against the models that it is allocated for.

Rules: N-DOM-1, 6, 7 (checked by `validate_buffer_roles`), N-DOM-4, 5 (a role that does not exist), N-DOM-8 to 12
(roles that disagree), N-DOM-13 to 15 (a description that disagrees with the roles). The caller checks that the models
were prepared by the same device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from nnfmq.hal.capabilities import BufferDesc, BufferRole
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import Model, Operand, is_scalar, merge_dimensions
from nnfmq.validation.rules import require
from nnfmq.validation.values import validate_buffer_desc, validate_buffer_roles

__all__ = ["validate_buffer"]


def validate_buffer(
    desc: BufferDesc, models: Sequence[Model], inputs: Sequence[BufferRole], outputs: Sequence[BufferRole]
) -> Operand:
    """Return the operand that the buffer stores in all of its roles; 0 and () are dimensions that stay unknown.

    Raises:
        InvalidArgument: If a role does not exist, roles disagree, or `desc` disagrees with them.
    """
    validate_buffer_desc(desc)
    validate_buffer_roles(inputs, outputs)
    operands = [*_operands(models, inputs, "input"), *_operands(models, outputs, "output")]
    name, merged = operands[0]
    for other_name, other in operands[1:]:
        merged = _merge(merged, other, f"{name} and {other_name}")
    return _apply_desc(merged, desc)


def _operands(models: Sequence[Model], roles: Sequence[BufferRole], kind: str) -> Iterator[tuple[str, Operand]]:
    for role in roles:
        count = len(models)
        require(
            role.model_index < count, "N-DOM-4", f"{kind} role: model index {role.model_index}, {count} models given"
        )
        main = models[role.model_index].main
        indexes = main.input_indexes if kind == "input" else main.output_indexes
        name = f"{kind} {role.io_index} of model {role.model_index}"
        require(role.io_index < len(indexes), "N-DOM-5", f"{name}: the model has {len(indexes)} {kind}s")
        yield name, main.operands[indexes[role.io_index]]


def _merge(first: Operand, other: Operand, names: str) -> Operand:
    """Return `first` with the dimensions that either operand knows. All else must be equal."""
    require(first.type == other.type, "N-DOM-8", f"{names} have types {first.type.name} and {other.type.name}")
    require(first.scale == other.scale, "N-DOM-9", f"{names} have scales {first.scale} and {other.scale}")
    points = first.zero_point, other.zero_point
    require(points[0] == points[1], "N-DOM-10", f"{names} have zero points {points[0]} and {points[1]}")
    extras = [(operand.channel_quant, operand.extension_data) for operand in (first, other)]
    require(extras[0] == extras[1], "DOM-3", f"{names} have different extra parameters")
    dimensions = merge_dimensions(first.dimensions, other.dimensions)
    if dimensions is None:
        rule = "N-DOM-12" if len(first.dimensions) == len(other.dimensions) else "N-DOM-11"
        raise InvalidArgument(f"{names} have dimensions {first.dimensions} and {other.dimensions} ({rule})")
    return replace(first, dimensions=dimensions)


def _apply_desc(operand: Operand, desc: BufferDesc) -> Operand:
    scalar = is_scalar(operand.type)
    require(not scalar or not desc.dimensions, "N-DOM-15", f"a scalar buffer with dimensions {desc.dimensions}")
    dimensions = merge_dimensions(operand.dimensions, desc.dimensions)
    if dimensions is None:
        rule = "N-DOM-14" if len(operand.dimensions) == len(desc.dimensions) else "N-DOM-13"
        raise InvalidArgument(
            f"buffer dimensions {desc.dimensions} requested, the roles have {operand.dimensions} ({rule})"
        )
    return replace(operand, dimensions=dimensions)
