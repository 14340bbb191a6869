"""Calls about managed buffers: allocating, copying in and out, releasing (`IDevice::allocate`, `IBuffer`)."""

from __future__ import annotations

from contextlib import closing

import msgspec

from nnfmq.driver.devices.configuration import require_available
from nnfmq.driver.memory.buffers import RoleOwner
from nnfmq.driver.session.calls import BlockingHandler, InlineHandler, SessionContext, error_as_reply, reply
from nnfmq.driver.session.handle_table import NO_ID
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

NO_TOKEN = 0
msgspec.convert((), tuple[BufferRole, ...])  # builds msgspec's type information before threads exist; see `messages`


def _allocate(context: SessionContext, message: Allocate, _fds: list[int], _received_ns: int) -> None:
    device = context.devices.find(message.device)
    device.require_available()
    owners: list[RoleOwner] = []
    for model_id in message.model_ids:
        prepared = context.models.lookup(model_id)  # an id of 0 is unknown, too (N-DOM-2)
        if prepared.device != device.name:
            raise InvalidArgument(
                f"model {model_id} was prepared by device {prepared.device}, not by {device.name} (N-DOM-3)"
            )
        owners.append(RoleOwner(prepared.model, prepared.key, prepared.status_byte))
    inputs, outputs = (
        msgspec.convert(roles, tuple[BufferRole, ...], from_attributes=True)
        for roles in (message.inputs, message.outputs)
    )
    buffer_id, token = context.buffers.allocate(BufferDesc(message.dimensions), owners, inputs, outputs)
    context.send(Allocated(message.call, ErrorStatus.NONE, "", buffer_id, token))


def _allocate_error(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    return (Allocated(call, status, text, NO_ID, NO_TOKEN),)


def _copy_from(context: SessionContext, message: CopyFrom, fds: list[int], _received_ns: int) -> None:
    try:
        (memory,) = context.quota.adopt_all(fds, [message.memory])
    except NnfmqError:
        context.buffers.lookup(message.buffer_id).mark_uninitialized()
        raise
    with closing(memory):
        buffer = context.buffers.lookup(message.buffer_id)
        require_available(buffer.status_byte)
        buffer.copy_from(memory, message.dimensions)
    context.send(reply(message.call))


def _copy_to(context: SessionContext, message: CopyTo, fds: list[int], _received_ns: int) -> None:
    (memory,) = context.quota.adopt_all(fds, [message.memory])
    with closing(memory):
        buffer = context.buffers.lookup(message.buffer_id)
        require_available(buffer.status_byte)
        buffer.copy_to(memory)
    context.send(reply(message.call))


def _release_buffer(context: SessionContext, message: ReleaseBuffer, _fds: list[int]) -> None:
    try:
        context.buffers.release(message.buffer_id)
    except InvalidArgument as error:
        context.send(reply(message.call, error))
    else:
        context.send(reply(message.call))


HANDLERS: dict[type[Message], InlineHandler | BlockingHandler] = {
    Allocate: BlockingHandler(_allocate, _allocate_error),
    CopyFrom: BlockingHandler(_copy_from, error_as_reply),
    CopyTo: BlockingHandler(_copy_to, error_as_reply),
    ReleaseBuffer: _release_buffer,
}
