"""Weights for products of octets: parts whose products fit 16 bits, and the lists of their groups."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from nnfmq.engines.compiled.kernels.packing import group_list_length, pack_group_lists, split_for_acc16
from nnfmq.operations.signature import Array

FOURS = [(0, 1, 4, 5), (2, 3, 6, 7)]  # of the cells of a group, in the order in which they are added
EVERY_END = np.array(list(itertools.product([0, 255], repeat=4)))
INT16 = np.iinfo(np.int16)


def whole_parts(weights: Array) -> list[Array]:
    """Return the parts of weights (channels, groups, 8), each with 0 where it has no group."""
    parts = []
    for numbers, held in split_for_acc16(weights):
        assert len(numbers) and held.any(axis=(0, 2)).all(), "a group is listed for nothing"
        parts.append(np.zeros(weights.shape, np.int64))
        parts[-1][:, numbers] = held
    return parts


def assert_parts_hold(weights: Array) -> list[Array]:
    """Assert that the parts are bytes, add up to the weights, and that no sum on the way leaves 16 bits."""
    parts = whole_parts(weights)
    np.testing.assert_array_equal(sum(parts, np.zeros(weights.shape, np.int64)), weights)
    for part in parts:
        assert part.min() >= -128 and part.max() <= 127
        for four in (part[..., list(places)].reshape(-1, 4) for places in FOURS):
            assert 255 * np.maximum(four, 0).sum(axis=1).max() <= INT16.max
            assert 255 * np.minimum(four, 0).sum(axis=1).min() >= INT16.min
            sums = np.cumsum(four[:, None] * EVERY_END, axis=-1)  # alone, of two, and of two and two more
            assert INT16.min <= sums.min() and sums.max() <= INT16.max
            second = four[:, 2:] @ EVERY_END[:, 2:].T
            assert INT16.min <= second.min() and second.max() <= INT16.max
    return parts


def added_in_16_bits(weights: Array, cells: Array) -> Array:
    """Return (..., 8) weights times cells as the instructions add them: twos saturate, and two of these wrap."""
    products = weights.astype(np.int64) * cells
    twos = products.reshape(*products.shape[:-1], 4, 2).sum(axis=-1).clip(INT16.min, INT16.max)
    return (twos[..., :2] + twos[..., 2:]).astype(np.int16).sum(axis=-1, dtype=np.int64)


@given(arrays(np.int16, (2, 3, 8), elements=st.integers(-255, 255)), arrays(np.uint8, (3, 8)))
@settings(deadline=None)
def test_parts_add_up_and_fit(weights: Array, cells: Array) -> None:
    found = sum((added_in_16_bits(part, cells) for part in assert_parts_hold(weights)), np.zeros((2, 3), np.int64))
    np.testing.assert_array_equal(found, (weights.astype(np.int64) * cells).sum(axis=-1))


@pytest.mark.parametrize("deviation", [5, 20, 60, 200])
def test_parts_of_many_weights_add_up_and_fit(deviation: int) -> None:
    random = np.random.default_rng(deviation)
    assert_parts_hold(np.rint(random.normal(0, deviation, (16, 500, 8))).clip(-255, 255).astype(np.int16))


def test_what_is_added_in_16_bits_can_be_too_much() -> None:
    """Neither two weights nor two and two may be more than 128 together: this shows that the test above would tell."""
    cells = np.full((1, 8), 255)
    for places, fits in itertools.product(((0, 1), (0, 4)), (True, False)):
        weights = np.zeros((1, 8), np.int16)
        weights[0, places] = 127, 1 + (not fits)
        assert (added_in_16_bits(weights, cells) == (weights * cells).sum()).all() == fits


def test_weights_of_0_have_no_parts() -> None:
    assert not whole_parts(np.zeros((3, 2, 8), np.int16))


@pytest.mark.parametrize(("weight", "count"), [(255, 8), (-255, 8), (127, 4), (-128, 4), (32, 1), (-32, 1)])
def test_large_weights_have_several_parts(weight: int, count: int) -> None:
    """Fours of it add up to 1020 and less, of which a part has 128."""
    assert len(assert_parts_hold(np.full((2, 3, 8), weight, np.int16))) == count


@pytest.mark.parametrize("four", FOURS)
@pytest.mark.parametrize("signs", [1, -1])
def test_what_fits_just_so_is_not_split(four: tuple[int, ...], signs: int) -> None:
    weights = np.zeros((1, 1, 8), np.int16)
    weights[0, 0, list(four)] = np.array([100, 3, 20, 5]) * signs
    assert len(assert_parts_hold(weights)) == 1
    weights[0, 0, four[3]] += signs
    assert len(assert_parts_hold(weights)) == 2


def test_signs_of_a_four_are_added_each_for_itself() -> None:
    weights = np.array([[[64, -64, 3, -128, 64, -64, 125, 0]]], np.int16)
    assert [part.tolist() for part in assert_parts_hold(weights)] == [weights.tolist()]


# -- lists ------------------------------------------------------------------------------------------------------------


def read_lists(data: bytes, panels: int, channels: int, cells: int, tap_places: Sequence[int]) -> tuple[Array, int]:
    """Return the weights (panels, channels, taps, cells of a tap) in lists, and how many groups these have."""
    weights, end, groups = np.zeros((panels, channels, len(tap_places), cells), int), 16 * panels, 0
    where = {place + 8 * n: (tap, 8 * n) for tap, place in enumerate(tap_places) for n in range(-(-cells // 8))}
    for panel in range(panels):
        begin, count = np.frombuffer(data, "<i8", 2, 16 * panel).tolist()
        quads = begin + -(-4 * count // 64) * 64
        assert begin % 64 == 0 and end <= begin
        for number, place in enumerate(np.frombuffer(data, "<i4", count, begin).tolist()):
            tap, first = where[place]
            group = np.frombuffer(data, "i1", 8 * channels, quads + 8 * channels * number).reshape(2, channels, 4)
            used = min(8, cells - first)
            both = np.concatenate([group[0], group[1]], axis=1)
            assert not both[:, used:].any()
            weights[panel, :, tap, first : first + used] += both[:, :used]
        end, groups = quads + 8 * channels * count, groups + count
    assert end == len(data)
    return weights, groups


@pytest.mark.parametrize("cells", [1, 8, 13, 24])
@pytest.mark.parametrize("deviation", [0, 10, 90])
def test_lists_have_all_weights(cells: int, deviation: int) -> None:
    random, tap_places = np.random.default_rng(cells), [0, 40, 80, 1000, 1040, 1080]
    weights = np.rint(random.normal(0, deviation, (3, 16, 6, cells))).clip(-255, 255).astype(np.int16)
    weights[1] = 0
    weights[2, :, 1:4] = 0
    found, groups = read_lists(pack_group_lists(weights, np.array(tap_places)), 3, 16, cells, tap_places)
    np.testing.assert_array_equal(found, weights)
    assert groups == sum(map(group_list_length, weights))
    assert group_list_length(weights[1]) == 0
    assert groups >= np.pad(weights, [(0, 0)] * 3 + [(0, -cells % 8)]).reshape(3, 16, -1, 8).any(axis=(1, 3)).sum()


def test_a_group_is_listed_for_each_part_that_a_channel_has_of_it() -> None:
    panel = np.ones((16, 1, 24), np.int16)
    assert group_list_length(panel) == 3
    panel[5, 0, 9] = 127  # 130 with its neighbours
    assert group_list_length(panel) == 4
    panel[:, 0, 16:] = 0
    assert group_list_length(panel) == 3
