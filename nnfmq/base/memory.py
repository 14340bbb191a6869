"""Memory that two processes share: a sealed memfd and its mapping. The only module that calls mmap and memfd_create.

A peer that shrinks a file makes every process that has it mapped die by SIGBUS when it accesses the missing pages. So
nothing is mapped here unless the kernel guarantees its size (seals F_SEAL_SHRINK and F_SEAL_GROW, see memfd_create(2)),
fstat confirms the size that the peer announced, and it is not hugetlb, whose pages can be missing even then. All pages
of memory that is created here are allocated immediately, so that a later access cannot fail.

A `Memory` owns its fd and its mapping. Arrays over `view` keep the mapping after `close`, and with it a duplicate of
the fd that Python's mmap makes for itself.

Constant memory (`create_constant`, `adopt_constant`) is sealed against writing as well, by its creator included. What
was verified in it cannot change afterwards.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Self

from nnfmq.base.ownership import Closable
from nnfmq.base.verbose_log import vlog
from nnfmq.hal.errors import BadState, InvalidArgument, ProtocolError, ResourceExhaustedTransient
from nnfmq.hal.types import Protection

F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; Python 3.11 has no name for it
SHARED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
CONSTANT_SEALS = SHARED_SEALS | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_PAGE = mmap.PAGESIZE
_FREED_AT_ONCE = 16 << 20
_COPY_BYTES = 1 << 20


class Memory(Closable):
    """A shared memory region: a memfd and its mapping. Satisfies `hal.types.Pool`. Close it, or use `with`.

    Attributes:
        size_bytes: The size of the region.
        is_readable: False if the peer passed the memory for writing only.
        is_writable: False if the mapping is read-only.
        on_close: Called once, by `close`; releases the memory's quota.
    """

    offset = 0  # of the region in the file
    protection = Protection.READ_WRITE  # what a peer that receives the fd may do

    def __init__(self) -> None:
        self._fds: list[int] = []  # at most one; list.pop is atomic, so only one thread closes it
        self._view = memoryview(b"")
        self.on_close: Callable[[], object] | None = None
        self.is_readable = True
        self.is_writable = False
        self.size_bytes = 0

    def __repr__(self) -> str:
        access = "" if self.is_writable else ", read-only"
        return f"<{type(self).__name__}: {self.size_bytes} bytes{', closed' if self.closed else access}>"

    @classmethod
    def create(cls, size_bytes: int, label: str = "nnfmq", *, one_writer: bool = False) -> Self:
        """Create zeroed memory whose size neither side can change. With `one_writer` a peer can map it only read-only.

        Raises:
            InvalidArgument: If `size_bytes` is less than 1.
            ResourceExhaustedTransient: If there is not enough memory, or no fd is left.
        """
        _check_size(size_bytes)
        memory = cls()
        try:
            memory._fds.append(_new_memfd(label, size_bytes))
            memory._map(size_bytes)
            memory._seal(one_writer)
            return memory
        except BaseException:
            memory.close()
            raise

    @classmethod
    def create_sparse(cls, size_bytes: int, label: str, *, one_writer: bool = False) -> Self:
        """Create zeroed memory as `create` does, whose pages are not allocated yet.

        Call `allocate_pages` with a part of it before you write there: otherwise a write may end the process.

        Raises:
            InvalidArgument: If `size_bytes` is less than 1.
            ResourceExhaustedTransient: If no fd is left.
        """
        _check_size(size_bytes)
        memory = cls()
        try:
            with _translated_errors(size_bytes):
                memory._fds.append(os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
                os.ftruncate(memory.fileno(), size_bytes)
            memory._map(size_bytes)
            memory._seal(one_writer)
            return memory
        except BaseException:
            memory.close()
            raise

    @classmethod
    def create_constant(cls, size_bytes: int, fill: Callable[[int], object], label: str) -> Self:
        """Create memory that no process can write to. `fill` writes its contents into the fd that it borrows.

        Raises:
            InvalidArgument: If `size_bytes` is less than 1.
            ResourceExhaustedTransient: If there is not enough memory, or no fd is left.
            Exception: Any error that `fill` raises.
        """
        _check_size(size_bytes)
        memory = cls()
        try:
            memory._fds.append(_new_memfd(label, size_bytes))
            fill(memory.fileno())
            fcntl.fcntl(memory.fileno(), fcntl.F_ADD_SEALS, CONSTANT_SEALS)
            memory._map(size_bytes, may_write=False)
            return memory
        except BaseException:
            memory.close()
            raise

    @classmethod
    def adopt(
        cls, fd: int, size_bytes: int | None = None, offset: int = 0, protection: Protection = Protection.READ_WRITE
    ) -> Self:
        """Map received memory: `size_bytes` (None = all) from `offset`. Takes ownership of `fd`, also if it raises.

        `protection` is what the peer passed the memory for, and what another peer gets that it is sent to.

        Raises:
            InvalidArgument: If the fd is not a memfd with the seals SHRINK and GROW, is hugetlb, or is too short.
            ResourceExhaustedTransient: If the region does not fit into the address space.
        """
        memory = cls()
        memory._fds.append(fd)
        try:
            memory._map(_checked_size(fd, size_bytes, offset), offset, Protection.WRITE in protection)
            memory.offset, memory.is_readable = offset, Protection.READ in protection
            memory.protection = protection
            return memory
        except BaseException:
            with suppress(OSError):  # the integer may not be an open fd at all
                memory.close()
            raise

    @classmethod
    def adopt_constant(cls, fd: int) -> Self:
        """Map received memory that no process can write to. Takes ownership of `fd`, also if it raises.

        Raises:
            InvalidArgument: If the memory is not sealed against writing, or `adopt` would reject it.
            ResourceExhaustedTransient: If the region does not fit into the address space.
        """
        if sealed_size(fd) is None:
            os.close(fd)
            raise InvalidArgument("received memory is not sealed against writing, or is no memfd that may be mapped")
        return cls.adopt(fd, protection=Protection.READ)

    @classmethod
    def sealed(cls, fd: int) -> Self:
        """Seal a memfd of `empty_memfd`, so that no process can write to it, and map it. Takes ownership of `fd`.

        Raises:
            OSError: If a process has it mapped for writing.
            InvalidArgument: If it is empty.
            ResourceExhaustedTransient: If it does not fit into the address space.
        """
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, CONSTANT_SEALS)
        except BaseException:
            os.close(fd)
            raise
        return cls.adopt_constant(fd)

    @classmethod
    def adopt_unsealed(cls, fd: int) -> Self:
        """Map all of a file without requiring seals. Takes ownership of `fd`, also if it raises.

        Every process that can open the file can make this one die by SIGBUS: for `posix_shm` only.
        """
        memory = cls()
        memory._fds.append(fd)
        try:
            memory._map(os.fstat(fd).st_size)
            return memory
        except BaseException:
            memory.close()
            raise

    def _map(self, size_bytes: int, offset: int = 0, may_write: bool = True) -> None:
        begin = offset % mmap.ALLOCATIONGRANULARITY  # mmap(2) needs an offset that is a multiple of it
        try:
            mapping, self.is_writable = _mapped(self.fileno(), begin + size_bytes, offset - begin, may_write)
        except PermissionError as error:
            raise InvalidArgument("received memory was opened for writing only: it cannot be mapped") from error
        self._view = memoryview(mapping)[begin:]
        self.size_bytes = size_bytes

    def _seal(self, one_writer: bool) -> None:
        # F_SEAL_FUTURE_WRITE forbids new writable mappings; the one that exists stays writable.
        writers = F_SEAL_FUTURE_WRITE if one_writer else 0
        fcntl.fcntl(self.fileno(), fcntl.F_ADD_SEALS, SHARED_SEALS | writers | fcntl.F_SEAL_SEAL)

    @contextmanager
    def inherited(self, begin: int = 0, size_bytes: int | None = None) -> Iterator[None]:
        """Let children that are forked in the block inherit the mapping, or whole pages of it, and no others."""
        self._advise(mmap.MADV_DOFORK, begin, size_bytes)
        try:
            yield
        finally:
            self.keep_from_children(begin, size_bytes)

    def keep_from_children(self, begin: int = 0, size_bytes: int | None = None) -> None:
        """Do not let forked children inherit the mapping, or whole pages of it."""
        self._advise(mmap.MADV_DONTFORK, begin, size_bytes)

    def _advise(self, advice: int, begin: int, size_bytes: int | None) -> None:
        mapping = self.view.obj
        assert isinstance(mapping, mmap.mmap)
        mapping.madvise(advice, begin, len(mapping) if size_bytes is None else size_bytes)

    def forget_file(self) -> None:
        """Keep the mapping, and close all fds of the file in this process: it cannot map the memory again.

        `fileno` is from then on that of /dev/null. Not thread-safe.

        Raises:
            OSError: If no fd is left, or /proc is missing.
        """
        file = os.fstat(self.fileno())
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for fd in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):  # the fd of the list itself
                if os.path.samestat(os.fstat(fd), file):
                    os.dup2(null, fd, inheritable=False)  # not closed: Python's mmap closes its duplicate by number
        os.close(null)

    @property
    def view(self) -> memoryview:
        """The region as bytes (format "B").

        Raises:
            BadState: If the memory is closed.
        """
        # Read before the check: `close` in another thread removes the fd first and replaces the view second, so a view
        # that was read before `closed` returned False is the mapping.
        view = self._view
        if self.closed:
            raise BadState("this memory is closed")
        return view

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._fds

    def fileno(self) -> int:
        """Return the fd, which stays owned by this object.

        Raises:
            BadState: If the memory is closed.
        """
        for fd in self._fds:
            return fd
        raise BadState("this memory is closed")

    def close(self) -> None:
        """Close the fd and release the mapping, which arrays over `view` keep alive. Idempotent. Thread-safe."""
        try:
            fd = self._fds.pop()  # before os.close: a moment later the integer may be another file's fd
        except IndexError:
            return
        os.close(fd)
        # Replaced, not released: another thread may have read `view` and be about to use it. The mapping goes with the
        # last view of it.
        self._view = memoryview(b"")
        if self.on_close is not None:
            self.on_close()

    def __del__(self) -> None:
        if getattr(self, "_fds", None):
            if not sys.is_finalizing():
                warnings.warn(f"memory of {self.size_bytes} bytes was never closed", ResourceWarning, stacklevel=2)
            self.close()


# ---- received fds ----


def is_mappable(fd: int) -> bool:
    """Return whether `Memory.adopt` accepts a received fd, and it is open for reading. Borrows `fd`.

    The result stays true, because seals cannot be removed.

    Raises:
        InvalidArgument: If `fd` is not an open fd.
    """
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    except OSError as error:
        raise InvalidArgument(f"{fd} is not an open fd: {error.strerror} (N-VAL-13)") from error
    is_readable = flags & os.O_ACCMODE != os.O_WRONLY and not flags & os.O_PATH
    return is_readable and _seals(fd) & SHARED_SEALS == SHARED_SEALS and os.fstatvfs(fd).f_bsize == _PAGE


def sealed_size(fd: int) -> int | None:
    """Return the size of a received fd's memory if no process can ever write to it or resize it, else None.

    Borrows `fd`.

    Raises:
        InvalidArgument: If `fd` is not an open fd.
    """
    if not is_mappable(fd) or _seals(fd) & CONSTANT_SEALS != CONSTANT_SEALS:
        return None
    return os.fstat(fd).st_size


def file_identity(fd: int) -> tuple[int, int] | None:
    """Return device and inode of a memfd or tmpfs file, equal for all fds of a file; None for others. Borrows `fd`.

    Other file systems reuse the inode of a deleted file, so there it does not identify the file's content.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return None
    file = os.fstat(fd)
    return file.st_dev, file.st_ino


