"""HandleTable: the objects that a client made in this driver, by the numbers that it knows them by.

Each costs the driver something that no quota counts, so a client may have so many of a kind, and no more.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

from nnfmq.hal.errors import InvalidArgument, ResourceExhaustedTransient

T = TypeVar("T")

NO_ID = 0  # stands for no object: in the answer to a call that failed
OBJECTS_MAX = 10_000  # of one kind, of one client


class HandleTable(Generic[T]):
    """Objects of one kind, which `what` names. Numbers go up from 1, and no number comes back. Thread-safe."""

    def __init__(self, what: str, numbers: Iterator[int] | None = None, limit: int = OBJECTS_MAX) -> None:
        self._what = what
        self._limit = limit
        self._numbers = itertools.count(1) if numbers is None else numbers
        self._objects: dict[int, T] = {}
        self._lock = threading.Lock()

    def next_id(self) -> int:
        """Return a number for an object that must know it before it is added."""
        return next(self._numbers)  # a count is atomic

    def require_capacity(self) -> None:
        """Raise ResourceExhaustedTransient where there are as many as may be, give or take what is being made now."""
        if len(self._objects) >= self._limit:
            raise ResourceExhaustedTransient(f"this client has {self._limit} {self._what}s already; release some")

    def add(self, value: T, number: int | None = None) -> int:
        """Add an object and return its number."""
        number = self.next_id() if number is None else number
        with self._lock:
            self._objects[number] = value
        return number

    def get(self, number: int) -> T | None:
        """Return the object, or None."""
        return self._objects.get(number)

    def find(self, number: int) -> T:
        """Return the object. Raises InvalidArgument where there is none."""
        found = self._objects.get(number)
        if found is None:
            raise self.unknown(number)
        return found

    def take(self, number: int) -> T:
        """Remove the object and return it. Raises InvalidArgument where there is none."""
        with self._lock:
            found = self._objects.pop(number, None)
        if found is None:
            raise self.unknown(number)
        return found

    def take_all(self) -> list[T]:
        """Remove the objects of this moment and return them."""
        with self._lock:
            objects, self._objects = self._objects, {}
        return list(objects.values())

    def all(self) -> list[T]:
        """Return the objects of this moment."""
        with self._lock:
            return list(self._objects.values())

    def unknown(self, number: int) -> InvalidArgument:
        """Return the error that says that there is no such object."""
        return InvalidArgument(f"there is no {self._what} {number} on this connection; it was released, or never made")
