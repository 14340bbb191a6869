"""What plain Python needs from below: futex(2), atomic read-modify-write of a futex word, CPU and timer, by ctypes.

Addresses are numbers here: who calls keeps the memory mapped meanwhile. Python has no atomic OR; libatomic has, and
where it is not installed the kernel does it (FUTEX_WAKE_OP). Calls that cannot wait keep the GIL. Sleeping on many
words at once (futex_waitv) is here for both cores. Left out: the private kind of futex, requeueing, priority
inheritance. FMQ_FACTS 1.7 and 1.9.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence
from errno import EAGAIN, EINTR, EINVAL, ETIMEDOUT
from typing import Protocol

ALL_BITS = 0xFFFFFFFF

_SYS_FUTEX = 202 if platform.machine() == "x86_64" else 98  # 98 is the generic number: AArch64, RISC-V
_SYS_FUTEX_WAITV = 449  # on every machine
_WAKE_OP, _WAIT_BITSET, _WAKE_BITSET = 5, 9, 10  # the shared kind: no FUTEX_PRIVATE_FLAG
_OP_OR, _OP_ANDN, _OP_ARG_SHIFT = 2, 3, 8
_INT_MAX = 2**31 - 1
_END_OF_CLOCK_NS = 2**63 - 1  # what the kernel can count, 292 years
_SIZE_U32 = 2  # of a word of futex_waitv: 32 bits; shared, for want of FUTEX2_PRIVATE
_CLOCK_MONOTONIC = 1

WAITV_MAX = 128
"""How many words one futex_waitv can sleep on."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _WaitvEntry(ctypes.Structure):
    _fields_ = (
        ("expected", ctypes.c_uint64), ("address", ctypes.c_uint64), ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )  # fmt: skip


_FUTEX_ARGUMENTS = (
    ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32
)  # fmt: skip
_sleeping_call = ctypes.CDLL(None, use_errno=True).syscall  # releases the GIL
_quick_call = ctypes.PyDLL(None, use_errno=True).syscall  # keeps it: these never wait
_sleeping_call.argtypes = _quick_call.argtypes = _FUTEX_ARGUMENTS
_sleeping_call.restype = _quick_call.restype = ctypes.c_long


def futex_wake(address: int, mask: int) -> int:
    """Wake everybody who sleeps on a bit of `mask`; return how many."""
    return int(_quick_call(_SYS_FUTEX, address, _WAKE_BITSET, _INT_MAX, None, None, mask))


def futex_wait(address: int, expected: int, deadline_ns: int | None, mask: int) -> int:
    """Sleep while the word is `expected`; return 0 when woken, else the errno."""
    if _sleeping_call(_SYS_FUTEX, address, _WAIT_BITSET, expected, _limit(deadline_ns), None, mask) == 0:
        return 0
    return ctypes.get_errno()


_library = ctypes.PyDLL(None, use_errno=True)
current_cpu = _library.sched_getcpu  # the CPU this thread runs on; may have changed when you read it
_prctl = _library.prctl
_prctl.argtypes = (ctypes.c_int, ctypes.c_ulong)
_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30


def timer_slack() -> int:
    """Return by how many nanoseconds this thread's sleeps may end late: 50 µs as a rule."""
    return int(_prctl(_PR_GET_TIMERSLACK, 0))


def set_timer_slack(slack_ns: int) -> None:
    """Change that; 1 is the least."""
    _prctl(_PR_SET_TIMERSLACK, slack_ns)


def futex_waitv(words: Sequence[tuple[int, int]], deadline_ns: int | None) -> int | None:
    """Sleep while every (address, expected) of `words` holds; return the index of one that was woken.

    None where that is not known: a word was not as expected, or the sleep ended by the deadline or a signal. A wake for
    any bits ends it. Raises OSError for what cannot be slept on.
    """
    entries = [_WaitvEntry(expected, address, _SIZE_U32, 0) for address, expected in words]
    array = (_WaitvEntry * len(entries))(*entries)
    woken = _sleeping_call(_SYS_FUTEX_WAITV, array, len(words), 0, _limit(deadline_ns), _CLOCK_MONOTONIC, 0)
    if woken >= 0:
        return int(woken)
    error = ctypes.get_errno()
    if error not in (EAGAIN, EINTR, ETIMEDOUT):
        raise OSError(error, f"futex_waitv: {os.strerror(error)}")
    return None


