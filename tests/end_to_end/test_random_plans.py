"""Random graphs with nested IFs and WHILEs, planned for random devices and executed by drivers, in every mode.

The steps of even devices are prepared on one driver, those of odd ones on another. The expected bits are those of the
interpreter for the whole model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np
import pytest
from msgspec.structs import replace
from support import tiers
from support.outlining import with_control_flow
from support.partitioned import MODES, STATUSES, Runtime, device_failing_with, infos_of
from support.planned import random_devices, run_whole

import nnfmq
from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.types import Model
from nnfmq.lab.conformance import testmodels
from nnfmq.lab.conformance.random_graphs import classes, generate
from nnfmq.planning.partitioning import PlanOptions, make_plan
from nnfmq.planning.plan import ExecutionPlan, ExecutionStep, GotoStep, IfStep, WhileStep

_GRAPHS = [name for name, found in classes().items() if found.family in ("small", "quantized")]
_SEEDS = range(300 if tiers.IS_DEEP else 12)
_ANY_SHAPES = ("synchronous", "asynchronous", "await")
_FAILING = [device_failing_with(status) for status in STATUSES if status != "INVALID_ARGUMENT"]


def compound_plan(model: Model, rng: random.Random) -> ExecutionPlan | None:
    """Return a plan of several steps, on two devices; None if this model has none."""
    options = PlanOptions(choose=lambda _subgraph, _operation, candidates: rng.choice(candidates))
    try:
        plan = make_plan(model, random_devices(rng), options)
    except GeneralFailure:  # a step of constants only, or with results that nobody reads
        return None
    return None if plan.is_simple else plan


def shared(model: Model, stack: ExitStack) -> Model:
    """Return the model with its constants in shared memory, which `stack` closes."""
    pools = []
    for pool in model.pools:
        pools.append(stack.enter_context(nnfmq.Memory.create(pool.size_bytes)))
        pools[-1].view[:] = pool.view
    return replace(model, pools=tuple(pools))


def random_plans(block: str) -> Iterator[tuple[ExecutionPlan, list[np.ndarray], random.Random]]:
    for seed in _SEEDS:
        rng = random.Random(f"{block} {seed}")
        test = testmodels.read(generate(classes()[rng.choice(_GRAPHS)], rng.randrange(50)))
        with ExitStack() as stack:
            model, inputs = with_control_flow(shared(test.model, stack), list(test.inputs), rng)
            plan = compound_plan(model, rng)
            if plan is not None and all(array is not None for array in inputs):
                yield plan, [np.asarray(array) for array in inputs], rng


def arguments_of(model: Model, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return arrays of the client's element types: the interpreter has bytes instead of truth values."""
    infos, _ = infos_of(model)
    return [array.astype(info.dtype) for array, info in zip(inputs, infos, strict=True)]


@pytest.mark.parametrize("mode", MODES)
def test_PART_4_PART_5_drivers_compute_the_same_bits_as_the_interpreter(runtime: Runtime, mode: str) -> None:
    kinds: set[type] = set()
    for plan, inputs, _rng in random_plans("synchronous"):
        expected = run_whole(plan.model, inputs)
        model = runtime.prepare(plan, devices=["reference"] * len(plan.devices))
        if mode not in _ANY_SHAPES and any(info.has_unknown_shape for info in model.outputs):
            continue
        for _ in range(2):
            for array, wanted in zip(MODES[mode](model, *arguments_of(plan.model, inputs)), expected, strict=True):
                np.testing.assert_array_equal(array, wanted)
        kinds.update(map(type, plan.steps))
        model.close()
    assert kinds == {ExecutionStep, IfStep, WhileStep, GotoStep}


@pytest.mark.parametrize("mode", MODES)
def test_PART_6_so_do_they_if_random_steps_fail(runtime: Runtime, mode: str) -> None:
    count = 0
    for plan, inputs, rng in random_plans("failing synchronous"):
        expected = run_whole(plan.model, inputs)
        devices = [
            "reference" if name == "nnapi-reference" else rng.choice(["reference", rng.choice(_FAILING)])
            for name in plan.devices
        ]
        cpu = rng.choice([("reference",), (rng.choice(_FAILING), "reference")])
        model = runtime.prepare(plan, devices=devices, cpu=cpu)
        if mode not in _ANY_SHAPES and any(info.has_unknown_shape for info in model.outputs):
            continue
        if "fenced" in mode:  # its fallback is the whole model at once, which has no other
            model = runtime.prepare(plan, devices=devices)
        for array, wanted in zip(MODES[mode](model, *arguments_of(plan.model, inputs)), expected, strict=True):
            np.testing.assert_array_equal(array, wanted)
        count += 1
        model.close()
    assert count > len(_SEEDS) // 3
