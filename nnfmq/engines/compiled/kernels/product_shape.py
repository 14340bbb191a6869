"""What a product is of: an image, how its filters move over it, and how many channels come out."""

from __future__ import annotations

from dataclasses import dataclass

from nnfmq.operations.shapes import WindowDimension

__all__ = ["ProductShape"]


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
    rows: WindowDimension
    columns: WindowDimension
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
            window.effective_kernel_size == window.stride == 1 and not (window.padding_low or window.padding_high)
            for window in (self.rows, self.columns)
        )

    @property
    def taps(self) -> tuple[int, int, int]:
        """Rows and columns of taps, and the cells of each: neighbouring columns are one tap."""
        if self.columns.dilation == 1 and self.parts == 1:
            return self.rows.size, 1, self.columns.size * self.channels
        return self.rows.size, self.columns.size, self.depth

    @property
    def taps_of_a_filter(self) -> int:
        """How many products a sum has."""
        return self.rows.size * self.columns.size * self.depth

    @property
    def pixels(self) -> int:
        """Pixels with the same weights."""
        return self.height * self.width * (1 if self.own else self.batch)

    @property
    def multiplications(self) -> int:
        """How many the whole product takes."""
        return self.positions * self.filters * self.taps_of_a_filter

    @property
    def positions(self) -> int:
        """Positions of a filter."""
        return self.batch * self.rows.count * self.columns.count
