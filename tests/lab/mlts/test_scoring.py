"""The benchmark with backends that compute nothing: what is run, in which order, how it is compared and reported."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from nnfmq.hal.errors import GeneralFailure
from nnfmq.importers import example_path
from nnfmq.lab.mlts import scoring
from nnfmq.lab.mlts.backends import FROM_CACHE, SAVING, WITHOUT_CACHE, CompilationSteps, ModelRunner
from nnfmq.lab.mlts.models import Array, ScoringModel
from nnfmq.lab.mlts.reports import histogram, scoring_csv, scoring_page
from nnfmq.lab.mlts.scoring import FAILED, MISSING, OK, Accuracy, ScoringOptions, ScoringResult, compare, run_benchmark
from nnfmq.lab.statistics import summarize

NO_TIME = ScoringOptions(0.0, 0.0)
GOLDEN = ScoringModel("digits", "digits", "Digits", golden_folder="digits", total=5)
PHOTOS = ScoringModel("digits_topk", "digits", "Digits", evaluator="top-k", expected_top1=0.5, total=4)


@dataclass
class FakeRuntime:
    """A backend whose output is the first element of the input; `calls` has what was called."""

    name: str = "fake"
    cache_bytes: int = 0
    error: Exception | None = None
    calls: list[str] = field(default_factory=list)

    @contextmanager
    def runner(self, path: Path) -> Iterator[ModelRunner]:
        self.calls.append(f"load {path.name}")
        yield FakeRunner(self)

    @contextmanager
    def compilations(self, path: Path) -> Iterator[CompilationSteps]:
        kinds = {
            kind: ((lambda kind=kind: self.calls.append(f"before {kind}")), (lambda kind=kind: self.calls.append(kind)))
            for kind in (WITHOUT_CACHE, SAVING, FROM_CACHE)
        }
        yield CompilationSteps(kinds, lambda: self.cache_bytes)

    def start(self, path: Path, array: Array) -> None:
        self.calls.append("start")


class FakeRunner:
    def __init__(self, runtime: FakeRuntime) -> None:
        self.runtime = runtime
        self.array = np.zeros(1)

    def reset(self) -> None:
        self.runtime.calls.append("reset")

    def set_input(self, array: Array) -> None:
        self.array = array

    def run(self) -> None:
        if self.runtime.error is not None:
            raise self.runtime.error
        self.runtime.calls.append(f"run {self.array.flat[0]:g}")

    def output(self) -> Array:
        return self.array.ravel()[:1].copy()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two sequences of two steps and of one step, whose golden outputs are off by 0 and by -2."""
    golden = tmp_path / "digits"
    golden.mkdir()
    shutil.copy(example_path("digits.tflite"), tmp_path / "digits.tflite")
    for name, steps, outputs in (("a", [1, 2], [1, 2]), ("b", [3], [5])):
        np.repeat(np.float32(steps), 64).tofile(golden / f"{name}.input")
        np.float32(outputs).tofile(golden / f"{name}.output")
    return tmp_path


def test_TST_10_states_are_reset_before_each_sequence_and_outputs_are_compared(folder: Path) -> None:
    runtime = FakeRuntime(cache_bytes=7)
    ((result,),) = run_benchmark([GOLDEN], [runtime], folder, NO_TIME)
    assert (result.status, result.reason, result.data_count) == (OK, "", 2)
    assert (result.accuracy.max_error, result.accuracy.mse) == (2.0, pytest.approx(4 / 3))
    assert result.latency is not None and result.latency.iterations == 3
    assert runtime.calls[:7] == ["load digits.tflite", "run 1", "reset", "run 1", "run 2", "reset", "run 3"]
    assert set(result.compilation) == {WITHOUT_CACHE, SAVING, FROM_CACHE} and result.cache_bytes == 7
    assert result.start is not None and runtime.calls.count("start") == 2  # the first is not counted


def test_each_compilation_is_prepared_outside_of_the_measured_time(folder: Path) -> None:
    runtime = FakeRuntime(cache_bytes=1)
    list(run_benchmark([GOLDEN], [runtime], folder, NO_TIME))
    first = runtime.calls.index(f"before {SAVING}")
    assert runtime.calls[first : first + 4] == [f"before {SAVING}", SAVING] * 2


def test_compilations_from_caches_count_only_if_something_was_saved(folder: Path) -> None:
    ((result,),) = run_benchmark([GOLDEN], [FakeRuntime()], folder, NO_TIME)
    assert set(result.compilation) == {WITHOUT_CACHE}


def test_a_file_is_compiled_for_its_first_test_only(folder: Path) -> None:
    tests = [GOLDEN, replace(GOLDEN, name="again")]
    (first,), (second,) = run_benchmark(tests, [FakeRuntime()], folder, NO_TIME)
    assert first.compilation and not second.compilation and second.start is None and second.status == OK


