"""Waiting for a queue without blocking an event loop: `MessageQueue.read_async` and `write_async`.

A coroutine tries on its loop's thread, and only there are records taken, so a cancelled one has consumed nothing. Where
it must wait, it leaves a `_Wait` to a thread of the process that sleeps in futex_waitv on the words of all awaited
queues and on its own bell. Per queue the thread does what every waiter does: consume the bit, look again (`Ring.arm`),
sleep on the word as it was left; where a try is worth while it gives the wait back to the loop. Limits of time are the
loop's timers, so the thread itself wakes for nothing but wakes. Above 127 queues there is a thread for each 127, and
for each queue where the kernel has no futex_waitv (before 5.16). Left out: loops other than asyncio's. FMQ_FACTS 1.7.

Only `_lock` holders change who waits where. A coroutine gives up by clearing its request, without the lock, because the
garbage collector may end one anywhere, also in a thread that holds the lock.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from errno import EAGAIN, EINTR
from typing import TYPE_CHECKING, TypeVar

from nnfmq.hal.errors import InvalidArgument
from nnfmq.queue import futex
from nnfmq.queue._pycore import READER, WRITER
from nnfmq.queue.event_flag import NOT_EMPTY, EventFlag

if TYPE_CHECKING:
    from nnfmq.queue._pycore import Ring

THREAD_NAME = "nnfmq-async-waiter"
LINGER_NS = 50_000_000
"""How long a thread that nobody needs waits for the next one who does: starting one costs more than a wait."""

_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}  # belong to the thread itself
_SIGNALS = signal.valid_signals() - _FAULTS
_log = logging.getLogger("nnfmq.queue")

Answer = TypeVar("Answer")


# ---- on the loop's thread ----


async def until_done(
    attempt: Callable[[], Answer | None], ring: Ring, flag: EventFlag | None, mask: int, size: int,
    deadline_ns: int | None,
) -> Answer | None:  # fmt: skip
    """Make `attempt`, which never waits, until it answers something; None once `deadline_ns` has passed.

    Between attempts wait for `size` bytes to read (`mask` is NOT_EMPTY) or to write (NOT_FULL). Raises what `attempt`
    raises, and InvalidArgument where another task waits for the same.
    """
    while True:
        has_passed = deadline_ns is not None and time.monotonic_ns() >= deadline_ns
        answer = attempt()
        if answer is not None or has_passed:
            return answer
        assert flag is not None, "without an event word the attempt raises"
        await _until_worth_a_try(_Wait(ring, flag, mask), size, deadline_ns)


async def _until_worth_a_try(wait: _Wait, size: int, deadline_ns: int | None) -> None:
    loop = asyncio.get_running_loop()
    request = _Request(loop, loop.create_future(), size)
    timer = None
    if deadline_ns is not None:
        timer = loop.call_later(max(0, deadline_ns - time.monotonic_ns()) / 1e9, _settle, request.future)
    try:
        wait = _waiters.add(wait, request)
        await request.future
    finally:
        wait.give_up(request)
        if timer is not None:
            timer.cancel()


def _settle(future: asyncio.Future[None], error: OSError | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


# ---- who waits ----


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """What a coroutine waits for: so many bytes, and then its future."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]
    size: int

    def answer(self, error: OSError | None = None) -> None:
        """Let the coroutine go on, from any thread. A loop that was closed has nobody left to tell."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(_settle, self.future, error)


class _Wait:
    """One side of one queue that is awaited. It counts as the queue's waiter as long as a thread has it.

    `request` is None once the coroutine has given up; until the thread has noticed, the next one may take the wait
    over: there is never more than one waiter for a bit. `armed` is the request for which the thread last looked.
    """

    __slots__ = ("address", "armed", "expected", "flag", "mask", "request", "ring", "thread")

    def __init__(self, ring: Ring, flag: EventFlag, mask: int) -> None:
        self.ring, self.flag, self.mask = ring, flag, mask
        self.address = self.expected = 0
        self.request: _Request | None = None
        self.armed: _Request | None = None
        self.thread: _WaiterThread | None = None

    def give_up(self, request: _Request) -> None:
        """Let the thread forget this wait, if it still has it for `request`."""
        if self.request is request:
            self.request = None
            thread = self.thread
            if thread is not None:
                thread.rouse(self)

    def arm(self) -> bool:
        """Look whether the request can be met, unless that is known; False where a try is worth while."""
        request = self.request
        if request is None or request is self.armed:
            return True  # given up: the next round drops it
        expected = self.ring.arm(READER if self.mask == NOT_EMPTY else WRITER, request.size)
        if expected is None:
            return False
        self.expected, self.armed = expected, request
        return True

    def end(self, error: OSError | None = None) -> None:
        """Leave the queue, then answer: whoever hears of it finds no waiter left."""
        request, self.request = self.request, None
        try:
            self.ring.dismiss()
        except (BufferError, OSError):
            _log.exception("a queue that was closed during a wait could not let go of its memory")
        if request is not None:
            request.answer(error)


# ---- the threads ----


class _WaiterThread:
    """One thread, and the waits that it sleeps for: up to `room`. `bell` is a futex word of its own."""

    def __init__(self, waiters: _Waiters, has_waitv: bool) -> None:
        self.waits: list[_Wait] = []
        self.room = futex.WAITV_MAX - 1 if has_waitv else 1
        self._waiters, self._has_waitv = waiters, has_waitv
        self._bell = ctypes.c_uint32()
        self._bell_address = ctypes.addressof(self._bell)
        self._rings = itertools.count(1)  # each value once, so that of two who ring at a time none goes unheard
        self._linger_until: int | None = None
        self.thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    def start(self) -> None:
        """Start it, with all signals blocked: a handler runs on the main thread, which is the one to interrupt."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            self.thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def rouse(self, wait: _Wait) -> None:
        """Have the thread look at everything again, `wait` above all, on whose word alone it may be asleep."""
        self._bell.value = next(self._rings) & futex.ALL_BITS
        futex.futex_wake(self._bell_address, futex.ALL_BITS)
        if not self._has_waitv:
            with suppress(InvalidArgument):  # closed, and woken by that
                wait.flag.wake(wait.mask)

    def _run(self) -> None:
        try:
            while self._round():
                pass
        except OSError as error:
            self._waiters.give_back(self, error)

    def _round(self) -> bool:
        """Look, and sleep until something changes; False when nobody has waited for a while."""
        bell = self._bell.value  # before the list is looked at: who changes it rings afterwards
        waits = self._waiters.keep_awaited(self)
        if not waits:
            return self._linger(bell)
        self._linger_until = None
        ready = [wait for wait in waits if not wait.arm()]
        if ready:
            self._waiters.end(self, ready)
        else:
            self._sleep(waits, bell)
        return True

    def _sleep(self, waits: list[_Wait], bell: int) -> None:
        if self._has_waitv:
            words = [(wait.address, wait.expected) for wait in waits]
            woken = futex.futex_waitv([*words, (self._bell_address, bell)], None)
        else:
            woken = None
            self._sleep_on_one(waits[0], bell)
        # Others may have changed as well: the next sleep does not begin then, and it is not known whose word it was.
        for wait in waits if woken is None else waits[woken : woken + 1]:
            wait.armed = None

    def _sleep_on_one(self, wait: _Wait, bell: int) -> None:
        if self._bell.value != bell:  # the bit that whoever rings sets next may just have been consumed
            return
        error = futex.futex_wait(wait.address, wait.expected, None, wait.mask)
        if error not in (0, EAGAIN, EINTR):
            raise OSError(error, f"futex: {os.strerror(error)}")

    def _linger(self, bell: int) -> bool:
        now = time.monotonic_ns()
        self._linger_until = self._linger_until or now + LINGER_NS
        if now >= self._linger_until and self._waiters.retire(self):
            return False
        futex.futex_wait(self._bell_address, bell, self._linger_until, futex.ALL_BITS)
        return True


