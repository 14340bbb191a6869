"""What declarations of the extension `nnfmq.tflite` share: codes, and sets of operand types."""

from __future__ import annotations

from collections.abc import Iterable

from nnfmq.hal.extensions import TfliteOperation
from nnfmq.hal.types import OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Plan
from nnfmq.operations.extensions import define_operation
from nnfmq.operations.kernel_adapters import fp16_via_fp32
from nnfmq.operations.shapes import same_shape

__all__ = ["ANY_TENSOR", "any_tensor_variants", "float_variants", "function_of_one", "own_code"]

ANY_TENSOR = (op.F32, op.F16, op.I32, op.Q8, op.Q8S, op.Q16S, op.B8, *op.WIDE)
"""The operand types of operations that only move elements."""


def own_code(operation: TfliteOperation) -> OperationType:
    """Return the code of an operation for its declaration."""
    return define_operation(operation, operation.name)


def function_of_one(
    operation: TfliteOperation, variants: Iterable[op.Variant], *attributes: op.Parameter
) -> op.Declaration:
    """Return the declaration of a function of each element of one tensor, which may have none.

    The output has the type O of a variant if it has that, else T.
    """
    variants = tuple(variants)
    return op.Declaration(
        own_code(operation),
        since=op.V1_2,
        overloads=(op.overload(op.data("input"), *attributes, level=op.V1_2),),
        variants=variants,
        shape=same_shape,
        outputs=("O" if "O" in variants[0].types else "T",),
        zero_sized=True,
    )


def any_tensor_variants(plan: Plan) -> tuple[op.Variant, ...]:
    """Return the variants of an operation that only moves elements."""
    return op.of_types(plan, *ANY_TENSOR)


def float_variants(plan: Plan) -> tuple[op.Variant, ...]:
    """Return the variants for float32, and for float16 computed in float32."""
    return op.Variant({"T": op.F32}, op.V1_2, plan), op.Variant({"T": op.F16}, op.V1_2, fp16_via_fp32(plan))