def test_missing_models_and_data_are_reported(folder: Path) -> None:
    missing = [replace(GOLDEN, file="other"), replace(GOLDEN, golden_folder="other"), PHOTOS]
    found = list(run_benchmark(missing, [FakeRuntime("one"), FakeRuntime("two")], folder, NO_TIME))
    assert [[result.status for result in test] for test in found] == [[MISSING] * 2] * 3
    reasons = [test[0].reason for test in found]
    assert "other.tflite" in reasons[0] and "other/*.input" in reasons[1] and "labels.txt" in reasons[2]


@pytest.mark.parametrize("error", [GeneralFailure("no\nmemory"), RuntimeError("no memory"), ValueError("no memory")])
def test_an_error_of_a_runtime_fails_its_own_result(folder: Path, error: Exception) -> None:
    ((bad, good),) = run_benchmark([GOLDEN], [FakeRuntime("bad", error=error), FakeRuntime("good")], folder, NO_TIME)
    assert (bad.status, bad.reason, bad.has_failed) == (FAILED, "no memory", True)
    assert (good.status, good.has_failed) == (OK, False)


def test_a_file_that_is_no_model_fails(folder: Path) -> None:
    (folder / "digits.tflite").write_bytes(b"no model")
    ((result,),) = run_benchmark([GOLDEN], [FakeRuntime()], folder, NO_TIME)
    assert result.status == FAILED and result.reason


def test_a_data_set_that_takes_too_long_is_a_failure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "LIMIT_S", 0.0)
    ((result,),) = run_benchmark([GOLDEN], [FakeRuntime()], folder, NO_TIME)
    assert result.status == FAILED and result.reason.startswith("1 of 2 inputs")


def test_the_data_set_is_repeated_until_the_duration_has_passed(folder: Path) -> None:
    ((result,),) = run_benchmark([GOLDEN], [FakeRuntime()], folder, ScoringOptions(0.02, 0.05))
    assert result.latency is not None and result.latency.iterations > 3 and result.accuracy.max_error == 2.0
    assert result.compilation[WITHOUT_CACHE].iterations == scoring.COMPILATIONS


def test_started_is_called_before_each_result(folder: Path) -> None:
    started: list[tuple[str, str]] = []
    backends = [FakeRuntime("one"), FakeRuntime("two")]
    list(run_benchmark([GOLDEN], backends, folder, NO_TIME, lambda model, name: started.append((model.name, name))))
    assert started == [("digits", "one"), ("digits", "two")]


def rated(backend: str, ranks: list[int]) -> ScoringResult:
    metrics = {f"top_{k}": sum(rank < k for rank in ranks) / len(ranks) for k in range(1, 6)}
    return ScoringResult(PHOTOS, backend, accuracy=Accuracy(metrics=metrics, ranks=tuple(ranks)))


def test_TST_10_a_device_must_not_be_less_accurate_than_litert() -> None:
    litert, device = rated("LiteRT", [0] * 10), rated("compiled", [0] * 4 + [3] * 6)
    assert compare(device, litert).accuracy.errors == ("top-1 is 0.400, LiteRT's is 1.000",)
    assert compare(rated("compiled", [9] * 10), litert).accuracy.errors[1] == "top-5 is 0.000, LiteRT's is 1.000"
    assert compare(rated("compiled", [0] * 9 + [3]), litert).accuracy.errors == ()
    assert compare(litert, device).accuracy.errors == compare(device, rated("other", [0] * 10)).accuracy.errors == ()


# ------------------------------------------------------------------------------------------------ reports


def results() -> list[list[ScoringResult]]:
    """Return a test with a baseline and a device, one that failed, and one that is missing."""
    block = summarize([1_000_000, 2_000_000, 3_000_000])
    litert = replace(rated("LiteRT", [0] * 10), data_count=10, latency=block, compilation={WITHOUT_CACHE: block})
    device = replace(
        compare(rated("<device>", [0] * 4 + [3] * 6), litert), data_count=10, latency=summarize([4_000_000] * 2),
        compilation={WITHOUT_CACHE: block, SAVING: block, FROM_CACHE: block}, cache_bytes=5000, start=block,
    )  # fmt: skip
    speech = ScoringModel("speech", "speech", "Speech", evaluator="mel-cep-log-f0", total=9)
    metrics = {"max_mel_cep_distortion": 1.5, "max_log_f0_error": 0.25}
    spoken = ScoringResult(speech, "LiteRT", OK, "", 3, block, Accuracy(0.5, 2.0, metrics, ("log F0",)))
    broken = ScoringResult(speech, "<device>", FAILED, "died")
    absent = ScoringResult(replace(GOLDEN, name="absent"), "LiteRT", MISSING, "no file")
    return [[litert, device], [spoken, broken], [absent]]


