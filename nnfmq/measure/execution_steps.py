"""Steps of a prepared model in each execution mode of the driver: arrays in, new arrays out.

That is the call that an application makes, with the copies into and out of shared memory. No call has a timeout: the
process that measures is ended from outside if it hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING

from nnfmq.measure.steps import Array, Step
from nnfmq.runtime.mapped_arrays import MappedArrays
from nnfmq.runtime.model_state import require_no_state

if TYPE_CHECKING:
    from nnfmq.runtime.compiled_model import CompiledModel

__all__ = ["MODES", "STAGES", "Stages", "opened_mode"]

Stages = Callable[[Sequence[Array]], tuple[int, int, int, int]]
"""Executes once; returns the execution's latency, and its parts in queues, driver and engine, in ns (`STAGES`)."""
STAGES = ("latency", "queue", "driver", "engine")


@contextmanager
def opened_mode(mode: str, prepared: CompiledModel) -> Iterator[tuple[Step, Stages | None]]:
    """Yield the step of an execution mode of `MODES`, and of a burst the stages of an execution.

    Raises:
        InvalidArgument: If the mode cannot execute this model: see docs/how-to/choose-execution-mode.md.
    """
    with MODES[mode](prepared) as opened:
        yield opened


@contextmanager
def _burst(prepared: CompiledModel) -> Iterator[tuple[Step, Stages | None]]:
    with prepared.burst() as burst:
        execute = burst.execute

        def stages(inputs: Sequence[Array]) -> tuple[int, int, int, int]:
            execute(*inputs)
            last = burst.last
            return last.latency_ns, last.queue_ns, last.driver_ns, last.engine_ns

        yield lambda inputs: execute(*inputs), stages


@contextmanager
def _reusable(prepared: CompiledModel) -> Iterator[tuple[Step, Stages | None]]:
    with prepared.create_reusable_execution() as execution:
        compute = execution.compute
        yield lambda inputs: compute(*inputs), None


@contextmanager
def _synchronous(prepared: CompiledModel) -> Iterator[tuple[Step, Stages | None]]:
    execute = prepared.execute
    yield lambda inputs: execute(*inputs), None


@contextmanager
def _asynchronous(prepared: CompiledModel) -> Iterator[tuple[Step, Stages | None]]:
    require_no_state(prepared.states, "execute")
    execute = prepared.execute_async
    yield lambda inputs: execute(*inputs).result(), None


@contextmanager
def _fenced(prepared: CompiledModel) -> Iterator[tuple[Step, Stages | None]]:
    require_no_state(prepared.states, "execute")

    def step(inputs: Sequence[Array]) -> Sequence[Array]:
        with prepared.execute_fenced(*inputs) as launched:
            return launched.result()

    yield step, None


class _MappedRequest:
    """The arrays of an AIDL burst; `arrays` is None once its memory is closed."""

    def __init__(self, prepared: CompiledModel, resources: ExitStack) -> None:
        self.arrays: MappedArrays | None = MappedArrays.create(prepared.handle, resources, "an AIDL burst")
        resources.callback(self._discard)
        self._burst = resources.enter_context(prepared.aidl_burst())
        for memory in self.arrays.memories:
            self._burst.cache_memory(memory)

    def _discard(self) -> None:
        self.arrays = None  # its views would keep the memory mapped

    def step(self, inputs: Sequence[Array]) -> Sequence[Array]:
        """Copy the inputs in, execute, and return copies of the outputs."""
        arrays = self.arrays
        assert arrays is not None
        arrays.copy_in(inputs)
        self._burst.execute_synchronously(arrays.request)
        return arrays.copy_out(None)


@contextmanager
def _aidl_burst(prepared: CompiledModel) -> Iterator[tuple[Step, Stages | None]]:
    require_no_state(prepared.states, "execute")
    with ExitStack() as resources:
        yield _MappedRequest(prepared, resources).step, None


MODES: dict[str, Callable[[CompiledModel], AbstractContextManager[tuple[Step, Stages | None]]]] = {
    "burst": _burst,
    "reusable": _reusable,
    "sync": _synchronous,
    "async": _asynchronous,
    "fenced": _fenced,
    "aidl-burst": _aidl_burst,
}
"""By the names that `nnfmq bench --mode` takes; the fastest first."""
