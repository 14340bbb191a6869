"""The compile server and its compile processes, in which models become machine code.

LLVM compiles slowly, one lock of llvmlite serializes all threads, and a failure inside LLVM ends the process. So models
are compiled in other processes than the worker. The compile server is forked by a process with one thread and without
data of a client: by the supervisor for all its workers, or by an embedded driver. The server imports
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
them. The server waits for its processes and writes the exit status of each to its pipe. `jobs` decides what is
compiled where. The processes have a lower CPU priority than the workers.

The server of an embedded driver also does for the driver what a supervisor does for a worker: it kills the driver if
that has not exited CLIENT_EXIT_GRACE_S after its client, or COMPILING_EXIT_GRACE_S if it has compiled.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import select
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from nnfmq.base.channel import NO_WAIT, Channel, Frame
from nnfmq.driver.process.children import CLIENT_EXIT_GRACE_S, COMPILING_EXIT_GRACE_S, ChildProcess, fork_child
from nnfmq.driver.process.event_loop import EventLoop, Timer
from nnfmq.driver.process.statistics_area import StatisticsArea
from nnfmq.hal.errors import (
    DeadObject,
    ErrorStatus,
    GeneralFailure,
    MissedDeadlineTransient,
    NnfmqError,
    ProtocolError,
    TransportError,
    status_for_error,
)
from nnfmq.observe import statistics_layout as layout

__all__ = [
    "BACKGROUND_NICE",
    "FINISHED",
    "FOREGROUND_NICE",
    "FORK",
    "FORKS",
    "FORK_BACKGROUND",
    "HANDLED",
    "IDLE_TIMEOUT_S",
    "PREFETCH",
    "REPLY_TIMEOUT_S",
    "CompileRelay",
    "CompileResult",
    "fork_compile_server",
    "lower_priority",
    "lower_session_priority",
]


# ----------------------------------------------------------------------------------------------------------------------
# The CPU priority of compile processes: below that of the workers, whose executions they would delay otherwise.
#
# A process lowers its priority before it compiles, and keeps it: raising it again needs CAP_SYS_NICE. The kernel weighs
# processes by their nice value within one scheduling group. With autogroups (CONFIG_SCHED_AUTOGROUP) each session is a
# group of its own, and the groups are weighed by values of their own; so the compile server lowers that of its session,
# too. See docs/explanation/scheduling.md for the values.


FOREGROUND_NICE: Final = 5
"""How much a process is nicer than the driver while a caller waits for the compilation: a third of the weight."""
BACKGROUND_NICE: Final = 10
"""The same if the model executes meanwhile on its baseline program: a ninth of the weight."""
_AUTOGROUP = Path("/proc/self/autogroup")


def lower_priority(is_background: bool) -> None:
    """Lower the priority of the calling thread, and of the threads that it starts. Call it once, before these."""
    os.nice(BACKGROUND_NICE if is_background else FOREGROUND_NICE)


def lower_session_priority() -> bool:
    """Lower the priority of this process's session; return False if a later call may succeed.

    For users without CAP_SYS_ADMIN the kernel changes one session in 0.1 s.
    """
    try:
        _AUTOGROUP.write_text(str(FOREGROUND_NICE))
    except OSError as error:  # a kernel without autogroups, or a sandbox
        return error.errno != errno.EAGAIN
    return True


# ----------------------------------------------------------------------------------------------------------------------
# The compile server and its compile processes, in which models become machine code.


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
            from nnfmq.engines.compiled.kernel_compilation import warm_up

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
    from nnfmq.engines.compiled.kernel_compilation import decode_kernels

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


# ----------------------------------------------------------------------------------------------------------------------
# The supervisor's part in compiling: one compile server for all workers, which exists only while it is used.
#
# Workers send PREFETCH and FORKS to the supervisor, which passes them on to the compile server, with their fds, and
# reads nothing else of them. It starts the server for the first request, and ends it IDLE_TIMEOUT_S after the last one
# when no compile process runs, so that an idle driver does not keep the compiler's memory. Only the supervisor sends to
# the server, so a request never meets one that is about to end.
#
# A server that dies, or that does not handle a request within REPLY_TIMEOUT_S (it may be stopped), is replaced for the
# next request. Its processes end with it; workers notice, and ask again.


IDLE_TIMEOUT_S = 10.0
REPLY_TIMEOUT_S = 30.0  # importing the compiler takes up to some seconds on a busy machine
_FDS = {PREFETCH: 0, **dict.fromkeys(FORKS, 2)}
_supervisor_log = logging.getLogger("nnfmq.supervisor")


class _RunningServer:
    """A running compile server."""

    def __init__(self, channel: Channel, process: ChildProcess) -> None:
        self.channel = channel
        self.process = process
        self.unanswered = self.processes = 0
        self.timer: Timer | None = None  # for the reply to a request, or for the end of an idle server


class CompileRelay:
    """Passes workers' requests on to the compile server. Used by one thread, the only one of its process. Close it."""

    def __init__(self, loop: EventLoop, statistics: StatisticsArea) -> None:
        self._loop = loop
        self._statistics = statistics
        self._server: _RunningServer | None = None

    def relay(self, link: Channel) -> bool:
        """Pass on one request from a worker, if one has arrived; return False if the link should be closed."""
        try:
            with link.receive(NO_WAIT, body_bytes_max=0) as frame:
                self._pass_on(frame)
        except MissedDeadlineTransient:
            return True
        except DeadObject:
            return False
        except (TransportError, OSError) as error:
            _supervisor_log.warning("a worker compiles its models itself from now on: %s", error)
            return False
        return True

    def _pass_on(self, frame: Frame) -> None:
        if frame.fds_truncated:
            return  # this process has no free fds; the worker sees that its process hangs up
        data = bytes(frame.data)
        if _FDS.get(data) != len(frame.fds):
            raise ProtocolError(f"a request of {len(data)} bytes with {len(frame.fds)} fds is unknown")
        for _ in range(2):  # the server may have died just now
            try:
                server = self._server or self._start()
                server.channel.send(data, frame.fds, NO_WAIT)
            except DeadObject:
                self._drop()
                continue
            except (OSError, GeneralFailure, MissedDeadlineTransient) as error:
                _supervisor_log.warning("no compile process: %s", error)  # the fds close, which the worker sees
                return
            self._statistics.add(layout.COMPILE_REQUESTS)
            server.unanswered += 1
            server.processes += data in FORKS
            if server.unanswered == 1:
                self._set_timer(server)
            return

    def _start(self) -> _RunningServer:
        server = self._server = _RunningServer(*fork_compile_server(reports=True))
        self._statistics.set(layout.COMPILE_SERVER_PID, server.process.pid)
        self._loop.add_reader(server.channel.fileno(), lambda: self._on_report(server))
        self._loop.add_reader(server.process.fileno(), lambda: self._on_exit(server))
        return server

    def _on_report(self, server: _RunningServer) -> None:
        try:
            with server.channel.receive(NO_WAIT, body_bytes_max=0) as frame:
                server.unanswered -= frame.data == HANDLED
                server.processes -= frame.data == FINISHED
        except MissedDeadlineTransient:
            return
        except TransportError:
            self._drop()
            return
        self._set_timer(server)

    def _set_timer(self, server: _RunningServer) -> None:
        """Limit the time to the next reply, or, if the server is idle, to the next request."""
        if server.timer is not None:
            server.timer.cancel()
            server.timer = None
        if server.unanswered:
            server.timer = self._loop.call_at(time.monotonic() + REPLY_TIMEOUT_S, self._give_up)
        elif not server.processes:
            server.timer = self._loop.call_at(time.monotonic() + IDLE_TIMEOUT_S, self._drop)

    def _give_up(self) -> None:
        _supervisor_log.error("the compile server has not replied for %g s: it is replaced", REPLY_TIMEOUT_S)
        self._drop()

    def _drop(self) -> None:
        """End the server. The next request starts another one."""
        server, self._server = self._server, None
        self._statistics.set(layout.COMPILE_SERVER_PID, 0)
        if server is not None:
            if server.timer is not None:
                server.timer.cancel()
            self._loop.remove_reader(server.channel.fileno())
            server.channel.close()
            server.process.send(signal.SIGKILL)  # it may be stopped

    def _on_exit(self, server: _RunningServer) -> None:
        self._loop.remove_reader(server.process.fileno())
        status = server.process.reap()
        if self._server is server:
            _supervisor_log.error("the compile server ended with status %d", status)
            self._drop()

    def close(self) -> None:
        """End the server, without waiting for its exit."""
        self._drop()
