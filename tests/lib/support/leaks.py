"""What a test may not leave changed in the process: fds, threads, mappings, children, variables, settings.

Resources are read from /proc, which lists them no matter which code created them. `watch()` compares before and after
and names new entries; a `Watcher` does so for one test after the other, and reads once between two of them. Of mappings
only shared memory (memfd, /dev/shm) counts, because libraries that a test loads stay mapped. Their list, which takes
most of the time, a `Watcher` reads if the size of the address space has changed; if another mapping of the same size
has gone, the next list shows it, at the latest that of `watch()` around the session. NumPy is imported before the first
snapshot, because BLAS starts its threads then.

The environment is read from Python, because /proc does not follow it. A setting is what the kernel, Python or nnfmq
keeps for the whole process, or for the thread of the tests. Of both, what is gone is named, too.

A thread that all users of nnfmq in the process share must not have ended while its owner counts on it: the tests after
this one would wait for it.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator, Sized
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from nnfmq.base import watcher
from nnfmq.hal.types import EXTENSION_TYPES
from nnfmq.observe import executions
from nnfmq.operations.declaration import REGISTRY
from nnfmq.operations.extensions import INSTALLED
from nnfmq.queue import aio, futex

GRACE_NS = 2_000_000_000
_SHARED_MEMORY = (b"/memfd:", b"/dev/shm/")
_GONE = (FileNotFoundError, ProcessLookupError)
_PYTEST_S = "PYTEST_CURRENT_TEST"

Held = dict[str, str]
"""What is held: what identifies it → what to say about it beyond that."""

_LIBUUID = "/var/lib/libuuid/clock.txt"  # libuuid keeps it open after the first UUID that a package asks for


def snapshot(*, is_exact: bool = True) -> Held:
    """Return the resources that this process holds now.

    Mappings are those of the last snapshot unless `is_exact`, or if the size of the address space has changed.
    """
    status = _Status.read()
    held = [*_descriptors(), *_threads(), *_shared_mappings(status, is_exact), *_children(), *_variables()]
    return dict(held) | {f"setting {name}: {value}": "" for name, value in _settings(status)} | _dead_threads()


class _Status(NamedTuple):
    """What /proc says about this process: the umask, the size of its address space, and a bit for each signal.

    The bit is set if the signal has a handler or is ignored.
    """

    umask: str
    size: str
    handled: int

    @classmethod
    def read(cls) -> _Status:
        status = _content("/proc/self/status").decode()
        umask, size, ignored, caught = (
            status.partition(f"\n{name}:\t")[2].partition("\n")[0] for name in ("Umask", "VmSize", "SigIgn", "SigCgt")
        )
        return cls(umask, size, int(ignored, 16) | int(caught, 16))


def _descriptors() -> Iterator[tuple[str, str]]:
    folder = os.open("/proc/self/fd", os.O_RDONLY)
    try:
        for number in os.listdir(folder):
            try:
                target = os.readlink(number, dir_fd=folder)
            except _GONE:  # the copy of `folder` that has listed it
                continue
            if target != _LIBUUID and int(number) != folder:
                yield f"descriptor {number} -> {target}", ""
    finally:
        os.close(folder)


def _threads() -> Iterator[tuple[str, str]]:
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    for number in os.listdir("/proc/self/task"):
        yield f"thread {number}", names.get(int(number), "(not one of Python)")


_last_mappings: dict[str, list[str]] = {}  # the size of the address space → what was mapped then


def _shared_mappings(status: _Status, is_exact: bool) -> Iterator[tuple[str, str]]:
    if is_exact or status.size not in _last_mappings:
        maps = _content("/proc/self/maps")
        lines = maps.splitlines() if any(part in maps for part in _SHARED_MEMORY) else ()  # seldom
        _last_mappings.clear()
        _last_mappings[status.size] = [line.decode() for line in lines if any(part in line for part in _SHARED_MEMORY)]
    for line in _last_mappings[status.size]:
        yield f"mapping {line}", ""


def _children() -> Iterator[tuple[str, str]]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return  # there is none
    for task in os.listdir("/proc/self/task"):
        with suppress(*_GONE):
            for child in _content(f"/proc/self/task/{task}/children").decode().split():
                yield f"child process {child}", _command(child)


def _content(path: str) -> bytes:
    """Return a file of /proc: after each of many thousand tests, so without layers above the calls."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return b"".join(iter(lambda: os.read(descriptor, 1 << 16), b""))
    finally:
        os.close(descriptor)


def _variables() -> Iterator[tuple[str, str]]:
    for name, value in os.environ.items():
        if name != _PYTEST_S:
            yield f"variable {name}={value}", ""


# Without that of pytest-timeout, which takes it back if a test fails.
_SIGNALS = sorted(map(int, signal.valid_signals() - {signal.SIGALRM}))
_LIMITS = {name: value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}
_TABLES: dict[str, Sized] = {
    "types of extensions": EXTENSION_TYPES,
    "extensions": INSTALLED,
    "declarations of operations": REGISTRY,
    "observers of preparations": executions._observers,
}


