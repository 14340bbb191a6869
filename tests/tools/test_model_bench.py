"""The benchmark of models: arithmetic, models made to size, the page, small runs of the command. Nothing is timed."""

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

import cpu_pinning as placement
import model_bench
import model_bench_page as pages
import model_bench_suites as sections
import numpy as np
import pytest
from bench_processes import Failed
from model_bench_metrics import (
    IN_PROCESS,
    MODELS,
    PEERS,
    Benchmark,
    apart,
    compiling_row,
    cost_row,
    goals_of,
    growth_exponent,
    model_row,
    named,
    roofline_row,
)
from model_bench_runners import PARTIES, Job, Turn, inputs_for, quickest, timed
from model_bench_runners import _stepping as stepping
from model_bench_scheduler import TURNS, Gathered, figures_of, rotated, wait_until_quiet
from model_bench_suites import SECTIONS, Plan, client_cores, cores, turns_of
from model_work import KINDS, TYPES, ModelCost, generated, model_cost
from support.compiled import assert_kernels_agree
from support.places import ROOT
from support.small_models import F32, one_operation

import nnfmq
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import Operand, OperationType

LIMIT_S = 300
needs_two_cores = pytest.mark.skipif(placement.two_cores() is None, reason="one core allowed: both sides poll")
needs_llvmlite = pytest.mark.skipif(importlib.util.find_spec("llvmlite") is None, reason="llvmlite is not installed")
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)


