"""The supervisor's part in shared programs: who is given what, what is not taken, and that nothing is kept for nobody.

A worker is the other end of a connection here, and says whatever a test wants, as one that was taken over would.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.descriptors import no_more_descriptors

from nnfmq.channel import INLINE_BYTES, NO_WAIT, Channel
from nnfmq.hal.errors import MissedDeadlineTransient
from nnfmq.memory import CONSTANT_SEALS, F_SEAL_FUTURE_WRITE, SHARED_SEALS
from nnfmq.service.caching import shared_cache_protocol, shared_cache_server
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
from nnfmq.service.caching.shared_cache_server import SharedCacheServer, WorkerLink

LIMIT = 1 << 20
NAME, OTHER = "a" * 64, "b" * 64
LABEL = "shared-test"


class Worker:
    """A worker's end of a connection, and what it says."""

    def __init__(self, registry: SharedCacheServer) -> None:
        self.registry = registry
        self.connection: WorkerLink
        self.connection, self.channel = registry.connect()
        self.is_open = True

    def say(self, message: SharedCacheMessage, fds: tuple[int, ...] = ()) -> bool:
        """Send a message; return whether the supervisor goes on listening."""
        return self.say_bytes(shared_cache_protocol.encode(message), fds)

    def say_bytes(self, data: bytes, fds: tuple[int, ...] = ()) -> bool:
        self.channel.send(data, fds, NO_WAIT)
        return self.heard()

    def heard(self) -> bool:
        self.is_open = self.registry.serve(self.connection)
        if not self.is_open:
            self.registry.close(self.connection)
        return self.is_open

    def offers(self, name: str, fd: int, number: int = 1) -> bool:
        """Offer a descriptor, and forget it."""
        try:
            return self.say(Publish(number, name), (fd,))
        finally:
            os.close(fd)

    def wants(self, name: str, number: int = 2) -> int | None:
        """Return the inode of what it is given, which it closes."""
        assert self.say(Lookup(number, name))
        with self.channel.receive(NO_WAIT) as frame:
            answer = shared_cache_protocol.decode(frame.data, sender=Sender.SUPERVISOR, fds=len(frame.fds))
            assert answer == (Found(number) if frame.fds else NotFound(number))
            return os.fstat(frame.fds[0]).st_ino if frame.fds else None

    def close(self) -> None:
        self.registry.close(self.connection)
        self.channel.close()


@pytest.fixture
def registry() -> SharedCacheServer:
    return SharedCacheServer(LIMIT)


@pytest.fixture
def workers(registry: SharedCacheServer) -> Iterator[Callable[[], Worker]]:
    """Return what makes a worker; after the test none of them has anything."""
    made: list[Worker] = []

    def make() -> Worker:
        made.append(Worker(registry))
        return made[-1]

    yield make
    for worker in made:
        worker.close()
    assert held() == 0


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


def held() -> int:
    """Return how many descriptors of offered memory this process has: the registry's."""
    places = (os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if is_open(fd))
    return sum(f"/memfd:{LABEL}" in place for place in places)


def is_open(fd: str) -> bool:
    return Path(f"/proc/self/fd/{fd}").is_symlink()


def inode(fd: int) -> int:
    return os.fstat(fd).st_ino


# ---------------------------------------------------------------------------------------------------------- holding


def test_what_one_offers_another_is_given(first: Worker, second: Worker) -> None:
    fd = memfd()
    number = inode(fd)
    assert first.offers(NAME, fd)
    assert second.wants(NAME) == number
    assert second.wants(OTHER, 3) is None
    assert held() == 1


def test_what_nobody_offered_is_absent(first: Worker) -> None:
    assert first.wants(NAME) is None


def test_it_is_kept_for_whoever_was_given_it_and_closed_with_the_last(
    first: Worker, second: Worker, workers: Callable[[], Worker]
) -> None:
    fd = memfd()
    number = inode(fd)
    first.offers(NAME, fd)
    second.wants(NAME)
    first.close()
    assert held() == 1
    third = workers()
    assert third.wants(NAME) == number
    assert second.say(Release(2)) and held() == 1
    assert third.say(Release(2)) and held() == 0
    assert third.wants(NAME, 3) is None


