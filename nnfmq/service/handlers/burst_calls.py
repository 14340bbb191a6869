"""Calls about bursts: configuring, what their slots stand for, closing (IBurstContext, IBurstCallback)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from nnfmq import watcher
from nnfmq.channel import close_all
from nnfmq.hal.errors import (
    DeadObject,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    NnfmqError,
    ResourceExhaustedTransient,
    error_for_status,
)
from nnfmq.queue import MessageQueue
from nnfmq.serialize.control_protocol import PeerRole
from nnfmq.serialize.datum import DATUM_BYTES
from nnfmq.serialize.messages import (
    MAX_FDS,
    BurstConfigured,
    BurstError,
    CloseBurst,
    ConfigureBurst,
    FreeMemory,
    GetBurstError,
    GetMemories,
    Memories,
    MemoryData,
    Message,
)
from nnfmq.service.aidl_burst_server import AidlBurstServer
from nnfmq.service.burst_server import BindingExecutor, BurstServer
from nnfmq.service.handle_table import OBJECTS_MAX
from nnfmq.service.handlers.base import BlockingHandler, InlineHandler, error_as_burst_configured, reply
from nnfmq.service.memory_quota import Received
from nnfmq.service.received_values import descriptor_from_wire

if TYPE_CHECKING:
    from nnfmq.service.session import Session


class Given(NamedTuple):
    """What a client has given for slots; whoever takes it owns the descriptors."""

    lent: tuple[MemoryData, ...]
    fds: list[int]


class _Callback:
    """A burst's way to ask the client for memories (IBurstCallback)."""

    def __init__(self, session: Session, burst_id: int) -> None:
        self._session = session
        self._burst_id = burst_id
        self._waiting: Future[Given] | None = None
        self._is_cancelled = False

    def get_memories(self, slots: Sequence[int]) -> list[Received]:
        """Ask once for all slots; only more than a message can carry take several."""
        memories: list[Received] = []
        with ExitStack() as undo:
            for start in range(0, len(slots), MAX_FDS):
                given = self._ask(slots[start : start + MAX_FDS])
                memories += given
                for memory in given:
                    undo.callback(memory.close)
            undo.pop_all()
        return memories

    def _ask(self, slots: Sequence[int]) -> list[Received]:
        waiting = self._waiting = _ask_for_memories(self._session, self._burst_id, slots)
        if self._is_cancelled:  # `cancel` may have looked before there was anything to cancel
            _settle(waiting, _closed())
        try:
            given = waiting.result()
        finally:
            self._waiting = None
        try:  # here, not where it was received: a file may take its time to say how large it is
            return self._session.quota.adopt_all(given.fds, given.lent)
        except InvalidArgument as error:
            raise GeneralFailure(str(error)) from error  # not the request's mistake: N-BUX-5

    def cancel(self) -> None:
        """The burst is being closed: nobody needs the answer."""
        self._is_cancelled = True
        waiting = self._waiting
        if waiting is not None:
            _settle(waiting, _closed())


class OpenBurst:
    """A burst of a session: its server, and its way to ask the client."""

    def __init__(self, server: BurstServer, callback: _Callback) -> None:
        self.server = server
        self._callback = callback

    def close(self) -> None:
        """End it. Blocks until a running execution is done."""
        self._callback.cancel()
        self.server.close()


def cancel_all(session: Session) -> None:
    """Wake every burst of a session whose client is gone, and whoever waits for its answers."""
    for question in list(session.pending_calls.values()):
        _settle(question, DeadObject("the client is gone"))
    for burst in session.bursts.all():
        watcher.notify_peer_death(burst.server.peer)


# -- configuring and closing ------------------------------------------------------------------------------------------


def _configure_burst(session: Session, message: ConfigureBurst, fds: list[int], _seen_ns: int) -> None:
    burst_id = _create_burst(session, message, fds)
    session.send(BurstConfigured(message.call, ErrorStatus.NONE, "", burst_id))


