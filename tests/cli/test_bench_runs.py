"""`nnfmq bench` for users: reports and files of real runs. No time is asserted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import until

import nnfmq
from nnfmq.base.processes import descendants
from nnfmq.cli import command_parser, main
from nnfmq.lab import roofline
from nnfmq.lab.bench import measurement
from nnfmq.lab.listening_driver import started_daemon

DIGITS = str(nnfmq.example_path("digits.tflite"))
QUICK = ("--device", "reference", "--count", "20", "--warm-up", "2", "--connect", "embedded")
LIMIT_S = 60


def bench(*words: str) -> int:
    return main(["bench", DIGITS, *words])


def reported(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> Any:
    assert bench(*QUICK, "--json", *words) == status
    return json.loads(capsys.readouterr().out)


def error(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def parsed(*words: str) -> dict[str, Any]:
    return vars(command_parser("bench").parse_args([DIGITS, *words]))


def test_a_closed_loop_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    report = reported(capsys)
    (result,) = report["results"]
    assert (result["runner"], result["clients"], result["rate"], result["requests"]) == ("burst", 1, None, 20)
    assert result["latency_ns"]["p99"] is result["latency_ns"]["p99_9"] is None  # of 20 requests
    times = [result["latency_ns"][name] for name in ("min", "p50", "p90", "p95", "max")]
    assert times == sorted(times) and times[0] > 0
    assert result["stages_ns"]["latency"] == pytest.approx(
        sum(result["stages_ns"][name] for name in ("queue", "driver", "engine"))
    )
    assert result["cpu_ns"]["client"] > 0 and result["pss_bytes"] > 1 << 20 and result["processes"] == 2
    assert result["is_stable"] is None and result["warm_up"] == []
    assert result["details"]["device"] == "reference"
    assert {"cpu", "kernel", "python", "packages", "core", "load_before", "clock"} <= set(report["conditions"])
    assert (report["missing"], report["ratios"], report["threshold"]) == ({}, [], None)


def test_modes_are_measured_in_turn_and_compared(capsys: pytest.CaptureFixture[str]) -> None:
    report = reported(capsys, "--mode", "burst,sync", "--rate", "500", "--arrivals", "poisson")
    assert [result["runner"] for result in report["results"]] == ["burst", "sync"]
    assert report["load"]["rounds"] == 5
    assert [result["requests"] for result in report["results"]] == [20, 20]
    assert {(row["runner"], row["over"], row["metric"]) for row in report["ratios"]} == {
        ("sync", "burst", "p50"), ("sync", "burst", "p99"),
    }  # fmt: skip


def test_each_number_of_clients_is_measured_at_each_rate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NNFMQ_SOCKET", str(tmp_path / "nobody.sock"))
    words = ("--device", "reference", "--count", "6", "--warm-up", "1", "--json")
    assert bench(*words, "--clients", "1:2", "--rate", "100:200:100") == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(each["clients"], each["rate"], each["requests"], each["processes"]) for each in results] == [
        (1, 100.0, 6, 3), (1, 200.0, 6, 3), (2, 100.0, 6, 5), (2, 200.0, 6, 5),
    ]  # fmt: skip
    assert all(each["wait_ns"]["min"] >= 0 for each in results)


def test_a_warm_up_ends_when_it_is_stable_or_after_ten_windows(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--device", "reference", "--count", "5", "--window", "100", "--stability", "99999", "--json")
    assert bench(*words, "--connect", "embedded") == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert len(result["warm_up"]) == 3 and result["is_stable"] is True


def test_the_first_load_above_the_threshold_is_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    report = reported(capsys, "--rate", "100:300:100", "--latency-threshold", "0.000001", status=1)
    assert [result["rate"] for result in report["results"]] == [100.0]
    assert report["threshold"] == {"percentile": "p99", "limit_ns": 1, "within": None}


def test_a_threshold_that_is_met_is_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    report = reported(capsys, "--latency-threshold", "60000", "--percentile", "50")
    assert report["threshold"] == {
        "percentile": "p50", "limit_ns": 60_000_000_000, "within": {"clients": 1, "rate": None},
    }  # fmt: skip


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Others:
    """What other programs use: nothing, unless a test says otherwise."""
    found = Others()
    monkeypatch.setattr(measurement, "OtherProcesses", found)
    return found


class Others:
    """In place of OtherProcesses: `used` is what they use in each part."""

    def __init__(self) -> None:
        self.used = 0
        self.roots: list[list[int]] = []

    def __call__(self, roots: list[int]) -> Others:
        self.roots.append(roots)
        return self

    def used_ns(self) -> int:
        return self.used


@pytest.mark.usefixtures("others")
def test_a_run_is_compared_with_an_earlier_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    earlier, faster = reported(capsys), tmp_path / "faster.json"
    slower = tmp_path / "slower.json"
    for path, factor in ((faster, 1e-6), (slower, 1e6)):
        blocks = [
            {name: value / factor if name == "throughput_per_s" else value * factor for name, value in block.items()}
            for block in earlier["results"][0]["blocks"]
        ]
        path.write_text(json.dumps(earlier | {"results": [earlier["results"][0] | {"blocks": blocks}]}))
    regressed = reported(capsys, "--baseline", str(faster), status=1)
    assert {row["outcome"] for row in regressed["baseline"]} == {"regression"}
    improved = reported(capsys, "--baseline", str(slower))
    assert {row["outcome"] for row in improved["baseline"]} == {"improvement"}
    assert {row["metric"] for row in improved["baseline"]} == {"p50", "p99", "throughput_per_s"}


def test_a_run_beside_other_programs_cannot_be_compared(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, others: Others
) -> None:
    earlier, path = reported(capsys), tmp_path / "earlier.json"
    (result,) = earlier["results"]
    assert result["others_cpu_share"] == 0
    blocks = [{name: value / 1e6 for name, value in block.items()} for block in result["blocks"]]
    path.write_text(json.dumps(earlier | {"results": [result | {"blocks": blocks}]}))
    others.used = 10**12
    busy = reported(capsys, "--baseline", str(path), status=3)
    assert busy["results"][0]["others_cpu_share"] > 1
    assert {row["outcome"] for row in busy["baseline"]} == {"cannot tell"}
    assert all(len(roots) == 2 for roots in others.roots)  # the client and its driver take part


def test_a_run_that_was_not_stable_cannot_be_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    earlier, path = reported(capsys), tmp_path / "earlier.json"
    blocks = [{name: value / 1e6 for name, value in block.items()} for block in earlier["results"][0]["blocks"]]
    path.write_text(json.dumps(earlier | {"results": [earlier["results"][0] | {"blocks": blocks, "is_stable": False}]}))
    unstable = reported(capsys, "--baseline", str(path), status=3)
    assert {row["outcome"] for row in unstable["baseline"]} == {"cannot tell"}
    path.write_text(json.dumps(earlier | {"model_sha256": "0" * 64}))
    assert bench("--baseline", str(path)) == 1
    assert "the baseline is of another model" in capsys.readouterr().err


def test_all_files_are_written_and_the_tables_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = {"--html": "page.html", "--csv": "out.csv", "--hgrm": "out.hgrm", "--profile-export-file": "all.json"}
    words = [word for option, name in names.items() for word in (option, str(tmp_path / name))]
    assert bench(*QUICK, *words) == 0
    printed = capsys.readouterr().out
    assert "p99.9" in printed and "PSS MiB" in printed and "closed loop; 20 requests" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names.values())
    assert (tmp_path / "out.csv").read_text().startswith("Concurrency,")
    assert "#[Max" in (tmp_path / "out.hgrm").read_text()
    assert "<svg" in (tmp_path / "page.html").read_text()
    (experiment,) = json.loads((tmp_path / "all.json").read_text())["experiments"]
    assert len(experiment["requests"]) == 20


def test_inputs_are_read_from_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.npy" for number in range(2)]
    for path in paths:
        np.save(path, np.ones((1, 8, 8, 1), np.float32))
    words = [word for path in paths for word in ("--input-data", str(path))]
    assert reported(capsys, *words)["conditions"]["inputs"] == list(map(str, paths))


def test_zeros_are_inputs_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert reported(capsys, "--input-data", "zero")["conditions"]["inputs"] == ["zero"]


def test_the_operations_can_be_profiled_as_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roofline, "_LIMITS_NS", (0, 0))
    report = reported(capsys, "--enable_op_profiling")
    assert [row["operation"] for row in report["operations"]["operations"]][-1] == "SOFTMAX"
    assert bench(*QUICK, "--enable_op_profiling") == 0
    assert "SOFTMAX" in capsys.readouterr().out


def test_a_peer_that_is_not_installed_is_reported_beside_the_results(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ai_edge_litert").mkdir()
    (tmp_path / "ai_edge_litert" / "__init__.py").write_text("raise ModuleNotFoundError('none')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert bench(*QUICK, "--against", "litert") == 0
    assert "LiteRT is missing: ai-edge-litert is not installed: pip install 'nnfmq[bench]'" in capsys.readouterr().out


def test_a_load_without_requests_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--rate", "0.5", "--arrivals", "poisson", "--duration", "0.001", "--warm-up", "0")
    assert bench("--device", "reference", "--connect", "embedded", *words) == 1
    assert "no request in 0.001 s; give a longer --duration" in error(capsys)


def test_an_unknown_device_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*QUICK, "--device", "none") == 1
    assert "burst: there is no device 'none'" in error(capsys)


def test_control_c_ends_all_processes() -> None:
    words = [sys.executable, "-P", "-m", "nnfmq", "bench", DIGITS, "--device", "reference", "--connect", "embedded"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        until(lambda: len(descendants(process.pid)) == 2, "the runner and its driver start")
        pids = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out, err) == (130, b"", b"")
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), "no process is left")


def test_several_clients_use_a_driver_that_listens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with started_daemon(tmp_path) as driver:
        monkeypatch.setenv("NNFMQ_SOCKET", driver.socket)
        words = ("--device", "reference", "--count", "4", "--warm-up", "1", "--json", "--clients", "2")
        assert bench(*words) == 0
        (result,) = json.loads(capsys.readouterr().out)["results"]
        assert (result["requests"], result["processes"]) == (4, 5)
        assert len(descendants(driver.pid)) <= 3  # its workers are those that were measured
