"""Vector operations within 128-bit subvectors: punpckl*, punpckh* and packs* of x86, zip1 and zip2 of NEON.

Unpacking a vector of bytes to 32-bit elements gives four vectors: the first with the elements 0 to 3 of each subvector,
the second with 4 to 7. Packing four vectors to bytes restores the order. NEON has one subvector.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nnfmq.engines.compiled.ir_builder import I8, I16, KernelBuilder, Value, vector

__all__ = ["PANEL_VECTORS", "pack_subvectors", "subvector_order", "unpack_subvectors"]

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
