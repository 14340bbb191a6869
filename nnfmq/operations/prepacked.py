"""What a plan makes of constants alone, which a compilation cache can bring back instead.

A plan wraps the expensive part of its preparation: `packed(compute)` returns the arrays of `compute()`. While a
`Packing` is in use, it notes them in the order of the calls, or gives back those that it was made with: binding the
same model by the same code asks for the same arrays in the same order. Outside of one, `packed` only computes. Wrap
what is slow and read only afterwards; whoever saves the arrays answers for that they come back unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from nnfmq.hal.errors import GeneralFailure
from nnfmq.operations.signature import Array

__all__ = ["Packing", "packed", "unpacked"]


class Packing:
    """The arrays of one model's preparation, a group for each call of `packed`; `known`: from an earlier one."""

    def __init__(self, known: Sequence[tuple[Array, ...]] | None = None) -> None:
        self.groups: list[tuple[Array, ...]] = []
        self._known = known

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let `packed` note its results here, on this thread, during a block."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def take(self, compute: Callable[[], tuple[Array, ...]]) -> tuple[Array, ...]:
        """Return the next group. Raises GeneralFailure where more are asked for than are known."""
        number = len(self.groups)
        if self._known is not None and number >= len(self._known):
            raise GeneralFailure(f"the cache has {number} groups of packed constants, and one more is needed")
        group = compute() if self._known is None else self._known[number]
        self.groups.append(group)
        return group


@contextmanager
def unpacked() -> Iterator[None]:
    """Let `packed` only compute during a block: what is made there is not kept."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


_current: ContextVar[Packing | None] = ContextVar("packing", default=None)


def packed(compute: Callable[[], tuple[Array, ...]]) -> tuple[Array, ...]:
    """Return the arrays of `compute()`, from the cache that is in use if there is one."""
    current = _current.get()
    return compute() if current is None else current.take(compute)
