"""Results of successful executions: ExecutionResult, in every execution mode, and the durations of a burst's."""

from __future__ import annotations

from typing import NamedTuple, Self

from msgspec import Struct

from nnfmq.hal.timing import NO_TIMING, Timing
from nnfmq.hal.types import OutputShape

__all__ = ["ExecutionInfo", "ExecutionResult"]


class ExecutionResult(NamedTuple):
    """Output shapes as the driver reported them (empty if it reported none), and the timing in ns."""

    shapes: tuple[OutputShape, ...]
    timing: Timing


class ExecutionInfo(Struct, frozen=True):
    """Durations of one burst execution, in ns; 0 if the driver did not report them.

    latency_ns = queue_ns (both queues, including wake-ups) + driver_ns (decoding, binding, replying) + engine_ns.
    `timing` has the HAL's two durations if `measure` was set.
    """

    latency_ns: int
    queue_ns: int
    driver_ns: int
    engine_ns: int
    timing: Timing = NO_TIMING

    @classmethod
    def within(cls, latency_ns: int, driver_ns: int, engine_ns: int, timing: Timing) -> Self:
        """Return the durations of an execution whose driver reports its time, and that of the engine.

        The driver can report anything: its values are limited to what is possible.
        """
        driver_ns = min(max(driver_ns, 0), latency_ns)
        engine_ns = min(max(engine_ns, 0), driver_ns)
        return cls(latency_ns, latency_ns - driver_ns, driver_ns - engine_ns, engine_ns, timing)
