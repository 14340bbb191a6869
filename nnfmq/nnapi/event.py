"""Event: NNAPI's event, and the progress of the execution that it belongs to."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from nnfmq.base.fence import Fence, HasFileno
from nnfmq.base.ownership import CLAIM, Claims, Closable, Uncopyable, release
from nnfmq.hal.errors import BadState, GeneralFailure, InvalidArgument, NnfmqError, OutputInsufficientSize
from nnfmq.hal.timing import NO_TIMING, Timing
from nnfmq.hal.types import FenceState, OutputShape
from nnfmq.nnapi.arguments import PendingResult
from nnfmq.nnapi.checks import required

__all__ = ["Event", "ExecutionOutcome", "ExecutionProgress", "RunningComputation"]


# ----------------------------------------------------------------------------------------------------------------------
# ExecutionProgress: whether an execution is prepared, running or completed, and with what result.


@dataclass(frozen=True, slots=True)
class ExecutionOutcome:
    """The result of an execution: the outputs' shapes, its times from the launch and from the last fence, its error."""

    shapes: tuple[OutputShape, ...] = ()
    launched: Timing = NO_TIMING
    fenced: Timing = NO_TIMING
    error: NnfmqError | None = None

    @classmethod
    def of_error(cls, error: NnfmqError) -> ExecutionOutcome:
        """Return the outcome of an execution that has failed; the shapes are known if an output was too small."""
        shapes = tuple(error.output_shapes) if isinstance(error, OutputInsufficientSize) else ()
        return cls(shapes, error=error)

    @classmethod
    def of_shapes(
        cls, shapes: Sequence[tuple[int, ...]], launched: Timing, fenced: Timing | None = None
    ) -> ExecutionOutcome:
        """Return the outcome of an execution that has succeeded; `fenced` is None if it had no dependencies."""
        return cls(tuple(map(OutputShape, shapes)), launched, launched if fenced is None else fenced)


class RunningComputation(Uncopyable):
    """An asynchronous computation, for which any thread may wait. The first to find it done collects its outcome.

    Args:
        pending: Its result.
        collect: Called once, when it is done: completes the execution and returns the outcome.
    """

    def __init__(self, pending: PendingResult, collect: Callable[[], ExecutionOutcome]) -> None:
        self._pending = pending
        self._collect = collect
        self._lock = threading.Lock()
        self._outcome: ExecutionOutcome | None = None

    def done(self) -> bool:
        """Return whether the computation has succeeded or failed. Does not block."""
        return self._outcome is not None or self._pending.done()

    def outcome(self) -> ExecutionOutcome:
        """Return the outcome; blocks until the computation is done."""
        if self._outcome is None:
            self._pending.wait()
            with self._lock:
                if self._outcome is None:
                    self._outcome = self._collect()
        return self._outcome


class ExecutionProgress:
    """The state of an execution: being prepared, running, or completed with an outcome. Thread-safe.

    A computation claims the execution with `begin`, and ends its claim with `complete` or `release`. As in
    `nnfmq.base.ownership`, the claim is an object, so that an exception of a signal handler leaves none behind.
    """

    def __init__(self) -> None:
        self.is_reusable = False
        self.running: RunningComputation | None = None
        self._claims: Claims = {}
        self._outcome: ExecutionOutcome | None = None

    def begin(self, function: str, claim: object) -> None:
        """Claim the execution for a computation.

        Raises:
            BadState: If it is running, or was computed and is not reusable.
        """
        self._settle()
        if self._claims.setdefault(CLAIM, claim) is not claim:
            raise BadState(f"{function}: this execution is running; wait for it, or make another one")
        if self._outcome is not None and not self.is_reusable:
            raise BadState(f"{function}: this execution was computed, and is not reusable: see set_reusable")

    def complete(self, claim: object, outcome: ExecutionOutcome) -> ExecutionOutcome:
        """Store and return the outcome of the computation that has this claim, and end the claim."""
        if self._claims.get(CLAIM) is claim:
            self._outcome, self.running = outcome, None
            self.release(claim)
        return outcome

    def release(self, claim: object) -> bool:
        """End a claim, and return True; False if the execution has another claim, or none."""
        return release(self._claims, claim)

    def _settle(self) -> None:
        """Collect the outcome of an asynchronous computation that is done."""
        running = self.running
        if running is not None and running.done():
            running.outcome()

    def is_running(self) -> bool:
        """Return whether a computation is in progress."""
        self._settle()
        return bool(self._claims)

    def require_preparation(self, function: str) -> None:
        """Require that no computation was started.

        Raises:
            BadState: If one was.
        """
        if self.is_running() or self._outcome is not None:
            raise BadState(f"{function}: a computation was started; make another execution for other settings")

    def require_completed(self, function: str) -> ExecutionOutcome:
        """Return the outcome.

        Raises:
            BadState: If the execution is being prepared or is running.
        """
        if self.is_running() or self._outcome is None:
            raise BadState(f"{function}: this execution is not completed; compute it, and wait for its event")
        return self._outcome


# ----------------------------------------------------------------------------------------------------------------------
# Event: NNAPI's event, of an asynchronous computation or of a fence that the application has imported.


class Event(Closable):
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
