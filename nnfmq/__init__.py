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
    from nnfmq.audio import read_audio
    from nnfmq.class_scores import ClassScore, read_labels, top_classes
    from nnfmq.fence import Fence
    from nnfmq.file_memory import FileMemory
    from nnfmq.hal.tensor_info import StateInfo, TensorInfo
    from nnfmq.hal.types import ExecutionPreference, FenceState
    from nnfmq.images import read_photo
    from nnfmq.importers import LoadedModel, ModelMetadata, TensorMetadata, example_path, load
    from nnfmq.memory import Memory
    from nnfmq.model_builder.builder import ModelBuilder
    from nnfmq.runtime.async_execution import PendingExecution
    from nnfmq.runtime.buffer_allocation import allocate
    from nnfmq.runtime.burst_controller import Burst
    from nnfmq.runtime.burst_pool import BurstPool
    from nnfmq.runtime.client import Client
    from nnfmq.runtime.client_device import Device, DeviceInfo
    from nnfmq.runtime.compiled_model import CompiledModel
    from nnfmq.runtime.connect import connect
    from nnfmq.runtime.devices.nnapi_runtime import Runtime
    from nnfmq.runtime.devices.runtime_device import RuntimeDevice
    from nnfmq.runtime.execution_result import ExecutionInfo
    from nnfmq.runtime.fenced_execution import FencedExecution
    from nnfmq.runtime.managed_buffer import Buffer
    from nnfmq.runtime.memory_copy import copy
    from nnfmq.runtime.model_burst import ModelBurst
    from nnfmq.runtime.named_models.served_model import ServedModel
    from nnfmq.runtime.one_call import run
    from nnfmq.runtime.outputs import Outputs
    from nnfmq.runtime.prepared_model import PreparedModel
    from nnfmq.runtime.reusable_execution import Execution

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
        "Burst": "nnfmq.runtime.burst_controller",
        "ExecutionInfo": "nnfmq.runtime.execution_result",
        **dict.fromkeys(("Device", "DeviceInfo"), "nnfmq.runtime.client_device"),
        **dict.fromkeys(("LoadedModel", "ModelMetadata", "TensorMetadata", "example_path", "load"), "nnfmq.importers"),
        "Buffer": "nnfmq.runtime.managed_buffer",
        "BurstPool": "nnfmq.runtime.burst_pool",
        "Client": "nnfmq.runtime.client",
        "CompiledModel": "nnfmq.runtime.compiled_model",
        "connect": "nnfmq.runtime.connect",
        "copy": "nnfmq.runtime.memory_copy",
        "allocate": "nnfmq.runtime.buffer_allocation",
        "Execution": "nnfmq.runtime.reusable_execution",
        "Fence": "nnfmq.fence",
        **dict.fromkeys(("ExecutionPreference", "FenceState"), "nnfmq.hal.types"),
        "FencedExecution": "nnfmq.runtime.fenced_execution",
        "FileMemory": "nnfmq.file_memory",
        "Memory": "nnfmq.memory",
        "ModelBuilder": "nnfmq.model_builder.builder",
        "ModelBurst": "nnfmq.runtime.model_burst",
        "Outputs": "nnfmq.runtime.outputs",
        "PendingExecution": "nnfmq.runtime.async_execution",
        "PreparedModel": "nnfmq.runtime.prepared_model",
        "Runtime": "nnfmq.runtime.devices.nnapi_runtime",
        "RuntimeDevice": "nnfmq.runtime.devices.runtime_device",
        "ServedModel": "nnfmq.runtime.named_models.served_model",
        "run": "nnfmq.runtime.one_call",
        "read_audio": "nnfmq.audio",
        "read_photo": "nnfmq.images",
        **dict.fromkeys(("ClassScore", "read_labels", "top_classes"), "nnfmq.class_scores"),
        **dict.fromkeys(("StateInfo", "TensorInfo"), "nnfmq.hal.tensor_info"),
    }

    def __getattr__(name):
        """Import a public name when it is first used, and store it in the module."""
        if name == "__version__":
            from nnfmq.installed_version import installed_version

            return globals().setdefault(name, installed_version("nnfmq") or "0+unknown")
        if name not in _MODULES:
            raise AttributeError(f"module 'nnfmq' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return value

    def __dir__():
        """Return the names that are imported, and those that can be."""
        return sorted({*globals(), *__all__})
