"""The driver's own cache of compiled programs, and of their kernels: a directory that all workers of a user share.

Each entry is a file. Its name is a digest of the model, its constants, the device and the driver's build; its content
is sealed like a client's cache files (`files`). A file that was changed, truncated, renamed or written by
another build fails verification; it is removed, and the model is compiled again. The folder `kernels` has an entry for
the object code of each kernel, by its description and the instruction set, for models that are compiled later.

Workers use the directory without a lock. An entry is written under a temporary name and renamed when it is complete.
The writer holds flock(2) on the temporary file until then, so another writer recognizes the leftover of a killed one by
its free lock, and removes it. All entries together take at most $NNFMQ_CACHE_MIB (0 disables the cache), kernels a
part of that; the least recently used are removed first. Failures are logged and never fail a preparation.
(docs/how-to/caching.md)

Before a worker reads a program's file it looks the entry up in the shared cache (`shared`). Shared memory has the
exact bytes of the file, so both are verified in the same way, and the program's constants are views of that memory.
A worker may not write to the directory: a child process of the supervisor copies the shared memory to the file.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from nnfmq.base import settings
from nnfmq.base.digests import Sha256
from nnfmq.base.memory import Memory, copy_file, write_all
from nnfmq.base.paths import cache_directory, check_directory, make_cache_directory
from nnfmq.driver.cache.files import (
    CacheContents,
    DeviceIdentity,
    PackedConstants,
    decode_constants,
    encode_constants,
    find_or_create_key,
    read_file,
    read_memory,
    seal,
    write_file,
)
from nnfmq.driver.cache.shared import STORED_FILES_MAX, SharedCacheClient, shared_cache
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
    "copy_entries",
    "entry_for",
    "entry_of",
    "entry_sizes",
    "kernel_entries",
    "mark_used",
    "open_entry",
    "store_bytes",
    "store_memory",
    "will_keep",
]

_MIB = 1 << 20
_MEMORY_LABEL = "nnfmq-program"
_TEMPORARY_PREFIX = "."
_KERNELS = "kernels"  # their folder in the directory
_KERNELS_SHARE = 16  # the part of the limit that kernels have: of 512 MiB some 4000 of them
_BLOCK_BYTES = 4096  # of a file system: a small file takes as much
_Found = TypeVar("_Found")
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
    return _entry(device, "", *fields) if cache_limit_bytes() else None


def _entry(device: DeviceIdentity, folder: str, *fields: bytes | memoryview) -> CacheEntry:
    token = _digest(*fields)
    name = _digest(device.name.encode(), device.version.encode(), build_identity(), token).hex()
    return CacheEntry(device, token, folder + name)


def kernel_entries(device: DeviceIdentity, target: str, kernels: Iterable[str]) -> list[CacheEntry]:
    """Return the entry for the object code of each kernel, existing or not; none if the cache is disabled.

    `kernels` are their reprs, `target` is the name of the instruction set.
    """
    if not cache_limit_bytes():
        return []
    compiler = replace(device, version=f"{device.version} kernel for {target}")
    return [_entry(compiler, f"{_KERNELS}/", kernel.encode()) for kernel in kernels]


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
    """Return the size of each entry in bytes, kernels included. Blocks.

    Raises:
        DeviceUnavailable: If the directory can be accessed by other users.
    """
    try:
        directory = cache_directory()
        check_directory(directory)
    except (FileNotFoundError, RuntimeError):
        return []
    return [size for folder in (directory, directory / _KERNELS) for _, size, _ in _entries(folder)]


class CacheEntry(Struct, frozen=True):
    """The entry of one model's program, or of a kernel, which may or may not exist."""

    device: DeviceIdentity
    token: bytes
    name: str

    def load(self) -> PackedConstants | None:
        """Return the entry's content from another worker or from its file; None if there is no valid one. Blocks."""
        shared = self._load_shared()
        return self._from_file(self._read_program) if shared is None else shared

    def load_bytes(self) -> bytes | None:
        """Return the bytes that `store_bytes` has stored; None if there are no valid ones. Blocks.

        Other workers are not asked for them: what is small is not shared.
        """
        return self._from_file(self._read_bytes)

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
            header, data = self.sealed(encode_constants(packed))
        except _ERRORS as error:
            _log.warning("a model was not added to the cache: %s", str(error))
            return None
        client = shared_cache()
        if client is not None:
            return self._share(client, header, data)
        _write_entries({self.name: lambda fd: write_file(fd, header, data)})
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

    def sealed(self, contents: CacheContents, key: bytes | None = None) -> tuple[bytes, BytesLike]:
        """Return the header of the entry's file, and the content after it. `key` is as in `seal`.

        Raises:
            GeneralFailure: If they take more than the whole cache, or there is no usable key.
        """
        size_bytes = len(contents.model[0])
        if size_bytes > cache_limit_bytes():
            cache = f"the whole cache (${settings.CACHE_MIB.variable})"
            raise GeneralFailure(f"it takes {size_bytes} bytes, more than {cache}")
        (found,) = seal(self.device, self.token, contents, key)
        return found

    def _from_file(self, read: Callable[[int], _Found]) -> _Found | None:
        """Return the result of `read` for the file, or None if there is no valid one. An invalid file is removed."""
        client = shared_cache()
        is_opened = client is not None and client.opens_files
        fd = client.open_file(self.name) if client is not None and is_opened else open_entry(self.name)
        if fd is None:
            return None
        try:
            found = read(fd)
            if not is_opened:
                mark_used(fd)
            return found
        except GeneralFailure as error:
            _log.warning("an entry of the cache is removed: %s", str(error))
            self.remove()
        except _ERRORS as error:  # a shortage: the entry may be valid
            _log.warning("an entry of the cache is not used: %s", str(error))
        finally:
            os.close(fd)
        return None

    def _read_bytes(self, fd: int) -> bytes:
        """Read and verify the file, in private memory."""
        return bytes(read_memory(read_file(fd, _size_of(fd)), self.device, self.token).model[0])

    def _read_program(self, fd: int) -> PackedConstants:
        """Read and verify the file; in memory that is shared with other workers, if there is a shared cache."""
        size = _size_of(fd)
        client = shared_cache()
        if client is None:
            return self._decode(read_file(fd, size))
        with Memory.create_constant(size, partial(copy_file, fd, 0, size), _MEMORY_LABEL) as memory:
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
                store_memory([(self.name, size_bytes)], memory)
                return packed
        except _ERRORS as error:
            _log.warning("a model is not shared: %s", str(error))
            return None


