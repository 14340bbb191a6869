"""Files of drivers whose sockets have names that no other driver gets: that of their process, or of their Ray node.

A driver that ends leaves its lock file, because another one may take it (`Listener.close`), and one that is killed its
socket, too. With a name of its own no other one does, so its owner removes them; those of an owner that was killed with
its driver are removed by the next one on the machine.
"""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from nnfmq.base.paths import cache_directory, models_socket, runtime_directory

__all__ = ["remove_left_files", "remove_socket_files", "unique_socket"]

_SUFFIX, _LOCK_SUFFIX = ".sock", ".sock.lock"
_YOUNG_S = 60.0  # a folder whose driver may not have started yet


def unique_socket(prefix: str, key: str) -> Path:
    """Return the path of the socket of an owner; its folder may not exist yet."""
    return runtime_directory() / f"{prefix}-{key}{_SUFFIX}"


def remove_socket_files(path: Path) -> bool:
    """Remove the sockets and lock files of a driver that has ended, and whose path no other one takes.

    Return whether that is done: not if a driver listens there. No effect if there are none.
    """
    for each in (path, models_socket(path)):
        with suppress(FileNotFoundError), open(f"{each}.lock", "rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            each.unlink(missing_ok=True)
            Path(lock.name).unlink()
    return True


def remove_left_files(prefix: str, may_live: Callable[[str], bool]) -> None:
    """Remove the socket files and the folder of models of owners that were killed. Raises OSError.

    `may_live` says of an owner's key whether it may start its driver again.
    """
    for lock in runtime_directory().glob(f"{prefix}-*{_LOCK_SUFFIX}"):
        key = lock.name.removeprefix(f"{prefix}-").removesuffix(_LOCK_SUFFIX)
        if not may_live(key):
            remove_socket_files(unique_socket(prefix, key))
    for folder in cache_directory().glob(f"{prefix}-*"):
        key = folder.name.removeprefix(f"{prefix}-")
        is_young = time.time() - folder.stat().st_mtime < _YOUNG_S
        if not (may_live(key) or is_young or unique_socket(prefix, key).with_suffix(_LOCK_SUFFIX).exists()):
            shutil.rmtree(folder, ignore_errors=True)
