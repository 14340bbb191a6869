"""`tools/start_bench.py`: the contents of its reports."""

from __future__ import annotations

import json

import pytest
import start_bench

import nnfmq


def test_it_prints_every_step_for_both_kinds_of_driver(capsys: pytest.CaptureFixture[str]) -> None:
    assert start_bench.main(["process", "--rounds", "1"]) == 0
    _, steps, *rows = capsys.readouterr().out.splitlines()
    assert tuple(steps.split()) == start_bench.STEPS
    assert [row.split()[0] for row in rows] == ["embedded", "daemon"]
    assert all(row.count("(") == len(start_bench.STEPS) for row in rows)


def test_the_total_is_the_sum_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    class Done:
        stdout = "[1000000, 3000000, 6000000, 10000000, 15000000]"

    monkeypatch.setattr(start_bench.subprocess, "run", lambda *_, **__: Done)
    assert start_bench.run_once(None, start_bench.MODEL, {}) == [2.0, 3.0, 4.0, 5.0, 14.0]


def test_it_reports_each_model_with_every_round(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(nnfmq.example_path("digits_quant.tflite"))
    assert start_bench.main(["cache", path, path, "--rounds", "2", "--json"]) == 0
    reports = json.loads(capsys.readouterr().out)["models"]
    assert [report["model"] for report in reports] == [path, path]
    for report in reports:
        assert list(report["ns"]) == ["read", "fresh", "save", "cache"]
        assert all(len(times) == 2 and min(times) > 0 for times in report["ns"].values())
        assert report["ratio"] == sum(report["ns"]["fresh"]) / sum(report["ns"]["cache"])  # medians of two
        assert report["cache_bytes"] > 2 * 64


def test_the_table_has_a_line_for_each_model(capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(nnfmq.example_path(name)) for name in ("digits.tflite", "digits_quant.tflite")]
    assert start_bench.main(["cache", *paths, "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["digits.tflite", "digits_quant.tflite"]


def test_it_divides_the_time_of_a_compilation(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llvmlite", exc_type=ImportError)
    assert start_bench.main(["compile", str(nnfmq.example_path("digits_quant.tflite")), "--rounds", "1"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[-9:] == [*start_bench.PARTS, "total", "kernels", "lines"]
    name, *numbers, kernels, lines = row.split()
    *parts, total = map(float, numbers)
    assert name == "digits_quant.tflite" and min(parts) > 0 and abs(sum(parts) - total) < 0.5
    assert 0 < 10 * int(kernels) < int(lines)


def test_it_counts_the_kernels_that_an_earlier_model_had(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llvmlite", exc_type=ImportError)
    path = str(nnfmq.example_path("digits_quant.tflite"))
    assert start_bench.main(["shared", path, path, "--rounds", "1"]) == 0
    _, first, second = (line.split() for line in capsys.readouterr().out.splitlines())
    assert int(first[1]) > 0 and int(second[1]) == 0
    assert float(first[2]) > float(second[2]) > 0
