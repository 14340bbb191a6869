"""RecordedModel: a model of a recording, in the form in which a device prepares it.

The states of a model are inputs and outputs of it here, as they are for the driver, so that each execution stands for
itself. The driver validates the model; what is checked here is that its bytes can be decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from nnfmq.hal.errors import InvalidArgument, NnfmqError
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import Model
from nnfmq.memory import Memory
from nnfmq.recording.recording_format import NO_DATA, TensorFormat
from nnfmq.recording.recording_reader import RecordingFile
from nnfmq.serialize.model_codec import decode_model

__all__ = ["RecordedModel", "load_recorded_model", "tensor_infos"]


class RecordedModel(NamedTuple):
    """A model, and its inputs and outputs."""

    model: Model
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


def load_recorded_model(recording: RecordingFile, number: int, resources: ExitStack) -> RecordedModel:
    """Return model `number` of a recording; `resources` closes its memories.

    Raises:
        InvalidArgument: If the recording has only its signature, or its bytes are no model.
    """
    row = recording.models[number]
    if row.data == NO_DATA:
        raise InvalidArgument(
            f"{recording.path}: model {number} was prepared from a cache, so the recording does not contain it"
        )
    try:
        pools = [_memory(recording.read(pool), resources) for pool in row.pools]
        model = decode_model(recording.read(row.data), pools)
    except NnfmqError as error:
        raise InvalidArgument(f"{recording.path}: model {number} cannot be read: {error}") from error
    return RecordedModel(model, tensor_infos(row.inputs), tensor_infos(row.outputs))


def _memory(content: bytes, resources: ExitStack) -> Memory:
    memory = resources.enter_context(Memory.create(len(content), "nnfmq-recorded"))
    memory.view[: len(content)] = content
    return memory


def tensor_infos(formats: Sequence[TensorFormat]) -> tuple[TensorInfo, ...]:
    """Return the descriptions of inputs or outputs."""
    return tuple(TensorInfo(f.name, f.shape, f.dtype, f.scale, f.zero_point, f.is_scalar, f.is_empty) for f in formats)
