"""`nnfmq mlts` as a user sees it: status, tables, JSON, files, wrong usage, Ctrl-C, and the death of the command."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.commands import started
from support.drivers import LIMIT_S, Process, opened, running_daemon, short_folder, until

from nnfmq.cli import main, mlts
from nnfmq.lab.mlts import backends

QUANT = "^mobilenet_v1_0.25_128_quant$"
SHORT = ("--duration", "0.001", "--warm-up", "0.001")


def run(*words: object) -> int:
    return main(["mlts", *map(str, words)])


@pytest.fixture
def models(data_dir: Path) -> Path:
    return data_dir / "models"


def test_TST_10_the_reference_device_computes_the_golden_outputs(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "bench.csv", tmp_path / "bench.html"]
    options = ["--data", models, "--only", QUANT, *SHORT, "--device", "reference", "--litert", "none"]
    assert run("bench", *options, "--json", "--csv", files[0], "--html", files[1]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    (result,) = report["results"]
    assert (result["name"], result["backend"], result["status"]) == ("mobilenet_v1_0.25_128_quant", "reference", "ok")
    assert result["accuracy"]["max_error"] == result["accuracy"]["mse"] == 0.0
    assert result["data_count"] == 2 and result["start"]["iterations"] >= 1
    assert (len(result["model_sha256"]), report["conditions"]["host"]) == (64, platform.node())
    assert report["litert_missing"] == "LiteRT is not measured: --litert none"
    assert ",reference,ok," in files[0].read_text() and "MLTS: no errors" in files[1].read_text()


@pytest.mark.full
@pytest.mark.parametrize("kernels", ["default", "reference"])
def test_TST_10_photos_are_classified_at_least_as_well_as_by_litert(
    models: Path, kernels: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")
    pytest.importorskip("PIL", reason="Pillow is not installed")
    pytest.importorskip("llvmlite", reason="llvmlite is not installed")
    options = ["--data", models, "--only", "0.25_128_quant_topk", *SHORT, "--photos", 60, "--litert", kernels]
    assert run("bench", *options, "--json") == 0
    litert, device = json.loads(capsys.readouterr().out)["results"]
    assert (device["backend"], device["accuracy"]["errors"]) == ("compiled", [])
    assert litert["backend"] == ("LiteRT" if kernels == "default" else "LiteRT, reference kernels")
    if kernels == "reference":  # quantized values are equal bit by bit
        assert litert["accuracy"]["metrics"] == device["accuracy"]["metrics"]
    assert set(device["compilation"]) == {"without cache", "saving to cache", "from cache"}
    assert set(litert["compilation"]) == {"without cache"} and device["cache_bytes"] > 0


@pytest.mark.full
def test_TST_10_speech_is_within_the_limits(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "--data", models, "--only", "tts_float", *SHORT, "--litert", "none") == 0
    out = capsys.readouterr().out
    assert "distortion" in out and "log F0" in out and "No metric exceeds its limit." in out


@pytest.mark.parametrize("columns", ["80", "40"])
def test_missing_models_and_a_missing_litert_are_reported(
    columns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(backends, "missing_reason", lambda: "LiteRT is not installed")
    assert run("bench", "--data", tmp_path, "--only", "asr|tts", *SHORT, "--device", "reference") == 0
    out = capsys.readouterr().out.replace("\n", " ")
    assert "LiteRT is not installed" in out and "2 of 2 tests are missing" in out
    assert "tts_float.tflite" in out and "asr_float.tflite" in out


def test_the_reason_for_a_missing_litert_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ai_edge_litert", None)
    monkeypatch.delitem(sys.modules, "ai_edge_litert.interpreter", raising=False)
    assert "pip install 'nnfmq[bench]'" in backends.missing_reason()


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_tables_fit_the_screen(
    columns: int, models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    options = ["--data", models, "--only", QUANT, *SHORT, "--device", "reference", "--litert", "none"]
    assert run("bench", *options) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns and "largest" in out
    assert "2/2" in out and "reference" in out


@pytest.mark.parametrize(("words", "message"), [
    (["bench"], "give --data DIR"), (["bench", "--data", "/nowhere"], "no folder /nowhere"),
    (["bench", "--data", "/", "--only", "nothing"], "no test has a name that matches 'nothing'"),
    (["crash", "--only", "nothing"], "--list shows all"), (["crash", "--self-test", "--only", "x"], "omit --only"),
    (["crash", "--connect", "embedded"], "one client"), (["crash", "--log", "x"], "--connect PATH"),
    (["crash", "--log", "/nowhere", "--connect", "x"], "no file /nowhere"),
])  # fmt: skip
def test_wrong_usage_is_one_line_and_status_2(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NNFMQ_DATA", raising=False)
    assert run(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nnfmq: error: ") and message in line


@pytest.mark.parametrize("words", [
    ["bench", "--duration", "-1"], ["bench", "--only", "("], ["bench", "--photos", "0"],
    ["crash", "--duration", "long"], ["crash", "--grace", "nan"], [],
])  # fmt: skip
def test_invalid_options_are_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 2
    assert "error" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["bench", "crash"])
def test_a_device_that_does_not_exist_is_an_error_that_lists_all(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(action, "--data", tmp_path, "--device", "other") == 1
    assert "device 'other' is not available; available are: reference" in capsys.readouterr().err


def test_the_list_has_all_tests_and_runs_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("crash", "--list", "--only", "stress") == 0
    assert "client-early-termination-stress" in capsys.readouterr().out


def test_help_of_an_action_fits_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("bench", "crash"):
        assert run(action, "--help") == 0
        assert len(capsys.readouterr().out.splitlines()) <= 40


def test_TST_11_a_crash_test_is_reported_as_table_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "crash.csv", tmp_path / "crash.html"]
    options = ["--only", "memory-mapped", "--device", "reference", "--data", tmp_path, "--duration", 1]
    results: list[Any] = []
    run_tests = mlts._run_tests

    def run_once(*given: Any) -> list[Any]:
        results[:] = results or run_tests(*given)
        return results

    monkeypatch.setattr(mlts, "_run_tests", run_once)
    for columns in (80, 40):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert run("crash", *options, "--csv", files[0], "--html", files[1]) == 0
        out = capsys.readouterr().out
        assert "SUCCESS" in out and "All as expected." in out and max(map(len, out.splitlines())) <= columns
    assert "reference,memory-mapped-model-load-stress,memory-mapped-model-load-stress,SUCCESS," in files[0].read_text()
    page = files[1].read_text()
    assert "<script" not in page and "http" not in page and "MLTS crash tests: all as expected" in page


def test_TST_11_a_running_driver_is_tested_with_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "driver.log"
    log.write_text("worker 1 ended with status -11\n")  # before the test
    with short_folder() as folder, running_daemon(folder / "d.sock") as daemon:
        options = ["--connect", daemon.path, "--log", log, "--data", tmp_path, "--device", "sample-quant"]
        assert run("crash", *options, "--only", "^inference-stress", "--duration", 1, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    (result,) = report["results"]
    assert report["conditions"]["host"] == platform.node()
    assert (result["test"], result["device"], result["outcome"]) == ("inference-stress", "sample-quant", "SUCCESS")
    assert result["codes"]["executed"] > 0


def test_TST_11_another_outcome_than_expected_is_status_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dataclasses import replace

    from nnfmq.lab.mlts import crash_tests

    test = replace(crash_tests.SELF_TESTS[1], expected=crash_tests.CrashOutcome.SUCCESS)
    monkeypatch.setattr(crash_tests, "SELF_TESTS", (test,))
    page = tmp_path / "crash.html"
    assert run("crash", "--self-test", "--html", page) == 1
    out = capsys.readouterr().out
    assert "FAILURE self-test-failure on reference: client 0: NnfmqError: this client fails on purpose" in out
    assert "1 of 1 tests have another outcome than expected." in out
    assert "this client fails on purpose" in page.read_text()


LONG_RUN = ("mlts", "crash", "--device", "reference", "--only", "multi-process-inference-stress-0", "--duration", "60")


def descendants_with_clients(pid: int) -> list[int]:
    """Wait until the driver, two of its workers and two clients run; return all descendants."""
    with Process(pid) as process:
        until(lambda: len(process.descendants()) >= 9, "clients and workers run", LIMIT_S)
        return process.descendants()


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_TST_11_no_process_is_left_when_the_command_ends(number: signal.Signals, tmp_path: Path) -> None:
    with ExitStack() as stack:
        folder = stack.enter_context(short_folder())  # a command that is killed leaves its temporary files there
        environment = {**os.environ, "TMPDIR": str(folder)}
        words = (*LONG_RUN, "--data", str(tmp_path))
        command = stack.enter_context(started(*words, stdout=subprocess.DEVNULL, env=environment))
        found = descendants_with_clients(command.pid)
        processes = [stack.enter_context(process) for process in opened(found)]
        command.send_signal(number)
        assert command.wait(LIMIT_S) == (130 if number is signal.SIGINT else -signal.SIGKILL)
        for process in processes:
            process.wait_for_end()
