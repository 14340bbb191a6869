"""Numbers that kernels load: what differs between operations that share code."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from nnfmq.engines.compiled.emission import I64, Emitter, Value

__all__ = ["load_numbers", "stored_numbers"]

Numbers = TypeVar("Numbers", bound=tuple[Any, ...])


def stored_numbers(*groups: tuple[int, ...]) -> bytes:
    """Return named tuples of whole numbers as a constant."""
    return np.array([number for group in groups for number in group], np.int64).tobytes()


def load_numbers(e: Emitter, address: Value, kind: type[Numbers], first: int = 0) -> Numbers:
    """Load a named tuple that lies `first` numbers behind `address`."""
    count = len(kind._fields)  # type: ignore[attr-defined]  # what named tuples have
    return kind(*(e.load(I64, address, 8 * (first + n)) for n in range(count)))
