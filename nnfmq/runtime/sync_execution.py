"""Synchronous executions over the control channel (the HAL's executeSynchronously).

Also the fallback of burst and reusable executions for requests that they cannot send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nnfmq.hal.errors import InvalidArgument, NnfmqError, OutputInsufficientSize
from nnfmq.hal.summaries import counted
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.timing import Timing
from nnfmq.hal.types import ExecutionConfig, Request
from nnfmq.observe.trace_points import recorded
from nnfmq.runtime import array_checks
from nnfmq.runtime.array_request import ArrayRequest, checked_arguments
from nnfmq.runtime.device_execution import execute_on_device
from nnfmq.runtime.execution_result import ExecutionResult
from nnfmq.runtime.failed_execution import execute_after_failure
from nnfmq.runtime.managed_buffer import Buffer
from nnfmq.runtime.model_handle import ModelHandle
from nnfmq.runtime.tensor_layout import Array, InputValue


def execute_request(
    model: ModelHandle, request: Request, config: ExecutionConfig, deadline_ns: int | None
) -> ExecutionResult:
    """Execute a request and return its validated result; blocks. Borrows the request's pools.

    If the device fails, the CPU may execute it, see `execute_after_failure`.

    Raises:
        ProtocolError: If the driver's reply is invalid.
        MissedDeadline: If the deadline passes.
        DeadObject: If the driver exits.
        NnfmqError: The error of the reply's status.
    """
    with recorded("[NN_LR_PE]execution"):
        try:
            return execute_on_device(model, request, config, deadline_ns)
        except NnfmqError as error:
            if not model.can_execute_again(error, deadline_ns):
                raise
            return execute_after_failure(model, request, config, deadline_ns, error)


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
    arguments = checked_arguments(model.inputs, inputs)
    if out is not None:
        check_out(model.outputs, out)
    targets: Sequence[object] = out if out is not None else [None] * len(model.outputs)
    writer = object()
    for values, is_output in ((arguments, False), (targets, True)):
        for index, value in enumerate(values):
            if isinstance(value, Buffer):
                value.check_role((model, index, is_output), writer)
    with ArrayRequest.create(model, arguments, targets) as array_request:
        try:
            result = execute_request(model, array_request.request, config, deadline_ns)
        except OutputInsufficientSize as error:
            array_request.grow(error)  # the driver has reported the size of outputs of unknown shape
            result = execute_request(model, array_request.request, config, deadline_ns)
        outputs = array_request.results(result.shapes)
    for target in targets:
        if isinstance(target, Buffer):
            target.mark_written(writer)
    return (outputs if out is None else copy_out(out, outputs)), result.timing


def check_out(infos: Sequence[TensorInfo], out: Sequence[Array | Buffer]) -> None:
    """Raise InvalidArgument unless `out` has an array that can take it, or a Buffer, for each output."""
    unchecked: Any = out  # from the application: any type
    if not isinstance(unchecked, Sequence) or not any(isinstance(target, Buffer) for target in unchecked):
        array_checks.check_out(infos, unchecked)
        return
    if len(unchecked) != len(infos):
        outputs = counted(len(infos), "output")
        raise InvalidArgument(f"the model has {outputs}, `out` has {len(unchecked)} arrays and buffers")
    arrays = [pair for pair in zip(infos, unchecked, strict=True) if not isinstance(pair[1], Buffer)]
    array_checks.check_out([info for info, _ in arrays], [target for _, target in arrays])


def copy_out(targets: Sequence[Array | Buffer], results: Sequence[Array | Buffer]) -> tuple[Array | Buffer, ...]:
    """Copy the results that are arrays into the caller's, and return the caller's arrays and buffers."""
    pairs = zip(targets, results, strict=True)
    arrays = [(t, r) for t, r in pairs if isinstance(t, np.ndarray) and isinstance(r, np.ndarray)]
    array_checks.copy_out([target for target, _ in arrays], [result for _, result in arrays])
    return tuple(targets)
