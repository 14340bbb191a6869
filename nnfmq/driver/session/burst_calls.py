"""Calls about bursts: configuring, the memory of their slots, closing (`IBurstContext`, `IBurstCallback`)."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack

from nnfmq.base import watcher
from nnfmq.base.channel import close_all
from nnfmq.driver.execution.aidl_burst import AidlBurstServer
from nnfmq.driver.execution.burst import BurstServer
from nnfmq.driver.memory.quota import ReceivedMemory
from nnfmq.driver.session.calls import (
    BlockingHandler,
    InlineHandler,
    OpenBurst,
    SentMemories,
    SessionContext,
    error_as_burst_configured,
    error_as_executed,
    error_as_reply,
    reply,
)
from nnfmq.driver.session.execution_calls import result_message
from nnfmq.driver.session.handle_table import OBJECTS_MAX
from nnfmq.hal.errors import (
    DeadObject,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    NnfmqError,
    ResourceExhaustedTransient,
    error_for_status,
)
from nnfmq.hal.timing import from_limit_field
from nnfmq.observe.statistics_writer import BurstRow, SlotWriter
from nnfmq.observe.trace_layout import request_base
from nnfmq.queue import Grantor, MessageQueue, MQDescriptor
from nnfmq.serialize.control_protocol import PeerRole
from nnfmq.serialize.messages import (
    MAX_FDS,
    BurstConfigured,
    BurstError,
    CloseBurst,
    ConfigureAidlBurst,
    ConfigureBurst,
    ExecuteAidlBurst,
    Executed,
    FreeMemory,
    GetBurstError,
    GetMemories,
    Memories,
    Message,
    MQDescriptorData,
    ReleaseMemoryResource,
    config_from_data,
)
from nnfmq.serialize.packets import DATUM_BYTES

__all__ = ["HANDLERS", "cancel_all", "fail_pending_call"]


class _ClientCallback:
    """A burst's calls to the client (`IBurstCallback`)."""

    def __init__(self, context: SessionContext, burst_id: int) -> None:
        self._context = context
        self._burst_id = burst_id
        self._pending: Future[SentMemories] | None = None
        self._is_cancelled = False

    def get_memories(self, slots: Sequence[int]) -> list[ReceivedMemory]:
        """Get the memory of all slots with one call, or several if there are more than one message can carry."""
        memories: list[ReceivedMemory] = []
        with ExitStack() as undo:
            for start in range(0, len(slots), MAX_FDS):
                received = self._request(slots[start : start + MAX_FDS])
                memories += received
                for memory in received:
                    undo.callback(memory.close)
            undo.pop_all()
        return memories

    def _request(self, slots: Sequence[int]) -> list[ReceivedMemory]:
        """Call GetMemories, and wait for the client's reply.

        Raises:
            DeadObject: If the client has exited, or the burst is being closed.
            ResourceExhaustedTransient: If the client owes too many replies.
            NnfmqError: With the status that the client replied.
        """
        context = self._context
        if len(context.pending_calls) >= OBJECTS_MAX:
            raise ResourceExhaustedTransient(
                f"the client owes {OBJECTS_MAX} replies, to bursts that it has closed since"
            )
        call = context.connection_state.next_call_id(PeerRole.DRIVER)
        pending: Future[SentMemories] = Future()
        context.pending_calls[call] = pending
        context.send(GetMemories(call, self._burst_id, tuple(slots)))
        if context.is_closed:  # `cancel_all` may have run before the call was in `nnfmq.client.connection.connection`
            raise DeadObject("the client has exited")
        self._pending = pending
        if self._is_cancelled:  # `cancel` may have run before `_pending` was set
            _complete(pending, _closed_error())
        try:
            sent = pending.result()
        finally:
            self._pending = None
        try:  # in this thread, not in the watcher's: fstat of a file on a slow file system can block
            return context.quota.adopt_all(sent.fds, sent.memories)
        except InvalidArgument as error:
            raise GeneralFailure(str(error)) from error  # the request itself is valid (N-BUX-5)

    def cancel(self) -> None:
        """End a wait for the client's reply, because the burst is being closed."""
        self._is_cancelled = True
        pending = self._pending
        if pending is not None:
            _complete(pending, _closed_error())


