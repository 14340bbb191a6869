"""Event: NNAPI's event, of an asynchronous computation or of a fence that the application has imported."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Self

from nnfmq.fence import Fence, HasFileno
from nnfmq.hal.errors import GeneralFailure, InvalidArgument, NnfmqError
from nnfmq.hal.types import FenceState
from nnfmq.nnapi.execution_progress import RunningComputation
from nnfmq.nnapi.required_arguments import required
from nnfmq.uncopyable import Uncopyable

__all__ = ["Event"]


class Event(Uncopyable):
    """The end of an asynchronous computation. Close it, or use `with`: both wait for the end. Thread-safe.

    Outputs in the application's arrays are filled when `wait` returns; those in memories when the computation ends.
    """

    def __init__(self, running: RunningComputation | None, fence: Fence | None) -> None:
        self._running = running
        self._fence = fence

    @classmethod
    def create_from_sync_fence_fd(cls, fd: int) -> Self:
        """Return the event of a fence: one of nnfmq, an eventfd or a sync_file. Borrows `fd`, and duplicates it.

        Raises:
            InvalidArgument: If `fd` is no fence; -1 is none.
        """
        try:
            duplicate = os.dup(required(fd, "the fence's fd"))
        except (OSError, OverflowError, TypeError) as error:
            raise InvalidArgument(f"{fd!r} is not the fd of a fence: {error}") from error
        return cls(None, Fence.adopt(duplicate))

    def wait(self) -> None:
        """Block until the computation, or the imported fence, is done.

        Raises:
            GeneralFailure: If an imported fence is in error.
            NnfmqError: The error of the computation.
        """
        if self._running is not None:
            error = self._running.outcome().error
            if error is not None:
                raise error
        elif self._imported().wait() is not FenceState.SIGNALED:
            raise GeneralFailure("the imported fence is in error")

    def get_sync_fence_fd(self) -> int:
        """Return a duplicate of the fence's fd, which the caller closes.

        Raises:
            InvalidArgument: If the event has no fence: that of `start_compute`, or over HIDL before 1.3. (NNAPI
                returns BAD_DATA and -1.)
        """
        if self._fence is None:
            raise InvalidArgument("this event has no fence; that of start_compute_with_dependencies has one")
        return os.dup(self._fence.fileno())

    def wait_for_dependency(self) -> list[HasFileno]:
        """Return the fence if there is one, for the driver to wait for; otherwise block until done, and return [].

        Raises:
            InvalidArgument: If the computation has failed: nothing may depend on it (FEN-5).
        """
        if self._fence is not None:
            return [self._fence]
        try:
            self.wait()
        except NnfmqError as error:
            raise InvalidArgument(f"a computation on which this one depends has failed: {error}") from error
        return []

    def _imported(self) -> Fence:
        assert self._fence is not None  # an event without a computation is that of a fence
        return self._fence

    def close(self) -> None:
        """Wait for the computation, and close the fence. Idempotent. An imported fence is not waited for."""
        if self._running is not None:
            self._running.outcome()
        if self._fence is not None:
            self._fence.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
