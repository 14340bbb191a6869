"""Child processes of the driver: fork(2), what the child inherits, and its exit status. The only module that forks.

A forked child inherits locks that other threads hold, but not the threads that would release them. So only a process
with one thread forks, and `fork_child` checks that. The child keeps the fds that it is given, and closes all others: a
copy of a connection would hide its hang-up. Its stdin is empty: the driver's may be a terminal.

A child can ask the kernel for a signal at the parent's exit (`nnfmq.base.processes`). Callers fork on the main thread,
which lives as long as the process.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import NoReturn, Self

from nnfmq.base.accounts import as_owner, give_up_capabilities
from nnfmq.base.channel import Channel
from nnfmq.base.log_records import send_records
from nnfmq.base.ownership import Uncopyable
from nnfmq.base.processes import children, is_child_stopped, request_signal_at_parent_exit, set_name
from nnfmq.base.threads import Thread
from nnfmq.hal.errors import GeneralFailure

__all__ = [
    "CLIENT_EXIT_GRACE_S",
    "COMPILING_EXIT_GRACE_S",
    "ChildProcess",
    "ClientProcess",
    "fork_child",
    "fork_orphan",
    "read_from_child",
    "reap_later",
    "reap_orphans",
    "start_detached",
]

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2, signal.SIGCHLD)
_log = logging.getLogger("nnfmq.processes")
_own: set[int] = set()  # children of this process that somebody here reaps
_killed: list[int] = []  # children without a pidfd, which `fork_child` reaps when it is called again


class ChildProcess:
    """A process that this one has forked. Owns a pidfd until `reap`. `uid` is what it runs under; None: as this one."""

    def __init__(self, pid: int, pidfd: int, uid: int | None = None) -> None:
        self.pid = pid
        self.uid = uid
        self._pidfd = pidfd
        _own.add(pid)

    @classmethod
    def of(cls, pid: int, uid: int | None = None) -> Self:
        """Return a child that has just been started. If that fails, it is killed, and reaped by a later `fork_child`.

        Raises:
            OSError: If the system lacks memory or fds.
        """
        try:
            return cls(pid, os.pidfd_open(pid), uid)
        except OSError:
            as_owner(uid, partial(os.kill, pid, signal.SIGKILL))
            _killed.append(pid)
            raise

    def fileno(self) -> int:
        """Return the pidfd, which becomes readable when the process exits; it stays owned by this object."""
        return self._pidfd

    def send(self, number: signal.Signals) -> None:
        """Send a signal. Does nothing if the process has exited."""
        if self._pidfd < 0:
            return
        with suppress(ProcessLookupError):
            as_owner(self.uid, partial(signal.pidfd_send_signal, self._pidfd, number))

    def is_stopped(self) -> bool:
        """Return whether a signal has stopped the process, which nobody has continued. False once it has exited."""
        return self._pidfd >= 0 and is_child_stopped(os.P_PIDFD, self._pidfd)

    def has_exited(self, wait_s: float) -> bool:
        """Return whether the process has exited, or does within a time, in seconds. Blocks for that at most."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(wait_s * 1000))

    def reap(self) -> int:
        """Wait for the exit, close the pidfd, and return the exit status; the negative number of a fatal signal."""
        ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        fd, self._pidfd = self._pidfd, -1
        os.close(fd)
        _own.discard(self.pid)
        assert ended is not None  # only with WNOHANG
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def fork_child(
    run: Callable[[], None],
    keep_fds: Collection[int],
    name: str,
    *,
    at_parent_exit: signal.Signals | None = None,
    blocked: Collection[signal.Signals] = (),
    uid: int | None = None,
    enter: Callable[[], None] = give_up_capabilities,
    log_fd: int | None = None,
) -> ChildProcess:
    """Fork a process that calls `run` and exits with status 0, or EX_SOFTWARE if `run` raises. Main thread only.

    `name` tells its role in ps and top.

    The child ignores SIGINT and SIGHUP, which a terminal sends to its processes, and SIGTERM ends it. `keep_fds` are
    the fds that it keeps; sockets among them must be detached from their `Channel`, which a fork closes in the child.
    `at_parent_exit` is the signal that it gets when this process exits; `blocked` are those that wait until it has
    handlers for them, and unblocks them. `enter` is called first: it gives up what the child does not need of this
    process, and if `uid` is not None makes it run under that uid. `log_fd` becomes the child's stdout and stderr, where
    it logs records (`log_records`); with None it has the log and the streams of this process.

    Raises:
        GeneralFailure: If this process has several threads.
        OSError: If the system lacks processes, memory or fds.
    """
    _reap_killed()
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise GeneralFailure(f"a process with {threads} threads starts no child processes")
    parent = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)  # the child must never call the parent's handlers
    try:
        pid = os.fork()
        if pid == 0:
            set_name(name)
            _run_and_exit(run, keep_fds, mask | set(blocked), parent, at_parent_exit, enter, log_fd)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return ChildProcess.of(pid, uid)


