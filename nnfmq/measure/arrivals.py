"""Schedules of an open loop: when each request is intended to start, without regard to earlier ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["DISTRIBUTIONS", "intended_starts"]

DISTRIBUTIONS = ("constant", "poisson")


def intended_starts(
    rate: float,
    seconds: float,
    distribution: str,
    client: int = 0,
    clients: int = 1,
    seed: int = 0,
    limit: int | None = None,
) -> npt.NDArray[np.int64]:
    """Return the intended starts of one client's requests, in ns from the begin of the load, in ascending order.

    There are at most `limit` of them.

    All clients together have `rate` requests per second. Constant arrivals of the clients alternate; their sum is a
    constant rate. Poisson arrivals are independent, and so is their sum of any number of clients.
    """
    if distribution == "constant":
        count = _at_most(limit, max(0, int(np.ceil(rate * seconds / clients - client / clients))))
        return _whole((np.arange(count) * clients + client) * (1e9 / rate))
    random, own_rate = np.random.default_rng((seed, client)), rate / clients
    # Six standard deviations more than the mean number of arrivals: then cut at the end.
    expected = own_rate * seconds
    gaps = random.exponential(1e9 / own_rate, _at_most(limit, int(expected + 6 * np.sqrt(expected) + 16)))
    starts = np.cumsum(gaps)
    return _whole(starts[starts < seconds * 1e9])


def _at_most(limit: int | None, count: int) -> int:
    return count if limit is None else min(limit, count)


def _whole(times: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.int64]:
    whole: npt.NDArray[np.int64] = np.rint(times).astype(np.int64)
    return whole
