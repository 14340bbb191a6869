"""`tools/latency_stress.py`: its report with small counts, and its parts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import latency_baselines
import latency_client
import latency_stress
import pytest
from support.places import ROOT

from nnfmq.hal.types import LifeTime
from nnfmq.measure import cpu_pinning
from nnfmq.measure.failures import RunnerUnavailable

LIMIT_S = 60
PERCENTILES = ["p50", "p90", "p99", "p99.9", "max"]
needs_two_cpus = pytest.mark.skipif(cpu_pinning.two_cpus() is None, reason="one CPU allowed: both sides spin")
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def stress(*words: str) -> subprocess.CompletedProcess[str]:
    tool = ROOT / "tools" / "latency_stress.py"
    command = [sys.executable, str(tool), "--limit", "30", *words]
    # The script imports other tools from its own folder, which PYTHONSAFEPATH would prevent.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment)


def reported(*words: str) -> Any:
    done = stress("--json", "--count", "20", "--warm-up", "5", *words)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.fixture
def affinity() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


def test_both_models_take_every_path() -> None:
    report = reported()
    taken = [(series["model"], series["path"]) for series in report["series"]]
    assert taken == [(model, path) for model in ("null", "real") for path in ("burst", "in-place", "ordinary")]
    for series in report["series"]:
        assert list(series["latency_us"]) == PERCENTILES
        assert sorted(series["latency_us"].values()) == list(series["latency_us"].values())
        assert series["executions"] == 20
        assert series["client_cpu_s"] > 0
        assert series["driver_cpu_s"] >= 0  # the kernel brings another process's clock up to date at each tick


def test_the_conditions_are_part_of_the_report() -> None:
    conditions = reported("--only", "null", "--placement", "cores=same", "--window", "7")["conditions"]
    assert conditions["placement"] == "same"
    assert conditions["cpus"][0]["client"] == conditions["cpus"][0]["driver"] in conditions["cpus_allowed"]
    assert conditions["core"] in ("compiled", "python")
    assert {"driver_core", "window_us", "driver_window_us", "clients", "kernel", "cpu", "clock"} <= set(conditions)


def test_several_clients_are_counted_together() -> None:
    report = reported("--only", "null", "--clients", "2")
    assert [series["executions"] for series in report["series"]] == [40, 40, 40]


def test_the_core_of_the_run_is_the_one_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNFMQ_CORE", "python")
    conditions = reported("--only", "null")["conditions"]
    assert (conditions["core"], conditions["driver_core"]) == ("python", "python")


@needs_two_cpus
@needs_cc
def test_baselines_alternate_with_the_burst() -> None:
    baselines = reported("--only", "null", "--baselines", "--rounds", "2")["baselines"]
    assert {name: len(p50) for name, p50 in baselines["p50_ns"].items()} == {"nnfmq": 2, "c": 2, "pipe": 2}
    assert baselines["nnfmq_over_c"] == baselines["median_ns"]["nnfmq"] / baselines["median_ns"]["c"]
    assert baselines["pipe_over_nnfmq"] == baselines["median_ns"]["pipe"] / baselines["median_ns"]["nnfmq"]


def test_the_table_has_every_percentile() -> None:
    done = stress("--count", "20", "--warm-up", "5", "--only", "null", "--no-color")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(f"{name} µs" in done.stdout for name in PERCENTILES)


def test_no_driver_is_one_line_and_status_1(tmp_path: Path) -> None:
    done = stress("--connect", str(tmp_path / "none.sock"), "--count", "5")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "DeviceUnavailable" in done.stderr


@pytest.mark.parametrize("words", [["--clients", "5"], ["--placement", "far"], ["--count", "0"], ["--only", "none"]])
def test_wrong_usage_is_status_2(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        latency_stress.main(words)


def test_the_null_model_reshapes_one_float() -> None:
    model = latency_client.null_model()
    assert [operand.lifetime for operand in model.main.operands] == [
        LifeTime.SUBGRAPH_INPUT, LifeTime.CONSTANT_COPY, LifeTime.SUBGRAPH_OUTPUT,
    ]  # fmt: skip
    assert model.operand_values == b"\1\0\0\0"


class TestPlacement:
    @pytest.fixture(autouse=True)
    def _four_cpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cpu_pinning, "ALLOWED", frozenset((4, 5, 6, 7)))

    @pytest.mark.parametrize(
        ("name", "number", "cpus"),
        [
            ("apart", 0, (4, 5)),
            ("apart", 1, (6, 7)),
            ("apart", 2, (4, 5)),
            ("same", 0, (4, 4)),
            ("same", 5, (5, 5)),
            ("free", 3, (None, None)),
        ],
    )
    def test_clients_get_the_cpus_round_robin(
        self, name: str, number: int, cpus: tuple[int | None, int | None]
    ) -> None:
        assert cpu_pinning.choose(name, number) == cpu_pinning.Cpus(*cpus)

    def test_one_cpu_is_not_two(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cpu_pinning, "ALLOWED", frozenset((4,)))
        assert cpu_pinning.two_cpus() is None
        assert cpu_pinning.choose("apart", 0) == cpu_pinning.Cpus(4, 4)


@pytest.mark.usefixtures("affinity")
def test_a_pinned_process_can_be_unpinned() -> None:
    cpu = min(cpu_pinning.ALLOWED)
    cpu_pinning.pin_process(0, cpu)
    assert os.sched_getaffinity(0) == {cpu}
    cpu_pinning.pin_process(0, None)
    assert os.sched_getaffinity(0) == cpu_pinning.ALLOWED


def test_cpu_time_of_another_process_is_the_same_clock() -> None:
    before = time.process_time_ns()
    assert before <= cpu_pinning.cpu_ns(os.getpid()) <= cpu_pinning.cpu_ns(0)


@needs_two_cpus
@needs_cc
@pytest.mark.parametrize("mode", ["spin", "futex"])
def test_the_c_ping_pong_prints_every_round_trip(tmp_path: Path, mode: str) -> None:
    program = latency_baselines.compile_c_pingpong(tmp_path)
    found = latency_baselines.run_c_pingpong(program, 200, 10, cpu_pinning.choose("apart", 0), LIMIT_S, mode)
    assert len(found) == 200
    assert min(found) > 0


@needs_cc
def test_the_c_ping_pong_ends_at_its_limit(tmp_path: Path) -> None:
    program = latency_baselines.compile_c_pingpong(tmp_path)
    with pytest.raises(RunnerUnavailable, match="ended with -14"):
        latency_baselines.run_c_pingpong(program, 10**8, 10, cpu_pinning.choose("apart", 0), 1)


def in_another_process(code: str) -> str:
    """Run code with the tools on its path: `multiprocessing` leaves a tracker behind wherever it is used."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r})\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout


def test_the_pipe_server_replies_and_ends() -> None:
    code = """
import latency_client
import latency_baselines
with latency_baselines.PipeServer.start(None, 30) as pipe:
    print(len(pipe.round(10, 2)))
"""
    assert in_another_process(code) == "10\n"


def test_without_a_compiler_the_reason_is_kept() -> None:
    code = """
import os, latency_baselines
from nnfmq.measure.cpu_pinning import Cpus
from pathlib import Path
os.environ["PATH"] = ""
found = latency_baselines.compare(
    lambda: [1000], count=5, warm_up=1, rounds=1, cpus=Cpus(None, None), folder=Path("."), limit_s=30
)
print(found.nnfmq_over_c, sorted(found.p50_ns), found.missing)
"""
    expected = "None ['nnfmq', 'pipe'] no C compiler (cc, gcc, clang) for the C ping-pong\n"
    assert in_another_process(code) == expected
