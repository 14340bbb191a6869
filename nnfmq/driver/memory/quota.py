"""Per-client quota of memory that the driver holds.

Without a limit, a client could make the driver allocate, map, and so keep alive, as much memory as the machine has. The
quota is charged, before the memory is taken, with

* received memory, by the size of its file, until it is closed;
* the private copies of a model's constants, until the last user of the model (a burst, an execution) has dropped it;
* the operand values of executions and the arenas of compiled code, as long as an execution is bound or they are cached
  for the next one (`engines.memory`);
* copies of data in files, and managed buffers;
* large messages while they wait to be handled, and the objects into which messages and models are decoded; a model's
  until its last user has dropped it.

It is not charged with what a device compiles, whether that is private to this worker or shared: the size of a compiled
program grows with its model, which is charged to each client that has it. Nor with what a kernel allocates within one
operation, and with results whose shape depends on the data; RLIMIT_DATA bounds these.

The limit is $NNFMQ_CLIENT_MEMORY_MIB, by default half of $NNFMQ_MEMORY_MIB, which is by default a quarter of the
machine's memory and limits all clients of a supervisor together. Each session has one quota.
"""

from __future__ import annotations

import os
import resource
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from enum import IntEnum
from functools import partial
from types import MappingProxyType
from typing import TypeAlias, TypeVar

from nnfmq.base import settings
from nnfmq.base.channel import close_all
from nnfmq.base.file_memory import FileMemory
from nnfmq.base.limits import data_bytes, limit_softly
from nnfmq.base.memory import Memory, is_mappable
from nnfmq.base.ownership import Closable
from nnfmq.engines.memory import trim_memory
from nnfmq.hal.errors import (
    InvalidArgument,
    ResourceExhausted,
    ResourceExhaustedPersistent,
    ResourceExhaustedTransient,
)
from nnfmq.hal.types import Protection
from nnfmq.serialize.messages import MemoryData

__all__ = [
    "STACK_BYTES",
    "UNCHARGED_BYTES",
    "MemoryQuota",
    "MemoryShare",
    "MemoryShares",
    "QuotaCharge",
    "SharedCount",
    "add_to_limit",
    "adopt_files",
    "limit_private_memory",
    "map_shares",
    "quota_limit_bytes",
    "total_limit_bytes",
    "user_limit_bytes",
]


# ----------------------------------------------------------------------------------------------------------------------
# What all clients of one driver may have together: shared memory with a page for each worker.
#
# Each worker writes the first word of its own page, with the bytes that it has charged to its client; the sum of these
# words is the total. The next words are the numbers of objects that its client has (`object_limits`). So nothing has to
# be added atomically, and a worker that dies at any instruction leaves no wrong count: the supervisor sets its words to
# 0 when it has exited. Two workers that charge at the same time both write before they read the sum, so both may be
# refused where one would fit.
#
# Workers are not trusted: each inherits the mapping of its own page and can map the others for reading only, because
# the memory is sealed against new writable mappings. A worker that is a program of its own ($NNFMQ_WORKER_START)
# inherits no mapping; then the memory is not sealed, and the worker keeps no fd by which it could map it again.
#
# A word counts as no less than 0 and no more than a client may have, so a worker that writes anything else takes no
# more from the other clients than its client could; and the words of one user's workers together as no more than a user
# may have.


_WORD_BYTES = 8
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PAGE_WORDS = _PAGE_BYTES // _WORD_BYTES
_LIMIT, _USER_LIMITS, _OWNERS = 0, 1, 3
"""Words of the first page, which the supervisor writes: the limit of all clients, those of the clients of one user in
the order of the words that they limit, and for each slot, from 1 on, the client's uid."""


class SharedCount(IntEnum):
    """A word of a worker's page that counts objects; the first one has bytes."""

    MODELS = 1
    THREADS = 2


_WORDS = 1 + len(SharedCount)


