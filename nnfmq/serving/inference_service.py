"""InferenceService: the interface between the protocols of an inference server and the part that computes.

`inference_protocol` (HTTP and gRPC) calls it; `server` implements it over a driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from msgspec import Struct, field

__all__ = [
    "Array",
    "CountedTime",
    "InferRequest",
    "InferResponse",
    "InferenceModelMetadata",
    "InferenceService",
    "InferenceStatistics",
    "InferenceTensorMetadata",
    "ModelIndex",
    "ModelIndexEntry",
    "ServerMetadata",
    "StatisticsSource",
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
    """A model, the versions of it that are served, and its inputs and outputs.

    `max_batch` is how many rows, of several requests, one execution computes at most; 0 if the model does not compute
    batches. A request waits up to `max_batch_wait_s` for others.
    """

    name: str
    versions: tuple[str, ...]
    inputs: tuple[InferenceTensorMetadata, ...]
    outputs: tuple[InferenceTensorMetadata, ...]
    platform: str = "nnfmq"
    max_batch: int = 0
    max_batch_wait_s: float = 0.0


class CountedTime(Struct, frozen=True):
    """The number of requests or executions, and the time that they took together."""

    count: int = 0
    ns: int = 0


class InferenceStatistics(Struct, frozen=True):
    """The requests for one version of a model, and the executions for them.

    Args:
        name: The model.
        version: The version.
        rows: The rows that successful requests had; a request to a model that does not compute batches has one.
        executions: Executions of the model that succeeded.
        success: Requests that succeeded, from their arrival at the service to their outputs.
        fail: Requests that ended with an error; those of a model that could not be opened are not counted.
        queue: The waits of successful requests: for a burst or a batch, and between this process and the driver.
        compute_input: The time of executions in the driver before and after the engine, its queue for cores included.
        compute_infer: The time of executions in the engine.
        compute_output: Nobody measures it; its count is that of the executions.
        last_request_ms: When the last request ended, in milliseconds since 1970; 0 if there was none.
    """

    name: str
    version: str
    rows: int = 0
    executions: int = 0
    success: CountedTime = CountedTime()
    fail: CountedTime = CountedTime()
    queue: CountedTime = CountedTime()
    compute_input: CountedTime = CountedTime()
    compute_infer: CountedTime = CountedTime()
    compute_output: CountedTime = CountedTime()
    last_request_ms: int = 0


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

    `bfloat16` are the names of outputs whose arrays have the bits of bfloat16, as uint16. `rows` is the number of rows
    of a request to a model that computes batches; `wait_ns` is how long the request waited for its execution to begin.
    """

    model: str
    version: str
    outputs: Mapping[str, Array]
    id: str = ""
    bfloat16: frozenset[str] = frozenset()
    rows: int = 1
    wait_ns: int = 0

    def dtype_of(self, name: str) -> np.dtype[Any] | str:
        """Return the dtype of an output, or "bfloat16"."""
        return "bfloat16" if name in self.bfloat16 else self.outputs[name].dtype


class InferenceService(Protocol):
    """The interface that protocols call. All methods run on one event loop; errors are those of `nnfmq.hal.errors`."""

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
    """The additional method of an InferenceService that can list its models."""

    async def model_index(self) -> Sequence[ModelIndexEntry]:
        """Return an entry for each model of the repository, served or not."""
        ...


@runtime_checkable
class StatisticsSource(Protocol):
    """The additional method of an InferenceService that counts its requests."""

    async def model_statistics(self, model: str = "", version: str = "") -> Sequence[InferenceStatistics]:
        """Return an entry for each version of a model that was executed or is served; of all open models without name.

        Raises:
            ModelNotFound: If there is no such model or version.
        """
        ...
