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
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from nnfmq.hal.types import OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Array, Run, Shape, Tensor
from nnfmq.operations.shapes import require

__all__ = [
    "ProjectionType",
    "dense_projection",
    "fingerprint64",
    "plan_projection",
    "projection_shape",
    "sparse_projection",
]


# ----------------------------------------------------------------------------------------------------------------------
# FarmHash's Fingerprint64 of many byte strings of one length; it is the same on every machine.
#
# Takes the rows of a uint8 array and returns a uint64 for each. Every step is arithmetic modulo 2^64 on whole columns,
# so that a thousand keys cost little more than one. The length selects the algorithm: up to 7, 16, 32, 64 bytes, or
# more. Strings of less than 4 bytes, seeds and other FarmHash functions are not implemented.


Bytes: TypeAlias = npt.NDArray[np.uint8]
Words: TypeAlias = npt.NDArray[np.uint64]
Pair: TypeAlias = tuple[Words, Words]

_K0, _K1, _K2 = np.uint64(0xC3A5C85C97CB3127), np.uint64(0xB492B66FBE98F273), np.uint64(0x9AE16A3B2F90404F)
_SEED = np.uint64(81)


def fingerprint64(keys: Bytes) -> Words:
    """Return the hash of each row of `keys`, of 4 bytes or more."""
    length = keys.shape[1]
    if length <= 7:
        return _hash_4_to_7(keys, length)
    if length <= 16:
        return _hash_8_to_16(keys, length)
    if length <= 32:
        return _hash_17_to_32(keys, length)
    if length <= 64:
        return _hash_33_to_64(keys, length)
    return _long(keys, length)


def _fetch64(keys: Bytes, at: int) -> Words:
    return np.ascontiguousarray(keys[:, at : at + 8]).view("<u8")[:, 0]


def _fetch32(keys: Bytes, at: int) -> Words:
    return np.ascontiguousarray(keys[:, at : at + 4]).view("<u4")[:, 0].astype(np.uint64)


def _rotated(value: Words, shift: int) -> Words:
    return value >> np.uint64(shift) | value << np.uint64(64 - shift)


def _shift_mixed(value: Words) -> Words:
    return value ^ value >> np.uint64(47)


def _hash_16(u: Words, v: Words, multiplier: Words | np.uint64) -> Words:
    a = _shift_mixed((u ^ v) * multiplier)
    return _shift_mixed((v ^ a) * multiplier) * multiplier


def _multiplier(length: int) -> np.uint64:
    return np.uint64((int(_K2) + 2 * length) % (1 << 64))


def _hash_4_to_7(keys: Bytes, length: int) -> Words:
    first = np.uint64(length) + (_fetch32(keys, 0) << np.uint64(3))
    return _hash_16(first, _fetch32(keys, length - 4), _multiplier(length))


def _hash_8_to_16(keys: Bytes, length: int) -> Words:
    multiplier = _multiplier(length)
    a, b = _fetch64(keys, 0) + _K2, _fetch64(keys, length - 8)
    c = _rotated(b, 37) * multiplier + a
    d = (_rotated(a, 25) + b) * multiplier
    return _hash_16(c, d, multiplier)


def _hash_17_to_32(keys: Bytes, length: int) -> Words:
    multiplier = _multiplier(length)
    a, b = _fetch64(keys, 0) * _K1, _fetch64(keys, 8)
    c, d = _fetch64(keys, length - 8) * multiplier, _fetch64(keys, length - 16) * _K2
    return _hash_16(
        _rotated(a + b, 43) + _rotated(c, 30) + d,
        a + _rotated(b + _K2, 18) + c,
        multiplier,
    )


