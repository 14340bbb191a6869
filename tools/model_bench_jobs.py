"""What the runners of model_bench.py are given and return: the job, the trials, the step that is timed.

A *step* writes the input, executes the model and reads the output. States of a recurrent model are copied from one
step's outputs to the next step's inputs, within the step, unless the runtime keeps them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from measure_capabilities import random_input

import nnfmq
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.runtime.model_state import initial_values

if TYPE_CHECKING:
    from nnfmq.hal.types import Model

Array = npt.NDArray[Any]
Step = Callable[[], Sequence[Array]]
_SEED = 7


@dataclass(frozen=True, slots=True)
class GeneratedModel:
    """A model that is not from a file, with the attributes of `nnfmq.LoadedModel`."""

    model: Model
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


@dataclass(frozen=True, slots=True)
class RunnerJob:
    """One runner; sent to its process. It computes on `cpus`, one thread per CPU."""

    kind: str
    source: Path | GeneratedModel
    cpus: tuple[int, ...]
    client_cpus: tuple[int, ...] = ()
    window_us: int | None = None  # None: the default window
    connect: str = "embedded"
    limit_s: int = 120


@dataclass(frozen=True, slots=True)
class Trial:
    """A request to a runner: `count` steps that are timed, after `warm_up` steps that are not."""

    count: int
    warm_up: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The first message of a runner: its processes, its details, and the outputs of its first step."""

    pids: tuple[int, ...]
    details: dict[str, Any]
    outputs: list[Array]


@dataclass(frozen=True, slots=True)
class Runner:
    """A loaded model. `variants` are steps by API variant, of which the fastest is used."""

    variants: Mapping[str, Step]
    pids: tuple[int, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)


def load_source(source: Path | GeneratedModel) -> Any:
    """Return the generated model itself, or the loaded file."""
    return source if isinstance(source, GeneratedModel) else nnfmq.load(source)


def inputs_for(infos: Sequence[TensorInfo]) -> list[Array]:
    """Return random arrays, the same for every runner."""
    random = np.random.default_rng(_SEED)
    return [random_input(info, random) for info in infos]


def states_of(model: Any) -> tuple[Array, ...]:
    """Return the initial values of a model's states, which a runtime without states has as inputs."""
    return initial_values(getattr(model, "states", ()))


def make_step(inputs: Sequence[Array], input_buffers: Sequence[Array], output_buffers: Sequence[Array],
              run: Callable[[], object]) -> Step:  # fmt: skip
    """Return the step of a runtime that reads `input_buffers` and writes `output_buffers` in place.

    Buffers beyond those of `inputs` are the model's states.
    """
    writes = list(zip(input_buffers, inputs, strict=False))
    states = input_buffers[len(inputs) :]
    first_state = len(output_buffers) - len(states)
    new_outputs, state_outputs = output_buffers[:first_state], output_buffers[first_state:]
    state_copies = list(zip(states, state_outputs, strict=True))

    def step() -> list[Array]:
        for buffer, array in writes:
            buffer[...] = array
        run()
        outputs = [array.copy() for array in new_outputs]
        for state, new_state in state_copies:
            state[...] = new_state
        return outputs

    return step
