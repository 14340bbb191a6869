"""One client's session in the driver: its control channel, and everything that it made. The same in every isolation.

The watcher's thread reads one frame at a time and answers what is quick; preparing, executing and closing run on a
small pool by priority, up to CALLS_MAX of them. The main thread waits for the end, which is seen so even while all
others send to a client that does not read, and gives back memory after IDLE_TRIM_MS without work. Whatever it sends,
the answer is a status; bytes that break the protocol end this connection and nothing else. On hang-up, the client's
death or `end` every wait ends, and the process with it: the kernel frees what is left, so cleaning up is not a
procedure that can be forgotten. What a call does is in `service.calls`. (ARCHITECTURE: Death and waiting;
REQUIREMENTS LIFE)
"""

from __future__ import annotations

import itertools
import logging
import os
import resource
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any, NoReturn

from nnfmq import watcher
from nnfmq.channel import INLINE_BYTES, NO_WAIT, Channel, Frame
from nnfmq.engines.execution import TieredProgram
from nnfmq.engines.idle_trim import trim_memory
from nnfmq.hal.errors import (
    DeadObject,
    ErrorStatus,
    InvalidArgument,
    MissedDeadlineTransient,
    NnfmqError,
    ProtocolError,
    ResourceExhaustedTransient,
    status_for_error,
)
from nnfmq.hal.feature_levels import FeatureLevel, interface_level
from nnfmq.hal.types import Priority
from nnfmq.queue import core
from nnfmq.serialize import control_protocol, messages
from nnfmq.serialize.connection_state import ConnectionState
from nnfmq.serialize.control_protocol import PeerRole
from nnfmq.service.aidl_burst_server import AidlBurstServer
from nnfmq.service.background_compile import tier_up
from nnfmq.service.device_registry import DeviceRegistry, load_devices
from nnfmq.service.driver_execution import DriverExecution
from nnfmq.service.driver_fenced_execution import DriverFencedExecution
from nnfmq.service.driver_prepared_model import DriverPreparedModel
from nnfmq.service.handle_table import HandleTable
from nnfmq.service.handlers import (
    aidl_burst_calls,
    buffer_calls,
    burst_calls,
    device_calls,
    execution_calls,
    fenced_calls,
    model_calls,
    reusable_calls,
)
from nnfmq.service.handlers.base import BlockingHandler, InlineHandler
from nnfmq.service.handlers.burst_calls import Given, OpenBurst
from nnfmq.service.interface_versions import InterfaceVersion
from nnfmq.service.managed_buffers import ManagedBuffers
from nnfmq.service.memory_quota import MemoryQuota, QuotaCharge
from nnfmq.service.priority_pool import PriorityThreadPool

POOL_THREADS = 4  # several executions and a preparation at once; a session is one client's
IDLE_TRIM_MS = 2000  # without work, until what it left is given back
CALLS_MAX = 256  # of one client, queued or running; more are refused at once
BURSTS_MAX = 256  # of one client: each has a thread
_OBJECTS_COST = 16  # bytes in memory for one of a message that is decoded
_PATIENCE_NS = 60_000_000_000  # with a client that has filled its socket with calls and reads no answer
_log = logging.getLogger("nnfmq.session")


