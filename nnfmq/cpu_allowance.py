"""How many CPUs this process may use: by its affinity mask, and by the CPU quota of its control groups.

A container with two CPUs of quota on a machine of sixteen sees all sixteen in its affinity mask. Sixteen threads use up
the quota of a period in an eighth of it, and the kernel stops all of them until the next one, which is a delay of up to
100 ms. So as many threads run as there are whole CPUs of quota. This is the only module that reads the quota.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

__all__ = ["allowed_cpus", "cpu_quota"]

_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_UNIFIED = ("", "unified")  # where version 2 is mounted: alone, and beside version 1
_CPU_CONTROLLER = ("cpu,cpuacct", "cpu")  # where the controller of version 1 is mounted


def allowed_cpus() -> int:
    """Return the number of CPUs that this process may use at the same time, at least 1."""
    allowed, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def cpu_quota(membership: Path = _MEMBERSHIP, cgroups: Path = _CGROUPS) -> float | None:
    """Return the CPU time per time that the process's groups allow, such as 1.5; None if there is no limit.

    A group's limit holds for the groups in it, so the smallest one on the way to the root counts. What cannot be read
    is no limit: in a container the names of outer groups need not exist in its file system.
    """
    return min(_quotas(membership, cgroups), default=None)


def _quotas(membership: Path, cgroups: Path) -> Iterator[float]:
    for line in _text(membership).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        is_unified = number == "0" and not controllers
        if not is_unified and "cpu" not in controllers.split(","):
            continue
        for mount in _UNIFIED if is_unified else _CPU_CONTROLLER:
            for group in _with_parents(name):
                folder = cgroups / mount / group
                yield from _unified_quota(folder) if is_unified else _controller_quota(folder)


def _with_parents(name: str) -> Iterator[str]:
    path = PurePosixPath("/", name)
    for group in (path, *path.parents):
        if ".." not in group.parts:  # a group outside of the namespace's root
            yield str(group).lstrip("/")


def _unified_quota(folder: Path) -> Iterator[float]:
    """Read `cpu.max`: quota, or "max", and period, in µs."""
    yield from _ratio(*_text(folder / "cpu.max").split()[:2])


def _controller_quota(folder: Path) -> Iterator[float]:
    """Read the files of version 1: a quota of -1 is no limit."""
    yield from _ratio(_text(folder / "cpu.cfs_quota_us").strip(), _text(folder / "cpu.cfs_period_us").strip())


def _ratio(quota: str = "", period: str = "") -> Iterator[float]:
    if quota.isdecimal() and period.isdecimal() and int(quota) and int(period):
        yield int(quota) / int(period)


def _text(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text("utf-8")
    return ""
