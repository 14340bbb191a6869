"""A program bound to its buffers, and what ends its run early: what a burst runs again and again.

All that a run need not do anew is done when it is bound: inputs are checked and in their places, and outputs that are
arrays of the very shape and type are filled in place. NumPy's warnings are the caller's to silence
(`np.errstate(all="ignore")`), once for as many runs as it likes: doing it here would cost more than a small model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from nnfmq.hal.errors import GeneralFailure, InvalidArgument, MissedDeadlineTransient, ResourceExhaustedTransient
from nnfmq.hal.types import LoopTimeoutDurationNs, OutputShape

Array: TypeAlias = np.ndarray[Any, Any]
ExecutionFrame: TypeAlias = list[Any]  # an array per operand, None while it has no value; then the execution's Limits
StepFunction: TypeAlias = Callable[[ExecutionFrame], None]
OutputWriter: TypeAlias = Callable[[ExecutionFrame], tuple[OutputShape, ...]]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What ends an execution before its result."""

    deadline_ns: int | None = None
    is_cancelled: Callable[[], bool] | None = None
    loop_timeout_ns: int = LoopTimeoutDurationNs.DEFAULT

    def check(self) -> None:
        """Raise MissedDeadlineTransient or, when cancelled, GeneralFailure."""
        if self.deadline_ns is not None and time.monotonic_ns() >= self.deadline_ns:
            raise MissedDeadlineTransient("the deadline passed before the model was executed")
        if self.is_cancelled is not None and self.is_cancelled():
            raise GeneralFailure("the execution was cancelled")


@dataclass(frozen=True, slots=True)
class DynamicOutput:
    """An output without a shape of its own: `room_for` is told the result's and returns the array to fill.

    It raises what keeps the result from being taken, and the execution ends with that.
    """

    allocate: Callable[[tuple[int, ...]], Array]


DEFAULT_RUN_OPTIONS = RunOptions()


def run_options(
    deadline_ns: int | None = None, is_cancelled: Callable[[], bool] | None = None, loop_timeout_ns: int | None = None
) -> RunOptions:
    """Return the limits of one execution. Raises InvalidArgument for a loop timeout above the maximum."""
    if deadline_ns is None and is_cancelled is None and loop_timeout_ns is None:
        return DEFAULT_RUN_OPTIONS
    timeout = LoopTimeoutDurationNs.DEFAULT if loop_timeout_ns is None else loop_timeout_ns
    if not 0 <= timeout <= LoopTimeoutDurationNs.MAXIMUM:
        raise InvalidArgument(f"loop timeout {timeout} ns, allowed are 0 to {LoopTimeoutDurationNs.MAXIMUM:d}")
    return RunOptions(deadline_ns, is_cancelled, timeout)


class BoundProgram(Protocol):
    """One request bound to its buffers: `Execution` below is one."""

    def run(self, limits: RunOptions = DEFAULT_RUN_OPTIONS) -> tuple[OutputShape, ...]:
        """Execute once: read the inputs, fill the outputs, return the shape of each."""
        ...


class PreparedProgram(Protocol):
    """What an engine makes of a model, whichever engine: `interpreter.Program` is one. Any thread may use it."""

    def bind(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> BoundProgram:
        """Check `inputs`, arrays with the operands' dtypes and shapes (None: omitted), and bind them to `outputs`.

        `outputs` are arrays of the right dtype and shape, or writable buffers (None: not wanted). Raises
        InvalidArgument for inputs that do not fit the model.
        """
        ...


def run_steps(steps: Sequence[StepFunction], scope: ExecutionFrame, limits: RunOptions) -> None:
    """Run all steps on `scope`, whose last slot tells the limits to those of IF and WHILE."""
    scope[-1] = limits
    if limits is DEFAULT_RUN_OPTIONS:
        for step in steps:
            step(scope)
        return
    for step in steps:
        limits.check()
        step(scope)


class BoundSteps:
    """One request of one program. `run` may be called any number of times, one call at a time.

    `scope` and `store`, which comes after the last step, are for who runs the program's parts one by one.
    """

    __slots__ = ("_steps", "scope", "store")

    def __init__(self, scope: ExecutionFrame, steps: Sequence[StepFunction], store: OutputWriter) -> None:
        self.scope = scope
        self._steps = steps
        self.store = store

    def run(self, limits: RunOptions = DEFAULT_RUN_OPTIONS) -> tuple[OutputShape, ...]:
        """Execute once: read the inputs, fill the outputs, return the shape of each. Raises as `Program.execute`."""
        scope = self.scope
        try:
            run_steps(self._steps, scope, limits)
            return self.store(scope)
        except (MemoryError, RecursionError) as error:
            raise ResourceExhaustedTransient(f"out of memory while executing the model: {error}") from error
