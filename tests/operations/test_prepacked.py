"""Packed constants: computed once, taken in the same order from what was computed before."""

from __future__ import annotations

import numpy as np
import pytest

from nnfmq.hal.errors import GeneralFailure
from nnfmq.operations.prepacked import Packing, packed
from nnfmq.operations.signature import Array


def group(number: int) -> tuple[Array, ...]:
    return (np.array(number),)


def never() -> tuple[Array, ...]:
    raise AssertionError("computed although it is known")


def test_groups_come_back_in_their_order_and_are_not_computed_again() -> None:
    first = Packing()
    with first.in_use():
        computed = [packed(lambda: group(1)), packed(lambda: group(2))]
    again = Packing(first.groups)
    with again.in_use():
        found = [packed(never), packed(never)]

    assert found == first.groups == computed


def test_a_group_that_the_cache_has_not_is_refused() -> None:
    with Packing([group(1)]).in_use():
        packed(never)
        with pytest.raises(GeneralFailure, match="the cache has 1 groups of packed constants, and one more is needed"):
            packed(lambda: group(2))
