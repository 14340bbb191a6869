"""The shared program cache: its protocol, the end of the workers, and that of the supervisor.

The workers of one supervisor, for clients of one uid, share the constants of a compiled program through a memfd that is
sealed against writing and contains the bytes of the program's cache file. A worker looks the entry up first, and
publishes it after it has compiled the model or read the file. Memory from a lookup is untrusted until its digest has
been verified. The reference ends when the last array over the mapping is garbage-collected. Model files of hosted
runtimes are shared in the same way (`shared_files`).

A failure never fails a preparation: it is logged, and the worker uses a private copy. An embedded driver has no
supervisor, and a supervisor may be killed; then lookups return None immediately. A lookup that takes longer than
LOOKUP_TIMEOUT_NS (the supervisor may be stopped) returns None as well; its late reply is recognized by its id and
discarded, and the next lookup tries again.
"""

from __future__ import annotations

import itertools
import os
import select
import threading
import time
import weakref
from collections.abc import Sequence
from enum import Enum
from typing import Annotated, Protocol, TypeAlias

import msgspec
from msgspec import Meta, Struct

from nnfmq.base.channel import FDS_MAX, NO_WAIT, Channel, Frame
from nnfmq.base.logs import rate_limited
from nnfmq.base.memory import Memory, sealed_size
from nnfmq.hal.client_class import ClientClass
from nnfmq.hal.errors import (
    DeadObject,
    DeviceUnavailable,
    InvalidArgument,
    MissedDeadlineTransient,
    NnfmqError,
    ProtocolError,
    TransportError,
)
from nnfmq.serialize.message_codec import MessageCodec

__all__ = [
    "ENTRIES_MAX",
    "REFERENCES_MAX",
    "STORED_FILES_MAX",
    "ClassChanged",
    "CopyPages",
    "Found",
    "GoOn",
    "Invalidate",
    "Lookup",
    "NotFound",
    "OpenEntry",
    "OpenStatistics",
    "Opened",
    "PagesCopied",
    "Publish",
    "Release",
    "Sender",
    "SetClass",
    "SharedCacheClient",
    "SharedCacheMessage",
    "SharedCacheServer",
    "SharedProgram",
    "Store",
    "WorkerLink",
    "WorkerRequests",
    "connect",
    "decode",
    "encode",
    "fd_count",
    "shared_cache",
]


# ----------------------------------------------------------------------------------------------------------------------
# Messages between workers and their supervisor about shared programs, and their encoding.
#
#     sender      message      fields             file descriptor   meaning
#     worker      Lookup       ref_id, name       -                 request the entry; replied to with Found or NotFound
#     supervisor  Found        ref_id             the memory        the worker now has a reference to the entry
#     supervisor  NotFound     ref_id             -                 there is no such entry
#     worker      Publish      ref_id, name       the memory        add an entry; not replied to
#     worker      Release      ref_id             -                 drop the reference
#     worker      Invalidate   ref_id             -                 the content does not match the name: remove entry
#     worker      Store        ref_id, files      memory, pipe      write the files of entries; close the pipe then
#     worker      OpenEntry     ref_id, name       -                 open the file of the entry; Opened or NotFound
#     supervisor  Opened       ref_id             the file          for reading; nobody has verified it
#     worker      GoOn         ref_id, pools      requests, pools   compile these models after the worker's exit
#     worker      SetClass     ref_id, worker_pid,   -              give a client another class; replied to with
#                              client_class                         ClassChanged
#     supervisor  ClassChanged ref_id, reason     -                 it has the class; or not, for a reason
#     worker      CopyPages    ref_id             -                 copy the clients' pages of statistics; replied to
#     supervisor  PagesCopied  ref_id             -                 with PagesCopied
#     worker      OpenStatistics ref_id           -                 copy the statistics that the client may see; Opened
#
# The name of an entry is a SHA-256 digest in hexadecimal, that of a kernel with its folder before it. A `ref_id`
# identifies one reference of one worker to an entry; the worker chooses it and uses it once. That of Store, OpenEntry,
# GoOn and SetClass identifies no reference: a worker may not write files, start programs (`base.sandbox`) or decide
# about clients, and with a uid of its own not open files of the cache, so it asks its supervisor. Both ends are one
# build of nnfmq, so messages have no version. The two ends, the worker's and the supervisor's, are below.


