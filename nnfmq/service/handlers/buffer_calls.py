"""Calls about the buffers that the driver manages: allocating, copying in and out, releasing (IDevice, IBuffer)."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import msgspec

from nnfmq.hal.capabilities import BufferDesc, BufferRole
from nnfmq.hal.errors import ErrorStatus, InvalidArgument, NnfmqError
from nnfmq.serialize.messages import (
    Allocate,
    Allocated,
    CopyFrom,
    CopyTo,
    Message,
    ReleaseBuffer,
)
from nnfmq.service.device_status import require_available
from nnfmq.service.driver_prepared_model import DriverPreparedModel
from nnfmq.service.handle_table import NO_ID
from nnfmq.service.handlers.base import BlockingHandler, InlineHandler, error_as_reply, reply

if TYPE_CHECKING:
    from nnfmq.service.session import Session

NO_TOKEN = 0
msgspec.convert((), tuple[BufferRole, ...])  # while there is one thread, see `messages`


def _allocate(session: Session, message: Allocate, _fds: list[int], _seen_ns: int) -> None:
    device = session.devices.find(message.device)
    device.require_available()
    models = [_model_of(session, device.name, number) for number in message.model_ids]
    inputs, outputs = (
        msgspec.convert(roles, tuple[BufferRole, ...], from_attributes=True)
        for roles in (message.inputs, message.outputs)
    )
    number, token = session.buffers.allocate(BufferDesc(message.dimensions), models, inputs, outputs)
    session.send(Allocated(message.call, ErrorStatus.NONE, "", number, token))


def _model_of(session: Session, device: str, number: int) -> DriverPreparedModel:
    prepared = session.models.find(number)  # N-DOM-2: no model is 0
    if prepared.device != device:
        raise InvalidArgument(f"N-DOM-3: model {number} was prepared by device {prepared.device}, not by {device}")
    return prepared


def _refuse_allocate(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    return (Allocated(call, status, text, NO_ID, NO_TOKEN),)


def _copy_from(session: Session, message: CopyFrom, fds: list[int], _seen_ns: int) -> None:
    try:
        (memory,) = session.quota.adopt_all(fds, [message.memory])
    except NnfmqError:
        session.buffers.find(message.buffer_id).mark_uninitialized()
        raise
    with closing(memory):
        buffer = session.buffers.find(message.buffer_id)
        require_available(buffer.status_byte)
        buffer.copy_from(memory, message.dimensions)
    session.send(reply(message.call))


def _copy_to(session: Session, message: CopyTo, fds: list[int], _seen_ns: int) -> None:
    (memory,) = session.quota.adopt_all(fds, [message.memory])
    with closing(memory):
        buffer = session.buffers.find(message.buffer_id)
        require_available(buffer.status_byte)
        buffer.copy_to(memory)
    session.send(reply(message.call))


def _release_buffer(session: Session, message: ReleaseBuffer, _fds: list[int]) -> None:
    try:
        session.buffers.release(message.buffer_id)
    except InvalidArgument as error:
        session.send(reply(message.call, error))
    else:
        session.send(reply(message.call))


HANDLERS: dict[type[Message], InlineHandler | BlockingHandler] = {
    Allocate: BlockingHandler(_allocate, _refuse_allocate),
    CopyFrom: BlockingHandler(_copy_from, error_as_reply),
    CopyTo: BlockingHandler(_copy_to, error_as_reply),
    ReleaseBuffer: _release_buffer,
}
