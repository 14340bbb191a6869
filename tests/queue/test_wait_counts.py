"""What a ring counts of its calls: received, polled, slept. On every core."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from nnfmq.hal.errors import InvalidArgument
from nnfmq.queue import MessageQueue

RECORD = b"12345678"
LONG_NS = 60_000_000_000
LIMIT_S = 30
Make = Callable[..., MessageQueue]
Start = Callable[..., Future[Any]]
Until = Callable[[Callable[[], object]], None]


@pytest.fixture
def counted(make_queue: Make) -> tuple[MessageQueue, memoryview]:
    queue, words = make_queue(8, 4), memoryview(bytearray(24))
    queue.count_waits(words)
    return queue, words.cast("Q")


def test_a_record_that_is_there_is_received_without_a_wait(counted: tuple[MessageQueue, memoryview]) -> None:
    queue, words = counted
    for _ in range(2):
        queue.send(RECORD)
        assert queue.receive(None, 0) == RECORD
    queue.send(RECORD)
    assert queue.receive_into(bytearray(8), None, 0) == 1
    assert words.tolist() == [3, 0, 0]


def test_a_deadline_without_a_record_counts_its_sleep_and_no_call(counted: tuple[MessageQueue, memoryview]) -> None:
    queue, words = counted
    assert queue.receive(time.monotonic_ns() + 5_000_000, 0) is None
    received, polled, slept = words.tolist()
    assert (received, polled) == (0, 0)
    assert slept == 1


def test_a_deadline_in_the_past_is_no_wait(counted: tuple[MessageQueue, memoryview]) -> None:
    queue, words = counted
    assert queue.receive(1, 0) is None
    assert words.tolist() == [0, 0, 0]


def test_a_wait_that_ends_in_its_window_is_polled(
    counted: tuple[MessageQueue, memoryview], start: Start, until: Until
) -> None:
    queue, words = counted
    found = start(queue.receive, None, LONG_NS)
    until(lambda: queue.waiters > 0)
    queue.send(RECORD)
    assert found.result(LIMIT_S) == RECORD
    assert words.tolist() == [1, 1, 0]


def test_a_wait_without_a_window_sleeps(counted: tuple[MessageQueue, memoryview], start: Start, until: Until) -> None:
    queue, words = counted
    found = start(queue.receive, None, 0)
    until(lambda: words[2] == 1)
    queue.send(RECORD)
    assert found.result(LIMIT_S) == RECORD
    assert words.tolist() == [1, 0, 1]


def test_words_that_are_too_few_are_rejected(make_queue: Make) -> None:
    queue = make_queue(8, 4)
    with pytest.raises(InvalidArgument, match="three aligned words"):
        queue.count_waits(memoryview(bytearray(16)))
    queue.send(RECORD)
    assert queue.receive(None, 0) == RECORD


def test_the_words_are_released_when_the_queue_is_closed(counted: tuple[MessageQueue, memoryview]) -> None:
    queue, words = counted
    queue.close()
    words.release()


def test_a_closed_queue_counts_no_more(make_queue: Make) -> None:
    queue = make_queue(8, 4)
    queue.close()
    with pytest.raises(InvalidArgument, match="closed"):
        queue.count_waits(memoryview(bytearray(24)))


def test_other_words_may_follow(counted: tuple[MessageQueue, memoryview]) -> None:
    queue, words = counted
    queue.send(RECORD)
    queue.receive(None, 0)
    others = memoryview(bytearray(24))
    queue.count_waits(others)
    queue.send(RECORD)
    queue.receive(None, 0)
    assert (words.tolist(), others.cast("Q").tolist()) == ([1, 0, 0], [1, 0, 0])
