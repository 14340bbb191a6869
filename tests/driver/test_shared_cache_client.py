"""The worker's side of the shared program cache: verified lookups, releases, and operation without a supervisor."""

from __future__ import annotations

import fcntl
import gc
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from support.caching import chain
from support.descriptors import no_more_descriptors

from nnfmq.base import settings
from nnfmq.base.channel import NO_WAIT, Channel
from nnfmq.base.file_memory import FileMemory
from nnfmq.base.memory import CONSTANT_SEALS, Memory
from nnfmq.driver.cache import shared
from nnfmq.driver.cache.files import DeviceIdentity, PackedConstants
from nnfmq.driver.cache.programs import CacheEntry, copy_entries, entry_for
from nnfmq.driver.cache.shared import (
    LOOKUP_TIMEOUT_NS,
    Found,
    Invalidate,
    Lookup,
    NotFound,
    Publish,
    Release,
    Sender,
    SharedCacheClient,
    SharedCacheMessage,
    SharedProgram,
    Store,
    decode,
    encode,
    shared_cache,
)
from nnfmq.driver.cache.shared_files import SHARED_BYTES_MIN, SharedFile, shared_file
from nnfmq.hal.errors import MissedDeadlineTransient
from nnfmq.hal.types import OperationType, Protection

SELF = DeviceIdentity("compiled", "1")
NAME = "a" * 64
LARGE = np.arange(1 << 20, dtype=np.uint8)
PACKED: PackedConstants = [(np.arange(7, dtype=np.float32), LARGE), ()]
LATE_NS = 20_000_000_000


class Supervisor:
    """The supervisor's end of the connection, controlled by the test."""

    def __init__(self, channel: Channel, patch: pytest.MonkeyPatch) -> None:
        self.channel = channel
        self._patch = patch

    def is_awaited(self) -> None:
        """Let lookups wait for it from now on, however busy the machine is."""
        self._patch.setattr(shared, "LOOKUP_TIMEOUT_NS", LATE_NS)

    def receives(self) -> tuple[SharedCacheMessage, list[int]]:
        """Return the next message and its fds, which the caller owns."""
        with self.channel.receive(time.monotonic_ns() + LATE_NS) as frame:
            return decode(frame.data, sender=Sender.WORKER, fds=len(frame.fds)), frame.detach_fds()

    def sends(self, message: SharedCacheMessage, *fds: int) -> None:
        """Send a message. Borrows the fds."""
        self.channel.send(encode(message), fds, NO_WAIT)

    def replies(self, *replies: Callable[[int], SharedCacheMessage], fds: tuple[int, ...] = ()) -> threading.Thread:
        """Let a thread reply to the next lookup, with its id; the last reply has the fds."""
        self.is_awaited()

        def run() -> None:
            lookup, _ = self.receives()
            for number, make in enumerate(replies, 1):
                self.sends(make(lookup.ref_id), *(fds if number == len(replies) else ()))

        thread = threading.Thread(target=run)
        thread.start()
        return thread


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(settings.CACHE_MIB.variable, raising=False)


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch, resources: ExitStack) -> Supervisor:
    """Return the supervisor's end of this process's connection to the shared cache."""
    local, remote = Channel.pair()
    resources.callback(local.close)
    worker = SharedCacheClient(remote)
    resources.callback(worker.close)
    monkeypatch.setattr("nnfmq.driver.cache.shared._client", worker)
    return Supervisor(local, monkeypatch)


@pytest.fixture
def worker(supervisor: Supervisor) -> SharedCacheClient:
    client = shared_cache()
    assert client is not None
    return client


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


# ---------------------------------------------------------------------------------------------------------- lookups


def test_found_memory_is_mapped_and_released_with_its_last_view(
    supervisor: Supervisor, worker: SharedCacheClient
) -> None:
    with constant(b"content") as memory:
        thread = supervisor.replies(Found, fds=(memory.fileno(),))
        program = worker.look_up(NAME)
        thread.join()
    assert program is not None
    view = program.memory.view
    program.memory.close()
    assert bytes(view) == b"content" and view.readonly
    number = program.ref_id
    del view, program
    gc.collect()
    assert supervisor.receives() == (Release(number), [])


def test_a_lookup_of_an_unknown_name_returns_None(supervisor: Supervisor, worker: SharedCacheClient) -> None:
    thread = supervisor.replies(NotFound)
    assert worker.look_up(NAME) is None
    thread.join()
    worker.invalidate(SharedProgram(Memory(), 5))
    assert supervisor.receives()[0] == Invalidate(5)  # and nothing before it


