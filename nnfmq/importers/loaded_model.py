"""LoadedModel: what every importer returns. Apart from the importers, so that naming it costs no import of theirs."""

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
