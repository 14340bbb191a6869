"""asyncio support: `MessageQueue.read_async` and `write_async`.

Records are read and written only on the event loop's thread, so a task that is cancelled loses no data. A task that has
to wait registers with a background thread. It sleeps in futex_waitv(2) on the event flag words of all awaited queues
plus one wakeup word, and completes the task's future through `call_soon_threadsafe`. For each queue it does what every
waiter does: clear the bit, check the condition (`Ring.prepare_to_wait`), sleep on the word as it was left. Timeouts are
timers of the loop, so the thread needs none.

One thread serves up to 127 queues (FUTEX_WAITV_MAX is 128). Before Linux 5.16, which added futex_waitv, each queue
needs its own thread. Only asyncio is supported.

Locking: `_WaiterPool._lock` protects the registrations. Cancellation clears `_Registration.request` without the lock,
because the garbage collector may finalize a coroutine in a thread that already holds it.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from errno import EAGAIN, EINTR
from typing import TYPE_CHECKING, TypeVar

from nnfmq.base.deadlines import has_passed, remaining_s
from nnfmq.base.threads import start_daemon
from nnfmq.hal.errors import InvalidArgument
from nnfmq.queue import futex
from nnfmq.queue._pycore import READER, WRITER
from nnfmq.queue.event_flag import NOT_EMPTY, EventFlag

if TYPE_CHECKING:
    from nnfmq.queue._pycore import Ring

THREAD_NAME = "nnfmq-async-waiter"
KEEP_ALIVE_NS = 50_000_000
"""Keep-alive time of an idle waiter thread. Starting a thread costs more than one wake-up."""

_log = logging.getLogger("nnfmq.queue")

T = TypeVar("T")


# ---- on the event loop's thread ----


async def retry_until_done(
    attempt: Callable[[], T | None], ring: Ring, flag: EventFlag | None, mask: int, size: int, deadline_ns: int | None
) -> T | None:
    """Call `attempt`, which must not block, until it returns a result; return None at the deadline.

    Between attempts it waits until `size` bytes can be read (`mask` is NOT_EMPTY) or written (NOT_FULL).

    Raises:
        InvalidArgument: If another task waits for the same.
        Exception: Any error that `attempt` raises.
    """
    while True:
        is_last = has_passed(deadline_ns)
        result = attempt()
        if result is not None or is_last:
            return result
        assert flag is not None, "without an event flag the attempt raises"
        await _wait_until_ready(_Registration(ring, flag, mask), size, deadline_ns)


async def _wait_until_ready(registration: _Registration, size: int, deadline_ns: int | None) -> None:
    loop = asyncio.get_running_loop()
    request = _Request(loop, loop.create_future(), size)
    left_s = remaining_s(deadline_ns)
    timer = None if left_s is None else loop.call_later(left_s, _complete, request.future)
    try:
        registration = _waiter_pool.add(registration, request)
        await request.future
    finally:
        registration.cancel(request)
        if timer is not None:
            timer.cancel()


def _complete(future: asyncio.Future[None], error: OSError | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


# ---- registrations ----


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """A task's wait for `size` bytes."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]
    size: int

    def complete(self, error: OSError | None = None) -> None:
        """Let the task continue. Thread-safe."""
        with suppress(RuntimeError):  # the loop was closed meanwhile
            self.loop.call_soon_threadsafe(_complete, self.future, error)


