"""Permission to use AMX's tile registers, which Linux gives to a process that asks for it.

The kernel saves 8 KiB of tiles for each thread that has used them, and gives none to a process that has not asked. The
permission holds for all threads and for forked children, and ends at execve(2).
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

__all__ = ["request_tile_registers"]

_SYS_ARCH_PRCTL = 158  # of x86-64
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


@cache
def request_tile_registers() -> bool:
    """Return whether this process may use tile registers from now on. False before Linux 5.16.

    A thread whose alternative signal stack is too small for the larger signal frame also makes the kernel refuse.
    """
    if os.uname().machine != "x86_64":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)
