"""`tools/cache_bench.py`: the contents of its report."""

from __future__ import annotations

import json

import cache_bench
import pytest

import nnfmq


def test_it_reports_each_model_with_every_round(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(nnfmq.example_path("digits_quant.tflite"))
    assert cache_bench.main([path, path, "--rounds", "2", "--json"]) == 0
    reports = json.loads(capsys.readouterr().out)["models"]
    assert [report["model"] for report in reports] == [path, path]
    for report in reports:
        assert list(report["ns"]) == ["read", "fresh", "save", "cache"]
        assert all(len(times) == 2 and min(times) > 0 for times in report["ns"].values())
        assert report["ratio"] == sum(report["ns"]["fresh"]) / sum(report["ns"]["cache"])  # medians of two
        assert report["cache_bytes"] > 2 * 64


def test_the_table_has_a_line_for_each_model(capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(nnfmq.example_path(name)) for name in ("digits.tflite", "digits_quant.tflite")]
    assert cache_bench.main([*paths, "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["digits.tflite", "digits_quant.tflite"]
