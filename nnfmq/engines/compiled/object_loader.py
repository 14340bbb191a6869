"""Loads object code into this process. The only module that makes memory executable.

Memory is first writable, and then either executable or read-only: never writable and executable at the same time, and
never writable again. It is unmapped with the last reference to its `LoadedCode`.

LLVM has a loader of its own, but a process that imports it has 40 MiB more resident memory, 5 MiB of them private. A
driver has a worker process for each client, which only loads what compile processes have compiled.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from functools import cache

from nnfmq.engines.compiled.object_linker import Linker
from nnfmq.hal.errors import GeneralFailure

__all__ = ["LIBRARY_FUNCTIONS", "LoadedCode"]

LIBRARY_FUNCTIONS = frozenset(
    [
        "acosf",
        "acoshf",
        "asinf",
        "asinhf",
        "atanf",
        "atanhf",
        "cosf",
        "coshf",
        "memcpy",
        "memset",
        "powf",
        "sinf",
        "sinhf",
        "syscall",
        "tanf",
    ]
)
"""Functions of the C library that object code may call. Kernels call all except syscall(2), which the thread pool does.

LLVM would call others for operations that the instruction set lacks, such as fmaf(3). Tests assert that it does not.
"""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class LoadedCode:
    """Object code in this process. Its functions stay callable as long as it is referenced. Immutable.

    Threads that run its functions must refer to it, daemon threads too: at the end of the interpreter objects that only
    modules refer to are freed, while such threads still run.
    """

    def __init__(self, object_code: Iterable[bytes]) -> None:
        """Link the object files and load them.

        Raises:
            GeneralFailure: If they are malformed, are for another machine, refer to a function that nothing defines, or
                if the system does not allow executable memory.
            MemoryError: If there is not enough memory.
        """
        linker = Linker(object_code)
        if linker.machine != os.uname().machine:
            raise GeneralFailure(f"object code cannot be loaded: it is for {linker.machine}")
        addresses = {name: _library_function(name) for name in linker.library_functions}
        self._memory = _anonymous_memory(linker.size_bytes)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        with memoryview(self._memory) as block:
            linker.write(block, self._base, addresses)
        _protect(self._base, linker.code_bytes, linker.size_bytes)
        self._offsets = linker.functions()

    def address(self, name: str) -> int:
        """Return the address of a function.

        Raises:
            GeneralFailure: If the object code does not define it.
        """
        if name not in self._offsets:
            raise GeneralFailure(f"object code cannot be loaded: nothing defines {name!r}")
        return self._base + self._offsets[name]


def _anonymous_memory(size_bytes: int) -> mmap.mmap:
    """Return private, zeroed and writable memory. It is unmapped when the object is freed."""
    try:
        return mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise MemoryError(f"{size_bytes} bytes for machine code: {error.strerror}") from error


@cache
def _library_function(name: str) -> int:
    """Return the address of a function of the C library.

    Raises:
        GeneralFailure: If generated code has no reason to call it.
    """
    if name not in LIBRARY_FUNCTIONS:
        raise GeneralFailure(f"object code cannot be loaded: it refers to {name!r}, which nothing defines")
    # An interpreter without libm of its own does not see the one that NumPy has loaded, unless it asks for that.
    library = _libc if hasattr(_libc, name) else ctypes.CDLL("libm.so.6")
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


def _protect(address: int, code_bytes: int, size_bytes: int) -> None:
    """Make the first part of the memory executable and the rest read-only."""
    if os.uname().machine == "aarch64":
        _synchronize_instruction_cache(address, code_bytes)
    parts = [(address, code_bytes, mmap.PROT_READ | mmap.PROT_EXEC)]
    if size_bytes > code_bytes:
        parts.append((address + code_bytes, size_bytes - code_bytes, mmap.PROT_READ))
    for start, size, protection in parts:
        if _libc.mprotect(start, size, protection):
            reason = os.strerror(ctypes.get_errno())
            raise GeneralFailure(f"machine code cannot be loaded: mprotect(2) of executable memory: {reason}")


def _synchronize_instruction_cache(address: int, size_bytes: int) -> None:
    """Let all CPUs fetch the instructions that were just written.

    On AArch64 instruction fetches need not see earlier writes to memory until both caches were cleaned to the point of
    unification (Arm ARM, B2.4). x86-64 fetches what was written. The function is libgcc's, which every process with
    libstdc++ or NumPy has loaded.
    """
    ctypes.CDLL("libgcc_s.so.1").__clear_cache(ctypes.c_void_p(address), ctypes.c_void_p(address + size_bytes))
