"""IDevice.allocate and IBuffer: managed buffers, since HIDL 1.3 (DOM)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from nnfmq.hal.capabilities import BufferDesc, BufferRole
from nnfmq.hal.errors import BadState, DeadObject, ErrorStatus, InvalidArgument
from nnfmq.hal.feature_levels import FeatureLevel
from nnfmq.hal.types import Pool
from nnfmq.runtime.connection import Connection
from nnfmq.runtime.hidl.methods import (
    INVALID,
    NONE,
    V1_3,
    Method,
    ModelReference,
    NamedDevice,
    VersionedObject,
    status_at,
)
from nnfmq.runtime.wire_values import memory_fds
from nnfmq.serialize import messages

_NO_MODEL = 0  # an id that the driver never assigns


def allocate(
    device: NamedDevice,
    level: FeatureLevel,
    desc: BufferDesc,
    prepared_models: Sequence[ModelReference | None],
    input_roles: Sequence[BufferRole],
    output_roles: Sequence[BufferRole],
) -> tuple[ErrorStatus, IBuffer | None, int]:
    """Return a status, a buffer, and its token for a request's pools; None and 0 if the status is not NONE.

    A null reference is None. It is INVALID_ARGUMENT, and so is a model of another connection (N-DOM-2, N-DOM-3).
    """
    connection = device.connection
    model_ids = (m.model_id if m is not None and m.connection is connection else _NO_MODEL for m in prepared_models)
    roles = (
        tuple(messages.RoleData(role.model_index, role.io_index, role.probability) for role in part)
        for part in (input_roles, output_roles)
    )
    call_id = connection.next_call_id()
    message = messages.Allocate(call_id, device.name, tuple(desc.dimensions), tuple(model_ids), *roles)
    try:
        reply = connection.exchange(message, messages.Allocated)
    except InvalidArgument:  # an index or a dimension is not a uint32
        return INVALID, None, 0
    if reply.status is not NONE:
        return status_at(level, reply.status), None, 0
    return NONE, IBuffer(connection, reply.buffer_id), reply.token


def _copy_from(buffer: IBuffer, level: FeatureLevel, source: Pool, dimensions: Sequence[int]) -> ErrorStatus:
    """`dimensions` is the shape of the memory's content, [] if the buffer has a fixed shape."""
    return _copy(buffer, level, source, messages.CopyFrom, tuple(dimensions))


def _copy_to(buffer: IBuffer, level: FeatureLevel, target: Pool) -> ErrorStatus:
    return _copy(buffer, level, target, messages.CopyTo)


def _copy(
    buffer: IBuffer, level: FeatureLevel, memory: Pool, call: type[messages.CopyFrom | messages.CopyTo], *more: Any
) -> ErrorStatus:
    try:
        message = call(buffer.connection.next_call_id(), buffer.buffer_id, messages.memory_to_data(memory), *more)
        reply = buffer.connection.exchange(message, messages.Reply, memory_fds([memory]))
    except InvalidArgument:
        return INVALID
    return status_at(level, reply.status)


BUFFER: dict[str, Method] = {"copyFrom": Method(V1_3, _copy_from), "copyTo": Method(V1_3, _copy_to)}


class IBuffer(VersionedObject):
    """A managed buffer; its methods are in BUFFER. Close it: its token is invalid afterwards."""

    methods = BUFFER

    def __init__(self, connection: Connection, buffer_id: int) -> None:
        self.connection = connection
        self.buffer_id = buffer_id

    def close(self) -> None:
        """Drop the reference: the driver frees the buffer after the executions that use it."""
        if self.connection.is_open:
            message = messages.ReleaseBuffer(self.connection.next_call_id(), self.buffer_id)
            with suppress(BadState, DeadObject):  # the client may be closed, or the driver exit, during the call
                self.connection.exchange(message, messages.Reply)
