"""Requantization of int32 accumulators, bit-exact with TFLite's two-rounding MultiplyByQuantizedMultiplier.

TFLite's FULLY_CONNECTED multiplies by a float64 number instead and rounds once: `RealMultiplier`. `Float32Multiplier`
has the same results as `FixedPointMultiplier`, which the rest of this text is about, if AVX-512 is available.

    high = (2 * acc * 2**left * multiplier + 2**31 + (2**(right - 1) << 32)) >> 32     SaturatingRoundingDoublingHighMul
    out  = (high - (acc < 0)) >> right                                                 RoundingDivideByPOT, if right > 0

The first line adds the second rounding's half already: it only changes the upper 32 bits. gemmlowp rounds a negative
product by 1 - 2**30 toward zero, which is the same as 2**30 toward minus infinity, so one nudge serves both signs.

Even and odd lanes are multiplied in 64 bits separately. The factor 2 comes from weights and bias packed doubled, or
from the left shift. `FixedPointMultiplier.of` returns None if an intermediate may not fit int32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.ir_builder import F32, F64, I1, I8, I16, I32, I64, KernelBuilder, Value, vector
from nnfmq.engines.compiled.target import Target
from nnfmq.operations.declaration import Array
from nnfmq.operations.fixed_point import INT32_MAX, INT32_MIN, ONE_Q2, Ints
from nnfmq.operations.normalization import HALF_SQRT_2_Q0, ONE_Q3
from nnfmq.operations.quantization import OutputMultipliers

__all__ = [
    "NO_REQUANTIZATION",
    "PANEL_VECTORS",
    "REQUANT_ROWS",
    "FixedPointMultiplier",
    "Float32Multiplier",
    "OutputQuantParams",
    "RealMultiplier",
    "Requantization",
    "float32_constants",
    "inverse_square_root",
    "pack_subvectors",
    "real_constants",
    "reciprocal",
    "requant_constants",
    "subvector_order",
    "unpack_subvectors",
]


# ----------------------------------------------------------------------------------------------------------------------
# TFLite's two-rounding multiplication in five float32 instructions, for results that are clamped to 8 bits.
#
# With y = acc * multiplier * 2**(shift - 31), both roundings of `requantize` are one, in exact arithmetic:
#
#     out = floor(y + 1/2 + (acc < 0 ? -1 : 1) * 2**-(right + 1))        without the last term if right is 0
#
# Twice as large, the sum before the floor is acc * (high + low) + sign * offset: float32 numbers of 24 and 7 bits,
# whose sum is the multiplier. The last multiply-add and the conversion to int32 are rounded down, by the instruction's
# own rounding mode (AVX-512 has one): they take the floor of what they are given exactly. Only the first multiply-add,
# acc * low + sign * offset, has a rounding error. out = (floor + 1) >> 1 is computed in 16 bits (pmulhrsw).
#
# The result is a step function of the accumulator. `Float32Multiplier.of` checks it at each step: results between two
# steps are right because the float32 function is monotone, too.


Floats = npt.NDArray[np.float64]

_HIGH, _LOW, _OFFSET = range(3)
_LOW_BITS = 127  # of a multiplier: the other 24 fit float32
_ROUND_DOWN = I32(9)  # _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC
_SIGN = -(1 << 31)
_MAX_RIGHT_SHIFT = 14  # then steps are at accumulators below 2**24, and the error below is at most 2**-23
_SHIFT_BITS = 6  # hold shifts from -14 to 30
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
        is_rectified = results[0] >= 0
        is_exact = _has_exact_steps(_distinct(multipliers), max(results[1], -results[0]), is_rectified)
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


def _distinct(multipliers: OutputMultipliers) -> OutputMultipliers:
    """Return each pair of a multiplier and a shift once."""
    pairs = np.unique(multipliers.multipliers << _SHIFT_BITS | multipliers.shifts + _MAX_RIGHT_SHIFT)
    return OutputMultipliers(pairs >> _SHIFT_BITS, (pairs & (1 << _SHIFT_BITS) - 1) - _MAX_RIGHT_SHIFT)


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
    """Return the distances from an integer, in real numbers, of the accumulators at which `steps` above 0 begin."""
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


# ----------------------------------------------------------------------------------------------------------------------
# Vector operations within 128-bit subvectors: punpckl*, punpckh* and packs* of x86, zip1 and zip2 of NEON.
#
# Unpacking a vector of bytes to 32-bit elements gives four vectors: the first with the elements 0 to 3 of each
# subvector, the second with 4 to 7. Packing four vectors to bytes restores the order. NEON has one subvector.


PANEL_VECTORS = 4
"""Vectors of 32-bit elements that have as many elements as a vector of bytes."""

_SUBVECTOR_BITS = 128
_PACK_INTRINSICS = {  # by 32-bit lanes: int32 to int16, int16 to int8, with signed saturation
    16: ("llvm.x86.avx512.packssdw.512", "llvm.x86.avx512.packsswb.512"),
    8: ("llvm.x86.avx2.packssdw", "llvm.x86.avx2.packsswb"),
    4: ("llvm.x86.sse2.packssdw.128", "llvm.x86.sse2.packsswb.128"),
}


def subvector_order(lanes: int) -> npt.NDArray[np.intp]:
    """Return the element, of a vector of bytes, in each lane of the four vectors of `lanes` 32-bit lanes."""
    return np.arange(PANEL_VECTORS * lanes).reshape(-1, PANEL_VECTORS, 4).swapaxes(0, 1).reshape(-1)


def unpack_subvectors(kb: KernelBuilder, first: Value, second: Value, half: int) -> Value:
    """Return the elements of the low (0) or high (1) halves of all subvectors, alternately of `first` and `second`."""
    count, per_subvector = first.type.count, _SUBVECTOR_BITS // int(first.type.element.width)
    begin = half * per_subvector // 2
    taken = [n for n in range(count) if begin <= n % per_subvector < begin + per_subvector // 2]
    return kb.shuffle(first, second, [lane for n in taken for lane in (n, count + n)])


def pack_subvectors(kb: KernelBuilder, first: Value, second: Value) -> Value:
    """Return two vectors in elements half as wide, saturated, subvector by subvector."""
    count, width = first.type.count, int(first.type.element.width)
    narrow, limit = vector(I16 if width == 32 else I8, 2 * count), 1 << (width // 2 - 1)
    if kb.target.pmaddwd is not None:  # x86
        return kb.call(_PACK_INTRINSICS[kb.target.lanes][width == 16], narrow, first, second)
    low, high = (kb.splat(first.type.element, bound, 2 * count) for bound in (-limit, limit - 1))
    return kb.ir.trunc(kb.clamp(kb.concat(first, second), low, high), narrow)


# ----------------------------------------------------------------------------------------------------------------------
# Requantization of int32 accumulators, bit-exact with TFLite's two-rounding MultiplyByQuantizedMultiplier.


_EVEN, _ODD, _EVEN_NUDGES, _ODD_NUDGES, _RIGHT, _LEFT, REQUANT_ROWS = range(7)
_LOW_HALVES, _HIGH_HALVES = range(2)  # of the float64 numbers of `real_constants`
_ALMOST_HALF = float(np.nextafter(0.5, 0.0))  # with it no number below a half is rounded up


@dataclass(frozen=True, slots=True)
class OutputQuantParams:
    """Output zero point and clamp range, the input's zero point, and the residual zero point of the packed weights."""

    output_zero_point: int
    output_min: int
    output_max: int
    input_zero_point: int = 0
    weight_zero_point: int = 0


