"""One client's session in the driver: its control channel, models, bursts and calls. The same in every isolation.

The watcher's thread reads one frame at a time and answers what is quick; preparing, executing and closing run on a
small pool, up to CALLS_MAX of them. The main thread does nothing but wait for the end, which is seen so even while all
others send to a client that does not read. Whatever the client sends, the answer is a status; bytes that break the
protocol end this connection and nothing else. On hang-up, the client's death or `end` every wait ends, and the process
with it: the kernel frees what is left, so cleaning up is not a procedure that can be forgotten. (ARCHITECTURE: Death
and waiting; REQUIREMENTS LIFE)
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from typing import Any, NoReturn

from nnfmq import watcher
from nnfmq.channel import NOW, Channel, Frame, close_all
from nnfmq.hal.errors import (
    DeadObject,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadlineTransient,
    NnfmqError,
    ProtocolError,
    ResourceExhaustedTransient,
    error_for,
    status_of,
)
from nnfmq.hal.types import Model, Request
from nnfmq.memory import Memory
from nnfmq.queue import MessageQueue, core
from nnfmq.serialize import control
from nnfmq.serialize.control import Role
from nnfmq.serialize.conversation import Conversation
from nnfmq.serialize.datum import DATUM_BYTES
from nnfmq.serialize.model import decode_model
from nnfmq.service.accounts import Charge, MemoryAccount
from nnfmq.service.burst import BindingExecutor, BurstServer
from nnfmq.service.device import DEVICES, find_device
from nnfmq.service.faults import faults_as_errors
from nnfmq.service.prepared_model import ExecutionResult, PreparedModel
from nnfmq.service.wire import deadline_of, descriptor_of, private_pools

POOL_THREADS = 4  # several executions and a preparation at once; a session is one client's
CALLS_MAX = 256  # of one client, queued or running; more are refused at once
_NO_ID = 0
_PATIENCE_NS = 60_000_000_000  # with a client that has filled its socket with calls and reads no answer
_log = logging.getLogger("nnfmq.session")


class _Callback:
    """A burst's way to ask the client for memories (IBurstCallback)."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.burst_id = _NO_ID
        self._waiting: Future[list[Memory]] | None = None
        self._is_cancelled = False

    def get_memories(self, slots: Sequence[int]) -> list[Memory]:
        """Ask once for all slots; only more than a message can carry take several."""
        memories: list[Memory] = []
        with ExitStack() as undo:
            for start in range(0, len(slots), control.MAX_FDS):
                given = self._ask(slots[start : start + control.MAX_FDS])
                memories += given
                for memory in given:
                    undo.callback(memory.close)
            undo.pop_all()
        return memories

    def _ask(self, slots: Sequence[int]) -> list[Memory]:
        waiting = self._waiting = self._session.ask_for_memories(self.burst_id, slots)
        if self._is_cancelled:  # `cancel` may have looked before there was anything to cancel
            _settle(waiting, _closed())
        try:
            return waiting.result()
        finally:
            self._waiting = None

    def cancel(self) -> None:
        """The burst is being closed: nobody needs the answer."""
        self._is_cancelled = True
        waiting = self._waiting
        if waiting is not None:
            _settle(waiting, _closed())


class _Burst:
    """A burst of this session: its server, and its way to ask the client."""

    def __init__(self, server: BurstServer, callback: _Callback) -> None:
        self.server = server
        self.callback = callback

    def close(self) -> None:
        self.callback.cancel()
        self.server.close()


