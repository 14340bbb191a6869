"""Profiling: wall times of whole runs and, interleaved with them, of each step.

A profiling pass executes all steps in order, as a run does, so that each step finds the caches as its predecessor left
them; a step is never repeated by itself. Before each step the same call is timed without work, twice: the first brings
Python's own data back into the caches, the second measures the overhead of timing. The launches of a compiled partition
are timed one by one (`Partition`); every other step is one unit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from nnfmq.engines.execution import DEFAULT_RUN_OPTIONS
from nnfmq.engines.program import ExecutionFrame, FrameExecution, Partition, Program, ProgramStep
from nnfmq.operations.declaration import Shape

__all__ = ["Profile", "Timings", "measure"]

_WARM_UP_RUNS = 3


@dataclass(slots=True)
class Timings:
    """Elapsed times of one step in each run, and the overhead of timing measured just before, in nanoseconds."""

    elapsed: list[int] = field(default_factory=list)
    overhead: list[int] = field(default_factory=list)

    @property
    def p50_ns(self) -> int:
        """The median elapsed time less the median overhead, at least 0."""
        return max(0, median_low(self.elapsed) - median_low(self.overhead))

    @property
    def rate_ns(self) -> int | None:
        """The median to divide by; None below a tenth of the overhead, which varies by as much."""
        p50_ns = self.p50_ns
        return p50_ns if 10 * p50_ns > median_low(self.overhead) else None

    @property
    def min_ns(self) -> int:
        """The minimum elapsed time less the minimum overhead, at least 0; the median if the overhead varies by more."""
        return min(self.p50_ns, max(0, min(self.elapsed) - min(self.overhead)))

    @classmethod
    def sum(cls, several: Iterable[Timings]) -> Timings:
        """Return the timings of several steps, added run by run."""
        steps = list(several)
        elapsed = [sum(run) for run in zip(*(step.elapsed for step in steps), strict=True)]
        return cls(elapsed, [sum(run) for run in zip(*(step.overhead for step in steps), strict=True)])


@dataclass(slots=True)
class Profile:
    """Times of whole `runs` in ns, timings of the launches of each step, and of the output copy after the last step.

    `shapes` are those of the operands that had a value after some step.
    """

    steps: list[list[Timings]]
    runs: list[int] = field(default_factory=list)
    output_copy: Timings = field(default_factory=Timings)
    shapes: dict[int, Shape] = field(default_factory=dict)


def measure(
    program: Program, execution: FrameExecution, runs: int, progress: Callable[[int, int], None] | None = None
) -> Profile:
    """Run `execution`, which `program` has bound, `runs` times as a whole and `runs` times step by step, interleaved.

    `progress` receives the number of completed runs, and of all. Blocks. The caller silences NumPy's warnings. Raises
    what the program raises.
    """
    for _ in range(_WARM_UP_RUNS):
        execution.run()
    functions = [step.function for step in program.steps]
    counts = [function.launch_count if isinstance(function, Partition) else 1 for function in functions]
    profile = Profile([[Timings() for _ in range(count)] for count in counts])
    profile.shapes.update(_operand_shapes(program.steps, execution.frame))
    for _ in range(runs):
        begin_ns = time.perf_counter_ns()
        execution.run()
        profile.runs.append(time.perf_counter_ns() - begin_ns)
        _profile_steps(program.steps, execution, profile)
        if progress is not None:
            progress(len(profile.runs), runs)
    return profile


def _operand_shapes(steps: Sequence[ProgramStep], frame: ExecutionFrame) -> dict[int, Shape]:
    """Run all steps and return the shapes of the operands that have a value after one of them."""
    shapes = {}
    for step in steps:
        step.function(frame)
        shapes.update({i: array.shape for i, array in enumerate(frame[:-1]) if hasattr(array, "shape")})
    for step in steps:
        _release(frame, step)
    return shapes


def _profile_steps(steps: Sequence[ProgramStep], execution: FrameExecution, profile: Profile) -> None:
    frame = execution.frame
    frame[-1] = DEFAULT_RUN_OPTIONS
    for step, timings in zip(steps, profile.steps, strict=True):
        function = step.function
        if isinstance(function, Partition):
            run = function.range_runner(frame)
            for number, timing in enumerate(timings):
                _time_launch(run, number, timing)
            function.publish_outputs(frame)
            _release(frame, step)
        else:
            _time_call(step.releasing_function(), frame, timings[0])
    _time_call(execution.write_outputs, frame, profile.output_copy)


def _time_launch(run: Callable[[int, int], None], number: int, timings: Timings) -> None:
    clock = time.perf_counter_ns
    run(number, number)
    begin_ns = clock()
    run(number, number)
    middle_ns = clock()
    run(number, number + 1)
    end_ns = clock()
    timings.overhead.append(middle_ns - begin_ns)
    timings.elapsed.append(end_ns - middle_ns)


def _time_call(call: Callable[[ExecutionFrame], object], frame: ExecutionFrame, timings: Timings) -> None:
    clock = time.perf_counter_ns
    _empty_call(frame)
    begin_ns = clock()
    _empty_call(frame)
    middle_ns = clock()
    call(frame)
    end_ns = clock()
    timings.overhead.append(middle_ns - begin_ns)
    timings.elapsed.append(end_ns - middle_ns)


def _empty_call(_frame: ExecutionFrame) -> None:
    pass


def _release(frame: ExecutionFrame, step: ProgramStep) -> None:
    for index in step.dead_after:
        frame[index] = None
