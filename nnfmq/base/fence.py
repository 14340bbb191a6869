"""Fences: file descriptors that indicate whether work is in progress, done, or failed, to any process that has one.

An nnfmq fence is one end of a SEQPACKET socketpair. Its creator sends one state byte through the other end:

    no message              ACTIVE
    one byte, 1 or 2        SIGNALED, ERROR
    end of the connection   ERROR: the creator has exited, and the kernel has closed its end

The byte is peeked, never removed, so any number of processes may wait; the fd can be polled, duplicated and passed on.
Two other kinds of fence are accepted for waiting: an eventfd (readable = SIGNALED, never ERROR) and a sync_file, which
kernel drivers create (linux/sync_file.h). (FEN-11)
"""

from __future__ import annotations

import fcntl
import os
import select
import stat
import struct
import warnings
from contextlib import suppress
from typing import Protocol, Self

from nnfmq.base.channel import FenceSignaler, open_fence_pair, peek_fence_byte
from nnfmq.base.deadlines import deadline_after, has_passed, remaining_ms
from nnfmq.base.ownership import Closable
from nnfmq.hal.errors import BadState, InvalidArgument
from nnfmq.hal.types import FenceState

_STATES = {bytes([state]): state for state in (FenceState.SIGNALED, FenceState.ERROR)}
_EVENTFD, _SYNC_FILE = "anon_inode:[eventfd]", "anon_inode:sync_file"
_SYNC_IOC_FILE_INFO = 0xC0383E04  # _IOWR('>', 4, struct sync_file_info), linux/sync_file.h
_SYNC_FILE_INFO = struct.Struct("32siIII8x")  # name, status, flags, num_fences, pad, sync_fence_info


class HasFileno(Protocol):
    """An object with a file descriptor: a fence, a file, a socket."""

    def fileno(self) -> int:
        """Return the fd, which stays owned by the object."""
        ...


def fence_state(fd: int) -> FenceState:
    """Return the state of a fence of any kind; UNKNOWN if `fd` is not a fence. Borrows `fd`. Does not block."""
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
    """Block until the fence is not ACTIVE, and return its state (the HAL's syncWait). Borrows `fd`.

    Args:
        fd: The fence. If it is not one, the result is UNKNOWN.
        timeout: Seconds after which the result is ACTIVE; None = no limit, 0 = do not block.
    """
    deadline_ns = deadline_after(None if timeout is None else max(timeout, 0))
    while True:
        state = fence_state(fd)
        if state is not FenceState.ACTIVE or has_passed(deadline_ns):
            return state
        _is_readable(fd, remaining_ms(deadline_ns))


def _socket_state(fd: int) -> FenceState:
    try:
        message = peek_fence_byte(fd)
    except InvalidArgument:
        return FenceState.UNKNOWN
    if message is None:
        return FenceState.ACTIVE
    return _STATES.get(message, FenceState.ERROR if not message else FenceState.UNKNOWN)


def _sync_file_state(fd: int) -> FenceState:
    """Return the state of a sync_file that is readable: its status is 1, or a negative errno."""
    info = bytearray(_SYNC_FILE_INFO.size)
    try:
        fcntl.ioctl(fd, _SYNC_IOC_FILE_INFO, info)
    except OSError:
        return FenceState.SIGNALED  # all that poll(2) reports
    return FenceState.ERROR if _SYNC_FILE_INFO.unpack(info)[1] < 0 else FenceState.SIGNALED


def _is_readable(fd: int, timeout_ms: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_ms))


class Fence(Closable):
    """A fence: its fd and, for the creator, the signaling end. Close it, or use `with`.

    If the creator closes it without a signal, other holders see ERROR. `fileno()` can be polled (readable = not
    ACTIVE), duplicated, and passed to another process.
    """

    def __init__(self, fd: int, signaler: FenceSignaler | None) -> None:
        self._signaler = signaler
        self._fds = [fd]  # at most one; list.pop is atomic, so only one thread closes it

    @classmethod
    def create(cls) -> Self:
        """Return a new fence. It is ACTIVE until `signal`, `fail`, or the exit of this process.

        Raises:
            ResourceExhaustedTransient: If no fds are left.
        """
        signaler, fd = open_fence_pair()
        return cls(fd, signaler)

    @classmethod
    def adopt(cls, fd: int) -> Self:
        """Return a fence that another process signals. Takes ownership of `fd`, also if it raises.

        Raises:
            InvalidArgument: If `fd` is not a fence.
        """
        if fence_state(fd) is FenceState.UNKNOWN:
            with suppress(OSError, OverflowError):  # the integer may not be an open fd at all
                os.close(fd)
            raise InvalidArgument(f"descriptor {fd} is no fence: it is one of nnfmq's, an eventfd or a sync_file")
        return cls(fd, None)

    def signal(self) -> None:
        """Report that the work is done. Only the first call of `signal` or `fail` has an effect.

        Raises:
            InvalidArgument: If the fence was adopted.
        """
        self._send(FenceState.SIGNALED)

    def fail(self) -> None:
        """Report that the work has failed. Only the first call of `signal` or `fail` has an effect.

        Raises:
            InvalidArgument: If the fence was adopted.
        """
        self._send(FenceState.ERROR)

    def _send(self, state: FenceState) -> None:
        if self._signaler is None:
            raise InvalidArgument("only its creator signals a fence; this one was adopted")
        self._signaler.send(state)

    @property
    def state(self) -> FenceState:
        """The current state.

        Raises:
            BadState: If the fence is closed.
        """
        return fence_state(self.fileno())

    def wait(self, timeout: float | None = None) -> FenceState:
        """Block until the fence is SIGNALED or ERROR, and return that; ACTIVE after `timeout` seconds.

        None means no limit.

        Raises:
            BadState: If the fence is closed.
        """
        return sync_wait(self.fileno(), timeout)

    def fileno(self) -> int:
        """Return the fd, which stays owned by this object.

        Raises:
            BadState: If the fence is closed.
        """
        for fd in self._fds:
            return fd
        raise BadState("this fence is closed")

    def close(self) -> None:
        """Close the fd and the signaling end. Idempotent. Thread-safe."""
        if self._signaler is not None:
            self._signaler.close()
        try:
            fd = self._fds.pop()
        except IndexError:
            return
        os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fds", None):
            warnings.warn("a fence was never closed", ResourceWarning, stacklevel=2)
            self.close()
