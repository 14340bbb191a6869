"""Where a program's time goes: whole runs, and beside each a pass over its parts, every one timed in its place.

A pass goes through all parts in order, as a run does, so that each finds the caches as the one before has left them;
no part is repeated by itself. Before each the same call is timed with nothing to do, twice, since the first one brings
back what the caches have lost of Python: what the second takes is the cost of timing. A part that consists of steps, as
a compiled segment does, is timed step by step; any other is one step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Protocol, runtime_checkable

from nnfmq.engines.execution import DEFAULT_RUN_OPTIONS, BoundSteps, ExecutionFrame
from nnfmq.engines.interpreter import ExecutionStep, Program
from nnfmq.operations.signature import Shape

__all__ = ["Profile", "SteppedPartition", "Timings", "measure"]

_WARM_UP = 3


@runtime_checkable
class SteppedPartition(Protocol):
    """A step of a program that consists of steps of its own."""

    steps: int

    def range_runner(self, scope: ExecutionFrame) -> Callable[[int, int], None]:
        """Return what runs some of them on a scope that it was called with; an empty range costs what a call costs."""
        ...

    def leave(self, scope: ExecutionFrame) -> None:
        """Give the scope what later steps read."""
        ...


@dataclass(slots=True)
class Timings:
    """What one thing took in each run, and what timing nothing took just before, in nanoseconds."""

    raw: list[int] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)

    @property
    def p50_ns(self) -> int:
        """The median, less that of nothing."""
        return max(0, median_low(self.raw) - median_low(self.empty))

    @property
    def min_ns(self) -> int:
        """The least, less the least of nothing."""
        return max(0, min(self.raw) - min(self.empty))

    @classmethod
    def sum(cls, parts: Iterable[Timings]) -> Timings:
        """Return what several things took together, run by run."""
        several = list(parts)
        raw, empty = ([sum(run) for run in zip(*lists, strict=True)] for lists in _lists(several))
        return cls(raw, empty)


def _lists(several: Sequence[Timings]) -> tuple[list[list[int]], list[list[int]]]:
    return [one.raw for one in several], [one.empty for one in several]


@dataclass(slots=True)
class Profile:
    """`whole` are runs as usual, `parts` the steps of each part, `storing` what comes after the last.

    `shapes` are those of the operands that were there between parts.
    """

    parts: list[list[Timings]]
    whole: list[int] = field(default_factory=list)
    storing: Timings = field(default_factory=Timings)
    shapes: dict[int, Shape] = field(default_factory=dict)


def measure(program: Program, execution: BoundSteps, runs: int) -> Profile:
    """Run `execution`, which `program` has bound, `runs` times whole and in parts, by turns. Blocks for as long.

    NumPy's warnings are the caller's to silence. Raises what the program raises.
    """
    for _ in range(_WARM_UP):
        execution.run()
    times = Profile([[Timings() for _ in range(_count(part))] for part in program.parts])
    times.shapes.update(_shapes_between(program.parts, execution.scope))
    for _ in range(runs):
        begin_ns = time.perf_counter_ns()
        execution.run()
        times.whole.append(time.perf_counter_ns() - begin_ns)
        _pass(program.parts, execution, times)
    return times


def _count(part: ExecutionStep) -> int:
    return part.step.steps if isinstance(part.step, SteppedPartition) else 1


def _shapes_between(parts: Sequence[ExecutionStep], scope: ExecutionFrame) -> dict[int, Shape]:
    shapes = {}
    for part in parts:
        part.step(scope)
        shapes.update({i: array.shape for i, array in enumerate(scope[:-1]) if hasattr(array, "shape")})
    for part in parts:
        _drop(scope, part)
    return shapes


def _pass(parts: Sequence[ExecutionStep], execution: BoundSteps, times: Profile) -> None:
    scope = execution.scope
    scope[-1] = DEFAULT_RUN_OPTIONS
    for part, samples in zip(parts, times.parts, strict=True):
        step = part.step
        if isinstance(step, SteppedPartition):
            run = step.range_runner(scope)
            for number, sample in enumerate(samples):
                _time_step(run, number, sample)
            step.leave(scope)
            _drop(scope, part)
        else:
            _time_call(part.releasing(), scope, samples[0])
    _time_call(execution.store, scope, times.storing)


def _time_step(run: Callable[[int, int], None], number: int, sample: Timings) -> None:
    clock = time.perf_counter_ns
    run(number, number)
    begin_ns = clock()
    run(number, number)
    middle_ns = clock()
    run(number, number + 1)
    end_ns = clock()
    sample.empty.append(middle_ns - begin_ns)
    sample.raw.append(end_ns - middle_ns)


def _time_call(call: Callable[[ExecutionFrame], object], scope: ExecutionFrame, sample: Timings) -> None:
    clock = time.perf_counter_ns
    _nothing(scope)
    begin_ns = clock()
    _nothing(scope)
    middle_ns = clock()
    call(scope)
    end_ns = clock()
    sample.empty.append(middle_ns - begin_ns)
    sample.raw.append(end_ns - middle_ns)


def _nothing(_scope: ExecutionFrame) -> None:
    pass


def _drop(scope: ExecutionFrame, part: ExecutionStep) -> None:
    for index in part.dropped:
        scope[index] = None
