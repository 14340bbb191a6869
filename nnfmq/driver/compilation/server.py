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
    server -> worker      QUEUED               over the connection: the process waits for its turn
    process -> worker     READY                the process has been forked
    worker -> process     description          kernels as data; the next one follows the reply
    process -> worker     CompileResult        object code of each kernel, or an error
    server -> supervisor  HANDLED              a request was handled
    server -> supervisor  FINISHED CLIENT      a process that a FORK asked for has exited, or is not wanted any more

A supervisor appends to FORK and FORK_BACKGROUND for whom it passes them on: the number of the client, and its uid.
`process_queue` decides whose process is started, and which one ends for another client's. SIGUSR1 tells a process that.

The server ends a process that is stopped (`EventLoop.watch_stops`) as one whose turn is over: the worker asks for
another one. A supervisor does the same with a server that is stopped.

The server and its processes run in a separate session (setsid), and keep no fd except their connection and the standard
streams. They exit when the connection hangs up; in a compile process a thread waits for that, since the main
thread is busy in LLVM. The server also watches the pipe for the exit status, which the worker closes as well: it kills
a process that has not seen the hang-up, because it is stopped. If the process that forked them exits, the kernel kills
them. The server waits for its processes and writes how each has ended to its pipe. `jobs` decides what is compiled
where. The processes have a lower CPU priority than the workers, and limits of memory and CPU time.

The server of an embedded driver also does for the driver what a supervisor does for a worker: it kills the driver if
that has not exited CLIENT_EXIT_GRACE_S after its client, or COMPILING_EXIT_GRACE_S if it has compiled.
"""

from __future__ import annotations

import gc
import itertools
import os
import re
import signal
import time
from collections import Counter
from contextlib import ExitStack, suppress
from functools import partial

from nnfmq.base.channel import NO_WAIT, Channel, Frame
from nnfmq.base.limits import data_left_bytes
from nnfmq.base.log_records import ChildLog
from nnfmq.base.logs import rate_limited
from nnfmq.base.memory import write_to_memfd
from nnfmq.base.ownership import Closable
from nnfmq.base.scheduling import BACKGROUND_NICE, FOREGROUND_NICE
from nnfmq.base.upgrades import require_unchanged
from nnfmq.driver.compilation.process import (
    END_SIGNAL,
    OUT_OF_MEMORY,
    QUEUED,
    TURN_IS_OVER,
    CompileProcess,
    describe_death,
    processes_max,
    set_session_priority,
)
from nnfmq.driver.compilation.process_queue import Claim, ProcessQueue
from nnfmq.driver.process.children import CLIENT_EXIT_GRACE_S, COMPILING_EXIT_GRACE_S, ChildProcess, fork_child
from nnfmq.driver.process.event_loop import EventLoop, Timer
from nnfmq.driver.process.log_pipe import LogPipe
from nnfmq.driver.process.statistics_area import StatisticsArea
from nnfmq.hal.errors import (
    DeadObject,
    DeviceUnavailable,
    GeneralFailure,
    InvalidArgument,
    MissedDeadlineTransient,
    ProtocolError,
    ResourceExhaustedTransient,
    TransportError,
)
from nnfmq.observe import statistics_layout as layout

__all__ = [
    "FINISHED",
    "FORK",
    "FORKS",
    "FORK_BACKGROUND",
    "HANDLED",
    "IDLE_TIMEOUT_S",
    "NEXT_REPLY_TIMEOUT_S",
    "PREFETCH",
    "REPLY_TIMEOUT_S",
    "CompileLink",
    "CompileRelay",
    "fork_compile_server",
]


# ----------------------------------------------------------------------------------------------------------------------
# The compile server and its compile processes, in which models become machine code.


PREFETCH, FORK, FORK_BACKGROUND = b"prefetch", b"fork", b"fork background"
FORKS = (FORK, FORK_BACKGROUND)
HANDLED, FINISHED = b"handled", b"finished"
_OWNER = re.compile(rb"(.+?)(?: (\d+) (\d+))?")
_LAST_WORDS_MAX = 64 << 10
# At the limit of their memory CPython and LLVM may go on without end, because they try failed allocations again.
_MEMORY_LOOK_S = 0.2
_LOOKS_WITHOUT_MEMORY = 3
_NO_MEMORY_BYTES = 1 << 20
_log = rate_limited("nnfmq.compiler")


def fork_compile_server(
    *, reports: bool = False, client_pidfd: int | None = None, log_fd: int | None = None
) -> tuple[Channel, ChildProcess]:
    """Fork a compile server; return the connection to it and the process. The server exits when the connection closes.

    With `reports` it sends HANDLED and FINISHED, which the caller must receive. With `client_pidfd`, which is borrowed,
    it kills this process if that outlives the client. `log_fd` is as in `fork_child`.

    Raises:
        GeneralFailure: If this process has several threads.
        OSError: If the system lacks processes, memory or fds.
    """
    local, remote = Channel.pair()
    fd = remote.detach()
    try:
        keep_fds = [fd] if client_pidfd is None else [fd, client_pidfd]
        return local, fork_child(
            lambda: _Server(Channel.adopt(fd), reports, client_pidfd).run(),
            keep_fds,
            "nnfmq-compilers",
            at_parent_exit=signal.SIGKILL,
            log_fd=log_fd,
        )
    except BaseException:
        local.close()
        raise
    finally:
        os.close(fd)


def owned(kind: bytes, client: int, uid: int) -> bytes:
    """Return a request of FORKS with the client for which a supervisor passes it on."""
    return b"%b %d %d" % (kind, client, uid)


def _parse_request(data: bytes) -> tuple[bytes, int, int]:
    """Return a request's kind, and the number and uid of its client; 0 and 0 for that of an embedded driver."""
    found = _OWNER.fullmatch(data)
    assert found is not None  # any request has bytes
    return found[1], int(found[2] or 0), int(found[3] or 0)


