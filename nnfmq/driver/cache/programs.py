"""The driver's own cache of compiled programs: a directory that all workers of a user share.

Each entry is a file. Its name is a digest of the model, its constants, the device and the driver's build; its content
is sealed like a client's cache files (`files`). A file that was changed, truncated, renamed or written by
another build fails verification; it is removed, and the model is compiled again.

Workers use the directory without a lock. An entry is written under a temporary name and renamed when it is complete.
The writer holds flock(2) on the temporary file until then, so another writer recognizes the leftover of a killed one by
its free lock, and removes it. All entries together take at most $NNFMQ_CACHE_MIB (0 disables the cache); the least
recently used are removed first. Failures are logged and never fail a preparation. (docs/how-to/caching.md)

Before a worker reads a file it looks the entry up in the shared cache (`shared`). Shared memory has the
exact bytes of the file, so both are verified in the same way, and the program's constants are views of that memory.
A worker may not write to the directory: a child process of the supervisor copies the shared memory to the file.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from nnfmq.base import settings
from nnfmq.base.digests import Sha256
from nnfmq.base.memory import Memory, write_all
from nnfmq.base.paths import cache_directory, check_directory, make_cache_directory
from nnfmq.driver.cache.files import (
    CacheContents,
    DeviceIdentity,
    PackedConstants,
    decode_constants,
    encode_constants,
    read_file,
    read_memory,
    seal,
    write_file,
)
from nnfmq.driver.cache.shared import SharedCacheClient, shared_cache
from nnfmq.driver.devices.installation import build_identity
from nnfmq.hal.errors import GeneralFailure, NnfmqError
from nnfmq.hal.types import Model
from nnfmq.operations.extensions import uses_plugins
from nnfmq.serialize.models import encode_model
from nnfmq.serialize.packets import BytesLike

__all__ = [
    "CacheEntry",
    "cache_disabled",
    "cache_limit_bytes",
    "copy_entry",
    "entry_for",
    "entry_of",
    "entry_sizes",
    "mark_used",
    "open_entry",
    "store_memory",
    "will_keep",
]

_MIB = 1 << 20
_MEMORY_LABEL = "nnfmq-program"
_COPY_BYTES = 1 << 20
_TEMPORARY_PREFIX = "."
# RuntimeError: the user has no home directory. Errors are logged as text (`str(error)`): a kept exception would keep
# its traceback, whose frames reference the mapped memory.
_ERRORS = (NnfmqError, OSError, RuntimeError, MemoryError)
_log = logging.getLogger("nnfmq.caching")


def cache_limit_bytes() -> int:
    """Return the maximum size of all entries together, in bytes; 0 if the cache is disabled."""
    return settings.CACHE_MIB.value() * _MIB


@contextmanager
def cache_disabled() -> Iterator[None]:
    """Disable the cache for this process, and for drivers that it starts within the block."""
    with settings.CACHE_MIB.exported("0"):
        yield


def entry_for(device: DeviceIdentity, model: Model) -> CacheEntry | None:
    """Return the entry for a program that `device` compiles from `model`, whether or not the entry exists.

    Returns None if the cache is disabled, and for a model with extensions of plug-ins: what a plug-in generates may
    change with the plug-in, whose version is not part of the digest.
    """
    if uses_plugins(model):
        return None
    data, pools = encode_model(replace(model, operand_values=b""))
    return entry_of(device, data, model.operand_values, *(pool.view for pool in pools))


def entry_of(device: DeviceIdentity, *fields: bytes | memoryview) -> CacheEntry | None:
    """Return the entry for what `device` makes of these bytes, existing or not; None if the cache is disabled."""
    if not cache_limit_bytes():
        return None
    token = _digest(*fields)
    name = _digest(device.name.encode(), device.version.encode(), build_identity(), token).hex()
    return CacheEntry(device, token, name)


def will_keep(model: Model) -> bool:
    """Return whether a program that is compiled from `model` will have an entry, as far as the directory tells."""
    client = shared_cache()
    try:
        if not cache_limit_bytes() or uses_plugins(model):
            return False
        return (client is not None and client.opens_files) or os.access(make_cache_directory(), os.W_OK)
    except _ERRORS:
        return False


def _digest(*fields: bytes | memoryview) -> bytes:
    digest = Sha256()
    for field in fields:
        digest.update(len(field).to_bytes(8, "little"))  # framed: ("ab", "c") and ("a", "bc") must differ
        digest.update(field)
    return digest.digest()


def entry_sizes() -> list[int]:
    """Return the size of each entry in bytes. Blocks.

    Raises:
        DeviceUnavailable: If the directory can be accessed by other users.
    """
    try:
        directory = cache_directory()
        check_directory(directory)
    except (FileNotFoundError, RuntimeError):
        return []
    return [size for _, size, _ in _entries(directory)]


class CacheEntry(Struct, frozen=True):
    """The entry of one model's program, which may or may not exist."""

    device: DeviceIdentity
    token: bytes
    name: str

    def load(self) -> PackedConstants | None:
        """Return the entry's content from another worker or from its file; None if there is no valid one. Blocks."""
        shared = self._load_shared()
        return self._load_file() if shared is None else shared

    def remove(self) -> None:
        """Remove the entry's file. Idempotent; raises nothing."""
        with suppress(*_ERRORS):
            (cache_directory() / self.name).unlink()

    def store(self, packed: PackedConstants) -> PackedConstants | None:
        """Store `packed` in the entry's file and share it with other workers, if possible. Blocks; raises nothing.

        Returns the constants as views of shared memory, or None if nothing is shared.
        """
        shared = self._load_shared()
        if shared is not None:
            return shared  # another worker compiled the same model meanwhile
        try:
            contents = encode_constants(packed)
            size_bytes = len(contents.model[0])
            if size_bytes > cache_limit_bytes():
                cache = f"the whole cache (${settings.CACHE_MIB.variable})"
                raise GeneralFailure(f"it takes {size_bytes} bytes, more than {cache}")
            ((header, data),) = seal(self.device, self.token, contents)
        except _ERRORS as error:
            _log.warning("a model was not added to the cache: %s", str(error))
            return None
        client = shared_cache()
        if client is not None:
            return self._share(client, header, data)
        write_entry(self.name, lambda fd: write_file(fd, header, data))
        return None

    def _load_shared(self) -> PackedConstants | None:
        """Return the content of another worker's memory, or None if there is no valid one."""
        client = shared_cache()
        program = None if client is None else client.look_up(self.name)
        if client is None or program is None:
            return None
        with program.memory as memory:
            try:
                return self._decode(memory.view)
            except _ERRORS as error:
                _log.warning("a program that another worker shares is not used: %s", str(error))
                if isinstance(error, GeneralFailure):  # other errors are shortages; the content may be valid
                    client.invalidate(program)
                return None

    def _load_file(self) -> PackedConstants | None:
        """Return the content of the file, or None if there is no valid one. An invalid file is removed."""
        client = shared_cache()
        is_opened = client is not None and client.opens_files
        fd = client.open_file(self.name) if client is not None and is_opened else open_entry(self.name)
        if fd is None:
            return None
        try:
            packed = self._read(fd)
            if not is_opened:
                mark_used(fd)
            return packed
        except GeneralFailure as error:
            _log.warning("an entry of the cache is removed: %s", str(error))
            self.remove()
        except _ERRORS as error:  # a shortage: the entry may be valid
            _log.warning("an entry of the cache is not used: %s", str(error))
        finally:
            os.close(fd)
        return None

    def _read(self, fd: int) -> PackedConstants:
        """Read and verify the file; in memory that is shared with other workers, if there is a shared cache."""
        info = os.fstat(fd)
        size = info.st_size
        if not stat.S_ISREG(info.st_mode) or not 0 < size <= cache_limit_bytes():
            raise GeneralFailure(f"it is not a regular file of 1 to {cache_limit_bytes()} bytes")
        client = shared_cache()
        if client is None:
            return self._decode(read_file(fd, size))
        with Memory.create_constant(size, partial(_copy, fd, size), _MEMORY_LABEL) as memory:
            packed = self._decode(memory.view)
            client.publish(self.name, memory)
            return packed

    def _decode(self, file: memoryview) -> PackedConstants:
        """Verify and decode the bytes of a file, in memory that nobody can change. Raises GeneralFailure if invalid."""
        return decode_constants(read_memory(file, self.device, self.token))

    def _share(self, client: SharedCacheClient, header: bytes, data: BytesLike) -> PackedConstants | None:
        """Publish the bytes of a file to other workers, and let the supervisor write it.

        Returns the constants as views of the published memory.
        """
        try:
            size_bytes = len(header) + len(data)
            with Memory.create_constant(size_bytes, lambda fd: write_file(fd, header, data), _MEMORY_LABEL) as memory:
                packed = decode_constants(CacheContents((memory.view[len(header) :],)))
                client.publish(self.name, memory)
                store_memory(self.name, memory)
                return packed
        except _ERRORS as error:
            _log.warning("a model is not shared: %s", str(error))
            return None


