"""DriverModels: the models that the repository has prepared in the driver, as one of its clients.

The driver keeps a program as long as a client has it. The repository has each served version prepared, so that another
client that prepares it finds the program, compiled and with its constants in shared memory.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from nnfmq.hal.errors import DeviceUnavailable
from nnfmq.hal.types import DeviceStatus, ExecutionPreference, Priority
from nnfmq.memory import Memory
from nnfmq.repository.version_import import ImportedModel
from nnfmq.runtime.client import Client
from nnfmq.runtime.connect import connect
from nnfmq.runtime.prepare_arguments import FinishedModel
from nnfmq.runtime.prepared_model import PreparedModel
from nnfmq.serialize.model_codec import decode_model

__all__ = ["DriverModels"]

CONNECT_S = 30.0
_BEST = ("compiled", "reference")


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

    def prepare(self, name: str, imported: ImportedModel, memories: Sequence[Memory]) -> PreparedModel:
        """Prepare a model; connect to the driver first, if need be. Blocks. The caller closes the result.

        Raises:
            NnfmqError: The driver's error.
            DeadObject: If the driver's worker dies meanwhile.
        """
        with self._lock:
            client = self._connected()
            device = imported.options.device or _best_device(client)
            model = FinishedModel(
                decode_model(imported.model, memories), imported.inputs, imported.outputs, imported.states
            )
            # Whatever the clients prefer, they are to find the compiled program.
            return client.device(device).prepare(
                model,
                preference=ExecutionPreference.SUSTAINED_SPEED,
                priority=Priority(imported.options.priority),
                name=name,
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
