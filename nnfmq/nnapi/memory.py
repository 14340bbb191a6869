"""MemoryBuilder: NNAPI's memory descriptor, from which device memories are made."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import TypeAlias

from msgspec.structs import replace

from nnfmq.base.file_memory import FileMemory
from nnfmq.base.memory import Memory, is_mappable
from nnfmq.base.ownership import Closable
from nnfmq.client.connection.connection import Connection
from nnfmq.client.connection.defaults import DEFAULT_TIMEOUT_S
from nnfmq.client.model.arrays import check_index, format_shape
from nnfmq.client.model.buffer_allocation import allocate_in_device
from nnfmq.client.model.buffers import AnyMemory, Buffer, SharedBuffer, copy
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.hal.errors import BadState, GeneralFailure, InvalidArgument, ProtocolError, ResourceExhausted
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import Protection, merge_dimensions
from nnfmq.nnapi.checks import required
from nnfmq.nnapi.compilation import CompilationBuilder, SharedModel, UserCount

__all__ = ["CompiledRole", "DeviceMemory", "MemoryBuilder", "copy_memory", "create_memory_from_fd"]


# ----------------------------------------------------------------------------------------------------------------------
# DeviceMemory: memory that a MemoryBuilder describes, as executions use it; and copies between memories.


CompiledRole: TypeAlias = tuple[SharedModel, int, bool]
"""A compiled model, the index of one of its inputs or outputs, and whether it is an output."""


class DeviceMemory(Closable):
    """A tensor for the inputs and outputs of executions that a MemoryBuilder lists. Close it, or use `with`.

    It is in the device, or in shared memory if no single device can hold it; `is_shared` is then True. It is
    uninitialized until an execution or a copy writes it. It may be closed while an execution uses it.
    """

    def __init__(self, buffer: Buffer, roles: Collection[CompiledRole]) -> None:
        self.buffer = buffer
        """The buffer, which this object owns."""
        self._roles = frozenset(roles)
        self._is_closed = False
        self.users = UserCount("device memory", buffer.close)
        """This object, until it is closed, and the computations that use the memory."""

    def __repr__(self) -> str:
        return f"<DeviceMemory: {self.buffer!r}>"

    @property
    def info(self) -> TensorInfo:
        """The tensor; in its shape 0 is a dimension that may change."""
        return self.buffer.info

    @property
    def is_shared(self) -> bool:
        """Whether it is in shared memory instead of the device."""
        return self.buffer.is_shared

    @property
    def dimensions(self) -> tuple[int, ...] | None:
        """The shape that was last written; None if the memory is uninitialized."""
        return self.buffer.dimensions

    def require_role(self, role: CompiledRole) -> None:
        """Require that the memory was described for a role (DOM-9).

        Raises:
            InvalidArgument: If it was not.
        """
        if role not in self._roles:
            _, index, is_output = role
            kind = "output" if is_output else "input"
            raise InvalidArgument(f"this device memory was not described for {kind} {index} of this compilation")

    def close(self) -> None:
        """Release the memory, unless a computation still uses it: its end then does. Idempotent. Blocks up to 1 s."""
        was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            self.users.release()


def copy_memory(source: AnyMemory | DeviceMemory, target: AnyMemory | DeviceMemory) -> None:
    """Copy all of a memory into another one of the same size; blocks (ANeuralNetworksMemory_copy).

    A copy between device memories keeps the shape. After a failed copy a target in a device is uninitialized.

    Raises:
        InvalidArgument: If the sizes or shapes differ, or the source is uninitialized.
        DeadObject: If the driver exits.
    """
    required(source, "the source")
    required(target, "the target")
    if isinstance(source, DeviceMemory) and source.dimensions is None:
        raise InvalidArgument("the source of the copy is uninitialized: no execution or copy has written it")
    copy(_pool(source), _pool(target))


def _pool(memory: AnyMemory | DeviceMemory) -> AnyMemory | Buffer:
    return memory.buffer if isinstance(memory, DeviceMemory) else memory


# ----------------------------------------------------------------------------------------------------------------------
# MemoryBuilder: NNAPI's memory descriptor, from which device memories are made.


class MemoryBuilder:
    """A description of device memory by its roles: add them, `finish`, then `create_memory` any number of times.

    All roles have the same element type, scale and zero point, and dimensions that agree. It keeps no compilation open.
    """

    def __init__(self) -> None:
        self._roles: dict[CompiledRole, float] = {}
        self._is_explicit = False
        self._info: TensorInfo | None = None
        self._dimensions: tuple[int, ...] = ()
        self._is_finished = False

    def add_input_role(self, compilation: CompilationBuilder, index: int, frequency: float = 1.0) -> None:
        """Let the memory be input `index` of executions of a compilation.

        Args:
            compilation: The compilation, which has succeeded.
            index: The input.
            frequency: How likely the memory is used in this role, in (0, 1].

        Raises:
            BadState: If the description is finished.
            InvalidArgument: If the compilation is not finished or has failed, the role does not exist, was added before
                or contradicts the others, `frequency` is out of range, or compilations for chosen devices have no
                device in common.
        """
        self._add_role(compilation, index, frequency, is_output=False)

    def add_output_role(self, compilation: CompilationBuilder, index: int, frequency: float = 1.0) -> None:
        """Let the memory be output `index` of executions of a compilation. Otherwise as `add_input_role`."""
        self._add_role(compilation, index, frequency, is_output=True)

    def _add_role(self, compilation: CompilationBuilder, index: int, frequency: float, *, is_output: bool) -> None:
        self._require_unfinished("add_output_role" if is_output else "add_input_role")
        if not required(compilation, "the compilation").is_compiled:
            raise InvalidArgument("a role needs a compilation that has succeeded: call finish() first")
        shared = compilation.require_compiled("a role")
        infos, kind = (shared.outputs, "output") if is_output else (shared.inputs, "input")
        check_index(kind, infos, index)
        role = (shared, index, is_output)
        if role in self._roles:
            raise InvalidArgument(f"{kind} {index} of this compilation was added before")
        if not 0 < frequency <= 1:
            raise InvalidArgument(f"the frequency of a role is more than 0 and at most 1; got {frequency}")
        merged = self._merged_with(infos[index])
        roles, is_explicit = {**self._roles, role: frequency}, self._is_explicit or compilation.is_explicit
        if is_explicit and _single_device(roles) is None:
            raise InvalidArgument("the compilations are for chosen devices, of which none has all roles of the memory")
        self._info, self._roles, self._is_explicit = merged, roles, is_explicit

    def _merged_with(self, info: TensorInfo) -> TensorInfo:
        """Return the tensor that the description and another role specify. Raise InvalidArgument if they disagree."""
        known = self._info or replace(info, name="memory")
        kinds = [(one.dtype, one.scale, one.zero_point, one.is_scalar) for one in (known, info)]
        if kinds[0] != kinds[1]:
            raise InvalidArgument(f"the roles have different types: {known}, {info}")
        return replace(known, shape=self._merged_dimensions(known, info.shape))

    def _merged_dimensions(self, known: TensorInfo, shape: tuple[int, ...]) -> tuple[int, ...]:
        merged = merge_dimensions(known.shape, shape)
        merged = None if merged is None else merge_dimensions(merged, self._dimensions)
        if merged is None or (known.is_scalar and merged):
            shapes = [format_shape(one) for one in (known.shape, shape, self._dimensions) if one]
            raise InvalidArgument(f"the dimensions of the memory's roles disagree: {', '.join(shapes)}")
        return merged

    def set_dimensions(self, dimensions: Sequence[int]) -> None:
        """Set dimensions that the roles leave unknown; one of 0, or none at all, stays unknown.

        Raises:
            BadState: If the description is finished.
            InvalidArgument: If they contradict the roles, or these are scalars.
        """
        self._require_unfinished("set_dimensions")
        requested = tuple(required(dimensions, "the dimensions"))
        if not all(0 <= extent < 1 << 32 for extent in requested):
            raise InvalidArgument(f"dimensions {requested}; each is 0 to 2^32 - 1")
        if self._info is not None:
            self._info = replace(self._info, shape=self._merged_dimensions(self._info, requested))
        else:
            merged = merge_dimensions(self._dimensions, requested)
            if merged is None:
                raise InvalidArgument(f"dimensions {requested} contradict {self._dimensions}")
            requested = merged
        self._dimensions = requested

    def _require_unfinished(self, function: str) -> None:
        if self._is_finished:
            raise BadState(f"{function}: this description is finished; make another one")

    def finish(self) -> None:
        """End the description.

        Raises:
            BadState: If it is finished.
            InvalidArgument: If it has no role.
        """
        self._require_unfinished("finish")
        if not self._roles:
            raise InvalidArgument("a memory needs a role: call add_input_role or add_output_role")
        self._is_finished = True

    def close(self) -> None:
        """Do nothing: a description owns nothing. Its memories remain."""

    def create_memory(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> DeviceMemory:
        """Return a new memory of this description; blocks. The caller closes it.

        It is in the device that has all roles. If there is none, or the device cannot hold it, and the devices were not
        chosen by the application, it is in shared memory.

        Raises:
            BadState: If the description is not finished.
            GeneralFailure: If no device can hold the memory, and shared memory is not allowed, or its shape is unknown.
            ResourceExhausted: As GeneralFailure, if the device has no memory left.
            MissedDeadline: If `timeout` (seconds; None = no limit) passes first.
            DeadObject: If the driver exits.
        """
        if not self._is_finished or self._info is None:
            raise BadState("create_memory: this description is not finished: call finish() first")
        may_share = not self._is_explicit and not self._info.has_unknown_shape
        try:
            buffer = self._allocate(timeout)
        except ProtocolError:
            raise
        except (GeneralFailure, ResourceExhausted):
            if not may_share:
                raise
            buffer = SharedBuffer(self._info, self._roles)
        return DeviceMemory(buffer, self._roles)

    def _allocate(self, timeout: float | None) -> Buffer:
        device = _single_device(self._roles)
        if device is None:
            raise GeneralFailure("no single device has all roles of the memory (DOM-15)")
        lists: tuple[list[tuple[PreparedModel, int]], list[tuple[PreparedModel, int]]] = ([], [])
        for shared, index, is_output in self._roles:
            assert isinstance(shared.model, PreparedModel)
            lists[is_output].append((shared.model, index))
        return allocate_in_device(*device, *lists, self._dimensions, timeout)


def _single_device(roles: dict[CompiledRole, float]) -> tuple[Connection, str] | None:
    """Return the connection and the name of the device that executes all models of the roles; None if there is none."""
    models = [shared.model for shared, _, _ in roles]
    prepared = [model for model in models if isinstance(model, PreparedModel)]
    found = {(model.connection, model.handle.device) for model in prepared}
    return found.pop() if len(prepared) == len(models) and len(found) == 1 else None


# ----------------------------------------------------------------------------------------------------------------------
# create_memory_from_fd: memory over a file of the application (ANeuralNetworksMemory_createFromFd).


def create_memory_from_fd(size_bytes: int, protection: Protection, fd: int, offset: int = 0) -> AnyMemory:
    """Return memory over `size_bytes` of a file from `offset` on. The caller closes it. Duplicates `fd`.

    A memfd with the seals SHRINK and GROW is mapped. Any other file is read and written by the driver with system
    calls, because a process that may shrink it could end all that have it mapped.

    Raises:
        InvalidArgument: If `fd` is not an open regular file, or the file is too short.
    """
    try:
        maps, allowed = is_mappable(fd), Protection(protection)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidArgument(
            f"file descriptor {fd!r} with protection {protection!r}: one of them is invalid"
        ) from error
    if maps and size_bytes > 0 and offset >= 0:
        memory = Memory.adopt(os.dup(fd), size_bytes, offset, allowed)
        memory.protection = allowed
        return memory
    return FileMemory.from_fd(fd, size_bytes, offset=offset, protection=allowed)
