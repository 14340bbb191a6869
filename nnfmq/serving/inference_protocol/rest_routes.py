"""The URLs of the protocol: which endpoint a path names, with the model and version in it."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

__all__ = ["RestEndpoint", "Route", "find_route"]


class RestEndpoint(Enum):
    """An endpoint; the value is the method of HTTP that it takes."""

    SERVER_LIVE = ("live", "GET")
    SERVER_READY = ("ready", "GET")
    SERVER_METADATA = ("metadata", "GET")
    REPOSITORY_INDEX = ("index", "POST")
    MODEL_READY = ("model ready", "GET")
    MODEL_METADATA = ("model metadata", "GET")
    MODEL_INFER = ("model infer", "POST")

    @property
    def method(self) -> str:
        """The method of HTTP that the endpoint takes."""
        return self.value[1]


class Route(NamedTuple):
    """An endpoint, and the model and version that the path names; empty if it names none."""

    endpoint: RestEndpoint
    model: str = ""
    version: str = ""


_SERVER: dict[tuple[str, ...], RestEndpoint] = {
    (): RestEndpoint.SERVER_METADATA,
    ("health", "live"): RestEndpoint.SERVER_LIVE,
    ("health", "ready"): RestEndpoint.SERVER_READY,
    ("repository", "index"): RestEndpoint.REPOSITORY_INDEX,
}
_MODEL: dict[tuple[str, ...], RestEndpoint] = {
    (): RestEndpoint.MODEL_METADATA,
    ("ready",): RestEndpoint.MODEL_READY,
    ("infer",): RestEndpoint.MODEL_INFER,
}


def find_route(path: str) -> Route | None:
    """Return the route of a path such as `/v2/models/NAME/infer`; None if there is no such endpoint."""
    match path.strip("/").split("/"):
        case ["v2", "models", model, "versions", version, *rest] if model and version:
            return _route(_MODEL, rest, model, version)
        case ["v2", "models", model, *rest] if model:
            return _route(_MODEL, rest, model)
        case ["v2", *rest]:
            return _route(_SERVER, rest)
    return None


def _route(
    endpoints: dict[tuple[str, ...], RestEndpoint], rest: list[str], model: str = "", version: str = ""
) -> Route | None:
    endpoint = endpoints.get(tuple(rest))
    return None if endpoint is None else Route(endpoint, model, version)
