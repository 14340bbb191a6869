"""Messages of clients, of which the last may be cut short; and the reports of crash tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from multiprocess import Pipe

from nnfmq.lab.child_processes import call_in_child
from nnfmq.lab.mlts.crash_runner import CrashResult, received_messages
from nnfmq.lab.mlts.crash_tests import (
    CRASH_TESTS,
    SELF_TESTS,
    ClientMessage,
    ClientState,
    ClientTask,
    CrashOutcome,
    GraphSize,
    Workload,
)
from nnfmq.lab.mlts.reports import crash_csv, crash_page


@pytest.fixture
def ends() -> Iterator[tuple[Any, Any]]:
    """A connection that is read, and the client's end."""
    reader, writer = Pipe(duplex=False)
    with reader, writer:
        yield reader, writer


def test_messages_are_returned_in_their_order_without_waiting_for_more(ends: tuple[Any, Any]) -> None:
    reader, writer = ends
    assert received_messages(reader) == ([], False)
    sent = [ClientMessage(ClientState.SUCCESS, codes={"executed": 3}), ClientMessage(ClientState.KILLING)]
    for message in sent:
        writer.send(message)
    assert received_messages(reader) == (sent, False)
    assert received_messages(reader) == ([], False)


def test_a_closed_connection_is_reported_with_its_last_messages(ends: tuple[Any, Any]) -> None:
    reader, writer = ends
    last = ClientMessage(ClientState.READY, worker_pid=5)
    writer.send(last)
    writer.close()
    assert received_messages(reader) == ([last], True)


def test_a_client_that_died_while_it_sent_a_message_is_closed(ends: tuple[Any, Any]) -> None:
    reader, writer = ends
    os.write(writer.fileno(), (1000).to_bytes(4, "big") + b"the beginning")
    writer.close()
    assert received_messages(reader) == ([], True)


def test_a_task_survives_its_journey() -> None:
    task = ClientTask("/socket", "reference", Workload.RANDOM_INFERENCE, 1.5, 3, ("a", "b"), (0.1, 0.2),
                      GraphSize(10, 1000), 7, 0.5, "/dump", True)  # fmt: skip
    assert call_in_child(lambda sent: sent, task) == task


def results() -> list[CrashResult]:
    passed = CrashResult("<device>", CRASH_TESTS[0], CrashOutcome.SUCCESS, "", 2_000_000_000, {"executed": 1234}, 5)
    hung = CrashResult("other", CRASH_TESTS[0], CrashOutcome.HANG, "nobody <replied>")
    unsupported = CrashResult("other", CRASH_TESTS[1], CrashOutcome.UNSUPPORTED, "no models")
    return [passed, hung, unsupported]


def test_TST_11_the_page_has_the_outcome_of_each_test_on_each_device() -> None:
    page = crash_page(results(), "a <machine>")
    assert "<script" not in page and "src=" not in page and "href=" not in page
    assert "MLTS crash tests: 1 of 3 failed" in page and "a &lt;machine&gt;" in page
    assert '<td class="good" title="1,234 steps in 2.0 s, 5 clients killed">SUCCESS <small>1,234</small></td>' in page
    assert "<b>HANG</b> parallel-inference-stress-8-threads on other: nobody &lt;replied&gt;" in page
    assert "1 SUCCESS, 1 HANG, 1 UNSUPPORTED" in page and "<td></td>" in page and "UNSUPPORTED</td>" in page


def test_a_page_without_failures_says_so() -> None:
    expected = replace(results()[1], test=SELF_TESTS[2])
    assert "all as expected" in crash_page([expected], "") and not expected.has_failed


def test_TST_11_the_csv_has_a_line_for_each_result() -> None:
    lines = crash_csv(results(), "2026").splitlines()
    assert lines[:2] == ["# 2026", "# device,target,test,outcome,expected,duration_s,killed,steps,reason"]
    name = "parallel-inference-stress-8-threads"
    assert lines[2] == f"<device>,parallel-inference-stress,{name},SUCCESS,SUCCESS,2.000,5,executed=1234,"
    assert lines[3] == f"other,parallel-inference-stress,{name},HANG,SUCCESS,0.000,0,,nobody <replied>"
    assert results()[1].as_json()["test"] == name and results()[1].as_json()["target"] == "parallel-inference-stress"
