"""Products: CONV_2D, GROUPED_CONV_2D and FULLY_CONNECTED, as sums of taps over a band of the image.

The sums of a tile, `rows` positions times `vectors` of channels, stay in registers while all taps go by. Work is cut
into blocks of positions and, where these are few or the weights many, groups of channels. Positions beside the last
whole tile are computed again by the last one, so that there is one shape of tile in a kernel. Extents are numbers in
memory: products of any shape that have a tile in common share their code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from nnfmq.engines.compiled.ir_builder import I32, I64, KernelBuilder, Value, load_params, pack_params
from nnfmq.engines.compiled.kernels.arithmetic import Arithmetic, Array, Quads
from nnfmq.engines.compiled.kernels.cell_sums import Tap, counting
from nnfmq.engines.compiled.kernels.cells import SLACK_BYTES, Band, BandNumbers, emit_band, widen
from nnfmq.engines.compiled.kernels.octets import LINE_BYTES
from nnfmq.engines.compiled.kernels.product_shape import ProductShape
from nnfmq.engines.compiled.target import Target

__all__ = ["Product", "Walk", "band_of"]

Walk: TypeAlias = Literal["in place", "pixels", "band"]
"""What lies under the positions of a block: pixels of the image, or of its widened copy, or rows with padding."""


class _Numbers(NamedTuple):
    """What products of one kernel differ in. Bytes but for what is counted."""

    blocks: Any
    groups: Any
    panels: Any
    panel_bytes: Any
    positions: Any
    step: Any  # from one position's cells to the next one's
    place: Any  # from one position's results to the next one's
    tap_rows: Any
    tap_columns: Any
    length: Any  # rounds of a tap
    down: Any  # from one row of taps to the next
    across: Any
    pixel_in: Any
    block_cells: Any  # counted
    pixels: Any  # with the same weights
    blocks_of_weights: Any
    weights_bytes: Any
    panels_of_a_part: Any
    part_in: Any
    part_out: Any
    image_bytes: Any
    blocks_of_an_image: Any
    served: Any
    rows: Any
    row_out: Any
    totals: Any  # in the scratch memory
    tap_vectors: Any  # whole vectors of cells of a tap, but the last one
    tap_rest: Any  # cells of the last one


@dataclass(frozen=True, slots=True)
class Product:
    """One product, planned for a target: its blocks of positions, its groups of channels, and what decides its code.

    That is what shows in its `repr`: the tile, how many channels the last panel of a part has if not all (`rest`), what
    the kernel walks over, and how many groups it multiplies `at_once`, in one round.
    """

    shape: ProductShape = field(repr=False)
    block: int = field(repr=False)
    groups: int = field(repr=False)
    arithmetic: Arithmetic
    tile: tuple[int, int]
    lanes: int
    rest: int
    walk: Walk
    is_parted: bool
    is_own: bool
    at_once: int

    compile_cost = 3

    @property
    def work_items(self) -> int:
        """Blocks of positions times groups of channels."""
        return self._blocks * self.groups

    @property
    def panels(self) -> int:
        """How many panels, tiles' widths of channels, there are."""
        return self.shape.parts * self._panels_of_a_part

    @property
    def _panels_of_a_part(self) -> int:
        return math.ceil(self.shape.part / self.panel)

    @property
    def order(self) -> Array:
        """The channel at each place of the panels; beside the last one of a part it is repeated."""
        places = np.minimum(np.arange(self._panels_of_a_part * self.panel), self.shape.part - 1)
        result: Array = (np.arange(self.shape.parts)[:, None] * self.shape.part + places).reshape(-1)
        return result

    @property
    def panel(self) -> int:
        """Channels of a tile."""
        return self.tile[1] * self.lanes

    @property
    def _band(self) -> Band:
        return band_of(self.shape, self.arithmetic, self.block)

    @property
    def _blocks_of_an_image(self) -> int:
        return math.ceil(self.shape.rows.count / self.block)

    @property
    def _blocks_of_weights(self) -> int:
        return math.ceil(self.shape.pixels / self.block)

    @property
    def _blocks(self) -> int:
        s = self.shape
        if s.is_pointwise:
            return self._blocks_of_weights * (s.batch if s.own else 1)
        return s.batch * self._blocks_of_an_image

    def scratch_bytes(self, target: Target) -> int:
        """The cells of a block, and a number for each of its positions."""
        if not self.arithmetic.has_excess:
            return self._cells_bytes
        return self._cells_bytes + 4 * self.block * (self.shape.columns.count if self.walk == "band" else 1)

    @property
    def _cells_bytes(self) -> int:
        if self.walk == "in place":
            return 0
        if self.walk == "band":
            return self._band.bytes
        return self.block * self.shape.channels * self.arithmetic.cell_bytes + SLACK_BYTES

    def pack(self, weights: Array) -> bytes:
        """Return `weights` (channels out, height, width, channels in), zero point subtracted, panel by panel."""
        tap_rows, tap_columns, cells = self.shape.taps
        parts, taps = self.shape.parts, tap_rows * tap_columns
        filled = np.zeros((parts, self._panels_of_a_part * self.panel, taps, cells), weights.dtype)
        filled[:, : self.shape.part] = weights.reshape(parts, self.shape.part, taps, cells)
        panels = filled.reshape(self.panels, self.panel, taps, cells)
        return self.arithmetic.pack(panels, self._tap_places)

    @property
    def _tap_places(self) -> Array:
        """Bytes from a position's first cell to that of each tap."""
        rows, columns, _ = self.shape.taps
        result: Array = (np.arange(rows)[:, None] * self._down + np.arange(columns) * self._across).reshape(-1)
        return result

    @property
    def _down(self) -> int:
        return self.shape.rows.dilation * self._band.pitch

    @property
    def _across(self) -> int:
        return self.shape.columns.dilation * self.shape.channels * self.arithmetic.cell_bytes

    def numbers(self) -> bytes:
        """Return the constant with all extents."""
        s, a = self.shape, self.arithmetic
        tap_rows, tap_columns, cells = s.taps
        length, cells_of_a_vector = math.ceil(cells / a.group), 4 * self.lanes // a.cell_bytes
        panel_bytes = tap_rows * tap_columns * length * self.panel * a.group * a.cell_bytes
        place, pixel = s.filters * a.output_bytes, s.channels * a.item_bytes
        own = _Numbers(
            blocks=self._blocks,
            groups=self.groups,
            panels=self.panels,
            panel_bytes=panel_bytes,
            positions=s.columns.count if self.walk == "band" else self.block,
            step=s.columns.stride * s.channels * a.cell_bytes,
            place=place,
            tap_rows=tap_rows,
            tap_columns=tap_columns,
            length=length // self.at_once,
            down=self._down,
            across=self._across,
            pixel_in=pixel,
            block_cells=self.block * s.channels,
            pixels=s.pixels,
            blocks_of_weights=self._blocks_of_weights,
            weights_bytes=self.panels * panel_bytes,
            panels_of_a_part=self._panels_of_a_part,
            part_in=s.depth * a.cell_bytes,
            part_out=s.part * a.output_bytes,
            image_bytes=s.height * s.width * pixel,
            blocks_of_an_image=self._blocks_of_an_image,
            served=self.block,
            rows=s.rows.count,
            row_out=s.columns.count * place,
            totals=self._cells_bytes,
            tap_vectors=(cells - 1) // cells_of_a_vector,
            tap_rest=(cells - 1) % cells_of_a_vector + 1,
        )
        return pack_params(own, self._band.numbers(s.width * pixel))

    def emit(self, kb: KernelBuilder) -> None:
        """Table: input, output, weights, what finishes sums, numbers; own weights come before the output."""
        image, out, weights, finish = map(kb.argument, (0, 2, 1, 3) if self.is_own else range(4))
        emission = _Emission(self, kb, load_params(kb, kb.argument(4), _Numbers), weights, finish)
        with kb.loop(kb.begin, kb.end) as unit:
            emission.emit_unit(image, out, unit)
        kb.return_void()


