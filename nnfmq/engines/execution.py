"""A program bound to its buffers: what a burst runs again and again.

All that a run need not do anew is done when it is bound: inputs are checked and in their places, and outputs that are
arrays of the very shape and type are filled in place. NumPy's warnings are the caller's to silence
(`np.errstate(all="ignore")`), once for as many runs as it likes: doing it here would cost more than a small model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from nnfmq.hal.errors import GeneralFailure, MissedDeadlineTransient, ResourceExhaustedTransient
from nnfmq.hal.types import OutputShape

Scope: TypeAlias = list[Any]  # an array per operand; None while it has no value
Store: TypeAlias = Callable[[Scope], tuple[OutputShape, ...]]


class Execution:
    """One request of one program. `run` may be called any number of times, one call at a time."""

    __slots__ = ("_scope", "_steps", "_store")

    def __init__(self, scope: Scope, steps: Sequence[Callable[[Scope], None]], store: Store) -> None:
        self._scope = scope
        self._steps = steps
        self._store = store

    def run(
        self, deadline_ns: int | None = None, is_cancelled: Callable[[], bool] | None = None
    ) -> tuple[OutputShape, ...]:
        """Execute once: read the inputs, fill the outputs, return the shape of each. Raises as `Program.execute`."""
        scope = self._scope
        try:
            if deadline_ns is None and is_cancelled is None:
                for step in self._steps:
                    step(scope)
            else:
                self._run_watched(deadline_ns, is_cancelled)
            return self._store(scope)
        except MemoryError as error:
            raise ResourceExhaustedTransient(f"out of memory while executing the model: {error}") from error

    def _run_watched(self, deadline_ns: int | None, is_cancelled: Callable[[], bool] | None) -> None:
        for step in self._steps:
            if deadline_ns is not None and time.monotonic_ns() >= deadline_ns:
                raise MissedDeadlineTransient("the deadline passed before the model was executed")
            if is_cancelled is not None and is_cancelled():
                raise GeneralFailure("the execution was cancelled")
            step(self._scope)


def storing_in_place(indexes: Sequence[int], outputs: Sequence[Any], shapes: tuple[OutputShape, ...]) -> Store:
    """Return what copies each result into its array, of the same shape and type, and gives the shapes."""
    if len(outputs) == 1:
        index, out = indexes[0], outputs[0]

        def store_one(scope: Scope) -> tuple[OutputShape, ...]:
            out[...] = scope[index]
            return shapes

        return store_one
    pairs = tuple(zip(indexes, outputs, strict=True))

    def store(scope: Scope) -> tuple[OutputShape, ...]:
        for index, out in pairs:
            out[...] = scope[index]
        return shapes

    return store


def is_array_of(out: Any, dtype: np.dtype[Any], shape: OutputShape) -> bool:
    """Return True where a result of this type and shape can be copied into `out` as it is."""
    return type(out) is np.ndarray and out.dtype == dtype and out.shape == shape.dimensions
