"""The supervisor: listens, checks who connects, gives each client a worker of its own. It never touches a tensor.

Workers come from `multiprocess`' forkserver, where everything they need is imported already. An accepted socket is
handed over unread and our copy is closed at once: a hang-up is seen only when no third process holds the connection.
Workers depend on their client alone, so they outlive a supervisor that is killed, and a new one can start beside them.
On SIGTERM or SIGINT it stops listening, ends its workers, and returns.

Each worker is watched, and ended, through a pidfd of our own: what `multiprocess` offers, a pipe that its forkserver
holds, says that a worker has ended when the forkserver has. With a worker its connection for shared programs is closed
(`shared_cache_server`), whoever else may have a copy of the other end.

The forkserver keeps a listener file; it lives in a 0700 directory beside the socket, which the next `serve` clears
under its lock when this one was killed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from nnfmq.channel import NO_WAIT, Channel, Listener
from nnfmq.hal.errors import DeadObject, DeviceUnavailable, ErrorStatus, MissedDeadlineTransient
from nnfmq.memory import Memory
from nnfmq.paths import default_socket, make_runtime_directory, runtime_directory
from nnfmq.serialize import control_protocol, messages
from nnfmq.service import worker
from nnfmq.service.caching import program_cache
from nnfmq.service.caching.shared_cache_server import SharedCacheServer, WorkerLink
from nnfmq.service.device_configuration import DEVICES_MAX, DeviceEntry, read_configuration
from nnfmq.service.extension_plugins import ALLOWED

CLIENTS_MAX = 64
END_SECONDS = 2.0
_STATUS_SECONDS = 1.0  # from a worker's end to its status, which the forkserver reports
_UNKNOWN_STATUS = 255  # what `multiprocess` says where the forkserver has died, or was started anew
_PATH_BYTES_MAX = 86  # sun_path holds 107; the forkserver's listener, in a directory beside it, takes 20 more
_SPAWN_ERRORS = (OSError, EOFError)
# Worth a log line and a next try, after a pause: this process is short of something, the socket is fine.
_ACCEPT_ERRORS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_ACCEPT_PAUSE_SECONDS = 0.1
_log = logging.getLogger("nnfmq.supervisor")


class _Passed:
    """An fd on its way into a new worker: `multiprocess` duplicates it when it pickles the worker's arguments."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        from multiprocess.reduction import DupFd

        return worker.take_fd, (DupFd(self._fd),)


@dataclass(frozen=True, slots=True)
class _Worker:
    process: Any  # multiprocess.Process
    connection: WorkerLink


class Supervisor:
    """A listening driver. `run` serves until the eventfd `bell` is rung; bell and listener stay their owners'."""

    def __init__(
        self, listener: Listener, context: Any, bell: int, configured: Sequence[DeviceEntry], status: Memory
    ) -> None:
        self._listener = listener
        self._configured = configured
        self._status = status  # of the devices, by their place; all workers map it
        self._context = context
        self._workers: dict[int, _Worker] = {}  # by its pidfd, which is ours
        self._programs = SharedCacheServer(program_cache.cache_limit_bytes())
        self._connections: dict[int, WorkerLink] = {}  # those that are open, by their descriptor
        self._bell = bell
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        self._poll.register(listener.fileno(), select.POLLIN)
        self._deaf_until = 0.0  # on the monotonic clock; 0: it listens

    def run(self) -> None:
        """Accept clients until the bell rings; then end every worker. Blocks."""
        while True:
            ready = [fd for fd, _ in self._poll.poll(self._pause_ms())]
            self._listen_again()
            if self._bell in ready:
                self._end_workers()
                return
            for fd in ready:
                self._attend_to(fd)
            if self._listener.fileno() in ready:
                self._accept()  # last: what it opens may have the number of what was closed in this round

    def _attend_to(self, fd: int) -> None:
        if fd in self._workers:
            self._reap(fd)
        elif fd in self._connections and not self._programs.serve(self._connections[fd]):
            self._hang_up(self._connections[fd])

    def _hang_up(self, connection: WorkerLink) -> None:
        """Close a worker's connection, unless that was done; the worker goes on alone."""
        fd = connection.channel.fileno()
        if self._connections.pop(fd, None) is not None:
            self._poll.unregister(fd)
            self._programs.close(connection)

    def _pause_ms(self) -> float | None:
        """Return how long it is until it listens again, None where it does."""
        return max(0.0, (self._deaf_until - time.monotonic()) * 1000) if self._deaf_until else None

    def _pause(self) -> None:
        """Accept nobody for a while: a client that waits would end every poll at once."""
        self._poll.modify(self._listener.fileno(), 0)
        self._deaf_until = time.monotonic() + _ACCEPT_PAUSE_SECONDS

    def _listen_again(self) -> None:
        if self._deaf_until and time.monotonic() >= self._deaf_until:
            self._poll.modify(self._listener.fileno(), select.POLLIN)
            self._deaf_until = 0.0

    def _accept(self) -> None:
        try:
            channel = self._listener.accept()
        except OSError as error:
            if error.errno not in _ACCEPT_ERRORS:
                raise
            _log.error("cannot accept a client now: %s", error.strerror)
            self._pause()
            return
        if channel is not None:
            with channel:  # our copy is closed here, whatever happened
                self._admit(channel)

    def _admit(self, channel: Channel) -> None:
        peer = channel.peer()
        if peer.uid not in (os.getuid(), 0):
            text = f"this driver serves uid {os.getuid()}, not {peer.uid}"
            self._refuse(channel, ErrorStatus.DEVICE_UNAVAILABLE, text)
        elif len(self._workers) >= CLIENTS_MAX:
            text = f"this driver serves {CLIENTS_MAX} clients already"
            self._refuse(channel, ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, text)
        else:
            self._start_worker(channel)

    @staticmethod
    def _refuse(channel: Channel, status: ErrorStatus, text: str) -> None:
        _log.warning("client refused: %s", text)
        with contextlib.suppress(DeadObject, MissedDeadlineTransient):
            channel.send(control_protocol.encode(messages.Refused(status, text)), (), NO_WAIT)

    def _start_worker(self, channel: Channel) -> None:
        try:
            connection, theirs = self._programs.connect()
        except OSError as error:
            self._refuse(channel, ErrorStatus.GENERAL_FAILURE, f"no worker could be started: {error!r}")
            return
        with theirs, ExitStack() as undo:
            undo.callback(self._programs.close, connection)
            descriptors = (_Passed(fd) for fd in (channel.fileno(), self._status.fileno(), theirs.fileno()))
            given = *descriptors, self._configured
            process = self._context.Process(target=worker.main, args=given, name="nnfmq-worker")
            try:
                process.start()
            except _SPAWN_ERRORS as error:
                self._refuse(channel, ErrorStatus.GENERAL_FAILURE, f"no worker could be started: {error!r}")
                return
            try:
                pidfd = os.pidfd_open(process.pid)
            except ProcessLookupError:
                _report(process)  # it has ended already
                return
            undo.pop_all()
        connection.worker_pid = process.pid
        self._watch(pidfd, _Worker(process, connection))

    def _watch(self, pidfd: int, started: _Worker) -> None:
        connection = started.connection
        self._workers[pidfd], self._connections[connection.channel.fileno()] = started, connection
        for fd in (pidfd, connection.channel.fileno()):
            self._poll.register(fd, select.POLLIN)

    def _reap(self, pidfd: int) -> None:
        ended = self._workers.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        self._hang_up(ended.connection)
        _report(ended.process)

    def _end_workers(self) -> None:
        """Ask every worker to end, then end those that did not."""
        self._poll.unregister(self._bell)
        self._poll.unregister(self._listener.fileno())
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pidfd in self._workers:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, number)
            self._reap_until(time.monotonic() + END_SECONDS)

    def _reap_until(self, deadline: float) -> None:
        while self._workers and (left := deadline - time.monotonic()) > 0:
            for fd, _ in self._poll.poll(left * 1000):
                self._attend_to(fd)


