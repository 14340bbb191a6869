"""The supervisor: accepts connections, checks the peer's uid and its Hello, and starts a worker for each client.

It has one thread, which never blocks on a peer: connections wait for their Hello in `pending_clients`, workers are
forked and watched by `workers`. It imports everything that a worker needs, but no code of plug-ins. So whoever imports
this module calls `processes.use_one_blas_thread` before: a process with threads does not fork. Its memory is frozen
before the first fork, so that workers share it.

A worker depends on its client alone: workers outlive a supervisor that is killed, and a new supervisor can start beside
them. On SIGTERM or SIGINT the supervisor closes its socket, so that another driver may start, lets its workers drain,
and returns; a second signal ends them at once. A successor can also get the socket (`hand_over`), for instance one that
the supervisor starts itself (`restart`): then it serves the clients that it has until they leave.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import platform
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from nnfmq.base import settings
from nnfmq.base.accounts import ServedUsers, UidPool, take_account
from nnfmq.base.channel import Channel, Credentials, Listener
from nnfmq.base.logs import apply_levels, rate_limited
from nnfmq.base.memory import Memory
from nnfmq.base.ownership import Closable
from nnfmq.base.packages import installed_version
from nnfmq.base.paths import is_socket_named
from nnfmq.base.processes import container_ends_with_this
from nnfmq.base.sandbox.sandbox import require_parts
from nnfmq.base.service_manager import ServiceManager
from nnfmq.base.upgrades import upgrade_text, was_upgraded
from nnfmq.driver.devices.configuration import STATUS_PAGE_BYTES, DeviceEntry, read_configuration
from nnfmq.driver.devices.installation import DriverOptions, installed_plugins
from nnfmq.driver.execution.turns import CoreShares
from nnfmq.driver.memory.quota import MemoryShares, SharedCount, total_limit_bytes, user_limit_bytes
from nnfmq.driver.process import executed_worker
from nnfmq.driver.process.admission import CLIENTS_MAX, PLACES, AdmittedClient, user_clients, why_full
from nnfmq.driver.process.children import reap_orphans
from nnfmq.driver.process.event_loop import EventLoop
from nnfmq.driver.process.hand_over import Predecessor, Successor
from nnfmq.driver.process.limits import few_descriptors, worker_start
from nnfmq.driver.process.listening import checked_path, open_listeners, take_passed_sockets
from nnfmq.driver.process.pending_clients import PendingClients, decode_greeting, refuse, reject
from nnfmq.driver.process.restart import SuccessorCommand, SuccessorProcess, tell_restarted
from nnfmq.driver.process.service_status import ServiceStatus
from nnfmq.driver.process.statistics_area import SharedStatistics, UserLimits
from nnfmq.driver.process.trace import TraceArea
from nnfmq.driver.process.worker import WorkerSetup, preload
from nnfmq.driver.process.workers import RepositoryProcess, WorkerProcesses
from nnfmq.engines.compiled.perf_map import remove_left_perf_maps
from nnfmq.engines.memory import trim_memory
from nnfmq.hal.errors import DeviceUnavailable, ErrorStatus, InvalidArgument
from nnfmq.hal.summaries import counted
from nnfmq.observe import statistics_layout as layout
from nnfmq.queue import core

_ACCEPTED_AT_ONCE = 64  # before other events are handled
# Shortages of this process or the system: the listening socket is intact, so accepting is tried again after a pause.
_ACCEPT_SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_ACCEPT_PAUSE_S = 0.1
_log = rate_limited("nnfmq.supervisor")


class SignalFds(NamedTuple):
    """Eventfds that become readable when signals arrive.

    Attributes:
        stop: SIGTERM or SIGINT: the driver drains, and ends at once when it becomes readable again.
        reload: SIGHUP: it reads its configuration again.
        succeed: SIGUSR2: it starts its successor.
    """

    stop: int
    reload: int
    succeed: int


class Supervisor(Closable):
    """A listening driver. Close it.

    Borrows its arguments. `signals` tell it what to do. `repository` is None if no models are served by name. `served`
    are the users whose clients it serves. `status` tells the service manager. `command` starts its successor; None: it
    starts none.
    """

    def __init__(
        self,
        loop: EventLoop,
        listener: Listener,
        workers: WorkerProcesses,
        signals: SignalFds,
        status: ServiceStatus,
        repository: RepositoryProcess | None,
        served: ServedUsers,
        command: SuccessorCommand | None,
    ) -> None:
        self._status = status
        self._listener = listener
        self._signals = signals
        self._command = command
        self._is_listening = True  # False: it has no socket any more
        self._is_draining = self._ends_now = self._was_upgraded = False
        self._successor: Successor | None = None
        self._next: SuccessorProcess | None = None
        self._asker: Channel | None = None  # who has asked for it, and waits
        self._loop = loop
        self._workers = workers
        self._repository = repository
        self._pending = PendingClients(self._loop, self._on_hello, self._on_successor, self._on_restart, served)
        # Closed to accept clients that are rejected because no fd is left; -1: none.
        self._spare_fd = os.dup(signals.stop)
        self._loop.add_reader(signals.stop, self._on_stop)
        self._loop.add_reader(signals.reload, self._reload)
        self._loop.add_reader(signals.succeed, self._on_succeed)
        self._loop.add_reader(listener.fileno(), self._accept)
        self._is_accepting = True
        if os.getpid() == 1:  # of a container: it gets the children of processes that exit before them
            loop.watch_children(reap_orphans)

    def run(self) -> None:
        """Accept clients until the driver ends: it was stopped, or replaced, and no client is left. Blocks."""
        if self._repository is not None:
            self._repository.start()
        while not self._is_done():
            self._status.update(f"{len(self._workers.client_pids)} of {self._clients_max()} clients")
            self._loop.run_once()
        self._pending.close()
        self._end_repository()
        self._workers.end_all()

    def _is_done(self) -> bool:
        return self._ends_now or not (self._is_listening or self._workers.client_pids or self._pending.count)

    # -- ending and being replaced ------------------------------------------------------------------------------------

    def _on_stop(self) -> None:
        """Let the workers drain, for $NNFMQ_DRAIN_S at most; the second time end them."""
        os.eventfd_read(self._signals.stop)
        if self._is_draining:
            self._end_now()
            return
        self._is_draining = True
        drain_s = settings.DRAIN_S.value()
        self._status.ends(drain_s)
        self._stop_accepting()
        if self._next is not None:
            self._next.end()
        self._refuse_asker("the driver ends")
        self._listener.close()  # another driver may start from now on
        self._end_repository()
        if self._repository is not None:
            self._repository.listener.close()
        self._pending.close()
        _log.info("the driver ends; it waits for the results of %s", counted(len(self._workers.client_pids), "client"))
        self._workers.drain_all()
        self._loop.call_at(time.monotonic() + drain_s, self._end_now)

    def _end_now(self) -> None:
        self._ends_now = True

    def _end_repository(self) -> None:
        if self._repository is not None:
            self._repository.end()  # before its worker

    def _on_succeed(self) -> None:
        os.eventfd_read(self._signals.succeed)
        reason = self._why_no_successor()
        if reason:
            _log.warning("no successor is started: %s", reason)
        else:
            self._start_successor()

    def _on_restart(self, channel: Channel) -> None:
        """Start the successor for who asks, and tell what has become of it. Takes ownership of `channel`."""
        reason = self._why_no_successor()
        if reason:
            reject(channel, ErrorStatus.DEVICE_UNAVAILABLE, f"no successor is started: {reason}")
        else:
            self._asker = channel
            self._start_successor()

    def _why_no_successor(self) -> str:
        if self._command is None:
            return "this driver ends with its parent, or its container would end with it"
        if self._next is not None:
            return "this driver has one already"
        return "" if self._is_listening and self._listener.path() else "this driver ends, or was replaced"

    def _start_successor(self) -> None:
        """Start the command of this driver again, in a process that replaces it; if that fails, this one goes on."""
        path = self._listener.path()
        assert self._command is not None and path is not None
        self._status.reloads()
        try:
            self._next = SuccessorProcess(self._loop, self._command, path, self._on_successor_exit)
            _log.info("process %d is started to replace this driver", self._next.pid)
        except OSError as error:
            self._on_successor_exit(f": {error}")

    def _on_successor_exit(self, reason: str = "; the log has its reason") -> None:
        """Go on without the successor that this driver has started, and that has not taken the sockets."""
        text = f"the successor did not start, and this driver goes on{reason}"
        _log.error("%s", text)
        self._next = None
        self._status.reloaded()
        self._refuse_asker(text)

    def _refuse_asker(self, text: str) -> None:
        asker, self._asker = self._asker, None
        if asker is not None:
            refuse(asker, ErrorStatus.DEVICE_UNAVAILABLE, text)

    def _on_successor(self, channel: Channel) -> None:
        """Send the sockets to another driver that asks for them. Takes ownership of `channel`."""
        is_own = self._next is not None and self._next.pid == channel.peer().pid
        if (self._status.is_managed or not self._listener.is_owner) and not is_own:
            # The manager has the socket, or would take the end of this process for that of the service.
            text = "its service manager restarts it, for instance by `systemctl reload`, and no request is lost"
            reject(channel, ErrorStatus.DEVICE_UNAVAILABLE, text)
            return
        if not self._is_listening or (self._successor is not None and self._successor.is_open):
            reject(channel, ErrorStatus.DEVICE_UNAVAILABLE, "another driver replaces this one already, or it ends")
            return
        self._successor = Successor(self._loop, channel, self._hand_over)
        models = () if self._repository is None else (self._repository.listener,)
        self._successor.send(self._listener, *models)

    def _hand_over(self) -> None:
        """Accept no more clients, because the successor does; serve those that are here until they leave."""
        if not self._is_listening:  # it has been stopped meanwhile
            return
        if self._next is not None:
            self._status.moves_to(self._next.pid)
            self._next.close()
            self._tell_asker(self._next.pid)
        self._stop_accepting()
        self._listener.give_up()
        self._end_repository()
        if self._repository is not None:
            self._repository.listener.give_up()
        left = counted(len(self._workers.client_pids), "client")
        _log.info("another driver has replaced this one, which ends when it has no clients; it has %s", left)
        self._workers.make_all_leave()

    def _tell_asker(self, pid: int) -> None:
        asker, self._asker = self._asker, None
        if asker is not None:
            tell_restarted(asker, pid)

    def _stop_accepting(self) -> None:
        self._is_listening = False
        if self._is_accepting:
            self._loop.remove_reader(self._listener.fileno())
            self._is_accepting = False

    # -- accepting ----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                channel = self._listener.accept()
            except OSError as shortage:
                if shortage.errno not in _ACCEPT_SHORTAGES:
                    raise
                if not self._reject_next(shortage):
                    self._pause_accepting()
                    return
                continue  # the shortage may be over: the next client is rejected only if accepting it fails, too
            if channel is None:
                return
            self._pending.add(channel)

    def _reject_next(self, shortage: OSError) -> bool:
        """Reject the client that waits longest, accepted with the spare fd. Return whether that was possible."""
        _log.error("cannot accept a client now: %s", shortage.strerror)
        self._close_spare_fd()
        try:
            channel = self._listener.accept()
            if channel is None:
                return False
            text = f"the driver cannot accept a client now: {shortage.strerror}"
            reject(channel, ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, text)
            return True
        except OSError as error:
            if error.errno not in _ACCEPT_SHORTAGES:
                raise
            return False
        finally:
            with contextlib.suppress(OSError):
                self._spare_fd = os.dup(self._signals.stop)

    def _pause_accepting(self) -> None:
        """Do not poll the listening socket for a while: the waiting client would end every poll immediately."""
        self._loop.remove_reader(self._listener.fileno())
        self._is_accepting = False
        self._loop.call_at(time.monotonic() + _ACCEPT_PAUSE_S, self._resume_accepting)

    def _resume_accepting(self) -> None:
        if self._is_listening:
            self._loop.add_reader(self._listener.fileno(), self._accept)
            self._is_accepting = True

    def _close_spare_fd(self) -> None:
        fd, self._spare_fd = self._spare_fd, -1
        if fd >= 0:
            os.close(fd)

    def _reload(self) -> None:
        os.eventfd_read(self._signals.reload)
        self._status.reloads()
        _reload()
        self._workers.publish_limits()
        self._status.reloaded()

    def _on_hello(self, channel: Channel, hello: bytes) -> None:
        self._note_upgrade()
        client = channel.peer()
        is_monitor = decode_greeting(hello).is_monitor and client.uid in (os.getuid(), 0)
        place = self._place(client, is_monitor)
        taken = [self._place(*served) for served in self._workers.clients]
        clients_max = self._clients_max()
        user_limit = user_clients(clients_max) if self._workers.uids else None
        reason = why_full(place, taken, self._repository is not None, clients_max, user_limit)
        if reason:
            self._workers.reject_surplus(channel, reason)
        else:
            self._workers.start(channel, hello, ends_if_stopped=place.is_repository)

    def _note_upgrade(self) -> None:
        """Tell in the log, once, and in the statistics, if nnfmq was upgraded under this driver."""
        if not self._was_upgraded and was_upgraded():
            self._was_upgraded = True
            self._workers.publish_upgrade()
            _log.warning("%s", upgrade_text())

    def _clients_max(self) -> int:
        return min(CLIENTS_MAX, self._workers.uids or CLIENTS_MAX)

    def _place(self, client: Credentials, is_monitor: bool) -> AdmittedClient:
        is_repository = self._repository is not None and self._repository.includes(client.pid)
        return AdmittedClient(client.pid, client.uid, is_monitor, is_repository)

    def close(self) -> None:
        """Close the supervisor's own fds. Idempotent."""
        for part in (self._successor, self._next, self._asker):
            if part is not None:
                part.close()
        self._close_spare_fd()


