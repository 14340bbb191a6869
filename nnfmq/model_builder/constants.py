"""ConstantValues: the constants of a model under construction.

As in NNAPI, values of at most 128 bytes are copied immediately, into the model's `operand_values`. Larger ones are
borrowed until the model is finished, and then copied to one pool.
"""

from __future__ import annotations

from nnfmq.base.file_memory import FileMemory
from nnfmq.base.memory import Memory
from nnfmq.base.shared_constants import SharedConstants
from nnfmq.hal.models import aligned_offset
from nnfmq.hal.types import DataLocation

__all__ = ["ConstantValues"]


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
