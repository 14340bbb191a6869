"""What a client does in a crash test, in this process: threads that execute or prepare models until the deadline.

Calls have no timeouts: a call that does not return is a hang, which the runner detects from outside. A thread ends at
the first call that returns after the deadline. `WorkloadContext.close` ends all calls.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nnfmq.hal.errors import GeneralFailure, NnfmqError
from nnfmq.mlts.crash_context import WorkloadContext
from nnfmq.mlts.crash_list import Workload
from nnfmq.mlts.datasets import Array
from nnfmq.mlts.random_stress import run_random_graphs
from nnfmq.mlts.stress_models import hal_model, inputs_for, open_model, with_constants_in_file
from nnfmq.runtime.client_device import Device

if TYPE_CHECKING:
    from nnfmq.runtime.compiled_model import CompiledModel

_SLICE_S = 1.0  # executions of one model before the next one
_FLOAT_TOLERANCE = 1e-3  # between a baseline program and the compiled one
_COMPILING_PAUSE_S = 0.02
MAX_SLOWDOWN = 0.5
"""By how much the mean latency may increase while another thread compiles."""


def run_workload(context: WorkloadContext) -> None:
    """Run the task's workload until its deadline. Blocks. Raises the first error of any thread."""
    workload = context.task.workload
    if workload is Workload.DEGRADATION:
        _measure_degradation(context)
        return
    steps: dict[Workload, Callable[[WorkloadContext, int], None]] = {
        Workload.INFERENCE: _execute_models,
        Workload.COMPILATION: _prepare_models,
        Workload.MAPPED_COMPILATION: _prepare_mapped_models,
        Workload.RANDOM_COMPILATION: run_random_graphs,
        Workload.RANDOM_INFERENCE: run_random_graphs,
    }
    step = steps[workload]
    in_threads([partial(step, context, number) for number in range(context.task.threads)])


def in_threads(functions: Sequence[Callable[[], None]]) -> None:
    """Call each function on a thread of its own and wait for all. Raises the error of the first that failed."""
    errors: list[BaseException] = []

    def call(function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:  # noqa: BLE001  raised again on the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=call, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _models(context: WorkloadContext, worker: int) -> Iterator[str]:
    """Yield the task's models again and again; each thread begins with another one."""
    names = context.task.models
    return itertools.cycle([*names[worker % len(names) :], *names[: worker % len(names)]])


def _execute_models(context: WorkloadContext, worker: int) -> None:
    device = context.device() if context.task.device else None
    for name in _models(context, worker):
        with context.prepare(device, open_model(name)) as prepared:
            end_ns = min(time.monotonic_ns() + round(_SLICE_S * 1e9), context.deadline_ns)
            _execute_until(context, prepared, end_ns)
        if context.is_over:
            return


def _execute_until(context: WorkloadContext, prepared: CompiledModel, end_ns: int) -> list[int]:
    """Execute the same inputs over a burst until `end_ns`, at least once; return the times in ns.

    Raises:
        GeneralFailure: If an output differs from that of the first execution.
    """
    durations_ns: list[int] = []
    first: list[Array] = []
    with prepared.burst(timeout=None) as burst:
        inputs = inputs_for(prepared)
        while not durations_ns or time.monotonic_ns() < end_ns:
            burst.reset_state()
            begin = time.monotonic_ns()
            outputs = burst.execute(*inputs, out=burst.outputs)
            durations_ns.append(time.monotonic_ns() - begin)
            first = first or [array.copy() for array in outputs]
            _require_equal(first, outputs)
    context.count("executed", len(durations_ns))
    return durations_ns


def _require_equal(expected: Sequence[Array], found: Sequence[Array]) -> None:
    """Floats may differ slightly: a model begins with its baseline program, and goes on with the compiled one."""
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        is_float = one.dtype.kind == "f"
        equal = np.allclose(one, other, _FLOAT_TOLERANCE, _FLOAT_TOLERANCE, True) if is_float else (one == other).all()
        if not equal:
            raise GeneralFailure(f"output {number} differs from that of an earlier execution with the same inputs")


def _prepare_models(context: WorkloadContext, worker: int) -> None:
    device = context.device() if context.task.device else None
    for name in _models(context, worker):
        context.prepare(device, open_model(name)).close()
        context.count("prepared")
        context.pause()
        if context.is_over:
            return


def _prepare_mapped_models(context: WorkloadContext, worker: int) -> None:
    device = context.device() if context.task.device else None
    with ExitStack() as stack:
        models = {}
        for name in context.task.models:
            file = stack.enter_context(tempfile.TemporaryFile())
            models[name] = stack.enter_context(with_constants_in_file(hal_model(open_model(name)), file))
        for name in _models(context, worker):
            context.prepare(device, models[name]).close()
            context.count("prepared")
            if context.is_over:
                return


def _measure_degradation(context: WorkloadContext) -> None:
    """Compare the mean latency alone with that beside a thread that compiles each model in turn.

    Raises:
        GeneralFailure: If the mean increases by more than MAX_SLOWDOWN.
    """
    device = context.device() if context.task.device else None
    names = context.task.models
    step_ns = round(context.task.seconds * 1e9 / (len(names) + 1))
    with context.prepare(device, open_model(names[0])) as prepared:
        _execute_until(context, prepared, time.monotonic_ns() + step_ns // 5)  # a warm-up
        alone_ns = np.mean(_execute_until(context, prepared, time.monotonic_ns() + step_ns * 4 // 5))
        for name in names:
            with _compiling(context, device, name):
                beside_ns = np.mean(_execute_until(context, prepared, time.monotonic_ns() + step_ns))
            slowdown = float(beside_ns / alone_ns) - 1
            if slowdown > MAX_SLOWDOWN:
                text = f"{beside_ns / 1e6:.2f} ms instead of {alone_ns / 1e6:.2f} ms"
                raise GeneralFailure(f"the mean latency is {text} while {name.rpartition('/')[2]} is compiled")


@contextmanager
def _compiling(context: WorkloadContext, device: Device | None, name: str) -> Iterator[None]:
    """Prepare a model again and again on another thread until the block ends. Raises its error afterwards."""
    stop = threading.Event()
    errors: list[NnfmqError] = []

    def prepare_until_stopped() -> None:
        model = open_model(name)
        try:
            while not stop.is_set():
                context.prepare(device, model).close()
                context.count("prepared")
                stop.wait(_COMPILING_PAUSE_S)
        except NnfmqError as error:
            errors.append(error)

    thread = threading.Thread(target=prepare_until_stopped, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]