def has_waitv() -> bool:
    """Return True where the kernel has futex_waitv (5.16), and no filter of system calls forbids it."""
    _sleeping_call(_SYS_FUTEX_WAITV, None, 0, 0, None, _CLOCK_MONOTONIC, 0)
    return ctypes.get_errno() == EINVAL  # no words: refused by the call itself


def _limit(deadline_ns: int | None) -> object:
    if deadline_ns is None:
        return None
    return ctypes.byref(_Timespec(*divmod(max(0, min(deadline_ns, _END_OF_CLOCK_NS)), 10**9)))


class Atomics(Protocol):
    """Read-modify-write of an event word, sequentially consistent."""

    def set_bits(self, word: memoryview, address: int, mask: int) -> bool:
        """OR `mask`; return False if every bit was set already, so that nobody can be asleep."""
        ...

    def take_bits(self, word: memoryview, address: int, mask: int) -> int:
        """Clear the bits of `mask`; return the word as it was."""
        ...


class LibAtomic:
    """By libatomic, the library of GCC's out-of-line atomic operations."""

    def __init__(self) -> None:
        library = ctypes.PyDLL("libatomic.so.1")
        self._or, self._and = library["__atomic_fetch_or_4"], library["__atomic_fetch_and_4"]
        self._or.argtypes = self._and.argtypes = (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int)
        self._or.restype = self._and.restype = ctypes.c_uint32

    def set_bits(self, word: memoryview, address: int, mask: int) -> bool:
        """OR `mask`; return False if every bit was set already, so that nobody can be asleep."""
        return int(self._or(address, mask, 5)) & mask != mask  # 5 = __ATOMIC_SEQ_CST

    def take_bits(self, word: memoryview, address: int, mask: int) -> int:
        """Clear the bits of `mask`; return the word as it was."""
        return int(self._and(address, ALL_BITS & ~mask, 5))


class KernelAtomic:
    """By FUTEX_WAKE_OP that wakes nobody: the kernel does the operation, but does not tell the old value.

    So `set_bits` always says that a wake is needed, and `take_bits` clears only the bits that it saw. That is safe
    with one waiter per bit: a bit set in between stays set, and the word differs from what the waiter expects.
    """

    def __init__(self) -> None:
        self._nobody = ctypes.c_uint32()  # WAKE_OP wakes one sleeper here even when asked for none

    def set_bits(self, word: memoryview, address: int, mask: int) -> bool:
        """OR `mask`; True, for want of the old value."""
        self._change(_OP_OR, address, mask)
        return True

    def take_bits(self, word: memoryview, address: int, mask: int) -> int:
        """Clear those bits of `mask` that are set; return the word as it was."""
        old = int(word[0])
        self._change(_OP_ANDN, address, old & mask)
        return old

    def _change(self, operation: int, address: int, mask: int) -> None:
        if mask == ALL_BITS:
            self._wake_op(operation << 28 | 0xFFF << 12, address)  # the 12-bit operand is sign-extended
            return
        for bit in range(32):
            if mask >> bit & 1:
                self._wake_op((operation | _OP_ARG_SHIFT) << 28 | bit << 12, address)

    def _wake_op(self, encoded: int, address: int) -> None:
        nobody = ctypes.addressof(self._nobody)
        if _quick_call(_SYS_FUTEX, nobody, _WAKE_OP, 0, None, address, encoded) < 0:
            raise OSError(ctypes.get_errno(), "FUTEX_WAKE_OP failed")


def find_atomics() -> Atomics:
    """Return the quicker of the two that this machine has."""
    try:
        return LibAtomic()
    except OSError:
        return KernelAtomic()
