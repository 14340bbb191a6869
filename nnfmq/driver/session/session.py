"""One client's session in the driver: its objects, the calls that it receives, and their replies.

The watcher's thread receives one frame at a time and runs the handlers that must not block; all others (preparing,
executing, closing) run by priority on a small thread pool, at most $NNFMQ_CLIENT_CALLS of them. The main thread waits
for the session's end, which it detects even while all other threads are blocked in sending, and trims memory after
IDLE_TRIM_MS without work. `calls.HANDLERS` has the handler of each message.

SIGTERM, and a client that leaves, let the session drain: what is in progress ends and gets its reply, everything that
begins later is rejected with DEVICE_UNAVAILABLE, and then the process exits. A second SIGTERM ends it at once, and so
does SIGUSR2: two SIGTERM are one to a process that has not run in between. SIGUSR1, from a supervisor that another one
has replaced, only asks the client to leave.

Whatever the client sends, the reply is a status; bytes that violate the protocol end only this connection. When the
client hangs up or dies, or `stop` is called, every wait ends and the process exits. The kernel then frees what is left,
so no clean-up procedure can be forgotten. The same code runs in a supervisor's worker and in an embedded driver. (LIFE)
"""

from __future__ import annotations

import itertools
import os
import resource
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, closing, suppress
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, NoReturn

from msgspec import Struct

from nnfmq.base import settings, watcher
from nnfmq.base.channel import INLINE_BYTES, NO_WAIT, Channel, Frame
from nnfmq.base.deadlines import deadline_in, has_passed, remaining_s
from nnfmq.base.logs import rate_limited
from nnfmq.base.processes import command_name, shown_name
from nnfmq.driver.compilation.jobs import tier_up
from nnfmq.driver.compilation.unfinished import UnfinishedCompilation, go_on_without_client
from nnfmq.driver.devices.installation import DriverOptions
from nnfmq.driver.devices.interface_versions import InterfaceVersion
from nnfmq.driver.devices.registry import DeviceRegistry, load_devices
from nnfmq.driver.execution.aidl_burst import AidlBurstServer
from nnfmq.driver.execution.burst import DRAINING, BurstServer
from nnfmq.driver.execution.fenced import DriverFencedExecution
from nnfmq.driver.execution.order import ClientOrder, PriorityThreadPool
from nnfmq.driver.execution.prepared_model import DriverPreparedModel, runs_in_progress
from nnfmq.driver.execution.reusable import DriverExecution
from nnfmq.driver.execution.watchdog import WATCHDOG, ExecutionLimit
from nnfmq.driver.memory.buffers import ManagedBuffers
from nnfmq.driver.memory.object_limits import ObjectLimit, use_thread_limit
from nnfmq.driver.memory.quota import MemoryQuota, MemoryShare, QuotaCharge, SharedCount, limit_private_memory
from nnfmq.driver.process.children import ClientProcess
from nnfmq.driver.process.pending_clients import decode_greeting
from nnfmq.driver.process.statistics_area import StatisticsArea
from nnfmq.driver.process.trace import recorded_call
from nnfmq.driver.session.error_translation import memory_shortage
from nnfmq.driver.session.handle_table import HandleTable
from nnfmq.engines import memory
from nnfmq.engines.compiled.perf_map import PERF_MAP
from nnfmq.engines.execution import TieredProgram
from nnfmq.engines.memory import trim_memory, use_one_heap
from nnfmq.hal.errors import (
    DeadObject,
    DeviceUnavailable,
    ErrorStatus,
    InvalidArgument,
    MissedDeadlineTransient,
    NnfmqError,
    ProtocolError,
    ResourceExhausted,
    ResourceExhaustedTransient,
    TransportError,
    status_for_error,
)
from nnfmq.hal.feature_levels import FeatureLevel
from nnfmq.hal.types import Priority
from nnfmq.serialize import control_protocol, messages
from nnfmq.serialize.control_protocol import MONITOR_CALLS, REPLIES, ConnectionState, PeerRole
from nnfmq.serialize.messages import Call, Memories, Message, Reply

