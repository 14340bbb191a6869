"""The trace area of a driver: a ring for each worker, in which all record while a client traces the driver.

    page 0     byte 0: the slot of the worker whose client traces the driver, 0 = nobody does; then a byte for each slot
               from 1 on: 1 if the worker has begun to record
    then       for each slot a trace ring of AREA_RING_BYTES (`observe.trace_layout`)

The memory is sparse: a worker allocates the pages of its ring when it begins to record, so a driver that is not traced
needs one page. The pages stay allocated for the next trace. A worker writes its own ring and byte, and byte 0 if its
client begins to trace. If it dies, the supervisor ends the trace. The area is trusted: only the supervisor and its
workers have it, and clients that administer the driver may read it (see docs/explanation/security-model.md).
"""

from __future__ import annotations

from typing import Final

from nnfmq.memory import Memory
from nnfmq.observe.trace_layout import ring_bytes

__all__ = ["ACTIVE", "AREA_RING_BYTES", "OWNER", "TraceArea", "ring_offset", "slots_of"]

OWNER: Final = 0
ACTIVE: Final = 0  # plus the slot
AREA_RING_BYTES: Final = ring_bytes(32768)
_PAGE = 4096


def ring_offset(slot: int) -> int:
    """Return where the ring of a slot, from 1 on, begins."""
    return _PAGE + (slot - 1) * AREA_RING_BYTES


def slots_of(size_bytes: int) -> int:
    """Return how many slots an area of `size_bytes` has."""
    return max(0, (size_bytes - _PAGE) // AREA_RING_BYTES)


class TraceArea:
    """The supervisor's side, for workers with the slots 1 to `slots`. Owns its memory; close it, or use `with`.

    Forked children do not inherit the mapping; workers map the memory themselves.
    """

    def __init__(self, slots: int) -> None:
        assert slots < _PAGE
        self.memory = Memory.create_sparse(ring_offset(slots + 1), "nnfmq-trace")
        self.memory.keep_from_children()

    def release(self, slot: int) -> None:
        """Forget a worker that has exited: the trace of its client ends, and its ring is free for another worker.

        What it has recorded stays readable until then.
        """
        view = self.memory.view
        if view[OWNER] == slot:
            view[OWNER] = 0

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self.memory.close()

    def __enter__(self) -> TraceArea:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
