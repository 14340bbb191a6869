"""A transaction: records in place in the ring, in one region or, where they cross its end, two.

`MessageQueue.begin_write` and `begin_read` make them, `commit_*` publishes or consumes; until then nothing has changed
and a transaction can be dropped. It is no more than two memoryviews and arithmetic: what was begun, and whether it may
be committed, is the core's business. The views keep the memory mapped, also after the queue was closed.
FMQ_FACTS 1.6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from nnfmq.hal.errors import InvalidArgument

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True, slots=True, eq=False)
class Transaction:
    """Room for records to be written, or records to be read, of `quantum` bytes each.

    `first` and `second` are their bytes in the ring itself, writable in a write, read-only in a read; `second` is empty
    unless they cross the ring's end. What is read in place from an unsynchronized queue is to be believed only after
    `commit_read` has answered True.
    """

    first: memoryview
    second: memoryview
    quantum: int

    @classmethod
    def of(cls, ring: memoryview, at: int, n: int, quantum: int) -> Self:
        """Return the `n` records that begin at byte `at` of `ring`, which is a whole ring."""
        first = ring[at : at + n * quantum]
        return cls(first, ring[: n * quantum - len(first)], quantum)

    @property
    def count(self) -> int:
        """Return the number of records."""
        return (len(self.first) + len(self.second)) // self.quantum

    def get_slot(self, index: int) -> memoryview:
        """Return the bytes of one record in place. Raises InvalidArgument where there are not so many."""
        if not 0 <= index < self.count:
            raise InvalidArgument(f"record {index} of a transaction of {self.count}")
        at = index * self.quantum
        region, at = (self.first, at) if at < len(self.first) else (self.second, at - len(self.first))
        return region[at : at + self.quantum]

    def copy_to(self, data: Buffer, start: int = 0) -> None:
        """Copy the records of `data` into the ring, from record `start` of the transaction on.

        Raises InvalidArgument where they do not fit, are no whole records, or the transaction is for reading.
        """
        source = memoryview(data).cast("B")
        if self.first.readonly:
            raise InvalidArgument("this transaction is for reading")
        target, rest = self._span(start, len(source))
        target[:] = source[: len(target)]
        rest[:] = source[len(target) :]

    def copy_from(self, data: Buffer, start: int = 0) -> None:
        """Fill the writable buffer `data` with records from the ring, from record `start` of the transaction on.

        Raises InvalidArgument where there are not so many, or `data` holds no whole records.
        """
        target = memoryview(data).cast("B")
        source, rest = self._span(start, len(target))
        target[: len(source)] = source
        target[len(source) :] = rest

    def tobytes(self) -> bytes:
        """Return a copy of all records."""
        return self.first.tobytes() + self.second.tobytes()

    def _span(self, start: int, size: int) -> tuple[memoryview, memoryview]:
        """Return the regions of `size` bytes from record `start` on."""
        at, end = start * self.quantum, start * self.quantum + size
        if start < 0 or size % self.quantum or end > len(self.first) + len(self.second):
            raise InvalidArgument(
                f"{size} bytes from record {start} on; the transaction has {self.count} records of {self.quantum} bytes"
            )
        turn = len(self.first)
        return self.first[at:end], self.second[max(at - turn, 0) : max(end - turn, 0)]
