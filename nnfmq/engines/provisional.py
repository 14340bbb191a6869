"""A program that is ready at once, and another one that takes its place while it is used.

Whoever has the better one ready says so, once (`replace`); executions go over to it at their next run, each on the
thread that runs it, so nothing waits for anything. From then on the provisional program costs nothing: what is bound
is the other's, and an execution that was bound before runs the other's as if it were its own. Both must answer alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nnfmq.engines.execution import DEFAULT_RUN_OPTIONS, BoundProgram, PreparedProgram, RunOptions
from nnfmq.hal.types import OutputShape

__all__ = ["TieredProgram"]


class TieredProgram:
    """`program`, until it is replaced by what `make` returns: whoever holds this decides when, and where, to ask it."""

    def __init__(self, program: PreparedProgram, make: Callable[[], PreparedProgram]) -> None:
        self.program = program
        self.make: Callable[[], PreparedProgram] | None = make

    def replace(self, program: PreparedProgram) -> None:
        """Use `program` from now on, and for good."""
        self.program = program
        self.make = None  # last: who sees it sees the program as well

    def keep(self) -> None:
        """Stay with the program that there is: nothing better will come."""
        self.make = None

    def bind(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> BoundProgram:
        """See `PreparedProgram.bind`."""
        if self.make is None:
            return self.program.bind(inputs, outputs)
        return _Provisional(self, inputs, outputs)


class _Provisional:
    """An execution of whatever its program is at each run."""

    def __init__(self, owner: TieredProgram, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self._owner, self._inputs, self._outputs = owner, inputs, outputs
        self._program = owner.program
        self._execution = self._program.bind(inputs, outputs)

    def run(self, limits: RunOptions = DEFAULT_RUN_OPTIONS) -> tuple[OutputShape, ...]:
        """See `BoundProgram.run`."""
        owner = self._owner
        if owner.make is None:
            if owner.program is not self._program:
                self._program, self._execution = owner.program, owner.program.bind(self._inputs, self._outputs)
            self.run = self._execution.run  # type: ignore[method-assign]  # the next run does not come by here
        return self._execution.run(limits)
