"""Weight packing for acc16: terms that cannot overflow int16, and group lists."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from nnfmq.engines.compiled.kernels.packing import group_list_length, pack_group_lists, split_for_acc16
from nnfmq.operations.declaration import Array

FOURS = [(0, 1, 4, 5), (2, 3, 6, 7)]  # inputs of a group whose products share an int16 lane
EXTREME_INPUTS = np.array(list(itertools.product([0, 255], repeat=4)))
INT16 = np.iinfo(np.int16)


def full_terms(weights: Array) -> list[Array]:
    """Return the terms of weights (channels, groups, 8), each with zeros for the groups that it does not list."""
    terms = []
    for numbers, listed in split_for_acc16(weights.swapaxes(0, 1)):
        assert len(numbers) and listed.any(axis=(1, 2)).all(), "an all-zero group is listed"
        terms.append(np.zeros(weights.shape, np.int64))
        terms[-1][:, numbers] = listed.swapaxes(0, 1)
    return terms


def assert_terms_are_exact(weights: Array) -> list[Array]:
    """Assert that the terms fit int8, sum to the weights, and that no partial sum overflows int16; return them."""
    terms = full_terms(weights)
    np.testing.assert_array_equal(sum(terms, np.zeros(weights.shape, np.int64)), weights)
    for term in terms:
        assert term.min() >= -128 and term.max() <= 127
        for four in (term[..., list(inputs)].reshape(-1, 4) for inputs in FOURS):
            assert 255 * np.maximum(four, 0).sum(axis=1).max() <= INT16.max
            assert 255 * np.minimum(four, 0).sum(axis=1).min() >= INT16.min
            sums = np.cumsum(four[:, None] * EXTREME_INPUTS, axis=-1)  # of one, two and all four products
            assert INT16.min <= sums.min() and sums.max() <= INT16.max
            second = four[:, 2:] @ EXTREME_INPUTS[:, 2:].T
            assert INT16.min <= second.min() and second.max() <= INT16.max
    return terms


def multiply_in_int16(weights: Array, inputs: Array) -> Array:
    """Return (..., 8) weights times inputs as the instructions do: pmaddubsw saturates, paddw wraps."""
    products = weights.astype(np.int64) * inputs
    pairs = products.reshape(*products.shape[:-1], 4, 2).sum(axis=-1).clip(INT16.min, INT16.max)
    return (pairs[..., :2] + pairs[..., 2:]).astype(np.int16).sum(axis=-1, dtype=np.int64)


@given(arrays(np.int16, (2, 3, 8), elements=st.integers(-255, 255)), arrays(np.uint8, (3, 8)))
@settings(deadline=None)
def test_terms_are_exact(weights: Array, inputs: Array) -> None:
    found = sum(
        (multiply_in_int16(term, inputs) for term in assert_terms_are_exact(weights)), np.zeros((2, 3), np.int64)
    )
    np.testing.assert_array_equal(found, (weights.astype(np.int64) * inputs).sum(axis=-1))


@pytest.mark.parametrize("deviation", [5, 20, 60, 200])
def test_terms_of_many_weights_are_exact(deviation: int) -> None:
    random = np.random.default_rng(deviation)
    assert_terms_are_exact(np.rint(random.normal(0, deviation, (16, 500, 8))).clip(-255, 255).astype(np.int16))


def test_weights_that_break_the_bound_overflow_int16() -> None:
    """Two weights of one pmaddubsw, or of two, may sum to 128 at most: the tests above detect an overflow."""
    inputs = np.full((1, 8), 255)
    for pair, fits in itertools.product(((0, 1), (0, 4)), (True, False)):
        weights = np.zeros((1, 8), np.int16)
        weights[0, pair] = 127, 1 + (not fits)
        assert (multiply_in_int16(weights, inputs) == (weights * inputs).sum()).all() == fits


def test_zero_weights_have_no_terms() -> None:
    assert not full_terms(np.zeros((3, 2, 8), np.int16))


@pytest.mark.parametrize(("weight", "count"), [(255, 8), (-255, 8), (127, 4), (-128, 4), (32, 1), (-32, 1)])
def test_large_weights_have_several_terms(weight: int, count: int) -> None:
    """A four of them sums to at most 1020, of which each term takes 128."""
    assert len(assert_terms_are_exact(np.full((2, 3, 8), weight, np.int16))) == count


@pytest.mark.parametrize("four", FOURS)
@pytest.mark.parametrize("signs", [1, -1])
def test_a_four_at_the_bound_is_not_split(four: tuple[int, ...], signs: int) -> None:
    weights = np.zeros((1, 1, 8), np.int16)
    weights[0, 0, list(four)] = np.array([100, 3, 20, 5]) * signs
    assert len(assert_terms_are_exact(weights)) == 1
    weights[0, 0, four[3]] += signs
    assert len(assert_terms_are_exact(weights)) == 2


def test_the_bound_applies_to_each_sign_separately() -> None:
    weights = np.array([[[64, -64, 3, -128, 64, -64, 125, 0]]], np.int16)
    assert [term.tolist() for term in assert_terms_are_exact(weights)] == [weights.tolist()]


# -- lists ------------------------------------------------------------------------------------------------------------


def read_lists(data: bytes, panels: int, channels: int, k: int, tap_offsets: Sequence[int]) -> tuple[Array, int]:
    """Return the weights (panels, channels, taps, k of a tap) in group lists, and the length of all lists."""
    weights, end, groups = np.zeros((panels, channels, len(tap_offsets), k), int), 16 * panels, 0
    groups_at = {offset + 8 * n: (tap, 8 * n) for tap, offset in enumerate(tap_offsets) for n in range(-(-k // 8))}
    for panel in range(panels):
        begin, count = np.frombuffer(data, "<i8", 2, 16 * panel).tolist()
        fours = begin + -(-4 * count // 64) * 64
        assert begin % 64 == 0 and end <= begin
        for number, offset in enumerate(np.frombuffer(data, "<i4", count, begin).tolist()):
            tap, first = groups_at[offset]
            group = np.frombuffer(data, "i1", 8 * channels, fours + 8 * channels * number).reshape(2, channels, 4)
            used = min(8, k - first)
            both = np.concatenate([group[0], group[1]], axis=1)
            assert not both[:, used:].any()
            weights[panel, :, tap, first : first + used] += both[:, :used]
        end, groups = fours + 8 * channels * count, groups + count
    assert end == len(data)
    return weights, groups


@pytest.mark.parametrize("k", [1, 8, 13, 24])
@pytest.mark.parametrize("deviation", [0, 10, 90])
def test_group_lists_have_all_weights(k: int, deviation: int) -> None:
    random, tap_offsets = np.random.default_rng(k), [0, 40, 80, 1000, 1040, 1080]
    weights = np.rint(random.normal(0, deviation, (3, 16, 6, k))).clip(-255, 255).astype(np.int16)
    weights[1] = 0
    weights[2, :, 1:4] = 0
    found, groups = read_lists(pack_group_lists(weights, np.array(tap_offsets)), 3, 16, k, tap_offsets)
    np.testing.assert_array_equal(found, weights)
    assert groups == group_list_length(weights) == sum(group_list_length(panel[None]) for panel in weights)
    assert group_list_length(weights[1:2]) == 0
    assert groups >= np.pad(weights, [(0, 0)] * 3 + [(0, -k % 8)]).reshape(3, 16, -1, 8).any(axis=(1, 3)).sum()


def test_a_group_has_one_entry_per_term_of_any_channel() -> None:
    panels = np.ones((1, 16, 1, 24), np.int16)
    assert group_list_length(panels) == 3
    panels[0, 5, 0, 9] = 127  # 130 with the rest of its four
    assert group_list_length(panels) == 4
    panels[0, :, 0, 16:] = 0
    assert group_list_length(panels) == 3