def bench(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command. Returning also shows that no process of it is left: each would hold its stdout open."""
    return _python(str(ROOT / "tools" / "model_bench.py"), *words, **environment)


def _python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=LIMIT_S, check=False, env=kept | environment
    )  # fmt: skip


@contextmanager
def one_core() -> Iterator[None]:
    """Allow this thread, and what it starts, a single core."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


# ---- runs


@needs_llvmlite
@needs_two_cores
def test_models_and_cost_are_reported(data_dir: Path) -> None:
    words = ("--quick", "--json", "--only", "tts_float", "--sections", "models,cost,roofline")
    done = bench(*words, "--models", str(data_dir / "models"))
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert set(report) == {"conditions", "models", "cost", "roofline", "missed", "not_compared"}
    (row,) = report["models"]
    assert row["parties"].keys() | row["missing"].keys() == {named(kind, n) for kind in PARTIES for n in (1, 2)}
    for party in row["parties"].values():
        assert {"p50", "p99", "p99.9", "threads", "way", "apart"} <= set(party)
        assert party["apart"] < 1e-5  # all have executed the same model on the same input
    if "LiteRT, 1 thread" in row["parties"]:
        assert row["parties"]["LiteRT, 1 thread"]["delegate"] == "XNNPACK"
    assert [cost["threads"] for cost in report["cost"]] == list(range(1, min(2, len(placement.ALLOWED) - 1) + 1))
    assert {"target", "cpus_used", "polling_window", "client_shares_cores"} <= set(report["conditions"])


@needs_llvmlite
def test_a_peer_that_is_not_installed_is_named_and_not_compared(data_dir: Path, tmp_path: Path) -> None:
    for package in ("ai_edge_litert", "onnxruntime"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"raise ModuleNotFoundError('none', name='{package}')\n")
    words = ("--quick", "--json", "--only", "tts_float", "--sections", "models", "--require-all")
    with one_core():  # half as many parties
        done = bench(*words, "--models", str(data_dir / "models"), PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads(done.stdout)
    (row,) = report["models"]
    assert row["best_peer"] is None
    assert row["goals"][0]["met"] is None
    assert row["missing"]["LiteRT, 1 thread"] == "ai-edge-litert is not installed: pip install 'nnfmq[bench]'"
    assert row["missing"]["ONNX Runtime, 1 thread"] == "onnxruntime is not installed: pip install 'nnfmq[bench]'"
    assert len(report["not_compared"]) == len(row["missing"])


@needs_llvmlite
@needs_two_cores
def test_a_burst_is_measured_while_another_client_compiles(data_dir: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "tools")!r})
import model_bench, model_bench_suites
model_bench_suites.COMPILING = ("tts_float", "tts_float")
sys.exit(model_bench.main(["--quick", "--json", "--sections", "compiling", "--models", {str(data_dir / "models")!r}]))
"""
    done = _python("-P", "-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    (row,) = json.loads(done.stdout)["compiling"]
    assert set(row["figures"]) == {"beside", "alone"}
    assert row["preparations"] >= 1


@needs_llvmlite
def test_a_model_that_is_not_there_ends_the_run_with_one_line(tmp_path: Path) -> None:
    done = bench("--quick", "--only", "tts_float", "--sections", "models", "--models", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("model_bench: error: nnfmq burst: FileNotFoundError")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("words", [["--only", "none"], ["--sections", "none"], ["--rounds", "0"]])
def test_wrong_usage_is_status_2(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        model_bench.main(words)


def test_a_turn_does_not_begin_while_a_process_computes() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "print(1, flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    assert busy.stdout is not None
    with busy, busy.stdout:
        busy.stdout.readline()
        try:
            with pytest.raises(Failed, match=r"still computes 0\.3 s after"):
                wait_until_quiet([busy.pid], 0.3)
        finally:
            busy.kill()
    wait_until_quiet([])


# ---- steps


def test_a_step_writes_executes_reads_and_moves_states() -> None:
    infos = [TensorInfo("x", (2,), "float32"), TensorInfo("s", (2,), "float32", is_state=True)]
    targets, results = np.zeros((2, 2), np.float32), np.zeros((2, 2), np.float32)

    def run() -> None:
        results[0] = targets[0] + targets[1]
        results[1] = targets[1] + 1

    step = stepping([np.array([3, 4], np.float32), np.zeros(2, np.float32)], infos, targets, results, run)
    first, second, third = (step()[0].tolist() for _ in range(3))
    assert (first, second, third) == ([3, 4], [4, 5], [5, 6])


def test_every_party_gets_the_same_inputs_and_states_of_zeros() -> None:
    infos = [TensorInfo("x", (50,), "uint8"), TensorInfo("s", (3,), "float32", is_state=True)]
    (first, state), (again, _) = inputs_for(infos), inputs_for(infos)
    np.testing.assert_array_equal(first, again)
    assert np.unique(first).size > 10 and not state.any()


def test_the_only_way_is_the_quickest() -> None:
    def step() -> list[Any]:
        return []

    assert quickest({"one": step}) == (step, "one")
    assert quickest({"one": step, "two": step})[1] in ("one", "two")
    assert len(timed(step, 5)) == 5


# ---- arithmetic


def test_a_figure_is_the_median_over_rounds_of_each_round_s_percentile() -> None:
    rounds = [[1000] * 98 + [9000, 9000], [2000] * 100, [4000] * 100]
    assert figures_of(rounds) == {"p50": 2.0, "p99": 4.0, "p99.9": 4.0}


def test_all_turns_of_a_round_are_one_sample() -> None:
    found = Gathered({"a": [[1000]] * (TURNS - 1) + [[5000]] + [[3000]] * TURNS})
    assert found.figures() == {"a": {"p50": 2.0, "p99": 4.0, "p99.9": 4.0}}


def test_turns_side_by_side_differ_by_their_medians() -> None:
    found = Gathered({"a": [[1000, 7000, 9000], [20000]], "b": [[4000], [5000, 6000, 99000]]})
    assert found.differences_us("a", "b") == [3.0, 14.0]


def test_each_round_begins_with_another_party() -> None:
    assert [rotated("abc", number) for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        list("abc"),
    ]


def _figures(p50: float) -> dict[str, float]:
    return {"p50": p50, "p99": 2 * p50, "p99.9": 3 * p50}


MODEL = Benchmark("folder/net", 0.5, 100)
FIGURES = {
    "nnfmq burst, 2 threads": _figures(40), "nnfmq in process, 2 threads": _figures(35),
    "LiteRT, 1 thread": _figures(10), "LiteRT, 2 threads": _figures(100), "ONNX Runtime, 2 threads": _figures(80),
}  # fmt: skip


def test_a_model_s_ratio_is_over_the_best_peer_with_as_many_threads() -> None:
    row = model_row(MODEL, FIGURES, 2)
    assert (row["model"], row["best_peer"]) == ("net", "ONNX Runtime, 2 threads")
    assert row["p50_us"] == {"ours": 40, "theirs": 80}
    (goal,) = row["goals"]
    assert (goal["value"], goal["limit"], goal["met"]) == (0.5, 0.5, True)
    slower = model_row(MODEL, FIGURES | {"nnfmq burst, 2 threads": _figures(41)}, 2)
    assert slower["goals"][0]["met"] is False


def test_a_model_without_peers_is_not_compared() -> None:
    row = model_row(MODEL, {"nnfmq burst, 2 threads": _figures(40)}, 2)
    assert (row["best_peer"], row["p50_us"]["theirs"], row["goals"][0]["met"]) == (None, None, None)


def test_the_cost_is_a_difference_beside_5_us() -> None:
    assert cost_row("net", 1, _figures(45), _figures(41), 4)["goals"][0]["value"] == 4
    assert cost_row("net", 1, _figures(45), _figures(41), 4)["goals"][0]["met"] is True
    assert cost_row("net", 1, _figures(45), _figures(39), 6)["goals"][0]["met"] is False


def test_p99_beside_a_compilation_is_over_p99_alone() -> None:
    (goal,) = compiling_row("net", "other", alone=_figures(10), beside=_figures(16))["goals"]
    assert (goal["value"], goal["met"]) == (1.6, False)


def test_growth_is_the_power_between_the_last_two_sizes() -> None:
    assert growth_exponent([4, 8, 16], [1, 1, 4]) == pytest.approx(2)
    assert growth_exponent([64, 256], [10, 40]) == pytest.approx(1)


def test_outputs_are_apart_by_codes_or_relative_to_the_largest_float() -> None:
    codes, floats = np.array([250, 3], np.uint8), np.array([2.0, -8.0], np.float32)
    assert apart([np.array([247, 4], np.uint8)], [codes]) == 3
    assert apart([np.array([2.0, -7.0], np.float32)], [floats]) == 1 / 8
    assert apart([codes, floats], [codes, floats]) == 0
    assert apart([floats + 1], [np.zeros(2, np.float32)]) == 7


def test_the_roof_is_the_lower_of_cache_and_registers() -> None:
    peaks = {"float32_operations_per_s": 80e9, "code_operations_per_s": 180e9, "memory_bytes_per_s": 10e9,
             "cache_bytes_per_s": 50e9}  # fmt: skip
    low = roofline_row("low", ModelCost(500, 2000, False), 1, peaks)  # half an operation a byte: 25 G/s
    assert low["operations_per_s"] == 1e9
    assert low["share_of_roof"] == pytest.approx(1 / 25)
    high = roofline_row("high", ModelCost(9000, 1000, True), 1, peaks)  # 18 operations a byte: 180 G/s
    assert high["share_of_roof"] == pytest.approx(18 / 180)
    assert (
        roofline_row("none", ModelCost(1, 1, True), 1, peaks | {"code_operations_per_s": None})["share_of_roof"] is None
    )


def test_goals_are_listed_with_what_they_are_of() -> None:
    report = {"models": [model_row(MODEL, FIGURES, 2)], "cost": [cost_row("net", 2, _figures(9), _figures(1), 8)]}
    assert [(label, goal["met"]) for label, goal in goals_of(report)] == [("net", True), ("net, 2 threads", False)]


def test_the_client_of_a_burst_has_a_core_of_its_own_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "ALLOWED", frozenset((2, 3, 5)))
    assert (cores(2), client_cores(2)) == ((2, 3), (5,))
    assert (cores(3), client_cores(3)) == ((2, 3, 5), (2, 3, 5))


@pytest.fixture
def made_up_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let parties answer at once, without processes: each step takes as many ns as the party's name is long."""

    def take(jobs: dict[str, Job], turns: object, rounds: int, advance: Callable[[str], object]) -> Gathered:
        for name in [*jobs] * rounds * TURNS:
            advance(name)
        outputs = {name: [np.zeros(1, np.uint8)] for name in jobs}
        return Gathered({name: [[len(name)]] * rounds * TURNS for name in jobs}, {name: {} for name in jobs}, outputs)

    digits = nnfmq.load(nnfmq.example_path("digits.tflite"))
    rates = {f"{name}_per_s": 1e9 for name in ("float32_operations", "code_operations", "memory_bytes", "cache_bytes")}
    monkeypatch.setattr(sections, "take_turns", take)
    monkeypatch.setattr(sections, "loaded", lambda _: digits)
    monkeypatch.setattr(sections, "_peaks", lambda _: rates)


