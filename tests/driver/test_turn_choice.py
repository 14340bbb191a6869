"""Whose turn is next: the rule alone."""

from __future__ import annotations

from nnfmq.driver.execution.turns import DUE_WITHOUT_DEADLINE_NS, LEAD_NS, Waiter, next_turn, wait_limit_ns

MS = 1_000_000
NOW = 10**12


def waiter(
    slot: int, due_ms: int = 50, *, has_deadline: bool = True, used_ms: int = 0, run_ms: int = 5, kind: int = 2
) -> Waiter:
    return Waiter(slot, NOW + due_ms * MS, has_deadline, used_ms * MS, run_ms * MS, kind)


def order(*waiters: Waiter) -> list[int]:
    """Return the slots in the order of their turns, if nobody else comes and no time passes."""
    left, slots = list(waiters), []
    while left:
        left.remove(chosen := next_turn(left, NOW))
        slots.append(chosen.slot)
    return slots


def test_the_earliest_deadline_is_first() -> None:
    assert order(waiter(1, 30), waiter(2, 10), waiter(3, 20)) == [2, 3, 1]


def test_clients_of_a_higher_class_are_first_and_deadlines_decide_inside_a_class() -> None:
    batch = (waiter(1, 10, kind=1), waiter(2, 5, kind=1))
    interactive = (waiter(3, 30, has_deadline=False, used_ms=500, kind=3), waiter(4, 20, used_ms=500, kind=3))
    assert order(*batch, waiter(5, 90), *interactive) == [4, 3, 5, 2, 1]


def test_one_that_can_no_longer_meet_its_deadline_is_last() -> None:
    assert order(waiter(1, 4), waiter(2, 30), waiter(3, 6)) == [3, 2, 1]


def test_work_without_a_deadline_goes_before_all_that_is_due_later_and_is_never_too_late() -> None:
    unlimited = waiter(1, DUE_WITHOUT_DEADLINE_NS // MS, has_deadline=False)
    assert order(waiter(2, 99), unlimited, waiter(3, 101)) == [2, 1, 3]
    assert order(waiter(2, 10), waiter(1, -1, has_deadline=False)) == [1, 2]


def test_a_client_that_is_ahead_by_more_than_the_lead_waits_whatever_its_deadline_is() -> None:
    lead_ms = LEAD_NS // MS
    assert order(waiter(1, 10, used_ms=100 + lead_ms), waiter(2, 40, used_ms=100)) == [1, 2]
    assert order(waiter(1, 10, used_ms=101 + lead_ms), waiter(2, 40, used_ms=100)) == [2, 1]


def test_clients_that_always_wait_get_equal_times_if_one_has_shorter_deadlines_or_longer_runs() -> None:
    used = {1: 0, 2: 0, 3: 0}
    runs, dues = {1: 20, 2: 5, 3: 5}, {1: 50, 2: 50, 3: 10_000}
    for _ in range(2000):
        waiters = [waiter(slot, dues[slot], used_ms=used[slot], run_ms=runs[slot]) for slot in used]
        slot = next_turn(waiters, NOW).slot
        used[slot] += runs[slot]
    assert max(used.values()) - min(used.values()) <= LEAD_NS // MS + max(runs.values())


def test_the_limit_of_a_wait_is_the_time_that_equal_shares_would_take() -> None:
    assert wait_limit_ns(8 * MS, 4, 2) == 1 * MS + 20 * MS
    assert wait_limit_ns(0, 64, 1) == 1 * MS