class MemoryShares(Closable):
    """The supervisor's side: it gives each worker a slot. Owns its memory; close it, or use `with`.

    A worker inherits the mapping of its own page, and other forked children nothing. `limit` and `user_limit` are bytes
    of all clients, and of those of one user, and `user_counts` numbers of objects of a user; 0: no limit. Without
    `one_writer` workers map their pages themselves (`map_shares`).
    """

    def __init__(
        self,
        limit: int,
        slots: int,
        user_limit: int | None = None,
        user_counts: Mapping[SharedCount, int] = MappingProxyType({}),
        *,
        one_writer: bool = True,
    ) -> None:
        assert _OWNERS + slots < _PAGE_WORDS
        self.slots = slots
        self.memory = Memory.create((1 + slots) * _PAGE_BYTES, "nnfmq-shares", one_writer=one_writer)
        self._words = self.memory.view.cast("q")
        self.memory.keep_from_children()
        self._words[_LIMIT], self._words[_USER_LIMITS] = limit, limit if user_limit is None else user_limit
        for count, allowed in user_counts.items():
            self._words[_USER_LIMITS + count] = allowed
        self._free = list(range(slots, 0, -1))

    def take(self, uid: int = 0) -> int:
        """Return a slot that no worker has, for a client of this uid.

        Raises:
            IndexError: If all are taken.
        """
        slot = self._free.pop()
        self._words[_OWNERS + slot] = uid
        return slot

    def release(self, slot: int) -> None:
        """Take back the slot of a worker that has exited, or was never started."""
        for word in range(_WORDS):
            self._words[slot * _PAGE_WORDS + word] = 0
        self._free.append(slot)

    def inherited(self, slot: int) -> AbstractContextManager[None]:
        """Let children that are forked in the block inherit the page of a slot."""
        return self.memory.inherited(slot * _PAGE_BYTES, _PAGE_BYTES)

    def own_words(self, slot: int) -> memoryview:
        """Return the words of a slot, for the worker that has inherited its page, and whose children do not."""
        self.memory.keep_from_children(slot * _PAGE_BYTES, _PAGE_BYTES)
        return self._words[slot * _PAGE_WORDS :][:_WORDS]

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._words = memoryview(bytes(_WORD_BYTES)).cast("q")
        self.memory.close()


def map_shares(fd: int, slot: int) -> tuple[memoryview, Memory]:
    """Map the words of a slot, and all shares for reading, in a worker that inherits no mapping. Takes `fd`.

    The memory is not sealed against writing then, so no fd is left by which the worker could map the other pages.

    Raises:
        OSError: If no fd is left, or /proc is missing.
    """
    shares = Memory.adopt(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC), protection=Protection.READ)
    with Memory.adopt(fd, _PAGE_BYTES, slot * _PAGE_BYTES) as own:
        words = own.view.cast("q")[:_WORDS]  # which keep the mapping
        own.forget_file()
    return words, shares


class MemoryShare:
    """A worker's side: `own_words`, which it writes, and `memory`, in which it reads those of all workers.

    Takes ownership of `memory`, which it keeps as long as the process lives. `client_limit` is how many bytes a client
    may have, and `slot` this worker's. `limit` is how many all clients may have together, and `user_limit` how many the
    clients of one uid.
    """

    def __init__(self, own_words: memoryview, memory: Memory, client_limit: int, slot: int) -> None:
        self._memory = memory
        self._own_words = own_words
        words = memory.view.cast("q")
        self._words, *self._counts = (words[_PAGE_WORDS + word :: _PAGE_WORDS] for word in range(_WORDS))
        self._owners = words[_OWNERS + 1 :][: len(self._words)]
        self._uid = self._owners[slot - 1]
        self._client_limit = client_limit
        self.limit, self.user_limit = words[_LIMIT], words[_USER_LIMITS]
        self._user_limits = words[_USER_LIMITS:][:_WORDS].tolist()

    def publish(self, charged: int) -> None:
        """Tell the other workers how many bytes this one has charged."""
        self._own_words[0] = charged  # one aligned store of 8 bytes

    def publish_count(self, count: SharedCount, value: int) -> None:
        """Tell the other workers how many objects this client has."""
        self._own_words[count] = value

    def user_limit_of(self, count: SharedCount) -> int:
        """Return how many objects the clients of one user may have, 0 if there is no such limit."""
        return int(self._user_limits[count])

    def user_count(self, count: SharedCount) -> int:
        """Return how many objects the clients of this client's user have."""
        values = self._counts[count - 1].tolist()
        own = zip(self._owners.tolist(), values, strict=True)
        return sum(max(value, 0) for owner, value in own if owner == self._uid)

    def total(self) -> int:
        """Return the sum of what all workers have charged, within the limits of a client and of a user."""
        if self.user_limit >= self.limit:
            return sum(self._charged())
        return sum(min(value, self.user_limit) for value in self._of_users().values())

    def user_total(self) -> int:
        """Return the sum of what the workers of this client's user have charged, each within the limits of a client."""
        return self._of_users()[self._uid]

    def _of_users(self) -> Counter[int]:
        sums: Counter[int] = Counter()
        for owner, value in zip(self._owners.tolist(), self._charged(), strict=True):
            sums[owner] += value
        return sums

    def _charged(self) -> list[int]:
        values = self._words.tolist()
        if min(values) < 0 or max(values) > self._client_limit:
            values = [min(max(value, 0), self._client_limit) for value in values]
        return values


# ----------------------------------------------------------------------------------------------------------------------
# Per-client quota of memory that the driver holds.


_MIB = 1 << 20

ReceivedMemory: TypeAlias = Memory | FileMemory
MemoryT = TypeVar("MemoryT", Memory, FileMemory, ReceivedMemory)


