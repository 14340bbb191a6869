"""Interleaving of input rows for 8-bit depthwise convolutions, and the packing of sums that undoes it.

A dot instruction sums two or four adjacent products in each 32-bit lane. A depthwise convolution sums products of one
channel, which come from different input rows: interleaving puts one channel of a group of rows into one lane.

The channels are then in the order of `subvectors`, until their results are packed to bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nnfmq.engines.compiled.ir_builder import I8, I16, KernelBuilder, Value, vector
from nnfmq.engines.compiled.kernels.dot_instructions import dot2, dot4, dot4_signed
from nnfmq.engines.compiled.kernels.dot_product import Array
from nnfmq.engines.compiled.kernels.requantize import Requantization
from nnfmq.engines.compiled.kernels.subvectors import unpack_subvectors
from nnfmq.engines.compiled.target import Target

__all__ = ["RowDot"]

_MIN_S8, _MAX_S8 = -128, 127


@dataclass(frozen=True, slots=True)
class RowDot:
    """Products of 8-bit inputs of `rows` interleaved rows, summed in int32.

    4 rows: u8 or s8 times s8 (dot4). 2 rows: s16 (dot2). 1 row: s16, on targets without instructions that sum products.
    The bias contains -input zero point * (sum of the channel's weights). Sums wrap around: only the last has to fit.

    Weights that int8 does not hold are sums of two `terms`. Models have them in some channels of uint8 filters.
    """

    rows: int
    terms: int
    is_signed: bool
    requantization: Requantization

    @classmethod
    def of(
        cls, target: Target, weight_range: tuple[int, int], is_signed: bool, requantization: Requantization
    ) -> RowDot:
        """Return the one that sums the most products per instruction."""
        low, high = weight_range
        if target.has_dot4 and low >= 2 * _MIN_S8 and high <= 2 * _MAX_S8:
            return cls(4, 1 if low >= _MIN_S8 and high <= _MAX_S8 else 2, is_signed, requantization)
        return cls(2 if target.pmaddwd is not None else 1, 1, is_signed, requantization)

    @property
    def group_bytes(self) -> int:
        """Bytes of a channel of a group of rows, as LHS or as weights."""
        return 2 if self.rows == 1 else 4

    @property
    def can_prescale(self) -> bool:
        """Whether weights may be packed doubled."""
        return self.rows < 4

    def lhs_is_signed(self, target: Target) -> bool:
        """Return whether inputs are read as int8, else as uint8."""
        return self.rows == 4 and target.dot4_is_signed(self.is_signed)

    def _kind(self, lanes: int) -> Any:
        return vector(I8, 4 * lanes) if self.rows == 4 else vector(I16, self.rows * lanes)

    def interleave(self, kb: KernelBuilder, rows: Sequence[Value]) -> list[Value]:
        """Return vectors of bytes, one for each row, as the four vectors whose lanes have one channel each.

        They are adjacent in memory; two of them may be joined in one.
        """
        if self.rows == 1:
            return [kb.ir.zext(rows[0], vector(I16, rows[0].type.count))]
        shorts, zero = vector(I16, rows[0].type.count // 2), kb.splat(I8, 0, rows[0].type.count)
        first = [unpack_subvectors(kb, rows[0], rows[1], half) for half in (0, 1)]
        if self.rows == 2:
            return [unpack_subvectors(kb, pair, zero, half) for pair in first for half in (0, 1)]
        second = [unpack_subvectors(kb, rows[2], rows[3], half) for half in (0, 1)]
        pairs = [[kb.ir.bitcast(pair, shorts) for pair in both] for both in zip(first, second, strict=True)]
        return [unpack_subvectors(kb, low, high, half) for low, high in pairs for half in (0, 1)]

    def load(self, kb: KernelBuilder, address: Value, offset: Any) -> Value:
        """Load LHS or weights of a vector of channels."""
        return kb.load(self._kind(kb.target.lanes), address, offset)

    def multiply_add(self, kb: KernelBuilder, acc: Value, lhs: Value, weights: Value) -> Value:
        """Return `acc` plus the products of a group of rows."""
        if self.rows == 4:
            return (dot4_signed if self.lhs_is_signed(kb.target) else dot4)(kb, acc, lhs, weights)
        if self.rows == 2:
            return dot2(kb, acc, lhs, weights)
        return kb.ir.add(acc, kb.ir.mul(kb.ir.sext(lhs, acc.type), kb.ir.sext(weights, acc.type)))

    def pack(self, weights: Array) -> list[Array]:
        """Return the terms of weights (panels, vectors, columns, groups, tile rows, rows of a group, lanes) as read."""
        weights = np.moveaxis(weights, -2, -1)
        if self.rows < 4:
            return [weights.astype(np.int16)]
        first = np.clip(weights, _MIN_S8, _MAX_S8)
        return [term.astype(np.int8) for term in (first, weights - first)[: self.terms]]
