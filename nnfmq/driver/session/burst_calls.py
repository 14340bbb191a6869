"""Calls about bursts: configuring, the memory of their slots, closing (`IBurstContext`, `IBurstCallback`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial

from nnfmq.base.channel import close_all
from nnfmq.driver.execution.aidl_burst import AidlBurstServer
from nnfmq.driver.execution.burst import BurstServer
from nnfmq.driver.memory.object_limits import return_threads, take_threads
from nnfmq.driver.memory.quota import ReceivedMemory
from nnfmq.driver.session.execution_calls import result_message
from nnfmq.driver.session.session import OpenBurst, SentMemories, Session, complete
from nnfmq.hal.errors import (
    DeadObject,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    ResourceExhaustedTransient,
    error_for_status,
)
from nnfmq.hal.timing import from_limit_field
from nnfmq.observe.statistics_writer import BurstRow
from nnfmq.observe.trace_layout import request_base
from nnfmq.observe.trace_points import TRACING
from nnfmq.queue import Grantor, MessageQueue, MQDescriptor
from nnfmq.serialize import messages
from nnfmq.serialize.control_protocol import PeerRole
from nnfmq.serialize.packets import DATUM_BYTES

_OWED_MAX = 10_000  # replies of a client


class _ClientCallback:
    """A burst's calls to the client (`IBurstCallback`)."""

    def __init__(self, session: Session, burst_id: int) -> None:
        self._session = session
        self._burst_id = burst_id
        self._pending: Future[SentMemories] | None = None
        self._is_cancelled = False

    def get_memories(self, slots: Sequence[int]) -> list[ReceivedMemory]:
        """Get the memory of all slots with one call, or several if there are more than one message can carry."""
        memories: list[ReceivedMemory] = []
        with ExitStack() as undo:
            for start in range(0, len(slots), messages.MAX_FDS):
                received = self._request(slots[start : start + messages.MAX_FDS])
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
        session = self._session
        if len(session.pending_calls) >= _OWED_MAX:
            raise ResourceExhaustedTransient(f"the client owes {_OWED_MAX} replies, to bursts that it has closed since")
        call = session.connection_state.next_call_id(PeerRole.DRIVER)
        pending: Future[SentMemories] = Future()
        session.pending_calls[call] = pending
        session.send(messages.GetMemories(call, self._burst_id, tuple(slots)))
        if session.is_closed:  # `Session` may have ended its calls before this one was in `pending_calls`
            raise DeadObject("the client has exited")
        self._pending = pending
        if self._is_cancelled:  # `cancel` may have run before `_pending` was set
            complete(pending, _closed_error())
        try:
            sent = pending.result()
        finally:
            self._pending = None
        try:  # in this thread, not in the watcher's: fstat of a file on a slow file system can block
            return session.quota.adopt_all(sent.fds, sent.memories)
        except InvalidArgument as error:
            raise GeneralFailure(str(error)) from error  # the request itself is valid (N-BUX-5)

    def cancel(self) -> None:
        """End a wait for the client's reply, because the burst is being closed."""
        self._is_cancelled = True
        pending = self._pending
        if pending is not None:
            complete(pending, _closed_error())


# -- configuring and closing ------------------------------------------------------------------------------------------


def configure_burst(session: Session, message: messages.ConfigureBurst, fds: list[int], _received_ns: int) -> None:
    """Start a burst over the client's queues (`IPreparedModel::configureExecutionBurst` of HIDL 1.2)."""
    memories = session.quota.adopt_mapped(fds)
    with ExitStack() as undo:
        for memory in memories:
            undo.callback(memory.close)
        session.bursts.require_capacity()
        prepared = session.models.lookup(message.model_id)
        prepared.require_available()
        requests = MessageQueue.attach(_descriptor(message.request), memories[0], quantum=DATUM_BYTES)
        undo.callback(requests.close)
        results = MessageQueue.attach(_descriptor(message.result), memories[1], quantum=DATUM_BYTES)
        undo.callback(results.close)
        burst_id = session.bursts.next_id()
        callback = _ClientCallback(session, burst_id)
        counted = session.statistics.burst(burst_id, message.model_id, prepared.recorder)
        undo.callback(session.statistics.close_burst, counted)
        take_threads(1)
        undo.callback(return_threads, 1)
        server = BurstServer.create(callback.get_memories, requests, results, prepared, statistics=counted)
        server.trace_base = request_base(os.getpid(), burst_id)
        if TRACING.recorder is not None:
            TRACING.recorder.burst(prepared.name, server.trace_base)
        undo.pop_all()
    forget = partial(_forget, session, counted)
    session.bursts.insert(OpenBurst(server, callback.cancel, forget), burst_id)
    session.send(messages.BurstConfigured(message.call, ErrorStatus.NONE, "", burst_id))