def _reap_killed() -> None:
    for pid in list(_killed):
        with suppress(ChildProcessError):  # `reap_orphans` has reaped it
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                continue
        _killed.remove(pid)


def read_from_child(
    write: Callable[[int], None],
    name: str,
    *,
    uid: int | None = None,
    enter: Callable[[], None] = give_up_capabilities,
    keep_fds: Collection[int] = (),
) -> tuple[bytes, int]:
    """Return what a child process has written to a pipe, and its exit status. Blocks until it has exited.

    The child calls `write` with the pipe's fd. The rest, and the errors, are those of `fork_child`.
    """
    receiving, sending = os.pipe2(os.O_CLOEXEC)
    with open(receiving, "rb") as pipe:
        try:
            child = fork_child(partial(write, sending), (sending, *keep_fds), name, uid=uid, enter=enter)
        finally:
            os.close(sending)
        data = pipe.read()
    return data, child.reap()


def fork_orphan(run: Callable[[], None], name: str) -> tuple[int, int]:
    """Fork a process that calls `run`, as `fork_child`, and is no child of this one. Blocks for some milliseconds.

    Its parent is whoever gets orphans: a service manager, or process 1. It keeps no fds, and what a supervisor has.
    If anything fails, it exits without a call of `run`.

    Returns:
        Its pid, and a pidfd, which the caller closes.

    Raises:
        GeneralFailure: If this process has several threads.
        OSError: If the system lacks processes, memory or fds.
    """
    with ExitStack() as pipe:
        waiting, starting = os.pipe2(os.O_CLOEXEC)
        for fd in (waiting, starting):
            pipe.callback(os.close, fd)
        told, _ = read_from_child(partial(_fork_again, run, waiting), name, enter=lambda: None, keep_fds=(waiting,))
        if not told:
            raise OSError(errno.EAGAIN, "no process could be forked")
        pid = int(told)
        pidfd = os.pidfd_open(pid)
        with suppress(BrokenPipeError):  # it was killed: the pidfd says so
            os.write(starting, b"s")
        return pid, pidfd


def _fork_again(run: Callable[[], None], waiting: int, fd: int) -> None:
    """Write the pid of a child of this process to `fd`; the child calls `run` once a byte can be read from `waiting`.

    If its other end is closed before, the child exits.
    """
    pid = os.fork()
    if pid:
        os.write(fd, str(pid).encode())
        return
    os.close(fd)
    if os.read(waiting, 1):
        os.close(waiting)
        run()


def start_detached(arguments: Sequence[str], fds: Sequence[int], environment: Mapping[str, str]) -> int:
    """Start `python -m nnfmq` in a session of its own, with `fds` and without the standard streams; return the pid.

    It outlives this process. Any thread may call this, also in a process with several threads. Borrows `fds`, which
    this process's later children of this kind inherit as well, until they are closed.

    Raises:
        OSError: If the system lacks processes, memory or fds.
    """
    for fd in fds:
        os.set_inheritable(fd, True)
    null = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in range(3)]
    command = [sys.executable, "-P", "-m", "nnfmq", *arguments]
    return os.posix_spawn(sys.executable, command, environment, file_actions=null, setsid=True)


def reap_orphans() -> None:
    """Reap the children of this process that others have started and left: those of the first process of a container.

    Does not block. Main thread only, and not between the start of a child and its `ChildProcess`.
    """
    for pid in children(os.getpid()):
        if pid not in _own:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def reap_later(pid: int) -> None:
    """Let a thread wait for a child process, so that it leaves no zombie while this process lives."""
    Thread(target=os.waitpid, args=(pid, 0), name="nnfmq-reap", daemon=True).start()


