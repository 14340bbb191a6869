"""The watcher: what it sees, whom it wakes, and that its thread lives as long as there is something to watch."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from support.forking import fork

from nnfmq.base import watcher
from nnfmq.base.channel import Channel
from nnfmq.hal.errors import DeadObject, ProtocolError
from nnfmq.queue import MessageQueue, PeerDeathFlag

LIMIT_S = 20
LONG_WINDOW_NS = 60_000_000_000  # a receive polls this long before it sleeps: for these tests, it never sleeps


@pytest.fixture
def pipe(resources: ExitStack) -> tuple[int, int]:
    read, write = os.pipe()
    resources.callback(os.close, read)
    return read, write


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        os.sched_yield()


def running() -> threading.Thread:
    thread = watcher.thread()
    assert thread is not None
    return thread


class Reader:
    """Reads what its watched descriptor has, and tells."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.called = threading.Event()
        self.got = b""
        self.on: threading.Thread | None = None

    def __call__(self) -> None:
        self.got = os.read(self._fd, 100)
        self.on = threading.current_thread()
        self.called.set()


@pytest.fixture
def queue(resources: ExitStack) -> MessageQueue:
    return resources.enter_context(MessageQueue.create(8, 16, label="watched", peer_death=PeerDeathFlag()))


# ------------------------------------------------------------------------------------------------ watching


def test_the_callback_of_a_readable_fd_is_called_on_the_watcher_thread(pipe: tuple[int, int]) -> None:
    read, write = pipe
    reader = Reader(read)
    watch = watcher.add_reader(read, reader)
    os.write(write, b"news")
    assert reader.called.wait(LIMIT_S)
    assert reader.got == b"news"
    assert reader.on is watcher.thread()
    assert running().name == watcher.THREAD_NAME
    watcher.remove_reader(watch)
    os.close(write)


def test_the_callback_is_called_each_time_the_fd_is_readable(pipe: tuple[int, int]) -> None:
    read, write = pipe
    reader = Reader(read)
    watch = watcher.add_reader(read, reader)
    os.write(write, b"one")
    assert reader.called.wait(LIMIT_S)
    reader.called.clear()
    os.write(write, b"two")
    assert reader.called.wait(LIMIT_S)
    assert reader.got == b"two"
    watcher.remove_reader(watch)
    os.close(write)


def test_a_hang_up_is_reported(resources: ExitStack) -> None:
    local, remote = Channel.pair()
    resources.callback(local.close)
    hung_up = threading.Event()
    watch = watcher.add_reader(local.fileno(), hung_up.set)
    remote.close()
    assert hung_up.wait(LIMIT_S)
    watcher.remove_reader(watch)


def test_the_exit_of_a_process_is_reported_by_its_pidfd(resources: ExitStack) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    resources.callback(process.communicate)
    pidfd = os.pidfd_open(process.pid)
    resources.callback(os.close, pidfd)
    ended = threading.Event()
    watch = watcher.add_reader(pidfd, ended.set)
    process.send_signal(signal.SIGKILL)
    assert ended.wait(LIMIT_S)
    watcher.remove_reader(watch)


def test_after_remove_reader_the_callback_is_not_called(pipe: tuple[int, int], resources: ExitStack) -> None:
    read, write = pipe
    resources.callback(os.close, write)
    called = threading.Event()
    watcher.remove_reader(watcher.add_reader(read, called.set))
    os.write(write, b"x")
    other_read, other_write = os.pipe()
    resources.callback(os.close, other_read)
    reader = Reader(other_read)
    other = watcher.add_reader(other_read, reader)  # once this is told the watcher has looked at everything
    os.write(other_write, b"y")
    os.close(other_write)
    assert reader.called.wait(LIMIT_S)
    watcher.remove_reader(other)
    assert not called.is_set()


def test_removing_a_reader_is_idempotent(pipe: tuple[int, int]) -> None:
    read, write = pipe
    first = watcher.add_reader(read, lambda: None)
    watcher.remove_reader(first)
    watcher.remove_reader(first)
    second = watcher.add_reader(read, lambda: None)
    watcher.remove_reader(first)
    assert watcher.thread() is not None
    watcher.remove_reader(second)
    os.close(write)


