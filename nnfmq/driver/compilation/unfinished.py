"""Compilations that go on when nobody waits for them any more, and the process in which they do.

A short program would otherwise never see the compiled program: its compilations would end with it at each start. The
process prepares the models again, from copies of the client's files, stores the programs, and exits
of its own. It depends on nobody: not on the client, the driver or its compile server, and has no socket.

A worker may not start it, so it asks its supervisor; an embedded driver does itself. The process has a sandbox, too: it
writes to the cache directory only.

It is bounded. At most one runs for a cache directory, on which it holds a lock (flock(2)); what comes meanwhile is
compiled when it is prepared next. It ends after $NNFMQ_COMPILE_AFTER_EXIT_S, has one thread, the worker's limit of
private memory, and the priority of a background compilation. A driver that SIGTERM ends starts none.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Self

import msgspec
from msgspec.structs import replace

from nnfmq.base import settings
from nnfmq.base.channel import close_all
from nnfmq.base.memory import Memory, write_all
from nnfmq.base.paths import make_cache_directory
from nnfmq.base.processes import child_environment
from nnfmq.base.sandbox.sandbox import enter
from nnfmq.base.scheduling import BACKGROUND_NICE, lower_priority
from nnfmq.base.upgrades import loaded_stamp, require_unchanged, watch_package
from nnfmq.driver.cache.programs import cache_limit_bytes
from nnfmq.driver.cache.shared import shared_cache
from nnfmq.driver.compilation.jobs import PrepareContext, current_prepare_context, prepare_context
from nnfmq.driver.compilation.process import set_session_priority
from nnfmq.driver.devices.builtin import CompiledDevice
from nnfmq.driver.devices.configuration import DeviceEntry
from nnfmq.driver.memory.private import copy_constant_pools
from nnfmq.driver.memory.quota import adopt_files, limit_private_memory, quota_limit_bytes
from nnfmq.driver.process.children import reap_later, start_detached
from nnfmq.driver.process.sandboxes import detached_sandbox
from nnfmq.hal.deterministic import is_deterministic
from nnfmq.hal.errors import NnfmqError
from nnfmq.serialize.messages import MemoryData, PrepareModel, hints_from_data
from nnfmq.serialize.messages.common import HintData, PrefixData
from nnfmq.serialize.models import decode_model

__all__ = ["DETACHED_OPTION", "CompileRequest", "UnfinishedCompilation", "go_on_without_client", "main", "start"]

DETACHED_OPTION = "--compile"
_LABEL = "nnfmq-compile"
_starting = threading.Lock()  # so that a main thread that exits waits for another thread that starts the process
_log = logging.getLogger("nnfmq.background_compile")


class CompileRequest(msgspec.Struct, frozen=True, array_like=True):
    """A model that a process of its own compiles. An fd for each of `pools` comes with it."""

    device: str
    model: bytes
    pools: tuple[MemoryData, ...]
    hints: tuple[HintData, ...] = ()
    extensions: tuple[PrefixData, ...] = ()


class UnfinishedCompilation:
    """A preparation that another process can go on with: the message, and fds of the client's files. Close it."""

    def __init__(self, message: PrepareModel, fds: Sequence[int]) -> None:
        options = message.hints, message.extensions
        self.request = CompileRequest(message.device, message.model, message.pools, *options)
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
        """Return the compilation that the message asks for; None if its result would not be kept. Borrows `fds`."""
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
        pools = [fd for _, fds in taken for fd in fds]
        try:
            if taken:
                _start_or_request([request for request, _ in taken], pools, exits)
        except (OSError, RuntimeError, NnfmqError, MemoryError) as error:
            _log.warning("a compilation ends with its client: %s", error)
        finally:
            close_all(pools)


def _start_or_request(requests: list[CompileRequest], pools: Sequence[int], exits: bool) -> None:
    """Start the process, or, in a worker, let the supervisor start it: a worker starts no programs."""
    data, supervisor = msgspec.msgpack.encode(requests), shared_cache()
    with Memory.create_constant(len(data), lambda fd: write_all(fd, data), _LABEL) as memory:
        if supervisor is not None:
            supervisor.go_on(memory, pools)
            return
        pid = start(memory.fileno(), pools)
        if pid is not None and not exits:
            reap_later(pid)


def start(requests: int, pools: Sequence[int]) -> int | None:
    """Start the process and return its pid; None if another one runs. Borrows the fds.

    Raises:
        DeviceUnavailable: If the cache directory cannot be used, or nnfmq was upgraded under this process.
        OSError: If the system lacks processes, memory or fds.
        RuntimeError: If the user has no home directory.
    """
    require_unchanged()
    lock = _take_lock()
    if lock is None:
        return None
    try:
        fds = (lock, requests, *pools)
        words = [loaded_stamp(), str(settings.COMPILE_AFTER_EXIT_S.value()), *map(str, fds)]
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


# ----------------------------------------------------------------------------------------------------------------------
# The process that compiles models whose client has left.
#
#     python -P -m nnfmq --compile STAMP LIMIT_S LOCK_FD REQUESTS_FD POOL_FD...
#
# It has no connection to anybody, and its standard streams are /dev/null. SIGALRM ends it after LIMIT_S seconds. A
# program that is in the cache meanwhile, because another worker has compiled it, is not compiled again.


def main(words: Sequence[str]) -> int:
    """Compile what the arguments say, and return the exit status. The lock is held until the process exits.

    STAMP is that of the driver's package (`base.upgrades`).
    """
    watch_package(words[0])
    limit_s, (_lock_fd, requests_fd, *pool_fds) = float(words[1]), list(map(int, words[2:]))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    os.chdir("/")  # keep no file system in use
    lower_priority(is_background=True)
    set_session_priority(BACKGROUND_NICE)
    limit_private_memory(quota_limit_bytes())
    enter(detached_sandbox())
    deadline_ns = time.monotonic_ns() + int(limit_s * 1e9)
    with prepare_context(PrepareContext(deadline_ns, is_background=True)):
        for request, fds in _received(requests_fd, pool_fds):
            try:
                _compile(request, fds)
            except NnfmqError as error:
                _log.warning("a model whose client has left is not compiled: %s", error)
    return 0


def _received(requests_fd: int, pool_fds: list[int]) -> Iterator[tuple[CompileRequest, list[int]]]:
    data = os.pread(requests_fd, os.fstat(requests_fd).st_size, 0)
    for request in msgspec.msgpack.decode(data, type=list[CompileRequest]):
        yield request, [pool_fds.pop(0) for _ in request.pools]


def _compile(request: CompileRequest, fds: list[int]) -> None:
    """Compile a model into the cache. Raises NnfmqError. The client is not trusted: everything is checked again."""
    device = CompiledDevice(DeviceEntry(request.device, engine="compiled"))
    pools = copy_constant_pools(adopt_files(fds, request.pools), _no_check)
    model = decode_model(request.model, pools, _no_check)
    hints, extensions = hints_from_data(request.hints, request.extensions)
    model = device.check_prepare_arguments(model, *_ANY, hints=hints, extensions=extensions)
    context = replace(current_prepare_context(), is_deterministic=is_deterministic(hints, extensions))
    with prepare_context(context):
        device.prepare_model(model)


_ANY = (0, 0, None)  # preference and priority do not change the program; no deadline


def _no_check() -> None:
    """Go on: nobody waits for the model."""
