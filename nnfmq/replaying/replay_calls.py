"""Calls of a prepared model in each execution mode, all with arrays, for the lanes of a replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

from numpy.typing import NDArray

from nnfmq.hal.types import HalExecutionMode
from nnfmq.runtime.array_request import ArrayRequest
from nnfmq.runtime.prepared_model import PreparedModel
from nnfmq.runtime.tensor_layout import has_unknown_shape

__all__ = ["Arrays", "ExecutionCall", "execution_call"]

Arrays: TypeAlias = tuple[NDArray[Any], ...]
ExecutionCall: TypeAlias = Callable[[Sequence[NDArray[Any]], float | None], Arrays]
"""Inputs, and a timeout in seconds (None = no limit), to outputs; blocks."""

_FIXED_SHAPES = (HalExecutionMode.BURST, HalExecutionMode.REUSABLE, HalExecutionMode.AIDL_BURST)


def execution_call(model: PreparedModel, mode: HalExecutionMode, resources: ExitStack) -> ExecutionCall:
    """Return a function that executes the model in a mode; `resources` closes what it needs.

    Modes that need fixed shapes are replaced by the synchronous one if a shape of the model is unknown.
    """
    if mode in _FIXED_SHAPES and any(map(has_unknown_shape, (*model.inputs, *model.outputs))):
        mode = HalExecutionMode.SYNCHRONOUS
    if mode is HalExecutionMode.BURST:
        burst = resources.enter_context(model.burst())
        return lambda inputs, timeout: burst.execute(*inputs, timeout=timeout)
    if mode is HalExecutionMode.REUSABLE:
        execution = resources.enter_context(model.create_reusable_execution())
        return lambda inputs, timeout: execution.compute(*inputs, timeout=timeout)
    if mode is HalExecutionMode.AIDL_BURST:
        return _aidl_burst_call(model, resources)
    if mode is HalExecutionMode.ASYNCHRONOUS:
        return lambda inputs, timeout: model.execute_async(*inputs, timeout=timeout).result()
    if mode is HalExecutionMode.FENCED:
        return lambda inputs, timeout: _execute_fenced(model, inputs, timeout)
    return lambda inputs, timeout: model.execute(*inputs, timeout=timeout)


def _aidl_burst_call(model: PreparedModel, resources: ExitStack) -> ExecutionCall:
    burst = resources.enter_context(model.aidl_burst())

    def call(inputs: Sequence[NDArray[Any]], timeout: float | None) -> Arrays:
        with ArrayRequest.create(model.handle, inputs) as request:
            return request.arrays(burst.execute_synchronously(request.request, timeout=timeout).shapes)

    return call


def _execute_fenced(model: PreparedModel, inputs: Sequence[NDArray[Any]], timeout: float | None) -> Arrays:
    with model.execute_fenced(*inputs, timeout=timeout) as launched:
        return launched.result()