class _QueueBurst:
    """A burst over queues: its server, its calls to the client, and its row in the client's statistics."""

    def __init__(
        self, server: BurstServer, callback: _ClientCallback, statistics: SlotWriter, counted: BurstRow
    ) -> None:
        self.server = server
        self._callback = callback
        self._statistics = statistics
        self._counted = counted
        self._closing = threading.Lock()  # acquired once, by whoever takes the row back

    def close(self) -> None:
        """See `OpenBurst.close`."""
        self._callback.cancel()
        self.server.close()
        if self._closing.acquire(blocking=False):
            self._statistics.close_burst(self._counted)


def cancel_all(context: SessionContext) -> None:
    """End all waits of bursts and for replies of the client, because the session ends."""
    for pending in list(context.pending_calls.values()):
        _complete(pending, DeadObject("the client has exited"))
    for burst in context.bursts.values():
        watcher.notify_peer_death(burst.server.peer)


# -- configuring and closing ------------------------------------------------------------------------------------------


def _configure(context: SessionContext, message: ConfigureBurst, fds: list[int], _received_ns: int) -> None:
    memories = context.quota.adopt_mapped(fds)
    with ExitStack() as undo:
        for memory in memories:
            undo.callback(memory.close)
        context.bursts.require_capacity()
        prepared = context.models.lookup(message.model_id)
        prepared.require_available()
        requests = MessageQueue.attach(_descriptor(message.request), memories[0], quantum=DATUM_BYTES)
        undo.callback(requests.close)
        results = MessageQueue.attach(_descriptor(message.result), memories[1], quantum=DATUM_BYTES)
        undo.callback(results.close)
        burst_id = context.bursts.next_id()
        callback = _ClientCallback(context, burst_id)
        counted = context.statistics.burst(burst_id, message.model_id, prepared.recorder)
        undo.callback(context.statistics.close_burst, counted)
        server = BurstServer.create(callback, requests, results, prepared, statistics=counted)
        server.trace_base = request_base(os.getpid(), burst_id)
        undo.pop_all()
    context.bursts.insert(_QueueBurst(server, callback, context.statistics, counted), burst_id)
    context.send(BurstConfigured(message.call, ErrorStatus.NONE, "", burst_id))


def _descriptor(data: MQDescriptorData) -> MQDescriptor:
    """Return a received queue descriptor in the form that `MessageQueue.attach` takes and checks."""
    grantors = tuple(Grantor(g.fd_index, g.offset, g.extent) for g in data.grantors)
    return MQDescriptor(grantors, data.quantum, data.flags)


def _close_burst(context: SessionContext, message: CloseBurst, _fds: list[int]) -> None:
    """Close a burst on the thread pool, because that may block.

    The call is exempt from the limit of open calls: there cannot be more of these than bursts.
    """
    is_aidl = context.aidl_bursts.get(message.burst_id) is not None
    try:
        burst: OpenBurst | AidlBurstServer = (context.aidl_bursts if is_aidl else context.bursts).pop(message.burst_id)
    except InvalidArgument as error:
        context.send(reply(message.call, error))
    else:
        context.submit(_close_and_reply, message, burst)


def _close_and_reply(context: SessionContext, message: CloseBurst, burst: OpenBurst | AidlBurstServer) -> None:
    burst.close()
    context.send(reply(message.call))


def _get_burst_error(context: SessionContext, message: GetBurstError, _fds: list[int]) -> None:
    try:
        last = context.bursts.lookup(message.burst_id).server.last_failure
    except InvalidArgument as error:
        context.send(BurstError(message.call, error.status, str(error), 0))
    else:
        context.send(BurstError(message.call, last.status, last.message, last.sequence))


