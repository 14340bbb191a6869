"""Files that drivers with sockets of their own names leave: removed by their owners, or by those that come after."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from support.drivers import Daemon, running_daemon

from nnfmq.base.paths import cache_directory
from nnfmq.serving.socket_files import remove_left_files, remove_socket_files, unique_socket


@pytest.fixture
def runtime(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the runtime directory, which is empty."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    (folder / "nnfmq").mkdir(mode=0o700)
    return folder / "nnfmq"


def killed_driver(path: Path, models: Path) -> None:
    """Run a driver at `path` that is killed, as all of a node's processes are."""
    daemon = Daemon.start(path, options=["--models", str(models)])
    daemon.process.send(signal.SIGKILL)
    daemon.program.wait()
    daemon.close()


def test_what_drivers_of_dead_owners_leave_is_removed_and_nothing_else(runtime: Path, tmp_path: Path) -> None:
    dead, alive, ended = (unique_socket("ray", key) for key in ("dead-1", "alive-1", "ended-1"))
    for path in (dead, alive):
        killed_driver(path, tmp_path)
    folders = [cache_directory() / name for name in ("ray-dead-1", "ray-dead-2", "ray-alive-1", "other")]
    for folder in folders:
        folder.mkdir(parents=True)
        os.utime(folder, (0, 0))
    young = cache_directory() / "ray-dead-3"
    young.mkdir()
    assert len(list(runtime.iterdir())) == 8
    with running_daemon(ended):  # of a key that is said to be dead
        remove_left_files("ray", lambda key: key.startswith("alive"))
        assert ended.exists() and not remove_socket_files(ended)
    left = {path.name for path in runtime.iterdir() if path.name.startswith(dead.name)}
    assert left == set()
    assert len([path for path in runtime.iterdir() if path.name.startswith(alive.name)]) == 4
    assert [folder.exists() for folder in (*folders, young)] == [False, False, True, True, True]
    assert remove_socket_files(ended) and remove_socket_files(alive)
    assert list(runtime.iterdir()) == []