class Session:
    """Everything of one client, in a process of its own. `run` serves it; any thread or signal handler may `end` it."""

    def __init__(self, channel: Channel, driver_name: str) -> None:
        self._channel = channel
        self._driver_name = driver_name
        self._conversation = Conversation()
        self._pool = ThreadPoolExecutor(POOL_THREADS, "nnfmq-session")
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._ids = itertools.count(1)
        self._models: dict[int, PreparedModel] = {}
        self._bursts: dict[int, _Burst] = {}
        self._questions: dict[int, Future[list[Memory]]] = {}
        self._calls = 0  # on the pool, queued or running
        self._has_ended = False
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._account = MemoryAccount()

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
            watch = watcher.watch(self._channel.fileno(), self._on_ready, _die_of_a_bug)
            stack.callback(watcher.unwatch, watch)
            stack.callback(self._bury_bursts)
            poll.poll()
            self.end()

    def end(self) -> None:
        """End the session: `run` returns. Takes no lock, for signal handlers. Harmless when repeated."""
        self._has_ended = True
        with suppress(OSError, ValueError):  # `run` has returned meanwhile
            os.eventfd_write(self._bell, 1)

    def _close_bell(self) -> None:
        bell, self._bell = self._bell, -1
        os.close(bell)

    def _bury_bursts(self) -> None:
        with self._lock:
            bursts, questions = list(self._bursts.values()), list(self._questions.values())
        for question in questions:
            _settle(question, DeadObject("the client is gone"))
        for burst in bursts:
            watcher.bury(burst.server.peer)

    # ------------------------------------------------------------------------------------------------ receiving

    def _on_ready(self) -> None:
        try:
            with self._channel.receive(NOW) as frame:
                self._on_frame(frame)
        except MissedDeadlineTransient:
            pass  # nothing there: what woke the watcher was taken already
        except DeadObject:
            self.end()
        except ProtocolError as error:
            _log.warning("connection closed: %s", error)
            self.end()

    def _on_frame(self, frame: Frame) -> None:
        seen_ns = time.monotonic_ns()
        message = control.decode(frame.data, sender=Role.CLIENT, fds=len(frame.fds))
        self._conversation.note(message, Role.CLIENT)
        quick = _QUICK.get(type(message))
        if quick is not None:
            quick(self, message, frame.take_fds())
        elif self._calls >= CALLS_MAX:  # only this thread lets it grow
            frame.close()
            self._fail(message, ResourceExhaustedTransient(f"{CALLS_MAX} calls of this client are open already"))
        else:
            self._submit(_ON_POOL[type(message)], message, frame.take_fds(), seen_ns)

    def _submit(self, handler: Callable[..., None], *arguments: Any) -> None:
        with self._lock:
            self._calls += 1
        self._pool.submit(self._guarded, handler, *arguments)

    def _guarded(self, handler: Callable[..., None], *arguments: Any) -> None:
        """Run a handler on the pool. A bug in it ends this worker, visibly, rather than leaving a call unanswered."""
        try:
            handler(self, *arguments)
        except DeadObject:
            self.end()
        except BaseException as error:  # noqa: BLE001  a future would swallow it
            _die_of_a_bug(error)
        finally:
            with self._lock:
                self._calls -= 1

    def _send(self, message: control.Message, fds: Sequence[int] = ()) -> None:
        data = control.encode(message)
        deadline_ns = time.monotonic_ns() + _PATIENCE_NS
        with self._send_lock:  # the conversation must note messages in the order in which they are sent
            self._conversation.note(message, Role.DRIVER)
            try:
                self._channel.send(data, fds, deadline_ns)
            except MissedDeadlineTransient:
                raise DeadObject("the client has not read its answers for a long time and is given up") from None

    def _fail(self, message: Any, error: NnfmqError) -> None:
        """Answer a call of the pool's with an error, as its kind is answered."""
        call, status, text = message.call, error.status, str(error)
        match message:
            case control.GetSupportedOperations():
                self._send(control.SupportedOperations(call, (), status, text))
            case control.PrepareModel():
                self._send(control.PreparedModelReady(call, status, text, _NO_ID))
                self._send(_reply(call, error))
            case control.ConfigureBurst():
                self._send(control.BurstConfigured(call, status, text, _NO_ID))
            case control.Execute():
                self._send(control.Executed(call, status, text))

    # ------------------------------------------------------------------------------------------------ quick calls

    def _hello(self, message: control.Hello, _fds: list[int]) -> None:
        if message.protocol != control.PROTOCOL:
            text = (
                f"this driver speaks protocol {control.PROTOCOL}, the client {message.protocol}: "
                "install the same nnfmq release on both sides"
            )
            self._send(control.Refused(ErrorStatus.GENERAL_FAILURE, text))
            self.end()
            return
        self._send(
            control.HelloReply(control.PROTOCOL, control.INTERFACE, self._driver_name, os.getpid(), core.core_name)
        )

    def _list_devices(self, message: control.ListDevices, _fds: list[int]) -> None:
        self._send(control.DeviceList(message.call, tuple(device.info for device in DEVICES.values())))

    def _release_model(self, message: control.ReleaseModel, _fds: list[int]) -> None:
        with self._lock:
            known = self._models.pop(message.model_id, None) is not None
        self._send(_reply(message.call, None if known else _unknown("model", message.model_id)))

    def _free_memory(self, message: control.FreeMemory, _fds: list[int]) -> None:
        burst = self._bursts.get(message.burst_id)
        if burst is not None:
            burst.server.free_memory(message.slot)

    def _burst_error(self, message: control.GetBurstError, _fds: list[int]) -> None:
        burst = self._bursts.get(message.burst_id)
        if burst is None:
            error = _unknown("burst", message.burst_id)
            self._send(control.BurstError(message.call, error.status, str(error), 0))
            return
        last = burst.server.last_failure
        self._send(control.BurstError(message.call, last.status, last.message, last.sequence))

    def _close_burst(self, message: control.CloseBurst, _fds: list[int]) -> None:
        """Leave the closing to the pool, which may have to wait. Never refused: there are as many as bursts."""
        with self._lock:
            burst = self._bursts.pop(message.burst_id, None)
        if burst is None:
            self._send(_reply(message.call, _unknown("burst", message.burst_id)))
        else:
            self._submit(Session._finish_burst, message, burst)

    def _memories(self, message: control.Memories, fds: list[int]) -> None:
        with self._lock:
            question = self._questions.pop(message.call, None)
        if question is None or question.done():
            close_all(fds)  # the burst that asked is closed
        elif message.status is not ErrorStatus.NONE:
            close_all(fds)
            is_dead = message.status is ErrorStatus.DEAD_OBJECT  # says one that lives: its burst goes on
            status = ErrorStatus.GENERAL_FAILURE if is_dead else message.status
            _settle(question, error_for(status, message.message))
        else:
            self._answer_question(question, message.sizes, fds)

    def _answer_question(self, question: Future[list[Memory]], sizes: Sequence[int], fds: list[int]) -> None:
        try:
            memories = self._account.adopt_all(fds, sizes)
        except InvalidArgument as error:
            _settle(question, GeneralFailure(str(error)))  # not the request's mistake: N-BUX-5
        except NnfmqError as error:
            _settle(question, error)
        else:
            if not _settle(question, memories):
                for memory in memories:
                    memory.close()

    def _goodbye(self, _message: control.Goodbye, _fds: list[int]) -> None:
        self.end()

    def ask_for_memories(self, burst_id: int, slots: Sequence[int]) -> Future[list[Memory]]:
        """Ask the client what `slots` stand for; the answer comes through the future. Raises DeadObject."""
        call = self._conversation.new_call(Role.DRIVER)
        question: Future[list[Memory]] = Future()
        with self._lock:
            self._questions[call] = question
        self._send(control.GetMemories(call, burst_id, tuple(slots)))
        if self._has_ended:
            raise DeadObject("the client is gone")
        return question

    # ------------------------------------------------------------------------------------------------ calls on the pool

    def _supported(self, message: control.GetSupportedOperations, fds: list[int], _seen_ns: int) -> None:
        try:
            model, charge = self._model(message.model, fds)  # first: it takes over the fds, whatever else is wrong
            with closing(charge):
                supported = find_device(message.device).supported_operations(model)
        except NnfmqError as error:
            self._fail(message, error)
            return
        self._send(control.SupportedOperations(message.call, tuple(supported)))

    def _prepare(self, message: control.PrepareModel, fds: list[int], _seen_ns: int) -> None:
        """Answer as the HAL orders it: bad arguments → callback, then the same status; else NONE, then the callback."""
        try:
            model, charge = self._model(message.model, fds)  # first: it takes over the fds, whatever else is wrong
            with ExitStack() as undo:
                undo.callback(charge.close)
                device = find_device(message.device)
                deadline_ns = deadline_of(message.deadline_ns)
                device.check_preparation(model, message.preference, message.priority, deadline_ns)
                undo.pop_all()
        except NnfmqError as error:
            self._fail(message, error)
            return
        self._send(_reply(message.call, None))
        try:
            prepared = replace(device.prepare_model(model), charge=charge)
        except NnfmqError as error:
            charge.close()
            self._send(control.PreparedModelReady(message.call, error.status, str(error), _NO_ID))
            return
        model_id = next(self._ids)
        with self._lock:
            self._models[model_id] = prepared
        self._send(control.PreparedModelReady(message.call, ErrorStatus.NONE, "", model_id))

    def _model(self, data: bytes, fds: list[int]) -> tuple[Model, Charge]:
        """Return the model over private copies of its pools, as the client can write to its own, and what it costs."""
        pools = private_pools(self._account.adopt_all(fds, [None] * len(fds)))
        charge = self._account.charge(len(data) + sum(pool.size_bytes for pool in pools))
        with ExitStack() as undo:
            undo.callback(charge.close)
            try:
                with faults_as_errors("reading the model"):
                    model = decode_model(data, pools)
            except ProtocolError as error:
                raise InvalidArgument(str(error)) from error
            undo.pop_all()
        return model, charge

    def _find_model(self, model_id: int) -> PreparedModel:
        try:
            return self._models[model_id]
        except KeyError:
            raise _unknown("model", model_id) from None

    def _configure_burst(self, message: control.ConfigureBurst, fds: list[int], _seen_ns: int) -> None:
        try:
            burst_id = self._create_burst(message, fds)
        except NnfmqError as error:
            self._fail(message, error)
            return
        self._send(control.BurstConfigured(message.call, ErrorStatus.NONE, "", burst_id))

    def _create_burst(self, message: control.ConfigureBurst, fds: list[int]) -> int:
        memories = self._account.adopt_all(fds, [None, None])
        with ExitStack() as undo:
            for memory in memories:
                undo.callback(memory.close)
            prepared = self._find_model(message.model_id)
            requests = MessageQueue.attach(descriptor_of(message.request), memories[0], quantum=DATUM_BYTES)
            undo.callback(requests.close)
            results = MessageQueue.attach(descriptor_of(message.result), memories[1], quantum=DATUM_BYTES)
            undo.callback(results.close)
            callback = _Callback(self)
            callback.burst_id = burst_id = next(self._ids)
            server = BurstServer.create(callback, requests, results, BindingExecutor(prepared))
            undo.pop_all()
        with self._lock:
            self._bursts[burst_id] = _Burst(server, callback)
        return burst_id

    def _finish_burst(self, message: control.CloseBurst, burst: _Burst) -> None:
        burst.close()
        self._send(_reply(message.call, None))

    def _execute(self, message: control.Execute, fds: list[int], seen_ns: int) -> None:
        try:
            result = self._executed(message, fds, seen_ns)
        except NnfmqError as error:
            self._fail(message, error)
            return
        timing = result.timing
        self._send(
            control.Executed(
                message.call,
                result.status,
                result.message,
                control.shapes_to_data(result.output_shapes),
                timing.time_on_device_ns,
                timing.time_in_driver_ns,
            )
        )

    def _executed(self, message: control.Execute, fds: list[int], seen_ns: int) -> ExecutionResult:
        with ExitStack() as stack:
            pools = self._account.adopt_all(fds, message.pool_sizes)
            for pool in pools:
                stack.callback(pool.close)
            prepared = self._find_model(message.model_id)
            inputs, outputs = map(control.arguments_from_data, (message.inputs, message.outputs))
            request = Request(inputs, outputs, tuple(pools))
            loop_timeout_ns = deadline_of(message.loop_timeout_ns)  # -1 stands for none, as it does in a deadline
            deadline_ns = deadline_of(message.deadline_ns)
            return prepared.execute_synchronously(request, message.measure, deadline_ns, seen_ns, loop_timeout_ns)


