"""The benchmark of queues: small runs of the real command, and the arithmetic of its targets. No time is asserted."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import queue_bench
import queue_bench_page
from bench_targets import outcome_text
from model_bench_page import DOCS
from queue_bench_candidates import CANDIDATES
from queue_bench_cases import ROWS, Row, Target, evaluate_target, medians, report_row
from queue_bench_html import page
from queue_bench_server import Sample
from queue_bench_transports import require
from support.places import ROOT
from support.under_test import core_name

from nnfmq.measure import cpu_pinning
from nnfmq.measure.failures import RunnerUnavailable

LIMIT_S = 120
needs_two_cpus = pytest.mark.skipif(cpu_pinning.two_cpus() is None, reason="one CPU allowed: both sides poll")
needs_compiled = pytest.mark.skipif(core_name() != "compiled", reason="measures the compiled core")


def bench(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command. That this returns also shows that no child process is left: it would keep stdout open."""
    command = [sys.executable, str(ROOT / "tools" / "queue_bench.py"), *words]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=kept | environment
    )  # fmt: skip


def reported(*words: str, **environment: str) -> Any:
    done = bench("--quick", "--rounds", "1", "--json", *words, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@needs_compiled
@needs_two_cpus
def test_every_chosen_row_is_reported() -> None:
    names = ["tail", "busy-cpu", "stream", "batches", "work", "think", "idle", "codec"]
    report = reported("--rows", ",".join(names))
    assert [row["name"] for row in report["rows"]] == names
    assert set(report) == {"conditions", "rows", "missed", "not_compared"}
    for row in report["rows"]:
        assert set(row) == {"name", "title", "targets", "candidates", "missing"}
        assert row["missing"] == {}
        for target in row["targets"]:
            assert set(target) == {"target", "value", "unit", "limit", "noise", "sense", "met"}
            assert target["value"] is not None
    rows = {row["name"]: row for row in report["rows"]}
    assert set(rows["tail"]["candidates"]["nnfmq"]) == {"p50", "p99", "p99.9", "rounds"}
    assert rows["batches"]["candidates"]["nnfmq batches"]["checksums_equal"] == 1


@needs_compiled
@needs_two_cpus
def test_the_conditions_are_part_of_the_report() -> None:
    conditions = reported("--rows", "tail")["conditions"]
    assert {
        "cpu", "cpus_used", "kernel", "python", "packages", "core", "polling_window_us", "load_before", "clock",
    } <= set(conditions)  # fmt: skip


@needs_compiled
@needs_two_cpus
def test_the_burst_of_the_null_model_runs_over_both_paths() -> None:
    candidates = reported("--rows", "burst")["rows"][0]["candidates"]
    assert {"burst in place", "burst copied"} <= set(candidates)


@needs_compiled
def test_a_missing_baseline_is_reported_and_not_compared() -> None:
    report = reported("--rows", "one-cpu", PATH="")
    row = report["rows"][0]
    assert row["missing"] == {"C futex": "no C compiler (cc, gcc, clang) for the C ping-pong"}
    assert [target["met"] is None for target in row["targets"]] == [True, False]
    assert report["not_compared"] == ["one-cpu: C futex: no C compiler (cc, gcc, clang) for the C ping-pong"]


@needs_compiled
def test_a_missing_baseline_is_an_error_if_all_are_required() -> None:
    assert bench("--quick", "--rounds", "1", "--rows", "one-cpu", "--require-all", PATH="").returncode == 1


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@needs_compiled
@needs_two_cpus
def test_the_python_core_is_compared_with_c_over_both_atomics() -> None:
    row = reported("--rows", "python")["rows"][0]
    assert set(row["candidates"]) | set(row["missing"]) == {"python, libatomic", "python, FUTEX_WAKE_OP", "C spin"}
    assert "C spin" in row["candidates"]


def test_a_package_that_is_not_installed_is_named_with_the_remedy() -> None:
    with pytest.raises(RunnerUnavailable, match=re.escape("no_such_peer is not installed: pip install 'nnfmq[bench]'")):
        require("no_such_peer")


@needs_compiled
def test_a_child_that_fails_ends_the_run_with_its_reason() -> None:
    done = bench("--rows", "idle", "--limit", "1")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "queue_bench: error: a child process ended without a result (its limit is 1 seconds: --limit)"
    ]


