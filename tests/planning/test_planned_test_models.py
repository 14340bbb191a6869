"""The HAL's test models with IF and WHILE, and with several operations, on random devices."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.planned import random_devices, run_plan, run_whole
from support.tiers import IS_DEEP
from support.vts_models import SPECS, executable_lines

from nnfmq.hal.errors import GeneralFailure
from nnfmq.lab.conformance import testmodels
from nnfmq.lab.conformance.testmodels import Line
from nnfmq.planning.partitioning import PlanOptions, make_plan
from nnfmq.planning.plan import IfStep, WhileStep

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not SPECS, reason="the HAL's test models are not part of the repository: set NNFMQ_DATA"),
]


def is_planned(line: Line) -> bool:
    return bool(line["referenced"]) or len(line["main"]["operations"]) > 1


@pytest.mark.parametrize("forced", [False, True])
def test_PART_4_and_PART_5_every_plan_of_a_test_model_computes_the_same_bits_as_the_model(forced: bool) -> None:
    """Of a third of the models; in the deep tier of all."""
    kinds: dict[type, int] = {IfStep: 0, WhileStep: 0}
    undivided = planned = 0
    lines = list(filter(is_planned, executable_lines()))
    for line in lines if IS_DEEP else lines[forced::3]:
        rng = random.Random(f"{line['name']} {forced}")
        test = testmodels.read(line)
        options = PlanOptions(choose=(lambda _s, _o, candidates, rng=rng: rng.choice(candidates)) if forced else None)
        try:
            plan = make_plan(test.model, random_devices(rng), options)
        except GeneralFailure:
            undivided += 1
            continue
        planned += 1
        for step in plan.steps:
            kinds[type(step)] = kinds.get(type(step), 0) + 1
        for expected, array in zip(run_whole(test.model, test.inputs), run_plan(plan, test.inputs), strict=True):
            np.testing.assert_array_equal(array, expected, err_msg=test.name)
    assert min(kinds.values()) > 0
    assert undivided < planned / 10
