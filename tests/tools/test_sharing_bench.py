"""The measurement of how clients share the cores: a small run of the real command. No time is asserted."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from sharing_bench import best_misses, deadlines_of
from support.drivers import short_folder
from support.places import ROOT

LIMIT_S = 120
DIGITS = ROOT / "nnfmq" / "data" / "digits_quant.tflite"


def ran(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONSAFEPATH", "NNFMQ_DATA")}
    command = [sys.executable, str(ROOT / "tools" / "sharing_bench.py"), *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment | {"TMPDIR": str(folder)}
    )


def test_throughput_and_misses_are_measured_beside_litert() -> None:
    pytest.importorskip("ai_edge_litert", exc_type=ImportError)
    with short_folder() as folder:
        done = ran(folder, "--quick", "--json", "--model", str(DIGITS))
        assert done.returncode == 0, done.stderr
        assert list(folder.iterdir()) == []
    report = json.loads(done.stdout)
    (throughput,), (deadlines,) = report["throughput"], report["deadlines"]
    for found in throughput.values():
        assert 0 < found["fewest"] <= found["most"] and 0 < found["ms"]["p50"] <= found["ms"]["p99.9"]
    ratio = throughput["nnfmq"]["per_second"] / throughput["LiteRT"]["per_second"]
    assert report["targets"][0]["value"] == pytest.approx(ratio)
    assert report["targets"][0]["sense"] == "at least"
    assert [found["executions"] for found in deadlines.values()] == [4] * 3
    assert all(0 <= missed <= 4 for found in deadlines.values() for missed in found["missed"].values())


def test_a_missing_model_is_an_error() -> None:
    with short_folder() as folder:
        done = ran(folder, "--quick")
    assert done.returncode == 1
    assert "needs --model FILE" in done.stderr


def misses(order: Sequence[int], run_ns: int, cores: int) -> int:
    """Count the misses of executions that run in this order; one that would end late does not begin."""
    begun = 0
    for deadline in order:
        begun += (begun // cores + 1) * run_ns <= deadline
    return len(order) - begun


@pytest.mark.parametrize("deadlines", [(1, 1, 1, 2, 2), (3, 1, 2, 2), (5, 5, 5, 5, 5), (0, 1, 1, 3, 3)])
@pytest.mark.parametrize("cores", [1, 2])
def test_no_order_has_fewer_misses_than_the_best_one(deadlines: tuple[int, ...], cores: int) -> None:
    orders = (order for count in range(len(deadlines) + 1) for order in itertools.permutations(deadlines, count))
    fewest = min(misses(order, 1, cores) + len(deadlines) - len(order) for order in orders)
    assert best_misses(deadlines, 1, cores) == fewest


def test_deadlines_leave_one_run_more_than_the_best_order_needs() -> None:
    assert deadlines_of(10, 5, 2, 1.0) == [20, 20, 30, 30, 40]
    assert deadlines_of(10, 2, 1, 1.5) == [30, 45]
    assert best_misses(deadlines_of(10, 8, 2, 1.0), 10, 2) == 0
