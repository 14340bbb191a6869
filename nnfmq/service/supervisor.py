"""The supervisor: accepts connections, checks the peer's uid, and starts a worker for each client.

Workers are forked by the forkserver of `multiprocess`, in which everything that they need is imported already. The
supervisor passes an accepted socket on unread and closes its own copy immediately, because a hang-up is seen only when
no other process has the connection open. A worker depends on its client alone: workers outlive a supervisor that is
killed, and a new supervisor can start beside them. On SIGTERM or SIGINT the supervisor closes its socket, ends its
workers, and returns.

The supervisor watches each worker through a pidfd. (`multiprocess` offers a pipe instead, whose other end the
forkserver holds: it reports that a worker has exited when the forkserver has.) When a worker exits, the supervisor
closes the worker's link to the shared program cache (`shared_cache_server`), even if another process still has a copy
of the link's other end.

The forkserver's listener file is in a directory of mode 0700 beside the socket. If a supervisor is killed, the next one
removes that directory, under the lock of its socket.
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
from nnfmq.paths import check_socket_directory, default_socket, make_runtime_directory, runtime_directory
from nnfmq.serialize import control_protocol, messages
from nnfmq.service import worker
from nnfmq.service.caching import program_cache
from nnfmq.service.caching.shared_cache_server import SharedCacheServer, WorkerLink
from nnfmq.service.device_configuration import STATUS_PAGE_BYTES, DeviceEntry, read_configuration
from nnfmq.service.device_status import end_changes
from nnfmq.service.driver_options import DriverOptions
from nnfmq.service.extension_plugins import ALLOWED_VARIABLE

CLIENTS_MAX = 64
STOP_TIMEOUT_S = 2.0  # after SIGTERM, and again after SIGKILL
_STATUS_TIMEOUT_S = 1.0  # between a worker's exit and its exit status, which the forkserver reports
_UNKNOWN_STATUS = 255  # what `multiprocess` reports if the forkserver has died or was restarted
_PATH_BYTES_MAX = 86  # sun_path has 107 bytes; the forkserver's listener, in a directory beside it, needs 20 more
_SPAWN_ERRORS = (OSError, EOFError)
# Shortages of this process or the system: the listening socket is intact, so accepting is tried again after a pause.
_ACCEPT_SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_ACCEPT_PAUSE_S = 0.1
_log = logging.getLogger("nnfmq.supervisor")


class _PassedFd:
    """An fd among a new worker's arguments. `multiprocess` duplicates it when it pickles them."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        from multiprocess.reduction import DupFd

        return worker.detach_fd, (DupFd(self._fd),)


@dataclass(frozen=True, slots=True)
class _Worker:
    process: Any  # multiprocess.Process
    link: WorkerLink


