"""Results of successful executions: ExecutionResult, in every execution mode, and the durations of a burst's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from nnfmq.hal.timing import NO_TIMING, Timing
from nnfmq.hal.types import OutputShape

__all__ = ["ExecutionInfo", "ExecutionResult"]


class ExecutionResult(NamedTuple):
    """Output shapes as the driver reported them (empty if it reported none), and the timing in ns."""

    shapes: tuple[OutputShape, ...]
    timing: Timing


@dataclass(frozen=True, slots=True)
class ExecutionInfo:
    """Durations of one burst execution, in ns; 0 if the driver did not report them.

    latency_ns = queue_ns (both queues, including wake-ups) + driver_ns (decoding, binding, replying) + engine_ns.
    `timing` has the HAL's two durations if `measure` was set.
    """

    latency_ns: int
    queue_ns: int
    driver_ns: int
    engine_ns: int
    timing: Timing = NO_TIMING
