"""Synchronous executions over the control channel (the HAL's executeSynchronously).

Also the fallback of burst and reusable executions for requests that they cannot send.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from time import monotonic_ns
from typing import NamedTuple

from msgspec.structs import replace

from nnfmq.base.deadlines import has_passed, remaining_s
from nnfmq.base.memory import Memory
from nnfmq.base.verbose_log import vlog
from nnfmq.client.execution.late_run import LateRun
from nnfmq.client.execution.requests import RequestRun, count_call, memory_fds, to_wire_config, to_wire_deadline
from nnfmq.client.model.array_request import ArrayRequest, CallArguments
from nnfmq.client.model.arrays import Array, ExecutionResult, InputValue, size_bytes
from nnfmq.client.model.buffers import Buffer
from nnfmq.client.model.handle import ModelHandle, ModelLocation
from nnfmq.hal.errors import (
    BadState,
    DeadObject,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    NnfmqError,
    OutputInsufficientSize,
)
from nnfmq.hal.summaries import clipped
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.timing import Timing
from nnfmq.hal.types import (
    BufferToken,
    DataLocation,
    ExecutionConfig,
    HalExecutionMode,
    Pool,
    Request,
    RequestArgument,
    merge_dimensions,
)
from nnfmq.observe.trace_points import recorded
from nnfmq.serialize import messages

__all__ = [
    "config_for_cpu",
    "exchange_execution",
    "execute_after_failure",
    "execute_arrays",
    "execute_call",
    "execute_on_cpu",
    "execute_on_device",
    "execute_request",
    "model_on_cpu",
]


# ----------------------------------------------------------------------------------------------------------------------
# One synchronous execution on the device that prepared the model, over the control channel, without a fallback.


def execute_on_device(
    model: ModelHandle,
    request: Request,
    config: ExecutionConfig,
    deadline_ns: int | None,
    late: LateRun | None = None,
) -> ExecutionResult:
    """Execute a request and return its validated result; blocks. Borrows the request's pools.

    `late` is the execution if its deadline passes, for a caller that executes over the same memory again.

    Raises:
        ProtocolError: If the driver's reply is invalid.
        MissedDeadline: If the deadline passes.
        DeadObject: If the driver exits.
        NnfmqError: The error of the reply's status.
    """
    location = model.location
    connection, model_id = location.connection, location.require_id()
    message = messages.Execute(
        connection.next_call_id(),
        model_id,
        messages.request_to_data(request),
        to_wire_config(model, config),
        to_wire_deadline(connection, deadline_ns),
    )
    run = RequestRun(model, request, config)
    fds, mode = memory_fds(request.pools), HalExecutionMode.SYNCHRONOUS
    return exchange_execution(location, message, run, fds, deadline_ns, mode, late)


def exchange_execution(
    location: ModelLocation,
    message: messages.Call,
    run: RequestRun,
    fds: Sequence[int],
    deadline_ns: int | None,
    mode: HalExecutionMode,
    late: LateRun | None = None,
) -> ExecutionResult:
    """Send a call whose reply is Executed, and return the validated result; blocks. Raises as `execute_on_device`.

    `location` is that of the model at which the request is executed; `late` as for `execute_on_device`.
    """
    begin_ns = monotonic_ns()
    observation = run.begin(mode, deadline_ns)
    try:
        reply = location.connection.exchange(
            message, messages.Executed, fds, deadline_ns, begin_late=None if late is None else late.begin
        )
        result = run.finish(reply)
    except NnfmqError as error:
        if observation is not None:
            observation.fail(error)
        if isinstance(error, MissedDeadline):
            count_call(location, begin_ns)
        raise
    count_call(location, begin_ns, reply.driver_ns)
    if observation is not None:
        observation.finish(result.shapes, result.timing)
    return result


# ----------------------------------------------------------------------------------------------------------------------
# execute_after_failure: what happens to an execution whose device has failed.
#
# If the model has a fallback, the CPU device executes the whole request, over the same memories (PART-6). The next
# execution tries the device again. If the driver has died, the model is prepared in the one that replaces it,
# meanwhile.
#
# A model without a fallback whose driver has died is prepared in the driver that has replaced it, and the request is
# executed there (LIFE-6), once.
#
# Managed buffers are in the memory of the failed device's driver: the CPU gets copies of the inputs, and its outputs
# are copied back, if that driver still lives. If it does not, their contents are lost, and the request fails.


_log = logging.getLogger("nnfmq.client")


def execute_after_failure(
    model: ModelHandle,
    request: Request,
    config: ExecutionConfig,
    deadline_ns: int | None,
    error: NnfmqError,
    late: LateRun | None = None,
) -> ExecutionResult:
    """Execute elsewhere what the device has failed to with `error`, and return the validated result; blocks.

    Borrows the request's pools. `late` as for `execute_on_device`.

    Raises:
        DeviceUnavailable: If the driver has died, and no driver with the same device has replaced it.
        NnfmqError: `error` itself, if nothing else can execute the request; otherwise as `execute_on_device`.
    """
    try:
        if model.can_recover(error) and not _has_buffers(request):
            try:
                return model.execute_again(
                    error, deadline_ns, partial(execute_on_device, model, request, config, deadline_ns, late)
                )
            except NnfmqError as failure:
                error = failure
        return execute_on_cpu(model, request, config, deadline_ns, error, late)
    finally:
        del error  # this frame, to which it refers, would keep it


def execute_on_cpu(
    model: ModelHandle,
    request: Request,
    config: ExecutionConfig,
    deadline_ns: int | None,
    error: NnfmqError,
    late: LateRun | None = None,
) -> ExecutionResult:
    """As `execute_after_failure`, but only on the CPU: the request must not be sent to the device again."""
    try:
        cpu = model_on_cpu(model, error, deadline_ns)
        with (
            recorded("[NN_LR_PE]fallback: whole model"),
            _without_buffers(model, request, deadline_ns, error) as shared,
        ):
            result = execute_on_device(cpu, shared.request, config_for_cpu(config), deadline_ns, late)
            shared.fill_outputs(deadline_ns)
    finally:
        del error  # as above
    return result


def model_on_cpu(model: ModelHandle, error: NnfmqError, deadline_ns: int | None) -> ModelHandle:
    """Return the model on the CPU device, because its own has failed with `error`; blocks while it is prepared.

    Logs one warning for each model.

    Raises:
        MissedDeadline: If the deadline passes while the CPU device prepares it.
        NnfmqError: `error`, if the model has no fallback, or it does not apply, or the CPU device cannot be used.
    """
    try:
        fallback = model.fallback
        if fallback is None or model.connection.is_abandoned or not fallback.applies_to(error, deadline_ns):
            raise error
        model.request_recovery(error)
        try:
            cpu = fallback.whole_model(deadline_ns)
        except NnfmqError as failure:
            if isinstance(failure, MissedDeadline) and has_passed(deadline_ns):
                raise
            if not isinstance(failure, BadState):  # else the model is closed
                text = "the CPU cannot execute a model that device %s failed to: %s"
                _log.warning(text, _name(model), str(failure))
            raise error from failure
        _log_fallback(model, error)
    finally:
        del error  # as above
    return cpu


def _log_fallback(model: ModelHandle, error: NnfmqError) -> None:
    vlog("execution", "device %s failed, the CPU executes instead: %s", model.device, str(error))
    if model.fallback_warning.acquire(blocking=False):
        meanwhile = " while the model is prepared again" if model.recovers_in_background and _has_died(error) else ""
        _log.warning(
            "device %s failed, the CPU executes instead%s (logged once for each model): %s: %s",
            _name(model), meanwhile, type(error).__name__, str(error),  # not the error: its traceback has memories
        )  # fmt: skip


def config_for_cpu(config: ExecutionConfig) -> ExecutionConfig:
    """Return `config` without hints: they are of extensions that the failed device supports."""
    return replace(config, hints=(), extensions=())


def _has_died(error: NnfmqError) -> bool:
    return isinstance(error, DeadObject)


def _name(model: ModelHandle) -> str:
    return clipped(repr(model.device))


# ------------------------------------------------------------------------------------------------ managed buffers


def _has_buffers(request: Request) -> bool:
    return any(isinstance(pool, BufferToken) for pool in request.pools)


class _FilledOutput(NamedTuple):
    buffer: Buffer
    memory: Memory
    shape: tuple[int, ...]


class _SharedRequest(NamedTuple):
    """A request without managed buffers, and the buffers that get its outputs."""

    request: Request
    outputs: Sequence[_FilledOutput]

    def fill_outputs(self, deadline_ns: int | None) -> None:
        """Copy the outputs into the managed buffers. Raises NnfmqError if that fails."""
        for output in self.outputs:
            output.buffer.copy_from(output.memory, output.shape, timeout=remaining_s(deadline_ns))


@contextmanager
def _without_buffers(
    model: ModelHandle, request: Request, deadline_ns: int | None, error: NnfmqError
) -> Iterator[_SharedRequest]:
    """Give `request` with memories in place of the managed buffers. Raises `error` if a buffer cannot be read."""
    try:
        if not _has_buffers(request):
            yield _SharedRequest(request, ())
            return
        with ExitStack() as resources:
            try:
                shared = _Replacement(model, request, resources, deadline_ns).make()
            except NnfmqError as failure:
                raise error from failure
            yield shared
    finally:
        del error  # as above


class _Replacement:
    """Replaces the managed buffers of one request. `resources` owns the memories."""

    def __init__(self, model: ModelHandle, request: Request, resources: ExitStack, deadline_ns: int | None) -> None:
        self._model, self._request, self._resources = model, request, resources
        self._deadline_ns = deadline_ns
        self._pools: list[Pool | BufferToken] = list(request.pools)
        self._shapes: dict[int, tuple[int, ...]] = {}  # of the pools that were replaced
        self._outputs: list[_FilledOutput] = []

    def make(self) -> _SharedRequest:
        inputs = self._arguments(self._request.inputs, self._model.inputs, is_output=False)
        outputs = self._arguments(self._request.outputs, self._model.outputs, is_output=True)
        return _SharedRequest(Request(inputs, outputs, tuple(self._pools)), self._outputs)

    def _arguments(
        self, arguments: Sequence[RequestArgument], infos: Sequence[TensorInfo], *, is_output: bool
    ) -> tuple[RequestArgument, ...]:
        if len(arguments) != len(infos):
            raise InvalidArgument(f"{len(arguments)} arguments of a request for {len(infos)} tensors")
        return tuple(self._argument(*pair, is_output) for pair in zip(arguments, infos, strict=True))

    def _argument(self, argument: RequestArgument, info: TensorInfo, is_output: bool) -> RequestArgument:
        index = argument.location.pool_index
        has_pool = not argument.has_no_value and 0 <= index < len(self._request.pools)
        pool = self._request.pools[index] if has_pool else None
        if not isinstance(pool, BufferToken):
            return argument
        if index not in self._shapes:  # several inputs may be one buffer (DOM-10)
            self._replace_pool(index, pool, argument, info, is_output)
        shape = self._shapes[index]
        return replace(argument, location=DataLocation(index, 0, size_bytes(info, shape)), dimensions=shape)

    def _replace_pool(
        self, index: int, pool: BufferToken, argument: RequestArgument, info: TensorInfo, is_output: bool
    ) -> None:
        buffer = self._model.connection.buffers.get(pool.token)
        if buffer is None:
            raise GeneralFailure(f"buffer {pool.token} was closed")
        shape = merge_dimensions(info.shape, tuple(argument.dimensions)) or info.shape
        if not is_output:
            shape = buffer.dimensions or shape
        memory = self._resources.enter_context(Memory.create(max(size_bytes(info, shape), 1), "nnfmq-copy"))
        if is_output:
            self._outputs.append(_FilledOutput(buffer, memory, shape))
        else:
            buffer.copy_to(memory, timeout=remaining_s(self._deadline_ns))
        self._pools[index], self._shapes[index] = memory, shape


# ----------------------------------------------------------------------------------------------------------------------
# Synchronous executions over the control channel (the HAL's executeSynchronously).


def execute_request(
    model: ModelHandle,
    request: Request,
    config: ExecutionConfig,
    deadline_ns: int | None,
    execute: Callable[[ModelHandle, Request, ExecutionConfig, int | None], ExecutionResult] = execute_on_device,
    late: LateRun | None = None,
) -> ExecutionResult:
    """Execute a request and return its validated result; blocks. Borrows the request's pools.

    `execute` sends it to the device. If that fails, the CPU may execute it, see `execute_after_failure`, with `late`.

    Raises:
        ProtocolError: If the driver's reply is invalid.
        MissedDeadline: If the deadline passes.
        DeadObject: If the driver exits.
        NnfmqError: The error of the reply's status.
    """
    with recorded("[NN_LR_PE]execution"):
        try:
            return execute(model, request, config, deadline_ns)
        except NnfmqError as error:
            if not model.can_execute_again(error, deadline_ns):
                raise
            return execute_after_failure(model, request, config, deadline_ns, error, late)


def execute_arrays(
    model: ModelHandle,
    inputs: Sequence[InputValue | Buffer],
    out: Sequence[Array | Buffer] | None,
    config: ExecutionConfig,
    deadline_ns: int | None,
) -> tuple[tuple[Array | Buffer, ...], Timing]:
    """Execute the model with arrays and managed buffers; return the outputs and the timing. Blocks.

    The outputs are new arrays if `out` is None, else the filled arrays and the buffers of `out`.

    Raises:
        InvalidArgument: If an argument's shape, dtype or number is wrong.
        NnfmqError: As `execute_request`.
    """
    call = CallArguments(model, inputs, out)
    outputs, timing = execute_call(model, call, config, deadline_ns)
    return call.finish(outputs), timing


def execute_call(
    model: ModelHandle, call: CallArguments, config: ExecutionConfig, deadline_ns: int | None
) -> tuple[tuple[Array | Buffer, ...], Timing]:
    """Execute a call that was checked, over memory of its own, and return the outputs and the timing. Blocks.

    Raises as `execute_request`.
    """
    with ArrayRequest.create(model, call.inputs, call.targets) as array_request:
        try:
            result = execute_request(model, array_request.request, config, deadline_ns)
        except OutputInsufficientSize as error:
            array_request.grow(error)  # the driver has reported the size of outputs of unknown shape
            result = execute_request(model, array_request.request, config, deadline_ns)
        return array_request.results(result.shapes), result.timing
