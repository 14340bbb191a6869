"""The supervisor's side of the shared program cache: references, rejected memory, and limits.

A worker is the other end of a link here, and sends whatever a test wants, as a compromised worker would.
"""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.descriptors import no_more_descriptors

from nnfmq.base.channel import INLINE_BYTES, NO_WAIT, Channel
from nnfmq.base.memory import CONSTANT_SEALS, F_SEAL_FUTURE_WRITE, SHARED_SEALS
from nnfmq.driver.cache import shared
from nnfmq.driver.cache.shared import (
    Found,
    Invalidate,
    Lookup,
    NotFound,
    Publish,
    Release,
    Sender,
    SharedCacheMessage,
    SharedCacheServer,
    Store,
    WorkerLink,
)
from nnfmq.driver.process.workers import user_entries
from nnfmq.hal.errors import MissedDeadlineTransient

LIMIT = 1 << 20
NAME, OTHER = "a" * 64, "b" * 64
LABEL = "shared-test"


class Worker:
    """The worker's end of a link."""

    def __init__(self, server: SharedCacheServer) -> None:
        self.server = server
        self.connection: WorkerLink
        self.connection, self.channel = server.connect()
        self.is_open = True

    def send(self, message: SharedCacheMessage, fds: tuple[int, ...] = ()) -> bool:
        """Send a message and let the server handle it; return whether the link is still open."""
        return self.send_bytes(shared.encode(message), fds)

    def send_bytes(self, data: bytes, fds: tuple[int, ...] = ()) -> bool:
        self.channel.send(data, fds, NO_WAIT)
        return self.serve_once()

    def serve_once(self) -> bool:
        self.is_open = self.server.serve(self.connection)
        if not self.is_open:
            self.server.close(self.connection)
        return self.is_open

    def publishes(self, name: str, fd: int, number: int = 1) -> bool:
        """Publish an fd, and close it."""
        try:
            return self.send(Publish(number, name), (fd,))
        finally:
            os.close(fd)

    def looks_up(self, name: str, number: int = 2) -> int | None:
        """Look an entry up; return the inode of its memory, or None."""
        assert self.send(Lookup(number, name))
        with self.channel.receive(NO_WAIT) as frame:
            reply = shared.decode(frame.data, sender=Sender.SUPERVISOR, fds=len(frame.fds))
            assert reply == (Found(number) if frame.fds else NotFound(number))
            return os.fstat(frame.fds[0]).st_ino if frame.fds else None

    def close(self) -> None:
        self.server.close(self.connection)
        self.channel.close()


@pytest.fixture
def server() -> SharedCacheServer:
    return SharedCacheServer(LIMIT)


@pytest.fixture
def workers(server: SharedCacheServer) -> Iterator[Callable[[], Worker]]:
    """Return a function that connects a worker. After the test all memory must be closed."""
    made: list[Worker] = []

    def make() -> Worker:
        made.append(Worker(server))
        return made[-1]

    yield make
    for worker in made:
        worker.close()
    assert open_memfds() == 0


@pytest.fixture
def first(workers: Callable[[], Worker]) -> Worker:
    return workers()


@pytest.fixture
def second(workers: Callable[[], Worker]) -> Worker:
    return workers()


