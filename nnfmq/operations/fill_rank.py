"""FILL and RANK: results that depend on attributes and shapes only.

C1 dimensions are a vector with at least one element, none negative
"""

from __future__ import annotations

from functools import partial

import numpy as np

from nnfmq.hal.types import OperandType, OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Array, Run, Shape, Tensor
from nnfmq.operations.shapes import require


def fill_shape(*, dimensions: Array, value: float) -> Shape:
    """Return `dimensions`."""
    shape = tuple(int(dimension) for dimension in dimensions.ravel())
    is_vector = dimensions.ndim == 1 and len(shape) > 0
    require(is_vector and min(shape) >= 0, "C1", f"dimensions {dimensions.tolist()}, each must be 0 or more")
    return shape


def plan_fill(*, output: Tensor, dimensions: Array, value: float) -> Run:
    """Plan a new array for each execution, so that a prepared model keeps no memory for it."""
    return partial(np.full, output.shape, value, output.dtype)


def rank_shape(input: Shape) -> Shape:
    """Return the shape of a scalar."""
    return ()


def plan_rank(input: Tensor, *, output: Tensor) -> Run:
    """Plan the count of the input's dimensions."""
    rank = np.array(len(input.shape), np.int32)
    return lambda array: rank


_TENSORS = (
    op.F32,
    op.F16,
    op.I32,
    op.B8,
    op.Q8,
    op.Q8S,
    op.S8,
    op.PC,
    OperandType.TENSOR_QUANT16_ASYMM,
    OperandType.TENSOR_QUANT16_SYMM,
)

DECLARATIONS = (
    op.Declaration(
        OperationType.FILL,
        since=op.V1_3,
        overloads=(op.overload(op.attribute("dimensions", op.I32), op.attribute("value", "S"), level=op.V1_3),),
        variants=(
            op.Variant({"S": op.FLOAT32, "T": op.F32}, op.V1_3, plan_fill),
            op.Variant({"S": op.FLOAT16, "T": op.F16}, op.V1_3, plan_fill),
            op.Variant({"S": op.INT32, "T": op.I32}, op.V1_3, plan_fill),
        ),
        shape=fill_shape,
    ),
    op.Declaration(
        OperationType.RANK,
        since=op.V1_3,
        overloads=(op.overload(op.data("input"), level=op.V1_3),),
        variants=tuple(op.Variant({"T": type}, op.V1_3, plan_rank) for type in _TENSORS),
        shape=rank_shape,
        outputs=(op.INT32,),
    ),
)