def _hash_33_to_64(keys: Bytes, length: int) -> Words:
    multiplier = _multiplier(length)
    a, b = _fetch64(keys, 0) * _K2, _fetch64(keys, 8)
    c, d = _fetch64(keys, length - 8) * multiplier, _fetch64(keys, length - 16) * _K2
    y = _rotated(a + b, 43) + _rotated(c, 30) + d
    z = _hash_16(y, a + _rotated(b + _K2, 18) + c, multiplier)
    e, f = _fetch64(keys, 16) * multiplier, _fetch64(keys, 24)
    g, h = (y + _fetch64(keys, length - 32)) * multiplier, (z + _fetch64(keys, length - 24)) * multiplier
    return _hash_16(
        _rotated(e + f, 43) + _rotated(g, 30) + h,
        e + _rotated(f + a, 18) + g,
        multiplier,
    )


def _weak_hash(keys: Bytes, at: int, a: Words, b: Words) -> Pair:
    """Mix 32 bytes into two seeds."""
    w, x, y, z = (_fetch64(keys, at + step) for step in (0, 8, 16, 24))
    a = a + w
    b = _rotated(b + a + z, 21)
    c = a
    a = a + x + y
    return a + z, b + _rotated(a, 44) + c


def _long(keys: Bytes, length: int) -> Words:
    """Hash strings of more than 64 bytes, in blocks of 64; the last block overlaps the one before to be complete."""
    start = np.full(len(keys), _SEED)
    y = start * _K1 + np.uint64(113)
    z = _shift_mixed(y * _K2 + np.uint64(113)) * _K2
    zero = np.zeros(len(keys), np.uint64)
    v, w = (zero, zero), (zero, zero)
    x = start * _K2 + _fetch64(keys, 0)
    end = (length - 1) // 64 * 64
    for at in range(0, end, 64):
        x, y, z, v, w = _mixed_block(keys, at, x, y, z, v, w, _K1, np.uint64(1))
    multiplier = _K1 + ((z & np.uint64(0xFF)) << np.uint64(1))
    w = (w[0] + np.uint64(length - 1 & 63), w[1])
    v = (v[0] + w[0], v[1])
    w = (w[0] + v[0], w[1])
    x, y, z, v, w = _mixed_block(keys, length - 64, x, y, z, v, w, multiplier, np.uint64(9))
    return _hash_16(
        _hash_16(v[0], w[0], multiplier) + _shift_mixed(y) * _K0 + z,
        _hash_16(v[1], w[1], multiplier) + x,
        multiplier,
    )


def _mixed_block(
    keys: Bytes,
    at: int,
    x: Words,
    y: Words,
    z: Words,
    v: Pair,
    w: Pair,
    multiplier: Words | np.uint64,
    factor: np.uint64,
) -> tuple[Words, Words, Words, Pair, Pair]:
    """Mix 64 bytes; the last block of a string uses another multiplier and factor."""
    x = _rotated(x + y + v[0] + _fetch64(keys, at + 8), 37) * multiplier
    y = _rotated(y + v[1] + _fetch64(keys, at + 48), 42) * multiplier
    x = x ^ w[1] * factor
    y = y + v[0] * factor + _fetch64(keys, at + 40)
    z = _rotated(z + w[0], 33) * multiplier
    v = _weak_hash(keys, at, v[1] * multiplier, x + w[0])
    w = _weak_hash(keys, at + 32, z + w[1], y + _fetch64(keys, at + 16))
    return z, y, x, v, w


# ----------------------------------------------------------------------------------------------------------------------
# LSH_PROJECTION: locality-sensitive hashing; similar inputs share many bits.


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
    op.Declaration(
        OperationType.LSH_PROJECTION,
        since=op.V1_0,
        overloads=(
            op.overload(
                op.data("seeds", "H"), op.data("input"), op.data("weights", "H", optional=True), op.attribute("type")
            ),
        ),
        variants=tuple(
            op.Variant({"H": hash, "T": type}, level, plan_projection)
            for hash, level in ((op.F32, op.V1_0), (op.F16, op.V1_2))
            for type in (op.F16, op.F32, op.I32, op.Q8)
        ),
        shape=projection_shape,
        outputs=(op.I32,),
    ),
)
