"""Kernels as data: what travels to a process that compiles them.

A kernel is a frozen dataclass of plain numbers, names, tuples of these, and further dataclasses: a description has each
dataclass as its name and its fields in order. Only those of `kernels`, and the windows in them, have a name here, so
that decoding makes nothing else. Fields are of the very types that come back: a subclass of int or float (NumPy's,
enums) would have another `repr`, and so another name (`kernel.symbol_name`).
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from nnfmq.engines.compiled import kernels as families
from nnfmq.engines.compiled.jit import Kernel
from nnfmq.engines.compiled.target import TARGETS, Target
from nnfmq.operations.shapes import WindowDimension

__all__ = ["decode_kernels", "encode_kernels", "kernel_types"]

_PLAIN = (bool, int, float, str, type(None))


@cache
def kernel_types() -> Mapping[str, type[Any]]:
    """Return every dataclass that may be in a description, by the name that it has there. Imports all kernels."""
    modules = [
        importlib.import_module(f"{families.__name__}.{m.name}") for m in pkgutil.iter_modules(families.__path__)
    ]
    found = {
        f"{module.__name__.rpartition('.')[2]}.{name}": value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__ == module.__name__
    }
    return {**found, "WindowDimension": WindowDimension}


@cache
def _names() -> Mapping[type[Any], str]:
    return {kind: name for name, kind in kernel_types().items()}


def encode_kernels(kernels: Sequence[Kernel], target: Target) -> bytes:
    """Return kernels that are to be compiled for `target`, as bytes. Raises TypeError for what has no description."""
    return msgspec.msgpack.encode((target.name, [_data(kernel) for kernel in kernels]))


def decode_kernels(data: bytes | bytearray) -> tuple[list[Kernel], Target]:
    """Return what was described, equal to what it was."""
    name, kernels = msgspec.msgpack.decode(data)
    return [_value(kernel) for kernel in kernels], TARGETS[name]


def _data(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple:
        return [_data(one) for one in value]
    if kind not in _names():
        raise TypeError(f"{value!r:.80} is a {kind.__name__}, which has no place in the description of a kernel")
    return {_names()[kind]: [_data(getattr(value, field.name)) for field in dataclasses.fields(kind)]}


def _value(data: Any) -> Any:
    if isinstance(data, dict):
        ((name, fields),) = data.items()
        return kernel_types()[name](*map(_value, fields))
    return tuple(map(_value, data)) if isinstance(data, list) else data
