"""Turns of compile processes among clients: the rules of `nnfmq.driver.compilation.process_queue`, at given times."""

from __future__ import annotations

from collections import Counter

import pytest

from nnfmq.driver.compilation.process_queue import OVERRUN_NS, TURN_NS, Claim, ProcessQueue


def add(queue: ProcessQueue, client: int, count: int = 1, *, uid: int = 0, background: bool = False) -> list[Claim]:
    claims = [Claim(client, uid, background) for _ in range(count)]
    for claim in claims:
        queue.add(claim)
    return claims


def start_all(queue: ProcessQueue, now_ns: int = 0) -> list[Claim]:
    started = []
    while (claim := queue.start_next(now_ns)) is not None:
        started.append(claim)
    return started


def clients(claims: list[Claim]) -> list[int]:
    return [claim.client for claim in claims]


def test_no_more_processes_start_than_there_are_places() -> None:
    queue = ProcessQueue(3)
    add(queue, 1, 24)
    started = start_all(queue)
    assert len(started) == 3
    assert queue.end_next(10 * TURN_NS) is None  # all are of one client
    queue.remove(started[0])
    assert len(start_all(queue)) == 1


def test_places_go_to_the_clients_in_turns_whatever_they_ask_for() -> None:
    queue = ProcessQueue(4)
    add(queue, 1, 24)
    add(queue, 2, 2)
    add(queue, 3, 1)
    assert clients(start_all(queue)) == [1, 2, 3, 1]


def test_places_go_to_the_uids_in_turns_first() -> None:
    queue = ProcessQueue(4)
    for client in (1, 2, 3):
        add(queue, client, 2, uid=1000)
    add(queue, 4, 2, uid=1001)
    assert Counter(claim.uid for claim in start_all(queue)) == {1000: 2, 1001: 2}


def test_a_client_that_has_not_had_a_place_for_longest_is_first() -> None:
    queue = ProcessQueue(1)
    for client in (1, 2, 3):
        add(queue, client, 2)
    order = []
    for _ in range(6):
        (started,) = start_all(queue)
        order.append(started.client)
        queue.remove(started)
    assert order == [1, 2, 3, 1, 2, 3]


def test_a_caller_that_waits_is_served_before_the_same_clients_background() -> None:
    queue = ProcessQueue(1)
    add(queue, 1, background=True)
    foreground = add(queue, 1)
    assert start_all(queue) == foreground


def test_a_process_of_the_client_that_has_most_ends_after_its_turn() -> None:
    queue = ProcessQueue(2)
    add(queue, 1, 8)
    first, _ = start_all(queue)
    (neighbour,) = add(queue, 2)
    assert queue.end_next(TURN_NS - 1) is None
    assert queue.next_change_ns(TURN_NS - 1) == TURN_NS
    assert queue.end_next(TURN_NS) is first
    assert queue.end_next(TURN_NS) is None  # its place is promised, and then each has one
    queue.remove(first)
    assert start_all(queue, TURN_NS) == [neighbour]


def test_clients_of_a_single_place_take_turns() -> None:
    queue = ProcessQueue(1)
    add(queue, 1, 2)
    add(queue, 2, 2)
    now_ns, order = 0, []
    for _ in range(4):
        (running,) = start_all(queue, now_ns)
        order.append(running.client)
        now_ns += TURN_NS
        assert queue.end_next(now_ns) is running
        queue.remove(running)
        add(queue, running.client)  # for what it has not compiled
    assert order == [1, 2, 1, 2]


def test_a_background_process_ends_at_once_for_a_caller_that_waits() -> None:
    queue = ProcessQueue(1)
    (background,) = add(queue, 1, background=True)
    start_all(queue)
    add(queue, 2, background=True)
    assert queue.end_next(0) is None
    add(queue, 2)
    assert queue.end_next(0) is background


def test_a_process_that_does_not_end_does_not_delay_others() -> None:
    queue = ProcessQueue(1)
    add(queue, 1)
    (stuck,) = start_all(queue)
    neighbours = add(queue, 2, 2)
    assert queue.end_next(TURN_NS) is stuck
    assert start_all(queue, TURN_NS + OVERRUN_NS - 1) == []
    assert queue.next_change_ns(TURN_NS) == TURN_NS + OVERRUN_NS
    assert start_all(queue, TURN_NS + OVERRUN_NS) == neighbours[:1]


@pytest.mark.parametrize("places", [1, 2, 5])
def test_there_are_never_more_than_twice_as_many_processes_as_places(places: int) -> None:
    queue = ProcessQueue(places)
    for client in range(1, 20):
        add(queue, client, 3)
    now_ns, started = 0, 0
    for _ in range(200):
        started += len(start_all(queue, now_ns))
        while queue.end_next(now_ns) is not None:
            pass
        now_ns += OVERRUN_NS  # and none ends
    assert started == 2 * places


def test_a_client_that_has_left_is_forgotten() -> None:
    queue = ProcessQueue(1)
    (claim,) = add(queue, 1)
    start_all(queue)
    queue.remove(claim)
    assert queue._last_start == {}
    assert queue.next_change_ns(0) is None
