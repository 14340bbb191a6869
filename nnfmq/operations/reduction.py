"""MEAN over axes.

C1 axes is a vector
"""

from __future__ import annotations

import math

import numpy as np

from nnfmq.hal.types import OperationType
from nnfmq.operations.policies import direct, half
from nnfmq.operations.shapes import normal_axis, require, require_rank
from nnfmq.operations.signature import (
    F16,
    F32,
    I32,
    Q8,
    Q8S,
    V1_1,
    V1_2,
    V1_3,
    Array,
    Declaration,
    Shape,
    Variant,
    control,
    data,
    form,
)


def reduced_axes(axes: Array, rank: int) -> tuple[int, ...]:
    """Return the axes counted from the front, each once."""
    require(axes.ndim == 1, "C1", f"axes have shape {axes.shape}, a vector is needed")
    return tuple(sorted({normal_axis(int(axis), rank) for axis in axes}))


def reduction_shape(input: Shape, *, axes: Array, keep_dimensions: int) -> Shape:
    """Return the input's shape with the axes gone, or 1 where dimensions are kept; (1,) if nothing is left."""
    require_rank(input, range(1, 5), "input")
    gone = reduced_axes(axes, len(input))
    if keep_dimensions > 0:
        return tuple(1 if axis in gone else extent for axis, extent in enumerate(input))
    return tuple(extent for axis, extent in enumerate(input) if axis not in gone) or (1,)


def mean(input: Array, *, axes: Array, keep_dimensions: int) -> Array:
    """Return the mean of floats."""
    gone = reduced_axes(axes, input.ndim)
    result = np.mean(input, axis=gone, keepdims=keep_dimensions > 0, dtype=input.dtype)
    return np.atleast_1d(result)


def mean_of_codes(input: Array, *, axes: Array, keep_dimensions: int) -> Array:
    """Return the sum of codes divided by their count, truncated toward zero."""
    gone = reduced_axes(axes, input.ndim)
    count = math.prod(input.shape[axis] for axis in gone)
    sums = np.sum(input, axis=gone, keepdims=keep_dimensions > 0, dtype=np.int64)
    return np.atleast_1d(np.sign(sums) * (np.abs(sums) // count)).astype(input.dtype)


DECLARATIONS = (
    Declaration(
        OperationType.MEAN,
        since=V1_1,
        forms=(form(data("input"), control("axes", I32), control("keep_dimensions"), level=V1_1),),
        variants=(
            Variant({"T": F32}, V1_1, direct(mean)),
            Variant({"T": Q8}, V1_1, direct(mean_of_codes)),
            Variant({"T": F16}, V1_2, half(direct(mean))),
            Variant({"T": Q8S}, V1_3, direct(mean_of_codes)),
        ),
        shape=reduction_shape,
        same_quantization=True,
    ),
)
