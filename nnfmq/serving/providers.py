"""ModelProvider: opens the models of a ModelServer by name, as RepositoryModels in the driver's model repository."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.summaries import clipped
from nnfmq.serving.inference_service import ModelIndexEntry

if TYPE_CHECKING:
    from nnfmq.client.connection.client import Client

__all__ = ["ModelProvider", "ProvidedModel", "RepositoryModels", "to_version"]

_VERSION_DIGITS = 10


@dataclass(frozen=True, slots=True)
class ProvidedModel:
    """A model that a provider has opened; the server closes it.

    `batch` is the number of independent rows in each input and output; 1 = none. `version_of` returns the version that
    executed the last request of a burst.
    """

    prepared: PreparedModel
    batch: int
    version_of: Callable[[Any], int]


class ModelProvider(Protocol):
    """Opens models by name. All methods block, and may be called by several threads."""

    def open(self, name: str, version: int, timeout: float | None) -> ProvidedModel:
        """Return a prepared model: this version, or the current one if it is 0.

        Raises:
            ModelNotFound: If there is no such model or version.
            NnfmqError: The error of the preparation.
        """
        ...

    def entries(self) -> list[ModelIndexEntry]:
        """Return all models by name."""
        ...


class RepositoryModels:
    """The models of the driver's model repository: `nnfmq serve --models`. Borrows the client.

    A model that is opened without a version executes the one that the repository serves, also after a change.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def open(self, name: str, version: int, timeout: float | None) -> ProvidedModel:
        """As `ModelProvider.open`."""
        model = self._client.model(name, version, timeout=timeout)
        return ProvidedModel(model, model.batch, lambda burst: int(burst.version))

    def entries(self) -> list[ModelIndexEntry]:
        """Return all models by name."""
        return [
            ModelIndexEntry(entry.name, str(entry.version or ""), entry.state.value, entry.reason)
            for entry in self._client.models()
        ]


def to_version(text: str) -> int:
    """Return a version's number; 0, the current one, if `text` is empty.

    Raises:
        InvalidArgument: If it is not a positive decimal number.
    """
    if not text:
        return 0
    is_decimal = text.isascii() and text.isdecimal() and len(text) <= _VERSION_DIGITS
    if not is_decimal or not 0 < int(text) < 2**31:
        raise InvalidArgument(f"a version is a positive decimal number below 2**31, not {clipped(repr(text))}")
    return int(text)
