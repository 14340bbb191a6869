"""The thread that updates a client's models, with updates that the test controls."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from support.drivers import LIMIT_S, InThread, until

from nnfmq.base import watcher
from nnfmq.base.channel import NO_WAIT
from nnfmq.client.named import models
from nnfmq.client.named.models import VersionUpdates


class Owner:
    """What the thread calls, and what happens then."""

    def __init__(self) -> None:
        self.updated: list[str] = []
        self.attempts = 0
        self.update: Callable[[str], bool] = lambda _name: True
        self.reconnect: Callable[[], bool] = lambda: True
        self.updates = VersionUpdates(self._update, self._reconnect)

    def _update(self, name: str) -> bool:
        self.updated.append(name)
        return self.update(name)

    def _reconnect(self) -> bool:
        self.attempts += 1
        return self.reconnect()


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner()
    yield made
    made.updates.end()
    made.updates.join()


def on_watcher(function: Callable[[], None]) -> None:
    watcher.call_at(NO_WAIT, function)


def is_running() -> bool:
    return "nnfmq-versions" in {thread.name for thread in threading.enumerate()}


def test_the_thread_ends_when_nothing_is_left_and_starts_again(owner: Owner) -> None:
    for count in (1, 2):
        on_watcher(lambda: owner.updates.request("a"))
        until(lambda count=count: owner.updated == ["a"] * count, "it is updated")
        until(lambda: not is_running(), "the thread ends")


def test_a_thread_that_is_being_started_is_joined(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    starts, may_start = threading.Event(), threading.Event()

    class SlowThread(threading.Thread):
        def start(self) -> None:
            starts.set()
            assert may_start.wait(LIMIT_S)
            super().start()

    monkeypatch.setattr(models, "Thread", SlowThread)
    on_watcher(lambda: owner.updates.request("a"))
    assert starts.wait(LIMIT_S)
    owner.updates.end()
    joining = InThread.start(owner.updates.join)
    joining.wait_until_asleep()
    may_start.set()
    joining.wait()
    assert not is_running()


def test_an_update_that_raises_ends_neither_the_thread_nor_the_others(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str) -> bool:
        if name == "a":
            raise ZeroDivisionError
        return True

    owner.update = fail
    for name in "ab":
        on_watcher(partial(owner.updates.request, name))
    until(lambda: owner.updated == ["a", "b"], "both are updated")
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "the update of model 'a' failed" in record.getMessage()


def test_connecting_again_is_tried_until_it_is_done(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_LAST_PAUSE_S", 0.001)
    owner.reconnect = lambda: owner.attempts == 5
    on_watcher(owner.updates.repository_was_lost)
    until(lambda: not is_running() and owner.attempts == 5, "the fifth attempt succeeds")


def test_a_repository_that_dies_at_each_request_is_not_tried_without_pauses(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_LAST_PAUSE_S", 1000.0)
    owner.updates._pause_s = 500.0  # as after many attempts

    def die(_name: str) -> bool:
        owner.updates.repository_was_lost()
        return False

    def connect() -> bool:
        owner.updates.request("a")
        return True

    owner.update, owner.reconnect = die, connect
    on_watcher(owner.updates.repository_was_lost)
    until(lambda: owner.updated == ["a"], "it has died again")
    on_watcher(lambda: owner.updates.request("b"))
    until(lambda: owner.updated == ["a", "b"], "an event in between is handled")
    assert owner.attempts == 1


def test_nothing_starts_after_the_end(owner: Owner) -> None:
    owner.updates.end()
    done = threading.Event()
    for event in (lambda: owner.updates.request("a"), owner.updates.repository_was_lost, done.set):
        on_watcher(event)
    assert done.wait(10)
    assert not is_running()
    assert not owner.updated
