"""One copy of a compiled program's constants for all workers of a user: a worker's part (`shared_cache_server` is the
supervisor's).

A program's memory holds the bytes of its cache file, sealed against writing. Who has made or read one offers it under
the entry's name; who needs one asks first. What is got here is a stranger's until its seal is verified. The supervisor
is told when nothing looks at the memory any more: when the mapping goes, with the last array over it.

Whatever is wrong costs a log line and a copy of one's own, never a preparation. An embedded driver has no supervisor,
and a supervisor may be killed: then nothing is asked, and nothing waits. One that does not answer in time (SIGSTOP) is
asked again for the next program; answers carry the question's number, so a late one is let go.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from dataclasses import dataclass

from nnfmq.channel import NOW, Channel
from nnfmq.hal.errors import DeadObject, InvalidArgument, MissedDeadlineTransient, NnfmqError, ProtocolError
from nnfmq.memory import Memory
from nnfmq.service.caching import shared_cache_protocol
from nnfmq.service.caching.shared_cache_protocol import Left, Offered, Role, Spoilt, Wanted

__all__ = ["Lent", "Sharing", "is_possible", "offer", "refuse", "start", "wanted"]

PATIENCE_NS = 250_000_000  # with the supervisor, which may be starting another worker
_log = logging.getLogger("nnfmq.sharing")


@dataclass(frozen=True, slots=True)
class Lent:
    """Memory that another worker offered, which is the receiver's to close; and its number, for `refuse`."""

    memory: Memory
    number: int


class Sharing:
    """A worker's connection to its supervisor, until that is gone. Thread-safe."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._alive = [channel]  # whose pop gives the end to one thread only
        self._numbers = itertools.count(1)
        self._asking = threading.Lock()
        self._was_late = False

    @property
    def is_over(self) -> bool:
        """Whether the supervisor is gone."""
        return not self._alive

    def wanted(self, name: str) -> Lent | None:
        """Return what another worker shares under `name`, None for nothing; blocks for PATIENCE_NS at most."""
        number = next(self._numbers)
        fd = self._asked(number, name)
        if fd is None:
            return None
        try:
            memory = Memory.adopt_constant(fd)  # SYNC offered: whoever did had sealed it
        except NnfmqError as error:
            _log.warning("what another worker shares is not used: %s", error)
            self._send(Spoilt(number) if isinstance(error, InvalidArgument) else Left(number))
            return None
        self._leave_with(memory, number)
        return Lent(memory, number)

    def offer(self, name: str, memory: Memory) -> None:
        """Let other workers have constant `memory`, which stays the caller's."""
        number = next(self._numbers)
        if self._send(Offered(number, name), memory.fileno()):  # SYNC offered: it cannot change any more
            self._leave_with(memory, number)

    def refuse(self, lent: Lent) -> None:
        """Keep others from what was lent: it is not what its name says."""
        self._send(Spoilt(lent.number))

    def close(self) -> None:
        """End it: the supervisor forgets what this worker has. Harmless when repeated."""
        self._end(None)

    def _asked(self, number: int, name: str) -> int | None:
        """Return the descriptor in the supervisor's answer, the caller's; None for none, and where it is late."""
        deadline_ns = time.monotonic_ns() + PATIENCE_NS
        if not self._asking.acquire(timeout=PATIENCE_NS / 1e9):
            return None
        try:
            if not self._send(Wanted(number, name)):  # SYNC held: from here on, until it is left
                return None
            return self._answer(number, deadline_ns)
        except MissedDeadlineTransient:
            self._send(Left(number))
            if not self._was_late:
                _log.warning("the supervisor does not answer: a program is not shared")
            self._was_late = True
        except (DeadObject, ProtocolError, OSError) as error:
            self._end(error)
        finally:
            self._asking.release()
        return None

    def _answer(self, number: int, deadline_ns: int) -> int | None:
        while True:
            with self._channel.receive(deadline_ns, body_bytes_max=0) as frame:
                count = None if frame.lacks_fds else len(frame.fds)
                answer = shared_cache_protocol.decode(frame.data, sender=Role.SUPERVISOR, fds=count)
                if answer.number != number:
                    continue  # of a question that was given up; its number was left
                if frame.lacks_fds:  # for want of room here
                    self._send(Left(number))
                return frame.take_fds()[0] if frame.fds else None

    def _leave_with(self, memory: Memory, number: int) -> None:
        """Tell the supervisor when the mapping goes, on whichever thread that happens: this takes no lock."""
        weakref.finalize(memory.view.obj, self._send, Left(number)).atexit = False  # SYNC left

    def _send(self, message: shared_cache_protocol.Message, *fds: int) -> bool:
        """Send without waiting, and return whether that was possible: if not, this is over."""
        if self.is_over:
            return False
        try:
            self._channel.send(shared_cache_protocol.encode(message), fds, NOW)
        except (NnfmqError, OSError) as error:
            self._end(error)
            return False
        return True

    def _end(self, error: Exception | None) -> None:
        try:
            channel = self._alive.pop()
        except IndexError:
            return
        channel.hang_up()
        if error is not None:
            _log.info("programs are not shared any more: %s", error)


_sharing: Sharing | None = None  # of this process; one for all its threads


def start(fd: int) -> None:
    """Take over the connection to this worker's supervisor."""
    global _sharing  # noqa: PLW0603  as the compile server, there is one for each process
    _sharing = Sharing(Channel.adopt(fd))


def is_possible() -> bool:
    """Return whether there is anybody to share with."""
    return _sharing is not None and not _sharing.is_over


def wanted(name: str) -> Lent | None:
    """Return what another worker shares under `name`, whose seal the caller verifies; None for nothing. Blocks."""
    return None if _sharing is None else _sharing.wanted(name)


def offer(name: str, memory: Memory) -> None:
    """Let other workers have constant `memory`, which stays the caller's."""
    if _sharing is not None:
        _sharing.offer(name, memory)


def refuse(lent: Lent) -> None:
    """Keep other workers from what was lent: it is not what its name says."""
    if _sharing is not None:
        _sharing.refuse(lent)
