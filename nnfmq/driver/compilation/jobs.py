"""Compilation of one model's kernels in compile processes, on behalf of a prepareModel call.

The kernels are divided into parts, a few for each process. A process gets the next part when it has returned one, and
has another one meanwhile: the worker packs constants before it looks at what has arrived. A process may have to wait
for its turn among those of other clients, and end when it has had it: another one then gets the parts that it has not
returned, and one that has nothing left to do gets those of one that waits. The client is charged with the memory that
the processes have taken, as long as they exist. The worker does not load LLVM, unless there is no compile server: then
it compiles itself. If the call fails, misses its deadline, or the worker dies, the connections to its processes close,
and the processes exit. If the compile server dies, its processes do as well, and those of the next one compile the
model.
"""

from __future__ import annotations

import logging
import select
import signal
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, NoReturn, Protocol, Self

import msgspec
from msgspec import Struct

from nnfmq.base.channel import NO_WAIT, Channel
from nnfmq.base.ownership import Closable
from nnfmq.driver.compilation.process import QUEUED, READY, TURN_IS_OVER, CompileResult, error_of_death, processes_max
from nnfmq.driver.compilation.server import FORK, FORK_BACKGROUND, PREFETCH, fork_compile_server
from nnfmq.driver.process.children import ChildProcess
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
from nnfmq.hal.types import ExecutionPreference

if TYPE_CHECKING:
    from nnfmq.engines.compiled.kernels import Kernel
    from nnfmq.engines.compiled.target import Target

__all__ = [
    "PROCESSES_MAX",
    "PrepareContext",
    "compile_in_processes",
    "current_prepare_context",
    "no_charge",
    "no_progress",
    "prefetch_imports",
    "prepare_context",
    "start_compile_server",
    "tier_up",
]

PROCESSES_MAX = 16  # for one model: none has kernels for more
_ATTEMPTS = 2  # to compile a model in processes, if the compile server dies
_PARTS_PER_PROCESS = 8  # so that the processes finish at about the same time, and progress can be reported
_PARTS_AHEAD = 2  # of a process: what it compiles, and what it finds when it has finished
_START_TIMEOUT_S = 5.0  # for the fork and the import of the compiler; the supervisor or the server may be stopped
_LOOK_NS = 200_000_000  # after which a job looks whether its driver's own server is stopped
_STATUS_TIMEOUT_S = 1.0  # between the exit of a process and the server's report
_POLL_MS_MAX = 2**31 - 1  # poll(2) takes an int
_LATE = "the deadline passed while the model was compiled"
_log = logging.getLogger("nnfmq.compiler")


def no_progress(_done: int, _total: int) -> None:
    """Ignore progress: a callback for `PrepareContext.on_progress`."""


class _Closing(Protocol):
    def close(self) -> None: ...


def no_charge(_size: int) -> _Closing:
    """Charge nobody: a callback for `PrepareContext.charge`."""
    return ExitStack()


class PrepareContext(Struct, frozen=True):
    """Deadline and progress callback of a prepareModel call.

    `deadline_ns` is a time of the monotonic clock. `on_progress` gets the number of compiled kernels, and of all.
    `is_background` tells that no caller waits for the compilation. A program that
    `is_deterministic` computes the same bits on every machine. `charge` charges the client with memory of compile
    processes until what it returns is closed, and raises ResourceExhausted if that is too much. `preference` is that of
    the client.
    """

    deadline_ns: int | None = None
    on_progress: Callable[[int, int], None] = no_progress
    is_background: bool = False
    is_deterministic: bool = False
    charge: Callable[[int], _Closing] = no_charge
    preference: ExecutionPreference = ExecutionPreference.SUSTAINED_SPEED

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


_own_server: ChildProcess | None = None  # of an embedded driver
_server: Channel | None = None  # or to the supervisor; all threads use it without a lock, because a FORK is one frame


def connect_compile_server(fd: int) -> None:
    """Let this worker compile in processes of its supervisor's compile server. Takes ownership of `fd`."""
    global _server  # noqa: PLW0603  one for each process, as the watcher's thread
    _server = Channel.adopt(fd)


