"""Private copies of client memory.

The client can write to its memory at any time. What decides addresses or control flow in the driver, such as a model's
constants, must therefore not be read from it twice (TOCTOU): it is copied once, then validated and used from the copy.

The memory is read by pread(2) and never mapped: the copy is all that it costs the driver, and the GIL is free while the
kernel copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from msgspec import Struct

from nnfmq.file_memory import FileMemory
from nnfmq.hal.errors import InvalidArgument
from nnfmq.memory import PrivateBytes, file_identity
from nnfmq.service.error_translation import errors_to_status


class ConstantPool(Struct, frozen=True):
    """A private copy of a memory pool with a model's constants.

    Attributes:
        data: The copy.
        identity: The file from which it was copied (see `memory.file_identity`), None if that cannot be identified.
        offset: Where in the file the copied bytes begin.
        is_private: No other process can write to it.
    """

    data: bytes | memoryview
    identity: tuple[int, int] | None = None
    offset: int = 0
    is_private: ClassVar[bool] = True

    @property
    def size_bytes(self) -> int:
        """Size in bytes."""
        return len(self.data)

    @property
    def view(self) -> memoryview:
        """The bytes, read-only."""
        return memoryview(self.data).toreadonly()


def copy_constant_pools(memories: Sequence[FileMemory], check: Callable[[], None]) -> tuple[ConstantPool, ...]:
    """Copy the memories and close them. The caller has charged the copies.

    `check` is called between slices (see `FileRange.read_into`).

    Raises:
        InvalidArgument: If a memory is write-only, or too short.
        ResourceExhaustedTransient: If there is not enough memory.
        Exception: Any error that `check` raises.
    """
    pools = []
    with errors_to_status("copying the model's memory"):
        for memory in memories:
            if not memory.is_readable:
                raise InvalidArgument("a memory with constants is write-only (MEM-4)")
            with memory:
                copy = memoryview(PrivateBytes.allocate(memory.size_bytes))[: memory.size_bytes]
                memory.range(0, memory.size_bytes).read_into(copy, check)
                pools.append(ConstantPool(copy, file_identity(memory.fileno()), memory.offset))
    return tuple(pools)
