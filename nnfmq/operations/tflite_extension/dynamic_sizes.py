"""RANGE, SHAPE, WHERE and UNIQUE: results whose shape depends on values or, for SHAPE, whose values are a shape.

C1 the step is not 0 and leads from start to limit; the numbers are finite
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nnfmq.hal.extensions import TENSOR_INT64, TfliteOperation
from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Array, Run, Shape, Tensor
from nnfmq.operations.kernel_adapters import stateless
from nnfmq.operations.shapes import DATA_DEPENDENT, require, require_rank, require_size
from nnfmq.operations.tflite_extension import ANY_TENSOR, any_tensor_variants, declare


def range_shape(*, start: Array, limit: Array, delta: Array) -> Shape:
    """Return the number of elements from `start` up to `limit`, which is not one of them, in steps of `delta`."""
    first, last, step = (np.asarray(value).reshape(-1)[0].item() for value in (start, limit, delta))
    finite = all(map(math.isfinite, (first, last, step)))
    leads = finite and step != 0 and (first == last or (last > first) == (step > 0))
    require(leads, "C1", f"the range from {first} to {last} in steps of {step}")
    if isinstance(first, int):
        return (-(-abs(last - first) // abs(step)),)
    count = math.ceil(abs(np.float32(np.float32(last - first) / np.float32(step))))
    require_size((count,), 4)
    return (count,)


def plan_range(*, output: Tensor, start: Array, limit: Array, delta: Array) -> Run:
    """Plan the numbers, each the sum of the one before and the step."""
    steps = np.full(output.shape, np.asarray(delta).reshape(-1)[0], output.dtype)
    steps[:1] = np.asarray(start).reshape(-1)[0]
    numbers = np.cumsum(steps, dtype=output.dtype)
    return numbers.copy


def shape_shape(input: Shape) -> Shape:
    """Return the input's rank."""
    return (len(input),)


def plan_shape(input: Tensor, *, output: Tensor) -> Run:
    """Plan the input's dimensions."""
    dimensions = np.array(input.shape, np.int32)
    return lambda array: dimensions.copy()


def where_shape(condition: Shape) -> Shape:
    """Return the count of true elements, which depends on the data, and the rank."""
    require_rank(condition, range(1, 9), "the condition")
    return (DATA_DEPENDENT, len(condition))


def where(condition: Array) -> Array:
    """Return the indexes of elements that are not 0, in order."""
    return np.argwhere(condition).astype(np.int32)


def unique_shape(input: Shape) -> tuple[Shape, Shape]:
    """Return the count of different values, which depends on the data, and the input's shape."""
    require_rank(input, range(1, 2), "the input")
    return (DATA_DEPENDENT,), input


def unique(input: Array) -> tuple[Any, ...]:
    """Return the different values in the order of their first occurrence, and the index of each element's value."""
    values, first, inverse = np.unique(input, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    return values[order], position[inverse.reshape(-1)].astype(np.int32)


DECLARATIONS = (
    declare(
        TfliteOperation.RANGE,
        op.attribute("start", "T"),
        op.attribute("limit", "T"),
        op.attribute("delta", "T"),
        variants=op.of_types(plan_range, op.F32, op.I32, TENSOR_INT64),
        shape=range_shape,
    ),
    declare(
        TfliteOperation.SHAPE,
        op.data("input"),
        variants=any_tensor_variants(plan_shape),
        shape=shape_shape,
        outputs=(op.I32,),
        zero_sized=True,
    ),
    declare(
        TfliteOperation.WHERE,
        op.data("condition"),
        variants=op.of_types(stateless(where), op.B8, *(kind for kind in ANY_TENSOR if kind != op.B8)),
        shape=where_shape,
        outputs=(op.I32,),
    ),
    declare(
        TfliteOperation.UNIQUE,
        op.data("input"),
        variants=any_tensor_variants(stateless(unique)),
        shape=unique_shape,
        outputs=("T", op.I32),
    ),
)