def _finished(client: int) -> bytes:
    return b"%b %d" % (FINISHED, client)


class _Compilation:
    """A compile process that a worker has asked for: it waits for its turn, and then runs. Owns its fds until `close`.

    `connection` is its end of the connection to the worker, until it is forked; `status` tells how it has ended.

    Raises:
        InvalidArgument: If an fd is no SEQPACKET socket.
    """

    def __init__(self, claim: Claim, connection_fd: int, status_fd: int) -> None:
        with ExitStack() as undo:
            undo.callback(os.close, status_fd)
            self.connection = undo.enter_context(Channel.adopt(connection_fd))
            undo.pop_all()
        self.status = Channel.adopt(status_fd)
        self.claim = claim
        self.process: ChildProcess | None = None
        self._log_fd = -1  # of the file that is its stderr, to which it logs
        self._was_stopped = False
        self._looks_without_memory = 0
        self._is_told = False

    def start_process(self) -> None:
        """Start the process. Raises OSError, or ResourceExhaustedTransient if no memory is left."""
        log_fd = self._log_fd = write_to_memfd(b"", "nnfmq-compiler-log")
        connection, is_background = self.connection.detach(), self.claim.is_background
        try:
            self.process = fork_child(
                lambda: CompileProcess(connection, is_background).run(),
                [connection],
                "nnfmq-compiler",
                at_parent_exit=signal.SIGKILL,
                log_fd=log_fd,
            )
        finally:
            os.close(connection)

    def tell_queued(self) -> None:
        """Tell the worker that the process starts later, so that it does not take the server for dead. Idempotent."""
        if not self._is_told:
            self._is_told = True
            with suppress(DeadObject, MissedDeadlineTransient):
                self.connection.send(QUEUED, (), NO_WAIT)

    def end_stopped(self) -> None:
        """End the process, which is stopped."""
        assert self.process is not None
        _log.warning("compile process %d is stopped: another one takes its place", self.process.pid)
        self._was_stopped = True
        self.process.send(signal.SIGKILL)

    def end_if_without_memory(self) -> None:
        """End the process if it had next to no memory left the last times, too: failed allocations are tried again."""
        assert self.process is not None
        with suppress(OSError):  # it has just exited
            is_without = data_left_bytes(self.process.pid) < _NO_MEMORY_BYTES
            self._looks_without_memory = self._looks_without_memory + 1 if is_without else 0
            if self._looks_without_memory >= _LOOKS_WITHOUT_MEMORY:
                self.process.send(signal.SIGKILL)

    def close(self) -> None:
        """Report to the worker how the process has ended, if it has run. Blocks until it has exited."""
        self.connection.close()
        if self.process is not None:
            status, last_words = self.process.reap(), os.pread(self._log_fd, _LAST_WORDS_MAX, 0).rstrip(b"\0")
            log = ChildLog("a compile process")
            log.pid = self.process.pid
            log.write(last_words)
            log.end()
            with suppress(DeadObject, MissedDeadlineTransient):  # the worker no longer needs it
                self.status.send(self._description(status, last_words).encode(), (), NO_WAIT)
        self.status.close()
        if self._log_fd >= 0:
            os.close(self._log_fd)

    def _description(self, status: int, last_words: bytes) -> str:
        if self._was_stopped:
            return TURN_IS_OVER
        if self._looks_without_memory >= _LOOKS_WITHOUT_MEMORY:
            return OUT_OF_MEMORY
        return describe_death(status, last_words)


