"""Tiles of 8-bit depthwise convolutions whose input rows are interleaved in registers, not in scratch memory.

The pixels that a tile's last window shares with the next tile's first one stay in registers. So only results are
stored, and the CPU multiplies and requantizes while it interleaves: shuffles take one of its ports. In scratch memory a
pixel of 64 channels takes 256 bytes, and a wide image's row most of the first-level cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from nnfmq.engines.compiled.ir_builder import KernelBuilder, Value
from nnfmq.engines.compiled.kernels.row_interleaving import RowInterleaver
from nnfmq.engines.compiled.kernels.subvectors import PANEL_VECTORS

__all__ = ["RegisterTiles"]


@dataclass(frozen=True, slots=True)
class RegisterTiles:
    """Emits the tiles of the output rows of a panel.

    `rows` are the input rows under them, `weights` the addresses of the terms of the panel's weights, and `biases` the
    sums' first values, one for each vector of channels.
    """

    interleaver: RowInterleaver
    rows: Sequence[Sequence[Value]]
    weights: Sequence[Value]
    biases: Callable[[], list[Value]]

    @property
    def _kb(self) -> KernelBuilder:
        return self.interleaver.kb

    @property
    def _kept(self) -> int:
        """Pixels of the window that the next tile's first window has, too."""
        return self.interleaver.taps.columns - self.interleaver.taps.stride

    def emit(self, sizes: Iterable[tuple[int, Value]], store: Callable[[Value, list[list[Value]]], None]) -> None:
        """Emit loops over the tiles of an output row; each of `sizes` is a number of positions, and how many tiles.

        `store` gets the number of a tile's first position, and for each vector of channels the sums of all rows and
        positions.
        """
        kb, left = self._kb, self._kb.ir.neg(self.interleaver.n.left)
        begin = kb.i64(0)
        kept: Sequence[Value] = _flat([self._pixel(left, number) for number in range(self._kept)])
        for positions, tiles in sizes:
            kept = kb.for_loop(tiles, kept, partial(self._tile, begin, positions, store), may_be_empty=True)
            begin = kb.ir.add(begin, kb.ir.mul(tiles, kb.i64(positions)))

    def _tile(
        self,
        begin: Value,
        positions: int,
        store: Callable[[Value, list[list[Value]]], None],
        number: Value,
        kept: Sequence[Value],
    ) -> list[Value]:
        """Emit a tile, given the pixels kept from the one before. Returns those to be kept."""
        kb, stride = self._kb, self.interleaver.taps.stride
        first = kb.ir.add(begin, kb.mul(number, positions))
        pixels = [list(kept[at : at + PANEL_VECTORS]) for at in range(0, len(kept), PANEL_VECTORS)]
        store(first, self._sums(kb.ir.sub(kb.mul(first, stride), self.interleaver.n.left), pixels, positions))
        return _flat(pixels[len(pixels) - self._kept :])

    def _pixel(self, first: Value, number: int) -> list[Value]:
        return self.interleaver.pixel(self.rows, self._kb.add(first, number))

    def _sums(self, first: Value, pixels: list[list[Value]], positions: int) -> list[list[Value]]:
        """Return the sums of a tile whose first pixel is `first`. Appends to `pixels` those that it lacks."""
        taps = self.interleaver.taps
        sums = [[bias] * (taps.rows * positions) for bias in self.biases()]
        for pixel in range(taps.columns + (positions - 1) * taps.stride):
            if pixel >= self._kept:
                pixels.append(self._pixel(first, pixel))
            for position in range(positions):
                column = pixel - position * taps.stride
                if 0 <= column < taps.columns:
                    self._multiply_add(sums, pixels[pixel], column, slice(position, None, positions))
        return sums

    def _multiply_add(self, sums: list[list[Value]], pixel: list[Value], column: int, of_position: slice) -> None:
        """Add the products of a pixel with a column of taps to the sums of a position, in all output rows."""
        kb, dot, taps, n = self._kb, self.interleaver.dot, self.interleaver.taps, self.interleaver.n
        vector_bytes = self.interleaver.pixel_bytes // PANEL_VECTORS
        for v, lhs in enumerate(pixel):
            results = sums[v][of_position]
            for row, term in itertools.product(range(taps.rows), self.weights):
                address = kb.at(term, kb.ir.mul(n.vector_weight_bytes, kb.i64(v)))
                weights = dot.load(kb, address, (column * taps.rows + row) * vector_bytes)
                results[row] = dot.multiply_add(kb, results[row], lhs, weights)
            sums[v][of_position] = results


def _flat(pixels: Sequence[Sequence[Value]]) -> list[Value]:
    return list(itertools.chain.from_iterable(pixels))
