"""Both cores of the recorders: each counts what the specification says, and they agree on every sequence."""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnfmq.observe import statistics_layout as layout
from nnfmq.observe.recorder_core import CORES
from nnfmq.serialize import execution_stats
from nnfmq.serialize.packets import SENT_WORD

needs_compiled = pytest.mark.skipif("compiled" not in CORES.available(), reason="the compiled core is not built here")
TIMES = st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1))
STEPS = st.lists(st.tuples(st.sampled_from(["model", "burst"]), st.none() | TIMES), max_size=20)


def words(count: int) -> memoryview:
    return memoryview(bytearray(8 * count))


class Counted:
    """Memory of a client, a model and a burst, with their recorders."""

    def __init__(self, core: Any) -> None:
        self.memory = (words(layout.SLOT_HEADER_WORDS), words(layout.MODEL_WORDS), words(layout.BURST_WORDS))
        self.model = core.ModelRecorder(*self.memory[:2])
        self.burst = core.BurstRecorder(self.model, self.memory[2])

    @property
    def counts(self) -> list[list[int]]:
        return [view.cast("Q").tolist() for view in self.memory]


def test_an_execution_counts_for_its_model_and_its_client(recorders: ModuleType) -> None:
    counted = Counted(recorders)
    counted.model.add(5_300, 4_000)
    client, model, burst = counted.counts
    assert {word: count for word, count in enumerate(client) if count} == {layout.CLIENT_EXECUTIONS: 1}
    expected = {layout.EXECUTIONS: 1, layout.DRIVER_NS: 5_300, layout.ENGINE_NS: 4_000}
    expected[layout.DRIVER_HISTOGRAM + 8 + 2 * 8 + 2] = 1  # 5.0 to 5.5 µs: the third eighth of the octave from 4 µs
    expected[layout.ENGINE_HISTOGRAM + 8 + 2 * 8] = 1  # 4.0 to 4.5 µs
    assert {word: count for word, count in enumerate(model) if count} == expected
    assert not any(burst)


def test_an_execution_of_a_burst_counts_for_all_three(recorders: ModuleType) -> None:
    counted = Counted(recorders)
    counted.burst.add(100, 50)
    counted.burst.add_failure()
    client, model, burst = counted.counts
    assert (client[layout.CLIENT_EXECUTIONS], client[layout.CLIENT_FAILURES]) == (1, 1)
    assert (model[layout.EXECUTIONS], model[layout.FAILURES], model[layout.DRIVER_HISTOGRAM]) == (1, 1, 1)
    assert (burst[layout.BURST_EXECUTIONS], burst[layout.BURST_FAILURES]) == (1, 1)


def test_times_that_went_back_count_as_zero(recorders: ModuleType) -> None:
    counted = Counted(recorders)
    counted.model.add(-7, -9)
    _, model, _ = counted.counts
    assert (model[layout.DRIVER_NS], model[layout.ENGINE_NS]) == (0, 0)
    assert (model[layout.DRIVER_HISTOGRAM], model[layout.ENGINE_HISTOGRAM]) == (1, 1)


def test_a_call_counts_with_the_time_that_its_client_has_waited(recorders: ModuleType) -> None:
    row = words(layout.CALLS_WORDS)
    calls = recorders.Calls(row)
    calls.add(5_300, 1_000)
    calls.add(-7, -1)  # its time in the queues is unknown
    expected = {layout.CLIENT_NS: 5_300, layout.QUEUE_NS: 1_000}
    expected |= {layout.CLIENT_HISTOGRAM: 1, layout.CLIENT_HISTOGRAM + 26: 1, layout.QUEUE_HISTOGRAM + 8: 1}
    assert {word: count for word, count in enumerate(row.cast("Q")) if count} == expected


@pytest.mark.parametrize(
    ("received", "sent", "queue_ns"),
    [(1_000, 4_000, 22_000), (0, 2**64 - 1, 0), (5_000, 4_000, 0), (2**64 - 500, 500, 24_000)],
    ids=["possible", "longer than the call", "backwards", "around the end of a word"],
)
def test_the_time_in_the_queues_is_what_the_driver_leaves_of_a_call(
    recorders: ModuleType, received: int, sent: int, queue_ns: int
) -> None:
    row, stats = words(layout.CALLS_WORDS), words(execution_stats.STATS_WORDS)
    stats.cast("Q")[execution_stats.REQUEST_RECEIVED], stats.cast("Q")[execution_stats.RESULT_SENT] = received, sent
    calls = recorders.BurstCalls(recorders.Calls(row), stats)
    calls.add(26_000, 25_000)
    calls.close()
    calls.close()
    calls.add(26_000, 25_000)
    calls.finish(0, True)
    assert row.cast("Q")[layout.CLIENT_NS : layout.QUEUE_NS + 1].tolist() == [26_000, queue_ns]


def test_an_execution_that_finishes_counts_if_its_call_took_no_longer(recorders: ModuleType) -> None:
    row = words(layout.CALLS_WORDS)
    calls = recorders.BurstCalls(recorders.Calls(row), words(execution_stats.STATS_WORDS))
    begin_ns = time.monotonic_ns()
    latency_ns = calls.finish(begin_ns, True)
    assert 0 <= latency_ns <= calls.finish(begin_ns, False) <= time.monotonic_ns() - begin_ns
    counted = row.cast("Q")
    assert (counted[layout.CLIENT_NS], sum(counted[layout.CLIENT_HISTOGRAM :][: layout.BUCKETS])) == (latency_ns, 1)


