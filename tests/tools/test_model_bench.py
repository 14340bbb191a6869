"""The benchmark of models: arithmetic, interruptions, versions, the page, small runs. No time is asserted."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bench_support
import compared_versions
import model_bench
import numpy as np
import pytest
from bench_support import MIN_ROUNDS, interval_limit, median_interval
from compared_versions import AFTER, BEFORE, SLOWER_LIMIT, compare_versions, version_tables
from model_bench import (
    BASELINES,
    BURST,
    IN_PROCESS,
    MODELS,
    RUNNERS,
    SECTIONS,
    TRIALS_PER_ROUND,
    BenchmarkPlan,
    Measurements,
    ModelBenchmark,
    RunnerJob,
    Trial,
    client_cpus,
    compared_in,
    compute_cpus,
    count_trials,
    inputs_for,
    max_output_difference,
    metrics_of,
    model_row,
    runner_name,
    targets_of,
)
from support.places import ROOT
from version_runner import FORMS

from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.lab import placement
from nnfmq.lab.bench.measurement import rotated
from nnfmq.lab.bench.steps import fastest_variant, make_step, timed
from nnfmq.lab.child_processes import BenchmarkFailed
from nnfmq.lab.placement import wait_until_idle

LIMIT_S = 300
needs_two_cpus = pytest.mark.skipif(placement.two_cpus() is None, reason="one CPU allowed: both sides poll")
needs_llvmlite = pytest.mark.skipif(importlib.util.find_spec("llvmlite") is None, reason="llvmlite is not installed")
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)


def bench(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command. That this returns also shows that no child process is left: it would keep stdout open."""
    return _python(str(ROOT / "tools" / "model_bench.py"), *words, **environment)


def _python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=LIMIT_S, check=False, env=kept | environment
    )  # fmt: skip


