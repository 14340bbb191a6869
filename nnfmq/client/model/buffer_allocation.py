"""allocate: make a buffer for given roles, in the driver or in shared memory.

One device can hold a tensor for roles of its own models. If the models belong to several devices, or the device cannot
hold the tensor, `allocate` falls back to shared memory, which behaves the same (DOM-15).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from msgspec.structs import replace

from nnfmq.base.deadlines import deadline_after
from nnfmq.client.connection.connection import Connection
from nnfmq.client.connection.defaults import DEFAULT_TIMEOUT_S
from nnfmq.client.model.buffers import Buffer, Role, SharedBuffer
from nnfmq.client.model.compiled_model import CompiledModel
from nnfmq.hal.errors import GeneralFailure, InvalidArgument, ProtocolError, ResourceExhausted
from nnfmq.hal.summaries import counted
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import merge_dimensions
from nnfmq.serialize import messages

ModelRole: TypeAlias = tuple[CompiledModel, int]
"""A prepared model and the index of one of its inputs, or of one of its outputs."""


def allocate(
    *,
    inputs: Sequence[ModelRole] = (),
    outputs: Sequence[ModelRole] = (),
    dimensions: Sequence[int] = (),
    timeout: float | None = DEFAULT_TIMEOUT_S,
) -> Buffer:
    """Return a buffer for these inputs and outputs of models of any devices and clients; blocks. The caller closes it.

    It is in the driver if all models belong to one device that can hold the tensor. Otherwise it is in shared memory:
    `is_shared` is True, it behaves the same, and its shape must be fully known. `Device.allocate` takes the same
    arguments and never falls back.

    Args:
        inputs: Models and indexes of their inputs that the buffer will be.
        outputs: Models and indexes of their outputs that the buffer will be.
        dimensions: Dimensions that the models leave unknown.
        timeout: In seconds; None = no limit.

    Raises:
        InvalidArgument: If the roles are invalid or contradict each other.
        GeneralFailure: If the device cannot hold the tensor, and the shape is not fully known.
        ResourceExhausted: If the device has no memory left, and the shape is not fully known.
        MissedDeadline: If `timeout` passes first.
        DeadObject: If the driver exits.
    """
    wanted = tuple(dimensions)
    _check_roles(inputs, outputs)
    info = merge_roles(inputs, outputs, wanted)
    devices = {(model.handle.connection, model.handle.device) for model, _ in (*inputs, *outputs)}
    is_unknown = info.has_unknown_shape
    connection, device = devices.pop()
    if connection is not None and not devices:
        try:
            return allocate_in_device(connection, device, inputs, outputs, wanted, timeout)
        except ProtocolError:
            raise
        except (GeneralFailure, ResourceExhausted):
            if is_unknown:
                raise
    if is_unknown:
        raise GeneralFailure(
            f"a buffer in shared memory needs a fixed shape; that of the roles is {info.shape} (DOM-15)"
        )
    _check_agreement(info, inputs, outputs, wanted)
    roles: set[Role] = {(model.handle, index, False) for model, index in inputs}
    return SharedBuffer(info, roles | {(model.handle, index, True) for model, index in outputs})


def allocate_in_device(
    connection: Connection,
    device: str,
    inputs: Sequence[ModelRole],
    outputs: Sequence[ModelRole],
    dimensions: tuple[int, ...],
    timeout: float | None,
) -> Buffer:
    """Return a buffer in the memory of the device named `device`; as `Device.allocate`."""
    models = list(dict.fromkeys(model for model, _ in (*inputs, *outputs)))
    roles = [tuple(messages.RoleData(models.index(m), i, 1.0) for m, i in part) for part in (inputs, outputs)]
    model_ids = tuple(model.handle.model_id for model in models)
    message = messages.Allocate(connection.next_call_id(), device, dimensions, model_ids, *roles)
    buffer = Buffer(connection, merge_roles(inputs, outputs, dimensions))
    try:
        connection.call(message, messages.Allocated, (), deadline_after(timeout), on_reply=buffer.on_allocated)
    except BaseException:
        buffer.close()  # the driver may have allocated it just before a signal handler raised
        raise
    return buffer


def merge_roles(inputs: Sequence[ModelRole], outputs: Sequence[ModelRole], dimensions: tuple[int, ...]) -> TensorInfo:
    """Return the tensor that the roles describe together, ignoring invalid ones: the driver rejects those."""
    infos = [model.inputs[i] for model, i in inputs if i < len(model.inputs)]
    infos += [model.outputs[i] for model, i in outputs if i < len(model.outputs)]
    if not infos:
        return TensorInfo("buffer", dimensions, "uint8")
    for info in infos:
        dimensions = merge_dimensions(dimensions, info.shape) or dimensions
    return replace(infos[0], name="buffer", shape=dimensions)


def _check_roles(inputs: Sequence[ModelRole], outputs: Sequence[ModelRole]) -> None:
    """Raise InvalidArgument for roles that no driver accepts (DOM-3)."""
    if not inputs and not outputs:
        raise InvalidArgument("a buffer needs a role (N-DOM-1)")
    for kind, roles in (("input", inputs), ("output", outputs)):
        if len(set(roles)) != len(roles):
            raise InvalidArgument(f"an {kind} occurs twice among the roles (N-DOM-7)")
        for model, index in roles:
            count = len(model.inputs if kind == "input" else model.outputs)
            if not 0 <= index < count:
                raise InvalidArgument(f"the model has {counted(count, kind)}, there is no {kind} {index} (N-DOM-5)")


def _check_agreement(
    info: TensorInfo, inputs: Sequence[ModelRole], outputs: Sequence[ModelRole], dimensions: tuple[int, ...]
) -> None:
    """Raise InvalidArgument if a role has another type or other dimensions than `info`."""
    for role in (*(model.inputs[i] for model, i in inputs), *(model.outputs[i] for model, i in outputs)):
        if (role.dtype, role.scale, role.zero_point, role.is_scalar) != (
            info.dtype,
            info.scale,
            info.zero_point,
            info.is_scalar,
        ):
            raise InvalidArgument(f"the roles have different types: {role}, {info} (N-DOM-8, N-DOM-9, N-DOM-10)")
        if role.is_scalar and dimensions:
            raise InvalidArgument(f"a scalar has no dimensions, got {dimensions} (N-DOM-15)")
        if merge_dimensions(info.shape, role.shape) != info.shape:
            raise InvalidArgument(f"a role has the shape {role.shape}, the buffer {info.shape} (N-DOM-12)")
