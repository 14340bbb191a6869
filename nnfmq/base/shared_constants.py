"""SharedConstants: memory with constants of a model, which lives as long as a model refers to it.

NNAPI lets an application free a memory, and the model, while compilations still need them (API-10, API-16). So a
builder keeps a duplicate of the memory's fd. Its owner is the Model, which has no `close`; several models, and the
sub-models of a plan, share one pool. The files of a hosted model are in such pools, too.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Self

from nnfmq.base.file_memory import FileMemory
from nnfmq.base.memory import Memory, write_all
from nnfmq.base.ownership import Uncopyable
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.models import aligned_offset
from nnfmq.hal.types import Protection

__all__ = ["SharedConstants"]


class SharedConstants(Uncopyable):
    """Memory with constants. Satisfies `hal.types.SharedPool`. The last reference to it closes the fd.

    Attributes:
        size_bytes: The size in bytes.
        offset: The offset in the file of the fd.
        protection: Always READ: nobody has to write constants.
    """

    protection = Protection.READ

    def __init__(self, memory: Memory | FileMemory) -> None:
        """Take ownership of `memory`."""
        self._memory = memory
        # Not __del__: of objects in a cycle the garbage collector may finalize the memory first, which then complains.
        weakref.finalize(self, memory.close).atexit = False
        self.size_bytes = memory.size_bytes
        self.offset = memory.offset

    def __repr__(self) -> str:
        return f"<SharedConstants: {self.size_bytes} bytes>"

    @classmethod
    def over(cls, memory: Memory | FileMemory) -> Self:
        """Return a pool over the same bytes as `memory`, which may be closed afterwards.

        Raises:
            InvalidArgument: If the memory is closed or may not be read.
        """
        if not memory.is_readable:
            raise InvalidArgument(f"{memory!r} may not be read, so it cannot contain constants")
        if isinstance(memory, FileMemory):
            duplicate = FileMemory.from_fd(
                memory.fileno(), memory.size_bytes, offset=memory.offset, protection=Protection.READ
            )
            return cls(duplicate)
        return cls(Memory.adopt(os.dup(memory.fileno()), memory.size_bytes, memory.offset, memory.protection))

    @classmethod
    def of_values(cls, values: Sequence[memoryview]) -> tuple[Self, list[int]]:
        """Return a pool with copies of `values`, which nobody can write to, and the offset of each value.

        Raises:
            ResourceExhaustedTransient: If there is not enough memory, or no fd is left.
        """
        offsets, end = [], 0
        for value in values:
            offsets.append(aligned_offset(end, value.nbytes))
            end = offsets[-1] + value.nbytes

        def fill(fd: int) -> None:
            for value, offset in zip(values, offsets, strict=True):
                write_all(fd, value, offset)

        return cls(Memory.create_constant(end, fill, "nnfmq-constants")), offsets

    @property
    def view(self) -> memoryview:
        """The bytes; of a file, a private copy."""
        return self._memory.view

    def fileno(self) -> int:
        """Return the fd, which stays owned by this object."""
        return self._memory.fileno()
