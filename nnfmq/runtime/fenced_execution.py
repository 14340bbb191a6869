"""Fenced executions: they begin when others' fences are signalled, and signal one of their own (executeFenced).

The wait is the driver's, so a chain of them runs from end to end without the application. A fence whose driver dies is
in error at once, since its signalling end was the driver's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Generic, NamedTuple, Self, TypeVar

from nnfmq.deadlines import deadline_after
from nnfmq.fence import Fence, HasFileno
from nnfmq.hal.errors import ErrorStatus, GeneralFailure, MissedDeadlineTransient
from nnfmq.hal.timing import Timing
from nnfmq.hal.types import FenceState
from nnfmq.runtime.connection import Connection
from nnfmq.runtime.result_validation import ResultValidator, fenced_times, raise_if_fenced_failed
from nnfmq.serialize import messages

ResultT = TypeVar("ResultT")
_INFO_SECONDS = 10.0
_GONE = "the fence is in error, and its driver has not said why"


class FencedTiming(NamedTuple):
    """The times of a fenced execution, in ns: from its launch on, and from when all its fences were signalled."""

    launched: Timing
    fenced: Timing


class FencedExecution(Generic[ResultT]):
    """An execution that waits for fences. Close it, or use `with`; closed early, it goes on in the driver.

    `fence` tells when it is over, and can be given to the next one. It belongs to this object and is closed with it.
    """

    def __init__(
        self, connection: Connection, collect: Callable[[FencedTiming], ResultT], judge: ResultValidator | None = None
    ) -> None:
        self._connection = connection
        self._collect = collect
        self._judge = judge
        self._resources = ExitStack()
        self._fence: Fence | None = None
        self._callback_id = 0

    @classmethod
    def launch(
        cls,
        connection: Connection,
        message: messages.ExecuteFenced | messages.RunExecutionFenced,
        fds: Sequence[int],
        deadline_ns: int | None,
        collect: Callable[[FencedTiming], ResultT],
        judge: ResultValidator | None = None,
    ) -> Self:
        """Send a launch and return when the driver has answered; blocks. The fds stay the caller's.

        Without a judge its answers are believed.
        """
        execution = cls(connection, collect, judge)
        try:
            if judge is not None:
                judge.begin()
            answer = connection.ask(
                message, messages.FencedLaunched, fds, deadline_ns,
                on_answer=execution._launched, on_fds=execution._take_fds,
            )  # fmt: skip
            raise_if_fenced_failed(answer)
            if judge is not None:
                judge.launched()
        except BaseException:
            execution.close()
            raise
        return execution

    def _take_fds(self, fds: list[int]) -> None:
        for fd in fds:
            self._fence = Fence.adopt(fd)
            self._resources.callback(self._fence.close)

    def _launched(self, answer: messages.FencedLaunched) -> None:
        self._callback_id = answer.callback_id
        if answer.status is ErrorStatus.NONE and self._fence is None:  # over already (FEN-4)
            self._fence = self._resources.enter_context(Fence.create())
            self._fence.signal()

    def keep(self, resource: Callable[[], object]) -> None:
        """Call this, too, when the execution is closed."""
        self._resources.callback(resource)

    @property
    def fence(self) -> Fence:
        """The fence; one that is signalled already where the driver gave none, since all was done (FEN-4)."""
        assert self._fence is not None  # `launch` returns none without
        return self._fence

    def done(self) -> bool:
        """Return True once it is over, well or not. Never blocks. Raises InvalidArgument once closed."""
        return self.fence.state is not FenceState.ACTIVE

    def wait(self, timeout: float | None = None) -> FenceState:
        """Wait for the fence as `Fence.wait` does, and return its state."""
        return self.fence.wait(timeout)

    def info(self) -> FencedTiming:
        """Ask how it went and return the times, -1 where not measured (getExecutionInfo); blocks for the answer.

        Raises why it failed; GeneralFailure where it is not over; DeadObject; ProtocolError for what cannot be true.
        """
        is_over = self.done()
        message = messages.GetExecutionInfo(self._connection.new_call(), self._callback_id)
        answer = self._connection.ask(message, messages.FencedExecutionInfo, (), deadline_after(_INFO_SECONDS))
        if self._judge is None:
            return FencedTiming(*fenced_times(answer))
        return FencedTiming(*self._judge.fenced_end(answer, is_over))

    def result(self, timeout: float | None = None) -> ResultT:
        """Wait for the fence and return the result; blocks up to `timeout` seconds (None = no limit).

        Raises MissedDeadlineTransient where the wait ends first (the execution goes on), or why the execution failed:
        what the driver answered, DeadObject where it died.
        """
        state = self.wait(timeout)
        if state is FenceState.ACTIVE:
            raise MissedDeadlineTransient("the timeout passed before the execution was over; it goes on")
        times = self.info()
        if state is not FenceState.SIGNALED:
            raise GeneralFailure(_GONE)
        return self._collect(times)

    def close(self) -> None:
        """Let go of it and close its fence. Harmless when repeated, or when the driver is gone."""
        callback_id, self._callback_id = self._callback_id, 0
        self._resources.close()
        if callback_id:
            self._connection.tell(messages.ReleaseCallback(self._connection.new_call(), callback_id))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def fence_fds(fences: Sequence[HasFileno | int]) -> list[int]:
    """Return the descriptors of fences, which stay their owners'."""
    return [fence if isinstance(fence, int) else fence.fileno() for fence in fences]
