"""A program that is a sequence of steps: operations of the interpreter, and partitions that are compiled.

A step is a function of a frame, which has the operand values of one execution. `Program.bind` fills a frame with the
inputs of a request and returns `BoundSteps`, which run all steps, one after the other. If one partition computes all
operations, there is nothing to do between steps: the partition then binds the frame itself, and a run is a run of its
launches. From the second run on, partitions write results to the request's arrays, and nothing is copied.

Calls go one way: execution, program, partition, thread pool. What a partition is, `Partition` says; the compiling
engine has it, which this module does not import.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from msgspec import Struct

from nnfmq.base.verbose_log import vlog, vlog_is_on
from nnfmq.engines import memory
from nnfmq.engines.execution import (
    DEFAULT_RUN_OPTIONS,
    BoundProgram,
    InputSpec,
    RunOptions,
    check_inputs,
    copy_outputs,
    dtype_of,
    run_options,
)
from nnfmq.hal.errors import ResourceExhaustedTransient
from nnfmq.hal.types import OperationType, OutputShape, Subgraph
from nnfmq.observe.trace_points import TRACING, TraceRecorder
from nnfmq.operations.declaration import Array, Shape

if TYPE_CHECKING:
    from nnfmq.observe.trace_core import StepTrace

__all__ = [
    "LEDGER_SLOT",
    "BoundSteps",
    "ExecutionFrame",
    "FrameExecution",
    "OutputWriter",
    "Partition",
    "Program",
    "ProgramStep",
    "StepFunction",
]

ExecutionFrame: TypeAlias = list[Any]
"""The operand values of one execution: an array for each operand, None while it has no value; then slots of steps with
state; then the `FrameLedger`, None if all shapes are known; last the `RunOptions`."""

LEDGER_SLOT = -2

StepFunction: TypeAlias = Callable[[ExecutionFrame], None]
OutputWriter: TypeAlias = Callable[[ExecutionFrame], tuple[OutputShape, ...]]
"""Copies the results from a frame to the request's buffers and returns their shapes."""


class FrameExecution(BoundProgram, Protocol):
    """A bound program with its frame. The profiler runs steps on it, and calls `write_outputs` after the last one."""

    frame: ExecutionFrame
    write_outputs: OutputWriter


# -- steps ------------------------------------------------------------------------------------------------------------


@runtime_checkable
class Partition(Protocol):
    """A step that computes several operations with the launches of compiled kernels."""

    launch_count: int

    def __call__(self, frame: ExecutionFrame) -> None:
        """Run all launches, and put the operands that others read into `frame`."""
        ...

    def bind(
        self,
        frame: ExecutionFrame,
        write_outputs: OutputWriter,
        write_directly: Callable[[ExecutionFrame], OutputWriter] | None,
    ) -> FrameExecution:
        """Return the execution of a program that this partition computes alone, on `frame`.

        A run ends with `write_outputs`. `write_directly`, unless it is None, is called between the first run and the
        next, and returns what writes the outputs of the next runs.
        """
        ...

    def name_launches(self, names: Callable[[int], str]) -> None:
        """Record launches in traces under the names that `names` returns for the numbers of their operations."""
        ...

    @property
    def direct_outputs(self) -> tuple[int, ...]:
        """The operands that launches can write to the request's arrays, instead of to the partition's memory."""
        ...

    def write_directly(self, frame: ExecutionFrame, arrays: Mapping[int, Array]) -> None:
        """From the next run on, write those of `direct_outputs` that are in `arrays` there.

        The step must have been called with `frame` before, and puts the arrays into it.
        """
        ...

    def range_runner(self, frame: ExecutionFrame) -> Callable[[int, int], None]:
        """Return `run(first, end)`, which runs these launches on `frame`; an empty range measures the call's overhead.

        For profiling. The step must have been called with `frame` before.
        """
        ...

    def publish_outputs(self, frame: ExecutionFrame) -> None:
        """Put the operands that others read into `frame`, after `range_runner` has computed them."""
        ...


class ProgramStep(Struct, frozen=True):
    """A step of a program, the number of its last operation, and the temporaries that no later step reads."""

    function: StepFunction
    last_operation: int
    dead_after: tuple[int, ...]

    def releasing_function(self, counts_values: bool = False) -> StepFunction:
        """Return `function` followed by the release of dead temporaries, whose memory is then reused while in cache.

        If `counts_values`, the frame's ledger no longer counts them either.
        """
        if not self.dead_after:
            return self.function
        function, dead_after = self.function, self.dead_after

        def run_and_release(frame: ExecutionFrame) -> None:
            function(frame)
            for index in dead_after:
                frame[index] = None

        def run_release_and_count(frame: ExecutionFrame) -> None:
            run_and_release(frame)
            frame[LEDGER_SLOT].release(dead_after)

        return run_release_and_count if counts_values else run_and_release