__all__ = [
    "POOL_THREADS",
    "Handler",
    "HandlerThread",
    "OpenBurst",
    "SentMemories",
    "Session",
    "abort_on_internal_error",
    "run_session",
]

POOL_THREADS = 4  # one client's calls: several executions and a preparation can run concurrently
LEAVE, END = signal.SIGUSR1, signal.SIGUSR2
SESSION_SIGNALS = (signal.SIGTERM, LEAVE, END)
IDLE_TRIM_MS = 2000
_TRIM_SOON_MS = 200  # until whoever has asked for it has dropped its last reference
_SEND_TIMEOUT_NS = 60_000_000_000
_GO_AWAY_TIMEOUT_NS = 100_000_000
_DRAIN_POLL_MS = 2  # the listener threads of bursts report nothing; see `BurstServer.is_drained`
_log = rate_limited("nnfmq.session")


class HandlerThread(Enum):
    """The thread on which a handler runs."""

    WATCHER = "the watcher's thread: the handler must not block"
    POOL = "one of the session's threads"
    LAUNCHES = "a thread for handlers that only start work, so that they reply immediately while the pool is busy"


def _medium_priority(_session: Session, _message: Any) -> int:
    return Priority.MEDIUM


class Handler(Struct, frozen=True):
    """The handler of a message, its thread, and the priority of its calls.

    Attributes:
        run: Handles the message, and owns the fds that came with it; its last argument is the time at which the message
            was received, in ns. Returns True if the call stays open, because `Session.submit_rest` has the rest of it.
            The error replies of `control_protocol` tell the client the NnfmqError that it raises; on the watcher's
            thread it may only raise InvalidArgument.
        thread: Where it runs. The client's HAL version is checked only of calls that do not run on the watcher's.
        priority: Returns the call's priority on the pool; MEDIUM for calls that belong to no model.
    """

    run: Callable[[Session, Any, list[int], int], bool | None]
    thread: HandlerThread = HandlerThread.POOL
    priority: Callable[[Session, Any], int] = _medium_priority


class SentMemories(NamedTuple):
    """A client's reply to GetMemories; the receiver owns `fds`."""

    memories: tuple[messages.MemoryData, ...]
    fds: list[int]


class OpenBurst:
    """A burst over queues: its server, and what else ends with it.

    Args:
        server: The server.
        cancel: Ends a wait for the client's reply. Idempotent.
        forget: Frees the burst's row in the client's statistics, and its thread's place.
    """

    def __init__(self, server: BurstServer, cancel: Callable[[], None], forget: Callable[[], None]) -> None:
        self.server = server
        self._cancel = cancel
        self._forget = forget
        self._closing = threading.Lock()  # acquired once, by whoever takes the row back

    def close(self) -> None:
        """End the burst. Blocks until a running execution has ended."""
        self._cancel()
        self.server.close()
        if self._closing.acquire(blocking=False):
            self._forget()


