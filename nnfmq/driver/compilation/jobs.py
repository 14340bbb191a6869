"""Compilation of one model's kernels in compile processes, on behalf of a prepareModel call.

The kernels are divided into parts, a few for each process; a process gets the next part when it has returned one. The
worker does not load LLVM, unless there is no compile server: then it compiles itself. If the call fails, misses its
deadline, or the worker dies, the connections to its processes close, and the processes exit. If the compile server
dies, its processes do as well, and those of the next one compile the model.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Self

import msgspec
from msgspec import Struct

from nnfmq.base.channel import NO_WAIT, Channel
from nnfmq.base.ownership import Closable
from nnfmq.base.processes import allowed_cpus
from nnfmq.driver.compilation.server import FORK, FORK_BACKGROUND, PREFETCH, CompileResult, fork_compile_server
from nnfmq.engines.execution import TieredProgram
from nnfmq.hal.errors import (
    DeadObject,
    ErrorStatus,
    GeneralFailure,
    MissedDeadlineTransient,
    NnfmqError,
    ResourceExhaustedTransient,
    error_for_status,
)

if TYPE_CHECKING:
    from nnfmq.engines.compiled.kernels import Kernel
    from nnfmq.engines.compiled.target import Target

__all__ = [
    "PROCESSES_MAX",
    "PrepareContext",
    "compile_in_processes",
    "current_prepare_context",
    "no_progress",
    "prefetch_imports",
    "prepare_context",
    "start_compile_server",
    "tier_up",
]

PROCESSES_MAX = 16  # for one model: none has kernels for more
_ATTEMPTS = 2  # to compile a model in processes, if the compile server dies
_PARTS_PER_PROCESS = 4  # so that the processes finish at about the same time, and progress can be reported
_START_TIMEOUT_S = 5.0  # for the fork and the import of the compiler; the supervisor or the server may be stopped
_STATUS_TIMEOUT_S = 1.0  # between the exit of a process and the server's report of its status
_POLL_MS_MAX = 2**31 - 1  # poll(2) takes an int
_LATE = "the deadline passed while the model was compiled"
_log = logging.getLogger("nnfmq.compiler")


def no_progress(_done: int, _total: int) -> None:
    """Ignore progress: a callback for `PrepareContext.on_progress`."""


class PrepareContext(Struct, frozen=True):
    """Deadline and progress callback of a prepareModel call.

    `deadline_ns` is a time of the monotonic clock. `on_progress` gets the number of compiled kernels, and of all.
    `is_background` tells that no caller waits for the compilation.
    """

    deadline_ns: int | None = None
    on_progress: Callable[[int, int], None] = no_progress
    is_background: bool = False

    def report(self, done: int, total: int) -> None:
        """Report progress.

        Raises:
            MissedDeadlineTransient: If the deadline has passed.
        """
        if self.deadline_ns is not None and time.monotonic_ns() >= self.deadline_ns:
            raise MissedDeadlineTransient(_LATE)
        self.on_progress(done, total)


_UNLIMITED = PrepareContext()
_context: ContextVar[PrepareContext] = ContextVar("prepare_context", default=_UNLIMITED)


@contextmanager
def prepare_context(context: PrepareContext) -> Iterator[None]:
    """Let compilations of this thread within the block use `context`."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def current_prepare_context() -> PrepareContext:
    """Return the context of this thread's compilations; one without deadline and callback outside `prepare_context`."""
    return _context.get()


_server: Channel | None = None  # or to the supervisor; all threads use it without a lock, because a FORK is one frame


def connect_compile_server(fd: int) -> None:
    """Let this worker compile in processes of its supervisor's compile server. Takes ownership of `fd`."""
    global _server  # noqa: PLW0603  one for each process, as the watcher's thread
    _server = Channel.adopt(fd)


def start_compile_server(client_pidfd: int | None) -> None:
    """Start this process's own compile server, if llvmlite is installed. Call it before the process starts threads.

    The server kills this process if it outlives its client, the process of `client_pidfd`, which is borrowed.
    """
    global _server
    if find_spec("llvmlite") is not None:
        try:
            _server, _ = fork_compile_server(client_pidfd=client_pidfd)
        except (OSError, GeneralFailure) as error:
            _log.warning("models are compiled in this process: %s", error)


def prefetch_imports() -> None:
    """Let the compile server import the compiler, because a compilation will follow. Does not block."""
    if _server is not None:
        with suppress(DeadObject, MissedDeadlineTransient):
            _server.send(PREFETCH, (), NO_WAIT)