class _Server:
    """Forks the compile processes that workers ask for, each in its turn, and reports how they have ended."""

    def __init__(self, channel: Channel, reports: bool, client_pidfd: int | None) -> None:
        self._channel = channel
        self._reports = reports
        self._has_forked = False
        self._nicer: int | None = None  # than the driver's session this one is; None: it has its first value
        self._queue = ProcessQueue(processes_max())
        self._compilations: dict[Claim, _Compilation] = {}
        self._timer: Timer | None = None
        self._looks = False  # at the memory of processes, again and again
        self._loop = EventLoop()
        self._loop.limit_closes()
        self._loop.add_reader(channel.fileno(), self._serve)
        if client_pidfd is not None:
            driver = ChildProcess(os.getppid(), os.pidfd_open(os.getppid()))
            self._loop.add_reader(client_pidfd, lambda: self._on_client_exit(client_pidfd, driver))

    def run(self) -> None:
        """Serve until the connection closes."""
        os.setsid()
        gc.disable()  # compilations are short, and their processes exit
        signal.pthread_sigmask(signal.SIG_BLOCK, [END_SIGNAL])  # a process that is forked waits with it until it can
        with suppress(DeadObject):
            while True:
                self._loop.run_once()

    def _serve(self) -> None:
        with suppress(MissedDeadlineTransient), self._channel.receive(NO_WAIT) as frame:
            from nnfmq.engines.compiled.kernel_compilation import warm_up

            warm_up()
            kind, client, uid = _parse_request(bytes(frame.data))
            if kind in FORKS:
                claim = Claim(client, uid, kind == FORK_BACKGROUND)
                if not self._add(claim, frame):  # the worker sees that its end of the connection hangs up
                    self._report(_finished(client))
            self._report(HANDLED)
            self._take_turns()

    def _report(self, message: bytes) -> None:
        if self._reports:
            self._channel.send(message)

    def _add(self, claim: Claim, frame: Frame) -> bool:
        """Let a claim wait for its turn; return False if it cannot be served. Workers are not trusted."""
        if frame.fds_truncated:
            return False
        try:
            compilation = _Compilation(claim, *frame.detach_fds())
        except InvalidArgument as error:
            _log.warning("no compile process: %s", error)
            return False
        self._has_forked = True
        self._compilations[claim] = compilation
        self._queue.add(claim)
        # The worker's end closes when it has no more use for the process, or exits. A process that is stopped does not
        # see that its connection hangs up.
        self._loop.add_reader(compilation.status.fileno(), lambda: self._on_unwanted(compilation))
        return True

    def _take_turns(self) -> None:
        """Start the processes that have a turn, and tell those to end that have had theirs."""
        now_ns = time.monotonic_ns()
        while (claim := self._queue.start_next(now_ns)) is not None:
            self._start(self._compilations[claim])
        while (claim := self._queue.end_next(now_ns)) is not None:
            process = self._compilations[claim].process
            assert process is not None
            process.send(END_SIGNAL)
        for compilation in self._compilations.values():
            if compilation.process is None:
                compilation.tell_queued()
        if self._timer is not None:
            self._timer.cancel()
        next_ns = self._queue.next_change_ns(now_ns)
        self._timer = None if next_ns is None else self._loop.call_at(next_ns / 1e9, self._take_turns)

    def _start(self, compilation: _Compilation) -> None:
        self._set_priority(compilation.claim)
        try:
            compilation.start_process()
        except (OSError, ResourceExhaustedTransient) as error:
            _log.warning("no compile process: %s", error)
            self._forget(compilation)
            return
        assert compilation.process is not None
        self._loop.add_reader(compilation.process.fileno(), lambda: self._on_exit(compilation))
        self._loop.watch_stops(compilation.process, compilation.end_stopped)
        if not self._looks:
            self._looks = True
            self._loop.call_at(time.monotonic() + _MEMORY_LOOK_S, self._look_at_memory)

    def _set_priority(self, *starting: Claim) -> None:
        """Give the session the priority that its processes need, and those that start now; the driver's without any."""
        claims = [*starting, *(claim for claim, each in self._compilations.items() if each.process is not None)]
        needed = [BACKGROUND_NICE if claim.is_background else FOREGROUND_NICE for claim in claims]
        nicer = min(needed, default=0)
        if nicer != self._nicer and set_session_priority(nicer):
            self._nicer = nicer

    def _look_at_memory(self) -> None:
        """Look at the memory of all processes, and again soon while there are any."""
        running = [compilation for compilation in self._compilations.values() if compilation.process is not None]
        for compilation in running:
            compilation.end_if_without_memory()
        self._set_priority()
        self._looks = bool(running)
        if running:
            self._loop.call_at(time.monotonic() + _MEMORY_LOOK_S, self._look_at_memory)

    def _on_exit(self, compilation: _Compilation) -> None:
        self._forget(compilation)
        self._take_turns()
        self._set_priority()

    def _on_unwanted(self, compilation: _Compilation) -> None:
        if compilation.process is None:
            self._forget(compilation)
        else:
            self._loop.remove_reader(compilation.status.fileno())
            compilation.process.send(signal.SIGKILL)

    def _forget(self, compilation: _Compilation) -> None:
        if compilation.process is not None:
            self._loop.unwatch_stops(compilation.process)
            self._loop.remove_reader(compilation.process.fileno())
        self._loop.remove_reader(compilation.status.fileno())
        del self._compilations[compilation.claim]
        self._queue.remove(compilation.claim)
        compilation.close()
        self._report(_finished(compilation.claim.client))

    def _on_client_exit(self, client_pidfd: int, driver: ChildProcess) -> None:
        self._loop.remove_reader(client_pidfd)
        grace_s = COMPILING_EXIT_GRACE_S if self._has_forked else CLIENT_EXIT_GRACE_S
        self._loop.call_at(time.monotonic() + grace_s, lambda: driver.send(signal.SIGKILL))


