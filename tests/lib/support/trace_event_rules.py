"""The rules of the published Trace Event Format for single events; `trace_checks` has those for slices and flows.

The format is that of the document "Trace Event Format" to which ui.perfetto.dev refers, in its JSON Object Format. They
are checked here because Perfetto's trace processor is not at hand everywhere: its Python package downloads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

__all__ = ["violations"]

Event = Mapping[str, Any]
_PHASES = ("X", "M", "i", "s", "f")
"""Those that nnfmq writes: complete events, metadata, instant events, begins and ends of flows."""
_METADATA = {"process_name": "name", "process_labels": "labels", "thread_name": "name"}


def violations(document: Mapping[str, Any]) -> list[str]:
    """Return what is wrong in a trace in the JSON Object Format; nothing if it obeys the rules."""
    events = document.get("traceEvents")
    if not isinstance(events, list):
        return ["traceEvents is no array"]
    found = [*_document(document), *(text for number, event in enumerate(events) for text in _event(number, event))]
    return found or [*_flows(events)]


def _document(document: Mapping[str, Any]) -> Iterator[str]:
    if document.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        yield f"displayTimeUnit is {document['displayTimeUnit']!r}"
    if not isinstance(document.get("otherData", {}), dict):
        yield "otherData is no object"


def _event(number: int, event: Any) -> Iterator[str]:
    if not isinstance(event, dict) or event.get("ph") not in _PHASES:
        yield f"event {number} has no phase of {', '.join(_PHASES)}"
        return
    if not isinstance(event.get("name"), str) or not event["name"]:
        yield f"event {number} has no name"
    if any(type(event.get(key)) is not int for key in ("pid", "tid")):
        yield f"event {number} has no pid and tid"
    if not isinstance(event.get("args", {}), dict):
        yield f"event {number}: args is no object"
    elif event["ph"] == "M" and _METADATA.get(event.get("name", ""), "") not in event.get("args", {}):
        yield f"event {number}: unknown metadata"
    if event["ph"] != "M":
        yield from _timed(number, event)


def _timed(number: int, event: Event) -> Iterator[str]:
    phase = event["ph"]
    if not _is_time(event.get("ts")):
        yield f"event {number} has no ts"
    if phase == "X" and not _is_time(event.get("dur")):
        yield f"event {number} has no dur"
    if phase == "i" and event.get("s", "t") not in ("g", "p", "t"):
        yield f"event {number}: the scope of an instant event is {event['s']!r}"
    if phase in "sf" and not isinstance(event.get("id"), str | int):
        yield f"event {number}: a flow has no id"
    if "bp" in event and (phase != "f" or event["bp"] != "e"):
        yield f"event {number}: bp is {event['bp']!r}"


def _is_time(value: object) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool) and value >= 0


def _flows(events: Sequence[Event]) -> Iterator[str]:
    """Viewers join the events of a flow by category, name and id."""
    flows: dict[object, set[tuple[object, object]]] = defaultdict(set)
    for event in events:
        if event["ph"] in ("s", "f"):
            flows[event["id"]].add((event.get("cat"), event["name"]))
    for flow, keys in flows.items():
        if len(keys) > 1:
            yield f"flow {flow} has {len(keys)} categories or names"
