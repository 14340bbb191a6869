"""CPU quotas in files as the kernel writes them, of both versions of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nnfmq.base import processes
from nnfmq.base.processes import allowed_cores, allowed_cpus, cpu_quota, cpus_by_core


def quota(tmp_path: Path, membership: str, **files: str) -> float | None:
    """Return the quota for a process with this /proc/self/cgroup; `files` has the files by path, `__` for `/`."""
    cgroups = tmp_path / "cgroups"
    for name, text in files.items():
        path = cgroups / name.replace("__", "/").replace("_max", ".max").replace("cpu_cfs", "cpu.cfs")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "membership").write_text(membership)
    return cpu_quota(tmp_path / "membership", cgroups)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("150000 100000\n", 1.5),
        ("max 100000\n", None),
        ("50000 100000\n", 0.5),
        ("", None),
        ("0 100000\n", None),
        ("5 0\n", None),
        ("-1 100000\n", None),
        ("many 100000\n", None),
    ],
)
def test_version_2(tmp_path: Path, text: str, expected: float | None) -> None:
    assert quota(tmp_path, "0::/app\n", app__cpu_max=text) == expected


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(("text", "expected"), [("250000\n", 2.5), ("-1\n", None)])
def test_version_1(tmp_path: Path, mount: str, text: str, expected: float | None) -> None:
    files = {f"{mount}__app__cpu_cfs_quota_us": text, f"{mount}__app__cpu_cfs_period_us": "100000\n"}
    assert quota(tmp_path, "7:memory:/other\n4:cpu,cpuacct:/app\n", **files) == expected


def test_the_smallest_limit_on_the_way_to_the_root_counts(tmp_path: Path) -> None:
    files = {"a__b__cpu_max": "400000 100000", "a__cpu_max": "300000 100000", "cpu_max": "max 100000"}
    assert quota(tmp_path, "0::/a/b\n", **files) == 3
    assert quota(tmp_path, "0::/a/b\n", a__b__cpu_max="100000 100000") == 1


def test_a_container_whose_own_group_has_another_name_outside(tmp_path: Path) -> None:
    assert quota(tmp_path, "0::/docker/1234\n", cpu_max="200000 100000") == 2
    assert quota(tmp_path, "0::/../other\n", cpu_max="200000 100000") == 2


def test_groups_of_other_controllers_and_version_1_beside_version_2(tmp_path: Path) -> None:
    files = {"unified__app__cpu_max": "300000 100000", "cpu__app__cpu_cfs_quota_us": "100000"}
    assert quota(tmp_path, "9:cpuset:/app\n0::/app\n", **files) == 3
    assert quota(tmp_path, "9:cpuset:/app\n", **files) is None


def test_unreadable_files_are_no_limit(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "missing", tmp_path) is None
    (tmp_path / "membership").write_bytes(b"0::/\xff\n")
    assert cpu_quota(tmp_path / "membership", tmp_path) is None


@pytest.mark.parametrize(("limit", "expected"), [(None, 4), (0.5, 1), (1.0, 1), (1.9, 1), (2.5, 2), (16.0, 4)])
def test_the_affinity_mask_and_the_whole_cpus_of_the_quota_count(
    monkeypatch: pytest.MonkeyPatch, limit: float | None, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 7})
    monkeypatch.setattr(processes, "cpu_quota", lambda: limit)
    assert allowed_cpus() == expected


# -- cores ------------------------------------------------------------------------------------------------------------


def cpu_folders(root: Path, *siblings: str) -> Path:
    for cpu, text in enumerate(siblings):
        folder = root / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{text}\n")
    return root


def test_cpus_that_share_a_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cpu_folders(tmp_path, "0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7")
    monkeypatch.setattr(processes, "cpu_quota", lambda: None)
    for mask, expected in [({*range(8)}, 4), ({0, 4}, 1), ({0, 1, 5}, 2), ({6}, 1), ({4, 5, 6, 7}, 4)]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, mask=mask: mask)
        assert (allowed_cores(folder), allowed_cpus()) == (expected, len(mask))


def test_the_quota_limits_cores_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cpu_folders(tmp_path, "0-1", "0-1", "2-3", "2-3", "4-5", "4-5")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(6)})
    for limit, expected in [(None, 3), (2.5, 2), (0.5, 1), (6.0, 3)]:
        monkeypatch.setattr(processes, "cpu_quota", lambda limit=limit: limit)
        assert allowed_cores(folder) == expected


def test_a_cpu_whose_core_is_not_known_counts_as_one(tmp_path: Path) -> None:
    folder = cpu_folders(tmp_path, "0-1", "0-1")
    (folder / "cpu2" / "topology").mkdir(parents=True)
    (folder / "cpu2" / "topology" / "thread_siblings_list").write_text("")
    assert cpus_by_core({3, 1, 0, 2}, folder) == [[0, 1], [2], [3]]