def total_limit_bytes() -> int:
    """Return the limit for all clients of a driver together, in bytes."""
    configured_mib = settings.MEMORY_MIB.value()
    if configured_mib is not None:
        return configured_mib * _MIB
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


def user_limit_bytes() -> int:
    """Return the limit for the clients of one user of a driver that serves several, in bytes."""
    configured_mib = settings.USER_MEMORY_MIB.value()
    return total_limit_bytes() // 2 if configured_mib is None else configured_mib * _MIB


def quota_limit_bytes() -> int:
    """Return the limit for one client, in bytes."""
    configured_mib = settings.CLIENT_MEMORY_MIB.value()
    return total_limit_bytes() // 2 if configured_mib is None else configured_mib * _MIB


class QuotaCharge:
    """Bytes charged against a quota until `close`, or until this object is garbage-collected."""

    __slots__ = ("_quota", "_size")

    def __init__(self, quota: MemoryQuota, size: int) -> None:
        self._quota = quota
        self._size = size

    def close(self) -> None:
        """Return the bytes to the quota. Idempotent."""
        size, self._size = self._size, 0
        self._quota._uncharge(size)

    def __del__(self) -> None:
        self.close()


class MemoryQuota:
    """The quota of one client. Thread-safe. `charged_bytes` is the sum of all charges, `limit_bytes` its maximum.

    `share` is this client's part of what all clients of the driver may have; None: no other clients count. `on_change`
    gets each new `charged_bytes`.
    """

    def __init__(
        self,
        limit: int | None = None,
        share: MemoryShare | None = None,
        on_change: Callable[[int], object] = lambda _charged: None,
    ) -> None:
        self.limit_bytes = quota_limit_bytes() if limit is None else limit
        self._share = share
        self._on_change = on_change
        # Reentrant: the garbage collector may close a charge in a thread that holds the lock.
        self._lock = threading.RLock()
        self.charged_bytes = 0

    @property
    def free_bytes(self) -> int:
        """The number of bytes that can be charged now."""
        return max(self.limit_bytes - self.charged_bytes, 0)

    @property
    def is_scarce(self) -> bool:
        """See `Budget.is_scarce`."""
        return self.charged_bytes * 2 > self.limit_bytes

    def adopt_mapped(self, fds: Sequence[int]) -> list[Memory]:
        """Map received memory that must be mapped, such as a queue's; it is charged until it is closed.

        Takes ownership of `fds`: all of them are closed if one cannot be mapped.

        Raises:
            InvalidArgument: If a file must not be mapped (see `Memory.adopt`).
            ResourceExhausted: If the quota is exhausted.
        """
        return _adopt_each(fds, [self._adopt_mapped for _ in fds])

    def adopt_all(self, fds: Sequence[int], memories: Iterable[MemoryData]) -> list[ReceivedMemory]:
        """Take ownership of one fd for each of `memories`: sealed memory is mapped, other files are not.

        Mapped memory is charged until it is closed; of a file, only later copies are charged.

        Raises:
            InvalidArgument: If a memory's description is invalid.
            ResourceExhausted: If the quota is exhausted.
        """
        return _adopt_each(fds, [partial(self._adopt, data=data) for data in memories])

    def _adopt(self, fd: int, data: MemoryData) -> ReceivedMemory:
        try:
            protection = _protection_of(data)
            is_mapped = is_mappable(fd)
        except BaseException:
            close_all([fd])
            raise
        if is_mapped:
            return self._adopt_mapped(fd, data.size_bytes, data.offset, protection)
        return FileMemory.adopt(fd, data.size_bytes, data.offset, protection)

    def _adopt_mapped(
        self, fd: int, size_bytes: int | None = None, offset: int = 0, protection: Protection = Protection.READ_WRITE
    ) -> Memory:
        # The whole file is charged: the peer can allocate all of its pages, however little of it is mapped here. It is
        # charged before it is mapped, because a sparse file may be larger than the address space.
        try:
            charge = self.charge(_file_bytes(fd))
        except BaseException:
            close_all([fd])
            raise
        memory = Memory.adopt(fd, size_bytes, offset, protection)
        memory.on_close = charge.close
        return memory

    def charge(self, size: int) -> QuotaCharge:
        """Charge `size` bytes. If that would exceed a limit, first free what is cached for later executions.

        Raises:
            ResourceExhaustedPersistent: If `size` alone exceeds a limit.
            ResourceExhaustedTransient: If it exceeds a limit together with what is charged already.
        """
        if self._try_charge(size) is not None:
            trim_memory()
            refusal = self._try_charge(size)
            if refusal is not None:
                raise refusal
        return QuotaCharge(self, size)

    def _try_charge(self, size: int) -> ResourceExhausted | None:
        """Charge `size` bytes, or return the error."""
        with self._lock:
            charged = self.charged_bytes + size
            if charged > self.limit_bytes:
                option = f"${settings.CLIENT_MEMORY_MIB.variable}"
                return _refusal(size, charged, self.limit_bytes, "this client's", option)
            self._set_charged(charged)
            refusal = None if self._share is None else _refusal_of_others(size, self._share)
            if refusal is not None:
                self._set_charged(charged - size)
            return refusal

    def _uncharge(self, size: int) -> None:
        with self._lock:
            self._set_charged(self.charged_bytes - size)

    def _set_charged(self, charged: int) -> None:
        self.charged_bytes = charged
        self._on_change(charged)
        if self._share is not None:
            self._share.publish(charged)