def open_entry(name: str) -> int | None:
    """Return an fd of the file of an entry, which the caller closes; None if there is none. Failures are logged."""
    try:
        directory = cache_directory()
        check_directory(directory)
        return os.open(directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except _ERRORS as error:
        _log.warning("the cache is not used: %s", error)
        return None


def mark_used(fd: int) -> None:
    """Make now the modification time of a file: the time of last use, by which entries are removed. Raises OSError."""
    os.utime(fd)


def write_entry(name: str, fill: Callable[[int], object]) -> None:
    """Write the file of an entry; `fill` writes to the fd that it borrows. Blocks. Failures are logged."""
    try:
        directory = make_cache_directory()
        _remove_leftovers(directory)
        with _new_file(directory, name) as fd:
            fill(fd)
        _evict(directory)
    except _ERRORS as error:
        _log.warning("a model was not added to the cache: %s", str(error))


def store_memory(name: str, memory: Memory) -> None:
    """Write constant memory to the file of an entry, or let the supervisor do it. Blocks. Failures are logged."""
    client = shared_cache()
    if client is None:
        copy_entry(name, memory.fileno())
    else:
        client.store(name, memory)


def copy_entry(name: str, memory: int) -> None:
    """Write the bytes of a sealed memory to the file of an entry. Blocks. Failures are logged. Borrows the fd."""
    write_entry(name, partial(_copy, memory, os.fstat(memory).st_size))


def _copy(source: int, size_bytes: int, target: int) -> None:
    """Copy a file in pieces of 1 MiB: a copy inside the kernel goes page by page, which is slower."""
    done = 0
    while done < size_bytes:
        piece = read_file(source, min(_COPY_BYTES, size_bytes - done), done)
        write_all(target, piece, done)
        done += len(piece)


@contextmanager
def _new_file(directory: Path, name: str) -> Iterator[int]:
    """Create a temporary file and yield its fd; then rename it to `name`; if the block fails, remove it.

    A file of this name with the same content stays: a worker may just have verified it.
    """
    temporary = directory / f"{_TEMPORARY_PREFIX}{name}.{os.urandom(8).hex()}"
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # released by the kernel if this process is killed
        yield fd
        if _has_content_of(directory / name, temporary):
            temporary.unlink()
        else:
            os.rename(temporary, directory / name)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    finally:
        os.close(fd)


def _has_content_of(path: Path, other: Path) -> bool:
    import filecmp  # most workers write no file

    try:
        return path.is_file() and filecmp.cmp(path, other, shallow=False)
    except FileNotFoundError:
        return False


def _remove_leftovers(directory: Path) -> None:
    """Remove temporary files of writers that have exited.

    A writer that has created its file but not locked it yet may lose it here; then its rename fails, and is logged.
    """
    for entry in _files_of(directory):
        if not entry.name.startswith(_TEMPORARY_PREFIX):
            continue
        with suppress(OSError):  # removed meanwhile, or locked by a living writer
            fd = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)
            finally:
                os.close(fd)


def _evict(directory: Path) -> None:
    """Remove the least recently used entries until all together are within the limit."""
    entries = sorted(_entries(directory))
    excess = sum(size for _, size, _ in entries) - cache_limit_bytes()
    for _, size, path in entries:
        if excess <= 0:
            break
        with suppress(FileNotFoundError):  # another worker evicts concurrently
            os.unlink(path)
        excess -= size


def _entries(directory: Path) -> Iterator[tuple[int, int, str]]:
    """Yield the time of last use (ns), the size in bytes and the path of each entry."""
    for entry in _files_of(directory):
        with suppress(FileNotFoundError):
            if not entry.name.startswith(_TEMPORARY_PREFIX):
                info = entry.stat(follow_symlinks=False)
                yield info.st_mtime_ns, info.st_size, entry.path


def _files_of(directory: Path) -> list[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        return [entry for entry in entries if entry.is_file(follow_symlinks=False)]
