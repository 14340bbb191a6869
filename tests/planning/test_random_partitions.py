"""Random graphs on random devices: whatever the plan, its steps compute the same bits as the whole model."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support import tiers
from support.outlining import with_control_flow
from support.planned import random_devices, run_plan, run_whole

from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.types import Model
from nnfmq.lab.conformance import testmodels
from nnfmq.lab.conformance.random_graphs import classes, generate
from nnfmq.planning.partitioning import PlanOptions, make_plan
from nnfmq.planning.plan import ExecutionPlan, ExecutionStep, GotoStep, IfStep, WhileStep

_GRAPHS = [name for name, found in classes().items() if found.family in ("small", "large", "quantized")]
_SEEDS = range(1500 if tiers.IS_DEEP else 100)
_BLOCKS = range(4)


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
        for expected, array in zip(run_whole(model, inputs), run_plan(plan, inputs), strict=True):
            np.testing.assert_array_equal(array, expected)
    assert kinds == {ExecutionStep, IfStep, WhileStep, GotoStep}