class Supervisor:
    """A listening driver.

    Borrows `listener`, `stop_fd`, an eventfd that ends `run` when it becomes readable, and `status`, the memory of the
    devices' status, which all workers map. `context` is the forkserver context of `multiprocess`. Workers get
    `entries` and `options`.
    """

    def __init__(
        self,
        listener: Listener,
        context: Any,
        stop_fd: int,
        entries: Sequence[DeviceEntry],
        status: Memory,
        options: DriverOptions,
    ) -> None:
        self._listener = listener
        self._context = context
        self._stop_fd = stop_fd
        self._entries = entries
        self._options = options
        self._status = status
        self._workers: dict[int, _Worker] = {}  # by pidfd, which the supervisor owns
        self._shared_cache = SharedCacheServer(program_cache.cache_limit_bytes())
        self._links: dict[int, WorkerLink] = {}  # open links, by fd
        self._accept_resume_time: float | None = None  # monotonic; None: not paused
        self._poll = select.poll()
        self._poll.register(stop_fd, select.POLLIN)
        self._poll.register(listener.fileno(), select.POLLIN)

    def run(self) -> None:
        """Accept clients until the stop fd is readable; then end all workers. Blocks."""
        while True:
            resume_time, timeout_ms = self._accept_resume_time, None
            if resume_time is not None:
                timeout_ms = max(0.0, (resume_time - time.monotonic()) * 1000)
            ready = [fd for fd, _ in self._poll.poll(timeout_ms)]
            if resume_time is not None and time.monotonic() >= resume_time:
                self._poll.modify(self._listener.fileno(), select.POLLIN)
                self._accept_resume_time = None
            if self._stop_fd in ready:
                self._end_workers()
                return
            for fd in ready:
                self._dispatch(fd)
            # Last: an fd that accepting opens may have the number of one that was closed in this round.
            if self._listener.fileno() in ready:
                self._accept()

    def _dispatch(self, fd: int) -> None:
        """Handle a readable fd: the pidfd of a worker that has exited, or a worker's link to the shared cache."""
        if fd in self._workers:
            worker_that_exited = self._workers.pop(fd)
            self._poll.unregister(fd)
            os.close(fd)
            self._close_link(worker_that_exited.link)
            end_changes(self._status.view, worker_that_exited.process.pid)
            _log_exit(worker_that_exited.process)
        elif fd in self._links and not self._shared_cache.serve(self._links[fd]):
            self._close_link(self._links[fd])

    def _close_link(self, link: WorkerLink) -> None:
        """Close a worker's link to the shared program cache. Idempotent. The worker goes on without it."""
        fd = link.channel.fileno()
        if self._links.pop(fd, None) is not None:
            self._poll.unregister(fd)
            self._shared_cache.close(link)

    # -- accepting ----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            channel = self._listener.accept()
        except OSError as error:
            if error.errno not in _ACCEPT_SHORTAGES:
                raise
            _log.error("cannot accept a client now: %s", error.strerror)
            # Stop polling the listener for a while: a waiting client would end every poll immediately.
            self._poll.modify(self._listener.fileno(), 0)
            self._accept_resume_time = time.monotonic() + _ACCEPT_PAUSE_S
            return
        if channel is None:
            return
        with channel:  # closes the supervisor's copy in any case
            peer = channel.peer()
            if peer.uid not in (os.getuid(), 0):
                text = f"this driver serves uid {os.getuid()}, not {peer.uid}"
                self._reject(channel, ErrorStatus.DEVICE_UNAVAILABLE, text)
            elif len(self._workers) >= CLIENTS_MAX:
                text = f"this driver serves {CLIENTS_MAX} clients already"
                self._reject(channel, ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, text)
            else:
                self._start_worker(channel)

    @staticmethod
    def _reject(channel: Channel, status: ErrorStatus, text: str) -> None:
        _log.warning("client rejected: %s", text)
        with contextlib.suppress(DeadObject, MissedDeadlineTransient):
            channel.send(control_protocol.encode(messages.Refused(status, text)), (), NO_WAIT)

    def _start_worker(self, channel: Channel) -> None:
        """Start a worker for a client, or reject the client if that fails."""
        try:
            link, worker_end = self._shared_cache.connect()
        except OSError as error:
            self._reject(channel, ErrorStatus.GENERAL_FAILURE, f"no worker could be started: {error!r}")
            return
        with worker_end, ExitStack() as undo:
            undo.callback(self._shared_cache.close, link)
            fds = (_PassedFd(fd) for fd in (channel.fileno(), self._status.fileno(), worker_end.fileno()))
            process = self._context.Process(
                target=worker.main, args=(*fds, self._entries, self._options), name="nnfmq-worker"
            )
            try:
                process.start()
            except _SPAWN_ERRORS as error:
                self._reject(channel, ErrorStatus.GENERAL_FAILURE, f"no worker could be started: {error!r}")
                return
            try:
                pidfd = os.pidfd_open(process.pid)
            except ProcessLookupError:  # it has exited already
                _log_exit(process)
                return
            undo.pop_all()
        link.worker_pid = process.pid
        self._workers[pidfd], self._links[link.channel.fileno()] = _Worker(process, link), link
        for fd in (pidfd, link.channel.fileno()):
            self._poll.register(fd, select.POLLIN)

    # -- ending -------------------------------------------------------------------------------------------------------

    def _end_workers(self) -> None:
        """Send SIGTERM to all workers, and SIGKILL to those that have not exited after STOP_TIMEOUT_S."""
        self._poll.unregister(self._stop_fd)
        self._poll.unregister(self._listener.fileno())
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            for pidfd in self._workers:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal_number)
            deadline = time.monotonic() + STOP_TIMEOUT_S
            while self._workers and (left := deadline - time.monotonic()) > 0:
                for fd, _ in self._poll.poll(left * 1000):
                    self._dispatch(fd)


