"""What the runners of model_bench.py are given and return: the job, the trials, the first message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import nnfmq
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.measure.steps import Array, random_input

if TYPE_CHECKING:
    from nnfmq.hal.types import Model

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


def load_source(source: Path | GeneratedModel) -> Any:
    """Return the generated model itself, or the loaded file."""
    return source if isinstance(source, GeneratedModel) else nnfmq.load(source)


def inputs_for(infos: Sequence[TensorInfo]) -> list[Array]:
    """Return random arrays, the same for every runner."""
    random = np.random.default_rng(_SEED)
    return [random_input(info, random) for info in infos]
