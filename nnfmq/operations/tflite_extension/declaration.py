"""What declarations of the extension `nnfmq.tflite` share: codes, and sets of operand types."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nnfmq.hal.extensions import TfliteOperation
from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Plan
from nnfmq.operations.extensions import define_operation
from nnfmq.operations.shapes import same_shape

__all__ = ["ANY_TENSOR", "any_tensor_variants", "declare", "function_of_one"]

ANY_TENSOR = (op.F32, op.F16, op.I32, op.Q8, op.Q8S, op.Q16S, op.B8, *op.WIDE)
"""The operand types of operations that only move elements."""


def declare(operation: TfliteOperation, *parameters: op.Parameter, **others: Any) -> op.Declaration:
    """Return the declaration of an operation with these parameters; `others` are further attributes, by name."""
    return op.Declaration(
        define_operation(operation, operation.name),
        since=op.V1_2,
        overloads=(op.overload(*parameters, level=op.V1_2),),
        **others,
    )


def function_of_one(
    operation: TfliteOperation, variants: Iterable[op.Variant], *attributes: op.Parameter
) -> op.Declaration:
    """Return the declaration of a function of each element of one tensor, which may have none.

    The output has the type O of a variant if it has that, else T.
    """
    variants = tuple(variants)
    return declare(
        operation,
        op.data("input"),
        *attributes,
        variants=variants,
        shape=same_shape,
        outputs=("O" if "O" in variants[0].types else "T",),
        zero_sized=True,
    )


def any_tensor_variants(plan: Plan) -> tuple[op.Variant, ...]:
    """Return the variants of an operation that only moves elements."""
    return op.of_types(plan, *ANY_TENSOR)
