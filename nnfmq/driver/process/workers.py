"""The supervisor's child processes: a worker for each client, and the model repository.

The supervisor has imported everything that a worker needs, so that a worker starts in milliseconds and shares those
pages. It closes its copy of the client's connection immediately, because a hang-up is seen only when no other process
has the connection open.

A worker exits by itself when its client does. But it may be stopped, or its threads may be busy in calls that do not
return soon. So the supervisor watches a pidfd of each client, and sends SIGKILL to a worker that has not exited
CLIENT_EXIT_GRACE_S after its client, or COMPILING_EXIT_GRACE_S if it has compiled. When a worker exits, the supervisor
closes the worker's link to the shared program cache (`cache.shared`), even if another process still has a copy
of the link's other end.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path

from nnfmq.base import settings
from nnfmq.base.accounts import UidPool, as_owner, give_up_capabilities
from nnfmq.base.channel import Channel, Credentials, Listener
from nnfmq.base.logs import LoggedClient, about, rate_limited
from nnfmq.base.memory import Memory
from nnfmq.base.paths import perf_map_path
from nnfmq.base.processes import child_environment, shown_name
from nnfmq.base.upgrades import loaded_stamp, require_unchanged
from nnfmq.base.verbose_log import vlog
from nnfmq.driver.cache import programs
from nnfmq.driver.cache.shared import ENTRIES_MAX, SharedCacheServer, WorkerLink
from nnfmq.driver.compilation.server import CompileLink, CompileRelay
from nnfmq.driver.devices.configuration import end_changes
from nnfmq.driver.execution.turns import CoreShares
from nnfmq.driver.memory.quota import MemoryShares
from nnfmq.driver.process import executed_worker, worker
from nnfmq.driver.process.admission import PLACES
from nnfmq.driver.process.children import CLIENT_EXIT_GRACE_S, COMPILING_EXIT_GRACE_S, ChildProcess, fork_child
from nnfmq.driver.process.client_classes import class_without_request, schedule_worker, why_not_changed, why_not_given
from nnfmq.driver.process.event_loop import EventLoop
from nnfmq.driver.process.heartbeats import HeartbeatWatch, worker_heartbeat
from nnfmq.driver.process.limits import USER_ENTRIES_MIN, publish_limits
from nnfmq.driver.process.log_pipe import LogPipe
from nnfmq.driver.process.pending_clients import decode_greeting, reject
from nnfmq.driver.process.private_folder import private_folder_of
from nnfmq.driver.process.statistics_area import SharedStatistics
from nnfmq.driver.process.trace import TraceArea
from nnfmq.driver.process.worker import WorkerFds, WorkerSetup
from nnfmq.driver.process.worker_requests import DriverRequests
from nnfmq.driver.session.session import END, LEAVE, SESSION_SIGNALS
from nnfmq.hal.client_class import ClientClass
from nnfmq.hal.errors import (
    DeviceUnavailable,
    ErrorStatus,
    GeneralFailure,
    NnfmqError,
    ResourceExhaustedTransient,
    status_for_error,
)
from nnfmq.observe import statistics_layout as layout

__all__ = ["PAUSE_MAX_S", "RepositoryProcess", "WorkerProcesses", "user_entries"]

_CAUSES: dict[int, str] = {
    signal.SIGSYS: ": its sandbox ended it, because of a system call that no worker makes",
    signal.SIGALRM: ": code of a plug-in kept Python's lock beyond its deadline, or beyond the limit of an execution",
}
STOP_TIMEOUT_S = 2.0  # after END, and again after SIGKILL
_log = rate_limited("nnfmq.supervisor")


class _Worker:
    def __init__(
        self,
        process: ChildProcess,
        cache_link: WorkerLink,
        compile_link: CompileLink,
        client: Credentials,
        client_pidfd: int | None,
        slot: int,
        client_class: ClientClass,
        cache: SharedCacheServer,
        logged: LoggedClient,
        log: LogPipe,
        heartbeat: HeartbeatWatch,
    ) -> None:
        self.log = log
        self.heartbeat = heartbeat
        self.cache = cache  # of its clients' user
        self.logged = logged
        self.started_s = time.monotonic()
        self.process = process
        self.cache_link = cache_link
        self.compile_link = compile_link
        self.client = client
        self.client_pidfd = client_pidfd  # None: unknown, or the client has exited
        self.slot = slot  # of MemoryShares
        self.client_class = client_class
        self.is_monitor = self.was_killed = self.client_has_exited = False
        self.was_silent = False
        self.has_compiled = False
        self.has_perf_map = settings.PERF_MAP.value()


class WorkerProcesses:
    """The workers of one supervisor. Used by one thread, which must be the only one of its process.

    Borrows `status`, the memory of the devices' status, `shares`, what each client has of the driver's memory, `cores`,
    what it has of the cores, `traces`, where workers record what they do, and `statistics`. All workers map all five.
    With `uids` each worker has one of its own, and each client's user a cache of its own.
    """

    def __init__(
        self,
        loop: EventLoop,
        status: Memory,
        shares: MemoryShares,
        cores: CoreShares,
        traces: TraceArea,
        statistics: SharedStatistics,
        setup: WorkerSetup,
        uids: UidPool | None = None,
    ) -> None:
        self._uids = uids
        self._loop = loop
        self._status = status
        self._shares = shares
        self._cores = cores
        self._traces = traces
        self._statistics = statistics
        self._setup = setup
        self._compile_relay = CompileRelay(loop, statistics)
        self._requests = DriverRequests(loop, statistics, self.set_class)
        self._caches: dict[int | None, SharedCacheServer] = {}  # by the clients' uid; None: of all
        statistics.set(layout.CACHE_LIMIT, programs.cache_limit_bytes())
        self.publish_limits()
        self._workers: dict[int, _Worker] = {}  # by pid
        self._is_replaced = False
        status.keep_from_children()  # compile processes map no shared memory; workers map it themselves

    def publish_limits(self) -> None:
        """Write the values of the driver's limits into its statistics."""
        publish_limits(self._statistics, self._uids is not None)

    def publish_upgrade(self) -> None:
        """Write into the statistics that nnfmq was upgraded under this driver."""
        self._statistics.set(layout.UPGRADED, 1)

    @property
    def clients(self) -> list[tuple[Credentials, bool]]:
        """The process of each client, and whether it is a monitor of the driver's user or of root."""
        return [
            (served.client, served.is_monitor and served.client.uid in (os.getuid(), 0))
            for served in self._workers.values()
        ]

    @property
    def client_pids(self) -> list[int]:
        """The process of each client; 0 for one in another PID namespace."""
        return [worker.client.pid for worker in self._workers.values()]

    @property
    def uids(self) -> int:
        """The number of uids for workers; 0 if they have none of their own."""
        return 0 if self._uids is None else self._uids.size

    def start(self, channel: Channel, hello: bytes, *, ends_if_stopped: bool = False) -> None:
        """Start a worker for a client, or reject the client if that fails. Takes ownership of `channel`.

        With `ends_if_stopped` the worker is ended when a signal stops it, because others wait for its client.
        """
        client = channel.peer()
        greeting = decode_greeting(hello)
        requested, program = greeting.client_class, shown_name(greeting.client_name)
        reason = "" if requested is None else why_not_given(client, program, requested)
        if reason:
            reject(channel, ErrorStatus.GENERAL_FAILURE, reason)
            return
        client_class = requested or class_without_request(client, program)
        try:
            client_pidfd = channel.open_peer_pidfd()
        except OSError as error:
            self._reject(channel, error)
            return
        control_fd = channel.detach()  # a fork closes channels in the child
        try:
            started = self._fork(control_fd, hello, client, program, client_pidfd, client_class)
        except (OSError, DeviceUnavailable, GeneralFailure, ResourceExhaustedTransient) as error:
            if client_pidfd is not None:
                os.close(client_pidfd)
            self._reject(Channel.adopt(control_fd), error)
        else:
            os.close(control_fd)
            started.is_monitor = greeting.is_monitor
            if ends_if_stopped:
                self._loop.watch_stops(started.process, lambda: self._on_stopped(started))
            self._watch(started)

    def _fork(
        self,
        control_fd: int,
        hello: bytes,
        client: Credentials,
        program: str,
        client_pidfd: int | None,
        client_class: ClientClass,
    ) -> _Worker:
        """Fork a worker. The caller still owns the fds if this raises.

        Raises:
            DeviceUnavailable: If workers execute the interpreter again, and nnfmq was upgraded.
            GeneralFailure, OSError: As `fork_child`.
            ResourceExhaustedTransient: If no memory or no fd is left.
        """
        if self._setup.is_executed:
            require_unchanged()
        with ExitStack() as undo, ExitStack() as worker_ends:
            cache = self._cache_for(client.uid)
            link, cache_end = cache.connect()
            undo.callback(cache.close, link)
            cache_fd = cache_end.detach()
            worker_ends.callback(os.close, cache_fd)
            compile_link, compile_end = self._compile_relay.connect(client.uid)
            undo.callback(compile_link.close)
            compile_fd = compile_end.detach()
            worker_ends.callback(os.close, compile_fd)
            slot, page = self._take_slot(client.uid, client_class, undo)
            shares, cores, traces = (each.memory.fileno() for each in (self._shares, self._cores, self._traces))
            statistics = self._statistics.of_worker(slot - 1)[0].memory
            may_trace = self._uids is None or client.uid in (os.getuid(), 0)
            uid, uid_lock, enter = self._take_account(client.uid, undo, worker_ends)
            log = LogPipe(self._loop, "a worker")
            undo.callback(log.close)
            start_s = executed_worker.START_S if self._setup.is_executed else 0.0
            heartbeat = undo.enter_context(worker_heartbeat(self._loop, start_s))
            worker_ends.callback(heartbeat.close_child_end)
            fds = WorkerFds(
                control_fd, self._status.fileno(), shares, cores, traces if may_trace else -1, cache_fd, compile_fd,
                statistics.fileno(), page, heartbeat.child_fd, uid_lock,
            )  # fmt: skip
            run = self._function_of(hello, fds, slot)
            trace_memory = self._traces.memory.inherited() if may_trace else nullcontext()
            with statistics.inherited(), trace_memory, self._shares.inherited(slot):
                # Without a supervisor nobody would end the worker if it is stopped and its client exits.
                process = fork_child(
                    run,
                    [fd for fd in fds if fd >= 0],
                    "nnfmq-worker",
                    at_parent_exit=signal.SIGCONT,
                    blocked=SESSION_SIGNALS,
                    uid=uid,
                    enter=enter,
                    log_fd=log.child_fd,
                )
            undo.pop_all()
        logged = client.logged(program)._replace(worker=process.pid)
        worker = _Worker(
            process, link, compile_link, client, client_pidfd, slot, client_class, cache, logged, log, heartbeat
        )
        self._begin(worker)
        return worker

    def _take_slot(self, uid: int, client_class: ClientClass, undo: ExitStack) -> tuple[int, int]:
        """Return a slot in what all workers share, and the fd of its page of statistics; `undo` releases both."""
        slot = self._shares.take(uid)
        undo.callback(self._shares.release, slot)
        page = self._statistics.take_slot(slot - 1, uid).fileno()
        undo.callback(self._statistics.release, slot - 1)
        self._publish_class(slot, client_class)
        if self._uids is not None:
            self._cores.set_user(slot, uid)
        return slot, page

    def _begin(self, worker: _Worker) -> None:
        """Schedule and log a worker that was forked; a driver that is replaced asks it to leave."""
        process, client_class = worker.process, worker.client_class
        worker.cache_link.worker_pid = process.pid
        schedule_worker(process, client_class)
        if self._is_replaced:
            process.send(LEAVE)
        vlog("driver", "worker %d serves a new client", process.pid)
        worker.log.begin(process.pid)
        worker.log.log.client = worker.logged
        _log.info("client connected, class %s", client_class.name.lower(), extra=about(worker.logged))

    def _function_of(self, hello: bytes, fds: WorkerFds, slot: int) -> Callable[[], None]:
        """Return the function that a forked worker calls."""
        if self._setup.is_executed:
            return partial(executed_worker.execute, hello, fds, slot, self._setup)
        own_statistics = self._statistics.of_worker(slot - 1)
        memories = partial(worker.inherited_memories, fds, slot, own_statistics, self._traces, self._shares)
        return partial(worker.main, hello, fds, slot, self._setup, memories)

    def _take_account(
        self, client_uid: int, undo: ExitStack, worker_ends: ExitStack
    ) -> tuple[int | None, int, Callable[[], None]]:
        """Return a uid for a worker and its lock's fd, None and -1 if it has none of its own; and how it begins."""
        if self._uids is None:
            return None, -1, give_up_capabilities
        uid, lock = self._uids.take()
        undo.callback(self._uids.release, uid)
        worker_ends.callback(os.close, lock)
        return uid, lock, partial(worker.enter_account, uid, lock, client_uid)

    def _publish_class(self, slot: int, client_class: ClientClass) -> None:
        self._cores.set_class(slot, client_class)
        self._statistics.set_client_class(slot - 1, client_class)

    def set_class(self, sender_pid: int, worker_pid: int, client_class: ClientClass) -> str:
        """Give the client of a worker another class, because the worker `sender_pid` asks for it; 0: its own client.

        Return the reason why the class stays as it was, for the client that asks; empty if it was changed.
        """
        requester, changed = self._workers.get(sender_pid), self._workers.get(worker_pid or sender_pid)
        if requester is None or changed is None:
            return f"no client of this driver has the worker {worker_pid}: `nnfmq client list` shows them"
        program, is_own = changed.logged.program, requester is changed
        reason = why_not_changed(requester.client, changed.client, program, client_class, is_own=is_own)
        if reason:
            return reason
        self._statistics.tell_class(changed.slot - 1, client_class)
        if client_class is not changed.client_class:
            changed.client_class = client_class
            self._publish_class(changed.slot, client_class)
            schedule_worker(changed.process, client_class)
            _log.info("client has the class %s now", client_class.name.lower(), extra=about(changed.logged))
        return ""

    def _cache_for(self, uid: int) -> SharedCacheServer:
        """Return the shared cache of the clients of a uid: of all, if this driver serves one user."""
        user = None if self._uids is None else uid
        if user not in self._caches:
            requests = (
                self._requests if user is None else DriverRequests(self._loop, self._statistics, self.set_class, user)
            )
            entries_max = None if user is None else user_entries()
            self._caches[user] = SharedCacheServer(programs.cache_limit_bytes(), requests, entries_max)
        return self._caches[user]

    def _reject(self, channel: Channel, error: OSError | NnfmqError) -> None:
        self._statistics.add(layout.REJECTED_CLIENTS)
        _reject(channel, error)

    def reject_surplus(self, channel: Channel, text: str) -> None:
        """Reject a client because the driver has as many as it may have. Takes ownership of `channel`."""
        self._statistics.add(layout.REJECTED_CLIENTS)
        reject(channel, ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, text)

    def _watch(self, started: _Worker) -> None:
        self._workers[started.process.pid] = started
        self._loop.add_reader(started.process.fileno(), lambda: self._on_exit(started))
        started.log.watch()
        self._loop.add_reader(started.cache_link.channel.fileno(), lambda: self._serve_cache(started))
        self._loop.add_reader(started.compile_link.channel.fileno(), lambda: self._relay_compilation(started))
        if started.client_pidfd is not None:
            self._loop.add_reader(started.client_pidfd, lambda: self._on_client_exit(started))
        started.heartbeat.begin(started.process.pid, lambda silent_s: self._on_silence(started, silent_s))

    def _on_silence(self, silent: _Worker, silent_s: float) -> None:
        text = "worker %d has not run its threads for %.3g s, more than $%s allows: it is ended"
        _log.error(text, silent.process.pid, silent_s, settings.EXECUTION_LIMIT_S.variable, extra=about(silent.logged))
        silent.was_silent = True
        silent.process.send(signal.SIGKILL)

    def _on_stopped(self, stopped: _Worker) -> None:
        _log.error("worker %d, of the model repository, is stopped: it is ended", stopped.process.pid)
        stopped.process.send(signal.SIGKILL)

    def _serve_cache(self, linked: _Worker) -> None:
        if not linked.cache.serve(linked.cache_link):
            self._close_cache_link(linked)
        self._publish_cache()

    def _publish_cache(self) -> None:
        caches, statistics = self._caches.values(), self._statistics
        statistics.set(layout.CACHE_PROGRAMS, sum(cache.program_count for cache in caches))
        statistics.set(layout.CACHE_BYTES, sum(cache.used_bytes for cache in caches))
        statistics.set(layout.CACHE_LOOKUPS, sum(cache.lookups for cache in caches))
        statistics.set(layout.CACHE_HITS, sum(cache.hits for cache in caches))

    def _close_cache_link(self, linked: _Worker) -> None:
        """Close a worker's link to the shared program cache. Idempotent. The worker goes on without it."""
        self._loop.remove_reader(linked.cache_link.channel.fileno())
        linked.cache.close(linked.cache_link)

    def _relay_compilation(self, linked: _Worker) -> None:
        linked.has_compiled = True
        if not self._compile_relay.relay(linked.compile_link):
            self._close_compile_link(linked)

    def _close_compile_link(self, linked: _Worker) -> None:
        """Close a worker's link to the compile server. Idempotent. The worker compiles its models itself then."""
        self._loop.remove_reader(linked.compile_link.channel.fileno())
        linked.compile_link.close()

    # -- ending -------------------------------------------------------------------------------------------------------

    def _on_client_exit(self, served: _Worker) -> None:
        served.client_has_exited = True
        self._close_client_pidfd(served)
        grace_s = COMPILING_EXIT_GRACE_S if served.has_compiled else CLIENT_EXIT_GRACE_S
        self._loop.call_at(time.monotonic() + grace_s, lambda: self._kill_without_client(served))

    def _close_client_pidfd(self, served: _Worker) -> None:
        fd, served.client_pidfd = served.client_pidfd, None
        if fd is not None:
            self._loop.remove_reader(fd)
            os.close(fd)

    def _kill_without_client(self, served: _Worker) -> None:
        if served.process.pid in self._workers:
            served.was_killed = True
            served.process.send(signal.SIGKILL)

    def _on_exit(self, ended: _Worker) -> None:
        del self._workers[ended.process.pid]
        self._loop.unwatch_stops(ended.process)
        self._loop.remove_reader(ended.process.fileno())
        self._close_client_pidfd(ended)
        self._close_cache_link(ended)
        self._publish_cache()
        self._close_compile_link(ended)
        end_changes(self._status.view, ended.process.pid)
        self._traces.release(ended.slot)
        self._statistics.release(ended.slot - 1)
        self._cores.release(ended.slot)  # first: another worker may get the slot from then on
        self._shares.release(ended.slot)
        uid = ended.process.uid
        self._requests.remove_folder(private_folder_of(ended.process.pid, uid), uid)
        if ended.has_perf_map:
            with suppress(OSError):  # it has none, or another user has a file of this name
                as_owner(uid, partial(os.unlink, perf_map_path(ended.process.pid)))
        if self._uids is not None and uid is not None:
            self._uids.release(uid)
        ended.heartbeat.close()
        status = ended.process.reap()
        ended.log.close()
        vlog("driver", "worker %d has ended with status %d", ended.process.pid, status)
        if status and not ended.was_killed:
            self._statistics.add(layout.DEAD_WORKERS)
            number = signal.SIGALRM if ended.was_silent else -status  # both have the same cause
            self._statistics.add(layout.DEATHS + layout.DEATH_CAUSES.index(_death_cause(-number)))
            text, cause = "worker %d ended with status %d%s", _CAUSES.get(number, "")
            _log.error(text, ended.process.pid, status, cause, extra=about(ended.logged))
            return
        left = "client's process has exited" if ended.client_has_exited else "client left"
        killed = ", and its worker was killed" if ended.was_killed else ""
        text = f"{left} after %.1f s{killed}"
        _log.info(text, time.monotonic() - ended.started_s, extra=about(ended.logged))

    def make_all_leave(self) -> None:
        """Let the workers, later ones included, ask their clients to move to the driver that has replaced this one."""
        self._is_replaced = True
        for running in self._workers.values():
            running.process.send(LEAVE)

    def drain_all(self) -> None:
        """Let the workers end when what is in progress has ended, at most after $NNFMQ_DRAIN_S. Does not block."""
        for running in self._workers.values():
            running.process.send(signal.SIGTERM)

    def end_all(self) -> None:
        """End all workers at once, also those that drain; those that have not exited after STOP_TIMEOUT_S by SIGKILL.

        Blocks.
        """
        self._compile_relay.close()
        for number in (END, signal.SIGKILL):
            for running in self._workers.values():
                running.process.send(number)
            deadline = time.monotonic() + STOP_TIMEOUT_S
            while self._workers and time.monotonic() < deadline:
                self._loop.run_once(deadline)


