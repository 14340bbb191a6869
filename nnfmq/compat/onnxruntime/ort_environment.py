"""Functions of ONNX Runtime about the whole process: versions, providers, logging."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from typing import Any

from nnfmq.compat.onnxruntime.ort_providers import CPU
from nnfmq.compat.onnxruntime.unavailable import unavailable_function

__all__ = [
    "VERSION",
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

VERSION = "1.32.0"
"""The version of ONNX Runtime whose interface this is."""


def get_version_string() -> str:
    """Return the version of ONNX Runtime whose interface this is."""
    return VERSION


def get_build_info() -> str:
    """Return a line about this package."""
    return f"nnfmq, with the interface of ONNX Runtime {VERSION}"


def get_available_providers() -> list[str]:
    """Return the name of the only provider."""
    return [CPU]


def get_all_providers() -> list[str]:
    """Return the name of the only provider."""
    return [CPU]


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
