"""ModelProvider: opens the models of a ModelServer by name: in the driver's model repository, or from files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nnfmq.hal.errors import DeviceUnavailable, GeneralFailure, InvalidArgument, ModelNotFound, NnfmqError
from nnfmq.hal.types import DeviceStatus

if TYPE_CHECKING:
    from nnfmq.runtime.burst_controller import Burst
    from nnfmq.runtime.client import Client
    from nnfmq.runtime.prepared_model import PreparedModel

__all__ = ["ModelFiles", "ModelProvider", "ModelStatus", "ProvidedModel", "files_in", "to_version"]

_DEVICES = ("compiled", "reference")  # the packaged ones, the faster one first


@dataclass(frozen=True, slots=True)
class ProvidedModel:
    """A model that a provider has opened; the server closes it.

    `batch` is the number of independent rows in each input and output; 1 = none. `version_of` returns the version that
    executed the last request of a burst.
    """

    prepared: PreparedModel
    batch: int
    version_of: Callable[[Burst], int]


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A model of a provider: its name, the version that is served, 0 if none is, and why the newest one is not."""

    name: str
    version: int
    reason: str = ""


class ModelProvider(Protocol):
    """Opens models by name. All methods block."""

    def open(self, name: str, version: int, timeout: float | None) -> ProvidedModel:
        """Return a prepared model: this version, or the current one if it is 0.

        Raises:
            ModelNotFound: If there is no such model or version.
            NnfmqError: The error of the preparation.
        """
        ...

    def list(self) -> list[ModelStatus]:
        """Return all models by name."""
        ...


class ModelFiles:
    """Models from files, for a driver without a model repository, as an embedded one. Each has the version 1.

    Borrows the client. A model runs on the device `compiled` if it is available, otherwise on `reference`, and never on
    another one: what was sent is not executed again elsewhere.
    """

    def __init__(self, client: Client, files: Mapping[str, str | os.PathLike[str]]) -> None:
        self._client = client
        self._files = dict(files)

    def open(self, name: str, version: int, timeout: float | None) -> ProvidedModel:
        """As `ModelProvider.open`. Raises GeneralFailure if the file cannot be read."""
        if name not in self._files or version not in (0, 1):
            known = ", ".join(sorted(self._files)) or "none"
            raise ModelNotFound(f"there is no model {_shown(name, version)}; models: {known}")
        devices = {info.name for info in self._client.devices() if info.status is DeviceStatus.AVAILABLE}
        device = next((device for device in _DEVICES if device in devices), None)
        if device is None:
            raise DeviceUnavailable(f"the driver has none of the devices {', '.join(_DEVICES)} available")
        try:
            prepared = self._client.device(device).prepare(self._files[name], timeout=timeout, name=name)
        except OSError as error:
            if isinstance(error, NnfmqError):  # DeadObject and MissedDeadline are OSErrors, too
                raise
            raise GeneralFailure(f"the file of model {name!r} cannot be read: {error}") from error
        return ProvidedModel(prepared, 1, _always_first)

    def list(self) -> list[ModelStatus]:
        """Return all models by name."""
        return [ModelStatus(name, 1) for name in sorted(self._files)]


def _always_first(_burst: Burst) -> int:
    return 1


def _shown(name: str, version: int) -> str:
    return repr(name) if not version else f"{name!r} of version {version}"


def files_in(directory: Path) -> dict[str, Path]:
    """Return the file of the newest version of each model in a directory NAME/VERSION/model.*."""
    found: dict[str, Path] = {}
    for folder in sorted(directory.glob("*/[1-9]*"), key=lambda path: (path.parent.name, int(path.name))):
        for file in (folder / "model.tflite", folder / "model.onnx"):
            if file.is_file():
                found[folder.parent.name] = file
    return found


def to_version(text: str) -> int:
    """Return a version's number; 0, the current one, if `text` is empty.

    Raises:
        InvalidArgument: If it is not a positive decimal number.
    """
    if not text:
        return 0
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or int(text) == 0:
        raise InvalidArgument(f"a version is a positive decimal number, not {text[:64]!r}")
    return int(text)
