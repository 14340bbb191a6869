"""One client's session in the driver: it receives calls on the control channel and dispatches them to handlers.

The watcher's thread receives one frame at a time and runs inline handlers; blocking handlers (preparing, executing,
closing) run by priority on a small thread pool, at most CALLS_MAX of them. The main thread waits for the session's end,
which it detects even while all other threads are blocked in sending, and trims memory after IDLE_TRIM_MS without work.

Whatever the client sends, the reply is a status; bytes that violate the protocol end only this connection. When the
client hangs up or dies, or `stop` is called, every wait ends and the process exits. The kernel then frees what is left,
so no clean-up procedure can be forgotten. The same code runs in a supervisor's worker and in an embedded driver. (LIFE)
"""

from __future__ import annotations

import logging
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from typing import Any, NoReturn

from nnfmq.base import watcher
from nnfmq.base.channel import INLINE_BYTES, NO_WAIT, Channel, Frame
from nnfmq.driver.compilation.unfinished import go_on_without_client
from nnfmq.driver.devices.installation import DriverOptions
from nnfmq.driver.devices.interface_versions import InterfaceVersion
from nnfmq.driver.devices.registry import DeviceRegistry, load_devices
from nnfmq.driver.execution.order import ClientOrder
from nnfmq.driver.memory.quota import MemoryQuota, MemoryShare, QuotaCharge, limit_private_memory
from nnfmq.driver.process.children import ClientProcess
from nnfmq.driver.process.pending_clients import check_hello
from nnfmq.driver.process.statistics_area import StatisticsArea
from nnfmq.driver.process.trace import WORKER_TRACE, recorded_call
from nnfmq.driver.session import buffer_calls, burst_calls, calls, execution_calls, model_calls
from nnfmq.driver.session.calls import BlockingHandler, SessionContext
from nnfmq.engines import memory
from nnfmq.engines.memory import trim_memory, use_one_heap
from nnfmq.hal.errors import (
    DeadObject,
    ErrorStatus,
    MissedDeadlineTransient,
    NnfmqError,
    ProtocolError,
    ResourceExhausted,
    ResourceExhaustedTransient,
    TransportError,
    status_for_error,
)
from nnfmq.hal.feature_levels import interface_level
from nnfmq.queue import core
from nnfmq.serialize import control_protocol, messages
from nnfmq.serialize.control_protocol import PeerRole

IDLE_TRIM_MS = 2000
_TRIM_SOON_MS = 200  # until whoever has asked for it has dropped its last reference
CALLS_MAX = 256  # queued or running, for each client; further calls are rejected immediately
_log = logging.getLogger("nnfmq.session")


