"""Messages of client processes, which may be cut, wrong or too long; and the reports of crash tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from nnfmq.hal.errors import DeadObject
from nnfmq.lab.mlts import crash_report
from nnfmq.lab.mlts.crash_runner import ClientMessages, CrashResult
from nnfmq.lab.mlts.crash_tests import (
    CRASH_TESTS,
    LINE_BYTES_MAX,
    SELF_TESTS,
    ClientMessage,
    ClientState,
    ClientTask,
    CrashOutcome,
    GraphSize,
    Workload,
    decode_task,
    encode,
)


@pytest.fixture
def ends() -> Iterator[tuple[ClientMessages, int]]:
    reader, writer = os.pipe()
    pipe = ClientMessages(reader)
    yield pipe, writer
    pipe.close()
    pipe.close()  # idempotent
    os.close(writer)


def test_a_message_is_returned_when_its_line_is_complete(ends: tuple[ClientMessages, int]) -> None:
    pipe, writer = ends
    line = encode(ClientMessage(ClientState.SUCCESS, codes={"executed": 3}))
    os.write(writer, line[:7])
    assert pipe.read() == []
    os.write(writer, line[7:] + encode(ClientMessage(ClientState.KILLING)))
    assert [message.state for message in pipe.read()] == [ClientState.SUCCESS, ClientState.KILLING]
    assert not pipe.is_closed


@pytest.mark.parametrize("line", [b"no json\n", b'{"state": "unknown"}\n', b"[]\n"])
def test_a_line_that_is_no_message_is_an_error(ends: tuple[ClientMessages, int], line: bytes) -> None:
    pipe, writer = ends
    os.write(writer, line)
    with pytest.raises(msgspec.DecodeError):
        pipe.read()


def test_a_message_that_never_ends_is_an_error(ends: tuple[ClientMessages, int]) -> None:
    pipe, writer = ends
    for _ in range(LINE_BYTES_MAX // 1024):
        os.write(writer, b"x" * 1024)
        assert pipe.read() == []
    os.write(writer, b"x")
    with pytest.raises(DeadObject, match="more than"):
        pipe.read()


def test_a_closed_pipe_is_reported_with_its_last_messages() -> None:
    reader, writer = os.pipe()
    os.write(writer, encode(ClientMessage(ClientState.READY, worker_pid=5)))
    os.close(writer)
    pipe = ClientMessages(reader)
    assert [message.worker_pid for message in pipe.read()] == [5] and pipe.is_closed
    pipe.close()


def test_a_task_survives_its_journey() -> None:
    task = ClientTask("/socket", "reference", Workload.RANDOM_INFERENCE, 1.5, 3, ("a", "b"), (0.1, 0.2),
                      GraphSize(10, 1000), 7, 0.5, "/dump", True)  # fmt: skip
    assert decode_task(encode(task)) == task


def results() -> list[CrashResult]:
    passed = CrashResult("<device>", CRASH_TESTS[0], CrashOutcome.SUCCESS, "", 2_000_000_000, {"executed": 1234}, 5)
    hung = CrashResult("other", CRASH_TESTS[0], CrashOutcome.HANG, "nobody <replied>")
    unsupported = CrashResult("other", CRASH_TESTS[1], CrashOutcome.UNSUPPORTED, "no models")
    return [passed, hung, unsupported]


def test_TST_11_the_page_has_the_outcome_of_each_test_on_each_device() -> None:
    page = crash_report.render(results(), "a <machine>")
    assert "<script" not in page and "src=" not in page and "href=" not in page
    assert "MLTS crash tests: 1 of 3 failed" in page and "a &lt;machine&gt;" in page
    assert '<td class="good" title="1,234 steps in 2.0 s, 5 clients killed">SUCCESS <small>1,234</small></td>' in page
    assert "<b>HANG</b> parallel-inference-stress-8-threads on other: nobody &lt;replied&gt;" in page
    assert "1 SUCCESS, 1 HANG, 1 UNSUPPORTED" in page and "<td></td>" in page and "UNSUPPORTED</td>" in page


def test_a_page_without_failures_says_so() -> None:
    expected = replace(results()[1], test=SELF_TESTS[2])
    assert "all as expected" in crash_report.render([expected], "") and not expected.has_failed


def test_TST_11_the_csv_has_a_line_for_each_result() -> None:
    lines = crash_report.render_csv(results(), "2026").splitlines()
    assert lines[:2] == ["# 2026", "# device,target,test,outcome,expected,duration_s,killed,steps,reason"]
    name = "parallel-inference-stress-8-threads"
    assert lines[2] == f"<device>,parallel-inference-stress,{name},SUCCESS,SUCCESS,2.000,5,executed=1234,"
    assert lines[3] == f"other,parallel-inference-stress,{name},HANG,SUCCESS,0.000,0,,nobody <replied>"
    assert results()[1].as_json()["test"] == name and results()[1].as_json()["target"] == "parallel-inference-stress"