def _death_cause(status: int) -> str:
    """Return which of DEATH_CAUSES the exit status of a worker means; below 0 it is a signal."""
    if status >= 0 or status == -signal.SIGALRM:
        return "ended"  # by itself: the watchdog, or an internal error
    return {-signal.SIGKILL: "killed", -signal.SIGSYS: "sandbox"}.get(status, "crashed")


def user_entries() -> int:
    """Return how many programs the clients of one user share at most: so few that the fds of this process suffice."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(ENTRIES_MAX, max(USER_ENTRIES_MIN, soft_limit // (2 * PLACES)))


def _reject(channel: Channel, error: OSError | NnfmqError) -> None:
    """Reject a client for which no worker could be started."""
    if isinstance(error, OSError):
        status, reason = ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, error.strerror or str(error)
    else:
        status, reason = status_for_error(error), str(error)
    reject(channel, status, f"no worker could be started: {reason}")


# ----------------------------------------------------------------------------------------------------------------------
# The model repository's process, as the supervisor starts it, watches it, and starts it again.
#
# The supervisor listens at the repository's socket, and the process inherits it. So clients that connect while it
# starts, or starts again, wait instead of failing. If the process dies, no client of the driver notices, except those
# that wait for the reply to a request for a model. The pause before the next start doubles, and is short again for a
# process that has run for long. One that is stopped is killed, so that another one takes its place. The process and its
# children are a session of their own, which ends with it; the kernel kills the process if the supervisor is killed.
#
# A process may also hang without being stopped: a loop without end, a lock, a system call that does not return. So it
# writes to a pipe about once a second (`heartbeats`), which takes both of its threads that must go on. The
# supervisor looks every HEARTBEAT_CHECK_S, and kills it after HEARTBEATS_MISSED_MAX looks without a heartbeat, before
# the first one after HEARTBEATS_MISSED_AT_START.


HEARTBEAT_CHECK_S = 5.0
HEARTBEATS_MISSED_MAX, HEARTBEATS_MISSED_AT_START = 3, 12
PAUSE_S, PAUSE_MAX_S = 0.1, 30.0
_LONG_S = 60.0


class RepositoryProcess:
    """Keeps a model repository running. Used by one thread, the only one of its process.

    Args:
        loop: The supervisor's event loop. Borrowed.
        listener: Listens at the repository's socket. Borrowed.
        socket: The driver's socket.
        directory: The directory of models.
    """

    def __init__(self, loop: EventLoop, listener: Listener, socket: Path, directory: Path) -> None:
        self._loop = loop
        self._listener = listener
        self._socket = socket.absolute()
        self._directory = directory
        self._process: ChildProcess | None = None
        self._log: LogPipe | None = None
        self._started_s = 0.0
        self._pause_s = PAUSE_S
        self._is_ending = False
        self._heartbeat: HeartbeatWatch | None = None  # of the process

    def start(self) -> None:
        """Start the process; if that fails, try again after a pause."""
        if self._is_ending:
            return
        fd = os.dup(self._listener.fileno())  # a fork closes the listener in the child
        try:
            require_unchanged()
            heartbeat = self._heartbeat = HeartbeatWatch(
                self._loop, HEARTBEAT_CHECK_S, HEARTBEATS_MISSED_MAX, HEARTBEATS_MISSED_AT_START
            )
            heartbeat_fd = heartbeat.child_fd
            log = self._log = LogPipe(self._loop, "the model repository", names_clients=True)
            process = self._process = fork_child(
                lambda: self._execute(fd, heartbeat_fd),
                [fd, heartbeat_fd],
                "nnfmq-models",
                at_parent_exit=signal.SIGKILL,
                log_fd=log.child_fd,
            )
            log.begin(process.pid)
            heartbeat.close_child_end()
            log.watch()
            self._started_s = time.monotonic()
            self._loop.add_reader(process.fileno(), self._on_exit)
            self._loop.watch_stops(process, self._on_stopped)
            heartbeat.begin(process.pid, self._on_silence)
        except (OSError, DeviceUnavailable, GeneralFailure) as error:
            _log.error("the model repository cannot be started: %s", error)
            self._end_process()
            self._start_later()
        finally:
            os.close(fd)

    def includes(self, pid: int) -> bool:
        """Return whether a process is the repository's, or of a child that imports a model."""
        try:
            return self._process is not None and os.getsid(pid) == self._process.pid
        except OSError:  # it has exited
            return False

    def _execute(self, fd: int, heartbeat_fd: int) -> None:
        """Become the repository: a forked child without this process's memory."""
        os.setsid()
        fds = fd, heartbeat_fd
        for inherited in fds:
            os.set_inheritable(inherited, True)
        arguments = ["--serve", loaded_stamp(), *map(str, fds), str(self._socket), str(self._directory)]
        os.execve(sys.executable, [sys.executable, "-P", "-m", "nnfmq.repository", *arguments], child_environment())

    def _on_stopped(self) -> None:
        _log.error("the model repository is stopped: it is replaced")
        if self._process is not None:
            self._process.send(signal.SIGKILL)

    def _on_silence(self, silent_s: float) -> None:
        """Kill the process, which has not shown for long that it answers. Its exit is waited for elsewhere."""
        _log.error("the model repository has not answered for %g s: it is replaced", silent_s)
        if self._process is not None:
            self._process.send(signal.SIGKILL)

    def _on_exit(self) -> None:
        status = self._end_process()
        _log.error("the model repository ended with status %d; it is started again", status)
        self._start_later()

    def _end_process(self) -> int:
        """Kill the process and its children; return its exit status. Blocks until that, for STOP_TIMEOUT_S at most."""
        process, self._process = self._process, None
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.close()
        status = 0 if process is None else self._kill(process)
        if self._log is not None:
            self._log.close()
        return status

    def _kill(self, process: ChildProcess) -> int:
        self._loop.unwatch_stops(process)
        self._loop.remove_reader(process.fileno())
        # The process group exists as long as the process is not reaped. Children that are stopped end, too.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.send(signal.SIGKILL)  # it may not have a group of its own yet
        if process.has_exited(STOP_TIMEOUT_S):
            return process.reap()
        _log.error("the model repository does not end: a system call that it makes does not return")
        self._loop.add_reader(process.fileno(), lambda: self._reap_later(process))
        return -signal.SIGKILL

    def _reap_later(self, process: ChildProcess) -> None:
        self._loop.remove_reader(process.fileno())
        process.reap()

    def _start_later(self) -> None:
        if time.monotonic() - self._started_s > _LONG_S:
            self._pause_s = PAUSE_S
        self._loop.call_at(time.monotonic() + self._pause_s, self.start)
        self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)

    @property
    def listener(self) -> Listener:
        """The listener at the repository's socket."""
        return self._listener

    def end(self) -> None:
        """End the process and its children; it has nothing to save. Blocks as `_end_process`. Idempotent."""
        self._is_ending = True
        self._end_process()
