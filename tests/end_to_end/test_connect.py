"""`connect` finds a running driver at the default path, else starts an embedded one and logs it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.drivers import LIMIT_S, Daemon, Program, running_daemon

import nnfmq


@pytest.fixture
def nowhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a new runtime directory in which no driver listens."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.delenv("NNFMQ_SOCKET", raising=False)
    return folder


def test_connect_finds_the_driver_that_NNFMQ_SOCKET_names(
    daemon: Daemon, nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNFMQ_SOCKET", str(daemon.path))
    with nnfmq.connect() as client:
        assert not client.is_embedded


def test_connect_finds_the_driver_in_the_runtime_directory(nowhere: Path) -> None:
    path = nowhere / "nnfmq" / "nnfmq.sock"
    with running_daemon(path, arguments=["-P", "-m", "nnfmq", "serve"]), nnfmq.connect() as client:
        assert not client.is_embedded
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert path.stat().st_mode & 0o777 == 0o600


def test_without_a_driver_connect_starts_an_embedded_one_and_logs_why(
    nowhere: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "nnfmq.client"), nnfmq.connect() as client:
        assert client.is_embedded
    where = nowhere / "nnfmq" / "nnfmq.sock"
    assert caplog.messages == [f"started an embedded driver: no driver listens at {where}: No such file or directory"]


def test_connect_starts_an_embedded_driver_if_only_a_killed_driver_s_path_exists(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_daemon(folder / "d.sock") as daemon:
        monkeypatch.setenv("NNFMQ_SOCKET", str(daemon.path))
        daemon.kill()
        with nnfmq.connect() as client:
            assert client.is_embedded


def test_embedded_False_never_starts_a_driver(nowhere: Path) -> None:
    with pytest.raises(nnfmq.DeviceUnavailable, match="no driver listens at"):
        nnfmq.connect(embedded=False)


def test_embedded_True_does_not_search_for_a_driver(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNFMQ_SOCKET", str(daemon.path))
    with nnfmq.connect(embedded=True) as client:
        assert client.is_embedded


def test_an_explicit_path_is_the_only_one_that_is_tried(nowhere: Path) -> None:
    with pytest.raises(nnfmq.DeviceUnavailable, match="no driver listens at /nowhere"):
        nnfmq.connect("/nowhere")


def test_a_path_and_embedded_exclude_each_other(nowhere: Path) -> None:
    with pytest.raises(nnfmq.InvalidArgument):
        nnfmq.connect("/nowhere", embedded=True)


def test_serve_rejects_a_runtime_directory_that_other_users_can_access(nowhere: Path) -> None:
    directory = nowhere / "nnfmq"
    directory.mkdir()
    directory.chmod(0o755)
    with Program.start(["-P", "-m", "nnfmq", "serve"]) as program:
        assert program.wait() == 1
        assert program.errors().startswith(f"nnfmq: error: {directory} must be a directory of uid {os.getuid()}")
        assert program.errors().count("\n") == 1
    assert list(directory.iterdir()) == []


def test_serve_rejects_a_runtime_directory_that_is_a_link(nowhere: Path) -> None:
    (nowhere / "elsewhere").mkdir(mode=0o700)
    (nowhere / "nnfmq").symlink_to("elsewhere")
    with Program.start(["-P", "-m", "nnfmq", "serve"]) as program:
        assert program.wait() == 1
    assert list((nowhere / "elsewhere").iterdir()) == []


def test_an_embedded_driver_does_not_import_from_the_app_s_working_directory(folder: Path) -> None:
    (folder / "msgspec.py").write_text("raise SystemExit('the wrong msgspec')")
    code = "import nnfmq; c = nnfmq.connect(embedded=True); print(c.devices()[0].name); c.close()"
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.stdout, done.stderr) == ("reference\n", "")


def test_an_embedded_driver_has_the_same_devices_as_a_daemon(client: nnfmq.Client) -> None:
    with nnfmq.connect(embedded=True) as embedded:
        assert embedded.devices() == client.devices()
        assert client.devices()[0].name == "reference"


def test_the_error_for_an_unknown_device_lists_the_known_devices(client: nnfmq.Client) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match=r"no device 'gpu'; this driver has: compiled, .*reference"):
        client.device("gpu")


@pytest.mark.parametrize("embedded", [None, False])
def test_a_client_uses_no_socket_that_every_user_can_replace(
    folder: Path, monkeypatch: pytest.MonkeyPatch, embedded: bool | None
) -> None:
    with running_daemon(folder / "d.sock") as daemon:
        monkeypatch.setenv("NNFMQ_SOCKET", str(daemon.path))
        folder.chmod(0o777)
        with pytest.raises(nnfmq.DeviceUnavailable, match="every user can replace files in"):
            nnfmq.connect(embedded=embedded)
        folder.chmod(0o1777)  # sticky, as /tmp is
        with nnfmq.connect(embedded=embedded) as client:
            assert not client.is_embedded


def test_a_driver_listens_at_no_path_that_every_user_can_replace(folder: Path) -> None:
    folder.chmod(0o777)
    done = serve(folder, NNFMQ_SOCKET=str(folder / "d.sock"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "every user can replace files in" in done.stderr
    assert list(folder.iterdir()) == []


def test_a_driver_replaces_no_file_and_leaves_none_beside_it(folder: Path) -> None:
    (folder / "thesis.txt").write_text("years of work")
    done = serve(folder, "--socket", str(folder / "thesis.txt"))
    assert (done.returncode, "exists and is no socket" in done.stderr) == (1, True)
    assert [entry.name for entry in folder.iterdir()] == ["thesis.txt"]
    assert (folder / "thesis.txt").read_text() == "years of work"


def serve(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a driver that is expected to end at once."""
    command = [sys.executable, "-P", "-m", "nnfmq", "serve", *options]
    variables = os.environ | {"XDG_RUNTIME_DIR": str(folder)} | environment
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False)
