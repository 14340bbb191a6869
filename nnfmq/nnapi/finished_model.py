"""FinishedModel: what a compilation keeps of a model with names, so that a ModelBuilder may be closed before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.hal.types import Model
from nnfmq.runtime.prepare_arguments import NamedModel, to_hal_model

__all__ = ["FinishedModel"]


@dataclass(frozen=True, slots=True)
class FinishedModel:
    """A HAL model with descriptions of its inputs, outputs and states. Satisfies NamedModel."""

    model: Model
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    states: tuple[StateInfo, ...] = ()

    @classmethod
    def of(cls, model: NamedModel) -> Self:
        """Return what `model` is now.

        Raises:
            BadState: If it is a ModelBuilder that is not finished.
            InvalidArgument: If it is no model.
        """
        return cls(to_hal_model(model), model.inputs, model.outputs, tuple(getattr(model, "states", ())))
