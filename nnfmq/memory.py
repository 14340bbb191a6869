"""Memory that two processes share: a sealed memfd and its mapping. The only door to mmap, memfd_create and shm_open.

A peer can make a reader die by SIGBUS if it shrinks a file that the reader has mapped. So nothing is mapped here
unless it is sealed against shrinking and growing, is as large as announced by fstat, and is not hugetlb (whose pages
can be missing even so). What we create has its pages allocated before anybody touches it. A Memory owns its fd and
its mapping; arrays made over `view` keep the mapping alive after `close` (and with it a duplicate of the fd, which
Python's mmap makes for itself), never the fd that was lent.

Constant memory (`create_constant`, `adopt_constant`) is sealed against writing as well, its maker's included: what was
verified in it once stays as it is.

POSIX shared memory with a name (`create_named`, `open_named`) is the exception, for programs that trust each other: it
cannot be sealed, so whoever may open it can make the others die by SIGBUS, and it stays until `unlink`. Nothing of the
driver uses it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from nnfmq.hal.errors import InvalidArgument, ProtocolError, ResourceExhaustedTransient
from nnfmq.hal.types import Protection

F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; Python 3.11 has no name for it
SHARED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
CONSTANT_SEALS = SHARED_SEALS | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
NAMED_FOLDER = Path("/dev/shm")
"""Where Linux shows POSIX shared memory."""
_NAME_BYTES = 255
_PAGE = mmap.PAGESIZE


def _new_file(label: str, size_bytes: int) -> int:
    """Create a memfd of `size_bytes` with every page allocated; the caller owns the fd."""
    return _allocated(lambda: os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), size_bytes)


def _allocated(create: Callable[[], int], size_bytes: int) -> int:
    """Return the fd that `create` opens, with every page of `size_bytes` allocated; the caller owns it."""
    if size_bytes > _PAGE * os.sysconf("SC_PHYS_PAGES"):  # the kernel would not refuse: it would try, page by page
        raise ResourceExhaustedTransient(f"no room for {size_bytes} bytes of shared memory: the machine has less")
    fd = -1
    try:
        fd = create()
        os.posix_fallocate(fd, 0, size_bytes)
        return fd
    except BaseException as error:  # a signal's too: this may take long
        if fd >= 0:
            os.close(fd)
        shortage = _shortage(error, size_bytes)
        if shortage is not None:
            raise shortage from error
        raise


def _shortage(error: BaseException, size_bytes: int) -> ResourceExhaustedTransient | None:
    """Return what to raise where `error` is a lack of something."""
    if not isinstance(error, OSError):
        return None
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ResourceExhaustedTransient(f"no file descriptor is left for shared memory (ulimit -n): {error}")
    if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
        return ResourceExhaustedTransient(f"no room for {size_bytes} bytes of shared memory: {error}")
    return None


def can_be_mapped(fd: int) -> bool:
    """Return whether a received descriptor may be mapped, as `Memory.adopt` has it, and opened for reading.

    The seals cannot be taken off again. Raises InvalidArgument for a number that is no open descriptor.
    """
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    except OSError as error:
        raise InvalidArgument(f"N-VAL-13: {fd} is no open descriptor: {error.strerror}") from error
    is_readable = flags & os.O_ACCMODE != os.O_WRONLY and not flags & os.O_PATH
    return is_readable and _seals(fd) & SHARED_SEALS == SHARED_SEALS and os.fstatvfs(fd).f_bsize == _PAGE


def constant_bytes(fd: int) -> int | None:
    """Return the size of a received descriptor's memory if nobody can ever write to it or resize it, None otherwise.

    Raises InvalidArgument for a number that is no open descriptor.
    """
    if not can_be_mapped(fd) or _seals(fd) & CONSTANT_SEALS != CONSTANT_SEALS:
        return None
    return os.fstat(fd).st_size


def _seals(fd: int) -> int:
    """Return the seals of an open descriptor's file; 0 for what cannot be sealed."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return 0


