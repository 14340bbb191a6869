"""Worker side of the shared program cache (supervisor side: `shared_cache_server`).

The workers of one supervisor share the constants of a compiled program through a memfd that is sealed against writing
and contains the bytes of the program's cache file. A worker looks the entry up first, and publishes it after it has
compiled the model or read the file. Memory from a lookup is untrusted until its digest has been verified. The reference
ends when the last array over the mapping is garbage-collected.

A failure never fails a preparation: it is logged, and the worker uses a private copy. An embedded driver has no
supervisor, and a supervisor may be killed; then lookups return None immediately. A lookup that takes longer than
LOOKUP_TIMEOUT_NS (the supervisor may be stopped) returns None as well; its late reply is recognized by its id and
discarded, and the next lookup tries again.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref

from msgspec import Struct

from nnfmq.channel import NO_WAIT, Channel
from nnfmq.hal.errors import (
    InvalidArgument,
    MissedDeadlineTransient,
    NnfmqError,
    TransportError,
)
from nnfmq.memory import Memory
from nnfmq.service.caching import shared_cache_protocol
from nnfmq.service.caching.shared_cache_protocol import (
    Invalidate,
    Lookup,
    Publish,
    Release,
    Sender,
    SharedCacheMessage,
)

__all__ = ["SharedCacheClient", "SharedProgram", "connect", "invalidate", "is_available", "look_up", "publish"]

LOOKUP_TIMEOUT_NS = 250_000_000  # the supervisor may be busy starting another worker
_log = logging.getLogger("nnfmq.sharing")


class SharedProgram(Struct, frozen=True):
    """Memory that another worker published, which the receiver closes, and the id of the reference to it."""

    memory: Memory
    ref_id: int


class SharedCacheClient:
    """A worker's connection to the shared program cache of its supervisor. Thread-safe."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._open = [channel]  # list.pop is atomic: exactly one thread closes the channel, without a lock
        self._ref_ids = itertools.count(1)
        self._lookup_lock = threading.Lock()
        self._timeout_logged = False

    @property
    def is_closed(self) -> bool:
        """Whether the connection has ended, because the supervisor is gone or because of `close`."""
        return not self._open

    def look_up(self, name: str) -> SharedProgram | None:
        """Return the program that another worker published as `name`, or None. Blocks up to LOOKUP_TIMEOUT_NS."""
        ref_id = next(self._ref_ids)
        fd = self._request(ref_id, name)
        if fd is None:
            return None
        try:
            memory = Memory.adopt_constant(fd)  # SYNC published: the publisher sealed the memory first
        except NnfmqError as error:
            _log.warning("a program that another worker shares is not used: %s", error)
            self._send(Invalidate(ref_id) if isinstance(error, InvalidArgument) else Release(ref_id))
            return None
        self._release_with(memory, ref_id)
        return SharedProgram(memory, ref_id)

    def publish(self, name: str, memory: Memory) -> None:
        """Share constant `memory` with other workers. Borrows `memory`. Does not block."""
        ref_id = next(self._ref_ids)
        if self._send(Publish(ref_id, name), memory.fileno()):  # SYNC published: the memory is sealed
            self._release_with(memory, ref_id)

    def invalidate(self, program: SharedProgram) -> None:
        """Report that the memory does not contain the entry of its name, so that no other worker gets it."""
        self._send(Invalidate(program.ref_id))

    def close(self) -> None:
        """Close the connection; the supervisor drops this worker's references. Idempotent."""
        self._end(None)

    def _request(self, ref_id: int, name: str) -> int | None:
        """Return the fd from the supervisor's reply, which the caller owns; None if not found or not in time."""
        deadline_ns = time.monotonic_ns() + LOOKUP_TIMEOUT_NS
        if not self._lookup_lock.acquire(timeout=LOOKUP_TIMEOUT_NS / 1e9):
            return None
        try:
            # SYNC referenced: from the moment the supervisor reads this, this worker may have a reference
            if not self._send(Lookup(ref_id, name)):
                return None
            return self._receive_reply(ref_id, deadline_ns)
        except MissedDeadlineTransient:
            self._send(Release(ref_id))
            if not self._timeout_logged:
                _log.warning("the supervisor does not respond: a program is not shared")
            self._timeout_logged = True
        except (TransportError, OSError) as error:
            self._end(error)
        finally:
            self._lookup_lock.release()
        return None

    def _receive_reply(self, ref_id: int, deadline_ns: int) -> int | None:
        while True:
            with self._channel.receive(deadline_ns, body_bytes_max=0) as frame:
                fds = None if frame.fds_truncated else len(frame.fds)
                reply = shared_cache_protocol.decode(frame.data, sender=Sender.SUPERVISOR, fds=fds)
                if reply.ref_id != ref_id:
                    continue  # the late reply of a lookup that timed out, whose reference was released then
                if frame.fds_truncated:  # this process has no free fd
                    self._send(Release(ref_id))
                return frame.detach_fds()[0] if frame.fds else None

    def _release_with(self, memory: Memory, ref_id: int) -> None:
        """Release a reference when the mapping is garbage-collected. That may happen on any thread: takes no lock."""
        weakref.finalize(memory.view.obj, self._send, Release(ref_id)).atexit = False  # SYNC released

    def _send(self, message: SharedCacheMessage, *fds: int) -> bool:
        """Send without blocking. If that fails, close the connection and return False."""
        if self.is_closed:
            return False
        try:
            self._channel.send(shared_cache_protocol.encode(message), fds, NO_WAIT)
        except (NnfmqError, OSError) as error:
            self._end(error)
            return False
        return True

    def _end(self, error: Exception | None) -> None:
        try:
            channel = self._open.pop()
        except IndexError:
            return
        channel.hang_up()
        if error is not None:
            _log.info("programs are no longer shared: %s", error)


_client: SharedCacheClient | None = None  # of this process, for all its threads; None in an embedded driver


def connect(fd: int) -> None:
    """Connect this worker to its supervisor's shared program cache. Takes ownership of `fd`."""
    global _client  # noqa: PLW0603  one for each process, as the compile server
    _client = SharedCacheClient(Channel.adopt(fd))


def is_available() -> bool:
    """Return whether this process has a connection to a shared program cache."""
    return _client is not None and not _client.is_closed


def look_up(name: str) -> SharedProgram | None:
    """Return the program that another worker published as `name`, or None. The caller verifies it. Blocks."""
    return None if _client is None else _client.look_up(name)


def publish(name: str, memory: Memory) -> None:
    """Share constant `memory` with other workers, if there is a shared cache. Borrows `memory`."""
    if _client is not None:
        _client.publish(name, memory)


def invalidate(program: SharedProgram) -> None:
    """Report that the memory does not contain the entry of its name, so that no other worker gets it."""
    if _client is not None:
        _client.invalidate(program)
