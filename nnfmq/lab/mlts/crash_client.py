"""A client of a crash test: what it does, and its process, which gets a task of `crash_tests` and sends messages.

The process exits with status 0 once it has reported, whatever the result, and when its connection is closed, because
the runner is gone then. Core files are disabled, because some clients crash on purpose.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import random
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nnfmq.client.connection.client import Client
from nnfmq.client.connection.connect import connect
from nnfmq.client.connection.device import Device
from nnfmq.client.connection.prepare_arguments import ModelArgument
from nnfmq.hal.errors import DeadObject, GeneralFailure, NnfmqError
from nnfmq.hal.types import OperandType
from nnfmq.lab.conformance.driver_targets import in_shared_memory
from nnfmq.lab.conformance.random_graphs import GraphClass, generate
from nnfmq.lab.conformance.random_source import GraphLimits
from nnfmq.lab.conformance.testmodels import Criterion, TestModel, dump, read
from nnfmq.lab.mlts.crash_tests import ClientMessage, ClientState, ClientTask, GraphSize, Workload
from nnfmq.lab.mlts.models import Array
from nnfmq.lab.mlts.stress_models import COMPLETE, hal_model, inputs_for, open_model, with_constants_in_file

if TYPE_CHECKING:
    from nnfmq.client.model.compiled_model import CompiledModel

__all__ = [
    "GraphFailed",
    "GraphOutcome",
    "WorkloadContext",
    "class_of",
    "in_threads",
    "run_client",
    "run_graph",
    "run_random_graphs",
    "run_workload",
    "serve_client",
]


# ----------------------------------------------------------------------------------------------------------------------
# The context of a workload: the client of the driver, the task, its deadline, and the numbers of outcomes.


_CONNECT_S = 60.0  # with 60 clients on one processor


class WorkloadContext:
    """A client of the driver, the task, its deadline and its count. Close it. Thread-safe."""

    def __init__(self, task: ClientTask, client: Client) -> None:
        self.task = task
        self.client = client
        self.deadline_ns = time.monotonic_ns() + round(task.seconds * 1e9)
        self.codes: dict[str, int] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, task: ClientTask) -> WorkloadContext:
        """Connect to the driver. Blocks."""
        return cls(task, connect(task.connect_to, embedded=False, timeout=_CONNECT_S, recover=False))

    def device(self) -> Device:
        """Return the device under test. Blocks."""
        return self.client.device(self.task.device, timeout=None)

    def prepare(self, device: Device | None, model: ModelArgument) -> CompiledModel:
        """Prepare a model, on any device if `device` is None. Blocks."""
        prepare = self.client.prepare if device is None else device.prepare
        return prepare(model, preference=COMPLETE if self.task.compiles_fully else "fast_single_answer")

    def count(self, code: str, number: int = 1) -> None:
        """Add to the number of successful steps, or of another outcome, of all threads."""
        with self._lock:
            self.codes[code] = self.codes.get(code, 0) + number

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic_ns() >= self.deadline_ns

    def pause(self) -> None:
        """Sleep for a random time within the task's limits, at most until the deadline."""
        left_s = (self.deadline_ns - time.monotonic_ns()) / 1e9
        time.sleep(max(0.0, min(random.uniform(*self.task.pause_s), left_s)))

    def close(self) -> None:
        """Close the client: calls in progress raise DeadObject. Idempotent."""
        self.client.close()


# ----------------------------------------------------------------------------------------------------------------------
# Random graphs as crash tests: generate, prepare and perhaps execute them, and count the outcomes.
#
# The outcomes are MLTS's. A graph that could not be generated and one that the device does not support count as
# success; a failure ends the test, and the graph is written to a file that `nnfmq conformance` reads.


_SEARCH_S = 30.0  # without a graph that the device supports
_SEED_STRIDE = 1_000_000  # between the first seeds of two threads


