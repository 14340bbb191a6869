"""Planning of 8-bit depthwise convolutions: tile, block rows, channel blocks, pixels of a group."""

from __future__ import annotations

import math
from dataclasses import replace

from nnfmq.engines.compiled.kernels.dwconv_int8 import DwConvInt8Kernel, TapGroups
from nnfmq.engines.compiled.kernels.segments import UNPACKED_VECTORS
from nnfmq.engines.compiled.kernels.tap_interleaving import RowDot
from nnfmq.engines.compiled.target import Target
from nnfmq.operations.shapes import WindowDimension
from nnfmq.operations.signature import Shape

__all__ = ["plan_dwconv_int8"]

_MAX_ROWS_BYTES = 1 << 16
_MIN_WORK_ITEMS = 8
_MAX_UNROLLED_DOTS = 16  # of one accumulator
_TILE_VECTORS_16_REGISTERS, _TILE_VECTORS_32_REGISTERS = 4, 8  # accumulators of a vector of channels
_MAX_PIXEL_GROUP = 8
_TILE_COST, _INTERLEAVING_COST = 50, 8  # instructions for a position and a panel, in one output row
_COPY_PANEL_COST, _COPY_PIXEL_COST = 3, 12  # instructions for a panel, and more for each pixel of a channel block


def plan_dwconv_int8(
    shape: Shape,
    depth_multiplier: int,
    rows: WindowDimension,
    columns: WindowDimension,
    dot: RowDot,
    target: Target,
) -> DwConvInt8Kernel:
    """Return the kernel for an input shape and a target: tile, block rows, channel blocks, pixels of a group."""
    channels, nr = shape[3] * depth_multiplier, UNPACKED_VECTORS * target.lanes
    groups = math.ceil(rows.size / dot.rows)
    tile_rows = groups * dot.rows - rows.size + 1 if rows.stride == rows.dilation == 1 else 1
    tile_rows = min(tile_rows, rows.count)
    pixel_group = _choose_pixel_group(channels, columns, nr)
    is_unrolled = groups * columns.size <= _MAX_UNROLLED_DOTS

    def plan(channel_block: int) -> DwConvInt8Kernel:
        candidate = DwConvInt8Kernel(
            shape,
            rows,
            columns,
            depth_multiplier,
            block_rows=1,
            channel_block=channel_block,
            pixel_group=pixel_group,
            dot=dot,
            taps=TapGroups(
                groups,
                columns.size if is_unrolled else 0,
                tile_rows,
                pixel_group * columns.stride,
                columns.dilation,
                rows.dilation,
                rows.size,
            ),
            mr=_choose_mr(columns.count // pixel_group, tile_rows, target),
            lanes=target.lanes,
            partial_panel=channels * pixel_group if channels * pixel_group < nr else 0,
            has_channel_blocks=channel_block < channels,
            has_depth_multiplier=depth_multiplier > 1,
        )
        return replace(candidate, block_rows=_choose_block_rows(candidate))

    channel_blocks = [
        nr * n for n in (1, 2, 4, 8) if depth_multiplier == 1 and channels % nr == 0 and nr * n < channels
    ]
    return min(map(plan, [channels * pixel_group, *channel_blocks]), key=_packing_cost)


def _choose_pixel_group(channels: int, columns: WindowDimension, nr: int) -> int:
    """Return how many adjacent pixels are taken as one. Each pixel's panel is interleaved as often as that."""
    if columns.stride > 1 or channels % nr == 0:
        return 1

    def cost(group: int) -> float:
        panels = math.ceil(channels * group / nr)
        return panels * (math.ceil(columns.count / group) * _TILE_COST + columns.count * _INTERLEAVING_COST)

    return min(range(1, min(_MAX_PIXEL_GROUP, columns.count) + 1), key=cost)


def _choose_mr(count: int, tile_rows: int, target: Target) -> int:
    """Return the positions of a tile: the fewest computed twice, and of these the most that share loads."""
    vectors = _TILE_VECTORS_16_REGISTERS if target.registers == 16 else _TILE_VECTORS_32_REGISTERS
    max_mr = max(1, min(count, vectors // tile_rows))
    return min(range(1, max_mr + 1), key=lambda mr: math.ceil(count / mr) * (mr + 0.6))


def _choose_block_rows(kernel: DwConvInt8Kernel) -> int:
    """Return the output rows of a block: as many as the scratch limit and the number of work items allow."""
    tile_rows = kernel.taps.rows
    channel_blocks = math.ceil(kernel.channels / kernel.channel_block)
    max_rows = max(tile_rows, kernel.shape[0] * kernel.rows.count * channel_blocks // _MIN_WORK_ITEMS)
    rows = tile_rows
    while (
        rows + tile_rows <= min(max_rows, kernel.rows.count + tile_rows - 1)
        and replace(kernel, block_rows=rows + tile_rows).row_buffer.bytes <= _MAX_ROWS_BYTES
    ):
        rows += tile_rows
    return rows


def _packing_cost(kernel: DwConvInt8Kernel) -> float:
    """Return the estimated instructions that copy the input rows of one panel."""
    blocks = math.ceil(kernel.rows.count / kernel.block_rows)
    rows = blocks * ((kernel.block_rows - 1) * kernel.rows.stride + kernel.rows.effective_kernel_size)
    pixel_cost = _COPY_PIXEL_COST * kernel.nr / kernel.channel_block if kernel.has_channel_blocks else 0
    return rows * (_COPY_PANEL_COST + pixel_cost)
