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

from nnfmq.engines.execution import NO_LIMITS, Execution, Scope
from nnfmq.engines.interpreter import Part, Program
from nnfmq.operations.signature import Shape

__all__ = ["Divisible", "Samples", "Times", "measure"]

_WARM_UP = 3


@runtime_checkable
class Divisible(Protocol):
    """A step of a program that consists of steps of its own."""

    steps: int

    def stepping(self, scope: Scope) -> Callable[[int, int], None]:
        """Return what runs some of them on a scope that it was called with; an empty range costs what a call costs."""
        ...

    def leave(self, scope: Scope) -> None:
        """Give the scope what later steps read."""
        ...


@dataclass(slots=True)
class Samples:
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
    def sum(cls, parts: Iterable[Samples]) -> Samples:
        """Return what several things took together, run by run."""
        several = list(parts)
        raw, empty = ([sum(run) for run in zip(*lists, strict=True)] for lists in _lists(several))
        return cls(raw, empty)


def _lists(several: Sequence[Samples]) -> tuple[list[list[int]], list[list[int]]]:
    return [one.raw for one in several], [one.empty for one in several]


@dataclass(slots=True)
class Times:
    """`whole` are runs as usual, `parts` the steps of each part, `storing` what comes after the last.

    `shapes` are those of the operands that were there between parts.
    """

    parts: list[list[Samples]]
    whole: list[int] = field(default_factory=list)
    storing: Samples = field(default_factory=Samples)
    shapes: dict[int, Shape] = field(default_factory=dict)


def measure(program: Program, execution: Execution, runs: int) -> Times:
    """Run `execution`, which `program` has bound, `runs` times whole and in parts, by turns. Blocks for as long.

    NumPy's warnings are the caller's to silence. Raises what the program raises.
    """
    for _ in range(_WARM_UP):
        execution.run()
    times = Times([[Samples() for _ in range(_count(part))] for part in program.parts])
    times.shapes.update(_shapes_between(program.parts, execution.scope))
    for _ in range(runs):
        begin_ns = time.perf_counter_ns()
        execution.run()
        times.whole.append(time.perf_counter_ns() - begin_ns)
        _pass(program.parts, execution, times)
    return times


def _count(part: Part) -> int:
    return part.step.steps if isinstance(part.step, Divisible) else 1


def _shapes_between(parts: Sequence[Part], scope: Scope) -> dict[int, Shape]:
    shapes = {}
    for part in parts:
        part.step(scope)
        shapes.update({i: array.shape for i, array in enumerate(scope[:-1]) if hasattr(array, "shape")})
    for part in parts:
        _drop(scope, part)
    return shapes


def _pass(parts: Sequence[Part], execution: Execution, times: Times) -> None:
    scope = execution.scope
    scope[-1] = NO_LIMITS
    for part, samples in zip(parts, times.parts, strict=True):
        step = part.step
        if isinstance(step, Divisible):
            run = step.stepping(scope)
            for number, sample in enumerate(samples):
                _time_step(run, number, sample)
            step.leave(scope)
            _drop(scope, part)
        else:
            _time_call(part.releasing(), scope, samples[0])
    _time_call(execution.store, scope, times.storing)


def _time_step(run: Callable[[int, int], None], number: int, sample: Samples) -> None:
    clock = time.perf_counter_ns
    run(number, number)
    begin_ns = clock()
    run(number, number)
    middle_ns = clock()
    run(number, number + 1)
    end_ns = clock()
    sample.empty.append(middle_ns - begin_ns)
    sample.raw.append(end_ns - middle_ns)


def _time_call(call: Callable[[Scope], object], scope: Scope, sample: Samples) -> None:
    clock = time.perf_counter_ns
    _nothing(scope)
    begin_ns = clock()
    _nothing(scope)
    middle_ns = clock()
    call(scope)
    end_ns = clock()
    sample.empty.append(middle_ns - begin_ns)
    sample.raw.append(end_ns - middle_ns)


def _nothing(_scope: Scope) -> None:
    pass


def _drop(scope: Scope, part: Part) -> None:
    for index in part.dropped:
        scope[index] = None
