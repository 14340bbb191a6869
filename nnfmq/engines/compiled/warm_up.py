"""Initialization of the compiler before a fork, so that compile processes start without that delay."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

from nnfmq.engines.compiled.jit import compile_kernels, host_target
from nnfmq.engines.compiled.kernel_serialization import kernel_types
from nnfmq.engines.compiled.thread_pool import pool_object_code
from nnfmq.hal.errors import InvalidArgument

__all__ = ["warm_up"]


@cache
def warm_up() -> None:
    """Import all kernels, initialize LLVM and compile the thread pool's functions. Idempotent."""
    kernel_types()
    with suppress(InvalidArgument):  # this machine has no target: each preparation reports that
        compile_kernels([], host_target())
        pool_object_code()
