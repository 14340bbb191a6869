"""Server side of the shared program cache, in the supervisor (worker side: `shared_cache_client`).

An entry is a name, an fd of the memory that contains the program's constants, and a count of the workers' references to
it. A worker gets a reference when it publishes an entry and when a lookup finds one; the reference ends when the worker
releases it, when its connection closes, and when the worker exits. With the last reference the fd is closed, so no
memory outlives its users. The supervisor never maps, reads or hashes the memory: the worker that looks an entry up
verifies it (`compilation_cache.read_memory`).

A client may control its worker, so workers are not trusted. Only memory that nobody can write or resize is
accepted, within limits of count and size. No call here blocks. A worker that violates the protocol loses its connection
(with one log line) and goes on without shared programs. Publishing a name that exists does nothing: the first entry
stays, and the second publisher uses its own copy.
"""

from __future__ import annotations

import logging
import os

from nnfmq.channel import NO_WAIT, Channel, Frame
from nnfmq.hal.errors import DeadObject, MissedDeadlineTransient, ProtocolError, TransportError
from nnfmq.memory import sealed_size
from nnfmq.service.caching import shared_cache_protocol
from nnfmq.service.caching.shared_cache_protocol import (
    Found,
    Invalidate,
    Lookup,
    NotFound,
    Publish,
    Release,
    Sender,
    SharedCacheMessage,
)

__all__ = ["ENTRIES_MAX", "REFERENCES_MAX", "SharedCacheServer", "WorkerLink"]

ENTRIES_MAX = 256  # one fd each; together with CLIENTS_MAX workers this stays below the usual limit of 1024 fds
REFERENCES_MAX = 128  # of one worker
_log = logging.getLogger("nnfmq.sharing")


class _Entry:
    """An entry and its fd, which is open until the last reference ends or a worker invalidates the entry."""

    def __init__(self, name: str, fd: int, size_bytes: int) -> None:
        self.name = name
        self.fd = fd
        self.size_bytes = size_bytes
        self.ref_count = 0

    def close(self) -> None:
        """Close the fd. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class WorkerLink:
    """The connection to one worker, and the worker's references by id."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.references: dict[int, _Entry] = {}
        self.worker_pid = 0  # for the log; set once the worker has been started
        self.rejection_logged = self.invalidation_logged = False