def _settle(question: Future[list[Memory]], answer: list[Memory] | NnfmqError) -> bool:
    """Answer a question, unless another thread was faster: then return False, and the answer stays the caller's."""
    try:
        if isinstance(answer, NnfmqError):
            question.set_exception(answer)
        else:
            question.set_result(answer)
    except InvalidStateError:
        return False
    return True


def _closed() -> DeadObject:
    return DeadObject("the burst was closed")


def _reply(call: int, error: NnfmqError | None) -> control.Reply:
    if error is None:
        return control.Reply(call, ErrorStatus.NONE, "")
    return control.Reply(call, status_of(error), str(error))


def _unknown(what: str, number: int) -> InvalidArgument:
    return InvalidArgument(f"there is no {what} {number} on this connection; it was released, or never made")


_QUICK: dict[type[control.Message], Callable[[Session, Any, list[int]], None]] = {
    control.Hello: Session._hello,
    control.ListDevices: Session._list_devices,
    control.ReleaseModel: Session._release_model,
    control.CloseBurst: Session._close_burst,
    control.FreeMemory: Session._free_memory,
    control.GetBurstError: Session._burst_error,
    control.Memories: Session._memories,
    control.Goodbye: Session._goodbye,
}
_ON_POOL: dict[type[control.Message], Callable[[Session, Any, list[int], int], None]] = {
    control.GetSupportedOperations: Session._supported,
    control.PrepareModel: Session._prepare,
    control.ConfigureBurst: Session._configure_burst,
    control.Execute: Session._execute,
}


def run_session(channel: Channel, driver_name: str) -> NoReturn:
    """Be the driver of the client at the other end until it is gone, or until SIGTERM; ends the process."""
    sys.setswitchinterval(50e-6)  # a listener takes the GIL back from a preparing thread in 50 µs, not 5 ms
    threading.excepthook = lambda arguments: _die_of_a_bug(arguments.exc_value)
    session = Session(channel, driver_name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is for the application, or the supervisor
    signal.signal(signal.SIGTERM, lambda _number, _frame: session.end())
    session.run()
    os._exit(0)  # at once: no work that is still running is wanted by anybody


def _die_of_a_bug(error: BaseException | None) -> None:
    """A thread of the driver has a bug: end this worker, so that its client learns of it instead of waiting."""
    _log.critical("a bug in the driver ends this worker", exc_info=error)
    os._exit(70)
