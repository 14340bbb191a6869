"""Where a tensor is to lie that is some models' input or output: in the driver, or in shared memory in its place.

One device can hold a tensor for the roles that it has with that device's models. Where there is no such device, or it
has no room for the tensor, `allocate` falls back to shared memory, which behaves the same (DOM-15).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from nnfmq.deadlines import deadline_after
from nnfmq.hal.errors import GeneralFailure, InvalidArgument, ResourceExhausted
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import BufferToken, DataLocation, RequestArgument, merge_dimensions
from nnfmq.memory import Memory
from nnfmq.runtime import tensor_layout
from nnfmq.runtime.connection import Connection
from nnfmq.runtime.managed_buffer import Buffer, LentMemory, copy_bytes
from nnfmq.serialize import messages

if TYPE_CHECKING:
    from nnfmq.runtime.prepared_model import PreparedModel

ModelRole: TypeAlias = "tuple[PreparedModel, int]"
"""A prepared model and the number of one of its inputs, or of its outputs."""
TIMEOUT_S = 10.0


def allocate(
    *,
    inputs: Sequence[ModelRole] = (),
    outputs: Sequence[ModelRole] = (),
    dimensions: Sequence[int] = (),
    timeout: float | None = TIMEOUT_S,
) -> Buffer:
    """Make a buffer that is to be these inputs and outputs of these models, of whichever devices and clients; blocks.

    It lies in the driver where all models are of one device, which can hold it. Otherwise it lies in shared memory:
    its `is_shared` is True, it behaves the same, and its shape has to be fully known. `Device.allocate`, which takes
    the same arguments, never falls back. The caller closes the result.

    Raises InvalidArgument for roles that are wrong or disagree; what the device answered, or GeneralFailure, where the
    shape is open and shared memory can therefore not stand in; MissedDeadline, DeadObject.
    """
    wanted = tuple(dimensions)
    _check_roles(inputs, outputs)
    info = merge_roles(inputs, outputs, wanted)
    models = {model for model, _ in (*inputs, *outputs)}
    homes = {(model.connection, model.device) for model in models}
    is_open = tensor_layout.is_open(info)
    if len(homes) == 1:
        try:
            return allocate_in_device(*homes.pop(), inputs, outputs, wanted, timeout)
        except (GeneralFailure, ResourceExhausted):
            if is_open:
                raise
    if is_open:
        raise GeneralFailure(
            f"DOM-15: memory that stands in for a buffer has a fixed shape; the roles' is {info.shape}"
        )
    return SharedBuffer(_agreed(info, inputs, outputs, wanted), inputs, outputs)


def allocate_in_device(
    connection: Connection,
    device: str,
    inputs: Sequence[ModelRole],
    outputs: Sequence[ModelRole],
    dimensions: tuple[int, ...],
    timeout: float | None,
) -> Buffer:
    """As `Device.allocate`, of the device of that name."""
    models = list(dict.fromkeys(model for model, _ in (*inputs, *outputs)))
    roles = [tuple(messages.RoleData(models.index(m), i, 1.0) for m, i in part) for part in (inputs, outputs)]
    numbers = tuple(model.model_id for model in models)
    message = messages.Allocate(connection.new_call(), device, dimensions, numbers, *roles)
    buffer = Buffer(connection, merge_roles(inputs, outputs, dimensions))
    try:
        connection.call(message, messages.Allocated, (), deadline_after(timeout), on_answer=buffer.take_answer)
    except BaseException:
        buffer.close()  # the driver may have made it just before a signal came
        raise
    return buffer


def merge_roles(inputs: Sequence[ModelRole], outputs: Sequence[ModelRole], dimensions: tuple[int, ...]) -> TensorInfo:
    """Return what a buffer holds, as far as its roles exist and agree: the driver judges them."""
    infos = [model.inputs[i] for model, i in inputs if i < len(model.inputs)]
    infos += [model.outputs[i] for model, i in outputs if i < len(model.outputs)]
    if not infos:
        return TensorInfo("buffer", dimensions, "uint8")
    for info in infos:
        dimensions = merge_dimensions(dimensions, info.shape) or dimensions
    return replace(infos[0], name="buffer", shape=dimensions)


def _check_roles(inputs: Sequence[ModelRole], outputs: Sequence[ModelRole]) -> None:
    """Raise InvalidArgument for roles that no driver would take (DOM-3)."""
    if not inputs and not outputs:
        raise InvalidArgument("N-DOM-1: a buffer needs a role")
    for kind, roles in (("input", inputs), ("output", outputs)):
        if len(set(roles)) != len(roles):
            raise InvalidArgument(f"N-DOM-7: an {kind} is given twice")
        for model, index in roles:
            count = len(model.inputs if kind == "input" else model.outputs)
            if not 0 <= index < count:
                raise InvalidArgument(f"N-DOM-5: the model has {count} {kind}s, there is no {kind} {index}")


def _agreed(
    info: TensorInfo, inputs: Sequence[ModelRole], outputs: Sequence[ModelRole], dimensions: tuple[int, ...]
) -> TensorInfo:
    """Return `info`; raises InvalidArgument where a role is not of its type, or has other dimensions."""
    for role in (*(model.inputs[i] for model, i in inputs), *(model.outputs[i] for model, i in outputs)):
        if (role.dtype, role.scale, role.zero_point, role.is_scalar) != (
            info.dtype,
            info.scale,
            info.zero_point,
            info.is_scalar,
        ):
            raise InvalidArgument(f"N-DOM-8, N-DOM-9, N-DOM-10: the roles are of different types: {role}, {info}")
        if role.is_scalar and dimensions:
            raise InvalidArgument(f"N-DOM-15: a scalar has no dimensions, given are {dimensions}")
        if merge_dimensions(info.shape, role.shape) != info.shape:
            raise InvalidArgument(f"N-DOM-12: a role has the shape {role.shape}, the buffer {info.shape}")
    return info


class SharedBuffer(Buffer):
    """A buffer in shared memory: for roles of models of several devices, or where none could hold it.

    It is used as any other, and judged here as the driver judges its own. In a request of the application's own its
    `pool` is a memory like any other: whoever writes it that way says so by `copy_from` or not at all.
    """

    is_shared = True

    def __init__(self, info: TensorInfo, inputs: Sequence[ModelRole], outputs: Sequence[ModelRole]) -> None:
        self.info = info
        self.token = 0
        self._roles = frozenset({(*role, False) for role in inputs} | {(*role, True) for role in outputs})
        self._dimensions = None
        self._writer = None
        self._size_bytes = tensor_layout.size_bytes(info, info.shape)
        self._memory = Memory.create(max(self._size_bytes, 1), "nnfmq-shared", one_writer=not outputs)

    @property
    def pool(self) -> Memory:  # type: ignore[override]
        """The memory. Raises InvalidArgument once closed."""
        if self._memory.closed:
            raise InvalidArgument("this buffer is closed")
        return self._memory

    def pool_for(self, _connection: Connection) -> BufferToken | Memory:
        """Return the memory, which any driver may be lent."""
        return self.pool

    def argument_in(self, pool_index: int) -> RequestArgument:
        """Return all of the memory."""
        return RequestArgument(location=DataLocation(pool_index, 0, max(self._size_bytes, 1)))

    def check_role(self, model: PreparedModel, index: int, is_output: bool, writer: object) -> None:
        """Judge a use as the driver does (DOM-5, DOM-9), and note the writer of an output."""
        if (model, index, is_output) not in self._roles:
            kind = "output" if is_output else "input"
            raise InvalidArgument(f"DOM-9: this buffer was not allocated for {kind} {index} of this model")
        if is_output:
            self.begin_write(writer)
        else:
            self._require_content()

    def end_role(self, writer: object) -> None:
        """An execution has written it."""
        self.end_write(writer, self.info.shape)

    def _require_content(self) -> None:
        if self._dimensions is None:
            raise GeneralFailure("DOM-5: this buffer is uninitialized: nothing was written into it")

    def _copy_from(self, source: LentMemory, dimensions: tuple[int, ...], timeout: float | None) -> None:
        writer = object()
        pool = self.pool
        self.begin_write(writer)
        if dimensions not in ((), self.info.shape) or source.size_bytes != pool.size_bytes:
            given = f"{source.size_bytes} bytes of shape {dimensions}"
            raise InvalidArgument(f"DOM-12: {given} are not what the shape {self.info.shape} has")
        copy_bytes(source, pool)
        self.end_role(writer)

    def copy_to(self, target: LentMemory, *, timeout: float | None = None) -> None:
        """Copy it into a memory of just its size. Raises as `Buffer.copy_to`; `timeout` bounds nothing here."""
        pool = self.pool
        self._require_content()
        copy_bytes(pool, target)

    def close(self) -> None:
        """Give the memory back; a driver that still uses it has it mapped itself. Harmless when repeated."""
        self._dimensions = None
        self._memory.close()
