"""FILL and RANK: results that depend on attributes and shapes only.

C1 dimensions are a vector with at least one element, none negative
"""

from __future__ import annotations

from functools import partial

import numpy as np

from nnfmq.hal.types import OperandType, OperationType
from nnfmq.operations.declaration import (
    B8,
    F16,
    F32,
    FLOAT16,
    FLOAT32,
    I32,
    INT32,
    PC,
    Q8,
    Q8S,
    S8,
    V1_3,
    Array,
    Declaration,
    Run,
    Shape,
    Tensor,
    Variant,
    attribute,
    data,
    overload,
)
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
    F32,
    F16,
    I32,
    B8,
    Q8,
    Q8S,
    S8,
    PC,
    OperandType.TENSOR_QUANT16_ASYMM,
    OperandType.TENSOR_QUANT16_SYMM,
)

DECLARATIONS = (
    Declaration(
        OperationType.FILL,
        since=V1_3,
        overloads=(overload(attribute("dimensions", I32), attribute("value", "S"), level=V1_3),),
        variants=(
            Variant({"S": FLOAT32, "T": F32}, V1_3, plan_fill),
            Variant({"S": FLOAT16, "T": F16}, V1_3, plan_fill),
            Variant({"S": INT32, "T": I32}, V1_3, plan_fill),
        ),
        shape=fill_shape,
    ),
    Declaration(
        OperationType.RANK,
        since=V1_3,
        overloads=(overload(data("input"), level=V1_3),),
        variants=tuple(Variant({"T": type}, V1_3, plan_rank) for type in _TENSORS),
        shape=rank_shape,
        outputs=(INT32,),
    ),
)
