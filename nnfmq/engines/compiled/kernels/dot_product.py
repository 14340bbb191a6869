"""Micro-kernels: how packed inputs (LHS) and weights are multiplied and accumulated.

    class            lhs   weights  accumulator  instructions                   input zero point
    Float32          f32   f32      f32          vfmadd231ps, fmla              -
    DotS16x2         s16   s16      s32          pmaddwd+paddd, vpdpwssd, smlal subtracted while packing
    DotU8S8x4        u8    s8       s32          vpdpbusd, usdot                folded into the bias
    DotS8S8x4        s8    s8       s32          sdot                           folded into the bias
    MmlaU8S8x8       u8    s8       s32          usmmla                         folded into the bias
    MmlaS8S8x8       s8    s8       s32          smmla                          folded into the bias
    AmxU8S8x64       u8    s8       s32          tdpbusd                        folded into the bias
    AmxS8S8x64       s8    s8       s32          tdpbssd                        folded into the bias
    MaddU8S8Acc16    u8    s8       s16, s32     2 pmaddubsw, paddw, pmaddwd    folded into the bias

int8 inputs of the u8 kernels are packed as x + 128, uint8 inputs of the s8 kernels as x - 128. Padding is packed as the
value that represents 0. Targets without one of these instructions get an exact equivalent in others. The Mmla and Amx
classes are in `matrix_product`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nnfmq.engines.compiled.ir_builder import F32, I8, I16, I32, KernelBuilder, Value, vector
from nnfmq.engines.compiled.kernels.dot_instructions import dot2_of_pair, dot4, dot4_signed, madd_acc16
from nnfmq.engines.compiled.kernels.float32_multiplier import Float32Multiplier
from nnfmq.engines.compiled.kernels.packing import ACC16_KR, InputConverter, pack_group_lists
from nnfmq.engines.compiled.kernels.requantize import Requantization
from nnfmq.engines.compiled.kernels.vector_math import fmuladd
from nnfmq.engines.compiled.target import Target

__all__ = [
    "Dot4",
    "DotS8S8x4",
    "DotS16x2",
    "DotU8S8x4",
    "Float32",
    "MaddU8S8Acc16",
    "MicroKernel",
    "in_k_groups",
]

Array = npt.NDArray[Any]


class MicroKernel(Protocol):
    """LHS packing, multiply-accumulate and epilogue for one pair of data types.

    Each step consumes kr consecutive K elements per lane (XNNPACK's kr). `params` is the address of the epilogue's
    constant, `channel` the packed channel of the first lane.
    """

    item_bytes: int
    """Bytes of an input element."""
    output_bytes: int
    """Bytes of an output element."""
    lhs_bytes: int
    """Bytes of an LHS element, and of a weight."""
    kr: int
    lhs_rows: int
    """Rows of a tile that share an LHS vector and an accumulator: 2 if an instruction multiplies matrices, else 1."""
    accumulator_type: Any
    """The type of an accumulator, of 32 bits."""

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

    item_bytes = output_bytes = lhs_bytes = 4
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
    requantization: Requantization

    item_bytes = output_bytes = 1
    lhs_bytes = 2
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
        return self.requantization.multiplier.weight_prescale

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
    requantization: Requantization

    item_bytes = output_bytes = lhs_bytes = 1
    kr = 4
    weight_prescale = lhs_rows = 1
    accumulator_type = I32
    lhs_is_signed = False

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
    """Four products summed in 32 bits (dot4): what `DotU8S8x4`, `DotS8S8x4` and `matrix_product` have in common.

    Weights that do not fit int8 are packed minus a residual zero point; zp * (sum of a position's inputs) is added to
    its accumulators (gemmlowp's rhs_offset).
    """

    has_weight_zero_point: bool

    is_group_sparse = False

    @property
    def unroll_epilogue(self) -> bool:
        """Return whether the requantization is short."""
        return isinstance(self.requantization.multiplier, Float32Multiplier)

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