def compile_in_processes(kernels: Sequence[Kernel], target: Target) -> list[bytes]:
    """Compile kernels in the current `PrepareContext`; return object code in parts. Blocks. The engine's `Compile`.

    Raises:
        GeneralFailure: If a compile process dies.
        MissedDeadlineTransient: If the deadline passes.
        ResourceExhaustedTransient: If there is not enough memory, or no process can be started.
    """
    from nnfmq.engines.compiled.kernel_compilation import compile_shards, shard_kernels, unique_kernels

    different = unique_kernels(kernels)
    context = current_prepare_context()
    if _server is not None:
        count = min(allowed_cpus(), PROCESSES_MAX)
        parts = shard_kernels(different, count * _PARTS_PER_PROCESS)
        for _ in range(_ATTEMPTS):
            with suppress(_ServerDiedError), ExitStack() as stack:
                processes = _start_processes(_server, min(count, len(parts)), stack, context)
                if not processes:
                    break
                return _Job(parts, target, processes, context).run()
            _log.warning("the compile server has died during a compilation")
    return compile_shards(shard_kernels(different, _PARTS_PER_PROCESS), target, context.report)


def _start_processes(server: Channel, count: int, stack: ExitStack, context: PrepareContext) -> list[_Process]:
    """Start compile processes, which `stack` ends. Return an empty list if the server has exited or does not fork.

    Raises:
        GeneralFailure: If a process has died.
        MissedDeadlineTransient: If the deadline passes.
        ResourceExhaustedTransient: If no process can be started.
    """
    deadline_ns, limit_ns = context.deadline_ns, time.monotonic_ns() + int(_START_TIMEOUT_S * 1e9)
    is_limited_by_deadline = deadline_ns is not None and deadline_ns < limit_ns
    try:
        processes = [stack.enter_context(_Process.start(server, context)) for _ in range(count)]
        for process in processes:
            process.wait_until_ready(deadline_ns if is_limited_by_deadline else limit_ns)
    except DeadObject:
        _log.warning("the compile server has exited: models are compiled in the worker from now on")
        return []
    except MissedDeadlineTransient:
        if is_limited_by_deadline:
            raise MissedDeadlineTransient(_LATE) from None
        _log.warning("no compile process has started within %g s: the worker compiles this model", _START_TIMEOUT_S)
        return []
    except OSError as error:
        raise ResourceExhaustedTransient(f"no compile process can be started: {error.strerror}") from error
    return processes


class _ServerDiedError(GeneralFailure):
    """A compile process has ended because the compile server, which would report its exit status, has."""


class _Process(Closable):
    """The worker's connection to a compile process. Closing it ends the process immediately."""

    def __init__(self, channel: Channel, status_pipe: int) -> None:
        self.channel = channel
        self._status_pipe = status_pipe

    @classmethod
    def start(cls, server: Channel, context: PrepareContext) -> Self:
        """Let the server fork a compile process.

        Raises:
            DeadObject: If the server has exited.
            MissedDeadlineTransient: If the server does not accept the message before the deadline.
            OSError: If this process has no free fds.
        """
        with ExitStack() as undo:
            local, remote = Channel.pair()
            undo.callback(local.close)
            with remote:
                status_pipe, server_end = os.pipe2(os.O_CLOEXEC)
                undo.callback(os.close, status_pipe)
                try:
                    kind = FORK_BACKGROUND if context.is_background else FORK
                    server.send(kind, (remote.fileno(), server_end), context.deadline_ns)
                finally:
                    os.close(server_end)
            undo.pop_all()
        return cls(local, status_pipe)

    def wait_until_ready(self, deadline_ns: int | None) -> None:
        """Wait until the process has been forked.

        Raises:
            GeneralFailure: If it has died.
            MissedDeadlineTransient: If the deadline passes.
        """
        try:
            self.channel.receive(deadline_ns).close()
        except DeadObject:
            raise self.death_error() from None

    def result(self) -> bytes:
        """Return the object code that the process has sent. Does not block.

        Raises:
            GeneralFailure: If the process has died.
            NnfmqError: The error that the process reported.
        """
        try:
            with self.channel.receive(NO_WAIT) as frame:
                result = msgspec.msgpack.decode(frame.data, type=CompileResult)
        except DeadObject:
            raise self.death_error() from None
        if result.status is not ErrorStatus.NONE:
            raise error_for_status(result.status, result.message)
        return result.code

    def death_error(self) -> GeneralFailure:
        """Return the error for a process that has died, with its exit status if the server reports it in time."""
        poll = select.poll()
        poll.register(self._status_pipe, select.POLLIN)
        is_ready = bool(poll.poll(_STATUS_TIMEOUT_S * 1000))
        status = os.read(self._status_pipe, 16).decode() if is_ready else ""
        if is_ready and not status:
            return _ServerDiedError("the compile server has died")
        return GeneralFailure(f"the process that compiled the model {_describe_exit(status)}; prepare it again")

    def close(self) -> None:
        """End the process, unless it has ended."""
        self.channel.close()
        os.close(self._status_pipe)


