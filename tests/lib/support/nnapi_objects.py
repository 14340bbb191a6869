"""NNAPI's objects over a driver, as its tests make them: finished compilations, executions with arguments, modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from nnfmq.client.connection.device import Device
from nnfmq.hal.types import Model
from nnfmq.nnapi import BurstBuilder, CompilationBuilder, DeviceMemory, ExecutionBuilder, MemoryBuilder

Floats = npt.NDArray[np.float32]
ONE, TEN, SUM = ([1, 2, 3, 4], [10, 20, 30, 40], [11, 22, 33, 44])
"""Inputs and output of `add_model`."""


def floats(values: Sequence[float]) -> Floats:
    """Return a new array."""
    return np.array(values, np.float32)


def finished(stack: ExitStack, model: Model, *devices: Device) -> CompilationBuilder:
    """Return a finished compilation for devices, which `stack` closes."""
    compilation = stack.enter_context(CompilationBuilder(model, devices))
    compilation.finish()
    return compilation


def adding(stack: ExitStack, compilation: CompilationBuilder) -> tuple[ExecutionBuilder, Floats]:
    """Return an execution of `add_model` with all its arguments, and the array of its output."""
    execution, output = stack.enter_context(ExecutionBuilder(compilation)), floats([0] * 4)
    execution.set_input(0, floats(ONE))
    execution.set_input(1, floats(TEN))
    execution.set_output(0, output)
    return execution, output


def compute(execution: ExecutionBuilder, _compilation: CompilationBuilder) -> None:
    """Compute synchronously."""
    execution.compute()


def burst_compute(execution: ExecutionBuilder, compilation: CompilationBuilder) -> None:
    """Compute with a burst of its own."""
    with BurstBuilder(compilation) as burst:
        execution.burst_compute(burst)


def start_compute(execution: ExecutionBuilder, _compilation: CompilationBuilder) -> None:
    """Compute asynchronously, and wait for the event."""
    with execution.start_compute() as event:
        event.wait()


def start_compute_with_dependencies(execution: ExecutionBuilder, _compilation: CompilationBuilder) -> None:
    """Compute behind no dependency, and wait for the event."""
    with execution.start_compute_with_dependencies([]) as event:
        event.wait()


Mode = Callable[[ExecutionBuilder, CompilationBuilder], None]
MODES: list[Mode] = [compute, burst_compute, start_compute, start_compute_with_dependencies]
UNFENCED = MODES[:3]


def memory_for(
    stack: ExitStack,
    inputs: Sequence[tuple[CompilationBuilder, int]] = (),
    outputs: Sequence[tuple[CompilationBuilder, int]] = (),
    dimensions: Sequence[int] = (),
) -> DeviceMemory:
    """Return a device memory for these roles, which `stack` closes."""
    builder = MemoryBuilder()
    for compilation, index in inputs:
        builder.add_input_role(compilation, index)
    for compilation, index in outputs:
        builder.add_output_role(compilation, index)
    builder.set_dimensions(dimensions)
    builder.finish()
    return stack.enter_context(builder.create_memory())
