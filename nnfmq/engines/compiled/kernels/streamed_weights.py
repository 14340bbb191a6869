"""The loops of a GEMM whose weights do not fit the second-level cache.

A block of positions is so large that each weight is loaded from memory once for many tiles. K is divided into blocks
(BLIS: kc) whose part of a panel stays in the cache, and the tiles of a panel prefetch the next one. Accumulators wait
in scratch memory between two K blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nnfmq.engines.compiled.ir_builder import Value
from nnfmq.engines.compiled.kernels.gemm_tile import TileBuilder, TilePlace

__all__ = ["emit_streamed_panels"]


@dataclass(frozen=True, slots=True)
class _KBlock:
    """A K block of a slice of N: its iterations, and the addresses of its LHS and of its part of panel 0."""

    is_first: Value
    is_last: Value
    iterations: Value
    lhs: Value
    weights: Value


def emit_streamed_panels(
    tile: TileBuilder, panels: tuple[Value, Value], lhs: Value, row_sums: Value, out: Value, weights: Value
) -> None:
    """Emit the loops over K blocks and panels: all panels of a slice read the K block of the LHS from the cache.

    `panels` are the first panel of a slice of N and the end of the slice.
    """
    kb, n = tile.kb, tile.n
    accumulators, (first_panel, end) = kb.at(kb.scratch, n.accumulators), panels
    with kb.loop(0, n.k_blocks) as k_block:
        first = kb.ir.mul(k_block, n.block_iterations)
        iterations = kb.intrinsic("llvm.smin", n.block_iterations, kb.ir.sub(n.k_iterations, first))
        block = _KBlock(
            is_first=kb.ir.icmp_unsigned("==", k_block, kb.i64(0)),
            is_last=kb.ir.icmp_unsigned("==", kb.add(k_block, 1), n.k_blocks),
            iterations=iterations,
            lhs=kb.at(lhs, kb.mul(first, tile.lhs_bytes)),
            weights=kb.at(weights, kb.mul(first, tile.weight_bytes)),
        )
        with kb.loop(first_panel, end) as panel:
            stored = kb.at(accumulators, kb.ir.mul(kb.ir.sub(panel, first_panel), n.accumulator_stride))
            _emit_k_block_of_panel(tile, block, panel, row_sums, stored, out)


def _emit_k_block_of_panel(
    tile: TileBuilder, block: _KBlock, panel: Value, row_sums: Value, accumulators: Value, out: Value
) -> None:
    """Emit the tiles of a panel over all positions of a block; each prefetches a part of the next panel's weights.

    A prefetch may run past the constant's end: it is a hint and reads nothing.
    """
    kb, n, mr, nr = tile.kb, tile.n, tile.tile.mr, tile.tile.nr
    channel, weights = kb.mul(panel, nr), kb.at(block.weights, kb.ir.mul(panel, n.panel_bytes))
    ahead, tile_prefetch = kb.at(weights, n.panel_bytes), kb.ir.mul(block.iterations, n.prefetch_stride)
    out = kb.at(out, kb.mul(panel, nr * tile.micro_kernel.output_bytes))
    is_last_panel = kb.ir.icmp_unsigned("==", kb.add(panel, 1), n.panels_per_group)
    last = kb.ir.sub(n.positions, kb.i64(mr))
    with kb.loop(0, n.positions, mr) as begin:
        position, stored = kb.intrinsic("llvm.smin", begin, last), kb.at(accumulators, kb.mul(begin, nr * 4))
        prefetched = kb.at(ahead, kb.ir.mul(kb.ir.udiv(begin, kb.i64(mr)), tile_prefetch))
        target = kb.at(out, kb.ir.mul(position, n.out_stride))
        place = TilePlace(kb.at(row_sums, kb.mul(position, 4)), channel, target, is_last_panel)
        accs = _initial_or_stored(tile, block, place, stored)
        row = kb.at(block.lhs, kb.ir.mul(position, n.lhs_stride))
        accs = tile.exchanged(tile.k_loop(row, weights, block.iterations, tile.exchanged(accs), prefetched))
        with kb.ir.if_else(block.is_last) as (done, more):
            with done:
                tile.emit_epilogue(accs, place)
            with more:
                tile.store_accumulators(accs, stored)


def _initial_or_stored(tile: TileBuilder, block: _KBlock, place: TilePlace, stored: Value) -> Sequence[Value]:
    """Return a tile's initial accumulators in the first K block, else those that the block before stored."""
    return tile.kb.either(block.is_first, lambda: tile.init_accumulators(place), lambda: tile.load_accumulators(stored))