def identity_of(fd: int) -> tuple[int, int] | None:
    """Return what tells a memfd's bytes from all others, whichever descriptor leads to them; None for other files.

    Other files' numbers come back: they mean nothing once the file may be gone.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return None
    file = os.fstat(fd)
    return file.st_dev, file.st_ino


def _check_received(fd: int, size_bytes: int | None, offset: int) -> int:
    """Return the size that may be mapped, or raise InvalidArgument with the reason."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except (OSError, ValueError):  # ValueError: a negative number
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


def _open_name(name: str, *, create: bool = False, read_only: bool = False) -> int:
    """Open POSIX shared memory, or create it where nobody has; the caller owns the fd."""
    import posix_ipc

    _check_name(name)
    flags = posix_ipc.O_CREX if create else 0
    try:
        return int(posix_ipc.SharedMemory(name, flags, mode=0o600, read_only=read_only).fd)
    except posix_ipc.ExistentialError:
        raise InvalidArgument(_existence(name, exists=create)) from None
    except posix_ipc.PermissionsError:
        mode = "reading" if read_only else "writing"
        raise PermissionError(errno.EACCES, f"no permission to open it for {mode}", str(named_path(name))) from None


def _existence(name: str, exists: bool) -> str:
    if exists:
        return f"there is shared memory {name} already: `nnfmq queue remove {name}` removes it, or take another name"
    return f"there is no shared memory {name}: `nnfmq queue list` shows the queues, `nnfmq queue create` makes one"


def _check_name(name: str) -> None:
    bare = name[1:]
    if (
        name[:1] != "/"
        or bare in ("", ".", "..")
        or "/" in bare
        or "\0" in bare
        or len(os.fsencode(name)) > _NAME_BYTES
    ):
        raise InvalidArgument(
            f"{name!r:.80} cannot name shared memory: it is a slash and 1 to {_NAME_BYTES - 1} bytes without another "
            "slash, such as /frames"
        )


def named_path(name: str) -> Path:
    """Return the file that shows the POSIX shared memory `name`, which begins with a slash."""
    return NAMED_FOLDER / name[1:]


def names() -> list[str]:
    """Return the names of all POSIX shared memory of this machine, sorted; none where it cannot be listed."""
    try:
        return sorted(f"/{path.name}" for path in NAMED_FOLDER.iterdir() if path.is_file())
    except OSError:
        return []


def end_of_named(name: str, count: int) -> tuple[int, bytes]:
    """Return the size of POSIX shared memory, and its last `count` bytes or all it has.

    They are read, not mapped: of memory that is nobody's friend, a look must not be a SIGBUS, nor allocate its holes.
    Raises InvalidArgument where there is none, PermissionError where it may not be read.
    """
    fd = _open_name(name, read_only=True)
    try:
        size_bytes = os.fstat(fd).st_size
        return size_bytes, os.pread(fd, count, max(0, size_bytes - count))
    finally:
        os.close(fd)


def unlink(name: str) -> None:
    """Remove the name of POSIX shared memory. Who has it open keeps it; what nobody holds is freed.

    Raises InvalidArgument where there is none, PermissionError where it is somebody else's.
    """
    import posix_ipc

    _check_name(name)
    try:
        posix_ipc.unlink_shared_memory(name)
    except posix_ipc.ExistentialError:
        raise InvalidArgument(_existence(name, exists=False)) from None
    except posix_ipc.PermissionsError:
        raise PermissionError(errno.EACCES, "no permission to remove it", str(named_path(name))) from None


def _map(fd: int, size_bytes: int, offset: int = 0, may_write: bool = True) -> tuple[memoryview, bool]:
    """Map read-write, or read-only where the writer sealed it against other writers (F_SEAL_FUTURE_WRITE)."""
    begin = offset % mmap.ALLOCATIONGRANULARITY
    try:
        mapping, is_writable = _mapping(fd, begin + size_bytes, offset - begin, may_write)
    except PermissionError as error:
        raise InvalidArgument("received memory was opened for writing only: it cannot be mapped") from error
    return memoryview(mapping)[begin:], is_writable


