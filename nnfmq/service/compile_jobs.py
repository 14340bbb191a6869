"""A preparation's machine code, made by compile processes: how many there are, what each gets, and what ends them.

The kernels are cut into parts, a few for each process; a process gets the next part when it has answered. What takes
not much longer than to start a process is compiled in this one, and so is everything where there is no server. A
preparation that fails, is late, or whose worker dies lets go of its processes' connections, with which they end.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Self

import msgspec

from nnfmq.channel import NOW, Channel
from nnfmq.hal.errors import (
    DeadObject,
    ErrorStatus,
    GeneralFailure,
    MissedDeadlineTransient,
    ResourceExhaustedTransient,
    error_for_status,
)
from nnfmq.service.compile_server import FORK, WARM, Answer, start_server

if TYPE_CHECKING:
    from nnfmq.engines.compiled.kernels.kernel import Kernel
    from nnfmq.engines.compiled.target import Target

__all__ = [
    "PROCESSES_MAX",
    "Preparation",
    "compile_in_processes",
    "current_preparation",
    "preparing",
    "start",
    "unheard",
    "warm",
]

PROCESSES_MAX = 16  # of a preparation: no model has kernels for more
_SMALL = 4  # in units of `compiler.cost`: what is compiled here
_PARTS_EACH = 4  # so that the last one of a process is short, and there is progress to tell
_STATUS_SECONDS = 1.0  # from a process's end to its status, which the server reports
_POLL_MS_MAX = 2**31 - 1  # poll(2) takes an int
_log = logging.getLogger("nnfmq.compiler")


def unheard(_done: int, _total: int) -> None:
    """Hear how far a preparation is, for nobody."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """What a preparation that runs may take, and who hears how many kernels are compiled, of how many."""

    deadline_ns: int | None = None
    heard: Callable[[int, int], None] = unheard

    def report(self, done: int, total: int) -> None:
        """Tell how far it is. Raises MissedDeadlineTransient once the deadline has passed."""
        if self.deadline_ns is not None and time.monotonic_ns() >= self.deadline_ns:
            raise MissedDeadlineTransient("the deadline passed while the model was compiled")
        self.heard(done, total)


_UNLIMITED = Preparation()
_preparation: ContextVar[Preparation] = ContextVar("preparation", default=_UNLIMITED)


@contextmanager
def preparing(preparation: Preparation) -> Iterator[None]:
    """Let what this thread compiles during a block belong to a preparation."""
    token = _preparation.set(preparation)
    try:
        yield
    finally:
        _preparation.reset(token)


def current_preparation() -> Preparation:
    """Return the one that this thread's work belongs to; without limits where there is none."""
    return _preparation.get()


_server: Channel | None = None  # of this process; one for all threads, as each FORK is a frame of its own


def start() -> None:
    """Give this process a compile server, before it has threads or anything that must not be copied."""
    global _server  # noqa: PLW0603  like the watcher's thread, there is one for each process
    if find_spec("llvmlite") is not None:
        _server = start_server()


def warm() -> None:
    """Let the server import what it needs meanwhile: something is to be compiled soon."""
    if _server is not None:
        with suppress(DeadObject, MissedDeadlineTransient):
            _server.send(WARM, (), NOW)


def compile_in_processes(kernels: Sequence[Kernel], target: Target) -> list[bytes]:
    """Compile for the current preparation: an engine's `Compile`.

    Raises GeneralFailure where a process dies, MissedDeadlineTransient, ResourceExhaustedTransient.
    """
    from nnfmq.engines.compiled.compiler import compiled_here, cost, distinct, parts_of

    different = distinct(kernels)
    preparation = current_preparation()
    if cost(different) > _SMALL and _server is not None:
        count = min(len(os.sched_getaffinity(0)), PROCESSES_MAX)
        parts = parts_of(different, count * _PARTS_EACH)
        with ExitStack() as stack:
            processes = _processes(min(count, len(parts)), stack, preparation.deadline_ns)
            if processes:
                return _Job(parts, target, processes, preparation).run()
    return compiled_here(parts_of(different, _PARTS_EACH), target, preparation.report)


