"""Execution providers: the CPU's, whose work the driver does, and those of an ONNX Runtime that the driver hosts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from nnfmq.compat.shared_client import DriverShare
from nnfmq.hal.errors import NnfmqError

__all__ = [
    "CPU",
    "Provider",
    "UnknownProvider",
    "available_providers",
    "checked_providers",
    "get_all_providers",
    "get_available_providers",
    "is_accelerator",
    "require_known",
]

CPU = "CPUExecutionProvider"
_AZURE = "AzureExecutionProvider"  # it has no operator but its own, which send data to a service
Provider: TypeAlias = tuple[str, Mapping[str, Any]]
"""The name of an execution provider and its options."""
_ALL = (
    "Tensorrt", "CUDA", "MIGraphX", "OpenVINO", "Dnnl", "VitisAI", "QNN", "Nnapi", "VSINPU", "Js", "CoreML", "Dml",
    "Rknpu", "WebNN", "WebGpu", "Xnnpack", "CANN", "Azure", "CPU",
)  # fmt: skip
# ir_version 8, a graph without nodes whose input "x" of floats is its output, opset 17
_MODEL = b"\x08\x08:\x19\x12\x01gZ\t\n\x01x\x12\x04\n\x02\x08\x01b\t\n\x01x\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\x11"


def get_all_providers() -> list[str]:
    """Return the names of all providers for which ONNX Runtime 1.32 has code, in its order of precedence."""
    return [f"{name}ExecutionProvider" for name in _ALL]


def get_available_providers() -> list[str]:
    """Return the names of the providers of ONNX Runtime in the driver; the CPU's alone if the driver does not host it.

    Blocks: it connects to the driver, or starts an embedded one for the question.
    """
    owner = _Owner()
    share = DriverShare(owner)
    try:
        return available_providers(share)
    finally:
        share.abandon()


class _Owner:
    """Has a connection for as long as it exists."""


def available_providers(share: DriverShare) -> list[str]:
    """Return the result of `get_available_providers` over a connection that exists; blocks."""
    found: Sequence[str] = ()
    with suppress(NnfmqError):  # the driver does not host ONNX Runtime, or cannot be reached
        found = share.client().device("onnxruntime").describe(_MODEL).providers
    return list(found) or [CPU]


class UnknownProvider(RuntimeError):
    """A provider for which ONNX Runtime has no code; the text is ONNX Runtime's."""


def require_known(providers: Sequence[Provider]) -> None:
    """Raise UnknownProvider if ONNX Runtime has no code for one."""
    for name, _ in providers:
        if name not in get_all_providers():
            raise UnknownProvider(f"Unknown Provider Type: {name}")


def is_accelerator(provider: Provider) -> bool:
    """Return whether a provider may execute a node that the CPU's would execute."""
    return provider[0] not in (CPU, _AZURE)


def checked_providers(providers: Any, provider_options: Any) -> list[Provider]:
    """Return the names of providers, each with its options.

    Raises:
        ValueError: If an argument has another form than names, or names with options.
        TypeError: If the providers cannot be iterated.
    """
    if providers is None:
        return []
    iter(providers or ())  # ONNX Runtime reads all before it checks them: a number is a TypeError, without a fallback
    if not isinstance(providers, Sequence):
        raise ValueError("'providers' should be a sequence.")
    if provider_options is not None:
        _check_options(providers, provider_options)
    found: dict[str, Mapping[str, Any]] = {}
    for index, provider in enumerate(providers):
        is_pair = isinstance(provider, tuple) and len(provider) == 2
        name, options = provider if is_pair else (provider, provider_options[index] if provider_options else {})
        if not isinstance(name, str) or not isinstance(options, dict):
            raise ValueError("'providers' values must be either strings or (string, dict) tuples.")
        if name in found:
            warnings.warn(f"Duplicate provider '{name}' encountered, ignoring.", stacklevel=3)
        found.setdefault(name, options)
    return list(found.items())


def _check_options(providers: Sequence[Any], options: Any) -> None:
    if not isinstance(options, Sequence):
        raise ValueError("'provider_options' should be a sequence.")
    if len(providers) != len(options):
        raise ValueError("'providers' and 'provider_options' should be the same length if both are given.")
    if not all(isinstance(provider, str) for provider in providers):
        raise ValueError("Only string values for 'providers' are supported if 'provider_options' is given.")
    if not all(isinstance(option, dict) for option in options):
        raise ValueError("'provider_options' values must be dicts.")