def _mapping(fd: int, size_bytes: int, offset: int, may_write: bool) -> tuple[mmap.mmap, bool]:
    try:
        if may_write:
            with suppress(PermissionError):
                return mmap.mmap(fd, size_bytes, offset=offset), True
        # Before Linux 6.7 what is sealed against writing has no shared mapping, not even for reading. Pages that nobody
        # writes to are the file's own in a private one, too.
        flags = mmap.MAP_PRIVATE if _seals(fd) & fcntl.F_SEAL_WRITE else mmap.MAP_SHARED
        return mmap.mmap(fd, size_bytes, flags, mmap.PROT_READ, offset=offset), False
    except PermissionError:
        raise
    except OSError as error:  # a sparse file costs its sender nothing, whatever its size
        raise ResourceExhaustedTransient(f"{size_bytes} bytes cannot be mapped: {error}") from error


class Memory:
    """A shared region: owns a sealed memfd and its mapping. Satisfies `hal.types.Pool`. Close it, or use `with`.

    `view` is the region as bytes; `is_writable` is False where the other side kept writing for itself, `is_readable`
    where it asks that nothing be read here.
    """

    offset = 0  # what is lent of our own is all of it, for reading and writing
    protection = Protection.READ_WRITE

    def __init__(self) -> None:
        self._fds: list[int] = []  # the one fd while it is ours; its pop gives it to one closer only
        self._view = memoryview(b"")
        self.on_close: Callable[[], object] | None = None  # whoever keeps account of it
        self.is_readable = True
        self.is_writable = False
        self.size_bytes = 0

    @classmethod
    def create(cls, size_bytes: int, label: str = "nnfmq", *, one_writer: bool = False) -> Self:
        """Create zeroed memory, sealed so that neither side can resize it.

        With `one_writer` the peer can only map it for reading. Raises InvalidArgument for a size below 1,
        ResourceExhaustedTransient where the system has no room.
        """
        if size_bytes < 1:
            raise InvalidArgument(f"shared memory needs at least 1 byte, not {size_bytes}")
        memory = cls()
        try:
            memory._fds.append(_new_file(label, size_bytes))
            memory._map(size_bytes)
            # After our own mapping: FUTURE_WRITE refuses every later one that could write.
            writers = F_SEAL_FUTURE_WRITE if one_writer else 0
            fcntl.fcntl(memory.fileno(), fcntl.F_ADD_SEALS, SHARED_SEALS | writers | fcntl.F_SEAL_SEAL)
            return memory
        except BaseException:
            memory.close()
            raise

    @classmethod
    def adopt(
        cls,
        fd: int,
        size_bytes: int | None = None,
        offset: int = 0,
        protection: Protection = Protection.READ_WRITE,
    ) -> Self:
        """Take over a received fd and map it (`size_bytes` of it, or all); it is closed whatever happens.

        `protection` says what it was lent for. Raises InvalidArgument where it is unsealed, too short, hugetlb, or no
        memfd; ResourceExhaustedTransient where it does not fit into the address space.
        """
        memory = cls()
        memory._fds.append(fd)
        try:
            memory._map(_check_received(fd, size_bytes, offset), offset, Protection.WRITE in protection)
            memory.offset, memory.is_readable = offset, Protection.READ in protection
            return memory
        except BaseException:
            with suppress(OSError):  # a number that is no open descriptor is refused like any other
                memory.close()
            raise

    @classmethod
    def create_constant(cls, size_bytes: int, fill: Callable[[int], object], label: str) -> Self:
        """Create memory that nobody can write to, this process neither. `fill` writes it, into the fd that it is lent.

        Raises as `create`, and what `fill` does.
        """
        if size_bytes < 1:
            raise InvalidArgument(f"shared memory needs at least 1 byte, not {size_bytes}")
        memory = cls()
        try:
            memory._fds.append(_new_file(label, size_bytes))
            fill(memory.fileno())
            fcntl.fcntl(memory.fileno(), fcntl.F_ADD_SEALS, CONSTANT_SEALS)
            memory._map(size_bytes, may_write=False)
            return memory
        except BaseException:
            memory.close()
            raise

    @classmethod
    def adopt_constant(cls, fd: int) -> Self:
        """Take over a received fd as `adopt` does, all of it, of memory that nobody can write to, its sender neither.

        Raises InvalidArgument for all other, ResourceExhaustedTransient where it does not fit into the address space.
        """
        if constant_bytes(fd) is None:
            os.close(fd)
            raise InvalidArgument("received memory is not sealed against writing, or is no memfd that may be mapped")
        return cls.adopt(fd, protection=Protection.READ)

    @classmethod
    def create_named(cls, name: str, size_bytes: int) -> Self:
        """Create zeroed POSIX shared memory that everybody of this user can open by its name, until `unlink`.

        Raises InvalidArgument where the name is taken or none, ResourceExhaustedTransient where the system has no room.
        """
        memory = cls()
        is_made = False
        try:
            fd = _open_name(name, create=True)
            is_made = True
            memory._fds.append(_allocated(lambda: fd, size_bytes))
            memory._map(size_bytes)
            return memory
        except BaseException:
            memory.close()
            if is_made:
                unlink(name)
            raise

    @classmethod
    def open_named(cls, name: str) -> Self:
        """Open POSIX shared memory; for reading only where no more is permitted. It cannot be sealed: see the module.

        Raises InvalidArgument where there is none or it has no bytes, PermissionError where it may not be read.
        """
        memory = cls()
        try:
            try:
                memory._fds.append(_open_name(name))
            except PermissionError:
                memory._fds.append(_open_name(name, read_only=True))
            size_bytes = os.fstat(memory.fileno()).st_size
            if size_bytes == 0:
                raise InvalidArgument(f"shared memory {name} has no bytes: its creator is at work, or ended there")
            memory._map(size_bytes)
            return memory
        except BaseException:
            memory.close()
            raise

    def _map(self, size_bytes: int, offset: int = 0, may_write: bool = True) -> None:
        self._view, self.is_writable = _map(self.fileno(), size_bytes, offset, may_write)
        self.size_bytes = size_bytes

    @property
    def view(self) -> memoryview:
        """The whole region as bytes ("B"). Raises InvalidArgument once closed."""
        view = self._view  # before the question: `close` in another thread answers it first and drops the view then
        if self.closed:
            raise InvalidArgument("this memory is closed")
        return view

    @property
    def closed(self) -> bool:
        """True once `close` was called."""
        return not self._fds

    def fileno(self) -> int:
        """Lend the fd, for passing it to a peer; it stays ours. Raises InvalidArgument once closed."""
        for fd in self._fds:
            return fd
        raise InvalidArgument("this memory is closed")

    def close(self) -> None:
        """Close the fd and the mapping. While arrays over `view` live, the mapping lives with them. Thread-safe."""
        try:
            fd = self._fds.pop()  # forgotten first: the number may be somebody else's a moment later
        except IndexError:
            return  # closed already, by another thread perhaps
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
        if getattr(self, "_fds", None):
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

    It is read, not mapped: whoever sent it may shrink it meanwhile. Raises ProtocolError where it is shorter, may not
    be read, or is no memfd: reading any other file could take as long as its sender likes (FUSE).
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
            except OSError as error:  # the sender opened it for writing only
                raise ProtocolError(f"a body of {size_bytes} bytes cannot be read: {error.strerror}", done) from error
            if count == 0:
                raise ProtocolError(f"a body of {size_bytes} bytes was announced, its file ends early", done)
            done += count
    return body
