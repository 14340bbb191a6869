"""Paths of nnfmq's files: the runtime directory with the socket, the state directory, the cache directory.

* Socket: `$NNFMQ_SOCKET`, else `socket` of a configuration file, else `nnfmq.sock` in the runtime directory. A client
  that finds none there uses that of the system's driver, `/run/nnfmq/nnfmq.sock`, if there is one.
* Runtime directory: `$XDG_RUNTIME_DIR/nnfmq`, else `/run/user/UID/nnfmq`, else `nnfmq-UID` in `$TMPDIR` or /tmp.
* State, which a driver keeps between runs: `$XDG_STATE_HOME/nnfmq`, else `~/.local/state/nnfmq`.
* Cache, which a driver can recreate: `$XDG_CACHE_HOME/nnfmq`, else `~/.cache/nnfmq`.

A directory of nnfmq that belongs to another user, or that others may enter, is rejected: a process that can create
files there could pretend to be the driver. A socket elsewhere, as $NNFMQ_SOCKET names, must be in a directory in which
no other user can replace files (`check_socket_directory`). Members of a directory's group are trusted.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path

from nnfmq.base import settings
from nnfmq.hal.errors import DeviceUnavailable

SOCKET_NAME = "nnfmq.sock"
SYSTEM_DIRECTORY = Path("/run/nnfmq")
"""Where a driver listens that serves several users."""
_MODELS_SUFFIX = ".models"
_MOVE = (
    "Choose a directory of your own (`--socket`, `--connect` or $NNFMQ_SOCKET), or unset $NNFMQ_SOCKET; if only the "
    "containers of a pod share it, set NNFMQ_CHECK_DIRECTORY=0 in them"
)


def models_socket(path: Path) -> Path:
    """Return the socket of the model repository that belongs to the driver with the socket `path`."""
    return path.with_name(path.name + _MODELS_SUFFIX)


def runtime_directory() -> Path:
    """Return this user's runtime directory, which may not exist yet."""
    xdg = settings.XDG_RUNTIME_DIR.value()
    if xdg:
        return Path(xdg) / "nnfmq"
    run_user = Path(f"/run/user/{os.getuid()}")
    if run_user.is_dir():
        return run_user / "nnfmq"
    # Not tempfile.gettempdir, because the module takes 4 ms to import.
    return Path(settings.TMPDIR.value() or "/tmp") / f"nnfmq-{os.getuid()}"


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


def check_socket_directory(path: Path, owners: Collection[int] = ()) -> None:
    """Check that only this user, root and `owners` can replace the socket `path` or a directory above it.

    Its directory must belong to one of them. If everybody may write to it or to a directory above it, that must be
    sticky, as /tmp is. $NNFMQ_CHECK_DIRECTORY turns the check off.

    Raises:
        DeviceUnavailable: If that is not so.
        OSError: If the directory does not exist or cannot be examined.
    """
    directory = path.parent.resolve(strict=True)
    if not settings.CHECK_DIRECTORY.value():
        return
    owner = directory.stat().st_uid
    if owner not in {os.getuid(), 0, *owners}:
        raise DeviceUnavailable(
            f"the socket {path} is not used: its directory belongs to uid {owner}, not to {os.getuid()} or root. "
            f"{_MOVE}"
        )
    for folder in (directory, *directory.parents):
        mode = folder.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise DeviceUnavailable(
                f"the socket {path} is not used: every user can replace files in {folder} "
                f"(mode {stat.S_IMODE(mode):04o}). {_MOVE}"
            )


def creation_problem(directory: Path) -> str:
    """Return why this process cannot create a directory, or files in it if it exists; "" if it can. Creates nothing."""
    found = next(folder for folder in (directory, *directory.parents) if os.path.lexists(folder))
    if not found.is_dir():
        return f"{found} is not a directory"
    return "" if os.access(found, os.W_OK | os.X_OK) else f"uid {os.geteuid()} may not create files in {found}"


def accounts_of(path: Path) -> tuple[int, ...]:
    """Return the uids of other accounts of which a driver at a socket is trusted.

    That is the owner of /run/nnfmq for a socket in it: only root creates folders in /run, so root has chosen the owner.
    """
    try:
        above, found = SYSTEM_DIRECTORY.parent.lstat(), SYSTEM_DIRECTORY.lstat()
        is_there = path.parent.resolve() == SYSTEM_DIRECTORY.resolve()
    except OSError:
        return ()
    others_may_write = above.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    is_chosen_by_root = stat.S_ISDIR(found.st_mode) and above.st_uid == 0 and not others_may_write
    return (found.st_uid,) if is_there and is_chosen_by_root else ()


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
    return _home_of(settings.XDG_STATE_HOME.value(), ".local/state")


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
    return _home_of(settings.XDG_CACHE_HOME.value(), ".cache")


def make_cache_directory() -> Path:
    """Return the cache directory; create it if it does not exist.

    Raises:
        DeviceUnavailable: If `check_directory` rejects it.
        OSError: If it cannot be created.
        RuntimeError: If the user has no home directory.
    """
    return _make(cache_directory())


def work_directory(uid: int | None = None) -> Path:
    """Return the directory of private folders of workers with a uid, by default this process's; it may not exist."""
    owner = os.getuid() if uid is None else uid
    return Path(settings.TMPDIR.value() or "/tmp") / f"nnfmq-{owner}-work"


def make_work_directory() -> Path:
    """Return the directory of workers' private folders; create it if it does not exist.

    Raises:
        DeviceUnavailable: If `check_directory` rejects it.
        OSError: If it cannot be created.
    """
    return _make(work_directory())


def _home_of(xdg: str | None, default: str) -> Path:
    return (Path(xdg) if xdg and xdg.startswith("/") else Path.home() / default) / "nnfmq"


def _make(directory: Path) -> Path:
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    check_directory(directory)
    return directory


def perf_map_path(pid: int) -> str:
    """Return the path where perf(1) looks for the names of functions that a process generated, whatever $TMPDIR is."""
    return f"/tmp/perf-{pid}.map"


def default_socket() -> Path:
    """Return the path at which this user's driver listens. There may be no driver."""
    named = settings.SOCKET.value()
    return runtime_directory() / SOCKET_NAME if named is None else Path(named)


def system_socket() -> Path:
    """Return the path at which a driver listens that serves several users. There may be no driver."""
    return SYSTEM_DIRECTORY / SOCKET_NAME


def client_socket() -> Path:
    """Return the path at which a client of this user looks for a driver. There may be none."""
    own = default_socket()
    if is_socket_named() or own.exists() or not system_socket().is_socket():
        return own
    return system_socket()


def is_socket_named() -> bool:
    """Return whether $NNFMQ_SOCKET, or a configuration file, names the socket."""
    return settings.SOCKET.value() is not None
