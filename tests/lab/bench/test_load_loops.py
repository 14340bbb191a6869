"""The load loops on a simulated clock: what one stop of 100 ms does to each of them.

The expected percentiles are arithmetic: of 10,000 requests, the 100 that become due during the stop of 100 ms wait from
100 ms down to nothing, so the 10th largest latency is about 90 ms, and the 50th about 50 ms.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from nnfmq.lab.bench.loops import closed_loop, intended_starts, open_loop
from nnfmq.lab.statistics import percentile, summary

FOREVER = 2**63 - 1
Times = npt.NDArray[np.int64]
SECOND, MS = 1_000_000_000, 1_000_000
SERVICE_NS, STOP_NS, READ_NS = 50_000, SECOND, 1000


class Clock:
    """A simulated clock; each reading takes 1 µs, so that a loop that polls it ends."""

    def __init__(self) -> None:
        self.now = 0

    def read(self) -> int:
        self.now += READ_NS
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * SECOND)

    def execute(self, _inputs: object) -> None:
        """Take 50 µs, and 100 ms more the first time that it ends after second 1."""
        begin, self.now = self.now, self.now + SERVICE_NS
        if begin < STOP_NS <= self.now:
            self.now += 100 * MS


def open_latencies(starts: Times) -> Times:
    clock = Clock()
    recording = open_loop(clock.execute, itertools.repeat(None), starts.tolist(), FOREVER, clock.read, clock.sleep)
    return np.array(recording.latencies, np.int64)


def expected_latencies(starts: Times) -> Times:
    """Return the latencies of a queue with one server (Lindley's recursion); the clock is read before and after it."""
    ends = [-READ_NS]
    for due in starts.tolist():
        begin = max(due, ends[-1] + READ_NS)
        end = begin + SERVICE_NS
        ends.append(end + 100 * MS * (begin < STOP_NS <= end) + READ_NS)
    return np.array(ends[1:], np.int64) - starts


def test_an_open_loop_counts_the_requests_that_wait_during_a_stop() -> None:
    starts = intended_starts(1000, 10, "constant") + 999_000  # one of them is executed when second 1 begins
    ordered = np.sort(open_latencies(starts))
    assert 80 * MS <= percentile(ordered, 99.9) <= 100 * MS
    assert 40 * MS <= percentile(ordered, 99.5) <= 60 * MS
    assert percentile(ordered, 90) < MS
    assert ordered.size == 10_000


@pytest.mark.parametrize("distribution", ["constant", "poisson"])
@pytest.mark.parametrize("rate", [1000, 18_000])
def test_the_latencies_of_an_open_loop_are_those_of_a_queue(distribution: str, rate: int) -> None:
    starts = intended_starts(rate, 1.5, distribution, seed=5)
    # A request that is waited for begins up to a reading late, and so do those that queue behind it.
    np.testing.assert_allclose(open_latencies(starts), expected_latencies(starts), rtol=0, atol=2 * READ_NS)


def test_a_closed_loop_shows_a_stop_in_its_maximum_alone() -> None:
    clock = Clock()
    recording = closed_loop(clock.execute, itertools.repeat(None), 10 * SECOND, None, clock.read)
    found = summary(np.array(recording.latencies, np.int64))
    assert found["max"] is not None and found["max"] >= 100 * MS
    assert found["p99_9"] is not None and found["p99_9"] < MS


def test_requests_of_a_closed_loop_follow_each_other() -> None:
    clock = Clock()
    recording = closed_loop(clock.execute, itertools.repeat(None), SECOND, 3, clock.read)
    assert list(recording.latencies) == [SERVICE_NS + READ_NS] * 3
    assert list(recording.started) == [READ_NS + number * (SERVICE_NS + 2 * READ_NS) for number in range(3)]
    assert recording.intended == recording.started


def test_a_closed_loop_ends_at_its_time() -> None:
    clock = Clock()
    recording = closed_loop(clock.execute, itertools.repeat(None), 10 * SERVICE_NS, None, clock.read)
    assert len(recording.latencies) == 10  # the tenth begins before the end, and is finished after it
    assert max(recording.started) < 10 * SERVICE_NS < max(recording.started) + SERVICE_NS + 2 * READ_NS


def test_a_backlog_ends_at_its_limit() -> None:
    clock, due = Clock(), [0] * 1000
    recording = open_loop(clock.execute, itertools.repeat(None), due, 10 * (SERVICE_NS + 2 * READ_NS), clock.read)
    assert len(recording.latencies) == 10
    assert list(recording.latencies) == sorted(recording.latencies)


def test_inputs_are_used_in_turn() -> None:
    clock, seen = Clock(), list[str]()
    closed_loop(seen.append, itertools.cycle("ab"), SECOND, 5, clock.read)
    open_loop(seen.append, itertools.cycle("ab"), [10**6, 2 * 10**6, 3 * 10**6], FOREVER, clock.read, clock.sleep)
    assert "".join(seen) == "ababaaba"


def test_a_request_of_an_open_loop_does_not_begin_before_its_time() -> None:
    clock = Clock()
    due = [2 * MS, 2 * MS + 10_000, 9 * MS]
    recording = open_loop(clock.execute, itertools.repeat(None), due, FOREVER, clock.read, clock.sleep)
    started = list(recording.started)
    assert list(recording.intended) == due
    assert due[0] <= started[0] <= due[0] + READ_NS
    assert started[1] >= started[0] + SERVICE_NS  # it became due during the first one
    assert due[2] <= started[2] <= due[2] + READ_NS
    assert recording.latencies[1] == started[1] + SERVICE_NS + READ_NS - due[1]