def start_compile_server(client_pidfd: int | None) -> None:
    """Start this process's own compile server, if llvmlite is installed. Call it before the process starts threads.

    The server kills this process if it outlives its client, the process of `client_pidfd`, which is borrowed.
    """
    global _server, _own_server
    if find_spec("llvmlite") is not None:
        try:
            _server, _own_server = fork_compile_server(client_pidfd=client_pidfd)
        except (OSError, GeneralFailure) as error:
            _log.warning("models are compiled in this process: %s", error)


def _end_own_server_if_stopped() -> None:
    """End the server of an embedded driver if it is stopped. That of a supervisor is the supervisor's."""
    if _own_server is not None and _own_server.is_stopped():
        _log.error("the compile server is stopped: models are compiled in this process from now on")
        _own_server.send(signal.SIGKILL)


def prefetch_imports() -> None:
    """Let the compile server import the compiler, because a compilation will follow. Does not block."""
    if _server is not None:
        with suppress(DeadObject, MissedDeadlineTransient):
            _server.send(PREFETCH, (), NO_WAIT)


def _nothing() -> None:
    """Do nothing while other processes compile."""


def compile_in_processes(
    kernels: Sequence[Kernel], target: Target, meanwhile: Callable[[], None] = _nothing
) -> list[bytes]:
    """Compile kernels, which differ, in the current `PrepareContext`; return the object code of each. Blocks.

    Calls `meanwhile` once, on this thread, when the processes have their first parts.

    Raises:
        Exception: Any error that `meanwhile` raises.
        GeneralFailure: If a compile process dies.
        MissedDeadlineTransient: If the deadline passes.
        ResourceExhaustedTransient: If there is not enough memory, or no process can be started.
    """
    from nnfmq.engines.compiled.kernel_compilation import compile_each, shard_kernels

    context = current_prepare_context()
    if _server is not None:
        count = min(processes_max(), PROCESSES_MAX)
        parts = shard_kernels(kernels, count * _PARTS_PER_PROCESS)
        for _ in range(_ATTEMPTS):
            with suppress(_ServerDiedError), _Job(_server, parts, target, context) as job:
                if not job.start(min(count, len(parts))):
                    break
                do_once, meanwhile = meanwhile, _nothing
                do_once()
                codes = job.run()
                if codes is None:
                    break
                return [codes[id(kernel)] for kernel in kernels]
            _log.warning("the compile server has died during a compilation")
    meanwhile()
    return compile_each(kernels, target, context.report)


class _ServerDiedError(GeneralFailure):
    """A compile process has ended because the compile server, which would report how, has."""


