"""Test models and random graphs over the runtime: plans, forced and random partitions, devices that fail.

Longer: `nnfmq conformance TESTS --path runtime --partition 2`, `... --random-graphs --path runtime --partition random`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING

import pytest
from support import model_lines
from support.vts_models import FOLDER, one_of_each_type

from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import Model
from nnfmq.lab.conformance import testmodels
from nnfmq.lab.conformance.cases import PASSED, SKIPPED, ConformanceResult, run_test
from nnfmq.lab.conformance.driver_targets import in_shared_memory
from nnfmq.lab.conformance.random_graphs import classes, generate
from nnfmq.lab.conformance.results import Summary
from nnfmq.lab.conformance.runner import open_target
from nnfmq.lab.conformance.runtime_targets import (
    PARTITIONS,
    RANDOM,
    RUNTIME_PATHS,
    DriversInTurn,
    RandomDevices,
    RuntimeTarget,
    configuration,
    in_turn,
)
from nnfmq.lab.conformance.targets import ExecutionRequest, ExecutionTarget, Interpreter, PlanCounts
from nnfmq.lab.conformance.testmodels import TestModel
from nnfmq.validation import validate_model

if TYPE_CHECKING:
    from nnfmq.client.model.compiled_model import CompiledModel

GRAPHS = [graph_class.name for graph_class in classes().values() if graph_class.family == "divided"]
SEEDS = range(2)


@cache
def graph(name: str, seed: int) -> TestModel:
    return testmodels.read(generate(classes()[name], seed))


def not_passed(results: Sequence[ConformanceResult]) -> list[tuple[str, str, str]]:
    return [(r.name, v.kind, v.reason) for r in results for v in r.outcomes if v.status != PASSED]


def plans_of(results: Sequence[ConformanceResult]) -> PlanCounts:
    summary = Summary()
    for result in results:
        summary.add(result)
    return summary.plans


def output_bytes(test: TestModel, target: ExecutionTarget) -> tuple[bytes, ...]:
    with target.prepared(test.model) as prepared:
        return prepared.execute(ExecutionRequest(test.inputs, test.expected)).outputs


# -- random partitions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", PARTITIONS)
def test_TST_8_PART_5_a_divided_graph_computes_what_the_interpreter_does(partition: str) -> None:
    tests = [graph(name, seed) for name in GRAPHS for seed in SEEDS]
    with closing(open_target("runtime", "reference", None, partition)) as target:
        divided = [output_bytes(test, target) for test in tests]
    assert divided == [output_bytes(test, Interpreter()) for test in tests]


def test_TST_8_PART_6_graphs_and_their_variants_pass_on_random_devices_some_of_which_fail() -> None:
    with closing(open_target("runtime", "", None, RANDOM)) as target:
        results = [run_test(graph(name, seed), target) for name in GRAPHS for seed in range(4, 6)]
        results += [run_test(graph(name, 4), target) for name in classes() if name.startswith("small_")]
    assert not_passed(results) == []
    plans = plans_of(results)
    assert plans.compound > 40
    assert plans.steps > 2 * plans.compound
    assert plans.fell_back > 0 and plans.unprepared > 0


def test_TST_8_the_devices_follow_from_the_model_alone() -> None:
    tests = [graph(name, 7) for name in GRAPHS]
    described = [[plan_of(test, devices) for test in order] for order in (tests, tests[::-1]) for devices in opened()]
    assert described[0] == described[1][::-1]
    assert len({devices for devices, _ in described[0]}) > len(tests) // 2


def opened() -> Iterator[RandomDevices]:
    with closing(RandomDevices()) as devices:
        yield devices


def plan_of(test: TestModel, devices: RandomDevices) -> tuple[tuple[str, ...], list[int]]:
    with in_shared_memory(test.model) as model, devices.prepared(model) as compiled:
        assert compiled.plan is not None
        return compiled.plan.devices, [step.device for step in compiled.plan.execution_steps]


def test_TST_8_the_devices_differ_in_their_operations_and_figures() -> None:
    import tomllib

    devices = [device for driver in range(2) for device in tomllib.loads(configuration(driver))["device"]]
    counts = [len(device["operations"]) for device in devices]
    assert len({device["name"] for device in devices}) == len(devices) == 24
    assert min(counts) < 30 and max(counts) > 70
    assert len({device["performance"]["all"]["exec_time"] for device in devices}) == len(devices)


# -- forced partitions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("candidates", "taken"), [([0, 1], [0, 1, 0, 1]), ([0, 2, 5], [0, 2, 5, 0]), ([4], [4] * 4)])
def test_operations_are_given_in_turn(candidates: list[int], taken: list[int]) -> None:
    assert [in_turn(0, operation, candidates) for operation in range(4)] == taken


@pytest.mark.parametrize("partition", ["2", "3"])
def test_PART_3_in_a_forced_partition_each_model_of_several_operations_has_several_steps(partition: str) -> None:
    with closing(open_target("runtime", "reference", None, partition)) as target:
        results = [run_test(graph(name, seed), target) for name in GRAPHS for seed in SEEDS]
    assert not_passed(results) == []
    plans = plans_of(results)
    assert plans.undivided == 0
    assert plans.compound > 2 * len(GRAPHS)
    assert plans.steps >= 2 * plans.compound
    assert plans.fell_back == 0


@pytest.mark.parametrize("path", RUNTIME_PATHS)
@pytest.mark.usefixtures("data_dir")
def test_TST_5_PART_4_loops_and_branches_over_drivers_in_turn(path: str) -> None:
    tests = [test for test in one_of_each_type() if test.model.referenced][:12]
    with closing(open_target(path, "reference", None, "2")) as target:
        results = [run_test(test, target) for test in tests]
    assert all(outcome.status in (PASSED, SKIPPED) for result in results for outcome in result.outcomes)
    assert sum(outcome.status == PASSED for result in results for outcome in result.outcomes) >= len(tests)


@pytest.mark.usefixtures("data_dir")
def test_PART_4_N_VAL_20_the_runtime_runs_models_whose_boundaries_of_unknown_size_a_driver_rejects() -> None:
    with closing(open_target("runtime", "sample-.*", None)) as target:
        results = [run_test(test, target) for test in islice(_models_that_drivers_reject(), 12)]
    assert len(results) == 12
    assert not_passed(results) == []
    plans = plans_of(results)
    assert (plans.simple, plans.unprepared) == (0, 0)


def _models_that_drivers_reject() -> Iterator[TestModel]:
    lines = (line for path in testmodels.find_files([FOLDER / "V1_3_cts_only"]) for _, line in testmodels.lines(path))
    for test in map(testmodels.read, lines):
        try:
            validate_model(test.model)
        except InvalidArgument:
            if not test.must_fail:
                yield test


# -- devices that fail ------------------------------------------------------------------------------------------------


class _Killed(DriversInTurn):
    """Drivers of which one is killed after each preparation."""

    @contextmanager
    def prepared(self, model: Model) -> Iterator[CompiledModel]:
        with super().prepared(model) as compiled:
            step = compiled if isinstance(compiled, PreparedModel) else compiled.steps[-1]
            connection = step.handle.connection
            os.kill(connection.wait_until_ready().worker_pid, signal.SIGKILL)
            yield compiled


@pytest.mark.parametrize("path", RUNTIME_PATHS)
def test_PART_6_LIFE_4_the_death_of_a_driver_before_an_execution_changes_no_result(path: str) -> None:
    with closing(RuntimeTarget(path, _Killed(2, "reference", None))) as target:
        results = [run_test(graph(name, 1), target, with_variants=False) for name in GRAPHS[:2]]
    assert not_passed(results) == []
    assert plans_of(results).fell_back + plans_of(results).unprepared == len(results)


# -- the target -------------------------------------------------------------------------------------------------------


def test_a_device_that_no_driver_has_is_an_error() -> None:
    with (
        closing(open_target("runtime", "nowhere", None, "2")) as target,
        pytest.raises(InvalidArgument, match="nowhere"),
    ):
        _ = target.feature_level


def test_a_target_that_was_closed_begins_anew() -> None:
    test = testmodels.read(model_lines.add())
    with closing(open_target("runtime", "reference", None, "2")) as target:
        before = output_bytes(test, target)
        target.close()
        assert output_bytes(test, target) == before


def test_the_runtime_chooses_among_the_devices_that_match() -> None:
    test = testmodels.read(model_lines.add())
    with closing(open_target("runtime", "sample-minimal", None)) as target:
        result = run_test(test, target)
    assert not_passed([result]) == []
    assert result.plans == PlanCounts(simple=3)  # the model, with outputs of unknown shape, and with a short buffer