def memfd(size_bytes: int = 4096, seals: int = CONSTANT_SEALS) -> int:
    fd = os.memfd_create(LABEL, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def open_memfds() -> int:
    """Return how many fds of published memory this process has: those of the server."""
    places = (os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if is_open(fd))
    return sum(f"/memfd:{LABEL}" in place for place in places)


def is_open(fd: str) -> bool:
    return Path(f"/proc/self/fd/{fd}").is_symlink()


def inode(fd: int) -> int:
    return os.fstat(fd).st_ino


# ---------------------------------------------------------------------------------------------------------- references


def test_a_published_entry_is_found_by_another_worker(first: Worker, second: Worker) -> None:
    fd = memfd()
    number = inode(fd)
    assert first.publishes(NAME, fd)
    assert second.looks_up(NAME) == number
    assert second.looks_up(OTHER, 3) is None
    assert open_memfds() == 1


def test_an_unknown_entry_is_not_found(first: Worker) -> None:
    assert first.looks_up(NAME) is None


def test_an_entry_is_closed_with_its_last_reference(
    first: Worker, second: Worker, workers: Callable[[], Worker]
) -> None:
    fd = memfd()
    number = inode(fd)
    first.publishes(NAME, fd)
    second.looks_up(NAME)
    first.close()
    assert open_memfds() == 1
    third = workers()
    assert third.looks_up(NAME) == number
    assert second.send(Release(2)) and open_memfds() == 1
    assert third.send(Release(2)) and open_memfds() == 0
    assert third.looks_up(NAME, 3) is None


def test_each_reference_of_a_worker_counts(first: Worker) -> None:
    first.publishes(NAME, memfd())
    first.looks_up(NAME, 2)
    first.send(Release(1))
    assert open_memfds() == 1
    first.send(Release(2))
    assert open_memfds() == 0


def test_the_first_of_two_published_entries_stays(first: Worker, second: Worker) -> None:
    fds = memfd(), memfd()
    number = inode(fds[0])
    assert first.publishes(NAME, fds[0]) and second.publishes(NAME, fds[1])
    assert open_memfds() == 1
    assert second.looks_up(NAME) == number
    assert second.send(Release(1)) and second.send(Release(2))  # reference 1 is of its own copy
    assert open_memfds() == 1


def test_releasing_an_unknown_reference_is_ignored(first: Worker) -> None:
    assert first.send(Release(99))


def test_an_invalidated_entry_is_removed_and_may_be_replaced(first: Worker, second: Worker) -> None:
    first.publishes(NAME, memfd())
    second.looks_up(NAME)
    assert second.send(Invalidate(2))
    assert open_memfds() == 0
    assert second.looks_up(NAME, 3) is None
    fd = memfd()
    number = inode(fd)
    assert second.publishes(NAME, fd, 4)
    assert first.send(Release(1))  # of the invalidated one
    assert first.looks_up(NAME, 5) == number


def test_invalidations_are_logged_once_for_each_worker(first: Worker, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(5):
        first.publishes(NAME, memfd(), number)
        assert first.send(Invalidate(number))
    assert caplog.text.count("corrupt") == 1
    assert open_memfds() == 0


# ---------------------------------------------------------------------------------------------------------- rejected


def opened_for_writing(fd: int) -> int:
    other = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC)
    os.close(fd)
    return other


def path_only(fd: int) -> int:
    other = os.open(f"/proc/self/fd/{fd}", os.O_PATH | os.O_CLOEXEC)
    os.close(fd)
    return other


UNSUITABLE: dict[str, Callable[[], int]] = {
    "no seals": lambda: memfd(seals=0),
    "may be written": lambda: memfd(seals=SHARED_SEALS | fcntl.F_SEAL_SEAL),
    "its mapping may be written": lambda: memfd(seals=SHARED_SEALS | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL),
    "empty": lambda: memfd(size_bytes=0),
    "may shrink": lambda: memfd(seals=CONSTANT_SEALS & ~fcntl.F_SEAL_SHRINK),
    "may grow": lambda: memfd(seals=CONSTANT_SEALS & ~fcntl.F_SEAL_GROW),
    "may be sealed": lambda: memfd(seals=CONSTANT_SEALS & ~fcntl.F_SEAL_SEAL),
    "opened for writing": lambda: opened_for_writing(memfd()),
    "a path": lambda: path_only(memfd()),
    "a file": lambda: os.open(__file__, os.O_RDONLY | os.O_CLOEXEC),
    "a device": lambda: os.open("/dev/zero", os.O_RDWR | os.O_CLOEXEC),
}


@pytest.mark.parametrize("make", UNSUITABLE.values(), ids=UNSUITABLE.keys())
def test_publishing_unsealed_memory_closes_that_link_only(
    make: Callable[[], int], first: Worker, second: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    second.publishes(OTHER, memfd())
    assert not first.publishes(NAME, make())
    assert second.looks_up(NAME) is None and second.looks_up(OTHER, 3) is not None
    assert caplog.text.count("no longer shares programs: it published an fd that is not") == 1


VIOLATIONS: dict[str, tuple[bytes, int]] = {
    "nothing": (b"", 0),
    "not a message": (b"\xff" * 100, 0),
    "a supervisor's message": (shared.encode(NotFound(1)), 0),
    "publishing without memory": (shared.encode(Publish(1, NAME)), 0),
    "publishing two fds": (shared.encode(Publish(1, NAME)), 2),
    "a lookup with memory": (shared.encode(Lookup(1, NAME)), 1),
    "a body in a file": (bytes(INLINE_BYTES + 1), 0),
    "storing files of another size": (shared.encode(Store(1, ((NAME, 4000), (OTHER, 97)))), 2),
    "invalidating an unknown reference": (shared.encode(Invalidate(1)), 0),
}


@pytest.mark.parametrize(("data", "count"), VIOLATIONS.values(), ids=VIOLATIONS.keys())
def test_LIFE_7_a_protocol_violation_closes_that_link(
    data: bytes, count: int, first: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    fds = tuple(memfd() for _ in range(count))
    try:
        assert not first.send_bytes(data, fds)
    finally:
        for fd in fds:
            os.close(fd)
    assert caplog.text.count("no longer shares programs") == 1


@pytest.mark.parametrize("message", [Lookup(1, NAME), Publish(1, OTHER)], ids=["wanted", "offered"])
def test_a_reference_id_in_use_cannot_be_reused(message: SharedCacheMessage, first: Worker) -> None:
    first.publishes(NAME, memfd())
    fds = (memfd(),) if isinstance(message, Publish) else ()
    try:
        assert not first.send(message, fds)
    finally:
        for fd in fds:
            os.close(fd)
    assert open_memfds() == 0


def test_a_worker_s_exit_is_not_logged(first: Worker, caplog: pytest.LogCaptureFixture) -> None:
    first.publishes(NAME, memfd())
    first.channel.close()
    assert not first.serve_once()
    assert open_memfds() == 0 and caplog.text == ""


def test_serving_without_a_frame_does_nothing(first: Worker) -> None:
    assert first.serve_once()


def test_a_worker_that_does_not_read_its_replies_is_disconnected(
    first: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(100_000):
        if not first.send(Lookup(number, NAME)):
            break
    assert "it does not read its replies" in caplog.text


# ---------------------------------------------------------------------------------------------------------- limits


def test_an_entry_over_the_limit_is_rejected_and_logged_once(first: Worker, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(3):
        assert first.publishes(NAME, memfd(LIMIT + 1), number)
    assert open_memfds() == 0
    assert caplog.text.count("is not shared") == 1


def test_the_limit_is_for_all_entries_together(first: Worker, second: Worker) -> None:
    assert first.publishes(NAME, memfd(LIMIT // 2)) and second.publishes(OTHER, memfd(LIMIT // 2 + 1))
    assert open_memfds() == 1
    assert first.send(Release(1))
    assert second.publishes(OTHER, memfd(LIMIT // 2 + 1), 2) and open_memfds() == 1


def test_the_number_of_entries_is_limited(
    server: SharedCacheServer, first: Worker, second: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    server.entries_max = 3
    for number in range(5):
        assert first.publishes(f"{number:064x}", memfd(), number)
    assert open_memfds() == 3 and "the cache has 3 programs already" in caplog.text
    assert second.looks_up(f"{2:064x}") is not None


def test_LIFE_7_the_references_of_a_worker_are_limited(
    first: Worker, second: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared, "REFERENCES_MAX", 2)
    assert all(first.publishes(f"{number:064x}", memfd(), number) for number in range(3))
    assert open_memfds() == 2 and "the worker has 2 references already" in caplog.text
    assert first.looks_up(f"{0:064x}", 7) is None
    assert second.looks_up(f"{0:064x}") is not None


def test_an_entry_whose_fd_cannot_be_received_is_rejected(first: Worker, caplog: pytest.LogCaptureFixture) -> None:
    fd = memfd()
    first.channel.send(shared.encode(Publish(1, NAME)), (fd,), NO_WAIT)
    os.close(fd)
    with no_more_descriptors():
        assert first.serve_once()
    assert open_memfds() == 0 and "no free file descriptor" in caplog.text


def test_an_entry_whose_fd_cannot_be_sent_is_not_found(
    first: Worker, second: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ETOOMANYREFS, when too many fds are in flight."""
    send = Channel.send

    def too_many(self: Channel, data: bytes, fds: tuple[int, ...] = (), deadline_ns: int | None = None) -> None:
        if fds and self is second.connection.channel:
            raise OSError(109, "Too many references: cannot splice")
        send(self, data, fds, deadline_ns)

    first.publishes(NAME, memfd())
    monkeypatch.setattr(Channel, "send", too_many)
    assert second.looks_up(NAME) is None
    first.send(Release(1))
    assert open_memfds() == 0


def test_only_lookups_are_replied_to(first: Worker) -> None:
    assert first.publishes(NAME, memfd()) and first.send(Release(1))
    with pytest.raises(MissedDeadlineTransient):
        first.channel.receive(NO_WAIT)


@pytest.mark.parametrize(("fds", "entries"), [(1024, 8), (8192, 64), (524288, 256)])
def test_the_programs_of_all_users_leave_descriptors_for_clients(
    fds: int, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (fds, fds))
    assert user_entries() == entries
