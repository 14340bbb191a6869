"""Execution providers: there is one, the CPU's, whose work the driver does."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from nnfmq.compat.onnxruntime.ort_types import OrtAllocatorType, OrtMemType

__all__ = ["CPU", "OrtMemoryInfo", "checked_providers"]

CPU = "CPUExecutionProvider"


def checked_providers(providers: Any, provider_options: Any) -> None:
    """Warn of providers that there are not, as ONNX Runtime does.

    Raises:
        ValueError: If an argument has another form than names, or names with options.
    """
    if providers is None:
        return
    if not isinstance(providers, Sequence):
        raise ValueError(f"providers is a {type(providers).__name__}: it must be a sequence")
    if provider_options is not None:
        _check_options(providers, provider_options)
    for provider in providers:
        name = provider[0] if isinstance(provider, tuple) and len(provider) == 2 else provider
        if not isinstance(name, str):
            raise ValueError(f"{name!r} among the providers is neither a name nor a pair of a name and a dict")
        if name != CPU:
            text = f"there is no provider {name!r}, which is ignored: {CPU!r} is the only one"
            warnings.warn(text, stacklevel=4)


def _check_options(providers: Sequence[Any], options: Any) -> None:
    if not isinstance(options, Sequence):
        raise ValueError(f"provider_options is a {type(options).__name__}: it must be a sequence")
    if len(providers) != len(options):
        raise ValueError("'providers' and 'provider_options' should be the same length if both are given.")
    if not all(isinstance(provider, str) for provider in providers):
        raise ValueError("Only string values for 'providers' are supported if 'provider_options' is given.")
    if not all(isinstance(option, dict) for option in options):
        raise ValueError("'provider_options' values must be dicts.")


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
