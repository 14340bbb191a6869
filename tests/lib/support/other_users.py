"""Drivers and clients under other uids than the tests'. Only root can start them.

The folders that Python and nnfmq are installed in may be below one that only root can enter. So each process gets a
view of the file system (a mount namespace) in which everybody can enter the folders above; nothing else changes, and
other processes do not see it. /run is empty there but for `run`, which is /run/nnfmq.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import stat
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from nnfmq.base.sandbox import kernel
from support.drivers import Daemon, Program
from support.places import ROOT

__all__ = ["REASON", "UserProcess", "as_system_driver", "needs_root", "open_the_way"]

_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 4096, 1 << 14, 1 << 18
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 47, 2
_AMBIENT = "ambient:"
_HERE = Path(__file__)
REASON = "only root starts processes under other uids, and needs CAP_SYS_ADMIN, CAP_SETUID and CAP_SETGID for that"
_NEEDED = 1 << 21 | 1 << 7 | 1 << 6


def needs_root() -> pytest.MarkDecorator:
    """Return the mark of tests with several uids."""
    has_all = kernel.held_capabilities() & _NEEDED == _NEEDED
    return pytest.mark.skipif(os.getuid() != 0 or not has_all, reason=REASON)


# ----------------------------------------------------------------------------------------------------------------------
# In the child process:  python other_users.py RUN_FOLDER UID,GID... ARGUMENTS...


_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    _call(
        "mount",
        source.encode(),
        target.encode(),
        None if kind is None else kind.encode(),
        flags,
        None if data is None else data.encode(),
    )


def open_the_way(*others: Path) -> None:
    """Let everybody enter the folders above those of Python, nnfmq and `others`, as this process sees them from now on.

    Each closed one is replaced by one with what is needed.
    """
    _call("unshare", _CLONE_NEWNS)
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    needed = [ROOT, *(Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)), *others]
    kept = [(path, os.open(path, os.O_PATH)) for path in dict.fromkeys(needed)]
    closed = {_first_closed(path) for path, _ in kept} - {None}
    for folder in closed:
        assert folder is not None
        _mount("tmpfs", str(folder), "tmpfs", 0, "mode=755")
    for path, fd in kept:
        if any(folder in path.parents for folder in closed if folder is not None):
            path.mkdir(parents=True, exist_ok=True)
            _mount(f"/proc/self/fd/{fd}", str(path), None, _MS_BIND | _MS_REC)
        os.close(fd)


def _first_closed(path: Path) -> Path | None:
    for folder in reversed(path.parents):
        if not folder.stat().st_mode & stat.S_IXOTH:
            return folder
    return None


def _run_folder(run: str) -> None:
    fd = os.open(run, os.O_PATH)
    _mount("tmpfs", "/run", "tmpfs", 0, "mode=755")
    os.mkdir("/run/nnfmq")
    _mount(f"/proc/self/fd/{fd}", "/run/nnfmq", None, _MS_BIND)
    os.close(fd)


def _raise_ambient() -> None:
    """Let the program that is executed next have all capabilities that this process may have."""
    held = kernel.held_capabilities()
    low, high = held & 0xFFFFFFFF, held >> 32
    number = {"x86_64": 126, "aarch64": 91}[platform.machine()]
    _call("syscall", number, struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", low, low, low, high, high, high))
    for bit in range(held.bit_length()):
        if held >> bit & 1:
            _call("prctl", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, bit, 0, 0)


def _main(run: str, who: str, arguments: Sequence[str]) -> None:
    uid, *groups = map(int, who.removeprefix(_AMBIENT).split(","))
    if who.startswith(_AMBIENT):
        kernel.keep_capabilities_of_root()
    open_the_way(Path(run).parent)
    _run_folder(run)
    os.environ["HOME"] = f"/nonexistent/{uid}"
    if uid:
        os.setgroups(groups)
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    if who.startswith(_AMBIENT):
        _raise_ambient()
    os.execv(sys.executable, [sys.executable, *arguments])


# ----------------------------------------------------------------------------------------------------------------------
# In the tests.


@contextmanager
def as_system_driver(
    run: Path,
    *,
    options: Sequence[str | Path] = (),
    environment: Mapping[str, str] | None = None,
    ambient: int | None = None,
) -> Iterator[Daemon]:
    """Run a daemon that root has started with `options`, at /run/nnfmq/nnfmq.sock, which is in `run`.

    With `ambient` it starts under that uid, with all capabilities of root, as AmbientCapabilities of systemd would.
    """
    who = "0" if ambient is None else f"{_AMBIENT}{ambient}"
    serve = ["-P", "-m", "nnfmq", "serve", "--socket", "/run/nnfmq/nnfmq.sock", *options]
    program = Program.start(["-P", _HERE, run, who, *serve], environment)
    daemon = None
    try:
        line = program.line()
        assert line == "nnfmq: listening on /run/nnfmq/nnfmq.sock", line
        daemon = Daemon(program, run / "nnfmq.sock")
        yield daemon
        daemon.end()
    finally:
        if daemon is None:
            program.__exit__(None, None, None)
        else:
            daemon.close()


class UserProcess:
    """A process under a uid, in which tests let Python evaluate expressions. Close it, or use `with`."""

    def __init__(
        self, run: Path, uid: int, groups: Sequence[int] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        who = ",".join(map(str, (uid, *groups)))
        self.uid = uid
        self.program = Program.start(["-P", _HERE, run, who, "-P", _HERE, "--evaluate"], environment)

    def send(self, text: str) -> None:
        """Let it evaluate an expression, or execute statements. `receive` returns the result."""
        self.program.tell(json.dumps(text))

    def receive(self) -> Any:
        """Return the result of what was sent; what `repr` says of an exception. Blocks."""
        return json.loads(self.program.line())

    def run(self, text: str) -> Any:
        """Evaluate an expression, or execute statements, and return the result. Blocks."""
        self.send(text)
        return self.receive()

    def __enter__(self) -> Self:
        self.program.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.program.__exit__(*error)


def _evaluate_lines() -> None:
    names: dict[str, Any] = {}
    for line in sys.stdin:
        text = json.loads(line)
        try:
            try:
                result = eval(compile(text, "<test>", "eval"), names)
            except SyntaxError:
                exec(compile(text, "<test>", "exec"), names)
                result = None
        except Exception as error:  # noqa: BLE001  the test looks at it
            result = repr(error)
        print(json.dumps(result, default=repr), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--evaluate":
        _evaluate_lines()
    else:
        _main(sys.argv[1], sys.argv[2], sys.argv[3:])