class Session(SessionContext):
    """One client's session. `run` serves it; any thread or signal handler may call `stop`."""

    def __init__(
        self,
        channel: Channel,
        driver_name: str,
        devices: DeviceRegistry | None = None,
        options: DriverOptions = DriverOptions(),  # noqa: B008  it is immutable
        hello: bytes | None = None,
        share: MemoryShare | None = None,
        order: ClientOrder | None = None,
        statistics: tuple[StatisticsArea, int] | None = None,
    ) -> None:
        if devices is None:
            devices = load_devices()
        area, slot = statistics or (StatisticsArea(), 0)
        writer = area.writer(slot)
        quota = MemoryQuota(share=share, on_change=writer.set_charged_bytes)
        super().__init__(channel, devices, options, quota, order, area, writer)
        client = channel.peer()
        writer.open(client.pid, client.uid, quota.limit_bytes)
        self._driver_name = driver_name
        self._received_hello = hello
        self._reader: watcher.ReaderHandle | None = None
        self._is_terminated = False

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
            if self._received_hello is not None:
                self._dispatch_hello(self._received_hello)
            self._reader = watcher.add_reader(self._channel.fileno(), self._on_readable, calls.abort_on_internal_error)
            stack.callback(watcher.remove_reader, self._reader)
            stack.callback(burst_calls.cancel_all, self)
            stack.callback(execution_calls.cancel_reusable, self)
            stack.callback(execution_calls.cancel_fenced, self)
            self.devices.prefetch_imports()  # meanwhile a client goes on with its start after Hello
            self._wait_for_end(poll)
            self.stop()
            if not self._is_terminated:
                go_on_without_client(list(self.unfinished), exits=True)

    def terminate(self) -> None:
        """End the session, because the driver ends: nothing goes on. For a signal handler."""
        self._is_terminated = True
        self.stop()

    def _wait_for_end(self, poll: select.poll) -> None:
        """Return when the session ends. After IDLE_TRIM_MS without work, trim memory once (EXE-13).

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
            fd_count = None if frame.fds_truncated else len(frame.fds)
            message = control_protocol.decode(frame.data, sender=PeerRole.CLIENT, fds=fd_count)
            self.connection_state.process_message(message, PeerRole.CLIENT)
            handler = _HANDLERS[type(message)]
            if frame.fds_truncated:
                self._reject_without_fds(handler, message)
            elif not isinstance(handler, BlockingHandler):
                handler(self, message, frame.detach_fds())
            elif self._admit(handler, message, frame):
                undo.pop_all()
                pool = self._launch_pool if handler.is_launch else self._pool
                priority = handler.priority(self, message)
                self._submit(pool, priority, Session._call, handler, message, frame.detach_fds(), received_ns, charge)

    def _reject_undecoded(self, size: control_protocol.MessageSize, error: NnfmqError) -> None:
        """Reply to a call whose message is too large to be decoded.

        Raises:
            ProtocolError: If the message is no call.
        """
        kind = control_protocol.call_type(size.type, PeerRole.CLIENT)
        handler = None if kind is None else _HANDLERS[kind]
        if kind is None or not isinstance(handler, BlockingHandler):
            raise ProtocolError(f"{error}; only calls may be so large")
        self.connection_state.process_call(kind, size.call, PeerRole.CLIENT)
        self._reply_with_error(handler, size.call, error)

    def _reject_without_fds(self, handler: object, message: messages.Message) -> None:
        error = ResourceExhaustedTransient("the driver cannot open more fds for this client (ulimit -n)")
        if isinstance(handler, BlockingHandler):
            assert isinstance(message, messages.Call)
            self._reply_with_error(handler, message.call, error)
        else:
            assert isinstance(message, messages.Memories)  # no other message with fds has an inline handler
            burst_calls.fail_pending_call(self, message, error)

    def _admit(self, handler: BlockingHandler, message: Any, frame: Frame) -> bool:
        """Return whether a call may be queued; close its frame and reply with an error if not."""
        try:
            if self._open_calls + len(self.launched) >= CALLS_MAX:
                raise ResourceExhaustedTransient(f"{CALLS_MAX} calls of this client are open already")
            self.interface.check_request(message)
        except NnfmqError as error:
            frame.close()
            self._reply_with_error(handler, message.call, error)
            return False
        return True

    def _call(
        self, handler: BlockingHandler, message: Any, fds: list[int], received_ns: int, charge: QuotaCharge
    ) -> bool:
        """Handle a call; return whether it stays open."""
        try:
            with closing(charge), recorded_call(message):
                return handler.run(self, message, fds, received_ns) is True
        except DeadObject:
            raise
        except NnfmqError as error:
            self._reply_with_error(handler, message.call, error)
        except MemoryError as error:
            text = f"there is not enough memory for the call: {error}"
            self._reply_with_error(handler, message.call, ResourceExhaustedTransient(text))
        return False

    def _reply_with_error(self, handler: BlockingHandler, call: int, error: NnfmqError) -> None:
        for reply in handler.error_replies(call, status_for_error(error), str(error)):
            self.send(reply)

    # -- the handshake ------------------------------------------------------------------------------------------------

    def _dispatch_hello(self, data: bytes) -> None:
        """Handle the Hello that the supervisor has received and checked."""
        try:
            self._dispatch(Frame(bytearray(data), []))
        except DeadObject:  # the client has exited meanwhile
            self.stop()

    def _hello(self, message: messages.Hello, _fds: list[int]) -> None:
        reason = check_hello(message)
        if reason:
            self.send(messages.Refused(ErrorStatus.GENERAL_FAILURE, reason))
            self.stop()
            return
        self.interface = InterfaceVersion(interface_level(message.interface))
        WORKER_TRACE.label = f"driver of {message.client_name}"
        worker_pid = os.getpid()
        driver_pid = self.options.supervisor_pid or worker_pid
        self.send(
            messages.HelloReply(
                control_protocol.PROTOCOL, message.interface, self._driver_name, driver_pid, worker_pid, core.core_name
            )
        )

    def _goodbye(self, _message: messages.Goodbye, _fds: list[int]) -> None:
        self.stop()


_HANDLERS: dict[type[messages.Message], Callable[[Session, Any, list[int]], None] | BlockingHandler] = {
    messages.Hello: Session._hello,
    messages.Goodbye: Session._goodbye,
    **model_calls.HANDLERS,
    **model_calls.HANDLERS,
    **execution_calls.HANDLERS,
    **execution_calls.HANDLERS,
    **execution_calls.HANDLERS,
    **burst_calls.HANDLERS,
    **burst_calls.HANDLERS,
    **buffer_calls.HANDLERS,
    **model_calls.HANDLERS,
}


def run_session(
    channel: Channel,
    driver_name: str,
    devices: DeviceRegistry | None = None,
    options: DriverOptions = DriverOptions(),  # noqa: B008  it is immutable
    hello: bytes | None = None,
    share: MemoryShare | None = None,
    order: ClientOrder | None = None,
    statistics: tuple[StatisticsArea, int] | None = None,
) -> NoReturn:
    """Serve the client at the other end of `channel` until it exits or SIGTERM arrives, then exit the process.

    Args:
        channel: The control channel.
        driver_name: The name that the client sees.
        devices: The devices to offer; by default those of the configuration and of plug-ins.
        options: What the session needs to know of its driver.
        hello: The client's first message; by default it is received from `channel`.
        share: This client's part of what all clients may have; by default no other clients count.
        order: The order of the client's long executions; by default each begins at once.
        statistics: The driver's statistics and the client's slot there; by default the session has an area of its own.
    """
    with suppress(OSError, ValueError):  # as many fds as possible: each memory of a client takes two
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    use_one_heap()
    # A burst's listener thread gets the GIL back from a thread that prepares a model after 50 µs instead of 5 ms.
    sys.setswitchinterval(50e-6)
    threading.excepthook = lambda args: calls.abort_on_internal_error(args.exc_value)
    session = Session(channel, driver_name, devices, options, hello, share, order, statistics)
    limit_private_memory(session.quota.limit_bytes)
    memory.use_budget(session.quota)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is meant for the application or the supervisor
    signal.signal(signal.SIGTERM, lambda _number, _frame: session.terminate())
    session.run()
    os._exit(0)  # without waiting for threads: nobody needs the result of work that is still running
