"""System calls of the Python core, by ctypes: futex(2), atomic operations on a futex word, CPU number, timer slack.

Addresses are integers; the caller keeps the memory mapped during a call. Python has no atomic OR. libatomic has one; if
it is not installed, the kernel does the operation (FUTEX_WAKE_OP). Calls that cannot block keep the GIL.

`futex_waitv`, which sleeps on many words, serves both cores. All operations are of the shared kind (no
FUTEX_PRIVATE_FLAG), because the words are in memory of two processes. See futex(2), FUTEX_WAIT_BITSET(2const).
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence
from errno import EAGAIN, EINTR, EINVAL, ETIMEDOUT
from typing import Protocol

from nnfmq.base.deadlines import CLOCK_MAX_NS

ALL_BITS = 0xFFFFFFFF

_SYS_FUTEX = 202 if platform.machine() == "x86_64" else 98  # 98 is the generic number: AArch64, RISC-V
_SYS_FUTEX_WAITV = 449  # on every architecture
_WAKE_OP, _WAIT_BITSET, _WAKE_BITSET = 5, 9, 10
_OP_OR, _OP_ANDN, _OP_ARG_SHIFT = 2, 3, 8
_INT_MAX = 2**31 - 1
_SIZE_U32 = 2  # FUTEX2_SIZE_U32: a word of 32 bits, shared because FUTEX2_PRIVATE is not set
_CLOCK_MONOTONIC = 1
_SEQ_CST = 5  # __ATOMIC_SEQ_CST

WAITV_MAX = 128
"""How many words one futex_waitv can sleep on (FUTEX_WAITV_MAX)."""


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
_blocking_call = ctypes.CDLL(None, use_errno=True).syscall  # releases the GIL
_quick_call = ctypes.PyDLL(None, use_errno=True).syscall  # keeps it
_blocking_call.argtypes = _quick_call.argtypes = _FUTEX_ARGUMENTS
_blocking_call.restype = _quick_call.restype = ctypes.c_long


def futex_wake(address: int, mask: int) -> int:
    """Wake all threads that sleep on a bit of `mask`; return how many."""
    return int(_quick_call(_SYS_FUTEX, address, _WAKE_BITSET, _INT_MAX, None, None, mask))


def futex_wait(address: int, expected: int, deadline_ns: int | None, mask: int) -> int:
    """Sleep if the word is `expected`; return 0 if woken, else the errno (EAGAIN, EINTR, ETIMEDOUT, …)."""
    if _blocking_call(_SYS_FUTEX, address, _WAIT_BITSET, expected, _timespec(deadline_ns), None, mask) == 0:
        return 0
    return ctypes.get_errno()


_library = ctypes.PyDLL(None, use_errno=True)
current_cpu = _library.sched_getcpu  # the CPU of the calling thread; outdated as soon as it is returned
_prctl = _library.prctl
_prctl.argtypes = (ctypes.c_int, ctypes.c_ulong)
_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30


def timer_slack() -> int:
    """Return by how many nanoseconds the kernel may end this thread's sleeps late: 50 µs by default."""
    return int(_prctl(_PR_GET_TIMERSLACK, 0))


def set_timer_slack(slack_ns: int) -> None:
    """Set the timer slack of this thread; the minimum is 1 (0 means the default)."""
    _prctl(_PR_SET_TIMERSLACK, slack_ns)


def futex_waitv(words: Sequence[tuple[int, int]], deadline_ns: int | None) -> int | None:
    """Sleep while every word of `words`, pairs of address and expected value, is unchanged. A wake for any bit ends it.

    Returns:
        The index of a word that was woken; None if it is unknown: a word was not as expected, or the sleep ended by the
        deadline or a signal.

    Raises:
        OSError: If a word cannot be slept on.
    """
    entries = [_WaitvEntry(expected, address, _SIZE_U32, 0) for address, expected in words]
    array = (_WaitvEntry * len(entries))(*entries)
    woken = _blocking_call(_SYS_FUTEX_WAITV, array, len(words), 0, _timespec(deadline_ns), _CLOCK_MONOTONIC, 0)
    if woken >= 0:
        return int(woken)
    error = ctypes.get_errno()
    if error not in (EAGAIN, EINTR, ETIMEDOUT):
        raise OSError(error, f"futex_waitv: {os.strerror(error)}")
    return None


def has_waitv() -> bool:
    """Return whether futex_waitv can be called: the kernel has it (5.16), and no seccomp filter forbids it."""
    _blocking_call(_SYS_FUTEX_WAITV, None, 0, 0, None, _CLOCK_MONOTONIC, 0)
    return ctypes.get_errno() == EINVAL  # from the call itself, which needs at least one word


def _timespec(deadline_ns: int | None) -> object:
    if deadline_ns is None:
        return None
    return ctypes.byref(_Timespec(*divmod(max(0, min(deadline_ns, CLOCK_MAX_NS)), 10**9)))


class Atomics(Protocol):
    """Sequentially consistent read-modify-write operations on an event flag word."""

    def fetch_or(self, word: memoryview, address: int, mask: int) -> int:
        """OR `mask` into the word; return the word as it was before, or 0 if that is unknown."""
        ...

    def fetch_clear(self, word: memoryview, address: int, mask: int) -> int:
        """Clear the bits of `mask`; return the word as it was before."""
        ...


class LibAtomic:
    """Atomic operations by libatomic, GCC's library of out-of-line atomic operations."""

    def __init__(self) -> None:
        library = ctypes.PyDLL("libatomic.so.1")
        self._or, self._and = library["__atomic_fetch_or_4"], library["__atomic_fetch_and_4"]
        self._or.argtypes = self._and.argtypes = (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int)
        self._or.restype = self._and.restype = ctypes.c_uint32

    def fetch_or(self, word: memoryview, address: int, mask: int) -> int:
        """OR `mask` into the word; return the word as it was before."""
        return int(self._or(address, mask, _SEQ_CST))

    def fetch_clear(self, word: memoryview, address: int, mask: int) -> int:
        """Clear the bits of `mask`; return the word as it was before."""
        return int(self._and(address, ALL_BITS & ~mask, _SEQ_CST))


class KernelAtomic:
    """Atomic operations by FUTEX_WAKE_OP, which changes the word, but does not return its old value.

    `fetch_or` therefore returns 0, and its caller always makes the system call that wakes. `fetch_clear` loads the word
    and clears only the bits that it saw set. That is safe because each bit has only one waiter: a bit that is set in
    between stays set, so the word differs from what the waiter expects, and it does not sleep.
    """

    def __init__(self) -> None:
        self._unused = ctypes.c_uint32()  # FUTEX_WAKE_OP also wakes a sleeper of its first word, even if asked for none

    def fetch_or(self, word: memoryview, address: int, mask: int) -> int:
        """OR `mask` into the word; return 0, because the old value is unknown."""
        self._change(_OP_OR, address, mask)
        return 0

    def fetch_clear(self, word: memoryview, address: int, mask: int) -> int:
        """Clear those bits of `mask` that are set; return the word as it was before."""
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
        unused = ctypes.addressof(self._unused)
        if _quick_call(_SYS_FUTEX, unused, _WAKE_OP, 0, None, address, encoded) < 0:
            raise OSError(ctypes.get_errno(), "FUTEX_WAKE_OP failed")


def find_atomics() -> Atomics:
    """Return the fastest implementation that this machine has."""
    try:
        return LibAtomic()
    except OSError:
        return KernelAtomic()