def test_every_eighth_short_execution_of_a_burst_stands_for_eight_in_the_queues(recorders: ModuleType) -> None:
    row, stats = words(layout.CALLS_WORDS), words(execution_stats.STATS_WORDS)
    calls = recorders.BurstCalls(recorders.Calls(row), stats)
    counted = row.cast("Q")
    for number in range(1, 18):
        stats.cast("Q")[execution_stats.RESULT_SENT] = number * 100
        calls.add(15_999, 15_999)
        calls.add(16_000, 16_000)  # is measured always
        waited = counted[layout.QUEUE_HISTOGRAM : layout.QUEUE_HISTOGRAM + layout.BUCKETS].tolist()
        assert (sum(waited), counted[layout.CLIENT_NS]) == (number // 8 * 8 + number, number * 31_999)
    longer_ns = sum(16_000 - number * 100 for number in range(1, 18))
    assert counted[layout.QUEUE_NS] == longer_ns + 8 * (15_999 - 800) + 8 * (15_999 - 1_600)


def test_the_clock_of_requests_tells_the_driver_the_time_until_it_is_closed(recorders: ModuleType) -> None:
    beside = words(4)
    clock = recorders.SendClock(beside)
    before_ns = time.monotonic_ns()
    now_ns = clock.now()
    assert before_ns <= now_ns <= time.monotonic_ns()
    expected = [0] * 4
    expected[SENT_WORD] = now_ns
    assert beside.cast("Q").tolist() == expected
    clock.close()
    clock.close()
    assert clock.now() >= now_ns
    assert beside.cast("Q").tolist() == expected
    with pytest.raises(ValueError, match="1 words of statistics where 2 are needed"):
        recorders.SendClock(words(1))


@needs_compiled
@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-1, 2**63 - 1)), max_size=20))
def test_both_cores_count_the_same_calls(times: list[tuple[int, int]]) -> None:
    rows = []
    for name in ("compiled", "python"):
        rows.append(words(layout.CALLS_WORDS))
        core = CORES.load(name)
        calls = core.Calls(rows[-1])
        of_burst = core.BurstCalls(calls, words(execution_stats.STATS_WORDS))
        for each in times:
            calls.add(*each)
            of_burst.add(*each)
    assert bytes(rows[0]) == bytes(rows[1])


@needs_compiled
@given(STEPS)
def test_both_cores_write_the_same_words(steps: list[tuple[str, tuple[int, int] | None]]) -> None:
    written = []
    for name in ("compiled", "python"):
        counted = Counted(CORES.load(name))
        for kind, times in steps[:8]:  # few, so that the sums stay below 2**64
            recorder = counted.model if kind == "model" else counted.burst
            if times is None:
                recorder.add_failure()
            else:
                recorder.add(times[0] // 8, times[1] // 8)
        written.append(counted.counts)
    assert written[0] == written[1]


def test_memory_that_is_too_small_is_rejected(recorders: ModuleType) -> None:
    client, model, burst = words(layout.SLOT_HEADER_WORDS), words(layout.MODEL_WORDS), words(layout.BURST_WORDS - 1)
    with pytest.raises(ValueError, match="words of statistics"):
        recorders.ModelRecorder(client[:-8], model)
    with pytest.raises(ValueError, match="words of statistics"):
        recorders.ModelRecorder(client, model[:-8])
    with pytest.raises(ValueError, match="words of statistics"):
        recorders.Calls(words(layout.CALLS_WORDS - 1))
    with pytest.raises(ValueError, match="words of statistics"):
        recorders.BurstRecorder(recorders.ModelRecorder(client, model), burst)


def test_a_slot_that_changes_gives_no_snapshot(recorders: ModuleType) -> None:
    slot = words(layout.SLOT_WORDS)
    slot[-1] = 9
    assert recorders.snapshot(slot) == bytes(slot)
    recorders.begin_change(slot)
    assert recorders.snapshot(slot) is None
    recorders.end_change(slot)
    assert recorders.snapshot(slot) == bytes(slot)


def test_the_change_of_a_writer_that_was_killed_is_completed_by_the_next_one(recorders: ModuleType) -> None:
    slot = words(layout.SLOT_WORDS)
    recorders.begin_change(slot)  # and killed
    recorders.begin_change(slot)
    assert recorders.snapshot(slot) is None
    recorders.end_change(slot)
    assert recorders.snapshot(slot) is not None
    assert slot.cast("Q")[layout.CHANGE] == 2


def test_each_change_gives_another_number(recorders: ModuleType) -> None:
    slot = words(layout.SLOT_WORDS)
    numbers = []
    for _ in range(3):
        recorders.begin_change(slot)
        recorders.end_change(slot)
        numbers.append(slot.cast("Q")[layout.CHANGE])
    assert numbers == [2, 4, 6]
    slot.cast("Q")[layout.CHANGE] = 2**64 - 2
    recorders.begin_change(slot)
    recorders.end_change(slot)
    assert slot.cast("Q")[layout.CHANGE] == 0


def test_a_snapshot_is_discarded_if_the_slot_changed_during_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    from nnfmq.observe import _pyrecorder

    numbers = iter([4, 6])
    monkeypatch.setattr(_pyrecorder, "_change_of", lambda _view: next(numbers))
    assert _pyrecorder.snapshot(words(layout.SLOT_WORDS)) is None
