"""FileMemory: memory in a file that is read by pread(2) and written by pwrite(2), never mapped.

A process that may shrink a file makes all processes that have it mapped die by SIGBUS, so `memory` maps only sealed
memfds. Ordinary files (weights on disk, unsealed memfds) are copied instead, and a file that has become too short is an
error with a HAL status. (MEM-1, N-RQX-16)

A FileMemory and the FileRanges made from it share one fd, which is closed with the last of them.
"""

from __future__ import annotations

import fcntl
import os
import stat
import warnings
from collections.abc import Callable
from typing import Self

from nnfmq.base.memory import write_all
from nnfmq.base.ownership import Closable, Uncopyable
from nnfmq.hal.errors import BadState, GeneralFailure, InvalidArgument
from nnfmq.hal.types import Protection

SLICE_BYTES = 4 << 20  # takes 1 to 4 ms
_READABLE = (os.O_RDONLY, os.O_RDWR)
_WRITABLE = (os.O_WRONLY, os.O_RDWR)


def _no_check() -> None:
    """Let a copy go on."""


class _SharedFd(Uncopyable):
    """A file descriptor that is closed with the last reference to it."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        """Close it now. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


class FileRange:
    """A byte range of a file, which stays open as long as this object exists."""

    __slots__ = ("_file", "size_bytes", "start")

    def __init__(self, file: _SharedFd, start: int, size_bytes: int) -> None:
        self._file = file
        self.start = start
        self.size_bytes = size_bytes

    def read_into(self, target: memoryview, check: Callable[[], None] = _no_check) -> None:
        """Fill `target` (format "B", not larger than the range) with bytes from the start of the range. Blocks.

        It reads SLICE_BYTES at a time, without the GIL, so that other threads run. `check` is called after each slice
        but the last, and may raise to end the copy.

        Raises:
            InvalidArgument: If the file is too short, or cannot be read.
            Exception: Any error that `check` raises.
        """
        done = 0
        while done < len(target):
            if done:
                check()
            try:
                count = os.preadv(self._file.fd, [target[done : done + SLICE_BYTES]], self.start + done)
            except OSError as error:
                raise InvalidArgument(f"memory in a file cannot be read: {error.strerror}") from error
            if count == 0:
                raise InvalidArgument(f"memory in a file ends after {done} bytes of {len(target)}")
            done += count

    def write_from(self, source: memoryview) -> None:
        """Write `source` (format "B", not larger than the range) to the start of the range. Blocks.

        Raises:
            InvalidArgument: If the file has become too short.
            GeneralFailure: If the write fails.
        """
        have, wanted = os.fstat(self._file.fd).st_size, self.start + len(source)
        if have < wanted:  # pwrite(2) would extend the file
            raise InvalidArgument(f"memory in a file ends at byte {have}; a result would reach to {wanted}")
        try:
            write_all(self._file.fd, source, self.start)
        except OSError as error:
            raise GeneralFailure(f"a result cannot be written into memory in a file: {error.strerror}") from error


class FileMemory(Closable):
    """`size_bytes` of a regular file from `offset` on. Satisfies `hal.types.Pool`. Close it, or use `with`.

    `protection` is what the creator asked for, limited to what the fd was opened for.
    """

    def __init__(self, file: _SharedFd, size_bytes: int, offset: int, protection: Protection) -> None:
        self._files = [file]  # empty once closed
        self.size_bytes = size_bytes
        self.offset = offset
        self.protection = protection

    @classmethod
    def from_fd(
        cls, fd: int, size_bytes: int, *, offset: int = 0, protection: Protection = Protection.READ_WRITE
    ) -> Self:
        """Return memory over a file. Borrows `fd`, of which it makes a duplicate.

        Raises:
            InvalidArgument: If `fd` is not open, or the file is not a regular file or is too short.
        """
        try:
            duplicate = os.dup(fd)
        except OSError as error:
            raise InvalidArgument(f"{fd} is not an open fd: {error.strerror} (N-VAL-13)") from error
        return cls.adopt(duplicate, size_bytes, offset, protection)

    @classmethod
    def adopt(cls, fd: int, size_bytes: int, offset: int, protection: Protection) -> Self:
        """Return memory over a received file. Takes ownership of `fd`, also if it raises.

        Raises:
            InvalidArgument: If the file is not a regular file, or is too short.
        """
        file = _SharedFd(fd)
        try:
            _check_file(fd, size_bytes, offset)
            return cls(file, size_bytes, offset, protection & _opened_for(fd))
        except BaseException:
            file.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._files

    def fileno(self) -> int:
        """Return the fd, which stays owned by this object.

        Raises:
            BadState: If the memory is closed.
        """
        return self._file().fd

    def range(self, start: int, size_bytes: int) -> FileRange:
        """Return a part of the memory, which stays usable after `close`.

        Raises:
            BadState: If the memory is closed.
        """
        return FileRange(self._file(), self.offset + start, size_bytes)

    @property
    def is_readable(self) -> bool:
        """Whether inputs may be in it."""
        return Protection.READ in self.protection

    @property
    def is_writable(self) -> bool:
        """Whether outputs may be in it."""
        return Protection.WRITE in self.protection

    @property
    def view(self) -> memoryview:
        """A private, read-only copy of the current bytes.

        Raises:
            InvalidArgument: If the memory may not be read or is closed, or the file is too short.
        """
        if not self.is_readable:
            raise InvalidArgument("this memory in a file may not be read (N-RQX-12)")
        copy = bytearray(self.size_bytes)
        self.range(0, self.size_bytes).read_into(memoryview(copy))
        return memoryview(copy).toreadonly()

    def _file(self) -> _SharedFd:
        for file in self._files:
            return file
        raise BadState("this memory is closed")

    def close(self) -> None:
        """Release the file; ranges keep it open. Idempotent. Thread-safe."""
        self._files = []

    def __del__(self) -> None:
        if getattr(self, "_files", None):
            warnings.warn(f"memory of {self.size_bytes} bytes was never closed", ResourceWarning, stacklevel=2)


def _check_file(fd: int, size_bytes: int, offset: int) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise InvalidArgument("received memory is not a regular file or memfd (N-RQX-16)")
    if size_bytes < 1:
        raise InvalidArgument(f"received memory has {size_bytes} bytes, it needs at least 1 (N-VAL-13)")
    if offset < 0 or offset + size_bytes > status.st_size:
        raise InvalidArgument(
            f"received memory has {status.st_size} bytes, announced are {size_bytes} from byte {offset} on (N-RQX-16)"
        )


def _opened_for(fd: int) -> Protection:
    """Return the access for which an fd was opened. O_APPEND is none for writing: pwrite(2) then ignores the offset."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    mode = flags & os.O_ACCMODE
    reads = Protection.READ if mode in _READABLE and not flags & os.O_PATH else Protection.NONE
    writes = Protection.WRITE if mode in _WRITABLE and not flags & os.O_APPEND else Protection.NONE
    return reads | writes
