"""configure_burst: an ordinary burst, or one that shows its executions to the observers of its model."""

from __future__ import annotations

from nnfmq.runtime.burst_controller import Burst
from nnfmq.runtime.mapped_arrays import MappedArrays
from nnfmq.runtime.model_handle import ModelHandle
from nnfmq.verbose_log import vlog

__all__ = ["configure_burst"]


def configure_burst(
    model: ModelHandle,
    polling_window_us: float | None,
    deadline_ns: int | None,
    *,
    with_memory: bool = True,
    arrays: MappedArrays | None = None,
) -> Burst:
    """Configure a burst and return it, which the caller closes; blocks. Arguments and errors of `Burst.configure`."""
    kind = Burst
    if model.observed is not None:
        from nnfmq.runtime.observed_burst import ObservedBurst

        kind = ObservedBurst
    vlog("execution", "a burst on %s: its executions are not logged", model.device)
    return kind.configure(model, polling_window_us, deadline_ns, with_memory=with_memory, arrays=arrays)