class Session:
    """One client's objects, and the services of its session for the handlers of calls. Thread-safe.

    `run` serves the client; any thread or signal handler may call `request_leave`, `drain` and `stop`.

    Args:
        channel: The control channel.
        driver_name: The name that the client sees.
        handlers: The handler of each message that a client may send.
        devices: The devices to offer; by default those of the configuration and of plug-ins.
        options: What the session needs to know of its driver.
        hello: The client's first message; by default it is received from `channel`.
        share: This client's part of what all clients may have; by default no other clients count.
        order: The order of the client's long executions; by default each begins at once.
        statistics: The driver's statistics and the client's slot there; by default the session has an area of its own.
        enter_sandbox: Called before the first byte of the client is looked at, and before threads start.

    Attributes:
        quota: The client's memory quota.
        devices: The devices that this driver offers.
        driver_name: The name that the client sees.
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
        threads: The number of threads that the client's bursts and open files have.
        unfinished: The compilations that go on in a process of their own if the client leaves.
        pending_calls: The driver's calls to the client, by call id.
        client_uid: The uid of the client process.
        is_monitor: Whether the client only looks at the driver.
        is_draining: Whether the session takes no new work, and ends when it has none left.
        is_closed: Whether the session is ending.
    """

    def __init__(
        self,
        channel: Channel,
        driver_name: str,
        handlers: Mapping[type[Message], Handler],
        devices: DeviceRegistry | None = None,
        options: DriverOptions = DriverOptions(),  # noqa: B008  it is immutable
        hello: bytes | None = None,
        share: MemoryShare | None = None,
        order: ClientOrder | None = None,
        statistics: tuple[StatisticsArea, int] | None = None,
        enter_sandbox: Callable[[], None] = lambda: None,
    ) -> None:
        self.devices = load_devices() if devices is None else devices
        self.driver_name = driver_name
        self.options = options
        self.order = order
        self.statistics_area, slot = statistics or (StatisticsArea(), 0)
        self.statistics = self.statistics_area.writer(slot)
        self.quota = MemoryQuota(share=share, on_change=self.statistics.set_charged_bytes)
        client = channel.peer()
        program = command_name(client.pid) if hello is None else shown_name(decode_greeting(hello).client_name)
        self.statistics.open(client.pid, client.uid, self.quota.limit_bytes, program)
        self.client_uid, self.client_pid = client.uid, client.pid
        self.connection_state = ConnectionState()
        self.interface = InterfaceVersion(FeatureLevel.AIDL_V4)
        ids = itertools.count(1)  # shared by all tables, so that the id of one kind of object is unknown as another
        counts = self.statistics
        models = ObjectLimit(
            "model", settings.CLIENT_MODELS, share, SharedCount.MODELS, settings.USER_MODELS, counts.set_models
        )
        bursts = ObjectLimit("burst", settings.CLIENT_BURSTS, on_change=counts.set_bursts)
        self.threads = ObjectLimit(
            "thread", settings.CLIENT_THREADS, share, SharedCount.THREADS, settings.USER_THREADS, counts.set_threads
        )
        self.models: HandleTable[DriverPreparedModel] = HandleTable("model", ids, models)
        self.bursts: HandleTable[OpenBurst] = HandleTable("burst", ids, bursts)
        self.aidl_bursts: HandleTable[AidlBurstServer] = HandleTable("burst", ids)
        self.executions: HandleTable[DriverExecution] = HandleTable("execution", ids)
        self.fenced_callbacks: HandleTable[DriverFencedExecution] = HandleTable("fenced execution", ids)
        self.launched: set[DriverFencedExecution] = set()
        self.buffers = ManagedBuffers(self.quota, ids)
        self.unfinished: list[UnfinishedCompilation] = []
        self.pending_calls: dict[int, Future[SentMemories]] = {}
        self.is_draining = self.is_closed = self.is_monitor = False
        self._goes_away = self._is_terminated = False
        self._channel = channel
        self._handlers = handlers
        self._received_hello = hello
        self._enter_sandbox = enter_sandbox
        self._client: ClientProcess | None = None  # None: unknown
        self._reader: watcher.ReaderHandle | None = None
        self._send_lock = threading.Lock()
        self._pool = PriorityThreadPool(POOL_THREADS, "nnfmq-session")
        self._launch_pool = PriorityThreadPool(1, "nnfmq-launches")
        self._tier_up_pool = PriorityThreadPool(1, "nnfmq-tier-up")
        self._lock = threading.Lock()
        self._calls_max = settings.CLIENT_CALLS.value()
        self._open_calls = 0  # queued or running on a pool
        self._running_calls = 0
        self._completed = 0  # pieces of work that the pools have completed
        self._is_idle = False  # trimmed, and no work since: the main loop sleeps without a timeout
        self._trim_is_due = False
        self._wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    # -- for the main thread ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve the client until it exits or `stop` is called. Blocks; call it on the process's main thread."""
        with ExitStack() as stack:
            stack.callback(self._close_wakeup_fd)
            stack.callback(self._channel.close)
            stack.callback(self.devices.end_changes)
            poll = select.poll()
            poll.register(self._wakeup_fd, select.POLLIN)
            self._client = ClientProcess.of(self._channel)
            if self._client is not None:
                stack.callback(self._client.close)
                poll.register(self._client, select.POLLIN)
            WATCHDOG.tell = self._tell_end
            self._enter_sandbox()
            stack.enter_context(ExecutionLimit(runs_in_progress, WATCHDOG.end_now))
            if self._received_hello is not None:
                self._dispatch_hello(self._received_hello)
            self._reader = watcher.add_reader(self._channel.fileno(), self._on_readable, abort_on_internal_error)
            stack.callback(watcher.remove_reader, self._reader)
            stack.callback(self._end_waits)
            self.devices.prefetch_imports()  # meanwhile a client goes on with its start after Hello
            self._wait_for_end(poll)
            if self.is_draining:
                self._wait_until_drained(poll)
            self.stop()
            if not self._is_terminated:
                go_on_without_client(list(self.unfinished), exits=True)

    def request_leave(self) -> None:
        """Have the main thread ask the client to move to the driver's successor. Takes no lock. Idempotent."""
        self._goes_away = True
        self._wake_up()

    def drain(self) -> None:
        """Take no new work, and end the session when it has none left. Takes no lock. Idempotent."""
        self.is_draining = True
        self._wake_up()

    def terminate(self) -> None:
        """End the session because the driver ends, so that nothing goes on: first drain it, and at once if it drains.

        For a signal handler.
        """
        if self._is_terminated or self.is_draining:
            self.stop()
        self._is_terminated = self._goes_away = True  # it drains once the client has been told
        self._wake_up()

    def end(self) -> None:
        """End the session at once because the driver ends, so that nothing goes on. For a signal handler."""
        self._is_terminated = True
        self.stop()

    def _send_go_away(self) -> None:
        """Ask the client to leave; without effect on one that does not read, or is not greeted yet."""
        self._goes_away = False
        text = "the driver ends" if self._is_terminated else "another driver has replaced this one"
        with suppress(DeadObject, ProtocolError, MissedDeadlineTransient):
            message = messages.GoAway(text, is_replaced=not self._is_terminated)
            self._send_before(message, (), time.monotonic_ns() + _GO_AWAY_TIMEOUT_NS)
        self.is_draining |= self._is_terminated

    def _tell_end(self, reason: str) -> None:
        """Tell the client why this process ends now; without effect on one that does not read."""
        with suppress(DeadObject, MissedDeadlineTransient, OSError):
            self._channel.send(control_protocol.encode(messages.GoAway(reason)), (), NO_WAIT)

    def _wait_until_drained(self, poll: select.poll) -> None:
        """Return when all that was in progress has ended, or the session has, or the client has exited.

        Two looks in a row must find nothing: between them a call that had been admitted is counted. The result of a
        fenced execution is in progress until the client has asked for it. If the driver ends,
        $NNFMQ_DRAIN_S limits the wait.
        """
        was_idle, limit_ns = False, deadline_in(round(settings.DRAIN_S.value() * 1e9)) if self._is_terminated else None
        while not (self.is_closed or has_passed(limit_ns)):
            bursts = self.bursts.values()
            for burst in bursts:
                burst.server.drain()
            is_idle = not (self._open_calls or self.launched) and all(burst.server.is_drained for burst in bursts)
            is_idle = is_idle and all(fenced.is_collected for fenced in self.fenced_callbacks.values())
            if is_idle and was_idle:
                for burst in bursts:
                    burst.server.end_listening(remaining_s(limit_ns))
                return
            was_idle = is_idle
            ready = {fd for fd, _ in poll.poll(_DRAIN_POLL_MS)}
            if ready - {self._wakeup_fd}:
                return  # the client has exited
            if ready:
                os.eventfd_read(self._wakeup_fd)

    def _end_waits(self) -> None:
        """End everything that waits for this session: fences, bursts, and calls that the client has not replied to."""
        for fenced in list(self.launched):
            fenced.fail(DeadObject("the client has exited"))
        for execution in self.executions.pop_all():
            execution.release()
        for pending in list(self.pending_calls.values()):
            complete(pending, DeadObject("the client has exited"))
        for burst in self.bursts.values():
            watcher.notify_peer_death(burst.server.peer)

    def _wait_for_end(self, poll: select.poll) -> None:
        """Return when the session ends or drains. After IDLE_TRIM_MS without work, trim memory once (EXE-13).

        What a preparation has freed is trimmed in any case (`trim_soon`). After trimming, the thread sleeps without a
        timeout; `_submit` wakes it. While a burst is open the thread sleeps as well, and the burst keeps its memory
        (BUR-1).
        """
        seen = trimmed_at = None
        while not self.is_closed:
            ready = {fd for fd, _ in poll.poll(self._trim_timeout_ms())}
            if ready - {self._wakeup_fd}:
                return  # the client has exited
            if ready:  # the session ends, there is work again, or memory to trim
                os.eventfd_read(self._wakeup_fd)
                self._is_idle = False
                if self._goes_away:
                    self._send_go_away()
                if self.is_draining:
                    return
                continue
            if self._trim_is_due:
                self._trim_is_due = False
                trim_memory()
                continue
            before, seen = seen, self._work_done()
            if before == seen != trimmed_at and not self._open_calls:
                trim_memory()
                trimmed_at = seen
            self._is_idle = trimmed_at == seen or bool(self.bursts.values())
            if self._work_done() != seen or self._open_calls or self._trim_is_due:
                # Work that began before `_is_idle` was set did not wake this thread.
                self._is_idle = False

    def _trim_timeout_ms(self) -> int | None:
        if self._trim_is_due:
            return _TRIM_SOON_MS
        return None if self._is_idle else IDLE_TRIM_MS

    def _work_done(self) -> tuple[int, int]:
        """Return a value that changes with each execution."""
        return self._completed, sum(burst.server.request_count for burst in self.bursts.values())

    def _close_wakeup_fd(self) -> None:
        fd, self._wakeup_fd = self._wakeup_fd, -1
        os.close(fd)

    # -- receiving: on the watcher's thread ---------------------------------------------------------------------------

    def _on_readable(self) -> None:
        try:
            with self._channel.receive(NO_WAIT) as frame:
                self._dispatch(frame)
        except MissedDeadlineTransient:
            pass  # the frame that woke the watcher was received before
        except DeadObject:
            self._stop_receiving()
        except (TransportError, MemoryError) as error:
            _log.warning("connection closed: %s", error or "there is not enough memory for a message")
            self._stop_receiving()

    def _stop_receiving(self) -> None:
        """End the session. The connection stays readable, so it must not be watched until the main thread ends."""
        self.stop()
        if self._reader is not None:  # else the watcher was faster than `run`, and calls again
            watcher.remove_reader(self._reader)

    def _dispatch(self, frame: Frame) -> None:
        received_ns = time.monotonic_ns()
        if len(frame.data) <= INLINE_BYTES:
            self._decode_and_dispatch(frame, received_ns, QuotaCharge(self.quota, 0))
            return
        # A larger message comes in a file, which may be sparse and so cost the client nothing.
        size = control_protocol.message_size(frame.data)
        try:
            charge = self.quota.charge(size.decoded_bytes(len(frame.data)))
        except ResourceExhausted as error:
            frame.close()
            self._reject_undecoded(size, error)
        else:
            self._decode_and_dispatch(frame, received_ns, charge)

    def _decode_and_dispatch(self, frame: Frame, received_ns: int, charge: QuotaCharge) -> None:
        """Decode a message and pass it to its handler; it is charged until it is handled."""
        with ExitStack() as undo:
            undo.callback(charge.close)
            message = control_protocol.decode(frame.data, sender=PeerRole.CLIENT, fds=frame.fd_count)
            self.connection_state.process_message(message, PeerRole.CLIENT)
            handler = self._handlers[type(message)]
            if frame.fds_truncated:
                self._reject_without_fds(message)
            elif handler.thread is HandlerThread.WATCHER:
                self._handle(handler, message, frame.detach_fds(), received_ns)
            elif self._admit(message, frame):
                undo.pop_all()
                pool = self._launch_pool if handler.thread is HandlerThread.LAUNCHES else self._pool
                priority = handler.priority(self, message)
                self._submit(pool, priority, Session._call, handler, message, frame.detach_fds(), received_ns, charge)

    def _handle(self, handler: Handler, message: Message, fds: list[int], received_ns: int) -> None:
        """Handle a message on this thread."""
        try:
            handler.run(self, message, fds, received_ns)
        except InvalidArgument as error:
            if not isinstance(message, Call) or type(message) not in REPLIES:
                raise
            self._send_error(type(message), message.call, error)

    def _reject_undecoded(self, size: control_protocol.MessageSize, error: NnfmqError) -> None:
        """Reply to a call whose message is too large to be decoded.

        Raises:
            ProtocolError: If the message is no call.
        """
        kind = control_protocol.call_type(size.type, PeerRole.CLIENT)
        if kind is None or self._handlers[kind].thread is HandlerThread.WATCHER:
            raise ProtocolError(f"{error}; only calls may be so large")
        self.connection_state.process_call(kind, size.call, PeerRole.CLIENT)
        self._send_error(kind, size.call, error)

    def _reject_without_fds(self, message: Message) -> None:
        error = ResourceExhaustedTransient("the driver cannot open more fds for this client (ulimit -n)")
        if isinstance(message, Memories):
            self.fail_pending_call(message, error)
        else:
            assert isinstance(message, Call)  # no other message comes with fds
            self._send_error(type(message), message.call, error)

    def fail_pending_call(self, message: Memories, error: NnfmqError) -> None:
        """Fail the call to which `message` replies, because its fds could not be received."""
        pending = self.pending_calls.pop(message.call, None)
        if pending is not None:
            complete(pending, error)

    def _admit(self, message: Any, frame: Frame) -> bool:
        """Return whether a call may be queued; close its frame and reply with an error if not."""
        try:
            if self.is_draining:
                raise DeviceUnavailable(DRAINING)
            if self._open_calls + len(self.launched) >= self._calls_max:
                raise ResourceExhaustedTransient(
                    f"{self._calls_max} calls of this client are open already, the limit that "
                    f"${settings.CLIENT_CALLS.variable} of the driver sets"
                )
            self.interface.check_request(message)
            if self.is_monitor and type(message) not in MONITOR_CALLS:
                raise InvalidArgument(f"a monitor may not call {type(message).__name__}: connect without `monitor`")
        except NnfmqError as error:
            frame.close()
            self._send_error(type(message), message.call, error)
            return False
        return True

    def _call(self, handler: Handler, message: Any, fds: list[int], received_ns: int, charge: QuotaCharge) -> bool:
        """Handle a call on a thread of the pools; return whether it stays open."""
        try:
            with closing(charge), recorded_call(message):
                return handler.run(self, message, fds, received_ns) is True
        except DeadObject:
            raise
        except NnfmqError as error:
            self._send_error(type(message), message.call, error)
        except MemoryError as error:
            shortage = memory_shortage(f"the call failed{f': {error}' if str(error) else ''}")
            self._send_error(type(message), message.call, shortage)
        return False

    def _send_error(self, kind: type[Call], call: int, error: NnfmqError) -> None:
        for reply in control_protocol.error_replies(kind, call, status_for_error(error), str(error)):
            self.send(reply)

    def _dispatch_hello(self, data: bytes) -> None:
        """Handle the Hello that the supervisor has received and checked."""
        try:
            self._dispatch(Frame(bytearray(data), []))
        except DeadObject:  # the client has exited meanwhile
            self.stop()

    # -- for handlers -------------------------------------------------------------------------------------------------

    def client_was_killed(self) -> bool:
        """Return whether the client's process has received SIGKILL, even if it has not exited yet."""
        return self._client is not None and self._client.was_killed()

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a message, without what the client's HAL version cannot express. Borrows `fds`.

        Blocks for up to a minute while the client does not read and its socket is full.

        Raises:
            DeadObject: If the client has exited, or has not read for a minute.
        """
        try:
            self._send_before(message, fds, time.monotonic_ns() + _SEND_TIMEOUT_NS)
        except MissedDeadlineTransient:
            raise DeadObject("the client has not read its replies for a minute; the driver gives it up") from None

    def _send_before(self, message: Message, fds: Sequence[int], deadline_ns: int) -> None:
        """Send a message before a deadline. Raises as `send`, and MissedDeadlineTransient."""
        message = self.interface.downgrade_reply(message)
        data = control_protocol.encode(message)
        # The connection state must process messages in the order in which they are sent.
        if not self._send_lock.acquire(timeout=remaining_s(deadline_ns) or 0):
            raise MissedDeadlineTransient("another thread waits until the client reads")
        try:
            self.connection_state.process_message(message, PeerRole.DRIVER)
            self._channel.send(data, fds, deadline_ns)
        finally:
            self._send_lock.release()

    def send_success(self, call: int) -> None:
        """Send the reply that only says that a call has succeeded. Blocks and raises as `send`."""
        self.send(Reply(call, ErrorStatus.NONE, ""))

    def submit(self, work: Callable[..., None], *args: Any, priority: int = Priority.MEDIUM) -> None:
        """Call `work(session, *args)` on the thread pool.

        If it raises DeadObject, the session stops. Any other exception is an internal error and ends the worker.
        """
        self._submit(self._pool, priority, work, *args)

    def submit_rest(self, work: Callable[..., None], *args: Any, priority: int) -> None:
        """Submit the rest of a launch as `submit` does. The launch's handler returns True: the call stays open."""
        self._pool.submit(partial(self._run_task, work, *args), priority)

    def _submit(self, pool: PriorityThreadPool, priority: int, work: Callable[..., object], *args: Any) -> None:
        with self._lock:
            self._open_calls += 1
            self._publish_calls()
        if self._is_idle:
            self._wake_up()
        pool.submit(partial(self._run_task, work, *args), priority)

    def _run_task(self, work: Callable[..., object], *args: Any) -> None:
        """Run `work`. If it returns True, its call stays open until the task that `submit_rest` was given ends."""
        stays_open = False
        with self._lock:
            self._running_calls += 1
            self._publish_calls()
        try:
            stays_open = work(self, *args) is True
        except DeadObject:
            self.stop()
        except BaseException as error:  # noqa: BLE001  the thread pool would drop it, and the client wait forever
            abort_on_internal_error(error)
        finally:
            with self._lock:
                self._open_calls -= not stays_open
                self._running_calls -= 1
                self._publish_calls()
                self._completed += 1

    def _publish_calls(self) -> None:
        """Publish the numbers of calls. The caller holds the lock."""
        self.statistics.set_calls(self._open_calls, self._running_calls)

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
            tier_up(program_ref, self.quota.charge)
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


