"""The attribution on synthetic records: each cause from its evidence alone, each pair of them, and none without it.

Expected parts of the excess are computed by hand from the records.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Any

import pytest

from nnfmq.lab.stress.attribution import (
    SlowRequest,
    Thresholds,
    largest_part,
    named_causes,
    slow_requests,
    worst_requests,
)
from nnfmq.lab.stress.records import DISTURBANCES, RequestRecord, StressSample
from nnfmq.observe.causes import CAUSES, Cause

MS = 1_000_000
P50 = 10_000
SLOW_AT = 1_000 * MS
USUAL = [RequestRecord(number * MS, P50, client_cpu=8_000, worker_cpu=6_000) for number in range(100)]
ALL_USED = {"client_cpu": 8_000, "worker_cpu": 6_000}


def slow(latency_ms: float, **counters: int) -> RequestRecord:
    return RequestRecord(SLOW_AT, round(latency_ms * MS), **(ALL_USED | counters))


def samples(end_ms: int, **increase: int) -> list[StressSample]:
    """Return samples every 2 ms from 2 ms before the slow request on; totals increase linearly until `end_ms`."""

    def at(time_ms: int) -> StressSample:
        done = min(max(time_ms, 0), end_ms) / end_ms
        read_at = SLOW_AT + time_ms * MS
        return StressSample(read_at, read_at, **{name: round(total * done) for name, total in increase.items()})

    return [at(time_ms) for time_ms in range(-2, end_ms + 4, 2)]


def causes(record: RequestRecord, seen: list[StressSample] | None = None, **limits: Any) -> dict[str, int]:
    (found,) = slow_requests([*USUAL, record], seen or [], Thresholds(**limits))
    assert found.record is record
    assert sum(cause.explained for cause in found.causes) <= found.excess
    return {cause.name: cause.explained for cause in found.causes}


# ---- one cause


@pytest.mark.parametrize("side", ["client", "worker"])
def test_a_wait_for_a_cpu_is_named_for_the_thread_that_waited(side: str) -> None:
    assert causes(slow(20, **{f"{side}_delay": 18 * MS})) == {f"cpu-{side}": 18 * MS}


def test_a_wait_for_a_cpu_behind_compile_processes_is_a_compilation() -> None:
    seen = samples(20, compiling=18 * MS, compiling_client=18 * MS)
    assert causes(slow(20, client_delay=16 * MS), seen) == {"compilation": 16 * MS}


def test_two_waits_that_are_longer_than_the_request_explain_its_excess_once() -> None:
    found = causes(slow(20, client_delay=15 * MS, worker_delay=15 * MS))
    assert found == {"cpu-client": 15 * MS, "cpu-worker": 5 * MS - P50}


def test_compile_processes_on_another_cpu_explain_nothing() -> None:
    seen = samples(20, compiling=18 * MS, compiling_worker=18 * MS)
    assert causes(slow(20, client_delay=16 * MS), seen) == {"cpu-client": 16 * MS}


def test_compile_processes_explain_no_more_than_their_cpu_time() -> None:
    seen = samples(20, compiling=6 * MS, compiling_client=6 * MS)
    assert causes(slow(20, client_delay=16 * MS), seen) == {"cpu-client": 10 * MS, "compilation": 6 * MS}


def test_a_compilation_while_nobody_waited_is_no_cause() -> None:
    assert causes(slow(20), samples(20, compiling=18 * MS, compiling_client=18 * MS)) == {}


@pytest.mark.parametrize("side", ["client", "worker"])
def test_throttled_time_is_a_cpu_limit_and_not_a_wait_for_other_tasks(side: str) -> None:
    seen = samples(40, **{f"{side}_throttled": 36 * MS})
    assert causes(slow(40, **{f"{side}_delay": 37 * MS}), seen) == {"throttling": 36 * MS}


@pytest.mark.parametrize("side", ["client", "worker"])
def test_throttled_time_in_which_nobody_waited_explains_nothing(side: str) -> None:
    """The samples are further apart than the request is long: the group was throttled before it, or idle."""
    seen = samples(40, **{f"{side}_throttled": 36 * MS})
    assert causes(slow(20, client_cpu=19 * MS, gc=18 * MS), seen) == {"gc": 18 * MS}
    assert causes(slow(20, gc=10 * MS, **{f"{side}_delay": 9 * MS}), seen) == {"gc": 10 * MS, "throttling": 9 * MS}


@pytest.mark.parametrize("side", ["client", "worker"])
def test_time_in_state_t_is_a_stop(side: str) -> None:
    """Samples from 4 to 24 ms see state T, the one at 26 ms does not: 22 ms."""
    seen = [
        sample._replace(**{f"{side}_stop": "stopped" if 4 * MS <= sample.time - SLOW_AT <= 24 * MS else ""})
        for sample in samples(30)
    ]
    assert causes(slow(30), seen) == {"stops": 22 * MS}


def test_a_request_that_was_sent_late_is_behind_the_one_before() -> None:
    assert causes(slow(20, late=15 * MS)) == {"backlog": 15 * MS}


def test_what_delayed_a_request_before_it_was_sent_is_named_and_not_the_backlog() -> None:
    seen = [sample._replace(worker_stop="stopped") for sample in samples(20)]
    assert causes(slow(20, late=15 * MS), seen) == {"stops": round(20 * MS - P50)}


def test_a_wait_for_a_cpu_says_who_had_it() -> None:
    (found,) = slow_requests(
        [*USUAL, slow(20, worker_delay=18 * MS)],
        [],
        None,
        lambda side, record, waited: (f"{side}: {waited // MS} of {len(record)}", 0),
    )
    assert found.causes[0].evidence.endswith(f"(schedstat); worker: 18 of {len(RequestRecord._fields)}")


def test_what_the_measurement_took_itself_is_a_cause_of_the_request_and_none_of_the_load() -> None:
    """It had the client's CPU for 9 of the 18 ms, and the worker's for more than that waited."""
    record = slow(40, client_delay=18 * MS, worker_delay=12 * MS)
    found = slow_requests(
        [*USUAL, record], [], None, lambda side, _record, _waited: ("", 9 * MS if side == "client" else 20 * MS)
    )
    assert {cause.name: cause.explained for cause in found[0].causes} == {"measurement": 21 * MS, "cpu-client": 9 * MS}
    assert named_causes(found * 2) == {"cpu-client": 18 * MS}


@pytest.mark.parametrize(
    ("how", "words"), [("stopped", "by a signal"), ("traced", "by a debugger"), ("frozen", "group")]
)
def test_a_stop_says_what_stopped_the_process(how: str, words: str) -> None:
    seen = [sample._replace(client_stop=how) for sample in samples(20)]
    (found,) = slow_requests([*USUAL, slow(20)], seen)
    assert words in found.causes[0].evidence


def test_a_stop_counts_only_within_the_request() -> None:
    seen = [sample._replace(worker_stop="stopped") for sample in samples(10)]
    assert causes(slow(9), seen) == {"stops": 9 * MS - P50}


def test_time_in_the_garbage_collector_is_named() -> None:
    assert causes(slow(30, client_cpu=29 * MS, gc=28 * MS)) == {"gc": 28 * MS}


def test_the_collectors_cpu_time_is_not_explained_twice() -> None:
    """1,000 minor faults of a collection that freed and took memory: its CPU time is all in the collector."""
    found = causes(slow(30, client_cpu=28 * MS, client_system=20 * MS, client_minor_faults=1000, gc=28 * MS))
    assert found == {"gc": 28 * MS}


def test_faults_explain_the_system_time_of_more_cpu_time_than_usual() -> None:
    record = slow(16, client_cpu=15 * MS + 8_000, client_system=12 * MS, client_minor_faults=17)
    assert causes(record) == {"page-faults": 12 * MS}


def test_many_small_faults_of_the_worker_explain_a_quarter_of_a_microsecond_each() -> None:
    record = slow(10, worker_cpu=9 * MS, worker_minor_faults=20_000)
    assert causes(record) == {"page-faults": 5 * MS}


def test_faults_explain_no_more_than_the_additional_cpu_time() -> None:
    record = slow(10, client_cpu=3 * MS + 8_000, client_system=9 * MS, client_minor_faults=20_000)
    assert causes(record) == {"page-faults": 3 * MS}


def test_a_few_faults_are_no_cause() -> None:
    assert causes(slow(16, client_cpu=15 * MS, client_system=12 * MS, client_minor_faults=15)) == {}


@pytest.mark.parametrize("side", ["client", "worker"])
def test_major_faults_explain_time_off_the_cpu(side: str) -> None:
    """The client is on the CPU for 8 µs of 30 ms, or waits for the worker, which is on the CPU for 6 µs."""
    used = {"client": 8_000, "worker": 6_000}[side]
    record = slow(30, **{f"{side}_major_faults": 3})
    assert causes(record) == {"memory": min(30 * MS - used, 30 * MS - P50)}


def test_stalls_for_memory_without_major_faults_explain_their_own_time() -> None:
    assert causes(slow(30), samples(30, memory_stall=12 * MS)) == {"memory": 12 * MS}


def test_a_short_stall_of_some_task_of_the_machine_is_no_cause() -> None:
    assert causes(slow(30), samples(30, memory_stall=2 * MS)) == {}


def test_major_faults_explain_only_what_nothing_else_explains() -> None:
    record = slow(30, client_delay=25 * MS, client_major_faults=1)
    assert causes(record, share=0.1) == {"cpu-client": 25 * MS, "memory": 5 * MS - P50}


# ---- pairs

EVIDENCE: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "cpu-client": ({"client_delay": 20 * MS}, {}),
    "cpu-worker": ({"worker_delay": 20 * MS}, {}),
    "memory": ({}, {"memory_stall": 20 * MS}),
    "throttling": ({"worker_delay": 20 * MS}, {"worker_throttled": 20 * MS}),
    "gc": ({"gc": 20 * MS, "client_cpu": 20 * MS}, {}),
    "page-faults": ({"worker_minor_faults": 80_000, "worker_cpu": 21 * MS}, {}),
    "stops": ({}, {}),
}
"""Name → counters, and increases that the sampler saw, of 20 ms."""


@pytest.mark.parametrize("pair", list(combinations(EVIDENCE, 2)), ids="+".join)
def test_two_causes_of_one_request_are_both_named(pair: tuple[str, str]) -> None:
    counters = Counter(EVIDENCE[pair[0]][0]) + Counter(EVIDENCE[pair[1]][0])
    seen = samples(41, **{name: value for cause in pair for name, value in EVIDENCE[cause][1].items()})
    if "stops" in pair:
        seen = [sample._replace(client_stop="stopped" if sample.time < SLOW_AT + 19 * MS else "") for sample in seen]
    found = causes(slow(41, **counters), seen)
    assert set(found) == set(pair)
    assert sum(found.values()) <= 41 * MS


# ---- no cause


def test_a_slow_request_without_evidence_has_no_cause() -> None:
    assert causes(slow(50), samples(50)) == {}


def test_a_cause_below_a_fifth_of_the_excess_is_not_named() -> None:
    assert causes(slow(50, client_delay=9 * MS)) == {}
    assert causes(slow(50, client_delay=10 * MS)) == {"cpu-client": 10 * MS}


def test_samples_that_end_before_the_request_are_no_evidence() -> None:
    early, late = SLOW_AT - MS, SLOW_AT - 1
    assert causes(slow(50), [StressSample(early, early), StressSample(late, late, memory_stall=40 * MS)]) == {}


def test_a_sample_whose_reading_took_long_is_before_or_after_a_request_only_as_a_whole() -> None:
    """The second sample began before the request, the third one before its end: what they read may be of either."""
    end = SLOW_AT + 20 * MS
    seen = [
        StressSample(SLOW_AT - 3 * MS, SLOW_AT - 2 * MS),
        StressSample(SLOW_AT - MS, SLOW_AT + MS, compiling=4 * MS, compiling_client=4 * MS),
        StressSample(end - MS, end + MS, compiling=10 * MS, compiling_client=10 * MS),
        StressSample(end + 2 * MS, end + 3 * MS, compiling=16 * MS, compiling_client=16 * MS),
    ]
    assert causes(slow(20, client_delay=16 * MS), seen) == {"compilation": 16 * MS}


@pytest.mark.parametrize("latency_ms", [0.029, 2.009])
def test_a_request_below_the_factor_or_the_amount_is_not_slow(latency_ms: float) -> None:
    assert slow_requests([*USUAL, slow(latency_ms, client_delay=2 * MS)], []) == []


def test_a_slow_model_needs_the_factor_as_well() -> None:
    usual = [record._replace(latency=10 * MS) for record in USUAL]
    assert slow_requests([*usual, slow(30, client_delay=20 * MS)], []) == []
    assert len(slow_requests([*usual, slow(30.1, client_delay=20 * MS)], [])) == 1


def test_a_disturbance_of_most_requests_does_not_become_usual() -> None:
    disturbed = [slow(20, client_delay=18 * MS)] * 80
    assert len(slow_requests([*USUAL[:20], *disturbed], [])) == 80


def test_no_requests_have_no_slow_ones() -> None:
    assert slow_requests([], samples(10)) == []


# ---- the causes of a load, and its worst requests


def request(latency_ms: float, **explained_ms: float) -> SlowRequest:
    """Return a slow request; `_` in the names of causes is `-`."""
    parts = tuple(Cause(name.replace("_", "-"), round(time * MS), "") for name, time in explained_ms.items())
    return SlowRequest(slow(latency_ms), round(latency_ms * MS), parts, parts)


def test_the_causes_of_a_load_are_those_with_a_part_of_its_excess() -> None:
    """3 % of 1,000 ms are less than a thirtieth, 4 % are more."""
    found = named_causes([request(600, gc=600), request(400, stops=40), request(0.1, cpu_client=30)])
    assert found == {"gc": 600 * MS, "stops": 40 * MS}


def test_a_small_part_of_each_of_many_requests_is_a_cause_of_the_load() -> None:
    """Each of ten requests was throttled for 40 ms, and spent 5 of its 46 ms in the collector: no fifth of it."""
    records = [slow(46, client_delay=40 * MS, client_cpu=6 * MS, gc=5 * MS) for _ in range(10)]
    found = slow_requests([*USUAL, *records], samples(46, client_throttled=40 * MS))
    assert {cause.name for request in found for cause in request.causes} == {"throttling"}
    assert named_causes(found) == {"throttling": 400 * MS, "gc": 50 * MS}
    assert largest_part(found, "gc").explained == 5 * MS


def test_a_cause_of_less_than_10_ms_is_none_of_the_load() -> None:
    assert named_causes([request(5, cpu_client=5), request(4.9, cpu_client=4.9)]) == {}
    assert named_causes([request(5, cpu_client=5), request(5, cpu_client=5)]) == {"cpu-client": 10 * MS}


def test_an_undisturbed_load_has_no_cause() -> None:
    assert named_causes(slow_requests(USUAL, [])) == {}


def test_the_worst_requests_have_one_of_each_cause_and_of_none() -> None:
    found = [request(50, gc=50), request(40, gc=40), request(9, stops=9), request(8), request(30, gc=30)]
    assert [each.record.latency // MS for each in worst_requests(found, 4)] == [50, 40, 9, 8]
    assert [each.record.latency // MS for each in worst_requests(found, 2)] == [50, 9]
    assert worst_requests([], 3) == []


def test_every_cause_that_is_named_has_a_description() -> None:
    assert {*EVIDENCE, "compilation"} == set(DISTURBANCES)
    assert set(DISTURBANCES) < set(CAUSES)
