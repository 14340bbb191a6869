"""Compilation of those kernels of a model that the driver's cache lacks, and their entries in it.

Models have kernels in common: one with another batch or other weights has nearly all of them. The object code of each
kernel is an entry of the cache (`cache.programs`). Its digest covers what decides the code: the kernel's description,
the target, the device and the build. So entries are read, sealed, shared by users, removed and written like programs,
by the same processes. What is found becomes a part of the program like what was compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nnfmq.driver.cache.files import DeviceIdentity
from nnfmq.driver.cache.programs import CacheEntry, kernel_entries, store_bytes
from nnfmq.driver.compilation.jobs import compile_in_processes

if TYPE_CHECKING:
    from nnfmq.engines.compiled.kernels import Kernel
    from nnfmq.engines.compiled.target import Target

__all__ = ["KernelCache"]


class KernelCache:
    """Compiles the kernels of one program that `device` prepares."""

    def __init__(self, device: DeviceIdentity) -> None:
        self._device = device
        self._compiled: dict[CacheEntry, bytes] = {}

    def compile(self, kernels: Sequence[Kernel], target: Target, meanwhile: Callable[[], None]) -> list[bytes]:
        """Return the object code of each kernel: the engine's `Compile`. Blocks.

        Calls `meanwhile` once. Raises what it raises, and the errors of `compile_in_processes`.
        """
        from nnfmq.engines.compiled.kernel_compilation import unique_kernels

        different = unique_kernels(kernels)
        entries = kernel_entries(self._device, target.name, map(repr, different))
        loaded = [entry.load_bytes() for entry in entries] or [None] * len(different)
        found = [code for code in loaded if code is not None]
        missing = [kernel for kernel, code in zip(different, loaded, strict=True) if code is None]
        if not missing:
            meanwhile()
            return found
        compiled = compile_in_processes(missing, target, meanwhile)
        lacking = [entry for entry, code in zip(entries, loaded, strict=False) if code is None]
        self._compiled.update(zip(lacking, compiled, strict=False))  # no entries: the cache is disabled
        return [*found, *compiled]

    def store(self) -> None:
        """Store what was compiled, once the program was linked. Blocks as `store_bytes`. Failures are logged."""
        compiled, self._compiled = self._compiled, {}
        if compiled:
            store_bytes(compiled)
