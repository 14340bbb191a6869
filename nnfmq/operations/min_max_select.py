"""MAXIMUM, MINIMUM and SELECT: one element of each pair.

Quantized inputs are requantized to the output's scale and zero point first, through a table if they differ. SELECT
takes the first operand if the condition's byte is not 0, and does not broadcast.

    C1 condition and operands of SELECT have one shape
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from nnfmq.hal.types import OperandType, OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Array, Plan, Run, Shape, Tensor
from nnfmq.operations.kernel_adapters import lut8, stateless
from nnfmq.operations.quantization import requantized_values
from nnfmq.operations.shapes import broadcast_shapes, require

Adapt: TypeAlias = Callable[[Array], Array]


def select_shape(condition: Shape, first: Shape, second: Shape) -> Shape:
    """Return the shape that all three have."""
    require(condition == first == second, "C1", f"condition and operands have shapes {condition}, {first}, {second}")
    return first


def select(condition: Array, first: Array, second: Array) -> Array:
    """Return the element of `first` if the condition is true, else of `second`, at each position."""
    return np.where(condition, first, second)


def plan_quantized_choice(ufunc: np.ufunc, first: Tensor, second: Tensor, *, output: Tensor) -> Run:
    """Plan MAXIMUM or MINIMUM of quantized values."""
    adapt_first, adapt_second = _adapter(first, output), _adapter(second, output)
    return lambda a, b: ufunc(adapt_first(a), adapt_second(b))


def plan_quantized_select(condition: Tensor, first: Tensor, second: Tensor, *, output: Tensor) -> Run:
    """Plan SELECT of quantized values."""
    adapt_first, adapt_second = _adapter(first, output), _adapter(second, output)
    return lambda mask, a, b: select(mask, adapt_first(a), adapt_second(b))


def _adapter(tensor: Tensor, output: Tensor) -> Adapt:
    quantized = requantized_values(tensor, output)
    return _unchanged if quantized is None else partial(lut8, quantized)


def _unchanged(quantized: Array) -> Array:
    return quantized


def _variants(in_any_dtype: Plan, in_quantized: Plan) -> tuple[op.Variant, ...]:
    return (
        *op.types_since(op.V1_2, in_any_dtype, op.F32, op.F16, op.I32),
        *op.types_since(op.V1_2, in_quantized, op.Q8, op.Q8S),
    )


def _of_stored_values(plan: Plan, *further: OperandType) -> tuple[op.Extended, ...]:
    """Declare `further` types, and TFLite's choice of quantized values as they are stored, whatever their scales."""
    return (
        op.wider(*op.of_types(plan, *further)),
        op.tflite(*op.of_types(plan, op.Q8, op.Q8S)),
        op.sixteen_bits(*op.of_types(plan, op.Q16S)),
    )


def _choice(code: OperationType, ufunc: Any) -> op.Declaration:
    return op.Declaration(
        code,
        since=op.V1_2,
        overloads=(op.overload(op.data("first"), op.data("second"), level=op.V1_2),),
        variants=_variants(stateless(ufunc), partial(plan_quantized_choice, ufunc)),
        shape=broadcast_shapes,
        extended=_of_stored_values(stateless(ufunc), *op.WIDE),
    )


DECLARATIONS = (
    _choice(OperationType.MAXIMUM, np.maximum),
    _choice(OperationType.MINIMUM, np.minimum),
    op.Declaration(
        OperationType.SELECT,
        since=op.V1_2,
        overloads=(op.overload(op.data("condition", op.B8), op.data("first"), op.data("second"), level=op.V1_2),),
        variants=_variants(stateless(select), plan_quantized_select),
        shape=select_shape,
        extended=_of_stored_values(stateless(select), op.B8, *op.WIDE),
    ),
)