class UserOptions(NamedTuple):
    """Options of a driver that concern users; None: as the settings say.

    Attributes:
        account: The account to which it changes.
        worker_uids: The uids of workers, as FIRST-LAST.
        allowed: The users that are served.
        allowed_groups: The groups whose members are.
    """

    account: str | None = None
    worker_uids: str | None = None
    allowed: Sequence[str] | None = None
    allowed_groups: Sequence[str] | None = None


def serve(
    path: Path | None = None,
    *,
    extensions: Sequence[str] | None = None,
    runtimes: Sequence[str] | None = None,
    devices: Path | None = None,
    allow_device_status: bool = False,
    memory_mib: int | None = None,
    models: Path | None = None,
    sandbox: str | None = None,
    worker_start: str | None = None,
    replace: bool = False,
    users: UserOptions = UserOptions(),  # noqa: B008  it is immutable
    parent: int | None = None,
    command: SuccessorCommand | None = None,
    ready: Callable[[Path], None] = lambda _path: None,
) -> int:
    """Run a driver that listens at `path` until it is stopped or replaced. Return 0, the exit status. Blocks.

    Main thread only. SIGTERM and SIGINT let it drain, and end it at once the second time; SIGHUP lets it read its
    configuration again, and SIGUSR2 start its successor.

    Args:
        path: The socket; by default in the user's runtime directory.
        extensions: Names of the extensions that workers may load; by default those of $NNFMQ_EXTENSIONS.
        runtimes: Names of the runtimes that workers host; by default those of $NNFMQ_RUNTIMES.
        devices: The configuration file; by default $NNFMQ_DEVICES, or the package's own.
        allow_device_status: Whether clients may set the status of devices.
        memory_mib: What all clients together may take in the driver; by default $NNFMQ_MEMORY_MIB, or a quarter of
            the machine's memory.
        models: The directory of the models that are served by name; by default that of $NNFMQ_MODELS, or none.
        sandbox: `on`, `required` or `off`; by default $NNFMQ_SANDBOX, or `on`.
        worker_start: `fork` or `exec`; by default $NNFMQ_WORKER_START, or `exec` if the driver serves several users.
        replace: Whether to replace a driver that listens at `path`; without one this one starts all the same.
        users: The options that concern users.
        parent: The parent process, with which the driver exits; None = it does not.
        command: Starts the driver's successor, on SIGUSR2 or if asked; None, or with `parent`, or if a container would
            end with this process: it has none.
        ready: Called with the path as soon as clients can connect.

    Raises:
        DeviceUnavailable: If another driver listens at `path`, or does not hand it over, or other users could replace
            it, or `parent` is not the parent of this process, or has exited, or the kernel lacks a part of the sandbox
            that is required.
        InvalidArgument: If a setting or the devices' configuration is not valid.
        OSError: If the devices' configuration, or the directory of models, cannot be read.
    """
    _export_options(
        {
            settings.SANDBOX: sandbox,
            settings.WORKER_START: worker_start,
            settings.RUNTIMES: runtimes,
            settings.EXTENSIONS: extensions,
            settings.MEMORY_MIB: memory_mib,
            settings.USER: users.account,
            settings.WORKER_UIDS: users.worker_uids,
            settings.ALLOW_USERS: users.allowed,
            settings.ALLOW_GROUPS: users.allowed_groups,
        }
    )
    settings.check_all()
    with ExitStack() as stack:
        manager = ServiceManager.take()
        passed = take_passed_sockets(stack, path)
        if replace and passed is not None:
            raise InvalidArgument("a driver that a service manager starts with its socket replaces no other: --replace")
        path = path if passed is None else passed.path
        uids = take_account(makes_directory=path is None and not is_socket_named())
        require_parts()
        models = _models_directory(models)
        entries = read_configuration(devices)  # once for all workers, and while errors can still be reported
        path = checked_path(path, models is not None, is_system=uids is not None)
        options = DriverOptions(os.getpid(), allow_device_status)
        # A signal during the rest of the setup must not leave files behind.
        signals = stack.enter_context(_signals())
        status = stack.enter_context(
            Memory.create(STATUS_PAGE_BYTES, "nnfmq-status", one_writer=not allow_device_status)
        )
        predecessor = Predecessor.request(path) if replace else None
        served = ServedUsers.of_settings()
        listener, named = open_listeners(stack, path, models is not None, predecessor, passed, served.socket_mode)
        loop = stack.enter_context(EventLoop())
        loop.limit_closes()
        repository = None if named is None or models is None else RepositoryProcess(loop, named, path, models)
        pool = None if uids is None else UidPool(uids, Path(f"{path}.uids"))
        workers = _prepare_workers(stack, loop, status, entries, options, pool)
        told = ServiceStatus(loop, manager)
        if parent is not None or (container_ends_with_this() and not manager.address):
            command = None
        supervisor = stack.enter_context(
            Supervisor(loop, listener, workers, signals, told, repository, served, command)
        )
        if parent is not None:
            _stop_with_parent(stack, loop, parent, signals.stop)
        if predecessor is not None:
            _take_over(predecessor, models)
        _log.info("nnfmq %s listens on %s", installed_version("nnfmq") or "without a version", path)
        ready(path)
        told.ready()
        supervisor.run()
        _log.info("the driver has ended")
    return 0


