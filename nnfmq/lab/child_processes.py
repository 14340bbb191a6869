"""Child processes that are Python functions: runners, clients and other load, started by `multiprocess` (spawn).

A function is called in a new interpreter with its end of a connection to the parent before its arguments. It is pickled
by dill, which can pickle closures, too; pickles travel between processes of one program only, never to or from a peer.
If the function itself is of a script, the child imports the script, which then needs the usual guard.
A process that is another program, such as `nnfmq serve`, is started by `subprocess`.

A child leads a session of its own, so that Ctrl-C reaches the parent alone, which ends it. If the parent is killed, so
is the child, whatever it does: by the kernel, when the thread exits that has started it. It has one thread of BLAS,
since idle ones spin, and what it prints goes to stderr, because stdout is the parent's.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any

import multiprocess
from multiprocess import connection as connections
from multiprocess import resource_tracker
from multiprocess.reduction import ForkingPickler

from nnfmq.base.processes import ONE_THREAD, request_signal_at_parent_exit
from nnfmq.hal.errors import NnfmqError

__all__ = [
    "BenchmarkFailed",
    "ChildEnded",
    "FunctionProcess",
    "RunnerUnavailable",
    "call_in_child",
    "set_time_limit",
    "started_child",
]

END_S, CLEAN_UP_S = 10.0, 60.0
_TICK_S = 0.1
_NONE: Mapping[str, str] = MappingProxyType({})
_UNNAMED = "a child process"
_CLOSED = (BrokenPipeError, ConnectionResetError)
_STARTING = threading.Lock()  # what a start changes in this process is changed by one thread at a time


class RunnerUnavailable(Exception):
    """A runner cannot run on this machine, or cannot execute this model; the message gives the reason."""


class BenchmarkFailed(Exception):
    """A measurement has no result: a child process reported an error, or ended early, or did not become idle."""


class ChildEnded(BenchmarkFailed):
    """A child process ended before it sent a result; `status` is its exit status, or -N after signal N."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


_REPORTED = (NnfmqError, BenchmarkFailed, OSError, RuntimeError, ValueError)
"""Errors of which the parent gets the message. Others are bugs: the child prints the traceback, and its status is 1."""


# ----------------------------------------------------------------------------------------------------------------------
# The parent's side.


