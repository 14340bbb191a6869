"""Whose turn is next: the rule alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from nnfmq.base.memory import Memory
from nnfmq.driver.execution.turns import (
    CREDIT_NS,
    DUE_WITHOUT_DEADLINE_NS,
    LEAD_NS,
    CorePage,
    CoreShares,
    CoreTurns,
    Waiter,
    begin_user_ns,
    next_turn,
    wait_limit_ns,
)

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


@pytest.mark.parametrize("clients", [1, 2, 10])
def test_a_user_with_many_clients_gets_no_more_time_than_one_with_one(clients: int) -> None:
    """Ann's clients always wait for the only core. Ben's client comes again when the next execution was chosen."""
    ann, ben, run_ns = 1, 2, 10 * MS
    user_ns, client_ns, arrived = {ann: 0, ben: 0}, [0] * (clients + 1), [0] * (clients + 1)
    now_ns, min_ns, ben_waits = 0, 0, True
    for _ in range(5000):
        users = dict.fromkeys(range(clients), ann) | ({clients: ben} if ben_waits else {})
        chosen = next_turn(
            [
                Waiter(slot, arrived[slot] + 100 * MS, False, client_ns[slot], run_ns, 2, user, user_ns[user])
                for slot, user in users.items()
            ],
            now_ns,
        )
        now_ns += run_ns
        min_ns = max(min_ns, min(user_ns[user] for user in users.values()))
        user_ns[chosen.user] += run_ns
        client_ns[chosen.slot] += run_ns
        arrived[chosen.slot] = now_ns
        if not ben_waits:
            user_ns[ben] = begin_user_ns(user_ns[ben], max(min_ns, user_ns[ann]))
        ben_waits = chosen.slot != clients
    assert 0.45 * now_ns < client_ns[clients] <= now_ns / 2 + LEAD_NS
    assert max(client_ns[:clients]) - min(client_ns[:clients]) <= LEAD_NS + run_ns


def test_a_user_who_needed_no_core_has_little_credit() -> None:
    assert begin_user_ns(0, 10**12) == 10**12 - CREDIT_NS
    assert begin_user_ns(10**12 + 5, 10**12) == 10**12 + 5


@pytest.fixture
def shares() -> Iterator[CoreShares]:
    with CoreShares(3) as made:
        for slot, uid in ((1, 1001), (2, 1002), (3, 1001)):
            made.set_user(slot, uid)
        yield made


def turns_of(shares: CoreShares, slot: int, resources: ExitStack) -> CoreTurns:
    """Return a worker's side, in this process."""
    memory = resources.enter_context(Memory.adopt(os.dup(shares.memory.fileno())))
    return CoreTurns(memory, slot, os.getppid())


def test_long_executions_of_several_users_take_turns_and_are_charged_to_both_users(
    shares: CoreShares, resources: ExitStack
) -> None:
    ann, ben, second = (turns_of(shares, slot, resources) for slot in (1, 2, 3))
    ann.begin(5 * MS)
    assert (ben.are_taken, second.are_taken) == (True, False)
    ann.release()
    page = CorePage(shares.memory)
    charged, bens = page.user_ns[1], page.user_ns[2]
    assert charged > 0 == bens
    second.begin(5 * MS)
    second.release()
    assert page.user_ns[1] > charged
    page.user_ns[1] = 10**11
    ann.begin(5 * MS)
    ben.begin(5 * MS)
    assert page.user_ns[2] == 10**11 - CREDIT_NS
    page.release()


def test_a_number_is_another_users_when_all_clients_of_a_user_have_left(shares: CoreShares) -> None:
    page = CorePage(shares.memory)
    assert bytes(page.users[:3]) == bytes([1, 2, 1])
    shares.release(1)
    shares.set_user(1, 1003)
    assert bytes(page.users[:3]) == bytes([3, 2, 1])
    shares.release(3)
    shares.set_user(3, 1004)
    assert bytes(page.users[:3]) == bytes([3, 2, 1])
    page.release()
