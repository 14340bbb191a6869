"""`nnfmq stress` for users: options, reports of real runs, files, statuses. No time is asserted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.conditions import CONDITIONS, LINE
from support.drivers import until

import nnfmq
from nnfmq.base.processes import descendants
from nnfmq.cli import command_parser, main, stress
from nnfmq.lab import placement
from nnfmq.lab.stress import self_test
from nnfmq.lab.stress.records import DISTURBANCES
from nnfmq.lab.stress.self_test import ConfusionMatrix, NamedCause
from nnfmq.lab.stress.trial import LOADS

DIGITS = str(nnfmq.example_path("digits.tflite"))
LIMIT_S = 60
QUICK = ("--device", "reference", "--duration", "0.3")


def error(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()[-1]


# ---- options


def test_the_names_in_the_help_are_those_of_the_loads_and_causes() -> None:
    assert tuple(LOADS) == stress._LOADS
    assert tuple(DISTURBANCES) == stress._CAUSES
    assert stress._PLACEMENTS == placement.PLACEMENTS


def test_lists_of_numbers_and_names() -> None:
    words = [DIGITS, "--clients", "1,4,1", "--window", "0,50", "--load", "gc,none", "--cpus", "same,free"]
    parsed = command_parser("stress").parse_args(words)
    assert parsed.clients == (1, 4)
    assert parsed.window == (0, 50)
    assert parsed.load == ("gc", "none")
    assert parsed.cpus == ("same", "free")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--load", "rain"), "there is no rain; allowed are none, cpu, memory"),
        (("--mode", "slow"), "there is no slow; allowed are burst"),
        (("--clients", "0"), "0 is not between 1 and"),
        (("--window", "x"), "'x' is not an integer"),
        (("--duration", "0"), "0 is not a positive number"),
        (("--only", "luck"), "there is no luck; allowed are cpu-client"),
    ],
)
def test_a_wrong_option_is_reported(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stress", DIGITS, *words]) == 2
    assert message in error(capsys)


def test_without_a_model_there_is_only_the_self_test(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stress"]) == 1
    assert error(capsys) == "nnfmq: error: give a MODEL.tflite, or --self-test"


def test_an_embedded_driver_has_one_client_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stress", DIGITS, "--connect", "embedded"]) == 1
    assert "give the socket of `nnfmq serve`" in error(capsys)


def test_a_driver_that_does_not_exist_is_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["stress", DIGITS, "--connect", str(tmp_path / "no.sock")]) == 1
    assert "no.sock" in error(capsys)


# ---- scenarios


def test_a_run_reports_each_scenario_and_writes_its_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = ["--html", str(tmp_path / "page.html"), "--trace", str(tmp_path / "trace.json")]
    words = [
        "--load",
        "none,gc",
        "--mode",
        "burst,sync",
        "--window",
        "0",
        "--slow",
        "0.001",
        "--worst",
        "100",
        "--json",
        *files,
    ]
    assert main(["stress", DIGITS, *QUICK, *words]) == 0
    report = json.loads(capsys.readouterr().out)
    named = [each["scenario"] for each in report["scenarios"]]
    assert named == ["burst, 0 µs: none", "burst, 0 µs: gc", "sync, 0 µs: none", "sync, 0 µs: gc"]
    for each in report["scenarios"]:
        assert each["requests"] > 0
        assert len(each["worst"]) <= 100
    assert any(request["counters"]["gc_ns"] > 0 for request in report["scenarios"][1]["worst"])
    assert "burst, 0 µs: gc" in (tmp_path / "page.html").read_text(encoding="utf-8")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert sum(event["ph"] == "M" for event in events) == 4


REQUEST = {
    "at_ns": 250_000_000, "latency_ns": 40_000_000, "stages_ns": {"application": 39_000_000, "engine": 1_000_000},
    "causes": [{"name": "gc", "evidence": "38.0 ms in the client's garbage collector"}],
}  # fmt: skip
TIMES = {"p50": 12_300, "p99": 99_000_000, "p99_9": 123_456_000, "max": 123_456_000}
REPORT: dict[str, Any] = {
    "conditions": {
        **CONDITIONS, "duration_s": 2.0, "rate": None, "slow_ms": 2.0, "seed": 7,
    },
    "scenarios": [
        {"scenario": "burst: gc", "requests": 1234, "latency_ns": TIMES, "slow_requests": 2,
         "causes_ns": {"gc": 38_000_000, "cpu-client": 11_000_000}, "others_cpu_ns": 70_000_000,
         "worst": [REQUEST, REQUEST | {"causes": [], "stages_ns": None}]},
        {"scenario": "burst: none", "requests": 1, "latency_ns": TIMES, "slow_requests": 0, "causes_ns": {},
         "others_cpu_ns": 4_000_000, "worst": []},
        {"scenario": "burst: throttle", "reason": "a CPU limit needs root"},
    ]
}  # fmt: skip


@pytest.mark.parametrize("columns", [80, 40])
def test_the_tables_fit_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from nnfmq.cli.console import console
    from nnfmq.cli.stress import print_scenarios

    monkeypatch.setenv("COLUMNS", str(columns))
    print_scenarios(console(no_color=True), REPORT)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns
    flowed = " ".join(text.split())
    assert "gc: 38.0 ms in the client's garbage collector" in flowed
    assert "unknown: no counter explains it" in flowed
    assert "burst: gc: gc 38 ms, cpu-client 11 ms; other programs used 70 ms of CPU time" in flowed
    assert "burst: throttle is missing: a CPU limit needs root" in flowed
    assert "2 s of each scenario, a closed loop, seed 7; slow: 2 ms above the usual latency" in flowed
    assert LINE in flowed
    assert ("p99.9" in text) is (columns == 80)


def is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_leaves_no_process_and_none_stopped(number: signal.Signals) -> None:
    words = [sys.executable, "-P", "-m", "nnfmq", "stress", DIGITS, "--device", "reference"]
    words += ["--load", "stops", "--duration", "8"]  # with some ten stops a second, from 2 to 6 s at least
    pids: set[int] = set()

    def has_stopped_one() -> bool:
        pids.update(descendants(process.pid))
        return any(map(is_stopped, pids))

    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        until(has_stopped_one, "a process is stopped")
        process.send_signal(number)
        out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out, err) == (130, b"", b"")
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), "no process is left")


# ---- the self-test


@pytest.mark.full  # it takes eight seconds
def test_the_self_test_reports_a_row_for_each_combination(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "_REPETITIONS_MAX", 1)
    status = main(["stress", "--self-test", "--only", "gc,stops", "--device", "reference", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert [row["disturbances"] for row in report["rows"]] == [[], ["gc"], ["stops"], ["gc", "stops"]]
    assert [row["runs"] for row in report["rows"]] == [1 - report["excluded"], 1, 1, 1]
    are_right = report["right_share"] >= 0.9 and report["rows"][0]["right"] == 1
    assert status == (0 if are_right else 1)  # on a busy machine other causes are named as well, and rightly


def result(monkeypatch: pytest.MonkeyPatch, *runs: tuple[list[str], list[str]]) -> int:
    matrix = ConfusionMatrix(skipped={"memory": "on tmpfs"})
    for disturbances, named in runs:
        matrix.add(disturbances, {cause: NamedCause(12_000_000, f"evidence of {cause}") for cause in named})
    monkeypatch.setattr(stress, "_tested", lambda arguments: matrix)
    return main(["stress", "--self-test"])


def test_the_self_test_prints_its_matrix(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert result(monkeypatch, ([], []), (["gc"], ["gc"])) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "none 1/1 none 1" in text
    assert "gc 1/1 gc 1" in text
    assert "memory was left out: on tmpfs" in text
    assert "100.0 % of the runs with disturbances are right; seed 0." in text


def test_runs_that_other_programs_disturbed_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    matrix = ConfusionMatrix()
    matrix.add([], None, 9)
    monkeypatch.setattr(stress, "_tested", lambda arguments: matrix)
    assert main(["stress", "--self-test"]) == 1  # it is not known what would be named in an undisturbed run
    matrix.add([], {}, 2)
    assert main(["stress", "--self-test"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "9 runs without a disturbance were repeated, and 1 excluded." in text
    assert "11 runs without a disturbance were repeated, and 1 excluded." in text


def test_what_was_named_without_a_disturbance_is_reported_with_its_evidence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert result(monkeypatch, ([], ["cpu-client"]), (["gc"], ["gc"])) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "cpu-client named beside none, 12.0 ms: evidence of cpu-client" in text


def test_a_few_unexpected_causes_are_printed_and_the_others_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert result(monkeypatch, *[(["gc"], ["stops"])] * 12) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("stops named beside gc") == 10
    assert "and 2 more (--json)" in text


def test_the_self_test_fails_below_90_percent_or_if_a_cause_is_named_without_a_disturbance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right, wrong = (["gc"], ["gc"]), (["gc"], ["stops"])
    assert result(monkeypatch, *[right] * 9, wrong) == 0
    assert result(monkeypatch, *[right] * 8, wrong) == 1
    assert result(monkeypatch, *[right] * 9, ([], ["gc"])) == 1


def test_causes_that_cannot_be_brought_about_are_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(placement, "ALLOWED", frozenset({0}))
    monkeypatch.setattr(self_test, "can_reclaim", lambda folder: False)
    monkeypatch.setattr("nnfmq.lab.stress.counters._location", lambda pid: None)
    found = self_test.unavailable_causes(tmp_path, 1)
    assert set(found) == {"cpu-worker", "memory", "throttling"}
    assert "one only" in found["cpu-worker"]
    assert str(tmp_path) in found["memory"]
    assert "not available" in found["throttling"]