# -- programs ---------------------------------------------------------------------------------------------------------


class Program:
    """A prepared model, made by `prepare`. Thread-safe. Holds no file descriptor, mapping or thread.

    `prepacked` has the arrays that preparation computed from constants, for a compilation cache. `compiled_ops` are the
    numbers of the operations that another engine has compiled. `steps` and `shapes` (of the operands, None if a shape
    comes with the request) are for the profiler.

    Attributes:
        working_bytes: The most memory that operand values take at the same time, of those with known shapes that are
            not in a compiled partition's arena. A view counts like a copy.
        has_dynamic_values: Whether the shapes of some values come with the request.
    """

    prepacked: tuple[tuple[Array, ...], ...] = ()
    compiled_ops: frozenset[int] = frozenset()

    def __init__(
        self,
        subgraph: Subgraph,
        frame: ExecutionFrame,
        steps: tuple[ProgramStep, ...],
        optional_inputs: frozenset[int],
        shapes: tuple[Shape | None, ...],
        working_bytes: int,
        has_dynamic_values: bool,
    ) -> None:
        types = tuple(operation.type for operation in subgraph.operations)
        ends = [-1 if isinstance(step.function, Partition) else step.last_operation for step in steps]
        self._trace_names = partial(_trace_names, types, ends)  # not a method: an execution need not keep the program
        self.steps = steps
        self.working_bytes = working_bytes
        self.has_dynamic_values = has_dynamic_values
        self.shapes = shapes
        self._frame = frame
        self._functions = tuple(step.releasing_function(has_dynamic_values) for step in steps)
        self._partitions = [step.function for step in steps if isinstance(step.function, Partition)]
        for partition in self._partitions:
            partition.name_launches(partial(_trace_name, types))
        self._is_compiled = len(self._partitions) == len(steps) == 1
        if vlog_is_on("cpuexe"):
            self._functions = tuple(map(_logging_function, self._functions, _step_names(types, steps)))
            self._is_compiled = False  # the functions log, the partition does not
        self._inputs = tuple(
            InputSpec.of(subgraph, index, is_optional=index in optional_inputs) for index in subgraph.input_indexes
        )
        self._outputs = subgraph.output_indexes
        self._output_dtypes = tuple(dtype_of(subgraph.operands[index]) for index in subgraph.output_indexes)
        output_shapes = [shapes[index] for index in subgraph.output_indexes]
        known = tuple(OutputShape(shape) for shape in output_shapes if shape is not None)
        self._output_shapes = known if len(known) == len(output_shapes) else None

    def execute(
        self,
        inputs: Sequence[Array | None],
        outputs: Sequence[Any],
        *,
        deadline_ns: int | None = None,
        is_cancelled: Callable[[], bool] | None = None,
        loop_timeout_ns: int | None = None,
    ) -> tuple[OutputShape, ...]:
        """Run once: read `inputs`, fill `outputs`, and return the shape of each output. Blocks.

        `inputs` are arrays with the operands' dtypes and shapes (None: omitted). `outputs` are arrays of the right
        dtype and shape, writable buffers of at least the output's bytes, or `DynamicOutput` (None: not wanted); they
        must not overlap the inputs. Deadline and cancellation are checked between operations. Each WHILE ends after
        `loop_timeout_ns` (None: LoopTimeoutDurationNs.DEFAULT).

        Raises:
            InvalidArgument: If an input does not fit the model, or the timeout is above the maximum.
            OutputInsufficientSize: If a buffer is too small; it has all shapes, and nothing was written.
            MissedDeadlineTransient: If the deadline or a WHILE's timeout passed.
            ResourceExhaustedTransient: If memory runs out.
            GeneralFailure: If an operation rejects its data, or the execution was cancelled.
        """
        options = run_options(deadline_ns, is_cancelled, loop_timeout_ns)
        with np.errstate(all="ignore"):
            return self.bind(inputs, outputs).run(options)

    def bind(self, inputs: Sequence[Array | None], outputs: Sequence[Any]) -> FrameExecution:
        """Check `inputs` and return the program bound to these buffers, which are as for `execute`.

        Raises:
            InvalidArgument: If an input does not fit the model.
            ResourceExhausted: If the operand values exceed the budget of this process.
        """
        outputs = tuple(outputs)
        write_outputs = _output_writer(self._outputs, outputs, self._output_dtypes, self._output_shapes)
        writes_directly = any(partition.direct_outputs for partition in self._partitions)
        write_directly = partial(self._write_directly, outputs) if writes_directly else None
        frame = self.new_frame()
        self._set_inputs(frame, inputs)
        if self._is_compiled:
            return self._partitions[0].bind(frame, write_outputs, write_directly)
        charge = memory.charge(self.working_bytes)
        return BoundSteps(frame, self._functions, write_outputs, write_directly, charge, self._trace_names)

    def _write_directly(self, outputs: Sequence[Any], frame: ExecutionFrame) -> OutputWriter:
        """Let steps write to `outputs` where that is possible, and return the writer of the others.

        A step may begin to write while it or a later step still reads inputs. So no output may overlap an input.
        """
        arrays: dict[int, Array] = {}
        inputs = [frame[spec.index] for spec in self._inputs if frame[spec.index] is not None]
        if _fit_outputs(outputs, self._output_dtypes, self._output_shapes) and _are_separate([*inputs, *outputs]):
            arrays = {i: out for i, out in zip(self._outputs, outputs, strict=True) if out.flags.carray}
        for partition in self._partitions:
            partition.write_directly(frame, arrays)
        written = arrays.keys() & {index for partition in self._partitions for index in partition.direct_outputs}
        return _output_writer(self._outputs, outputs, self._output_dtypes, self._output_shapes, written)

    def new_frame(self) -> ExecutionFrame:
        """Return a frame with the constants, for `call_in`."""
        return self._frame.copy()

    def call_in(self, frame: ExecutionFrame, inputs: Sequence[Array | None], options: RunOptions) -> list[Array]:
        """Run a subgraph for IF or WHILE in a frame of `new_frame`; the caller has charged `working_bytes`.

        The outputs may be views of inputs, and are valid until the frame is used again.
        """
        self._set_inputs(frame, inputs)
        _run_steps(self._functions, frame, options)
        return [frame[index] for index in self._outputs]

    def detached(self, outputs: list[Array]) -> list[Array]:
        """Return outputs of a call so that they stay valid without its frame: copies of what partitions computed."""
        return [array.copy() if array.base is not None else array for array in outputs] if self._partitions else outputs

    def _set_inputs(self, frame: ExecutionFrame, inputs: Sequence[Array | None]) -> None:
        check_inputs(self._inputs, inputs)
        for spec, array in zip(self._inputs, inputs, strict=True):
            frame[spec.index] = array
        if self.has_dynamic_values:
            frame[LEDGER_SLOT] = memory.FrameLedger()