@dataclass(frozen=True, slots=True)
class FixedPointMultiplier:
    """The two-rounding multiplication, specialized for whether there are left shifts and right shifts by 0."""

    has_left_shift: bool
    has_zero_right_shift: bool

    @classmethod
    def of(
        cls, multipliers: OutputMultipliers, bias: Ints, max_abs_acc: Ints, can_prescale: bool = True
    ) -> FixedPointMultiplier | None:
        """Return the specialization, or None if an intermediate may overflow int32.

        `max_abs_acc` bounds |accumulator| of each channel without its bias. If weights cannot be packed doubled
        (`can_prescale`), accumulators are shifted left at run time.
        """
        left, right = np.maximum(multipliers.shifts, 0), np.maximum(-multipliers.shifts, 0)
        # 2 * |acc| * 2**left + 2**right <= INT32_MAX: then the doubled accumulator fits, and half of it all, the sum of
        # high and its nudge. Solved for |acc|, because the left side may overflow int64.
        headroom = (INT32_MAX - (np.int64(1) << right)) >> (left + 1)
        if bool((np.abs(bias) + max_abs_acc > headroom).any()):
            return None
        return cls(bool(left.any()) or not can_prescale, not bool(right.all()))

    @property
    def weight_prescale(self) -> int:
        """Weight prescale, 1 or 2: 2 saves the doubling of SaturatingRoundingDoublingHighMul at run time."""
        return 1 if self.has_left_shift else 2

    def apply(self, kb: KernelBuilder, accs: Value, row: Callable[[int], Value]) -> Value:
        """Return accumulators, multiplied by `weight_prescale` already, times their multipliers, rounded twice.

        `row` loads one of the rows that `requant_constants` made. The sign of the accumulator stands for that of the
        product in the second rounding: they differ only if the product rounds to 0, and then the result is 0 both ways.
        """
        lanes = accs.type.count
        if self.has_left_shift:
            accs = kb.ir.shl(accs, row(_LEFT))
        wide = vector(I64, lanes // 2)
        even = _multiply_nudged(kb, _even_lanes(kb, accs, wide), row(_EVEN), row(_EVEN_NUDGES))
        odd_lanes = kb.ir.ashr(kb.ir.bitcast(accs, wide), kb.splat(I64, 32, lanes // 2))
        odd = _multiply_nudged(kb, odd_lanes, row(_ODD), row(_ODD_NUDGES))
        even = kb.ir.bitcast(kb.ir.lshr(even, kb.splat(I64, 32, lanes // 2)), accs.type)
        high = kb.shuffle(even, kb.ir.bitcast(odd, accs.type), [lane + lanes * (lane % 2) for lane in range(lanes)])
        right, minus_one_if_negative = row(_RIGHT), kb.ir.ashr(accs, kb.splat(I32, 31, lanes))
        if self.has_zero_right_shift:
            is_zero = kb.ir.icmp_signed("==", right, kb.splat(I32, 0, lanes))
            minus_one_if_negative = kb.ir.select(is_zero, kb.splat(I32, 0, lanes), minus_one_if_negative)
        return kb.ir.ashr(kb.ir.add(high, minus_one_if_negative), right)


def _multiply_nudged(kb: KernelBuilder, values: Value, multipliers: Value, nudges: Value) -> Value:
    """Return value * multiplier + nudge in 64 bits; the multipliers are in the even lanes."""
    return kb.ir.add(kb.ir.mul(values, _even_lanes(kb, multipliers, values.type)), kb.ir.bitcast(nudges, values.type))


def _even_lanes(kb: KernelBuilder, values: Value, wide: Value) -> Value:
    """Return the even int32 lanes, sign-extended to 64 bits."""
    by = kb.splat(I64, 32, wide.count)
    return kb.ir.ashr(kb.ir.shl(kb.ir.bitcast(values, wide), by), by)


def requant_constants(multipliers: OutputMultipliers) -> Array:
    """Return the rows (REQUANT_ROWS, channels) that `FixedPointMultiplier.apply` loads, for an even number of channels.

    Multipliers; those of the odd channels moved to even lanes; the 64-bit nudges of even channels, then of odd
    channels; right shifts; left shifts, with 1 more for the doubling.
    """
    left, right = np.maximum(multipliers.shifts, 0), np.maximum(-multipliers.shifts, 0)
    nudges = (np.int64(1) << 31) + (((np.int64(1) << right) >> 1) << 32)
    rows = np.zeros((REQUANT_ROWS, len(left)), np.int32)
    rows[_EVEN], rows[_ODD, ::2] = multipliers.multipliers, multipliers.multipliers[1::2]
    rows[_EVEN_NUDGES], rows[_ODD_NUDGES] = (nudges[first::2].astype(np.int64).view(np.int32) for first in (0, 1))
    rows[_RIGHT], rows[_LEFT] = right, left + 1
    return rows


@dataclass(frozen=True, slots=True)
class RealMultiplier:
    """Multiplication by a float64 number and one rounding, halves away from zero."""

    @classmethod
    def of(cls, bias: Ints, max_abs_acc: Ints) -> RealMultiplier | None:
        """Return the multiplication, or None if an accumulator with its bias may overflow int32."""
        return None if bool((np.abs(bias) + max_abs_acc > INT32_MAX).any()) else cls()

    @property
    def weight_prescale(self) -> int:
        """Weights are packed as they are."""
        return 1

    def apply(self, kb: KernelBuilder, accs: Value, row: Callable[[int], Value]) -> Value:
        """Return accumulators times their numbers, limited to 16 bits and rounded.

        `row` loads one of the rows that `real_constants` made.
        """
        lanes = accs.type.count
        reals = vector(F64, lanes)
        halves = kb.shuffle(row(_LOW_HALVES), row(_HIGH_HALVES), [n // 2 + lanes * (n % 2) for n in range(2 * lanes)])
        product = kb.ir.fmul(kb.ir.sitofp(accs, reals), kb.ir.bitcast(halves, reals))
        product = kb.intrinsic("llvm.maxnum", product, kb.splat(F64, -float(1 << 15), lanes))
        product = kb.intrinsic("llvm.minnum", product, kb.splat(F64, float(1 << 15), lanes))
        half = kb.intrinsic("llvm.copysign", kb.splat(F64, _ALMOST_HALF, lanes), product)
        return kb.ir.fptosi(kb.ir.fadd(product, half), accs.type)


def real_constants(factors: Array) -> Array:
    """Return the rows (REQUANT_ROWS, channels) that `RealMultiplier.apply` loads: both halves of float64 numbers."""
    rows = np.zeros((REQUANT_ROWS, len(factors)), np.int32)
    rows[: _HIGH_HALVES + 1] = factors.astype(np.float64).view(np.int32).reshape(-1, 2).T
    return rows


_ROW_BYTES = 64  # as long as the longest vector
_OUTPUT_ZERO_POINT, _MIN, _MAX, _INPUT_ZERO_POINT, _WEIGHT_ZERO_POINT = range(5)
_SIGNED_ZERO_POINT, _SIGNED_MIN, _SIGNED_MAX, _SIGN_FLIP, _HEADER_ROWS = range(5, 10)
_BIAS, _CHANNEL_ROWS = REQUANT_ROWS, REQUANT_ROWS + 1


@dataclass(frozen=True, slots=True)
class Requantization:
    """Requantization of a GEMM's accumulators, with constants for each channel.

    All numbers are in one constant: a header for all channels, then the rows of each vector of channels. So layers of
    any shape share code.
    """

    multiplier: FixedPointMultiplier | RealMultiplier | Float32Multiplier

    output_bytes = 1
    input_offset = 0

    @property
    def weight_prescale(self) -> int:
        """The multiplier's."""
        return self.multiplier.weight_prescale

    @property
    def is_short(self) -> bool:
        """Whether it is so few instructions that they are repeated for each row of a tile."""
        return isinstance(self.multiplier, Float32Multiplier)

    def constants(self, rows: Array, bias: Ints, quant: OutputQuantParams, lanes: int) -> bytes:
        """Return the constant, for channels that fill whole vectors; `rows` are those that `multiplier` loads."""
        header = np.zeros((_HEADER_ROWS, _ROW_BYTES // 2), np.int16)
        header[:_INPUT_ZERO_POINT] = np.array([[quant.output_zero_point], [quant.output_min], [quant.output_max]])
        header[_INPUT_ZERO_POINT].view(np.int32)[:] = quant.input_zero_point
        header[_WEIGHT_ZERO_POINT].view(np.int32)[:] = quant.weight_zero_point
        flip = 128 if quant.output_max > 127 else 0
        header[_SIGNED_ZERO_POINT] = quant.output_zero_point - flip
        header[_SIGNED_MIN : _SIGN_FLIP + 1].view(np.uint8)[:] = np.array(
            [[quant.output_min - flip], [quant.output_max - flip], [flip]]
        ).astype(np.uint8)
        biases = bias.astype(np.int32) * np.int32(self.multiplier.weight_prescale)
        rows = np.concatenate([rows, biases[None]])
        return header.tobytes() + rows.reshape(_CHANNEL_ROWS, -1, lanes).swapaxes(0, 1).tobytes()

    def bias(self, kb: KernelBuilder, constants: Value, channel: Value, lanes: int) -> Value:
        """Load the biases of `lanes` channels, multiplied by the weight prescale."""
        return self._rows(kb, constants, channel, lanes)(_BIAS)

    def bias_address(self, kb: KernelBuilder, constants: Value, channel: Value, lanes: int) -> Value:
        """Return the address of the biases of `lanes` channels."""
        return kb.at(self._first_row(kb, constants, channel), 4 * lanes * _BIAS)

    def input_zero_point(self, kb: KernelBuilder, constants: Value) -> Value:
        """Load the input's zero point."""
        return kb.load(I32, constants, _ROW_BYTES * _INPUT_ZERO_POINT)

    def weight_zero_point(self, kb: KernelBuilder, constants: Value) -> Value:
        """Load the residual zero point of the weights."""
        return kb.load(I32, constants, _ROW_BYTES * _WEIGHT_ZERO_POINT)

    def requantize(self, kb: KernelBuilder, accs: Sequence[Value], constants: Value, channel: Value) -> list[Value]:
        """Return adjacent vectors of accumulators, the first at `channel`, as 8-bit values, two vectors joined."""
        lanes = accs[0].type.count
        rounded = [
            self.multiplier.apply(kb, acc, self._rows(kb, constants, kb.add(channel, n * lanes), lanes))
            for n, acc in enumerate(accs)
        ]
        pairs = [rounded[n : n + 2] for n in range(0, len(rounded), 2)]
        joined = [pair[0] if len(pair) == 1 else kb.shuffle(pair[0], pair[1], range(2 * lanes)) for pair in pairs]
        return [self._narrowed(kb, values, constants) for values in joined]

    def requantize_subvectors(
        self, kb: KernelBuilder, accs: Sequence[Value], constants: Value, channels: Sequence[Value]
    ) -> Value:
        """Return four vectors of accumulators, each with its first channel, as one vector of 8-bit values, in order."""
        first, second, third, fourth = (
            self.rounded(kb, acc, constants, channel) for acc, channel in zip(accs, channels, strict=True)
        )
        low = self.narrow_subvectors(kb, first, second, constants)
        high = self.narrow_subvectors(kb, third, fourth, constants)
        packed = self.clamp_subvectors(kb, low, high, constants)
        words = kb.ir.bitcast(packed, accs[0].type)
        order = np.arange(accs[0].type.count).reshape(-1, PANEL_VECTORS).T.reshape(-1)
        return kb.ir.bitcast(kb.shuffle(words, words, order.tolist()), packed.type)

    def rounded(self, kb: KernelBuilder, acc: Value, constants: Value, channel: Value) -> Value:
        """Return a vector of accumulators, the first at `channel`, times their multipliers, as int32."""
        return self.multiplier.apply(kb, acc, self._rows(kb, constants, channel, acc.type.count))

    def narrow_subvectors(self, kb: KernelBuilder, first: Value, second: Value, constants: Value) -> Value:
        """Return two vectors that `rounded` made as int16, packed by subvectors, with the zero point of int8 added."""
        short = self._halved(kb, pack_subvectors(kb, first, second))
        zero_point = kb.load(short.type, constants, _ROW_BYTES * _SIGNED_ZERO_POINT)
        return kb.intrinsic("llvm.sadd.sat", short, zero_point)

    def clamp_subvectors(self, kb: KernelBuilder, first: Value, second: Value, constants: Value) -> Value:
        """Return two vectors that `narrow_subvectors` made as output bytes.

        They are saturated and clamped as int8. Adding 128 makes uint8 of them, which flips the sign.
        """
        signed = pack_subvectors(kb, first, second)
        low, high, flip = (
            kb.load(signed.type, constants, _ROW_BYTES * row) for row in (_SIGNED_MIN, _SIGNED_MAX, _SIGN_FLIP)
        )
        return kb.ir.xor(kb.clamp(signed, low, high), flip)

    def _halved(self, kb: KernelBuilder, values: Value) -> Value:
        return self.multiplier.halved(kb, values) if isinstance(self.multiplier, Float32Multiplier) else values

    def _narrowed(self, kb: KernelBuilder, values: Value, constants: Value) -> Value:
        """Add the zero point, clamp and truncate to 8 bits.

        Saturating to int16 first does not change the result: the addition saturates, and the clamp range is 8 bits.
        """
        count = values.type.count
        low, high = kb.splat(I32, -(1 << 15), count), kb.splat(I32, (1 << 15) - 1, count)
        short = self._halved(kb, kb.ir.trunc(kb.clamp(values, low, high), vector(I16, count)))
        zero_point, low, high = (
            kb.load(short.type, constants, _ROW_BYTES * row) for row in (_OUTPUT_ZERO_POINT, _MIN, _MAX)
        )
        return kb.ir.trunc(kb.clamp(kb.intrinsic("llvm.sadd.sat", short, zero_point), low, high), vector(I8, count))

    def _rows(self, kb: KernelBuilder, constants: Value, channel: Value, lanes: int) -> Callable[[int], Value]:
        """Return a function that loads a row of the vector of channels that begins at `channel`."""
        first = self._first_row(kb, constants, channel)
        return lambda row: kb.load(vector(I32, lanes), first, 4 * lanes * row)

    def _first_row(self, kb: KernelBuilder, constants: Value, channel: Value) -> Value:
        """Return the address of the rows of the vector of channels that begins at `channel`."""
        return kb.at(kb.at(constants, kb.mul(channel, 4 * _CHANNEL_ROWS)), _ROW_BYTES * _HEADER_ROWS)


NO_REQUANTIZATION = Requantization(FixedPointMultiplier(False, False))
"""Stands for the requantization while a GEMM is planned: which one it is depends on the planned panels."""


# -- functions of one number, in 64 bits -------------------------------------------------------------------------------


def reciprocal(kb: KernelBuilder, total: Value) -> tuple[Value, Value]:
    """Return (multiplier, right shift) of the reciprocal of a sum in Q12, as TFLite's GetReciprocal.

    Newton-Raphson in Q2 from 48/17 - 32/17 * x, as gemmlowp's one_over_one_plus_x_for_x_in_0_1.
    """
    zeros = kb.ir.sub(_leading_zeros(kb, total), kb.i64(32))
    fraction = kb.ir.sub(kb.ir.shl(total, zeros), kb.i64(1 << 31))
    half = kb.ir.ashr(kb.ir.add(fraction, kb.i64(1 << 31)), kb.i64(1))
    x = kb.ir.add(kb.i64(1515870810), _high_mul(kb, half, kb.i64(-1010580540)))
    for _ in range(3):
        error = kb.ir.sub(kb.i64(ONE_Q2), _high_mul(kb, half, x))
        x = kb.ir.add(x, _saturating_shift_left(kb, _high_mul(kb, x, error), 2))
    return _saturating_shift_left(kb, x, 1), kb.ir.sub(kb.i64(35), zeros)


def inverse_square_root(kb: KernelBuilder, total: Value) -> tuple[Value, Value]:
    """Return (multiplier, right shift) of 1 / sqrt of a sum below 2**29, as TFLite's GetInvSqrtQuantizedMultiplierExp.

    Sums of 0 and 1 give the largest multiplier, about 1.
    """
    known = kb.intrinsic("llvm.umax", total, kb.i64(2))
    pairs = kb.ir.sub(kb.ir.lshr(kb.ir.sub(_leading_zeros(kb, known), kb.i64(33)), kb.i64(1)), kb.i64(1))
    shift = kb.ir.sub(kb.i64(11), pairs)
    x = _newton_steps(kb, kb.ir.shl(known, kb.ir.shl(pairs, kb.i64(1))))
    x = _high_mul(kb, x, kb.i64(HALF_SQRT_2_Q0))
    x = kb.ir.shl(x, kb.intrinsic("llvm.smax", kb.ir.neg(shift), kb.i64(0)))
    is_tiny = kb.ir.icmp_signed("<=", total, kb.i64(1))
    right = kb.intrinsic("llvm.smax", shift, kb.i64(0))
    return kb.ir.select(is_tiny, kb.i64(INT32_MAX), x), kb.ir.select(is_tiny, kb.i64(0), right)


def _newton_steps(kb: KernelBuilder, value: Value) -> Value:
    half = kb.ir.ashr(kb.ir.add(kb.ir.ashr(value, kb.i64(1)), kb.i64(1)), kb.i64(1))
    x = kb.i64(ONE_Q3)
    for _ in range(5):
        cube = _saturating_shift_left(kb, _high_mul(kb, _high_mul(kb, x, x), x), 6)
        three_halves = _high_mul(kb, x, kb.i64(ONE_Q3 + (ONE_Q3 >> 1)))
        x = _saturating_shift_left(kb, kb.ir.sub(three_halves, _high_mul(kb, half, cube)), 3)
    return x


def _leading_zeros(kb: KernelBuilder, value: Value) -> Value:
    return kb.call("llvm.ctlz.i64", I64, value, I1(0))


def _high_mul(kb: KernelBuilder, first: Value, second: Value) -> Value:
    """SaturatingRoundingDoublingHighMul."""
    product = kb.ir.ashr(kb.ir.add(kb.ir.mul(first, second), kb.i64(1 << 30)), kb.i64(31))
    return kb.intrinsic("llvm.smin", product, kb.i64(INT32_MAX))


def _saturating_shift_left(kb: KernelBuilder, value: Value, bits: int) -> Value:
    return kb.clamp(kb.ir.shl(value, kb.i64(bits)), kb.i64(INT32_MIN), kb.i64(INT32_MAX))
