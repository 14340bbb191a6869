"""Run neural networks in a driver process of its own, a few microseconds away.

    import nnfmq
    with nnfmq.connect() as client:
        model = client.device("reference").prepare(nnfmq.load("model.tflite"))
        with model.burst() as burst:
            scores, = burst.execute(image)

Importing this is cheap: what is heavy is imported by the call that needs it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from nnfmq.file_memory import FileMemory
from nnfmq.hal.errors import (
    DeadObject,
    DeviceUnavailable,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    MissedDeadlinePersistent,
    MissedDeadlineTransient,
    NnfmqError,
    OutputInsufficientSize,
    ProtocolError,
    QueueCorrupted,
    ResourceExhausted,
    ResourceExhaustedPersistent,
    ResourceExhaustedTransient,
)
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import FenceState
from nnfmq.importers import LoadedModel, example_path, load
from nnfmq.memory import Memory
from nnfmq.runtime.buffers import Buffer, copy
from nnfmq.runtime.burst import Burst, ExecutionInfo
from nnfmq.runtime.client import Client, Device, DeviceInfo, connect
from nnfmq.runtime.prepared_model import PreparedModel

if TYPE_CHECKING:
    from nnfmq.fence import Fence
    from nnfmq.runtime.fenced import FencedExecution
    from nnfmq.runtime.pending import PendingExecution
    from nnfmq.runtime.reusable import Execution

__all__ = [
    "Buffer",
    "Burst",
    "Client",
    "DeadObject",
    "Device",
    "DeviceInfo",
    "DeviceUnavailable",
    "ErrorStatus",
    "Execution",
    "ExecutionInfo",
    "Fence",
    "FenceState",
    "FencedExecution",
    "FileMemory",
    "GeneralFailure",
    "InvalidArgument",
    "LoadedModel",
    "Memory",
    "MissedDeadline",
    "MissedDeadlinePersistent",
    "MissedDeadlineTransient",
    "NnfmqError",
    "OutputInsufficientSize",
    "PendingExecution",
    "PreparedModel",
    "ProtocolError",
    "QueueCorrupted",
    "ResourceExhausted",
    "ResourceExhaustedPersistent",
    "ResourceExhaustedTransient",
    "TensorInfo",
    "connect",
    "copy",
    "example_path",
    "load",
]

_LATER = {
    "Execution": "nnfmq.runtime.reusable",
    "Fence": "nnfmq.fence",
    "FencedExecution": "nnfmq.runtime.fenced",
    "PendingExecution": "nnfmq.runtime.pending",
}


def __getattr__(name: str) -> Any:
    """Import what few programs need when it is asked for."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
