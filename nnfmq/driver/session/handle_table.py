"""Table of the objects that a client created in this driver, by id, and within a limit of their number."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

from nnfmq.base import settings
from nnfmq.driver.memory.object_limits import ObjectLimit
from nnfmq.hal.errors import InvalidArgument

T = TypeVar("T")


class HandleTable(Generic[T]):
    """The objects of one kind. Thread-safe.

    Ids start at 1 and are never reused, so a stale id is not found instead of naming another object.

    Args:
        kind: The kind of object in error messages, in the singular.
        ids: The source of new ids, which several tables may share; by default the table counts from 1.
        limit: How many objects the client may have; by default $NNFMQ_CLIENT_OBJECTS.
    """

    def __init__(self, kind: str, ids: Iterator[int] | None = None, limit: ObjectLimit | None = None) -> None:
        self._kind = kind
        self._limit = ObjectLimit(kind, settings.CLIENT_OBJECTS) if limit is None else limit
        self._ids = itertools.count(1) if ids is None else ids
        self._objects: dict[int, T] = {}
        self._lock = threading.Lock()

    def next_id(self) -> int:
        """Return a new id, for an object that has to know its id before it is inserted."""
        return next(self._ids)  # atomic in CPython: itertools.count is implemented in C

    def require_capacity(self) -> None:
        """Check the limit before an object is created.

        Objects that other threads create between this check and their `insert` may exceed the limit by a few.

        Raises:
            ResourceExhaustedTransient: If the client, or its user, has as many objects as it may have.
        """
        self._limit.require()

    def insert(self, value: T, object_id: int | None = None) -> int:
        """Insert an object under `object_id`, by default a new id, and return the id."""
        object_id = self.next_id() if object_id is None else object_id
        with self._lock:
            self._objects[object_id] = value
        self._limit.add(1)
        return object_id

    def get(self, object_id: int) -> T | None:
        """Return the object, or None if the id is unknown."""
        return self._objects.get(object_id)

    def lookup(self, object_id: int) -> T:
        """Return the object.

        Raises:
            InvalidArgument: If the id is unknown.
        """
        found = self._objects.get(object_id)
        if found is None:
            raise self._unknown(object_id)
        return found

    def pop(self, object_id: int) -> T:
        """Remove the object and return it.

        Raises:
            InvalidArgument: If the id is unknown.
        """
        with self._lock:
            found = self._objects.pop(object_id, None)
        if found is None:
            raise self._unknown(object_id)
        self._limit.add(-1)
        return found

    def pop_all(self) -> list[T]:
        """Remove all objects and return them."""
        with self._lock:
            objects, self._objects = self._objects, {}
        self._limit.add(-len(objects))
        return list(objects.values())

    def values(self) -> list[T]:
        """Return a copy of the list of objects."""
        with self._lock:
            return list(self._objects.values())

    def _unknown(self, object_id: int) -> InvalidArgument:
        return InvalidArgument(
            f"there is no {self._kind} {object_id} on this connection; it was released, or never created"
        )
