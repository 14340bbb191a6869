"""Whose turn it is at the cores: the rule by which the workers of a driver choose among waiting executions.

Each client has a *virtual time*: the time that its executions had the cores. A client that has had more than another
that waits, by more than LEAD_NS, has to wait for it. Among the others the execution that is due first is next. One
without a deadline is due DUE_WITHOUT_DEADLINE_NS after its arrival, so it goes before all that arrive and are due
later. An execution that cannot end before its deadline any more goes after those that can.

Arithmetic only: times are integer nanoseconds, deadlines those of the monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["DUE_WITHOUT_DEADLINE_NS", "LEAD_NS", "Waiter", "next_turn", "wait_limit_ns"]

LEAD_NS = 50_000_000
DUE_WITHOUT_DEADLINE_NS = 100_000_000
_WAIT_MIN_NS = 1_000_000  # for a wake-up, and for the error of the estimate


class Waiter(NamedTuple):
    """A waiting execution.

    Attributes:
        slot: Its worker.
        due_ns: Its deadline, or when it is due without one.
        has_deadline: Whether it has a deadline.
        virtual_ns: The virtual time of its client.
        expected_ns: How long it will probably run.
    """

    slot: int
    due_ns: int
    has_deadline: bool
    virtual_ns: int
    expected_ns: int


def next_turn(waiters: Sequence[Waiter], now_ns: int) -> Waiter:
    """Return the one of `waiters`, at least one, whose turn is next."""
    latest = min(waiter.virtual_ns for waiter in waiters) + LEAD_NS
    return min(
        (waiter for waiter in waiters if waiter.virtual_ns <= latest),
        key=lambda waiter: (
            waiter.has_deadline and now_ns + waiter.expected_ns > waiter.due_ns,
            waiter.due_ns,
            waiter.virtual_ns,
            waiter.slot,
        ),
    )


def wait_limit_ns(expected_ns: int, executions: int, cores: int) -> int:
    """Return for how long an execution waits: as long as it would take if all ran at once with equal shares.

    Then it begins without a turn: a short execution must not wait for long ones. `executions` are all that wait or run.
    """
    return _WAIT_MIN_NS + expected_ns * executions * 5 // (4 * cores)
