"""The driver's own cache: what a device compiled for any client of this user, ready for the next one.

Each entry is a file, named by a digest over the model, with its constants, and all that its code depends on; it is
sealed as a client's cache files are (`compilation_cache`), and believed on the same terms. So a file that was changed,
cut short, renamed or written by another build is removed, and its model compiled afresh.

Any number of workers share the directory without a lock among them. An entry is written under another name and appears
whole; the writer holds a lock on that file, so what a killed one left is known by its lock being free, and removed by
the next writer. All entries together take at most $NNFMQ_CACHE_MIB (0: no cache at all); those that were not used for
the longest time go first. Whatever is wrong costs a log line, and never fails a preparation. (docs/caching.md)
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from nnfmq.hal.device import NumberOfCacheFiles
from nnfmq.hal.errors import GeneralFailure, NnfmqError
from nnfmq.hal.types import Model
from nnfmq.paths import cache_directory, check_directory, make_cache_directory
from nnfmq.serialize.model import encode_model
from nnfmq.service.compilation_cache import CacheFiles, Identity, build_identity, open_files, write_files
from nnfmq.service.interpreter_cache import Groups, restore_groups, save_groups

__all__ = ["VARIABLE", "Entry", "entry_for", "entry_sizes", "limit_bytes", "switched_off"]

VARIABLE = "NNFMQ_CACHE_MIB"
_DEFAULT_MIB = 512
_MIB = 1 << 20
_ONE_FILE = NumberOfCacheFiles(model=1)
_UNFINISHED = "."  # what names of files begin with that are being written
_ERRORS = (NnfmqError, OSError, RuntimeError)  # the last: a user without a home
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
        """Return what was stored here, None for nothing, or nothing to be trusted. Blocks."""
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
            contents, _ = open_files(self._files(fd), _ONE_FILE, self.identity, limit_bytes())
            os.utime(fd)  # it was used
            return restore_groups(contents)
        except (*_ERRORS, MemoryError) as error:
            _log.warning("an entry of the cache is removed: %s", error)
            self.remove()
            return None
        finally:
            os.close(fd)

    def remove(self) -> None:
        """Forget what was stored here."""
        with suppress(*_ERRORS):
            (cache_directory() / self.name).unlink()

    def store(self, groups: Groups) -> None:
        """Keep `groups` here, unless that cannot be. Blocks; raises nothing."""
        try:
            contents = save_groups(groups)
            if len(contents.model[0]) > limit_bytes():
                raise GeneralFailure(f"it takes {len(contents.model[0])} bytes, more than all may (${VARIABLE})")
            directory = make_cache_directory()
            _remove_unfinished(directory)
            with _written(directory, self.name) as fd:
                write_files(self._files(fd), self.identity, contents)
            _make_room(directory)
        except (*_ERRORS, MemoryError) as error:
            _log.warning("a model was not added to the cache: %s", error)

    def _files(self, fd: int) -> CacheFiles:
        return CacheFiles(self.token, (fd,))


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
