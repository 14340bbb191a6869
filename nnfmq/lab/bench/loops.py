"""Load: the two loops that execute a model and record each request, and the schedule of an open loop.

In the *closed loop* a client begins a request when the last one is done. If the driver stops for 100 ms, one request
takes 100 ms, and those that would have been sent meanwhile are not. In the *open loop* each request has an intended
start, and its latency counts from there: requests that become due while an earlier one is executing wait, as those of
independent users would, and their wait is part of their latency.

Both are called with the clock, so that tests can simulate it.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["DISTRIBUTIONS", "RequestTimes", "closed_loop", "intended_starts", "open_loop", "wait_until"]

T = TypeVar("T")
Clock = Callable[[], int]
_POLLING_NS = 200_000  # the end of a wait is polled: a sleep ends up to that much too late


def _times() -> array[int]:
    return array("q")


@dataclass(slots=True)
class RequestTimes:
    """The requests of one client: intended start, real start, and latency from the intended start, each in ns."""

    intended: array[int] = field(default_factory=_times)
    started: array[int] = field(default_factory=_times)
    latencies: array[int] = field(default_factory=_times)


def closed_loop(
    step: Callable[[T], object], inputs: Iterable[T], until_ns: int, count: int | None, clock: Clock = time.monotonic_ns
) -> RequestTimes:
    """Execute one request after the other until `until_ns`, at most `count` (None: any number), and return their times.

    A request that has begun is finished. `inputs` should be endless.
    """
    begins, latencies = array("q"), array("q")
    for values in islice(inputs, count):
        begin = clock()
        if begin >= until_ns:
            break
        step(values)
        latencies.append(clock() - begin)
        begins.append(begin)
    return RequestTimes(begins, begins, latencies)


def open_loop(
    step: Callable[[T], object],
    inputs: Iterable[T],
    intended: Iterable[int],
    until_ns: int,
    clock: Clock = time.monotonic_ns,
    sleep: Callable[[float], object] = time.sleep,
) -> RequestTimes:
    """Execute a request at each of the `intended` starts, or as soon as the earlier ones are done; return their times.

    A backlog is executed also after the last intended start, but no request begins after `until_ns`.
    """
    times = RequestTimes()
    intended_starts, started, latencies = times.intended, times.started, times.latencies
    for due, values in zip(intended, inputs, strict=False):
        begin = clock()
        if begin >= until_ns:
            break
        if begin < due:
            begin = _wait(due, begin, clock, sleep)
        step(values)
        latencies.append(clock() - due)
        intended_starts.append(due)
        started.append(begin)
    return times


def wait_until(due: int) -> int:
    """Block until it is `due`, on the monotonic clock in ns, and return the time; at once if it is due already."""
    now = time.monotonic_ns()
    return _wait(due, now, time.monotonic_ns, time.sleep) if now < due else now


def _wait(due: int, now: int, clock: Clock, sleep: Callable[[float], object]) -> int:
    """Return the time when it is `due`."""
    if due - now > _POLLING_NS:
        sleep((due - now - _POLLING_NS) / 1e9)
    while (now := clock()) < due:
        pass
    return now


# ----------------------------------------------------------------------------------------------------------------------
# Schedules of an open loop: when each request is intended to start, without regard to earlier ones.


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
