"""boundary_bench measures a plan that two drivers execute, and its steps."""

from __future__ import annotations

import json

import boundary_bench
import numpy as np
import pytest
from support.planned import run_plan, run_whole


def test_its_plan_computes_what_its_model_does() -> None:
    plan = boundary_bench.plan_of_two(3)
    inputs = np.array([1, 2, 3], np.float32), np.array([10, 20, 30], np.float32)
    (result,) = run_plan(plan, inputs)
    assert result.tolist() == run_whole(plan.model, inputs)[0].tolist() == [21, 42, 63]


def test_it_prints_the_cost_for_each_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert boundary_bench.main(["--rounds", "1", "--executions", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["bytes"] for row in found["sizes"]] == list(boundary_bench.SIZES)
    for row in found["sizes"]:
        assert row["cost_us"] == pytest.approx(row["plan_us"] - sum(row["steps_us"]))


def test_its_table_has_a_line_for_each_size(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boundary_bench, "SIZES", (16,))
    assert boundary_bench.main(["--rounds", "1", "--executions", "2", "--cpus", ""]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    assert line.split()[0] == "16"
