"""The memory models themselves, by the usual two-thread litmus tests: what each must allow, and what it must not.

A line with a SYNC label is a release store or an acquire load, as in the Python core. `flag` is a queue's write
counter, `other` its read counter, `data` the first byte of its ring.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.explorer.instrumented_runtime import ProcessQueues, QueueShape
from support.explorer.models import Model
from support.explorer.program import Call, Thread
from support.explorer.search import Scenario, outcomes

ALL = set(Model)
DATA = slice(0, 1)


def threads(first: Call, second: Call) -> Scenario:
    """Return the scenario in which each is called once; the outcome is what both returned."""

    def thread(name: str, call: Call) -> Thread:
        return Thread(
            name, name, lambda done: call if done is None else None, lambda _, result: (result,), None, reads=True
        )

    return Scenario("litmus", (QueueShape(1, 1),), (thread("first", first), thread("second", second)))


def allowing(outcome: tuple[Any, Any], first: Call, second: Call) -> set[Model]:
    """Return the models in which both can end so."""
    wanted = tuple((result,) for result in outcome)
    return {model for model in Model if wanted in outcomes(threads(first, second), model)}


def write_flag_see_other(bench: ProcessQueues) -> object:
    ring = bench.rings[0]
    ring._write_counter[0] = 1
    return ring._read_counter[0]


def write_other_see_flag(bench: ProcessQueues) -> object:
    ring = bench.rings[0]
    ring._read_counter[0] = 1
    return ring._write_counter[0]


def test_a_load_passes_an_earlier_store_if_stores_are_delayed() -> None:
    assert allowing((0, 0), write_flag_see_other, write_other_see_flag) == {Model.TSO, Model.WEAK}


def swap_flag_see_other(bench: ProcessQueues) -> object:
    bench.events[0]._atomics.fetch_or(bench.events[0]._word, bench.events[0]._address, 1)
    return write_flag_see_other(bench)


def barrier_between(bench: ProcessQueues) -> object:
    ring, event = bench.rings[0], bench.events[0]
    ring._write_counter[0] = 1
    event.fetch_clear(4)
    return ring._read_counter[0]


def barrier_between_the_others(bench: ProcessQueues) -> object:
    ring, event = bench.rings[0], bench.events[0]
    ring._read_counter[0] = 1
    event.fetch_clear(4)
    return ring._write_counter[0]


def test_a_read_modify_write_is_a_barrier() -> None:
    assert allowing((0, 0), barrier_between, barrier_between_the_others) == set()


def test_a_barrier_before_the_store_does_not_help() -> None:
    assert allowing((0, 0), swap_flag_see_other, write_other_see_flag) == {Model.TSO, Model.WEAK}


def publish(bench: ProcessQueues) -> object:
    ring = bench.rings[0]
    ring._ring[DATA] = b"\7"
    ring._write_counter[0] = 1  # SYNC
    return None


def publish_relaxed(bench: ProcessQueues) -> object:
    ring = bench.rings[0]
    ring._ring[DATA] = b"\7"
    ring._write_counter[0] = 1
    return None


def look(bench: ProcessQueues) -> object:
    ring = bench.rings[0]
    seen = ring._write_counter[0]  # SYNC
    return bytes(ring._ring[DATA]) if seen else None


def look_relaxed(bench: ProcessQueues) -> object:
    ring = bench.rings[0]
    seen = ring._write_counter[0]
    return bytes(ring._ring[DATA]) if seen else None


@pytest.mark.parametrize(
    ("writer", "reader", "stale_in"),
    [
        (publish, look, set()),
        (publish_relaxed, look, {Model.WEAK}),
        (publish, look_relaxed, {Model.WEAK}),
        (publish_relaxed, look_relaxed, {Model.WEAK}),
    ],
)
def test_a_message_needs_a_release_and_an_acquire_if_accesses_are_reordered(
    writer: Call, reader: Call, stale_in: set[Model]
) -> None:
    assert allowing((None, b"\0"), writer, reader) == stale_in
    assert allowing((None, b"\7"), writer, reader) == ALL


def overwrite_when_told(bench: ProcessQueues) -> object:
    ring = bench.rings[0]
    if ring._read_counter[0]:  # SYNC
        ring._ring[DATA] = b"\7"
    return None


def read_and_tell(bench: ProcessQueues) -> object:
    ring = bench.rings[0]
    data = bytes(ring._ring[DATA])
    ring._read_counter[0] = 1  # SYNC
    return data


def read_and_tell_relaxed(bench: ProcessQueues) -> object:
    ring = bench.rings[0]
    data = bytes(ring._ring[DATA])
    ring._read_counter[0] = 1
    return data


def test_a_payload_load_passes_a_later_store_only_if_that_is_relaxed_and_accesses_are_reordered() -> None:
    assert allowing((None, b"\7"), overwrite_when_told, read_and_tell) == set()
    assert allowing((None, b"\7"), overwrite_when_told, read_and_tell_relaxed) == {Model.WEAK}


def write_data_twice(bench: ProcessQueues) -> object:
    ring = bench.rings[0]
    ring._ring[DATA] = b"\1"
    ring._ring[DATA] = b"\2"
    return bytes(ring._ring[DATA])


def nothing(bench: ProcessQueues) -> object:
    return None


def test_a_thread_sees_its_own_newest_store() -> None:
    assert allowing((b"\2", None), write_data_twice, nothing) == ALL
    assert allowing((b"\1", None), write_data_twice, nothing) == set()
    assert allowing((b"\0", None), write_data_twice, nothing) == set()