class _Process(Closable):
    """The worker's connection to a compile process, from the request for it on. Closing it ends the process.

    Attributes:
        channel: The connection.
        parts: Indexes of the parts that it has and has not returned, in order.
        reply_by_ns: Until when the server has to answer the request; None if it has.
        is_ready: Whether the process runs.
        memory_bytes: What the client is charged with for the process.
    """

    def __init__(self, channel: Channel, status: Channel) -> None:
        self.channel = channel
        self._status = status
        self._charges = ExitStack()
        self.parts: deque[int] = deque()
        self.reply_by_ns: int | None = time.monotonic_ns() + int(_START_TIMEOUT_S * 1e9)
        self.is_ready = False
        self.memory_bytes = 0

    @classmethod
    def start(cls, server: Channel, context: PrepareContext) -> Self:
        """Ask the server for a compile process.

        Raises:
            DeadObject: If the server has exited.
            MissedDeadlineTransient: If the server does not accept the message before the deadline.
            OSError: If this process has no free fds.
        """
        with ExitStack() as undo:
            local, remote = Channel.pair()
            undo.enter_context(local)
            with remote:
                status, server_end = Channel.pair()
                undo.enter_context(status)
                with server_end:
                    kind = FORK_BACKGROUND if context.is_background else FORK
                    server.send(kind, (remote.fileno(), server_end.fileno()), context.deadline_ns)
            undo.pop_all()
        return cls(local, status)

    def receive(self, context: PrepareContext) -> tuple[bytes, ...] | None:
        """Return the object code of a part's kernels; None if something else has arrived. Does not block.

        Charges the client with the process's memory.

        Raises:
            DeadObject: If the process has ended because its turn was over.
            NnfmqError: The error that the process reported, or the one for how it has died.
            ResourceExhausted: If its memory is more than the client may have.
        """
        try:
            with self.channel.receive(NO_WAIT) as frame:
                self.reply_by_ns = None
                if frame.data in (QUEUED, READY):
                    self.is_ready = frame.data == READY
                    return None
                result = msgspec.msgpack.decode(frame.data, type=CompileResult)
        except DeadObject:
            self._raise_death()
        if result.memory_bytes > self.memory_bytes:
            self._charges.callback(context.charge(result.memory_bytes - self.memory_bytes).close)
            self.memory_bytes = result.memory_bytes
        if result.status is not ErrorStatus.NONE:
            raise error_for_status(result.status, result.message)
        return result.codes

    def _raise_death(self) -> NoReturn:
        """Raise the error for a process that has ended, as the server describes it if it does in time."""
        description = ""
        try:
            with self._status.receive(time.monotonic_ns() + int(_STATUS_TIMEOUT_S * 1e9)) as frame:
                description = frame.data.decode("ascii", "replace")
        except MissedDeadlineTransient:
            pass
        except DeadObject:
            raise _ServerDiedError("the compile server has died") from None
        if description == TURN_IS_OVER:
            raise DeadObject("the turn of the compile process is over, or it was stopped")
        raise error_of_death(description) from None

    def close(self) -> None:
        """End the process, unless it has ended. Idempotent."""
        self.channel.close()
        self._status.close()
        self._charges.close()


