"""Compilations that go on when nobody waits for them any more: a process of its own fills the driver's cache.

A short program would otherwise never see the compiled program: its compilations would end with it at each start. The
process prepares the models again, from copies of the client's files, stores the programs, and exits
(`detached_compile`). It depends on nobody: not on the client, the driver or its compile server, and has no socket.

It is bounded. At most one runs for a cache directory, on which it holds a lock (flock(2)); what comes meanwhile is
compiled when it is prepared next. It ends after $NNFMQ_COMPILE_AFTER_EXIT_S, has one thread, the worker's limit of
private memory, and the priority of a background compilation. A driver that SIGTERM ends starts none.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Sequence
from typing import Self

import msgspec

from nnfmq import settings
from nnfmq.channel import close_all
from nnfmq.child_environment import child_environment
from nnfmq.hal.errors import NnfmqError
from nnfmq.memory import Memory
from nnfmq.paths import make_cache_directory
from nnfmq.serialize.messages import MemoryData, PrepareModel
from nnfmq.service.caching.program_cache import cache_limit_bytes
from nnfmq.service.child_process import reap_later, start_detached

__all__ = ["DETACHED_OPTION", "CompileRequest", "UnfinishedCompilation", "go_on_without_client"]

DETACHED_OPTION = "--compile"
_LABEL = "nnfmq-compile"
_starting = threading.Lock()  # so that a main thread that exits waits for another thread that starts the process
_log = logging.getLogger("nnfmq.background_compile")


class CompileRequest(msgspec.Struct, frozen=True, array_like=True):
    """A model that a process of its own compiles. An fd for each of `pools` comes with it."""

    device: str
    model: bytes
    pools: tuple[MemoryData, ...]


class UnfinishedCompilation:
    """What another process needs to prepare a model: the message, and fds of the client's files. Close it."""

    def __init__(self, message: PrepareModel, fds: Sequence[int]) -> None:
        self.request = CompileRequest(message.device, message.model, message.pools)
        self._fds: list[int] = []
        self._lock = threading.Lock()  # held while fds are closed, or duplicated for another process
        try:
            for fd in fds[: len(message.pools)]:
                self._fds.append(os.dup(fd))
        except OSError:
            self.close()
            raise

    @classmethod
    def of(cls, message: PrepareModel, fds: Sequence[int]) -> Self | None:
        """Return what is unfinished while the message is handled; None if nothing would be kept. Borrows `fds`."""
        if not settings.COMPILE_AFTER_EXIT_S.value() or not cache_limit_bytes():
            return None
        try:
            return cls(message, fds)
        except OSError:  # no fds are left: it ends with the client
            return None

    def take(self) -> tuple[CompileRequest, list[int]] | None:
        """Return the request and new fds of its pools, which the caller owns; None if this is closed."""
        with self._lock:
            if self.request.pools and not self._fds:
                return None
            return self.request, [os.dup(fd) for fd in self._fds]

    def close(self) -> None:
        """Close the files. Idempotent."""
        with self._lock:
            fds, self._fds = self._fds, []
        close_all(fds)


def go_on_without_client(unfinished: Sequence[UnfinishedCompilation], *, exits: bool = False) -> None:
    """Start a process that compiles these models, unless one runs already. Does not wait for it. Raises nothing.

    With `exits` this process exits next, and does not reap it.
    """
    with _starting:
        taken = [found for found in (each.take() for each in unfinished) if found is not None]
        fds = [fd for _, pools in taken for fd in pools]
        try:
            pid = _start([request for request, _ in taken], fds) if taken else None
            if pid is not None and not exits:
                reap_later(pid)
        except (OSError, RuntimeError, NnfmqError, MemoryError) as error:
            _log.warning("a compilation ends with its client: %s", error)
        finally:
            close_all(fds)


def _start(requests: list[CompileRequest], pool_fds: Sequence[int]) -> int | None:
    """Start the process and return its pid; None if another one runs. Borrows the fds."""
    lock = _take_lock()
    if lock is None:
        return None
    data = msgspec.msgpack.encode(requests)
    try:
        with Memory.create_constant(len(data), lambda fd: os.pwrite(fd, data, 0), _LABEL) as memory:
            fds = (lock, memory.fileno(), *pool_fds)
            words = [str(settings.COMPILE_AFTER_EXIT_S.value()), *map(str, fds)]
            return start_detached([DETACHED_OPTION, *words], fds, child_environment())
    finally:
        os.close(lock)


def _take_lock() -> int | None:
    """Return an fd with the lock on the cache directory, which its copies keep; None if the lock is held."""
    fd = os.open(make_cache_directory(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd
