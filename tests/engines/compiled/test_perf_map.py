"""The file of a process for perf: created safely, and lines in perf's format."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nnfmq.engines.compiled import perf_map
from nnfmq.engines.compiled.perf_map import PERF_MAP, _PerfMap, open_perf_map, remove_left_perf_maps

FIRST = f"0 1 nnfmq_in_pid_namespace_{os.stat('/proc/self/ns/pid').st_ino}\n"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(perf_map, "perf_map_path", lambda pid: str(tmp_path / f"perf-{pid}.map"))
    return tmp_path / f"perf-{os.getpid()}.map"


@pytest.fixture
def opened(path: Path) -> Iterator[_PerfMap]:
    made = _PerfMap()
    made.open()
    yield made
    made.close()


def test_functions_are_lines_of_address_size_and_name(opened: _PerfMap, path: Path) -> None:
    opened.add([(0x7F00_0000_1000, 0x8A, "GemmKernel_01")])
    opened.add([(16, 1, "b c")])
    assert path.read_text() == f"{FIRST}7f0000001000 8a GemmKernel_01\n10 1 b c\n"


def test_what_processes_have_left_is_removed_and_nothing_else(opened: _PerfMap, path: Path, tmp_path: Path) -> None:
    """Also not what is another program's, or of another PID namespace."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    contents = {
        f"perf-{ended.pid}.map": FIRST + "1 2 a\n",
        f"perf-{2**22 + 1}.map": "1 2 a\n",  # no process has this pid
        f"perf-{2**22 + 2}.map": FIRST.replace("\n", "0\n") + "1 2 a\n",
        "perf-a.map": FIRST,
    }
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    (tmp_path / f"perf-{2**22 + 3}.map").symlink_to(tmp_path / f"perf-{ended.pid}.map")
    before = {each.name for each in tmp_path.iterdir()}
    remove_left_perf_maps()
    assert before - {each.name for each in tmp_path.iterdir()} == {f"perf-{ended.pid}.map"}


def test_a_file_that_is_not_open_gets_no_functions(path: Path) -> None:
    _PerfMap().add([(1, 2, "a")])
    assert not path.exists()


def test_a_link_of_this_name_is_replaced_and_not_followed(path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path.symlink_to(victim)
    made = _PerfMap()
    made.open()
    made.add([(1, 2, "a")])
    assert victim.read_text() == "precious"
    made.close()
    assert not path.exists()
    made.close()


def test_a_forked_child_leaves_the_file_to_its_parent(path: Path) -> None:
    PERF_MAP.open()
    try:
        child = os.fork()
        if not child:
            os._exit(1 if PERF_MAP.is_open else 0)
        assert os.waitpid(child, 0)[1] == 0
        PERF_MAP.add([(1, 2, "parent")])
        assert path.read_text() == f"{FIRST}1 2 parent\n"
    finally:
        PERF_MAP.close()


def test_a_process_that_cannot_create_it_goes_on(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path.mkdir()
    monkeypatch.setenv("NNFMQ_PERF_MAP", "1")
    with caplog.at_level(logging.WARNING):
        open_perf_map()
    assert "perf does not learn the names" in caplog.text