# ----------------------------------------------------------------------------------------------------------------------
# The supervisor's part in compiling: one compile server for all workers, which exists only while it is used.
#
# Workers send PREFETCH and FORKS to the supervisor, which passes them on to the compile server, with their fds and with
# the client for which it does so. It reads nothing else of them, and closes the link to a worker that asks for more
# than CLIENT_PROCESSES_MAX. It starts the server for the first request, and ends it IDLE_TIMEOUT_S after the last one
# when no compile process runs, so that an idle driver does not keep the compiler's memory. Only the supervisor sends to
# the server, so a request never meets one that is about to end.
#
# A server that dies, that is stopped, or that does not handle its first request within REPLY_TIMEOUT_S and the others
# within NEXT_REPLY_TIMEOUT_S, is replaced for the next request. Its processes end with it; workers notice, and ask
# again.


IDLE_TIMEOUT_S = 10.0
REPLY_TIMEOUT_S = 30.0  # importing the compiler takes up to some seconds on a busy machine
NEXT_REPLY_TIMEOUT_S = 4.0  # a fork takes milliseconds; less than workers wait before they compile themselves
CLIENT_PROCESSES_MAX = 128  # that run or wait: each of a session's preparations asks for 16 at most
_FDS = {PREFETCH: 0, **dict.fromkeys(FORKS, 2)}
_supervisor_log = rate_limited("nnfmq.supervisor")


class _RunningServer:
    """A running compile server. `processes` counts for each client those that run or wait."""

    def __init__(self, channel: Channel, process: ChildProcess, log: LogPipe) -> None:
        self.channel = channel
        self.process = process
        self.log = log
        self.unanswered = 0
        self.has_answered = False
        self.processes: Counter[int] = Counter()
        self.timer: Timer | None = None  # for the reply to a request, or for the end of an idle server


class CompileLink(Closable):
    """The connection over which a worker asks for compile processes. Close it.

    Attributes:
        channel: The supervisor's end.
        client: The number of the worker's client, which no other client of this driver has had.
        uid: The client's uid.
    """

    def __init__(self, channel: Channel, client: int, uid: int) -> None:
        self.channel = channel
        self.client = client
        self.uid = uid

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self.channel.close()


