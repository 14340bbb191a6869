"""ExecutionResult: the result of a successful execution, in every execution mode."""

from __future__ import annotations

from typing import NamedTuple

from nnfmq.hal.timing import Timing
from nnfmq.hal.types import OutputShape


class ExecutionResult(NamedTuple):
    """Output shapes as the driver reported them (empty if it reported none), and the timing in ns."""

    shapes: tuple[OutputShape, ...]
    timing: Timing
