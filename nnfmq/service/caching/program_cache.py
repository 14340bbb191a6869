"""The driver's own cache: what a device compiled for any client of this user, ready for the next one.

Each entry is a file, named by a digest over the model, with its constants, and all that its code depends on; it is
sealed as a client's cache files are (`compilation_cache`), and believed on the same terms. So a file that was changed,
cut short, renamed or written by another build is removed, and its model compiled afresh.

Any number of workers share the directory without a lock among them. An entry is written under another name and appears
whole; the writer holds a lock on that file, so what a killed one left is known by its lock being free, and removed by
the next writer. All entries together take at most $NNFMQ_CACHE_MIB (0: no cache at all); those that were not used for
the longest time go first. Whatever is wrong costs a log line, and never fails a preparation. (docs/how-to/caching.md)

What a living worker has of an entry others take from it (`shared_cache_client`): the memory in which it lies has
the very bytes of the file, so one seal is verified either way, and constants of a program are views of that memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from nnfmq.hal.errors import GeneralFailure, NnfmqError
from nnfmq.hal.types import Model
from nnfmq.memory import Memory
from nnfmq.paths import cache_directory, check_directory, make_cache_directory
from nnfmq.serialize.model_codec import encode_model
from nnfmq.service.caching import shared_cache_client
from nnfmq.service.caching.compilation_cache import (
    Buffer,
    CacheContents,
    Identity,
    build_identity,
    open_memory,
    read_file,
    sealed,
    write_file,
)
from nnfmq.service.caching.interpreter_cache_format import Groups, restore_groups, save_groups

__all__ = ["VARIABLE", "Entry", "entry_for", "entry_sizes", "limit_bytes", "switched_off"]

VARIABLE = "NNFMQ_CACHE_MIB"
_DEFAULT_MIB = 512
_MIB = 1 << 20
_LABEL = "nnfmq-program"
_PIECE_BYTES = 1 << 20
_UNFINISHED = "."  # what names of files begin with that are being written
# RuntimeError: a user without a home. All are logged as text: who keeps an error keeps the memory that its frames see.
_ERRORS = (NnfmqError, OSError, RuntimeError, MemoryError)
_log = logging.getLogger("nnfmq.caching")


def limit_bytes() -> int:
    """Return how much all entries may take; 0: nothing is cached."""
    given = os.environ.get(VARIABLE, "")
    return (int(given) if given.isdecimal() else _DEFAULT_MIB) * _MIB


@contextmanager
def switched_off() -> Iterator[None]:
    """Let this process, and drivers that it starts during the block, cache nothing."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "0"
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def entry_for(identity: Identity, model: Model) -> Entry | None:
    """Return the place of what a device makes of `model`, whether or not anything is there.

    None where nothing is cached, and for a model with extensions: what a plug-in makes may change with the plug-in.
    """
    if not limit_bytes() or model.extensions:
        return None
    data, pools = encode_model(replace(model, operand_values=b""))
    token = _digest(data, model.operand_values, *(pool.view for pool in pools))
    name = _digest(identity.name.encode(), identity.version.encode(), build_identity(), token).hex()
    return Entry(identity, token, name)


def _digest(*fields: bytes | memoryview) -> bytes:
    digest = hashlib.sha256()
    for field in fields:
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.digest()


def entry_sizes() -> list[int]:
    """Return the bytes of each entry there is. Raises DeviceUnavailable for a directory that is not to be trusted."""
    try:
        directory = cache_directory()
        check_directory(directory)
    except (FileNotFoundError, RuntimeError):
        return []
    return [size for _, size, _ in _entries(directory)]


