"""TFLite's two-rounding multiplication in five float32 instructions, for results that are clamped to 8 bits.

With y = acc * multiplier * 2**(shift - 31), both roundings of `requantize` are one, in exact arithmetic:

    out = floor(y + 1/2 + (acc < 0 ? -1 : 1) * 2**-(right + 1))        without the last term if right is 0

Twice as large, the sum before the floor is acc * (high + low) + sign * offset: float32 numbers of 24 and 7 bits, whose
sum is the multiplier. The last multiply-add and the conversion to int32 are rounded down, by the instruction's own
rounding mode (AVX-512 has one): they take the floor of what they are given exactly. Only the first multiply-add,
acc * low + sign * offset, has a rounding error. out = (floor + 1) >> 1 is computed in 16 bits (pmulhrsw).

The result is a step function of the accumulator. `Float32Multiplier.of` checks it at each step: results between two
steps are right because the float32 function is monotone, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nnfmq.engines.compiled.ir_builder import F32, I16, I32, KernelBuilder, Value, vector
from nnfmq.engines.compiled.target import Target
from nnfmq.operations.fixed_point import Ints
from nnfmq.operations.quantization import OutputMultipliers
from nnfmq.operations.signature import Array

__all__ = ["Float32Multiplier", "float32_constants"]

Floats = npt.NDArray[np.float64]

_HIGH, _LOW, _OFFSET = range(3)
_LOW_BITS = 127  # of a multiplier: the other 24 fit float32
_ROUND_DOWN = I32(9)  # _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC
_SIGN = -(1 << 31)
_MAX_RIGHT_SHIFT = 14  # then steps are at accumulators below 2**24, and the error below is at most 2**-23
_MAX_ERROR = 2.0**-22  # of the first multiply-add, in units of the accumulator; twice the bound
_CHECKED_CHANNELS = 256  # at a time: they fit a second-level cache
_PMULHRSW = {32: "llvm.x86.avx512.pmul.hr.sw.512", 16: "llvm.x86.avx2.pmul.hr.sw"}


@dataclass(frozen=True, slots=True)
class Float32Multiplier:
    """The multiplication, whose results are twice as large until `halved`.

    If results below 0 are clamped (`is_rectified`), the offset of an accumulator below 0 needs no sign: its result is
    at most 0 in any case.
    """

    is_rectified: bool

    weight_prescale = 1

    @classmethod
    def of(
        cls, multipliers: OutputMultipliers, max_abs_acc: Ints, results: tuple[int, int], target: Target
    ) -> Float32Multiplier | None:
        """Return the multiplication, or None if the target lacks the instructions or a result might be wrong.

        `max_abs_acc` bounds |accumulator| of each channel; `results` are the minimum and maximum not clamped.
        """
        if target.lanes < 16 or not multipliers.multipliers.all() or (multipliers.shifts < -_MAX_RIGHT_SHIFT).any():
            return None
        high, _, _ = _factors(multipliers)
        if (max_abs_acc * high >= 2.0**30).any():  # twice that does not fit int32
            return None
        distinct = np.unique(np.stack([multipliers.multipliers, multipliers.shifts]).astype(np.int64), axis=1)
        is_rectified = results[0] >= 0
        is_exact = _has_exact_steps(OutputMultipliers(*distinct), max(results[1], -results[0]), is_rectified)
        return cls(is_rectified) if is_exact else None

    def apply(self, kb: KernelBuilder, accs: Value, row: Callable[[int], Value]) -> Value:
        """Return twice the accumulators times their multipliers, rounded down.

        `row` loads one of the rows that `float32_constants` made.
        """
        lanes = accs.type.count
        kind = vector(F32, lanes)

        def floats(number: int) -> Value:
            return kb.ir.bitcast(row(number), kind)

        value = kb.ir.sitofp(accs, kind)
        offset = row(_OFFSET)
        if not self.is_rectified:
            offset = kb.ir.or_(kb.ir.and_(accs, kb.splat(I32, _SIGN, lanes)), offset)
        remainder = kb.intrinsic("llvm.fma", value, floats(_LOW), kb.ir.bitcast(offset, kind))
        total = kb.call("llvm.x86.avx512.vfmadd.ps.512", kind, value, floats(_HIGH), remainder, _ROUND_DOWN)
        every = I16(-1)
        return kb.call(
            "llvm.x86.avx512.mask.cvtps2dq.512", accs.type, total, kb.splat(I32, 0, lanes), every, _ROUND_DOWN
        )

    def halved(self, kb: KernelBuilder, values: Value) -> Value:
        """Return (value + 1) >> 1 of int16 values."""
        half = kb.splat(I16, 1 << 14, values.type.count)
        return kb.call(_PMULHRSW[values.type.count], values.type, values, half)


def _factors(multipliers: OutputMultipliers) -> tuple[Floats, Floats, Floats]:
    """Return the high and low parts of twice the multipliers, and the offsets, all of them float32 numbers."""
    shifts = multipliers.shifts
    low = multipliers.multipliers & _LOW_BITS
    offset = np.where(shifts < 0, np.exp2(shifts.astype(np.float64)), 0.0)
    scale = np.exp2(shifts - 30.0)
    return (multipliers.multipliers - low) * scale, low * scale, offset


def float32_constants(multipliers: OutputMultipliers, rows: int) -> Array:
    """Return `rows` rows, the first of which `Float32Multiplier.apply` loads."""
    constants = np.zeros((rows, len(multipliers.shifts)), np.int32)
    constants[: _OFFSET + 1] = np.stack(_factors(multipliers)).astype(np.float32).view(np.int32)
    return constants


# -- the check ---------------------------------------------------------------------------------------------------------


def _has_exact_steps(multipliers: OutputMultipliers, last: int, is_rectified: bool) -> bool:
    """Return whether the results 1 - last (or 1) to last begin at the right accumulators, for every channel.

    A step may be at a wrong accumulator only if it is within the error of one. Only those are computed exactly. That of
    1 - k is minus that of k.
    """
    steps = np.arange(1, last + 1)
    for first in range(0, len(multipliers.shifts), _CHECKED_CHANNELS):
        some = multipliers.of_channels(np.arange(first, min(first + _CHECKED_CHANNELS, len(multipliers.shifts))))
        channels, indexes = np.nonzero(_distances(some, steps) < _MAX_ERROR)
        close = some.of_channels(channels)
        if not (_is_exact(close, steps[indexes]) and (is_rectified or _is_exact(close, 1 - steps[indexes]))):
            return False
    return True


def _distances(multipliers: OutputMultipliers, steps: Ints) -> Floats:
    """Return how far from an integer the accumulators are, in real numbers, at which `steps` above 0 begin."""
    right, left = np.maximum(-multipliers.shifts, 0), np.maximum(multipliers.shifts, 0)
    units = np.exp2(30.0 - left) / multipliers.multipliers  # accumulators for half a result, if not shifted right
    begins = np.multiply.outer(units * np.exp2(right), (2 * steps - 1).astype(np.float64))
    begins -= (units * (right > 0))[:, None]
    begins -= np.rint(begins)
    return np.abs(begins, out=begins)


def _is_exact(multipliers: OutputMultipliers, steps: Ints) -> bool:
    """Return whether float32 arithmetic gives each step at its first accumulator, and not at the one before."""
    right, left = np.maximum(-multipliers.shifts, 0), np.maximum(multipliers.shifts, 0)
    begins = ((2 * steps - 1) << (30 + right)) - (np.where(steps > 0, 1, -1) * (right > 0) << 30)
    first = -(-begins // (multipliers.multipliers << left))
    return bool(_reaches(multipliers, first, steps).all() and not _reaches(multipliers, first - 1, steps).any())


def _reaches(multipliers: OutputMultipliers, accs: Ints, steps: Ints) -> npt.NDArray[np.bool_]:
    """Return whether the float32 result of each of `accs` is its step or a later one.

    All float64 operations are exact, but for the rounding to float32: acc * high has 48 bits, and is subtracted from a
    number at most twice as large or small.
    """
    high, low, offset = _factors(multipliers)
    values = accs.astype(np.float32).astype(np.float64)
    remainder = (values * low + np.where(accs < 0, -offset, offset)).astype(np.float32)
    reaches: npt.NDArray[np.bool_] = remainder >= (2 * steps - 1) - values * high
    return reaches
