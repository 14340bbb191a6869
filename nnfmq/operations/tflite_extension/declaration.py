"""What declarations of the extension `nnfmq.tflite` share: codes, and sets of operand types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from nnfmq.hal.extensions import TENSOR_FLOAT64, TENSOR_INT64, TENSOR_UINT32, TENSOR_UINT64, WIDE_TYPES, TfliteOperation
from nnfmq.hal.types import OperandType, OperationType
from nnfmq.operations import padding, permute, reduction, reshape_concat, slicing
from nnfmq.operations.declaration import (
    B8,
    F16,
    F32,
    I32,
    Q8,
    Q8S,
    Q16S,
    V1_0,
    V1_2,
    Array,
    Declaration,
    Overload,
    Parameter,
    Plan,
    Shape,
    Variant,
    data,
    overload,
)
from nnfmq.operations.extensions import define_operation
from nnfmq.operations.kernel_adapters import fp16_via_fp32
from nnfmq.operations.shapes import same_shape

__all__ = [
    "ANY_TENSOR",
    "F64",
    "SHAPES_OF_ANY_RANK",
    "WIDE_INTEGERS",
    "any_tensor_variants",
    "as_tflite",
    "conversions",
    "float_variants",
    "function_of_one",
    "own_code",
    "padded_shape_of_any_rank",
    "variants_of",
]

F64 = TENSOR_FLOAT64
WIDE_INTEGERS = (TENSOR_INT64, TENSOR_UINT32, TENSOR_UINT64)

ANY_TENSOR = (F32, F16, I32, Q8, Q8S, Q16S, B8, *WIDE_TYPES)
"""The operand types of operations that only move elements."""


def own_code(operation: TfliteOperation) -> OperationType:
    """Return the code of an operation for its declaration."""
    return define_operation(operation, operation.name)


def as_tflite(operation: TfliteOperation, source: Declaration, plan: Plan, types: Iterable[OperandType]) -> Declaration:
    """Return the declaration of TFLite's definition of the HAL's `source`: with its parameters and its shape rule."""
    others = {tuple((name, kind) for name, kind in variant.types.items() if name != "T") for variant in source.variants}
    return replace(
        source,
        code=own_code(operation),
        since=V1_2,
        overloads=tuple(Overload(o.parameters, dict.fromkeys(o.arities, V1_2)) for o in source.overloads),
        variants=tuple(Variant({"T": kind, **dict(other)}, V1_2, plan) for kind in types for other in sorted(others)),
        level=lambda inputs, output: V1_0,
    )


def variants_of(types: Iterable[OperandType], plan: Plan) -> tuple[Variant, ...]:
    """Return a variant with the same plan for each type as T."""
    return tuple(Variant({"T": operand_type}, V1_2, plan) for operand_type in types)


def function_of_one(operation: TfliteOperation, variants: Iterable[Variant], *attributes: Parameter) -> Declaration:
    """Return the declaration of a function of each element of one tensor, which may have none.

    The output has the type O of a variant if it has that, else T.
    """
    variants = tuple(variants)
    return Declaration(
        own_code(operation),
        since=V1_2,
        overloads=(overload(data("input"), *attributes, level=V1_2),),
        variants=variants,
        shape=same_shape,
        outputs=("O" if "O" in variants[0].types else "T",),
        zero_sized=True,
    )


def conversions(plan: Plan, pairs: Iterable[tuple[OperandType, OperandType]]) -> tuple[Variant, ...]:
    """Return a variant with the same plan for each pair of an input's and an output's type."""
    return tuple(Variant({"T": given, "O": result}, V1_2, plan) for given, result in pairs)


def any_tensor_variants(plan: Plan) -> tuple[Variant, ...]:
    """Return the variants of an operation that only moves elements."""
    return variants_of(ANY_TENSOR, plan)


def float_variants(plan: Plan) -> tuple[Variant, ...]:
    """Return the variants for float32, and for float16 computed in float32."""
    return Variant({"T": F32}, V1_2, plan), Variant({"T": F16}, V1_2, fp16_via_fp32(plan))


# ----------------------------------------------------------------------------------------------------------------------
# Shape rules of operations that the HAL limits to rank 4, without that limit.


def padded_shape_of_any_rank(input: Shape, *, paddings: Array, value: float = 0) -> Shape:
    """Return the input's shape, of any rank, plus the paddings."""
    return padding.padded(input, paddings)


SHAPES_OF_ANY_RANK: Mapping[str, Callable[..., Any]] = {
    "RESHAPE": reshape_concat.reshaped,
    "SQUEEZE": reshape_concat.squeezed,
    "CONCATENATION": reshape_concat.concatenated,
    "STRIDED_SLICE": slicing.strided,
    "PAD": padded_shape_of_any_rank,
    "PAD_V2": padded_shape_of_any_rank,
    "TRANSPOSE": permute.permuted,
    **dict.fromkeys(("MEAN", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_SUM", "REDUCE_PROD"), reduction.reduced),
}
"""By the operation's name."""
