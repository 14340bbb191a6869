"""Calls about managed buffers: allocating, copying in and out, releasing (`IDevice::allocate`, `IBuffer`)."""

from __future__ import annotations

from contextlib import closing

import msgspec

from nnfmq.driver.devices.configuration import require_available
from nnfmq.driver.memory.buffers import RoleOwner
from nnfmq.driver.session.session import Session
from nnfmq.hal.capabilities import BufferDesc, BufferRole
from nnfmq.hal.errors import ErrorStatus, InvalidArgument, NnfmqError
from nnfmq.serialize import messages

msgspec.convert((), tuple[BufferRole, ...])  # builds msgspec's type information before threads exist; see `messages`


def allocate(session: Session, message: messages.Allocate, *_: object) -> None:
    """Create a managed buffer and send its id and token (`IDevice::allocate`)."""
    device = session.devices.find(message.device)
    device.require_available()
    owners: list[RoleOwner] = []
    for model_id in message.model_ids:
        prepared = session.models.lookup(model_id)  # an id of 0 is unknown, too (N-DOM-2)
        if prepared.device != device.name:
            raise InvalidArgument(
                f"model {model_id} was prepared by device {prepared.device}, not by {device.name} (N-DOM-3)"
            )
        owners.append(RoleOwner(prepared.model, prepared.key, prepared.status_byte))
    inputs, outputs = (
        msgspec.convert(roles, tuple[BufferRole, ...], from_attributes=True)
        for roles in (message.inputs, message.outputs)
    )
    buffer_id, token = session.buffers.allocate(BufferDesc(message.dimensions), owners, inputs, outputs)
    session.send(messages.Allocated(message.call, ErrorStatus.NONE, "", buffer_id, token))


def copy_from(session: Session, message: messages.CopyFrom, fds: list[int], _received_ns: int) -> None:
    """Fill a buffer from a memory (`IBuffer::copyFrom`). Blocks."""
    try:
        (memory,) = session.quota.adopt_all(fds, [message.memory])
    except NnfmqError:
        session.buffers.lookup(message.buffer_id).mark_uninitialized()
        raise
    with closing(memory):
        buffer = session.buffers.lookup(message.buffer_id)
        require_available(buffer.status_byte)
        buffer.copy_from(memory, message.dimensions)
    session.send_success(message.call)


def copy_to(session: Session, message: messages.CopyTo, fds: list[int], _received_ns: int) -> None:
    """Copy a buffer to a memory (`IBuffer::copyTo`). Blocks."""
    (memory,) = session.quota.adopt_all(fds, [message.memory])
    with closing(memory):
        buffer = session.buffers.lookup(message.buffer_id)
        require_available(buffer.status_byte)
        buffer.copy_to(memory)
    session.send_success(message.call)


def release_buffer(session: Session, message: messages.ReleaseBuffer, *_: object) -> None:
    """Forget a buffer, whose memory is freed after its last execution."""
    session.buffers.release(message.buffer_id)
    session.send_success(message.call)
