"""Messages between clients and the model repository of a driver, and their encoding.

    sender      message         fields                     file descriptors  meaning
    client      OpenModel       call, name, version        -                 request a model (0 = its current version)
    repository  ModelOpened     call, status, message,     its memories      the model, or the error
                                description
    client      ListModels      call                       -                 request the list of models
    repository  ModelList       call, models               -                 all models, by name
    repository  VersionChanged  name, version              -                 another version is served from now on

The model repository is a process beside the driver. It serves the model files of a directory by name: it imports and
validates each file, and has the driver prepare it once, so that the program is in the driver's cache. A client gets the
HAL's model over sealed memories and has its own worker prepare it, which finds that program.

A client is told of a new version of each model that it has opened, once that version is prepared. A `call` identifies
one request of one client; the client chooses it and uses it once. Both ends are one build of nnfmq, so messages have no
version.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.serialize.message_codec import MessageCodec
from nnfmq.serialize.messages.common import MAX_TEXT, U63, MemoryData, MemoryList

__all__ = [
    "SENDERS",
    "ListModels",
    "ModelDescription",
    "ModelEntry",
    "ModelList",
    "ModelName",
    "ModelOpened",
    "ModelState",
    "OpenModel",
    "RepositoryMessage",
    "RepositoryRole",
    "Version",
    "VersionChanged",
    "decode",
    "encode",
    "fd_count",
]

ModelName: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]*\Z", max_length=64)]
"""A directory's name; at most 64 characters, which the driver's statistics show."""
Version: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""A version's directory, a positive decimal number; 0 = none, or in a request the current one."""
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]


class RepositoryRole(Enum):
    """The two ends of a connection."""

    CLIENT = "client"
    REPOSITORY = "repository"


class ModelState(Enum):
    """The state of a model of the repository, with the names of the Open Inference Protocol's repository extension."""

    READY = "READY"
    """A version is served."""
    LOADING = "LOADING"
    """No version is served yet: the first one is being prepared."""
    UNAVAILABLE = "UNAVAILABLE"
    """No version could be prepared, or there is none."""


class ModelDescription(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A model for a client that prepares it: the HAL's model without its memories, and the options.

    `model` is what `serialize.models.encode_model` returns, and `pools` are its memories, whose fds come with the
    message. The names are those of the model file. `batch` is the size of the first dimension of each input and output,
    the rows of which are independent of each other; 1 = the model does not compute batches. `deterministic` is that of
    `Device.prepare`.
    """

    name: ModelName
    version: Version
    device: str
    preference: int
    priority: int
    batch: Annotated[int, Meta(ge=1, le=65536)]
    deterministic: bool
    model: bytes
    pools: MemoryList
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    states: tuple[StateInfo, ...] = ()


class ModelEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One model of the repository.

    `version` is the one that is served, 0 if there is none. `failed_version` is the newest version that could not be
    prepared, 0 if there is none or a later one is served, and `reason` says why. `changed_s` is when the served version
    was last changed, in seconds since the epoch.
    """

    name: ModelName
    state: ModelState
    version: Version
    device: str
    failed_version: Version
    reason: Text
    changed_s: float


class RepositoryMessage(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base class of the messages."""


class OpenModel(RepositoryMessage, frozen=True):
    """Request for a model. The reply is ModelOpened; VersionChanged follows whenever another version is served."""

    call: U63
    name: ModelName
    version: Version = 0


class ListModels(RepositoryMessage, frozen=True):
    """Request for the list of models. The reply is ModelList."""

    call: U63


class ModelOpened(RepositoryMessage, frozen=True):
    """Reply to OpenModel: the model if the status is NONE, with an fd for each of its pools; otherwise the reason.

    INVALID_ARGUMENT: there is no such model or version. DEVICE_UNAVAILABLE: no version of it is served (yet).
    """

    call: U63
    status: ErrorStatus
    message: Text
    description: ModelDescription | None = None

    @property
    def pools(self) -> tuple[MemoryData, ...]:
        """The memories whose fds come with the message."""
        return () if self.description is None else self.description.pools


class ModelList(RepositoryMessage, frozen=True):
    """Reply to ListModels: all models, sorted by name."""

    call: U63
    models: tuple[ModelEntry, ...]


class VersionChanged(RepositoryMessage, frozen=True):
    """The repository now serves this version of a model that the client has opened."""

    name: ModelName
    version: Version


SENDERS: dict[RepositoryRole, tuple[type[RepositoryMessage], ...]] = {
    RepositoryRole.CLIENT: (OpenModel, ListModels),
    RepositoryRole.REPOSITORY: (ModelOpened, ModelList, VersionChanged),
}
_codec: MessageCodec[RepositoryMessage] = MessageCodec(SENDERS, {ModelOpened: "pools"})
fd_count, encode, decode = _codec.fd_count, _codec.encode, _codec.decode
