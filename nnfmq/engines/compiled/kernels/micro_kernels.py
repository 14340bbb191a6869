"""Micro-kernels: how packed inputs (LHS) and weights are multiplied and accumulated.

    class            lhs   weights  accumulator  instructions                   input zero point
    Float32          f32   f32      f32          vfmadd231ps, fmla              -
    HalfWeights      f32   f16      f32          vcvtph2ps+vfmadd231ps, fmla    -
    DotS16x2         s16   s16      s32          pmaddwd+paddd, vpdpwssd, smlal subtracted while packing
    DotU8S8x4        u8    s8       s32          vpdpbusd, usdot                folded into the bias
    DotS8S8x4        s8    s8       s32          sdot                           folded into the bias
    MmlaU8S8x8       u8    s8       s32          usmmla                         folded into the bias
    MmlaS8S8x8       s8    s8       s32          smmla                          folded into the bias
    AmxU8S8x64       u8    s8       s32          tdpbusd                        folded into the bias
    AmxS8S8x64       s8    s8       s32          tdpbssd                        folded into the bias
    MaddU8S8Acc16    u8    s8       s16, s32     2 pmaddubsw, paddw, pmaddwd    folded into the bias
    MaddS8S8         s8    s8       s16, s32     psign, pmaddubsw, pmaddwd      folded into the bias

int8 inputs of the u8 kernels are packed as x + 128, uint8 inputs of the s8 kernels as x - 128. Padding is packed as the
value that represents 0. Targets without one of these instructions get an exact equivalent in others. The Mmla and Amx
classes are at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.ir_builder import F16, F32, I1, I8, I16, I32, KernelBuilder, Value, vector
from nnfmq.engines.compiled.kernels.conv_shape import ConvShape
from nnfmq.engines.compiled.kernels.dynamic_quantization import Dequantization, ExactSums
from nnfmq.engines.compiled.kernels.packing import ACC16_KR, InputConverter, pack_group_lists
from nnfmq.engines.compiled.kernels.requantize import Requantization
from nnfmq.engines.compiled.kernels.vector_math import fmuladd
from nnfmq.engines.compiled.target import Target

__all__ = [
    "TILE_ROWS",
    "Amx",
    "AmxS8S8x64",
    "AmxU8S8x64",
    "Dot4",
    "DotS8S8x4",
    "DotS16x2",
    "DotU8S8x4",
    "Float32",
    "HalfWeights",
    "MaddU8S8Acc16",
    "MicroKernel",
    "MmlaS8S8x8",
    "MmlaU8S8x8",
    "dot2",
    "dot2_of_pair",
    "dot4",
    "dot4_signed",
    "exchange_halves",
    "in_k_groups",
    "madd_acc16",
    "mmla",
    "s8_micro_kernel",
]


# ----------------------------------------------------------------------------------------------------------------------
# Multiply-adds of adjacent integers: the target's instructions, or an exact equivalent in others.


def dot2(kb: KernelBuilder, acc: Value, lhs: Value, weights: Value) -> Value:
    """Return int32 `acc` plus the sums of two adjacent int16 products: vpdpwssd, or pmaddwd and an addition."""
    if kb.target.vpdpwssd is not None and acc.type.count == kb.target.lanes:
        return kb.call(kb.target.vpdpwssd, acc.type, acc, *(kb.ir.bitcast(v, acc.type) for v in (lhs, weights)))
    return kb.ir.add(acc, _pmaddwd(kb, lhs, weights))


def dot2_of_pair(kb: KernelBuilder, acc: Value, lhs: Value, weights: Value) -> Value:
    """Return dot2 for an `lhs` of equal pairs: two smlal by element on AArch64."""
    if not kb.target.multiplies_by_element:
        return dot2(kb, acc, lhs, weights)
    lanes = acc.type.count
    for element in (0, 1):
        left = kb.shuffle(lhs, lhs, [element] * lanes)
        right = kb.shuffle(weights, weights, range(element, 2 * lanes, 2))
        acc = kb.ir.add(acc, kb.ir.mul(*(kb.ir.sext(factor, acc.type) for factor in (left, right))))
    return acc


def _pmaddwd(kb: KernelBuilder, lhs: Value, weights: Value) -> Value:
    lanes = weights.type.count // 2
    if kb.target.pmaddwd is not None and lanes == kb.target.lanes:
        return kb.call(kb.target.pmaddwd, vector(I32, lanes), lhs, weights)
    wide = vector(I32, 2 * lanes)
    products = kb.ir.mul(kb.ir.sext(lhs, wide), kb.ir.sext(weights, wide))
    even, odd = (kb.shuffle(products, products, range(first, 2 * lanes, 2)) for first in (0, 1))
    return kb.ir.add(even, odd)


def dot4(kb: KernelBuilder, acc: Value, lhs: Value, weights: Value) -> Value:
    """Return int32 `acc` plus the sums of four adjacent u8 * s8 products: vpdpbusd, usdot, or two dot2."""
    lanes = acc.type.count
    vpdpbusd = {kb.target.lanes: kb.target.vpdpbusd, kb.target.half_lanes: kb.target.vpdpbusd_half}.get(lanes)
    if vpdpbusd is not None:
        return kb.call(vpdpbusd, acc.type, acc, *(kb.ir.bitcast(v, acc.type) for v in (lhs, weights)))
    if kb.target.usdot is not None:
        return kb.call(kb.target.usdot, acc.type, acc, lhs, weights)
    shorts, byte = vector(I16, 2 * lanes), kb.splat(I16, 8, 2 * lanes)
    lhs, weights = (kb.ir.bitcast(v, shorts) for v in (lhs, weights))
    even = kb.ir.and_(lhs, kb.splat(I16, 255, 2 * lanes)), kb.ir.ashr(kb.ir.shl(weights, byte), byte)
    odd = kb.ir.lshr(lhs, byte), kb.ir.ashr(weights, byte)
    return dot2(kb, dot2(kb, acc, *even), *odd)


def dot4_signed(kb: KernelBuilder, acc: Value, lhs: Value, weights: Value) -> Value:
    """Return int32 `acc` plus the sums of four adjacent s8 * s8 products: sdot."""
    assert kb.target.sdot is not None, "the micro-kernel is chosen only for targets that have it"
    return kb.call(kb.target.sdot, acc.type, acc, lhs, weights)


def mmla(kb: KernelBuilder, acc: Value, lhs: Value, weights: Value, lhs_is_signed: bool) -> Value:
    """Return int32 `acc` plus the product of a 2 x 8 matrix and the transposed of another, s8: usmmla or smmla."""
    name = kb.target.smmla if lhs_is_signed else kb.target.usmmla
    assert name is not None, "the micro-kernel is chosen only for targets that have it"
    return kb.call(name, acc.type, acc, lhs, weights)


def madd_acc16(kb: KernelBuilder, acc: Value, lhs: tuple[Value, Value], weights: tuple[Value, Value]) -> Value:
    """Return int32 `acc` plus eight u8 * s8 products: 2 pmaddubsw, paddw, then pmaddwd by ones.

    Neither pmaddubsw saturates nor paddw wraps, because packed weights keep the bound of `packing`: every partial sum
    of the four products in an int16 lane is at most 255 * 128 in magnitude.
    """
    pmaddubsw = kb.target.pmaddubsw
    assert pmaddubsw is not None, "acc16 kernels are chosen only for targets that have it"
    kind = vector(I16, lhs[0].type.count // 2)
    first, second = (kb.call(pmaddubsw, kind, *pair) for pair in zip(lhs, weights, strict=True))
    return dot2(kb, acc, kb.ir.add(first, second), kb.splat(I16, 1, 2 * acc.type.count))


# ----------------------------------------------------------------------------------------------------------------------
# Micro-kernels: how packed inputs (LHS) and weights are multiplied and accumulated.


Array = npt.NDArray[Any]

Epilogue: TypeAlias = Requantization | Dequantization | ExactSums
"""What makes results of the sums of integers."""


def madd_signed(kb: KernelBuilder, acc: Value, magnitudes: Value, lhs: Value, weights: Value) -> Value:
    """Return int32 `acc` plus the sums of four adjacent s8 * s8 products: psign, pmaddubsw, then pmaddwd by ones."""
    psign, pmaddubsw = kb.target.psign, kb.target.pmaddubsw
    assert psign is not None and pmaddubsw is not None, "the micro-kernel is chosen only for targets that have them"
    signed = kb.call(psign, weights.type, weights, lhs)
    pairs = kb.call(pmaddubsw, vector(I16, weights.type.count // 2), magnitudes, signed)
    return dot2(kb, acc, pairs, kb.splat(I16, 1, 2 * acc.type.count))


class MicroKernel(Protocol):
    """LHS packing, multiply-accumulate and epilogue for one pair of data types.

    Each step consumes kr consecutive K elements per lane (XNNPACK's kr). `params` is the address of the epilogue's
    constant, `channel` the packed channel of the first lane.
    """

    item_bytes: int
    """Bytes of an input element."""
    lhs_bytes: int
    """Bytes of an LHS element."""
    weight_bytes: int
    """Bytes of a weight."""
    kr: int
    lhs_rows: int
    """Rows of a tile that share an LHS vector and an accumulator: 2 if an instruction multiplies matrices, else 1."""
    accumulator_type: Any
    """The type of an accumulator, of 32 bits."""

    @property
    def output_bytes(self) -> int:
        """Bytes of an output element."""
        ...

    @property
    def input_offset(self) -> int:
        """Bytes before the first input element."""
        ...

    @property
    def has_weight_zero_point(self) -> bool:
        """Whether packed weights have a residual zero point zp; if so, zp * row_sum is added to the accumulators."""
        ...

    @property
    def unroll_epilogue(self) -> bool:
        """Whether the epilogue is so short that it is unrolled over a tile's rows, which keeps them in registers."""
        ...

    @property
    def is_group_sparse(self) -> bool:
        """Whether weights are packed as lists of K groups: zero groups left out, others listed several times."""
        ...

    @property
    def weight_prescale(self) -> int:
        """Factor, 1 or 2, by which weights are multiplied before packing."""
        ...

    def can_read_lhs_directly(self, channels: int) -> bool:
        """Return whether pixels of `channels` elements need no packing."""
        ...

    def temporaries(self, target: Target) -> int:
        """Return the number of registers for products before they are accumulated."""
        ...

    def input_converter(self, kb: KernelBuilder, params: Value) -> InputConverter:
        """Return the conversion of input elements to LHS elements."""
        ...

    def init_accumulators(self, kb: KernelBuilder, params: Value, channel: Value, lanes: int) -> Value:
        """Return the initial accumulators of `lanes` channels: the bias."""
        ...

    def load_lhs(self, kb: KernelBuilder, address: Value, offset: Value, lanes: int) -> Any:
        """Load kr LHS elements and broadcast them to all lanes."""
        ...

    def weight_type(self, lanes: int) -> Any:
        """Return the vector type of the weights for kr K elements of `lanes` channels."""
        ...

    def multiply_add(self, kb: KernelBuilder, acc: Value, lhs: Any, weights: Any) -> Value:
        """Return `acc` plus the products of kr LHS elements and weights."""
        ...

    def epilogue(self, kb: KernelBuilder, accs: Sequence[Value], params: Value, channel: Value) -> list[Value]:
        """Return the output elements of adjacent vectors of accumulators."""
        ...

    def pack(self, weights: Array, tap_offsets: Array) -> bytes:
        """Return weights (panels, channels, taps, k of a tap) in the order in which they are read.

        `tap_offsets` are byte offsets from a position's first LHS element to the first of each tap.
        """
        ...


@dataclass(frozen=True, slots=True)
class Float32:
    """float32, clamped to `low` and `high`."""

    low: float
    high: float

    item_bytes = output_bytes = lhs_bytes = weight_bytes = 4
    input_offset = 0
    kr = lhs_rows = 1
    accumulator_type = F32
    weight_prescale = 1
    has_weight_zero_point = is_group_sparse = False
    unroll_epilogue = True

    def can_read_lhs_directly(self, channels: int) -> bool:
        """Return True."""
        return True

    def temporaries(self, target: Target) -> int:
        """Return 0: a multiply-add has none; 8 for elements of two K groups."""
        return 8 if target.multiplies_by_element else 0

    def input_converter(self, kb: KernelBuilder, params: Value) -> Float32:
        """Return this: input elements are LHS elements."""
        return self

    def convert(self, kb: KernelBuilder, source: Value, offset: Value, count: int) -> Value:
        """Load `count` elements."""
        return kb.load(vector(F32, count), source, offset)

    def padding(self, kb: KernelBuilder, count: int) -> Value:
        """Return zeros."""
        return kb.splat(F32, 0.0, count)

    def init_accumulators(self, kb: KernelBuilder, params: Value, channel: Value, lanes: int) -> Value:
        """Load the bias."""
        return kb.load(vector(F32, lanes), params, kb.mul(channel, 4))

    def load_lhs(self, kb: KernelBuilder, address: Value, offset: Value, lanes: int) -> Value:
        """Load one element and broadcast it."""
        return kb.broadcast(kb.load(F32, address, offset), lanes)

    def weight_type(self, lanes: int) -> Any:
        """Return `lanes` x f32."""
        return vector(F32, lanes)

    def multiply_add(self, kb: KernelBuilder, acc: Value, lhs: Value, weights: Value) -> Value:
        """Return acc + lhs * weights, fused if the target has FMA."""
        return fmuladd(kb, lhs, weights, acc)

    def epilogue(self, kb: KernelBuilder, accs: Sequence[Value], params: Value, channel: Value) -> list[Value]:
        """Return the accumulators, clamped. NaN is kept."""
        return [self._clamped(kb, acc) for acc in accs]

    def _clamped(self, kb: KernelBuilder, acc: Value) -> Value:
        # With the bound as first operand a comparison and a select are one maxps or minps, which returns its second
        # operand, the accumulator, if that is NaN.
        lanes = acc.type.count
        if self.low > -np.inf:
            low = kb.splat(F32, self.low, lanes)
            acc = kb.ir.select(kb.ir.fcmp_ordered(">", low, acc), low, acc)
        if self.high < np.inf:
            high = kb.splat(F32, self.high, lanes)
            acc = kb.ir.select(kb.ir.fcmp_ordered("<", high, acc), high, acc)
        return acc

    def pack(self, weights: Array, _: Array) -> bytes:
        """Return (panels, taps, k, channels)."""
        return weights.transpose(0, 2, 3, 1).astype(np.float32).tobytes()


class HalfWeights(Float32):
    """float32 with weights that are float16 in memory, of half the size. Each is the float32 that it stands for."""

    __slots__ = ()
    weight_bytes = 2

    def weight_type(self, lanes: int) -> Any:
        """Return `lanes` x f16."""
        return vector(F16, lanes)

    def multiply_add(self, kb: KernelBuilder, acc: Value, lhs: Value, weights: Value) -> Value:
        """Return acc + lhs * weights, fused if the target has FMA."""
        return fmuladd(kb, lhs, kb.ir.fpext(weights, acc.type), acc)

    def pack(self, weights: Array, _: Array) -> bytes:
        """Return (panels, taps, k, channels)."""
        return weights.transpose(0, 2, 3, 1).astype(np.float16).tobytes()


# -- 8-bit inputs in 16 bits -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ZeroPointSubtracted:
    """Converts 8-bit elements to int16, and subtracts the zero point. Padding is 0."""

    is_signed: bool
    zero_point: Value

    item_bytes = 1
    lhs_bytes = 2

    def convert(self, kb: KernelBuilder, source: Value, offset: Value, count: int) -> Value:
        """Load `count` elements and subtract the zero point."""
        extend = kb.ir.sext if self.is_signed else kb.ir.zext
        values = extend(kb.load(vector(I8, count), source, offset), vector(I16, count))
        return kb.ir.sub(values, kb.broadcast(kb.ir.trunc(self.zero_point, I16), count))

    def padding(self, kb: KernelBuilder, count: int) -> Value:
        """Return zeros."""
        return kb.splat(I16, 0, count)


@dataclass(frozen=True, slots=True)
class DotS16x2:
    """8-bit values minus their zero points, as int16, multiplied in pairs (dot2)."""

    is_signed: bool
    requantization: Epilogue

    item_bytes = 1
    lhs_bytes = weight_bytes = 2
    kr = 2
    lhs_rows = 1
    accumulator_type = I32
    has_weight_zero_point = is_group_sparse = unroll_epilogue = False

    def can_read_lhs_directly(self, channels: int) -> bool:
        """Return False."""
        return False

    def temporaries(self, target: Target) -> int:
        """Return 1, or 0 if one instruction multiplies and accumulates; 12 for even and odd weights of two K groups."""
        return 12 if target.multiplies_by_element else 0 if target.vpdpwssd else 1

    @property
    def weight_prescale(self) -> int:
        """The requantization's."""
        return self.requantization.weight_prescale

    @property
    def output_bytes(self) -> int:
        """The requantization's."""
        return self.requantization.output_bytes

    @property
    def input_offset(self) -> int:
        """The requantization's."""
        return self.requantization.input_offset

    def input_converter(self, kb: KernelBuilder, params: Value) -> ZeroPointSubtracted:
        """Return the conversion to int16."""
        return ZeroPointSubtracted(self.is_signed, self.requantization.input_zero_point(kb, params))

    def init_accumulators(self, kb: KernelBuilder, params: Value, channel: Value, lanes: int) -> Value:
        """Load the bias."""
        return self.requantization.bias(kb, params, channel, lanes)

    def load_lhs(self, kb: KernelBuilder, address: Value, offset: Value, lanes: int) -> Value:
        """Load two elements and broadcast them."""
        return kb.ir.bitcast(kb.broadcast(kb.load(I32, address, offset), lanes), vector(I16, 2 * lanes))

    def weight_type(self, lanes: int) -> Any:
        """Return 2 * `lanes` x i16."""
        return vector(I16, 2 * lanes)

    def multiply_add(self, kb: KernelBuilder, acc: Value, lhs: Value, weights: Value) -> Value:
        """Return acc + dot2(lhs, weights)."""
        return dot2_of_pair(kb, acc, lhs, weights)

    def epilogue(self, kb: KernelBuilder, accs: Sequence[Value], params: Value, channel: Value) -> list[Value]:
        """Return the requantized accumulators."""
        return self.requantization.requantize(kb, accs, params, channel)

    def pack(self, weights: Array, _: Array) -> bytes:
        """Return (panels, taps, k / 2, channels, 2); an odd K element is paired with 0."""
        return in_k_groups(weights.astype(np.int16), self.kr)


def in_k_groups(weights: Array, kr: int, multiple: int | None = None) -> bytes:
    """Return weights (panels, channels, taps, k) as (panels, taps, k / kr, channels, kr).

    Each tap is filled up with 0 to a multiple of `multiple` elements, by default `kr`, of which it is a multiple.
    """
    panels, channels, taps, k = weights.shape
    multiple = multiple or kr
    filled = np.zeros((panels, channels, taps, math.ceil(k / multiple) * multiple), weights.dtype)
    filled[..., :k] = weights
    return filled.reshape(panels, channels, taps, -1, kr).transpose(0, 2, 3, 1, 4).tobytes()


# -- 8-bit inputs in 8 bits --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SignFlipped:
    """Converts 8-bit elements to uint8 or int8, from the other if `is_flipped`: x + 128 or x - 128, both XOR 0x80.

    Padding is the zero point.
    """

    is_flipped: bool
    zero_point: Value

    item_bytes = lhs_bytes = 1

    def convert(self, kb: KernelBuilder, source: Value, offset: Value, count: int) -> Value:
        """Load and convert `count` elements."""
        return self.flipped(kb, kb.load(vector(I8, count), source, offset))

    def flipped(self, kb: KernelBuilder, values: Value) -> Value:
        """Convert elements, in either direction."""
        return kb.ir.xor(values, kb.splat(I8, -128, values.type.count)) if self.is_flipped else values

    def padding(self, kb: KernelBuilder, count: int) -> Value:
        """Return the zero point, which is that of the LHS."""
        return kb.broadcast(kb.ir.trunc(self.zero_point, I8), count)


@dataclass(frozen=True, slots=True)
class _S8Weights:
    """8-bit inputs times s8 weights. The bias contains -LHS zero point * (sum of the channel's weights)."""

    is_signed: bool
    requantization: Epilogue

    item_bytes = lhs_bytes = weight_bytes = 1
    kr = 4
    weight_prescale = lhs_rows = 1
    accumulator_type = I32
    lhs_is_signed = False

    @property
    def output_bytes(self) -> int:
        """The requantization's."""
        return self.requantization.output_bytes

    @property
    def input_offset(self) -> int:
        """The requantization's."""
        return self.requantization.input_offset

    def can_read_lhs_directly(self, channels: int) -> bool:
        """Return whether input elements are LHS elements and no K group reads past a pixel."""
        return self.is_signed == self.lhs_is_signed and channels % self.kr == 0

    def input_converter(self, kb: KernelBuilder, params: Value) -> SignFlipped:
        """Return the conversion to the type of LHS elements."""
        is_flipped = self.is_signed != self.lhs_is_signed
        return SignFlipped(is_flipped, self.requantization.input_zero_point(kb, params))

    def init_accumulators(self, kb: KernelBuilder, params: Value, channel: Value, lanes: int) -> Value:
        """Load the corrected bias."""
        return self.requantization.bias(kb, params, channel, lanes)

    def weight_type(self, lanes: int) -> Any:
        """Return 4 * `lanes` x i8."""
        return vector(I8, 4 * lanes)

    def epilogue(self, kb: KernelBuilder, accs: Sequence[Value], params: Value, channel: Value) -> list[Value]:
        """Return the requantized accumulators."""
        return self.requantization.requantize(kb, accs, params, channel)


@dataclass(frozen=True, slots=True)
class Dot4(_S8Weights):
    """Four products summed in 32 bits (dot4): what `DotU8S8x4`, `DotS8S8x4` and those for matrices have in common.

    Weights that do not fit int8 are packed minus a residual zero point; zp * (sum of a position's inputs) is added to
    its accumulators (gemmlowp's rhs_offset).
    """

    has_weight_zero_point: bool

    is_group_sparse = False

    @property
    def unroll_epilogue(self) -> bool:
        """Return whether the requantization is short."""
        return self.requantization.is_short

    def weight_zero_point(self, kb: KernelBuilder, params: Value) -> Value:
        """Load the residual weight zero point."""
        return self.requantization.weight_zero_point(kb, params)

    def temporaries(self, target: Target) -> int:
        """Return 0: one instruction multiplies and accumulates."""
        return 0

    def load_lhs(self, kb: KernelBuilder, address: Value, offset: Value, lanes: int) -> Value:
        """Load four elements and broadcast them."""
        return _broadcast_four(kb, address, offset, lanes)

    def multiply_add(self, kb: KernelBuilder, acc: Value, lhs: Value, weights: Value) -> Value:
        """Return acc + dot4(lhs, weights)."""
        return self.dot(kb, acc, lhs, weights)

    def dot(self, kb: KernelBuilder, acc: Value, lhs: Value, weights: Value) -> Value:
        """Return acc + dot4(lhs, weights): also for the sums of a row's elements."""
        return (dot4_signed if self.lhs_is_signed else dot4)(kb, acc, lhs, weights)

    def pack(self, weights: Array, _: Array) -> bytes:
        """Return (panels, taps, k / kr, channels, kr), filled up with 0."""
        return in_k_groups(weights.astype(np.int8), self.kr)


class DotU8S8x4(Dot4):
    """dot4 of uint8 elements."""

    __slots__ = ()


class DotS8S8x4(Dot4):
    """dot4 of int8 elements."""

    __slots__ = ()
    lhs_is_signed = True


def _broadcast_four(kb: KernelBuilder, address: Value, offset: Any, lanes: int) -> Value:
    return kb.ir.bitcast(kb.broadcast(kb.load(I32, address, offset), lanes), vector(I8, 4 * lanes))


@dataclass(frozen=True, slots=True)
class MaddU8S8Acc16(_S8Weights):
    """Four products summed in 16 bits, eight for each lane (acc16). Weights are packed as group lists."""

    kr = ACC16_KR
    has_weight_zero_point = unroll_epilogue = False
    is_group_sparse = True

    def temporaries(self, target: Target) -> int:
        """Return 3: the products of two fours, and the ones by which pmaddwd multiplies."""
        return 3

    def load_lhs(self, kb: KernelBuilder, address: Value, offset: Value, lanes: int) -> tuple[Value, Value]:
        """Load eight elements and broadcast them, as two fours."""
        first = kb.at(address, offset)
        return _broadcast_four(kb, first, 0, lanes), _broadcast_four(kb, first, 4, lanes)

    def multiply_add(
        self, kb: KernelBuilder, acc: Value, lhs: tuple[Value, Value], weights: tuple[Value, Value]
    ) -> Value:
        """Return acc + the eight products."""
        return madd_acc16(kb, acc, lhs, weights)

    def pack(self, weights: Array, tap_offsets: Array) -> bytes:
        """Return the group lists."""
        return pack_group_lists(weights, tap_offsets)


# ----------------------------------------------------------------------------------------------------------------------
# Micro-kernels with instructions that multiply matrices, and the choice among all with int8 weights.
#
# An instruction of AArch64 (mmla) multiplies eight LHS elements of two rows with eight weights of two channels. Its
# accumulator is the 2 x 2 matrix of the sums, row by row. Bias and epilogue are by rows, so `exchange_halves` before
# and after the K loop.
#
# An instruction of AMX multiplies 64 LHS elements of up to 16 rows with 64 weights of 16 channels, all of them in tile
# registers of 1 KiB (`gemm_tile`).


TILE_ROWS = 16
"""Rows of a tile register of AMX."""

_MIN_TILE_K = 32  # of a tap: with fewer, more than half of a tile's products are by 0


class MaddS8S8(Dot4):
    """dot4 of int8 elements without such an instruction: magnitudes times weights with the elements' signs.

    Products of a pair are summed in 16 bits: two of at most 128 · 127, if no weight is -128. Weights stay bytes, where
    those for acc16 may be listed several times.
    """

    __slots__ = ()
    lhs_is_signed = True

    def temporaries(self, target: Target) -> int:
        """Return 4: products, the ones by which pmaddwd multiplies, and magnitudes beside two LHS vectors."""
        return 4

    def load_lhs(self, kb: KernelBuilder, address: Value, offset: Value, lanes: int) -> tuple[Value, Value]:
        """Load four elements and broadcast them; also their magnitudes."""
        values = _broadcast_four(kb, address, offset, lanes)
        return kb.intrinsic("llvm.abs", values, I1(0)), values

    def multiply_add(self, kb: KernelBuilder, acc: Value, lhs: tuple[Value, Value], weights: Value) -> Value:
        """Return acc plus the four products."""
        return madd_signed(kb, acc, *lhs, weights)


class _Mmla(Dot4):
    """Eight products for each of two rows and two channels, summed in 32 bits."""

    __slots__ = ()
    kr = 8
    lhs_rows = 2

    def temporaries(self, target: Target) -> int:
        """Return 5: LLVM loads the LHS of two K groups at once, and weights in pairs."""
        return 5

    def load_lhs(self, kb: KernelBuilder, address: Value, offset: Value, lanes: int) -> Value:
        """Load eight elements: half of an LHS vector."""
        return kb.load(vector(I8, 2 * lanes), address, offset)

    def multiply_add(self, kb: KernelBuilder, acc: Value, lhs: Value, weights: Value) -> Value:
        """Return acc + mmla(lhs, weights)."""
        return mmla(kb, acc, lhs, weights, self.lhs_is_signed)


class MmlaU8S8x8(_Mmla):
    """mmla of uint8 elements."""

    __slots__ = ()


class MmlaS8S8x8(_Mmla):
    """mmla of int8 elements."""

    __slots__ = ()
    lhs_is_signed = True


class Amx(Dot4):
    """64 products for each of 16 rows and 16 channels, summed in 32 bits. Accumulators are in tile registers."""

    __slots__ = ()
    kr = 64

    def pack(self, weights: Array, _: Array) -> bytes:
        """Return (panels, taps, k / 4, channels, 4), each tap filled up with 0 to a multiple of 64 elements."""
        return in_k_groups(weights.astype(np.int8), 4, self.kr)


class AmxU8S8x64(Amx):
    """tdpbusd of uint8 elements."""

    __slots__ = ()


class AmxS8S8x64(Amx):
    """tdpbssd of int8 elements."""

    __slots__ = ()
    lhs_is_signed = True

    def dot(self, kb: KernelBuilder, acc: Value, lhs: Value, weights: Value) -> Value:
        """Return acc + dot4(lhs, weights), for `weights` that are not negative: 1 in the sums of a row's elements."""
        return dot4(kb, acc, weights, lhs)


def exchange_halves(kb: KernelBuilder, accs: Sequence[Value], nr_vectors: int) -> list[Value]:
    """Return the accumulators of rows as those of matrices, or the reverse, for a tile of `nr_vectors`.

    Four channels of two rows are two vectors in both forms: the second half of the first vector and the first half of
    the second one change places.
    """
    lanes, results = accs[0].type.count, list(accs)
    low, high = ([*half, *(lanes + lane for lane in half)] for half in (range(lanes // 2), range(lanes // 2, lanes)))
    for first in range(0, len(accs), 2 * nr_vectors):
        for a in range(first, first + nr_vectors):
            b = a + nr_vectors
            results[a], results[b] = (kb.shuffle(accs[a], accs[b], mask) for mask in (low, high))
    return results


def s8_micro_kernel(
    target: Target,
    shape: ConvShape,
    is_signed: bool,
    has_weight_zero_point: bool,
    requantization: Epilogue,
) -> Dot4 | MaddU8S8Acc16:
    """Return the target's micro-kernel with int8 weights, for int8 or uint8 inputs.

    Inputs need no conversion if the target has the instruction for their type. AMX needs a whole tile of positions.
    mmla needs two positions; with at most four K elements half of it would multiply by 0.
    """
    if not target.has_dot4:
        return MaddU8S8Acc16(is_signed, requantization)
    if target.has_tiles and shape.tiled_positions >= TILE_ROWS and shape.taps[2] >= _MIN_TILE_K:
        return (AmxS8S8x64 if is_signed else AmxU8S8x64)(is_signed, requantization, has_weight_zero_point)
    is_mmla = target.usmmla is not None and shape.tiled_positions > 1 and shape.taps[2] > Dot4.kr
    unsigned: type[Dot4] = MmlaU8S8x8 if is_mmla else DotU8S8x4
    signed: type[Dot4] = MmlaS8S8x8 if is_mmla else DotS8S8x4
    return (signed if target.dot4_is_signed(is_signed) else unsigned)(is_signed, requantization, has_weight_zero_point)
