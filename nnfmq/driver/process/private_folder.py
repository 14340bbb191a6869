"""The private folder of a worker: for libraries that keep files there.

The supervisor removes it when the worker has exited, however it did. If the supervisor is killed first, the next worker
with a private folder of this uid does. A worker holds a lock on its folder while it lives: pids are used again, and
mean others in another PID namespace.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress

from nnfmq.base.paths import make_work_directory, work_directory

__all__ = ["create_private_folder", "private_folder_of"]

_TRIES = 64  # another worker may have locked the new folder, for a moment, or the supervisor removed the directory


def private_folder_of(pid: int, uid: int | None = None) -> str:
    """Return the private folder of a worker, which exists only if one of its devices needs it.

    `uid` is what the worker runs under; None: as this process.
    """
    return str(work_directory(uid) / str(pid))


def create_private_folder() -> str:
    """Return this process's private folder, which is locked until the process ends; Python's temporary files go there.

    Removes those that workers have left. Call it once.

    Raises:
        DeviceUnavailable: If other users can access the directory of the folders.
        OSError: If the folder cannot be created.
    """
    import tempfile  # takes milliseconds, and most workers have no such folder

    _remove_left_folders()
    folder = _locked_folder()
    tempfile.tempdir = folder
    return folder


def _locked_folder() -> str:
    """Create this process's private folder, locked until the process ends, and return its path."""
    folder = private_folder_of(os.getpid())
    for _ in range(_TRIES):
        with suppress(FileNotFoundError, FileExistsError, BlockingIOError):
            make_work_directory()  # in each round: the supervisor removes it while it is empty
            os.mkdir(folder, 0o700)
            fd = _lock(folder)
            if os.path.exists(folder):
                return folder
            os.close(fd)
        os.sched_yield()
    raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), folder)


def _remove_left_folders() -> None:
    """Remove the private folders of workers that have exited."""
    import shutil

    with suppress(FileNotFoundError):  # the supervisor has removed the empty directory meanwhile
        for folder in make_work_directory().iterdir():
            with suppress(OSError, RecursionError):  # it has gone, its worker lives, or has made a thousand folders
                fd = _lock(str(folder))
                try:
                    shutil.rmtree(folder)
                finally:
                    os.close(fd)


def _lock(folder: str) -> int:
    """Return a descriptor of a folder that locks it. Raises BlockingIOError if another process has locked it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(fd)
        raise
    return fd