class _Job(Closable):
    """The compilation of one model's parts in processes. Close it, which ends them."""

    def __init__(
        self, server: Channel, parts: Sequence[Sequence[Kernel]], target: Target, context: PrepareContext
    ) -> None:
        self._server = server
        self._parts = parts
        self._target = target
        self._context = context
        self._codes: dict[int, bytes] = {}  # by the `id` of the kernel
        self._unsent = deque(range(len(parts)))
        self._processes: dict[int, _Process] = {}  # by the fd of the connection
        self._poll = select.poll()
        self._kernels_done = 0
        self._total = sum(map(len, parts))

    def start(self, count: int) -> bool:
        """Ask for so many processes and send each its first parts. Return False if the server has exited.

        Raises:
            MissedDeadlineTransient: If the deadline passes.
            ResourceExhaustedTransient: If this process has no free fds.
        """
        try:
            for _ in range(count):
                self._add_process()
        except DeadObject:
            _log.warning("the compile server has exited: models are compiled in the worker from now on")
            return False
        self._context.report(0, self._total)
        for process in [*self._processes.values()] * _PARTS_AHEAD:
            self._send_next(process)
        return True

    def _add_process(self) -> _Process:
        try:
            process = _Process.start(self._server, self._context)
        except MissedDeadlineTransient:
            raise MissedDeadlineTransient(_LATE) from None
        except DeadObject:  # an OSError
            raise
        except OSError as error:
            raise ResourceExhaustedTransient(f"no compile process can be started: {error.strerror}") from error
        self._processes[process.channel.fileno()] = process
        self._poll.register(process.channel.fileno(), select.POLLIN)
        return process

    def run(self) -> Mapping[int, bytes] | None:
        """Return object code by the `id` of the kernel; None if the server does not answer a request. Blocks.

        Raises:
            MissedDeadlineTransient: If the deadline passes.
            NnfmqError: The error of a process.
        """
        while self._processes:
            _end_own_server_if_stopped()
            for fd, _ in self._poll.poll(self._timeout_ms()):
                if fd in self._processes:  # it may have been dropped for another one
                    self._on_message(self._processes[fd])
            self._context.report(self._kernels_done, self._total)  # raises if the deadline ended the poll
            if any(time_ns <= time.monotonic_ns() for time_ns in self._reply_times()):
                _log.warning("no compile process has started within %g s: the worker compiles", _START_TIMEOUT_S)
                return None
        return self._codes

    def _reply_times(self) -> list[int]:
        return [process.reply_by_ns for process in self._processes.values() if process.reply_by_ns is not None]

    def _timeout_ms(self) -> float | None:
        deadline_ns = self._context.deadline_ns
        times = self._reply_times() if deadline_ns is None else [deadline_ns, *self._reply_times()]
        if self._reply_times() and _own_server is not None:
            times.append(time.monotonic_ns() + _LOOK_NS)
        return min(max(0.0, (min(times) - time.monotonic_ns()) / 1e6), _POLL_MS_MAX) if times else None

    def _on_message(self, process: _Process) -> None:
        try:
            codes = process.receive(self._context)
        except DeadObject:
            self._drop(process)
            if self._unsent:
                self._replace()
            return
        if codes is None:
            return
        part = self._parts[process.parts.popleft()]
        if len(codes) != len(part):
            raise GeneralFailure(f"a compile process returned {len(codes)} object files for {len(part)} kernels")
        self._codes.update(zip(map(id, part), codes, strict=True))
        self._kernels_done += len(part)
        if not self._unsent and not process.parts:
            self._take_from_waiting()
        self._send_next(process)
        if not process.parts:
            self._drop(process)

    def _take_from_waiting(self) -> None:
        """Drop a process that waits for its turn, if there is one: its parts can be compiled now."""
        for process in self._processes.values():
            if not process.is_ready:
                self._drop(process)
                return

    def _drop(self, process: _Process) -> None:
        """End a process. The parts that it has not returned are sent to others."""
        fd = process.channel.fileno()
        self._poll.unregister(fd)
        del self._processes[fd]
        self._unsent.extendleft(reversed(process.parts))
        process.close()

    def _replace(self) -> None:
        """Ask for another process, and send it its first parts."""
        try:
            process = self._add_process()
        except DeadObject:
            raise _ServerDiedError("the compile server has died") from None
        for _ in range(_PARTS_AHEAD):
            self._send_next(process)

    def _send_next(self, process: _Process) -> None:
        """Send the next part to a process, if one is left. That it has died is seen when its result is awaited."""
        from nnfmq.engines.compiled.kernel_compilation import encode_kernels

        if not self._unsent:
            return
        index = self._unsent.popleft()
        process.parts.append(index)
        with suppress(DeadObject):
            description = encode_kernels(self._parts[index], self._target)
            process.channel.send(description, (), self._context.deadline_ns)

    def close(self) -> None:
        """End all processes. Idempotent."""
        while self._processes:
            self._processes.popitem()[1].close()


# ----------------------------------------------------------------------------------------------------------------------
# Background compilation of models prepared with FAST_SINGLE_ANSWER (tier-up).
#
# The model first runs on its baseline program; this job compiles it and replaces the program. The job holds a weak
# reference only: if the model is released, a job that waits is dropped, and a running one stops after the part that is
# being compiled. If compiling fails, the model keeps the baseline program, and a warning is logged.


_background_log = logging.getLogger("nnfmq.background_compile")


def tier_up(program_ref: weakref.ref[TieredProgram], charge: Callable[[int], _Closing] = no_charge) -> None:
    """Compile a program and let the result replace it, if the program is still in use. Blocks; raises nothing.

    `charge` charges the client with the memory of compile processes, see `PrepareContext`.
    """
    program = program_ref()
    compile_program = None if program is None else program.compile_program
    del program  # no strong reference while compiling
    if compile_program is None:
        return
    compiled = None
    try:
        on_progress = partial(_require_in_use, program_ref)
        with prepare_context(PrepareContext(on_progress=on_progress, is_background=True, charge=charge)):
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
        _background_log.info("a model runs on its compiled program from now on")


def _require_in_use(program_ref: weakref.ref[TieredProgram], _done: int, _total: int) -> None:
    """Abort a compilation whose program has been released."""
    if program_ref() is None:
        raise GeneralFailure("the model was released before it was compiled")
