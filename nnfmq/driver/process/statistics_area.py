"""A driver's statistics area: shared memory that workers write and clients read, or private memory if it is embedded.

Shared memory is sealed against new writable mappings (F_SEAL_FUTURE_WRITE) as soon as the supervisor has mapped it. So
whoever gets its fd can only read, also if they open the file again. Workers inherit the mapping instead of making one:
it is given to the forked child of `inherited`, and to no other. An embedded driver has one client; for each reading it
makes a constant copy. docs/reference/statistics.md describes the layout.

Each client has a page, memory of its own for what it measures itself, which the driver makes and the client maps, too.
The supervisor keeps the pages of all clients: it copies them into the area before one of its clients reads that, and
when a worker has exited, however it ended, it adds what its slot has counted to the past.

A driver that serves several users, or whose workers are programs of their own ($NNFMQ_WORKER_START) and inherit no
mapping, has memory for each worker alone. Readers get a copy from the supervisor: those who
administer the driver of everything, others with the clients of their own uid.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Self

from nnfmq.base.memory import Memory, allocate_pages, write_all
from nnfmq.base.ownership import Closable
from nnfmq.base.processes import pid_namespace
from nnfmq.driver.cache.shared import shared_cache
from nnfmq.hal.errors import DeviceUnavailable
from nnfmq.observe import statistics_layout as layout
from nnfmq.observe.recorder_core import begin_change, end_change, snapshot
from nnfmq.observe.statistics_layout import WORD_BYTES, text_to_words
from nnfmq.observe.statistics_past import add_past
from nnfmq.observe.statistics_writer import SlotWriter

__all__ = ["SharedStatistics", "StatisticsArea", "UserLimits", "WorkerStatistics"]

_COPY_ATTEMPTS = 20
_OF_ALL_CLIENTS = (
    layout.HEADER_PAST,
    layout.CACHE_PROGRAMS,
    layout.CACHE_BYTES,
    layout.CACHE_LOOKUPS,
    layout.CACHE_HITS,
    layout.COMPILE_SERVER_PID,
    layout.COMPILE_REQUESTS,
    layout.REJECTED_CLIENTS,
    layout.DEAD_WORKERS,
)
"""Words of the header that tell what clients of all users do."""


class StatisticsArea:
    """The statistics of an embedded driver, which has one client. Slots count from 0.

    Borrows `page`, that of the client; without it the client counts nothing itself.
    """

    def __init__(self, page: Memory | None = None) -> None:
        self._use(memoryview(bytearray(layout.area_bytes(1))))
        self._fill(1)
        self._page = page
        self._writer = SlotWriter(self._view, 0, None if page is None else page.view)

    def _use(self, view: memoryview) -> None:
        self._view = view
        self._header = view[: layout.HEADER_WORDS * WORD_BYTES].cast("Q")
        self._counts: Counter[int] = Counter()  # not read from the area: a compromised worker can write to it

    def _fill(self, slots: int, past: int = 0) -> None:
        self.set(layout.HEADER_SLOTS, slots)
        self.set(layout.HEADER_PAST, past)
        self.set(layout.CLIENTS_LIMIT, slots)
        self.set(layout.DRIVER_PID, os.getpid())
        self.set(layout.PID_NAMESPACE, pid_namespace())
        self.set(layout.DRIVER_START, time.monotonic_ns())
        self.set(layout.HEADER_MAGIC, layout.MAGIC)

    def open_for_reading(self) -> tuple[int, int]:
        """Return an fd from which a client can map the statistics, and their size. The caller closes the fd.

        Raises:
            ResourceExhaustedTransient: If no memory or no fd is left.
        """
        if self._page is not None:
            self._copy_page(0, self._page)
        data = self._writer.complete_copy(self._view)
        with Memory.create_constant(len(data), lambda fd: write_all(fd, data), layout.DRIVER_PAGE) as copy:
            return os.dup(copy.fileno()), copy.size_bytes

    @property
    def is_for_everybody(self) -> bool:
        """Whether any client may read what `open_for_reading` opens; otherwise those who administer the driver."""
        return False

    @property
    def page(self) -> Memory | None:
        """The page of the client that this process serves, which stays owned by others; None if it has none."""
        return self._page

    def _copy_page(self, slot: int, page: Memory) -> None:
        begin = (layout.slot_at(slot) + layout.CALLS_AT) * WORD_BYTES
        self._view[begin : begin + layout.CALLS_BYTES] = page.view[: layout.CALLS_BYTES]

    def set(self, word: int, value: int) -> None:
        """Publish a word of the header."""
        self._header[word] = value

    def add(self, word: int) -> None:
        """Add 1 to a word of the header."""
        self._counts[word] += 1
        self._header[word] = self._counts[word]

    def set_client_class(self, slot: int, client_class: int) -> None:
        """Publish the class of the client that has a slot, or will have it."""
        begin = (layout.slot_at(slot) + layout.CLIENT_CLASS) * WORD_BYTES
        self._view[begin : begin + WORD_BYTES] = client_class.to_bytes(WORD_BYTES, "little")

    def writer(self, slot: int) -> SlotWriter:
        """Return the writer of a slot."""
        assert slot == 0, "an embedded driver has one client"
        return self._writer


class WorkerStatistics(StatisticsArea, Closable):
    """The statistics of one worker with one slot, of a driver that shares no area among workers. Close it.

    No other worker has this memory, so none sees what clients of other users do. The supervisor copies the slot before
    somebody reads. Takes ownership of `memory`, which the supervisor has made by `create`.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.memory.keep_from_children()
        self._page = None
        self._use(memory.view)

    @classmethod
    def create(cls, *, one_writer: bool) -> Self:
        """Return the statistics of a new worker. Without `one_writer` it maps the memory itself."""
        made = cls(Memory.create(layout.area_bytes(1), layout.DRIVER_PAGE, one_writer=one_writer))
        made._fill(1)
        return made

    @property
    def slot(self) -> memoryview:
        """The bytes of the slot."""
        return self._view[layout.HEADER_WORDS * WORD_BYTES :][: layout.SLOT_BYTES]

    @property
    def is_for_everybody(self) -> bool:
        """Whether any client may read what `open_for_reading` opens."""
        return True

    def open_for_reading(self) -> tuple[int, int]:
        """Return an fd of a copy of what the client may see, and its size. A worker waits for its supervisor.

        Raises:
            DeviceUnavailable: If the supervisor does not reply: it may have been killed.
        """
        supervisor = shared_cache()
        fd = None if supervisor is None else supervisor.open_statistics()
        if fd is None:
            raise DeviceUnavailable(
                "the supervisor of this driver does not show its statistics; its log says why, or it was killed"
            )
        return fd, os.fstat(fd).st_size

    def use_page(self, page: Memory) -> None:
        """Use the page of the client that this process serves. Borrows it."""
        self._page = page

    def writer(self, slot: int) -> SlotWriter:
        """Return the writer of the slot, for the worker that has it."""
        assert slot == 0, "a worker has one client"
        return SlotWriter(self._view, 0, None if self._page is None else self._page.view)

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._view = self._header = memoryview(b"")
        self.memory.close()


