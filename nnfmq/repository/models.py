"""Models of the repository: their directory, and those that it has prepared in the driver.

Names of models are those of `repository_protocol.ModelName`, and versions positive decimal numbers without leading
zeros; everything else is ignored. The directory is read again and again, because inotify(7) does not see what other
machines change in a network file system.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from nnfmq.base.deadlines import deadline_after
from nnfmq.base.file_memory import FileMemory
from nnfmq.client.connection.client import Client
from nnfmq.client.connection.connect import connect
from nnfmq.client.connection.device import hosts_runtime
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.hal.errors import DeviceUnavailable
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.hal.types import DeviceStatus, ExecutionPreference, Priority
from nnfmq.repository.version_import import ImportedModel

__all__ = ["DirectoryLook", "DriverModels", "FileState", "ModelDirectory", "VersionState"]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,63}")  # as `repository_protocol.ModelName`; a test compares them
_VERSION = re.compile(r"[1-9][0-9]{0,9}")
_VERSION_MAX = 2**31 - 1
_MISSING = (FileNotFoundError, NotADirectoryError)


class FileState(NamedTuple):
    """A file of a version, as the file system describes it."""

    name: str
    inode: int
    size_bytes: int
    modified_ns: int


class VersionState(NamedTuple):
    """The files of a version, and when the last of them was changed: by its content, its name or its metadata."""

    files: tuple[FileState, ...]
    changed_s: float


class DirectoryLook(NamedTuple):
    """The result of a look at a directory of models.

    Attributes:
        models: The states of all versions of each model, by name; None: that model could not be read.
        errors: What could not be read. If that is the directory, `models` is None.
    """

    models: dict[str, dict[int, VersionState] | None] | None
    errors: list[OSError]


class ModelDirectory:
    """A directory of models. All methods block on the file system, for as long as that does not answer."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def look(self) -> DirectoryLook:
        """Return the states of all versions of all models, or what cannot be read."""
        try:
            names = self.names()
        except OSError as error:  # it may be back soon: a network file system
            return DirectoryLook(None, [error])
        models: dict[str, dict[int, VersionState] | None] = {}
        errors = []
        for name in names:
            try:
                found = {version: self.state(name, version) for version in self.versions(name)}
            except OSError as error:
                models[name] = None
                errors.append(error)
            else:
                models[name] = {version: state for version, state in found.items() if state is not None}
        return DirectoryLook(models, errors)

    def names(self) -> list[str]:
        """Return the names of the models, sorted.

        Raises:
            OSError: If the directory cannot be read.
        """
        return sorted(entry.name for entry in _folders(self.path) if _NAME.fullmatch(entry.name))

    def versions(self, name: str) -> list[int]:
        """Return the versions of a model, the newest first; none if there is no such model (any more).

        Raises:
            OSError: If its directory cannot be read.
        """
        try:
            found = [int(entry.name) for entry in _folders(self.path / name) if _VERSION.fullmatch(entry.name)]
        except _MISSING:
            return []
        return sorted((version for version in found if version <= _VERSION_MAX), reverse=True)

    def version_path(self, name: str, version: int) -> Path:
        """Return the directory of a version."""
        return self.path / name / str(version)

    def state(self, name: str, version: int) -> VersionState | None:
        """Return the state of a version's files; None if there is no such version (any more).

        Two equal states mean that nothing was changed in between. Folders in it are described, not read, and so are
        links that lead nowhere. Of a folder that this user may not read only the folder itself is described.

        Raises:
            OSError: If it cannot be examined, which may pass.
        """
        path = self.version_path(name, version)
        try:
            infos = [(".", path.stat()), *sorted(_described(path), key=lambda item: item[0])]
        except _MISSING:
            return None
        files = tuple(FileState(name, info.st_ino, info.st_size, info.st_mtime_ns) for name, info in infos)
        # Not the time of modification, which `cp -p` and archives set to the past.
        return VersionState(files, max(info.st_ctime for _, info in infos))


def _folders(path: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        for entry in entries:
            with suppress(OSError):  # a link to itself
                if entry.is_dir():  # also a link to one
                    yield entry


def _described(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    with suppress(PermissionError), os.scandir(path) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # it has been removed since
                info = _info(entry)
                if stat.S_IFMT(info.st_mode) in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
                    yield entry.name, info


def _info(entry: os.DirEntry[str]) -> os.stat_result:
    """Describe what a link leads to, or the link itself if that cannot be examined."""
    try:
        return entry.stat()
    except OSError:
        return entry.stat(follow_symlinks=False)


# ----------------------------------------------------------------------------------------------------------------------
# DriverModels: the models that the repository has prepared in the driver, as one of its clients.
#
# The driver keeps a program as long as a client has it. The repository has each served version prepared, so that
# another client that prepares it finds the program, compiled and with its constants in shared memory.


CONNECT_S = 30.0
PREPARE_S = 600.0
"""The deadline of a preparation: a device that never ends would keep all other models waiting."""
_BEST = ("compiled", "reference")


class _Interface(NamedTuple):
    """The inputs, outputs and states of a model."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    states: tuple[StateInfo, ...]


class DriverModels:
    """Prepares models in the driver that listens at `socket`. Thread-safe; prepares one model at a time.

    So if the driver's worker dies, it is known which model it was preparing.
    """

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self._lock = threading.Lock()
        self._client: Client | None = None

    def prepare(
        self, name: str, version: int, imported: ImportedModel, memories: Sequence[FileMemory]
    ) -> PreparedModel:
        """Prepare a model; connect to the driver first, if need be. Blocks. The caller closes the result.

        Raises:
            NnfmqError: The driver's error; MissedDeadlineTransient after PREPARE_S.
            DeadObject: If the driver's worker dies meanwhile.
        """
        with self._lock:
            client = self._connected()
            device = imported.options.device or _best_device(client)
            return client.device(device).prepare_encoded(
                _Interface(imported.inputs, imported.outputs, imported.states),
                imported.model,
                memories,
                # Whatever the clients prefer, they are to find the compiled program.
                preference=ExecutionPreference.SUSTAINED_SPEED,
                priority=Priority(imported.options.priority),
                deterministic=imported.options.deterministic,
                deadline_ns=deadline_after(PREPARE_S),
                name=name,
                version=version,
            )

    def _connected(self) -> Client:
        client = self._client
        if client is None or not client.connection.is_open:
            if client is not None:
                client.close()
            self._client = client = connect(self.socket, timeout=CONNECT_S)
        return client

    def close(self) -> None:
        """Hang up; the driver forgets the models. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


def _best_device(client: Client) -> str:
    """Return the name of the best device that is available. Raises DeviceUnavailable if none is."""
    available = [
        info.name
        for info in client.devices()
        if info.status is DeviceStatus.AVAILABLE and not hosts_runtime(info)  # the import has chosen such a device
    ]
    found = [name for name in _BEST if name in available] or available
    if not found:
        raise DeviceUnavailable("no device of the driver is available")
    return found[0]
