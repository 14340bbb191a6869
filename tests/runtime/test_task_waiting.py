"""Waits of asyncio tasks that no real driver causes reliably."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest
from support.executors import LIMIT_S

from nnfmq.hal.errors import DeadObject, GeneralFailure
from nnfmq.runtime.future import Future
from nnfmq.runtime.task_waiting import result_of, run_on_fallback_thread


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
