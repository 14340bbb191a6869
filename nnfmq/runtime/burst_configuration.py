"""configure_burst: an ordinary burst, or one that shows its executions to the observers of its model."""

from __future__ import annotations

from nnfmq.hal.errors import NnfmqError
from nnfmq.runtime.burst_controller import Burst
from nnfmq.runtime.failed_execution import can_execute_again, model_on_cpu
from nnfmq.runtime.model_handle import ModelHandle

__all__ = ["configure_burst"]


def configure_burst(
    model: ModelHandle, polling_window_us: float | None, deadline_ns: int | None, *, with_memory: bool = True
) -> Burst:
    """Configure a burst and return it, which the caller closes; blocks. Arguments and errors of `Burst.configure`.

    If the driver has died, the model is prepared again in the one that has replaced it; otherwise, or if that fails,
    the burst is one of the model on the CPU device, if the model has a fallback.
    """
    try:
        return _configure(model, polling_window_us, deadline_ns, with_memory)
    except NnfmqError as failure:
        if not can_execute_again(model, failure, deadline_ns):
            raise
        error = failure
    if model.can_recover(error):
        try:
            model.recover(deadline_ns)
            return _configure(model, polling_window_us, deadline_ns, with_memory)
        except NnfmqError as failure:
            error = failure
    return _configure(model_on_cpu(model, error, deadline_ns), polling_window_us, deadline_ns, with_memory)


def _configure(
    model: ModelHandle, polling_window_us: float | None, deadline_ns: int | None, with_memory: bool
) -> Burst:
    kind = Burst
    if model.observed is not None:
        from nnfmq.runtime.observed_burst import ObservedBurst

        kind = ObservedBurst
    return kind.configure(model, polling_window_us, deadline_ns, with_memory=with_memory)
