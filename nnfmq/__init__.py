"""Run neural networks in a driver process of its own, a few microseconds away.

    import nnfmq
    with nnfmq.connect() as client:
        model = client.device("reference").prepare(nnfmq.load("model.tflite"))
        with model.burst() as burst:
            scores, = burst.execute(image)

Importing this is cheap: what is heavy is imported by the call that needs it.
"""

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
from nnfmq.importers import LoadedModel, example_path, load
from nnfmq.memory import Memory
from nnfmq.runtime.buffers import Buffer, copy
from nnfmq.runtime.burst import Burst, ExecutionInfo
from nnfmq.runtime.client import Client, Device, DeviceInfo, connect
from nnfmq.runtime.prepared_model import PreparedModel

__all__ = [
    "Buffer",
    "Burst",
    "Client",
    "DeadObject",
    "Device",
    "DeviceInfo",
    "DeviceUnavailable",
    "ErrorStatus",
    "ExecutionInfo",
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
