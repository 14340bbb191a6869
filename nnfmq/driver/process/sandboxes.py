"""The sandboxes of a driver's processes: of a worker, a compile process, and the one that compiles without a client.

docs/explanation/security-model.md says what they defend, and names the test of each line.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import resource
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from nnfmq.base import settings
from nnfmq.base.paths import cache_directory, make_cache_directory, make_work_directory, state_directory, work_directory
from nnfmq.base.processes import allowed_cpus
from nnfmq.base.sandbox.sandbox import Sandbox, prepare
from nnfmq.driver.cache.files import find_or_create_key, given_key
from nnfmq.driver.cache.programs import cache_limit_bytes
from nnfmq.driver.devices.device import DeviceBase, SandboxNeeds
from nnfmq.hal.errors import NnfmqError

__all__ = [
    "compile_sandbox",
    "detached_sandbox",
    "prepare_worker_sandbox",
    "private_folder_of",
    "worker_sandbox",
]

WORKER_OOM_SCORE = 200
"""Of 1000: if memory runs out, the kernel ends workers before other programs, and compile processes before workers."""
COMPILE_OOM_SCORE = 500
_OWN_THREADS, _CORE_THREADS = 64, 8
"""Threads of a worker, and for each core, that no limit counts: of the session, of the engine, and of runtimes."""
_ACCELERATOR_PATHS = ("/sys", "/proc/driver", "/etc/OpenCL")
"""Where libraries of accelerators find out which there are, beside their nodes."""
_log = logging.getLogger("nnfmq.sandbox")
_ERRORS = (NnfmqError, OSError, RuntimeError)  # RuntimeError: the user has no home directory


def worker_sandbox(devices: Iterable[DeviceBase], *, has_own_uid: bool = False) -> Sandbox:
    """Return the sandbox of a worker with these devices. With a uid of its own the kernel limits its threads, too.

    Creates what a worker uses and may not create later: its private folder if a device needs one, and the key and the
    directory of the cache.
    """
    needs = [device.sandbox_needs for device in devices]
    writes: tuple[str, ...] = ()
    if any(need.has_private_folder for need in needs):
        writes = _private_folder()
    found = _sandbox_for(needs, writes, _cache_paths())
    if not has_own_uid:
        return found  # the kernel would count all programs of the driver's user
    threads = settings.CLIENT_THREADS.value() + _OWN_THREADS + _CORE_THREADS * allowed_cpus()
    return replace(found, limits=((resource.RLIMIT_NPROC, threads),))


def _sandbox_for(needs: Iterable[SandboxNeeds], writes: tuple[str, ...], cache: tuple[str, ...]) -> Sandbox:
    nodes = settings.SANDBOX_NODES.value() or ()
    allowed = SandboxNeeds(_ACCELERATOR_PATHS, tuple(nodes), generates_code=True) if nodes else SandboxNeeds()
    needs = [allowed, *needs]
    return Sandbox(
        reads=(*cache, *(path for need in needs for path in need.reads)),
        writes=writes,
        nodes=tuple(path for need in needs for path in need.nodes),
        generates_code=settings.PERF_MAP.value() or any(need.generates_code for need in needs),
        oom_score=WORKER_OOM_SCORE,
    )


def prepare_worker_sandbox(has_cache: bool) -> None:
    """Compute in the supervisor what the sandboxes of workers have in common; `has_cache`: they read its cache."""
    prepare(_sandbox_for((), (), _cache_paths() if has_cache else ()))


def compile_sandbox() -> Sandbox:
    """Return the sandbox of a compile process, which reads the installation, and limits its memory and time itself."""
    return Sandbox(oom_score=COMPILE_OOM_SCORE)


def detached_sandbox() -> Sandbox:
    """Return the sandbox of the process that compiles models whose client has left: it writes to the cache."""
    reads, writes = _cache_paths(), _cache_paths()[:1]
    return Sandbox(reads=reads, writes=writes, oom_score=COMPILE_OOM_SCORE)


def _cache_paths() -> tuple[str, ...]:
    """Return the directories of the cache and of its key, which are created; none if this process may use neither."""
    if not cache_limit_bytes() or given_key() is not None:
        return ()
    try:
        with suppress(NnfmqError):  # nothing is cached
            find_or_create_key()
        make_cache_directory()
        return str(cache_directory()), str(state_directory())
    except _ERRORS as error:
        _log.info("nothing is cached: %s", error)
        return ()


# ----------------------------------------------------------------------------------------------------------------------
# The private folder of a worker: for libraries that keep files there. The supervisor removes it when the worker has
# exited, however it did. If the supervisor is killed first, the next worker with a private folder of this uid does.
# A worker holds a lock on its folder while it lives: pids are used again, and mean others in another PID namespace.


_TRIES = 64  # another worker may have locked the new folder, for a moment, or the supervisor removed the directory


def private_folder_of(pid: int, uid: int | None = None) -> str:
    """Return the private folder of a worker, which exists only if one of its devices needs it.

    `uid` is what the worker runs under; None: as this process.
    """
    return str(work_directory(uid) / str(pid))


def _private_folder() -> tuple[str, ...]:
    """Create this process's private folder, and let Python create temporary files there; return its path."""
    import tempfile  # takes milliseconds, and most workers have no such folder

    try:
        with suppress(FileNotFoundError):  # the supervisor has removed the empty directory meanwhile
            for left in make_work_directory().iterdir():
                _remove_left(left)
        folder = _locked_folder()
    except _ERRORS as error:
        _log.warning("devices have no private folder: %s", error)
        return ()
    tempfile.tempdir = folder
    return (folder,)


def _locked_folder() -> str:
    """Create this process's private folder, locked until the process ends, and return its path."""
    folder = private_folder_of(os.getpid())
    for _ in range(_TRIES):
        make_work_directory()
        with suppress(FileNotFoundError, FileExistsError, BlockingIOError):
            os.mkdir(folder, 0o700)
            fd = _lock(folder)
            if os.path.exists(folder):
                return folder
            os.close(fd)
        os.sched_yield()
    raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), folder)


def _remove_left(folder: Path) -> None:
    """Remove the private folder of a worker that has exited, if this is one."""
    import shutil

    with suppress(OSError, RecursionError):  # it has gone, its worker lives, or has made a thousand folders in it
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