@contextmanager
def one_cpu() -> Iterator[None]:
    """Allow this thread, and processes that it starts, a single CPU."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


# ---- runs


@needs_llvmlite
@needs_two_cpus
def test_every_runner_of_a_model_is_reported(data_dir: Path) -> None:
    words = ("--quick", "--json", "--only", "tts_float", "--sections", "models")
    done = bench(*words, "--models", str(data_dir / "models"))
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert set(report) == {"conditions", "models", "missed", "not_compared"}
    (row,) = report["models"]
    assert row["runners"].keys() | row["missing"].keys() == {
        runner_name(kind, n) for kind in (BURST, IN_PROCESS, *BASELINES) for n in (1, 2)
    }
    for runner in row["runners"].values():
        assert {"p50", "threads", "api_variant", "output_difference"} <= set(runner)
        assert "p99" not in runner  # of 50 executions
        assert runner["output_difference"] < 1e-5  # all runners execute the same model on the same input
    if "LiteRT, 1 thread" in row["runners"]:
        assert row["runners"]["LiteRT, 1 thread"]["delegate"] == "XNNPACK"
    assert {"target", "cpus_used", "polling_window", "client_shares_cpus"} <= set(report["conditions"])


@needs_llvmlite
def test_a_baseline_that_is_not_installed_is_reported_and_not_compared(data_dir: Path, tmp_path: Path) -> None:
    for package in ("ai_edge_litert", "onnxruntime", "openvino"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"raise ModuleNotFoundError('none', name='{package}')\n")
    words = ("--quick", "--json", "--only", "tts_float", "--sections", "models", "--require-all")
    with one_cpu():  # half as many runners
        done = bench(*words, "--models", str(data_dir / "models"), PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads(done.stdout)
    (row,) = report["models"]
    (comparison,) = row["comparisons"]
    assert comparison["best_baseline"] is None
    assert {target["met"] for target in comparison["targets"]} == {None}
    assert row["missing"]["LiteRT, 1 thread"] == "ai-edge-litert is not installed: pip install 'nnfmq[bench]'"
    assert row["missing"]["ONNX Runtime, 1 thread"] == "onnxruntime is not installed: pip install 'nnfmq[bench]'"
    assert row["missing"]["OpenVINO, 1 thread"] == "openvino is not installed: pip install 'nnfmq[bench]'"
    assert len(report["not_compared"]) == len(row["missing"])


@needs_llvmlite
def test_a_missing_model_file_is_an_error_of_one_line(tmp_path: Path) -> None:
    done = bench("--quick", "--only", "tts_float", "--sections", "models", "--models", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("model_bench: error: nnfmq burst, 1 thread: [Errno 2] No such file")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("words", [["--only", "none"], ["--sections", "none"], ["--rounds", "0"]])
def test_wrong_usage_is_status_2(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        model_bench.main(words)


def test_a_trial_does_not_begin_while_a_process_computes() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "print(1, flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    assert busy.stdout is not None
    with busy, busy.stdout:
        busy.stdout.readline()
        try:
            with pytest.raises(BenchmarkFailed, match=r"still computes 0\.3 s after"):
                wait_until_idle([busy.pid], 0.3)
        finally:
            busy.kill()
    wait_until_idle([])


# ---- steps


def test_a_step_writes_executes_reads_and_moves_states() -> None:
    targets, results = np.zeros((2, 2), np.float32), np.zeros((2, 2), np.float32)

    def run() -> None:
        results[0] = targets[0] + targets[1]
        results[1] = targets[1] + 1

    step = make_step(1, targets, results, run)
    first, second, third = (step([np.array([3, 4], np.float32)])[0].tolist() for _ in range(3))
    assert (first, second, third) == ([3, 4], [4, 5], [5, 6])


def test_every_runner_gets_the_same_inputs() -> None:
    infos = [TensorInfo("x", (50,), "uint8")]
    (first,), (again,) = inputs_for(infos), inputs_for(infos)
    np.testing.assert_array_equal(first, again)
    assert np.unique(first).size > 10


def test_the_only_api_variant_is_the_fastest() -> None:
    def step(_inputs: Any) -> list[Any]:
        return []

    assert fastest_variant({"one": step}, []) == (step, "one")
    assert fastest_variant({"one": step, "two": step}, [])[1] in ("one", "two")
    assert len(timed(step, [], 5)) == 5


# ---- arithmetic


def test_a_metric_is_a_percentile_of_all_executions() -> None:
    rounds = [[1000] * 598 + [9000, 8000], [2000] * 400]
    assert metrics_of(rounds) == {"p50": 1.0, "p99": 2.0, "p99.9": 8.0}


@pytest.mark.parametrize(
    ("count", "reported"),
    [(1, ["p50"]), (999, ["p50"]), (1000, ["p50", "p99"]), (9999, ["p50", "p99"]), (10_000, ["p50", "p99", "p99.9"])],
)
def test_a_percentile_is_reported_if_ten_executions_exceed_it(count: int, reported: list[str]) -> None:
    assert list(Measurements({"a": [[1000] * count]}).metrics()["a"]) == reported


def test_each_round_begins_with_another_runner() -> None:
    assert [rotated("abc", number) for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        list("abc"),
    ]


def _metrics(p50: float) -> dict[str, float]:
    return {"p50": p50, "p99": 2 * p50, "p99.9": 3 * p50}


MODEL = ModelBenchmark("folder/net", (0.5, 0.5))
METRICS = {
    "nnfmq burst, 2 threads": _metrics(40), "nnfmq in process, 2 threads": _metrics(35),
    "LiteRT, 1 thread": _metrics(10), "LiteRT, 2 threads": _metrics(100), "ONNX Runtime, 2 threads": _metrics(80),
}  # fmt: skip
ROUNDS = [METRICS] * MIN_ROUNDS


def test_a_model_s_ratio_is_over_the_best_baseline_with_as_many_threads() -> None:
    row = model_row(MODEL, METRICS, 2, ROUNDS)
    assert (row["model"], row["threads"], row["best_baseline"]) == ("net", 2, "ONNX Runtime")
    assert (row["subject"], row["subject_us"], row["baseline_us"]) == ("nnfmq burst", 40, 80)
    assert [(each["value"], each["limit"], each["met"]) for each in row["targets"]] == [
        (0.5, 0.5, True), (0.5, 1.3, True), (0.5, 2.0, True),
    ]  # fmt: skip
    metrics = METRICS | {"nnfmq burst, 2 threads": _metrics(41)}
    slower = model_row(MODEL, metrics, 2, [metrics] * MIN_ROUNDS)
    assert slower["targets"][0]["met"] is False


def test_a_product_is_compared_in_process() -> None:
    row = model_row(ModelBenchmark("product", (1.0, 1.0), IN_PROCESS), METRICS, 2)
    assert (row["subject"], row["subject_us"]) == (IN_PROCESS, 35)
    assert (row["targets"][0]["target"], row["targets"][0]["value"]) == ("p50 of in process / best baseline", 35 / 80)


def test_a_model_without_baselines_is_not_compared() -> None:
    row = model_row(MODEL, {"nnfmq burst, 2 threads": _metrics(40)}, 2)
    assert (row["best_baseline"], row["baseline_us"], row["targets"][0]["met"]) == (None, None, None)


def test_tails_are_compared_with_the_shortest_tail_of_a_baseline() -> None:
    tails = {
        "nnfmq burst, 1 thread": {"p50": 10.0, "p99": 27.0, "p99.9": 60.0},
        "LiteRT, 1 thread": {"p50": 20.0, "p99": 40.0, "p99.9": 30.0},
        "OpenVINO, 1 thread": {"p50": 30.0, "p99": 20.0, "p99.9": 50.0},
    }
    row = model_row(MODEL, tails, 1, [tails] * MIN_ROUNDS)
    assert row["best_baseline"] == "LiteRT"
    assert [(each["value"], each["met"]) for each in row["targets"]] == [(0.5, True), (1.35, False), (2.0, True)]


def test_metrics_by_round_have_all_trials_of_the_round() -> None:
    found = Measurements({"a": [[1000]] * TRIALS_PER_ROUND + [[3000]] * TRIALS_PER_ROUND})
    assert [each["a"]["p50"] for each in found.metrics_by_round()] == [1.0, 3.0]


def test_output_difference_is_in_quantized_steps_or_relative_to_the_largest_float() -> None:
    quantized, floats = np.array([250, 3], np.uint8), np.array([2.0, -8.0], np.float32)
    assert max_output_difference([np.array([247, 4], np.uint8)], [quantized]) == 3
    assert max_output_difference([np.array([2.0, -7.0], np.float32)], [floats]) == 1 / 8
    assert max_output_difference([quantized, floats], [quantized, floats]) == 0
    assert max_output_difference([floats + 1], [np.zeros(2, np.float32)]) == 7


def test_targets_are_listed_with_the_label_of_their_row() -> None:
    slower = METRICS | {"nnfmq burst, 2 threads": _metrics(400)}
    report = {
        "models": [{"comparisons": [model_row(MODEL, METRICS, 2, ROUNDS)]}],
        "transformers": [
            {"comparisons": [model_row(ModelBenchmark("block", (1.0, 1.0)), slower, 2, [slower] * MIN_ROUNDS)]}
        ],
    }
    assert [(label, target["met"]) for label, target in targets_of(report)] == [
        *[("net, 2 threads", True)] * 3,
        *[("block, 2 threads", False)] * 3,
    ]


def test_the_client_of_a_burst_has_its_own_cpu_if_one_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "ALLOWED", frozenset((2, 3, 5)))
    assert (compute_cpus(2), client_cpus(2)) == ((2, 3), (5,))
    assert (compute_cpus(3), client_cpus(3)) == ((2, 3, 5), (2, 3, 5))


@pytest.fixture
def fake_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace trials by immediate results: each step takes as many ns as its runner's name is long."""

    def take(
        jobs: dict[str, RunnerJob], trial: object, rounds: int, advance: Callable[[str], object], *, model_s: object
    ) -> Measurements:
        for name in [*jobs] * rounds * TRIALS_PER_ROUND:
            advance(name)
        outputs = {name: [np.zeros(1, np.uint8)] for name in jobs}
        return Measurements(
            {name: [[len(name)]] * rounds * TRIALS_PER_ROUND for name in jobs}, {name: {} for name in jobs}, outputs
        )

    monkeypatch.setattr(model_bench, "run_interleaved", take)
    monkeypatch.setattr(model_bench, "generate", lambda _: b"")


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("divisor", [1, 100])
@pytest.mark.parametrize("cpus", [2, 4])
def test_the_progress_bar_has_the_number_of_trials(
    section: str, divisor: int, cpus: int, fake_trials: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "ALLOWED", frozenset(range(cpus)))
    seen: list[str] = []
    plan = BenchmarkPlan(Path(), MODELS, 3, divisor, 1, seen.append)
    assert len(list(SECTIONS[section](plan))) == len(compared_in(section, plan))
    assert len(seen) == count_trials(section, plan)


