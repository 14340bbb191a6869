"""Run neural networks in a separate driver process, with a round trip of a few microseconds.

    import nnfmq
    scores, = nnfmq.run("model.tflite", image)

    with nnfmq.connect() as client:
        model = client.prepare("model.tflite")
        with model.burst() as burst:
            scores, = burst.execute(image)

Importing this package is fast: all names except the errors are imported when they are first used.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from nnfmq.hal import errors as _errors
from nnfmq.hal.errors import *  # noqa: F403  its `__all__`, so that a new error is public as soon as it is defined

if TYPE_CHECKING:
    from nnfmq.base.fence import Fence
    from nnfmq.base.file_memory import FileMemory
    from nnfmq.base.memory import Memory
    from nnfmq.client.burst.burst import Burst, ModelBurst
    from nnfmq.client.burst.pool import BurstPool
    from nnfmq.client.connection.client import Client
    from nnfmq.client.connection.connect import connect
    from nnfmq.client.connection.device import Device, DeviceInfo
    from nnfmq.client.execution.asynchronous import PendingExecution
    from nnfmq.client.execution.fenced import FencedExecution
    from nnfmq.client.execution.reusable import Execution
    from nnfmq.client.model.arrays import ExecutionInfo, Outputs
    from nnfmq.client.model.buffer_allocation import allocate
    from nnfmq.client.model.buffers import Buffer, copy
    from nnfmq.client.model.compiled_model import CompiledModel
    from nnfmq.client.model.prepared_model import PreparedModel
    from nnfmq.client.named.models import ServedModel
    from nnfmq.client.partitioned.devices import RuntimeDevice
    from nnfmq.client.partitioned.runtime import Runtime
    from nnfmq.client.run import run
    from nnfmq.hal.tensor_info import StateInfo, TensorInfo
    from nnfmq.hal.types import ExecutionPreference, FenceState
    from nnfmq.importers import LoadedModel, ModelMetadata, TensorMetadata, example_path, load
    from nnfmq.media.audio import read_audio
    from nnfmq.media.class_scores import ClassScore, read_labels, top_classes
    from nnfmq.media.images import read_photo
    from nnfmq.model_builder.builder import ModelBuilder

    __version__: str

__all__ = [
    "Buffer",
    "Burst",
    "BurstPool",
    "ClassScore",
    "Client",
    "CompiledModel",
    "Device",
    "DeviceInfo",
    "Execution",
    "ExecutionInfo",
    "ExecutionPreference",
    "Fence",
    "FenceState",
    "FencedExecution",
    "FileMemory",
    "LoadedModel",
    "Memory",
    "ModelBuilder",
    "ModelBurst",
    "ModelMetadata",
    "Outputs",
    "PendingExecution",
    "PreparedModel",
    "Runtime",
    "RuntimeDevice",
    "ServedModel",
    "StateInfo",
    "TensorInfo",
    "TensorMetadata",
    "__version__",
    "allocate",
    "connect",
    "copy",
    "example_path",
    "load",
    "read_audio",
    "read_labels",
    "read_photo",
    "run",
    "top_classes",
]
__all__ += _errors.__all__
__all__.sort()

if not TYPE_CHECKING:  # type checkers accept any name of a module with a `__getattr__`
    _MODULES = {
        name: module
        for module, names in {
            "nnfmq.base.fence": ("Fence",),
            "nnfmq.base.file_memory": ("FileMemory",),
            "nnfmq.base.memory": ("Memory",),
            "nnfmq.client.burst.burst": ("Burst", "ModelBurst"),
            "nnfmq.client.burst.pool": ("BurstPool",),
            "nnfmq.client.connection.client": ("Client",),
            "nnfmq.client.connection.connect": ("connect",),
            "nnfmq.client.connection.device": ("Device", "DeviceInfo"),
            "nnfmq.client.execution.asynchronous": ("PendingExecution",),
            "nnfmq.client.execution.fenced": ("FencedExecution",),
            "nnfmq.client.execution.reusable": ("Execution",),
            "nnfmq.client.model.arrays": ("ExecutionInfo", "Outputs"),
            "nnfmq.client.model.buffer_allocation": ("allocate",),
            "nnfmq.client.model.buffers": ("Buffer", "copy"),
            "nnfmq.client.model.compiled_model": ("CompiledModel",),
            "nnfmq.client.model.prepared_model": ("PreparedModel",),
            "nnfmq.client.named.models": ("ServedModel",),
            "nnfmq.client.partitioned.devices": ("RuntimeDevice",),
            "nnfmq.client.partitioned.runtime": ("Runtime",),
            "nnfmq.client.run": ("run",),
            "nnfmq.hal.tensor_info": ("StateInfo", "TensorInfo"),
            "nnfmq.hal.types": ("ExecutionPreference", "FenceState"),
            "nnfmq.importers": ("LoadedModel", "ModelMetadata", "TensorMetadata", "example_path", "load"),
            "nnfmq.media.audio": ("read_audio",),
            "nnfmq.media.class_scores": ("ClassScore", "read_labels", "top_classes"),
            "nnfmq.media.images": ("read_photo",),
            "nnfmq.model_builder.builder": ("ModelBuilder",),
        }.items()
        for name in names
    }

    def __getattr__(name):
        """Import a public name when it is first used, and store it in the module."""
        if name == "__version__":
            from nnfmq.base.packages import installed_version

            return globals().setdefault(name, installed_version("nnfmq") or "0+unknown")
        if name not in _MODULES:
            raise AttributeError(f"module 'nnfmq' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return value

    def __dir__():
        """Return the names that are imported, and those that can be."""
        return sorted({*globals(), *__all__})
