"""Traces as Chrome's JSON and back, and other programs' JSON and ftrace text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import trace_checks

from nnfmq.observe.machine_record import CpuUse, MachineRecord, Stop
from nnfmq.observe.trace_files import Slice, ThreadTimes, Trace, read_trace, write_trace
from nnfmq.observe.trace_layout import request_base

REQUEST = request_base(30, 2) | 7


def example() -> Trace:
    trace = Trace(
        [
            Slice(20, 21, 1_000, 9_000, "[NN_LR_PE]execute", REQUEST),
            Slice(20, 21, 1_000, 2_000, "[NN_LR_PIO]write", REQUEST),
            Slice(20, 21, 2_000, 8_500, "[NN_LI_PE]wait", REQUEST),
            Slice(30, 31, 3_001, 8_000, "[NN_LD_PE]request", REQUEST),
            Slice(30, 31, 3_500, 7_000, 'no tag "quoted"'),
        ],
        {20: "application ä", 30: "driver"},
        [ThreadTimes(30, 31, 100, 4_000, 77, 3_000)],
        lost=3,
        machine=MachineRecord(
            uses=[CpuUse(40, 41, 200, 5_000, 4_000, (1,)), CpuUse(30, 0, 200, 5_000, 90)],
            stops=[Stop(30, 300, 900, "stopped")],
            processes={30: "nnfmq-worker", 40: "busy.py"},
            threads={(40, 41): "spinner"},
            is_sampled=True,
        ),
        epoch_ns=1_700_000_000_123_456_789,
    )
    trace.sort()
    return trace


def test_a_written_trace_reads_back_as_it_was(tmp_path: Path) -> None:
    write_trace(example(), tmp_path / "out.json")
    assert read_trace(tmp_path / "out.json") == example()
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_a_trace_passes_the_independent_checks(tmp_path: Path) -> None:
    write_trace(example(), tmp_path / "out.json")
    events = trace_checks.load(tmp_path / "out.json")
    trace_checks.check(events)
    (execute,) = trace_checks.named(events, "[NN_LR_PE]execute")
    assert (str(execute["ts"]), str(execute["dur"])) == ("1.000", "8.000")
    assert (execute["cat"], execute["args"]) == ("LR,PE", {"request": "30.2.7"})


def test_a_flow_leads_into_the_driver_and_back(tmp_path: Path) -> None:
    write_trace(example(), tmp_path / "out.json")
    flows = [event for event in trace_checks.load(tmp_path / "out.json") if event["ph"] in "sf"]
    assert [(f["ph"], f["name"], f["pid"], str(f["ts"])) for f in flows] == [
        ("s", "request", 20, "1.999"),
        ("f", "request", 30, "3.001"),
        ("s", "result", 30, "7.999"),
        ("f", "result", 20, "8.499"),
    ]


@pytest.mark.parametrize("missing", ["[NN_LR_PIO]write", "[NN_LI_PE]wait", "[NN_LD_PE]request"])
def test_a_request_without_one_of_its_slices_has_no_flow(tmp_path: Path, missing: str) -> None:
    trace = example()
    trace.slices = [one for one in trace.slices if one.name != missing]
    write_trace(trace, tmp_path / "out.json")
    assert not [event for event in trace_checks.load(tmp_path / "out.json") if event["ph"] in "sf"]


def test_an_empty_trace_is_valid(tmp_path: Path) -> None:
    write_trace(Trace(), tmp_path / "out.json")
    assert trace_checks.load(tmp_path / "out.json") == []
    assert read_trace(tmp_path / "out.json") == Trace()


def test_begin_and_end_events_of_others_are_read(tmp_path: Path) -> None:
    events = [
        {"ph": "B", "pid": 1, "tid": 2, "ts": 1, "name": "outer"},
        {"ph": "B", "pid": 1, "tid": 2, "ts": 2.5, "name": "inner"},
        {"ph": "E", "pid": 1, "tid": 2, "ts": 3},
        {"ph": "C", "pid": 1, "tid": 2, "ts": 3, "name": "counter"},
        {"ph": "M", "pid": 1, "name": "thread_name", "args": {"name": "x"}},
        {"ph": "E", "pid": 1, "tid": 2, "ts": 4},
        {"ph": "E", "pid": 1, "tid": 2, "ts": 5},
        {"ph": "X", "pid": 1, "tid": 3, "ts": 1, "dur": 1, "name": "other", "args": {"request": 5}},
    ]
    (tmp_path / "x.json").write_text(json.dumps(events))
    assert read_trace(tmp_path / "x.json").slices == [
        Slice(1, 2, 1000, 4000, "outer"),
        Slice(1, 3, 1000, 2000, "other"),
        Slice(1, 2, 2500, 3000, "inner"),
    ]


FTRACE = """\
# tracer: nop
#           TASK-PID    TGID   CPU#  ||||    TIMESTAMP  FUNCTION
 app-101   (  100) [001] ...1    10.000001: tracing_mark_write: B|100|[NN_LR_PE]execute
 app-101   (  100) [001] ...1    10.000002: tracing_mark_write: B|100|[NN_LI_PE]call
 drv-200   (  200) [000] ...1    10.000003: sched_switch: something else
 app-101   (  100) [001] ...1    10.000005: tracing_mark_write: E|100
 app-101   (  100) [001] ...1    10.000009: tracing_mark_write: E
 app-101   (  100) [001] ...1    10.000010: tracing_mark_write: E
"""


def test_text_of_ftrace_is_read(tmp_path: Path) -> None:
    (tmp_path / "trace.txt").write_text(FTRACE)
    assert read_trace(tmp_path / "trace.txt").slices == [
        Slice(100, 101, 10_000_001_000, 10_000_009_000, "[NN_LR_PE]execute"),
        Slice(100, 101, 10_000_002_000, 10_000_005_000, "[NN_LI_PE]call"),
    ]


@pytest.mark.parametrize(
    "text", ["", "hello", "{", "{}", '{"traceEvents": [1]}', '[{"ph": "X"}]', '{"traceEvents": 5}']
)
def test_what_is_no_trace_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match="is neither a Chrome JSON trace nor ftrace text"):
        read_trace(tmp_path / "x.json")