class GraphOutcome(StrEnum):
    """The outcome of one random graph."""

    SUCCESS = "success"
    FAILED_COMPILATION = "failed compilation"
    FAILED_EXECUTION = "failed execution"
    OTHER_FAILURE = "other API failure"
    INVALID_MODEL = "invalid model generated"
    UNSUPPORTED_MODEL = "unsupported model"


FAILURES = (GraphOutcome.FAILED_COMPILATION, GraphOutcome.FAILED_EXECUTION, GraphOutcome.OTHER_FAILURE)


class GraphFailed(GeneralFailure):
    """A random graph failed; the message has the outcome, the error and the file of the graph."""


def run_random_graphs(context: WorkloadContext, worker: int) -> None:
    """Run graph after graph until the deadline, the number of graphs, or 30 s without a supported one. Blocks.

    Raises:
        GraphFailed: If a graph fails.
        DeadObject: If the driver exits.
    """
    task = context.task
    assert task.graphs is not None
    graph_class = class_of(task.graphs)
    device, first = context.device(), task.seed + worker * _SEED_STRIDE
    succeeded_at = time.monotonic()
    for seed in range(first, first + task.graphs.count):
        outcome = _run_seed(context, device, graph_class, seed)
        context.count(outcome)
        now = time.monotonic()
        succeeded_at = now if outcome is GraphOutcome.SUCCESS else succeeded_at
        if context.is_over or now - succeeded_at > _SEARCH_S:
            return
        if outcome is GraphOutcome.SUCCESS:
            context.pause()


def class_of(size: GraphSize) -> GraphClass:
    """Return the class of graphs of this size: operations of all types and ranks."""
    name = f"stress_{size.operations}_operations"
    criteria = dict.fromkeys(OperandType, Criterion())  # results are not evaluated
    return GraphClass(name, "stress", GraphLimits(size.max_dimension), criteria, size.operations)


def _run_seed(context: WorkloadContext, device: Device, graph_class: GraphClass, seed: int) -> GraphOutcome:
    try:
        line = generate(graph_class, seed)
    except GeneralFailure:
        return GraphOutcome.INVALID_MODEL
    executes = context.task.workload is Workload.RANDOM_INFERENCE
    outcome, error = run_graph(device, read(line), executes=executes)
    if outcome in FAILURES:
        path = dump(line, context.task.dump_to)
        raise GraphFailed(f"{outcome}: {error}; the graph is in {path}" if path else f"{outcome}: {error}")
    return outcome


def run_graph(device: Device, test: TestModel, *, executes: bool) -> tuple[GraphOutcome, NnfmqError | None]:
    """Prepare a graph, and execute it; return the outcome, and the error of a failure. Blocks.

    Raises:
        DeadObject: If the driver exits.
    """
    failure = GraphOutcome.OTHER_FAILURE
    try:
        with in_shared_memory(test.model) as model:
            if not all(device.supported_operations(model)):
                return GraphOutcome.UNSUPPORTED_MODEL, None
            failure = GraphOutcome.FAILED_COMPILATION
            with device.prepare(model) as prepared:
                failure = GraphOutcome.FAILED_EXECUTION
                if executes:
                    arrays = [array for array in test.inputs if array is not None]
                    prepared.execute(*(a.astype(i.dtype) for a, i in zip(arrays, prepared.inputs, strict=True)))
                failure = GraphOutcome.OTHER_FAILURE
    except DeadObject:
        raise
    except NnfmqError as error:
        return failure, error
    return GraphOutcome.SUCCESS, None


# ----------------------------------------------------------------------------------------------------------------------
# What a client does in a crash test, in this process: threads that execute or prepare models until the deadline.
#
# Calls have no timeouts: a call that does not return is a hang, which the runner detects from outside. A thread ends at
# the first call that returns after the deadline. `WorkloadContext.close` ends all calls.


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


# ----------------------------------------------------------------------------------------------------------------------
# A client: it reports that it is ready, and what became of its workload, which may be to fail on purpose.


