"""What one client's session offers to the call handlers: its objects, and sending, scheduling and stopping.

`session.Session` adds the control channel's receiving side and the main loop. Handlers depend on this module only.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

from msgspec import Struct

from nnfmq.base.channel import Channel
from nnfmq.driver.compilation.jobs import tier_up
from nnfmq.driver.compilation.unfinished import UnfinishedCompilation, go_on_without_client
from nnfmq.driver.devices.installation import DriverOptions
from nnfmq.driver.devices.interface_versions import InterfaceVersion
from nnfmq.driver.devices.registry import DeviceRegistry
from nnfmq.driver.execution.aidl_burst import AidlBurstServer
from nnfmq.driver.execution.burst import BurstServer
from nnfmq.driver.execution.fenced import DriverFencedExecution
from nnfmq.driver.execution.order import ClientOrder, PriorityThreadPool
from nnfmq.driver.execution.prepared_model import DriverPreparedModel
from nnfmq.driver.execution.reusable import DriverExecution
from nnfmq.driver.memory.buffers import ManagedBuffers
from nnfmq.driver.memory.quota import MemoryQuota
from nnfmq.driver.process.children import ClientProcess
from nnfmq.driver.process.statistics_area import StatisticsArea
from nnfmq.driver.session.handle_table import NO_ID, HandleTable
from nnfmq.engines.execution import TieredProgram
from nnfmq.hal.errors import DeadObject, ErrorStatus, MissedDeadlineTransient, NnfmqError, status_for_error
from nnfmq.hal.feature_levels import FeatureLevel
from nnfmq.hal.types import Priority
from nnfmq.observe.statistics_writer import SlotWriter
from nnfmq.serialize import control_protocol, messages
from nnfmq.serialize.control_protocol import ConnectionState, PeerRole
from nnfmq.serialize.messages import BurstConfigured, Executed, Message, Reply

__all__ = [
    "BlockingHandler",
    "OpenBurst",
    "SentMemories",
    "SessionContext",
    "abort_on_internal_error",
    "error_as_burst_configured",
    "error_as_executed",
    "error_as_reply",
    "reply",
]

POOL_THREADS = 4  # one client's calls: several executions and a preparation can run concurrently
BURSTS_MAX = 256  # for each client: each burst has a thread
_SEND_TIMEOUT_NS = 60_000_000_000
_log = logging.getLogger("nnfmq.session")


class SentMemories(NamedTuple):
    """A client's reply to GetMemories; the receiver owns `fds`."""

    memories: tuple[messages.MemoryData, ...]
    fds: list[int]


class OpenBurst(Protocol):
    """A burst over queues, as a session keeps it."""

    server: BurstServer

    def close(self) -> None:
        """End the burst. Blocks until a running execution has ended."""
        ...


