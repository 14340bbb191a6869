"""Calls that execute a model the ordinary way (IPreparedModel)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from nnfmq.serialize.messages import (
    Execute,
    Executed,
    Message,
    config_from_data,
    request_from_data,
    shapes_to_data,
)
from nnfmq.service.calls.answering import Handler, Pooled, refuse_execute
from nnfmq.service.prepared_model import ExecutionResult
from nnfmq.service.wire import deadline_of

if TYPE_CHECKING:
    from nnfmq.service.session import Session


def _execute(session: Session, message: Execute, fds: list[int], seen_ns: int) -> None:
    session.send(executed(message.call, _result(session, message, fds, seen_ns)))


def executed(call: int, result: ExecutionResult) -> Executed:
    """Return the answer that says how an execution went."""
    shapes, timing = shapes_to_data(result.output_shapes), result.timing
    return Executed(call, result.status, result.message, shapes, timing.time_on_device_ns, timing.time_in_driver_ns)


def _result(session: Session, message: Execute, fds: list[int], seen_ns: int) -> ExecutionResult:
    with ExitStack() as stack:
        pools = session.account.adopt_all(fds, message.memories)
        for pool in pools:
            stack.callback(pool.close)
        prepared = session.models.find(message.model_id)
        request, config = request_from_data(message.request, pools), config_from_data(message.config)
        return prepared.execute_synchronously(request, config, deadline_of(message.deadline_ns), seen_ns)


HANDLERS: dict[type[Message], Handler | Pooled] = {Execute: Pooled(_execute, refuse_execute)}
