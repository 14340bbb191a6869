"""Execution targets: the interpreter or compiling engine in this process, or a driver's device over one of its paths.

A target prepares a model and executes requests as AOSP's harness builds them: arguments without dimensions, inputs in
pool 0 and outputs in pool 1, each aligned to 64 bytes, an omitted input without a value, and one byte for an empty
output. Outputs are filled with 0xA5 before, so that bytes which were not written are not mistaken for zeros. On the
paths memory-domain (synchronous), memory-domain-async and so on, each argument with a value is a driver-managed buffer,
which is filled and read by copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import numpy as np

from nnfmq.conformance.testmodels import Array
from nnfmq.engines import interpreter
from nnfmq.fence import Fence
from nnfmq.hal.types import (
    DataLocation,
    ExecutionConfig,
    ExecutionPreference,
    Model,
    OutputShape,
    Request,
    RequestArgument,
)
from nnfmq.memory import Memory
from nnfmq.runtime.buffer_allocation import ModelRole
from nnfmq.runtime.client import Client
from nnfmq.runtime.client_device import Device
from nnfmq.runtime.connect import connect
from nnfmq.runtime.managed_buffer import Buffer
from nnfmq.runtime.prepared_model import PreparedModel
from nnfmq.validation import validate_model

MEMORY_DOMAIN = "memory-domain"
PATHS = (
    "interpreter",
    "compiled",
    "sync",
    "async",
    "fenced",
    "reusable",
    "burst",
    "aidl-burst",
    MEMORY_DOMAIN,
    f"{MEMORY_DOMAIN}-async",
    f"{MEMORY_DOMAIN}-fenced",
    f"{MEMORY_DOMAIN}-aidl-burst",
)
INTERPRETER_LEVEL = 8
TIMEOUT_S = 60.0
_AS_COMPILED = ExecutionPreference.SUSTAINED_SPEED  # no baseline program runs before the compiled one
_ALIGNMENT = 64
_FILL_BYTE = 0xA5
_MIN_BYTES = 1  # a client may not ask for no bytes


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
        return [max(array.nbytes - less, _MIN_BYTES) for array, less in zip(self.expected, lacking, strict=True)]


@dataclass(frozen=True, slots=True)
class ExecutionOutput:
    """The reported shapes (none: as in the model), and the bytes of each output."""

    shapes: tuple[OutputShape, ...]
    outputs: tuple[bytes, ...]


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

    def prepared(self, model: Model) -> AbstractContextManager[Prepared]:
        """Prepare a model until the block ends. Blocks. Raises the errors of the engine or driver."""
        ...

    def supports(self, model: Model) -> bool:
        """Return whether the target supports all operations of the model."""
        ...

    def close(self) -> None:
        """Release all resources. Idempotent."""
        ...


class Interpreter:
    """The interpreter in this process, as a framework uses it: boundaries of unknown size are allowed."""

    feature_level = INTERPRETER_LEVEL
    rejects_unspecified_boundaries = False
    allows_short_buffers = True
    rejects_unspecified_outputs = False

    @contextmanager
    def prepared(self, model: Model) -> Iterator[Prepared]:
        """Validate and prepare."""
        validate_model(model, allow_unspecified_boundaries=True)
        yield _InProcess(self.prepare(model))

    def prepare(self, model: Model) -> interpreter.Program:
        """Prepare a validated model."""
        return interpreter.prepare(model)

    def supports(self, model: Model) -> bool:
        """Return whether the target supports all operations of the model."""
        return True

    def close(self) -> None:
        """Do nothing: there are no resources."""


class CompilingEngine(Interpreter):
    """The compiling engine in this process, which needs the extra `compiled`."""

    def prepare(self, model: Model) -> interpreter.Program:
        """Compile a validated model."""
        from nnfmq.engines.compiled.partition import prepare

        return prepare(model)

    def close(self) -> None:
        """End the thread pool."""
        from nnfmq.engines.compiled.thread_pool import default_thread_pool

        default_thread_pool().stop()


@dataclass(frozen=True, slots=True)
class _InProcess:
    program: interpreter.Program

    def execute(self, execution: ExecutionRequest) -> ExecutionOutput:
        raw = [np.full(size, _FILL_BYTE, np.uint8) for size in execution.output_sizes]
        buffers = [_like(array, bytes_) for array, bytes_ in zip(execution.expected, raw, strict=True)]
        shapes = self.program.execute(execution.inputs, buffers, loop_timeout_ns=execution.loop_timeout_ns)
        return ExecutionOutput(shapes, tuple(array.tobytes() for array in raw))


def _like(expected: Array, raw: Array) -> Array:
    """Return `raw` as an array like the expected one if the sizes are equal, so that an engine writes it in place."""
    fits = raw.nbytes == expected.nbytes
    return raw.view(expected.dtype).reshape(expected.shape) if fits else raw


class Driver:
    """A device of a driver. After `close`, the next use connects to a new driver."""

    rejects_unspecified_boundaries = True

    def __init__(self, device: str, connect_to: str | None, path: str) -> None:
        self._name = device
        self._connect_to = connect_to
        self._in_buffers = path.startswith(MEMORY_DOMAIN)
        self._mode = (path.removeprefix(MEMORY_DOMAIN).lstrip("-") or "sync") if self._in_buffers else path
        self.allows_short_buffers = not self._in_buffers
        self._client: Client | None = None
        self._device: Device | None = None

    @property
    def rejects_unspecified_outputs(self) -> bool:
        """Whether executions are fenced."""
        return self._mode == "fenced"

    @property
    def worker_pid(self) -> int:
        """The pid of the driver process that serves this client; connects if necessary."""
        self._connected()
        assert self._client is not None
        return self._client.worker_pid

    @property
    def feature_level(self) -> int:
        """The device's feature level."""
        return self._connected().info.feature_level

    def _connected(self) -> Device:
        if self._device is None:
            embedded = self._connect_to == "embedded"
            self._client = connect(embedded=True) if embedded else connect(self._connect_to)
            self._device = self._client.device(self._name)
        return self._device

    def supports(self, model: Model) -> bool:
        """Return whether the target supports all operations of the model."""
        with _in_shared_memory(model) as sent:
            return all(self._connected().supported_operations(sent, timeout=TIMEOUT_S))

    @contextmanager
    def prepared(self, model: Model) -> Iterator[Prepared]:
        """Prepare the model on the device."""
        device = self._connected()
        with (
            _in_shared_memory(model) as sent,
            device.prepare(sent, preference=_AS_COMPILED, timeout=TIMEOUT_S) as prepared,
        ):
            run = _EXECUTE[self._mode]
            yield _InBuffers(device, prepared, run) if self._in_buffers else _InDriver(prepared, run)

    def close(self) -> None:
        """Close the connection; an embedded driver exits."""
        client, self._client, self._device = self._client, None, None
        if client is not None:
            client.close()


