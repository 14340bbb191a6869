"""`tools/burst_parts.py`: the parts that it reports, and that they do what they are named after."""

from __future__ import annotations

import json
import os

import burst_parts
import pytest

PARTS = [
    "client: execute(out=outputs)",
    "client: execute(array)",
    "client: ..., out=outputs, timeout",
    "client: send",
    "client: count it",
    "client: receive",
    "worker: from receive to the next",
    "worker: run",
    "worker: run of the program",
    "worker: send",
]


def test_it_reports_each_part_and_leaves_the_process_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    allowed = os.sched_getaffinity(0)
    assert burst_parts.main(["--calls", "20", "--json"]) == 0
    times = json.loads(capsys.readouterr().out)
    assert list(times) == PARTS
    assert all(least <= tenth for least, tenth in times.values())
    assert os.sched_getaffinity(0) == allowed


def test_a_line_has_the_name_and_both_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(burst_parts, "measure", lambda _calls: {"client: send": (1200, 1300)})
    assert burst_parts.main([]) == 0
    assert capsys.readouterr().out.split() == ["client:", "send", "1,200", "1,300"]


def test_the_worker_answers_the_packet_of_a_client() -> None:
    _, packet, reply = burst_parts.client_times(5)
    with burst_parts.answering_worker() as (server, requests, results, _execution, sink):
        for _ in range(2):
            assert requests.send(packet)
            server._receive_and_handle()
            assert results.receive(0, 0) == reply
            assert sink[0] == 1
            sink[0] = 0
