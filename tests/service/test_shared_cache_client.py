"""A worker's part in shared programs: what it gets is verified, what it has it gives back, and alone it goes on."""

from __future__ import annotations

import fcntl
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from support.caching import chain
from support.descriptors import no_more_descriptors

from nnfmq.channel import NO_WAIT, Channel
from nnfmq.hal.types import OperationType
from nnfmq.memory import CONSTANT_SEALS, Memory
from nnfmq.service.caching import program_cache, shared_cache_client, shared_cache_protocol
from nnfmq.service.caching.compilation_cache import DeviceIdentity
from nnfmq.service.caching.interpreter_cache_format import PackedConstants
from nnfmq.service.caching.program_cache import CacheEntry, entry_for
from nnfmq.service.caching.shared_cache_client import LOOKUP_TIMEOUT_NS, SharedCacheClient, SharedProgram
from nnfmq.service.caching.shared_cache_protocol import (
    Found,
    Invalidate,
    Lookup,
    NotFound,
    Publish,
    Release,
    Sender,
    SharedCacheMessage,
)

SELF = DeviceIdentity("compiled", "1")
NAME = "a" * 64
LARGE = np.arange(1 << 20, dtype=np.uint8)
GROUPS: PackedConstants = [(np.arange(7, dtype=np.float32), LARGE), ()]
LATE_NS = 20_000_000_000


class Supervisor:
    """The other end, which answers as a test wants it."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def hears(self) -> tuple[SharedCacheMessage, list[int]]:
        """Return what comes next, and its descriptors, the caller's."""
        with self.channel.receive(time.monotonic_ns() + LATE_NS) as frame:
            return shared_cache_protocol.decode(
                frame.data, sender=Sender.WORKER, fds=len(frame.fds)
            ), frame.detach_fds()

    def says(self, message: SharedCacheMessage, *fds: int) -> None:
        """Answer; the fds stay the caller's."""
        self.channel.send(shared_cache_protocol.encode(message), fds, NO_WAIT)

    def answers(self, *answer: Callable[[int], SharedCacheMessage], fds: tuple[int, ...] = ()) -> threading.Thread:
        """Let a thread answer the next question with its number: the last answer has the descriptors."""

        def run() -> None:
            question, _ = self.hears()
            for number, make in enumerate(answer, 1):
                self.says(make(question.ref_id), *(fds if number == len(answer) else ()))

        thread = threading.Thread(target=run)
        thread.start()
        return thread


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(program_cache.CACHE_VARIABLE, raising=False)


@pytest.fixture
def resources() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch, resources: ExitStack) -> Supervisor:
    """Return the supervisor's end of what this process shares by."""
    ours, theirs = Channel.pair()
    resources.callback(ours.close)
    worker = SharedCacheClient(theirs)
    resources.callback(worker.close)
    monkeypatch.setattr(shared_cache_client, "_client", worker)
    return Supervisor(ours)


@pytest.fixture
def worker(supervisor: Supervisor) -> SharedCacheClient:
    assert shared_cache_client._client is not None
    return shared_cache_client._client


@pytest.fixture
def entry() -> CacheEntry:
    made = entry_for(SELF, chain(OperationType.ADD))
    assert made is not None
    return made


def constant(data: bytes) -> Memory:
    return Memory.create_constant(len(data), lambda fd: os.pwrite(fd, data, 0), "shared-test")


