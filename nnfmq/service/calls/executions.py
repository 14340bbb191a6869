"""Calls that execute a model the ordinary way (IPreparedModel)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.types import Request
from nnfmq.serialize.messages import Execute, Executed, Message, arguments_from_data, shapes_to_data
from nnfmq.service.calls.answering import Handler, Pooled
from nnfmq.service.prepared_model import ExecutionResult
from nnfmq.service.wire import deadline_of

if TYPE_CHECKING:
    from nnfmq.service.session import Session


def _execute(session: Session, message: Execute, fds: list[int], seen_ns: int) -> None:
    result = _result(session, message, fds, seen_ns)
    session.send(
        Executed(
            message.call,
            result.status,
            result.message,
            shapes_to_data(result.output_shapes),
            result.timing.time_on_device_ns,
            result.timing.time_in_driver_ns,
        )
    )


def _result(session: Session, message: Execute, fds: list[int], seen_ns: int) -> ExecutionResult:
    with ExitStack() as stack:
        pools = session.account.adopt_all(fds, message.pool_sizes)
        for pool in pools:
            stack.callback(pool.close)
        prepared = session.models.find(message.model_id)
        inputs, outputs = map(arguments_from_data, (message.inputs, message.outputs))
        request = Request(inputs, outputs, tuple(pools))
        loop_timeout_ns = deadline_of(message.loop_timeout_ns)  # -1 stands for none, as it does in a deadline
        deadline_ns = deadline_of(message.deadline_ns)
        return prepared.execute_synchronously(request, message.measure, deadline_ns, seen_ns, loop_timeout_ns)


def _refuse_execute(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    return (Executed(call, status, text),)


HANDLERS: dict[type[Message], Handler | Pooled] = {Execute: Pooled(_execute, _refuse_execute)}
