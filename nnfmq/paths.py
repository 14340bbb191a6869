"""Places in the file system: the runtime directory, with the socket, the state, and a cache. A leaf; no sockets here.

`$NNFMQ_SOCKET` names the socket outright. Else it is `nnfmq.sock` in `$XDG_RUNTIME_DIR/nnfmq`, in
`/run/user/UID/nnfmq`, or in a per-uid directory under the system's temporary one. A directory that is not ours, or
that others can enter, is refused: whoever can create files there could stand in for the driver. What a driver keeps
from one run to the next is in `$XDG_STATE_HOME/nnfmq`, or `~/.local/state/nnfmq`, by the same rule; what it could make
again is in `$XDG_CACHE_HOME/nnfmq`, or `~/.cache/nnfmq`.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from nnfmq.hal.errors import DeviceUnavailable

SOCKET_NAME = "nnfmq.sock"


def runtime_directory() -> Path:
    """Return the runtime directory of this user; it need not exist yet."""
    xdg = os.environ.get("XDG_RUNTIME_DIR")
    if xdg:
        return Path(xdg) / "nnfmq"
    run_user = Path(f"/run/user/{os.getuid()}")
    if run_user.is_dir():
        return run_user / "nnfmq"
    return Path(os.environ.get("TMPDIR") or "/tmp") / f"nnfmq-{os.getuid()}"  # `tempfile` costs 4 ms to import


def check_directory(directory: Path) -> None:
    """Raise DeviceUnavailable unless `directory` is a real directory of ours with mode 0700."""
    info = directory.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) != 0o700:
        raise DeviceUnavailable(
            f"{directory} must be a directory of uid {os.getuid()} with mode 0700; it has uid {info.st_uid}, "
            f"mode {stat.S_IMODE(info.st_mode):04o}. Remove it, or set XDG_RUNTIME_DIR, NNFMQ_SOCKET, "
            "XDG_STATE_HOME or XDG_CACHE_HOME"
        )


def make_runtime_directory() -> Path:
    """Create the runtime directory if need be, and check it. Raises DeviceUnavailable, OSError."""
    directory = runtime_directory()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_directory(directory)
    return directory


def state_directory() -> Path:
    """Return the directory of what drivers of this user keep; it need not exist yet.

    Raises RuntimeError for a user without a home.
    """
    return _home_of("XDG_STATE_HOME", ".local/state")


def make_state_directory() -> Path:
    """Create the state directory if need be, and check it. Raises DeviceUnavailable, OSError, RuntimeError."""
    return _make(state_directory())


def cache_directory() -> Path:
    """Return the directory of what drivers of this user could make again; it need not exist yet.

    Raises RuntimeError for a user without a home.
    """
    return _home_of("XDG_CACHE_HOME", ".cache")


def make_cache_directory() -> Path:
    """Create the cache directory if need be, and check it. Raises DeviceUnavailable, OSError, RuntimeError."""
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
    """Return the path at which the user's driver listens, whether or not one does."""
    named = os.environ.get("NNFMQ_SOCKET")
    return Path(named) if named else runtime_directory() / SOCKET_NAME
