"""Products: CONV_2D, GROUPED_CONV_2D and FULLY_CONNECTED, as sums of taps over a band of the image.

The sums of a tile, `rows` positions times `vectors` of channels, stay in registers while all taps go by. Work is cut
into blocks of positions and, where these are few or the weights many, groups of channels. Positions beside the last
whole tile are computed again by the last one, so that there is one shape of tile in a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from nnfmq.engines.compiled.emission import Emitter, Value
from nnfmq.engines.compiled.kernels.arithmetic import Arithmetic, Array
from nnfmq.engines.compiled.kernels.cells import Band, widen
from nnfmq.engines.compiled.target import Target
from nnfmq.operations.shapes import Window

__all__ = ["Product", "ProductShape", "plan_product"]

_SCRATCH_BYTES = 1 << 16  # with a panel of weights beside it about half of a second-level cache
_UNITS = 8
_PANEL_BYTES = 1 << 17
_UNROLLED = 8


@dataclass(frozen=True, slots=True)
class ProductShape:
    """An image, how a filter moves over it, and how many channels come out.

    Channels, in and out, may be in `parts` that do not see each other. With `own` weights each image has some, which
    are the second input, as `packing` makes them; that is for pixels by themselves only.
    """

    batch: int
    height: int
    width: int
    channels: int
    rows: Window
    columns: Window
    filters: int
    parts: int = 1
    own: bool = False

    @property
    def depth(self) -> int:
        """Channels that a filter sees."""
        return self.channels // self.parts

    @property
    def part(self) -> int:
        """Channels that come out of one part."""
        return self.filters // self.parts

    @property
    def is_pointwise(self) -> bool:
        """Whether each pixel is one position."""
        return all(
            window.reach == window.stride == 1 and not (window.head or window.tail)
            for window in (self.rows, self.columns)
        )

    @property
    def taps(self) -> tuple[int, int, int]:
        """Rows and columns of taps, and the cells of each: neighbouring columns are one tap."""
        if self.columns.dilation == 1 and self.parts == 1:
            return self.rows.size, 1, self.columns.size * self.channels
        return self.rows.size, self.columns.size, self.depth

    @property
    def pixels(self) -> int:
        """Pixels with the same weights."""
        return self.height * self.width * (1 if self.own else self.batch)

    @property
    def multiplications(self) -> int:
        """How many the whole product takes."""
        positions = self.batch * self.rows.count * self.columns.count
        return positions * self.filters * self.rows.size * self.columns.size * self.depth


@dataclass(frozen=True, slots=True)
class Product:
    """One product, planned for a target: its tile, its blocks of positions, its groups of channels."""

    shape: ProductShape
    arithmetic: Arithmetic
    tile: tuple[int, int]
    lanes: int
    block: int
    groups: int

    @property
    def units(self) -> int:
        """Blocks of positions times groups of channels."""
        return self._blocks * self.groups

    @property
    def panels(self) -> int:
        """How many panels, tiles' widths of channels, there are."""
        return self.shape.parts * self._panels_of_a_part

    @property
    def _panels_of_a_part(self) -> int:
        return math.ceil(self.shape.part / self._panel)

    @property
    def order(self) -> Array:
        """The channel at each place of the panels; beside the last one of a part it is repeated."""
        places = np.minimum(np.arange(self._panels_of_a_part * self._panel), self.shape.part - 1)
        result: Array = (np.arange(self.shape.parts)[:, None] * self.shape.part + places).reshape(-1)
        return result

    @property
    def _panel(self) -> int:
        return self.tile[1] * self.lanes

    @property
    def _band(self) -> Band:
        s = self.shape
        return Band(s.height, s.width, s.channels, s.rows, s.columns, self.block)

    @property
    def _blocks_of_an_image(self) -> int:
        return math.ceil(self.shape.rows.count / self.block)

    @property
    def _blocks(self) -> int:
        s = self.shape
        if s.is_pointwise:
            return s.batch * s.height * s.width // self.block
        return s.batch * self._blocks_of_an_image

    @property
    def _reads_in_place(self) -> bool:
        return self.shape.is_pointwise and self.arithmetic.cell_bytes == self.arithmetic.item_bytes

    def scratch_bytes(self, target: Target) -> int:
        """The cells of a block."""
        if self._reads_in_place:
            return 0
        cell = self.arithmetic.cell_bytes
        return self.block * self.shape.channels * cell + 64 if self.shape.is_pointwise else self._band.bytes(cell)

    def pack(self, weights: Array) -> bytes:
        """Return `weights` (channels out, height, width, channels in), zero point subtracted, panel by panel."""
        tap_rows, tap_columns, cells = self.shape.taps
        parts, taps = self.shape.parts, tap_rows * tap_columns
        filled = np.zeros((parts, self._panels_of_a_part * self._panel, taps, cells), weights.dtype)
        filled[:, : self.shape.part] = weights.reshape(parts, self.shape.part, taps, cells)
        return self.arithmetic.pack(
            filled.reshape(self.panels, self._panel, tap_rows * tap_columns, cells), self._panel
        )

    def emit(self, e: Emitter) -> None:
        """Table: input, output, weights, what finishes sums; own weights come before the output."""
        image, out, weights, finish = map(e.argument, (0, 2, 1, 3) if self.shape.own else range(4))
        with e.loop(e.begin, e.end) as unit:
            group, block = e.b.sdiv(unit, e.i64(self._blocks)), e.b.srem(unit, e.i64(self._blocks))
            if self.shape.is_pointwise:
                self._emit_pointwise(e, image, out, weights, finish, group, block)
            else:
                self._emit_band(e, image, out, weights, finish, group, block)
        e.finish()

    def _emit_pointwise(self, e: Emitter, image: Value, out: Value, *rest: Value) -> None:
        weights, finish, group, block = rest
        a, s = self.arithmetic, self.shape
        source = e.at(image, e.mul(block, self.block * s.channels * a.item_bytes))
        cells = source
        if not self._reads_in_place:
            widen(e, a.widening(e, finish), source, e.scratch, self.block * s.channels)
            cells = e.scratch
        target = e.at(out, e.mul(block, self.block * s.filters * a.output_bytes))
        if s.own:
            number = e.b.udiv(block, e.i64(s.height * s.width // self.block))
            weights = e.at(weights, e.mul(number, self.panels * self._panel_bytes))
        with self._panels(e, group) as panel:
            self._emit_row(e, cells, self.block, s.channels * a.cell_bytes, target, weights, finish, panel)

    def _emit_band(self, e: Emitter, image: Value, out: Value, *rest: Value) -> None:
        weights, finish, group, block = rest
        a, s, per_image = self.arithmetic, self.shape, e.i64(self._blocks_of_an_image)
        number, first = e.b.sdiv(block, per_image), e.mul(e.b.srem(block, per_image), self.block)
        served = e.intrinsic("llvm.smin", e.i64(self.block), e.b.sub(e.i64(s.rows.count), first))
        source = e.at(image, e.mul(number, s.height * s.width * s.channels * a.item_bytes))
        self._band.emit(e, a.widening(e, finish), source, first, served)
        pitch, step = self._band.row_cells * a.cell_bytes, s.columns.stride * s.channels * a.cell_bytes
        row = s.columns.count * s.filters * a.output_bytes
        target = e.at(out, e.mul(e.add(e.mul(number, s.rows.count), first), row))
        with self._panels(e, group) as panel, e.loop(0, served) as r:
            cells = e.at(e.scratch, e.mul(r, s.rows.stride * pitch))
            place = e.at(target, e.mul(r, row))
            self._emit_row(e, cells, s.columns.count, step, place, weights, finish, panel)

    @property
    def _panel_bytes(self) -> int:
        tap_rows, tap_columns, length = self.shape.taps
        groups = math.ceil(length / self.arithmetic.group)
        return tap_rows * tap_columns * groups * self._panel * self.arithmetic.group * self.arithmetic.cell_bytes

    def _panels(self, e: Emitter, group: Value) -> Value:
        """Return the loop over the panels of a group."""
        begin, end = (e.b.sdiv(e.mul(e.add(group, more), self.panels), e.i64(self.groups)) for more in (0, 1))
        return e.loop(begin, end)

    def _emit_row(
        self, e: Emitter, cells: Value, count: int, step: int, out: Value, weights: Value, finish: Value, panel: Value
    ) -> None:
        """Emit the tiles of `count` positions that lie `step` bytes from each other."""
        rows = self.tile[0]
        a, channel = self.arithmetic, e.mul(panel, self._panel)
        matrix = e.at(weights, e.mul(panel, self._panel_bytes))
        first = channel
        if self.shape.parts > 1:
            part, panel = (f(panel, e.i64(self._panels_of_a_part)) for f in (e.b.udiv, e.b.urem))
            cells = e.at(cells, e.mul(part, self.shape.depth * a.cell_bytes))
            first = e.add(e.mul(part, self.shape.part), e.mul(panel, self._panel))
        with e.loop(0, count, rows) as position:
            if count % rows:
                position = e.intrinsic("llvm.smin", position, e.i64(count - rows))
            sums = self._emit_tile(e, e.at(cells, e.mul(position, step)), step, matrix, finish, channel)
            place = e.at(out, e.mul(e.add(e.mul(position, self.shape.filters), first), a.output_bytes))
            self._emit_store(e, sums, place, finish, channel, panel)

    def _emit_tile(
        self, e: Emitter, cells: Value, step: int, matrix: Value, finish: Value, channel: Value
    ) -> Sequence[Value]:
        (rows, vectors), lanes, a = self.tile, self.lanes, self.arithmetic
        tap_rows, tap_columns, length = self.shape.taps
        groups = math.ceil(length / a.group)
        group_bytes, pitch = a.group * a.cell_bytes, self._band.row_cells * a.cell_bytes
        across = self.shape.columns.dilation * self.shape.channels * a.cell_bytes
        kind = a.weights_type(lanes)
        starts = [a.first_sums(e, finish, e.add(channel, v * lanes), lanes) for v in range(vectors)]
        vector_bytes = lanes * group_bytes

        def multiply(cell: Value, weight: Value, sums: Sequence[Value]) -> list[Value]:
            loaded = [e.load(kind, weight, v * vector_bytes) for v in range(vectors)]
            results = []
            for r in range(rows):
                group = a.load_group(e, cell, r * step, lanes)
                results += [a.multiply_add(e, sums[r * vectors + v], group, loaded[v]) for v in range(vectors)]
            return results

        def tap(i: Value, j: Value, sums: Sequence[Value]) -> Sequence[Value]:
            first = e.at(cells, e.add(e.mul(i, self.shape.rows.dilation * pitch), e.mul(j, across)))
            number = e.add(e.mul(i, tap_columns), j)
            panel = e.at(matrix, e.mul(number, groups * vectors * vector_bytes))
            return _rounds(
                e,
                groups,
                sums,
                lambda k, s: multiply(
                    e.at(first, e.mul(k, group_bytes)), e.at(panel, e.mul(k, vectors * vector_bytes)), s
                ),
            )

        sums = starts * rows
        return e.carry(tap_rows, sums, lambda i, s: e.carry(tap_columns, s, lambda j, inner: tap(i, j, inner)))

    def _emit_store(
        self, e: Emitter, sums: Sequence[Value], place: Value, finish: Value, channel: Value, panel: Value
    ) -> None:
        """Finish the sums row by row, through memory: once for each sum would be most of the kernel's code."""
        (_, vectors), lanes, a, filters = self.tile, self.lanes, self.arithmetic, self.shape.filters
        with e.rows_of(sums, vectors) as (r, row):
            out = e.at(place, e.mul(r, filters * a.output_bytes))
            results = [a.results(e, row[v], finish, e.add(channel, v * lanes)) for v in range(vectors)]
            e.store_panel(results, out, a.output_bytes, self.shape.part, self._panel, panel)


def _rounds(e: Emitter, count: int, sums: Sequence[Value], body: object) -> Sequence[Value]:
    """Emit `count` rounds, several in each round of the loop."""
    assert callable(body)
    if count <= _UNROLLED:
        for k in range(count):
            sums = body(k, sums)
        return sums
    times = 4 if count >= 16 else 2

    def several(k: Value, inner: Sequence[Value]) -> Sequence[Value]:
        first = e.mul(k, times)
        for more in range(times):
            inner = body(e.add(first, more), inner)
        return inner

    sums = e.carry(count // times, sums, several)
    for k in range(count - count % times, count):
        sums = body(k, sums)
    return sums


def plan_product(shape: ProductShape, arithmetic: Arithmetic, target: Target) -> Product:
    """Choose the tile, the blocks and the groups for a target."""
    positions = shape.pixels if shape.is_pointwise else shape.columns.count
    tile = _best_tile(positions, shape.part, target)
    panels = shape.parts * math.ceil(shape.part / (tile[1] * target.lanes))
    block = _pointwise_block(shape, arithmetic, tile[0]) if shape.is_pointwise else _band_rows(shape, arithmetic)
    blocks = Product(shape, arithmetic, tile, target.lanes, block, 1).units
    taps = shape.rows.size * shape.columns.size * shape.depth
    heavy = taps * shape.filters * arithmetic.cell_bytes > _PANEL_BYTES
    groups = max(math.ceil(_UNITS / blocks), 2 if heavy else 1)
    return Product(shape, arithmetic, tile, target.lanes, block, min(panels, groups))


def _best_tile(positions: int, filters: int, target: Target) -> tuple[int, int]:
    """Return the tile with the least estimate of cycles: two products, or two loads, a cycle."""
    sums = target.registers - (4 if target.registers == 16 else 6)

    def cycles(tile: tuple[int, int]) -> tuple[float, int]:
        rows, vectors = tile
        tiles = math.ceil(positions / rows) * math.ceil(filters / (vectors * target.lanes))
        return tiles * (max(rows * vectors, rows + vectors) + 1), -rows * vectors

    tiles = [(r, v) for r in range(1, min(positions, 8) + 1) for v in range(1, 9) if r * v <= sums]
    return min(tiles, key=cycles)


def _pointwise_block(shape: ProductShape, arithmetic: Arithmetic, rows: int) -> int:
    """Return a divisor of the positions that is no smaller than the tile."""
    positions = shape.pixels
    most = max(rows, _SCRATCH_BYTES // (shape.channels * arithmetic.cell_bytes))
    wanted = max(rows, min(most, math.ceil(shape.batch * shape.height * shape.width / _UNITS)))
    divisors = [divisor for divisor in _divisors(positions) if divisor >= rows]
    fitting = [divisor for divisor in divisors if divisor <= wanted]
    return max(fitting) if fitting else min(divisors, default=positions)


@cache
def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return [*small, *(number // divisor for divisor in small)]


def _band_rows(shape: ProductShape, arithmetic: Arithmetic) -> int:
    """Return how many output rows share a band."""
    most = max(1, math.ceil(shape.batch * shape.rows.count / _UNITS))
    served = 1
    while served < most:
        band = Band(shape.height, shape.width, shape.channels, shape.rows, shape.columns, served + 1)
        if band.bytes(arithmetic.cell_bytes) > _SCRATCH_BYTES:
            break
        served += 1
    return served
