"""The key by which a driver knows its own cache files again: 32 random bytes in a file that only its user can read.

It is made when the first cache is saved. It appears under its name whole and at once, so any number of drivers may make
it at the same time, and all use the one that was first. A key that others can read or write is no key: whoever has it
can make the driver believe anything. Where there is none, and none can be made, nothing is cached. (CACHE-12)
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

__all__ = ["KEY_BYTES", "KEY_NAME", "find_key", "is_key_possible", "make_key"]

KEY_NAME = "cache.key"
KEY_BYTES = 32
_log = logging.getLogger("nnfmq.caching")
_ERRORS = (NnfmqError, OSError, RuntimeError)  # the last: a user without a home
_SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))


def is_key_possible() -> bool:
    """Return whether there is a key, or could be; makes nothing."""
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
    """Return the key. Raises GeneralFailure where there is none, or none to be trusted.

    And ResourceExhaustedTransient where it cannot be read for want of something: then nothing is known of it.
    """
    try:
        directory = state_directory()
        check_directory(directory)
        key = _read(directory)
    except _ERRORS as error:
        lacks = isinstance(error, OSError) and error.errno in _SHORTAGES
        kind = ResourceExhaustedTransient if lacks else GeneralFailure
        raise kind(f"this installation's key cannot be used: {error}") from error
    if key is None:
        raise GeneralFailure("this installation has no key: it has never saved a compilation")
    return key


def make_key() -> bytes:
    """Return the key, after making it if there is none. Raises GeneralFailure where that cannot be."""
    try:
        directory = make_state_directory()
        if _read(directory) is None:
            _create(directory)
    except _ERRORS as error:
        raise GeneralFailure(f"there is no key to save by: {error}") from error
    return find_key()


def _read(directory: Path) -> bytes | None:
    """Return the key in `directory`, None where there is none. Raises GeneralFailure for one that is not ours alone."""
    path = directory / KEY_NAME
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        info = os.fstat(fd)
        is_ours = stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077
        key = os.read(fd, KEY_BYTES + 1) if is_ours else b""
    finally:
        os.close(fd)
    if len(key) != KEY_BYTES:
        raise GeneralFailure(
            f"{path} must be a file of {KEY_BYTES} bytes that uid {os.geteuid()} owns and nobody else may read or "
            "write. Remove it: a new one will be made, and old caches are prepared afresh"
        )
    return key


def _create(directory: Path) -> None:
    """Make the key under another name first: what is seen under its own is complete, and never replaced."""
    fresh = directory / f".{KEY_NAME}.{os.getpid()}.{os.urandom(8).hex()}"
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.write(fd, os.urandom(KEY_BYTES))
            os.fsync(fd)
        finally:
            os.close(fd)
        with suppress(FileExistsError):  # another driver was faster: its key is the key
            os.link(fresh, directory / KEY_NAME)
    finally:
        os.unlink(fresh)
