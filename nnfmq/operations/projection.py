"""LSH_PROJECTION: locality-sensitive hashing; similar inputs share many bits.

Each seed gives one bit: the sign of a weighted sum, over the rows of the input, of the fingerprint of seed and row. The
fingerprint is converted from int64 to float64. The sum is taken in the order of the rows, as in TFLite, because its
sign may depend on the order. A float16 seed is converted to float32; the row's bytes are hashed unchanged.

    C1 the seeds have shape (hashes, bits), bits at most 32      C2 the type is 1, 2 or 3
    C3 DENSE has a weight for each row, the sparse types have no weights
"""

from __future__ import annotations

from enum import IntEnum
from functools import partial

import numpy as np

from nnfmq.hal.types import OperationType
from nnfmq.operations.farmhash import fingerprint64
from nnfmq.operations.shapes import require
from nnfmq.operations.signature import (
    F16,
    F32,
    I32,
    Q8,
    V1_0,
    V1_2,
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


class ProjectionType(IntEnum):
    """SPARSE types return one number for each hash (offset by its index in SPARSE), DENSE one output for each bit."""

    SPARSE_DEPRECATED = 1
    DENSE = 2
    SPARSE = 3


def projection_shape(seeds: Shape, input: Shape, weights: Shape | None, *, type: int) -> Shape:
    """Return (hashes,), or (hashes · bits,) for DENSE."""
    require(len(seeds) == 2 and seeds[1] <= 32, "C1", f"seeds of shape {seeds}, (hashes, at most 32) is required")
    require(bool(input), "R1", "the input has no rows")
    require(type in tuple(ProjectionType), "C2", f"type {type}, allowed are 1, 2 and 3")
    if type != ProjectionType.DENSE:
        require(weights is None, "C3", f"weights are given for type {type}, which has none")
        return seeds[:1]
    require(weights == input[:1], "C3", f"weights of shape {weights} for {input[0]} rows")
    return (seeds[0] * seeds[1],)


def plan_projection(seeds: Tensor, input: Tensor, weights: Tensor | None, *, output: Tensor, type: int) -> Run:
    """Plan dense bits, or sparse numbers made of them."""
    return dense_projection if type == ProjectionType.DENSE else partial(sparse_projection, type=type)


def dense_projection(seeds: Array, input: Array, weights: Array | None) -> Array:
    """Return a 0 or 1 for each seed."""
    rows = np.ascontiguousarray(input).reshape(len(input), -1).view(np.uint8)
    keys = np.empty((len(rows), 4 + rows.shape[1]), np.uint8)
    keys[:, 4:] = rows
    bits = np.empty(seeds.size, np.int32)
    for position, seed in enumerate(seeds.astype("<f4").reshape(-1, 1).view(np.uint8)):
        keys[:, :4] = seed
        terms = fingerprint64(keys).view(np.int64).astype(np.float64)
        weighted = terms if weights is None else weights.astype(np.float64) * terms
        bits[position] = np.add.accumulate(weighted)[-1] > 0
    return bits


def sparse_projection(seeds: Array, input: Array, weights: Array | None, *, type: int) -> Array:
    """Return the bits of each hash as a number, the first bit highest; for SPARSE plus the hash's index · 2^bits."""
    hashes, count = seeds.shape
    bits = dense_projection(seeds, input, weights).reshape(hashes, count)
    numbers = bits.astype(np.int64) @ (1 << np.arange(count - 1, -1, -1, dtype=np.int64))
    if type == ProjectionType.SPARSE:
        numbers += np.arange(hashes, dtype=np.int64) << count
    return numbers.astype(np.int32)


DECLARATIONS = (
    Declaration(
        OperationType.LSH_PROJECTION,
        since=V1_0,
        overloads=(
            overload(data("seeds", "H"), data("input"), data("weights", "H", optional=True), attribute("type")),
        ),
        variants=tuple(
            Variant({"H": hash, "T": type}, level, plan_projection)
            for hash, level in ((F32, V1_0), (F16, V1_2))
            for type in (F16, F32, I32, Q8)
        ),
        shape=projection_shape,
        outputs=(I32,),
    ),
)
