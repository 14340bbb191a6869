"""The compile server and its compile processes, in which models become machine code.

LLVM compiles slowly, one lock of llvmlite serializes all threads, and a failure inside LLVM ends the process. So models
are compiled in other processes than the worker. The compile server is forked by a process with one thread and without
data of a client: by the supervisor for all its workers (`compile_relay`), or by an embedded driver. The server imports
the compiler on the first request, and forks a compile process for each job, which takes milliseconds. (A new
interpreter would import for as long as a small model takes to compile.) Only file descriptors and kernel descriptions
are sent:

    worker -> server      PREFETCH             import the compiler now: a compilation will follow
    worker -> server      FORK and 2 fds       the process's end of a connection; a pipe for its exit status
    worker -> server      FORK_BACKGROUND      the same for a compilation that no caller waits for
    process -> worker     READY                the process has been forked
    worker -> process     description          kernels as data; the next one follows the reply
    process -> worker     CompileResult        object code, or an error
    server -> supervisor  HANDLED             a request was handled
    server -> supervisor  FINISHED             a process that a FORK started has exited

The server and its processes run in a separate session (setsid), and keep no fd except their connection and the
standard streams. They exit when the connection hangs up; in a compile process a thread waits for that, since the main
thread is busy in LLVM. The server also watches the pipe for the exit status, which the worker closes as well: it kills
a process that has not seen the hang-up, because it is stopped. If the process that forked them exits, the kernel kills
them. The server waits for its processes and writes the exit status of each to its pipe. `compile_jobs` decides what is
compiled where. The processes have a lower CPU priority than the workers (`compile_priority`).

The server of an embedded driver also does for the driver what a supervisor does for a worker: it kills the driver if
that has not exited CLIENT_EXIT_GRACE_S after its client, or COMPILING_EXIT_GRACE_S if it has compiled.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import threading
import time
from contextlib import suppress

import msgspec

from nnfmq.channel import NO_WAIT, Channel, Frame
from nnfmq.hal.errors import DeadObject, ErrorStatus, MissedDeadlineTransient, NnfmqError, status_for_error
from nnfmq.service.child_process import ChildProcess, fork_child
from nnfmq.service.client_process import CLIENT_EXIT_GRACE_S, COMPILING_EXIT_GRACE_S
from nnfmq.service.compile_priority import lower_priority, lower_session_priority
from nnfmq.service.event_loop import EventLoop

__all__ = [
    "FINISHED",
    "FORK",
    "FORKS",
    "FORK_BACKGROUND",
    "HANDLED",
    "PREFETCH",
    "CompileResult",
    "fork_compile_server",
]

PREFETCH, FORK, FORK_BACKGROUND = b"prefetch", b"fork", b"fork background"
FORKS = (FORK, FORK_BACKGROUND)
HANDLED, FINISHED = b"handled", b"finished"
READY = b"ready"
_OOM_SCORE_ADJ = "500"  # of 1000: if memory runs out, the kernel kills a compile process before a client's worker
_log = logging.getLogger("nnfmq.compiler")


class CompileResult(msgspec.Struct, frozen=True, array_like=True):
    """Reply of a compile process. `code` is object code if `status` is NONE; else `message` describes the error."""

    status: ErrorStatus
    message: str = ""
    code: bytes = b""


def fork_compile_server(*, reports: bool = False, client_pidfd: int | None = None) -> tuple[Channel, ChildProcess]:
    """Fork a compile server; return the connection to it and the process. The server exits when the connection closes.

    With `reports` it sends HANDLED and FINISHED, which the caller must receive. With `client_pidfd`, which is borrowed,
    it kills this process if that outlives the client.

    Raises:
        GeneralFailure: If this process has several threads.
        OSError: If the system lacks processes, memory or fds.
    """
    local, remote = Channel.pair()
    fd = remote.detach()
    try:
        keep_fds = [fd] if client_pidfd is None else [fd, client_pidfd]
        return local, fork_child(
            lambda: _Server(Channel.adopt(fd), reports, client_pidfd).run(), keep_fds, at_parent_exit=signal.SIGKILL
        )
    except BaseException:
        local.close()
        raise
    finally:
        os.close(fd)


class _Server:
    """Forks a compile process for each message of FORKS, and reports its exit status."""

    def __init__(self, channel: Channel, reports: bool, client_pidfd: int | None) -> None:
        self._channel = channel
        self._reports = reports
        self._has_lowered_session = self._has_forked = False
        self._loop = EventLoop()
        self._loop.add_reader(channel.fileno(), self._serve)
        if client_pidfd is not None:
            driver = ChildProcess(os.getppid(), os.pidfd_open(os.getppid()))
            self._loop.add_reader(client_pidfd, lambda: self._on_client_exit(client_pidfd, driver))

    def run(self) -> None:
        """Serve until the connection closes."""
        os.setsid()
        gc.disable()  # compilations are short, and their processes exit
        with suppress(DeadObject):
            while True:
                self._loop.run_once()

    def _serve(self) -> None:
        with suppress(MissedDeadlineTransient), self._channel.receive(NO_WAIT) as frame:
            from nnfmq.engines.compiled.kernel_serialization import warm_up

            warm_up()
            # If the fork fails, the worker sees that its end of the connection hangs up.
            is_fork = frame.data in FORKS
            is_running = is_fork and not frame.fds_truncated and self._fork(frame)
            self._report(HANDLED)
            if is_fork and not is_running:
                self._report(FINISHED)

    def _report(self, message: bytes) -> None:
        if self._reports:
            self._channel.send(message)

    def _fork(self, frame: Frame) -> bool:
        """Fork a compile process; return False if that fails."""
        self._has_forked = True
        connection, status_pipe = frame.fds
        is_background = frame.data == FORK_BACKGROUND
        self._has_lowered_session = self._has_lowered_session or lower_session_priority()
        try:
            process = fork_child(
                lambda: _CompileProcess(connection, is_background).run(), [connection], at_parent_exit=signal.SIGKILL
            )
        except OSError as error:
            _log.warning("no compile process: %s", error.strerror)
            return False
        frame.fds = [connection]  # the frame closes this one; the pipe stays open until the process exits
        self._loop.add_reader(process.fileno(), lambda: self._reap(process, status_pipe))
        # The reading end closes when the worker has no more use for the process, or exits. A process that is stopped
        # does not see that its connection hangs up.
        self._loop.add_reader(status_pipe, lambda: self._kill(process, status_pipe))
        return True

    def _on_client_exit(self, client_pidfd: int, driver: ChildProcess) -> None:
        self._loop.remove_reader(client_pidfd)
        grace_s = COMPILING_EXIT_GRACE_S if self._has_forked else CLIENT_EXIT_GRACE_S
        self._loop.call_at(time.monotonic() + grace_s, lambda: driver.send(signal.SIGKILL))

    def _kill(self, process: ChildProcess, status_pipe: int) -> None:
        self._loop.remove_reader(status_pipe)
        process.send(signal.SIGKILL)

    def _reap(self, process: ChildProcess, status_pipe: int) -> None:
        self._loop.remove_reader(process.fileno())
        self._loop.remove_reader(status_pipe)
        with suppress(BrokenPipeError):  # the worker no longer needs the status
            os.write(status_pipe, str(process.reap()).encode())
        os.close(status_pipe)
        self._report(FINISHED)


class _CompileProcess:
    """Compiles the descriptions that it receives, one after the other."""

    def __init__(self, fd: int, is_background: bool) -> None:
        self._channel = Channel.adopt(fd)
        self._is_background = is_background

    def run(self) -> None:
        """Compile until the worker closes the connection; during a compilation the process exits then."""
        lower_priority(self._is_background)
        threading.Thread(target=self._exit_with_worker, daemon=True).start()
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write(_OOM_SCORE_ADJ)
        with suppress(DeadObject):
            self._channel.send(READY)
            while True:
                with self._channel.receive() as frame:
                    self._channel.send(msgspec.msgpack.encode(_compile(frame.data)))

    def _exit_with_worker(self) -> None:
        poll = select.poll()
        poll.register(self._channel.fileno(), 0)  # no events: poll(2) reports POLLHUP and POLLERR in any case
        poll.poll()
        os._exit(0)


def _compile(description: bytearray) -> CompileResult:
    from nnfmq.engines.compiled.code_generator import compile_kernels
    from nnfmq.engines.compiled.kernel_serialization import decode_kernels

    try:
        return CompileResult(ErrorStatus.NONE, code=compile_kernels(*decode_kernels(description)))
    except MemoryError:
        text = "there is not enough memory to compile the model"
        return CompileResult(ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, text)
    except NnfmqError as error:
        return CompileResult(status_for_error(error), str(error))
    except Exception as error:  # noqa: BLE001  errors of LLVM too: they fail one model
        _log.exception("compiling failed")
        return CompileResult(ErrorStatus.GENERAL_FAILURE, f"compiling failed: {error!r}")
