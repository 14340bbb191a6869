"""An independent reader of Chrome's JSON, and what must hold in every trace. It shares no code with `nnfmq.observe`."""

from __future__ import annotations

import json
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

from support.trace_event_rules import violations

Event = dict[str, Any]


def load(path: Path) -> list[Event]:
    """Return the events of a file; times are exact. Fails unless each obeys the format."""
    document = json.loads(path.read_text(encoding="utf-8"), parse_float=Decimal)
    assert violations(document) == []
    events: list[Event] = document["traceEvents"]
    return events


def named(events: list[Event], name: str) -> list[Event]:
    """Return the slices with a name."""
    return [event for event in events if event["ph"] == "X" and event["name"] == name]


def check(events: list[Event]) -> None:
    """Fail unless slices of each thread nest, times of each track are monotonic, and flows join two slices."""
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            tracks[event["pid"], event["tid"]].append(event)
    for slices in tracks.values():
        _check_track(slices)
    _check_flows(events, tracks)


def _check_track(slices: list[Event]) -> None:
    begins = [event["ts"] for event in slices]
    assert begins == sorted(begins), "the slices of a track are in the order of their begin"
    ends: list[Decimal] = []
    for event in slices:
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        end = event["ts"] + event["dur"]
        assert not ends or end <= ends[-1], f"overlaps the slice around it without nesting: {event}"
        ends.append(end)


def _check_flows(events: list[Event], tracks: dict[tuple[int, int], list[Event]]) -> None:
    flows: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            flows[event["id"]].append(event)
    for identifier, ends in flows.items():
        assert [end["ph"] for end in ends] == ["s", "f"], f"flow {identifier} has a start and an end"
        for end in ends:
            around = tracks[end["pid"], end["tid"]]
            assert any(s["ts"] <= end["ts"] <= s["ts"] + s["dur"] for s in around), f"outside of slices: {end}"
