"""Calls about AIDL bursts: configuring, executing, releasing memory (`IBurst`). CloseBurst is in `burst_calls`."""

from __future__ import annotations

from contextlib import ExitStack

from nnfmq.channel import close_all
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.timing import from_limit_field
from nnfmq.serialize.messages import (
    BurstConfigured,
    ConfigureAidlBurst,
    ExecuteAidlBurst,
    Executed,
    Message,
    ReleaseMemoryResource,
    config_from_data,
)
from nnfmq.service.aidl_burst_server import AidlBurstServer
from nnfmq.service.handlers.base import (
    BlockingHandler,
    InlineHandler,
    error_as_burst_configured,
    error_as_executed,
    error_as_reply,
    reply,
)
from nnfmq.service.handlers.execution_calls import result_message
from nnfmq.service.session_context import SessionContext


def _configure(context: SessionContext, message: ConfigureAidlBurst, _fds: list[int], _received_ns: int) -> None:
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


HANDLERS: dict[type[Message], InlineHandler | BlockingHandler] = {
    ConfigureAidlBurst: BlockingHandler(_configure, error_as_burst_configured),
    ExecuteAidlBurst: BlockingHandler(_execute, error_as_executed),
    ReleaseMemoryResource: BlockingHandler(_release_memory, error_as_reply),
}
