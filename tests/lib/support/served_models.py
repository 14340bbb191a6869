"""Models of tests for a ModelServer, and the loop that runs a test of one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import nnfmq
from nnfmq.client.connection.prepare_arguments import FinishedModel
from nnfmq.hal.errors import ModelNotFound
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import Model
from nnfmq.serving.inference_service import InferRequest, ModelIndexEntry
from nnfmq.serving.providers import ProvidedModel
from support.drivers import LIMIT_S
from support.models import add_model, relu_model

Array = npt.NDArray[Any]


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on a new loop; hangs become errors."""

    async def limited() -> Any:
        async with asyncio.timeout(LIMIT_S):
            return await main

    return asyncio.run(limited())


@dataclass(frozen=True)
class TestModel:
    """A model, how many independent rows it has, and the device that executes it."""

    __test__ = False

    model: Model | FinishedModel | Path
    batch: int = 1
    device: str = "reference"


def named(model: Model, inputs: Mapping[str, tuple[int, ...]], outputs: Mapping[str, tuple[int, ...]]) -> FinishedModel:
    """Return a model of floats whose inputs and outputs have names."""
    given, results = (
        tuple(TensorInfo(name, shape, "float32") for name, shape in tensors.items()) for tensors in (inputs, outputs)
    )
    return FinishedModel(model, given, results)


def adding(shape: tuple[int, ...] = (2, 3)) -> FinishedModel:
    """Return a model that adds `a` and `b` to `sum`."""
    return named(add_model(shape), {"a": shape, "b": shape}, {"sum": shape})


def positive(shape: tuple[int, ...] = (3,)) -> FinishedModel:
    """Return a model whose `y` is `x` where that is positive, otherwise 0."""
    return named(relu_model(shape), {"x": shape}, {"y": shape})


class ModelsInMemory:
    """A ModelProvider for models of a test. Counts how often each was opened."""

    def __init__(self, client: nnfmq.Client, models: Mapping[str, TestModel]) -> None:
        self._client, self._models = client, models
        self.opened: list[tuple[str, int]] = []

    def open(self, name: str, version: int, timeout: float | None) -> ProvidedModel:
        """Prepare a model on its device; each has the versions 1 and 2."""
        self.opened.append((name, version))
        if name not in self._models or version not in (0, 1, 2):
            raise ModelNotFound(f"there is no model {name!r} of version {version}")
        found = self._models[name]
        prepared = self._client.device(found.device).prepare(found.model, timeout=timeout, name=name)
        return ProvidedModel(prepared, found.batch, lambda _burst: version or 2)

    def entries(self) -> list[ModelIndexEntry]:
        """Return all models; the current version is 2."""
        return [ModelIndexEntry(name, "2", "READY") for name in sorted(self._models)]


def x(*values: float) -> dict[str, Array]:
    """Return the inputs of `positive`."""
    return {"x": np.array(values, np.float32)}


def request(model: str, inputs: Mapping[str, Any], **options: Any) -> InferRequest:
    """Return a request."""
    return InferRequest(model, inputs, **options)
