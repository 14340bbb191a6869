"""Steps of a prepared model in each execution mode of the driver: arrays in, new arrays out.

That is the call that an application makes, with the copies into and out of shared memory. No call has a timeout: the
process that measures is ended from outside if it hangs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nnfmq.client.model.array_request import MappedArrays
from nnfmq.client.model.handle import initial_values, require_no_state
from nnfmq.hal.tensor_info import TensorInfo

if TYPE_CHECKING:
    from nnfmq.client.model.compiled_model import CompiledModel

__all__ = [
    "MODES",
    "STAGES",
    "Array",
    "Runner",
    "Stages",
    "Step",
    "fastest_variant",
    "make_step",
    "opened_mode",
    "random_input",
    "states_of",
    "timed",
]


# ----------------------------------------------------------------------------------------------------------------------
# Steps of a loaded model, which are timed, and the choice of the fastest API variant.
#
# A *step* writes the inputs, executes the model and reads the outputs. States of a recurrent model are copied from one
# step's outputs to the next step's inputs, within the step, unless the runtime keeps them itself.


Array: TypeAlias = npt.NDArray[Any]
Step: TypeAlias = Callable[[Sequence[Array]], Sequence[Array]]
"""Executes once with these inputs, and returns the outputs."""
_TRIALS_PER_VARIANT = 20  # of each API variant, to find the fastest


@dataclass(frozen=True, slots=True)
class Runner:
    """A loaded model. `variants` are steps by API variant, of which the fastest is used.

    `pids` are those of other processes that compute for it.
    """

    variants: Mapping[str, Step]
    pids: tuple[int, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)


def random_input(info: TensorInfo, random: np.random.Generator) -> Array:
    """Return a random input: quantized values of the type's full range, or floats in [0, 1)."""
    dtype = np.dtype(info.dtype)
    if dtype.kind == "f":
        return random.random(info.shape).astype(dtype)
    low, high = (0, 2) if dtype.itemsize > 1 else (np.iinfo(dtype).min, np.iinfo(dtype).max + 1)
    return random.integers(low, high, info.shape).astype(dtype)


def states_of(model: Any) -> tuple[Array, ...]:
    """Return the initial values of a model's states, which a runtime without states has as inputs."""
    return initial_values(getattr(model, "states", ()))


def make_step(
    input_count: int, input_buffers: Sequence[Array], output_buffers: Sequence[Array], run: Callable[[], object]
) -> Step:
    """Return the step of a runtime that reads `input_buffers` and writes `output_buffers` in place.

    Buffers beyond the first `input_count` are the model's states.
    """
    buffers, states = input_buffers[:input_count], input_buffers[input_count:]
    first_state = len(output_buffers) - len(states)
    new_outputs, state_outputs = output_buffers[:first_state], output_buffers[first_state:]
    state_copies = list(zip(states, state_outputs, strict=True))

    def step(inputs: Sequence[Array]) -> list[Array]:
        for buffer, array in zip(buffers, inputs, strict=True):
            buffer[...] = array
        run()
        outputs = [array.copy() for array in new_outputs]
        for state, new_state in state_copies:
            state[...] = new_state
        return outputs

    return step


def fastest_variant(variants: Mapping[str, Step], inputs: Sequence[Array]) -> tuple[Step, str]:
    """Return the variant with the least median time, and its name; the trials of several are interleaved."""
    if len(variants) == 1:
        return next((step, name) for name, step in variants.items())
    times: dict[str, list[int]] = {name: [] for name in variants}
    for name, step in [*variants.items()] * _TRIALS_PER_VARIANT:
        times[name] += timed(step, inputs, 1)
    best = min(times, key=lambda name: statistics.median(times[name]))
    return variants[best], best


def timed(step: Step, inputs: Sequence[Array], count: int) -> list[int]:
    """Return the time of each of `count` steps, in ns."""
    clock, samples = time.perf_counter_ns, [0] * count
    for index in range(count):
        begin = clock()
        step(inputs)
        samples[index] = clock() - begin
    return samples


# ----------------------------------------------------------------------------------------------------------------------
# Steps of a prepared model in each execution mode of the driver: arrays in, new arrays out.


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
