"""DriverModels: the models that the repository has prepared in the driver, as one of its clients.

The driver keeps a program as long as a client has it. The repository has each served version prepared, so that another
client that prepares it finds the program, compiled and with its constants in shared memory.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nnfmq.file_memory import FileMemory
from nnfmq.hal.errors import DeviceUnavailable
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.hal.types import DeviceStatus, ExecutionPreference, Priority
from nnfmq.repository.version_import import ImportedModel
from nnfmq.runtime.client import Client
from nnfmq.runtime.connect import connect
from nnfmq.runtime.prepared_model import PreparedModel

__all__ = ["DriverModels"]

CONNECT_S = 30.0
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
        self._socket = socket
        self._lock = threading.Lock()
        self._client: Client | None = None

    @property
    def is_connected(self) -> bool:
        """Whether the models prepared so far are still prepared. False also before the first one."""
        client = self._client
        return client is not None and client.connection.is_open

    def prepare(
        self, name: str, version: int, imported: ImportedModel, memories: Sequence[FileMemory]
    ) -> PreparedModel:
        """Prepare a model; connect to the driver first, if need be. Blocks. The caller closes the result.

        Raises:
            NnfmqError: The driver's error.
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
                deadline_ns=None,
                name=name,
                version=version,
            )

    def _connected(self) -> Client:
        client = self._client
        if client is None or not client.connection.is_open:
            if client is not None:
                client.close()
            self._client = client = connect(self._socket, timeout=CONNECT_S)
        return client

    def close(self) -> None:
        """Hang up; the driver forgets the models. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


def _best_device(client: Client) -> str:
    """Return the name of the best device that is available. Raises DeviceUnavailable if none is."""
    available = [info.name for info in client.devices() if info.status is DeviceStatus.AVAILABLE]
    found = [name for name in _BEST if name in available] or available
    if not found:
        raise DeviceUnavailable("no device of the driver is available")
    return found[0]
