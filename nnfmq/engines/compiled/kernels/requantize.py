"""From exact sums to codes: the two roundings of `operations.fixed_point.multiply` in vectors of 32 bits.

Both are shifts to the right of (sum · mantissa + nudge), a number of 64 bits, but that a negative sum is nudged by one
less between them. Sums are taken doubled, so that 32 bits are shifted out first: `Rounding.of` declines what 32 bits do
not hold then. A product's channels have a multiplier, a shift and a bias each; where the model has one for all it is
repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from nnfmq.engines.compiled.ir_builder import F32, I8, I16, I32, I64, KernelBuilder, Value, vector
from nnfmq.operations.fixed_point import INT32_MAX, Ints
from nnfmq.operations.quantization import OutputMultipliers
from nnfmq.operations.signature import Array

__all__ = ["NO_REQUANTIZATION", "ROUNDING_ROWS", "Codomain", "Requantization", "Rounding", "rounding_rows", "whole"]

_EVEN, _ODD, _EVEN_NUDGES, _ODD_NUDGES, _RIGHT, _LEFT, ROUNDING_ROWS = range(7)


@dataclass(frozen=True, slots=True)
class Codomain:
    """The codes that come out, and the zero point of those that went in (`centre`).

    Weights are less by `excess` than they should be.
    """

    zero_point: int
    low: int
    high: int
    centre: int = 0
    excess: int = 0


@dataclass(frozen=True, slots=True)
class Rounding:
    """What of the two roundings there is to do; their numbers are rows of constants.

    Sums that are not shifted to the left (by one bit at least) are given twice as large as they are.
    """

    shifts_left: bool
    shifts_by_nothing: bool

    @classmethod
    def of(cls, multipliers: OutputMultipliers, bias: Ints, bounds: Ints, doubled: bool = True) -> Rounding | None:
        """Return the form, or None where 32 bits do not hold what is between. `bounds` are on |sum| without bias.

        Where sums cannot be given `doubled` all of them are shifted to the left.
        """
        left, right = np.maximum(multipliers.shifts, 0), np.maximum(-multipliers.shifts, 0)
        room = (INT32_MAX - (np.int64(1) << right)) >> (left + 1)  # what is shifted to the left might not fit 64 bits
        if bool((np.abs(bias) + bounds > room).any()):
            return None
        return cls(bool(left.any()) or not doubled, not bool(right.all()))

    @property
    def factor(self) -> int:
        """How many times a sum is to be given."""
        return 1 if self.shifts_left else 2

    def rounded(self, kb: KernelBuilder, sums: Value, row: Callable[[int], Value]) -> Value:
        """Return sums times their multipliers, rounded. `row` loads one of the rows that `rounding_rows` made.

        A tie between two numbers goes up where the sum is positive, and down where it is negative. Instead of the
        product's sign that of the sum decides: the product is 0 only for -1 times a half, and then both give 0.
        """
        lanes = sums.type.count
        if self.shifts_left:
            sums = kb.ir.shl(sums, row(_LEFT))
        wide = vector(I64, lanes // 2)
        even = _nudged(kb, _low(kb, sums, wide), row(_EVEN), row(_EVEN_NUDGES))
        odd = _nudged(
            kb, kb.ir.ashr(kb.ir.bitcast(sums, wide), kb.splat(I64, 32, lanes // 2)), row(_ODD), row(_ODD_NUDGES)
        )
        even = kb.ir.bitcast(kb.ir.lshr(even, kb.splat(I64, 32, lanes // 2)), sums.type)
        high = kb.shuffle(even, kb.ir.bitcast(odd, sums.type), [place + lanes * (place % 2) for place in range(lanes)])
        right, tie = row(_RIGHT), kb.ir.ashr(sums, kb.splat(I32, 31, lanes))
        if self.shifts_by_nothing:
            none = kb.ir.icmp_signed("==", right, kb.splat(I32, 0, lanes))
            tie = kb.ir.select(none, kb.splat(I32, 0, lanes), tie)
        return kb.ir.ashr(kb.ir.add(high, tie), right)


def _nudged(kb: KernelBuilder, values: Value, multipliers: Value, nudges: Value) -> Value:
    """Return products of 64 bits and what is added to them."""
    return kb.ir.add(kb.ir.mul(values, _low(kb, multipliers, values.type)), kb.ir.bitcast(nudges, values.type))


def _low(kb: KernelBuilder, values: Value, wide: Value) -> Value:
    """Return every second number, from the first on, in 64 bits."""
    by = kb.splat(I64, 32, wide.count)
    return kb.ir.ashr(kb.ir.shl(kb.ir.bitcast(values, wide), by), by)


def rounding_rows(multipliers: OutputMultipliers) -> Array:
    """Return what `Rounding.rounded` loads, for an even number of channels.

    Mantissas where the even ones are taken, and where the odd ones are; what is added to their products; right and left
    shifts.
    """
    left, right = np.maximum(multipliers.shifts, 0), np.maximum(-multipliers.shifts, 0)
    nudges = (np.int64(1) << 31) + (((np.int64(1) << right) >> 1) << 32)
    rows = np.zeros((ROUNDING_ROWS, len(left)), np.int32)
    rows[_EVEN], rows[_ODD, ::2] = multipliers.multipliers, multipliers.multipliers[1::2]
    rows[_EVEN_NUDGES], rows[_ODD_NUDGES] = (nudges[first::2].astype(np.int64).view(np.int32) for first in (0, 1))
    rows[_RIGHT], rows[_LEFT] = right, left + 1
    return rows


_ROW_BYTES = 64  # as long as the longest vector
_ZERO, _LOW, _HIGH, _CENTRE, _EXCESS, _HEAD_ROWS = range(6)
_BIAS, _CHANNEL_ROWS = ROUNDING_ROWS, ROUNDING_ROWS + 1


@dataclass(frozen=True, slots=True)
class Requantization:
    """How a product's sums become codes.

    Every number is in a constant: first rows for all channels, then those of each vector of channels. So layers of any
    shape share code.
    """

    rounding: Rounding

    def constants(self, multipliers: OutputMultipliers, bias: Ints, codes: Codomain, lanes: int) -> bytes:
        """Return the constant for channels that fill whole vectors."""
        head = np.zeros((_HEAD_ROWS, _ROW_BYTES // 2), np.int16)
        head[:_CENTRE] = np.array([[codes.zero_point], [codes.low], [codes.high]])
        head[_CENTRE].view(np.int32)[:], head[_EXCESS].view(np.int32)[:] = codes.centre, codes.excess
        biases = bias.astype(np.int32) * np.int32(self.rounding.factor)
        rows = np.concatenate([rounding_rows(multipliers), biases[None]])
        return head.tobytes() + rows.reshape(_CHANNEL_ROWS, -1, lanes).swapaxes(0, 1).tobytes()

    def bias(self, kb: KernelBuilder, constants: Value, channel: Value, lanes: int) -> Value:
        """Load the biases of `lanes` channels, as large as the sums are to be."""
        return self._rows(kb, constants, channel, lanes)(_BIAS)

    def codes(self, kb: KernelBuilder, sums: Sequence[Value], constants: Value, channel: Value) -> list[Value]:
        """Return the codes of neighbouring vectors of sums, the first of which is that of `channel`, as bytes."""
        lanes = sums[0].type.count
        rounded = [
            self.rounding.rounded(kb, value, self._rows(kb, constants, kb.add(channel, n * lanes), lanes))
            for n, value in enumerate(sums)
        ]
        pairs = [_joined(kb, rounded[n : n + 2]) for n in range(0, len(rounded), 2)]
        return [self._narrowed(kb, values, constants) for values in pairs]

    def _narrowed(self, kb: KernelBuilder, values: Value, constants: Value) -> Value:
        """Return codes as bytes: held to 16 bits first, where the zero point is added."""
        count = values.type.count
        low, high = kb.splat(I32, -(1 << 15), count), kb.splat(I32, (1 << 15) - 1, count)
        short = kb.ir.trunc(kb.clamp(values, low, high), vector(I16, count))
        zero, low, high = (kb.load(short.type, constants, _ROW_BYTES * row) for row in (_ZERO, _LOW, _HIGH))
        return kb.ir.trunc(kb.clamp(kb.intrinsic("llvm.sadd.sat", short, zero), low, high), vector(I8, count))

    def centre(self, kb: KernelBuilder, constants: Value) -> Value:
        """Load the zero point of the codes that come in."""
        return kb.load(I32, constants, _ROW_BYTES * _CENTRE)

    def excess(self, kb: KernelBuilder, constants: Value) -> Value:
        """Load what weights lack."""
        return kb.load(I32, constants, _ROW_BYTES * _EXCESS)

    def _rows(self, kb: KernelBuilder, constants: Value, channel: Value, lanes: int) -> Callable[[int], Value]:
        """Return what loads one of the rows of a vector of channels."""
        first = kb.at(constants, kb.mul(channel, 4 * _CHANNEL_ROWS))
        return lambda row: kb.load(vector(I32, lanes), first, _ROW_BYTES * _HEAD_ROWS + 4 * lanes * row)


NO_REQUANTIZATION = Requantization(Rounding(False, False))
"""What products are planned with until it is known which numbers their sums take."""


def _joined(kb: KernelBuilder, values: Sequence[Value]) -> Value:
    """Return one vector, or two as one."""
    if len(values) == 1:
        return values[0]
    return kb.shuffle(values[0], values[1], range(2 * values[0].type.count))


def whole(kb: KernelBuilder, sums: Value) -> Value:
    """Return float32 sums that are exact whole numbers as such."""
    assert sums.type.element == F32, "sums of floats"
    return kb.ir.fptosi(sums, vector(I32, sums.type.count))