def test_a_quick_run_has_fewer_steps() -> None:
    assert BenchmarkPlan(Path(), MODELS, 3, 1, 1, lambda _: None).trial(2000) == Trial(2000 // TRIALS_PER_ROUND, 40)
    assert BenchmarkPlan(Path(), MODELS, 3, 100, 1, lambda _: None).trial(2000) == Trial(10, 3)


@pytest.mark.parametrize(
    ("count", "cut"), [(6, 0), (8, 0), (9, 1), (11, 1), (12, 2), (20, 5), (30, 9)]
)  # one less than the ranks in tables of the sign test at 5 %
def test_the_interval_of_a_median_is_that_of_the_sign_test(count: int, cut: int) -> None:
    assert median_interval([*range(count)][::-1]) == (cut, count - 1 - cut)


@pytest.mark.parametrize(
    ("ratios", "met"),
    [([1.0] * MIN_ROUNDS, True), ([1.1] * MIN_ROUNDS, False), ([0.9, 1.1] * 5, None), ([1.0] * (MIN_ROUNDS - 1), None)],
)
def test_a_limit_is_judged_by_the_interval_of_the_rounds(ratios: list[float], met: bool | None) -> None:
    assert interval_limit("", ratios, 1.0, SLOWER_LIMIT)["met"] is met


# ---- interruptions


@pytest.fixture
def interrupted_in_round(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that lets the user press Ctrl-C within a round: the round has one trial by then."""

    def choose(interrupted: int) -> None:
        def run_round(number: int, *arguments: Any) -> None:
            samples = arguments[3].samples.setdefault("a", [])
            samples += [[number]] * (1 if number == interrupted else TRIALS_PER_ROUND)
            if number == interrupted:
                raise KeyboardInterrupt

        monkeypatch.setattr(model_bench, "_run_round", run_round)

    return choose


def test_an_interrupted_measurement_has_its_whole_rounds(interrupted_in_round: Callable[[int], None]) -> None:
    interrupted_in_round(2)
    found = model_bench.run_interleaved({}, Trial(1, 1), 5, lambda _: None)
    assert found.is_interrupted
    assert found.samples == {"a": [[0]] * TRIALS_PER_ROUND + [[1]] * TRIALS_PER_ROUND}


def test_a_measurement_that_is_interrupted_in_its_first_round_has_no_result(
    interrupted_in_round: Callable[[int], None],
) -> None:
    interrupted_in_round(0)
    with pytest.raises(KeyboardInterrupt):
        model_bench.run_interleaved({}, Trial(1, 1), 5, lambda _: None)


@pytest.mark.parametrize("is_within", [True, False])
def test_an_interrupted_benchmark_prints_what_it_has(
    is_within: bool, report: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(_: BenchmarkPlan) -> Iterator[dict[str, Any]]:
        yield report["models"][0] | {"interrupted": is_within}
        raise KeyboardInterrupt

    monkeypatch.setitem(SECTIONS, "models", rows)
    for name in ("adopt_orphans", "interrupt_on_sigterm"):  # they would change the process of the tests
        monkeypatch.setattr(bench_support, name, lambda: None)
    assert model_bench.main(["--no-color"]) == 130
    printed = capsys.readouterr()
    assert "net" in printed.out
    assert printed.err == "model_bench: interrupted: the rest was not measured\n"


# ---- versions


def test_versions_alternate_and_are_compared_by_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def measure_model(
        name: str, _path: Path, threads: int, _places: object, _plan: object, orders: Any, times: Any
    ) -> None:
        for order in orders:
            begun.append(order[0])
            compared_versions._add(times, (name, threads, "burst"), {BEFORE: 100.0, AFTER: 104.0})

    monkeypatch.setattr(compared_versions, "build", lambda *_: tmp_path)
    monkeypatch.setattr(compared_versions, "_measure_model", measure_model)
    monkeypatch.setattr(compared_versions, "_measure_starts", lambda *_: None)
    plan = compared_versions.VersionsPlan({"m": tmp_path}, {1: ((0,), (1,))}, MIN_ROUNDS, None, True, True)
    report = compare_versions("HEAD", plan, tmp_path)
    assert begun[:4] == [BEFORE, AFTER, BEFORE, AFTER]
    assert [row["target"]["met"] for row in report["versions"]["rows"]] == [False, False]
    assert report["missed"] == ["null, 1 thread: burst", "m, 1 thread: burst"]
    row = version_tables(report["versions"])["versions"].rows[1]
    assert row == ["m", "1", "burst", "100", "104", "1.04", "1.04-1.04", "missed (≤ 1.03)", "6"]


def test_a_revision_that_does_not_exist_is_an_error_of_one_line() -> None:
    done = bench("--against-ref", "no-such-commit")
    assert (done.returncode, done.stderr) == (1, "model_bench: error: no commit no-such-commit\n")


@needs_llvmlite
@pytest.mark.full
def test_a_commit_is_built_and_compared_with_the_working_tree(data_dir: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nexec cc "$@" -O0\n')  # to optimize the cores of both versions takes 30 s of a CPU
    compiler.chmod(0o755)
    words = ("--against-ref", "HEAD", "--quick", "--json", "--only", "mobilenet_v1_0.25_128_quant")
    with one_cpu():  # half as many runners
        done = bench(*words, "--models", str(data_dir / "models"), CC=str(compiler))
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)["versions"]["rows"]
    starts = ["script, first start", "script, cached"]
    assert [row["form"] for row in rows] == [*FORMS * 2, *starts]
    assert {row["rounds"] for row in rows} == {2}
    assert all(row["before_us"] > 0 < row["after_us"] for row in rows)


# ---- results


def _runner(p50: float) -> dict[str, Any]:
    return _metrics(p50) | {"threads": 2, "api_variant": "in place", "output_difference": 0.0}


@pytest.fixture
def report() -> dict[str, Any]:
    row = {"model": "net", "count": 7, "rounds": 3, "is_quantized": True, "missing": {}}
    row["comparisons"] = [model_row(MODEL, METRICS, 2, ROUNDS)]
    row["runners"] = {name: _runner(metrics["p50"]) for name, metrics in METRICS.items()}
    conditions = {
        "cpu": "a processor", "target": "avx2", "kernel": "6", "python": "3", "packages": {"onnx": None}, "core": "c",
        "cpus_allowed": [0, 1], "cpus_used": {"1 threads": {"computing": [0], "client": [1]}},
        "client_shares_cpus": True, "polling_window": {"all": "50 µs"}, "load_before": [0.1], "quick": False,
    }  # fmt: skip
    return {
        "conditions": conditions,
        "models": [row],
        "transformers": [row | {"model": "block"}],
        "missed": ["net: something"],
        "not_compared": [],
    }  # fmt: skip


def test_results_have_a_table_for_each_section(report: dict[str, Any]) -> None:
    made = model_bench.tables(report)
    ratio = ["0.50", "0.50-0.50"]
    ratios = [*ratio, "met (≤ 0.50)", *ratio, "met (≤ 1.30)", *ratio, "met (≤ 2.00)"]
    assert made["models"].rows == [["net", "nnfmq burst", "2", *ratios, "40", "80", "ONNX Runtime"]]
    assert ["net", "nnfmq burst, 2 threads", "40", "80", "120", "0", "in place"] in made["models-runners"].rows
    assert made["transformers-runners"].rows[0][:2] == ["block", "nnfmq burst, 2 threads"]


def test_a_section_that_was_not_measured_has_no_table(report: dict[str, Any]) -> None:
    kept = {name: report[name] for name in ("conditions", "models")}
    assert list(model_bench.tables(kept)) == ["models", "models-runners"]


@needs_matplotlib
def test_TST_10_the_plot_is_drawn_and_the_same_report_gives_the_same_bytes(
    report: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report), encoding="utf-8")
    written = []
    for folder in (tmp_path / "once", tmp_path / "again"):
        # In another process, because matplotlib keeps global state.
        done = bench("--report", str(file), "--results", str(folder))
        assert (done.returncode, done.stderr) == (0, "")
        written.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert written[0] == written[1]
    assert b"<svg" in written[0]["models.svg"]
    assert written[0]["model-models.csv"].startswith(b"model,runner,threads,p50,95 %,,")


def test_the_page_of_the_repository_has_the_targets() -> None:
    page = (ROOT / "docs" / "explanation" / "performance.md").read_text(encoding="utf-8")
    for model in MODELS:
        assert f"| `{model.file}` | {model.targets[0]:.2f} | {model.targets[1]:.2f} |" in page


@pytest.mark.parametrize(("text", "error"), [("[", "JSONDecodeError"), ("{}", "ValueError")])
def test_a_file_that_is_not_a_report_is_an_error_of_one_line(
    text: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    file.write_text(text, encoding="utf-8")
    assert model_bench.main(["--report", str(file)]) == 1
    assert capsys.readouterr().err.startswith(f"model_bench: error: {error}")


def test_the_runners_of_the_table_exist() -> None:
    assert {IN_PROCESS, *BASELINES} < set(RUNNERS)


def test_the_printed_tables_have_ratios_first_and_every_runner(
    report: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report), encoding="utf-8")
    assert model_bench.main(["--report", str(file), "--no-color"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    ratio = next(number for number, line in enumerate(lines) if line.startswith("model") and "runner" in line)
    runner = next(number for number, line in enumerate(lines) if line.startswith("net") and "burst, 2 threads" in line)
    assert ratio < runner
    assert lines[ratio + 2].split()[:7] == ["net", "nnfmq", "burst", "2", "0.50", "0.50-0.50", "met"]
    assert lines[runner].split()[5:9] == ["40", "80", "120", "0"]
    assert "targets missed: net: something" in lines
    assert "not compared: nothing" in lines
