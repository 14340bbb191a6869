"""Draws: Philox against published values, and what holds for classes that are drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.one_result import result_of, tensor

from nnfmq.hal.types import Operand, OperandType, OperationType
from nnfmq.operations.multinomial import classes_of, cumulative, multinomial, philox, uniform

Array = npt.NDArray[Any]
I32 = OperandType.TENSOR_INT32


def drawn(logits: Any, samples: int, seeds: tuple[int, int], dtype: str = "float32") -> Array:
    arguments = [tensor(logits, dtype), samples, (Operand(I32, (2,)), np.array(seeds, np.int32).tobytes())]
    return result_of(OperationType.RANDOM_MULTINOMIAL, arguments, Operand(I32, ()))


def test_philox_gives_the_published_words_for_a_key_and_counter_of_0() -> None:
    # Random123's known results, philox4x32 with 10 rounds
    assert philox(1, 0, 0).tolist() == [[0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]]


@pytest.mark.parametrize(("key", "counter"), [(1, 2), (0xFFFFFFFFFFFFFFFB, 0xFFFFFFFF00000001)])
def test_philox_is_its_definition(key: int, counter: int) -> None:
    words, keys = [2, 0, counter & 0xFFFFFFFF, counter >> 32], [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        a, b = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [b >> 32 ^ words[1] ^ keys[0], b & 0xFFFFFFFF, a >> 32 ^ words[3] ^ keys[1], a & 0xFFFFFFFF]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]

    assert philox(3, key, counter)[2].tolist() == words


def test_a_uniform_number_has_20_bits_of_one_word_above_those_of_the_next() -> None:
    (words,) = philox(1, 0, 0).tolist()

    assert uniform(2, (0, 0)).tolist() == [((words[i] & 0xFFFFF) * 2**32 + words[i + 1]) / 2**52 for i in (0, 2)]


@pytest.mark.parametrize("first", [0, 1, 6, 7])
def test_a_part_of_a_stream_is_that_part(first: int) -> None:
    np.testing.assert_array_equal(uniform(5, (3, 4), first), uniform(20, (3, 4))[first : first + 5])


def test_rows_and_their_pieces_go_on_in_one_stream() -> None:
    samples = 70_001

    classes = multinomial(np.zeros((2, 4), np.float32), samples, (3, 4))

    np.testing.assert_array_equal(classes.ravel(), np.floor(uniform(2 * samples, (3, 4)) * 4))


def test_negative_seeds_are_widened_with_their_sign() -> None:
    words = philox(1, (1 << 64) - 5, (1 << 64) - 7)

    assert uniform(1, (-5, -7))[0] == ((int(words[0, 0]) & 0xFFFFF) * 2**32 + int(words[0, 1])) / 2**52


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_classes_are_drawn_as_often_as_their_probabilities_say(dtype: str) -> None:
    logits = np.log([[0.5, 0.25, 0.125, 0.125], [0.125, 0.125, 0.25, 0.5]]) + 3

    classes = drawn(logits, 4096, (37, 42), dtype)

    for row, expected in zip(classes, ([0.5, 0.25, 0.125, 0.125], [0.125, 0.125, 0.25, 0.5]), strict=True):
        np.testing.assert_allclose(np.bincount(row, minlength=4) / 4096, expected, atol=0.03)


def test_the_same_seeds_give_the_same_draws_and_others_do_not() -> None:
    first, again, other = (drawn(np.zeros((2, 9)), 64, seeds) for seeds in ((1, 2), (1, 2), (2, 1)))

    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert (first[0] != first[1]).any()


def test_seeds_of_0_are_new_each_time() -> None:
    assert (drawn(np.zeros((1, 1000)), 64, (0, 0)) != drawn(np.zeros((1, 1000)), 64, (0, 0))).any()


def test_a_class_that_is_not_finite_is_never_drawn() -> None:
    logits = np.array([[-np.inf, 0.0, np.nan, 0.0, np.inf]])

    assert set(drawn(logits, 256, (1, 1)).ravel().tolist()) == {1, 3}


def test_classes_that_are_all_not_finite_stay_inside_the_range() -> None:
    assert drawn(np.full((1, 3), np.nan), 8, (1, 1)).max() < 3


def test_a_draw_on_a_border_belongs_to_the_class_above() -> None:
    (sums,) = cumulative(np.zeros((1, 4), np.float32))

    assert classes_of(sums, np.array([0.0, 0.25, 0.5, 0.75, 1 - 2.0**-52])).tolist() == [0, 1, 2, 3, 3]
