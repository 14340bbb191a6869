"""The socket's path: the order of directories, and that directories under others' control are rejected."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nnfmq.base import paths
from nnfmq.hal.errors import DeviceUnavailable


@pytest.fixture(autouse=True)
def _nothing_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NNFMQ_SOCKET", "XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_run_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this user has no /run/user/UID."""
    is_dir = Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda path: not str(path).startswith("/run/user/") and is_dir(path))


def test_an_explicitly_named_socket_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNFMQ_SOCKET", "/some/where")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/xdg")
    assert paths.default_socket() == Path("/some/where")


def test_the_runtime_directory_of_the_session_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/xdg")
    assert paths.default_socket() == Path("/run/xdg/nnfmq/nnfmq.sock")


def test_the_user_s_own_run_directory_comes_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda path: True)
    assert paths.default_socket() == Path(f"/run/user/{os.getuid()}/nnfmq/nnfmq.sock")


@pytest.mark.usefixtures("no_run_user")
def test_the_user_s_directory_below_the_temporary_directory_comes_last() -> None:
    assert paths.default_socket() == Path(f"/tmp/nnfmq-{os.getuid()}/nnfmq.sock")


@pytest.mark.usefixtures("no_run_user")
def test_the_environment_names_the_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/scratch")
    assert paths.runtime_directory() == Path(f"/scratch/nnfmq-{os.getuid()}")


@pytest.mark.parametrize("name", ["NNFMQ_SOCKET", "XDG_RUNTIME_DIR"])
@pytest.mark.usefixtures("no_run_user")
def test_an_empty_variable_is_treated_as_unset(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "")
    assert paths.default_socket() == Path(f"/tmp/nnfmq-{os.getuid()}/nnfmq.sock")


def test_computing_the_socket_path_creates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    paths.default_socket()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mask", [0, 0o022, 0o077])
def test_the_runtime_directory_is_created_for_its_owner_only(
    mask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    before = os.umask(mask)
    try:
        made = paths.make_runtime_directory()
    finally:
        os.umask(before)
    assert made == tmp_path / "nnfmq"
    assert made.stat().st_mode & 0o7777 == 0o700


def test_an_existing_safe_runtime_directory_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (paths.make_runtime_directory() / "kept").touch()
    assert (paths.make_runtime_directory() / "kept").exists()


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o1700])
def test_a_directory_that_other_users_can_access_is_rejected_with_the_remedy(mode: int, tmp_path: Path) -> None:
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(
        DeviceUnavailable, match=f"mode {mode:04o}.*set XDG_RUNTIME_DIR, NNFMQ_SOCKET, XDG_STATE_HOME or XDG_CACHE_HOME"
    ):
        paths.check_directory(directory)


def test_a_link_to_a_directory_is_rejected(tmp_path: Path) -> None:
    """The creator of a link controls its target."""
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(DeviceUnavailable, match="link must be a directory"):
        paths.check_directory(tmp_path / "link")


def test_a_file_instead_of_the_directory_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o700)
    with pytest.raises(DeviceUnavailable, match="must be a directory"):
        paths.check_directory(tmp_path / "file")


def test_a_directory_of_another_user_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(DeviceUnavailable, match="directory of uid 12345"):
        paths.check_directory(tmp_path / "theirs")


def test_the_state_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert paths.state_directory() == Path("/state/nnfmq")


@pytest.mark.parametrize("named", ["", "relative/state"])
def test_state_is_in_the_user_s_home_if_the_environment_names_no_absolute_path(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", named)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert paths.state_directory() == Path("/home/somebody/.local/state/nnfmq")


def test_the_state_directory_is_created_for_its_owner_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "new" / "state"))
    made = paths.make_state_directory()
    assert made.stat().st_mode & 0o777 == 0o700
    assert paths.make_state_directory() == made


def test_a_socket_may_be_in_a_directory_of_the_user_or_in_a_sticky_one(tmp_path: Path) -> None:
    for mode in (0o700, 0o755, 0o775, 0o1777):
        tmp_path.chmod(mode)
        paths.check_socket_directory(tmp_path / "d.sock")


@pytest.mark.parametrize("below", [".", "deep/deeper"])
def test_a_socket_where_every_user_can_replace_it_is_rejected(tmp_path: Path, below: str) -> None:
    (tmp_path / "open" / below).mkdir(parents=True)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(DeviceUnavailable, match=r"every user can replace files in .*open \(mode 0777\)"):
        paths.check_socket_directory(tmp_path / "open" / below / "d.sock")


def test_a_setting_turns_the_check_off_as_for_an_emptyDir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(DeviceUnavailable, match="NNFMQ_CHECK_DIRECTORY=0"):
        paths.check_socket_directory(tmp_path / "d.sock")
    monkeypatch.setenv("NNFMQ_CHECK_DIRECTORY", "0")
    paths.check_socket_directory(tmp_path / "d.sock")


def test_a_socket_in_a_directory_of_another_user_is_rejected_unless_that_user_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.getuid() == 0:
        os.chown(tmp_path, 4711, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    owner = tmp_path.stat().st_uid
    with pytest.raises(DeviceUnavailable, match=f"belongs to uid {owner}, not to {os.getuid()} or root"):
        paths.check_socket_directory(tmp_path / "d.sock")
    paths.check_socket_directory(tmp_path / "d.sock", (owner,))
