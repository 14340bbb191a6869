"""`nnfmq why` for users: what it prints of a trace, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nnfmq.cli import main
from nnfmq.observe.trace_files import CpuWait, Slice, Trace, write_trace
from nnfmq.observe.trace_layout import request_base


def request(number: int, at: int, wake: int) -> list[Slice]:
    identity = request_base(300, 2) | number
    received, end = at + 1_000 + wake, at + 13_000 + wake
    return [
        Slice(100, 100, at, end, "[NN_LR_PE]execute", identity),
        Slice(100, 100, at, at + 1_000, "[NN_LR_PIO]write", identity),
        Slice(100, 100, at + 1_000, received + 10_000, "[NN_LI_PE]wait", identity),
        Slice(100, 100, received + 10_000, end, "[NN_LR_PR]read", identity),
        Slice(300, 301, received, received + 9_000, "[NN_LD_PE]request", identity),
        Slice(300, 301, received + 500, received + 8_000, "[NN_LC_PE]engine", identity),
        Slice(300, 301, received + 600, received + 7_000, "[NN_LC_PCO]4 CONV_2D"),
    ]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    slices = [one for number in range(1, 6) for one in request(number, number * 10_000_000, 700)]
    slices += request(6, 100_000_000, 4_321_000)
    trace = Trace(slices, {100: "application", 300: "driver"}, [CpuWait(300, 301, 99_000_000, 105_000_000, 4_000_000)])
    trace.sort()
    write_trace(trace, tmp_path / "in.json")
    return tmp_path / "in.json"


def test_OBS_7_the_abnormal_stage_of_the_slowest_request_stands_out(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", str(file), "-n", "1"]) == 0
    out = capsys.readouterr().out
    assert "The slowest 1 of 6 requests; typical is the median." in out
    assert "1. 4,334.0 µs: packet 6 of burst 2, worker 300, 90.0 ms after the begin." in out
    assert "request wake-up: 4,321.0 µs, typically 0.7" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["request", "wake-up", "*", "4,321.0", "100%", "0.7"] in rows
    assert ["engine", "7.5", "0%", "7.5"] in rows
    assert ["4", "CONV_2D", "6.4", "0%", "6.4"] in rows
    assert "Thread 301 had no CPU for 4,000.0 µs of the 6,000.0 µs around." in out


def test_it_fits_into_a_narrow_terminal(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["why", str(file)]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 40


def test_the_report_as_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(file), "-n", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    slow, other = report["slowest"]
    assert (report["requests"], slow["abnormal"], slow["packet"], slow["burst"]) == (6, "request wake-up", 6, 2)
    assert slow["cpu_waits"] == [{"pid": 300, "thread": 301, "period_ns": 6_000_000, "waited_ns": 4_000_000}]
    assert {"name": "request wake-up", "ns": 4_321_000, "typical_ns": 700}.items() <= slow["stages"][1].items()
    assert [operation["name"] for operation in slow["operations"]] == ["4 CONV_2D"]
    assert other["total_ns"] == 13_700


@pytest.mark.parametrize("words", [[], ["x.json", "--duration", "1"]])
def test_either_a_file_or_a_driver_is_needed(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(["why", *words]) == 2
    assert "give either the file of a trace, or --duration S" in capsys.readouterr().err


def test_a_trace_without_requests_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(Trace(), tmp_path / "x.json")
    assert main(["why", str(tmp_path / "x.json")]) == 1
    assert capsys.readouterr().err == "nnfmq: error: the trace has no burst requests; only these have stages\n"


def test_an_embedded_driver_cannot_be_traced_from_outside(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "--connect", "embedded", "--duration", "0.1"]) == 1
    assert "an embedded driver has one client: trace that with `nnfmq trace" in capsys.readouterr().err
