"""Memory that two processes share: a sealed memfd and its mapping. The only door to mmap(2) and memfd_create(2).

A peer can make a reader die by SIGBUS if it shrinks a file that the reader has mapped. So nothing is mapped here
unless it is sealed against shrinking and growing, is as large as announced by fstat, and is not hugetlb (whose pages
can be missing even so). What we create has its pages allocated before anybody touches it. A Memory owns its fd and
its mapping; arrays made over `view` keep the mapping alive after `close`, never the fd.

Left out: named segments. They can be guessed, truncated under a reader, and outlive a crash.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from nnfmq.hal.errors import InvalidArgument, ProtocolError, ResourceExhaustedTransient

F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; Python 3.11 has no name for it
SHARED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_PAGE = mmap.PAGESIZE


def _new_file(label: str, size_bytes: int) -> int:
    """Create a memfd of `size_bytes` with every page allocated; the caller owns the fd."""
    if size_bytes > _PAGE * os.sysconf("SC_PHYS_PAGES"):  # the kernel would not refuse: it would try, page by page
        raise ResourceExhaustedTransient(f"no room for {size_bytes} bytes of shared memory: the machine has less")
    fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise ResourceExhaustedTransient(f"no room for {size_bytes} bytes of shared memory: {error}") from error
        raise
    return fd


def _check_received(fd: int, size_bytes: int | None) -> int:
    """Return the size that may be mapped, or raise InvalidArgument with the reason."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise InvalidArgument("received memory is no memfd: it cannot be sealed, so it is never mapped") from None
    if seals & SHARED_SEALS != SHARED_SEALS:
        raise InvalidArgument(f"received memory lacks the seals SHRINK and GROW (it has 0x{seals:x})")
    if os.fstatvfs(fd).f_bsize != _PAGE:
        raise InvalidArgument("received memory is hugetlb, whose pages may be missing; use an ordinary memfd")
    actual = os.fstat(fd).st_size
    wanted = actual if size_bytes is None else size_bytes
    if not 0 < wanted <= actual:
        raise InvalidArgument(f"received memory has {actual} bytes, announced are {wanted}; both must be above 0")
    return wanted


def _map(fd: int, size_bytes: int) -> tuple[mmap.mmap, bool]:
    """Map read-write, or read-only where the writer sealed it against other writers (F_SEAL_FUTURE_WRITE)."""
    try:
        return mmap.mmap(fd, size_bytes), True
    except PermissionError:
        return mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ), False
    except OSError as error:  # a sparse file costs its sender nothing, whatever its size
        raise ResourceExhaustedTransient(f"{size_bytes} bytes cannot be mapped: {error}") from error


class Memory:
    """A shared region: owns a sealed memfd and its mapping. Satisfies `hal.types.Pool`. Close it, or use `with`.

    `view` is the region as bytes; `is_writable` is False where the other side kept writing for itself.
    """

    def __init__(self, fd: int, mapping: mmap.mmap, is_writable: bool) -> None:
        self._fd = fd
        self._mapping: mmap.mmap | None = mapping
        self._view = memoryview(mapping)
        self.on_close: Callable[[], object] | None = None  # whoever keeps account of it
        self.is_writable = is_writable
        self.size_bytes = len(mapping)

    @classmethod
    def create(cls, size_bytes: int, label: str = "nnfmq", *, one_writer: bool = False) -> Self:
        """Create zeroed memory, sealed so that neither side can resize it.

        With `one_writer` the peer can only map it for reading. Raises InvalidArgument for a size below 1,
        ResourceExhaustedTransient where the system has no room.
        """
        if size_bytes < 1:
            raise InvalidArgument(f"shared memory needs at least 1 byte, not {size_bytes}")
        fd = _new_file(label, size_bytes)
        try:
            mapping = mmap.mmap(fd, size_bytes)
            # After our own mapping: FUTURE_WRITE refuses every later one that could write.
            writers = F_SEAL_FUTURE_WRITE if one_writer else 0
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SHARED_SEALS | writers | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, mapping, True)

    @classmethod
    def adopt(cls, fd: int, size_bytes: int | None = None) -> Self:
        """Take over a received fd and map it (`size_bytes` of it, or all); it is closed whatever happens.

        Raises InvalidArgument where it is unsealed, too short, hugetlb, or no memfd; ResourceExhaustedTransient where
        it does not fit into the address space.
        """
        try:
            mapping, is_writable = _map(fd, _check_received(fd, size_bytes))
        except BaseException:
            with suppress(
                OSError
            ):  # a number that is no open descriptor is refused like any other that cannot be mapped
                os.close(fd)
            raise
        return cls(fd, mapping, is_writable)

    @property
    def view(self) -> memoryview:
        """The whole region as bytes ("B"). Raises InvalidArgument once closed."""
        view = self._view  # before the question: `close` in another thread answers it first and drops the view then
        if self._mapping is None:
            raise InvalidArgument("this memory is closed")
        return view

    @property
    def closed(self) -> bool:
        """True once `close` was called."""
        return self._mapping is None

    def fileno(self) -> int:
        """Lend the fd, for passing it to a peer; it stays ours. Raises InvalidArgument once closed."""
        if self._fd < 0:
            raise InvalidArgument("this memory is closed")
        return self._fd

    def close(self) -> None:
        """Close the fd and the mapping. While arrays over `view` live, the mapping lives with them."""
        mapping, self._mapping = self._mapping, None
        if mapping is None:
            return
        del mapping
        fd, self._fd = self._fd, -1  # forgotten first: the number may be somebody else's a moment later
        os.close(fd)
        # Dropped, not released: another thread may be about to look at it. The mapping goes with whoever looks last.
        self._view = memoryview(b"")
        if self.on_close is not None:
            self.on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_mapping", None) is not None:
            warnings.warn(f"memory of {self.size_bytes} bytes was never closed", ResourceWarning, stacklevel=2)
            self.close()


def put_in_file(data: bytes | bytearray | memoryview, label: str = "nnfmq-body") -> int:
    """Return a new memfd that holds `data`, for a body that is too large for a socket; the caller owns the fd."""
    fd = _new_file(label, max(len(data), 1))
    try:
        done = 0
        with memoryview(data) as rest:
            while done < len(rest):
                done += os.pwrite(fd, rest[done:], done)
    except BaseException:
        os.close(fd)
        raise
    return fd


def take_from_file(fd: int, size_bytes: int) -> bytearray:
    """Read `size_bytes` of a received fd into private memory. The fd stays the caller's.

    It is read, not mapped: whoever sent it may shrink it meanwhile. Raises ProtocolError where it is shorter, or is
    nothing that can be read at an offset.
    """
    body = bytearray(size_bytes)
    done = 0
    with memoryview(body) as rest:
        while done < size_bytes:
            try:
                count = os.preadv(fd, [rest[done:]], done)
            except OSError as error:  # a pipe, a folder, a file that may not be read: whatever came in its place
                raise ProtocolError(f"a body of {size_bytes} bytes cannot be read: {error.strerror}", done) from error
            if count == 0:
                raise ProtocolError(f"a body of {size_bytes} bytes was announced, its file ends early", done)
            done += count
    return body
