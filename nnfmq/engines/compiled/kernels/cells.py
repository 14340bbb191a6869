"""Rows of an image, widened into a thread's scratch memory with their padding: what filters run over.

A *band* are the image rows under some output rows. Padding is cells of 0. Widening a row reads no byte beyond it, since
images may end where a mapping does. All extents are numbers known at run time, so that images of any shape share code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from llvmlite import ir

from nnfmq.engines.compiled.ir_builder import I32, KernelBuilder, Value
from nnfmq.operations.shapes import WindowDimension

__all__ = ["SLACK_BYTES", "Band", "BandNumbers", "Widening", "emit_band", "in_vectors", "widen", "widen_repeated"]

SLACK_BYTES = 64  # what the last group of a filter's row may read behind it, and the last vector of padding write


class Widening(Protocol):
    """What `arithmetic` has for elements on their way to cells."""

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        ...

    @property
    def cell_bytes(self) -> int:
        """Bytes of a cell."""
        ...

    def widened(self, kb: KernelBuilder, source: Value, offset: Any, count: int) -> Value:
        """Load `count` elements and return them as cells."""
        ...

    def zeros(self, kb: KernelBuilder, count: int) -> Value:
        """Return cells of 0."""
        ...


class BandNumbers(NamedTuple):
    """A band's extents: rows, bytes and cells, as plain numbers or as what was loaded of them."""

    height: Any
    stride: Any
    head: Any
    reach: Any
    row_bytes: Any
    pitch: Any
    before: Any
    within: Any
    behind: Any


@dataclass(frozen=True, slots=True)
class Band:
    """The windows over one image's height and width, and how many output rows a band serves.

    `cells` are those of one pixel, `cell_bytes` their size.
    """

    height: int
    width: int
    cells: int
    rows: WindowDimension
    columns: WindowDimension
    served: int
    cell_bytes: int

    @property
    def pitch(self) -> int:
        """Bytes from one row of cells to the next."""
        reached = (self.columns.count - 1) * self.columns.stride + self.columns.effective_kernel_size
        return max(self.columns.padding_low + self.width, reached) * self.cells * self.cell_bytes

    @property
    def bytes(self) -> int:
        """How much scratch memory a band takes."""
        count = (self.served - 1) * self.rows.stride + self.rows.effective_kernel_size
        return count * self.pitch + SLACK_BYTES

    def numbers(self, row_bytes: int) -> BandNumbers:
        """Return its extents, where rows of the image are so long."""
        rows, before, within = self.rows, self.columns.padding_low * self.cells, self.width * self.cells
        behind = self.pitch // self.cell_bytes - before - within
        return BandNumbers(
            self.height,
            rows.stride,
            rows.padding_low,
            rows.effective_kernel_size,
            row_bytes,
            self.pitch,
            before,
            within,
            behind,
        )


def emit_band(
    kb: KernelBuilder,
    n: BandNumbers,
    arithmetic: Widening,
    image: Value,
    first: Value,
    served: Value,
    widen_row: Callable[[Value, Value], None],
) -> None:
    """Fill the scratch memory with the rows under the output rows from `first` on, `served` of them.

    `widen_row` gets a row of the image and the place of its cells.
    """
    top = kb.ir.sub(kb.ir.mul(first, n.stride), n.head)
    last = kb.ir.add(kb.ir.mul(kb.ir.sub(served, kb.i64(1)), n.stride), n.reach)
    cell = arithmetic.cell_bytes
    with kb.loop(0, last) as number:
        row = kb.ir.add(top, number)
        place = kb.at(kb.scratch, kb.ir.mul(number, n.pitch))
        inside = kb.ir.icmp_unsigned("<", row, n.height)
        with kb.ir.if_else(inside) as (here, outside):
            with here:
                fill(kb, arithmetic, place, n.before)
                pixels = kb.at(place, kb.mul(n.before, cell))
                widen_row(kb.at(image, kb.ir.mul(row, n.row_bytes)), pixels)
                fill(kb, arithmetic, kb.at(pixels, kb.mul(n.within, cell)), n.behind)
            with outside:
                fill(kb, arithmetic, place, kb.ir.add(kb.ir.add(n.before, n.within), n.behind))


def widen(kb: KernelBuilder, arithmetic: Widening, source: Value, place: Value, count: Value) -> None:
    """Put `count` elements at `source` as cells to `place`; nothing else is read or written."""
    item, cell = arithmetic.item_bytes, arithmetic.cell_bytes
    lanes = 4 * kb.target.lanes // cell

    def move(offset: Value, elements: int) -> None:
        kb.store(arithmetic.widened(kb, source, kb.mul(offset, item), elements), place, kb.mul(offset, cell))

    whole = kb.ir.and_(count, kb.i64(-lanes))
    with kb.loop(0, whole, lanes) as offset:
        move(offset, lanes)
    rest, fits = kb.ir.icmp_signed("<", whole, count), kb.ir.icmp_signed(">=", count, kb.i64(lanes))
    with kb.ir.if_then(rest), kb.ir.if_else(fits) as (long, short):
        with long:
            move(kb.ir.sub(count, kb.i64(lanes)), lanes)
        with short, kb.loop(0, count) as offset:
            move(offset, 1)


def widen_repeated(
    kb: KernelBuilder, arithmetic: Widening, source: Value, place: Value, count: Value, repeat: Value
) -> None:
    """Put `repeat` cells of each of `count` elements to `place`; up to a vector behind them is written as well."""
    item, cell, lanes = arithmetic.item_bytes, arithmetic.cell_bytes, 4 * kb.target.lanes // arithmetic.cell_bytes
    with kb.loop(0, count) as index:
        one = kb.ir.extract_element(arithmetic.widened(kb, source, kb.mul(index, item), 1), ir.Constant(I32, 0))
        cells, first = kb.broadcast(one, lanes), kb.at(place, kb.ir.mul(index, kb.mul(repeat, cell)))
        with kb.loop(0, repeat, lanes) as offset:
            kb.store(cells, first, kb.mul(offset, cell))


def fill(kb: KernelBuilder, arithmetic: Widening, place: Value, count: Value) -> None:
    """Put `count` cells of 0 to `place`; up to a vector behind them is written as well."""
    cell, lanes = arithmetic.cell_bytes, 4 * kb.target.lanes // arithmetic.cell_bytes
    with kb.loop(0, count, lanes) as offset:
        kb.store(arithmetic.zeros(kb, lanes), place, kb.mul(offset, cell))


def in_vectors(kb: KernelBuilder, count: int, lanes: int, move: Any) -> None:
    """Call `move` with offsets and numbers of elements that cover `count`, the last whole vector twice in part."""
    if count >= lanes:
        whole = count - count % lanes
        if whole == lanes:
            move(0, lanes)
        else:
            with kb.loop(0, whole, lanes) as offset:
                move(offset, lanes)
        if count % lanes:
            move(count - lanes, lanes)
        return
    done = 0
    while done < count:
        part = 1 << ((count - done).bit_length() - 1)
        move(done, part)
        done += part