def _models_directory(path: Path | None) -> Path | None:
    """Return the absolute path of the directory of models; None if no models are served by name.

    Raises:
        OSError: If it is no directory, or cannot be read.
    """
    named = settings.MODELS.value()
    if path is None and named is None:
        return None
    directory = Path(named or "" if path is None else path).absolute()
    os.scandir(directory).close()
    return directory


def _stop_with_parent(stack: ExitStack, loop: EventLoop, parent: int, stop_fd: int) -> None:
    """Make `stop_fd` readable when `parent` exits.

    PR_SET_PDEATHSIG is not used: it fires when the parent's thread exits that made this process. The parent is compared
    after its pidfd is opened, so the pidfd cannot be that of another process with the same pid.

    Raises:
        DeviceUnavailable: If `parent` is not this process's parent.
    """
    try:
        pidfd = os.pidfd_open(parent)
        stack.callback(os.close, pidfd)
    except OSError as error:
        raise DeviceUnavailable(f"the driver cannot exit with process {parent}: {error.strerror}") from error
    if os.getppid() != parent:
        raise DeviceUnavailable(f"the driver exits with its parent, process {os.getppid()}, not with {parent}")

    def stop() -> None:
        loop.remove_reader(pidfd)
        _log.info("process %d has exited, and so does its driver", parent)
        os.eventfd_write(stop_fd, 1)

    loop.add_reader(pidfd, stop)


