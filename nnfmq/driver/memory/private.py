"""Constants of client memory that nobody can change: private copies, or memory that is sealed against writing.

The client can write to its memory at any time. What decides addresses or control flow in the driver, such as a model's
constants, must therefore not be read from it twice (TOCTOU): it is copied once, then validated and used from the copy.
The memory is read by pread(2) and never mapped: the copy is all that it costs the driver, and the GIL is free while the
kernel copies.

A memfd that is sealed against writing, as the model repository sends it, is mapped instead: no process can write to it
or shrink it, and the workers of all clients share its pages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import ClassVar

from msgspec import Struct

from nnfmq.base.file_memory import FileMemory
from nnfmq.base.memory import Memory, PrivateBytes, file_identity, sealed_size
from nnfmq.driver.session.error_translation import errors_to_status
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import Protection


class ConstantPool(Struct, frozen=True):
    """A memory pool with a model's constants, which never change.

    Attributes:
        data: The bytes: a copy, or a view of sealed memory.
        identity: The file from which they came (see `memory.file_identity`), None if that cannot be identified.
        offset: Where in the file they begin.
        is_sealed: Whether the bytes are a view of sealed memory, so that a file never has others.
        is_private: No other process can write to them.
    """

    data: bytes | memoryview
    identity: tuple[int, int] | None = None
    offset: int = 0
    is_sealed: bool = False
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
    """Copy the memories, or map those that are sealed against writing, and close them. The caller has charged them.

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
                is_sealed = sealed_size(memory.fileno()) is not None
                data = _mapped(memory) if is_sealed else _copied(memory, check)
                pools.append(ConstantPool(data, file_identity(memory.fileno()), memory.offset, is_sealed))
    return tuple(pools)


def _mapped(memory: FileMemory) -> memoryview:
    """Return the bytes of sealed memory; the mapping ends with the last view of them."""
    with Memory.adopt(os.dup(memory.fileno()), memory.size_bytes, memory.offset, Protection.READ) as mapped:
        return mapped.view


def _copied(memory: FileMemory, check: Callable[[], None]) -> memoryview:
    copy = memoryview(PrivateBytes.allocate(memory.size_bytes))[: memory.size_bytes]
    memory.range(0, memory.size_bytes).read_into(copy, check)
    return copy
