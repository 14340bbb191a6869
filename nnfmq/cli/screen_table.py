"""A table that fits the screen: columns as wide as their longest word at least, or else a block of lines for each row.

rich alone shrinks the widest columns first, and breaks words in them while other columns have space.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table

__all__ = ["ScreenTable", "named_values"]

_LONGEST_WORD = 24  # longer ones, such as paths, may be broken
_NARROW_PADDING = (0, 1, 0, 0)
_UNLIMITED = 100_000


class ScreenTable(Table):
    """A `Table` whose rows become blocks of `heading  value` lines if the screen is too narrow for its columns."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the table within the width of `options`."""
        unlimited = options.update(width=_UNLIMITED)
        if self.__rich_measure__(console, unlimited).maximum > options.max_width:
            self.padding = _NARROW_PADDING
            sizes = [_size(console, unlimited, column) for column in self.columns]
            natural = self.__rich_measure__(console, unlimited).maximum
            available = options.max_width - (natural - sum(size.maximum for size in sizes))
            if sum(size.minimum for size in sizes) > available:
                yield from self._blocks()
                return
            for column, width in zip(self.columns, _shares(sizes, available), strict=True):
                column.width = width
        yield from super().__rich_console__(console, options)

    def _blocks(self) -> RenderResult:
        if self.title:
            yield self.title
        for row in zip(*(column.cells for column in self.columns), strict=True):
            yield named_values((str(column.header), cell) for column, cell in zip(self.columns, row, strict=True))
            yield ""


def named_values(pairs: Iterable[tuple[str, RenderableType]]) -> Table:
    """Return lines of `name  value`, whose values are folded on a narrow screen. Empty values are left out."""
    block = Table.grid(padding=(0, 2, 0, 0))
    block.add_column(no_wrap=True)
    block.add_column(overflow="fold")
    for name, value in pairs:
        if value:
            block.add_row(name, value)
    return block


def _size(console: Console, options: ConsoleOptions, column: Column) -> Measurement:
    """Return the least width of a column, that of its longest word unless it is very long, and its natural width."""
    cells = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
    widest = max(cell.maximum for cell in cells)
    longest_word = max(cell.minimum for cell in cells)
    return Measurement(widest if column.no_wrap else min(longest_word, _LONGEST_WORD), widest)


def _shares(sizes: list[Measurement], available: int) -> list[int]:
    """Return the widths of columns whose sum is at most `available`: wide columns shrink, narrow ones stay as they are.

    All columns that are shrunk get the same width, unless they have a longer word.
    """
    for limit in range(available, 0, -1):
        widths = [max(size.minimum, min(size.maximum, limit)) for size in sizes]
        if sum(widths) <= available:
            return widths
    return [size.minimum for size in sizes]
