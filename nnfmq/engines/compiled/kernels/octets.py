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

GROUP = 8
LINE_BYTES = 64
"""Places and weights begin at multiples of it."""
_QUAD, _PAIR = 4, 2
_LARGEST_SUM = 128  # 255 times that fits 16 bits
_LARGEST, _LEAST = 127, 128  # a byte's ends, without signs


def parts_of(weights: Array) -> Iterator[Array]:
    """Yield arrays like `weights` (..., 8) that can be multiplied by bytes and add up to them. None for only 0."""
    left = weights
    while left.any():
        fours = left.reshape(*left.shape[:-1], 2, _PAIR, _PAIR).swapaxes(-3, -2)  # by pairs of a quad, then quads
        flat = fours.reshape(*left.shape[:-1], _PAIR, _QUAD)
        held = _held(np.maximum(flat, 0), _LARGEST) - _held(np.maximum(-flat, 0), _LEAST)
        part = held.reshape(fours.shape).swapaxes(-3, -2).reshape(left.shape)
        yield part
        left = left - part


def _held(weights: Array, largest: int) -> Array:
    """Return of each four as much as fits, the first weights first."""
    room = np.minimum(np.cumsum(np.minimum(weights, largest), axis=-1, dtype=np.int16), _LARGEST_SUM)
    return np.diff(room, axis=-1, prepend=np.int16(0))


def rounds_of(panel: Array) -> int:
    """Return how long the list of a panel is: weights (channels, taps, cells of a tap)."""
    return sum(len(numbers) for numbers, _ in _listed(_in_groups(panel)))


def pack_lists(weights: Array, tap_places: npt.NDArray[np.int64]) -> bytes:
    """Return lists of `weights` (panels, channels, taps, cells of a tap), and first where each begins and its length.

    A list are the places of cells, in bytes from those of a position, then their weights (groups, 2, channels, 4).
    `tap_places` are the places of the taps' first cells.
    """
    table, data = np.zeros((len(weights), 2), np.int64), bytearray(16 * len(weights))
    groups = -(-weights.shape[-1] // GROUP)
    places = (tap_places[:, None] + GROUP * np.arange(groups)).astype(np.int32).reshape(-1)
    for number, panel in enumerate(weights):
        parts = list(_listed(_in_groups(panel)))
        data += bytes(-len(data) % LINE_BYTES)
        table[number] = len(data), sum(len(numbers) for numbers, _ in parts)
        data += b"".join(places[numbers].tobytes() for numbers, _ in parts)
        data += bytes(-len(data) % LINE_BYTES)
        data += b"".join(quads.tobytes() for _, quads in parts)
    data[: table.nbytes] = table.tobytes()
    return bytes(data)


def _in_groups(panel: Array) -> Array:
    """Return weights (channels, taps, cells) with the cells of each tap in groups, filled up with 0."""
    channels, taps, cells = panel.shape
    filled = np.zeros((channels, taps, cells + -cells % GROUP), np.int16)
    filled[..., :cells] = panel
    return filled.reshape(channels, -1, GROUP)


def _listed(panel: Array) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int8]]]:
    """Yield for each part of weights (channels, groups, 8) which groups it has, and their bytes."""
    for part in parts_of(panel):
        numbers = np.flatnonzero(part.any(axis=(0, 2)))
        quads = part[:, numbers].reshape(len(panel), len(numbers), 2, _QUAD)
        yield numbers, quads.transpose(1, 2, 0, 3).astype(np.int8)
