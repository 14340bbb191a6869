"""What is found in a directory of models, and when two looks differ."""

from __future__ import annotations

import errno
import os
import re
import time
from pathlib import Path
from typing import get_args

import pytest

from nnfmq.repository import models
from nnfmq.repository.models import ModelDirectory
from nnfmq.serialize import repository_protocol


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a version with one file."""
    made = tmp_path / "m" / "1"
    made.mkdir(parents=True)
    (made / "model.tflite").write_bytes(b"content")
    return made


def test_the_names_are_those_of_the_protocol() -> None:
    _, meta = get_args(repository_protocol.ModelName)
    pattern = re.compile(meta.pattern)
    for name in ("a", "A.b-c_9", "_x", "9", ".a", "-a", "a b", "a/b", "ä", "", "a\n", "x" * 64, "x" * 65):
        is_allowed = bool(pattern.search(name)) and len(name) <= meta.max_length
        assert bool(models._NAME.fullmatch(name)) == is_allowed, name


def test_models_and_versions_are_directories_or_links_to_them(tmp_path: Path, folder: Path) -> None:
    os.symlink(folder.parent, tmp_path / "linked")
    (tmp_path / "file").write_text("")
    os.symlink(tmp_path / "nothing", tmp_path / "dangling")
    (tmp_path / ".hidden").mkdir()
    directory = ModelDirectory(tmp_path)
    assert directory.names() == ["linked", "m"]
    assert (directory.versions("m"), directory.versions("linked"), directory.versions("none")) == ([1], [1], [])


def test_versions_are_positive_decimal_numbers_and_sorted_as_such(tmp_path: Path) -> None:
    for name in ("1", "9", "10", "2147483647", "2147483648", "0", "01", "+1", "1.0", "latest", "٣"):
        (tmp_path / "m" / name).mkdir(parents=True)
    assert ModelDirectory(tmp_path).versions("m") == [2147483647, 10, 9, 1]


def test_a_state_changes_with_every_change_of_a_file(tmp_path: Path, folder: Path) -> None:
    directory = ModelDirectory(tmp_path)
    states = [directory.state("m", 1)]
    file = folder / "model.tflite"
    info = file.stat()
    file.write_bytes(b"longer content")
    states.append(directory.state("m", 1))
    os.utime(file, ns=(1, 1))
    states.append(directory.state("m", 1))
    (folder / "model.toml").write_text("")
    states.append(directory.state("m", 1))
    (folder / "weights").mkdir()
    states.append(directory.state("m", 1))
    (folder / "model.toml").unlink()
    (folder / "new").write_bytes(b"content")
    os.utime(folder / "new", ns=(info.st_atime_ns, info.st_mtime_ns))
    os.rename(folder / "new", file)
    states.append(directory.state("m", 1))
    assert None not in states and len({state.files for state in states if state}) == len(states)
    assert directory.state("m", 1) == states[-1]


@pytest.mark.parametrize("target", ["nothing", ".#model.toml"], ids=["dangling, as an editor's lock", "to itself"])
def test_a_link_that_leads_nowhere_is_a_part_of_the_state(tmp_path: Path, folder: Path, target: str) -> None:
    directory = ModelDirectory(tmp_path)
    before = directory.state("m", 1)
    os.symlink(target, folder / ".#model.toml")
    state = directory.state("m", 1)
    assert before and state and [file.name for file in state.files] == [".", ".#model.toml", "model.tflite"]


def test_a_link_to_itself_hides_no_model_and_no_version(tmp_path: Path, folder: Path) -> None:
    for link in (tmp_path / "itself", folder.parent / "2"):
        os.symlink(link.name, link)
    directory = ModelDirectory(tmp_path)
    assert (directory.names(), directory.versions("m")) == (["m"], [1])


def test_of_a_folder_that_may_not_be_read_the_folder_is_the_state(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scandir(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", scandir)
    state = ModelDirectory(tmp_path).state("m", 1)
    assert state and [file.name for file in state.files] == ["."]


def test_the_time_of_the_last_change_is_not_that_which_a_copy_sets(tmp_path: Path, folder: Path) -> None:
    os.utime(folder / "model.tflite", (0, 0))
    state = ModelDirectory(tmp_path).state("m", 1)
    assert state is not None and abs(time.time() - state.changed_s) < 60


def test_a_version_that_is_not_there_has_no_state(tmp_path: Path, folder: Path) -> None:
    directory = ModelDirectory(tmp_path)
    assert directory.state("m", 2) is None
    assert directory.state("none", 1) is None
    (folder.parent / "3").write_text("a file")
    assert directory.state("m", 3) is None


def test_a_directory_that_is_missing_is_an_error_and_not_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ModelDirectory(tmp_path / "none").names()