def _forget(session: Session, counted: BurstRow) -> None:
    session.statistics.close_burst(counted)
    return_threads(1)


def _descriptor(data: messages.MQDescriptorData) -> MQDescriptor:
    """Return a received queue descriptor in the form that `MessageQueue.attach` takes and checks."""
    grantors = tuple(Grantor(g.fd_index, g.offset, g.extent) for g in data.grantors)
    return MQDescriptor(grantors, data.quantum, data.flags)


def close_burst(session: Session, message: messages.CloseBurst, *_: object) -> None:
    """Close a burst of either kind on the thread pool, because that may block.

    The call is exempt from the limit of open calls: there cannot be more of these than bursts.
    """
    is_aidl = session.aidl_bursts.get(message.burst_id) is not None
    burst: OpenBurst | AidlBurstServer = (session.aidl_bursts if is_aidl else session.bursts).pop(message.burst_id)
    session.submit(_close_and_reply, message, burst)


def _close_and_reply(session: Session, message: messages.CloseBurst, burst: OpenBurst | AidlBurstServer) -> None:
    burst.close()
    session.send_success(message.call)


def get_burst_error(session: Session, message: messages.GetBurstError, *_: object) -> None:
    """Send what the packet of a burst's last failure could not carry: its text and exact status."""
    last = session.bursts.lookup(message.burst_id).server.last_failure
    session.send(messages.BurstError(message.call, last.status, last.message, last.sequence))


# -- memory of the slots ----------------------------------------------------------------------------------------------


def free_memory(session: Session, message: messages.FreeMemory, *_: object) -> None:
    """Forget the memory of a slot (`IBurstContext::freeMemory`)."""
    burst = session.bursts.get(message.burst_id)
    if burst is not None:
        burst.server.free_memory(message.slot)


def receive_memories(session: Session, message: messages.Memories, fds: list[int], _received_ns: int) -> None:
    """Complete a call to the client with the memories that it has sent (`IBurstCallback::getMemories`)."""
    pending = session.pending_calls.pop(message.call, None)
    if pending is None or pending.done():
        close_all(fds)  # the burst has been closed
    elif message.status is not ErrorStatus.NONE:
        close_all(fds)
        # A client that replies DEAD_OBJECT is alive, so its burst must not end.
        is_dead = message.status is ErrorStatus.DEAD_OBJECT
        status = ErrorStatus.GENERAL_FAILURE if is_dead else message.status
        complete(pending, error_for_status(status, message.message))
    elif not complete(pending, SentMemories(message.memories, fds)):
        close_all(fds)


def _closed_error() -> DeadObject:
    return DeadObject("the burst was closed")


# ----------------------------------------------------------------------------------------------------------------------
# AIDL bursts: configuring, executing, releasing memory (`IBurst`).


def configure_aidl_burst(session: Session, message: messages.ConfigureAidlBurst, *_: object) -> None:
    """Create an AIDL burst (`IPreparedModel::configureExecutionBurst` of AIDL)."""
    session.aidl_bursts.require_capacity()
    prepared = session.models.lookup(message.model_id)
    prepared.require_available()
    burst_id = session.aidl_bursts.insert(AidlBurstServer(prepared, session.quota))
    session.send(messages.BurstConfigured(message.call, ErrorStatus.NONE, "", burst_id))


def execute_aidl_burst(session: Session, message: messages.ExecuteAidlBurst, fds: list[int], received_ns: int) -> None:
    """Run a request of an AIDL burst and send its result (`IBurst::executeSynchronously`). Blocks."""
    with ExitStack() as undo:
        undo.callback(close_all, fds)
        burst = session.aidl_bursts.lookup(message.burst_id)
        config, deadline_ns = messages.config_from_data(message.config), from_limit_field(message.deadline_ns)
        undo.pop_all()
    result = burst.execute_synchronously(message.request, message.tokens, fds, config, deadline_ns, received_ns)
    session.send(result_message(messages.Executed, message.call, result))


def release_memory_resource(session: Session, message: messages.ReleaseMemoryResource, *_: object) -> None:
    """Forget the memory of a token (`IBurst::releaseMemoryResource`)."""
    session.aidl_bursts.lookup(message.burst_id).release_memory_resource(message.token)
    session.send_success(message.call)
