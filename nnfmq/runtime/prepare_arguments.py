"""Arguments of `Device.prepare` in the forms that applications use: paths of model files, and names of preferences."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, Protocol, Self, TypeAlias

from msgspec import Struct

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.hal.types import ExecutionPreference, Model, OperationType

__all__ = [
    "FinishedModel",
    "ModelArgument",
    "ModelSignature",
    "NamedModel",
    "Preference",
    "has_vendor_operations",
    "name_for_display",
    "to_hal_model",
    "to_model",
    "to_preference",
]
_NAME_CHARACTERS = 64  # the statistics show as many bytes


class ModelSignature(Protocol):
    """The inputs and outputs of a model: a NamedModel, a PreparedModel, or an application's own object."""

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        """The inputs, in order."""
        ...

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """The outputs, in order."""
        ...


class NamedModel(ModelSignature, Protocol):
    """A model with names for its inputs and outputs, as `nnfmq.load` returns it."""

    @property
    def model(self) -> Model:
        """The HAL's model."""
        ...


class FinishedModel(Struct, frozen=True):
    """A model with descriptions of its inputs, outputs and states. Satisfies NamedModel.

    A prepared model keeps it, because it may be prepared again when the ModelBuilder that it came from is closed.
    """

    model: Model
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    states: tuple[StateInfo, ...] = ()

    @classmethod
    def of(cls, model: NamedModel) -> Self:
        """Return the present parts of `model`.

        Raises:
            BadState: If it is a ModelBuilder that is not finished.
            InvalidArgument: If it is no model.
        """
        return cls(to_hal_model(model), model.inputs, model.outputs, tuple(getattr(model, "states", ())))


ModelArgument: TypeAlias = Model | NamedModel | str | os.PathLike[str]
"""A model, or the path of a model file."""
Preference: TypeAlias = ExecutionPreference | Literal["low_power", "fast_single_answer", "sustained_speed"]
"""A preference, or its short name."""

_PREFERENCES = {
    "low_power": ExecutionPreference.LOW_POWER,
    "fast_single_answer": ExecutionPreference.FAST_SINGLE_ANSWER,
    "sustained_speed": ExecutionPreference.SUSTAINED_SPEED,
}


def to_model(model: ModelArgument) -> Model | FinishedModel:
    """Return a model that does not change any more; if `model` is a path, load that file.

    Raises:
        BadState: If `model` is a ModelBuilder that is not finished.
        InvalidArgument: If `model` is no model, or `nnfmq.load` rejects the file.
        OSError: If the file cannot be read.
    """
    if isinstance(model, (Model, FinishedModel)):
        return model
    if not isinstance(model, (str, os.PathLike)):
        return FinishedModel.of(model)
    from nnfmq.importers import load

    return FinishedModel.of(load(Path(model)))


def to_hal_model(model: Model | ModelSignature) -> Model:
    """Return the HAL's model. Raises InvalidArgument if it is none (N-VAL-24)."""
    hal_model = model if isinstance(model, Model) else getattr(model, "model", None)
    if not isinstance(hal_model, Model):
        raise InvalidArgument(f"a {type(model).__name__} is no model (N-VAL-24)")
    return hal_model


def has_vendor_operations(model: Model) -> bool:
    """Return whether an operation is of an extension or OEM: the CPU device has none of those."""
    types = {operation.type for graph in (model.main, *model.referenced) for operation in graph.operations}
    if OperationType.OEM_OPERATION in types:
        return True
    if not model.extensions:  # then no valid operation is of one, and a start is faster without the import
        return False
    from nnfmq.hal.extension_codes import is_extension

    return any(map(is_extension, types))


def name_for_display(model: ModelArgument, name: str | None) -> str:
    """Return what the driver calls a model in its statistics: `name`, or the name of its file, or nothing."""
    if name is None:
        name = Path(model).name if isinstance(model, (str, os.PathLike)) else str(getattr(model, "file_name", ""))
    return name[:_NAME_CHARACTERS].encode("utf-8", "replace").decode()  # file names may be undecodable


def to_preference(preference: Preference) -> ExecutionPreference:
    """Return the preference with this short name; an ExecutionPreference is returned unchanged.

    Raises:
        InvalidArgument: If there is none of that name.
    """
    if not isinstance(preference, str):
        return preference
    if preference not in _PREFERENCES:
        allowed = ", ".join(repr(name) for name in _PREFERENCES)
        raise InvalidArgument(f"preference {preference!r}: allowed are {allowed}, and nnfmq.ExecutionPreference")
    return _PREFERENCES[preference]
