"""Execution targets: what prepares a model and executes it, and the engines in this process.

`driver_targets` has the devices of a driver, `stepwise` the compiling engine operation by operation, `runner`
the names of all. Outputs are filled with 0xA5 before, so that bytes which were not written are not mistaken for zeros.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from nnfmq.engines import interpreter
from nnfmq.engines.program import Program
from nnfmq.hal.types import Model, OutputShape, is_scalar
from nnfmq.lab.conformance.criteria import OutputMismatch
from nnfmq.lab.conformance.testmodels import Array
from nnfmq.validation import validate_model

if TYPE_CHECKING:
    from nnfmq.client.model.compiled_model import CompiledModel

INTERPRETER_LEVEL = 8
FILL_BYTE = 0xA5
MIN_BYTES = 1
"""The size of an empty output's buffer: a client may not ask for no bytes."""


@dataclass(frozen=True, slots=True)
class ExecutionRequest:
    """One execution: inputs, the expected outputs, the bytes that the first output's buffer lacks, the loop timeout."""

    inputs: Sequence[Array | None]
    expected: Sequence[Array]
    short_bytes: int = 0
    loop_timeout_ns: int | None = None

    @property
    def output_sizes(self) -> list[int]:
        """The size of each output's buffer in bytes; at least 1, because a client cannot request an empty one."""
        lacking = [self.short_bytes, *[0] * (len(self.expected) - 1)]
        return [max(array.nbytes - less, MIN_BYTES) for array, less in zip(self.expected, lacking, strict=True)]


@dataclass(frozen=True, slots=True)
class ExecutionOutput:
    """The reported shapes (none: as in the model), and the bytes of each output."""

    shapes: tuple[OutputShape, ...]
    outputs: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PlanCounts:
    """The plans of models that a runtime prepared: numbers of models, but for `steps`.

    Attributes:
        simple: Models on one device.
        compound: Models on several devices, or with IF or WHILE that the runtime interprets.
        steps: The executed and interpreted steps of these.
        undivided: Models of several operations that are on one device.
        unprepared: Models that only the CPU device prepared, because a device failed.
        fell_back: Models of which something was executed by the CPU device, because a device failed.
    """

    simple: int = 0
    compound: int = 0
    steps: int = 0
    undivided: int = 0
    unprepared: int = 0
    fell_back: int = 0

    def __add__(self, other: PlanCounts) -> PlanCounts:
        return PlanCounts(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: PlanCounts) -> PlanCounts:
        return PlanCounts(*map(operator.sub, astuple(self), astuple(other)))


NO_PLANS = PlanCounts()


class TargetMismatch(Exception):
    """A target has compared its own executions with each other and found differences."""

    def __init__(self, mismatches: Sequence[OutputMismatch]) -> None:
        super().__init__("; ".join(mismatch.reason for mismatch in mismatches))
        self.mismatches = tuple(mismatches)


def has_specified_outputs(model: Model) -> bool:
    """Return whether all extents of the main subgraph's outputs are known, as a fenced execution requires (FEN-7)."""
    outputs = (model.main.operands[index] for index in model.main.output_indexes)
    return all(is_scalar(output.type) or (output.dimensions and 0 not in output.dimensions) for output in outputs)


class Prepared(Protocol):
    """A model that can be executed."""

    def execute(self, execution: ExecutionRequest) -> ExecutionOutput:
        """Execute once. Blocks. Raises the errors of the engine or driver."""
        ...


class ExecutionTarget(Protocol):
    """An engine or device that prepares models, one at a time."""

    @property
    def feature_level(self) -> int:
        """The highest supported feature level."""
        ...

    @property
    def rejects_unspecified_boundaries(self) -> bool:
        """Whether IF and WHILE may not have operands of unknown size at their boundaries (N-VAL-20)."""
        ...

    @property
    def allows_short_buffers(self) -> bool:
        """Whether an output's buffer can be too small; managed buffers always have the size of their role."""
        ...

    @property
    def rejects_unspecified_outputs(self) -> bool:
        """Whether every output must be fully specified (FEN-7)."""
        ...

    @property
    def compared_steps(self) -> int:
        """The number of compiled operations that were compared with the interpreter's so far."""
        ...

    @property
    def plans(self) -> PlanCounts:
        """The plans of a runtime so far; nothing of another target."""
        ...

    def prepared(self, model: Model) -> AbstractContextManager[Prepared]:
        """Prepare a model until the block ends. Blocks. Raises the errors of the engine or driver."""
        ...

    def supports(self, model: Model) -> bool:
        """Return whether the target supports all operations of the model."""
        ...

    def close(self) -> None:
        """Release all resources. Idempotent."""
        ...


class DeviceArrangement(Protocol):
    """The devices on which a runtime may execute a model."""

    def connect(self) -> object:
        """Connect to the drivers, if that has not happened yet. Raises if a device does not exist."""
        ...

    def prepared(self, model: Model) -> AbstractContextManager[CompiledModel]:
        """Prepare a model, whose pools are in shared memory, until the block ends. Blocks."""
        ...

    def close(self) -> None:
        """Release all resources; the next use connects again. Idempotent."""
        ...


class Interpreter:
    """The interpreter in this process, as a framework uses it: boundaries of unknown size are allowed."""

    feature_level = INTERPRETER_LEVEL
    rejects_unspecified_boundaries = False
    allows_short_buffers = True
    rejects_unspecified_outputs = False
    compared_steps = 0
    plans = NO_PLANS

    @contextmanager
    def prepared(self, model: Model) -> Iterator[Prepared]:
        """Validate and prepare."""
        validate_model(model, allow_unspecified_boundaries=True)
        yield InProcess(self.prepare(model))

    def prepare(self, model: Model) -> Program:
        """Prepare a validated model."""
        return interpreter.prepare(model)

    def supports(self, model: Model) -> bool:
        """Return whether the target supports all operations of the model."""
        return True

    def close(self) -> None:
        """Do nothing: there are no resources."""


class CompilingEngine(Interpreter):
    """The compiling engine in this process, which needs the extra `compiled`."""

    def prepare(self, model: Model) -> Program:
        """Compile a validated model."""
        from nnfmq.engines.compiled.partition import prepare

        return prepare(model)

    def close(self) -> None:
        """End the thread pool."""
        from nnfmq.engines.compiled.thread_pool import default_thread_pool

        default_thread_pool().stop()


@dataclass(frozen=True, slots=True)
class InProcess:
    """A program of an engine in this process."""

    program: Program

    def execute(self, execution: ExecutionRequest) -> ExecutionOutput:
        """Execute once."""
        raw = [np.full(size, FILL_BYTE, np.uint8) for size in execution.output_sizes]
        buffers = [_like(array, bytes_) for array, bytes_ in zip(execution.expected, raw, strict=True)]
        shapes = self.program.execute(execution.inputs, buffers, loop_timeout_ns=execution.loop_timeout_ns)
        return ExecutionOutput(shapes, tuple(array.tobytes() for array in raw))


def _like(expected: Array, raw: Array) -> Array:
    """Return `raw` as an array like the expected one if the sizes are equal, so that an engine writes it in place."""
    fits = raw.nbytes == expected.nbytes
    return raw.view(expected.dtype).reshape(expected.shape) if fits else raw