@pytest.mark.parametrize("section", [name for name in SECTIONS if name != "compiling"])
@pytest.mark.parametrize("divisor", [1, 100])
@pytest.mark.parametrize("cpus", [2, 4])
def test_the_bar_knows_how_many_turns_there_will_be(
    section: str, divisor: int, cpus: int, made_up_turns: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "ALLOWED", frozenset(range(cpus)))
    seen: list[str] = []
    plan = Plan(Path(), MODELS, 3, divisor, 1, seen.append)
    SECTIONS[section](plan)
    assert len(seen) == turns_of(section, plan)


def test_the_cost_is_measured_wherever_the_client_has_a_core(
    made_up_turns: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "ALLOWED", frozenset(range(3)))
    rows = SECTIONS["cost"](Plan(Path(), MODELS[:2], 1, 1, 1, lambda _: None))
    assert [(row["model"], row["threads"]) for row in rows] == [(m.name, n) for m in MODELS[:2] for n in (1, 2)]


def test_growth_has_a_point_for_each_size(made_up_turns: None) -> None:
    found = SECTIONS["growth"](Plan(Path(), MODELS, 1, 1, 1, lambda _: None))
    assert [point["size"] for point in found["size"][0]["points"]] == list(sections.SIZES)
    assert [(series["operation"], series["type"]) for series in found["channels"]] == [
        (k, t) for k in KINDS for t in TYPES
    ]