@dataclass(frozen=True, slots=True)
class _Emission:
    """The instructions of a product, which depend on what shows in its `repr` only."""

    product: Product
    kb: KernelBuilder
    n: _Numbers
    weights: Value
    finish: Value

    @property
    def _a(self) -> Arithmetic:
        return self.product.arithmetic

    def emit_unit(self, image: Value, out: Value, unit: Value) -> None:
        kb, n = self.kb, self.n
        group, block = kb.ir.udiv(unit, n.blocks), kb.ir.urem(unit, n.blocks)
        if self.product.walk == "band":
            self._emit_band(image, out, group, block)
        else:
            self._emit_pixels(image, out, group, block)

    def _emit_pixels(self, image: Value, out: Value, group: Value, block: Value) -> None:
        kb, n = self.kb, self.n
        weights, first = self.weights, kb.ir.mul(block, n.positions)
        if self.product.is_own:
            number = kb.ir.udiv(block, n.blocks_of_weights)
            weights = kb.at(weights, kb.ir.mul(number, n.weights_bytes))
            first = kb.ir.mul(kb.ir.urem(block, n.blocks_of_weights), n.positions)
        first = kb.intrinsic("llvm.smin", first, kb.ir.sub(n.pixels, n.positions))
        if self.product.is_own:
            first = kb.ir.add(first, kb.ir.mul(number, n.pixels))
        cells, target = kb.at(image, kb.ir.mul(first, n.pixel_in)), kb.at(out, kb.ir.mul(first, n.place))
        if self.product.walk == "pixels":
            widen(kb, self._a.widening(kb, self.finish), cells, kb.scratch, n.block_cells)
            cells = kb.scratch
        totals = kb.at(kb.scratch, n.totals)
        if self._a.has_excess:
            self._emit_totals(cells, totals)
        with self._panels(group) as panel:
            self._emit_row(cells, totals, target, weights, panel)

    def _emit_band(self, image: Value, out: Value, group: Value, block: Value) -> None:
        kb, n, a = self.kb, self.n, self._a
        band = load_params(kb, kb.argument(4), BandNumbers, len(_Numbers._fields))
        number, first = (
            kb.ir.udiv(block, n.blocks_of_an_image),
            kb.ir.mul(kb.ir.urem(block, n.blocks_of_an_image), n.served),
        )
        served = kb.intrinsic("llvm.smin", n.served, kb.ir.sub(n.rows, first))
        widening = a.widening(kb, self.finish)
        source = kb.at(image, kb.ir.mul(number, n.image_bytes))
        emit_band(
            kb, band, widening, source, first, served, lambda row, place: widen(kb, widening, row, place, band.within)
        )
        target = kb.at(out, kb.ir.mul(kb.ir.add(kb.ir.mul(number, n.rows), first), n.row_out))
        down = kb.ir.mul(band.stride, band.pitch)
        totals, totals_row = kb.at(kb.scratch, n.totals), kb.mul(n.positions, 4)
        if a.has_excess:
            with kb.loop(0, served) as row:
                self._emit_totals(kb.at(kb.scratch, kb.ir.mul(row, down)), kb.at(totals, kb.ir.mul(row, totals_row)))
        with self._panels(group) as panel, kb.loop(0, served) as row:
            cells, place = kb.at(kb.scratch, kb.ir.mul(row, down)), kb.at(target, kb.ir.mul(row, n.row_out))
            self._emit_row(cells, kb.at(totals, kb.ir.mul(row, totals_row)), place, self.weights, panel)

    def _panels(self, group: Value) -> AbstractContextManager[Value]:
        """Return the loop over the panels of a group."""
        kb, n = self.kb, self.n
        begin, end = (kb.ir.udiv(kb.ir.mul(kb.add(group, more), n.panels), n.groups) for more in (0, 1))
        return kb.loop(begin, end)

    def _emit_totals(self, cells: Value, totals: Value) -> None:
        """Put what the excess of weights adds to each position of a row to `totals`; the last ones twice, as tiles."""
        kb, n, a, lanes, (rows, _) = self.kb, self.n, self._a, self.product.lanes, self.product.tile
        assert isinstance(a, Quads), "no others have an excess"
        counted, zeros = counting(kb, a, lanes, n.step, n.tap_vectors, n.tap_rest), kb.splat(I32, 0, lanes)
        excess, last = a.excess(kb, self.finish), kb.ir.sub(n.positions, kb.i64(rows))
        with kb.loop(0, n.positions, rows) as position:
            position = kb.intrinsic("llvm.smin", position, last)
            sums = kb.horizontal_sums(
                self._over_taps(kb.at(cells, kb.ir.mul(position, n.step)), [zeros] * rows, counted)
            )
            kb.store_partial(kb.ir.mul(sums, kb.broadcast(excess, sums.type.count)), rows, totals, kb.mul(position, 4))

    def _emit_row(self, cells: Value, totals: Value, out: Value, weights: Value, panel: Value) -> None:
        """Emit the tiles of a panel over all positions of a row."""
        kb, n, (rows, vectors) = self.kb, self.n, self.product.tile
        width = vectors * self.product.lanes
        channel = kb.mul(panel, width)
        matrix = kb.at(weights, kb.mul(panel, 16) if self._a.is_listed else kb.ir.mul(panel, n.panel_bytes))
        emit_tile = self._emit_listed(weights, matrix) if self._a.is_listed else self._emit_taps(matrix)
        if self.product.is_parted:
            part, panel = kb.ir.udiv(panel, n.panels_of_a_part), kb.ir.urem(panel, n.panels_of_a_part)
            cells, out = kb.at(cells, kb.ir.mul(part, n.part_in)), kb.at(out, kb.ir.mul(part, n.part_out))
        out = kb.at(out, kb.mul(panel, width * self._a.output_bytes))
        is_last = kb.ir.icmp_unsigned("==", panel, kb.ir.sub(n.panels_of_a_part, kb.i64(1)))
        last = kb.ir.sub(n.positions, kb.i64(rows))
        with kb.loop(0, n.positions, rows) as position:
            position = kb.intrinsic("llvm.smin", position, last)
            first = self._first_sums(kb.at(totals, kb.mul(position, 4)), channel)
            sums = emit_tile(kb.at(cells, kb.ir.mul(position, n.step)), first)
            self._emit_store(sums, kb.at(out, kb.ir.mul(position, n.place)), channel, is_last)

    def _first_sums(self, totals: Value, channel: Value) -> Sequence[Value]:
        (rows, vectors), lanes, a, kb = self.product.tile, self.product.lanes, self._a, self.kb
        first = [a.first_sums(kb, self.finish, kb.add(channel, v * lanes), lanes) for v in range(vectors)]
        if not a.has_excess:
            return first * rows
        more = [kb.broadcast(kb.load(I32, totals, 4 * r), lanes) for r in range(rows)]
        return [kb.ir.add(value, total) for total in more for value in first]

    def _emit_listed(self, weights: Value, entry: Value) -> _Tile:
        """Return what emits a tile over the groups in a panel's list."""
        (rows, vectors), lanes, a, kb, n = self.product.tile, self.product.lanes, self._a, self.kb, self.n
        places, count = kb.at(weights, kb.load(I64, entry)), kb.load(I64, entry, 8)
        lines = kb.ir.and_(kb.add(kb.mul(count, 4), LINE_BYTES - 1), kb.i64(-LINE_BYTES))
        listed, kind, size = kb.at(places, lines), a.weights_type(lanes), 4 * lanes

        def tile(cells: Value, sums: Sequence[Value]) -> Sequence[Value]:
            first = [kb.at(cells, kb.mul(n.step, r)) for r in range(rows)]

            def group(k: Value, sums: Sequence[Value]) -> Sequence[Value]:
                place = kb.ir.sext(kb.load(I32, places, kb.mul(k, 4)), I64)
                quads, results = kb.at(listed, kb.mul(k, 2 * vectors * size)), []
                for r in range(rows):
                    loaded = a.load_group(kb, first[r], place, lanes)
                    for v in range(vectors):
                        pair = tuple(kb.load_volatile(kind, quads, n * size) for n in (v, vectors + v))
                        results.append(a.multiply_add(kb, sums[r * vectors + v], loaded, pair))
                return results

            return kb.for_loop(count, sums, group, may_be_empty=True)

        return tile

    def _emit_taps(self, matrix: Value) -> _Tile:
        """Return what emits a tile over all groups of all taps."""
        return lambda cells, sums: self._emit_tile(cells, matrix, sums)

    def _emit_tile(self, cells: Value, matrix: Value, sums: Sequence[Value]) -> Sequence[Value]:
        (rows, vectors), lanes, a, kb, n = self.product.tile, self.product.lanes, self._a, self.kb, self.n
        group_bytes, at_once = a.group * a.cell_bytes, self.product.at_once
        groups_bytes = vectors * lanes * group_bytes

        def groups(cells: Sequence[Value], k: Value, weights: Value, sums: Sequence[Value]) -> Sequence[Value]:
            for number in range(at_once):
                place = kb.add(kb.mul(k, at_once * group_bytes), number * group_bytes)
                sums = self._multiply(cells, place, kb.at(weights, number * groups_bytes), sums)
            return sums

        def tap(number: Value, first: Value, sums: Sequence[Value]) -> Sequence[Value]:
            panel = kb.at(matrix, kb.ir.mul(number, kb.mul(n.length, at_once * groups_bytes)))
            cells = [kb.launder(kb.at(first, kb.mul(n.step, r))) for r in range(rows)]
            return kb.for_loop(
                n.length,
                sums,
                lambda k, s: groups(cells, k, kb.at(panel, kb.mul(k, at_once * groups_bytes)), s),
            )

        return self._over_taps(cells, sums, tap)

    def _over_taps(
        self,
        cells: Value,
        sums: Sequence[Value],
        tap: Tap,
    ) -> Sequence[Value]:
        """Emit loops over a filter's taps: `tap` gets the number of one, its first cells, and the sums so far."""
        kb, n = self.kb, self.n
        if self.product.walk != "band":
            return tap(kb.i64(0), cells, sums)

        def taps(i: Value, sums: Sequence[Value]) -> Sequence[Value]:
            row, first = kb.at(cells, kb.ir.mul(i, n.down)), kb.ir.mul(i, n.tap_columns)
            return kb.for_loop(
                n.tap_columns, sums, lambda j, s: tap(kb.ir.add(first, j), kb.at(row, kb.ir.mul(j, n.across)), s)
            )

        return kb.for_loop(n.tap_rows, sums, taps)

    def _multiply(self, cells: Sequence[Value], k: Value, weights: Value, sums: Sequence[Value]) -> Sequence[Value]:
        """Emit one round: the side with fewer vectors stays in registers, the other one goes by."""
        (rows, vectors), lanes, a, kb = self.product.tile, self.product.lanes, self._a, self.kb
        kind = a.weights_type(lanes)

        def factor(v: int) -> Value:
            return kb.load(kind, weights, v * lanes * a.group * a.cell_bytes)

        def group(r: int) -> Value:
            return a.load_group(kb, cells[r], k, lanes)

        results = list(sums)
        if rows < vectors:
            groups = [group(r) for r in range(rows)]
            for v in range(vectors):
                loaded = factor(v)
                for r in range(rows):
                    results[r * vectors + v] = a.multiply_add(kb, sums[r * vectors + v], groups[r], loaded)
            return results
        factors = [factor(v) for v in range(vectors)]
        for r in range(rows):
            loaded = group(r)
            for v in range(vectors):
                results[r * vectors + v] = a.multiply_add(kb, sums[r * vectors + v], loaded, factors[v])
        return results

    def _emit_store(self, sums: Sequence[Value], place: Value, channel: Value, is_last: Value) -> None:
        """Finish the sums row by row."""
        kb, (_, vectors), rest = self.kb, self.product.tile, self.product.rest

        def store(offset: Value, row: Sequence[Value]) -> None:
            results = self._a.results(kb, row, self.finish, channel)
            kb.store_tile_row(results, kb.at(place, offset), rest, is_last)

        if self._a.finishes_soon and not rest:
            for first in range(0, len(sums), vectors):
                store(kb.mul(self.n.place, first // vectors), sums[first : first + vectors])
        else:
            with kb.for_each_tile_row(sums, vectors, self.n.place) as (offset, row):
                store(offset, row)


_Tile: TypeAlias = Callable[[Value, Sequence[Value]], Sequence[Value]]
"""What emits a tile: it gets the cells of its first position and what the sums begin with, and returns the sums."""


def band_of(shape: ProductShape, arithmetic: Arithmetic, served: int) -> Band:
    """Return the image rows under so many output rows."""
    s = shape
    return Band(s.height, s.width, s.channels, s.rows, s.columns, served, arithmetic.cell_bytes)
