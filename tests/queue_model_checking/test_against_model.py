"""A queue and a deque side by side: whatever is called in whatever order, both give the same. On each core.

The model is libfmq's contract (all or nothing, first in, first out, what is left and what fits), transactions too.
Waiting calls are made with a deadline that has passed: one try.
"""

from __future__ import annotations

import os
from collections import deque

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.tiers import IS_DEEP

from nnfmq.base.memory import Memory
from nnfmq.queue import NOT_EMPTY, NOT_FULL, UNSYNCHRONIZED, MessageQueue
from nnfmq.queue import core as cores

CORES = ["python"] if cores.core_name == "python" else list(cores.CORES.available())
EXAMPLES, STEPS = (2000, 100) if IS_DEEP else (100, 40)

counts = st.integers(0, 9)


class QueueAgainstDeque(RuleBasedStateMachine):
    """One writer's and one reader's end, each on its core, of a queue of `capacity` records."""

    writer_core = reader_core = "python"

    @initialize(quantum=st.sampled_from([1, 3, 8, 24]), capacity=st.integers(1, 7), past=st.integers(0, 10))
    def make(self, quantum: int, capacity: int, past: int) -> None:
        """Create and attach; `past` records have gone through before, so that the end of the ring comes anywhere."""
        self.quantum, self.capacity = quantum, capacity
        self.model: deque[bytes] = deque()
        self.number = 0
        self.w = MessageQueue.create(quantum, capacity, core=cores.CORES.load(self.writer_core))
        memory = Memory.adopt(os.dup(self.w.memory.fileno()))
        self.r = MessageQueue.attach(self.w.descriptor, memory, core=cores.CORES.load(self.reader_core))
        for _ in range(past):
            assert self.w.write(bytes(quantum))
            assert self.r.read(1) == bytes(quantum)
        self.pending_bits = 0

    def teardown(self) -> None:
        """Close both ends."""
        if hasattr(self, "w"):
            self.w.close()
            self.r.close()

    def records(self, n: int) -> list[bytes]:
        """Return n records that never come again."""
        self.number += n
        return [(self.number - i).to_bytes(8, "little")[: self.quantum].ljust(self.quantum, b"\7") for i in range(n)]

    @property
    def free_records(self) -> int:
        return self.capacity - len(self.model)

    def written(self, records: list[bytes], did: bool) -> None:
        """Compare a write's result with the model."""
        assert did is (len(records) <= self.free_records)
        if did:
            self.model.extend(records)

    def taken(self, n: int, data: bytes | None) -> None:
        """Compare a read's result with the model."""
        if n > len(self.model):
            assert data is None
        else:
            assert data == b"".join(self.model.popleft() for _ in range(n))

    @rule(n=counts, as_view=st.booleans())
    def write(self, n: int, as_view: bool) -> None:
        records = self.records(n)
        data = b"".join(records)
        self.written(records, self.w.write(memoryview(bytearray(data)) if as_view else data))

    @rule(n=counts)
    def send(self, n: int) -> None:
        records = self.records(n)
        did = self.w.send(b"".join(records))
        self.pending_bits |= NOT_EMPTY if did else 0
        self.written(records, did)

    @rule(n=counts)
    def write_blocking(self, n: int) -> None:
        records = self.records(n)
        did = self.w.write_blocking(b"".join(records), 0)
        self.pending_bits |= NOT_EMPTY if did else 0
        self.written(records, did)

    @rule(n=counts, used=counts)
    def write_in_place(self, n: int, used: int) -> None:
        transaction = self.w.begin_write(n)
        assert (transaction is not None) is (n <= self.free_records)
        if transaction is not None:
            records = self.records(min(used, n))
            transaction.copy_to(b"".join(records))
            self.w.commit_write(len(records))
            self.model.extend(records)

    @rule(n=counts)
    def read(self, n: int) -> None:
        self.taken(n, self.r.read(n))

    @rule(n=counts)
    def read_blocking(self, n: int) -> None:
        data = self.r.read_blocking(n, 0)
        self.pending_bits |= NOT_FULL if data is not None else 0
        self.taken(n, data)

    @rule(window_ns=st.sampled_from([0, 1000]))
    def receive(self, window_ns: int) -> None:
        data = self.r.receive(0, window_ns)
        self.pending_bits |= NOT_FULL if data is not None else 0
        self.taken(len(self.model) or 1, data)

    @rule(n=counts, used=counts)
    def read_in_place(self, n: int, used: int) -> None:
        transaction = self.r.begin_read(n)
        assert (transaction is not None) is (n <= len(self.model))
        if transaction is not None:
            assert transaction.tobytes() == b"".join(list(self.model)[:n])
            assert self.r.commit_read(min(used, n)) is True
            self.taken(min(used, n), transaction.tobytes()[: min(used, n) * self.quantum])

    @precondition(lambda self: self.number % 5 == 0)
    @rule()
    def drain(self) -> None:
        assert self.r.drain() == len(self.model)
        self.pending_bits |= NOT_FULL
        self.model.clear()

    @rule(mask=st.sampled_from([NOT_FULL, NOT_EMPTY, NOT_FULL | NOT_EMPTY]))
    def clear_bits(self, mask: int) -> None:
        """A bit that was woken is there until somebody takes it; the calls that wait took theirs only to look again."""
        assert self.r.event_flag is not None
        assert not self.r.event_flag.wait(mask, 0) & ~self.pending_bits
        self.pending_bits &= ~mask
        assert self.w.event_flag is not None
        assert self.w.event_flag.wait(mask, 0) == 0

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "w"):
            assert self.r.available_to_read() == self.w.available_to_read() == len(self.model)
            assert self.r.available_to_write() == self.w.available_to_write() == self.free_records


