"""The result type of every importer, in a separate module so that no importer is imported with it."""

from __future__ import annotations

from dataclasses import dataclass

from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import Model


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model read from a file, ready for `Device.prepare`, and its inputs and outputs in the model's order."""

    model: Model
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
