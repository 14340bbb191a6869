"""Calls about models: what a device supports, preparing, releasing (IDevice)."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING

from nnfmq.hal.errors import ErrorStatus, InvalidArgument, NnfmqError, ProtocolError
from nnfmq.hal.types import Model, Priority
from nnfmq.serialize.messages import (
    GetSupportedOperations,
    Message,
    PreparedModelReady,
    PrepareModel,
    ReleaseModel,
    Reply,
    SupportedOperations,
)
from nnfmq.serialize.model import decode_model
from nnfmq.service.accounts import Charge, MemoryAccount
from nnfmq.service.arguments import constant_ranges
from nnfmq.service.calls.answering import Handler, Pooled, reply
from nnfmq.service.faults import faults_as_errors
from nnfmq.service.handles import NO_ID
from nnfmq.service.wire import deadline_of, private_pools

if TYPE_CHECKING:
    from nnfmq.service.session import Session


def _supported(session: Session, message: GetSupportedOperations, fds: list[int], _seen_ns: int) -> None:
    model, charge = _received_model(session.account, message, fds)
    with closing(charge):
        supported = session.devices.find(message.device).supported_operations(model, session.dialect.level)
        session.dialect.check_consumers(model, message.consumers)
    session.send(SupportedOperations(message.call, tuple(supported)))


def _refuse_supported(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    return (SupportedOperations(call, (), status, text),)


def _prepare(session: Session, message: PrepareModel, fds: list[int], _seen_ns: int) -> None:
    """Answer as the HAL orders it: bad arguments → callback, then the same status; else NONE, then the callback."""
    model, charge = _received_model(session.account, message, fds)
    with ExitStack() as undo:
        undo.callback(charge.close)
        device = session.devices.find(message.device)
        deadline_ns = deadline_of(message.deadline_ns)
        preference, priority, dialect = message.preference, message.priority, session.dialect
        model = device.check_preparation(model, preference, priority, deadline_ns, dialect.level)
        dialect.check_consumers(model, message.consumers)
        undo.pop_all()
    session.send(reply(message.call))
    try:
        prepared = replace(
            device.prepare_model(model),
            charge=charge,
            priority=message.priority,
            device=device.name,
            buffers=session.buffers,
            takes_unspecified=dialect.takes_unspecified,
            constants=constant_ranges(model),
        )
    except NnfmqError as error:
        charge.close()
        session.send(PreparedModelReady(message.call, error.status, str(error), NO_ID))
        return
    session.send(PreparedModelReady(message.call, ErrorStatus.NONE, "", session.models.add(prepared)))


def _priority(_session: Session, message: PrepareModel) -> int:
    """Return how important a preparation is; what is no priority is refused when it is its turn."""
    return message.priority if message.priority in list(Priority) else Priority.MEDIUM


def _refuse_prepare(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    return PreparedModelReady(call, status, text, NO_ID), Reply(call, status, text)


def _received_model(
    account: MemoryAccount, message: PrepareModel | GetSupportedOperations, fds: list[int]
) -> tuple[Model, Charge]:
    """Return the model over private copies of its pools, as the client can write to its own, and what it costs.

    Takes over the fds, whatever is wrong with the rest, so call it first.
    """
    pools = private_pools(account.adopt_all(fds, message.pools), account)
    charge = account.charge(len(message.model) + sum(pool.size_bytes for pool in pools))
    with ExitStack() as undo:
        undo.callback(charge.close)
        try:
            with faults_as_errors("reading the model"):
                model = decode_model(message.model, pools)
        except ProtocolError as error:
            raise InvalidArgument(str(error)) from error
        undo.pop_all()
    return model, charge


def _release_model(session: Session, message: ReleaseModel, _fds: list[int]) -> None:
    try:
        session.models.take(message.model_id)
    except InvalidArgument as error:
        session.send(reply(message.call, error))
    else:
        session.send(reply(message.call))


HANDLERS: dict[type[Message], Handler | Pooled] = {
    GetSupportedOperations: Pooled(_supported, _refuse_supported),
    PrepareModel: Pooled(_prepare, _refuse_prepare, _priority),
    ReleaseModel: _release_model,
}