def _take_over(predecessor: Predecessor, models: Path | None) -> None:
    """Let the driver that is replaced end, as soon as its clients have left; all that this one needs is open."""
    predecessor.confirm()
    if models is None and predecessor.models is not None:
        predecessor.models.close()  # nobody serves models by name any more


def _export_options(values: Mapping[settings.Setting[Any], object]) -> None:
    """Set the variables of the settings that options replace; workers read them, too."""
    for setting, value in values.items():
        if value is not None:
            setting.export(",".join(value) if isinstance(value, (list, tuple)) else str(value))


def _prepare_workers(
    stack: ExitStack,
    loop: EventLoop,
    status: Memory,
    entries: Sequence[DeviceEntry],
    options: DriverOptions,
    uids: UidPool | None,
) -> WorkerProcesses:
    """Load what workers need, without threads, and prepare to share it with them. `stack` releases the rest."""
    preload(has_cache=uids is None)
    if settings.PERF_MAP.value():
        remove_left_perf_maps()
    is_executed = worker_start(serves_several=uids is not None) == "exec"
    if uids is not None:
        _check_uid(uids.first, is_executed)
    setup = WorkerSetup(entries, installed_plugins(), options, is_executed)
    clients_max = CLIENTS_MAX if uids is None else min(CLIENTS_MAX, uids.size)
    limits = None if uids is None else UserLimits(user_limit_bytes(), user_clients(clients_max))
    of_user = () if limits is None else (limits.memory_bytes, _user_counts())
    shares = stack.enter_context(MemoryShares(total_limit_bytes(), PLACES, *of_user, one_writer=not is_executed))
    cores = stack.enter_context(CoreShares(PLACES))
    statistics = stack.enter_context(
        SharedStatistics(
            PLACES, installed_version("nnfmq") or "", total_limit_bytes(), _build(), limits, workers_map=is_executed
        )
    )
    statistics.set(layout.CLIENTS_LIMIT, clients_max)
    if limits is not None:
        statistics.set(layout.SERVED_USERS, layout.SEVERAL_USERS)
    elif settings.WORKER_UIDS.value() is not None:
        statistics.set(layout.SERVED_USERS, layout.LACKS_CAPABILITIES)
    traces = stack.enter_context(TraceArea(PLACES, one_writer=not is_executed))
    workers = WorkerProcesses(loop, status, shares, cores, traces, statistics, setup, uids)
    with contextlib.suppress(OSError, ValueError):  # each client takes several fds
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    few = few_descriptors(serves_several=uids is not None, clients_max=clients_max)
    if few:
        _log.warning("%s", few)
    trim_memory()
    gc.freeze()  # the collector would write to pages that workers share; a hundredth of it all is garbage, some KiB
    gc.enable()  # the command has disabled it for the time of the imports
    return workers