class SharedCacheServer:
    """The programs that the workers of one driver share. Used by one thread, which also closes all links.

    `limit_bytes` bounds the size of all entries together. `lookups` counts how often workers asked for a program, and
    `hits` how often there was one.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._entries: dict[str, _Entry] = {}
        self.lookups = self.hits = 0

    @property
    def program_count(self) -> int:
        """How many programs are shared."""
        return len(self._entries)

    @property
    def used_bytes(self) -> int:
        """The size of all entries together."""
        return sum(entry.size_bytes for entry in self._entries.values())

    @staticmethod
    def connect() -> tuple[WorkerLink, Channel]:
        """Return a link, to be passed to `serve` and `close`, and the worker's end of it, which the caller owns."""
        local, remote = Channel.pair()
        return WorkerLink(local), remote

    def serve(self, link: WorkerLink) -> bool:
        """Handle one frame if one has arrived. Return False if the link should be closed. Does not block."""
        try:
            with link.channel.receive(NO_WAIT, body_bytes_max=0) as frame:
                self._handle(link, frame)
        except MissedDeadlineTransient:
            return True  # no frame
        except DeadObject:
            return False
        except (TransportError, OSError) as error:  # OSError: the kernel lacks memory or fds
            _log.warning("worker %d no longer shares programs: %s", link.worker_pid, error)
            return False
        return True

    def close(self, link: WorkerLink) -> None:
        """Close a link and end its references. Idempotent."""
        link.channel.close()
        while link.references:
            self._unref(link.references.popitem()[1])

    def _handle(self, link: WorkerLink, frame: Frame) -> None:
        fds = None if frame.fds_truncated else len(frame.fds)
        match shared_cache_protocol.decode(frame.data, sender=Sender.WORKER, fds=fds):
            case Lookup(ref_id, name):
                self._look_up(link, ref_id, name)
            case Publish(ref_id, name):
                if frame.fds_truncated:
                    self._log_rejection(link, "this process has no free file descriptor (ulimit -n)")
                else:
                    self._publish(link, ref_id, name, frame)
            case Release(ref_id):
                entry = link.references.pop(ref_id, None)
                if entry is not None:
                    self._unref(entry)  # SYNC released
            case Invalidate(ref_id):
                self._invalidate(link, ref_id)

    def _look_up(self, link: WorkerLink, ref_id: int, name: str) -> None:
        _require_unused(link, ref_id)
        entry = self._entries.get(name)
        self.lookups += 1
        if entry is None or len(link.references) >= REFERENCES_MAX:
            _send(link, NotFound(ref_id))
            return
        # The reference begins before the reply is sent: the worker may be killed right after it has received it.
        self._ref(link, ref_id, entry)  # SYNC referenced
        try:
            _send(link, Found(ref_id), entry.fd)
            self.hits += 1
        except OSError as error:  # ETOOMANYREFS: too many fds are in flight, perhaps because of another worker
            self._log_rejection(link, f"a file descriptor cannot be sent: {error.strerror}")
            self._unref(link.references.pop(ref_id))
            _send(link, NotFound(ref_id))

    def _publish(self, link: WorkerLink, ref_id: int, name: str, frame: Frame) -> None:
        _require_unused(link, ref_id)
        size = sealed_size(frame.fds[0])  # SYNC published: seals cannot be removed, so the check stays valid
        if not size:
            raise ProtocolError("it published an fd that is not a non-empty memfd sealed against writing")
        if name in self._entries:
            return
        reason = self._rejection_reason(link, size)
        if reason:
            self._log_rejection(link, reason)
            return
        entry = self._entries[name] = _Entry(name, frame.detach_fds()[0], size)
        self._ref(link, ref_id, entry)

    def _rejection_reason(self, link: WorkerLink, size: int) -> str:
        used = self.used_bytes
        if used + size > self._limit_bytes:
            return f"{size} bytes in addition to {used} exceed the limit of {self._limit_bytes}"
        if len(self._entries) >= ENTRIES_MAX:
            return f"the cache has {ENTRIES_MAX} programs already"
        if len(link.references) >= REFERENCES_MAX:
            return f"the worker has {REFERENCES_MAX} references already"
        return ""

    @staticmethod
    def _log_rejection(link: WorkerLink, reason: str) -> None:
        """Log, once for each worker, why a program is not shared."""
        if not link.rejection_logged:
            _log.warning("a program of worker %d is not shared: %s", link.worker_pid, reason)
        link.rejection_logged = True

    @staticmethod
    def _ref(link: WorkerLink, ref_id: int, entry: _Entry) -> None:
        link.references[ref_id] = entry
        entry.ref_count += 1

    def _unref(self, entry: _Entry) -> None:
        entry.ref_count -= 1
        if not entry.ref_count:
            self._remove(entry)

    def _invalidate(self, link: WorkerLink, ref_id: int) -> None:
        """Remove an entry. A worker that reports a valid entry as invalid costs the others a private copy, no more."""
        entry = link.references.pop(ref_id, None)
        if entry is None:
            raise ProtocolError(f"it invalidated reference {ref_id}, which it does not have")
        if not link.invalidation_logged:
            _log.warning("worker %d found a shared program corrupt: it is removed", link.worker_pid)
        link.invalidation_logged = True
        self._remove(entry)
        self._unref(entry)

    def _remove(self, entry: _Entry) -> None:
        if self._entries.get(entry.name) is entry:  # else it was invalidated, and another one published
            del self._entries[entry.name]
        entry.close()


def _require_unused(link: WorkerLink, ref_id: int) -> None:
    if ref_id in link.references:
        raise ProtocolError(f"it used the reference id {ref_id} twice")


def _send(link: WorkerLink, message: SharedCacheMessage, *fds: int) -> None:
    try:
        link.channel.send(shared_cache_protocol.encode(message), fds, NO_WAIT)
    except MissedDeadlineTransient:
        raise ProtocolError("it does not read its replies") from None
