"""The shape of a convolution or matrix product, as GEMM: M output positions, N output channels, K inputs of each."""

from __future__ import annotations

from nnfmq.base.frozen import dataclass
from nnfmq.operations.shapes import WindowDimension

__all__ = ["ConvShape"]


@dataclass(frozen=True, slots=True)
class ConvShape:
    """An NHWC input, the windows over its height and width, and the number of output channels.

    With `groups`, output channels read only the input channels of their group. With `has_batched_rhs` each image has
    separate weights, which are the second input, packed by `PackRhs`; for pointwise windows only.
    """

    batch: int
    height: int
    width: int
    channels: int
    rows: WindowDimension
    columns: WindowDimension
    output_channels: int
    groups: int = 1
    has_batched_rhs: bool = False

    @property
    def channels_per_group(self) -> int:
        """Input channels of a group."""
        return self.channels // self.groups

    @property
    def output_channels_per_group(self) -> int:
        """Output channels of a group."""
        return self.output_channels // self.groups

    @property
    def is_pointwise(self) -> bool:
        """Whether each input pixel is one output position."""
        return all(
            window.effective_kernel_size == window.stride == 1 and not (window.padding_low or window.padding_high)
            for window in (self.rows, self.columns)
        )

    @property
    def taps(self) -> tuple[int, int, int]:
        """Rows and columns of taps, and the K elements of each tap.

        Adjacent columns are contiguous in memory without dilation and groups, and then one tap.
        """
        if self.columns.dilation == 1 and self.groups == 1:
            return self.rows.size, 1, self.columns.size * self.channels
        return self.rows.size, self.columns.size, self.channels_per_group

    @property
    def k(self) -> int:
        """Products that an output element sums."""
        return self.rows.size * self.columns.size * self.channels_per_group

    @property
    def m(self) -> int:
        """Output positions."""
        return self.batch * self.rows.count * self.columns.count

    @property
    def tiled_positions(self) -> int:
        """Output positions that register tiles divide: all, or those of a row of windows that are not pointwise."""
        return self.pixels if self.is_pointwise else self.columns.count

    @property
    def pixels(self) -> int:
        """Input pixels that share weights."""
        return self.height * self.width * (1 if self.has_batched_rhs else self.batch)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the whole product."""
        return self.m * self.output_channels * self.k
