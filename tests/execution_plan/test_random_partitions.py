"""Random graphs on random devices: whatever the plan, its steps compute the same bits as the whole model."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from support import tiers
from support.outlining import with_control_flow
from support.planned import Array, FakeDevice, cpu, figures, run_plan

from nnfmq.conformance import testmodels
from nnfmq.conformance.random_classes import classes
from nnfmq.conformance.random_graphs import generate
from nnfmq.engines import interpreter
from nnfmq.engines.execution import RunOptions
from nnfmq.execution_plan.partitioning import PlanOptions, make_plan
from nnfmq.execution_plan.plan import ExecutionPlan, ExecutionStep, GotoStep, IfStep, WhileStep
from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.types import Model, Operation, Subgraph

_GRAPHS = [name for name, found in classes().items() if found.family in ("small", "large", "quantized")]
_SEEDS = range(1500 if tiers.IS_DEEP else 100)
_BLOCKS = range(4)


def random_devices(rng: random.Random) -> list[FakeDevice]:
    """Return one to three devices that support random subsets of the operations, and the CPU device."""
    devices = []
    for number in range(rng.randint(1, 3)):
        share, salt = rng.choice((0.2, 0.5, 0.9)), rng.random()

        def supports(_graph: Subgraph, operation: Operation, share: float = share, salt: float = salt) -> bool:
            return random.Random(f"{salt} {operation.type} {len(operation.inputs)}").random() < share

        capabilities = figures(rng.choice((0.5, 1.0, 2.0)))
        devices.append(FakeDevice(f"fake-{number}", supports, rng.randint(1, 8), capabilities))
    return [*devices, cpu()]


def whole(model: Model, inputs: Sequence[Array | None]) -> list[Array]:
    with np.errstate(all="ignore"):
        return interpreter.prepare(model).call(inputs, RunOptions())


def planned(model: Model, rng: random.Random) -> ExecutionPlan | None:
    options = PlanOptions(strict_slicing=rng.random() < 0.3)
    if rng.random() < 0.5:
        options = PlanOptions(choose=lambda _subgraph, _operation, candidates: rng.choice(candidates))
    try:
        return make_plan(model, random_devices(rng), options)
    except GeneralFailure as error:
        if "would have no" not in str(error):
            raise
        return None  # a step of constants only, or with results that nobody reads


@pytest.mark.parametrize("block", _BLOCKS)
def test_PART_3_and_PART_5_every_plan_computes_the_same_bits_as_the_whole_model(block: int) -> None:
    kinds: set[type] = set()
    for seed in _SEEDS:
        rng = random.Random(f"{block} {seed}")
        test = testmodels.read(generate(classes()[rng.choice(_GRAPHS)], rng.randrange(50)))
        model, inputs = test.model, list(test.inputs)
        if rng.random() < 0.7:
            model, inputs = with_control_flow(model, inputs, rng)
        plan = planned(model, rng)
        if plan is None:
            continue
        kinds.update(map(type, plan.steps))
        for expected, array in zip(whole(model, inputs), run_plan(plan, inputs), strict=True):
            np.testing.assert_array_equal(array, expected)
    assert kinds == {ExecutionStep, IfStep, WhileStep, GotoStep}
