"""Schedules of replays: when each execution is intended to start, and in which lane.

A lane executes one after the other, on a thread of its own. Executions that overlapped in the recording are in
different lanes, so a replay has as much concurrency as the application had. An execution is intended to start at its
time even if the one before it in its lane is late (open loop): its latency then includes the wait.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from nnfmq.hal.errors import InvalidArgument
from nnfmq.recording.recording_reader import RecordedExecution

__all__ = ["LANES_MAX", "ORIGINAL_SPEED", "ReplaySpeed", "ScheduledExecution", "parse_speed", "schedule_lanes"]

LANES_MAX = 64
"""Executions of more lanes wait in these."""


class ReplaySpeed(NamedTuple):
    """The recorded intervals divided by `value` (factor); `value` executions per s (rate); or without waiting (max)."""

    kind: Literal["factor", "rate", "max"]
    value: float = 1.0


ORIGINAL_SPEED = ReplaySpeed("factor")


class ScheduledExecution(NamedTuple):
    """An execution, and its intended start in ns from the start of the replay; None = after the one before it."""

    execution: RecordedExecution
    offset_ns: int | None


def parse_speed(text: str) -> ReplaySpeed:
    """Return the speed that a text gives: `original`, `max`, or a factor.

    Raises:
        InvalidArgument: If it gives none.
    """
    if text == "original":
        return ORIGINAL_SPEED
    if text == "max":
        return ReplaySpeed("max")
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 1e-6 <= factor <= 1e6:  # written so that NaN is rejected as well
        raise InvalidArgument(f"speed {text!r}: give `original`, `max`, or a factor such as 2 (from 1e-6 to 1e6)")
    return ReplaySpeed("factor", factor)


def schedule_lanes(executions: Sequence[RecordedExecution], speed: ReplaySpeed) -> list[list[ScheduledExecution]]:
    """Return the lanes of a replay, each in the order of its intended starts."""
    ordered = sorted(executions, key=lambda execution: execution.row.intended_ns)
    first_ns = ordered[0].row.intended_ns if ordered else 0
    lanes: list[list[ScheduledExecution]] = []
    free: list[tuple[int, int]] = []  # the end of each lane's last execution in the recording, and the lane
    for index, execution in enumerate(ordered):
        scheduled = ScheduledExecution(execution, _offset_ns(speed, execution.row.intended_ns - first_ns, index))
        if free and (free[0][0] <= execution.row.intended_ns or len(lanes) == LANES_MAX):
            lane = heapq.heappop(free)[1]
        else:
            lane = len(lanes)
            lanes.append([])
        lanes[lane].append(scheduled)
        heapq.heappush(free, (execution.row.end_ns, lane))
    return lanes


def _offset_ns(speed: ReplaySpeed, recorded_ns: int, index: int) -> int | None:
    if speed.kind == "max":
        return None
    return round(recorded_ns / speed.value) if speed.kind == "factor" else round(index * 1e9 / speed.value)
