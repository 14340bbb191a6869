"""`nnfmq trace` for users: options, errors, the table of a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support import trace_checks

from nnfmq.cli import main, trace_collection
from nnfmq.driver.process.trace import ACTIVE, AREA_RING_BYTES, TraceArea, ring_offset
from nnfmq.observe.trace_core import TraceRing
from nnfmq.observe.trace_files import Slice, Trace, write_trace


@pytest.fixture
def file(tmp_path: Path) -> Path:
    trace = Trace(
        [
            Slice(1, 1, 0, 5_000_000, "[NN_LR_PE]execute"),
            Slice(1, 1, 1_000_000, 4_000_000, "[NN_LI_PE]wait"),
            Slice(1, 1, 1_500_000, 2_000_000, "[NN_LU_PU]other"),
        ],
        {1: "x"},
    )
    write_trace(trace, tmp_path / "in.json")
    return tmp_path / "in.json"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "give -o FILE to record a trace, or --table FILE to read one"),
        ("-o {}/o", "give `-- COMMAND ...` to trace a command, or --duration S to trace a running driver"),
        ("-o {}/o --duration 1 -- true", "give either a command to trace, or --duration with --connect"),
        ("-o {}/o --connect x -- true", "give either a command to trace, or --duration with --connect"),
        ("-o {}/o --json -- true", "--json prints a table: give --table FILE with it"),
        ("--table {}/x --duration 1", "--table reads a trace: give no other option than --json with it"),
        ("-o {}/o --duration 0", "argument --duration: 0 s is not above 0 and at most 86400 (a day)"),
        ("-o {}/o --duration nan", "argument --duration: nan s is not above 0"),
        ("-o {}/o --duration x", "argument --duration: 'x' is not a number of seconds"),
        ("-o {}/none/o -- true", "does not exist; create it first"),
    ],
)
def test_contradictory_options_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert main(["trace", *words.format(tmp_path).split()]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_UTL_5_the_table_has_times_and_own_times(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--table", str(file)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["LR", "runtime", "PE", "execution", "1", "5.000", "2.000"] in lines
    assert ["LI", "IPC", "PE", "execution", "1", "3.000", "3.000"] in lines


def test_UTL_5_a_narrow_terminal_shows_the_codes(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["trace", "--table", str(file)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 40
    assert ["LR", "PE", "1", "5.000", "2.000"] in [line.split() for line in out.splitlines()]


def test_UTL_5_the_table_as_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--json", "--table", str(file)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["unit"] == "ns"
    assert {"layer": "LI", "phase": "PE", "slices": 1, "overall_ns": 3_000_000, "self_ns": 3_000_000} in report["rows"]


def test_a_file_without_tags_has_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(Trace([Slice(1, 1, 0, 1, "x")]), tmp_path / "x.json")
    assert main(["trace", "--table", str(tmp_path / "x.json")]) == 1
    assert capsys.readouterr().err == f"nnfmq: error: {tmp_path}/x.json has no slices with NNAPI's tags\n"


def test_a_file_that_is_no_trace_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text("x")
    assert main(["trace", "--table", str(tmp_path / "x.json")]) == 1
    assert "is neither a Chrome JSON trace nor ftrace text" in capsys.readouterr().err
    assert main(["trace", "--table", str(tmp_path / "y.json")]) == 1
    assert "y.json: No such file or directory" in capsys.readouterr().err


def test_the_exit_status_is_that_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.json"
    assert main(["trace", "-o", str(output), "--", sys.executable, "-c", "import sys; sys.exit(7)"]) == 7
    assert capsys.readouterr().err == f"nnfmq: {output} has no slices: nothing used nnfmq meanwhile\n"
    assert trace_checks.load(output) == []


def test_a_command_that_does_not_exist_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "-o", str(tmp_path / "o"), "--", "/nonexistent/program"]) == 127
    assert capsys.readouterr().err == "nnfmq: error: /nonexistent/program cannot be run: No such file or directory\n"


def test_a_command_is_killed_if_its_trace_cannot_be_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no more files")

    monkeypatch.setattr(trace_collection._Collector, "collect_until_exit", fail)
    with pytest.raises(OSError, match="no more files"):
        trace_collection.trace_command([sys.executable, "-c", "input()"])


def test_what_a_process_sends_to_the_collector_besides_rings_is_ignored(tmp_path: Path) -> None:
    script = (
        "import os, pathlib\n"
        "from nnfmq.base.channel import Channel\n"
        "channel = Channel.connect(pathlib.Path(os.environ['NNFMQ_TRACE'].removeprefix('socket:')))\n"
        "fd = os.open('/dev/null', os.O_RDONLY)\n"
        "channel.send(b'ring', [fd])\n"
        "channel.send(b'nothing')\n"
    )
    trace, status = trace_collection.trace_command([sys.executable, "-c", script])
    assert (trace, status) == (Trace(), 0)


def test_a_slot_that_another_worker_has_taken_is_read_as_a_new_ring() -> None:
    with TraceArea(2) as area:
        offset = ring_offset(2)
        view = area.memory.view[offset : offset + AREA_RING_BYTES]
        rings = trace_collection.WorkerRings(area.memory.view, begin_ns=100)
        rings.read()
        assert rings.trace() == Trace()
        area.memory.view[ACTIVE + 2] = 1
        for pid in (11, 12):
            ring = TraceRing(view, pid, b"driver")
            ring.slice(1, 0, 10, 20)  # before the trace began
            ring.slice(1, 0, 110, 120 + pid)
            rings.read()
            ring.slice(1, 0, 210, 220 + pid)
            rings.read()
            ring.close()
        rings.release()
        view.release()
        found = rings.trace()
    assert [(one.pid, one.end_ns) for one in found.slices] == [(12, 132), (11, 131), (12, 232), (11, 231)]
    assert found.processes == {11: "driver", 12: "driver"}
