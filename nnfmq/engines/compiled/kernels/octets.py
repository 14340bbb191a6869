"""Weights of bytes whose products are added in 16 bits, four by four: what does not fit there comes in a second part.

A *group* are eight cells, which are codes without sign, so at most 255. Its products are added in two fours: cells 0,
1, 4, 5, and the others. No sum on the way leaves 16 bits while the weights of either sign in a four add up to 128 at
most. Trained filters have few groups that do not: their weights are split into parts that keep to it, and a group is
listed once for each part that has weights of any of the channels side by side.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

__all__ = ["GROUP", "LINE_BYTES", "pack_lists", "parts_of", "rounds_of"]

Array = npt.NDArray[np.int16]
RowPointers = npt.NDArray[np.int64]

GROUP = 8
LINE_BYTES = 64
"""Places and weights begin at multiples of it."""
_QUAD, _PAIR = 4, 2
_LARGEST_SUM = 128  # 255 times that fits 16 bits
_LARGEST = 127


def parts_of(panel: Array) -> Iterator[tuple[RowPointers, Array]]:
    """Yield parts that can be multiplied and add up to `panel` (channels, groups, 8): the groups it has, and these."""
    numbers, left = np.arange(panel.shape[1]), panel
    while True:
        some = left.any(axis=(0, 2))
        numbers, left = numbers[some], left[:, some]
        if not len(numbers):
            return
        part, excessive = left, _is_excessive(left)
        if excessive.any():
            part = left.copy()
            part[excessive] = _held(left[excessive])
        yield numbers, part
        left = left - part


def _is_excessive(groups: Array) -> npt.NDArray[np.bool_]:
    """Return of which groups (..., 8) either four, or a weight, does not fit."""
    above = np.maximum(groups, 0)
    sums = [_sums_of_fours(signed) for signed in (above, above - groups)]
    excess = (np.maximum(*sums) > _LARGEST_SUM).any(axis=-1)
    result: npt.NDArray[np.bool_] = excess | (above.max(axis=-1) > _LARGEST)
    return result


def _sums_of_fours(groups: Array) -> Array:
    pairs = groups[..., 0::2] + groups[..., 1::2]
    return pairs[..., :_PAIR] + pairs[..., _PAIR:]


def _held(groups: Array) -> Array:
    """Return as much of groups (count, 8) as fits."""
    fours = groups.reshape(-1, 2, _PAIR, _PAIR).swapaxes(1, 2)  # by pairs of a quad, then by quads
    flat = fours.reshape(-1, _PAIR, _QUAD)
    held = _first(np.maximum(flat, 0), _LARGEST) - _first(np.maximum(-flat, 0), _LARGEST_SUM)
    return held.reshape(fours.shape).swapaxes(1, 2).reshape(groups.shape)


def _first(fours: Array, largest: int) -> Array:
    """Return of each four, of weights without signs, what fits of the first ones, and then of the others."""
    room = np.minimum(np.cumsum(np.minimum(fours, largest), axis=-1, dtype=np.int16), _LARGEST_SUM)
    return np.diff(room, axis=-1, prepend=np.int16(0))


def rounds_of(panel: Array) -> int:
    """Return how long the list of a panel is: weights (channels, taps, cells of a tap)."""
    return sum(len(numbers) for numbers, _ in parts_of(_in_groups(panel)))


def pack_lists(weights: Array, tap_places: RowPointers) -> bytes:
    """Return lists of `weights` (panels, channels, taps, cells of a tap), and first where each begins and its length.

    A list are the places of cells, in bytes from those of a position, then their weights (groups, 2, channels, 4).
    `tap_places` are the places of the taps' first cells.
    """
    table, data = np.zeros((len(weights), 2), np.int64), bytearray(16 * len(weights))
    groups = -(-weights.shape[-1] // GROUP)
    places = (tap_places[:, None] + GROUP * np.arange(groups)).astype(np.int32).reshape(-1)
    for number, panel in enumerate(weights):
        parts = list(parts_of(_in_groups(panel)))
        data += bytes(-len(data) % LINE_BYTES)
        table[number] = len(data), sum(len(numbers) for numbers, _ in parts)
        data += b"".join(places[numbers].tobytes() for numbers, _ in parts)
        data += bytes(-len(data) % LINE_BYTES)
        data += b"".join(_in_quads(part).tobytes() for _, part in parts)
    data[: table.nbytes] = table.tobytes()
    return bytes(data)


def _in_quads(groups: Array) -> npt.NDArray[np.int8]:
    """Return bytes (groups, 2, channels, 4) of weights (channels, groups, 8)."""
    channels, count, _ = groups.shape
    return groups.astype(np.int8).reshape(channels, count, 2, _QUAD).transpose(1, 2, 0, 3)


def _in_groups(panel: Array) -> Array:
    """Return weights (channels, taps, cells) with the cells of each tap in groups, filled up with 0."""
    channels, taps, cells = panel.shape
    filled = np.zeros((channels, taps, cells + -cells % GROUP), np.int16)
    filled[..., :cells] = panel
    return filled.reshape(channels, -1, GROUP)
