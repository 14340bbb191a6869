"""Calls about AIDL's bursts: configuring, executing, releasing memory (IBurst). CloseBurst is in `bursts`."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from nnfmq.channel import close_all
from nnfmq.hal.errors import ErrorStatus
from nnfmq.serialize.messages import (
    BurstConfigured,
    ConfigureAidlBurst,
    ExecuteAidlBurst,
    Executed,
    Message,
    ReleaseMemoryResource,
    config_from_data,
)
from nnfmq.service.aidl_burst import AidlBurst
from nnfmq.service.calls.answering import Handler, Pooled, refuse_by_reply, refuse_configure, refuse_execute, reply
from nnfmq.service.calls.executions import result_message
from nnfmq.service.wire import deadline_of

if TYPE_CHECKING:
    from nnfmq.service.session import Session


def _configure(session: Session, message: ConfigureAidlBurst, _fds: list[int], _seen_ns: int) -> None:
    session.aidl_bursts.require_room()
    prepared = session.models.find(message.model_id)
    prepared.require_available()
    burst_id = session.aidl_bursts.add(AidlBurst(prepared, session.account))
    session.send(BurstConfigured(message.call, ErrorStatus.NONE, "", burst_id))


def _execute(session: Session, message: ExecuteAidlBurst, fds: list[int], seen_ns: int) -> None:
    with ExitStack() as undo:
        undo.callback(close_all, fds)
        burst = session.aidl_bursts.find(message.burst_id)
        config, deadline_ns = config_from_data(message.config), deadline_of(message.deadline_ns)
        undo.pop_all()
    result = burst.execute_synchronously(message.request, message.tokens, fds, config, deadline_ns, seen_ns)
    session.send(result_message(Executed, message.call, result))


def _release(session: Session, message: ReleaseMemoryResource, _fds: list[int], _seen_ns: int) -> None:
    session.aidl_bursts.find(message.burst_id).release_memory_resource(message.token)
    session.send(reply(message.call))


HANDLERS: dict[type[Message], Handler | Pooled] = {
    ConfigureAidlBurst: Pooled(_configure, refuse_configure),
    ExecuteAidlBurst: Pooled(_execute, refuse_execute),
    ReleaseMemoryResource: Pooled(_release, refuse_by_reply),
}
