"""How a product is cut: its tile, its blocks of positions and its groups of channels; and what that takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from nnfmq.engines.compiled.kernels.arithmetic import Arithmetic, Array
from nnfmq.engines.compiled.kernels.octets import rounds_of
from nnfmq.engines.compiled.kernels.product import Product, Walk, band_of
from nnfmq.engines.compiled.kernels.product_shape import ProductShape
from nnfmq.engines.compiled.target import Target

__all__ = ["plan_product", "time_of"]

_SCRATCH_BYTES = 1 << 16  # with a panel of weights beside it about half of a second-level cache
_UNITS = 8
_PANEL_BYTES = 1 << 17
_AT_ONCE = (2, 3, 5)  # groups in a round: the first number that all can be divided by
_SAMPLE = 4  # panels, whose lists tell how long all are


def plan_product(
    shape: ProductShape, arithmetic: Arithmetic, target: Target, widths: Sequence[int] = range(1, 9)
) -> Product:
    """Choose the tile, which has one of these widths in vectors, the blocks and the groups for a target."""
    positions = shape.pixels if shape.is_pointwise else shape.columns.count
    tile = _best_tile(positions, shape.part, arithmetic, target, widths)
    panel = tile[1] * target.lanes
    panels = shape.parts * math.ceil(shape.part / panel)
    block = _pointwise_block(shape, arithmetic, tile[0]) if shape.is_pointwise else _band_rows(shape, arithmetic)
    walk: Walk = "band"
    if shape.is_pointwise:
        walk = "in place" if arithmetic.in_place(shape.depth) else "pixels"
    rest, parted = shape.part % panel, shape.parts > 1
    groups = 1 if arithmetic.is_listed else math.ceil(shape.taps[2] / arithmetic.group)
    at_once = next((number for number in _AT_ONCE if groups % number == 0), 1)
    draft = Product(shape, block, 1, arithmetic, tile, target.lanes, rest, walk, parted, shape.own, at_once)
    heavy = shape.taps_of_a_filter * shape.filters * arithmetic.cell_bytes > _PANEL_BYTES
    groups = max(math.ceil(_UNITS / draft.work_items), 2 if heavy else 1)
    return replace(draft, groups=min(panels, groups))


def _best_tile(
    positions: int, filters: int, arithmetic: Arithmetic, target: Target, widths: Sequence[int]
) -> tuple[int, int]:
    """Return the tile of the least time.

    Beside the sums, registers hold the shorter side, what is multiplied with it, and its products unless they are added
    at once.
    """

    def fits(rows: int, vectors: int) -> bool:
        return rows * vectors + min(rows, vectors) + 1 + arithmetic.products(target) <= target.registers

    def time(tile: tuple[int, int]) -> float:
        rows, vectors = tile
        tiles = math.ceil(positions / rows) * math.ceil(filters / (vectors * target.lanes))
        return tiles * _round_time(arithmetic, rows, vectors)

    tiles = [(r, v) for r in range(1, min(positions, 8) + 1) for v in widths if fits(r, v)]
    return min(tiles, key=time)


def _round_time(arithmetic: Arithmetic, rows: int, vectors: int) -> float:
    """Return about how long one round of a tile takes: two products, or two loads, are 1.

    Listed weights, of eight cells, are loaded for each row; that was measured. Narrow panels stay in the nearest cache.
    """
    if arithmetic.is_listed:
        return 2.6 * rows * vectors + 1.4 * rows + 2
    return max(rows * vectors, rows + vectors) + 1 + vectors / 8


def _pointwise_block(shape: ProductShape, arithmetic: Arithmetic, rows: int) -> int:
    """Return how many positions a block has: whole tiles, but where there is only one block.

    The last block begins earlier where positions are no multiple. What two blocks then have in common both write alike.
    """
    most = max(rows, _SCRATCH_BYTES // (shape.channels * arithmetic.cell_bytes))
    wanted = min(most, math.ceil(shape.batch * shape.height * shape.width / _UNITS))
    blocks = math.ceil(shape.pixels / max(rows, wanted))
    return min(shape.pixels, math.ceil(math.ceil(shape.pixels / blocks) / rows) * rows)


def _band_rows(shape: ProductShape, arithmetic: Arithmetic) -> int:
    """Return how many output rows share a band."""
    most = max(1, math.ceil(shape.batch * shape.rows.count / _UNITS))
    served = 1
    while served < most and band_of(shape, arithmetic, served + 1).bytes <= _SCRATCH_BYTES:
        served += 1
    return served


def time_of(product: Product, weights: Array) -> float:
    """Return about how long a product takes, to compare products of one shape; two multiplications are 1.

    `weights` are as for its `pack`: where they are listed, a sample of the panels tells how long the lists are.
    """
    tap_rows, tap_columns, cells = product.shape.taps
    tiles = math.ceil(product.shape.positions / product.tile[0]) * product.panels
    if product.arithmetic.is_listed:
        rounds = _listed_rounds(product, weights.reshape(product.shape.filters, -1, cells))
    else:
        rounds = tap_rows * tap_columns * math.ceil(cells / product.arithmetic.group)
    return tiles * rounds * _round_time(product.arithmetic, *product.tile)


def _listed_rounds(product: Product, weights: Array) -> float:
    """Return how long lists of weights (channels, taps, cells) are: the mean of a sample of panels."""
    sample = np.unique(np.linspace(0, product.panels - 1, _SAMPLE).astype(int))
    panels = (weights[product.order[number * product.panel :][: product.panel]] for number in sample)
    return sum(map(rounds_of, panels)) / len(sample)
