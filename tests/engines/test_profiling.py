"""Profiling: the order of timed calls, and timings computed from a fake clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.small_models import one_operation, vector

from nnfmq.engines import interpreter
from nnfmq.engines.execution import DEFAULT_RUN_OPTIONS, DynamicOutput
from nnfmq.engines.profiling import Timings, measure
from nnfmq.engines.program import BoundSteps, ExecutionFrame, Partition, ProgramStep
from nnfmq.hal.types import Operand, OperandType, OperationType

F32 = OperandType.TENSOR_FLOAT32


class Clock:
    """A fake clock: each reading takes 10 ns; fake work advances `now_ns`."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 10
        return self.now_ns


class TwoLaunches(Partition):
    """A partition with launches of 500 and 300 ns and a call overhead of 70. `log` has the ranges that were run."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.launch_count = 2
        self.log: list[Any] = []

    def __call__(self, frame: ExecutionFrame) -> None:
        self._clock.now_ns += 800
        self.publish_outputs(frame)

    def range_runner(self, frame: ExecutionFrame) -> Callable[[int, int], None]:
        def run(first: int, last: int) -> None:
            self._clock.now_ns += 70 + sum((500, 300)[first:last])
            self.log.append((first, last))

        return run

    def publish_outputs(self, frame: ExecutionFrame) -> None:
        self.log.append("leave")
        frame[0] = np.zeros((2, 3))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "perf_counter_ns", made)
    return made


def measured(clock: Clock, runs: int) -> tuple[Any, TwoLaunches, list[Any]]:
    """Measure a partition, and another step of 1000 ns that reads its output."""
    partition, seen = TwoLaunches(clock), []

    def other(frame: ExecutionFrame) -> None:
        seen.append(frame[0])
        clock.now_ns += 1000

    def write_outputs(frame: ExecutionFrame) -> Any:
        seen.append(frame[0])
        clock.now_ns += 40

    steps = (ProgramStep(partition, 1, ()), ProgramStep(other, 2, (0,)))
    execution = BoundSteps(
        [None, None, DEFAULT_RUN_OPTIONS], [step.releasing_function() for step in steps], write_outputs
    )
    return measure(SimpleNamespace(steps=steps), execution, runs), partition, seen  # type: ignore[arg-type]


def test_the_overhead_of_a_call_is_subtracted_from_each_step(clock: Clock) -> None:
    profile, _, _ = measured(clock, runs=4)

    assert [[launch.p50_ns for launch in step] for step in profile.steps] == [[500, 300], [1000]]
    assert [launch.min_ns for launch in profile.steps[0]] == [500, 300]
    assert profile.output_copy.p50_ns == 40


def test_whole_runs_are_timed_without_subtracting_overhead(clock: Clock) -> None:
    profile, _, _ = measured(clock, runs=4)

    assert profile.runs == [800 + 1000 + 40 + 10] * 4


def test_a_pass_runs_the_launches_in_order_each_after_two_empty_calls(clock: Clock) -> None:
    _, partition, _ = measured(clock, runs=1)

    ranges = [entry for entry in partition.log if entry != "leave"]
    assert ranges == [(0, 0), (0, 0), (0, 1), (1, 1), (1, 1), (1, 2)]


def test_outputs_of_a_partition_are_published_and_temporaries_released(clock: Clock) -> None:
    _, _, seen = measured(clock, runs=1)

    assert [None if array is None else array.shape for array in seen[-2:]] == [(2, 3), None]


def test_shapes_of_operands_between_steps_are_recorded(clock: Clock) -> None:
    profile, _, _ = measured(clock, runs=1)

    assert profile.shapes == {0: (2, 3)}


def test_overhead_is_subtracted_from_timings_which_are_never_negative() -> None:
    assert Timings([900, 700, 800], [100, 300, 200]).p50_ns == 600
    assert Timings([900, 700, 800], [100, 300, 200]).min_ns == 600


def test_a_minimum_is_not_above_the_median() -> None:
    """A step that takes as long in each run, and an overhead that was small once."""
    found = Timings([301, 300, 301], [60, 10, 60])
    assert found.min_ns == found.p50_ns == 241
    assert (Timings([5, 5], [9, 9]).p50_ns, Timings([5, 5], [9, 9]).min_ns) == (0, 0)


def test_a_time_below_a_tenth_of_the_overhead_gives_no_rate() -> None:
    assert (Timings([331], [300]).rate_ns, Timings([330], [300]).rate_ns, Timings([5], [9]).rate_ns) == (31, None, None)
    assert Timings([0], [0]).rate_ns is None


def test_timings_are_added_run_by_run() -> None:
    total = Timings.sum([Timings([1, 20], [0, 2]), Timings([300, 4], [5, 6])])

    assert (total.elapsed, total.overhead) == ([301, 24], [5, 8])


def test_profiling_the_interpreter_does_not_change_its_results() -> None:
    program = interpreter.prepare(one_operation(OperationType.RELU, [Operand(F32, (4,))], Operand(F32, (4,))))
    output = np.empty(4, np.float32)
    execution = program.bind([np.float32([-1, 2, -3, 4])], [output])

    profile = measure(program, execution, runs=2)

    assert not isinstance(program.steps[0].function, Partition)
    assert [len(launch.elapsed) for step in profile.steps for launch in step] == [2]
    assert output.tolist() == [0, 2, 0, 4]


def test_a_shape_that_comes_with_the_request_is_recorded() -> None:
    model = one_operation(OperationType.RESHAPE, [Operand(F32, (6,)), Operand(vector([1, 1])[0].type, (2,))], F32_2D)
    program = interpreter.prepare(model)
    buffers: list[Any] = []
    execution = program.bind(
        [np.zeros(6, np.float32), np.int32([3, 2])],
        [DynamicOutput(lambda shape: buffers.append(np.empty(shape, "f4")) or buffers[-1])],
    )

    profile = measure(program, execution, runs=1)

    output = model.main.output_indexes[0]
    assert (program.shapes[output], profile.shapes[output]) == (None, (3, 2))


F32_2D = Operand(F32, (0, 0))