class CompileRelay:
    """Passes workers' requests on to the compile server. Used by one thread, the only one of its process. Close it."""

    def __init__(self, loop: EventLoop, statistics: StatisticsArea) -> None:
        self._loop = loop
        self._statistics = statistics
        self._server: _RunningServer | None = None
        self._clients = itertools.count(1)

    def connect(self, uid: int) -> tuple[CompileLink, Channel]:
        """Return a link for the worker of a client with `uid`, and the worker's end. The caller owns both.

        Raises:
            OSError: If no fds are left.
        """
        channel, worker_end = Channel.pair()
        return CompileLink(channel, next(self._clients), uid), worker_end

    def relay(self, link: CompileLink) -> bool:
        """Pass on one request from a worker, if one has arrived; return False if the link should be closed."""
        try:
            with link.channel.receive(NO_WAIT, body_bytes_max=0) as frame:
                self._pass_on(link, frame)
        except MissedDeadlineTransient:
            return True
        except DeadObject:
            return False
        except (TransportError, OSError) as error:
            _supervisor_log.warning("a worker compiles its models itself from now on: %s", error)
            return False
        return True

    def _pass_on(self, link: CompileLink, frame: Frame) -> None:
        if frame.fds_truncated:
            return  # this process has no free fds; the worker sees that its process hangs up
        kind = bytes(frame.data)
        if _FDS.get(kind) != len(frame.fds):
            raise ProtocolError(f"a request of {len(kind)} bytes with {len(frame.fds)} fds is unknown")
        for _ in range(2):  # the server may have died just now
            try:
                server = self._server or self._start()
                if kind in FORKS and server.processes[link.client] == CLIENT_PROCESSES_MAX:
                    raise ProtocolError(f"it has asked for more than {CLIENT_PROCESSES_MAX} processes at a time")
                data = owned(kind, link.client, link.uid) if kind in FORKS else kind
                server.channel.send(data, frame.fds, NO_WAIT)
            except DeadObject:
                self._drop()
                continue
            except (OSError, DeviceUnavailable, GeneralFailure, MissedDeadlineTransient) as error:
                _supervisor_log.warning("no compile process: %s", error)  # the fds close, which the worker sees
                return
            self._statistics.add(layout.COMPILE_REQUESTS)
            server.unanswered += 1
            if kind in FORKS:
                server.processes[link.client] += 1
            if server.unanswered == 1:
                self._set_timer(server)
            return

    def _start(self) -> _RunningServer:
        require_unchanged()  # it imports the compiler
        with ExitStack() as undo:
            log = undo.enter_context(LogPipe(self._loop, "the compile server"))
            channel, process = fork_compile_server(reports=True, log_fd=log.child_fd)
            undo.pop_all()
        server = self._server = _RunningServer(channel, process, log)
        log.begin(process.pid)
        log.watch()
        self._statistics.set(layout.COMPILE_SERVER_PID, server.process.pid)
        self._loop.add_reader(server.channel.fileno(), lambda: self._on_report(server))
        self._loop.add_reader(server.process.fileno(), lambda: self._on_exit(server))
        self._loop.watch_stops(server.process, lambda: self._on_stopped(server))
        return server

    def _on_report(self, server: _RunningServer) -> None:
        try:
            with server.channel.receive(NO_WAIT, body_bytes_max=0) as frame:
                kind, _, client = bytes(frame.data).partition(b" ")
                server.unanswered -= kind == HANDLED
                server.has_answered |= kind == HANDLED
                if kind == FINISHED:
                    server.processes.subtract([int(client)])
                    server.processes += Counter()  # without those that have none
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
            timeout_s = NEXT_REPLY_TIMEOUT_S if server.has_answered else REPLY_TIMEOUT_S
            server.timer = self._loop.call_at(time.monotonic() + timeout_s, partial(self._give_up, timeout_s))
        elif not server.processes:
            server.timer = self._loop.call_at(time.monotonic() + IDLE_TIMEOUT_S, self._drop)

    def _on_stopped(self, server: _RunningServer) -> None:
        if self._server is server:
            _supervisor_log.error("the compile server is stopped: it is replaced")
            self._drop()

    def _give_up(self, timeout_s: float) -> None:
        _supervisor_log.error("the compile server has not replied for %g s: it is replaced", timeout_s)
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
        self._loop.unwatch_stops(server.process)
        self._loop.remove_reader(server.process.fileno())
        status = server.process.reap()
        server.log.close()
        if self._server is server:
            _supervisor_log.error("the compile server ended with status %d", status)
            self._drop()

    def close(self) -> None:
        """End the server, without waiting for its exit."""
        self._drop()
