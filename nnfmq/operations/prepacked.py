"""Prepacked weights: arrays that plans derive from constants, which a compilation cache can save and restore.

A plan wraps the expensive part of its preparation in `cached_prepack(compute)`, which returns what `compute()`
returns. Within `PrepackedWeights.in_use()`, the arrays of each call are recorded in order. If the `PrepackedWeights`
was made with the arrays of an earlier preparation, they are returned in the same order and nothing is computed:
preparing the same model with the same code makes the same calls.

Wrap only what is slow to compute and read-only afterwards. The caller that saves the arrays is responsible for their
integrity: restored arrays are not checked here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from nnfmq.hal.errors import GeneralFailure
from nnfmq.operations.signature import Array

__all__ = ["PrepackedWeights", "cached_prepack", "no_prepack_recording"]


class PrepackedWeights:
    """The prepacked arrays of one model, a group for each call of `cached_prepack`.

    Args:
        restored: The groups of an earlier preparation of the same model; None to compute and record them.
    """

    def __init__(self, restored: Sequence[tuple[Array, ...]] | None = None) -> None:
        self.groups: list[tuple[Array, ...]] = []
        self._restored = restored

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Make `cached_prepack` record or restore here during the block, on the calling thread."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def next_group(self, compute: Callable[[], tuple[Array, ...]]) -> tuple[Array, ...]:
        """Return the next group, restored or computed.

        Raises:
            GeneralFailure: If fewer groups were restored than the model needs.
        """
        index = len(self.groups)
        if self._restored is not None and index >= len(self._restored):
            raise GeneralFailure(f"the cache has {index} groups of prepacked weights, the model needs more")
        group = compute() if self._restored is None else self._restored[index]
        self.groups.append(group)
        return group


@contextmanager
def no_prepack_recording() -> Iterator[None]:
    """Make `cached_prepack` compute without recording during the block, on the calling thread."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


_current: ContextVar[PrepackedWeights | None] = ContextVar("prepacked_weights", default=None)


def cached_prepack(compute: Callable[[], tuple[Array, ...]]) -> tuple[Array, ...]:
    """Return the arrays of `compute()`, restored if the `PrepackedWeights` in use has them."""
    current = _current.get()
    return compute() if current is None else current.next_group(compute)
