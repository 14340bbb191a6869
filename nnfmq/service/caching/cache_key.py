"""The key that seals cache files: 32 random bytes in a file that only the driver's user can read.

The key is created when the first cache is saved. It is written under a temporary name and linked to its own name when
it is complete, so any number of drivers may create it concurrently: all of them use the one that was linked first. A
key that other users can read or write is rejected, because whoever has the key can forge cache contents. Without a
usable key nothing is cached. (CACHE-12)
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from contextlib import suppress
from pathlib import Path

from nnfmq.hal.errors import GeneralFailure, NnfmqError, ResourceExhaustedTransient
from nnfmq.paths import check_directory, make_state_directory, state_directory

__all__ = ["KEY_BYTES", "KEY_NAME", "find_key", "find_or_create_key", "is_key_available"]

KEY_NAME = "cache.key"
KEY_BYTES = 32
_log = logging.getLogger("nnfmq.caching")
_ERRORS = (NnfmqError, OSError, RuntimeError)  # RuntimeError: the user has no home directory
_SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))


def is_key_available() -> bool:
    """Return whether a key exists or could be created. Creates nothing; raises nothing."""
    try:
        directory = state_directory()
        if directory.exists():
            check_directory(directory)
            return _read(directory) is not None or _is_writable(directory)
        return _is_writable(next(parent for parent in directory.parents if parent.exists()))
    except _ERRORS as error:
        _log.info("nothing is cached: %s", error)
        return False


def _is_writable(directory: Path) -> bool:
    return directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)


def find_key() -> bytes:
    """Return the key.

    Raises:
        GeneralFailure: If there is no key, or other users can access its file or directory.
        ResourceExhaustedTransient: If the key could not be read because of a shortage (EMFILE, ENFILE, ENOMEM). Caches
            must not be treated as invalid then.
    """
    try:
        directory = state_directory()
        check_directory(directory)
        key = _read(directory)
    except _ERRORS as error:
        is_shortage = isinstance(error, OSError) and error.errno in _SHORTAGES
        error_type = ResourceExhaustedTransient if is_shortage else GeneralFailure
        raise error_type(f"this installation's cache key cannot be used: {error}") from error
    if key is None:
        raise GeneralFailure("this installation has no cache key: it has never saved a compilation")
    return key


def find_or_create_key() -> bytes:
    """Return the key, which is created if there is none.

    Raises:
        GeneralFailure: If the key cannot be created, or as `find_key`.
        ResourceExhaustedTransient: As `find_key`.
    """
    try:
        directory = make_state_directory()
        if _read(directory) is None:
            _create(directory)
    except _ERRORS as error:
        raise GeneralFailure(f"there is no cache key: {error}") from error
    return find_key()


def _read(directory: Path) -> bytes | None:
    """Return the key in `directory`, or None. Raises GeneralFailure if the file is not private to this user."""
    path = directory / KEY_NAME
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        info = os.fstat(fd)
        is_private = stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077
        key = os.read(fd, KEY_BYTES + 1) if is_private else b""
    finally:
        os.close(fd)
    if len(key) != KEY_BYTES:
        raise GeneralFailure(
            f"{path} must be a file of {KEY_BYTES} bytes that uid {os.geteuid()} owns and nobody else may read or "
            "write. Remove it: a new key is created, and models with old caches are compiled again"
        )
    return key


def _create(directory: Path) -> None:
    """Create the key. link(2) fails if the name exists, so a key is never replaced and never seen incomplete."""
    temporary = directory / f".{KEY_NAME}.{os.getpid()}.{os.urandom(8).hex()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.write(fd, os.urandom(KEY_BYTES))
            os.fsync(fd)
        finally:
            os.close(fd)
        with suppress(FileExistsError):  # another driver was faster: its key is used
            os.link(temporary, directory / KEY_NAME)
    finally:
        os.unlink(temporary)
