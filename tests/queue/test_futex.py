"""The Python core's atomics: both methods to change an event flag word, and machines on which it rejects sharing."""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from nnfmq.hal.errors import DeadObject, InvalidArgument
from nnfmq.queue import MessageQueue, PeerDeathFlag, _pycore, futex
from nnfmq.queue.core import CORES
from nnfmq.queue.layout import compute_layout

Word = tuple[memoryview, int]


needs_waitv = pytest.mark.skipif(not futex.has_waitv(), reason="Linux before 5.16")


@pytest.fixture(params=[futex.LibAtomic, futex.KernelAtomic])
def atomics(request: pytest.FixtureRequest) -> futex.Atomics:
    made: futex.Atomics = request.param()
    return made


@pytest.fixture
def word() -> Iterator[Word]:
    """A futex word as a view, and its address."""
    memory = bytearray(8)
    anchor = ctypes.c_uint32.from_buffer(memory)
    with memoryview(memory)[:4].cast("I") as view:
        yield view, ctypes.addressof(anchor)


@pytest.mark.parametrize(
    ("before", "mask", "after"),
    [(0, 1, 1), (1, 2, 3), (4, 0x80000001, 0x80000005), (5, 0xFFFFFFFF, 0xFFFFFFFF), (0, 0x1800, 0x1800)],
)
def test_bits_are_added(atomics: futex.Atomics, word: Word, before: int, mask: int, after: int) -> None:
    word[0][0] = before
    assert atomics.fetch_or(*word, mask) & mask != mask  # so a wake is needed
    assert word[0][0] == after


@pytest.mark.parametrize(
    ("before", "mask", "after"),
    [(3, 1, 2), (0x80000005, 0x80000001, 4), (0xFFFFFFFF, 0xFFFFFFFF, 0), (8, 1, 8), (0xFFF, 0x801, 0x7FE)],
)
def test_bits_are_cleared_and_the_old_word_is_returned(
    atomics: futex.Atomics, word: Word, before: int, mask: int, after: int
) -> None:
    word[0][0] = before
    assert atomics.fetch_clear(*word, mask) == before
    assert word[0][0] == after


def test_libatomic_returns_the_old_word_so_that_no_needless_wake_is_made(word: Word) -> None:
    word[0][0] = 3
    assert futex.LibAtomic().fetch_or(*word, 2) == 3


def test_a_changed_word_is_not_slept_on(word: Word) -> None:
    word[0][0] = 1
    assert futex.futex_wait(word[1], 0, None, 1) != 0


def test_a_sleep_ends_at_its_deadline(word: Word) -> None:
    deadline = time.monotonic_ns() + 5_000_000
    assert futex.futex_wait(word[1], 0, deadline, 1) != 0
    assert time.monotonic_ns() >= deadline


def test_without_libatomic_the_kernel_changes_the_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "PyDLL", missing)
    assert isinstance(futex.find_atomics(), futex.KernelAtomic)


def test_a_queue_works_on_the_kernels_atomics(
    monkeypatch: pytest.MonkeyPatch, start: Callable[..., Future[Any]], limit_ns: int
) -> None:
    monkeypatch.setattr(_pycore, "_atomics", futex.KernelAtomic())
    with MessageQueue.create(8, 3, core=CORES.load("python")) as queue:
        future = start(lambda: [queue.read_blocking(1, limit_ns) for _ in range(500)])
        assert all(queue.write_blocking(i.to_bytes(8, "little"), limit_ns) for i in range(500))
        assert future.result() == [i.to_bytes(8, "little") for i in range(500)]


class DiesMeanwhile(futex.LibAtomic):
    """The peer dies between a waiter's first look at the peer death flag and its look at the word."""

    def __init__(self, flag: PeerDeathFlag) -> None:
        super().__init__()
        self.flag = flag

    def fetch_clear(self, word: memoryview, address: int, mask: int) -> int:
        self.flag.set()
        self.fetch_or(word, address, futex.ALL_BITS)
        return super().fetch_clear(word, address, mask)


@pytest.mark.parametrize("wait", [lambda q, e: e.wait(4), lambda q, e: q.receive(None, 0)], ids=["event", "receive"])
def test_the_bits_set_after_a_death_are_not_returned(
    wait: Callable[[_pycore.Ring, _pycore.EventFlagWord], object],
) -> None:
    flag, place = PeerDeathFlag(), compute_layout(8, 4)
    memory = memoryview(bytearray(place.region_bytes))
    assert place.event_flag is not None
    event = _pycore.EventFlagWord(memory, place.event_flag, flag.buffer, DiesMeanwhile(flag))
    with pytest.raises(DeadObject):
        wait(_pycore.Ring(memory, place, event), event)


def test_off_x86_64_the_python_core_rejects_sharing_and_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(InvalidArgument, match=r"on aarch64.*C compiler.*reinstall"):
        MessageQueue.create(8, 4, core=CORES.load("python"))


def test_off_x86_64_the_python_core_serves_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with MessageQueue.create(8, 4, shared=False, core=CORES.load("python")) as queue:
        assert queue.send(bytes(8)) and queue.receive(0, 0) == bytes(8)


# ---- several words ----


@needs_waitv
def test_waitv_returns_immediately_if_a_word_has_another_value() -> None:
    word = ctypes.c_uint32(5)
    assert futex.futex_waitv([(ctypes.addressof(word), 4)], None) is None


@needs_waitv
def test_waitv_ends_at_its_deadline() -> None:
    word, begin = ctypes.c_uint32(5), time.monotonic_ns()
    assert futex.futex_waitv([(ctypes.addressof(word), 5)], begin + 10_000_000) is None
    assert time.monotonic_ns() - begin >= 10_000_000


@needs_waitv
def test_waitv_returns_which_word_was_woken(start: Callable[..., Future[Any]], until: Callable[..., None]) -> None:
    words = [ctypes.c_uint32(i) for i in range(futex.WAITV_MAX)]
    places = [(ctypes.addressof(word), word.value) for word in words]
    woken = start(futex.futex_waitv, places, None)
    until(lambda: futex.futex_wake(places[77][0], 1) or woken.done())
    assert woken.result() == 77


@needs_waitv
def test_waitv_rejects_more_words_than_the_kernel_allows() -> None:
    with pytest.raises(OSError, match="futex_waitv"):
        futex.futex_waitv([(0, 0)] * (futex.WAITV_MAX + 1), None)
