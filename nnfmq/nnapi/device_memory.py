"""DeviceMemory: memory that a MemoryBuilder describes, as executions use it; and copies between memories."""

from __future__ import annotations

from collections.abc import Collection
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.nnapi.required_arguments import required
from nnfmq.nnapi.user_count import UserCount
from nnfmq.runtime.managed_buffer import AnyMemory, Buffer
from nnfmq.runtime.memory_copy import copy
from nnfmq.uncopyable import Uncopyable

if TYPE_CHECKING:
    from nnfmq.nnapi.shared_model import SharedModel

__all__ = ["CompiledRole", "DeviceMemory", "copy_memory"]

CompiledRole: TypeAlias = "tuple[SharedModel, int, bool]"
"""A compiled model, the index of one of its inputs or outputs, and whether it is an output."""


class DeviceMemory(Uncopyable):
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


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
