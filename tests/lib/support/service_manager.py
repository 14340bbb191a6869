"""A service manager for tests: it listens, starts drivers with its sockets, and receives what they tell, as systemd."""

from __future__ import annotations

import select
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from nnfmq.base.paths import models_socket
from support.drivers import LIMIT_S, Daemon, Program

__all__ = ["Manager", "seqpacket_listener"]

_START = """
import fcntl, os, sys
fds = [fcntl.fcntl(int(word), fcntl.F_DUPFD_CLOEXEC, 100) for word in sys.argv[1].split()]
for number, fd in enumerate(fds, 3):
    os.dup2(fd, number)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(fds)), LISTEN_FDNAMES="nnfmq.socket")
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def seqpacket_listener(path: Path) -> socket.socket:
    """Return a socket that listens at `path`; the caller closes it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(64)
    return listener


class Manager:
    """Keeps the sockets of a driver at `path`, with `has_models` also that of its models by name. Close it."""

    def __init__(self, path: Path, *, has_models: bool = False) -> None:
        self.path = path
        paths = [path, models_socket(path)] if has_models else [path]
        self._stack = ExitStack()
        self.listeners = [self._stack.enter_context(seqpacket_listener(each)) for each in paths]
        self._told = self._stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        address = f"{path}.notify"
        self._told.bind(address)
        self.environment = {"NOTIFY_SOCKET": address}

    def start(
        self, *options: str | Path, environment: Mapping[str, str] | None = None, words: Sequence[str | Path] = ()
    ) -> Program:
        """Start `nnfmq serve` with `options`; with `words` another program of Python."""
        fds = [listener.fileno() for listener in self.listeners]
        command = words or ["-P", "-m", "nnfmq", "serve", *options]
        arguments = ["-P", "-c", _START, " ".join(map(str, fds)), *command]
        return Program.start(arguments, {**self.environment, **(environment or {})}, pass_fds=fds)

    def started(self, *options: str | Path, environment: Mapping[str, str] | None = None) -> Daemon:
        """Return a driver that has told that it is ready."""
        with ExitStack() as if_it_fails:
            program = if_it_fails.enter_context(self.start(*options, environment=environment))
            self.wait_for(READY="1")
            if_it_fails.pop_all()
            return Daemon(program, self.path)

    def message(self, limit_s: float = LIMIT_S) -> dict[str, str]:
        """Return the next message's variables; empty if none comes within the limit."""
        poll = select.poll()
        poll.register(self._told, select.POLLIN)
        if not poll.poll(limit_s * 1000):
            return {}
        lines = self._told.recv(65536).decode().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def wait_for(self, **expected: str) -> dict[str, str]:
        """Return the first message with these variables; fail if it does not come."""
        while message := self.message():
            if expected.items() <= message.items():
                return message
        pytest.fail(f"the driver has not told {expected}")

    def close(self) -> None:
        """Close the sockets, and remove them."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
