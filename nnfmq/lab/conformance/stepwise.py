"""Comparison of each compiled operation, and of each partition, with the interpreter's, on the interpreter's inputs.

The outputs of a whole model hide an error that a later operation rounds away, and add up the differences of floats that
are summed in another order. So `compare_operations` executes a model in the interpreter, keeps the value of every
operand, and runs each launch of each partition on these values. Integers and quantized values must be equal bit by bit,
floats within the tolerance of the test vectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nnfmq.engines import interpreter
from nnfmq.engines.compiled.executor import CompiledPartition
from nnfmq.engines.execution import DEFAULT_RUN_OPTIONS
from nnfmq.engines.program import ExecutionFrame, Program
from nnfmq.hal.types import Model
from nnfmq.lab.conformance.criteria import OutputMismatch, describe_mismatch, tolerance_of_float32
from nnfmq.lab.conformance.targets import (
    CompilingEngine,
    ExecutionOutput,
    ExecutionRequest,
    InProcess,
    Prepared,
    TargetMismatch,
)
from nnfmq.lab.conformance.testmodels import Array
from nnfmq.operations.preparation import TO_NHWC


@dataclass(slots=True)
class StepReport:
    """The numbers of compared operations, partitions and outputs, and the outputs that are wrong."""

    operations: int = 0
    partitions: int = 0
    outputs: int = 0
    mismatches: list[OutputMismatch] = field(default_factory=list)


class StepwiseEngine(CompilingEngine):
    """The compiling engine; each compiled operation is also compared with the interpreter's, on the same inputs."""

    @contextmanager
    def prepared(self, model: Model) -> Iterator[Prepared]:
        """Validate the model and prepare it with both engines."""
        with super().prepared(model) as compiled:
            assert isinstance(compiled, InProcess)
            yield _Stepwise(self, model, interpreter.prepare(model), compiled)


@dataclass(frozen=True, slots=True)
class _Stepwise:
    target: StepwiseEngine
    model: Model
    reference: Program
    compiled: InProcess

    def execute(self, execution: ExecutionRequest) -> ExecutionOutput:
        executed = self.compiled.execute(execution)
        report = compare_operations(self.model, self.reference, self.compiled.program, execution.inputs)
        self.target.compared_steps += report.operations
        if report.mismatches:
            raise TargetMismatch(report.mismatches)
        return executed


def compare_operations(
    model: Model,
    reference: Program,
    compiled: Program,
    inputs: Sequence[Array | None],
    tolerance: tuple[float, float] | None = None,
) -> StepReport:
    """Return a comparison of each compiled operation and partition with the interpreter, on these inputs. Blocks.

    `tolerance` is atol and rtol of floats, by default those of the test vectors. Raises what executing `reference`
    raises.
    """
    report = StepReport()
    tolerance = tolerance or tolerance_of_float32(model)
    with np.errstate(all="ignore"):
        values = _all_values(reference, inputs)
        first = 0
        for step in compiled.steps:
            if isinstance(step.function, CompiledPartition):
                operations = range(first, step.last_operation + 1)
                comparison = _PartitionComparison(model, step.function, operations, values, tolerance, report)
                comparison.run(_frame(compiled, inputs))
            first = step.last_operation + 1
    return report


def _all_values(program: Program, inputs: Sequence[Array | None]) -> ExecutionFrame:
    """Run the interpreter's steps and return the frame, in which no temporary has been released."""
    frame = _frame(program, inputs)
    for step in program.steps:
        step.function(frame)
    return frame


def _frame(program: Program, inputs: Sequence[Array | None]) -> ExecutionFrame:
    frame = program.bind(inputs, ()).frame  # nothing copies the results
    frame[-1] = DEFAULT_RUN_OPTIONS
    return frame


class _PartitionComparison:
    """Runs one partition on the interpreter's values, as a whole and launch by launch."""

    def __init__(
        self,
        model: Model,
        partition: CompiledPartition,
        operations: range,
        values: ExecutionFrame,
        tolerance: tuple[float, float],
        report: StepReport,
    ) -> None:
        self._operands = model.main.operands
        self._partition, self._values, self._report = partition, values, report
        self._launches = partition.plan.source_launches
        self._places = {place.index: place for place in partition.plan.allocations}
        computed = {number for launch in self._launches for number in (launch.operation, *launch.fused)}
        views = [model.main.operations[number] for number in operations if number not in computed]
        self._views = {view.outputs[0]: view.inputs[0] for view in views}
        self._tolerance = tolerance
        report.operations += len(operations)
        report.partitions += 1

    def run(self, frame: ExecutionFrame) -> None:
        """Compare the outputs of the partition, then those of each of its launches."""
        for index in self._partition.plan.inputs:
            frame[index] = self._values[index]
        self._partition(frame)
        for index, _, _ in self._partition.plan.outputs:
            self._compare(f"the partition's output {index}", self._values[index], frame[index])
        self._run_launches(frame)

    def _run_launches(self, frame: ExecutionFrame) -> None:
        run = self._partition.range_runner(frame)
        own: set[int] = set()
        for number, launch in enumerate(self._launches):
            if number and launch.operation != self._launches[number - 1].operation:
                own = set()
            self._fill(frame, (index for index in launch.inputs if self._root(index) not in own))
            run(number, number + 1)
            own.update(map(self._root, launch.outputs))
            for index, expected in self._expected(launch.outputs):
                label = f"operation {launch.operation}, launch {number}, operand {index if index >= 0 else ~index}"
                self._compare(label, expected, self._in_arena(frame, index))

    def _fill(self, frame: ExecutionFrame, indexes: Iterable[int]) -> None:
        """Write the interpreter's values of operands to the arena; inputs of the partition are in the frame."""
        for index, value in self._expected(indexes):
            if self._root(index) in self._places:
                place = self._in_arena(frame, index)
                place[...] = np.asarray(value).reshape(place.shape)

    def _expected(self, indexes: Iterable[int]) -> Iterator[tuple[int, Array]]:
        """Yield operands with the interpreter's values. Intermediates of an operation have none."""
        for index in indexes:
            if index < 0:
                yield index, np.transpose(self._values[~index], TO_NHWC)
            elif index < len(self._operands):
                yield index, self._values[index]

    def _root(self, index: int) -> int:
        while index in self._views:
            index = self._views[index]
        return index

    def _in_arena(self, frame: ExecutionFrame, index: int) -> Array:
        return self._partition.arena_view(frame, self._places[self._root(index)])

    def _compare(self, label: str, expected: Any, actual: Array) -> None:
        want, got = np.asarray(expected), actual
        self._report.outputs += 1
        wrong = _wrong_elements(want, got.reshape(want.shape), self._tolerance)
        if wrong.any():
            self._report.mismatches.append(describe_mismatch(label, want, got.reshape(want.shape), wrong))


def _wrong_elements(want: Array, got: Array, tolerance: tuple[float, float]) -> Array:
    if want.dtype.kind != "f":
        return np.asarray(want != got)
    atol, rtol = tolerance
    expected, actual = want.astype(np.float64), got.astype(np.float64)
    close = np.abs(actual - expected) <= atol + rtol * np.abs(expected)
    return np.asarray(~(close | (expected == actual) | (np.isnan(expected) & np.isnan(actual))))
