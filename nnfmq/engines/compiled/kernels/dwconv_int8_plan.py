"""Planning of 8-bit depthwise convolutions: tile, blocks, pixels of a group."""

from __future__ import annotations

import math
from dataclasses import replace

from nnfmq.engines.compiled.kernels.dwconv_int8 import DwConvInt8Kernel
from nnfmq.engines.compiled.kernels.row_interleaving import TapGroups
from nnfmq.engines.compiled.kernels.subvectors import PANEL_VECTORS
from nnfmq.engines.compiled.kernels.tap_interleaving import RowDot
from nnfmq.engines.compiled.target import Target
from nnfmq.operations.shapes import WindowDimension
from nnfmq.operations.signature import Shape

__all__ = ["plan_dwconv_int8"]

_MAX_ROWS_BYTES = 1 << 16
_MIN_WORK_ITEMS, _MAX_WORK_ITEMS = 8, 64
_MAX_UNROLLED_DOTS = 16  # of one accumulator
_TILE_VECTORS_16_REGISTERS, _TILE_VECTORS_32_REGISTERS = 4, 10  # accumulators of a vector of channels
_MIN_LANES_FOR_REGISTERS = 16
_MAX_SMALL_WIDTH = 16  # pixels for each row tile of a panel; measured with AVX512-VNNI
_MAX_KEPT_PIXELS = 2  # from one tile to the next one, in 8 registers
_MAX_REGISTER_COLUMNS = 5  # of a window: all of them are unrolled
_MAX_PIXEL_GROUP = 8
_SUBVECTOR_BYTES = 16  # of a vector: the channels of a panel fill at least one
_ROW_TILE_COSTS = {1: 1.0, 2: 1.1, 4: 1.75}  # of a panel, by row tiles that share it; measured with AVX512-VNNI
_TILE_COST, _INTERLEAVING_COST = 50, 8  # instructions for a position and a panel, in one output row


