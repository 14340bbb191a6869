"""What the kernels of depthwise convolutions have in common: the shape, and the blocks of output rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from nnfmq.operations.shapes import WindowDimension
from nnfmq.operations.signature import Shape

__all__ = ["DwConvShape"]


@dataclass(frozen=True, slots=True)
class DwConvShape:
    """An NHWC input of shape `shape`, the windows over it, and the output rows of a block. None decides the code."""

    shape: Shape = field(repr=False)
    rows: WindowDimension = field(repr=False)
    columns: WindowDimension = field(repr=False)
    depth_multiplier: int = field(repr=False)
    block_rows: int = field(repr=False)

    compile_cost = 2

    @property
    def channels(self) -> int:
        """Output channels."""
        return self.shape[3] * self.depth_multiplier

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the whole convolution."""
        positions = self.shape[0] * self.rows.count * self.columns.count
        return positions * self.channels * self.rows.size * self.columns.size

    @property
    def row_blocks(self) -> int:
        """Blocks of output rows of an image."""
        return math.ceil(self.rows.count / self.block_rows)
