"""The sandboxes of a driver's processes: of a worker, a compile process, and the one that compiles without a client.

docs/explanation/security-model.md says what they defend, and names the test of each line.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterable
from contextlib import suppress

from msgspec.structs import replace

from nnfmq.base import settings
from nnfmq.base.paths import cache_directory, make_cache_directory, state_directory
from nnfmq.base.processes import allowed_cpus
from nnfmq.base.sandbox.sandbox import Sandbox, prepare
from nnfmq.driver.cache.files import find_or_create_key, given_key
from nnfmq.driver.cache.programs import cache_limit_bytes
from nnfmq.driver.devices.device import DeviceBase, SandboxNeeds
from nnfmq.driver.process.private_folder import create_private_folder
from nnfmq.hal.errors import NnfmqError

__all__ = [
    "compile_sandbox",
    "detached_sandbox",
    "prepare_worker_sandbox",
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
    writes = _private_folder() if any(need.has_private_folder for need in needs) else ()
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


def _private_folder() -> tuple[str, ...]:
    """Return this process's private folder, which is created; none if that is not possible."""
    try:
        return (create_private_folder(),)
    except _ERRORS as error:
        _log.warning("devices have no private folder: %s", error)
        return ()


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