def _create_burst(session: Session, message: ConfigureBurst, fds: list[int]) -> int:
    memories = session.quota.adopt_mapped(fds)
    with ExitStack() as undo:
        for memory in memories:
            undo.callback(memory.close)
        session.bursts.require_capacity()
        prepared = session.models.find(message.model_id)
        prepared.require_available()
        requests = MessageQueue.attach(descriptor_from_wire(message.request), memories[0], quantum=DATUM_BYTES)
        undo.callback(requests.close)
        results = MessageQueue.attach(descriptor_from_wire(message.result), memories[1], quantum=DATUM_BYTES)
        undo.callback(results.close)
        burst_id = session.bursts.next_id()
        callback = _Callback(session, burst_id)
        server = BurstServer.create(callback, requests, results, BindingExecutor(prepared))
        undo.pop_all()
    return session.bursts.add(OpenBurst(server, callback), burst_id)


def _close_burst(session: Session, message: CloseBurst, _fds: list[int]) -> None:
    """Leave the closing to the pool, which may have to wait. Never refused: there are as many as bursts."""
    is_aidl = session.aidl_bursts.get(message.burst_id) is not None
    try:
        burst: OpenBurst | AidlBurstServer = (session.aidl_bursts if is_aidl else session.bursts).take(message.burst_id)
    except InvalidArgument as error:
        session.send(reply(message.call, error))
    else:
        session.submit(_finish_burst, message, burst)


def _finish_burst(session: Session, message: CloseBurst, burst: OpenBurst | AidlBurstServer) -> None:
    burst.close()
    session.send(reply(message.call))


def _burst_error(session: Session, message: GetBurstError, _fds: list[int]) -> None:
    try:
        last = session.bursts.find(message.burst_id).server.last_failure
    except InvalidArgument as error:
        session.send(BurstError(message.call, error.status, str(error), 0))
    else:
        session.send(BurstError(message.call, last.status, last.message, last.sequence))


# -- what the slots stand for -----------------------------------------------------------------------------------------


def _free_memory(session: Session, message: FreeMemory, _fds: list[int]) -> None:
    burst = session.bursts.get(message.burst_id)
    if burst is not None:
        burst.server.free_memory(message.slot)


def _ask_for_memories(session: Session, burst_id: int, slots: Sequence[int]) -> Future[Given]:
    """Ask the client what `slots` stand for; the answer comes through the future. Raises DeadObject."""
    if len(session.pending_calls) >= OBJECTS_MAX:
        raise ResourceExhaustedTransient(f"the client owes {OBJECTS_MAX} answers, to bursts that it has closed since")
    call = session.connection_state.next_call_id(PeerRole.DRIVER)
    question: Future[Given] = Future()
    session.pending_calls[call] = question
    session.send(GetMemories(call, burst_id, tuple(slots)))
    if session.is_closed:
        raise DeadObject("the client is gone")
    return question


def _memories(session: Session, message: Memories, fds: list[int]) -> None:
    question = session.pending_calls.pop(message.call, None)
    if question is None or question.done():
        close_all(fds)  # the burst that asked is closed
    elif message.status is not ErrorStatus.NONE:
        close_all(fds)
        is_dead = message.status is ErrorStatus.DEAD_OBJECT  # says one that lives: its burst goes on
        status = ErrorStatus.GENERAL_FAILURE if is_dead else message.status
        _settle(question, error_for_status(status, message.message))
    else:
        given = Given(message.memories, fds)
        if not _settle(question, given):
            close_all(fds)


def fail_pending_call(session: Session, message: Memories, error: NnfmqError) -> None:
    """The client has answered with memories that could not be received: the burst that asked is told why."""
    question = session.pending_calls.pop(message.call, None)
    if question is not None:
        _settle(question, error)


def _settle(question: Future[Given], answer: Given | NnfmqError) -> bool:
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


HANDLERS: dict[type[Message], InlineHandler | BlockingHandler] = {
    ConfigureBurst: BlockingHandler(_configure_burst, error_as_burst_configured),
    CloseBurst: _close_burst,
    GetBurstError: _burst_error,
    FreeMemory: _free_memory,
    Memories: _memories,
}