def complete(pending: Future[SentMemories], result: SentMemories | NnfmqError) -> bool:
    """Set the result of a pending call and return True. Return False, and keep nothing, if it has one already."""
    try:
        if isinstance(result, NnfmqError):
            pending.set_exception(result)
        else:
            pending.set_result(result)
    except InvalidStateError:
        return False
    return True


def abort_on_internal_error(error: BaseException | None) -> None:
    """Terminate the worker because of a bug in a thread, so that its client sees its death instead of waiting."""
    _log.critical("an internal error ends this worker", exc_info=error)
    os._exit(os.EX_SOFTWARE)


def run_session(session: Session) -> NoReturn:
    """Serve the session's client until it exits, or SIGTERM has arrived and nothing is left; then exit the process."""
    with suppress(OSError, ValueError):  # as many fds as possible: each memory of a client takes two
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    use_one_heap()
    # A burst's listener thread gets the GIL back from a thread that prepares a model after 50 µs instead of 5 ms.
    sys.setswitchinterval(50e-6)
    threading.excepthook = lambda args: abort_on_internal_error(args.exc_value)
    limit_private_memory(session.quota.limit_bytes)
    memory.use_budget(session.quota)
    use_thread_limit(session.threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is meant for the application or the supervisor
    signal.signal(signal.SIGTERM, lambda _number, _frame: session.terminate())
    signal.signal(LEAVE, lambda _number, _frame: session.request_leave())
    signal.signal(END, lambda _number, _frame: session.end())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SESSION_SIGNALS)  # what a supervisor has sent before is handled now
    session.run()
    PERF_MAP.close()
    os._exit(0)  # without waiting for threads: nobody needs the result of work that is still running