@dataclass(frozen=True, slots=True)
class Entry:
    """The place of one model's program."""

    identity: Identity
    token: bytes
    name: str

    def find(self) -> Groups | None:
        """Return what another worker shares or was stored here, None for nothing, or nothing to be trusted. Blocks."""
        shared = self._shared()
        return self._stored() if shared is None else shared

    def remove(self) -> None:
        """Forget what was stored here."""
        with suppress(*_ERRORS):
            (cache_directory() / self.name).unlink()

    def store(self, groups: Groups) -> Groups | None:
        """Keep `groups` here, for workers of now and of later, unless that cannot be. Blocks; raises nothing.

        Return them as they lie in memory that other workers have or can have, None where nothing is shared.
        """
        found = self._shared()
        if found is not None:
            return found  # another worker was faster
        try:
            contents = save_groups(groups)
            if len(contents.model[0]) > limit_bytes():
                raise GeneralFailure(f"it takes {len(contents.model[0])} bytes, more than all may (${VARIABLE})")
            ((header, data),) = sealed(self.identity, self.token, contents)
        except _ERRORS as error:
            _log.warning("a model was not added to the cache: %s", str(error))
            return None
        shared = self._offered(header, data) if shared_cache_client.is_possible() else None
        self._write(header, data)
        return shared

    def _shared(self) -> Groups | None:
        """Return what another worker shares, None for nothing, or nothing to be trusted."""
        lent = shared_cache_client.wanted(self.name)
        if lent is None:
            return None
        with lent.memory as memory:
            try:
                return self._verified(memory.view)
            except _ERRORS as error:
                _log.warning("what another worker shares is not used: %s", str(error))
                if isinstance(error, GeneralFailure):  # and not for want of something
                    shared_cache_client.refuse(lent)
                return None

    def _stored(self) -> Groups | None:
        """Return what the file has, None for nothing, or nothing to be trusted."""
        try:
            directory = cache_directory()
            check_directory(directory)
            fd = os.open(directory / self.name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except _ERRORS as error:
            _log.warning("the cache is not used: %s", error)
            return None
        try:
            groups = self._read(fd)
            os.utime(fd)  # it was used
            return groups
        except GeneralFailure as error:
            _log.warning("an entry of the cache is removed: %s", str(error))
            self.remove()
        except _ERRORS as error:  # a lack of something: the entry may be right
            _log.warning("an entry of the cache is not used: %s", str(error))
        finally:
            os.close(fd)
        return None

    def _read(self, fd: int) -> Groups:
        """Return what a file has, from memory that is offered to other workers where there may be some."""
        info = os.fstat(fd)
        size = info.st_size
        if not stat.S_ISREG(info.st_mode) or not 0 < size <= limit_bytes():
            raise GeneralFailure(f"it is no file of 1 to {limit_bytes()} bytes")
        if not shared_cache_client.is_possible():
            return self._verified(read_file(fd, size))
        with Memory.create_constant(size, partial(_copy, fd, size), _LABEL) as memory:
            groups = self._verified(memory.view)
            shared_cache_client.offer(self.name, memory)
            return groups

    def _verified(self, file: memoryview) -> Groups:
        """Return what lies in memory that nobody can change. Raises GeneralFailure unless it is this entry's file."""
        return restore_groups(open_memory(file, self.identity, self.token))

    def _offered(self, header: bytes, data: Buffer) -> Groups | None:
        """Offer a file's bytes to other workers, and return what lies in their memory."""
        try:
            size_bytes = len(header) + len(data)
            with Memory.create_constant(size_bytes, lambda fd: write_file(fd, header, data), _LABEL) as memory:
                groups = restore_groups(CacheContents((memory.view[len(header) :],)))
                shared_cache_client.offer(self.name, memory)
                return groups
        except _ERRORS as error:
            _log.warning("a model is not shared: %s", str(error))
            return None

    def _write(self, header: bytes, data: Buffer) -> None:
        """Write the file."""
        try:
            directory = make_cache_directory()
            _remove_unfinished(directory)
            with _written(directory, self.name) as fd:
                write_file(fd, header, data)
            _make_room(directory)
        except _ERRORS as error:
            _log.warning("a model was not added to the cache: %s", str(error))


def _copy(source: int, size_bytes: int, target: int) -> None:
    """Copy a file, in pieces: page by page through the kernel is slower."""
    done = 0
    while done < size_bytes:
        piece = read_file(source, min(_PIECE_BYTES, size_bytes - done), done)
        done += os.pwrite(target, piece, done)


@contextmanager
def _written(directory: Path, name: str) -> Iterator[int]:
    """Lend a new file, which is `name` afterwards, in place of what was; where the block fails it is removed."""
    unfinished = directory / f"{_UNFINISHED}{name}.{os.urandom(8).hex()}"
    fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # held until the process ends, if need be
        yield fd
        os.rename(unfinished, directory / name)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
    finally:
        os.close(fd)


def _remove_unfinished(directory: Path) -> None:
    """Remove what writers left that have ended. One that has not locked its file yet fails, and logs that."""
    for entry in _files_of(directory):
        if not entry.name.startswith(_UNFINISHED):
            continue
        with suppress(OSError):  # gone, or locked
            fd = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)
            finally:
                os.close(fd)


def _make_room(directory: Path) -> None:
    """Remove entries until all together are within the limit, the one that was not used for the longest time first."""
    entries = sorted(_entries(directory))
    excess = sum(size for _, size, _ in entries) - limit_bytes()
    for _, size, path in entries:
        if excess <= 0:
            break
        with suppress(FileNotFoundError):  # another worker makes room as well
            os.unlink(path)
        excess -= size


def _entries(directory: Path) -> Iterator[tuple[int, int, str]]:
    """Yield when each entry was used last (ns), its size and its path."""
    for entry in _files_of(directory):
        with suppress(FileNotFoundError):
            if not entry.name.startswith(_UNFINISHED):
                info = entry.stat(follow_symlinks=False)
                yield info.st_mtime_ns, info.st_size, entry.path


def _files_of(directory: Path) -> list[os.DirEntry[str]]:
    with os.scandir(directory) as found:
        return [entry for entry in found if entry.is_file(follow_symlinks=False)]
