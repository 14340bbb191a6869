"""SharedModel: a compiled model that several objects of this package use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from nnfmq.base.ownership import Uncopyable
from nnfmq.hal.errors import BadState

if TYPE_CHECKING:
    from nnfmq.client.model.compiled_model import CompiledModel

__all__ = ["SharedModel", "UserCount"]


# ----------------------------------------------------------------------------------------------------------------------
# UserCount: when to close what several objects share.


class UserCount:
    """The number of users of something that is closed when the last one has released it. Thread-safe.

    There is one user at first. `what` names it in errors.
    """

    def __init__(self, what: str, close: Callable[[], object]) -> None:
        self._what = what
        self._close = close
        self._lock = threading.Lock()
        self._count = 1

    def acquire(self) -> None:
        """Add a user, which calls `release` once.

        Raises:
            BadState: If the last user has released it.
        """
        with self._lock:
            if not self._count:
                raise BadState(f"this {self._what} is closed")
            self._count += 1

    def release(self) -> None:
        """Remove a user; after the last one, close what they shared."""
        with self._lock:
            self._count -= 1
            is_last = self._count == 0
        if is_last:
            self._close()


# ----------------------------------------------------------------------------------------------------------------------
# SharedModel: a compiled model that several objects of this package use.


class SharedModel(Uncopyable):
    """A compiled model that a compilation, its executions and its bursts share: its `users`.

    `inputs` and `outputs` are those of requests: with the states.
    """

    def __init__(self, model: CompiledModel) -> None:
        states = tuple(state.tensor for state in model.states)
        self.model = model
        self.inputs = (*model.inputs, *states)
        self.outputs = (*model.outputs, *states)
        self.users = UserCount("model", model.close)

    @property
    def sends_padding(self) -> bool:
        """Whether a request tells the driver of an argument's padding: HIDL has no field for it (MEM-6)."""
        return self.model.memory_preference("output", 0).padding > 1