class FunctionProcess:
    """A child process, and the parent's end of the connection to it."""

    def __init__(self, name: str, process: Any, connection: Any, *, cleans_up: bool = False) -> None:
        self.name = name
        self.cleans_up = cleans_up
        """Whether the child is never killed as long as it may end by itself."""
        self.connection = connection
        """A `multiprocess.connection.Connection`, which can be polled together with others."""
        self._process = process

    @property
    def pid(self) -> int:
        """The pid, while the process has not been reaped."""
        pid: int = self._process.pid
        return pid

    def send(self, message: object) -> None:
        """Send an object; blocks while the connection is full."""
        with suppress(*_CLOSED):  # `receive` reports why the process has ended
            self.connection.send(message)

    def receive(self, timeout_s: float, tick: Callable[[], object] = lambda: None) -> Any:
        """Return the next object that the child sends; `tick` is called about ten times a second while there is none.

        Raises:
            RunnerUnavailable: If the child cannot run here.
            ChildEnded: If it has ended.
            BenchmarkFailed: If it failed, or sends nothing within `timeout_s`.
            Exception: The exception that it sent.
        """
        end = time.monotonic() + timeout_s
        while not connections.wait([self.connection, self._process.sentinel], _TICK_S):
            tick()
            if time.monotonic() > end:
                raise BenchmarkFailed(f"{self.name}: its process did not reply within {timeout_s:g} s")
        try:
            if not self.connection.poll():  # a process of the child's may keep its end open
                raise EOFError
            reply = self.connection.recv()
        except (EOFError, OSError):
            status = self._ended()
            raise ChildEnded(f"{self.name}: its process ended with status {status} before a result", status) from None
        if isinstance(reply, BenchmarkFailed):
            raise BenchmarkFailed(f"{self.name}: {reply}")
        if isinstance(reply, Exception):
            raise reply
        return reply

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the exit; return the exit status, -N after signal N, or None if the process still runs."""
        self._process.join(timeout_s)
        status: int | None = self._process.exitcode
        return status

    def kill(self) -> None:
        """Send SIGKILL; an embedded driver exits with its client."""
        if self._process.pid is not None:
            self._process.kill()

    def end(self) -> None:
        """Close the connection, which the child notices; kill it if it has not exited 10 s later, and reap it.

        A child that cleans up has 60 s.
        """
        self.connection.close()
        if self._process.pid is not None:
            self._ended()
        self._process.close()

    def _ended(self) -> int:
        """Return the exit status, of a process that is killed if it does not exit by itself."""
        if self.wait(CLEAN_UP_S if self.cleans_up else END_S) is None:
            self.kill()
            self._process.join()
        status: int = self._process.exitcode
        return status


@contextmanager
def started_child(
    function: Callable[..., object], *arguments: Any, name: str = _UNNAMED, environment: Mapping[str, str] = _NONE,
    cleans_up: bool = False,
) -> Iterator[FunctionProcess]:  # fmt: skip
    """Call `function(connection, *arguments)` in a new process, and yield it; at exit it is ended and reaped.

    The child's `recv` raises EOFError when the parent closes its end or exits, which ends the function quietly. After
    an error, or if the parent is killed, the child is killed, unless it `cleans_up`: then it must wait in `recv`, and
    that is all that it is told. `name` begins the messages of errors; `environment` is added to the child's variables.
    """
    with _started(_call, function, arguments, name, environment, cleans_up=cleans_up) as child:
        yield child


def call_in_child(
    function: Callable[..., Any], *arguments: Any, limit_s: float = 600.0, name: str = _UNNAMED,
    environment: Mapping[str, str] = _NONE,
) -> Any:  # fmt: skip
    """Return the result of `function(*arguments)` in a new process. Blocks.

    Raises:
        RunnerUnavailable, BenchmarkFailed: As `FunctionProcess.receive`.
    """
    with _started(_send_result, function, arguments, name, environment) as child:
        return child.receive(limit_s)


@contextmanager
def _started(
    entry: Callable[..., None], function: Callable[..., Any], arguments: tuple[Any, ...], name: str,
    environment: Mapping[str, str], *, cleans_up: bool = False,
) -> Iterator[FunctionProcess]:  # fmt: skip
    context = multiprocess.get_context("spawn")
    # With `recurse` a function of a notebook takes along what it refers to. One of a script finds that in the script's
    # module, which spawn imports again.
    script = getattr(sys.modules["__main__"], "__file__", None)
    is_of_script = function.__module__ == "__main__" and script is not None and os.path.isfile(script)
    pickled = bytes(ForkingPickler.dumps((function, arguments), recurse=not is_of_script))
    parent_end, child_end = context.Pipe()
    process = context.Process(target=_run, args=(child_end, entry, cleans_up))
    child = FunctionProcess(name, process, parent_end, cleans_up=cleans_up)
    try:
        with (
            child_end, _STARTING, _variables(environment), _without_main(not is_of_script), _without_tracker(),
            _without_interrupts(),
        ):  # fmt: skip
            process.start()
        with suppress(*_CLOSED):
            parent_end.send_bytes(pickled)
        yield child
    except BaseException:
        if not cleans_up:
            child.kill()
        raise
    finally:
        child.end()


@contextmanager
def _variables(added: Mapping[str, str]) -> Iterator[None]:
    """Add a child's variables to the environment, which `start` passes on: some are read before any Python code runs.

    A child imports nothing from the working directory.
    """
    variables = {**dict.fromkeys(ONE_THREAD, "1"), "PYTHONSAFEPATH": "1", **added}
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _without_main(is_hidden: bool) -> Iterator[None]:
    """Keep the child from importing this program's main module again, which may have no guard against that."""
    main = sys.modules["__main__"]
    if is_hidden:
        sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _without_tracker() -> Iterator[None]:
    """Keep `start` from starting a second process, which unlinks named semaphores later: nothing here creates any."""
    tracker = resource_tracker._resource_tracker
    if tracker._fd is not None:  # the program uses multiprocess by itself
        yield
        return
    tracker._fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        os.close(tracker._fd)
        tracker._fd = None


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Block SIGINT, also in a process that is started meanwhile, which admits it when it has left the session."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ----------------------------------------------------------------------------------------------------------------------
# The child's side.


def set_time_limit(seconds: float) -> None:
    """Limit the running time of the calling process: SIGALRM ends it after `seconds`; 0 removes the limit."""
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _run(connection: Any, entry: Callable[..., None], cleans_up: bool) -> None:
    """Call the function in the child. It is received and unpickled, with its imports, when the process is set up."""
    if not cleans_up:
        request_signal_at_parent_exit(signal.SIGKILL)
        if os.getppid() != multiprocess.parent_process().pid:
            return  # the parent has exited before
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # discards one from before
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.dup2(2, 1)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and os.path.exists(f"/proc/self/fd/{name}"):
            os.set_inheritable(int(name), False)  # a program that the child starts would keep the connection open
    try:
        entry(connection, *ForkingPickler.loads(connection.recv_bytes()))
    except (EOFError, *_CLOSED):
        pass  # the parent has ended, or does not need this process any more
    except RunnerUnavailable as reason:
        connection.send(reason)
    except _REPORTED as error:
        connection.send(BenchmarkFailed(" ".join(str(error).split()) or type(error).__name__))


def _call(connection: Any, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    function(connection, *arguments)


def _send_result(connection: Any, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    connection.send(function(*arguments))