def test_TST_10_the_csv_has_a_line_for_each_result_with_its_metrics_under_their_names() -> None:
    flat = [result for test in results() for result in test]
    lines = scoring_csv(flat, "2026, nnfmq 1").splitlines()
    assert lines[0] == "# 2026, nnfmq 1" and lines[1].startswith("# name,backend,")
    rows = list(csv.DictReader(io.StringIO("\n".join([lines[1].removeprefix("# "), *lines[2:]]))))
    assert [row["status"] for row in rows] == [OK, OK, OK, FAILED, MISSING]
    assert (rows[1]["top_1"], rows[1]["top_5"], rows[1]["data_count"], rows[1]["data_total"]) == ("0.4", "1", "10", "4")
    assert rows[1]["errors"] == "top-1 is 0.400, LiteRT's is 1.000"
    assert (rows[2]["max_mel_cep_distortion"], rows[2]["max_log_f0_error"], rows[2]["top_1"]) == ("1.5", "0.25", "")
    assert (rows[0]["latency_iterations"], rows[0]["latency_total_s"]) == ("3", "0.006000000")
    assert rows[0]["latency_histogram"].split().count("1") == 3 and len(rows[0]["latency_histogram"].split()) == 32
    assert rows[1]["compile_cached_p50_s"] == rows[1]["start_p50_s"] == "0.002000000"
    assert rows[0]["compile_cached_p50_s"] == "" and rows[1]["cache_bytes"] == "5000"
    assert (rows[3]["reason"], rows[3]["latency_iterations"], rows[4]["reason"]) == ("died", "", "no file")


class Page(HTMLParser):
    """A page: which tags stay open, what it would load, its cells by class, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.styled: dict[str, list[str]] = {}
        self.text = ""
        self._style = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "rect", "br"):
            self.open.append(tag)
        self.loaded += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href")] + ["script"] * (
            tag == "script"
        )
        self._style = dict(attrs).get("class") or ""

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "br"):
            assert self.open.pop() == tag
        self._style = ""

    def handle_data(self, data: str) -> None:
        self.text += f"{data}\n"
        self.styled.setdefault(self._style, []).append(data)


def test_TST_10_the_page_is_self_contained_and_shows_differences_from_the_baseline() -> None:
    page = Page(scoring_page(results(), "a <machine>", "LiteRT is <missing>"))
    assert page.open == [] and page.loaded == []
    assert "a <machine>" in page.text and "LiteRT is <missing>" in page.text
    assert "MLTS: 3 of 4 results failed" in page.text
    assert page.styled["worse"] == ["40.0 % (-60.0)", "4.000 (+100 %)", "4.000 (+33 %)", "4.000 (+100 %)"]
    assert "\n100.0 %\n" in page.text and "cache KB" in page.text
    for text in ("top-1 is 0.400, LiteRT's is 1.000", "died", "log F0", "absent: no file", "Missing (1)"):
        assert text in page.text
    assert "mel-cep distortion\nlog F0 error\nlargest error\n" in page.text and "\n1.5\n0.25\n2\n" in page.text


def test_better_values_are_marked_and_a_page_without_errors_says_so() -> None:
    fast = replace(rated("compiled", [0] * 10), latency=summarize([500_000]), data_count=10)
    slow = replace(rated("LiteRT", [0, 1] * 5), latency=summarize([1_000_000]), data_count=10)
    page = Page(scoring_page([[slow, fast]], ""))
    assert page.styled["better"] == ["100.0 % (+50.0)", "0.500 (-50 %)", "0.500 (-50 %)", "0.500 (-50 %)"]
    assert "MLTS: no errors" in page.text and "Errors" not in page.styled and "worse" not in page.styled


def test_a_time_many_times_as_long_is_shown_as_a_factor() -> None:
    slow = replace(rated("compiled", [0]), latency=summarize([12_000_000]))
    fast = replace(rated("LiteRT", [0]), latency=summarize([1_000_000]))
    assert "12.000 (12 ×)" in Page(scoring_page([[fast, slow]], "")).styled["worse"]


def test_a_histogram_has_a_bar_for_each_bucket_that_is_not_empty() -> None:
    assert histogram(summarize([1, 2, 3000])).count("<rect") == 2


def test_json_has_no_ranks() -> None:
    found = results()[0][1].as_json()
    assert found["name"] == "digits_topk" and "ranks" not in found["accuracy"]
    assert found["accuracy"]["metrics"]["top_1"] == 0.4 and found["data_total"] == 4
