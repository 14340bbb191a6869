"""Models on several devices, with real drivers: synchronous executions of plans that are written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest
from support.control_flow_models import branching, counting, rotating
from support.drivers import Daemon, running_daemon, short_folder
from support.plans import control_flow_plan, linear_plan
from support.small_models import two_adds

import nnfmq
from nnfmq.execution_plan.plan import ExecutionPlan
from nnfmq.hal.tensor_info import operand_info
from nnfmq.runtime.cpu_fallback import CpuFallback
from nnfmq.runtime.plan_execution.partitioned_model import PartitionedModel

Prepare = Callable[[ExecutionPlan], PartitionedModel]


@pytest.fixture(scope="module")
def drivers() -> Iterator[list[Daemon]]:
    with ExitStack() as stack:
        folder = stack.enter_context(short_folder())
        yield [stack.enter_context(running_daemon(folder / f"{name}.sock")) for name in "abc"]


@pytest.fixture
def prepare(drivers: list[Daemon]) -> Iterator[Prepare]:
    """Prepare the steps of a plan on the first two drivers; the third has the CPU device."""
    with ExitStack() as stack:
        clients = [stack.enter_context(driver.connect()) for driver in drivers]

        def prepare(plan: ExecutionPlan) -> PartitionedModel:
            model = prepared(plan, clients)
            stack.callback(model.close)
            return model

        yield prepare


def prepared(plan: ExecutionPlan, clients: Sequence[nnfmq.Client]) -> PartitionedModel:
    """Return the plan's model, whose step for device i is on client i; the last client has the CPU device."""
    steps = [clients[step.device].device("reference").prepare(step.model) for step in plan.execution_steps]
    fallback = CpuFallback(
        partial(clients[-1].device, "reference"), plan.model, [step.model for step in plan.execution_steps]
    )
    main = plan.model.main
    inputs = tuple(operand_info(main.operands[index], f"input {i}") for i, index in enumerate(main.input_indexes))
    outputs = tuple(operand_info(main.operands[index], f"output {i}") for i, index in enumerate(main.output_indexes))
    return PartitionedModel(plan, steps, fallback, inputs, outputs)


A = np.array([[1, 2], [3, 4]], np.float32)
B = np.array([[10, 20], [30, 40]], np.float32)


def test_PART_5_a_value_between_two_drivers_is_in_memory_of_the_runtime(prepare: Prepare) -> None:
    model = prepare(linear_plan(two_adds(), [0], [1]))
    for _ in range(3):
        (result,) = model.execute(A, B)
        assert result.tolist() == (A + 2 * B).tolist()


@pytest.mark.parametrize("condition", [True, False])
def test_PART_4_an_interpreted_IF_executes_one_branch(prepare: Prepare, condition: bool) -> None:
    model = prepare(control_flow_plan(branching()))
    x, y = np.array([3, 4], np.float32), np.array([5, 6], np.float32)
    (result,) = model.execute(np.array([condition]), x, y)
    assert result.tolist() == ([8, 10] if condition else [15, 24])


@pytest.mark.parametrize("rounds", [0, 1, 5])
def test_PART_4_an_interpreted_WHILE_repeats_its_body(prepare: Prepare, rounds: int) -> None:
    model = prepare(control_flow_plan(counting()))
    for _ in range(2):
        total, x = np.array([1, 2], np.float32), np.array([10, 20], np.float32)
        (result,) = model.execute(total, np.array([rounds], np.int32), x)
        assert result.tolist() == [1 + 10 * rounds, 2 + 20 * rounds]


def test_PART_4_the_values_of_a_WHILE_change_places(prepare: Prepare) -> None:
    model = prepare(control_flow_plan(rotating()))
    a, b, c = (np.array([v, -v], np.float32) for v in (1, 10, 100))
    results = model.execute(a, b, c, np.array([3], np.int32))
    for _ in range(3):
        a, b, c = b, c, a + c
    assert [result.tolist() for result in results] == [a.tolist(), b.tolist(), c.tolist()]
