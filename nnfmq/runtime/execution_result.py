"""What executions answer, and what is asked of them: the same for every path."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple, cast

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import (
    BufferToken,
    ExecutionConfig,
    LoopTimeoutDurationNs,
    MeasureTiming,
    OutputShape,
    Pool,
    SharedPool,
    Timing,
)
from nnfmq.runtime.connection import Connection

NO_LIMIT = -1
_log = logging.getLogger("nnfmq.client")


class ExecutionResult(NamedTuple):
    """How an execution went: the shapes that the driver reports, none where it reports none, and the timing."""

    shapes: tuple[OutputShape, ...]
    timing: Timing


def to_wire_limit(limit_ns: int | None) -> int:
    """Return a deadline or a duration as messages have it."""
    return NO_LIMIT if limit_ns is None else limit_ns


def to_wire_deadline(connection: Connection, deadline_ns: int | None) -> int:
    """Return a deadline as a message has it; -1 where the interface has none: then only the wait here ends."""
    return to_wire_limit(deadline_ns if connection.has_deadlines else None)


def make_execution_config(measure: bool, loop_timeout: float | None) -> ExecutionConfig:
    """Return the configuration of an execution; a loop timeout (seconds) above the maximum is cut, with a warning.

    Raises InvalidArgument for one below 0. (CF-5)
    """
    asked = MeasureTiming.YES if measure else MeasureTiming.NO
    if loop_timeout is None:
        return ExecutionConfig(asked)
    if not loop_timeout >= 0:
        raise InvalidArgument(f"a loop timeout is 0 or more seconds, or None for the default; got {loop_timeout}")
    longest = int(LoopTimeoutDurationNs.MAXIMUM)
    if loop_timeout * 1e9 > longest:
        _log.warning("a loop timeout of %g s is cut to the maximum of %g s", loop_timeout, longest / 1e9)
        return ExecutionConfig(asked, longest)
    return ExecutionConfig(asked, round(loop_timeout * 1e9))


def to_duration_ns(duration: float | None) -> int | None:
    """Return a duration (seconds) in ns; None = no limit. Raises InvalidArgument below 0."""
    if duration is None:
        return None
    if not duration >= 0:  # nor a NaN
        raise InvalidArgument(f"a duration is 0 or more seconds, or None for no limit; got {duration}")
    return round(min(duration, 9e9) * 1e9)


def memory_fds(pools: Sequence[Pool | BufferToken]) -> list[int]:
    """Return the descriptors of the memories among pools, judged by `memory_to_data`; they stay their owners'."""
    return [cast(SharedPool, pool).fileno() for pool in pools if not isinstance(pool, BufferToken)]