class _Registration:
    """Registration of one direction (read or write) of one queue with a waiter thread.

    libfmq allows one waiter per event flag bit, so a queue has at most one registration per direction, which counts as
    its waiter. A cancelled task sets `request` to None; a later task may reuse the registration before the thread
    removes it. `checked_request` is the request whose condition the thread checked last.
    """

    __slots__ = ("address", "checked_request", "expected", "flag", "mask", "request", "ring", "thread")

    def __init__(self, ring: Ring, flag: EventFlag, mask: int) -> None:
        self.ring, self.flag, self.mask = ring, flag, mask
        self.address = self.expected = 0  # of the futex
        self.request: _Request | None = None
        self.checked_request: _Request | None = None
        self.thread: _WaiterThread | None = None

    def cancel(self, request: _Request) -> None:
        """Cancel the wait, if the registration is still for `request`."""
        if self.request is request:
            self.request = None
            thread = self.thread
            if thread is not None:
                thread.wakeup(self)

    def prepare_to_wait(self) -> bool:
        """Check the condition, unless that was done for this request; return False if an attempt may succeed."""
        request = self.request
        if request is None or request is self.checked_request:
            return True  # if cancelled, the next iteration removes it
        expected = self.ring.prepare_to_wait(READER if self.mask == NOT_EMPTY else WRITER, request.size)
        if expected is None:
            return False
        self.expected, self.checked_request = expected, request
        return True

    def finish(self, error: OSError | None = None) -> None:
        """Stop being the queue's waiter, then let the task continue, which may then close the queue."""
        request, self.request = self.request, None
        try:
            self.ring.finish_wait()
        except (BufferError, OSError):
            _log.exception("a queue that was closed during a wait could not release its memory")
        if request is not None:
            request.complete(error)


# ---- the threads ----


class _WaiterThread:
    """A background thread, and up to `capacity` registrations that it waits for."""

    thread: threading.Thread

    def __init__(self, pool: _WaiterPool, has_waitv: bool) -> None:
        self.registrations: list[_Registration] = []
        self.capacity = futex.WAITV_MAX - 1 if has_waitv else 1
        self._pool, self._has_waitv = pool, has_waitv
        self._wakeup_word = ctypes.c_uint32()
        self._wakeup_address = ctypes.addressof(self._wakeup_word)
        # Each value once: if two threads wake this one concurrently, no increment is lost.
        self._wakeup_values = itertools.count(1)
        self._idle_until_ns: int | None = None

    def start(self) -> None:
        """Start the thread. Raises RuntimeError if none can be started."""
        self.thread = start_daemon(self._run, THREAD_NAME)

    def wakeup(self, registration: _Registration) -> None:
        """Make the thread check everything again. Without futex_waitv it may sleep on `registration`'s word alone."""
        self._wakeup_word.value = next(self._wakeup_values) & futex.ALL_BITS
        futex.futex_wake(self._wakeup_address, futex.ALL_BITS)
        if not self._has_waitv:
            with suppress(InvalidArgument):  # closed, which wakes the thread as well
                registration.flag.wake(registration.mask)

    def _run(self) -> None:
        try:
            while self._run_once():
                pass
        except OSError as error:
            self._pool.on_thread_failure(self, error)

    def _run_once(self) -> bool:
        """Check all conditions, and sleep until something changes; return False if the thread must end."""
        # Loaded before the registrations: a thread that changes them changes this word afterwards, and so the sleep
        # below ends immediately.
        wakeup_value = self._wakeup_word.value
        registrations = self._pool.remove_cancelled(self)
        if not registrations:
            return self._stay_idle(wakeup_value)
        self._idle_until_ns = None
        ready = [registration for registration in registrations if not registration.prepare_to_wait()]
        if ready:
            self._pool.finish(self, ready)
        else:
            self._sleep(registrations, wakeup_value)
        return True

    def _sleep(self, registrations: list[_Registration], wakeup_value: int) -> None:
        woken = None
        if self._has_waitv:
            words = [(registration.address, registration.expected) for registration in registrations]
            woken = futex.futex_waitv([*words, (self._wakeup_address, wakeup_value)], None)
        else:
            self._sleep_on_one(registrations[0], wakeup_value)
        # Words that changed during the sleep and are not reported make the next futex_waitv return immediately with no
        # index, and then all conditions are checked again.
        for registration in registrations if woken is None else registrations[woken : woken + 1]:
            registration.checked_request = None

    def _sleep_on_one(self, registration: _Registration, wakeup_value: int) -> None:
        # `wakeup` changes its word before it sets the queue's bit. If that bit has just been cleared, the word shows
        # it.
        if self._wakeup_word.value != wakeup_value:
            return
        error = futex.futex_wait(registration.address, registration.expected, None, registration.mask)
        if error not in (0, EAGAIN, EINTR):
            raise OSError(error, f"futex: {os.strerror(error)}")

    def _stay_idle(self, wakeup_value: int) -> bool:
        now = time.monotonic_ns()
        self._idle_until_ns = self._idle_until_ns or now + KEEP_ALIVE_NS
        if now >= self._idle_until_ns and self._pool.remove_idle(self):
            return False
        futex.futex_wait(self._wakeup_address, wakeup_value, self._idle_until_ns, futex.ALL_BITS)
        return True


