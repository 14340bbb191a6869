"""CPU limits of cgroups: version 1 or 2 as this machine has it, and version 2 in a folder that stands for its mount."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.drivers import Process, until

from nnfmq.lab.child_processes import BenchmarkFailed
from nnfmq.lab.stress import counters, sampler
from nnfmq.lab.stress.attribution import slow_requests
from nnfmq.lab.stress.counters import PERIOD_US, limited_group, throttle_files, throttled_ns
from nnfmq.lab.stress.records import RequestRecord
from nnfmq.lab.stress.sampler import Sampler, Watched

MS = 1_000_000
PATH = "/user.slice/app.slice/app.scope"
UNLIMITED_STAT = "usage_usec 900\nuser_usec 600\nsystem_usec 300\n"
LIMITED_STAT = UNLIMITED_STAT + "nr_periods 9\nnr_throttled 4\nthrottled_usec 1500\n"


# ---- the groups of this machine


def can_limit() -> bool:
    try:
        with limited_group(os.getpid()):
            return True
    except BenchmarkFailed:
        return False


def test_a_limited_process_is_throttled_and_returns_to_its_group(child: Process) -> None:
    if not can_limit():
        pytest.skip("a CPU limit needs root or a delegated cgroup")
    before = Path(f"/proc/{child.pid}/cgroup").read_text()
    with limited_group(child.pid) as group:
        group.limit(1000)
        files = throttle_files(child.pid)
        until(lambda: sum(throttled_ns(path.read_text()) for path in files) > 0, "the process has been throttled")
        group.limit(None)
        assert Path(f"/proc/{child.pid}/cgroup").read_text() != before
    assert Path(f"/proc/{child.pid}/cgroup").read_text() == before


def test_the_throttled_time_of_both_versions_of_cgroups() -> None:
    assert throttled_ns("nr_periods 3\nnr_throttled 2\nthrottled_time 1500\n") == 1500
    assert throttled_ns(LIMITED_STAT) == 1_500_000


def test_a_limit_without_permission_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    location = counters._Location(missing, "/", 1)
    monkeypatch.setattr(counters, "_location", lambda pid: location)
    with pytest.raises(BenchmarkFailed, match="needs root or a delegated cgroup"), limited_group(os.getpid()):
        pass


def test_without_the_cpu_controller_there_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_location", lambda pid: None)
    assert throttle_files(os.getpid()) == []
    with pytest.raises(BenchmarkFailed, match="not available"), limited_group(os.getpid()):
        pass


# ---- version 2


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of a mount of version 2 that these functions use; every process is in PATH.

    A real group has its files when it is made, and is removed with them.
    """
    group = tmp_path / PATH.lstrip("/")
    group.mkdir(parents=True)
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    (tmp_path / "cpu.stat").write_text(UNLIMITED_STAT)  # that of the root group has no limit
    for folder in (group, group.parent, group.parent.parent):
        (folder / "cpu.stat").write_text(LIMITED_STAT)
    monkeypatch.setattr(counters, "_location", lambda pid: counters._Location(tmp_path, PATH, 2))
    monkeypatch.setattr(Path, "rmdir", shutil.rmtree)
    return tmp_path


def test_version_2_is_found_by_its_mount_and_the_line_with_number_0(mount: Path) -> None:
    mounts = f"proc /proc proc rw 0 0\ncgroup2 {mount} cgroup2 rw,nosuid,nsdelegate 0 0\n"
    assert counters._found_location(f"0::{PATH}\n", mounts) == (mount, PATH, 2)


def test_version_1_is_found_if_it_has_the_cpu_controller(mount: Path) -> None:
    """As on machines that mount version 2 beside it without controllers."""
    (mount / "cgroup.controllers").write_text("hugetlb\n")
    mounts = f"cgroup /cpu cgroup rw,relatime,cpu,cpuacct 0 0\ncgroup2 {mount} cgroup2 rw 0 0\n"
    assert counters._found_location("4:cpu,cpuacct:/one\n0::/other\n", mounts) == (Path("/cpu"), "/one", 1)
    assert counters._found_location(f"0::{PATH}\n", mounts.splitlines()[1]) is None


def test_the_limits_of_a_group_and_of_those_above_it_count(mount: Path) -> None:
    group = mount / PATH.lstrip("/")
    folders = (group, group.parent, group.parent.parent)
    assert throttle_files(os.getpid()) == [folder / "cpu.stat" for folder in folders]


def test_a_process_is_limited_in_a_group_beside_its_own(mount: Path) -> None:
    own, pid = mount / PATH.lstrip("/"), os.getpid()
    with limited_group(pid) as group:
        (made,) = set(own.parent.iterdir()) - {own, own.parent / "cpu.stat", own.parent / "cgroup.subtree_control"}
        assert (own.parent / "cgroup.subtree_control").read_text() == "+cpu"
        assert (made / "cgroup.procs").read_text() == str(pid)
        group.limit(2000)
        assert (made / "cpu.max").read_text() == f"2000 {PERIOD_US}"
        group.limit(None)
        assert (made / "cpu.max").read_text() == f"max {PERIOD_US}"
    assert not made.exists()
    assert (own / "cgroup.procs").read_text() == str(pid)


def test_a_group_that_is_not_delegated_is_an_error_that_names_it(mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path, text: str) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "write_text", denied)
    with pytest.raises(BenchmarkFailed, match=r"app\.slice: Permission denied"), limited_group(os.getpid()):
        pass


@pytest.mark.parametrize("side", ["client", "worker"])
def test_time_that_cpu_max_throttles_is_named(
    side: str, mount: Path, child: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel adds 30 ms to `throttled_usec` during a request, in the group of one side alone."""
    files = {pid: mount / str(pid) for pid in (os.getpid(), child.pid)}
    for path in files.values():
        path.write_text(LIMITED_STAT)
    monkeypatch.setattr(sampler, "throttle_files", lambda pid: [files[pid]])
    watched = Watched(os.getpid(), child.pid, None, None)
    with Sampler([watched], os.getpid()) as running:
        samples = running.samples[0]
        until(lambda: len(samples) > 1, "samples before the request")
        begin = samples[-1].read
        limited = files[os.getpid() if side == "client" else child.pid]
        os.pwrite(fd := os.open(limited, os.O_WRONLY), LIMITED_STAT.replace("1500", "31500").encode(), 0)
        os.close(fd)
        until(lambda: getattr(samples[-1], f"{side}_throttled") == 31_500_000, "a sample after the request")
    usual = [RequestRecord(number, 10_000) for number in range(20)]
    slow = RequestRecord(begin, max(samples[-1].time - begin, 40 * MS), **{f"{side}_delay": 30 * MS})
    last = samples[-1]._replace(time=slow.end, read=slow.end)
    (found,) = slow_requests([*usual, slow], [*samples, last])
    assert [(cause.name, cause.explained) for cause in found.causes] == [("throttling", 30 * MS)]
    assert found.causes[0].evidence == f"the {side} waited 30.0 ms while throttled by a CPU limit (cpu.stat, schedstat)"