def test_each_hold_of_a_worker_counts(first: Worker) -> None:
    first.offers(NAME, memfd())
    first.wants(NAME, 2)
    first.say(Release(1))
    assert held() == 1
    first.say(Release(2))
    assert held() == 0


def test_of_two_offers_the_first_one_stays(first: Worker, second: Worker) -> None:
    fds = memfd(), memfd()
    number = inode(fds[0])
    assert first.offers(NAME, fds[0]) and second.offers(NAME, fds[1])
    assert held() == 1
    assert second.wants(NAME) == number
    assert second.say(Release(1)) and second.say(Release(2))  # the former is of its own copy
    assert held() == 1


def test_a_number_that_is_not_held_may_be_left(first: Worker) -> None:
    assert first.say(Release(99))


def test_what_was_found_spoilt_is_given_to_nobody_and_may_be_replaced(first: Worker, second: Worker) -> None:
    first.offers(NAME, memfd())
    second.wants(NAME)
    assert second.say(Invalidate(2))
    assert held() == 0
    assert second.wants(NAME, 3) is None
    fd = memfd()
    number = inode(fd)
    assert second.offers(NAME, fd, 4)
    assert first.say(Release(1))  # of the spoilt one
    assert first.wants(NAME, 5) == number


def test_a_worker_that_finds_everything_spoilt_is_heard_once(first: Worker, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(5):
        first.offers(NAME, memfd(), number)
        assert first.say(Invalidate(number))
    assert caplog.text.count("corrupt") == 1
    assert held() == 0


# ---------------------------------------------------------------------------------------------------------- refused


def opened_for_writing(fd: int) -> int:
    other = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC)
    os.close(fd)
    return other


def only_path(fd: int) -> int:
    other = os.open(f"/proc/self/fd/{fd}", os.O_PATH | os.O_CLOEXEC)
    os.close(fd)
    return other


WRONG: dict[str, Callable[[], int]] = {
    "no seals": lambda: memfd(seals=0),
    "may be written": lambda: memfd(seals=SHARED_SEALS | fcntl.F_SEAL_SEAL),
    "its mapping may be written": lambda: memfd(seals=SHARED_SEALS | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL),
    "empty": lambda: memfd(size_bytes=0),
    "may shrink": lambda: memfd(seals=CONSTANT_SEALS & ~fcntl.F_SEAL_SHRINK),
    "may grow": lambda: memfd(seals=CONSTANT_SEALS & ~fcntl.F_SEAL_GROW),
    "may be sealed": lambda: memfd(seals=CONSTANT_SEALS & ~fcntl.F_SEAL_SEAL),
    "opened for writing": lambda: opened_for_writing(memfd()),
    "a path": lambda: only_path(memfd()),
    "a file": lambda: os.open(__file__, os.O_RDONLY | os.O_CLOEXEC),
    "a device": lambda: os.open("/dev/zero", os.O_RDWR | os.O_CLOEXEC),
}


