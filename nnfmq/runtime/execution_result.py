"""What executions answer, and what is asked of them: the same for every path."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple, cast

from nnfmq.hal.timing import Timing, from_seconds, to_limit_field
from nnfmq.hal.types import (
    BufferToken,
    ExecutionConfig,
    LoopTimeoutDurationNs,
    MeasureTiming,
    OutputShape,
    Pool,
    SharedPool,
)
from nnfmq.runtime.connection import Connection

_log = logging.getLogger("nnfmq.client")


class ExecutionResult(NamedTuple):
    """How an execution went: the shapes that the driver reports, none where it reports none, and the timing."""

    shapes: tuple[OutputShape, ...]
    timing: Timing


def to_wire_deadline(connection: Connection, deadline_ns: int | None) -> int:
    """Return a deadline as a message has it; -1 where the interface has none: then only the wait here ends."""
    return to_limit_field(deadline_ns if connection.has_deadlines else None)


def make_execution_config(measure: bool, loop_timeout: float | None) -> ExecutionConfig:
    """Return the configuration of an execution; a loop timeout (seconds) above the maximum is cut, with a warning.

    Raises InvalidArgument for one below 0. (CF-5)
    """
    asked = MeasureTiming.YES if measure else MeasureTiming.NO
    loop_timeout_ns = from_seconds(loop_timeout, "a loop timeout")
    if loop_timeout_ns is None:
        return ExecutionConfig(asked)
    longest_ns = int(LoopTimeoutDurationNs.MAXIMUM)
    if loop_timeout_ns > longest_ns:
        _log.warning("a loop timeout of %g s is cut to the maximum of %g s", loop_timeout, longest_ns / 1e9)
        return ExecutionConfig(asked, longest_ns)
    return ExecutionConfig(asked, loop_timeout_ns)


def memory_fds(pools: Sequence[Pool | BufferToken]) -> list[int]:
    """Return the descriptors of the memories among pools, judged by `memory_to_data`; they stay their owners'."""
    return [cast(SharedPool, pool).fileno() for pool in pools if not isinstance(pool, BufferToken)]
