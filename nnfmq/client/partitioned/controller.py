"""Controller: the position of an execution in its plan. It interprets IF and WHILE between the steps of the devices.

Each WHILE has a limit of time, which begins with its first condition and is checked after each condition that was
true; an inner loop has its own, which restarts with it. (NNAPI: ExecutionPlan::Controller; PART-4)
"""

from __future__ import annotations

import time

from nnfmq.client.partitioned.memory import ExecutionMemory
from nnfmq.client.partitioned.plan import BoundCall, BoundIf, BoundWhile, read_condition
from nnfmq.hal.errors import MissedDeadlineTransient
from nnfmq.hal.types import LoopTimeoutDurationNs

__all__ = ["Controller"]


class _Loop:
    """A WHILE in progress: the end of its time, and whether its condition or its body runs."""

    __slots__ = ("end_ns", "is_in_body")

    def __init__(self, end_ns: int) -> None:
        self.end_ns = end_ns
        self.is_in_body = False


class Controller:
    """The steps of one execution, one after the other. The values are in `memory`."""

    def __init__(self, memory: ExecutionMemory, loop_timeout_ns: int = LoopTimeoutDurationNs.DEFAULT) -> None:
        self._memory = memory
        self._steps = memory.plan.steps
        self._loop_timeout_ns = loop_timeout_ns
        self._position = 0
        self._loops: dict[int, _Loop] = {}  # by the position of their step

    def next(self) -> BoundCall | None:
        """Return the next step that a device executes; None after the last. The steps before it have been executed.

        Raises:
            MissedDeadlineTransient: If a loop's time is over.
            GeneralFailure: If a value that an IF or a WHILE needs was omitted.
        """
        while self._position < len(self._steps):
            step = self._steps[self._position]
            if isinstance(step, BoundCall):
                self._position += 1
                return step
            if isinstance(step, BoundIf):
                is_true = read_condition(self._memory.locations[step.condition])
                self._position = step.then_step if is_true else step.else_step
            elif isinstance(step, BoundWhile):
                self._position = self._continue_loop(self._position, step)
            else:
                self._position = step.target
        return None

    def _continue_loop(self, position: int, step: BoundWhile) -> int:
        """Return the position of the step that follows a WhileStep."""
        loop = self._loops.get(position)
        if loop is None:
            self._memory.copy(step.initial, step.current)
            self._loops[position] = _Loop(time.monotonic_ns() + self._loop_timeout_ns)
            return step.condition_step
        if loop.is_in_body:
            self._memory.copy(step.next, step.current)
            loop.is_in_body = False
            return step.condition_step
        if read_condition(self._memory.locations[step.condition]):
            if time.monotonic_ns() >= loop.end_ns:
                raise MissedDeadlineTransient(f"a loop was still running after {self._loop_timeout_ns} ns")
            loop.is_in_body = True
            return step.body_step
        del self._loops[position]
        self._memory.copy(step.current[: len(step.outputs)], step.outputs)
        return step.exit_step