def test_writable_memory_is_not_mapped(
    supervisor: Supervisor, worker: SharedCacheClient, resources: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    thread = supervisor.replies(Found, fds=(unsealed(resources),))
    assert worker.look_up(NAME) is None
    thread.join()
    assert isinstance(supervisor.receives()[0], Invalidate)
    assert "not sealed against writing" in caplog.text


def test_a_late_reply_is_discarded(supervisor: Supervisor, worker: SharedCacheClient) -> None:
    with constant(b"late") as late, constant(b"new") as new:
        assert worker.look_up(NAME) is None
        lookup, release = supervisor.receives()[0], supervisor.receives()[0]
        assert release == Release(lookup.ref_id)
        supervisor.sends(Found(lookup.ref_id), late.fileno())
        thread = supervisor.replies(Found, fds=(new.fileno(),))
        program = worker.look_up(NAME)
        thread.join()
    assert program is not None
    with program.memory as memory:
        assert bytes(memory.view) == b"new"


def test_a_lookup_times_out_and_is_logged_once(
    supervisor: Supervisor, worker: SharedCacheClient, caplog: pytest.LogCaptureFixture
) -> None:
    begin_ns = time.monotonic_ns()
    assert worker.look_up(NAME) is None and worker.look_up(NAME) is None
    assert 2 * LOOKUP_TIMEOUT_NS <= time.monotonic_ns() - begin_ns < LATE_NS
    assert len(caplog.records) == 1 and not worker.is_closed


def test_a_program_is_offered_without_a_wait_to_a_supervisor_that_does_not_respond(
    supervisor: Supervisor, worker: SharedCacheClient, caplog: pytest.LogCaptureFixture
) -> None:
    assert worker.look_up(NAME) is None
    with constant(b"content") as memory:
        worker.store([(NAME, memory.size_bytes)], memory)
    assert [record.message for record in caplog.records] == [
        "the supervisor does not respond: programs are not shared now"
    ]


def test_a_supervisor_that_does_not_respond_gets_requests_for_files_again_after_it_has_replied(
    supervisor: Supervisor, worker: SharedCacheClient
) -> None:
    """A program may have many kernels, and each of them a file: it does not wait for every one."""
    assert worker.look_up(NAME) is None
    assert worker.open_file(NAME) is None
    assert [supervisor.receives()[0] for _ in range(2)] == [Lookup(1, NAME), Release(1)]
    with pytest.raises(MissedDeadlineTransient):
        supervisor.channel.receive(NO_WAIT)
    thread = supervisor.replies(NotFound)
    assert worker.look_up(NAME) is None
    thread.join()
    thread = supervisor.replies(NotFound)
    assert worker.open_file(NAME) is None
    thread.join()


def test_DEAD_no_lookups_after_the_supervisor_exited(
    supervisor: Supervisor, worker: SharedCacheClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "nnfmq.sharing")
    supervisor.channel.close()
    with constant(b"content") as memory:
        for _ in range(3):
            assert worker.look_up(NAME) is None
            worker.publish(NAME, memory)
    assert worker.is_closed and shared_cache() is None
    assert len(caplog.records) == 1


def test_a_lookup_ends_when_the_supervisor_exits(supervisor: Supervisor, worker: SharedCacheClient) -> None:
    def end() -> None:
        supervisor.receives()
        supervisor.channel.close()

    supervisor.is_awaited()
    thread = threading.Thread(target=end)
    thread.start()
    begin_ns = time.monotonic_ns()
    assert worker.look_up(NAME) is None and worker.is_closed
    assert time.monotonic_ns() - begin_ns < LATE_NS
    thread.join()


@pytest.mark.parametrize("reply", [b"", b"\xff", encode(Lookup(1, NAME)), encode(Found(1))])
def test_an_invalid_reply_closes_the_connection(
    reply: bytes, supervisor: Supervisor, worker: SharedCacheClient
) -> None:
    supervisor.channel.send(reply, (), NO_WAIT)
    assert worker.look_up(NAME) is None
    assert worker.is_closed


def test_a_reply_whose_fd_cannot_be_received_is_released(supervisor: Supervisor, worker: SharedCacheClient) -> None:
    with constant(b"content") as memory:
        supervisor.sends(Found(1), memory.fileno())
        with no_more_descriptors():
            assert worker.look_up(NAME) is None
    assert [supervisor.receives()[0] for _ in range(2)] == [Lookup(1, NAME), Release(1)]
    assert not worker.is_closed


def test_a_full_socket_closes_the_connection(supervisor: Supervisor, worker: SharedCacheClient) -> None:
    with constant(b"content") as memory:
        for _ in range(100_000):
            worker.publish(NAME, memory)
            if worker.is_closed:
                break
    assert worker.is_closed


# ---------------------------------------------------------------------------------------------------------- the cache


def store_entry(entry: CacheEntry, supervisor: Supervisor) -> tuple[PackedConstants, Memory]:
    """Store an entry. Return its shared constants, and the published memory, which the caller closes."""
    received: list[tuple[SharedCacheMessage, list[int]]] = []

    def serve() -> None:
        lookup, _ = supervisor.receives()
        supervisor.sends(NotFound(lookup.ref_id))
        received.extend([supervisor.receives(), supervisor.receives()])
        (stored, (memory, pipe)) = received[1]
        assert isinstance(stored, Store)
        copy_entries(stored.files, memory)
        os.close(memory)
        os.close(pipe)

    thread = threading.Thread(target=serve)
    thread.start()
    shared = entry.store(PACKED)
    thread.join()
    assert shared is not None
    (published, (fd,)), (stored, _) = received
    assert isinstance(published, Publish) and isinstance(stored, Store)
    assert stored.files == ((entry.name, os.fstat(fd).st_size),) and published.name == entry.name
    return shared, Memory.adopt_constant(fd)


def assert_equal(found: PackedConstants | None) -> None:
    assert found is not None
    for group, expected in zip(found, PACKED, strict=True):
        for array, kept in zip(group, expected, strict=True):
            assert array.dtype == kept.dtype
            np.testing.assert_array_equal(array, kept)


def test_a_stored_entry_is_published_as_its_file_s_bytes_and_returned_as_views(
    entry: CacheEntry, supervisor: Supervisor, tmp_path: Path
) -> None:
    shared, memory = store_entry(entry, supervisor)
    with memory:
        assert bytes(memory.view) == (tmp_path / "cache" / "nnfmq" / entry.name).read_bytes()
        assert own_mappings() == 2  # the published memory, and the one that came back
        assert_equal(shared)
        assert shared[0][1].ctypes.data % 64 == 0 and not shared[0][1].flags.writeable


def test_a_shared_entry_is_loaded_without_its_file(entry: CacheEntry, supervisor: Supervisor, tmp_path: Path) -> None:
    _, memory = store_entry(entry, supervisor)
    (tmp_path / "cache" / "nnfmq" / entry.name).unlink()
    with memory:
        thread = supervisor.replies(Found, fds=(memory.fileno(),))
        assert_equal(entry.load())
        thread.join()


def test_an_entry_read_from_its_file_is_published(entry: CacheEntry, supervisor: Supervisor) -> None:
    shared, memory = store_entry(entry, supervisor)
    with memory:
        expected = bytes(memory.view)
    del shared
    assert isinstance(supervisor.receives()[0], Release)  # of what was stored: nobody kept it
    thread = supervisor.replies(NotFound)
    found = entry.load()
    thread.join()
    assert_equal(found)
    published, (fd,) = supervisor.receives()
    with Memory.adopt_constant(fd) as memory:
        assert isinstance(published, Publish) and bytes(memory.view) == expected


def test_an_entry_that_another_worker_published_meanwhile_is_used(
    entry: CacheEntry, supervisor: Supervisor, tmp_path: Path
) -> None:
    _, memory = store_entry(entry, supervisor)
    with memory:
        thread = supervisor.replies(Found, fds=(memory.fileno(),))
        assert_equal(entry.store(PACKED))
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
def test_CACHE_12_corrupt_shared_memory_is_rejected_and_the_file_is_used(
    corrupt: Callable[[bytes], bytes], entry: CacheEntry, supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    kept, memory = store_entry(entry, supervisor)
    with memory, constant(corrupt(bytes(memory.view))) as corrupted:
        thread = supervisor.replies(Found, fds=(corrupted.fileno(),))
        assert_equal(entry.load())
        thread.join()
    assert isinstance(supervisor.receives()[0], Invalidate)
    assert "a program that another worker shares is not used" in caplog.text
    del kept


def test_CACHE_12_memory_of_another_entry_is_rejected(entry: CacheEntry, supervisor: Supervisor) -> None:
    other = entry_for(SELF, chain(OperationType.MUL))
    assert other is not None
    kept, memory = store_entry(other, supervisor)
    with memory:
        thread = supervisor.replies(Found, fds=(memory.fileno(),))
        assert entry.load() is None
        thread.join()
    assert isinstance(supervisor.receives()[0], Invalidate)
    del kept


def test_a_program_is_shared_if_its_file_cannot_be_written(
    entry: CacheEntry, supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    shared, memory = store_entry(entry, supervisor)
    memory.close()
    assert_equal(shared)


def test_a_worker_does_not_wait_for_a_file_that_nobody_writes(entry: CacheEntry, supervisor: Supervisor) -> None:
    """The supervisor closes the fds of a request that it cannot do."""

    def refuse() -> None:
        lookup, _ = supervisor.receives()
        supervisor.sends(NotFound(lookup.ref_id))
        for _ in (Publish, Store):
            for fd in supervisor.receives()[1]:
                os.close(fd)

    thread = threading.Thread(target=refuse)
    thread.start()
    assert_equal(entry.store(PACKED))
    thread.join()


def test_without_a_shared_cache_files_are_read_into_private_memory(entry: CacheEntry) -> None:
    assert entry.store(PACKED) is None
    found = entry.load()
    assert_equal(found)
    assert own_mappings() == 0


# ---- model files of hosted runtimes


FILE = bytes(range(256)) * (SHARED_BYTES_MIN // 256)


def sent(data: bytes) -> FileMemory:
    with constant(data) as memory:
        return FileMemory.from_fd(memory.fileno(), len(data), protection=Protection.READ)


def answered(supervisor: Supervisor, data: bytes | None) -> tuple[SharedFile | None, list[SharedCacheMessage]]:
    """Share FILE while another worker has published `data` under its name; return that, and what the worker sent."""
    with ExitStack() as stack:
        fds = () if data is None else (stack.enter_context(constant(data)).fileno(),)
        thread = supervisor.replies(NotFound if data is None else Found, fds=fds)
        with sent(FILE) as memory:
            found = shared_file(memory, lambda: None)
        thread.join()
    messages = []
    while isinstance(message := received(supervisor), SharedCacheMessage):
        messages.append(message)
    return found, messages


def received(supervisor: Supervisor) -> SharedCacheMessage | None:
    try:
        with supervisor.channel.receive(NO_WAIT) as frame:
            return decode(frame.data, sender=Sender.WORKER, fds=frame.fd_count)
    except MissedDeadlineTransient:
        return None


def test_a_file_that_nobody_shares_is_published_and_released_when_it_is_closed(supervisor: Supervisor) -> None:
    file, messages = answered(supervisor, None)
    assert file is not None and not file.is_replacement
    assert [type(message) for message in messages] == [Publish]
    with sent(FILE) as other:
        assert os.fstat(other.fileno()).st_ino != os.fstat(file.fd).st_ino
    del file
    gc.collect()
    assert [type(received(supervisor)), received(supervisor)] == [Release, None]


def test_the_same_bytes_replace_those_of_the_client(supervisor: Supervisor) -> None:
    file, messages = answered(supervisor, FILE)
    assert file is not None and file.is_replacement
    assert messages == []
    with FileMemory.from_fd(file.fd, len(FILE), protection=Protection.READ) as again:
        assert shared_file(again, lambda: None) is file  # without another lookup


@pytest.mark.parametrize("data", [FILE[:-1] + b"?", FILE + b"?", FILE[:-1]], ids=["other", "longer", "shorter"])
def test_other_bytes_under_the_digest_of_a_file_are_reported_and_not_used(supervisor: Supervisor, data: bytes) -> None:
    file, messages = answered(supervisor, data)
    assert file is not None and not file.is_replacement
    assert [type(message) for message in messages if not isinstance(message, Release)] == [Invalidate, Publish]


def test_a_process_without_free_fds_shares_no_file(supervisor: Supervisor, caplog: pytest.LogCaptureFixture) -> None:
    with sent(FILE) as memory, no_more_descriptors():
        assert shared_file(memory, lambda: None) is None
    assert "a file is not shared: " in caplog.text
    assert received(supervisor) is None


def test_a_small_or_unsealed_file_or_one_beyond_the_cache_s_limit_is_not_shared(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(FILE)
    with sent(FILE[:-1]) as small, open(path, "rb") as opened:
        assert shared_file(small, lambda: None) is None
        with FileMemory.from_fd(opened.fileno(), len(FILE), protection=Protection.READ) as unsealed:
            assert shared_file(unsealed, lambda: None) is None
    monkeypatch.setenv(settings.CACHE_MIB.variable, "0")
    with sent(FILE) as large:
        assert shared_file(large, lambda: None) is None
    assert received(supervisor) is None
