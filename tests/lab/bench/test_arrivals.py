"""Schedules of open loops: their number, their rate, and how clients share them."""

from __future__ import annotations

import numpy as np
import pytest

from nnfmq.lab.bench.loops import intended_starts

SECOND = 1_000_000_000


def test_constant_arrivals_have_equal_distances() -> None:
    assert intended_starts(4, 1, "constant").tolist() == [0, SECOND // 4, SECOND // 2, 3 * SECOND // 4]


@pytest.mark.parametrize("clients", [2, 3, 7])
def test_constant_arrivals_of_all_clients_are_a_constant_rate(clients: int) -> None:
    parts = [intended_starts(1000, 2.5, "constant", number, clients) for number in range(clients)]
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), intended_starts(1000, 2.5, "constant"))


def test_a_client_may_have_no_request() -> None:
    assert intended_starts(1, 1, "constant", 1, 2).tolist() == []


def test_poisson_arrivals_have_exponential_distances() -> None:
    starts = intended_starts(1000, 100, "poisson")
    gaps = np.diff(starts) / 1e6
    # 100,000 arrivals: the mean of the distances is within 1 % of 1 ms, and so is their standard deviation.
    assert starts.size == pytest.approx(100_000, rel=0.02)
    assert gaps.mean() == pytest.approx(1, rel=0.02)
    assert gaps.std() == pytest.approx(1, rel=0.03)
    assert (gaps > 1).mean() == pytest.approx(np.exp(-1), abs=0.01)
    assert starts[0] >= 0 and starts[-1] < 100 * SECOND


def test_poisson_arrivals_depend_on_the_seed_and_the_client_alone() -> None:
    first = intended_starts(100, 1, "poisson", seed=3)
    np.testing.assert_array_equal(first, intended_starts(100, 1, "poisson", seed=3))
    others = [intended_starts(100, 1, "poisson", seed=4), intended_starts(200, 1, "poisson", 1, 2, seed=3)]
    assert all(first.size != other.size or (first != other).any() for other in others)


@pytest.mark.parametrize("distribution", ["constant", "poisson"])
@pytest.mark.parametrize("limit", [0, 3, 10_000])
def test_there_are_at_most_as_many_as_wanted(distribution: str, limit: int) -> None:
    few, all_of_them = (intended_starts(1000, 1, distribution, limit=each) for each in (limit, None))
    np.testing.assert_array_equal(few, all_of_them[:limit])


def test_clients_share_the_rate_of_poisson_arrivals() -> None:
    parts = [intended_starts(1000, 50, "poisson", number, 4) for number in range(4)]
    assert [part.size for part in parts] == pytest.approx([12_500] * 4, rel=0.05)