# -- memory of the slots ----------------------------------------------------------------------------------------------


def _free_memory(context: SessionContext, message: FreeMemory, _fds: list[int]) -> None:
    burst = context.bursts.get(message.burst_id)
    if burst is not None:
        burst.server.free_memory(message.slot)


def _memories(context: SessionContext, message: Memories, fds: list[int]) -> None:
    pending = context.pending_calls.pop(message.call, None)
    if pending is None or pending.done():
        close_all(fds)  # the burst has been closed
    elif message.status is not ErrorStatus.NONE:
        close_all(fds)
        # A client that replies DEAD_OBJECT is alive, so its burst must not end.
        is_dead = message.status is ErrorStatus.DEAD_OBJECT
        status = ErrorStatus.GENERAL_FAILURE if is_dead else message.status
        _complete(pending, error_for_status(status, message.message))
    elif not _complete(pending, SentMemories(message.memories, fds)):
        close_all(fds)


def fail_pending_call(context: SessionContext, message: Memories, error: NnfmqError) -> None:
    """Fail the call to which `message` replies, because its fds could not be received."""
    pending = context.pending_calls.pop(message.call, None)
    if pending is not None:
        _complete(pending, error)


def _complete(pending: Future[SentMemories], result: SentMemories | NnfmqError) -> bool:
    """Set the result of a pending call and return True. Return False, and keep nothing, if it has one already."""
    try:
        if isinstance(result, NnfmqError):
            pending.set_exception(result)
        else:
            pending.set_result(result)
    except InvalidStateError:
        return False
    return True


def _closed_error() -> DeadObject:
    return DeadObject("the burst was closed")


_BURST_HANDLERS: dict[type[Message], InlineHandler | BlockingHandler] = {
    ConfigureBurst: BlockingHandler(_configure, error_as_burst_configured),
    CloseBurst: _close_burst,
    GetBurstError: _get_burst_error,
    FreeMemory: _free_memory,
    Memories: _memories,
}


# ----------------------------------------------------------------------------------------------------------------------
# Calls about AIDL bursts: configuring, executing, releasing memory (`IBurst`). CloseBurst is in `burst_calls`.


def _configure_aidl(context: SessionContext, message: ConfigureAidlBurst, _fds: list[int], _received_ns: int) -> None:
    context.aidl_bursts.require_capacity()
    prepared = context.models.lookup(message.model_id)
    prepared.require_available()
    burst_id = context.aidl_bursts.insert(AidlBurstServer(prepared, context.quota))
    context.send(BurstConfigured(message.call, ErrorStatus.NONE, "", burst_id))


def _execute(context: SessionContext, message: ExecuteAidlBurst, fds: list[int], received_ns: int) -> None:
    with ExitStack() as undo:
        undo.callback(close_all, fds)
        burst = context.aidl_bursts.lookup(message.burst_id)
        config, deadline_ns = config_from_data(message.config), from_limit_field(message.deadline_ns)
        undo.pop_all()
    result = burst.execute_synchronously(message.request, message.tokens, fds, config, deadline_ns, received_ns)
    context.send(result_message(Executed, message.call, result))


def _release_memory(
    context: SessionContext, message: ReleaseMemoryResource, _fds: list[int], _received_ns: int
) -> None:
    context.aidl_bursts.lookup(message.burst_id).release_memory_resource(message.token)
    context.send(reply(message.call))


_AIDL_BURST_HANDLERS: dict[type[Message], InlineHandler | BlockingHandler] = {
    ConfigureAidlBurst: BlockingHandler(_configure_aidl, error_as_burst_configured),
    ExecuteAidlBurst: BlockingHandler(_execute, error_as_executed),
    ReleaseMemoryResource: BlockingHandler(_release_memory, error_as_reply),
}

HANDLERS: dict[type[Message], InlineHandler | BlockingHandler] = {**_BURST_HANDLERS, **_AIDL_BURST_HANDLERS}
