"""Rows of an image, widened into a thread's scratch memory with their padding: what filters run over.

A *band* are the image rows under some output rows. Padding is cells of 0. Widening a row reads no byte beyond it, since
images may end where a mapping does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from llvmlite import ir

from nnfmq.engines.compiled.emission import I32, Emitter, Value
from nnfmq.operations.shapes import Window

__all__ = ["Band", "Widening", "in_vectors", "widen"]

_SLACK_BYTES = 64  # what the last group of a filter's row may read behind it


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

    def widened(self, e: Emitter, source: Value, offset: Any, count: int) -> Value:
        """Load `count` elements and return them as cells."""
        ...

    def zeros(self, e: Emitter, count: int) -> Value:
        """Return cells of 0."""
        ...


@dataclass(frozen=True, slots=True)
class Band:
    """The windows over one image's height and width, and how many output rows a band serves.

    `channels` are those of the cells: each element of the image becomes `repeat` of them.
    """

    height: int
    width: int
    channels: int
    rows: Window
    columns: Window
    served: int
    repeat: int = 1

    @property
    def count(self) -> int:
        """Image rows in a whole band."""
        return (self.served - 1) * self.rows.stride + self.rows.reach

    @property
    def row_cells(self) -> int:
        """Cells from one row to the next."""
        reached = (self.columns.count - 1) * self.columns.stride + self.columns.reach
        return max(self.columns.head + self.width, reached) * self.channels

    def bytes(self, cell_bytes: int) -> int:
        """How much scratch memory a band takes."""
        return self.count * self.row_cells * cell_bytes + _SLACK_BYTES

    def emit(self, e: Emitter, arithmetic: Widening, image: Value, first: Value, served: Value) -> None:
        """Fill the scratch memory with the rows under the output rows from `first` on, `served` of them."""
        top = e.b.sub(e.mul(first, self.rows.stride), e.i64(self.rows.head))
        last = e.add(e.mul(e.b.sub(served, e.i64(1)), self.rows.stride), self.rows.reach)
        item, cell = arithmetic.item_bytes, arithmetic.cell_bytes
        head, width = self.columns.head * self.channels, self.width * self.channels
        tail = self.row_cells - head - width
        with e.loop(0, last) as number:
            row = e.b.add(top, number)
            place = e.at(e.scratch, e.mul(number, self.row_cells * cell))
            inside = e.b.icmp_unsigned("<", row, e.i64(self.height))
            with e.b.if_else(inside) as (here, outside):
                with here:
                    fill(e, arithmetic, place, head)
                    source = e.at(image, e.mul(row, width // self.repeat * item))
                    if self.repeat > 1:
                        widen_repeated(e, arithmetic, source, e.at(place, head * cell), width, self.repeat)
                    else:
                        widen(e, arithmetic, source, e.at(place, head * cell), width)
                    fill(e, arithmetic, e.at(place, (head + width) * cell), tail)
                with outside:
                    fill(e, arithmetic, place, self.row_cells)


def widen(e: Emitter, arithmetic: Widening, source: Value, place: Value, count: int) -> None:
    """Put `count` elements at `source` as cells to `place`."""
    item, cell = arithmetic.item_bytes, arithmetic.cell_bytes

    def move(offset: Any, lanes: int) -> None:
        cells = arithmetic.widened(e, source, e.mul(offset, item), lanes)
        e.store(cells, place, e.mul(offset, cell))

    in_vectors(e, count, 4 * e.target.lanes // cell, move)


def widen_repeated(e: Emitter, arithmetic: Widening, source: Value, place: Value, count: int, repeat: int) -> None:
    """Put `count` cells to `place`, `repeat` of each element; up to a vector behind them is written as well."""
    item, cell, lanes = arithmetic.item_bytes, arithmetic.cell_bytes, 4 * e.target.lanes // arithmetic.cell_bytes
    with e.loop(0, count // repeat) as index:
        one = e.b.extract_element(arithmetic.widened(e, source, e.mul(index, item), 1), ir.Constant(I32, 0))
        cells, first = e.broadcast(one, lanes), e.at(place, e.mul(index, repeat * cell))
        with e.loop(0, repeat, lanes) as offset:
            e.store(cells, first, e.mul(offset, cell))


def fill(e: Emitter, arithmetic: Widening, place: Value, count: int) -> None:
    """Put `count` cells of 0 to `place`."""
    cell = arithmetic.cell_bytes
    in_vectors(
        e,
        count,
        4 * e.target.lanes // cell,
        lambda offset, lanes: e.store(arithmetic.zeros(e, lanes), place, e.mul(offset, cell)),
    )


def in_vectors(e: Emitter, count: int, lanes: int, move: Any) -> None:
    """Call `move` with offsets and numbers of elements that cover `count`, the last whole vector twice in part."""
    if count >= lanes:
        whole = count - count % lanes
        if whole == lanes:
            move(0, lanes)
        else:
            with e.loop(0, whole, lanes) as offset:
                move(offset, lanes)
        if count % lanes:
            move(count - lanes, lanes)
        return
    done = 0
    while done < count:
        part = 1 << ((count - done).bit_length() - 1)
        move(done, part)
        done += part