class SessionContext:
    """Objects of one client, and the session's services for handlers. Thread-safe.

    Attributes:
        quota: The client's memory quota.
        devices: The devices that this driver offers.
        options: The driver's options that concern a session.
        order: The order of the client's long executions; None: each begins at once.
        statistics_area: The memory of the driver's statistics.
        statistics: The client's slot in it.
        interface: The client's HAL version; AIDL v4 until its Hello is received.
        connection_state: State of the control protocol.
        models: Prepared models.
        bursts: Bursts over queues.
        aidl_bursts: AIDL bursts.
        executions: Reusable executions.
        fenced_callbacks: Fenced executions whose callback the client has not released.
        launched: Fenced executions that are not complete.
        buffers: Managed buffers.
        unfinished: The compilations that go on in a process of their own if the client leaves.
        pending_calls: The driver's calls to the client, by call id.
        client_uid: The uid of the client process.
        is_closed: Whether the session is ending.
    """

    def __init__(
        self,
        channel: Channel,
        devices: DeviceRegistry,
        options: DriverOptions,
        quota: MemoryQuota,
        order: ClientOrder | None,
        statistics_area: StatisticsArea,
        statistics: SlotWriter,
    ) -> None:
        self.quota = quota
        self.statistics_area = statistics_area
        self.statistics = statistics
        self.devices = devices
        self.options = options
        self.order = order
        self.connection_state = ConnectionState()
        self.interface = InterfaceVersion(FeatureLevel.AIDL_V4)
        ids = itertools.count(1)  # shared by all tables, so that the id of one kind of object is unknown as another
        self.models: HandleTable[DriverPreparedModel] = HandleTable("model", ids)
        self.bursts: HandleTable[OpenBurst] = HandleTable("burst", ids, BURSTS_MAX)
        self.aidl_bursts: HandleTable[AidlBurstServer] = HandleTable("burst", ids)
        self.executions: HandleTable[DriverExecution] = HandleTable("execution", ids)
        self.fenced_callbacks: HandleTable[DriverFencedExecution] = HandleTable("fenced execution", ids)
        self.launched: set[DriverFencedExecution] = set()
        self.buffers = ManagedBuffers(self.quota, ids)
        self.unfinished: list[UnfinishedCompilation] = []
        self.pending_calls: dict[int, Future[SentMemories]] = {}
        self.client_uid = channel.peer().uid
        self.is_closed = False
        self._channel = channel
        self._client: ClientProcess | None = None  # None: unknown
        self._send_lock = threading.Lock()
        self._pool = PriorityThreadPool(POOL_THREADS, "nnfmq-session")
        self._launch_pool = PriorityThreadPool(1, "nnfmq-launches")
        self._tier_up_pool = PriorityThreadPool(1, "nnfmq-tier-up")
        self._lock = threading.Lock()
        self._open_calls = 0  # queued or running on a pool
        self._completed = 0  # pieces of work that the pools have completed
        self._is_idle = False  # trimmed, and no work since: the main loop sleeps without a timeout
        self._trim_is_due = False
        self._wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def client_was_killed(self) -> bool:
        """Return whether the client's process has received SIGKILL, even if it has not exited yet."""
        return self._client is not None and self._client.was_killed()

    def send(self, message: messages.Message, fds: Sequence[int] = ()) -> None:
        """Send a message, without what the client's HAL version cannot express. Borrows `fds`.

        Blocks for up to a minute while the client does not read and its socket is full.

        Raises:
            DeadObject: If the client has exited, or has not read for a minute.
        """
        message = self.interface.downgrade_reply(message)
        data = control_protocol.encode(message)
        deadline_ns = time.monotonic_ns() + _SEND_TIMEOUT_NS
        with self._send_lock:  # the connection state must process messages in the order in which they are sent
            self.connection_state.process_message(message, PeerRole.DRIVER)
            try:
                self._channel.send(data, fds, deadline_ns)
            except MissedDeadlineTransient:
                raise DeadObject("the client has not read its replies for a minute; the driver gives it up") from None

    def submit(self, work: Callable[..., None], *args: Any, priority: int = Priority.MEDIUM) -> None:
        """Call `work(context, *args)` on the thread pool.

        If it raises DeadObject, the session stops. Any other exception is an internal error and ends the worker.
        """
        self._submit(self._pool, priority, work, *args)

    def submit_rest(self, work: Callable[..., None], *args: Any, priority: int) -> None:
        """Submit the rest of a launch as `submit` does. The launch's handler returns True: the call stays open."""
        self._pool.submit(partial(self._run_task, work, *args), priority)

    def _submit(self, pool: PriorityThreadPool, priority: int, work: Callable[..., object], *args: Any) -> None:
        with self._lock:
            self._open_calls += 1
            self.statistics.set_open_calls(self._open_calls)
        if self._is_idle:
            self._wake_up()
        pool.submit(partial(self._run_task, work, *args), priority)

    def _run_task(self, work: Callable[..., object], *args: Any) -> None:
        """Run `work`. If it returns True, its call stays open until the task that `submit_rest` was given ends."""
        stays_open = False
        try:
            stays_open = work(self, *args) is True
        except DeadObject:
            self.stop()
        except BaseException as error:  # noqa: BLE001  the thread pool would drop it, and the client wait forever
            abort_on_internal_error(error)
        finally:
            with self._lock:
                self._open_calls -= not stays_open
                self.statistics.set_open_calls(self._open_calls)
                self._completed += 1

    def tier_up(
        self,
        program: TieredProgram,
        priority: int = Priority.MEDIUM,
        unfinished: UnfinishedCompilation | None = None,
    ) -> None:
        """Compile `program` in the background and replace its baseline, unless the model is released before.

        Does not block. The thread serves only this purpose, so that no call waits for a compilation. If the model is
        released, a process of its own goes on with `unfinished`.
        """
        self._tier_up_pool.submit(partial(self._tier_up, weakref.ref(program), unfinished), priority)

    def _tier_up(self, program_ref: weakref.ref[TieredProgram], unfinished: UnfinishedCompilation | None) -> None:
        program = program_ref()
        if program is not None and not self.is_closed:
            # Bursts use the baseline until their next execution.
            weakref.finalize(program.program, self.trim_soon).atexit = False
            del program
            tier_up(program_ref)
        if unfinished is not None:
            self.end_compilation(unfinished, is_finished=program_ref() is not None)
        with self._lock:
            self._completed += 1
        self.trim_soon()

    def end_compilation(self, unfinished: UnfinishedCompilation, *, is_finished: bool) -> None:
        """Forget a compilation. If it is not finished, a process of its own goes on with it, unless one runs."""
        if self.is_closed:
            return  # the main thread goes on with it
        if not is_finished:
            go_on_without_client([unfinished])
        with suppress(ValueError):  # only now: if the session ends meanwhile, its main thread goes on with it
            self.unfinished.remove(unfinished)
        unfinished.close()

    def trim_soon(self) -> None:
        """Let the main thread return freed memory to the kernel, also while bursts are open. Takes no lock.

        Call it when much memory has been freed, or will be in a moment.
        """
        self._trim_is_due = True
        self._is_idle = False
        self._wake_up()

    def stop(self) -> None:
        """End the session. Idempotent. Takes no lock, so a signal handler may call it."""
        self.is_closed = True
        self._wake_up()

    def _wake_up(self) -> None:
        with suppress(OSError, ValueError):  # the fd is closed (-1) once `Session.run` has returned
            os.eventfd_write(self._wakeup_fd, 1)

    def join(self) -> None:
        """Wait until all threads of the pools have ended. For tests: a worker process exits without waiting."""
        self._launch_pool.shutdown()
        self._pool.shutdown()
        self._tier_up_pool.shutdown()  # last, because work on the other pools submits to it


