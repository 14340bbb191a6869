"""Calls about traces: the ring of one client, and the area of all."""

from __future__ import annotations

import os

from nnfmq.hal.errors import ErrorStatus, GeneralFailure
from nnfmq.serialize.messages import DriverTraced, Message, StartTrace, TraceDriver
from nnfmq.service.handlers.base import BlockingHandler, InlineHandler, error_as_reply, reply
from nnfmq.service.session_context import SessionContext
from nnfmq.service.worker_trace import WORKER_TRACE


def _start_trace(context: SessionContext, message: StartTrace, fds: list[int], _received_ns: int) -> None:
    (memory,) = context.quota.adopt_mapped(fds)
    WORKER_TRACE.record_to(memory)
    context.send(reply(message.call))


def _trace_driver(context: SessionContext, message: TraceDriver, _fds: list[int], _received_ns: int) -> None:
    if context.client_uid not in (os.getuid(), 0):  # it would see what other users' clients do
        raise GeneralFailure(f"uid {context.client_uid} does not administer this driver, which runs as {os.getuid()}")
    fd = WORKER_TRACE.open_area()
    try:
        context.send(DriverTraced(message.call, ErrorStatus.NONE, "", 1), [fd])
    finally:
        os.close(fd)


def _traced_error(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    return (DriverTraced(call, status, text),)


HANDLERS: dict[type[Message], InlineHandler | BlockingHandler] = {
    StartTrace: BlockingHandler(_start_trace, error_as_reply, is_launch=True),
    TraceDriver: BlockingHandler(_trace_driver, _traced_error),
}
