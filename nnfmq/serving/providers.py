"""ModelProvider: opens the models of a ModelServer by name: in the driver's model repository, or from files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nnfmq.client.connection.device import hosts_runtime
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.hal.errors import DeviceUnavailable, GeneralFailure, InvalidArgument, ModelNotFound, NnfmqError
from nnfmq.hal.summaries import clipped
from nnfmq.hal.types import DeviceStatus
from nnfmq.serving.inference_service import ModelIndexEntry

if TYPE_CHECKING:
    from nnfmq.client.connection.client import Client
    from nnfmq.client.connection.prepare_arguments import PrepareOptions

__all__ = ["ModelFiles", "ModelProvider", "ProvidedModel", "RepositoryModels", "to_version"]

_DEVICES = ("compiled", "reference")  # the packaged ones, the faster one first
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


class ModelFiles:
    """Models from files, for a driver without a model repository, as an embedded one. Each has the version 1.

    Borrows the client. A model runs on the device `compiled` if it is available, otherwise on `reference`; one that
    these do not support on the first hosted runtime that loads its file. It never changes to another device: what was
    sent is not executed again elsewhere.
    """

    def __init__(self, client: Client, files: Mapping[str, str | os.PathLike[str]]) -> None:
        self._client = client
        self._files = dict(files)

    def open(self, name: str, version: int, timeout: float | None) -> ProvidedModel:
        """As `ModelProvider.open`. Raises GeneralFailure if the file cannot be read."""
        if name not in self._files or version not in (0, 1):
            known = ", ".join(sorted(self._files)) or "none"
            raise ModelNotFound(f"there is no model {_shown(name, version)}; models: {known}")
        from nnfmq.client.connection.hosted_choice import GivenModel, Host, Hosting  # a repository chooses by itself

        infos = [info for info in self._client.devices() if info.status is DeviceStatus.AVAILABLE]
        devices = {info.name: self._client.device_of(info) for info in infos}
        device = next((devices[name] for name in _DEVICES if name in devices), None)
        if device is None:
            raise DeviceUnavailable(f"the driver has none of the devices {', '.join(_DEVICES)} available")
        hosts = [Host.of(each) for each in devices.values() if hosts_runtime(each.info)]
        options: PrepareOptions = {"timeout": timeout, "name": name}
        try:
            given = GivenModel.of(self._files[name], options)
            prepared = Hosting(hosts, self._client.why_absent).prepare(
                given, options, lambda model, left: device.prepare(model, **left)
            )
        except OSError as error:
            if isinstance(error, NnfmqError):  # DeadObject and MissedDeadline are OSErrors, too
                raise
            raise GeneralFailure(f"the file of model {name!r} cannot be read: {error}") from error
        assert isinstance(prepared, PreparedModel)  # each device has prepared it whole
        return ProvidedModel(prepared, 1, lambda _burst: 1)

    def entries(self) -> list[ModelIndexEntry]:
        """Return all models by name."""
        return [ModelIndexEntry(name, "1", "READY") for name in sorted(self._files)]


def _shown(name: str, version: int) -> str:
    shown = clipped(repr(name))
    return shown if not version else f"{shown} of version {version}"


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