class UserLimits(NamedTuple):
    """The limits of all clients of one user, of a driver that serves several: memory, in bytes, and places."""

    memory_bytes: int
    clients: int


class SharedStatistics(StatisticsArea, Closable):
    """The statistics of a supervisor and its workers, with a slot for each client. Close it, or use `with`.

    `version` is the driver's release, and `build` its queue core, Python and machine, for display. With `user_limits`,
    or if workers map their memory themselves (`workers_map`), each worker writes to memory of its own
    (`WorkerStatistics`), and only the supervisor has all.
    """

    def __init__(
        self,
        slots: int,
        version: str,
        memory_limit_bytes: int,
        build: str = "",
        user_limits: UserLimits | None = None,
        *,
        workers_map: bool = False,
    ) -> None:
        self._user_limits = user_limits
        self._workers_map = workers_map
        self._of_workers: dict[int, WorkerStatistics] = {}  # by slot
        self._uids: dict[int, int] = {}  # of the clients, by slot
        past = layout.PAST_CLIENTS_MAX
        self._memory = Memory.create_sparse(layout.area_bytes(slots, past), layout.DRIVER_PAGE, one_writer=True)
        self._memory.keep_from_children()
        self._past_at = layout.area_bytes(slots)  # not read from the memory, where workers can write anything
        self._pages: dict[int, Memory] = {}  # by slot; of the supervisor
        self._page = None  # of a worker's own client
        allocate_pages(self.fileno(), layout.HEADER_WORDS * WORD_BYTES)
        self._use(self._memory.view)
        self._fill(slots, past)
        for word, text, words in (
            (layout.DRIVER_VERSION, version, layout.DRIVER_VERSION_WORDS),
            (layout.DRIVER_BUILD, build, layout.DRIVER_BUILD_WORDS),
        ):
            self._view[word * WORD_BYTES : (word + words) * WORD_BYTES] = text_to_words(text, words)
        self.set(layout.MEMORY_LIMIT, memory_limit_bytes)

    def fileno(self) -> int:
        """Return the fd, which stays owned by this object."""
        return self._memory.fileno()

    def of_worker(self, slot: int) -> tuple[SharedStatistics | WorkerStatistics, int]:
        """Return the statistics in which the worker of a slot counts, and its slot there."""
        own = self._of_workers.get(slot)
        return (self, slot) if own is None else (own, 0)

    @property
    def memory(self) -> Memory:
        """The memory, which stays owned by this object."""
        return self._memory

    def set_client_class(self, slot: int, client_class: int) -> None:
        """Publish the class of the client that has a slot, or will have it."""
        own = self._of_workers.get(slot)
        if own is None:
            super().set_client_class(slot, client_class)
        else:
            own.set_client_class(0, client_class)

    def tell_class(self, slot: int, client_class: int) -> None:
        """Tell the client that has a slot, in its page, which class it was given while it runs."""
        self._pages[slot].view[layout.CALLS_BYTES : layout.PAGE_BYTES] = client_class.to_bytes(WORD_BYTES, "little")

    def take_slot(self, slot: int, uid: int = 0) -> Memory:
        """Prepare a slot for a worker, and return the page of its client, which stays owned by this object.

        `uid` is that of the client.

        Raises:
            ResourceExhaustedTransient: If no memory or no fd is left.
        """
        allocate_pages(self.fileno(), layout.SLOT_BYTES, layout.slot_at(slot) * WORD_BYTES)
        size = self._memory.size_bytes - self._past_at
        allocate_pages(self.fileno(), size, self._past_at)  # for when the slot is released
        page = self._pages[slot] = Memory.create(layout.PAGE_BYTES, layout.PAGE)
        page.keep_from_children()
        self._uids[slot] = uid
        if self._user_limits is not None or self._workers_map:
            try:
                self._of_workers[slot] = WorkerStatistics.create(one_writer=not self._workers_map)
            except BaseException:
                self._pages.pop(slot).close()
                raise
        return page

    def copy_pages(self) -> None:
        """Copy what clients, and workers with memory of their own, have counted to where it is read.

        For the supervisor.
        """
        for slot, page in self._pages.items():
            self._copy_slot(slot)
            self._copy_page(slot, page)

    def _copy_slot(self, slot: int) -> None:
        """Copy what a worker has in memory of its own. One that changes its rows meanwhile keeps its last copy."""
        own = self._of_workers.get(slot)
        if own is None:
            return
        for _ in range(_COPY_ATTEMPTS):
            copied = snapshot(own.slot)
            if copied is not None:
                begin = layout.slot_at(slot) * WORD_BYTES
                self._view[begin : begin + layout.SLOT_BYTES] = copied
                return

    def open_for_user(self, uid: int | None) -> int:
        """Return an fd of a copy with the clients of a uid, which the caller closes; None: all clients.

        Of the driver it has what is about the driver itself, and nothing that tells what clients of others do.

        Raises:
            ResourceExhaustedTransient: If no memory or no fd is left.
        """
        self.copy_pages()
        slots = [slot for slot in sorted(self._pages) if uid is None or self._uids[slot] == uid]
        header = bytearray(self._view[: layout.HEADER_WORDS * WORD_BYTES])
        words = memoryview(header).cast("Q")
        words[layout.HEADER_SLOTS] = len(slots)
        parts: list[bytearray | memoryview] = [header, *(self._slot(slot) for slot in slots)]
        if uid is None:
            parts.append(self._view[self._past_at : self._memory.size_bytes])
        else:
            self._hide_others(words)
        size = sum(map(len, parts))
        with Memory.create_constant(size, partial(_write_parts, parts), layout.DRIVER_PAGE) as copy:
            return os.dup(copy.fileno())

    def _slot(self, slot: int) -> memoryview:
        begin = layout.slot_at(slot) * WORD_BYTES
        return self._view[begin : begin + layout.SLOT_BYTES]

    def _hide_others(self, words: memoryview) -> None:
        assert self._user_limits is not None  # it serves several users
        for word in (*_OF_ALL_CLIENTS, *range(layout.DEATHS, layout.DEATHS + len(layout.DEATH_CAUSES))):
            words[word] = 0
        words[layout.MEMORY_LIMIT], words[layout.CLIENTS_LIMIT] = self._user_limits

    def open_for_reading(self) -> tuple[int, int]:
        """See `StatisticsArea.open_for_reading`. A worker waits for its supervisor to copy the pages, but not long."""
        if self._page is None:
            self.copy_pages()
        elif (supervisor := shared_cache()) is not None:
            supervisor.copy_pages()
        return os.dup(self.fileno()), self._memory.size_bytes

    def use_page(self, page: Memory) -> None:
        """Use the page of the client that this process serves, a worker. Borrows it."""
        self._page = page  # `_pages` stays as it was inherited: it has the supervisor's numbers of fds

    def writer(self, slot: int) -> SlotWriter:
        """Return the writer of a slot, for the worker that has it."""
        return SlotWriter(self._view, slot, None if self._page is None else self._page.view)

    def release(self, slot: int) -> None:
        """Free the slot of a worker that has exited, however it ended; what it has counted is that of a past client.

        Also for a worker that was never started.
        """
        self._copy_slot(slot)
        page = self._pages.pop(slot)
        self._copy_page(slot, page)
        page.close()
        own = self._of_workers.pop(slot, None)
        if own is not None:
            own.close()
        begin = layout.slot_at(slot) * WORD_BYTES
        view = self._view[begin : begin + layout.SLOT_BYTES]
        self._add_past(view.cast("Q"))
        begin_change(view)
        header = layout.SLOT_HEADER_WORDS * WORD_BYTES
        view[WORD_BYTES:header] = bytes(header - WORD_BYTES)  # all but CHANGE; the next worker clears the rest
        end_change(view)

    def _add_past(self, slot: memoryview) -> None:
        """Add what a slot has counted to the past."""
        if slot[layout.STATE] != layout.USED:
            return
        table = self._view[self._past_at : self._memory.size_bytes].cast("Q")
        for row in range(layout.MODELS_MAX):
            model, calls = layout.MODELS_AT + row * layout.MODEL_WORDS, layout.CALLS_AT + row * layout.CALLS_WORDS
            if slot[model + layout.EXECUTIONS] or slot[model + layout.FAILURES]:
                counted = slot[calls : calls + layout.CALLS_WORDS].tolist()
                add_past(table, slot[model : model + layout.MODEL_WORDS].tolist(), counted)
        for row in range(layout.PAST_MODELS_MAX):
            begin = layout.PAST_AT + row * layout.PAST_WORDS
            if slot[begin + layout.MODEL_ID]:
                words = slot[begin : begin + layout.PAST_WORDS].tolist()
                add_past(table, words[: layout.PAST_CALLS], words[layout.PAST_CALLS :])

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._view = self._header = memoryview(b"")
        for owned in (self._pages, self._of_workers):
            while owned:
                owned.popitem()[1].close()
        self._memory.close()


def _write_parts(parts: Sequence[bytearray | memoryview], fd: int) -> None:
    offset = 0
    for part in parts:
        write_all(fd, part, offset)
        offset += len(part)
