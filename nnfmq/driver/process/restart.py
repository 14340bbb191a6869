"""A driver starts its own command again, in a process that replaces it: on SIGUSR2, or for `nnfmq serve --restart`.

    command -> driver    REQUEST        instead of a Hello, on a connection to the driver's socket
    driver -> command    RESTARTED pid  that process has the driver's sockets; or Refused, with the reason

Only the driver's user and root get this far, as with `hand_over`, by which the successor gets the sockets.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

from nnfmq.base.accounts import pass_capabilities
from nnfmq.base.channel import NO_WAIT, Channel
from nnfmq.base.ownership import Closable
from nnfmq.base.paths import accounts_of, check_socket_directory
from nnfmq.base.processes import child_environment, environment
from nnfmq.driver.process.children import fork_orphan
from nnfmq.driver.process.event_loop import EventLoop
from nnfmq.hal.errors import DeadObject, DeviceUnavailable, MissedDeadlineTransient, ProtocolError
from nnfmq.serialize import control_protocol, messages
from nnfmq.serialize.control_protocol import PeerRole

__all__ = ["REQUEST", "SuccessorCommand", "SuccessorProcess", "request_restart", "tell_restarted"]

REQUEST, RESTARTED = b"nnfmq: restart", b"nnfmq: restarted "
_OF_THE_ACCOUNT = ("HOME", "USER", "LOGNAME")  # which a driver of root's has changed to another one
_OF_ONE_PROCESS = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_PID")  # it hands its sockets over itself


# ----------------------------------------------------------------------------------------------------------------------
# The driver.


class SuccessorCommand(NamedTuple):
    """How this driver was started: the arguments of `nnfmq`, and the environment before anything has changed it."""

    arguments: Sequence[str]
    environment: Mapping[str, str]

    def execute(self, path: Path) -> NoReturn:
        """Become an interpreter that runs this command, to replace the driver at `path`. Raises OSError."""
        base = {name: value for name, value in self.environment.items() if name not in _OF_ONE_PROCESS}
        now = environment()
        base |= {name: now[name] for name in _OF_THE_ACCOUNT if name in now}
        words = [*self.arguments, "--replace", "--socket", str(path)]
        pass_capabilities()
        os.execve(sys.executable, [sys.executable, "-P", "-m", "nnfmq", *words], child_environment(base=base))


class SuccessorProcess(Closable):
    """The process of the successor that this driver has started. Used by one thread. Close it.

    Its parent is the service manager, or whoever gets orphans, which learns of its exit also after this driver's.
    `on_exit` is called once if it exits before `close`.
    """

    def __init__(self, loop: EventLoop, command: SuccessorCommand, path: Path, on_exit: Callable[[], None]) -> None:
        """Start the process; blocks for some milliseconds. Main thread only.

        Raises:
            OSError: If the system lacks processes, memory or fds. Then there is no process.
        """
        self._loop, self._on_exit = loop, on_exit
        self.pid, self._pidfd = fork_orphan(partial(command.execute, path), "nnfmq-driver")
        loop.add_reader(self._pidfd, self._exited)

    def _exited(self) -> None:
        self.close()
        self._on_exit()

    def end(self) -> None:
        """End the process, unless it has replaced this driver, or has exited."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)

    def close(self) -> None:
        """Watch the process no more; it goes on. Idempotent."""
        fd, self._pidfd = self._pidfd, -1
        if fd >= 0:
            self._loop.remove_reader(fd)
            os.close(fd)


def tell_restarted(channel: Channel, pid: int) -> None:
    """Tell who has asked that process `pid` has replaced this driver, and close the connection. Does not block."""
    with channel, suppress(DeadObject, MissedDeadlineTransient, OSError):
        channel.send(RESTARTED + str(pid).encode(), (), NO_WAIT)


# ----------------------------------------------------------------------------------------------------------------------
# Who asks.


def request_restart(path: Path) -> int:
    """Let the driver at `path` start its successor, and return the pid of that when it has the driver's sockets.

    Blocks until then. The driver goes on with it if this process ends before.

    Raises:
        DeviceUnavailable: If no driver listens at `path`, it may not be asked, or its successor does not start.
        OSError: If the socket's directory cannot be examined.
    """
    trusted = accounts_of(path)
    with suppress(FileNotFoundError):  # then nobody listens there
        check_socket_directory(path, trusted)
    with Channel.connect(path) as channel:
        uid = channel.peer().uid
        if uid not in {os.getuid(), 0, *trusted}:
            raise DeviceUnavailable(f"the driver at {path} runs as uid {uid}, not as {os.getuid()} or root")
        try:
            channel.send(REQUEST)
            with channel.receive(body_bytes_max=0, takes_fds=False) as frame:
                return _pid_of(bytes(frame.data))
        except DeadObject:
            raise DeviceUnavailable(
                f"the driver at {path} does not answer: it has just ended, or is of a release without this request, or "
                "runs under another user: only that and root restart it"
            ) from None


def _pid_of(data: bytes) -> int:
    """Return the pid in a driver's reply. Raises DeviceUnavailable if it refuses, ProtocolError if it is no reply."""
    pid = data.removeprefix(RESTARTED)
    if data.startswith(RESTARTED) and pid.isdigit():
        return int(pid)
    reply = control_protocol.decode(data, sender=PeerRole.DRIVER)
    if isinstance(reply, messages.Refused):
        raise DeviceUnavailable(reply.message)
    raise ProtocolError(f"the driver has replied with {type(reply).__name__}")