def _describe_exit(status: str) -> str:
    if not status:
        return "has ended"
    if not status.startswith("-"):
        return f"ended with status {status}"
    number = -int(status)
    name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
    return f"was ended by {name}{' (is there enough memory?)' if name in ('SIGKILL', 'SIGABRT') else ''}"


class _Job:
    """The compilation of one model's parts in its processes."""

    def __init__(
        self, parts: Sequence[Sequence[Kernel]], target: Target, processes: Sequence[_Process], context: PrepareContext
    ) -> None:
        self._parts = parts
        self._target = target
        self._processes = {process.channel.fileno(): process for process in processes}
        self._context = context
        self._codes = [b""] * len(parts)
        self._current: dict[int, int] = {}  # fd of a process → index of the part that it compiles
        self._sent = self._kernels_done = 0
        self._poll = select.poll()

    def run(self) -> list[bytes]:
        """Return the object code of each part. Blocks."""
        total = sum(map(len, self._parts))
        self._context.report(0, total)
        for fd in self._processes:
            self._poll.register(fd, select.POLLIN)
            self._send_next(fd)
        while self._current:
            for fd, _ in self._poll.poll(self._timeout_ms()):
                index = self._current.pop(fd)
                self._codes[index] = self._processes[fd].result()
                self._kernels_done += len(self._parts[index])
                self._send_next(fd)
            self._context.report(self._kernels_done, total)  # raises if the deadline ended the poll
        return self._codes

    def _timeout_ms(self) -> float | None:
        deadline_ns = self._context.deadline_ns
        return None if deadline_ns is None else min(max(0.0, (deadline_ns - time.monotonic_ns()) / 1e6), _POLL_MS_MAX)

    def _send_next(self, fd: int) -> None:
        """Send the next part to a process. If none is left, stop polling the process."""
        from nnfmq.engines.compiled.kernel_compilation import encode_kernels

        if self._sent == len(self._parts):
            self._poll.unregister(fd)
            return
        process, index = self._processes[fd], self._sent
        try:
            process.channel.send(encode_kernels(self._parts[index], self._target), (), self._context.deadline_ns)
        except DeadObject:
            raise process.death_error() from None
        self._current[fd] = index
        self._sent += 1


# ----------------------------------------------------------------------------------------------------------------------
# Background compilation of models prepared with FAST_SINGLE_ANSWER (tier-up).
#
# The model first runs on its baseline program; this job compiles it and replaces the program. The job holds a weak
# reference only: if the model is released, a job that waits is dropped, and a running one stops after the part that is
# being compiled. If compiling fails, the model keeps the baseline program, and a warning is logged.


_background_log = logging.getLogger("nnfmq.background_compile")


def tier_up(program_ref: weakref.ref[TieredProgram]) -> None:
    """Compile a program and let the result replace it, if the program is still in use. Blocks; raises nothing."""
    program = program_ref()
    compile_program = None if program is None else program.compile_program
    del program  # no strong reference while compiling
    if compile_program is None:
        return
    compiled = None
    try:
        on_progress = partial(_require_in_use, program_ref)
        with prepare_context(PrepareContext(on_progress=on_progress, is_background=True)):
            compiled = compile_program()
    except NnfmqError as error:
        level = logging.DEBUG if program_ref() is None else logging.WARNING
        _background_log.log(level, "a model stays on its baseline program: %s", error)
    except Exception:  # noqa: BLE001  code of a plug-in may raise anything
        _background_log.exception("a model stays on its baseline program")
    program = program_ref()
    if program is None:
        return
    if compiled is None:
        program.stay()
    else:
        program.tier_up(compiled)


def _require_in_use(program_ref: weakref.ref[TieredProgram], _done: int, _total: int) -> None:
    """Abort a compilation whose program has been released."""
    if program_ref() is None:
        raise GeneralFailure("the model was released before it was compiled")