class Session:
    """Everything of one client, in a process of its own. `run` serves it; any thread or signal handler may `end` it.

    The handlers of `service.calls` use what has no underscore here.
    """

    def __init__(self, channel: Channel, driver_name: str, devices: DeviceRegistry | None = None) -> None:
        self.quota = MemoryQuota()
        self.devices = load_devices() if devices is None else devices
        self.connection_state = ConnectionState()
        self.interface = InterfaceVersion(FeatureLevel.AIDL_V4)  # until the client says which
        numbers = itertools.count(1)  # one row for all kinds: what is mistaken for another is not found
        self.models: HandleTable[DriverPreparedModel] = HandleTable("model", numbers)
        self.bursts: HandleTable[OpenBurst] = HandleTable("burst", numbers, BURSTS_MAX)
        self.aidl_bursts: HandleTable[AidlBurstServer] = HandleTable("burst", numbers)
        self.executions: HandleTable[DriverExecution] = HandleTable("execution", numbers)
        self.fenced_callbacks: HandleTable[DriverFencedExecution] = HandleTable("fenced execution", numbers)
        self.launched: set[DriverFencedExecution] = set()  # those that are not over
        self.buffers = ManagedBuffers(self.quota, numbers)
        self.pending_calls: dict[int, Future[Given]] = {}  # what the client was asked, by the call's number
        self.is_closed = False
        self.client_uid = channel.peer().uid
        self._channel = channel
        self._driver_name = driver_name
        self._pool = PriorityThreadPool(POOL_THREADS, "nnfmq-session")
        self._launches = PriorityThreadPool(1, "nnfmq-launches")
        self._improvements = PriorityThreadPool(1, "nnfmq-improvements")
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._calls = 0  # on the pool, queued or running
        self._done = 0  # by the pool
        self._is_resting = False  # what work left was given back, and nothing was done since
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def run(self) -> None:
        """Serve until the client is gone or `end` is called; blocks, on the main thread of the process."""
        with ExitStack() as stack:
            stack.callback(self._close_bell)
            stack.callback(self._channel.close)
            poll = select.poll()
            poll.register(self._bell, select.POLLIN)
            pidfd = self._channel.open_peer_pidfd()
            if pidfd is not None:
                stack.callback(os.close, pidfd)
                poll.register(pidfd, select.POLLIN)
            watch = watcher.add_reader(self._channel.fileno(), self._on_ready, abort_on_internal_error)
            stack.callback(watcher.remove_reader, watch)
            stack.callback(burst_calls.cancel_all, self)
            stack.callback(reusable_calls.cancel_all, self)
            stack.callback(fenced_calls.cancel_all, self)
            self._wait_for_end(poll)
            self.end()

    def _wait_for_end(self, poll: select.poll) -> None:
        """Return at the end. When there was no work for IDLE_TRIM_MS, give back what earlier work left (EXE-13)."""
        seen = rested = None
        while not self.is_closed:
            ready = {fd for fd, _ in poll.poll(None if self._is_resting else IDLE_TRIM_MS)}
            if ready - {self._bell}:
                return
            if ready:  # the end, or work after a rest
                os.eventfd_read(self._bell)
                self._is_resting = False
                continue
            before, seen = seen, self._work()
            if before == seen != rested and not self._calls:
                trim_memory()
                rested = seen
            self._is_resting = rested == seen or bool(self.bursts.all())  # which keep what they need (BUR-1)
            if self._work() != seen or self._calls:
                self._is_resting = False

    def _work(self) -> tuple[int, int]:
        """Return what differs whenever something was executed."""
        return self._done, sum(burst.server.request_count for burst in self.bursts.all())

    def end(self) -> None:
        """End the session: `run` returns. Takes no lock, for signal handlers. Harmless when repeated."""
        self.is_closed = True
        self._ring()

    def _ring(self) -> None:
        with suppress(OSError, ValueError):  # `run` has returned meanwhile
            os.eventfd_write(self._bell, 1)

    def send(self, message: messages.Message, fds: Sequence[int] = ()) -> None:
        """Send a message; the fds stay the caller's. Raises DeadObject, also where the client reads nothing."""
        message = self.interface.spoken(message)
        data = control_protocol.encode(message)
        deadline_ns = time.monotonic_ns() + _PATIENCE_NS
        with self._send_lock:  # the connection state must process messages in the order in which they are sent
            self.connection_state.process_message(message, PeerRole.DRIVER)
            try:
                self._channel.send(data, fds, deadline_ns)
            except MissedDeadlineTransient:
                raise DeadObject("the client has not read its answers for a long time and is given up") from None

    def submit(self, work: Callable[..., None], *arguments: Any, priority: int = Priority.MEDIUM) -> None:
        """Run `work(session, *arguments)` on the pool; what it raises but DeadObject is a bug."""
        self._submit(self._pool, priority, work, *arguments)

    def _submit(self, threads: PriorityThreadPool, priority: int, work: Callable[..., None], *arguments: Any) -> None:
        with self._lock:
            self._calls += 1
        if self._is_resting:
            self._ring()
        threads.submit(partial(self._guarded, work, *arguments), priority)

    def improve(self, program: TieredProgram, priority: int = Priority.MEDIUM) -> None:
        """Replace `program` by what it is provisional for, on a thread of its own, unless it is gone by then.

        No call waits for this, and none is refused for it.
        """
        self._improvements.submit(partial(self._improve, weakref.ref(program)), priority)

    def _improve(self, wanted: weakref.ref[TieredProgram]) -> None:
        if not self.is_closed:
            tier_up(wanted)
        with self._lock:
            self._done += 1
        if self._is_resting:
            self._ring()  # this has left something to give back

    def join(self) -> None:
        """Return when no thread of the pool runs any more: for sessions that do not end with their process."""
        self._launches.shutdown()
        self._pool.shutdown()
        self._improvements.shutdown()  # last: what runs on the pool may hand it a model

    def _close_bell(self) -> None:
        bell, self._bell = self._bell, -1
        os.close(bell)

    def _on_ready(self) -> None:
        try:
            with self._channel.receive(NO_WAIT) as frame:
                self._on_frame(frame)
        except MissedDeadlineTransient:
            pass  # nothing there: what woke the watcher was taken already
        except DeadObject:
            self.end()
        except ProtocolError as error:
            _log.warning("connection closed: %s", error)
            self.end()

    def _on_frame(self, frame: Frame) -> None:
        received_ns = time.monotonic_ns()
        count = None if frame.fds_truncated else len(frame.fds)
        message = control_protocol.decode(frame.data, sender=PeerRole.CLIENT, fds=count)
        self.connection_state.process_message(message, PeerRole.CLIENT)
        handler = _HANDLERS[type(message)]
        if frame.fds_truncated:
            self._refuse_without_fds(handler, message)
        elif not isinstance(handler, BlockingHandler):
            handler(self, message, frame.detach_fds())
        else:
            try:
                charge = self._admitted(message, len(frame.data))
            except NnfmqError as refusal:
                frame.close()
                self._refuse(handler, message, refusal)
                return
            threads = self._launches if handler.is_launch else self._pool
            priority = handler.priority(self, message)
            self._submit(threads, priority, Session._call, handler, message, frame.detach_fds(), received_ns, charge)

    def _admitted(self, message: messages.Message, size_bytes: int) -> QuotaCharge:
        """Return what a call costs while it waits for its turn. Raises what it is refused with."""
        if self._calls + len(self.launched) >= CALLS_MAX:
            raise ResourceExhaustedTransient(f"{CALLS_MAX} calls of this client are open already")
        refusal = self.interface.refusal(message)
        if refusal is not None:
            raise refusal
        # A body in a file may be large at no cost to the client: holes. What is no model's bytes becomes many objects.
        in_bytes = len(getattr(message, "model", b""))
        is_large = size_bytes > INLINE_BYTES
        return self.quota.charge(in_bytes + (size_bytes - in_bytes) * _OBJECTS_COST if is_large else 0)

    def _refuse_without_fds(self, handler: InlineHandler | BlockingHandler, message: Any) -> None:
        """Refuse what came with descriptors for which this process has no room."""
        error = ResourceExhaustedTransient("the driver has no room for more descriptors of this client (ulimit -n)")
        if isinstance(handler, BlockingHandler):
            self._refuse(handler, message, error)
        else:
            burst_calls.fail_pending_call(self, message, error)

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        """Run work on the pool. A bug in it ends this worker, visibly, rather than leaving a call unanswered."""
        try:
            work(self, *arguments)
        except DeadObject:
            self.end()
        except BaseException as error:  # noqa: BLE001  a future would swallow it
            abort_on_internal_error(error)
        finally:
            with self._lock:
                self._calls -= 1
                self._done += 1

    def _call(
        self, handler: BlockingHandler, message: Any, fds: list[int], received_ns: int, charge: QuotaCharge
    ) -> None:
        try:
            with closing(charge):
                handler.run(self, message, fds, received_ns)
        except DeadObject:
            raise
        except NnfmqError as error:
            self._refuse(handler, message, error)

    def _refuse(self, handler: BlockingHandler, message: Any, error: NnfmqError) -> None:
        for answer in handler.refuse(message.call, status_for_error(error), str(error)):
            self.send(answer)

    def _hello(self, message: messages.Hello, _fds: list[int]) -> None:
        if message.protocol != control_protocol.PROTOCOL:
            text = (
                f"this driver speaks protocol {control_protocol.PROTOCOL}, the client {message.protocol}: "
                "install the same nnfmq release on both sides"
            )
            self._turn_away(text)
            return
        try:
            self.interface = InterfaceVersion(interface_level(message.interface))
        except InvalidArgument as error:
            self._turn_away(str(error))
            return
        name, pid = self._driver_name, os.getpid()
        self.send(messages.HelloReply(control_protocol.PROTOCOL, message.interface, name, pid, core.core_name))

    def _turn_away(self, text: str) -> None:
        self.send(messages.Refused(ErrorStatus.GENERAL_FAILURE, text))
        self.end()

    def _goodbye(self, _message: messages.Goodbye, _fds: list[int]) -> None:
        self.end()


