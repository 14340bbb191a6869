"""Packed constants: computed once, taken in the same order from what was computed before."""

from __future__ import annotations

import numpy as np
import pytest

from nnfmq.hal.errors import GeneralFailure
from nnfmq.operations.declaration import Array
from nnfmq.operations.preparation import PrepackedWeights, cached_prepack


def group(number: int) -> tuple[Array, ...]:
    return (np.array(number),)


def never() -> tuple[Array, ...]:
    raise AssertionError("computed although it is known")


def test_groups_come_back_in_their_order_and_are_not_computed_again() -> None:
    first = PrepackedWeights()
    with first.in_use():
        computed = [cached_prepack(lambda: group(1)), cached_prepack(lambda: group(2))]
    again = PrepackedWeights(first.groups)
    with again.in_use():
        found = [cached_prepack(never), cached_prepack(never)]

    assert found == first.groups == computed


def test_a_group_that_the_cache_has_not_is_rejected() -> None:
    with PrepackedWeights([group(1)]).in_use():
        cached_prepack(never)
        with pytest.raises(GeneralFailure, match="the cache has 1 groups of prepacked weights, the model needs more"):
            cached_prepack(lambda: group(2))