def unsealed(resources: ExitStack) -> int:
    fd = os.memfd_create("shared-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    resources.callback(os.close, fd)
    os.ftruncate(fd, 4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, CONSTANT_SEALS & ~fcntl.F_SEAL_WRITE)
    return fd


def own_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:nnfmq-program")


# ---------------------------------------------------------------------------------------------------------- asking


def test_what_is_here_is_mapped_and_left_when_nothing_looks_at_it(
    supervisor: Supervisor, worker: SharedCacheClient
) -> None:
    with constant(b"content") as memory:
        thread = supervisor.answers(Found, fds=(memory.fileno(),))
        program = worker.look_up(NAME)
        thread.join()
    assert program is not None
    view = program.memory.view
    program.memory.close()
    assert bytes(view) == b"content" and view.readonly
    number = program.ref_id
    del view, program
    gc.collect()
    assert supervisor.hears() == (Release(number), [])


def test_what_is_absent_is_nothing(supervisor: Supervisor, worker: SharedCacheClient) -> None:
    thread = supervisor.answers(NotFound)
    assert worker.look_up(NAME) is None
    thread.join()
    worker.invalidate(SharedProgram(Memory(), 5))
    assert supervisor.hears()[0] == Invalidate(5)  # and nothing before it


def test_what_may_still_be_written_is_not_mapped(
    supervisor: Supervisor, worker: SharedCacheClient, resources: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    thread = supervisor.answers(Found, fds=(unsealed(resources),))
    assert worker.look_up(NAME) is None
    thread.join()
    assert isinstance(supervisor.hears()[0], Invalidate)
    assert "not sealed against writing" in caplog.text


def test_an_answer_that_came_too_late_is_not_taken_for_another(
    supervisor: Supervisor, worker: SharedCacheClient
) -> None:
    with constant(b"late") as late, constant(b"new") as new:
        assert worker.look_up(NAME) is None
        question, left = supervisor.hears()[0], supervisor.hears()[0]
        assert left == Release(question.ref_id)
        supervisor.says(Found(question.ref_id), late.fileno())
        thread = supervisor.answers(Found, fds=(new.fileno(),))
        program = worker.look_up(NAME)
        thread.join()
    assert program is not None
    with program.memory as memory:
        assert bytes(memory.view) == b"new"


def test_a_supervisor_that_does_not_answer_costs_a_moment_and_one_log_line(
    supervisor: Supervisor, worker: SharedCacheClient, caplog: pytest.LogCaptureFixture
) -> None:
    begin_ns = time.monotonic_ns()
    assert worker.look_up(NAME) is None and worker.look_up(NAME) is None
    assert 2 * LOOKUP_TIMEOUT_NS <= time.monotonic_ns() - begin_ns < LATE_NS
    assert len(caplog.records) == 1 and not worker.is_closed


def test_DEAD_a_supervisor_that_is_gone_is_asked_nothing(
    supervisor: Supervisor, worker: SharedCacheClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "nnfmq.sharing")
    supervisor.channel.close()
    with constant(b"content") as memory:
        for _ in range(3):
            assert worker.look_up(NAME) is None
            worker.publish(NAME, memory)
    assert worker.is_closed and not shared_cache_client.is_available()
    assert len(caplog.records) == 1


def test_a_supervisor_that_ends_while_it_is_asked_keeps_nobody_waiting(
    supervisor: Supervisor, worker: SharedCacheClient
) -> None:
    def end() -> None:
        supervisor.hears()
        supervisor.channel.close()

    thread = threading.Thread(target=end)
    thread.start()
    begin_ns = time.monotonic_ns()
    assert worker.look_up(NAME) is None and worker.is_closed
    assert time.monotonic_ns() - begin_ns < LOOKUP_TIMEOUT_NS
    thread.join()


@pytest.mark.parametrize(
    "answer", [b"", b"\xff", shared_cache_protocol.encode(Lookup(1, NAME)), shared_cache_protocol.encode(Found(1))]
)
def test_an_impossible_answer_ends_it(answer: bytes, supervisor: Supervisor, worker: SharedCacheClient) -> None:
    supervisor.channel.send(answer, (), NO_WAIT)
    assert worker.look_up(NAME) is None
    assert worker.is_closed


def test_without_room_for_a_descriptor_nothing_is_held(supervisor: Supervisor, worker: SharedCacheClient) -> None:
    with constant(b"content") as memory:
        supervisor.says(Found(1), memory.fileno())
        with no_more_descriptors():
            assert worker.look_up(NAME) is None
    assert [supervisor.hears()[0] for _ in range(2)] == [Lookup(1, NAME), Release(1)]
    assert not worker.is_closed


def test_a_supervisor_that_takes_nothing_any_more_ends_it(supervisor: Supervisor, worker: SharedCacheClient) -> None:
    with constant(b"content") as memory:
        for _ in range(100_000):
            worker.publish(NAME, memory)
            if worker.is_closed:
                break
    assert worker.is_closed


# ---------------------------------------------------------------------------------------------------------- the cache


def stored(entry: CacheEntry, supervisor: Supervisor) -> tuple[PackedConstants, Memory]:
    """Store something; return it as it is shared, and what the supervisor was published, the caller's."""
    thread = supervisor.answers(NotFound)
    shared = entry.store(GROUPS)
    thread.join()
    assert shared is not None
    (published, (fd,)) = supervisor.hears()
    assert isinstance(published, Publish) and published.name == entry.name
    return shared, Memory.adopt_constant(fd)


def assert_equal(found: PackedConstants | None) -> None:
    assert found is not None
    for group, expected in zip(found, GROUPS, strict=True):
        for array, kept in zip(group, expected, strict=True):
            assert array.dtype == kept.dtype
            np.testing.assert_array_equal(array, kept)


def test_what_is_stored_is_offered_as_the_bytes_of_its_file_and_becomes_its_view(
    entry: CacheEntry, supervisor: Supervisor, tmp_path: Path
) -> None:
    shared, memory = stored(entry, supervisor)
    with memory:
        assert bytes(memory.view) == (tmp_path / "cache" / "nnfmq" / entry.name).read_bytes()
        assert own_mappings() == 2  # the published memory, and the one that came back
        assert_equal(shared)
        assert shared[0][1].ctypes.data % 64 == 0 and not shared[0][1].flags.writeable


def test_what_is_shared_is_found_without_a_file(entry: CacheEntry, supervisor: Supervisor, tmp_path: Path) -> None:
    _, memory = stored(entry, supervisor)
    (tmp_path / "cache" / "nnfmq" / entry.name).unlink()
    with memory:
        thread = supervisor.answers(Found, fds=(memory.fileno(),))
        assert_equal(entry.load())
        thread.join()


def test_what_is_read_from_a_file_is_offered(entry: CacheEntry, supervisor: Supervisor) -> None:
    shared, memory = stored(entry, supervisor)
    with memory:
        expected = bytes(memory.view)
    del shared
    assert isinstance(supervisor.hears()[0], Release)  # of what was stored: nobody kept it
    thread = supervisor.answers(NotFound)
    found = entry.load()
    thread.join()
    assert_equal(found)
    published, (fd,) = supervisor.hears()
    with Memory.adopt_constant(fd) as memory:
        assert isinstance(published, Publish) and bytes(memory.view) == expected


def test_what_another_worker_shares_meanwhile_takes_the_place_of_one_s_own(
    entry: CacheEntry, supervisor: Supervisor, tmp_path: Path
) -> None:
    _, memory = stored(entry, supervisor)
    with memory:
        thread = supervisor.answers(Found, fds=(memory.fileno(),))
        assert_equal(entry.store(GROUPS))
        thread.join()


CORRUPTIONS: dict[str, Callable[[bytes], bytes]] = {
    "flipped": lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
    "header": lambda data: b"\0" + data[1:],
    "cut short": lambda data: data[:-1],
    "appended": lambda data: data + b"\0",
    "shorter than a header": lambda data: data[:63],
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("corrupt", CORRUPTIONS.values(), ids=CORRUPTIONS.keys())
def test_CACHE_12_what_is_not_what_its_name_says_is_refused_and_the_file_is_used(
    corrupt: Callable[[bytes], bytes], entry: CacheEntry, supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    kept, memory = stored(entry, supervisor)
    with memory, constant(corrupt(bytes(memory.view))) as corrupted:
        thread = supervisor.answers(Found, fds=(corrupted.fileno(),))
        assert_equal(entry.load())
        thread.join()
    assert isinstance(supervisor.hears()[0], Invalidate)
    assert "a program that another worker shares is not used" in caplog.text
    del kept


def test_CACHE_12_another_entry_s_memory_is_refused(entry: CacheEntry, supervisor: Supervisor) -> None:
    other = entry_for(SELF, chain(OperationType.MUL))
    assert other is not None
    kept, memory = stored(other, supervisor)
    with memory:
        thread = supervisor.answers(Found, fds=(memory.fileno(),))
        assert entry.load() is None
        thread.join()
    assert isinstance(supervisor.hears()[0], Invalidate)
    del kept


def test_a_full_cache_directory_does_not_keep_it_from_being_shared(
    entry: CacheEntry, supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    shared, memory = stored(entry, supervisor)
    memory.close()
    assert_equal(shared)


def test_alone_nothing_is_shared_and_the_file_is_read_into_private_memory(entry: CacheEntry) -> None:
    assert entry.store(GROUPS) is None
    found = entry.load()
    assert_equal(found)
    assert own_mappings() == 0
