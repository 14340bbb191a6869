"""`nnfmq why` for users: what it prints of a trace, and errors."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from nnfmq.cli import main
from nnfmq.observe.machine_record import CpuUse, MachineRecord
from nnfmq.observe.trace_files import Slice, ThreadTimes, Trace, read_trace, write_trace
from nnfmq.observe.trace_layout import BURST_OF, request_base

EPOCH_NS = 1_790_000_000_000_000_000


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
    slices.append(Slice(300, 300, 10_000_000, 10_000_000, f"{BURST_OF}faces.tflite", request_base(300, 2)))
    times = [ThreadTimes(300, 301, 99_000_000, 105_000_000, 4_000_000, 20_000)]
    uses = [CpuUse(50, 50, 100_000_000, 104_000_000, 3_900_000, (0,))]
    machine = MachineRecord(uses, [], {50: "busy.py", 300: "nnfmq-worker of app.py"}, is_sampled=True)
    trace = Trace(slices, {100: "application", 300: "driver"}, times, machine=machine, epoch_ns=EPOCH_NS)
    trace.sort()
    write_trace(trace, tmp_path / "in.json")
    return tmp_path / "in.json"


def test_OBS_7_the_abnormal_stage_of_the_slowest_request_stands_out(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", str(file), "-n", "1"]) == 0
    out = capsys.readouterr().out
    assert "The slowest 1 of 6 requests; typical is the median; * is the furthest above it." in out
    flowed, clock = " ".join(out.split()), datetime.fromtimestamp((EPOCH_NS + 100_000_000) / 1e9).astimezone()
    assert (
        f"1. 4,334.0 µs at {clock:%Y-%m-%d %H:%M:%S.%f}: packet 6 of burst 2 of faces.tflite, nnfmq-worker of "
        "app.py (300), 90.0 ms after the begin."
    ) in flowed
    assert (
        "cpu-worker: the worker's listener thread waited 4.0 ms for a CPU (schedstat); busy.py (50) had it for 3.9 ms"
    ) in flowed
    rows = [line.split() for line in out.splitlines()]
    assert ["request", "wake-up", "*", "4,321.0", "100", "%", "0.7", "4,000.0"] in rows
    assert ["engine", "7.5", "0", "%", "7.5"] in rows
    assert ["4", "CONV_2D", "6.4", "0", "%", "6.4"] in rows


def test_a_request_that_is_not_slow_blames_no_stage(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(file), "-n", "6"]) == 0
    _, last = capsys.readouterr().out.split("\n6. ")
    assert "no stage took longer than usual" in last and "*" not in last


def test_a_request_without_a_cause_has_its_abnormal_stage(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = read_trace(file)
    trace.times, trace.epoch_ns = [], 0
    write_trace(trace, file)
    assert main(["why", str(file), "-n", "1"]) == 0
    out = capsys.readouterr().out
    assert "1. 4,334.0 µs: packet 6" in out
    assert "request wake-up: 4,321.0 µs, typically 0.7; nothing that was recorded explains it" in " ".join(out.split())
    assert "off CPU" not in out


def test_it_fits_into_a_narrow_terminal(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["why", str(file)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 40
    evidence = out[out.index("   cpu-worker:") : out.index(" stage")].rstrip().splitlines()
    assert len(evidence) > 2 and all(line.startswith("   ") for line in evidence)


def test_the_report_as_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(file), "-n", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    slow, other = report["slowest"]
    assert (report["requests"], slow["abnormal"], slow["packet"], slow["burst"]) == (6, "request wake-up", 6, 2)
    assert (slow["cause"], slow["causes"][0]["explained_ns"]) == ("cpu-worker", 4_000_000)
    assert datetime.fromisoformat(slow["date"]).timestamp() == pytest.approx((EPOCH_NS + 100_000_000) / 1e9)
    assert (slow["client_id"], slow["worker"], slow["model"]) == (300, "nnfmq-worker of app.py", "faces.tflite")
    client, worker = slow["threads"]
    assert (client["role"], client["thread"], client["waited_ns"]) == ("client", 100, 0)
    assert (worker["role"], worker["thread"], worker["waited_ns"]) == ("worker", 301, 4_000_000)
    assert worker["holders"] == [{"name": "busy.py (50)", "pid": 50, "thread": 0, "had_ns": 3_900_000}]
    assert {"name": "request wake-up", "duration_ns": 4_321_000, "typical_ns": 700}.items() <= slow["stages"][1].items()
    assert [operation["name"] for operation in slow["operations"]] == ["4 CONV_2D"]
    assert (other["total_ns"], other["cause"]) == (13_700, "unknown")


@pytest.mark.parametrize("words", [[], ["x.json", "--duration", "1"]])
def test_either_a_file_or_a_driver_is_needed(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(["why", *words]) == 2
    assert "give either the file of a trace, or --duration S" in capsys.readouterr().err


def test_a_trace_without_requests_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(Trace(), tmp_path / "x.json")
    assert main(["why", str(tmp_path / "x.json")]) == 1
    assert capsys.readouterr().err == "nnfmq: error: the trace has no burst requests; only these have stages\n"


@pytest.mark.parametrize("command", [["why"], ["trace", "-o", "x.json"]], ids=["why", "trace"])
def test_without_a_driver_it_is_said_how_to_start_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NNFMQ_SOCKET", str(tmp_path / "none.sock"))
    assert main([*command, "--duration", "0.1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"no driver listens at {tmp_path / 'none.sock'}" in line and "start one with `nnfmq serve`" in line
    assert not (tmp_path / "x.json").exists()