def _step_names(types: Sequence[OperationType], steps: Sequence[ProgramStep]) -> Iterator[str]:
    """Yield the names of steps in the verbose log: an operation, or the range that one step computes."""
    first = 0
    for step in steps:
        last = step.last_operation
        yield f"operation {last} {types[last].name}" if first == last else f"operations {first} to {last}, compiled"
        first = last + 1


def _logging_function(function: StepFunction, name: str) -> StepFunction:
    def log_and_run(frame: ExecutionFrame) -> None:
        vlog("cpuexe", "%s", name)
        function(frame)

    return log_and_run


def _trace_name(types: Sequence[OperationType], operation: int) -> str:
    return f"[NN_LC_PCO]{operation} {types[operation].name}"


def _trace_names(types: Sequence[OperationType], operations: Sequence[int]) -> list[str]:
    """Return the names of steps in traces; "" for a partition (-1), which records its launches."""
    return ["" if operation < 0 else _trace_name(types, operation) for operation in operations]


# -- executions -------------------------------------------------------------------------------------------------------


def _run_steps(
    steps: Sequence[StepFunction], frame: ExecutionFrame, options: RunOptions, trace: StepTrace | None = None
) -> None:
    """Run all steps on `frame`; check the options before each, and record a slice for each in `trace`.

    The options go into the frame's last slot, where IF and WHILE find them.
    """
    frame[-1] = options
    if options is DEFAULT_RUN_OPTIONS:
        if trace is not None:
            trace.run(steps, frame)
            return
        for step in steps:
            step(frame)
        return
    if trace is not None:
        trace.begin()
    for step in steps:
        options.check()
        step(frame)
        if trace is not None:
            trace.end_step()


