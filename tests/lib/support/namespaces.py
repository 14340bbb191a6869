"""Processes that share only a folder with each other, as containers do: `python namespaces.py ARGUMENTS` in the child.

Each has namespaces of its own for mounts, pids, IPC and the network, its pid is 1, and its /dev/shm is empty and takes
nothing. Where the tests do not run as root it has a user namespace as well, in which its uid is 0.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.drivers import Program

__all__ = ["isolated", "needs_namespaces"]

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
_MS_RDONLY, _MS_REC, _MS_PRIVATE = 1, 1 << 14, 1 << 18
_PR_SET_PDEATHSIG = 1


# In the child process.

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _enter() -> None:
    uid, gid = os.getuid(), os.getgid()
    flags = _CLONE_NEWNS | _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET
    _call("unshare", flags | (_CLONE_NEWUSER if uid else 0))
    if uid:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def _become(arguments: Sequence[str]) -> None:
    """Become Python with these arguments, in a view of the file system for the new namespaces."""
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    _call("mount", b"proc", b"/proc", b"proc", 0, None)
    _call("mount", b"none", b"/dev/shm", b"tmpfs", _MS_RDONLY, None)
    os.execv(sys.executable, [sys.executable, *arguments])


def _main(arguments: Sequence[str]) -> None:
    _enter()
    pid = os.fork()
    if not pid:
        _become(arguments)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    _, status = os.waitpid(pid, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


# In the tests.


def isolated(arguments: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> Program:
    """Start Python with `arguments` in namespaces of its own. It gets SIGTERM that is sent to the program."""
    return Program.start(["-P", __file__, *arguments], environment)


@functools.cache
def _problem() -> str:
    done = subprocess.run(
        [sys.executable, "-P", __file__, "-c", ""], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    return "" if done.returncode == 0 else done.stderr.strip().rpartition("\n")[2]


def needs_namespaces() -> None:
    """Skip the test if this process cannot make namespaces."""
    if _problem():
        pytest.skip(f"no namespaces: {_problem()}")


if __name__ == "__main__":
    _main(sys.argv[1:])
