"""A pool of bursts loses none of them, whatever ends a loan: its block, its thread, or a signal handler that raises."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from nnfmq.client.burst.pool import BurstPool

ROUNDS = 300
SIZE = 3


class Interrupted(Exception):
    """Raised by the signal handler."""


@pytest.fixture
def pool() -> BurstPool:
    model: Any = SimpleNamespace(require_usable=lambda: None, signature="")
    pool = BurstPool(model)
    for number in range(SIZE):
        burst: Any = SimpleNamespace(number=number, discard_inputs=lambda: None)
        pool._free.append(burst)
        pool._tokens.put(None)
    pool.size = SIZE
    return pool


@pytest.fixture
def armed() -> Iterator[list[object]]:
    """Make the next SIGALRM raise Interrupted if the list has an item, which it removes."""
    armed: list[object] = []

    def handle(_number: int, _frame: FrameType | None) -> None:
        if armed:
            armed.clear()
            raise Interrupted

    previous = signal.signal(signal.SIGALRM, handle)
    yield armed
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


def all_numbers(pool: BurstPool) -> list[int]:
    """Borrow all bursts of the pool at once, without waiting, and return their numbers."""
    loans = [pool.acquire(timeout=0) for _ in range(SIZE)]
    numbers: list[Any] = [loan.__enter__() for loan in loans]
    return sorted(burst.number for burst in numbers)


def test_the_burst_that_was_returned_last_is_lent_first(pool: BurstPool) -> None:
    first, second = pool.acquire(), pool.acquire()
    burst = first.__enter__()
    second.release()
    first.release()
    assert pool.acquire().__enter__() is burst


def test_a_loan_that_nothing_refers_to_is_returned(pool: BurstPool) -> None:
    for _ in range(3 * SIZE):
        pool.acquire(timeout=0)
    assert all_numbers(pool) == [0, 1, 2]


def test_a_loan_is_returned_once(pool: BurstPool) -> None:
    loan = pool.acquire()
    for _ in range(5):
        loan.release()
    assert all_numbers(pool) == [0, 1, 2]


def acquire_until_interrupted(pool: BurstPool, armed: list[object]) -> None:
    while armed:
        with pool.acquire():
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the handler may raise in `__del__`
def test_a_signal_handler_that_raises_at_any_instruction_loses_no_burst(pool: BurstPool, armed: list[object]) -> None:
    source = random.Random(5)
    for _ in range(ROUNDS):
        with suppress(Interrupted):
            armed.append(None)
            signal.setitimer(signal.ITIMER_REAL, source.uniform(1e-6, 1e-4))
            acquire_until_interrupted(pool, armed)  # not here: Python lets jumps of a loop raise outside of the `with`
    assert all_numbers(pool) == [0, 1, 2]
