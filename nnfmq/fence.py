"""Fences: a descriptor that says whether work is under way, done, or failed, to whoever holds it, in any process.

A fence of ours is the reading end of a SEQPACKET socketpair. Its signaller sends one state byte; a holder peeks:

    nothing there           ACTIVE
    one byte, 1 or 2        SIGNALED, ERROR
    the end, without one    ERROR: a signaller that dies is an error at once, since the kernel closes its end

Nobody takes the byte out, so any number may look, and the descriptor can be polled, duplicated and passed on. Two other
kinds are taken, to wait for only: an eventfd (readable = SIGNALED, never ERROR) and, where a kernel driver makes them,
a sync_file. Whatever else a descriptor may be is no fence. What waits for fences, and what signals them, is elsewhere.
(REQUIREMENTS FEN-11)
"""

from __future__ import annotations

import fcntl
import os
import select
import stat
import struct
import time
import warnings
from contextlib import suppress
from types import TracebackType
from typing import Protocol, Self

from nnfmq.channel import FenceSignaler, open_fence_pair, peek_fence_byte
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import FenceState

_STATES = {bytes([state]): state for state in (FenceState.SIGNALED, FenceState.ERROR)}
_EVENTFD, _SYNC_FILE = "anon_inode:[eventfd]", "anon_inode:sync_file"
_SYNC_IOC_FILE_INFO = 0xC0383E04  # _IOWR('>', 4, struct sync_file_info), linux/sync_file.h
_SYNC_FILE_INFO = struct.Struct("32siIII8x")  # name, status, flags, num_fences, pad, sync_fence_info
_POLL_MS_MAX = 2**31 - 1


class HasFileno(Protocol):
    """A fence, a file, a socket: what lends a descriptor."""

    def fileno(self) -> int:
        """Lend the descriptor."""
        ...


def fence_state(fd: int) -> FenceState:
    """Return the state of any kind of fence; UNKNOWN where `fd` is none. Never blocks; the fd stays the caller's."""
    try:
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            return _socket_state(fd)
        kind = os.readlink(f"/proc/self/fd/{fd}")
    except (OSError, ValueError, OverflowError):
        return FenceState.UNKNOWN
    if kind not in (_EVENTFD, _SYNC_FILE):
        return FenceState.UNKNOWN
    if not _is_readable(fd, 0):
        return FenceState.ACTIVE
    return _sync_file_state(fd) if kind == _SYNC_FILE else FenceState.SIGNALED


def sync_wait(fd: int, timeout: float | None = None) -> FenceState:
    """Wait until the fence is no longer ACTIVE and return its state (the HAL's syncWait).

    `timeout` in seconds: None = no limit, 0 = never block; ACTIVE at its end, UNKNOWN at once for what is no fence.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        state = fence_state(fd)
        left = None if deadline is None else deadline - time.monotonic()
        if state is not FenceState.ACTIVE or (left is not None and left <= 0):
            return state
        _is_readable(fd, left)


def _socket_state(fd: int) -> FenceState:
    try:
        seen = peek_fence_byte(fd)
    except InvalidArgument:
        return FenceState.UNKNOWN
    if seen is None:
        return FenceState.ACTIVE
    return _STATES.get(seen, FenceState.ERROR if not seen else FenceState.UNKNOWN)


def _sync_file_state(fd: int) -> FenceState:
    """Return what became of a sync_file that is readable: its status is 1, or a negative errno."""
    info = bytearray(_SYNC_FILE_INFO.size)
    try:
        fcntl.ioctl(fd, _SYNC_IOC_FILE_INFO, info)
    except OSError:
        return FenceState.SIGNALED  # poll(2) alone must do
    return FenceState.ERROR if _SYNC_FILE_INFO.unpack(info)[1] < 0 else FenceState.SIGNALED


def _is_readable(fd: int, seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if seconds is None else min(-(-seconds * 1000 // 1), _POLL_MS_MAX)))


class Fence:
    """A fence. Close it, or use `with`; one that was created and is closed without a signal is an ERROR to its holders.

    `fileno()` can be polled (readable = no longer ACTIVE), duplicated, and passed to another process.
    """

    def __init__(self, fd: int, sender: FenceSignaler | None) -> None:
        self._fds = [fd]  # its pop gives it to one closer only
        self._sender = sender

    @classmethod
    def create(cls) -> Self:
        """Return a new fence, ACTIVE until its creator calls `signal` or `fail`, or is gone.

        Raises ResourceExhaustedTransient where there are no descriptors for it.
        """
        sender, fd = open_fence_pair()
        return cls(fd, sender)

    @classmethod
    def adopt(cls, fd: int) -> Self:
        """Take over somebody else's fence, to wait for only. Raises InvalidArgument for what is none, and closes it."""
        if fence_state(fd) is FenceState.UNKNOWN:
            with suppress(OSError, OverflowError):  # a number that is no open descriptor is refused like any other
                os.close(fd)
            raise InvalidArgument(f"descriptor {fd} is no fence: it is one of nnfmq's, an eventfd or a sync_file")
        return cls(fd, None)

    def signal(self) -> None:
        """Say that the work is done. The first `signal` or `fail` counts. Raises InvalidArgument for an adopted one."""
        self._send(FenceState.SIGNALED)

    def fail(self) -> None:
        """Say that the work has failed. The first `signal` or `fail` counts. Raises InvalidArgument as `signal`."""
        self._send(FenceState.ERROR)

    def _send(self, state: FenceState) -> None:
        if self._sender is None:
            raise InvalidArgument("a fence is signalled by whoever created it; this one was adopted")
        self._sender.send(state)

    @property
    def state(self) -> FenceState:
        """The state of this moment. Raises InvalidArgument once closed."""
        return fence_state(self.fileno())

    def wait(self, timeout: float | None = None) -> FenceState:
        """Wait until it is SIGNALED or ERROR, and return that; ACTIVE where `timeout` (seconds, None = no limit) ends.

        Raises InvalidArgument once closed.
        """
        return sync_wait(self.fileno(), timeout)

    def fileno(self) -> int:
        """Lend the descriptor. Raises InvalidArgument once closed."""
        for fd in self._fds:
            return fd
        raise InvalidArgument("this fence is closed")

    def close(self) -> None:
        """Let go of it. Harmless when repeated."""
        if self._sender is not None:
            self._sender.close()
        try:
            fd = self._fds.pop()
        except IndexError:
            return
        os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fds", None):
            warnings.warn("a fence was never closed", ResourceWarning, stacklevel=2)
            self.close()