@contextmanager
def _in_shared_memory(model: Model) -> Iterator[Model]:
    """Yield the model with its memory pools copied to shared memory."""
    with ExitStack() as stack:
        pools = [stack.enter_context(Memory.create(pool.size_bytes, "nnfmq-constants")) for pool in model.pools]
        for memory, pool in zip(pools, model.pools, strict=True):
            memory.view[: pool.size_bytes] = pool.view
        yield replace(model, pools=tuple(pools))


@dataclass(frozen=True, slots=True)
class _InDriver:
    prepared: PreparedModel
    run: _Run

    def execute(self, execution: ExecutionRequest) -> ExecutionOutput:
        sizes = [0 if array is None else array.nbytes for array in execution.inputs]
        input_locations, input_bytes = _locations(0, sizes)
        output_locations, output_bytes = _locations(1, execution.output_sizes)
        pairs = zip(execution.inputs, input_locations, strict=True)
        inputs = [
            RequestArgument(True) if array is None else RequestArgument(False, location) for array, location in pairs
        ]
        outputs = [RequestArgument(False, location) for location in output_locations]
        with ExitStack() as stack:
            source = stack.enter_context(Memory.create(input_bytes, "nnfmq-inputs", one_writer=True))
            sink = stack.enter_context(Memory.create(output_bytes, "nnfmq-outputs"))
            sink.view[:] = bytes([_FILL_BYTE]) * sink.size_bytes
            for array, location in zip(execution.inputs, input_locations, strict=True):
                if array is not None:
                    source.view[location.offset : location.offset + array.nbytes] = np.ascontiguousarray(
                        array
                    ).tobytes()
            request = Request(tuple(inputs), tuple(outputs), (source, sink))
            shapes = self.run(self.prepared, request, _config(execution))
            return ExecutionOutput(
                shapes,
                tuple(
                    bytes(sink.view[location.offset : location.offset + location.length])
                    for location in output_locations
                ),
            )


_Run: TypeAlias = Callable[[PreparedModel, Request, ExecutionConfig], tuple[OutputShape, ...]]


def _execute_sync(prepared: PreparedModel, request: Request, config: ExecutionConfig) -> tuple[OutputShape, ...]:
    return prepared.execute_request(request, config, timeout=TIMEOUT_S).shapes


def _execute_async(prepared: PreparedModel, request: Request, config: ExecutionConfig) -> tuple[OutputShape, ...]:
    return prepared.execute_request_async(request, config, timeout=TIMEOUT_S).result(TIMEOUT_S).shapes