def _processes(count: int, stack: ExitStack, deadline_ns: int | None) -> list[_Process]:
    """Start compile processes, which `stack` ends; none where the server is gone. Raises MissedDeadlineTransient."""
    assert _server is not None
    try:
        return [stack.enter_context(_Process.start(_server, deadline_ns)) for _ in range(count)]
    except DeadObject:
        _log.warning("the compile server is gone: compiling in the worker from now on")
        return []
    except OSError as error:
        raise ResourceExhaustedTransient(f"no compile process can be started: {error.strerror}") from error


class _Process:
    """A compile process, as the worker sees it. Close it to end it at once."""

    def __init__(self, channel: Channel, status: int) -> None:
        self.channel = channel
        self._status = status

    @classmethod
    def start(cls, server: Channel, deadline_ns: int | None) -> Self:
        """Let the server fork one. Raises DeadObject where the server is gone, OSError without descriptors.

        And MissedDeadlineTransient where it does not even take the order in time.
        """
        with ExitStack() as undo:
            ours, theirs = Channel.pair()
            undo.callback(ours.close)
            with theirs:
                reading, writing = os.pipe2(os.O_CLOEXEC)
                undo.callback(os.close, reading)
                try:
                    server.send(FORK, (theirs.fileno(), writing), deadline_ns)
                finally:
                    os.close(writing)
            undo.pop_all()
        return cls(ours, reading)

    def answer(self) -> bytes:
        """Return the object code that it has made. Raises GeneralFailure where it has died, and what it answers."""
        try:
            with self.channel.receive(NOW) as frame:
                answer = msgspec.msgpack.decode(frame.data, type=Answer)
        except DeadObject:
            raise self.death() from None
        if answer.status is not ErrorStatus.NONE:
            raise error_for_status(answer.status, answer.message)
        return answer.code

    def death(self) -> GeneralFailure:
        """Return what says that it has died, and how as far as that is known."""
        poll = select.poll()
        poll.register(self._status, select.POLLIN)
        status = os.read(self._status, 16).decode() if poll.poll(_STATUS_SECONDS * 1000) else ""
        return GeneralFailure(f"the process that compiled the model {_ending(status)}; prepare it again")

    def close(self) -> None:
        """Let go of it."""
        self.channel.close()
        os.close(self._status)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ending(status: str) -> str:
    if not status:
        return "has ended"
    if not status.startswith("-"):
        return f"ended with status {status}"
    number = -int(status)
    name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
    return f"was ended by {name}{' (is there enough memory?)' if name in ('SIGKILL', 'SIGABRT') else ''}"


class _Job:
    """The parts of one preparation, on its processes."""

    def __init__(
        self, parts: Sequence[Sequence[Kernel]], target: Target, processes: Sequence[_Process], preparation: Preparation
    ) -> None:
        self._parts = parts
        self._target = target
        self._processes = {process.channel.fileno(): process for process in processes}
        self._preparation = preparation
        self._codes = [b""] * len(parts)
        self._at: dict[int, int] = {}  # which part a process is at
        self._given = self._done = 0
        self._poll = select.poll()

    def run(self) -> list[bytes]:
        """Return the object code of each part. Blocks."""
        total = sum(map(len, self._parts))
        self._preparation.report(0, total)
        for fd in self._processes:
            self._poll.register(fd, select.POLLIN)
            self._give(fd)
        while self._at:
            for fd, _ in self._poll.poll(self._milliseconds_left()):
                self._take(fd)
                self._give(fd)
            self._preparation.report(self._done, total)
        return self._codes

    def _milliseconds_left(self) -> float | None:
        deadline_ns = self._preparation.deadline_ns
        return None if deadline_ns is None else min(max(0.0, (deadline_ns - time.monotonic_ns()) / 1e6), _POLL_MS_MAX)

    def _take(self, fd: int) -> None:
        number = self._at.pop(fd)
        self._codes[number] = self._processes[fd].answer()
        self._done += len(self._parts[number])

    def _give(self, fd: int) -> None:
        """Give a process the next part; it has none to watch for where there is none."""
        from nnfmq.engines.compiled.kernel_serialization import encode_kernels

        if self._given == len(self._parts):
            self._poll.unregister(fd)
            return
        process, number = self._processes[fd], self._given
        try:
            process.channel.send(encode_kernels(self._parts[number], self._target), (), self._preparation.deadline_ns)
        except DeadObject:
            raise process.death() from None
        self._at[fd] = number
        self._given += 1