def _run_and_exit(
    run: Callable[[], None],
    keep_fds: Collection[int],
    mask: set[signal.Signals | int],
    parent: int,
    at_parent_exit: signal.Signals | None,
    enter: Callable[[], None],
    log_fd: int | None,
) -> NoReturn:
    """Run in a forked child, then exit. Never returns, so no object of the parent's frames is finalized."""
    status = os.EX_SOFTWARE
    try:
        gc.freeze()  # the collector would write to pages that parent and children share
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        enter()  # before the request for a signal, which a change of the uid takes back
        if at_parent_exit is not None:
            _request_signal(at_parent_exit, parent)
        _close_other_fds(keep_fds if log_fd is None else {*keep_fds, log_fd})
        _replace_streams(keep_fds, log_fd)
        run()
        status = 0
    except BaseException:  # noqa: BLE001  the last frame of this process
        _log.critical("an internal error ends this process", exc_info=True)
    finally:
        os._exit(status)  # no exit handlers: they are the parent's


def _request_signal(at_parent_exit: signal.Signals, parent: int) -> None:
    request_signal_at_parent_exit(at_parent_exit)
    if os.getppid() != parent and at_parent_exit == signal.SIGKILL:  # it exited before the call
        os._exit(0)


def _replace_streams(keep_fds: Collection[int], log_fd: int | None) -> None:
    """Give this process an empty stdin, and `log_fd` as stdout and stderr. A stream may have been closed before."""
    if 0 not in keep_fds:
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(null, 0)
        if null:
            os.close(null)
    if log_fd is not None:
        for stream in (1, 2):
            if stream not in keep_fds:
                os.dup2(log_fd, stream)
        os.close(log_fd)
        send_records()


def _close_other_fds(keep_fds: Collection[int]) -> None:
    """Close all fds except `keep_fds` and the standard streams."""
    last = max(map(int, os.listdir("/proc/self/fd")))
    begin = 3
    for fd in sorted(keep_fds):
        os.closerange(begin, fd)
        begin = max(begin, fd + 1)
    os.closerange(begin, last + 1)


# ----------------------------------------------------------------------------------------------------------------------
# The process of a client: when it has exited, and whether it has been killed but has not exited yet.
#
# The kernel closes a process's files only after it has released the process's memory, page by page: a client that has 1
# GiB mapped hangs up 50 to 150 ms after its SIGKILL, and a worker that frees the client's memory with its own then
# needs 200 ms more. Long work in a worker therefore asks `was_killed` from time to time, and ends early.


CLIENT_EXIT_GRACE_S = 0.02
"""After a client's exit, its worker gets this time to exit by itself; an idle one needs 1 or 2 ms."""
COMPILING_EXIT_GRACE_S = 1.0
"""The same of a worker that has asked for compile processes: it may start the process that goes on compiling."""
_SIGKILL_BIT = 1 << (signal.SIGKILL - 1)
_PID = re.compile(rb"^Pid:\t(\d+)$", re.MULTILINE)
_PENDING = re.compile(rb"^ShdPnd:\t([0-9a-f]+)$", re.MULTILINE)
_STATUS_BYTES_MAX = 8192


class ClientProcess(Uncopyable):
    """A client's process. Owns a pidfd and a file of /proc; close it."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd
        self._status_fd = _open_status(pidfd)

    @classmethod
    def of(cls, channel: Channel) -> Self | None:
        """Return the process that connected to `channel`, or None if the kernel cannot identify it."""
        pidfd = channel.open_peer_pidfd()
        return None if pidfd is None else cls(pidfd)

    def fileno(self) -> int:
        """Return the pidfd, which becomes readable when the process has exited; it stays owned by this object."""
        return self._pidfd

    def was_killed(self) -> bool:
        """Return whether the process has received SIGKILL. Takes about 0.1 ms. False if /proc does not tell.

        The signal stays pending while the process exits, and no process survives it.
        """
        try:
            pending = _PENDING.search(os.pread(self._status_fd, _STATUS_BYTES_MAX, 0))
        except OSError:  # it has exited, which the pidfd reports; or there is no such file
            return False
        return pending is not None and bool(int(pending[1], 16) & _SIGKILL_BIT)

    def close(self) -> None:
        """Close the files. Idempotent."""
        for fd in (self._pidfd, self._status_fd):
            if fd >= 0:
                os.close(fd)
        self._pidfd = self._status_fd = -1


def _open_status(pidfd: int) -> int:
    """Return an fd of /proc/PID/status; -1 if /proc does not show the process."""
    with suppress(OSError), open(f"/proc/self/fdinfo/{pidfd}", "rb") as info:
        found = _PID.search(info.read())
        if found is None:  # -1: it has exited
            return -1
        fd = os.open(b"/proc/%b/status" % found[1], os.O_RDONLY | os.O_CLOEXEC)
        if not _has_exited(pidfd):
            return fd
        os.close(fd)  # the pid may have been reused before the file was opened
    return -1


def _has_exited(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