def _settings(status: _Status) -> Iterator[tuple[str, object]]:
    yield "CPUs of the thread", os.sched_getaffinity(0)
    yield "nice value of the thread", os.getpriority(os.PRIO_PROCESS, 0)
    yield "scheduling policy of the thread", os.sched_getscheduler(0)
    yield "timer slack of the thread", futex.timer_slack()
    yield "blocked signals", signal.pthread_sigmask(signal.SIG_BLOCK, ())
    for number in _SIGNALS:
        if status.handled >> (number - 1) & 1 and (handler := signal.getsignal(number)):
            yield f"handler of signal {number}", getattr(handler, "__qualname__", handler)
    for name, limit in _LIMITS.items():
        yield name, resource.getrlimit(limit)
    yield "umask", status.umask
    yield "working directory", os.getcwd()
    yield "import path", sys.path
    yield "garbage collector", (gc.isenabled(), gc.get_threshold())
    yield "switch interval", sys.getswitchinterval()
    yield "recursion limit", sys.getrecursionlimit()
    yield "tracing of allocations", tracemalloc.is_tracing()
    yield "NumPy's errors", np.geterr()
    ours = [log for name, log in logging.root.manager.loggerDict.items() if name.startswith("nnfmq")]
    for log in (logging.root, *ours):
        if isinstance(log, logging.Logger) and (log.level or log.handlers or log.disabled or not log.propagate):
            yield f"log {log.name}", (log.level, log.handlers, log.disabled, log.propagate)
    for name, table in _TABLES.items():
        yield f"number of {name}", len(table)


def _dead_threads() -> Held:
    """Return the threads that all users of nnfmq share, and that have ended although their owner counts on them."""
    shared = [watcher.thread(), *(waiter.thread for waiter in list(aio._waiter_pool._threads))]
    return {f"dead thread {thread.name}": "" for thread in shared if thread is not None and not thread.is_alive()}


def _command(pid: str) -> str:
    """Return a process's command line; a zombie has none."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except _GONE:
        words = ""
    return words or "(ended, not waited for)"


def _new_since(before: Held, now: Held) -> list[str]:
    new = sorted(f"{what} {more}".rstrip() for what, more in now.items() if what not in before)
    return new + sorted(
        f"no {what}" for what in before.keys() - now.keys() if what.startswith(("variable ", "setting "))
    )


def _settled(before: Held, deadline_ns: int, is_exact: bool) -> tuple[Held, list[str]]:
    """Return what is held, and the entries that are still new, after resources that are being released are gone.

    A joined thread's task and a hung-up child's entry leave /proc a moment later and nothing can be waited on for that,
    so this function polls; for a test without leaks the first snapshot is enough. It collects garbage each time: a
    thread that ends may leave a cycle.
    """
    now = snapshot(is_exact=is_exact)
    if _new_since(before, now):
        _close_own_bursts()
        gc.collect()
        now = snapshot()
    while (left := _new_since(before, now)) and time.monotonic_ns() < deadline_ns:
        time.sleep(0.005)
        gc.collect()
        now = snapshot()
    return now, left


def _close_own_bursts() -> None:
    """Close the bursts that open models keep for `execute` until two seconds after the last call."""
    for connection in _connections():
        connection.close_own_bursts()


def _wait_for_pages() -> None:
    """Wait for the drivers of open clients: with their first reply comes the page in which the client counts."""
    for connection in _connections():
        with suppress(sys.modules["nnfmq.hal.errors"].NnfmqError):  # of a driver that does not start
            connection.wait_until_ready(time.monotonic_ns() + GRACE_NS)


def _connections() -> Iterator[Any]:
    """Yield the open connections of this process."""
    module = sys.modules.get("nnfmq.client.connection.open_connections")  # the test may not have imported nnfmq
    for connection in list(module._connections) if module else ():
        if isinstance(connection, sys.modules["nnfmq.client.connection.connection"].Connection):
            yield connection


class Watcher:
    """Watches one test after the other. Each begins with what the last one ended with, so that /proc is read once.

    A plugin of pytest: what a fixture of several tests has opened or closed between two of them is read again.
    `is_exact`: whether mappings are read in any case.
    """

    def __init__(self, *, is_exact: bool = False) -> None:
        self._is_exact = is_exact
        self._held: Held | None = None
        self._exempt: Held = {}  # what the running test has opened for others, too

    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        """Let the next test begin with what the fixture opens."""
        if fixturedef.scope != "function":
            self._held = None

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        """Let the next test begin without what the fixture has closed."""
        if fixturedef.scope != "function":
            self._held = None

    @contextmanager
    def watch(self, grace_ns: int = GRACE_NS) -> Iterator[None]:
        """Fail with a list if the block leaks anything; wait up to `grace_ns` for resources that are being released."""
        _wait_for_pages()
        before, self._held, self._exempt = self._held or snapshot(), None, {}
        yield
        now, left = _settled(before | self._exempt, time.monotonic_ns() + grace_ns, self._is_exact)
        if left:
            pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)
        self._held = now

    @contextmanager
    def exemption(self) -> Iterator[None]:
        """Let the test that is watched keep what the block opens, for further tests."""
        before = snapshot()
        yield
        self._exempt |= {what: more for what, more in snapshot().items() if what not in before}


def watch(grace_ns: int = GRACE_NS) -> AbstractContextManager[None]:
    """Return a context manager that fails if its block leaks anything, see `Watcher.watch`."""
    return Watcher(is_exact=True).watch(grace_ns)
