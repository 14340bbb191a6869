"""Every schedule of a writer and a reader, one shared-memory step at a time: the Python core keeps its promises in all.

No record is lost, torn, repeated or out of order, no wake-up is lost, every wait ends, also when a side dies at any of
its steps. With accesses in order, then with delayed and reordered stores.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from support.explorer.models import Model
from support.explorer.program import Violation
from support.explorer.scenarios import (
    dying,
    flags,
    given_up,
    overwriting,
    ping_pong,
    sharing_a_word,
    streaming,
    trying,
    until_deadline,
    waiting_on_a_dead_peer,
)
from support.explorer.search import Report, Scenario, explore
from support.explorer.seeded_bugs import BEGIN_WITHOUT_RESERVATION, WRITE_WITHOUT_RESERVATION

Explored = Callable[[Scenario, Model], Report]

MOST_STEPS_AFTER_DEATH = 20  # of the survivor, from the flag to its end: one pass through its longest loop

SMALL = [
    trying(3, 4, 1),
    trying(4, 4, 2),
    trying(2, 3, 3, start=2, batch=2),
    trying(3, 4, 2, in_place=True),
    trying(2, 3, 3, in_place=True, start=2, batch=2),
    streaming([1, 1], 1),
    streaming([1, 1, 1], 2),
    streaming([1, 1, 1], 2, start=5),
    streaming([2, 1, 1], 3, read=[1, 3]),
    streaming([2, 2], 3, read=[1, 1, 1, 1]),
    streaming([1, 1], 2, how="send", window_ns=0),
    streaming([1, 1, 1], 3, how="send", window_ns=2, quantum=1),
    streaming([1, 2], 2, window_ns=1),
    streaming([1, 1], 1, signals=1),
    streaming([1, 1], 1, atomics="kernel"),
    streaming([1, 1], 2, how="send", is_async=True),
    streaming([1, 1, 1], 1, quantum=1, is_async=True),
    streaming([2, 1, 1], 3, read=[1, 3], quantum=1, is_async=True),
    streaming([1, 1], 1, atomics="kernel", quantum=1, is_async=True),
    ping_pong(2),
    ping_pong(1, window_ns=2),
    until_deadline(2, 2, quantum=1),
    sharing_a_word(1),
    flags([1, 2], times=2),
    flags([1, 2, 4]),
    flags([1, 2, 4], "kernel"),
]
DEATHS = [
    dying("writer", [1, 1], 1),
    dying("writer", [1, 1], 2, how="send", window_ns=1, quantum=1),
    dying("reader", [1, 1], 1),
    dying("reader", [2, 1], 2, window_ns=0, quantum=1),
    dying("writer", [1, 1], 1, quantum=1, is_async=True),
    dying("writer", [1], 1, quantum=1, is_async=True, written=[], rounds=1),
    waiting_on_a_dead_peer(),
    waiting_on_a_dead_peer(atomics="kernel"),
]
REORDERED = [
    trying(3, 3, 2),
    trying(2, 3, 2, in_place=True),
    streaming([1, 1], 1),
    streaming([1, 1], 2, how="send", window_ns=0),
    streaming([1, 1, 1], 1, quantum=1),
    streaming([2, 1], 2, quantum=1, start=1),
    streaming([1, 1], 1, atomics="kernel", quantum=1),
    streaming([1, 1], 2, how="send", quantum=1, is_async=True),
    ping_pong(2),
    sharing_a_word(1),
    flags([1, 2], times=2),
    dying("writer", [1], 1, quantum=1),
    dying("reader", [1, 1], 1, quantum=1, rounds=1),
]
OVERWRITING = [
    overwriting([1] * 4, 3, 2),
    overwriting([1] * 4, 3, 2, in_place=True),
    overwriting([1] * 5, 3, 3, history=1),
    overwriting([2, 2], 3, 3),
]
AS_LIBFMQ_WRITES = [
    overwriting([1] * 4, 3, 2, margin=1),
    overwriting([1] * 4, 3, 2, margin=1, in_place=True),
    overwriting([2, 2], 3, 3, margin=2),
]
TIMED_SLEEPS = [
    streaming([1, 1], 2, how="send", window_ns=2, sleeps_first=True),
    ping_pong(1, window_ns=2, sleeps_first=True),
]
TIMED_SLEEP_DEATH = dying("writer", [1, 1], 2, how="send", window_ns=2, quantum=1, sleeps_first=True)
AS_LIBFMQ = (WRITE_WITHOUT_RESERVATION, BEGIN_WITHOUT_RESERVATION)
LARGE = [
    trying(5, 5, 3, in_place=True),
    streaming([1, 1, 1, 1], 1),
    streaming([1, 1, 1, 1], 2),
    streaming([1, 1, 1, 1], 3),
    streaming([2, 1, 2, 2], 3, read=[1, 2, 2, 2]),
    streaming([1, 1, 1], 2, signals=2),
    streaming([1, 1, 1], 2, atomics="kernel"),
    streaming([1, 1, 1, 1], 4, how="send", window_ns=3),
    ping_pong(3),
    sharing_a_word(2, 2),
    flags([1, 2, 4], times=2),
    until_deadline(3, 3),
    dying("writer", [1, 1], 1),
    dying("reader", [1, 1], 1),
    dying("writer", [1, 1, 1], 2),
    dying("reader", [1, 1, 1], 2),
    given_up([1, 1], 2),
    given_up([1, 1], 2, window_ns=1),
    given_up([1, 1], 2, window_ns=2, sleeps_first=True),
]


def name(case: Scenario | Model) -> str:
    return case.value if isinstance(case, Model) else case.name


@pytest.mark.parametrize("scenario", SMALL, ids=name)
def test_no_schedule_loses_tears_repeats_or_hangs(scenario: Scenario, explored: Explored) -> None:
    assert explored(scenario, Model.SEQUENTIAL).states > 100


@pytest.mark.parametrize("scenario", DEATHS, ids=name)
def test_a_death_at_any_step_ends_every_wait(scenario: Scenario, explored: Explored) -> None:
    report = explored(scenario, Model.SEQUENTIAL)
    assert report.steps_after_death is not None
    assert 0 < report.steps_after_death < MOST_STEPS_AFTER_DEATH


@pytest.mark.parametrize("victim", ["writer", "reader"])
def test_one_round_of_the_watcher_is_enough(victim: str, explored: Explored) -> None:
    assert explored(dying(victim, [1, 1], 1, rounds=1, quantum=1), Model.SEQUENTIAL).schedules is not None


def test_a_living_peer_that_is_reported_dead_corrupts_nothing(explored: Explored) -> None:
    explored(given_up([1, 1], 2), Model.SEQUENTIAL)


@pytest.mark.parametrize("model", [Model.TSO, Model.WEAK], ids=name)
@pytest.mark.parametrize("scenario", REORDERED, ids=name)
def test_delayed_and_reordered_stores_change_nothing(scenario: Scenario, model: Model, explored: Explored) -> None:
    explored(scenario, model)


@pytest.mark.parametrize("model", [Model.SEQUENTIAL, Model.TSO], ids=name)
@pytest.mark.parametrize("scenario", OVERWRITING, ids=name)
def test_an_unsynchronized_reader_gets_whole_records_even_a_whole_ring_behind(
    scenario: Scenario, model: Model, explored: Explored
) -> None:
    explored(scenario, model)


@pytest.mark.parametrize("model", [Model.SEQUENTIAL, Model.TSO], ids=name)
@pytest.mark.parametrize("scenario", AS_LIBFMQ_WRITES, ids=name)
def test_a_reader_far_enough_from_libfmqs_writer_gets_whole_records(scenario: Scenario, model: Model) -> None:
    explore(scenario, model, AS_LIBFMQ)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_reader_a_whole_ring_behind_libfmqs_writer_may_get_a_torn_record(in_place: bool) -> None:
    # It changes the bytes before it moves its counter, so that the look after the copy comes too early.
    with pytest.raises(Violation, match="no later one"):
        explore(overwriting([1] * 4, 3, 2, in_place=in_place), Model.SEQUENTIAL, AS_LIBFMQ)


@pytest.mark.parametrize(
    ("scenario", "model"),
    [
        *product(TIMED_SLEEPS, (Model.SEQUENTIAL, Model.TSO)),
        (TIMED_SLEEP_DEATH, Model.SEQUENTIAL),
        pytest.param(TIMED_SLEEP_DEATH, Model.TSO, marks=pytest.mark.deep),
    ],
    ids=name,
)
def test_a_timed_sleep_before_the_expected_record_loses_nothing(
    scenario: Scenario, model: Model, explored: Explored
) -> None:
    explored(scenario, model)


def test_a_writer_and_a_reader_that_want_more_together_than_the_ring_holds_may_wait_for_each_other() -> None:
    # All or nothing, as in libfmq: with 2 of 3 records there, a read of 3 and a write of 3 both have to wait.
    with pytest.raises(Violation, match=r"nothing can end this: writer sleeps .* reader sleeps"):
        explore(streaming([2, 1, 3], 3, read=[1, 3, 2]), Model.SEQUENTIAL)


@pytest.mark.deep
@pytest.mark.parametrize("model", Model, ids=name)
@pytest.mark.parametrize("scenario", LARGE, ids=name)
def test_larger_rings_and_longer_streams(scenario: Scenario, model: Model, explored: Explored) -> None:
    explored(scenario, model)