@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG.keys())
def test_what_is_not_sealed_ends_the_connection_of_its_worker_alone(
    make: Callable[[], int], first: Worker, second: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    second.offers(OTHER, memfd())
    assert not first.offers(NAME, make())
    assert second.wants(NAME) is None and second.wants(OTHER, 3) is not None
    assert caplog.text.count("no longer shares programs: it published an fd that is not") == 1


BROKEN: dict[str, tuple[bytes, int]] = {
    "nothing": (b"", 0),
    "no message": (b"\xff" * 100, 0),
    "a supervisor's": (shared_cache_protocol.encode(NotFound(1)), 0),
    "an offer without memory": (shared_cache_protocol.encode(Publish(1, NAME)), 0),
    "an offer of two": (shared_cache_protocol.encode(Publish(1, NAME)), 2),
    "a question with memory": (shared_cache_protocol.encode(Lookup(1, NAME)), 1),
    "a body in a file": (bytes(INLINE_BYTES + 1), 0),
    "spoilt, and not held": (shared_cache_protocol.encode(Invalidate(1)), 0),
}


@pytest.mark.parametrize(("data", "count"), BROKEN.values(), ids=BROKEN.keys())
def test_LIFE_7_what_breaks_the_protocol_ends_that_connection(
    data: bytes, count: int, first: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    fds = tuple(memfd() for _ in range(count))
    try:
        assert not first.say_bytes(data, fds)
    finally:
        for fd in fds:
            os.close(fd)
    assert caplog.text.count("no longer shares programs") == 1


@pytest.mark.parametrize("message", [Lookup(1, NAME), Publish(1, OTHER)], ids=["wanted", "offered"])
def test_a_number_that_is_held_cannot_be_given_again(message: SharedCacheMessage, first: Worker) -> None:
    first.offers(NAME, memfd())
    fds = (memfd(),) if isinstance(message, Publish) else ()
    try:
        assert not first.say(message, fds)
    finally:
        for fd in fds:
            os.close(fd)
    assert held() == 0


def test_a_worker_that_is_gone_is_forgotten_without_a_word(first: Worker, caplog: pytest.LogCaptureFixture) -> None:
    first.offers(NAME, memfd())
    first.channel.close()
    assert not first.heard()
    assert held() == 0 and caplog.text == ""


def test_there_may_be_nothing_to_hear(first: Worker) -> None:
    assert first.heard()


def test_a_worker_that_does_not_read_its_answers_is_not_waited_for(
    first: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(100_000):
        if not first.say(Lookup(number, NAME)):
            break
    assert "it does not read its replies" in caplog.text


# ---------------------------------------------------------------------------------------------------------- limits


def test_what_is_larger_than_the_limit_is_not_kept_and_said_once(
    first: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        assert first.offers(NAME, memfd(LIMIT + 1), number)
    assert held() == 0
    assert caplog.text.count("is not shared") == 1


def test_all_together_are_within_the_limit(first: Worker, second: Worker) -> None:
    assert first.offers(NAME, memfd(LIMIT // 2)) and second.offers(OTHER, memfd(LIMIT // 2 + 1))
    assert held() == 1
    assert first.say(Release(1))
    assert second.offers(OTHER, memfd(LIMIT // 2 + 1), 2) and held() == 1


def test_there_are_only_so_many(
    first: Worker, second: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_cache_server, "ENTRIES_MAX", 3)
    for number in range(5):
        assert first.offers(f"{number:064x}", memfd(), number)
    assert held() == 3 and "the cache has 3 programs already" in caplog.text
    assert second.wants(f"{2:064x}") is not None


def test_LIFE_7_a_worker_holds_only_so_many_and_others_go_on(
    first: Worker, second: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_cache_server, "REFERENCES_MAX", 2)
    assert all(first.offers(f"{number:064x}", memfd(), number) for number in range(3))
    assert held() == 2 and "the worker has 2 references already" in caplog.text
    assert first.wants(f"{0:064x}", 7) is None
    assert second.wants(f"{0:064x}") is not None


def test_without_a_free_descriptor_an_offer_is_not_kept(first: Worker, caplog: pytest.LogCaptureFixture) -> None:
    fd = memfd()
    first.channel.send(shared_cache_protocol.encode(Publish(1, NAME)), (fd,), NO_WAIT)
    os.close(fd)
    with no_more_descriptors():
        assert first.heard()
    assert held() == 0 and "no free file descriptor" in caplog.text


def test_a_descriptor_that_cannot_be_sent_makes_it_absent(
    first: Worker, second: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where too many are on their way: ETOOMANYREFS."""
    send = Channel.send

    def too_many(self: Channel, data: bytes, fds: tuple[int, ...] = (), deadline_ns: int | None = None) -> None:
        if fds and self is second.connection.channel:
            raise OSError(109, "Too many references: cannot splice")
        send(self, data, fds, deadline_ns)

    first.offers(NAME, memfd())
    monkeypatch.setattr(Channel, "send", too_many)
    assert second.wants(NAME) is None
    first.say(Release(1))
    assert held() == 0


def test_only_questions_are_answered(first: Worker) -> None:
    assert first.offers(NAME, memfd()) and first.say(Release(1))
    with pytest.raises(MissedDeadlineTransient):
        first.channel.receive(NO_WAIT)
