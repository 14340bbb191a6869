"""Paths of nnfmq's files: the runtime directory with the socket, the state directory, the cache directory.

* Socket: `$NNFMQ_SOCKET`, else `nnfmq.sock` in the runtime directory.
* Runtime directory: `$XDG_RUNTIME_DIR/nnfmq`, else `/run/user/UID/nnfmq`, else `nnfmq-UID` in `$TMPDIR` or /tmp.
* State, which a driver keeps between runs: `$XDG_STATE_HOME/nnfmq`, else `~/.local/state/nnfmq`.
* Cache, which a driver can recreate: `$XDG_CACHE_HOME/nnfmq`, else `~/.cache/nnfmq`.

A directory that belongs to another user, or that others may enter, is rejected: a process that can create files there
could pretend to be the driver.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from nnfmq.hal.errors import DeviceUnavailable

SOCKET_NAME = "nnfmq.sock"


def runtime_directory() -> Path:
    """Return this user's runtime directory, which may not exist yet."""
    xdg = os.environ.get("XDG_RUNTIME_DIR")
    if xdg:
        return Path(xdg) / "nnfmq"
    run_user = Path(f"/run/user/{os.getuid()}")
    if run_user.is_dir():
        return run_user / "nnfmq"
    # Not tempfile.gettempdir, because the module takes 4 ms to import.
    return Path(os.environ.get("TMPDIR") or "/tmp") / f"nnfmq-{os.getuid()}"


def check_directory(directory: Path) -> None:
    """Check that `directory` is a directory of this user with mode 0700, not a symbolic link.

    Raises:
        DeviceUnavailable: If it is not.
        OSError: If it does not exist or cannot be examined.
    """
    info = directory.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) != 0o700:
        raise DeviceUnavailable(
            f"{directory} must be a directory of uid {os.getuid()} with mode 0700; it has uid {info.st_uid}, "
            f"mode {stat.S_IMODE(info.st_mode):04o}. Remove it, or set XDG_RUNTIME_DIR, NNFMQ_SOCKET, "
            "XDG_STATE_HOME or XDG_CACHE_HOME"
        )


def make_runtime_directory() -> Path:
    """Return the runtime directory; create it if it does not exist.

    Raises:
        DeviceUnavailable: If `check_directory` rejects it.
        OSError: If it cannot be created.
    """
    directory = runtime_directory()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_directory(directory)
    return directory


def state_directory() -> Path:
    """Return this user's state directory, which may not exist yet.

    Raises:
        RuntimeError: If the user has no home directory.
    """
    return _home_of("XDG_STATE_HOME", ".local/state")


def make_state_directory() -> Path:
    """Return the state directory; create it if it does not exist.

    Raises:
        DeviceUnavailable: If `check_directory` rejects it.
        OSError: If it cannot be created.
        RuntimeError: If the user has no home directory.
    """
    return _make(state_directory())


def cache_directory() -> Path:
    """Return this user's cache directory, which may not exist yet.

    Raises:
        RuntimeError: If the user has no home directory.
    """
    return _home_of("XDG_CACHE_HOME", ".cache")


def make_cache_directory() -> Path:
    """Return the cache directory; create it if it does not exist.

    Raises:
        DeviceUnavailable: If `check_directory` rejects it.
        OSError: If it cannot be created.
        RuntimeError: If the user has no home directory.
    """
    return _make(cache_directory())


def _home_of(variable: str, default: str) -> Path:
    xdg = os.environ.get(variable, "")
    return (Path(xdg) if xdg.startswith("/") else Path.home() / default) / "nnfmq"


def _make(directory: Path) -> Path:
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    check_directory(directory)
    return directory


def default_socket() -> Path:
    """Return the path at which this user's driver listens. There may be no driver."""
    named = os.environ.get("NNFMQ_SOCKET")
    return Path(named) if named else runtime_directory() / SOCKET_NAME