def _check_uid(uid: int, is_executed: bool) -> None:
    """Check that a worker with this uid can execute Python and read what it imports.

    Raises:
        InvalidArgument: If it cannot, and workers execute Python again; others are forked, and miss what they import.
    """
    closed = executed_worker.why_not_executable(uid)
    if not closed:
        return
    origin = settings.WORKER_UIDS.effective().origin
    text = f"uid {uid} of {origin} cannot read {closed}: let everybody read Python, nnfmq and its libraries"
    if is_executed:
        raise InvalidArgument(f"{text}, for instance in /opt; or start workers with --worker-start fork")
    _log.warning("%s; workers lack what they have to import", text)


def _user_counts() -> dict[SharedCount, int]:
    """Return how many objects the clients of one user may have."""
    return {SharedCount.MODELS: settings.USER_MODELS.value(), SharedCount.THREADS: settings.USER_THREADS.value()}


def _build() -> str:
    """Return the queue core, the Python and the machine of this driver, for its statistics."""
    return f"{core.core_name} {platform.python_version()} {platform.machine()}"


@contextlib.contextmanager
def _signals() -> Iterator[SignalFds]:
    """Yield the eventfds of signals that are handled in the block. Restores the previous handlers.

    SIGCHLD gets its default: if a parent had it ignored, the exit statuses of workers would be lost.
    """
    fds = SignalFds(*(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in SignalFds._fields))
    by_signal = {
        signal.SIGTERM: fds.stop, signal.SIGINT: fds.stop, signal.SIGHUP: fds.reload, signal.SIGUSR2: fds.succeed,
    }  # fmt: skip

    def notify(number: int, _frame: FrameType | None) -> None:
        os.eventfd_write(by_signal[signal.Signals(number)], 1)

    previous = {number: signal.signal(number, notify) for number in by_signal}
    previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield fds
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for fd in fds:
            os.close(fd)


def _reload() -> None:
    """Read the configuration again after SIGHUP; an invalid one changes nothing. Logs what has become of it."""
    try:
        changes = settings.reload()
    except InvalidArgument as error:
        _log.error("the configuration is not reloaded: %s", error)
        return
    apply_levels()
    _log.info("the configuration is reloaded; settings that have changed: %d", len(changes))
    for setting, before, now in changes:
        if setting.reloads:
            _log.warning("%s is %s instead of %s, %s", setting.name, now, before, setting.reloads)
        else:
            _log.warning(
                "%s stays %s until the driver is restarted; the configuration says %s", setting.name, before, now
            )