def store_bytes(contents: Mapping[CacheEntry, bytes]) -> None:
    """Store bytes in the files of entries, for `CacheEntry.load_bytes`. Failures are logged.

    Blocks until this process has written the files; not until the supervisor has.
    """
    try:
        key = find_or_create_key()
        sealed = {entry.name: b"".join(entry.sealed(CacheContents((data,)), key)) for entry, data in contents.items()}
        names = list(sealed)
        for part in (names[begin : begin + STORED_FILES_MAX] for begin in range(0, len(names), STORED_FILES_MAX)):
            joined = b"".join(sealed[name] for name in part)
            with Memory.create_constant(len(joined), partial(write_all, data=joined), _MEMORY_LABEL) as memory:
                store_memory([(name, len(sealed[name])) for name in part], memory, waits=False)
    except _ERRORS as error:
        _log.warning("kernels were not added to the cache: %s", str(error))


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


def _size_of(fd: int) -> int:
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or not 0 < info.st_size <= cache_limit_bytes():
        raise GeneralFailure(f"it is not a regular file of 1 to {cache_limit_bytes()} bytes")
    return info.st_size


def mark_used(fd: int) -> None:
    """Make now the modification time of a file: the time of last use, by which entries are removed. Raises OSError."""
    os.utime(fd)


def _write_entries(files: Mapping[str, Callable[[int], object]]) -> None:
    """Write the files of entries: what each is mapped to writes to the fd that it borrows. Failures are logged."""
    try:
        directory = make_cache_directory()
        folders = {(directory / name).parent for name in files}
        for folder in folders:
            folder.mkdir(mode=0o700, exist_ok=True)
            _remove_leftovers(folder)
        for name, fill in files.items():
            with _new_file(directory / name) as fd:
                fill(fd)
        for folder in folders:
            _evict(folder)
    except _ERRORS as error:
        _log.warning("a model was not added to the cache: %s", str(error))


def store_memory(files: Sequence[tuple[str, int]], memory: Memory, *, waits: bool = True) -> None:
    """Write constant memory to the files of entries, or let the supervisor do it. Blocks. Failures are logged.

    `files` are the name and the size of each, which follow one another in the memory. `waits`: until the supervisor has
    written them.
    """
    client = shared_cache()
    if client is None:
        copy_entries(files, memory.fileno())
    else:
        client.store(files, memory, waits=waits)


def copy_entries(files: Sequence[tuple[str, int]], memory: int) -> None:
    """Do what `store_memory` does, with an fd that is borrowed, in this process."""
    begins = accumulate((size for _, size in files), initial=0)
    offsets = zip(files, begins, strict=False)
    _write_entries({name: partial(copy_file, memory, begin, size) for (name, size), begin in offsets})


@contextmanager
def _new_file(path: Path) -> Iterator[int]:
    """Create a temporary file and yield its fd; then rename it to `path`; if the block fails, remove it.

    A file that is there with the same content stays: a worker may just have verified it.
    """
    temporary = path.with_name(f"{_TEMPORARY_PREFIX}{path.name}.{os.urandom(8).hex()}")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # released by the kernel if this process is killed
        yield fd
        if _has_content_of(path, temporary):
            temporary.unlink()
        else:
            os.rename(temporary, path)
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


def _evict(folder: Path) -> None:
    """Remove the least recently used entries of a folder until all of them are within its part of the limit."""
    entries, kernels_bytes = sorted(_entries(folder)), cache_limit_bytes() // _KERNELS_SHARE
    limit_bytes = kernels_bytes if folder.name == _KERNELS else cache_limit_bytes() - kernels_bytes
    excess = sum(_disk_bytes(size) for _, size, _ in entries) - limit_bytes
    for _, size, path in entries:
        if excess <= 0:
            break
        with suppress(FileNotFoundError):  # another worker evicts concurrently
            os.unlink(path)
        excess -= _disk_bytes(size)


def _disk_bytes(size: int) -> int:
    """Return the disk space of a file of so many bytes: a compromised worker may have millions of small ones stored."""
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


def _entries(directory: Path) -> Iterator[tuple[int, int, str]]:
    """Yield the time of last use (ns), the size in bytes and the path of each entry."""
    for entry in _files_of(directory):
        with suppress(FileNotFoundError):
            if not entry.name.startswith(_TEMPORARY_PREFIX):
                info = entry.stat(follow_symlinks=False)
                yield info.st_mtime_ns, info.st_size, entry.path


def _files_of(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if entry.is_file(follow_symlinks=False)]
    except FileNotFoundError:  # no kernel has been stored
        return []
