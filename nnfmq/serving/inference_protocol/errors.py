"""The status of a failed request in HTTP and gRPC: one table for both, from the class of the error.

gRPC's codes are names, so that nothing here needs gRPC. Errors of Ray Serve are recognized by the names of their
classes, so that nothing here needs Ray. docs/reference/inference-protocol.md has the same table.
"""

from __future__ import annotations

from typing import NamedTuple

from nnfmq.base.logs import rate_limited
from nnfmq.hal.errors import (
    BadState,
    DeadObject,
    DeviceUnavailable,
    InvalidArgument,
    MissedDeadline,
    ModelNotFound,
    NnfmqError,
    ResourceExhaustedPersistent,
    ResourceExhaustedTransient,
)
from nnfmq.hal.summaries import clipped
from nnfmq.serving.inference_service import InferenceService, ModelIndex, ModelIndexEntry

__all__ = [
    "MAPPING",
    "RAY_MAPPING",
    "ClientLeft",
    "CompressedBody",
    "EndpointMissing",
    "MethodNotAllowed",
    "ProtocolStatus",
    "RequestTooLarge",
    "ServerOverloaded",
    "Unauthenticated",
    "UploadTooSlow",
    "error_text",
    "listed_models",
    "protocol_status",
    "quoted",
]


# ----------------------------------------------------------------------------------------------------------------------
# Errors of a request that only a network protocol has; each has its own status.


class Unauthenticated(InvalidArgument):
    """The request has no token, or one that the server does not accept."""


class RequestTooLarge(InvalidArgument):
    """A request is larger than the server's limits allow."""


class UploadTooSlow(InvalidArgument):
    """The body of a request did not arrive in time."""


class ServerOverloaded(ResourceExhaustedTransient):
    """The requests in progress take all the memory that they may have."""


class EndpointMissing(InvalidArgument):
    """The server does not have the endpoint."""


class MethodNotAllowed(InvalidArgument):
    """The endpoint does not take this method of HTTP; `allowed` is the one that it takes."""

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class CompressedBody(InvalidArgument):
    """The body is compressed, and the server does not decompress bodies: a few bytes could become gigabytes."""


class ClientLeft(Exception):
    """The client closed the connection before it had sent its whole request."""


_SHOWN = 100  # characters


def quoted(text: str) -> str:
    """Return a client's text for a message: quoted, characters that are not printable escaped, long text cut."""
    return repr(clipped(text, _SHOWN))


# ----------------------------------------------------------------------------------------------------------------------
# The status of a failed request in HTTP and gRPC: one table for both, from the class of the error.


_log = rate_limited("nnfmq.serving")
_MAX_TEXT = 1000  # characters: gRPC's status details travel in a header of 8 KiB
RETRY_AFTER_S = 1


class ProtocolStatus(NamedTuple):
    """A status in HTTP and gRPC. `retry_after_s` is not None if the same request may succeed that much later."""

    http: int
    grpc: str
    retry_after_s: int | None = None


_INTERNAL = ProtocolStatus(500, "INTERNAL")
_UNAVAILABLE = ProtocolStatus(503, "UNAVAILABLE", RETRY_AFTER_S)
_OVERLOADED = ProtocolStatus(429, "RESOURCE_EXHAUSTED", RETRY_AFTER_S)

MAPPING: dict[type[BaseException], ProtocolStatus] = {
    ModelNotFound: ProtocolStatus(404, "NOT_FOUND"),
    EndpointMissing: ProtocolStatus(404, "UNIMPLEMENTED"),
    MethodNotAllowed: ProtocolStatus(405, "UNIMPLEMENTED"),
    CompressedBody: ProtocolStatus(415, "UNIMPLEMENTED"),
    Unauthenticated: ProtocolStatus(401, "UNAUTHENTICATED"),
    RequestTooLarge: ProtocolStatus(413, "RESOURCE_EXHAUSTED"),
    UploadTooSlow: ProtocolStatus(408, "DEADLINE_EXCEEDED"),
    ServerOverloaded: ProtocolStatus(503, "RESOURCE_EXHAUSTED", RETRY_AFTER_S),
    # A server calls its objects in the right state, unless it is closing them.
    BadState: _UNAVAILABLE,
    InvalidArgument: ProtocolStatus(400, "INVALID_ARGUMENT"),
    ResourceExhaustedTransient: _OVERLOADED,
    ResourceExhaustedPersistent: ProtocolStatus(507, "RESOURCE_EXHAUSTED"),
    MissedDeadline: ProtocolStatus(504, "DEADLINE_EXCEEDED"),
    TimeoutError: ProtocolStatus(504, "DEADLINE_EXCEEDED"),
    DeviceUnavailable: _UNAVAILABLE,
    DeadObject: _UNAVAILABLE,
    # The server provides the buffers of outputs, so OutputInsufficientSize is no fault of the client.
    NnfmqError: _INTERNAL,
}
"""Class → status; an error has that of the first of its base classes, in their order, that is in the table."""

RAY_MAPPING: dict[str, ProtocolStatus] = {
    "ray.serve.exceptions.BackPressureError": _OVERLOADED,
    "ray.serve.exceptions.DeploymentUnavailableError": _UNAVAILABLE,
    "ray.serve.exceptions.ReplicaUnavailableError": _UNAVAILABLE,
    "ray.exceptions.RayActorError": _UNAVAILABLE,
    "ray.exceptions.NodeDiedError": _UNAVAILABLE,
    "ray.exceptions.WorkerCrashedError": _UNAVAILABLE,
    "ray.exceptions.ObjectLostError": _UNAVAILABLE,
}
"""Errors that a handle of Ray Serve raises → status, by full name of the class."""


def protocol_status(error: BaseException) -> ProtocolStatus:
    """Return the status to send for an error: INTERNAL for one that no table has."""
    for base in type(_without_ray(error)).__mro__:
        found = MAPPING.get(base) or RAY_MAPPING.get(_full_name(base))
        if found is not None:
            return found
    return _INTERNAL


def error_text(error: BaseException) -> str:
    """Return the text to send for an error. A defect is logged, and its text, which may be confidential, not sent."""
    original = _without_ray(error)
    if not isinstance(original, NnfmqError) and protocol_status(original) is _INTERNAL:
        _log.error("A request failed because of a defect", exc_info=error)
        return f"internal error: {type(original).__name__}; the server's log has details"
    return clipped(str(original) or type(original).__name__, _MAX_TEXT)


def _without_ray(error: BaseException) -> BaseException:
    """Return the error that a replica raised: Ray's own error has its traceback as text, which is not for clients."""
    is_rays = any(_full_name(base) == "ray.exceptions.RayTaskError" for base in type(error).__mro__)
    cause = getattr(error, "cause", None) if is_rays else None
    return cause if isinstance(cause, BaseException) else error


def _full_name(kind: type[BaseException]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# ----------------------------------------------------------------------------------------------------------------------
# The list of models for Triton's model repository extension, of services that can list them.


async def listed_models(service: InferenceService, *, ready: bool) -> list[ModelIndexEntry]:
    """Return the models of the repository, or only those that are READY.

    Raises:
        EndpointMissing: If the service cannot list its models.
    """
    if not isinstance(service, ModelIndex):
        raise EndpointMissing("this server cannot list its models")
    return [entry for entry in await service.model_index() if entry.state == "READY" or not ready]
