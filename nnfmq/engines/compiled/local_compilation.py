"""Compilation on the calling thread. LLVM is imported by the first one, and not together with this module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from nnfmq.engines.compiled.jit import Kernel, shard_kernels, unique_kernels
from nnfmq.engines.compiled.target import Target

__all__ = ["ProgressCallback", "compile_in_process", "compile_shards"]

_SHARDS_IN_PROCESS = 8

ProgressCallback: TypeAlias = Callable[[int, int], None]
"""Receives the number of compiled kernels and of all kernels. An exception that it raises ends the compilation."""


def compile_shards(shards: Sequence[Sequence[Kernel]], target: Target, on_progress: ProgressCallback) -> list[bytes]:
    """Return the object code of each shard. Compiles on this thread, and calls `on_progress` after each shard."""
    from nnfmq.engines.compiled.code_generator import compile_kernels  # imports LLVM

    total, object_code = sum(map(len, shards)), []
    on_progress(0, total)
    for number, shard in enumerate(shards, start=1):
        object_code.append(compile_kernels(shard, target))
        on_progress(sum(map(len, shards[:number])), total)
    return object_code


def _no_progress(_done: int, _total: int) -> None:
    """Ignore progress."""


def compile_in_process(
    kernels: Sequence[Kernel], target: Target, on_progress: ProgressCallback = _no_progress
) -> list[bytes]:
    """Return the object code of kernels, compiled on this thread: a `Compile`."""
    shards = shard_kernels(unique_kernels(kernels), _SHARDS_IN_PROCESS)
    return compile_shards(shards, target, on_progress)
