"""ConstantValues: the constants of a model under construction.

As in NNAPI, values of at most 128 bytes are copied immediately, into the model's `operand_values`. Larger ones are
borrowed until the model is finished, and then copied to one pool.
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
from nnfmq.hal.types import DataLocation, Protection

__all__ = ["IMMEDIATELY_COPIED_MAX_BYTES", "ConstantValues", "SharedConstants"]


# ----------------------------------------------------------------------------------------------------------------------
# SharedConstants: memory with constants of a built model, which lives as long as a model refers to it.
#
# NNAPI lets an application free a memory, and the model, while compilations still need them (API-10, API-16). So a
# builder keeps a duplicate of the memory's fd. Its owner is the Model, which has no `close`; several models, and the
# sub-models of a plan, share one pool.


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


# ----------------------------------------------------------------------------------------------------------------------
# ConstantValues: the constants of a model under construction.


IMMEDIATELY_COPIED_MAX_BYTES = 128  # ANEURALNETWORKS_MAX_SIZE_OF_IMMEDIATELY_COPIED_VALUES


class ConstantValues:
    """The bytes of small constants, views of large ones, and pools over the application's memories.

    Attributes:
        small: The values that have been copied, aligned.
        pools: The pools so far.
    """

    def __init__(self) -> None:
        self.small = bytearray()
        self.pools: list[SharedConstants] = []
        self._memories: list[Memory | FileMemory] = []  # of the pools
        self._large: dict[int, memoryview] = {}  # by operand

    def copied(self, data: memoryview) -> DataLocation:
        """Copy a small value and return its location in `small`."""
        offset = aligned_offset(len(self.small), data.nbytes)
        self.small += bytes(offset - len(self.small))
        self.small += data
        return DataLocation(0, offset, data.nbytes)

    def borrow(self, operand: int, data: memoryview) -> None:
        """Keep a view of a large value until `join_large`."""
        self._large[operand] = data

    def forget(self, operand: int) -> None:
        """Drop the view of an operand's large value, if it has one: the operand gets another value."""
        self._large.pop(operand, None)

    def pool_of(self, memory: Memory | FileMemory) -> int:
        """Return the index of the pool over an application's memory.

        Raises:
            InvalidArgument: If the memory is closed or may not be read.
        """
        for index, known in enumerate(self._memories):
            if known is memory:
                return index
        self.pools.append(SharedConstants.over(memory))
        self._memories.append(memory)
        return len(self.pools) - 1

    def join_large(self) -> dict[int, DataLocation]:
        """Copy all large values to a new pool, the last one, and return their locations by operand.

        Raises:
            ResourceExhaustedTransient: If there is not enough memory, or no fd is left. The values are kept.
        """
        if not self._large:
            return {}
        pool, offsets = SharedConstants.of_values(list(self._large.values()))
        self.pools.append(pool)
        locations = {
            operand: DataLocation(len(self.pools) - 1, offset, data.nbytes)
            for (operand, data), offset in zip(self._large.items(), offsets, strict=True)
        }
        self._large = {}
        return locations
