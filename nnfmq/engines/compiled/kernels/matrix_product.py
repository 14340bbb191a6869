"""Micro-kernels with instructions that multiply matrices, and the choice among all with int8 weights.

An instruction of AArch64 (mmla) multiplies eight LHS elements of two rows with eight weights of two channels. Its
accumulator is the 2 x 2 matrix of the sums, row by row. Bias and epilogue are by rows, so `exchange_halves` before and
after the K loop.

An instruction of AMX multiplies 64 LHS elements of up to 16 rows with 64 weights of 16 channels, all of them in tile
registers of 1 KiB (`amx_tile`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nnfmq.engines.compiled.ir_builder import I8, KernelBuilder, Value, vector
from nnfmq.engines.compiled.kernels.conv_shape import ConvShape
from nnfmq.engines.compiled.kernels.dot_instructions import dot4, mmla
from nnfmq.engines.compiled.kernels.dot_product import (
    Array,
    Dot4,
    DotS8S8x4,
    DotU8S8x4,
    MaddU8S8Acc16,
    in_k_groups,
)
from nnfmq.engines.compiled.kernels.requantize import Requantization
from nnfmq.engines.compiled.target import Target

__all__ = [
    "TILE_ROWS",
    "Amx",
    "AmxS8S8x64",
    "AmxU8S8x64",
    "MmlaS8S8x8",
    "MmlaU8S8x8",
    "exchange_halves",
    "s8_micro_kernel",
]

TILE_ROWS = 16
"""Rows of a tile register of AMX."""

_MIN_TILE_K = 32  # of a tap: with fewer, more than half of a tile's products are by 0


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
    target: Target, shape: ConvShape, is_signed: bool, has_weight_zero_point: bool, requantization: Requantization
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