_SELF_TEST_PAUSE_S = 0.2

Send = Callable[[ClientMessage], None]


def run_client(context: WorkloadContext, send: Send) -> None:
    """Report that the client is ready, run its workload, and report the result. Blocks."""
    send(ClientMessage(ClientState.READY, worker_pid=context.client.worker_pid))
    try:
        if (self_test := _SELF_TESTS.get(context.task.workload)) is not None:
            self_test(context)
        else:
            run_workload(context)
    except DeadObject as error:
        send(ClientMessage(ClientState.DRIVER_DIED, str(error), codes=context.codes))
    except Exception as error:  # noqa: BLE001  whatever a workload raises is the result
        reason = f"{type(error).__name__}: {error}"
        send(ClientMessage(ClientState.FAILURE, reason, codes=context.codes))
    else:
        send(ClientMessage(ClientState.SUCCESS, codes=context.codes))


# ------------------------------------------------------------------------------------------------ self-tests


class _NullPointer:
    """An array in the first page, at address 8; NumPy accepts no 0."""

    __array_interface__ = {"version": 3, "shape": (1,), "typestr": "|u1", "data": (8, False)}  # noqa: RUF012


def _write_to_null(_context: WorkloadContext) -> None:
    np.asarray(_NullPointer())[0] = 1


def _fail(_context: WorkloadContext) -> None:
    raise NnfmqError("this client fails on purpose")


def _hang(_context: WorkloadContext) -> None:
    threading.Event().wait()


def _signal_worker_and_execute(number: signal.Signals) -> Callable[[WorkloadContext], None]:
    def run(context: WorkloadContext) -> None:
        device = context.device() if context.task.device else None
        with context.prepare(device, open_model(context.task.models[0])) as prepared, prepared.burst() as burst:
            os.kill(context.client.worker_pid, number)
            while not context.is_over:
                burst.execute(*inputs_for(prepared))

    return run


def _crash_worker_without_a_call(context: WorkloadContext) -> None:
    """Crash the worker, and report success without another call."""
    time.sleep(_SELF_TEST_PAUSE_S)
    os.kill(context.client.worker_pid, signal.SIGSEGV)
    while not context.is_over:
        context.pause()


_SELF_TESTS: dict[Workload, Callable[[WorkloadContext], None]] = {
    Workload.NO_OP: lambda _context: None,
    Workload.FAIL: _fail,
    Workload.HANG: _hang,
    Workload.NULL_POINTER: _write_to_null,
    Workload.STOP_DRIVER: _signal_worker_and_execute(signal.SIGSTOP),
    Workload.CRASH_DRIVER: _signal_worker_and_execute(signal.SIGSEGV),
    Workload.CRASH_DRIVER_UNSEEN: _crash_worker_without_a_call,
}


# ------------------------------------------------------------------------------------------------ the process


def serve_client(connection: Any, task: ClientTask, log: Path) -> None:
    """Run a client in a process of its own, which ends with it; what it prints is appended to the file `log`."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with log.open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    faulthandler.enable()
    lock = threading.Lock()

    def send(message: ClientMessage) -> None:
        with lock:
            connection.send(message)

    threading.Thread(target=_exit_with_runner, args=(connection,), daemon=True).start()
    if task.kill_after_s is not None:
        threading.Timer(task.kill_after_s, _kill_this_process, (send,)).start()
    try:
        context = WorkloadContext.open(task)
    except (NnfmqError, OSError) as error:
        send(ClientMessage(ClientState.FAILURE, f"{type(error).__name__}: {error}"))
        return
    run_client(context, send)
    os._exit(0)  # threads of a workload that failed may still be in calls


def _exit_with_runner(connection: Any) -> None:
    try:
        connection.recv()  # nothing comes
    except (EOFError, OSError):
        os._exit(1)


def _kill_this_process(send: Send) -> None:
    send(ClientMessage(ClientState.KILLING))
    os.kill(os.getpid(), signal.SIGKILL)
