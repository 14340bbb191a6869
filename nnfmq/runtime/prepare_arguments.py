"""Arguments of `Device.prepare` in the forms that applications use: paths of model files, and names of preferences."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeAlias, TypeVar

from msgspec import Struct

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.summaries import nearest
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.hal.types import ExecutionPreference, Model, OperationType, Priority

__all__ = [
    "FinishedModel",
    "ModelArgument",
    "ModelSignature",
    "NamedModel",
    "Preference",
    "PriorityArgument",
    "has_vendor_operations",
    "name_for_display",
    "to_hal_model",
    "to_member",
    "to_model",
    "to_preference",
    "to_priority",
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
    metadata: Any = None
    """What the file's author says of the model, an `nnfmq.ModelMetadata`, or None."""

    @classmethod
    def of(cls, model: NamedModel) -> Self:
        """Return the present parts of `model`.

        Raises:
            BadState: If it is a ModelBuilder that is not finished.
            InvalidArgument: If it is no model.
        """
        states, metadata = tuple(getattr(model, "states", ())), getattr(model, "metadata", None)
        return cls(to_hal_model(model), model.inputs, model.outputs, states, metadata)


ModelArgument: TypeAlias = Model | NamedModel | str | os.PathLike[str] | bytes | bytearray | memoryview
"""A model, the path of a model file, or the content of one."""
Preference: TypeAlias = ExecutionPreference | Literal["low_power", "fast_single_answer", "sustained_speed"]
"""A preference, or its name."""
PriorityArgument: TypeAlias = Priority | Literal["low", "medium", "high"]
"""A priority, or its name."""
MemberT = TypeVar("MemberT", bound=IntEnum)


def to_model(
    model: ModelArgument, shapes: Mapping[str | int, Sequence[int]] | None = None, signature: str | None = None
) -> Model | FinishedModel:
    """Return a model that does not change any more; if `model` is a path or a file's content, load that.

    Raises:
        BadState: If `model` is a ModelBuilder that is not finished.
        InvalidArgument: If `model` is no model, `nnfmq.load` rejects the file, or there are shapes or a signature for a
            model that is loaded already.
        OSError: If the file cannot be read.
    """
    if isinstance(model, (str, os.PathLike, bytes, bytearray, memoryview)):
        from nnfmq.importers import load

        return FinishedModel.of(load(model, shapes=shapes, signature=signature))
    if shapes or signature is not None:
        raise InvalidArgument(
            f"`shapes` and `signature` are for model files; this is a {type(model).__name__}, which is loaded already: "
            "give them to nnfmq.load"
        )
    return model if isinstance(model, (Model, FinishedModel)) else FinishedModel.of(model)


def to_hal_model(model: Model | ModelSignature) -> Model:
    """Return the HAL's model. Raises InvalidArgument if it is none (N-VAL-24)."""
    hal_model = model if isinstance(model, Model) else getattr(model, "model", None)
    if not isinstance(hal_model, Model):
        raise InvalidArgument(
            f"{type(model).__name__} is not a model: give the path of a .tflite or .onnx file, its content as bytes, "
            "what nnfmq.load returns, or a finished nnfmq.ModelBuilder"
        )
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
    """Return the preference of this name. Raises InvalidArgument if there is none."""
    return to_member(ExecutionPreference, preference, "preference")


def to_priority(priority: PriorityArgument) -> Priority:
    """Return the priority of this name. Raises InvalidArgument if there is none."""
    return to_member(Priority, priority, "priority")


def to_member(kind: type[MemberT], value: Any, what: str) -> MemberT:
    """Return the member of `kind` that `value` is, or that it names in any case; `what` is the argument.

    Raises:
        InvalidArgument: If there is none.
    """
    if isinstance(value, str):
        value = kind.__members__.get(value.upper(), value)
    try:
        return kind(value)
    except ValueError:
        words = [name.lower() for name in kind.__members__]
        allowed = ", ".join(map(repr, words))
        raise InvalidArgument(f"{what} {value!r}: allowed are {allowed}{nearest(value, words)}") from None