class UnsynchronizedAgainstList(RuleBasedStateMachine):
    """An overwriting writer and two readers with separate positions, against the list of all written records."""

    writer_core = reader_core = "python"

    @initialize(quantum=st.sampled_from([1, 8, 24]), capacity=st.integers(1, 7))
    def make(self, quantum: int, capacity: int) -> None:
        self.quantum, self.capacity = quantum, capacity
        self.all: list[bytes] = []
        self.w = MessageQueue.create(quantum, capacity, flavor=UNSYNCHRONIZED, core=cores.CORES.load(self.writer_core))
        self.readers = [self.attached() for _ in range(2)]
        self.positions = [0, 0]

    def attached(self) -> MessageQueue:
        return MessageQueue.attach(
            self.w.descriptor, Memory.adopt(os.dup(self.w.memory.fileno())), flavor=UNSYNCHRONIZED,
            reset_pointers=False, core=cores.CORES.load(self.reader_core),
        )  # fmt: skip

    def teardown(self) -> None:
        if hasattr(self, "w"):
            for queue in (self.w, *self.readers):
                queue.close()

    @rule(n=counts)
    def write(self, n: int) -> None:
        records = [bytes([len(self.all) + i & 0xFF]) * self.quantum for i in range(n)]
        did = self.w.write(b"".join(records))
        assert did is (n <= self.capacity)
        self.all.extend(records if did else [])

    @rule(which=st.integers(0, 1), n=counts, in_place=st.booleans())
    def read(self, which: int, n: int, in_place: bool) -> None:
        reader, position = self.readers[which], self.positions[which]
        left = len(self.all) - position
        data = self.read_in_place(reader, n) if in_place else reader.read(n)
        if left > self.capacity:  # overtaken: all is lost
            assert data is None
            self.positions[which] = len(self.all)
        elif n > left:
            assert data is None
        else:
            assert data == b"".join(self.all[position : position + n])
            self.positions[which] += n

    def read_in_place(self, reader: MessageQueue, n: int) -> bytes | None:
        transaction = reader.begin_read(n)
        data = None if transaction is None else transaction.tobytes()
        return data if transaction is None or reader.commit_read(n) else None

    @invariant()
    def counts_agree(self) -> None:
        for reader, position in zip(getattr(self, "readers", ()), getattr(self, "positions", ()), strict=True):
            assert reader.available_to_read() == len(self.all) - position


@pytest.mark.parametrize(("writer", "reader"), [(writer, reader) for writer in CORES for reader in CORES])
@pytest.mark.parametrize("machine", [QueueAgainstDeque, UnsynchronizedAgainstList])
def test_a_queue_behaves_as_a_deque_for_all_sequences_of_calls(
    machine: type[RuleBasedStateMachine], writer: str, reader: str
) -> None:
    # The function cannot be a fixture's user: hypothesis runs it again and again.
    chosen = type(machine.__name__, (machine,), {"writer_core": writer, "reader_core": reader})
    run_state_machine_as_test(
        chosen,
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None, database=None, derandomize=not IS_DEEP,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )  # fmt: skip
