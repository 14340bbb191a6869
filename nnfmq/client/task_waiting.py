"""Waits of asyncio tasks: for a Future that another thread completes, for a file descriptor, for blocking work.

A task that waits has no thread: whoever completes the Future, mostly the watcher, wakes the task's event loop. Each
task has a waiter of its own, so any number of tasks, of several loops in several threads, may wait for one Future. A
task that is cancelled removes its waiter, and the Future keeps nothing of it.

Only asyncio is supported, with any event loop that implements its interface.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from nnfmq.client import fallback_thread
from nnfmq.client.waiting import Future
from nnfmq.hal.errors import GeneralFailure, NnfmqError

__all__ = ["readable", "result_of", "run_on_fallback_thread", "run_to_its_end"]

ResultT = TypeVar("ResultT")


class _TaskWaiter:
    """Wakes one task."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.woken: asyncio.Future[None] = self._loop.create_future()

    def put(self, notification: object, /) -> None:
        """Wake the task if `notification` is None: the result is there. Thread-safe."""
        if notification is None:
            with suppress(RuntimeError):  # the loop was closed meanwhile, so nobody waits
                self._loop.call_soon_threadsafe(_complete_once, self.woken)


async def result_of(future: Future[ResultT]) -> ResultT:
    """Return the result of `future`, for which other tasks of the loop do not wait.

    Raises:
        NnfmqError: The error that was set.
    """
    if not future.done():
        waiter = _TaskWaiter()
        try:
            future.add_waiter(waiter)
            await waiter.woken
        finally:
            future.discard_waiter(waiter)
    return future.result(None)


async def run_on_fallback_thread(function: Callable[[], ResultT], finish: Callable[[], object]) -> ResultT:
    """Return the result of `function`, which blocks and runs on the fallback thread, followed by `finish`.

    Both run even if the task is cancelled.

    Raises:
        NnfmqError: The error that `function` raises.
        RuntimeError: If no thread can be started.
    """
    return await result_of(_start(function, finish))


async def run_to_its_end(function: Callable[[], ResultT]) -> ResultT:
    """Return the result of `function`, which blocks and runs on the fallback thread.

    A task that is cancelled meanwhile is so when `function` has ended: nothing else may use what that changes. Raises
    as `run_on_fallback_thread`.
    """
    future = _start(function, _nothing)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await result_of(future)
        except asyncio.CancelledError as error:
            cancelled = error
        except NnfmqError:
            pass  # raised below
    if cancelled is not None:
        raise cancelled
    return future.result(None)


def _nothing() -> None:
    """Do nothing when a function has ended."""


def _start(function: Callable[[], ResultT], finish: Callable[[], object]) -> Future[ResultT]:
    """Run `function` and then `finish` on the fallback thread; return the future that gets the result."""
    future: Future[ResultT] = Future()

    def run() -> None:
        try:
            result = function()
        except NnfmqError as error:
            finish()
            future.set_exception(error)
        except BaseException as bug:
            finish()
            future.set_exception(GeneralFailure(f"internal error: {bug!r}"))
            raise
        else:
            finish()
            future.set_result(result)

    try:
        fallback_thread.submit(run)
    except RuntimeError:
        finish()
        raise
    return future


async def readable(fd: int) -> None:
    """Return when `fd` is readable, as a fence that is not active. Borrows `fd`.

    Any number of tasks may wait: each watches a duplicate, because an event loop has one callback for an fd.
    """
    loop = asyncio.get_running_loop()
    woken = loop.create_future()
    duplicate = os.dup(fd)
    try:
        loop.add_reader(duplicate, _complete_once, woken)
        await woken
    finally:
        loop.remove_reader(duplicate)
        os.close(duplicate)


def _complete_once(future: asyncio.Future[None]) -> None:
    if not future.done():  # it is if the task was cancelled, or woken before
        future.set_result(None)
