"""The random source of random graphs: numbers, dimensions, values and scales from one seed.

All values are derived from the raw bits of PCG64, whose stream NumPy guarantees (NEP 19), and not from NumPy's
distributions, which may change. So a seed gives the same graph everywhere. The ranges are those of AOSP's random graph
generator: floats in [-2, 2), so that sums and products stay small; int32 in [0, 255]; quantized values in their whole
range; scales in [0.1, 2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct

from nnfmq.conformance.testmodels import Array
from nnfmq.hal.types import OperandType
from nnfmq.operations.signature import NUMPY_TYPES, Shape

Item = TypeVar("Item")

_MAX_REAL = 2.0
_MAX_INTEGER = 255
_SCALES = (0.1, 2.0)


class Sign(Enum):
    """The sign that an operation requires of an argument's real values."""

    ANY = "any"
    NOT_NEGATIVE = "not negative"
    NOT_ZERO = "not zero"
    POSITIVE = "positive"

    def is_satisfied(self, reals: Array) -> bool:
        """Return True if all values have this sign."""
        if self is Sign.NOT_ZERO:
            return bool(np.all(reals != 0))
        if self is Sign.POSITIVE:
            return bool(np.all(reals > 0))
        return self is Sign.ANY or bool(np.all(reals >= 0))


class Discard(Exception):
    """The sample exceeds the limits, or its result cannot be evaluated. The caller generates another one."""


class GraphLimits(Struct, frozen=True):
    """Limits of a dimension, of the elements of a tensor, and of the multiply-accumulates of an operation."""

    dimension: int
    elements: int = 10_000
    macs: int = 1 << 22


class Quantization(Struct, frozen=True):
    """Scale, exact in float32, and zero point."""

    scale: float = 0.0
    zero_point: int = 0


class RandomSource:
    """A stream of random choices."""

    def __init__(self, seed: Sequence[int], limits: GraphLimits) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(list(seed)))
        self.limits = limits

    def fractions(self, count: int) -> Array:
        """Return `count` float64 numbers in [0, 1)."""
        raw = np.asarray(self._bits.random_raw(count), np.uint64)
        return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def real(self, low: float, high: float) -> float:
        """Return a number in [low, high), exact in float32."""
        return float(np.float32(low + (high - low) * self.fractions(1)[0]))

    def integer(self, low: int, high: int) -> int:
        """Return an integer from `low` to `high`, both included."""
        return low + int(self.fractions(1)[0] * (high - low + 1))

    def chance(self, probability: float = 0.5) -> bool:
        """Return True with this probability."""
        return bool(self.fractions(1)[0] < probability)

    def choice(self, items: Sequence[Item]) -> Item:
        """Return one of the items."""
        return items[self.integer(0, len(items) - 1)]

    def permutation(self, count: int) -> list[int]:
        """Return a permutation of 0 to `count` - 1."""
        return [int(position) for position in np.argsort(self.fractions(count), kind="stable")]

    def dimension(self, max_dimension: int) -> int:
        """Return a dimension from 1 to `max_dimension`.

        In half of the cases it is log-uniform, so that small dimensions are frequent.
        """
        if self.chance():
            return self.integer(1, max_dimension)
        return max(1, min(max_dimension, int((max_dimension + 1) ** float(self.fractions(1)[0]))))

    def shape(self, rank: int, max_elements: int | None = None) -> Shape:
        """Return dimensions whose product is within the limit; in half of the cases of similar size."""
        remaining = self.limits.elements if max_elements is None else max_elements
        even = 2 * math.ceil(remaining ** (1 / rank))
        max_dimension = min(self.limits.dimension, even) if self.chance() else self.limits.dimension
        dimensions = [1] * rank
        for axis in self.permutation(rank):
            dimensions[axis] = self.dimension(max(1, min(max_dimension, remaining)))
            remaining //= dimensions[axis]
        return tuple(dimensions)

    def activation(self) -> int:
        """Return the code of a fused activation; in half of the cases none, because the others clamp results."""
        return 0 if self.chance() else self.integer(1, 3)

    def divisor(self, number: int, max_divisor: int | None = None) -> int:
        """Return one of the divisors of `number`, up to `max_divisor`."""
        limit = number if max_divisor is None else min(max_divisor, number)
        return self.choice([d for d in range(1, limit + 1) if number % d == 0])

    def quantization(self, type: OperandType) -> Quantization:
        """Return a scale and zero point for a tensor of this type; none for types that have none."""
        if type in FIXED_QUANTIZATION:
            return FIXED_QUANTIZATION[type]
        scale = self.real(*_SCALES)
        if type not in ASYMMETRIC:
            return Quantization(scale)
        zero = 0 if self.chance(1 / 8) else self.integer(0, 254)  # HAL 1.1 can only pad with 0
        return Quantization(scale, zero - (128 if type == OperandType.TENSOR_QUANT8_ASYMM_SIGNED else 0))

    def values(self, type: OperandType, shape: Shape, sign: Sign, zero_point: int) -> Array:
        """Return an array of this type; `sign` is that of the values minus the zero point."""
        dtype = NUMPY_TYPES[type]
        fractions = self.fractions(math.prod(shape)).reshape(shape)
        if dtype.kind == "f":
            return _reals(fractions, sign).astype(dtype)
        low, high = _bounds(type, dtype, sign, zero_point)
        integers: Array = (low + np.floor(fractions * (high - low + 1))).astype(dtype)
        if sign is Sign.NOT_ZERO and type != OperandType.TENSOR_BOOL8:
            integers[integers == zero_point] += 1
        return integers


ASYMMETRIC = (OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED)
FIXED_QUANTIZATION = {
    OperandType.TENSOR_QUANT16_ASYMM: Quantization(0.125),
    **dict.fromkeys(
        (type for type in OperandType if "QUANT" not in type.name or "PER_CHANNEL" in type.name), Quantization()
    ),
}
"""Types whose scale is fixed: 0.125 for boxes, none for the others."""


def _reals(fractions: Array, sign: Sign) -> Array:
    low = 0.0 if sign in (Sign.NOT_NEGATIVE, Sign.POSITIVE) else -_MAX_REAL
    reals: Array = low + (_MAX_REAL - low) * fractions
    if sign in (Sign.POSITIVE, Sign.NOT_ZERO):
        reals[np.abs(reals) < 2.0**-12] = 2.0**-12
    return reals


def _bounds(type: OperandType, dtype: np.dtype[Any], sign: Sign, zero_point: int) -> tuple[int, int]:
    if type == OperandType.TENSOR_BOOL8:
        return 0, 1
    if type == OperandType.TENSOR_INT32:
        return int(sign in (Sign.POSITIVE, Sign.NOT_ZERO)), _MAX_INTEGER
    info = np.iinfo(dtype)
    low = info.min + (type == OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL)
    low = {Sign.NOT_NEGATIVE: zero_point, Sign.POSITIVE: zero_point + 1}.get(sign, low)
    return int(low), int(info.max)
