"""Test models over every execution path of a driver process: one for each operation and each of its operand types.

`nnfmq conformance TESTS --path all --device NAME` runs all test models, with their variants.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from support import model_lines
from support.vts_models import executable_lines, one_of_each_type

from nnfmq.lab.conformance import testmodels
from nnfmq.lab.conformance.cases import FAILED, PASSED, matrix_entries, run_test
from nnfmq.lab.conformance.driver_targets import DRIVER_PATHS, Driver
from nnfmq.lab.conformance.runner import open_target
from nnfmq.lab.conformance.targets import ExecutionOutput, ExecutionRequest, ExecutionTarget, Prepared

PARTS = 8


@pytest.fixture(params=["reference", "compiled"], scope="module")
def target(request: pytest.FixtureRequest) -> Iterator[ExecutionTarget]:
    """Yield all paths of a device; one driver process serves all tests."""
    with closing(open_target("all", request.param, "embedded")) as opened:
        assert opened.feature_level  # connects now, so that the first test does not include the time it takes
        yield opened


@pytest.mark.usefixtures("data_dir")
def test_TST_5_the_chosen_models_have_every_operation_with_every_operand_type() -> None:
    entries = {entry for line in executable_lines() for entry in matrix_entries(line)}
    chosen = {entry for test in one_of_each_type() for entry in matrix_entries(test.line)}
    assert len(entries) > 390
    assert chosen == entries


@pytest.mark.usefixtures("data_dir")
@pytest.mark.parametrize("part", range(PARTS))
def test_TST_1_TST_5_every_path_returns_the_expected_outputs_and_the_same_bytes(
    part: int, target: ExecutionTarget
) -> None:
    results = [run_test(test, target, with_variants=False) for test in one_of_each_type()[part::PARTS]]
    assert len(results) > 30
    assert [(r.name, o.reason) for r in results for o in r.outcomes if o.status != PASSED] == []


def test_TST_1_the_paths_are_the_calls_that_execute_a_model_with_pools_and_with_buffers() -> None:
    with_pools = {"sync", "async", "fenced", "reusable", "burst", "aidl-burst"}
    with_buffers = {"memory-domain", *(f"memory-domain-{mode}" for mode in ("async", "fenced", "aidl-burst"))}
    assert set(DRIVER_PATHS) == with_pools | with_buffers


def test_TST_1_a_model_that_must_fail_is_a_failure_if_the_driver_executes_it(target: ExecutionTarget) -> None:
    invalid = model_lines.changed(lambda line: line["main"]["operations"][0].update(inputs=[0, 1]))
    results = [
        run_test(testmodels.read({**line, "expectFailure": True}), target, with_variants=False)
        for line in (model_lines.add(), invalid)
    ]
    assert [outcome.status for result in results for outcome in result.outcomes] == [FAILED, PASSED]


class Inverted:
    """What executes a model, with all bits of the outputs inverted."""

    def __init__(self, right: Prepared) -> None:
        self.right = right

    def execute(self, execution: ExecutionRequest) -> ExecutionOutput:
        executed = self.right.execute(execution)
        return replace(executed, outputs=tuple(bytes(255 - byte for byte in raw) for raw in executed.outputs))


def test_TST_1_a_path_with_another_result_is_reported_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Driver.executor
    with closing(open_target("all", "reference", "embedded")) as target:
        for path in DRIVER_PATHS:

            def executor(self: Driver, prepared: Any, name: str, path: str = path) -> Prepared:
                made = right(self, prepared, name)
                return Inverted(made) if name == path else made

            monkeypatch.setattr(Driver, "executor", executor)
            (outcome,) = run_test(testmodels.read(model_lines.add()), target, with_variants=False).outcomes
            first, *others = DRIVER_PATHS
            assert outcome.status == FAILED
            assert [m.reason.split(":")[0] for m in outcome.mismatches] == (others if path == first else [path])
