"""What the trace, the verbose log and observers are told of executions of plans, on real drivers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.control_flow_models import branching, counting
from support.drivers import LIMIT_S, Daemon, Process, running_daemon, short_folder
from support.plans import control_flow_plan, linear_plan
from support.small_models import two_adds

import nnfmq
from nnfmq.base import verbose_log
from nnfmq.client.model.cpu_fallback import CpuFallback
from nnfmq.client.observation import ObservedModel
from nnfmq.client.partitioned.model import PartitionedModel
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.tensor_info import operand_info
from nnfmq.hal.types import HalExecutionMode
from nnfmq.observe.executions import ObservedExecution
from nnfmq.observe.trace_files import RingReader, Slice
from nnfmq.observe.trace_layout import ring_bytes
from nnfmq.observe.trace_points import TRACING, TraceRecorder
from nnfmq.planning.plan import ExecutionPlan

A = np.array([[1, 2], [3, 4]], np.float32)
B = np.array([[10, 20], [30, 40]], np.float32)
Prepare = Callable[..., PartitionedModel]
OF_ONE_DEVICE = ("[NN_LR_PIO]write", "[NN_LR_PR]read", "[NN_LR_PE]execute", "[NN_LR_PE]execution")
"""Slices of the layer LR within a step."""


@pytest.fixture(scope="module")
def drivers() -> Iterator[list[Daemon]]:
    """Return three drivers for all tests here, which kill at most the workers of their clients."""
    with ExitStack() as stack:
        folder = stack.enter_context(short_folder())
        yield [stack.enter_context(running_daemon(folder / f"{name}.sock")) for name in "abc"]


@pytest.fixture
def clients(drivers: list[Daemon]) -> Iterator[list[nnfmq.Client]]:
    with ExitStack() as stack:
        yield [stack.enter_context(driver.connect()) for driver in drivers]


@pytest.fixture
def prepare(clients: list[nnfmq.Client]) -> Iterator[Prepare]:
    """Prepare the steps of a plan on the first two drivers; the third has the CPU device."""
    with ExitStack() as stack:

        def prepare(plan: ExecutionPlan, has_fallback: bool = True) -> PartitionedModel:
            model = prepared(plan, clients, has_fallback)
            stack.callback(model.close)
            return model

        yield prepare


def prepared(plan: ExecutionPlan, clients: Sequence[nnfmq.Client], has_fallback: bool) -> PartitionedModel:
    steps = [clients[step.device].device("reference").prepare(step.model) for step in plan.execution_steps]
    models = [step.model for step in plan.execution_steps]
    fallback = CpuFallback(partial(clients[-1].device, "reference"), plan.model, models) if has_fallback else None
    main = plan.model.main
    inputs = tuple(operand_info(main.operands[index], f"input {i}") for i, index in enumerate(main.input_indexes))
    outputs = tuple(operand_info(main.operands[index], f"output {i}") for i, index in enumerate(main.output_indexes))
    return PartitionedModel(plan, steps, fallback, inputs, outputs)


@contextmanager
def traced() -> Iterator[Callable[[], list[Slice]]]:
    """Record this process; the value returns its slices of the layer LR of plans, in the order of their begin."""
    memory = bytearray(ring_bytes(256))
    TRACING.start(TraceRecorder(memoryview(memory), "test"))
    reader = RingReader(memoryview(memory))

    def slices() -> list[Slice]:
        reader.poll()
        found = [one for one in reader.trace().slices if one.name.startswith("[NN_LR_")]
        return [one for one in found if one.name not in OF_ONE_DEVICE]

    try:
        yield slices
    finally:
        TRACING.stop()
        reader.release()


def names(slices: Sequence[Slice]) -> list[str]:
    return [one.name for one in slices]


def test_OBS_7_a_plan_and_its_steps_are_slices_of_the_layer_LR(prepare: Prepare) -> None:
    model = prepare(linear_plan(two_adds(), [0], [1]))
    with traced() as slices:
        model.execute(A, B)
        found = slices()
    devices = [step.device for step in model.steps]
    assert names(found) == ["[NN_LR_PE]plan", *(f"[NN_LR_PE]step {i} on {name}" for i, name in enumerate(devices))]
    plan, first, second = found
    assert plan.begin_ns <= first.begin_ns <= first.end_ns <= second.begin_ns <= second.end_ns <= plan.end_ns


def test_OBS_7_a_burst_of_a_plan_is_traced(prepare: Prepare) -> None:
    model = prepare(linear_plan(two_adds(), [0], [1]))
    with model.burst() as burst:
        before = burst.execute(A, B)[0].tolist()
        with traced() as slices:
            assert burst.execute(A, B)[0].tolist() == before
            assert [name.split(" on")[0] for name in names(slices())] == [
                "[NN_LR_PE]plan", "[NN_LR_PE]step 0", "[NN_LR_PE]step 1",
            ]  # fmt: skip


def test_OBS_7_interpretation_has_slices_between_the_steps(prepare: Prepare) -> None:
    model = prepare(control_flow_plan(counting()))
    with traced() as slices:
        model.execute(np.array([1, 2], np.float32), np.array([2], np.int32), np.array([1, 1], np.float32))
        found = [name.split(" on")[0] for name in names(slices())]
    # 3 conditions and 2 rounds of a body of 2 operations, each a step; a slice before each of them, and one at the end
    steps = 3 + 2 * 2
    assert len([name for name in found if name.startswith("[NN_LR_PE]step")]) == steps
    assert found.count("[NN_LR_PCO]interpretation") == steps + 1
    assert found[0] == "[NN_LR_PE]plan"


def test_OBS_7_a_fallback_has_a_slice(prepare: Prepare, clients: list[nnfmq.Client]) -> None:
    model = prepare(linear_plan(two_adds(), [0], [1]))
    with Process(clients[1].worker_pid) as worker:
        worker.kill()
    with traced() as slices:
        (result,) = model.execute(A, B)
        found = names(slices())
    assert result.tolist() == (A + 2 * B).tolist()
    assert "[NN_LR_PE]fallback: step 1" in found


class Observer:
    """Keeps the executions of one model."""

    needs_tensors = False

    def __init__(self) -> None:
        self.executions: list[ObservedExecution] = []

    def executed(self, execution: ObservedExecution) -> None:
        self.executions.append(execution)


@pytest.fixture
def observer() -> Observer:
    return Observer()


def observe(model: PartitionedModel, observer: Observer) -> None:
    model.handle.observed = ObservedModel([observer], model.handle.inputs, model.handle.outputs)


def by_sync(model: PartitionedModel) -> Any:
    return model.execute(A, B)


def by_async(model: PartitionedModel) -> Any:
    return model.execute_async(A, B).result(LIMIT_S)


def by_burst(model: PartitionedModel) -> Any:
    with model.burst() as burst:
        return burst.execute(A, B)


def by_reusable(model: PartitionedModel) -> Any:
    with model.create_reusable_execution() as execution:
        return execution.compute(A, B)


def by_fences(model: PartitionedModel) -> Any:
    with model.execute_fenced(A, B) as launched:
        return launched.result(LIMIT_S)


MODES = [
    (by_sync, HalExecutionMode.SYNCHRONOUS),
    (by_async, HalExecutionMode.ASYNCHRONOUS),
    (by_burst, HalExecutionMode.BURST),
    (by_reusable, HalExecutionMode.REUSABLE),
    (by_fences, HalExecutionMode.FENCED),
]


@pytest.mark.parametrize(("execute", "mode"), MODES)
def test_OBS_2_an_execution_of_a_plan_is_observed_once_in_every_mode(
    prepare: Prepare, observer: Observer, execute: Callable[[PartitionedModel], Any], mode: HalExecutionMode
) -> None:
    model = prepare(linear_plan(two_adds(), [0], [1]))
    observe(model, observer)
    execute(model)
    (found,) = observer.executions
    assert (found.mode, found.status) == (mode, ErrorStatus.NONE)
    assert 0 < found.begin_ns <= found.end_ns
    assert (found.time_on_device_ns, found.time_in_driver_ns) == (-1, -1)


@pytest.mark.parametrize(("execute", "mode"), MODES)
def test_OBS_2_an_execution_of_a_plan_that_fails_is_observed_with_its_error(
    prepare: Prepare,
    clients: list[nnfmq.Client],
    observer: Observer,
    execute: Callable[[PartitionedModel], Any],
    mode: HalExecutionMode,
) -> None:
    model = prepare(linear_plan(two_adds(), [0], [1]), has_fallback=False)
    observe(model, observer)
    if mode in (HalExecutionMode.BURST, HalExecutionMode.REUSABLE):
        opened = model.burst() if mode is HalExecutionMode.BURST else model.create_reusable_execution()
        call = opened.execute if mode is HalExecutionMode.BURST else opened.compute
    else:
        opened, call = ExitStack(), lambda *_: execute(model)
    with opened:
        with Process(clients[1].worker_pid) as worker:
            worker.kill()
        with pytest.raises(nnfmq.DeadObject):
            call(A, B)
    assert {(found.mode, found.status) for found in observer.executions} == {(mode, ErrorStatus.DEAD_OBJECT)}
    assert len(observer.executions) == 1


def test_OBS_2_QOS_2_an_execution_whose_deadline_has_passed_is_observed_in_every_mode(
    prepare: Prepare, observer: Observer
) -> None:
    model = prepare(linear_plan(two_adds(), [0], [1]))
    observe(model, observer)
    with model.burst() as burst, model.create_reusable_execution() as execution:
        calls: dict[HalExecutionMode, Callable[[], Any]] = {
            HalExecutionMode.SYNCHRONOUS: lambda: model.execute(A, B, timeout=0),
            HalExecutionMode.ASYNCHRONOUS: lambda: model.execute_async(A, B, timeout=0).result(LIMIT_S),
            HalExecutionMode.BURST: lambda: burst.execute(A, B, timeout=0),
            HalExecutionMode.REUSABLE: lambda: execution.compute(A, B, timeout=0),
            HalExecutionMode.FENCED: lambda: model.execute_fenced(A, B, timeout=0),
        }
        for call in calls.values():
            with pytest.raises(nnfmq.MissedDeadlinePersistent):
                call()
    assert [one.mode for one in observer.executions] == list(calls)
    assert {one.status for one in observer.executions} == {ErrorStatus.MISSED_DEADLINE_PERSISTENT}


def test_OBS_5_the_verbose_log_names_each_step_and_fallback(
    prepare: Prepare, clients: list[nnfmq.Client], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = prepare(linear_plan(two_adds(), [0], [1]))
    with Process(clients[1].worker_pid) as worker:
        worker.kill()
    monkeypatch.setattr(verbose_log._Mask, "tags", frozenset({"execution"}))
    with caplog.at_level("INFO", "nnfmq.vlog.execution"):
        model.execute(A, B)
    lines = [r.getMessage() for r in caplog.records if r.name == "nnfmq.vlog.execution"]
    devices = [step.device for step in model.steps]
    assert lines[0] == f"SYNCHRONOUS execution of a plan on {model.device}"
    assert [line for line in lines if line.startswith("step")] == [
        f"step 0 on {devices[0]}", f"step 1 on {devices[1]}", "step 1 on the CPU",
    ]  # fmt: skip


def test_OBS_7_a_branch_that_is_not_taken_has_no_slice(prepare: Prepare) -> None:
    model = prepare(control_flow_plan(branching()))
    x, y = np.array([3, 4], np.float32), np.array([5, 6], np.float32)
    with traced() as slices:
        model.execute(np.array([False]), x, y)
        found = [name.split(" on")[0] for name in names(slices())]
    assert [name for name in found if name.startswith("[NN_LR_PE]step")] == ["[NN_LR_PE]step 1"]
