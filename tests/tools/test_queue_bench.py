"""The benchmark of queues: small runs of the real command, and the arithmetic of its targets. No time is asserted."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import queue_bench
import queue_candidates
from bench_support import END, Target, evaluate_target, medians, outcome_text, replaced
from queue_bench import ROWS, Row, metrics_of, page, report_row
from queue_candidates import CANDIDATES, RECORDS, Sample, codec_request, operations, samples
from support.places import ROOT
from support.under_test import core_name

from nnfmq.base.packages import installed_version
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.types import LifeTime
from nnfmq.lab import placement
from nnfmq.lab.child_processes import RunnerUnavailable
from nnfmq.serialize import codec

LIMIT_S = 120
needs_two_cpus = pytest.mark.skipif(placement.two_cpus() is None, reason="one CPU allowed: both sides poll")
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
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


MISSING = set(queue_bench.ICEORYX) if installed_version("iceoryx2") is None else set[str]()
ROW_CANDIDATES = {row.name: row.candidates for row in ROWS}


@needs_cc
@needs_compiled
@needs_two_cpus
def test_every_chosen_row_is_reported() -> None:
    names = ["round-trip", "busy-cpu", "stream", "batches", "work", "think", "idle", "codec", "memories"]
    report = reported("--rows", ",".join(names))
    assert [row["name"] for row in report["rows"]] == names
    assert set(report) == {"conditions", "rows", "missed", "not_compared"}
    for row in report["rows"]:
        assert set(row) == {"name", "title", "targets", "candidates", "missing"}
        assert set(row["missing"]) == MISSING & set(ROW_CANDIDATES[row["name"]])
        for target in row["targets"]:
            assert set(target) == {"target", "value", "unit", "limit", "noise", "sense", "met"}
            assert (target["value"] is None) == (bool(MISSING) and "iceoryx2" in target["target"])
    rows = {row["name"]: row for row in report["rows"]}
    assert set(rows["round-trip"]["candidates"]["nnfmq"]) == {"p50", "p99", "p99.9", "rounds"}
    assert rows["batches"]["candidates"]["nnfmq batches"]["checksums_equal"] == 1


@needs_compiled
@needs_two_cpus
def test_the_conditions_are_part_of_the_report() -> None:
    conditions = reported("--rows", "codec")["conditions"]
    assert {
        "cpu", "cpus_used", "kernel", "python", "core", "polling_window_us", "load_before", "clock",
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


def test_a_peer_that_is_not_installed_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_candidates, "installed_version", lambda package: None)
    with pytest.raises(RunnerUnavailable, match=re.escape("iceoryx2 is not installed: pip install 'nnfmq[bench]'")):
        queue_candidates.IceoryxPubSub(Path())


@needs_compiled
def test_a_child_that_fails_ends_the_run_with_its_reason() -> None:
    done = bench("--rows", "idle", "--limit", "1")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "queue_bench: error: nnfmq idle: its process ended with status -14 before a result: it took longer than --limit"
    ]


@pytest.mark.parametrize(
    ("server", "reason"),
    [("lambda ready, _: open('/nowhere')", "FileNotFoundError"), ("lambda ready, _: None", "the server of it ended")],
)
def test_a_server_that_is_never_ready_fails_its_candidate(server: str, reason: str) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "tools")!r})
from forked_peers import BenchmarkFailed, forked
try:
    with forked("it", {server}, 30):
        print("it went on")
except BenchmarkFailed as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert reason in done.stdout


@needs_compiled
@needs_two_cpus
def test_the_table_has_targets_and_missing_comparisons() -> None:
    done = bench("--quick", "--rounds", "1", "--rows", "round-trip", "--no-color")
    assert (done.returncode, done.stderr) == (0, "")
    assert "p99 / p50" in done.stdout
    assert re.search(r"at most 1\.50 ×\s+(met|missed)", done.stdout)
    missing = "round-trip: iceoryx2 pub-sub: iceoryx2 is not installed" if MISSING else "nothing"
    assert f"not compared: {missing}" in " ".join(done.stdout.split())


@pytest.mark.parametrize("words", [["--rows", "none"], ["--rows", ""], ["--rounds", "0"]])
def test_wrong_usage_is_status_2(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        queue_bench.main(words)


# ---- arithmetic ----

SUBJECT = [Sample([1000] * 98 + [9000, 9000]), Sample([2000] * 100), Sample([4000] * 100)]
BASELINE = [Sample([10_000]), Sample([12_000]), Sample([80_000])]
OTHERS = [Sample([20_000])] * 3


def medians_of(rounds: Sequence[Sample]) -> Mapping[str, float]:
    return medians([metrics_of(sample) for sample in rounds])


def test_a_metric_is_the_median_of_the_percentiles_by_round() -> None:
    assert medians_of(SUBJECT) == {"p50": 2.0, "p99": 4.0, "p99.9": 4.0}
    assert medians_of([Sample(metrics={"per_second": value}) for value in (1, 7, 5)]) == {"per_second": 5}


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
    metrics = {"us": medians_of(SUBJECT), "them": medians_of(BASELINE), "others": medians_of(OTHERS)}
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
        "polling_window_us": {"default": 50.0}, "clock": "c",
        "quick": False,
    }  # fmt: skip
    rows = [
        report_row(Row("r", "round trip", ("us", "them"), (target, noisy)), {"us": SUBJECT, "them": BASELINE}, {}),
        report_row(Row("i", "idle", ("us",), ()), {"us": [Sample(metrics={"cpu_seconds": 0.1})]}, {}),
    ]
    return {"conditions": conditions, "rows": rows, "missed": [], "not_compared": ["r: C spin: no C compiler"]}


def test_the_tables_have_every_percentile_of_every_candidate_and_every_outcome() -> None:
    made = queue_bench.tables(queue_report())
    assert ["r", "us", "2", "4", "4"] in made["times"].rows and ["r", "them", "12", "12", "12"] in made["times"].rows
    assert ["i", "us", "cpu_seconds", "0.10"] in made["metrics"].rows
    assert ["r: p50 against <them>", "0.17 ×", "0.12 ×", "at most 3 ×", "met"] in made["targets"].rows
    assert ["r: p99", "4 µs", "7 µs", "at most 3 µs", "not measured"] in made["targets"].rows


def test_the_same_report_gives_the_same_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "queue.json"
    report.write_text(json.dumps(queue_report()), encoding="utf-8")
    made = []
    for name in ("first", "second"):
        assert queue_bench.main(["--report", str(report), "--results", str(tmp_path / name)]) == 0
        made.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert made[0] == made[1]
    assert made[0].keys() == {"queue-targets.csv", "queue-times.csv", "queue-metrics.csv", "queue.json"}
    assert b"row,candidate,p50,p99,p99.9\nr,us,2,4,4\n" in made[0]["queue-times.csv"]
    kept = json.loads(made[0]["queue.json"])
    assert kept["conditions"]["polling_window_us"] == {"default": 50.0}
    assert kept["not_compared"] == ["r: C spin: no C compiler"]


def test_only_the_text_between_the_markers_of_a_page_is_replaced() -> None:
    page = f"before\n<!-- it -->\nold\n{END}\nafter\n"
    assert replaced(page, "new", "<!-- it -->") == f"before\n<!-- it -->\n\nnew\n\n{END}\nafter\n"
    with pytest.raises(ValueError, match="the page has no"):
        replaced("nothing", "new", "<!-- it -->")


def test_a_file_that_is_not_a_report_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "queue.json"
    report.write_text("{}", encoding="utf-8")
    assert queue_bench.main(["--report", str(report)]) == 1
    assert re.fullmatch(r"queue_bench: error: .+\n", capsys.readouterr().err)


# ---- codecs


def test_the_packet_has_the_records_that_the_module_names() -> None:
    assert len(codec.encode_request(*codec_request())) == 24 * RECORDS


@pytest.mark.parametrize("name", codec.CORES.available())
def test_each_operation_does_what_it_is_called(name: str) -> None:
    do = operations(codec.CORES.load(name))
    packet = codec.encode_request(*codec_request())
    assert do["encode request"]() == packet
    assert do["decode request"]() == codec.decode_request(packet)
    assert do["decode request"]() is not do["decode request"]()
    result = do["decode result"]()
    assert result == codec.decode_result(do["encode result"]())  # type: ignore[arg-type]
    assert result.status is ErrorStatus.NONE  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", codec.CORES.available())
def test_there_is_one_sample_for_each_batch(name: str) -> None:
    found = samples(codec.CORES.load(name), batches=2)
    assert [len(values) for values in found.values()] == [2] * 4


def test_round_trips_alternate_between_memories() -> None:
    assert len(queue_candidates.memory_trips(2, 5)) == 5


# ---- the ping-pong in C


@needs_two_cpus
@needs_cc
@pytest.mark.parametrize("mode", ["spin", "futex"])
def test_the_c_ping_pong_prints_every_round_trip(tmp_path: Path, mode: str) -> None:
    program = queue_candidates.compile_c_pingpong(tmp_path)
    found = queue_candidates.run_c_pingpong(program, 200, 10, placement.choose("apart", 0), LIMIT_S, mode)
    assert len(found) == 200
    assert min(found) > 0


@needs_cc
def test_the_c_ping_pong_ends_at_its_limit(tmp_path: Path) -> None:
    program = queue_candidates.compile_c_pingpong(tmp_path)
    with pytest.raises(RunnerUnavailable, match="ended with -14"):
        queue_candidates.run_c_pingpong(program, 10**8, 10, placement.choose("apart", 0), 1)


def test_the_null_model_reshapes_one_float() -> None:
    model = queue_candidates.null_model()
    assert [operand.lifetime for operand in model.main.operands] == [
        LifeTime.SUBGRAPH_INPUT, LifeTime.CONSTANT_COPY, LifeTime.SUBGRAPH_OUTPUT,
    ]  # fmt: skip
    assert model.operand_values == b"\1\0\0\0"