class _WaiterPool:
    """All waiter threads and registrations of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[_WaiterThread] = []
        self._registrations: dict[tuple[Ring, int], _Registration] = {}
        self.has_waitv = futex.has_waitv()

    def add(self, registration: _Registration, request: _Request) -> _Registration:
        """Make a thread wait for `request`; return the registration in use, which may be an existing one.

        Raises:
            BadState: If the queue is closed.
            InvalidArgument: If another task waits for this direction of it.
            RuntimeError: If a thread cannot be started.
        """
        with self._lock:
            registration = self._registrations.get((registration.ring, registration.mask), registration)
            if registration.request is not None and not registration.request.loop.is_closed():
                act = "read" if registration.mask == NOT_EMPTY else "write"
                raise InvalidArgument(f"another task waits to {act} here already: one at a time, or a queue for each")
            if registration.thread is None:
                self._assign_thread(registration, request)
            registration.request = request
            thread = registration.thread
        assert thread is not None
        thread.wakeup(registration)
        return registration

    def _assign_thread(self, registration: _Registration, request: _Request) -> None:
        thread = next((thread for thread in self._threads if len(thread.registrations) < thread.capacity), None)
        if thread is None:
            thread = _WaiterThread(self, self.has_waitv)
            thread.start()  # idle until the registration is in its list
            self._threads.append(thread)
        registration.address = registration.ring.begin_wait()
        registration.request, registration.thread = request, thread
        self._registrations[registration.ring, registration.mask] = registration
        thread.registrations.append(registration)

    def remove_cancelled(self, thread: _WaiterThread) -> list[_Registration]:
        """Remove the thread's registrations whose tasks were cancelled; return the others."""
        self.finish(thread, (), and_cancelled=True)
        return list(thread.registrations)

    def finish(
        self, thread: _WaiterThread, finished: Collection[_Registration], error: OSError | None = None,
        and_cancelled: bool = False,
    ) -> None:  # fmt: skip
        """Remove registrations from a thread, and let their tasks continue."""
        with self._lock:
            removed = [r for r in thread.registrations if r in finished or (and_cancelled and r.request is None)]
            thread.registrations = [r for r in thread.registrations if r not in removed]
            for registration in removed:
                registration.thread = None
                del self._registrations[registration.ring, registration.mask]
        for registration in removed:
            registration.finish(error)

    def remove_idle(self, thread: _WaiterThread) -> bool:
        """Remove a thread that is about to end; return False if it has got a registration meanwhile."""
        with self._lock:
            if not thread.registrations and thread in self._threads:
                self._threads.remove(thread)
            return thread not in self._threads

    def on_thread_failure(self, thread: _WaiterThread, error: OSError) -> None:
        """Remove a thread whose sleep failed, and raise `error` in the tasks that it served."""
        with self._lock:
            self._threads.remove(thread)
        self.finish(thread, list(thread.registrations), error)

    def reset_after_fork(self) -> None:
        """Forget all threads and tasks in a forked child, which has neither."""
        registrations = list(self._registrations.values())
        self.__init__()  # type: ignore[misc]  # a new lock as well: a thread of the parent may have held the old one
        for registration in registrations:
            registration.request = registration.thread = None
            registration.finish()


_waiter_pool = _WaiterPool()
os.register_at_fork(after_in_child=_waiter_pool.reset_after_fork)