def _file_bytes(fd: int) -> int:
    """Return the size of a received file; 0 if `fd` is not open, which `Memory.adopt` reports."""
    try:
        return os.fstat(fd).st_size
    except OSError:
        return 0


def _refusal_of_others(size: int, share: MemoryShare) -> ResourceExhausted | None:
    """Return the error if all clients, or those of this one's user, have more than they may; `size` was charged."""
    total = share.total()
    if total > share.limit:
        option = f"${settings.MEMORY_MIB.variable}, {settings.MEMORY_MIB.options}"
        return _refusal(size, total, share.limit, "all clients'", option)
    if share.user_limit < share.limit and (total := share.user_total()) > share.user_limit:
        return _refusal(size, total, share.user_limit, "this user's", f"${settings.USER_MEMORY_MIB.variable}")
    return None


def _refusal(size: int, charged: int, limit: int, whose: str, option: str) -> ResourceExhausted:
    kind = ResourceExhaustedPersistent if size > limit else ResourceExhaustedTransient
    return kind(
        f"{size} bytes more would make {charged} of {whose} memory in the driver; the limit is {limit}. "
        f"The driver's {option} sets it, in MiB"
    )


def adopt_files(fds: Sequence[int], memories: Iterable[MemoryData]) -> list[FileMemory]:
    """Take ownership of one fd for each of `memories`, to be read and never mapped. Nothing is charged.

    Raises:
        InvalidArgument: If a memory's description is invalid.
    """
    return _adopt_each(fds, [partial(_adopt_file, data=data) for data in memories])


def _adopt_file(fd: int, data: MemoryData) -> FileMemory:
    try:
        protection = _protection_of(data)
    except BaseException:
        close_all([fd])
        raise
    return FileMemory.adopt(fd, data.size_bytes, data.offset, protection)


def _protection_of(data: MemoryData) -> Protection:
    if data.protection & ~Protection.READ_WRITE.value:
        raise InvalidArgument(
            f"protection {data.protection:#x} of a memory; 1 (read) and 2 (write) are known (N-VAL-13)"
        )
    return Protection(data.protection)


def _adopt_each(fds: Sequence[int], adopt: Sequence[Callable[[int], MemoryT]]) -> list[MemoryT]:
    """Call each function with its fd, of which it takes ownership. If one raises, close everything and re-raise."""
    with ExitStack() as undo:
        remaining = list(fds)
        undo.callback(lambda: close_all(remaining))
        memories = []
        for function in adopt:
            memories.append(function(remaining.pop(0)))
            undo.callback(memories[-1].close)
        undo.pop_all()
        return memories


# ----------------------------------------------------------------------------------------------------------------------
# The limit of a worker's private memory that the kernel enforces (RLIMIT_DATA), also of what no quota is charged with.
#
# It is the client's limit and UNCHARGED_BYTES, beside what the process has when its session begins. Where memory is
# missing, an allocation fails: Python raises MemoryError, and the call gets RESOURCE_EXHAUSTED. The kernel counts
# private writable memory when it is mapped, not when it is used, so each burst's thread adds its stack.


UNCHARGED_BYTES = 384 << 20
"""One message of 256 MiB while it is received, stacks of the session's threads, buffers of BLAS, and programs."""
STACK_BYTES = 2 << 20
"""Of each thread. LLVM in a worker that has no compile process needs the most."""

_lock = threading.Lock()


def limit_private_memory(quota_bytes: int) -> None:
    """Set the limit of this process, whose client's limit is `quota_bytes`. Call it before threads are started."""
    threading.stack_size(STACK_BYTES)
    limit_softly(resource.RLIMIT_DATA, data_bytes() + quota_bytes + UNCHARGED_BYTES)


def add_to_limit(size_bytes: int) -> None:
    """Allow this process `size_bytes` more; less if negative. Does nothing if it has no limit. Thread-safe."""
    with _lock:
        soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
        if soft != resource.RLIM_INFINITY:
            limit_softly(resource.RLIMIT_DATA, soft + size_bytes)
