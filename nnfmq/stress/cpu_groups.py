"""CPU limits of cgroups: the files that count throttling, and a group of its own with a limit.

Both versions of cgroups are supported: version 2 has `cpu.max` and counts `throttled_usec`; version 1, which some
machines still mount for the CPU controller, has `cpu.cfs_quota_us` and counts `throttled_time` in ns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from nnfmq.measure.failures import BenchmarkFailed

__all__ = ["PERIOD_US", "CpuGroup", "limited_group", "throttle_files", "throttled_ns"]

PERIOD_US = 50_000


class _Location(NamedTuple):
    """The mount of the CPU controller, the path of a process below it, and the version."""

    mount: Path
    path: str
    version: int


def _location(pid: int) -> _Location | None:
    """Return where the CPU controller has a process; None if it is not mounted."""
    return _found_location(Path(f"/proc/{pid}/cgroup").read_text(), Path("/proc/self/mounts").read_text())


def _found_location(cgroup: str, mounted: str) -> _Location | None:
    """Return the same from the content of /proc/PID/cgroup and /proc/self/mounts."""
    groups = [line.split(":", 2) for line in cgroup.splitlines()]
    mounts = [line.split(" ") for line in mounted.splitlines()]
    for _, mount, kind, options, *_ in mounts:
        for _, controllers, path in groups:
            if kind == "cgroup" and "cpu" in options.split(",") and "cpu" in controllers.split(","):
                return _Location(Path(mount), path, 1)
            has_cpu = kind == "cgroup2" and "cpu" in _words(Path(mount) / "cgroup.controllers")
            if has_cpu and not controllers:
                return _Location(Path(mount), path, 2)
    return None


def _words(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text().split()
    return []


def throttle_files(pid: int) -> list[Path]:
    """Return the files cpu.stat of a process's group and of the groups above it; none without the CPU controller."""
    location = _location(pid)
    if location is None:
        return []
    folder = location.mount / location.path.lstrip("/")
    above = [each for each in (folder, *folder.parents) if each.is_relative_to(location.mount)]
    return [each / "cpu.stat" for each in above if "nr_throttled" in _words(each / "cpu.stat")]


def throttled_ns(text: str) -> int:
    """Return the throttled time in the content of a cpu.stat."""
    values = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
    return int(values["throttled_time"]) if "throttled_time" in values else int(values["throttled_usec"]) * 1000


class CpuGroup:
    """A group with one process, whose CPU time can be limited."""

    def __init__(self, folder: Path, version: int) -> None:
        self._folder = folder
        self._version = version

    def limit(self, quota_us: int | None) -> None:
        """Limit the group to `quota_us` in each 50 ms; None: no limit."""
        if self._version == 2:
            (self._folder / "cpu.max").write_text(f"{'max' if quota_us is None else quota_us} {PERIOD_US}")
            return
        (self._folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (self._folder / "cpu.cfs_quota_us").write_text(str(-1 if quota_us is None else quota_us))


@contextmanager
def limited_group(pid: int) -> Iterator[CpuGroup]:
    """Move a process to a new group beside its own, and yield it; at exit the process moves back.

    Raises:
        BenchmarkFailed: If this user may not do that; the message says what is missing.
    """
    location = _location(pid)
    if location is None:
        raise BenchmarkFailed("the CPU controller of cgroups is not available")
    own = location.mount / location.path.lstrip("/")
    parent = own if location.version == 1 or own == location.mount else own.parent
    folder = parent / f"nnfmq-stress-{os.getpid()}-{pid}"
    try:
        if location.version == 2:
            (parent / "cgroup.subtree_control").write_text("+cpu")
        folder.mkdir()
    except OSError as error:
        raise BenchmarkFailed(f"a CPU limit needs root or a delegated cgroup: {parent}: {error.strerror}") from error
    try:
        _move(pid, folder)
        yield CpuGroup(folder, location.version)
    finally:
        with suppress(ProcessLookupError):  # the process has exited
            _move(pid, own)
        folder.rmdir()


def _move(pid: int, folder: Path) -> None:
    try:
        (folder / "cgroup.procs").write_text(str(pid))
    except PermissionError as error:
        raise BenchmarkFailed(f"a CPU limit needs root or a delegated cgroup: {folder}: {error.strerror}") from error
