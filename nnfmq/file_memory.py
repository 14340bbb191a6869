"""FileMemory: bytes of a file that is never mapped, but read by pread and written by pwrite.

Whoever may shrink a file kills by SIGBUS those who have mapped it, so `memory` maps only what is sealed. An ordinary
file (weights on disk, an unsealed memfd) cannot be: its bytes are copied, and one that became short in the meantime is
an error with a status. A FileMemory owns its descriptor, and so does each FileRange that was taken of it: it is closed
when the last of them is gone, as a mapping goes with the last array over it. (REQUIREMENTS MEM-1, N-RQX-16)
"""

from __future__ import annotations

import fcntl
import os
import stat
import warnings
from types import TracebackType
from typing import Self

from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.types import Protection

_READABLE = (os.O_RDONLY, os.O_RDWR)
_WRITABLE = (os.O_WRONLY, os.O_RDWR)


class _Descriptor:
    """A file descriptor that is closed when nobody refers to it any more."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def close(self) -> None:
        """Close it now, for one that nobody was given."""
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)

    def __del__(self) -> None:
        self.close()


class FileRange:
    """Some bytes of a file, which this keeps open."""

    __slots__ = ("_descriptor", "size_bytes", "start")

    def __init__(self, descriptor: _Descriptor, start: int, size_bytes: int) -> None:
        self._descriptor = descriptor
        self.start = start
        self.size_bytes = size_bytes

    def read_into(self, target: memoryview) -> None:
        """Fill `target` ("B", not larger than the range) from the range's beginning; blocks as long as the file does.

        Raises InvalidArgument where the file ends early or cannot be read.
        """
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._descriptor.number, [target[done:]], self.start + done)
            except OSError as error:
                raise InvalidArgument(f"memory in a file cannot be read: {error.strerror}") from error
            if count == 0:
                raise InvalidArgument(f"memory in a file ends after {done} bytes of {len(target)}")
            done += count

    def write_from(self, source: memoryview) -> None:
        """Write `source` ("B", not larger than the range) to the range's beginning; blocks as long as the file does.

        Raises InvalidArgument where the file has become too short, GeneralFailure where it takes no more.
        """
        have, wanted = os.fstat(self._descriptor.number).st_size, self.start + len(source)
        if have < wanted:  # pwrite would make it longer
            raise InvalidArgument(f"memory in a file ends at byte {have}; a result would reach to {wanted}")
        done = 0
        while done < len(source):
            try:
                done += os.pwrite(self._descriptor.number, source[done:], self.start + done)
            except OSError as error:
                raise GeneralFailure(f"a result cannot be written into memory in a file: {error.strerror}") from error


class FileMemory:
    """`size_bytes` of a regular file from `offset` on. Satisfies `hal.types.Pool`. Close it, or use `with`.

    `protection` says what may be done with it, which is less where the descriptor allows less.
    """

    def __init__(self, descriptor: _Descriptor, size_bytes: int, offset: int, protection: Protection) -> None:
        self._held = [descriptor]
        self.size_bytes = size_bytes
        self.offset = offset
        self.protection = protection

    @classmethod
    def from_fd(
        cls, fd: int, size_bytes: int, *, offset: int = 0, protection: Protection = Protection.READ_WRITE
    ) -> Self:
        """Return memory over a descriptor, which stays the caller's: this keeps a duplicate.

        Raises InvalidArgument where the file is none that has bytes in places, or is shorter than that.
        """
        try:
            duplicate = os.dup(fd)
        except OSError as error:
            raise InvalidArgument(f"N-VAL-13: {fd} is no open descriptor: {error.strerror}") from error
        return cls.adopt(duplicate, size_bytes, offset, protection)

    @classmethod
    def adopt(cls, fd: int, size_bytes: int, offset: int, protection: Protection) -> Self:
        """Take over a received descriptor; it is closed whatever happens. Raises as `from_fd`."""
        descriptor = _Descriptor(fd)
        try:
            _check_file(fd, size_bytes, offset)
            return cls(descriptor, size_bytes, offset, protection & _allowed(fd))
        except BaseException:
            descriptor.close()
            raise

    @property
    def closed(self) -> bool:
        """True once `close` was called."""
        return not self._held

    def fileno(self) -> int:
        """Lend the descriptor, for passing it to a peer; it stays ours. Raises InvalidArgument once closed."""
        return self._descriptor().number

    def range(self, start: int, size_bytes: int) -> FileRange:
        """Return a part of the memory, which keeps the file open for itself. Raises InvalidArgument once closed."""
        return FileRange(self._descriptor(), self.offset + start, size_bytes)

    @property
    def is_readable(self) -> bool:
        """Whether inputs may lie in it."""
        return Protection.READ in self.protection

    @property
    def is_writable(self) -> bool:
        """Whether outputs may."""
        return Protection.WRITE in self.protection

    @property
    def view(self) -> memoryview:
        """A private, read-only copy of the bytes as they are now. Raises as `FileRange.read_into`."""
        if not self.is_readable:
            raise InvalidArgument("N-RQX-12: this memory in a file may not be read")
        copy = bytearray(self.size_bytes)
        self.range(0, self.size_bytes).read_into(memoryview(copy))
        return memoryview(copy).toreadonly()

    def _descriptor(self) -> _Descriptor:
        for descriptor in self._held:
            return descriptor
        raise InvalidArgument("this memory is closed")

    def close(self) -> None:
        """Let go of the descriptor; ranges that were taken keep theirs. Thread-safe, harmless when repeated."""
        self._held = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_held", None):
            warnings.warn(f"memory of {self.size_bytes} bytes was never closed", ResourceWarning, stacklevel=2)


def _check_file(fd: int, size_bytes: int, offset: int) -> None:
    kept = os.fstat(fd)
    if not stat.S_ISREG(kept.st_mode):
        raise InvalidArgument("N-RQX-16: received memory is no file that has bytes in places, such as a memfd")
    if size_bytes < 1:
        raise InvalidArgument(f"N-VAL-13: received memory has {size_bytes} bytes, it needs at least 1")
    if offset < 0 or offset + size_bytes > kept.st_size:
        raise InvalidArgument(
            f"N-RQX-16: received memory has {kept.st_size} bytes, announced are {size_bytes} from byte {offset} on"
        )


def _allowed(fd: int) -> Protection:
    """Return what a descriptor was opened for. One that appends writes at the end, wherever it is told to."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    mode = flags & os.O_ACCMODE
    reads = Protection.READ if mode in _READABLE and not flags & os.O_PATH else Protection.NONE
    writes = Protection.WRITE if mode in _WRITABLE and not flags & os.O_APPEND else Protection.NONE
    return reads | writes