@pytest.mark.parametrize(
    ("server", "reason"),
    [("lambda ready, _: open('/nowhere')", "FileNotFoundError"), ("lambda ready, _: None", "the server of it ended")],
)
def test_a_server_that_is_never_ready_fails_its_candidate(server: str, reason: str) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "tools")!r})
from pathlib import Path
from nnfmq.measure import cpu_pinning
import queue_bench_server as server
job = server.RoundJob("it", 1, 1, cpu_pinning.Cpus(None, None), Path("."), 30)
try:
    with server.forked(job, None, {server}):
        print("it went on")
except server.BenchmarkFailed as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert reason in done.stdout


@needs_compiled
@needs_two_cpus
def test_the_table_has_targets_and_missing_comparisons() -> None:
    done = bench("--quick", "--rounds", "1", "--rows", "tail", "--no-color")
    assert (done.returncode, done.stderr) == (0, "")
    assert "p99 / p50" in done.stdout
    assert re.search(r"at most 1\.50 ×\s+(met|missed)", done.stdout)
    assert "not compared: nothing" in done.stdout


@pytest.mark.parametrize("words", [["--rows", "none"], ["--rows", ""], ["--rounds", "0"]])
def test_wrong_usage_is_status_2(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        queue_bench.main(words)


# ---- arithmetic ----

SUBJECT = [Sample([1000] * 98 + [9000, 9000]), Sample([2000] * 100), Sample([4000] * 100)]
BASELINE = [Sample([10_000]), Sample([12_000]), Sample([80_000])]
OTHERS = [Sample([20_000])] * 3


def test_a_metric_is_the_median_of_the_percentiles_by_round() -> None:
    assert medians(SUBJECT) == {"p50": 2.0, "p99": 4.0, "p99.9": 4.0}
    assert medians([Sample(metrics={"per_second": value}) for value in (1, 7, 5)]) == {"per_second": 5}


@pytest.mark.parametrize(
    ("target", "value", "is_met"),
    [
        (Target("", "us", "p50", 0.1, "×", ("them",)), 2 / 12, False),
        (Target("", "us", "p50", 6.0, "×", ("them",), is_at_least=True), 6.0, True),
        (Target("", "us", "p50", 7.0, "×", ("others", "them"), is_at_least=True), 6.0, False),
        (Target("", "us", "p50", 1.0, "×", ("others", "them"), is_strict=True), 2 / 12, True),
        (Target("", "us", "p99", 2.0, "×", ("us",), "p50"), 2.0, True),
        (Target("", "us", "p99", 2.0, "×", ("us",), "p50", is_strict=True), 2.0, False),
        (Target("", "us", "p50", 1.9, "µs"), 2.0, False),
    ],
)
def test_a_target_is_a_ratio_of_medians_with_a_limit(target: Target, value: float, is_met: bool) -> None:
    metrics = {"us": medians(SUBJECT), "them": medians(BASELINE), "others": medians(OTHERS)}
    evaluated = evaluate_target(target, metrics)
    assert evaluated["value"] == pytest.approx(value)
    assert evaluated["met"] is is_met


@pytest.mark.parametrize(
    ("limit", "times_us", "met", "text"),
    [
        (20.0, (10, 12, 14), True, "met"),
        (16.0, (10, 12, 14), True, "met"),  # differs from the median by the range of the rounds
        (15.9, (10, 12, 14), None, "not measured"),
        (12.0, (10, 12, 14), None, "not measured"),
        (11.0, (10, 12, 14), None, "not measured"),
        (7.0, (10, 12, 14), False, "missed"),
        (12.0, (12, 12, 12), True, "met"),
        (12.0, (12,), True, "met"),  # one round has no range
    ],
)
def test_a_difference_below_the_noise_is_not_measured(
    limit: float, times_us: tuple[int, ...], met: bool | None, text: str
) -> None:
    row = Row("r", "", ("us",), (Target("", "us", "p50", limit, "µs"),))
    (target,) = report_row(row, {"us": [Sample([1000 * time]) for time in times_us]}, {})["targets"]
    assert (target["noise"], target["met"]) == (max(times_us) - min(times_us), met)
    assert outcome_text(target) == text


def test_rates_are_divided_by_the_baseline_s() -> None:
    target = Target("", "us", "per_second", 2.5, "×", ("them",), is_at_least=True)
    rounds = {"us": [Sample(metrics={"per_second": 30.0})], "them": [Sample(metrics={"per_second": 10.0})]}
    assert report_row(Row("r", "", (), (target,)), rounds, {})["targets"][0]["value"] == pytest.approx(3.0)


def test_every_candidate_of_the_table_exists() -> None:
    assert {candidate for row in ROWS for candidate in row.candidates} <= set(CANDIDATES)
    for row in ROWS:
        assert {target.candidate for target in row.targets} | {
            name for target in row.targets for name in target.per
        } <= set(row.candidates)


def test_the_page_draws_a_curve_for_each_candidate_and_loads_nothing(tmp_path: Path) -> None:
    rounds = {"us": SUBJECT, "<them>": BASELINE}
    row = report_row(Row("r", "a & b", ("us", "<them>"), (Target("g", "us", "p50", 3, "µs"),)), rounds, {})
    made = page({"conditions": {"cpu": "x"}, "rows": [row]}, {"r": rounds})
    assert made.count("<polyline") == 2
    assert "&lt;them&gt;" in made and "a &amp; b" in made and "<them>" not in made
    assert not re.search(r"(src|href)=|<script|url\(", made)


# ---- the page of the documentation ----


def queue_report() -> dict[str, Any]:
    target = Target("p50 against <them>", "us", "p50", 3.0, "×", ("them",))
    noisy = Target("p99", "us", "p99", 3.0, "µs")
    conditions = {
        "cpu": "x", "cpus_allowed": [0, 1], "kernel": "6", "python": "3", "core": "compiled", "load_before": [0.1],
        "packages": {"pyzmq": "27", "grpcio": None}, "polling_window_us": {"default": 50.0}, "clock": "c",
        "quick": False,
    }  # fmt: skip
    rows = [
        report_row(Row("r", "round trip", ("us", "them"), (target, noisy)), {"us": SUBJECT, "them": BASELINE}, {}),
        report_row(Row("i", "idle", ("us",), ()), {"us": [Sample(metrics={"cpu_seconds": 0.1})]}, {}),
    ]
    return {"conditions": conditions, "rows": rows, "missed": [], "not_compared": ["r: grpc: not installed"]}


def test_the_page_has_every_percentile_of_every_candidate_and_every_outcome() -> None:
    text = queue_bench_page.results(queue_report())
    assert "| us | 2 | 4 | 4 |" in text and "| them | 12 | 12 | 12 |" in text
    assert "| p50 against <them> | 0.17 × | 0.12 × | at most 3 × | met |" in text
    assert "| p99 | 4 µs | 7 µs | at most 3 µs | not measured |" in text
    assert "* targets: 1 met, 1 not measured" in text
    assert "pyzmq 27, grpcio not installed" in text and "* not compared: r: grpc: not installed" in text


def test_the_page_is_rewritten_between_its_markers_with_the_same_bytes(tmp_path: Path) -> None:
    report, page_file = tmp_path / "queue.json", tmp_path / "page.md"
    report.write_text(json.dumps(queue_report()), encoding="utf-8")
    page_file.write_text((DOCS / "explanation" / "queue-performance.md").read_text("utf-8"), encoding="utf-8")
    made = []
    for _ in range(2):
        assert queue_bench_page.main([str(report), "--page", str(page_file)]) == 0
        made.append(page_file.read_text("utf-8"))
    assert made[0] == made[1]
    assert "### Round trip" in made[0] and made[0].startswith("# Performance of the queue")


def test_a_page_without_markers_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, page_file = tmp_path / "queue.json", tmp_path / "page.md"
    report.write_text(json.dumps(queue_report()), encoding="utf-8")
    page_file.write_text("nothing", encoding="utf-8")
    assert queue_bench_page.main([str(report), "--page", str(page_file)]) == 1
    assert capsys.readouterr().err.startswith("queue_bench_page: error: ValueError: the page has no ")
