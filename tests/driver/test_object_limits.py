"""Limits of the number of objects: who is refused what, and what counts no more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from nnfmq.base import settings
from nnfmq.base.memory import Memory
from nnfmq.driver.memory.object_limits import ObjectLimit, use_thread_limit
from nnfmq.driver.memory.quota import MemoryShare, MemoryShares, SharedCount
from nnfmq.hal.errors import ResourceExhaustedTransient
from nnfmq.hosted.open_files import KeptFile, OpenFile


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectLimit]:
    """Return the limit of this process's threads, 5."""
    monkeypatch.setenv(settings.CLIENT_THREADS.variable, "5")
    limit = ObjectLimit("thread", settings.CLIENT_THREADS)
    use_thread_limit(limit)
    yield limit
    use_thread_limit(None)


def open_with(threads: int) -> OpenFile[object]:
    return OpenFile(threads, object)


def test_the_threads_of_open_files_count_until_the_files_are_dropped(threads: ObjectLimit) -> None:
    first, second = open_with(4), open_with(1)
    assert threads.count == 3  # the calling thread is one of each file's
    with pytest.raises(ResourceExhaustedTransient, match=r"has 3 threads .* 3 more .* 5, .* \$NNFMQ_CLIENT_THREADS"):
        open_with(4)
    assert threads.count == 3
    del first, second
    assert threads.count == 0


def test_a_file_that_is_kept_for_later_gives_its_threads_to_one_that_is_needed_now(threads: ObjectLimit) -> None:
    kept: KeptFile[object] = KeptFile()
    kept.keep("key", open_with(5), [])
    opened = open_with(5)
    assert (kept.take("key"), threads.count) == (None, 4)
    del opened


def test_a_user_has_a_limit_for_all_his_clients_and_what_a_worker_writes_below_0_counts_as_0(
    resources: ExitStack,
) -> None:
    shares = resources.enter_context(MemoryShares(1, slots=3, user_counts={SharedCount.MODELS: 3}))
    slots = [shares.take(uid) for uid in (1001, 1001, 1002)]
    first, second, other = (models(shares, slot, resources) for slot in slots)
    first.take(2)
    second.take(1)
    with pytest.raises(ResourceExhaustedTransient, match=r"this user have 3 models .* \$NNFMQ_USER_MODELS"):
        second.take(1)
    other.take(3)
    shares.own_words(slots[0])[SharedCount.MODELS] = -100
    second.take(2)
    with pytest.raises(ResourceExhaustedTransient):
        second.take(1)
    shares.release(slots[1])  # its worker has exited
    first.add(0)
    first.take(1)


def models(shares: MemoryShares, slot: int, resources: ExitStack) -> ObjectLimit:
    reading = resources.enter_context(Memory.adopt(os.dup(shares.memory.fileno())))
    share = MemoryShare(shares.own_words(slot), reading, 1, slot)
    return ObjectLimit("model", settings.CLIENT_MODELS, share, SharedCount.MODELS, settings.USER_MODELS)
