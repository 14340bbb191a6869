"""The end of a warm-up: when the last windows have the same latency and throughput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["STABLE_WINDOWS", "WarmUpWindow", "are_stable"]

STABLE_WINDOWS = 3  # as perf_analyzer has it


@dataclass(frozen=True, slots=True)
class WarmUpWindow:
    """Latency (a percentile, in ns) and requests per second in one window of a warm-up."""

    latency_ns: float
    per_second: float


def are_stable(windows: Sequence[WarmUpWindow], percent: float) -> bool:
    """Return True if latency and throughput of the last three windows are within `percent` of their mean."""
    last = windows[-STABLE_WINDOWS:]
    return len(last) == STABLE_WINDOWS and all(
        _is_within([getattr(window, name) for window in last], percent / 100) for name in ("latency_ns", "per_second")
    )


def _is_within(values: Sequence[float], share: float) -> bool:
    mean = sum(values) / len(values)
    return all(abs(value - mean) <= share * mean for value in values)