def plan_dwconv_int8(
    shape: Shape,
    depth_multiplier: int,
    rows: WindowDimension,
    columns: WindowDimension,
    dot: RowDot,
    target: Target,
) -> DwConvInt8Kernel:
    """Return the kernel for an input shape and a target: tile, blocks, pixels of a group."""
    channels, nr = shape[3] * depth_multiplier, PANEL_VECTORS * target.lanes
    groups = math.ceil(rows.size / dot.rows)
    tile_rows = groups * dot.rows - rows.size + 1 if rows.stride == rows.dilation == 1 else 1
    tile_rows = min(tile_rows, rows.count)
    copies_rows = depth_multiplier > 1 or channels < min(nr, _SUBVECTOR_BYTES)
    pixel_group = _choose_pixel_group(channels, columns, nr) if copies_rows else 1
    row_tiles = 1 if copies_rows else _choose_row_tiles(channels, math.ceil(rows.count / tile_rows), nr)
    is_unrolled = groups * columns.size <= _MAX_UNROLLED_DOTS
    uses_registers = (
        not copies_rows
        and _fits_registers(groups, columns, dot, target)
        and _saves_memory(row_tiles, shape[2], columns)
    )
    mr = _choose_mr(columns.count // pixel_group, tile_rows, target)
    if uses_registers:
        mr = 2 if tile_rows <= 2 else 1  # at most 16 of 32 registers are sums

    kernel = DwConvInt8Kernel(
        shape,
        rows,
        columns,
        depth_multiplier,
        block_rows=tile_rows * row_tiles,
        block_panels=math.ceil(channels * pixel_group * row_tiles / nr),
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
        mr=mr,
        lanes=target.lanes,
        partial_panel=channels * pixel_group if copies_rows and channels * pixel_group < nr else 0,
        row_tiles=row_tiles,
        copies_rows=copies_rows,
        uses_registers=uses_registers,
        has_depth_multiplier=depth_multiplier > 1,
    )
    return replace(kernel, block_rows=_choose_block_rows(kernel)) if copies_rows else _in_blocks(kernel)


def _in_blocks(kernel: DwConvInt8Kernel) -> DwConvInt8Kernel:
    """Return a kernel that copies no rows, in blocks small enough that all threads have some.

    Blocks of panels do not overlap: there are none if the last panel starts early.
    """
    tile_rows, panels = kernel.tile_rows, kernel.panels
    tiles = kernel.shape[0] * math.ceil(kernel.rows.count / tile_rows)
    if tiles < _MIN_WORK_ITEMS and kernel.channels % kernel.panel_channels == 0 and panels > 1:
        block_panels = math.ceil(panels / math.ceil(_MIN_WORK_ITEMS / tiles))
        return replace(kernel, block_panels=block_panels)
    return replace(kernel, block_rows=max(1, tiles // _MAX_WORK_ITEMS) * tile_rows)


def _choose_row_tiles(channels: int, tiles: int, nr: int) -> int:
    """Return how many row tiles share a vector, so that little of it is unused."""

    def cost(row_tiles: int) -> float:
        panels = math.ceil(channels * row_tiles / nr)
        return math.ceil(tiles / row_tiles) * panels * _ROW_TILE_COSTS[row_tiles]

    return min((n for n in _ROW_TILE_COSTS if _SUBVECTOR_BYTES <= nr // n <= channels), key=cost)


def _choose_pixel_group(channels: int, columns: WindowDimension, nr: int) -> int:
    """Return how many adjacent pixels are taken as one. Each pixel's panel is interleaved as often as that."""
    if columns.stride > 1 or channels >= nr:
        return 1

    def cost(group: int) -> float:
        panels = math.ceil(channels * group / nr)
        return panels * (math.ceil(columns.count / group) * _TILE_COST + columns.count * _INTERLEAVING_COST)

    return min(range(1, min(_MAX_PIXEL_GROUP, columns.count) + 1), key=cost)


def _fits_registers(groups: int, columns: WindowDimension, dot: RowDot, target: Target) -> bool:
    """Return whether rows can be interleaved in registers, of which vectors are long enough to gain from it.

    With vectors of 16 bytes it takes as many instructions as in scratch memory, where rows take less memory, too.
    """
    if target.lanes < _MIN_LANES_FOR_REGISTERS or groups > 1 or dot.rows < 4 or columns.dilation > 1:
        return False
    return columns.stride <= columns.size <= min(columns.stride + _MAX_KEPT_PIXELS, _MAX_REGISTER_COLUMNS)


def _saves_memory(row_tiles: int, width: int, columns: WindowDimension) -> bool:
    """Return whether interleaved rows had better not be in scratch memory.

    Pixels of several row tiles take more instructions to load, which only a wide row is worth if windows share most
    pixels.
    """
    return columns.stride > 1 or row_tiles == 1 or width > row_tiles * _MAX_SMALL_WIDTH


def _choose_mr(count: int, tile_rows: int, target: Target) -> int:
    """Return the positions of a tile: the fewest computed twice, and of these the most that share loads."""
    vectors = _TILE_VECTORS_16_REGISTERS if target.registers == 16 else _TILE_VECTORS_32_REGISTERS
    max_mr = max(1, min(count, vectors // tile_rows))
    return min(range(1, max_mr + 1), key=lambda mr: math.ceil(count / mr) * (mr + 0.35))


def _choose_block_rows(kernel: DwConvInt8Kernel) -> int:
    """Return the output rows of a block: as many as the scratch limit and the number of work items allow."""
    tile_rows = kernel.taps.rows
    max_rows = max(tile_rows, kernel.shape[0] * kernel.rows.count // _MIN_WORK_ITEMS)
    rows = tile_rows
    while (
        rows + tile_rows <= min(max_rows, kernel.rows.count + tile_rows - 1)
        and replace(kernel, block_rows=rows + tile_rows).row_buffer.bytes <= _MAX_ROWS_BYTES
    ):
        rows += tile_rows
    return rows
