"""Devices of a driver as execution targets, over one of the execution paths or over all of them.

Requests are as AOSP's harness builds them: arguments without dimensions, inputs in pool 0 and outputs in pool 1, each
aligned to 64 bytes, an omitted input without a value, and one byte for an empty output. On the paths memory-domain
(synchronous), memory-domain-async and so on, each argument with a value is a driver-managed buffer, which is filled and
read by copies. The path `all` prepares a model once and executes it over every path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import numpy as np
from msgspec.structs import replace

from nnfmq.base.fence import Fence
from nnfmq.base.memory import Memory
from nnfmq.client.connection.client import Client
from nnfmq.client.connection.connect import connect
from nnfmq.client.connection.device import Device
from nnfmq.client.model.buffer_allocation import ModelRole
from nnfmq.client.model.buffers import Buffer
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.hal.errors import DeadObject, InvalidArgument, NnfmqError, OutputInsufficientSize, status_for_error
from nnfmq.hal.preparation import require_compiler_s_program
from nnfmq.hal.types import (
    DataLocation,
    ExecutionConfig,
    ExecutionPreference,
    Model,
    OutputShape,
    Request,
    RequestArgument,
)
from nnfmq.lab.conformance.criteria import OutputMismatch
from nnfmq.lab.conformance.targets import (
    FILL_BYTE,
    MIN_BYTES,
    NO_PLANS,
    ExecutionOutput,
    ExecutionRequest,
    Prepared,
    TargetMismatch,
    has_specified_outputs,
)
from nnfmq.lab.conformance.testmodels import Array

ALL_PATHS = "all"
MEMORY_DOMAIN = "memory-domain"
DRIVER_PATHS = (
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
TIMEOUT_S = 60.0
_AS_COMPILED = ExecutionPreference.SUSTAINED_SPEED  # no baseline program runs before the compiled one
_ALIGNMENT = 64


class Driver:
    """A device of a driver. After `close`, the next use connects to a new driver."""

    rejects_unspecified_boundaries = True
    compared_steps = 0
    plans = NO_PLANS

    def __init__(self, device: str, connect_to: str | None, path: str) -> None:
        self._name = device
        self._connect_to = connect_to
        self._path = path
        self.allows_short_buffers = not path.startswith(MEMORY_DOMAIN)
        self._client: Client | None = None
        self._device: Device | None = None

    @property
    def rejects_unspecified_outputs(self) -> bool:
        """Whether executions are fenced."""
        return _mode(self._path) == "fenced"

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
            self._client = connect(None if embedded else self._connect_to, embedded=embedded or None, recover=False)
            self._device = self._client.device(self._name)
        return self._device

    def supports(self, model: Model) -> bool:
        """Return whether the target supports all operations of the model."""
        with in_shared_memory(model) as sent:
            return all(self._connected().supported_operations(sent, timeout=TIMEOUT_S))

    @contextmanager
    def prepared(self, model: Model) -> Iterator[Prepared]:
        """Prepare the model on the device."""
        device = self._connected()
        with (
            in_shared_memory(model) as sent,
            device.prepare(sent, preference=_AS_COMPILED, timeout=TIMEOUT_S) as prepared,
        ):
            require_compiler_s_program(self._name, prepared.program)
            if self._path == ALL_PATHS:
                yield _OnEveryPath(self, prepared, has_specified_outputs(model))
            else:
                yield self.executor(prepared, self._path)

    def executor(self, prepared: PreparedModel, path: str) -> Prepared:
        """Return an executor of a model of this device over a path."""
        if path.startswith(MEMORY_DOMAIN):
            return _InBuffers(self._connected(), prepared, _EXECUTE[_mode(path)])
        return RequestExecutor(prepared, _EXECUTE[path])

    def close(self) -> None:
        """Close the connection; an embedded driver exits."""
        client, self._client, self._device = self._client, None, None
        if client is not None:
            client.close()


def _mode(path: str) -> str:
    """Return the execution mode of a path."""
    return (path.removeprefix(MEMORY_DOMAIN).lstrip("-") or "sync") if path.startswith(MEMORY_DOMAIN) else path


ModelT = TypeVar("ModelT")
_Outcome: TypeAlias = ExecutionOutput | NnfmqError


@dataclass(frozen=True, slots=True)
class _OnEveryPath:
    """Executes a model over every path; each must end as the synchronous one does, with the same bytes or status."""

    driver: Driver
    prepared: PreparedModel
    has_specified_outputs: bool

    def execute(self, execution: ExecutionRequest) -> ExecutionOutput:
        first = self._outcome(DRIVER_PATHS[0], execution)
        outcomes = [(path, self._outcome(path, execution)) for path in DRIVER_PATHS[1:]]
        mismatches = [
            OutputMismatch(f"{path}: {_text(outcome)}; {DRIVER_PATHS[0]}: {_text(first)}")
            for path, outcome in outcomes
            if not self._agrees(path, outcome, first, [array.nbytes for array in execution.expected])
        ]
        if mismatches:
            raise TargetMismatch(mismatches)
        if isinstance(first, NnfmqError):
            raise first
        return first

    def _agrees(self, path: str, outcome: _Outcome, first: _Outcome, sizes: Sequence[int]) -> bool:
        if _mode(path) == "fenced" and not self.has_specified_outputs:
            return isinstance(outcome, InvalidArgument)  # FEN-7
        if isinstance(first, OutputInsufficientSize) and path.startswith(MEMORY_DOMAIN):
            return isinstance(outcome, ExecutionOutput)  # a managed buffer is never too small
        if isinstance(outcome, NnfmqError) or isinstance(first, NnfmqError):
            return type(outcome) is type(first)
        same_shapes = not outcome.shapes or not first.shapes or outcome.shapes == first.shapes
        return same_shapes and _cut(outcome, sizes) == _cut(first, sizes)

    def _outcome(self, path: str, execution: ExecutionRequest) -> _Outcome:
        try:
            return self.driver.executor(self.prepared, path).execute(execution)
        except DeadObject:
            raise
        except NnfmqError as error:
            return error


def _cut(outcome: ExecutionOutput, sizes: Sequence[int]) -> list[bytes]:
    """Return the outputs without the byte that an empty one has in a pool."""
    return [raw[:size] for raw, size in zip(outcome.outputs, sizes, strict=True)]


def _text(outcome: _Outcome) -> str:
    if isinstance(outcome, NnfmqError):
        return f"{status_for_error(outcome).name}: {outcome}"
    values = ", ".join(f"{raw[:8].hex()}{'...' if len(raw) > 8 else ''}" for raw in outcome.outputs)
    return f"outputs {values}, shapes {[shape.dimensions for shape in outcome.shapes]}"


@contextmanager
def in_shared_memory(model: Model) -> Iterator[Model]:
    """Yield the model with its memory pools copied to shared memory, which a driver can map."""
    with ExitStack() as stack:
        pools = [stack.enter_context(Memory.create(pool.size_bytes, "nnfmq-constants")) for pool in model.pools]
        for memory, pool in zip(pools, model.pools, strict=True):
            memory.view[: pool.size_bytes] = pool.view
        yield replace(model, pools=tuple(pools))


@dataclass(frozen=True, slots=True)
class RequestExecutor(Generic[ModelT]):
    """Executes a prepared model with its arguments in shared memory; `run` sends the request in some mode."""

    prepared: ModelT
    run: Callable[[ModelT, Request, ExecutionConfig], tuple[OutputShape, ...]]

    def execute(self, execution: ExecutionRequest) -> ExecutionOutput:
        """Execute once."""
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
            sink.view[:] = bytes([FILL_BYTE]) * sink.size_bytes
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
        sink.view[:] = bytes([FILL_BYTE]) * sink.size_bytes
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
        with Memory.create(max(array.nbytes, MIN_BYTES), "nnfmq-inputs") as source:
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
        locations.append(DataLocation(pool_index, offset, max(size, MIN_BYTES)))
        end = offset + max(size, MIN_BYTES)
    return locations, max(end, MIN_BYTES)