def test_a_trial_has_fewer_steps() -> None:
    assert Plan(Path(), MODELS, 3, 1, 1, lambda _: None).turn(2000) == Turn(2000 // TURNS, 40)
    assert Plan(Path(), MODELS, 3, 100, 1, lambda _: None).turn(2000, turns=1) == Turn(20, 3)


# ---- work, and models made to size


def test_the_work_of_known_models(data_dir: Path) -> None:
    # The papers have 14 and 300 million multiply-adds.
    small = model_cost(nnfmq.load(data_dir / "models" / "mobilenet_v1_0.25_128_quant.tflite").model)
    large = model_cost(nnfmq.load(data_dir / "models" / "mobilenet_v2_1.0_224_quant.tflite").model)
    assert (small.is_quantized, large.is_quantized) == (True, True)
    assert round(small.multiply_adds / 1e6) == 14
    assert round(large.multiply_adds / 1e6) == 301
    speech = model_cost(nnfmq.load(data_dir / "models" / "tts_float.tflite").model)
    assert not speech.is_quantized
    assert speech.multiply_adds * 4 == pytest.approx(speech.bytes, rel=0.03)  # each weight is used once


def test_the_work_of_a_product_of_several_rows() -> None:
    weights, bias = (Operand(F32, (5, 6)), bytes(120)), (Operand(F32, (5,)), bytes(20))
    model = one_operation(OperationType.FULLY_CONNECTED, [Operand(F32, (3, 6)), weights, bias, 0], Operand(F32, (3, 5)))
    work = model_cost(model)
    assert work.multiply_adds == 3 * 5 * 6
    assert work.bytes == 4 * (3 * 6 + 5 * 6 + 5 + 1 + 3 * 5)


@pytest.fixture
def team() -> Iterator[None]:
    yield
    from nnfmq.engines.compiled.thread_pool import default_thread_pool

    default_thread_pool().stop()


@needs_llvmlite
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TYPES)
def test_models_made_to_size_are_computed_by_kernels(kind: str, dtype: str, team: None) -> None:
    made = generated(kind, dtype, 6, 12)
    assert_kernels_agree(made.model)
    assert (made.inputs[0].shape, made.inputs[0].dtype) == ((1, 6, 6, 12), dtype)
    depth = 12 if kind.startswith("convolution") else 1
    assert model_cost(made.model).multiply_adds == 6 * 6 * 9 * 12 * depth


# ---- the page


def _party(p50: float) -> dict[str, Any]:
    return _figures(p50) | {"threads": 2, "way": "some", "apart": 0.0}


@pytest.fixture
def report() -> dict[str, Any]:
    row = model_row(MODEL, FIGURES, 2) | {"count": 7, "rounds": 3, "is_quantized": True, "missing": {}}
    row["parties"] = {name: _party(figures["p50"]) for name, figures in FIGURES.items()}
    peaks = {"float32_operations_per_s": 80e9, "code_operations_per_s": None, "memory_bytes_per_s": 10e9,
             "cache_bytes_per_s": 50e9}  # fmt: skip
    points = [{"size": n, "channels": n, "threads": n, "burst_us": 3.0 * n, "in_process_us": 2.0 * n} for n in (8, 16)]
    series = {"operation": "op", "type": "uint8", "points": points, "exponents": {"burst_us": 1.5, "in_process_us": 1}}
    conditions = {
        "cpu": "a processor", "target": "avx2", "kernel": "6", "python": "3", "packages": {"onnx": None}, "core": "c",
        "cpus_allowed": [0, 1], "cpus_used": {"1 threads": {"computing": [0], "client": [1]}},
        "client_shares_cores": True, "polling_window": {"all": "50 µs"}, "load_before": [0.1], "quick": False,
    }  # fmt: skip
    return {
        "conditions": conditions,
        "models": [row],
        "cost": [cost_row("net", 1, _figures(45), _figures(41), 4)],
        "compiling": [compiling_row("net", "other", _figures(10), _figures(16))],
        "growth": {"size": [series], "channels": [series], "at": {"size": 16, "channels": 32},
                   "threads": [{"model": "net", "points": points}]},
        "roofline": {"peaks": peaks, "models": [roofline_row("net", ModelCost(500, 2000, False), 1, peaks)]},
        "missed": ["net: something"],
        "not_compared": [],
    }  # fmt: skip