def _log_exit(process: Any) -> None:
    """Log a worker's exit status, if it is known and not 0, and release the process object."""
    process.join(_STATUS_TIMEOUT_S)
    status = process.exitcode
    if status in (None, _UNKNOWN_STATUS):
        _log.info("worker %d exited; its status is unknown", process.pid)
    elif status:
        _log.error("worker %d ended with status %d", process.pid, status)
    if status is not None:
        process.close()


def serve(
    path: Path | None = None,
    *,
    extensions: Sequence[str] | None = None,
    devices: Path | None = None,
    allow_device_status: bool = False,
    ready: Callable[[Path], None] = lambda _path: None,
) -> int:
    """Run a driver that listens at `path` until SIGTERM or SIGINT. Return 0, the exit status. Main thread only. Blocks.

    Args:
        path: The socket; by default in the user's runtime directory.
        extensions: Names of the extensions that workers may load; by default those of $NNFMQ_EXTENSIONS.
        devices: The configuration file; by default $NNFMQ_DEVICES, or the package's own.
        allow_device_status: Whether clients may set the status of devices.
        ready: Called with the path as soon as clients can connect.

    Raises:
        DeviceUnavailable: If another driver listens at `path`, or other users could replace it.
        InvalidArgument: If the configuration is not valid.
        OSError: If the configuration cannot be read.
    """
    if extensions is not None:
        os.environ[ALLOWED_VARIABLE] = ",".join(extensions)  # inherited by the forkserver, which loads them
    entries = read_configuration(devices)  # once for all workers, and while errors can still be reported
    if path is None:
        path = default_socket()
        if path.parent == runtime_directory():
            make_runtime_directory()
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        raise DeviceUnavailable(f"the path of a driver's socket has at most {_PATH_BYTES_MAX} bytes; {path} is longer")
    check_socket_directory(path)
    with ExitStack() as stack:
        # First: a signal during the rest of the setup must not leave files behind.
        stop_fd = stack.enter_context(_stop_signals())
        status = stack.enter_context(Memory.create(STATUS_PAGE_BYTES, "nnfmq-status"))
        listener = stack.enter_context(Listener.create(path))
        context = stack.enter_context(_forkserver(Path(f"{path}.d")))
        ready(path)
        options = DriverOptions(os.getpid(), allow_device_status)
        Supervisor(listener, context, stop_fd, entries, status, options).run()
    return 0


@contextlib.contextmanager
def _forkserver(directory: Path) -> Iterator[Any]:
    """Run the forkserver with its files in `directory`. The caller holds the lock of the socket beside it."""
    import multiprocess
    from multiprocess import forkserver, process, resource_tracker

    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)
    process.current_process()._config["tempdir"] = str(directory)  # where `multiprocess` creates its listener
    os.environ.update(dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    context = multiprocess.get_context("forkserver")
    # The command line too: `multiprocess` imports the main module, which is the `nnfmq` script, in every worker.
    context.set_forkserver_preload(["nnfmq.service.forkserver_preload", "nnfmq.cli"])
    forkserver.ensure_running()  # now, so that the first client does not wait for the imports
    try:
        yield context
    finally:
        # `multiprocess` has no public way to end its helper processes; without this they end a little later.
        forkserver._forkserver._stop()
        tracker = resource_tracker._resource_tracker
        if tracker._fd is not None:  # not its `_stop`, which waits for all processes that have the pipe open
            os.close(tracker._fd)
            tracker._fd = None
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _stop_signals() -> Iterator[int]:
    """Yield an eventfd that becomes readable on SIGTERM or SIGINT. Restores the previous handlers afterwards."""
    stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def stop(_number: int, _frame: FrameType | None) -> None:
        os.eventfd_write(stop_fd, 1)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop_fd
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.close(stop_fd)
