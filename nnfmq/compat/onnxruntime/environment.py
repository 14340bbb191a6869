"""Functions of ONNX Runtime about the whole process: versions, logging; and the names that nnfmq does not have."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from nnfmq.compat.onnxruntime.errors import ort_error
from nnfmq.compat.onnxruntime.providers import get_all_providers, get_available_providers
from nnfmq.compat.onnxruntime.types import OrtAllocatorType, OrtMemType

# The names of ONNX Runtime, which the package has as well; other modules here import further ones.
__all__ = [
    "AdapterFormat",
    "LoraAdapter",
    "ModelCompiler",
    "ModelPackage",
    "ModelPackageComponentContext",
    "ModelPackageContext",
    "ModelPackageOptions",
    "OrtArenaCfg",
    "OrtEpAssignedNode",
    "OrtEpAssignedSubgraph",
    "OrtEpContextData",
    "OrtEpContextDataBuffer",
    "OrtEpDevice",
    "OrtExternalInitializerInfo",
    "OrtHardwareDevice",
    "OrtMemoryInfo",
    "OrtSyncStream",
    "SessionIOBinding",
    "SparseTensor",
    "create_and_register_allocator",
    "create_and_register_allocator_v2",
    "disable_telemetry_events",
    "enable_telemetry_events",
    "get_all_providers",
    "get_available_providers",
    "get_build_info",
    "get_device",
    "get_ep_devices",
    "get_version_string",
    "has_collective_ops",
    "preload_dlls",
    "print_debug_info",
    "register_execution_provider_library",
    "set_default_logger_callback",
    "set_default_logger_severity",
    "set_default_logger_verbosity",
    "set_global_thread_pool_sizes",
    "set_seed",
    "unregister_execution_provider_library",
]


class OrtMemoryInfo:
    """The memory of a tensor: by default the CPU's."""

    def __init__(
        self,
        name: str = "Cpu",
        allocator_type: OrtAllocatorType = OrtAllocatorType.ORT_DEVICE_ALLOCATOR,
        device_id: int = 0,
        mem_type: OrtMemType = OrtMemType.DEFAULT,
    ) -> None:
        self.name = name
        self.allocator_type = allocator_type
        self.device_id = device_id
        self.mem_type = mem_type
        self.device_mem_type = 0
        self.device_vendor_id = 0

    @classmethod
    def create_v2(cls, name: str = "Cpu", *others: Any) -> OrtMemoryInfo:
        """Return the description of a memory; all but its name is ignored."""
        return cls(name)


# ----------------------------------------------------------------------------------------------------------------------
# Names of ONNX Runtime that nnfmq does not have: using one raises NotImplemented with the reason.


