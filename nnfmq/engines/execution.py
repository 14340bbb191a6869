"""The common parts of executions on all engines: run options, the checks of inputs, the copies of outputs, tiers.

A program is a prepared model (`PreparedProgram`). `bind` checks a request and returns a bound program, which a burst
runs again and again: inputs are resolved and output copies chosen once. Callers silence NumPy's floating-point
warnings themselves (`np.errstate(all="ignore")`), because entering that context costs more than a small model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import numpy as np
from msgspec import Struct

from nnfmq.hal.errors import (
    GeneralFailure,
    InvalidArgument,
    MissedDeadlineTransient,
    OutputInsufficientSize,
)
from nnfmq.hal.types import LoopTimeoutDurationNs, Operand, OutputShape, Subgraph, is_scalar
from nnfmq.operations.declaration import NUMPY_TYPES, Shape

Array: TypeAlias = np.ndarray[Any, Any]

_BUFFER_TYPES = (np.ndarray, memoryview)  # a tuple: `np.ndarray | memoryview` would build a union in each call


class RunOptions(Struct):
    """Deadline (monotonic clock), cancellation callback and WHILE timeout of one execution.

    Constant while the execution runs; a burst uses the same object, with another deadline, for the next one.
    """

    deadline_ns: int | None = None
    is_cancelled: Callable[[], bool] | None = None
    loop_timeout_ns: int = LoopTimeoutDurationNs.DEFAULT

    def check(self) -> None:
        """Check the deadline and the cancellation callback.

        Raises:
            MissedDeadlineTransient: If the deadline has passed.
            GeneralFailure: If the execution was cancelled.
        """
        if self.deadline_ns is not None and time.monotonic_ns() >= self.deadline_ns:
            raise MissedDeadlineTransient("the deadline passed before the execution had ended")
        if self.is_cancelled is not None and self.is_cancelled():
            raise GeneralFailure("the execution was cancelled")


DEFAULT_RUN_OPTIONS = RunOptions()


def run_options(
    deadline_ns: int | None = None, is_cancelled: Callable[[], bool] | None = None, loop_timeout_ns: int | None = None
) -> RunOptions:
    """Return the options of one execution; None stands for the default.

    Raises:
        InvalidArgument: If the loop timeout is negative or above the HAL's maximum.
    """
    if deadline_ns is None and is_cancelled is None and loop_timeout_ns is None:
        return DEFAULT_RUN_OPTIONS
    timeout = LoopTimeoutDurationNs.DEFAULT if loop_timeout_ns is None else loop_timeout_ns
    if not 0 <= timeout <= LoopTimeoutDurationNs.MAXIMUM:
        raise InvalidArgument(f"loop timeout {timeout} ns, allowed are 0 to {LoopTimeoutDurationNs.MAXIMUM:d}")
    return RunOptions(deadline_ns, is_cancelled, timeout)


class DynamicOutput(Struct, frozen=True):
    """An output buffer that is allocated when its shape is known (as TensorRT's IOutputAllocator).

    `allocate` gets the result's shape and returns the array to fill. An exception that it raises ends the execution.
    """

    allocate: Callable[[tuple[int, ...]], Array]


class BoundProgram(Protocol):
    """A program with the buffers of one request."""

    def run(self, options: RunOptions = DEFAULT_RUN_OPTIONS) -> tuple[OutputShape, ...]:
        """Execute once: read the inputs, fill the outputs, return the shape of each output. Blocks."""
        ...


class PreparedProgram(Protocol):
    """A prepared model of any engine. Thread-safe."""

    def bind(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> BoundProgram:
        """Bind the program to the buffers of a request.

        `inputs` are arrays with the operands' dtypes and shapes (None: omitted). `outputs` are arrays of the right
        dtype and shape, writable buffers, or `DynamicOutput` (None: not wanted).

        Raises:
            InvalidArgument: If an input does not fit the model.
        """
        ...


class InputSpec(Struct, frozen=True):
    """Dtype and shape of a model input; `shape` is None if it is not fully known, `dimensions` are as declared."""

    index: int
    dtype: np.dtype[Any]
    shape: Shape | None
    dimensions: Shape
    is_optional: bool

    @classmethod
    def of(cls, subgraph: Subgraph, index: int, *, is_optional: bool) -> InputSpec:
        """Return the specification of operand `index`.

        Raises:
            GeneralFailure: If no engine has arrays of the operand's type.
        """
        operand = subgraph.operands[index]
        return cls(index, dtype_of(operand), known_shape(operand), operand.dimensions, is_optional)

    def check(self, array: Array | None) -> None:
        """Check an argument (None: omitted).

        Raises:
            InvalidArgument: If its dtype or shape is not the operand's, or if a required input is omitted.
        """
        if array is None:
            fits = self.is_optional
        elif self.shape is not None:
            fits = array.dtype == self.dtype and array.shape == self.shape
        else:
            fits = array.dtype == self.dtype and is_compatible_shape(self.dimensions, array.shape)
        if not fits:
            received = "nothing" if array is None else f"{array.dtype} {array.shape}"
            raise InvalidArgument(f"input operand {self.index} is {self.dtype} {self.dimensions}, received {received}")


def check_inputs(expected: Sequence[InputSpec], arrays: Sequence[Array | None]) -> None:
    """Check the arguments of a request against the inputs of a model.

    Raises:
        InvalidArgument: If their number, or the dtype or shape of one, is not the model's, or if a required one is
            omitted.
    """
    if len(arrays) != len(expected):
        raise InvalidArgument(f"{len(arrays)} inputs given, the model has {len(expected)}")
    for spec, array in zip(expected, arrays, strict=True):
        if array is None or array.dtype != spec.dtype or array.shape != spec.shape:
            spec.check(array)


def dtype_of(operand: Operand) -> np.dtype[Any]:
    """Return the NumPy dtype of an operand.

    Raises:
        GeneralFailure: If its type has none.
    """
    dtype = NUMPY_TYPES.get(operand.type)
    if dtype is None:
        raise GeneralFailure(f"operands of type {operand.type.name} are not supported")
    return dtype


def known_shape(operand: Operand) -> Shape | None:
    """Return an operand's declared shape, or None if a dimension is unknown (0)."""
    if is_scalar(operand.type):
        return ()
    return operand.dimensions if operand.dimensions and 0 not in operand.dimensions else None


def value_bytes(operand: Operand) -> int:
    """Return the size of an operand's value, 0 if it is not known when the model is prepared."""
    shape = known_shape(operand)
    return 0 if shape is None or operand.type not in NUMPY_TYPES else math.prod(shape) * dtype_of(operand).itemsize


def is_compatible_shape(dimensions: Shape, shape: Shape) -> bool:
    """Return True if `shape` agrees with declared `dimensions`, in which 0 and an empty tuple mean unknown."""
    if not dimensions:
        return True
    return len(dimensions) == len(shape) and all(d in (0, e) for d, e in zip(dimensions, shape, strict=True))


# -- outputs ----------------------------------------------------------------------------------------------------------


def copy_outputs(results: Sequence[Array], outputs: Sequence[Any]) -> tuple[OutputShape, ...]:
    """Copy each result to its output (None: not wanted) and return the results' shapes.

    Raises:
        InvalidArgument: If the number of outputs is not the model's.
        OutputInsufficientSize: If a buffer is too small; nothing was written then.
    """
    if len(results) != len(outputs):
        raise InvalidArgument(f"{len(outputs)} outputs given, the model has {len(results)}")
    pairs = list(zip(results, outputs, strict=True))
    shapes = tuple(_output_shape(result.shape, _is_sufficient(out, result.nbytes)) for result, out in pairs)
    if not all(shape.is_sufficient for shape in shapes):
        short = [position for position, shape in enumerate(shapes) if not shape.is_sufficient]
        raise OutputInsufficientSize(f"the buffers of outputs {short} are too small", shapes)
    # Allocate all destinations before the first copy: a DynamicOutput may raise.
    destinations = [None if out is None else _destination(out, result) for result, out in pairs]
    for result, destination in zip(results, destinations, strict=True):
        if destination is not None and result.size:
            np.copyto(destination, result)
    return shapes


@lru_cache(maxsize=1024)
def _output_shape(dimensions: Shape, is_sufficient: bool) -> OutputShape:
    """Return an OutputShape, cached because every execution returns the same few (they are immutable)."""
    return OutputShape(dimensions, is_sufficient)


def _is_sufficient(out: Any, byte_count: int) -> bool:
    if out is None or isinstance(out, DynamicOutput):
        return True
    return (out.nbytes if isinstance(out, _BUFFER_TYPES) else memoryview(out).nbytes) >= byte_count


def _destination(out: Any, result: Array) -> Array:
    """Return an array of the dtype and shape of `result` over the memory of `out`."""
    if isinstance(out, DynamicOutput):
        return out.allocate(result.shape)
    if isinstance(out, np.ndarray) and out.dtype == result.dtype and out.shape == result.shape:
        return out
    return np.frombuffer(memoryview(out).cast("B"), result.dtype, result.size).reshape(result.shape)


# -- tiered execution -------------------------------------------------------------------------------------------------


class TieredProgram:
    """A baseline program that is replaced by the one that `compile_program` returns, while it is in use.

    The owner decides when and on which thread to call `compile_program`, then calls `tier_up` with its result, or
    `stay`. Executions switch at their next run, on their own thread and without locks. Both tiers must return the same
    results (floats within tolerance). After the switch the baseline program costs nothing: `bind` returns the new
    program's executions, and an older execution replaces its own `run`.
    """

    def __init__(self, program: PreparedProgram, compile_program: Callable[[], PreparedProgram]) -> None:
        self.program = program
        self.compile_program: Callable[[], PreparedProgram] | None = compile_program

    def tier_up(self, program: PreparedProgram) -> None:
        """Use `program` from now on. Call it once."""
        self.program = program
        # Assigned last: a thread that reads None here also reads the new program.
        self.compile_program = None

    def stay(self) -> None:
        """Keep the baseline program for good, for example because compilation failed."""
        self.compile_program = None

    def bind(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> BoundProgram:
        """See `PreparedProgram.bind`."""
        if self.compile_program is None:
            return self.program.bind(inputs, outputs)
        return _TieredExecution(self, inputs, outputs)


class _TieredExecution:
    """A bound program of a `TieredProgram` that was bound before the switch."""

    def __init__(self, owner: TieredProgram, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self._owner, self._inputs, self._outputs = owner, inputs, outputs
        self._program = owner.program
        self._execution = self._program.bind(inputs, outputs)

    def run(self, options: RunOptions = DEFAULT_RUN_OPTIONS) -> tuple[OutputShape, ...]:
        """See `BoundProgram.run`."""
        owner = self._owner
        if owner.compile_program is None:
            if owner.program is not self._program:
                self._program, self._execution = owner.program, owner.program.bind(self._inputs, self._outputs)
            self.run = self._execution.run  # type: ignore[method-assign]  # further runs skip this check
        return self._execution.run(options)
