"""From exact sums to codes: the two roundings of `operations.fixed_point.multiply` in vectors of 32 bits.

Sums, bias included, must fit 31 bits after the left shift, and half of the right shift on top: `Requantization.of`
looks at the bounds and declines what does not. Every channel has a multiplier, a shift and a bias of its own; where
the model has one for all it is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nnfmq.engines.compiled.emission import F32, I8, I32, I64, Emitter, Value, vector
from nnfmq.operations.fixed_point import INT32_MAX, Ints
from nnfmq.operations.quantization import Multipliers

__all__ = ["Codomain", "Requantization"]

_BIAS, _MANTISSA, _HALF, _RIGHT, _LEFT, _ZERO, _LOW, _HIGH, _CENTRE = range(9)


@dataclass(frozen=True, slots=True)
class Codomain:
    """The codes that come out, and the zero point of those that went in (`centre`)."""

    zero_point: int
    low: int
    high: int
    centre: int = 0


@dataclass(frozen=True, slots=True)
class Requantization:
    """How sums become codes; every number is in a constant made by `constants`, so that layers of one shape share code.

    `channels` is their number, filled up to whole vectors.
    """

    channels: int
    shifts_left: bool
    shifts_by_nothing: bool

    @classmethod
    def of(cls, multipliers: Multipliers, bias: Ints, bounds: Ints, channels: int) -> Requantization | None:
        """Return the form, or None where 32 bits do not hold what is between. `bounds` are on |sum| without bias."""
        left, right = np.maximum(multipliers.shifts, 0), np.maximum(-multipliers.shifts, 0)
        most = (np.abs(bias) + bounds) << left
        if int((most + (np.int64(1) << right)).max(initial=0)) > INT32_MAX - 255:  # a zero point is added last
            return None
        return cls(channels, bool(left.any()), not bool(right.all()))

    def constants(self, multipliers: Multipliers, bias: Ints, codes: Codomain) -> bytes:
        """Return bias, mantissas, halves, right and left shifts, and the numbers of `codes`, each for all channels."""
        left, right = np.maximum(multipliers.shifts, 0), np.maximum(-multipliers.shifts, 0)
        halves = (np.int64(1) << right) >> 1
        table = np.zeros((9, self.channels), np.int32)
        for row, values in enumerate((bias, multipliers.mantissas, halves, right, left)):
            table[row, : len(bias)] = values
        table[_ZERO:] = np.array([[codes.zero_point], [codes.low], [codes.high], [codes.centre]])
        return table.tobytes()

    def bias(self, e: Emitter, constants: Value, channel: Value, lanes: int) -> Value:
        """Load the biases of `lanes` channels."""
        return self._row(e, constants, _BIAS, channel, lanes)

    def codes(self, e: Emitter, sums: Value, constants: Value, channel: Value) -> Value:
        """Return the codes of a vector of sums, as whole numbers of 32 bits."""
        lanes = sums.type.count
        if self.shifts_left:
            sums = e.b.shl(sums, self._row(e, constants, _LEFT, channel, lanes))
        high = _high_product(e, sums, self._row(e, constants, _MANTISSA, channel, lanes))
        right = self._row(e, constants, _RIGHT, channel, lanes)
        tie = e.b.ashr(high, e.splat(I32, 31, lanes))
        if self.shifts_by_nothing:
            none = e.b.icmp_signed("==", right, e.splat(I32, 0, lanes))
            tie = e.b.select(none, e.splat(I32, 0, lanes), tie)
        nudged = e.b.add(e.b.add(high, tie), self._row(e, constants, _HALF, channel, lanes))
        shifted = e.b.ashr(nudged, right)
        zero, low, high = (self._row(e, constants, row, channel, lanes) for row in (_ZERO, _LOW, _HIGH))
        return e.clamp(e.b.add(shifted, zero), low, high)

    def centre(self, e: Emitter, constants: Value) -> Value:
        """Load the zero point of the codes that come in."""
        return e.load(I32, constants, 4 * _CENTRE * self.channels)

    def narrowed(self, e: Emitter, codes: Value) -> Value:
        """Return codes as bytes."""
        return e.b.trunc(codes, vector(I8, codes.type.count))

    def _row(self, e: Emitter, constants: Value, row: int, channel: Value, lanes: int) -> Value:
        offset = e.add(4 * row * self.channels, e.mul(channel, 4))
        return e.load(vector(I32, lanes), constants, offset)


def _high_product(e: Emitter, sums: Value, mantissas: Value) -> Value:
    """SaturatingRoundingDoublingHighMul by even and odd places, whose products have 64 bits each.

    The mantissa is never the least int32, so nothing saturates.
    """
    lanes = sums.type.count
    wide = vector(I64, lanes // 2)
    nudge = e.splat(I64, 1 << 30, lanes // 2)
    even, odd = (
        e.b.add(e.b.mul(first, second), nudge)
        for first, second in zip(_even_and_odd(e, sums, wide), _even_and_odd(e, mantissas, wide), strict=True)
    )
    low = e.b.bitcast(e.b.lshr(even, e.splat(I64, 31, lanes // 2)), sums.type)
    high = e.b.bitcast(e.b.shl(odd, e.splat(I64, 1, lanes // 2)), sums.type)
    return e.shuffle(low, high, [place + lanes * (place % 2) for place in range(lanes)])


def _even_and_odd(e: Emitter, values: Value, wide: Value) -> tuple[Value, Value]:
    """Return every second value as 64 bits, from the first and from the second on."""
    pairs, by = e.b.bitcast(values, wide), e.splat(I64, 32, wide.count)
    return e.b.ashr(e.b.shl(pairs, by), by), e.b.ashr(pairs, by)


def whole(e: Emitter, sums: Value) -> Value:
    """Return float32 sums that are exact whole numbers as such."""
    assert sums.type.element == F32, "sums of floats"
    return e.b.fptosi(sums, vector(I32, sums.type.count))