def test_a_callback_may_remove_its_own_reader(pipe: tuple[int, int]) -> None:
    read, write = pipe
    watches: list[watcher.ReaderHandle] = []
    done = threading.Event()

    def once() -> None:
        watcher.remove_reader(watches[0])
        done.set()

    watches.append(watcher.add_reader(read, once))
    thread = running()
    os.close(write)
    assert done.wait(LIMIT_S)
    thread.join(LIMIT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("error", [ProtocolError("broken"), OSError("broken")])
def test_UTL_9_a_callback_that_raises_loses_only_its_own_reader(
    error: Exception, pipe: tuple[int, int], resources: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    bad_read, bad_write = os.pipe()
    resources.callback(os.close, bad_read)
    read, write = pipe
    bad = watcher.add_reader(bad_read, fail)
    reader = Reader(read)
    good = watcher.add_reader(read, reader)
    with caplog.at_level(logging.ERROR, "nnfmq.watcher"):
        os.close(bad_write)
        until(lambda: "no longer watched" in caplog.text)
    os.write(write, b"alive")
    assert reader.called.wait(LIMIT_S)
    watcher.remove_reader(good)
    watcher.remove_reader(bad)
    os.close(write)


def test_an_owner_that_cannot_be_told_of_a_failure_does_not_end_the_thread(
    pipe: tuple[int, int], resources: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    read, write = pipe
    good = watcher.add_reader(read, reader := Reader(read))
    failing_fd = os.eventfd(1)
    resources.callback(os.close, failing_fd)
    watcher.add_reader(failing_fd, fail, fail)
    until(lambda: "the report of that failure failed" in caplog.text)
    os.write(write, b"alive")
    assert reader.called.wait(LIMIT_S)
    watcher.remove_reader(good)
    os.close(write)


def test_an_fd_that_epoll_rejects_leaves_no_thread_running() -> None:
    fd = os.open("/etc/passwd", os.O_RDONLY)
    with pytest.raises(PermissionError):
        watcher.add_reader(fd, lambda: None)
    os.close(fd)
    until(lambda: watcher.thread() is None)


def test_an_fd_that_is_watched_already_keeps_its_first_callback(pipe: tuple[int, int]) -> None:
    read, write = pipe
    reader = Reader(read)
    watch = watcher.add_reader(read, reader)
    with pytest.raises(FileExistsError):
        watcher.add_reader(read, lambda: None)
    os.write(write, b"first")
    assert reader.called.wait(LIMIT_S)
    watcher.remove_reader(watch)
    os.close(write)


# ------------------------------------------------------------------------------------------------ its thread


def test_without_readers_there_is_no_thread() -> None:
    until(lambda: watcher.thread() is None)


def test_the_thread_ends_with_the_last_reader_and_starts_again(pipe: tuple[int, int]) -> None:
    read, write = pipe
    first = watcher.add_reader(read, lambda: None)
    second = watcher.add_reader(write, lambda: None)
    thread = running()
    watcher.remove_reader(first)
    watcher.remove_reader(second)
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    third = watcher.add_reader(read, lambda: None)
    assert running() is not thread
    watcher.remove_reader(third)
    os.close(write)


def test_concurrent_starts_and_ends_lose_no_callback(start: Callable[..., Future[Any]]) -> None:
    def watch_once(_number: int) -> bytes:
        read, write = os.pipe()
        reader = Reader(read)
        watch = watcher.add_reader(read, reader)
        os.write(write, b"x")
        assert reader.called.wait(LIMIT_S)
        watcher.remove_reader(watch)
        os.close(read)
        os.close(write)
        return reader.got

    assert [future.result(LIMIT_S) for future in [start(watch_once, i) for i in range(200)]] == [b"x"] * 200


def no_descriptor(_value: int, _flags: int) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def no_thread(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


start_thread = threading.Thread.start


def interrupted(thread: threading.Thread) -> None:
    start_thread(thread)
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("where", "name", "failing", "error"),
    [
        (os, "eventfd", no_descriptor, OSError),
        (threading.Thread, "start", no_thread, RuntimeError),
        (threading.Thread, "start", interrupted, KeyboardInterrupt),
    ],
)
def test_a_failed_start_leaves_nothing_open_and_the_next_one_succeeds(
    where: Any,
    name: str,
    failing: Callable[..., Any],
    error: type[BaseException],
    pipe: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, write = pipe
    with monkeypatch.context() as patch:
        patch.setattr(where, name, failing)
        with pytest.raises(error):
            watcher.add_reader(read, lambda: None)
        assert watcher.thread() is None
    reader = Reader(read)
    watch = watcher.add_reader(read, reader)
    os.write(write, b"heard")
    assert reader.called.wait(LIMIT_S)
    watcher.remove_reader(watch)
    os.close(write)


def test_the_thread_does_not_delay_the_exit_of_the_process() -> None:
    script = "import os; from nnfmq.base import watcher; watcher.add_reader(os.pipe()[0], print)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=LIMIT_S)


def test_a_forked_child_has_no_watcher_and_can_start_its_own(pipe: tuple[int, int]) -> None:
    read, write = pipe
    watch = watcher.add_reader(read, lambda: None)
    pid = fork()
    if pid == 0:
        status = 70
        try:
            status = child_report()
        finally:
            os._exit(status)  # never back into pytest
    _, status = os.waitpid(pid, 0)
    watcher.remove_reader(watch)
    os.close(write)
    assert os.waitstatus_to_exitcode(status) == 0


def links_of_descriptors() -> list[str]:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that listed the folder
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return links


def child_report() -> int:
    """Return 0 if all is well in a forked child."""
    if watcher.thread() is not None or len(os.listdir("/proc/self/task")) != 1:
        return 1
    if any("eventpoll" in link or "eventfd" in link for link in links_of_descriptors()):
        return 2
    read, write = os.pipe()
    reader = Reader(read)
    watcher.add_reader(read, reader)
    os.write(write, b"x")
    return 0 if reader.called.wait(LIMIT_S) else 3


# ------------------------------------------------------------------------------------------------ peer death


def notify_and_wait(peer: watcher.DeathRecipients) -> None:
    """Notify of peer death, and wait until the watcher has finished."""
    watcher.notify_peer_death(peer)
    thread = watcher.thread()
    if thread is not None:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


@pytest.fixture
def peer(queue: MessageQueue) -> watcher.DeathRecipients:
    peer = watcher.DeathRecipients(queue.peer_death)
    peer.add(queue)
    return peer


def test_UTL_9_the_peer_death_flag_is_set_when_notify_peer_death_returns(
    peer: watcher.DeathRecipients, queue: MessageQueue
) -> None:
    watcher.notify_peer_death(peer)
    assert queue.peer_death.is_set()
    with pytest.raises(DeadObject):
        queue.receive(None, 0)


@pytest.mark.parametrize("window_ns", [0, LONG_WINDOW_NS], ids=["asleep", "polling"])
def test_UTL_9_a_thread_blocked_on_a_dead_peer_is_woken(
    window_ns: int, peer: watcher.DeathRecipients, queue: MessageQueue, start: Callable[..., Future[Any]]
) -> None:
    waiting = start(queue.receive, None, window_ns)
    until(lambda: queue.waiters)
    begin = time.monotonic()
    notify_and_wait(peer)
    assert isinstance(waiting.exception(LIMIT_S), DeadObject)
    assert time.monotonic() - begin < 5
    assert queue.waiters == 0


@pytest.mark.parametrize("window_ns", [0, 20_000], ids=["asleep", "polling a little"])
def test_UTL_9_peer_death_at_any_moment_of_a_wait_leaves_no_thread_asleep(
    window_ns: int, resources: ExitStack, start: Callable[..., Future[Any]]
) -> None:
    for round in range(100):
        peer_death = PeerDeathFlag()
        with MessageQueue.create(8, 16, label="watched", peer_death=peer_death) as queue:
            peer = watcher.DeathRecipients(peer_death)
            peer.add(queue)
            waiting = start(queue.receive, None, window_ns)
            for _ in range(round * 20):
                pass  # another moment each time
            watcher.notify_peer_death(peer)
            assert isinstance(waiting.exception(LIMIT_S), DeadObject)
            peer.discard(queue)


def test_UTL_9_a_blocked_write_ends_on_peer_death_too(
    peer: watcher.DeathRecipients, queue: MessageQueue, start: Callable[..., Future[Any]]
) -> None:
    assert queue.write(bytes(8 * 16))
    waiting = start(queue.write_blocking, bytes(8), None)
    until(lambda: queue.waiters)
    notify_and_wait(peer)
    assert isinstance(waiting.exception(LIMIT_S), DeadObject)


def test_only_the_queues_of_the_dead_peer_are_woken(resources: ExitStack, start: Callable[..., Future[Any]]) -> None:
    peer_death, alive = PeerDeathFlag(), PeerDeathFlag()
    doomed = [resources.enter_context(MessageQueue.create(8, 16, peer_death=peer_death)) for _ in range(3)]
    other = resources.enter_context(MessageQueue.create(8, 16, peer_death=alive))
    peer = watcher.DeathRecipients(peer_death)
    peer.add(*doomed)
    waiting = [start(queue.receive, None, 0) for queue in doomed]
    bystander = start(other.receive, None, 0)
    until(lambda: all(queue.waiters for queue in (*doomed, other)))
    notify_and_wait(peer)
    assert all(isinstance(one.exception(LIMIT_S), DeadObject) for one in waiting)
    assert not bystander.done()
    other.send(bytes(8))
    assert bystander.result(LIMIT_S) == bytes(8)


class Sleepy:
    """Pretends to have a waiter that misses the first few wake-ups, between its look at the flag and its sleep."""

    def __init__(self, misses: int) -> None:
        self.waiters = 1
        self.woken = 0
        self._misses = misses

    def wake_all(self) -> None:
        self.woken += 1
        self.waiters = int(self.woken <= self._misses)


def test_a_waiter_that_missed_its_wake_up_is_woken_again_until_it_returns() -> None:
    flag, sleepy = PeerDeathFlag(), Sleepy(misses=5)
    peer = watcher.DeathRecipients(flag)
    peer.add(sleepy)
    notify_and_wait(peer)
    assert sleepy.woken == 6
    assert sleepy.waiters == 0


def test_a_queue_that_cannot_be_woken_does_not_end_the_thread_that_others_need(
    pipe: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Sleepy):
        def wake_all(self) -> None:
            super().wake_all()
            if threading.current_thread() is watcher.thread():
                raise ZeroDivisionError

    read, write = pipe
    good = watcher.add_reader(read, reader := Reader(read))
    peer = watcher.DeathRecipients(PeerDeathFlag())
    peer.add(Broken(misses=3))
    watcher.notify_peer_death(peer)
    until(lambda: "could not be woken" in caplog.text)
    os.write(write, b"alive")
    assert reader.called.wait(LIMIT_S)
    watcher.remove_reader(good)
    os.close(write)


def test_a_queue_that_was_discarded_is_not_woken() -> None:
    sleepy = Sleepy(misses=0)
    peer = watcher.DeathRecipients(PeerDeathFlag())
    peer.add(sleepy)
    peer.discard(sleepy)
    notify_and_wait(peer)
    assert sleepy.woken == 0


def test_UTL_9_notify_peer_death_is_idempotent(peer: watcher.DeathRecipients) -> None:
    notify_and_wait(peer)
    notify_and_wait(peer)


def test_notify_peer_death_can_be_called_on_the_watcher_thread(
    peer: watcher.DeathRecipients, queue: MessageQueue, resources: ExitStack, start: Callable[..., Future[Any]]
) -> None:
    local, remote = Channel.pair()
    resources.callback(local.close)
    watches: list[watcher.ReaderHandle] = []

    def hung_up() -> None:
        watcher.remove_reader(watches[0])
        watcher.notify_peer_death(peer)

    watches.append(watcher.add_reader(local.fileno(), hung_up))
    waiting = start(queue.receive, None, 0)
    until(lambda: queue.waiters)
    remote.close()
    assert isinstance(waiting.exception(LIMIT_S), DeadObject)


# ------------------------------------------------------------------------------------------------ timers


def test_a_timer_expires_on_the_watcher_thread_not_before_its_time() -> None:
    rung, seen = threading.Event(), list[tuple[int, threading.Thread]]()

    def action() -> None:
        seen.append((time.monotonic_ns(), threading.current_thread()))
        rung.set()

    at_ns = time.monotonic_ns() + 20_000_000
    watcher.call_at(at_ns, action)
    assert rung.wait(LIMIT_S)
    assert seen[0][0] >= at_ns
    assert seen[0][1].name == watcher.THREAD_NAME
    until(lambda: watcher.thread() is None)


def test_timers_expire_in_the_order_of_their_times() -> None:
    rung, order = threading.Event(), list[int]()
    now = time.monotonic_ns()
    watcher.call_at(now + 60_000_000, rung.set)
    for milliseconds in (40, 20, 30):
        watcher.call_at(now + milliseconds * 1_000_000, lambda ms=milliseconds: order.append(ms))  # type: ignore[misc]
    assert rung.wait(LIMIT_S)
    assert order == [20, 30, 40]


def test_a_timer_that_is_due_expires_immediately() -> None:
    rung = threading.Event()
    watcher.call_at(0, rung.set)
    assert rung.wait(LIMIT_S)


def test_a_cancelled_timer_does_not_expire_and_keeps_no_thread() -> None:
    rung, later = threading.Event(), threading.Event()
    timer = watcher.call_at(time.monotonic_ns() + 10_000_000, rung.set)
    watcher.cancel_timer(timer)
    watcher.cancel_timer(timer)
    watcher.call_at(time.monotonic_ns() + 20_000_000, later.set)
    assert later.wait(LIMIT_S)
    assert not rung.is_set()
    distant = watcher.call_at(2**63 - 1, rung.set)
    thread = running()
    watcher.cancel_timer(distant)
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_a_timer_whose_callback_raises_is_logged_and_others_expire(caplog: pytest.LogCaptureFixture) -> None:
    rung = threading.Event()

    def action() -> None:
        raise ZeroDivisionError

    watcher.call_at(0, action)
    watcher.call_at(time.monotonic_ns() + 1_000_000, rung.set)
    assert rung.wait(LIMIT_S)
    assert "a timer's callback failed" in caplog.text