def _seals(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return 0  # EINVAL: the file does not support sealing


def _checked_size(fd: int, size_bytes: int | None, offset: int) -> int:
    """Return how many bytes of a received fd to map. Raise InvalidArgument if it must not be mapped."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except (OSError, ValueError):  # ValueError: a negative integer
        raise InvalidArgument("received memory is no memfd: it cannot be sealed, so it is never mapped") from None
    if seals & SHARED_SEALS != SHARED_SEALS:
        raise InvalidArgument(f"received memory lacks the seals SHRINK and GROW (it has 0x{seals:x})")
    if os.fstatvfs(fd).f_bsize != _PAGE:
        raise InvalidArgument("received memory is hugetlb, whose pages may be missing; use an ordinary memfd")
    actual = os.fstat(fd).st_size
    wanted = actual if size_bytes is None else size_bytes
    if not 0 < wanted <= actual or not 0 <= offset <= actual - wanted:
        where = f" from byte {offset} on" if offset else ""
        raise InvalidArgument(
            f"received memory has {actual} bytes, announced are {wanted}{where}; both must be above 0"
        )
    return wanted


def _mapped(fd: int, size_bytes: int, offset: int, may_write: bool) -> tuple[mmap.mmap, bool]:
    """Map a file; return the mapping, and whether it is writable. Read-only if the file is sealed against writing."""
    try:
        if may_write:
            with suppress(PermissionError):
                return mmap.mmap(fd, size_bytes, offset=offset), True
        # Before Linux 6.7 a file with F_SEAL_WRITE cannot be mapped shared, not even read-only. A private mapping has
        # the same pages, because nobody writes to them.
        flags = mmap.MAP_PRIVATE if _seals(fd) & fcntl.F_SEAL_WRITE else mmap.MAP_SHARED
        return mmap.mmap(fd, size_bytes, flags, mmap.PROT_READ, offset=offset), False
    except PermissionError:
        raise
    except OSError as error:  # a sparse file may be larger than the address space
        if error.errno in _NO_DESCRIPTOR:
            raise _no_descriptor(error) from error
        raise ResourceExhaustedTransient(f"{size_bytes} bytes cannot be mapped: {error}") from error


# ---- new memory ----


def allocate_pages(fd: int, size_bytes: int, offset: int = 0) -> None:
    """Allocate the pages of `size_bytes` bytes of a file from `offset` on; a shorter file grows.

    Raises:
        ResourceExhaustedTransient: If there is not enough memory.
    """
    # The kernel would not fail: it would allocate page by page until the out-of-memory killer runs.
    if size_bytes > _PAGE * os.sysconf("SC_PHYS_PAGES"):
        raise ResourceExhaustedTransient(f"not enough memory for {size_bytes} bytes of shared memory")
    with _translated_errors(size_bytes):
        os.posix_fallocate(fd, offset, size_bytes)


def _new_memfd(label: str, size_bytes: int) -> int:
    """Create a memfd with all pages allocated; the caller owns the fd."""
    fd = -1
    try:
        with _translated_errors(size_bytes):
            fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        allocate_pages(fd, size_bytes)
        vlog("memory", "%d bytes of shared memory for %s, fd %d", size_bytes, label, fd)
        return fd
    except BaseException:  # also what a signal handler raises: allocation may take long
        if fd >= 0:
            os.close(fd)
        raise


@contextmanager
def _translated_errors(size_bytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NO_DESCRIPTOR:
            raise _no_descriptor(error) from error
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise ResourceExhaustedTransient(
                f"not enough memory for {size_bytes} bytes of shared memory: {error}"
            ) from error
        raise


def _no_descriptor(error: OSError) -> ResourceExhaustedTransient:
    return ResourceExhaustedTransient(
        f"no file descriptor is left for shared memory: {error}. close() bursts, models and clients that are not used "
        "any more, or use `with`; `ulimit -n` raises the limit"
    )


def _check_size(size_bytes: int) -> None:
    if size_bytes < 1:
        raise InvalidArgument(f"shared memory needs at least 1 byte, not {size_bytes}")


class PrivateBytes(mmap.mmap):
    """Zeroed private memory for large copies. Make it with `allocate`; freed with the last view of it.

    The pages are returned in slices, because the GIL is held meanwhile: returning 1 GiB at once takes 0.1 to 0.5 s.
    """

    @classmethod
    def allocate(cls, size_bytes: int) -> Self:
        """Return memory of `size_bytes`.

        Raises:
            MemoryError: If there is not enough.
        """
        try:
            memory = cls(-1, max(size_bytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"{size_bytes} bytes of private memory: {error}") from error
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def __del__(self) -> None:
        if self.closed:  # `allocate` has failed
            return
        for begin in range(0, len(self), _FREED_AT_ONCE):
            self.madvise(mmap.MADV_DONTNEED, begin, min(_FREED_AT_ONCE, len(self) - begin))


# ---- contents of files, and message bodies ----


def write_all(fd: int, data: bytes | bytearray | memoryview, offset: int = 0) -> None:
    """Write all of `data` (format "B") at `offset` of a file: one pwrite(2) writes 2 GiB at most. Raises OSError."""
    done = 0
    with memoryview(data) as rest:
        while done < len(rest):
            done += os.pwrite(fd, rest[done:], offset + done)


def copy_file(source: int, begin: int, size_bytes: int, target: int) -> None:
    """Copy a part of a file to the beginning of another one, up to the file's end, and blocks. Raises OSError.

    In pieces of 1 MiB: a copy inside the kernel goes page by page, which is slower.
    """
    piece, done = memoryview(PrivateBytes.allocate(min(_COPY_BYTES, size_bytes))), 0
    while done < size_bytes:
        count = os.preadv(source, [piece[: size_bytes - done]], begin + done)
        if count == 0:
            break
        write_all(target, piece[:count], done)
        done += count


def empty_memfd(label: str) -> int:
    """Return the fd of an empty memfd, which the caller owns: for a library that writes to it by a path of its fd.

    Raises:
        ResourceExhaustedTransient: If no fd is left.
    """
    with _translated_errors(0):
        return os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def write_to_memfd(data: bytes | bytearray | memoryview, label: str = "nnfmq-body") -> int:
    """Return a new memfd with `data`: the body of a message that does not fit into a socket. The caller owns the fd."""
    fd = _new_memfd(label, max(len(data), 1))
    try:
        write_all(fd, data)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_from_memfd(fd: int, size_bytes: int) -> bytearray:
    """Read `size_bytes` of a received memfd into private memory. Borrows `fd`.

    The file is read, not mapped, because its sender may shrink it meanwhile.

    Raises:
        ProtocolError: If the file is not a memfd, is too short, or may not be read. Other files are rejected because a
            read of them can block for as long as their sender likes (FUSE).
    """
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise ProtocolError(f"a body of {size_bytes} bytes cannot be read: it came in what is no memfd") from None
    body = bytearray(size_bytes)
    done = 0
    with memoryview(body) as rest:
        while done < size_bytes:
            try:
                count = os.preadv(fd, [rest[done:]], done)
            except OSError as error:  # EBADF: the sender opened it for writing only
                raise ProtocolError(f"a body of {size_bytes} bytes cannot be read: {error.strerror}", done) from error
            if count == 0:
                raise ProtocolError(f"a body of {size_bytes} bytes was announced, its file ends early", done)
            done += count
    return body
