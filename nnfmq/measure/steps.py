"""Steps of a loaded model, which are timed, and the choice of the fastest API variant.

A *step* writes the inputs, executes the model and reads the outputs. States of a recurrent model are copied from one
step's outputs to the next step's inputs, within the step, unless the runtime keeps them itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.runtime.model_state import initial_values

__all__ = ["Array", "Runner", "Step", "fastest_variant", "make_step", "random_input", "states_of", "timed"]

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
