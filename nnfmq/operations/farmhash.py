"""FarmHash's Fingerprint64 of many byte strings of one length; it is the same on every machine.

Takes the rows of a uint8 array and returns a uint64 for each. Every step is arithmetic modulo 2^64 on whole columns, so
that a thousand keys cost little more than one. The length selects the algorithm: up to 7, 16, 32, 64 bytes, or more.
Strings of less than 4 bytes, seeds and other FarmHash functions are not implemented.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

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
