"""A sandbox: what a process needs, and how it gives up everything else. docs/explanation/security-model.md: threats.

The parts are independent: where the kernel lacks one, the others hold. `missing_parts` says which it lacks.
"""

from __future__ import annotations

import logging
import os
import platform
import resource
import site
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path

from msgspec import Struct

from nnfmq.base import settings
from nnfmq.base.sandbox import kernel
from nnfmq.base.sandbox.filter_program import filter_program
from nnfmq.base.sandbox.kernel import PathAccess, PathRule
from nnfmq.base.sandbox.system_calls import Permissions
from nnfmq.hal.errors import DeviceUnavailable

__all__ = ["Sandbox", "enter", "installation_paths", "missing_parts", "prepare", "require_parts"]

_log = logging.getLogger("nnfmq.sandbox")
_SCOPES_SINCE = 6  # of Landlock's interface


class Sandbox(Struct, frozen=True):
    """The rights of a process in its sandbox, beside computing with what it has when it enters.

    Attributes:
        reads: Files and folders that it may read.
        writes: Folders in which it may create, change and remove files.
        nodes: Device nodes that it may open and control.
        generates_code: Whether it may make memory executable.
        connects: Whether it may connect to a unix socket at a path.
        oom_score: How much earlier than others the kernel kills it when memory runs out, of 1000.
        limits: Limits of resources: RLIMIT_* and the value of both the soft and the hard one.
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    generates_code: bool = False
    connects: bool = False
    oom_score: int = 0
    limits: tuple[tuple[int, int], ...] = ()

    @property
    def permissions(self) -> Permissions:
        """The rights for the filter of system calls."""
        return Permissions(self.generates_code, bool(self.writes), self.connects, bool(self.nodes))


def enter(sandbox: Sandbox) -> None:
    """Give up everything that this process does not need. Call it before the process starts threads.

    If `sandbox=off` does nothing; otherwise a part that cannot be had is logged, or with `sandbox=required` an error.

    Raises:
        DeviceUnavailable: If a part is missing, and the setting requires it.
    """
    mode = settings.SANDBOX.value()
    if mode == "off":
        return
    failed = list(_failures(sandbox))
    if failed and mode == "required":
        raise DeviceUnavailable(f"a process cannot enter its sandbox: {'; '.join(failed)}")
    for reason in failed:
        _log.warning("a process runs without a part of its sandbox: %s", reason)


def _failures(sandbox: Sandbox) -> Iterator[str]:
    """Enter; yield each part that failed, with the reason."""
    if len(os.listdir("/proc/self/task")) > 1:
        yield "threads that were started before are not in it"
    for part in _parts(sandbox):
        try:
            part()
        except OSError as error:
            yield error.strerror or str(error)


def _parts(sandbox: Sandbox) -> list[Callable[[], object]]:
    """Return the parts in the order in which one needs what the next gives up."""
    parts: list[Callable[[], object]] = [
        partial(_raise_oom_score, sandbox.oom_score),
        partial(_limit, [(resource.RLIMIT_CORE, 0), *sandbox.limits]),
        kernel.drop_capabilities,
        kernel.forbid_new_privileges,
    ]
    if kernel.landlock_version():
        parts.append(lambda: kernel.restrict_paths([_own_rule(), *_rules(sandbox)]))
    parts.append(kernel.hide_memory)
    if kernel.supports_filter():
        parts.append(lambda: kernel.install_filter(_program(sandbox)))
    return parts


def _program(sandbox: Sandbox) -> bytes:
    return filter_program(platform.machine(), sandbox.permissions, os.getpid())


def _raise_oom_score(score: int) -> None:
    fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
    try:
        if score > int(os.read(fd, 16)):
            os.write(fd, str(score).encode())
    finally:
        os.close(fd)


def _limit(limits: Iterable[tuple[int, int]]) -> None:
    for which, value in limits:
        _, hard = resource.getrlimit(which)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


# ----------------------------------------------------------------------------------------------------------------------
# Files.


_READ = PathAccess.READ_FILE | PathAccess.READ_DIR
_WRITE = (
    _READ | PathAccess.WRITE_FILE | PathAccess.TRUNCATE | PathAccess.REMOVE_DIR | PathAccess.REMOVE_FILE
    | PathAccess.MAKE_DIR | PathAccess.MAKE_REG | PathAccess.REFER
)  # fmt: skip
_CONTROL = PathAccess.READ_FILE | PathAccess.WRITE_FILE | PathAccess.IOCTL_DEV
_SYSTEM_PATHS = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/etc/localtime",
    "/usr/share/zoneinfo", "/proc/cpuinfo", "/proc/meminfo", "/proc/sys/vm/overcommit_memory",
    "/sys/devices/system/cpu", "/sys/devices/system/node", "/sys/fs/cgroup", "/dev/urandom", "/dev/zero",
)  # fmt: skip
"""What the C library, Python and the libraries of the installation open by themselves."""
_own_folder: list[int] = []


def installation_paths() -> tuple[str, ...]:
    """Return the folders that this interpreter imports from, and those of nnfmq and of the system's libraries."""
    package = str(Path(__file__).parents[2])
    prefixes = [f"{prefix}/{name}" for prefix in (sys.prefix, sys.base_prefix) for name in ("lib", "lib64")]
    packages = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    return tuple(dict.fromkeys([package, *filter(None, sys.path), *prefixes, *packages]))


