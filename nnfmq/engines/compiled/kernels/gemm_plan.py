"""Blocking heuristic of GEMMs: register tile (mr, nr), mc, slices of N, and estimated cycles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from nnfmq.engines.compiled.kernels.conv_shape import ConvShape
from nnfmq.engines.compiled.kernels.gemm import GemmKernel, LhsLayout, position_stride, row_buffer_of
from nnfmq.engines.compiled.kernels.micro_kernels import TILE_ROWS, Amx, Array, DotU8S8x4, Float32, MicroKernel
from nnfmq.engines.compiled.kernels.packing import best_output_rows, group_list_length
from nnfmq.engines.compiled.target import Target

__all__ = ["estimate_cycles", "plan_gemm"]

_MAX_SCRATCH_BYTES = 1 << 16  # together with a panel of weights about half of a second-level cache
_MIN_WORK_ITEMS = 8
_MAX_WEIGHT_BYTES = 1 << 17  # of one slice of N
_K_UNROLLS = (2, 3, 5)  # the first that divides the number of K groups
_SAMPLE_PANELS = 4  # whose group lists are measured, to estimate the length of all
_MAX_MR = 8
_MAX_CONSTANT_STRIDE = 64  # bytes
_CONFLICTING_STRIDE = 1 << 11  # bytes; an AMX tile's rows then share two sets of the first-level cache

# Streamed weights, which do not fit the second-level cache.
_MAX_RESIDENT_BYTES = 3 << 18  # of weights that do
_STREAMED_MC = 128  # positions that share a load of weights from memory
_MAX_STREAMED_SCRATCH = 1 << 19  # of packed LHS, and of accumulators
_MAX_K_BLOCK_BYTES = 3 << 16  # of a panel in a K block


def plan_gemm(
    shape: ConvShape, micro_kernel: MicroKernel, target: Target, nr_vectors: Sequence[int] = range(1, 9)
) -> GemmKernel:
    """Return the kernel for a shape and a target; `nr_vectors` are the panel widths that may be chosen, in vectors."""
    channels, has_tiles = shape.output_channels_per_group, isinstance(micro_kernel, Amx)
    row_positions = 2 if _fits_half_vectors(shape, micro_kernel, target) else 1
    lanes, constant_stride = target.lanes // row_positions, _constant_stride(shape, micro_kernel)
    if has_tiles:
        mr, width = _choose_amx_tile(shape.tiled_positions, channels, target)
    elif row_positions == 2:
        # Eight accumulators only hide the latency of multiply-adds of which a CPU begins two in a cycle.
        max_mr = target.registers // 2 if constant_stride and isinstance(micro_kernel, Float32) else _MAX_MR
        mr, width = min(shape.tiled_positions // 2 * 2, max_mr), 1
    else:
        mr, width = _choose_tile(shape.tiled_positions, channels, micro_kernel, target, nr_vectors)
    lhs_layout = LhsLayout.ROW_BUFFER
    if shape.is_pointwise:
        is_direct = micro_kernel.can_read_lhs_directly(shape.channels_per_group)
        is_conflicting = has_tiles and shape.channels % _CONFLICTING_STRIDE == 0
        lhs_layout = LhsLayout.SPACED if is_conflicting else LhsLayout.DIRECT if is_direct else LhsLayout.PACKED
    k_groups = 1 if micro_kernel.is_group_sparse or has_tiles else math.ceil(shape.taps[2] / micro_kernel.kr)
    streams_weights = _streams_weights(shape, micro_kernel, mr)
    if streams_weights:
        mc = _choose_streamed_mc(shape, micro_kernel, mr)
    else:
        mc = _choose_mc(shape, micro_kernel, mr) if shape.is_pointwise else _choose_block_rows(shape, micro_kernel)
    panel_bytes = shape.k * width * lanes * micro_kernel.weight_bytes
    candidate = GemmKernel(
        shape,
        mc=mc,
        n_splits=1,
        k_blocks=math.ceil(panel_bytes / _MAX_K_BLOCK_BYTES) if streams_weights else 1,
        micro_kernel=micro_kernel,
        mr=mr,
        nr_vectors=width,
        lanes=lanes,
        row_positions=row_positions,
        nr_remainder=channels * row_positions % (width * target.lanes),
        lhs_layout=lhs_layout,
        is_grouped=shape.groups > 1,
        has_batched_rhs=shape.has_batched_rhs,
        k_unroll=next((number for number in _K_UNROLLS if k_groups % number == 0), 1),
        constant_stride=constant_stride,
        streams_weights=streams_weights,
    )
    return replace(candidate, n_splits=_choose_n_splits(candidate))


def _streams_weights(shape: ConvShape, micro_kernel: MicroKernel, mr: int) -> bool:
    """Return whether several tiles read each weight, and the weights do not fit the second-level cache."""
    is_dense = shape.is_pointwise and shape.groups == 1 and not micro_kernel.is_group_sparse
    return is_dense and shape.pixels > mr and _weight_bytes(shape, micro_kernel) > _MAX_RESIDENT_BYTES


def _weight_bytes(shape: ConvShape, micro_kernel: MicroKernel) -> int:
    return shape.k * shape.output_channels * micro_kernel.weight_bytes


def _choose_n_splits(kernel: GemmKernel) -> int:
    """Return the slices of N: as many as the number of work items and the size of the accumulators require."""
    n_splits = math.ceil(_MIN_WORK_ITEMS / kernel.work_items)
    if kernel.k_blocks > 1:
        n_splits = max(n_splits, math.ceil(kernel.mc * kernel.panels * kernel.nr * 4 / _MAX_STREAMED_SCRATCH))
    elif _weight_bytes(kernel.shape, kernel.micro_kernel) > _MAX_WEIGHT_BYTES:
        n_splits = max(n_splits, 2)
    return min(kernel.panels, n_splits)


def _fits_half_vectors(shape: ConvShape, micro_kernel: MicroKernel, target: Target) -> bool:
    """Return whether accumulators of all channels fit half vectors, and the target can compute with those.

    Weights and constants must be known, because constants are packed for two positions.
    """
    has_halves = isinstance(micro_kernel, Float32) or (
        isinstance(micro_kernel, DotU8S8x4) and target.vpdpbusd_half is not None
    )
    is_simple = shape.groups == 1 and not shape.has_batched_rhs and shape.tiled_positions > 1
    return has_halves and is_simple and shape.output_channels <= target.half_lanes


def _constant_stride(shape: ConvShape, micro_kernel: MicroKernel) -> int:
    """Return the bytes from one position's LHS to the next one's in a row buffer if they are few, else 0.

    Then one register has the address of all positions of a tile. A tap has few K groups, so that with a register for
    each position their addresses would take as long as the products.
    """
    stride = position_stride(shape, micro_kernel)
    return 0 if shape.is_pointwise or isinstance(micro_kernel, Amx) or stride > _MAX_CONSTANT_STRIDE else stride


def _choose_tile(
    positions: int, channels: int, micro_kernel: MicroKernel, target: Target, nr_vectors: Sequence[int]
) -> tuple[int, int]:
    """Return (mr, nr in vectors) with the least estimated time of those whose values fit the registers.

    Registers hold the accumulators, the operand with fewer vectors, one vector of the other, and temporaries.
    """
    height = micro_kernel.lhs_rows

    def fits(mr: int, width: int) -> bool:
        operands = min(mr // height, width * height) + 1
        return mr * width + operands + micro_kernel.temporaries(target) <= target.registers

    def cycles(tile: tuple[int, int]) -> float:
        mr, width = tile
        tiles = math.ceil(positions / mr) * math.ceil(channels / (width * target.lanes))
        return tiles * _cycles_per_k_group(micro_kernel, mr, width)

    heights = range(height, min(positions, _MAX_MR) + 1, height)
    return min(((mr, width) for mr in heights for width in nr_vectors if fits(mr, width)), key=cycles)


def _choose_amx_tile(positions: int, channels: int, target: Target) -> tuple[int, int]:
    """Return (mr, nr in vectors): two tile registers by two, if there are so many positions and channels."""
    return TILE_ROWS * min(2, positions // TILE_ROWS), min(2, math.ceil(channels / target.lanes))


def _cycles_per_k_group(micro_kernel: MicroKernel, mr: int, width: int) -> float:
    """Return the estimated time of one K group of a tile, in units of two multiply-adds or two loads.

    The acc16 kernel loads its weights again for each row; its formula was fitted to measurements. Narrow panels are
    preferred slightly, because they stay in the first-level cache. An LHS vector of two rows is joined from halves.
    """
    if micro_kernel.is_group_sparse:
        return 2.6 * mr * width + 1.4 * mr + 2
    height = micro_kernel.lhs_rows
    weights, joins = width * height, (height - 1) * mr / 2
    return max(mr * width + joins, mr + weights) + 1 + weights / 8


def _choose_mc(shape: ConvShape, micro_kernel: MicroKernel, mr: int) -> int:
    """Return the positions of a block of pixels: a multiple of mr, unless there is only one block.

    The last block starts early if mc does not divide the positions. Both blocks write the same bytes for the positions
    that they share.
    """
    max_positions = max(mr, _MAX_SCRATCH_BYTES // (shape.channels * micro_kernel.lhs_bytes))
    wanted = min(max_positions, math.ceil(shape.batch * shape.height * shape.width / _MIN_WORK_ITEMS))
    return _divide_positions(shape.pixels, max(mr, wanted), mr)


def _choose_streamed_mc(shape: ConvShape, micro_kernel: MicroKernel, mr: int) -> int:
    """Return the positions of a block whose weights are streamed: work items are slices of N rather than blocks."""
    return _divide_positions(shape.pixels, _max_streamed_positions(shape, micro_kernel, mr), mr)


def _max_streamed_positions(shape: ConvShape, micro_kernel: MicroKernel, mr: int) -> int:
    fits = _STREAMED_MC
    if not micro_kernel.can_read_lhs_directly(shape.channels):
        fits = min(fits, _MAX_STREAMED_SCRATCH // (shape.channels * micro_kernel.lhs_bytes))
    return max(mr, fits)


def _divide_positions(positions: int, most: int, mr: int) -> int:
    """Return the size of the fewest equal blocks of at most about `most` positions: a multiple of mr, or one block."""
    blocks = math.ceil(positions / most)
    return min(positions, math.ceil(math.ceil(positions / blocks) / mr) * mr)


def _choose_block_rows(shape: ConvShape, micro_kernel: MicroKernel) -> int:
    """Return the output rows of a block: as many as the scratch limit and the number of work items allow."""
    max_rows = max(1, math.ceil(shape.batch * shape.rows.count / _MIN_WORK_ITEMS))
    rows = 1
    while rows < max_rows and row_buffer_of(shape, micro_kernel, rows + 1).bytes <= _MAX_SCRATCH_BYTES:
        rows += 1
    return best_output_rows(row_buffer_of(shape, micro_kernel, rows), rows)


def estimate_cycles(kernel: GemmKernel, weights: Array) -> float:
    """Return the estimated time of a GEMM in units of two multiply-adds, to compare kernels for one shape.

    `weights` are as for `GemmKernel.pack`. The length of group lists is estimated from a sample of the panels.
    """
    tap_rows, tap_columns, k = kernel.shape.taps
    tiles = math.ceil(kernel.shape.m / kernel.mr) * kernel.panels
    if kernel.micro_kernel.is_group_sparse:
        by_channel = weights.reshape(kernel.shape.output_channels, -1, k)
        # Not np.unique, which imports numpy.ma: 3 MiB of each worker.
        sample = dict.fromkeys(np.linspace(0, kernel.panels - 1, _SAMPLE_PANELS).astype(int).tolist())
        panels = [by_channel[kernel.packed_channel_map[number * kernel.nr :][: kernel.nr]] for number in sample]
        k_groups = group_list_length(np.stack(panels)) / len(sample)
    else:
        k_groups = tap_rows * tap_columns * math.ceil(k / kernel.micro_kernel.kr)
    return tiles * k_groups * _cycles_per_k_group(kernel.micro_kernel, kernel.mr, kernel.nr_vectors)