def _execute_fenced(prepared: PreparedModel, request: Request, config: ExecutionConfig) -> tuple[OutputShape, ...]:
    """Execute with a fence that is signaled after the launch. Returns no shapes, because all are specified."""
    with (
        Fence.create() as begin,
        prepared.execute_request_fenced(request, config, wait_for=[begin], timeout=TIMEOUT_S) as launched,
    ):
        begin.signal()
        launched.result(TIMEOUT_S)
    return ()


def _execute_reusable(prepared: PreparedModel, request: Request, config: ExecutionConfig) -> tuple[OutputShape, ...]:
    """Execute twice; the second result counts."""
    with prepared.create_reusable_request(request, config, timeout=TIMEOUT_S) as execution:
        execution.compute(timeout=TIMEOUT_S)
        sink = request.pools[1]
        assert isinstance(sink, Memory)
        sink.view[:] = bytes([_FILL_BYTE]) * sink.size_bytes
        return execution.compute(timeout=TIMEOUT_S).shapes


def _execute_burst(prepared: PreparedModel, request: Request, config: ExecutionConfig) -> tuple[OutputShape, ...]:
    with prepared.request_burst(timeout=TIMEOUT_S) as burst:
        return burst.execute_request(request, config, timeout=TIMEOUT_S).shapes


def _execute_aidl_burst(prepared: PreparedModel, request: Request, config: ExecutionConfig) -> tuple[OutputShape, ...]:
    with prepared.aidl_burst(timeout=TIMEOUT_S) as burst:
        return burst.execute_synchronously(request, config, timeout=TIMEOUT_S).shapes


_EXECUTE: dict[str, _Run] = {
    "sync": _execute_sync,
    "async": _execute_async,
    "fenced": _execute_fenced,
    "reusable": _execute_reusable,
    "burst": _execute_burst,
    "aidl-burst": _execute_aidl_burst,
}


@dataclass(frozen=True, slots=True)
class _InBuffers:
    device: Device
    prepared: PreparedModel
    run: _Run

    def execute(self, execution: ExecutionRequest) -> ExecutionOutput:
        with ExitStack() as stack:
            filled = [
                None if array is None else self._filled(stack, i, array) for i, array in enumerate(execution.inputs)
            ]
            results = [self._allocated(stack, outputs=[(self.prepared, i)]) for i in range(len(execution.expected))]
            buffers = [buffer for buffer in (*filled, *results) if buffer is not None]
            arguments = (RequestArgument(location=DataLocation(index)) for index in range(len(buffers)))
            inputs = tuple(RequestArgument(True) if buffer is None else next(arguments) for buffer in filled)
            request = Request(inputs, tuple(arguments), tuple(buffer.pool for buffer in buffers))
            shapes = self.run(self.prepared, request, _config(execution))
            pairs = zip(results, execution.expected, strict=True)
            return ExecutionOutput(shapes, tuple(_content(buffer, array) for buffer, array in pairs))

    def _allocated(
        self, stack: ExitStack, *, inputs: Sequence[ModelRole] = (), outputs: Sequence[ModelRole] = ()
    ) -> Buffer:
        return stack.enter_context(self.device.allocate(inputs=inputs, outputs=outputs, timeout=TIMEOUT_S))

    def _filled(self, stack: ExitStack, index: int, array: Array) -> Buffer:
        buffer = self._allocated(stack, inputs=[(self.prepared, index)])
        with Memory.create(max(array.nbytes, _MIN_BYTES), "nnfmq-inputs") as source:
            source.view[: array.nbytes] = np.ascontiguousarray(array).tobytes()
            buffer.copy_from(source, array.shape, timeout=TIMEOUT_S)
        return buffer


def _content(buffer: Buffer, expected: Array) -> bytes:
    """Return as many bytes as expected, so that a buffer of another size fails. An empty buffer cannot be copied."""
    if not expected.nbytes:
        return b""
    with Memory.create(expected.nbytes, "nnfmq-outputs") as sink:
        buffer.copy_to(sink, timeout=TIMEOUT_S)
        return bytes(sink.view)


def _config(execution: ExecutionRequest) -> ExecutionConfig:
    limit = execution.loop_timeout_ns
    return ExecutionConfig() if limit is None else ExecutionConfig(loop_timeout_ns=limit)


def _locations(pool_index: int, sizes: Sequence[int]) -> tuple[list[DataLocation], int]:
    """Return the location of each argument in its pool, and the size of the pool."""
    locations, end = [], 0
    for size in sizes:
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        locations.append(DataLocation(pool_index, offset, max(size, _MIN_BYTES)))
        end = offset + max(size, _MIN_BYTES)
    return locations, max(end, _MIN_BYTES)


def open_target(path: str, device: str, connect_to: str | None) -> ExecutionTarget:
    """Return the target of an execution path, which connects when first used. The caller closes it."""
    if path == "compiled":
        return CompilingEngine()
    return Interpreter() if path == "interpreter" else Driver(device, connect_to, path)
