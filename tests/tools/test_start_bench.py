"""`tools/start_bench.py`: the contents of its report."""

from __future__ import annotations

import pytest
import start_bench


def test_it_prints_every_step_for_both_kinds_of_driver(capsys: pytest.CaptureFixture[str]) -> None:
    assert start_bench.main(["--rounds", "1"]) == 0
    _, steps, *rows = capsys.readouterr().out.splitlines()
    assert tuple(steps.split()) == start_bench.STEPS
    assert [row.split()[0] for row in rows] == ["embedded", "daemon"]
    assert all(row.count("(") == len(start_bench.STEPS) for row in rows)


def test_the_total_is_the_sum_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    class Done:
        stdout = "[1000000, 3000000, 6000000, 10000000, 15000000]"

    monkeypatch.setattr(start_bench.subprocess, "run", lambda *_, **__: Done)
    assert start_bench.run_once(None, start_bench.MODEL, {}) == [2.0, 3.0, 4.0, 5.0, 14.0]
