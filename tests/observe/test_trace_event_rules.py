"""The rules of the Trace Event Format that the tests apply to traces: each finds what violates it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from support.trace_event_rules import violations

from nnfmq.observe.trace_files import Slice, ThreadTimes, Trace, write_trace
from nnfmq.observe.trace_layout import request_base

REQUEST = request_base(30, 2) | 7
PLACES = {"M": 0, "X": 1, "s": 4, "f": 5, "i": 8}
"""Where the first event of each phase is in the trace below."""


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    """A trace with an event of each phase: three slices, two flows, a wait for a CPU."""
    slices = [
        Slice(20, 21, 1_000, 2_000, "[NN_LR_PIO]write", REQUEST),
        Slice(20, 21, 2_000, 8_500, "[NN_LI_PE]wait", REQUEST),
        Slice(30, 31, 3_001, 8_000, "[NN_LD_PE]request", REQUEST),
    ]
    write_trace(
        Trace(slices, {20: "application"}, [ThreadTimes(30, 31, 100, 4_000, 77, 3_000)], lost=3), tmp_path / "out.json"
    )
    found: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    return found


def test_a_written_trace_obeys_the_rules(document: dict[str, Any]) -> None:
    assert violations(document) == []
    phases = [event["ph"] for event in document["traceEvents"]]
    assert {phase: phases.index(phase) for phase in phases} == PLACES


@pytest.mark.parametrize(
    ("phase", "change", "text"),
    [
        ("X", {"ph": "Q"}, "no phase of X, M, i, s, f"),
        ("X", {"name": ""}, "has no name"),
        ("X", {"pid": "20"}, "has no pid and tid"),
        ("X", {"tid": None}, "has no pid and tid"),
        ("X", {"args": [1]}, "args is no object"),
        ("X", {"ts": "1.5"}, "has no ts"),
        ("X", {"ts": -1}, "has no ts"),
        ("X", {"dur": None}, "has no dur"),
        ("i", {"s": "thread"}, "scope of an instant event is 'thread'"),
        ("s", {"id": None}, "a flow has no id"),
        ("s", {"bp": "e"}, "bp is 'e'"),
        ("f", {"bp": "s"}, "bp is 's'"),
        ("f", {"name": "other"}, "has 2 categories or names"),
        ("f", {"cat": "other"}, "has 2 categories or names"),
        ("M", {"name": "process_colour"}, "unknown metadata"),
        ("M", {"args": {}}, "unknown metadata"),
    ],
)
def test_an_event_that_violates_a_rule_is_found(
    document: dict[str, Any], phase: str, change: dict[str, Any], text: str
) -> None:
    changed = copy.deepcopy(document)
    changed["traceEvents"][PLACES[phase]].update(change)
    (found,) = violations(changed)
    assert text in found


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"traceEvents": {}}, "traceEvents is no array"),
        ({"displayTimeUnit": "us"}, "displayTimeUnit is 'us'"),
        ({"otherData": []}, "otherData is no object"),
    ],
)
def test_a_document_that_violates_a_rule_is_found(document: dict[str, Any], change: dict[str, Any], text: str) -> None:
    assert violations(document | change) == [text]


def test_an_event_that_is_no_object_is_found(document: dict[str, Any]) -> None:
    assert violations(document | {"traceEvents": [1]}) == ["event 0 has no phase of X, M, i, s, f"]
