"""The key of this installation: created once, by the first process, readable by its user only; else no caching."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nnfmq.driver.cache.files import (
    CacheContents,
    CacheFiles,
    DeviceIdentity,
    find_key,
    find_or_create_key,
    is_key_available,
    read_files,
    save_files,
)
from nnfmq.driver.devices.registry import load_devices
from nnfmq.hal.capabilities import NumberOfCacheFiles
from nnfmq.hal.errors import GeneralFailure

ONE_FILE = NumberOfCacheFiles(1, 0)
SELF = DeviceIdentity("reference", "1")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a state directory that does not exist yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "nnfmq"


@pytest.fixture
def key_file(state: Path) -> Path:
    find_or_create_key()
    return state / "cache.key"


def test_the_key_is_created_once_and_private_to_its_user(state: Path) -> None:
    key = find_or_create_key()
    assert (len(key), find_or_create_key(), find_key()) == (32, key, key)
    info = (state / "cache.key").stat()
    assert (info.st_mode & 0o777, info.st_uid, state.stat().st_mode & 0o777) == (0o600, os.geteuid(), 0o700)
    assert os.listdir(state) == ["cache.key"]


def test_two_installations_have_different_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = find_or_create_key()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "second"))
    assert find_or_create_key() != first


def test_is_key_available_creates_no_key(state: Path) -> None:
    assert is_key_available()
    assert not state.exists()
    with pytest.raises(GeneralFailure):
        find_key()
    assert not state.exists()


def test_threads_that_create_the_key_concurrently_get_the_same() -> None:
    with ThreadPoolExecutor(16) as pool:
        keys = list(pool.map(lambda _: find_or_create_key(), range(16)))
    assert len(set(keys)) == 1


def test_processes_that_create_the_key_concurrently_get_the_same() -> None:
    code = (
        "import sys; from nnfmq.driver.cache.files import find_or_create_key; "
        "print(flush=True); sys.stdin.read(1); print(find_or_create_key().hex())"
    )
    makers = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for maker in makers:
        assert maker.stdout is not None
        maker.stdout.readline()  # it is ready
    keys = {maker.communicate("x")[0].strip() for maker in makers}
    assert keys == {find_key().hex()}


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o604, 0o602, 0o610, 0o644, 0o666])
def test_a_key_that_others_can_access_is_rejected_with_a_remedy(mode: int, key_file: Path) -> None:
    key_file.chmod(mode)
    assert not is_key_available()
    for function in (find_key, find_or_create_key):
        with pytest.raises(GeneralFailure, match=r"cache\.key must be .* Remove it"):
            function()


@pytest.mark.parametrize("content", [b"", b"k" * 31, b"k" * 33])
def test_a_key_of_wrong_length_is_rejected(content: bytes, key_file: Path) -> None:
    key_file.write_bytes(content)
    assert not is_key_available()
    with pytest.raises(GeneralFailure):
        find_or_create_key()


@pytest.mark.parametrize("kind", ["link", "directory", "pipe"])
def test_a_key_that_is_not_a_regular_file_is_rejected(kind: str, key_file: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    key_file.rename(elsewhere)
    if kind == "link":
        key_file.symlink_to(elsewhere)
    elif kind == "pipe":
        os.mkfifo(key_file, 0o600)
    else:
        key_file.mkdir()
    assert not is_key_available()
    with pytest.raises(GeneralFailure):
        find_or_create_key()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_N_CCX_1_a_key_of_another_user_is_rejected(key_file: Path) -> None:
    os.chown(key_file, 12345, 12345)
    assert not is_key_available()
    with pytest.raises(GeneralFailure):
        find_or_create_key()


def test_a_state_directory_that_others_can_access_is_rejected(key_file: Path) -> None:
    key_file.parent.chmod(0o755)
    assert not is_key_available()
    with pytest.raises(GeneralFailure, match="mode 0700"):
        find_or_create_key()


def test_N_CCH_15_without_a_key_a_device_declares_no_cache_files_saves_nothing_and_loads_nothing(
    tmp_path: Path,
) -> None:
    """A home that cannot be written to: here a file is in its place, which stops root as well."""
    (tmp_path / "state").write_bytes(b"")
    assert not is_key_available()
    assert load_devices().find("reference").number_of_cache_files == NumberOfCacheFiles()
    fd = os.memfd_create("cache")
    try:
        save_files(CacheFiles(bytes(32), [fd]), ONE_FILE, SELF, lambda: CacheContents((b"x",)))
        assert os.fstat(fd).st_size == 0
    finally:
        os.close(fd)


def test_no_key_is_available_in_a_directory_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert not is_key_available()


def test_no_key_is_available_to_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert not is_key_available()
    for function in (find_key, find_or_create_key):
        with pytest.raises(GeneralFailure):
            function()


def test_a_new_key_invalidates_old_caches_only(key_file: Path) -> None:
    fd = os.memfd_create("cache")
    try:
        files = CacheFiles(bytes(32), [fd])
        save_files(files, ONE_FILE, SELF, lambda: CacheContents((b"x",)))
        assert read_files(files, ONE_FILE, SELF, 100)[0].model == (b"x",)
        key_file.unlink()
        with pytest.raises(GeneralFailure, match="never saved"):
            read_files(files, ONE_FILE, SELF, 100)
        find_or_create_key()
        with pytest.raises(GeneralFailure, match="not what this driver saved"):
            read_files(files, ONE_FILE, SELF, 100)
        save_files(files, ONE_FILE, SELF, lambda: CacheContents((b"y",)))
        assert read_files(files, ONE_FILE, SELF, 100)[0].model == (b"y",)
    finally:
        os.close(fd)