class _Waiters:
    """All threads and all waits of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[_WaiterThread] = []
        self._waits: dict[tuple[Ring, int], _Wait] = {}
        self.has_waitv = futex.has_waitv()

    def add(self, wait: _Wait, request: _Request) -> _Wait:
        """Have a thread wait for `request`; return the wait that does, which may be one already there.

        Raises InvalidArgument where the queue is closed or another task waits at this side of it, and RuntimeError
        where no thread can be started.
        """
        with self._lock:
            wait = self._waits.get((wait.ring, wait.mask), wait)
            if wait.request is not None and not wait.request.loop.is_closed():
                act = "read" if wait.mask == NOT_EMPTY else "write"
                raise InvalidArgument(f"another task waits to {act} here already: one at a time, or a queue for each")
            if wait.thread is None:
                self._place(wait, request)
            wait.request = request
            thread = wait.thread
        assert thread is not None
        thread.rouse(wait)
        return wait

    def _place(self, wait: _Wait, request: _Request) -> None:
        thread = next((thread for thread in self._threads if len(thread.waits) < thread.room), None)
        if thread is None:
            thread = _WaiterThread(self, self.has_waitv)
            thread.start()  # and it lingers
            self._threads.append(thread)
        wait.address = wait.ring.admit()
        wait.request, wait.thread = request, thread
        self._waits[wait.ring, wait.mask] = wait
        thread.waits.append(wait)

    def keep_awaited(self, thread: _WaiterThread) -> list[_Wait]:
        """Drop the waits that nobody awaits any more; return the others."""
        self.end(thread, (), and_given_up=True)
        return list(thread.waits)

    def end(
        self, thread: _WaiterThread, ended: Collection[_Wait], error: OSError | None = None, and_given_up: bool = False
    ) -> None:
        """Take waits from a thread, and answer them."""
        with self._lock:
            gone = [wait for wait in thread.waits if wait in ended or (and_given_up and wait.request is None)]
            thread.waits = [wait for wait in thread.waits if wait not in gone]
            for wait in gone:
                wait.thread = None
                del self._waits[wait.ring, wait.mask]
        for wait in gone:
            wait.end(error)

    def retire(self, thread: _WaiterThread) -> bool:
        """Forget a thread that is about to end, unless it has got something to do."""
        with self._lock:
            if not thread.waits and thread in self._threads:
                self._threads.remove(thread)
            return thread not in self._threads

    def give_back(self, thread: _WaiterThread, error: OSError) -> None:
        """A thread cannot sleep: it ends, and who relied on it is told why."""
        with self._lock:
            self._threads.remove(thread)
        self.end(thread, list(thread.waits), error)

    def forget(self) -> None:
        """Start anew in a forked child, where no thread is and nobody waits."""
        waits = list(self._waits.values())
        self.__init__()  # type: ignore[misc]  # a new lock too: the parent's thread may have held the old one
        for wait in waits:
            wait.request = wait.thread = None
            wait.end()


_waiters = _Waiters()
os.register_at_fork(after_in_child=_waiters.forget)
