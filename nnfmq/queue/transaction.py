"""Transaction: records that are written or read in the ring itself (libfmq MemTransaction).

`MessageQueue.begin_write` and `begin_read` return transactions; `commit_write` publishes the records, `commit_read`
consumes them. A transaction is two memoryviews and arithmetic. The core stores what was begun, and decides whether it
may be committed. The views keep the memory mapped, also after the queue was closed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from msgspec import Struct

from nnfmq.hal.errors import InvalidArgument

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Transaction(Struct, frozen=True, eq=False):
    """Space for records, or records to read, in one region of the ring or, if they cross its end, in two.

    `first` and `second` are bytes of the ring, writable in a write transaction, read-only in a read transaction. What
    is read from an unsynchronized queue is valid only after `commit_read` has returned True.
    """

    first: memoryview
    second: memoryview
    quantum: int

    @classmethod
    def from_ring(cls, ring: memoryview, start: int, n: int, quantum: int) -> Self:
        """Return the `n` records that begin at byte `start` of the whole ring `ring`."""
        first = ring[start : start + n * quantum]
        return cls(first, ring[: n * quantum - len(first)], quantum)

    @property
    def count(self) -> int:
        """Number of records."""
        return (len(self.first) + len(self.second)) // self.quantum

    def get_slot(self, index: int) -> memoryview:
        """Return the bytes of one record in the ring.

        Raises:
            InvalidArgument: If there is no record `index`.
        """
        if not 0 <= index < self.count:
            raise InvalidArgument(f"record {index} of a transaction of {self.count}")
        start = index * self.quantum
        region, start = (self.first, start) if start < len(self.first) else (self.second, start - len(self.first))
        return region[start : start + self.quantum]

    def copy_to(self, data: Buffer, start: int = 0) -> None:
        """Copy the records of `data` into the ring, beginning at record `start` of the transaction.

        Raises:
            InvalidArgument: If they do not fit or are not whole records, or this is a read transaction.
        """
        source = memoryview(data).cast("B")
        if self.first.readonly:
            raise InvalidArgument("this transaction is for reading")
        first, second = self._regions(start, len(source))
        first[:] = source[: len(first)]
        second[:] = source[len(first) :]

    def copy_from(self, data: Buffer, start: int = 0) -> None:
        """Fill the writable buffer `data` with records, beginning at record `start` of the transaction.

        Raises:
            InvalidArgument: If there are fewer records, or the size of `data` is not a whole number of records.
        """
        target = memoryview(data).cast("B")
        first, second = self._regions(start, len(target))
        target[: len(first)] = first
        target[len(first) :] = second

    def tobytes(self) -> bytes:
        """Return a copy of all records."""
        return self.first.tobytes() + self.second.tobytes()

    def _regions(self, start: int, size: int) -> tuple[memoryview, memoryview]:
        begin, end = start * self.quantum, start * self.quantum + size
        if start < 0 or size % self.quantum or end > len(self.first) + len(self.second):
            raise InvalidArgument(
                f"{size} bytes from record {start} on; the transaction has {self.count} records of {self.quantum} bytes"
            )
        split = len(self.first)
        return self.first[begin:end], self.second[max(begin - split, 0) : max(end - split, 0)]
