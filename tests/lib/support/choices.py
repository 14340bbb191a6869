"""Choices from which a random test is made: drawn by Hypothesis, or read from bytes that a fuzzer changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


class Choices(Protocol):
    """A source of choices."""

    def one_of(self, options: Sequence[T]) -> T:
        """Return one of the options."""
        ...

    def between(self, first: int, last: int) -> int:
        """Return an integer from `first` to `last`."""
        ...

    def flag(self) -> bool:
        """Return True or False."""
        ...


class DrawnChoices:
    """Choices by Hypothesis, which shrinks them when a test fails."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw

    def one_of(self, options: Sequence[T]) -> T:
        """See `Choices`."""
        chosen: T = self._draw(st.sampled_from(options))
        return chosen

    def between(self, first: int, last: int) -> int:
        """See `Choices`."""
        return int(self._draw(st.integers(first, last)))

    def flag(self) -> bool:
        """See `Choices`."""
        return bool(self._draw(st.booleans()))


class ByteChoices:
    """Choices by bytes, each by as many as its options need. When no bytes are left, the first option is chosen."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._next = 0

    @property
    def has_more(self) -> bool:
        """Whether bytes are left."""
        return self._next < len(self._data)

    def one_of(self, options: Sequence[T]) -> T:
        """See `Choices`."""
        return options[self.between(0, len(options) - 1)]

    def between(self, first: int, last: int) -> int:
        """See `Choices`."""
        size = ((last - first).bit_length() + 7) // 8
        read = self._data[self._next : self._next + size]
        self._next += size
        return first + int.from_bytes(read, "little") % (last - first + 1)

    def flag(self) -> bool:
        """See `Choices`."""
        return bool(self.between(0, 1))
