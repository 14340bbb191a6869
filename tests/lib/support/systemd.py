"""A systemd of a user, in a view of the file system of its own, as the machine's process 1 may be another program."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from support.drivers import LIMIT_S, until

__all__ = ["UserManager", "needs_systemd", "running_manager"]

_PROGRAM = "/lib/systemd/systemd"
_CGROUPS = [Path("/sys/fs/cgroup", name) for name in ("unified", "systemd", "")]  # of which each machine has some
_START = f"""
for cgroup in $CGROUPS; do echo $$ > $cgroup/cgroup.procs; done
mount -t tmpfs none /run/systemd
mkdir /run/systemd/system
exec {_PROGRAM} --user
"""


class UserManager:
    """A running manager. `folder` is the home directory of its services and of the commands."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.runtime_directory = Path(environment["XDG_RUNTIME_DIR"])
        self._process = process
        self._environment = environment

    def run(self, commands: str) -> subprocess.CompletedProcess[str]:
        """Run commands of a shell; the first that fails ends them."""
        words = ["nsenter", "--mount", f"--target={self._process.pid}", "bash", "-euo", "pipefail", "-c", commands]
        return subprocess.run(
            words, env=self._environment, capture_output=True, text=True, timeout=2 * LIMIT_S, check=False
        )

    def property(self, name: str) -> str:
        """Return a property of the service `nnfmq`."""
        return self.run(f"systemctl --user show --value --property {name} nnfmq").stdout.strip()


@contextmanager
def running_manager(folder: Path) -> Iterator[UserManager]:
    """Run a manager in the block; its services end with it."""
    environment = _environment(folder)
    Path(environment["XDG_RUNTIME_DIR"]).mkdir(mode=0o700)
    with (folder / "systemd.txt").open("wb") as log, _own_cgroups(folder.name) as cgroups:
        process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-euc", _START],
            env={**environment, "CGROUPS": " ".join(map(str, cgroups))},
            stdout=log,
            stderr=log,
        )
        manager = UserManager(process, folder, environment)
        try:
            private = manager.runtime_directory / "systemd" / "private"
            until(lambda: private.is_socket() or process.poll() is not None, "systemd listens")
            assert process.poll() is None, (folder / "systemd.txt").read_text()
            yield manager
        finally:
            if process.poll() is None:
                process.terminate()  # it ends its services
            with suppress(subprocess.TimeoutExpired):
                process.wait(LIMIT_S)
            process.kill()
            process.wait()


@contextmanager
def _own_cgroups(name: str) -> Iterator[list[Path]]:
    """Make cgroups for the manager and its services, whose names another manager may use, too."""
    made = [hierarchy / name for hierarchy in _hierarchies()]
    for cgroup in made:
        cgroup.mkdir()
    try:
        yield made
    finally:
        for cgroup in made:
            for folder, _, _ in os.walk(cgroup, topdown=False):
                os.rmdir(folder)


def _hierarchies() -> list[Path]:
    return [each for each in _CGROUPS if (each / "cgroup.procs").exists() and os.access(each, os.W_OK)]


def _environment(folder: Path) -> dict[str, str]:
    left = ("XDG_", "DBUS_", "NNFMQ_CONFIG", "NNFMQ_SOCKET")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left)}
    return {
        **kept,
        "HOME": str(folder),
        "XDG_RUNTIME_DIR": str(folder / "run"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }


@functools.cache
def _problem() -> str:
    missing = [name for name in (_PROGRAM, "systemctl", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"there is no {missing[0]}"
    if not _hierarchies():
        return "this user may make no cgroup"
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False)
    return done.stderr.strip()


def needs_systemd() -> None:
    """Skip the test if this process cannot run a manager."""
    if _problem():
        pytest.skip(f"no systemd: {_problem()}")