def _report(process: Any) -> None:
    """Log how a worker ended, where that is known and was not well; then forget it."""
    process.join(_STATUS_SECONDS)
    status = process.exitcode
    if status in (None, _UNKNOWN_STATUS):
        _log.info("worker %d ended; nobody knows with which status", process.pid)
    elif status:
        _log.error("worker %d ended with status %d", process.pid, status)
    if status is not None:
        process.close()


def serve(
    path: Path | None = None,
    *,
    extensions: Sequence[str] | None = None,
    devices: Path | None = None,
    ready: Callable[[Path], None] = lambda _path: None,
) -> int:
    """Listen at `path` (default: the user's runtime directory) until SIGTERM or SIGINT; return the exit status, 0.

    `extensions` are the names of those that workers may load (default: as $NNFMQ_EXTENSIONS says, see `extensions`).
    `devices` is the file that lists the devices (default: $NNFMQ_DEVICES, or the package's own, see `devices`).
    `ready` is called with the path once clients can connect. Blocks; call it from the main thread. Raises
    DeviceUnavailable where another driver listens there, or the directory is not safe, and InvalidArgument or OSError
    where the devices cannot be read.
    """
    if extensions is not None:
        os.environ[ALLOWED] = ",".join(extensions)  # for the forkserver, which loads them
    configured = read_configuration(
        devices
    )  # here, where somebody sees what is wrong with it, and once for all workers
    if path is None:
        path = default_socket()
        if path.parent == runtime_directory():
            make_runtime_directory()
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        raise DeviceUnavailable(f"a socket path has at most {_PATH_BYTES_MAX} bytes here; {path} is longer")
    # The bell first: a signal that comes while the rest is set up must not leave it behind.
    with ExitStack() as stack:
        bell = stack.enter_context(_bell())
        status = stack.enter_context(Memory.create(DEVICES_MAX, "nnfmq-status"))
        listener = stack.enter_context(Listener.create(path))
        context = stack.enter_context(_forkserver(Path(f"{path}.d")))
        ready(path)
        Supervisor(listener, context, bell, configured, status).run()
    return 0


@contextlib.contextmanager
def _forkserver(directory: Path) -> Iterator[Any]:
    """Run the forkserver with its files in `directory`, which is ours alone: its user holds the listener's lock."""
    import multiprocess
    from multiprocess import forkserver, process, resource_tracker

    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)
    process.current_process()._config["tempdir"] = str(directory)  # where `multiprocess` puts its listener
    os.environ.update(dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    context = multiprocess.get_context("forkserver")
    # The command line too: `multiprocess` imports the main module, that is the `nnfmq` script, in every worker.
    context.set_forkserver_preload(["nnfmq.service.forkserver_preload", "nnfmq.cli"])
    forkserver.ensure_running()  # now, so that the first client does not pay for the imports
    try:
        yield context
    finally:
        # `multiprocess` has no public way to end its helpers; at exit they would end by themselves, a little later.
        forkserver._forkserver._stop()
        tracker = resource_tracker._resource_tracker
        if tracker._fd is not None:  # not its `_stop`, which waits for all that hold the pipe
            os.close(tracker._fd)
            tracker._fd = None
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _bell() -> Iterator[int]:
    """Lend an eventfd that SIGTERM and SIGINT ring meanwhile."""
    bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def ring(_number: int, _frame: FrameType | None) -> None:
        os.eventfd_write(bell, 1)

    before = {number: signal.signal(number, ring) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield bell
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(bell)