_HANDLERS: dict[type[messages.Message], InlineHandler | BlockingHandler] = {
    messages.Hello: Session._hello,
    messages.Goodbye: Session._goodbye,
    **device_calls.HANDLERS,
    **model_calls.HANDLERS,
    **execution_calls.HANDLERS,
    **fenced_calls.HANDLERS,
    **reusable_calls.HANDLERS,
    **burst_calls.HANDLERS,
    **aidl_burst_calls.HANDLERS,
    **buffer_calls.HANDLERS,
}


def run_session(channel: Channel, driver_name: str, devices: DeviceRegistry | None = None) -> NoReturn:
    """Be the driver of the client at the other end until it is gone, or until SIGTERM; ends the process.

    It offers `devices`, by default those that this process loads for itself.
    """
    _allow_descriptors()
    sys.setswitchinterval(50e-6)  # a listener takes the GIL back from a preparing thread in 50 µs, not 5 ms
    threading.excepthook = lambda arguments: abort_on_internal_error(arguments.exc_value)
    session = Session(channel, driver_name, devices)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is for the application, or the supervisor
    signal.signal(signal.SIGTERM, lambda _number, _frame: session.end())
    session.run()
    os._exit(0)  # at once: no work that is still running is wanted by anybody


def _allow_descriptors() -> None:
    """Let this process have as many descriptors as it may: each memory that a client lends takes two."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def abort_on_internal_error(error: BaseException | None) -> None:
    """A thread of the driver has a bug: end this worker, so that its client learns of it instead of waiting."""
    _log.critical("a bug in the driver ends this worker", exc_info=error)
    os._exit(70)
