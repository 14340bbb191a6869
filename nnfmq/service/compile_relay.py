"""The supervisor's part in compiling: one compile server for all workers, which exists only while it is used.

Workers send PREFETCH and FORKS to the supervisor, which passes them on to the compile server, with their fds, and reads
nothing else of them. It starts the server for the first request, and ends it IDLE_TIMEOUT_S after the last one when no
compile process runs, so that an idle driver does not keep the compiler's memory. Only the supervisor sends to the
server, so a request never meets one that is about to end.

A server that dies, or that does not handle a request within REPLY_TIMEOUT_S (it may be stopped), is replaced for the
next request. Its processes end with it; workers notice, and ask again.
"""

from __future__ import annotations

import logging
import signal
import time

from nnfmq.channel import NO_WAIT, Channel, Frame
from nnfmq.hal.errors import DeadObject, GeneralFailure, MissedDeadlineTransient, ProtocolError, TransportError
from nnfmq.observe import statistics_layout as layout
from nnfmq.service.child_process import ChildProcess
from nnfmq.service.compile_server import FINISHED, FORKS, HANDLED, PREFETCH, fork_compile_server
from nnfmq.service.event_loop import EventLoop, Timer
from nnfmq.service.statistics_area import StatisticsArea

__all__ = ["IDLE_TIMEOUT_S", "REPLY_TIMEOUT_S", "CompileRelay"]

IDLE_TIMEOUT_S = 10.0
REPLY_TIMEOUT_S = 30.0  # importing the compiler takes up to some seconds on a busy machine
_FDS = {PREFETCH: 0, **dict.fromkeys(FORKS, 2)}
_log = logging.getLogger("nnfmq.supervisor")


class _Server:
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
        self._server: _Server | None = None

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
            _log.warning("a worker compiles its models itself from now on: %s", error)
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
                _log.warning("no compile process: %s", error)  # the fds close, which the worker sees
                return
            self._statistics.add(layout.COMPILE_REQUESTS)
            server.unanswered += 1
            server.processes += data in FORKS
            if server.unanswered == 1:
                self._set_timer(server)
            return

    def _start(self) -> _Server:
        server = self._server = _Server(*fork_compile_server(reports=True))
        self._statistics.set(layout.COMPILE_SERVER_PID, server.process.pid)
        self._loop.add_reader(server.channel.fileno(), lambda: self._on_report(server))
        self._loop.add_reader(server.process.fileno(), lambda: self._on_exit(server))
        return server

    def _on_report(self, server: _Server) -> None:
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

    def _set_timer(self, server: _Server) -> None:
        """Limit the time to the next reply, or, if the server is idle, to the next request."""
        if server.timer is not None:
            server.timer.cancel()
            server.timer = None
        if server.unanswered:
            server.timer = self._loop.call_at(time.monotonic() + REPLY_TIMEOUT_S, self._give_up)
        elif not server.processes:
            server.timer = self._loop.call_at(time.monotonic() + IDLE_TIMEOUT_S, self._drop)

    def _give_up(self) -> None:
        _log.error("the compile server has not replied for %g s: it is replaced", REPLY_TIMEOUT_S)
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

    def _on_exit(self, server: _Server) -> None:
        self._loop.remove_reader(server.process.fileno())
        status = server.process.reap()
        if self._server is server:
            _log.error("the compile server ended with status %d", status)
            self._drop()

    def close(self) -> None:
        """End the server, without waiting for its exit."""
        self._drop()