class BoundSteps:
    """A bound program that is a sequence of steps. `run` may be called any number of times, by one thread at a time.

    `write_directly` is called once, between the first successful run and the next, and returns the output writer for
    the next runs. A request that is executed only once saves the cost of it.
    """

    __slots__ = (
        "_charge", "_has_run", "_step_trace", "_steps", "_trace_names", "_traced_by", "_write_directly", "frame",
        "write_outputs",
    )  # fmt: skip

    def __init__(
        self,
        frame: ExecutionFrame,
        steps: Sequence[StepFunction],
        write_outputs: OutputWriter,
        write_directly: Callable[[ExecutionFrame], OutputWriter] | None = None,
        charge: memory.Charge | None = None,
        trace_names: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self.frame = frame
        self._steps = steps
        self.write_outputs = write_outputs
        self._write_directly = write_directly
        self._has_run = False
        self._charge = charge  # of the operand values, as long as this object exists
        self._trace_names = trace_names  # of the steps; "" for a step that records its operations itself
        self._traced_by: TraceRecorder | None = None
        self._step_trace: StepTrace | None = None  # in the ring of that

    def run(self, options: RunOptions = DEFAULT_RUN_OPTIONS) -> tuple[OutputShape, ...]:
        """Execute once: read the inputs, fill the outputs, return the shape of each. Raises as `Program.execute`."""
        frame, recorder = self.frame, TRACING.recorder
        try:
            if self._write_directly is not None and self._has_run:
                self.write_outputs, self._write_directly = self._write_directly(frame), None
            if recorder is None and options is DEFAULT_RUN_OPTIONS:  # what `_run_steps` does then, without its call
                frame[-1] = options
                for step in self._steps:
                    step(frame)
            else:
                _run_steps(self._steps, frame, options, None if recorder is None else self._trace_in(recorder))
            shapes = self.write_outputs(frame)
            self._has_run = True
            return shapes
        except (MemoryError, RecursionError) as error:
            raise ResourceExhaustedTransient(f"out of memory while executing the model: {error}") from error

    def _trace_in(self, recorder: TraceRecorder) -> StepTrace | None:
        """Return a recorder of a slice for each step that does not record its launches itself."""
        if self._traced_by is not recorder:
            names = self._trace_names() or [f"[NN_LC_PCO]step {number}" for number in range(len(self._steps))]
            self._step_trace, self._traced_by = recorder.steps(names), recorder
        return self._step_trace


# -- outputs ----------------------------------------------------------------------------------------------------------


def _output_writer(
    indexes: Sequence[int],
    outputs: Sequence[Any],
    dtypes: Sequence[np.dtype[Any]],
    shapes: tuple[OutputShape, ...] | None,
    written: Container[int] = (),
) -> OutputWriter:
    """Return the function that copies the operands at `indexes` to `outputs`; `shapes` is None if one is unknown.

    If every output is an array of its result's dtype and shape, a run copies without checking anything again, and
    leaves out the operands in `written`, which steps write directly.
    """
    if shapes is None or not _fit_outputs(outputs, dtypes, shapes):
        return lambda frame: copy_outputs([frame[index] for index in indexes], outputs)
    known = shapes
    pairs = tuple(pair for pair in zip(indexes, outputs, strict=True) if pair[0] not in written)
    if not pairs:
        return lambda _frame: known
    if len(pairs) == 1:
        ((index, out),) = pairs

        def write_one(frame: ExecutionFrame) -> tuple[OutputShape, ...]:
            out[...] = frame[index]
            return known

        return write_one

    def write_all(frame: ExecutionFrame) -> tuple[OutputShape, ...]:
        for index, out in pairs:
            out[...] = frame[index]
        return known

    return write_all


def _fit_outputs(
    outputs: Sequence[Any], dtypes: Sequence[np.dtype[Any]], shapes: tuple[OutputShape, ...] | None
) -> bool:
    """Return whether all shapes are known, and every output is an array of its result's dtype and shape."""
    return shapes is not None and len(outputs) == len(shapes) and all(map(_is_array_of, outputs, dtypes, shapes))


def _is_array_of(out: Any, dtype: np.dtype[Any], shape: OutputShape) -> bool:
    return type(out) is np.ndarray and out.dtype == dtype and out.shape == shape.dimensions


def _are_separate(arrays: Sequence[Array]) -> bool:
    """Return whether all arrays are contiguous and no two of them share a byte."""
    addresses = [(array.ctypes.data, array.nbytes) for array in arrays]
    ends_before_next = (begin + size <= following for (begin, size), (following, _) in pairwise(sorted(addresses)))
    return all(array.flags.c_contiguous for array in arrays) and all(ends_before_next)
