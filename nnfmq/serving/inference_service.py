"""InferenceService: what an inference server does, whatever the protocol and whoever computes.

`inference_protocol` (HTTP and gRPC) calls it; `server` implements it over a driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from msgspec import Struct, field

__all__ = [
    "Array",
    "InferRequest",
    "InferResponse",
    "InferenceModelMetadata",
    "InferenceService",
    "InferenceTensorMetadata",
    "ModelIndex",
    "ModelIndexEntry",
    "ServerMetadata",
]

Array: TypeAlias = np.ndarray[Any, Any]
Parameters: TypeAlias = Mapping[str, bool | int | float | str]


class InferenceTensorMetadata(Struct, frozen=True):
    """One input or output of a model: its name, dtype (NumPy's name, or "bfloat16") and shape; -1 = any size.

    The shape of a tensor of any rank is (-1,), because the protocol has no other.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parameters: Parameters = field(default_factory=dict)
    """The quantization: `scale` and `zero_point`; empty if the values are not quantized."""


class InferenceModelMetadata(Struct, frozen=True):
    """A model, the versions of it that are served, and its inputs and outputs."""

    name: str
    versions: tuple[str, ...]
    inputs: tuple[InferenceTensorMetadata, ...]
    outputs: tuple[InferenceTensorMetadata, ...]
    platform: str = "nnfmq"


class ServerMetadata(Struct, frozen=True):
    """A server, its release, and the extensions of the protocol that it has."""

    name: str
    version: str
    extensions: tuple[str, ...] = ()


class ModelIndexEntry(Struct, frozen=True):
    """One model of the repository: the version that is served, its state, and the reason for the state.

    States are READY, LOADING and UNAVAILABLE. `version` is empty if no version is served.
    """

    name: str
    version: str
    state: str
    reason: str = ""


class InferRequest(Struct, frozen=True):
    """One request: arrays by input name. `version` is empty for the current one.

    `outputs` are the names of the wanted ones, in order; empty = all. `timeout_s` is the time that is left for it.
    """

    model: str
    inputs: Mapping[str, Array]
    version: str = ""
    id: str = ""
    outputs: tuple[str, ...] = ()
    timeout_s: float | None = None


class InferResponse(Struct, frozen=True):
    """The result of a request: arrays by output name, in order, and the version that computed them.

    `bfloat16` are the names of outputs whose arrays have the bits of bfloat16, as uint16.
    """

    model: str
    version: str
    outputs: Mapping[str, Array]
    id: str = ""
    bfloat16: frozenset[str] = frozenset()

    def dtype_of(self, name: str) -> np.dtype[Any] | str:
        """Return the dtype of an output, or "bfloat16"."""
        return "bfloat16" if name in self.bfloat16 else self.outputs[name].dtype


class InferenceService(Protocol):
    """What a server's protocols call. All methods run on one event loop; errors are those of `nnfmq.hal.errors`."""

    async def is_live(self) -> bool:
        """Return whether the server runs at all."""
        ...

    async def is_ready(self) -> bool:
        """Return whether the server can serve requests: its driver lives."""
        ...

    async def is_model_ready(self, model: str, version: str = "") -> bool:
        """Return whether a model, or this version of it, is served. False if there is none of that name."""
        ...

    async def server_metadata(self) -> ServerMetadata:
        """Return the server's name, release and extensions."""
        ...

    async def model_metadata(self, model: str, version: str = "") -> InferenceModelMetadata:
        """Return a model's versions, inputs and outputs.

        Raises:
            ModelNotFound: If there is no such model or version.
        """
        ...

    async def infer(self, request: InferRequest) -> InferResponse:
        """Execute a request, once.

        Raises:
            ModelNotFound: If there is no such model or version.
            InvalidArgument: If an input is missing, unknown, or of another shape or dtype.
            ResourceExhaustedTransient: If too many requests wait already.
            MissedDeadline: If the request's time is over.
            NnfmqError: The error of the execution.
        """
        ...


@runtime_checkable
class ModelIndex(Protocol):
    """What an InferenceService has in addition if it can list its models."""

    async def model_index(self) -> Sequence[ModelIndexEntry]:
        """Return an entry for each model of the repository, served or not."""
        ...
