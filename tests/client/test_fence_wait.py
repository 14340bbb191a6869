"""A wait for several fences ends once, without a thread, and closes its descriptors, also if it cannot begin."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import ExitStack

import pytest
from support.drivers import until

from nnfmq.base import watcher
from nnfmq.base.fence import Fence
from nnfmq.client.partitioned.fenced import FenceWait
from nnfmq.hal.errors import ResourceExhaustedTransient


@pytest.fixture
def fences() -> ExitStack:
    with ExitStack() as stack:
        yield [stack.enter_context(Fence.create()) for _ in range(3)]


def fds(fences: list[Fence]) -> list[int]:
    return [fence.fileno() for fence in fences]


def test_the_call_is_made_when_the_last_fence_is_signaled_or_in_error(fences: list[Fence]) -> None:
    calls: list[str] = []
    done = threading.Event()

    def on_done() -> None:
        calls.append(threading.current_thread().name)
        done.set()

    FenceWait(fds(fences), on_done).start()
    two_are_done = threading.Event()
    FenceWait(fds(fences[:2]), two_are_done.set).start()
    fences[1].signal()
    fences[0].fail()
    assert two_are_done.wait(10)
    assert calls == []
    fences[2].signal()
    assert done.wait(10)
    assert calls == [watcher.THREAD_NAME]
    until(lambda: watcher.thread() is None, "the watcher has nothing to watch")


def test_without_active_fences_the_call_is_made_once(fences: list[Fence]) -> None:
    calls: list[int] = []
    FenceWait([], lambda: calls.append(0)).start()
    assert calls == [0]
    for fence in fences:
        fence.signal()
    FenceWait(fds(fences), lambda: calls.append(1)).start()
    until(lambda: calls == [0, 1], "the call is made")


def test_a_fence_whose_creator_closes_it_is_no_longer_active() -> None:
    calls: list[int] = []
    fence = Fence.create()
    FenceWait([fence.fileno()], lambda: calls.append(1)).start()
    fence.close()
    until(lambda: calls == [1], "the call is made")


def test_descriptors_that_cannot_be_duplicated_are_reported(
    fences: list[Fence], monkeypatch: pytest.MonkeyPatch
) -> None:
    duplicate, count = os.dup, iter(range(3))

    def failing(fd: int) -> int:
        if next(count) == 2:
            raise OSError(errno.EMFILE, "too many")
        return duplicate(fd)

    monkeypatch.setattr(os, "dup", failing)
    with pytest.raises(ResourceExhaustedTransient, match="no file descriptor is left"):
        FenceWait(fds(fences), lambda: None)


def test_fences_that_the_watcher_cannot_watch_are_reported(
    fences: list[Fence], monkeypatch: pytest.MonkeyPatch
) -> None:
    add, count = watcher.add_reader, iter(range(3))

    def failing(*arguments: object) -> object:
        if next(count) == 2:
            raise OSError(errno.ENOSPC, "no space")
        return add(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(watcher, "add_reader", failing)
    calls: list[int] = []
    with pytest.raises(ResourceExhaustedTransient, match="cannot be watched"):
        FenceWait(fds(fences), lambda: calls.append(1)).start()
    for fence in fences:
        fence.signal()
    assert calls == []
