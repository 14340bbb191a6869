"""POSIX shared memory, identified by a name: for programs of one user that trust each other. The driver never uses it.

Such memory cannot be sealed. Any process that may open it can shrink it, and the others then die by SIGBUS when they
access it. It exists until `unlink`, even if no process has it open. See shm_overview(7).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nnfmq.base.memory import Memory, allocate_pages
from nnfmq.hal.errors import InvalidArgument

FOLDER = Path("/dev/shm")
"""The tmpfs in which Linux keeps POSIX shared memory."""

_NAME_BYTES_MAX = 255


def create(name: str, size_bytes: int) -> Memory:
    """Create zeroed shared memory that only this user may open, and map it. The caller owns the result.

    If it fails, the name does not exist afterwards.

    Raises:
        InvalidArgument: If the name exists, or is not valid.
        ResourceExhaustedTransient: If there is not enough memory.
    """
    fd = _open(name, create=True)
    try:
        try:
            allocate_pages(fd, size_bytes)
        except BaseException:
            os.close(fd)
            raise
        return Memory.adopt_unsealed(fd)
    except BaseException:
        unlink(name)
        raise


def open_existing(name: str) -> Memory:
    """Map existing shared memory, read-only if this user may not write to it. The caller owns the result.

    Raises:
        InvalidArgument: If the name does not exist or is not valid, or the memory has no bytes.
        PermissionError: If this user may not read it.
    """
    try:
        fd = _open(name)
    except PermissionError:
        fd = _open(name, read_only=True)
    if os.fstat(fd).st_size == 0:
        os.close(fd)
        raise InvalidArgument(f"shared memory {name} has no bytes: its creator is not finished, or died before it was")
    return Memory.adopt_unsealed(fd)


def names() -> list[str]:
    """Return the names of all POSIX shared memory of this machine, sorted; an empty list if it cannot be listed."""
    try:
        return sorted(f"/{path.name}" for path in FOLDER.iterdir() if path.is_file())
    except OSError:
        return []


def path_of(name: str) -> Path:
    """Return the file that represents the shared memory `name`, which starts with a slash."""
    return FOLDER / name[1:]


def read_end(name: str, count: int) -> tuple[int, bytes]:
    """Return the size of shared memory, and its last `count` bytes (fewer if it is smaller).

    The bytes are read, not mapped: access to a mapping could raise SIGBUS, and allocates the pages of a sparse file.

    Raises:
        InvalidArgument: If the name does not exist or is not valid.
        PermissionError: If this user may not read it.
    """
    fd = _open(name, read_only=True)
    try:
        size_bytes = os.fstat(fd).st_size
        return size_bytes, os.pread(fd, count, max(0, size_bytes - count))
    finally:
        os.close(fd)


def unlink(name: str) -> None:
    """Remove a name. Processes that have the memory open keep it; it is freed after the last of them has closed it.

    Raises:
        InvalidArgument: If the name does not exist or is not valid.
        PermissionError: If it belongs to another user.
    """
    import posix_ipc  # costs time that `import nnfmq` need not spend

    _check_name(name)
    with _translated_errors(name, "no permission to remove it"):
        posix_ipc.unlink_shared_memory(name)


def _open(name: str, *, create: bool = False, read_only: bool = False) -> int:
    """Open shared memory, or create it if it does not exist; the caller owns the fd."""
    import posix_ipc

    _check_name(name)
    mode = "reading" if read_only else "writing"
    with _translated_errors(name, f"no permission to open it for {mode}", create):
        flags = posix_ipc.O_CREX if create else 0
        return int(posix_ipc.SharedMemory(name, flags, mode=0o600, read_only=read_only).fd)


@contextmanager
def _translated_errors(name: str, denied: str, create: bool = False) -> Iterator[None]:
    import posix_ipc

    try:
        yield
    except posix_ipc.ExistentialError:
        exists = f"there is shared memory {name} already: `nnfmq queue remove {name}` removes it, or take another name"
        lacks = f"there is no shared memory {name}: `nnfmq queue list` shows the queues, `nnfmq queue create` makes one"
        raise InvalidArgument(exists if create else lacks) from None
    except posix_ipc.PermissionsError:
        raise PermissionError(errno.EACCES, denied, str(path_of(name))) from None


def _check_name(name: str) -> None:
    bare = name[1:]
    if (
        name[:1] != "/"
        or bare in ("", ".", "..")
        or "/" in bare
        or "\0" in bare
        or len(os.fsencode(name)) > _NAME_BYTES_MAX
    ):
        raise InvalidArgument(
            f"{name!r:.80} cannot name shared memory: it is a slash and 1 to {_NAME_BYTES_MAX - 1} bytes without "
            "another slash, such as /frames"
        )