def _own_rule() -> PathRule:
    # A rule is about an inode, and that of /proc/PID is a new one when nothing has kept the old one.
    _own_folder.append(os.open("/proc/self", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    return kernel.path_rule(f"/proc/{os.getpid()}", _READ)


@cache  # a supervisor makes them once for all its workers
def _rules(sandbox: Sandbox) -> tuple[PathRule, ...]:
    reads = (*_SYSTEM_PATHS, *installation_paths(), *sandbox.reads)
    wanted = [
        ("/dev/null", PathAccess.READ_FILE | PathAccess.WRITE_FILE),
        *((path, _READ) for path in reads),
        *((path, _WRITE) for path in sandbox.writes),
        *((path, _CONTROL) for path in sandbox.nodes),
    ]
    return tuple(kernel.path_rule(path, access) for path, access in wanted if os.path.exists(path))


def prepare(sandbox: Sandbox) -> None:
    """Compute what `enter` needs, so that processes that are forked later need not. Opens nothing."""
    _rules(sandbox)
    if kernel.supports_filter():
        _program(sandbox)


# ----------------------------------------------------------------------------------------------------------------------
# What the kernel lacks.


def missing_parts() -> list[str]:
    """Return the parts of a sandbox that this kernel lacks, each with what is open without it."""
    missing = []
    version = kernel.landlock_version()
    if not version:
        missing.append("Landlock (Linux 5.13): a worker opens every file of its user")
    if version < _SCOPES_SINCE:
        missing.append("scopes of Landlock (Linux 6.12): only the filter of system calls refuses signals")
    if not kernel.supports_filter():
        missing.append("a filter of system calls for this machine: a worker opens sockets and starts programs")
    return missing


def require_parts() -> None:
    """Check that this kernel has every part, if the setting requires them; otherwise log what it lacks.

    Raises:
        DeviceUnavailable: If it lacks a part that is required.
    """
    mode = settings.SANDBOX.value()
    if mode == "off":
        _log.warning("workers have no sandbox: %s", settings.SANDBOX.effective().origin)
        return
    missing = missing_parts()
    if missing and mode == "required":
        origin = settings.SANDBOX.effective().origin
        raise DeviceUnavailable(
            f"the driver does not start: {origin} requires a complete sandbox, which this kernel lacks: "
            f"{'; '.join(missing)}"
        )
    for part in missing:
        _log.warning("workers run without a part of their sandbox: this kernel lacks %s", part)
