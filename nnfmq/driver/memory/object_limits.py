"""Limits of the objects that a client, and all clients of its user, may have in the driver: models, bursts, threads.

An object costs memory that the quota does not count, so the number of objects of each kind is limited for each client.
In a driver for several users the models and threads of all clients of one user have a limit, too: each worker publishes
its counts beside what it has charged (`quota.MemoryShares`).

The threads that count are those of bursts, and those that hosted runtimes start for an open file. A worker has some
more, whose number does not depend on the client's calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from nnfmq.base.settings import Setting
from nnfmq.driver.memory.quota import MemoryShare, SharedCount
from nnfmq.engines.memory import trim_memory
from nnfmq.hal.errors import ResourceExhaustedTransient

__all__ = ["ObjectLimit", "return_threads", "take_threads", "use_thread_limit"]


class ObjectLimit:
    """The number of objects of one kind that this client has, within the limits of a client and of a user. Thread-safe.

    Args:
        kind: The kind in error messages, in the singular.
        of_client: How many the client may have; read now.
        share: What this client's user has in all workers; None: there is no limit for a user.
        shared: The count in `share`.
        of_user: The setting of a user's limit, which the supervisor has read.
        on_change: Gets each new number.
    """

    def __init__(
        self,
        kind: str,
        of_client: Setting[int],
        share: MemoryShare | None = None,
        shared: SharedCount = SharedCount.MODELS,
        of_user: Setting[int] | None = None,
        on_change: Callable[[int], object] = lambda _count: None,
    ) -> None:
        self.count = 0
        self._kind = kind
        self._limit, self._variable = of_client.value(), of_client.variable
        self._share = None if of_user is None else share
        self._shared, self._user_variable = shared, "" if of_user is None else of_user.variable
        self._on_change = on_change
        # Reentrant: the garbage collector may drop an object in a thread that holds the lock.
        self._lock = threading.RLock()

    def require(self, more: int = 1) -> None:
        """Check the limits before so many objects are created.

        Objects that others create between this check and `add` may exceed a limit by a few.

        Raises:
            ResourceExhaustedTransient: If there would be more objects than this client, or its user, may have.
        """
        if self.count + more > self._limit:
            raise self._refusal("this client has", self.count, more, self._limit, self._variable)
        if self._share is None or not (limit := self._share.user_limit_of(self._shared)):
            return
        count = self._share.user_count(self._shared)
        if count + more > limit:
            raise self._refusal("the clients of this user have", count, more, limit, self._user_variable)

    def _refusal(self, who: str, count: int, more: int, limit: int, variable: str) -> ResourceExhaustedTransient:
        return ResourceExhaustedTransient(
            f"{who} {count} {self._kind}s already, and with {more} more there would be more than {limit}, the limit "
            f"that ${variable} of the driver sets; release some"
        )

    def add(self, more: int) -> None:
        """Note that there are so many objects more, or fewer if it is negative."""
        with self._lock:
            self.count += more
            if self._share is not None:
                self._share.publish_count(self._shared, self.count)
            self._on_change(self.count)

    def take(self, more: int) -> None:
        """Note that there are so many objects more, if the limits allow it. Raises as `require`."""
        with self._lock:
            self.require(more)
            self.add(more)


# ----------------------------------------------------------------------------------------------------------------------
# The threads of this process, which serves one client.


class _Process:
    threads: ObjectLimit | None = None


def use_thread_limit(limit: ObjectLimit | None) -> None:
    """Count all further threads of this process in `limit`; None: nowhere."""
    _Process.threads = limit


def take_threads(count: int) -> None:
    """Note threads that are about to be started; if they are too many, first drop what is kept for later calls.

    Raises:
        ResourceExhaustedTransient: If they are too many all the same.
    """
    limit = _Process.threads
    if limit is None or count <= 0:
        return
    try:
        limit.take(count)
    except ResourceExhaustedTransient:
        trim_memory()
        limit.take(count)


def return_threads(count: int) -> None:
    """Note that threads which were taken have ended."""
    limit = _Process.threads
    if limit is not None and count > 0:
        limit.add(-count)
