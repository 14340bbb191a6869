"""Compilation of kernels: their encoding for compile processes, what these inherit, and the shards that they take.

A kernel is a frozen dataclass of plain values, enum members, tuples of these, and further dataclasses. A dataclass is
encoded as {"module.Class": [its fields in order]}, an enum member as {"module.Class": [its value]}. Only classes of the
modules of `kernels`, and the struct `WindowDimension`, have such names, so decoding creates nothing else. The modules
of a sub-package would not be found.

Field types are exact: a subclass of int or float, such as NumPy's, has another `repr`, and the `repr` is the kernel's
symbol name (`kernels.symbol_name`).
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import cache
from typing import Any, TypeAlias

import msgspec

from nnfmq.engines.compiled import kernels as kernel_package
from nnfmq.engines.compiled.kernels import Kernel, symbol_name
from nnfmq.engines.compiled.target import TARGETS, Target, host_target
from nnfmq.hal.errors import InvalidArgument
from nnfmq.operations.shapes import WindowDimension

__all__ = [
    "Compile",
    "Meanwhile",
    "ProgressCallback",
    "compile_each",
    "compile_in_process",
    "decode_kernels",
    "encode_kernels",
    "kernel_types",
    "nothing_meanwhile",
    "shard_kernels",
    "total_compile_cost",
    "unique_kernels",
    "warm_up",
]

_PLAIN_TYPES = (bool, int, float, str, type(None))


@cache
def kernel_types() -> Mapping[str, type[Any]]:
    """Return every dataclass and enum that a kernel may contain, by name. Imports all modules of `kernels`."""
    modules = [
        importlib.import_module(f"{kernel_package.__name__}.{module.name}")
        for module in pkgutil.iter_modules(kernel_package.__path__)
    ]
    found = {
        f"{module.__name__.rpartition('.')[2]}.{name}": value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, type)
        and (dataclasses.is_dataclass(value) or issubclass(value, Enum))
        and value.__module__ == module.__name__
    }
    return {**found, "WindowDimension": WindowDimension}


@cache
def warm_up() -> None:
    """Import all kernels and LLVM, and generate code once. Idempotent.

    Called before a fork, so that compile processes start without that delay.
    """
    from nnfmq.engines.compiled.code_generator import compile_kernels

    kernel_types()
    with suppress(InvalidArgument):  # this machine has no target: each preparation reports that
        compile_kernels([], host_target())


@cache
def _type_names() -> Mapping[type[Any], str]:
    return {kind: name for name, kind in kernel_types().items()}


def encode_kernels(kernels: Sequence[Kernel], target: Target) -> bytes:
    """Return kernels and the target to compile them for as bytes.

    Raises:
        TypeError: If a kernel contains a value of another type.
    """
    return msgspec.msgpack.encode((target.name, [_encode(kernel) for kernel in kernels]))


def decode_kernels(data: bytes | bytearray) -> tuple[list[Kernel], Target]:
    """Return the kernels and the target that were encoded."""
    name, kernels = msgspec.msgpack.decode(data)
    return [_decode(kernel) for kernel in kernels], TARGETS[name]


def _encode(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return value
    if kind is tuple:
        return [_encode(item) for item in value]
    if kind not in _type_names():
        raise TypeError(f"{value!r:.80} is a {kind.__name__}, which a kernel must not contain")
    if isinstance(value, Enum):
        return {_type_names()[kind]: [value.value]}
    return {_type_names()[kind]: [_encode(getattr(value, name)) for name in kind.__match_args__]}


def _decode(data: Any) -> Any:
    if isinstance(data, dict):
        ((name, fields),) = data.items()
        return kernel_types()[name](*map(_decode, fields))
    return tuple(map(_decode, data)) if isinstance(data, list) else data


# ----------------------------------------------------------------------------------------------------------------------
# Shards, and compilation on the calling thread. LLVM is imported by the first one, not together with this module.
#
# Each kernel is compiled to an object file of its own, so that programs can share it. A driver's compile processes take
# the kernels of a program in shards, one after the other (`driver.compilation.jobs`), and progress is counted in them.
# Shards cost about the same by an estimate for each kernel class. The estimate may be rough, because a process takes
# the next shard when it has finished one.


Meanwhile: TypeAlias = Callable[[], None]
"""What the calling thread does while other processes compile. It is called once; an exception ends the compilation."""

Compile: TypeAlias = Callable[[Sequence[Kernel], Target, Meanwhile], list[bytes]]
"""Returns object code, in one part or more, that together defines each kernel's function."""

ProgressCallback: TypeAlias = Callable[[int, int], None]
"""Receives the number of compiled kernels and of all kernels. An exception that it raises ends the compilation."""


def unique_kernels(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Return one kernel of each symbol name."""
    return list({symbol_name(kernel): kernel for kernel in kernels}.values())


def total_compile_cost(kernels: Iterable[Kernel]) -> int:
    """Return the estimated time to compile kernels, in units of about 20 ms."""
    return sum(kernel.compile_cost for kernel in kernels)


def shard_kernels(kernels: Sequence[Kernel], count: int) -> list[list[Kernel]]:
    """Return different kernels in at most `count` shards of about equal cost, the most expensive first, none empty."""
    shards: list[list[Kernel]] = [[] for _ in range(min(count, len(kernels)))]
    for kernel in sorted(kernels, key=lambda kernel: -kernel.compile_cost):
        min(shards, key=total_compile_cost).append(kernel)
    return sorted(shards, key=lambda shard: -total_compile_cost(shard))


def compile_each(kernels: Sequence[Kernel], target: Target, on_progress: ProgressCallback) -> list[bytes]:
    """Return the object code of each kernel. Compiles on this thread, and calls `on_progress` after each kernel."""
    from nnfmq.engines.compiled.code_generator import compile_kernels  # imports LLVM

    object_code = []
    on_progress(0, len(kernels))
    for done, kernel in enumerate(kernels, start=1):
        object_code.append(compile_kernels([kernel], target))
        on_progress(done, len(kernels))
    return object_code


def _no_progress(_done: int, _total: int) -> None:
    """Ignore progress."""


def nothing_meanwhile() -> None:
    """Do nothing: a `Meanwhile`."""


def compile_in_process(
    kernels: Sequence[Kernel],
    target: Target,
    meanwhile: Meanwhile = nothing_meanwhile,
    on_progress: ProgressCallback = _no_progress,
) -> list[bytes]:
    """Return the object code of kernels, compiled on this thread after `meanwhile`: a `Compile`."""
    meanwhile()
    return compile_each(unique_kernels(kernels), target, on_progress)
