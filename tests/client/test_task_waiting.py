"""Waits of asyncio tasks that no real driver causes reliably."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest
from support.executors import LIMIT_S

from nnfmq.client.task_waiting import result_of, run_on_fallback_thread, run_to_its_end
from nnfmq.client.waiting import Future
from nnfmq.hal.errors import DeadObject, GeneralFailure


def run(main: Any) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(LIMIT_S):
            return await main

    return asyncio.run(limited())


def test_a_result_that_is_there_needs_no_wait() -> None:
    future: Future[int] = Future()
    future.set_result(5)
    assert run(result_of(future)) == 5


def test_notifications_do_not_wake_a_task() -> None:
    future: Future[int] = Future()

    async def main() -> int:
        task = asyncio.create_task(result_of(future))
        await asyncio.sleep(0)
        future.notify("progress")
        await asyncio.sleep(0)
        assert not task.done()
        future.set_result(6)
        return await task

    assert run(main()) == 6


def test_a_result_that_is_set_while_the_task_registers_is_found() -> None:
    class Racing(Future[int]):
        __slots__ = ()

        def add_waiter(self, waiter: Any) -> None:
            self.set_result(7)
            super().add_waiter(waiter)

    assert run(result_of(Racing())) == 7


def test_work_on_the_fallback_thread_ends_before_its_result_is_seen() -> None:
    ended: list[str] = []
    assert run(run_on_fallback_thread(lambda: threading.current_thread().name, lambda: ended.append("end"))) != ""
    assert ended == ["end"]


def test_an_error_on_the_fallback_thread_is_the_task_s() -> None:
    ended: list[str] = []

    def fail() -> None:
        raise DeadObject("gone")

    with pytest.raises(DeadObject, match="gone"):
        run(run_on_fallback_thread(fail, lambda: ended.append("end")))
    assert ended == ["end"]


def test_a_bug_on_the_fallback_thread_is_logged_and_fails_the_task(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[str] = []

    def bug() -> None:
        raise ZeroDivisionError("a bug")

    with caplog.at_level(logging.ERROR, "nnfmq.client"), pytest.raises(GeneralFailure, match="a bug"):
        run(run_on_fallback_thread(bug, lambda: ended.append("end")))
    assert ended == ["end"]
    # The log line comes after the result.


def test_without_a_thread_the_task_raises_and_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def no_thread(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(RuntimeError, match="can't start"):
        run(run_on_fallback_thread(lambda: 1, lambda: ended.append("end")))
    assert ended == ["end"]


@pytest.mark.parametrize("error", [None, DeadObject("gone")])
def test_a_task_that_is_cancelled_waits_for_work_that_runs_to_its_end(error: DeadObject | None) -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait(LIMIT_S)
        ended.set()
        if error is not None:
            raise error

    async def main() -> None:
        task = asyncio.create_task(run_to_its_end(work))
        await asyncio.to_thread(begun.wait)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    run(main())


def test_the_result_or_error_of_work_that_runs_to_its_end_is_the_task_s() -> None:
    def fail() -> None:
        raise DeadObject("gone")

    assert run(run_to_its_end(lambda: 5)) == 5
    with pytest.raises(DeadObject, match="gone"):
        run(run_to_its_end(fail))
