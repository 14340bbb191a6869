"""Which programs workers share, and who holds them: the supervisor's part of `shared_cache_client`.

Of a program there is its name, a descriptor of the memory it lies in, and how many holds workers have on it: who was
given it, or offered it first. A hold ends when its worker says so, when the worker ends, and when its connection does;
with the last one the descriptor is closed, so nothing outlives its users. The memory is never mapped, read or hashed
here: whoever is given it verifies it (`compilation_cache.open_memory`).

A worker may have been taken over by its client. So what is taken is memory that nobody can write to or resize, within
limits of number and size; nothing here waits for an answer; and what breaks the rules of
`shared_cache_protocol` ends that connection with one log line, after which its worker goes on alone. A second offer of
a name changes nothing: the first stays, and who offered the second keeps its own copy.
"""

from __future__ import annotations

import logging
import os

from nnfmq.channel import NOW, Channel, Frame
from nnfmq.hal.errors import DeadObject, MissedDeadlineTransient, ProtocolError
from nnfmq.memory import constant_bytes
from nnfmq.service.caching import shared_cache_protocol
from nnfmq.service.caching.shared_cache_protocol import Absent, Here, Left, Offered, Role, Spoilt, Wanted

__all__ = ["HOLDS_MAX", "PROGRAMS_MAX", "Connection", "ProgramRegistry"]

PROGRAMS_MAX = 256  # each is a descriptor; with as many as CLIENTS_MAX workers there is room among 1024
HOLDS_MAX = 128  # of one worker
_log = logging.getLogger("nnfmq.sharing")


class _Program:
    """A program's descriptor, which is open as long as anybody holds the program, and nobody found it spoilt."""

    def __init__(self, name: str, fd: int, size_bytes: int) -> None:
        self.name = name
        self.fd = fd
        self.size_bytes = size_bytes
        self.holds = 0

    def close(self) -> None:
        """Close the descriptor. Harmless when repeated."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Connection:
    """One worker's connection, and the programs that it holds, by its numbers."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.holds: dict[int, _Program] = {}
        self.worker = 0  # its pid, as soon as it is known; for the log
        self.was_refused = self.has_complained = False


class ProgramRegistry:
    """The programs that the workers of one driver share. One thread uses it, and closes all connections."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._programs: dict[str, _Program] = {}

    @staticmethod
    def connect() -> tuple[Connection, Channel]:
        """Return a connection, for `serve` and `close`, and its other end, for a worker; the caller owns that."""
        ours, theirs = Channel.pair()
        return Connection(ours), theirs

    def serve(self, connection: Connection) -> bool:
        """Take one frame, if there is one; return False where the connection should be closed. Never blocks."""
        try:
            with connection.channel.receive(NOW, body_bytes_max=0) as frame:
                self._take(connection, frame)
        except MissedDeadlineTransient:
            return True  # nothing there
        except DeadObject:
            return False
        except (ProtocolError, OSError) as error:  # the latter: the kernel is short of something
            _log.warning("worker %d shares no programs any more: %s", connection.worker, error)
            return False
        return True

    def close(self, connection: Connection) -> None:
        """End a connection, and all its holds. Harmless when repeated."""
        connection.channel.close()
        while connection.holds:
            self._let_go(connection.holds.popitem()[1])

    def _take(self, connection: Connection, frame: Frame) -> None:
        count = None if frame.lacks_fds else len(frame.fds)
        match shared_cache_protocol.decode(frame.data, sender=Role.WORKER, fds=count):
            case Wanted(number, name):
                self._give(connection, number, name)
            case Offered(number, name):
                if frame.lacks_fds:
                    self._refuse(connection, "no descriptor is left (ulimit -n)")
                else:
                    self._add(connection, number, name, frame)
            case Left(number):
                program = connection.holds.pop(number, None)
                if program is not None:
                    self._let_go(program)  # SYNC left
            case Spoilt(number):
                self._forget(connection, number)

    def _give(self, connection: Connection, number: int, name: str) -> None:
        _require_new(connection, number)
        program = self._programs.get(name)
        if program is None or len(connection.holds) >= HOLDS_MAX:
            _send(connection, Absent(number))
            return
        self._hold(connection, number, program)  # SYNC held: before the answer, whose reader may be killed
        try:
            _send(connection, Here(number), program.fd)
        except OSError as error:  # too many descriptors are on their way, perhaps by another worker's fault
            self._refuse(connection, f"a descriptor cannot be sent: {error.strerror}")
            self._let_go(connection.holds.pop(number))
            _send(connection, Absent(number))

    def _add(self, connection: Connection, number: int, name: str, frame: Frame) -> None:
        _require_new(connection, number)
        size = constant_bytes(frame.fds[0])  # SYNC offered: what is sealed now stays so
        if not size:
            raise ProtocolError("it offered what is not sealed against writing, or no memfd, or nothing")
        if name in self._programs:
            return
        obstacle = self._obstacle(connection, size)
        if obstacle:
            self._refuse(connection, obstacle)
            return
        program = self._programs[name] = _Program(name, frame.take_fds()[0], size)
        self._hold(connection, number, program)

    def _obstacle(self, connection: Connection, size: int) -> str:
        held = sum(program.size_bytes for program in self._programs.values())
        if held + size > self._limit_bytes:
            return f"{size} bytes more than {held} are beyond the limit of {self._limit_bytes}"
        if len(self._programs) >= PROGRAMS_MAX:
            return f"there are {PROGRAMS_MAX} programs already"
        if len(connection.holds) >= HOLDS_MAX:
            return f"it holds {HOLDS_MAX} already"
        return ""

    @staticmethod
    def _refuse(connection: Connection, text: str) -> None:
        """Say once for each worker why something of it is not shared."""
        if not connection.was_refused:
            _log.warning("a program of worker %d is not shared: %s", connection.worker, text)
        connection.was_refused = True

    @staticmethod
    def _hold(connection: Connection, number: int, program: _Program) -> None:
        connection.holds[number] = program
        program.holds += 1

    def _let_go(self, program: _Program) -> None:
        program.holds -= 1
        if not program.holds:
            self._drop(program)

    def _forget(self, connection: Connection, number: int) -> None:
        """Give a program to nobody any more. Whoever says so wrongly costs others a copy, no more."""
        program = connection.holds.pop(number, None)
        if program is None:
            raise ProtocolError(f"it holds no program {number} that could be spoilt")
        if not connection.has_complained:
            _log.warning("worker %d found a program that it was given spoilt: nobody else gets it", connection.worker)
        connection.has_complained = True
        self._drop(program)
        self._let_go(program)

    def _drop(self, program: _Program) -> None:
        if self._programs.get(program.name) is program:
            del self._programs[program.name]
        program.close()


def _require_new(connection: Connection, number: int) -> None:
    if number in connection.holds:
        raise ProtocolError(f"it gave the number {number} twice")


def _send(connection: Connection, message: shared_cache_protocol.Message, *fds: int) -> None:
    try:
        connection.channel.send(shared_cache_protocol.encode(message), fds, NOW)
    except MissedDeadlineTransient:
        raise ProtocolError("it does not read its answers") from None
