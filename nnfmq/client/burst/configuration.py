"""configure_burst: a burst of a model on one device, of the kind that the model needs, where it can be executed."""

from __future__ import annotations

from functools import partial

from nnfmq.base.verbose_log import vlog
from nnfmq.client.burst.burst import Burst
from nnfmq.client.connection.garbage import catch_up
from nnfmq.client.execution.synchronous import model_on_cpu
from nnfmq.client.model.array_request import MappedArrays, has_unknown_shapes
from nnfmq.client.model.handle import ModelHandle
from nnfmq.hal.errors import NnfmqError, ResourceExhaustedTransient

__all__ = ["configure_burst"]


def configure_burst(
    model: ModelHandle,
    polling_window_us: float | None,
    deadline_ns: int | None,
    *,
    with_memory: bool = True,
    arrays: MappedArrays | None = None,
) -> Burst:
    """Configure a burst and return it, which the caller closes; blocks. Arguments and errors of `Burst.configure`.

    If the driver has died, the model is prepared again in the one that has replaced it; otherwise, or if that fails,
    the burst is one of the model on the CPU device, if the model has a fallback. If the driver has no resources for it,
    bursts that models keep for `execute` give way.
    """
    catch_up()

    def configure(target: ModelHandle) -> Burst:
        vlog("execution", "a burst on %s: its executions are not logged", target.device)
        kind: type[Burst] = Burst
        if with_memory and arrays is None and has_unknown_shapes(target):
            from nnfmq.client.burst.unfixed import UnfixedBurst  # few models

            kind = UnfixedBurst
        finish = partial(kind.configure, target, polling_window_us, deadline_ns, with_memory=with_memory, arrays=arrays)
        try:
            return finish()
        except ResourceExhaustedTransient:
            if not target.connection.close_own_bursts():
                raise
        return finish()

    error: NnfmqError | None = None
    try:
        try:
            return configure(model)
        except NnfmqError as failure:
            if not model.can_execute_again(failure, deadline_ns):
                raise
            error = failure
        if model.can_recover(error):
            try:
                return model.execute_again(error, deadline_ns, partial(configure, model))
            except NnfmqError as failure:
                error = failure
        cpu = model_on_cpu(model, error, deadline_ns)
    finally:
        del error  # this frame, to which it refers, would keep it
    return configure(cpu)