STORED_FILES_MAX = 256  # in one message
EntryName: TypeAlias = Annotated[str, Meta(pattern=r"^(kernels/)?[0-9a-f]{64}\Z", min_length=64, max_length=72)]
FileSize: TypeAlias = Annotated[int, Meta(ge=1, le=2**63 - 1)]
RefId: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Pid: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class Sender(Enum):
    """The two ends of a connection."""

    WORKER = "worker"
    SUPERVISOR = "supervisor"


class SharedCacheMessage(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base class of the messages."""

    ref_id: RefId


class Lookup(SharedCacheMessage, frozen=True):
    """Request for an entry. The reply is Found or NotFound with the same `ref_id`."""

    name: EntryName


class Publish(SharedCacheMessage, frozen=True):
    """A new entry, with an fd of memory that is sealed against writing and resizing."""

    name: EntryName


class Release(SharedCacheMessage, frozen=True):
    """The worker drops a reference. An unknown `ref_id` is ignored: its Publish or Lookup may have been rejected."""


class Invalidate(SharedCacheMessage, frozen=True):
    """The memory of a reference does not contain the entry; the worker drops the reference as well."""


class Store(SharedCacheMessage, frozen=True):
    """Write memory that is sealed against writing to the files of entries. Nobody holds the pipe open afterwards.

    `files` are the name and the size of each, which follow one another in the memory.
    """

    files: Annotated[tuple[tuple[EntryName, FileSize], ...], Meta(min_length=1, max_length=STORED_FILES_MAX)]


class OpenEntry(SharedCacheMessage, frozen=True):
    """Request for the file of an entry. The reply is Opened or NotFound with the same `ref_id`."""

    name: EntryName


class GoOn(SharedCacheMessage, frozen=True):
    """Start the process that compiles models whose client has left (`compilation.unfinished`).

    The first fd is the requests' memory, which is sealed against writing; the other ones are their pools.
    """

    pools: Annotated[int, Meta(ge=0, lt=FDS_MAX)]

    @property
    def fd_count(self) -> int:
        """The number of fds that come with it."""
        return 1 + self.pools


class SetClass(SharedCacheMessage, frozen=True):
    """Give the client that a worker serves another class; 0 = the sender's. The reply is ClassChanged."""

    worker_pid: Pid
    client_class: ClientClass


class ClassChanged(SharedCacheMessage, frozen=True):
    """Reply to SetClass: the reason why the class stays as it was, for the client; empty if it was changed."""

    reason: str


class CopyPages(SharedCacheMessage, frozen=True):
    """Copy what clients have counted themselves to where others read it. The reply is PagesCopied."""


class OpenStatistics(SharedCacheMessage, frozen=True):
    """Copy those statistics that this worker's client may see. The reply is Opened, or NotFound."""


class PagesCopied(SharedCacheMessage, frozen=True):
    """Reply to CopyPages."""


class Found(SharedCacheMessage, frozen=True):
    """Reply to Lookup, with an fd of the entry's memory."""


class Opened(SharedCacheMessage, frozen=True):
    """Reply to OpenEntry, with an fd of the file that is open for reading; and to OpenStatistics, with their memory."""


class NotFound(SharedCacheMessage, frozen=True):
    """Reply to Lookup and OpenEntry: there is no such entry, or the worker has the maximum number of references."""


_codec: MessageCodec[SharedCacheMessage] = MessageCodec(
    {
        Sender.WORKER: (
            Lookup,
            Publish,
            Release,
            Invalidate,
            Store,
            OpenEntry,
            GoOn,
            SetClass,
            CopyPages,
            OpenStatistics,
        ),
        Sender.SUPERVISOR: (Found, Opened, NotFound, ClassChanged, PagesCopied),
    },
    {Publish: 1, Found: 1, Opened: 1, Store: 2, GoOn: "fd_count"},
)
fd_count, encode, decode = _codec.fd_count, _codec.encode, _codec.decode


# ----------------------------------------------------------------------------------------------------------------------
# The worker's end.


LOOKUP_TIMEOUT_NS = 250_000_000  # the supervisor may be busy starting another worker
STORE_TIMEOUT_S = 10.0  # to write a file
_SET_CLASS_TIMEOUT_NS = 5_000_000_000
_log = rate_limited("nnfmq.sharing")


class SharedProgram(Struct, frozen=True):
    """Memory that another worker published, which the receiver closes, and the id of the reference to it."""

    memory: Memory
    ref_id: int


class SharedCacheClient:
    """A worker's connection to the shared program cache of its supervisor. Thread-safe.

    `opens_files` says whether the supervisor opens the files of the cache for this worker, which may not.
    """

    def __init__(self, channel: Channel, *, opens_files: bool = False) -> None:
        self.opens_files = opens_files
        self._channel = channel
        self._open = [channel]  # list.pop is atomic: exactly one thread closes the channel, without a lock
        self._ref_ids = itertools.count(1)
        self._lookup_lock = threading.Lock()
        self._responds = True  # the supervisor, to the last request

    @property
    def is_closed(self) -> bool:
        """Whether the connection has ended, because the supervisor is gone or because of `close`."""
        return not self._open

    def look_up(self, name: str, owner: object = None) -> SharedProgram | None:
        """Return the program that another worker published as `name`, or None. Blocks up to LOOKUP_TIMEOUT_NS.

        The reference ends when `owner` is garbage-collected; by default, the mapping.
        """
        ref_id = next(self._ref_ids)
        found = self._request(Lookup(ref_id, name), LOOKUP_TIMEOUT_NS)
        if found is None or not found[1]:
            return None
        (fd,) = found[1]
        try:
            memory = Memory.adopt_constant(fd)  # SYNC published: the publisher sealed the memory first
        except NnfmqError as error:
            _log.warning("a program that another worker shares is not used: %s", error)
            self._send(Invalidate(ref_id) if isinstance(error, InvalidArgument) else Release(ref_id))
            return None
        self._release_with(owner or memory.view.obj, ref_id)
        return SharedProgram(memory, ref_id)

    def publish(self, name: str, memory: Memory, owner: object = None) -> None:
        """Share constant `memory` with other workers. Borrows `memory`. Does not block. `owner` is as in `look_up`."""
        ref_id = next(self._ref_ids)
        if self._send(Publish(ref_id, name), memory.fileno()):  # SYNC published: the memory is sealed
            self._release_with(owner or memory.view.obj, ref_id)

    def invalidate(self, program: SharedProgram) -> None:
        """Report that the memory does not contain the entry of its name, so that no other worker gets it."""
        self._send(Invalidate(program.ref_id))

    def store(self, files: Sequence[tuple[str, int]], memory: Memory, *, waits: bool = True) -> None:
        """Let the supervisor write constant `memory` to the files of entries. Borrows `memory`. Raises nothing.

        `files` are as in `Store`. If it `waits`, it blocks until they are written, or cannot be, at most
        STORE_TIMEOUT_S; not if the supervisor has not replied to the last request, as when it is stopped.
        """
        try:
            done, end = os.pipe2(os.O_CLOEXEC)
        except OSError as error:
            _log.warning("a program is not stored: %s", error.strerror)
            return
        try:
            try:
                is_sent = self._send(Store(next(self._ref_ids), tuple(files)), memory.fileno(), end)
            finally:
                os.close(end)
            poll = select.poll()
            poll.register(done, 0)  # POLLHUP is reported in any case
            if waits and is_sent and self._responds and not poll.poll(STORE_TIMEOUT_S * 1000):
                _log.warning("a program is not stored within %g s", STORE_TIMEOUT_S)
        finally:
            os.close(done)

    def open_file(self, name: str) -> int | None:
        """Return an fd of the file of an entry, which the caller closes; None if there is none. Blocks as `look_up`.

        Returns None immediately if the supervisor has not replied to the last request: a program may have many files.
        """
        if not self._responds:
            return None
        found = self._request(OpenEntry(next(self._ref_ids), name), LOOKUP_TIMEOUT_NS)
        return found[1][0] if found is not None and found[1] else None

    def go_on(self, requests: Memory, pools: Sequence[int]) -> None:
        """Let the supervisor start a process that compiles models. Borrows the arguments. Does not block."""
        if len(pools) < FDS_MAX:
            self._send(GoOn(next(self._ref_ids), len(pools)), requests.fileno(), *pools)

    def set_class(self, worker_pid: int, client_class: ClientClass) -> str:
        """Let the supervisor give the client of a worker another class; 0 = this worker's. Blocks for some seconds.

        Return the reason why it stays as it was, for the client; empty if it was changed.

        Raises:
            DeviceUnavailable: If the supervisor does not reply: it may have been killed.
        """
        found = self._request(SetClass(next(self._ref_ids), worker_pid, client_class), _SET_CLASS_TIMEOUT_NS)
        if found is None or not isinstance(found[0], ClassChanged):
            raise DeviceUnavailable("the supervisor of this driver does not respond; connect to the driver again")
        return found[0].reason

    def open_statistics(self) -> int | None:
        """Return an fd of a copy of what this worker's client may see, which the caller closes; None: none."""
        found = self._request(OpenStatistics(next(self._ref_ids)), LOOKUP_TIMEOUT_NS)
        return found[1][0] if found is not None and found[1] else None

    def copy_pages(self) -> None:
        """Let the supervisor copy what clients have counted themselves. Blocks until it has, for 250 ms at most."""
        self._request(CopyPages(next(self._ref_ids)), LOOKUP_TIMEOUT_NS)

    def close(self) -> None:
        """Close the connection; the supervisor drops this worker's references. Idempotent."""
        self._end(None)

    def _request(self, request: SharedCacheMessage, timeout_ns: int) -> tuple[SharedCacheMessage, list[int]] | None:
        """Return the supervisor's reply, and its fds, which the caller owns; None if it does not come in time."""
        deadline_ns = time.monotonic_ns() + timeout_ns
        if not self._lookup_lock.acquire(timeout=timeout_ns / 1e9):
            return None
        try:
            # SYNC referenced: from the moment the supervisor reads a Lookup, this worker may have a reference
            if not self._send(request):
                return None
            return self._receive_reply(request.ref_id, deadline_ns)
        except MissedDeadlineTransient:
            self._send(Release(request.ref_id))
            if self._responds:
                _log.warning("the supervisor does not respond: programs are not shared now")
            self._responds = False
        except (TransportError, OSError) as error:
            self._end(error)
        finally:
            self._lookup_lock.release()
        return None

    def _receive_reply(self, ref_id: int, deadline_ns: int) -> tuple[SharedCacheMessage, list[int]]:
        while True:
            with self._channel.receive(deadline_ns, body_bytes_max=0) as frame:
                self._responds = True
                reply = decode(frame.data, sender=Sender.SUPERVISOR, fds=frame.fd_count)
                if reply.ref_id != ref_id:
                    continue  # the late reply of a lookup that timed out, whose reference was released then
                if frame.fds_truncated:  # this process has no free fd
                    self._send(Release(ref_id))
                return reply, frame.detach_fds()

    def _release_with(self, owner: object, ref_id: int) -> None:
        """Release a reference when `owner` is garbage-collected. That may happen on any thread: takes no lock."""
        weakref.finalize(owner, self._send, Release(ref_id)).atexit = False  # SYNC released

    def _send(self, message: SharedCacheMessage, *fds: int) -> bool:
        """Send without blocking. If that fails, close the connection and return False."""
        if self.is_closed:
            return False
        try:
            self._channel.send(encode(message), fds, NO_WAIT)
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


def connect(fd: int, *, opens_files: bool = False) -> None:
    """Connect this worker to its supervisor's shared program cache. Takes ownership of `fd`."""
    global _client  # noqa: PLW0603  one for each process, as the compile server
    _client = SharedCacheClient(Channel.adopt(fd), opens_files=opens_files)


def shared_cache() -> SharedCacheClient | None:
    """Return this worker's connection to the shared program cache; None if there is none, or it has ended."""
    return None if _client is None or _client.is_closed else _client


# ----------------------------------------------------------------------------------------------------------------------
# The supervisor's end.
#
# An entry is a name, an fd of the memory that contains the program's constants, and a count of the workers' references
# to it. A worker gets a reference when it publishes an entry and when a lookup finds one; the reference ends when the
# worker releases it, when its connection closes, and when the worker exits. With the last reference the fd is closed,
# so no memory outlives its users. The supervisor never maps, reads or hashes the memory: the worker that looks an entry
# up verifies it (`files.read_memory`).
#
# A client may control its worker, so workers are not trusted. Only memory that nobody can write or resize is accepted,
# within limits of count and size. No call here blocks. A worker that violates the protocol loses its connection (with
# one log line) and goes on without shared programs. Publishing a name that exists does nothing: the first entry stays,
# and the second publisher uses its own copy.


ENTRIES_MAX = 256  # one fd each; together with CLIENTS_MAX workers this stays below the usual limit of 1024 fds
REFERENCES_MAX = 128  # of one worker


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


class WorkerRequests(Protocol):
    """The supervisor's work for its workers, which may not do it themselves. Nothing of it blocks or raises."""

    def store(self, files: Sequence[tuple[str, int]], memory: int, pipe: int) -> None:
        """Write the files of entries, whose names and sizes are as in `Store`. Borrows the fds."""

    def open(self, name: str) -> int | None:
        """Return an fd of the file of an entry, which the caller closes; None if there is none."""

    def go_on(self, requests: int, pools: Sequence[int]) -> None:
        """Start the process that compiles these models. Borrows the fds."""

    def set_class(self, sender_pid: int, worker_pid: int, client_class: ClientClass) -> str:
        """Give the client of a worker another class, for the worker `sender_pid`; return the reason if that fails."""
        ...

    def open_statistics(self) -> int | None:
        """Return an fd of a copy of the statistics that the clients may see, which the caller closes; None: none."""

    def copy_pages(self) -> None:
        """Copy what the clients have counted themselves to where others read it."""


class SharedCacheServer:
    """The programs that the workers of one driver share. Used by one thread, which also closes all links.

    `limit_bytes` bounds the size of all entries together, `entries_max` their number (by default ENTRIES_MAX), for each
    is an fd of this process. `requests` does what else workers ask for. `lookups` counts how often workers asked for a
    program, and `hits` how often there was one.
    """

    def __init__(
        self, limit_bytes: int, requests: WorkerRequests | None = None, entries_max: int | None = None
    ) -> None:
        self._limit_bytes = limit_bytes
        self.entries_max = ENTRIES_MAX if entries_max is None else entries_max
        self._requests = requests
        self._entries: dict[str, _Entry] = {}
        self.lookups = self.hits = 0

    @property
    def program_count(self) -> int:
        """The number of programs that are shared."""
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
        match decode(frame.data, sender=Sender.WORKER, fds=frame.fd_count):
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
            case SetClass(ref_id, worker_pid, client_class):
                reason = "nobody decides about classes here"
                if self._requests is not None:
                    reason = self._requests.set_class(link.worker_pid, worker_pid, client_class)
                _send(link, ClassChanged(ref_id, reason))
            case OpenEntry(ref_id, name):
                self._send_opened(link, ref_id, None if self._requests is None else self._requests.open(name))
            case OpenStatistics(ref_id):
                self._send_opened(link, ref_id, None if self._requests is None else self._requests.open_statistics())
            case CopyPages(ref_id):
                if self._requests is not None:
                    self._requests.copy_pages()
                _send(link, PagesCopied(ref_id))
            case (Store() | GoOn()) as request if not frame.fds_truncated:
                self._do(link, request, frame.fds)

    def _do(self, link: WorkerLink, request: Store | GoOn, fds: Sequence[int]) -> None:
        size = sealed_size(fds[0])
        if not size:
            raise ProtocolError("it sent an fd that is not a non-empty memfd sealed against writing")
        if size > self._limit_bytes:
            self._log_rejection(link, f"{size} bytes exceed the limit of {self._limit_bytes}")
        elif isinstance(request, Store) and sum(size for _, size in request.files) != size:
            raise ProtocolError(f"it asked to store files of other sizes than the memory of {size} bytes")
        elif self._requests is not None and isinstance(request, Store):
            self._requests.store(request.files, *fds)
        elif self._requests is not None:
            self._requests.go_on(fds[0], fds[1:])

    def _send_opened(self, link: WorkerLink, ref_id: int, fd: int | None) -> None:
        """Send an fd, which is closed; None: there is nothing."""
        if fd is None:
            _send(link, NotFound(ref_id))
            return
        try:
            _send(link, Opened(ref_id), fd)
        except OSError as error:  # ETOOMANYREFS, as in `_look_up`
            self._log_rejection(link, f"a file descriptor cannot be sent: {error.strerror}")
            _send(link, NotFound(ref_id))
        finally:
            os.close(fd)

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
        if len(self._entries) >= self.entries_max:
            return f"the cache has {self.entries_max} programs already"
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
        link.channel.send(encode(message), fds, NO_WAIT)
    except MissedDeadlineTransient:
        raise ProtocolError("it does not read its replies") from None