def abort_on_internal_error(error: BaseException | None) -> None:
    """Terminate the worker because of a bug in a thread, so that its client sees its death instead of waiting."""
    _log.critical("an internal error ends this worker", exc_info=error)
    os._exit(70)


# ----------------------------------------------------------------------------------------------------------------------
# Kinds of call handlers, and error replies that several of them send.
#
# A handler gets the session's context, the message and the fds that came with it, which it owns. An inline handler runs
# on the watcher's thread and must not block. A `BlockingHandler` runs on the session's thread pool and may raise any
# NnfmqError, which the session turns into the call's error replies.


InlineHandler: TypeAlias = Callable[[SessionContext, Any, list[int]], None]
ErrorReplies: TypeAlias = Callable[[int, ErrorStatus, str], tuple[Message, ...]]


def _medium_priority(_context: SessionContext, _message: Any) -> int:
    return Priority.MEDIUM


class BlockingHandler(Struct, frozen=True):
    """A handler for the thread pool.

    Attributes:
        run: Handles the call; its last argument is the time at which the message was received, in ns. Returns True if
            the call stays open, because `SessionContext.submit_rest` has the rest of it.
        error_replies: Returns the replies to a call that failed, from its id, the status and the text.
        priority: Returns the call's priority; MEDIUM for calls that belong to no model.
        is_launch: Whether `run` only starts work and does not block. Such calls run on a separate thread, so that
            they are replied to immediately while the pool is busy.
    """

    run: Callable[[SessionContext, Any, list[int], int], bool | None]
    error_replies: ErrorReplies
    priority: Callable[[SessionContext, Any], int] = _medium_priority
    is_launch: bool = False


def reply(call: int, error: NnfmqError | None = None) -> Reply:
    """Return the reply that carries only the status of a call."""
    if error is None:
        return Reply(call, ErrorStatus.NONE, "")
    return Reply(call, status_for_error(error), str(error))


def error_as_reply(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    """Return the error replies to a call whose reply carries only a status."""
    return (Reply(call, status, text),)


def error_as_executed(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    """Return the error replies to a synchronous execution."""
    return (Executed(call, status, text),)


def error_as_burst_configured(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    """Return the error replies to a call that creates a burst."""
    return (BurstConfigured(call, status, text, NO_ID),)
