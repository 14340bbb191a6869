"""Targets of the benchmarks: a value, its limit, the noise, and the outcome.

The noise is the range of the value over the rounds or readings. A value that differs from its limit by less than the
noise is "not measured", because another run could have the opposite outcome.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def upper_limit(text: str, values: Sequence[float], value: float, limit: float, unit: str) -> dict[str, Any]:
    """Return a target for --json: `value` is to be at most `limit`. `values` are those of the rounds."""
    noise = max(values) - min(values) if values else 0.0
    is_measured = abs(value - limit) >= noise
    return {
        "target": text, "value": value, "unit": unit, "limit": limit, "noise": noise, "sense": "at most",
        "met": value <= limit if is_measured else None,
    }  # fmt: skip


def lower_limit(text: str, values: Sequence[float], value: float, limit: float, unit: str) -> dict[str, Any]:
    """Return a target for --json: `value` is to be at least `limit`. `values` are those of the rounds."""
    target = upper_limit(text, values, value, limit, unit)
    is_met = None if target["met"] is None else value >= limit
    return target | {"sense": "at least", "met": is_met}


def failed(text: str, limit: float, unit: str) -> dict[str, Any]:
    """Return a target that is missed without a value, because what it limits failed."""
    return {"target": text, "value": None, "unit": unit, "limit": limit, "noise": 0.0, "sense": "at most", "met": False}


def outcome_text(target: Mapping[str, Any]) -> str:
    """Return "met", "missed", "not measured" (within the noise) or "not compared" (no value) for a reported target."""
    if target["met"] is None:
        return "not compared" if target["value"] is None else "not measured"
    return "met" if target["met"] else "missed"


def format_metric(value: float | None, unit: str) -> str:
    """Return a value with its unit for tables; `-` for None, which means that it was not measured."""
    if value is None:
        return "-"
    digits = 0 if value >= 1000 or value == int(value) else 2
    return f"{value:,.{digits}f} {unit}".strip()


def allowed_text(target: Mapping[str, Any]) -> str:
    """Return the limit of a target, for example "at most 1.50 ×"."""
    return f"{target['sense']} {format_metric(target['limit'], target['unit'])}"


def print_targets(screen: Any, targets: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of targets with their outcomes on a console of rich."""
    from nnfmq.cli.console import table

    rows = table("target", ">measured", ">noise", ">allowed", "")
    for target in targets:
        value, noise = (format_metric(target[name], target["unit"]) for name in ("value", "noise"))
        rows.add_row(target["target"], value, noise, allowed_text(target), outcome_text(target))
    screen.print(rows)
