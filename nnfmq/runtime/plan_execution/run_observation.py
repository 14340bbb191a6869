"""What observers, the trace and the verbose log are told of an execution of a plan (OBS-2, OBS-5, OBS-7).

The trace has a slice of the layer LR around each execution on the caller's thread, in it one for each step, and one for
what the runtime does itself between two steps: it interprets IF and WHILE, and copies the values of loops. Executions
that are continued on the watcher thread have none, because their slices would not nest.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nnfmq.execution_observers import ObservedExecution
from nnfmq.hal.errors import ErrorStatus, NnfmqError
from nnfmq.hal.timing import NO_TIME
from nnfmq.hal.types import HalExecutionMode
from nnfmq.verbose_log import vlog

if TYPE_CHECKING:
    from nnfmq.runtime.request_observation import ObservedModel

__all__ = ["INTERPRETATION_SLICE", "PLAN_SLICE", "RunObservation", "log_step", "step_slice"]

PLAN_SLICE = "[NN_LR_PE]plan"
INTERPRETATION_SLICE = "[NN_LR_PCO]interpretation"


class RunObservation:
    """One execution of a plan, for the observers of its model; `observed` is None if there are none.

    The first of `finish` and `fail` reports the execution; later calls do nothing. Times are those of the whole
    execution; a plan has no measured ones, and its tensors are not shown.
    """

    __slots__ = ("_begin_ns", "_mode", "_observed")

    def __init__(self, observed: ObservedModel | None, mode: HalExecutionMode) -> None:
        self._observed = observed
        self._mode = mode
        self._begin_ns = time.monotonic_ns() if observed is not None else 0

    def finish(self) -> None:
        """Report success."""
        self._report(ErrorStatus.NONE)

    def fail(self, error: NnfmqError) -> None:
        """Report an error."""
        self._report(error.status)

    def _report(self, status: ErrorStatus) -> None:
        observed, self._observed = self._observed, None
        if observed is not None:
            observed.report(
                ObservedExecution(
                    self._mode, status, self._begin_ns, self._begin_ns, time.monotonic_ns(), None,
                    NO_TIME, NO_TIME, None, None,
                )
            )  # fmt: skip


def step_slice(step: int | None, device: str, is_on_cpu: bool) -> str:
    """Return the name of the slice of a step; `step` None = the whole model, as a fallback."""
    if step is None:
        return "[NN_LR_PE]fallback: whole model"
    return f"[NN_LR_PE]fallback: step {step}" if is_on_cpu else f"[NN_LR_PE]step {step} on {device}"


def log_step(step: int | None, device: str, is_on_cpu: bool) -> None:
    """Log which step is executed next, and where."""
    if step is None:
        vlog("execution", "the CPU executes the whole model")
    else:
        vlog("execution", "step %d on %s", step, "the CPU" if is_on_cpu else device)