class _Unavailable(type):
    """The type of classes whose use raises: making an object, and reading an attribute."""

    reason: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise ort_error("NotImplemented", f"nnfmq has no {cls.__name__}: {cls.reason}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise ort_error("NotImplemented", f"nnfmq has no {cls.__name__}.{name}: {cls.reason}")


UNAVAILABLE_CLASSES: dict[str, type] = {}
"""Name → class whose use raises."""


def _unavailable(name: str, reason: str) -> Any:
    made = _Unavailable(name, (), {"reason": reason, "__module__": __name__, "__doc__": f"Not available: {reason}."})
    return UNAVAILABLE_CLASSES.setdefault(name, made)


_COMPILED = "models compiled for an execution provider cannot be written or read"
_PACKAGE = "model packages of ONNX Runtime cannot be read"
_LORA = "LoRA adapters cannot be read"
_DEVICES = "the driver's devices are those of `nnfmq devices`"
AdapterFormat = _unavailable("AdapterFormat", _LORA)
LoraAdapter = _unavailable("LoraAdapter", _LORA)
ModelCompiler = _unavailable("ModelCompiler", _COMPILED)
ModelPackage = _unavailable("ModelPackage", _PACKAGE)
ModelPackageComponentContext = _unavailable("ModelPackageComponentContext", _PACKAGE)
ModelPackageContext = _unavailable("ModelPackageContext", _PACKAGE)
ModelPackageOptions = _unavailable("ModelPackageOptions", _PACKAGE)
OrtArenaCfg = _unavailable("OrtArenaCfg", "the driver allocates memory itself")
OrtEpAssignedNode = _unavailable("OrtEpAssignedNode", "a graph is not divided among providers")
OrtEpAssignedSubgraph = _unavailable("OrtEpAssignedSubgraph", "a graph is not divided among providers")
OrtEpContextData = _unavailable("OrtEpContextData", _COMPILED)
OrtEpContextDataBuffer = _unavailable("OrtEpContextDataBuffer", _COMPILED)
OrtEpDevice = _unavailable("OrtEpDevice", _DEVICES)
OrtExternalInitializerInfo = _unavailable("OrtExternalInitializerInfo", _COMPILED)
OrtHardwareDevice = _unavailable("OrtHardwareDevice", _DEVICES)
OrtSyncStream = _unavailable("OrtSyncStream", "runs end before they return; there are no streams")
SessionIOBinding = _unavailable("SessionIOBinding", "use InferenceSession.io_binding")
SparseTensor = _unavailable("SparseTensor", "tensors are dense")
UNAVAILABLE_MODULES = {
    "backend": "the interface of onnx.backend",
    "datasets": "the example models",
    "experimental": "experiments",
    "quantization": "the quantizer; use ONNX Runtime's, or nnfmq's own for TensorFlow Lite files",
    "tools": "the tools",
    "training": "training",
    "transformers": "the optimizer of transformers",
}
"""Modules of ONNX Runtime, and what is in them."""


def unavailable_function(name: str, reason: str) -> Any:
    """Return a function that raises NotImplemented."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise ort_error("NotImplemented", f"nnfmq has no {name}: {reason}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Raise NotImplemented: {reason}."
    return refuse


# ----------------------------------------------------------------------------------------------------------------------
# Functions of ONNX Runtime about the whole process: versions, logging.


VERSION = "1.32.0"
"""The version of ONNX Runtime whose interface this is."""


def get_version_string() -> str:
    """Return the version of ONNX Runtime whose interface this is."""
    return VERSION


def get_build_info() -> str:
    """Return a line about this package."""
    return f"nnfmq, with the interface of ONNX Runtime {VERSION}"


def get_device() -> str:
    """Return "CPU"."""
    return "CPU"


def get_ep_devices() -> list[Any]:
    """Return an empty list: the driver's devices are no devices of ONNX Runtime."""
    return []


def has_collective_ops() -> bool:
    """Return False."""
    return False


def set_default_logger_severity(severity: int) -> None:
    """Accept 0 to 4; without effect. Raises RuntimeError for others."""
    if not 0 <= severity <= 4:
        raise RuntimeError("Invalid logging severity. 0:Verbose, 1:Info, 2:Warning, 3:Error, 4:Fatal")


def set_default_logger_verbosity(verbosity: int) -> None:
    """Accept a level; without effect."""


def set_default_logger_callback(callback: Callable[..., None] | None, severity: int = 2) -> None:
    """Accept a function; nnfmq logs with the module `logging` and never calls it."""


def set_seed(seed: int) -> None:
    """Accept a seed; without effect."""


def set_global_thread_pool_sizes(intra_op: int, inter_op: int) -> None:
    """Accept numbers of threads; without effect."""


def enable_telemetry_events() -> None:
    """Do nothing: there is no telemetry."""


def disable_telemetry_events() -> None:
    """Do nothing: there is no telemetry."""


def create_and_register_allocator(mem_info: Any, arena_cfg: Any) -> None:
    """Accept an allocator; without effect."""


def create_and_register_allocator_v2(provider: str, mem_info: Any, options: Any, arena_cfg: Any) -> None:
    """Accept an allocator; without effect."""


def preload_dlls(cuda: bool = True, cudnn: bool = True, msvc: bool = True, directory: str | None = None) -> None:
    """Do nothing: no library needs it."""


def print_debug_info() -> None:
    """Print the versions of Python and of this package."""
    print(get_build_info())
    print(f"platform: {platform.platform()}, Python {sys.version.split()[0]}")


_LIBRARIES = "execution providers are libraries for ONNX Runtime"
register_execution_provider_library = unavailable_function("register_execution_provider_library", _LIBRARIES)
unregister_execution_provider_library = unavailable_function("unregister_execution_provider_library", _LIBRARIES)
