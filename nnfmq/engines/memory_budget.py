"""The budget of this process, which executions charge before they allocate memory.

A driver process serves one client and sets that client's quota as the budget (`use_budget`); other processes, which
execute their own models, have none. Operand values whose shapes are known when a model is prepared are charged once,
when a request is bound; those whose shapes come with the request are charged through a `FrameLedger` of the execution.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

__all__ = ["Budget", "Charge", "FrameLedger", "charge", "use_budget"]


class Charge(Protocol):
    """Bytes that count against a budget until `close`, or until this object is garbage-collected."""

    def close(self) -> None:
        """Return the bytes to the budget. Idempotent."""
        ...


class Budget(Protocol):
    """What limits the memory of this process's executions. Thread-safe."""

    def charge(self, size: int) -> Charge:
        """Charge `size` bytes.

        Raises:
            ResourceExhausted: If that would exceed a limit.
        """
        ...


class _Process:
    """What this process has one of."""

    budget: Budget | None = None


def use_budget(budget: Budget | None) -> None:
    """Charge all further memory of executions to `budget`; None: to nothing."""
    _Process.budget = budget


def charge(size: int) -> Charge | None:
    """Charge `size` bytes to the budget of this process; return None if it has none.

    Raises:
        ResourceExhausted: If that would exceed a limit.
    """
    budget = _Process.budget
    return None if budget is None or size == 0 else budget.charge(size)


class FrameLedger:
    """The operand values of one execution whose shapes came with the request. Used by one thread at a time.

    The charge grows to the largest sum of values that exist at the same time, and stays until the execution is freed:
    a run that needs no more than earlier ones charges nothing.
    """

    __slots__ = ("_charged", "_charges", "_live", "_sizes")

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._live = self._charged = 0
        self._charges: list[Charge | None] = []

    def record(self, index: int, size: int) -> None:
        """Count the value that operand `index` is about to get; its last value exists until then.

        Raises:
            ResourceExhausted: If the budget does not allow it.
        """
        live = self._live + size
        if live > self._charged:
            self._charges.append(charge(live - self._charged))
            self._charged = live
        self._live = live - self._sizes.get(index, 0)
        self._sizes[index] = size

    def release(self, indexes: Iterable[int]) -> None:
        """Count the values of these operands no longer."""
        for index in indexes:
            self._live -= self._sizes.pop(index, 0)
