"""The explorer is worth what it finds: each of these changes to the algorithm is found, and found for its reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.explorer import seeded_bugs
from support.explorer.instrumented_runtime import SeededBug
from support.explorer.models import Model
from support.explorer.program import Violation
from support.explorer.scenarios import dying, flags, overwriting, streaming, waiting_on_a_dead_peer
from support.explorer.search import Scenario, explore

from nnfmq.base.watcher import DeathRecipients

WRONG_DATA = "came"
NO_END = "nothing can end this"
SENT = streaming([1, 1], 2, how="send", window_ns=0)
STREAMED = streaming([1, 1], 1)
TIMED_SLEEP = streaming([1, 1], 2, how="send", window_ns=2, sleeps_first=True)
ASYNC = streaming([1, 1], 2, how="send", is_async=True)


def found(scenario: Scenario, model: Model, *seeded: SeededBug) -> Violation:
    with pytest.raises(Violation) as caught:
        explore(scenario, model, seeded)
    return caught.value


def wake_then_raise(peer: DeathRecipients) -> None:
    peer.wake()
    peer.flag.set()


@pytest.mark.parametrize(
    ("bug", "scenario", "why"),
    [
        (seeded_bugs.PUBLISH_BEFORE_PAYLOAD, SENT, WRONG_DATA),
        (seeded_bugs.READ_COUNTER_BEFORE_COPY, STREAMED, WRONG_DATA),
        (seeded_bugs.WRITE_INTO_A_FULL_RING, STREAMED, WRONG_DATA),
        (seeded_bugs.NO_SECOND_CHECK, SENT, NO_END),
        (seeded_bugs.BIT_CLEARED_AFTER_THE_CHECK, ASYNC, NO_END),
        (seeded_bugs.BIT_CLEARED_AFTER_THE_CHECK, dying("writer", [1], 1, is_async=True, written=[], rounds=1), NO_END),
        (seeded_bugs.SLEEP_ON_ANY_VALUE, SENT, NO_END),
        (seeded_bugs.EVENT_FLAG_SLEEPS_ON_ANY_VALUE, flags([1]), NO_END),
        (seeded_bugs.WAKE_ONLY_IF_ALL_WERE_SET, SENT, NO_END),
        (seeded_bugs.WAKE_BEFORE_WRITE, SENT, NO_END),
        (seeded_bugs.KERNEL_CLEARS_UNSEEN_BITS, flags([1], "kernel"), NO_END),
        (seeded_bugs.FLAG_CHECKED_BEFORE_CLEARING_BITS_ONLY, dying("writer", [1], 1, written=[], rounds=1), NO_END),
        (seeded_bugs.TIMED_SLEEP_ONLY, TIMED_SLEEP, "came None"),
        (seeded_bugs.RESERVED_AFTER_THE_BYTES, overwriting([1] * 4, 3, 2), "no later one"),
        (seeded_bugs.BITS_USED_BEFORE_THE_FLAG, waiting_on_a_dead_peer(), "which nobody sets"),
    ],
    ids=[
        "publish",
        "read",
        "full",
        "look",
        "async",
        "async_dead",
        "sleep",
        "flag_sleep",
        "wake",
        "early_wake",
        "kernel",
        "dead",
        "nap",
        "announce",
        "bits",
    ],
)
def test_a_fault_in_the_algorithm_is_found(
    bug: SeededBug, scenario: Scenario, why: str, record: Callable[[object], None]
) -> None:
    violation = found(scenario, Model.SEQUENTIAL, bug)
    assert why in violation.what
    assert violation.schedule
    record(f"found after {len(violation.schedule):3} steps: {violation.what[:110]}")


def test_an_event_flag_word_that_is_loaded_and_stored_loses_bits() -> None:
    assert NO_END in found(flags([1, 2], "plain"), Model.SEQUENTIAL).what


def test_a_waiter_misses_a_peer_death_flag_that_is_set_after_the_wake() -> None:
    assert NO_END in found(dying("writer", [1], 1, rounds=1, mark_dead=wake_then_raise), Model.SEQUENTIAL).what


@pytest.mark.parametrize(
    ("bug", "scenario"),
    [
        (seeded_bugs.RECORDS_RELAXED, SENT),
        (seeded_bugs.SPACE_RELAXED, STREAMED),
        (seeded_bugs.RECORDS_NOT_ACQUIRED, SENT),
    ],
    ids=["records", "space", "acquire"],
)
def test_a_relaxed_memory_order_is_found_only_if_stores_are_reordered(bug: SeededBug, scenario: Scenario) -> None:
    explore(scenario, Model.TSO, (bug,))  # x86-64 keeps the order anyway: this is why the Python core may run there
    assert WRONG_DATA in found(scenario, Model.WEAK, bug).what


@pytest.mark.parametrize("model", [Model.TSO, Model.WEAK])
def test_an_event_flag_word_changed_by_plain_accesses_loses_wake_ups_if_stores_are_delayed(model: Model) -> None:
    assert NO_END in found(streaming([1, 1], 2, how="send", window_ns=0, quantum=1, atomics="plain"), model).what


def test_a_violation_reports_its_schedule_step_by_step() -> None:
    schedule = found(SENT, Model.SEQUENTIAL, seeded_bugs.PUBLISH_BEFORE_PAYLOAD).schedule
    assert any(step.startswith("writer: store q0.w") for step in schedule)
    assert schedule[-1].startswith("reader: ")


def test_a_seeded_bug_that_does_not_fit_the_source_fails_with_a_message() -> None:
    with pytest.raises(AssertionError, match="adapt the bug"):
        explore(SENT, Model.SEQUENTIAL, (SeededBug("no such line", ""),))
