"""IDevice.allocate and IBuffer: tensors that the driver keeps, since HIDL 1.3 (REQUIREMENTS DOM)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from nnfmq.hal.capabilities import BufferDesc, BufferRole
from nnfmq.hal.errors import DeadObject, ErrorStatus, InvalidArgument
from nnfmq.hal.feature_levels import FeatureLevel
from nnfmq.hal.types import Pool
from nnfmq.runtime.connection import Connection
from nnfmq.runtime.execution_result import memory_fds
from nnfmq.runtime.hidl.methods import INVALID, NONE, V1_3, Form, HasForms, status_of
from nnfmq.serialize import messages

if TYPE_CHECKING:
    from nnfmq.runtime.hidl.idevice import IDevice
    from nnfmq.runtime.hidl.iprepared_model import IPreparedModel

_NO_MODEL = 0  # a number that the driver gives to nothing


def allocate(
    device: IDevice,
    level: FeatureLevel,
    desc: BufferDesc,
    prepared_models: Sequence[IPreparedModel | None],
    input_roles: Sequence[BufferRole],
    output_roles: Sequence[BufferRole],
) -> tuple[ErrorStatus, IBuffer | None, int]:
    """Return a status, a buffer, and the token that stands for it among a request's pools; without one, None and 0.

    A reference to nothing is None; that, and the model of another connection, is INVALID_ARGUMENT (N-DOM-2, N-DOM-3).
    """
    connection = device.connection
    numbers = (m.model_id if m is not None and m.connection is connection else _NO_MODEL for m in prepared_models)
    roles = (
        (messages.RoleData(r.model_index, r.io_index, r.probability) for r in p) for p in (input_roles, output_roles)
    )
    message = messages.Allocate(
        connection.new_call(), device.name, tuple(desc.dimensions), tuple(numbers), *map(tuple, roles)
    )
    try:
        answer = connection.ask(message, messages.Allocated)
    except InvalidArgument:  # no index, or no extent, of the interface's types
        return INVALID, None, 0
    if answer.status is not NONE:
        return status_of(answer.status, level), None, 0
    return NONE, IBuffer(connection, answer.buffer_id), answer.token


def _copy_from(buffer: IBuffer, level: FeatureLevel, source: Pool, dimensions: Sequence[int]) -> ErrorStatus:
    """`dimensions` is the shape of what is in the memory, [] where the buffer takes one shape only."""
    return _copied(buffer, level, source, messages.CopyFrom, tuple(dimensions))


def _copy_to(buffer: IBuffer, level: FeatureLevel, target: Pool) -> ErrorStatus:
    return _copied(buffer, level, target, messages.CopyTo)


def _copied(
    buffer: IBuffer, level: FeatureLevel, memory: Pool, kind: type[messages.CopyFrom | messages.CopyTo], *more: Any
) -> ErrorStatus:
    try:
        message = kind(buffer.connection.new_call(), buffer.buffer_id, messages.memory_to_data(memory), *more)
        answer = buffer.connection.ask(message, messages.Reply, memory_fds([memory]))
    except InvalidArgument:
        return INVALID
    return status_of(answer.status, level)


BUFFER: dict[str, Form] = {"copyFrom": Form(V1_3, _copy_from), "copyTo": Form(V1_3, _copy_to)}


class IBuffer(HasForms):
    """A tensor in the driver; its methods are in BUFFER. Close it: its token then means nothing any more."""

    forms = BUFFER

    def __init__(self, connection: Connection, buffer_id: int) -> None:
        self.connection = connection
        self.buffer_id = buffer_id

    def close(self) -> None:
        """Drop the reference: the driver frees the buffer when no execution uses it."""
        if self.connection.is_open:
            with suppress(DeadObject):  # whose end is seen only now
                self.connection.ask(messages.ReleaseBuffer(self.connection.new_call(), self.buffer_id), messages.Reply)