def test_results_have_a_table_for_each_section(report: dict[str, Any]) -> None:
    text = pages.results(report, {})
    assert "| net | 0.50 × | 0.50 × | met | 40 | 80 | ONNX Runtime, 2 threads |" in text
    assert "| net | 1 | 4 µs | 5 µs | met | 45 | 41 |" in text
    assert "| net | other | 1.60 × | 1.50 × | **missed** | 32 | 20 |" in text
    assert "| op, uint8 | 24 | 48 | 1.50 |" in text
    assert "which has no core of its own then" in text
    assert "onnx not installed" in text
    assert "* goals: 2 of 3 met" in text
    assert "![" not in text


def test_a_section_that_was_not_measured_is_left_out(report: dict[str, Any]) -> None:
    text = pages.results({name: report[name] for name in ("conditions", "missed", "not_compared", "cost")}, {})
    assert [line for line in text.splitlines() if line.startswith("###")] == ["### Cost over the model"]


def test_only_what_is_between_the_marks_is_replaced() -> None:
    page = f"before\n{pages.BEGIN}\nold\n{pages.END}\nafter\n"
    assert pages.replaced(page, "new") == f"before\n{pages.BEGIN}\n\nnew\n\n{pages.END}\nafter\n"
    with pytest.raises(ValueError, match="the page has no"):
        pages.replaced("nothing", "new")


@needs_matplotlib
def test_the_page_links_the_plots_and_the_same_report_gives_the_same_bytes(
    report: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report), encoding="utf-8")
    pages_of = [tmp_path / name / "page.md" for name in ("once", "again")]
    for page in pages_of:
        page.parent.mkdir()
        page.write_text(f"{pages.BEGIN}{pages.END}", encoding="utf-8")
    # In a process of its own: matplotlib leaves a good deal behind.
    calls = "; ".join(
        f"assert not model_bench_page.main([{str(file)!r}, '--page', {str(page)!r}])" for page in pages_of
    )
    done = _python(
        "-P", "-c", f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); import model_bench_page; {calls}"
    )
    assert (done.returncode, done.stderr) == (0, "")
    written = [{path.name: path.read_bytes() for path in page.parent.rglob("*.*")} for page in pages_of]
    assert written[0] == written[1]
    assert set(written[0]) == {"page.md", *(f"{n}.svg" for n in ("models", "cost", "size", "channels", "roofline"))}
    assert b"](page/models.svg)" in written[0]["page.md"]


def test_the_page_of_the_repository_has_the_marks() -> None:
    page = (ROOT / "docs" / "explanation" / "performance.md").read_text(encoding="utf-8")
    assert pages.replaced(page, "x").count("x") >= 1
    for model in MODELS:
        assert f"| `{model.file}` | {model.goal:.2f} |" in page or f"| `{model.file}` | {model.goal:g} |" in page


def test_a_file_that_is_no_report_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    file.write_text("[", encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(f"{pages.BEGIN}{pages.END}", encoding="utf-8")
    assert pages.main([str(file), "--page", str(page)]) == 1
    assert capsys.readouterr().err.startswith("model_bench_page: error: JSONDecodeError")


def test_the_parties_of_the_table_can_be_run() -> None:
    assert {IN_PROCESS, *PEERS} < set(PARTIES)


def test_the_tables_name_ratios_first_and_every_party(
    report: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model_bench._print(report, True)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    ratio = next(number for number, line in enumerate(lines) if "burst / best peer" in line)
    party = next(number for number, line in enumerate(lines) if line.startswith("nnfmq burst, 2 threads"))
    assert ratio < party
    assert lines[ratio + 2].split()[:6] == ["net", "0.50", "×", "0.50", "×", "met"]
    assert lines[party].split()[4:8] == ["40", "80", "120", "2"]
    assert "goals missed: net: something" in lines
    assert "not compared: nothing" in lines
