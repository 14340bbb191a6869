"""The supervisor's workers: it forks one for each client, and ends those that outlive their client.

The supervisor has imported everything that a worker needs, so that a worker starts in milliseconds and shares those
pages. It closes its copy of the client's connection immediately, because a hang-up is seen only when no other process
has the connection open.

A worker exits by itself when its client does. But it may be stopped, or its threads may be busy in calls that do not
return soon. So the supervisor watches a pidfd of each client, and sends SIGKILL to a worker that has not exited
CLIENT_EXIT_GRACE_S after its client, or COMPILING_EXIT_GRACE_S if it has compiled. When a worker exits, the supervisor
closes the worker's link to the shared program cache (`shared_cache_server`), even if another process still has a copy
of the link's other end.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import ExitStack
from functools import partial

from nnfmq.channel import Channel
from nnfmq.hal.errors import ErrorStatus, GeneralFailure
from nnfmq.memory import Memory
from nnfmq.observe import statistics_layout as layout
from nnfmq.service import worker
from nnfmq.service.caching import program_cache
from nnfmq.service.caching.shared_cache_server import SharedCacheServer, WorkerLink
from nnfmq.service.child_process import ChildProcess, fork_child
from nnfmq.service.client_process import CLIENT_EXIT_GRACE_S, COMPILING_EXIT_GRACE_S
from nnfmq.service.compile_relay import CompileRelay
from nnfmq.service.core_shares import CoreShares
from nnfmq.service.device_status import end_changes
from nnfmq.service.event_loop import EventLoop
from nnfmq.service.memory_shares import MemoryShares
from nnfmq.service.pending_clients import reject
from nnfmq.service.statistics_area import SharedStatistics
from nnfmq.service.trace_area import TraceArea
from nnfmq.service.worker import WorkerFds, WorkerSetup
from nnfmq.verbose_log import vlog

__all__ = ["WorkerProcesses"]

STOP_TIMEOUT_S = 2.0  # after SIGTERM, and again after SIGKILL
_log = logging.getLogger("nnfmq.supervisor")


class _Worker:
    def __init__(
        self, process: ChildProcess, cache_link: WorkerLink, compile_link: Channel, client_pidfd: int | None, slot: int
    ) -> None:
        self.process = process
        self.cache_link = cache_link
        self.compile_link = compile_link
        self.client_pidfd = client_pidfd  # None: unknown, or the client has exited
        self.slot = slot  # of MemoryShares
        self.was_killed = False
        self.has_compiled = False


class WorkerProcesses:
    """The workers of one supervisor. Used by one thread, which must be the only one of its process.

    Borrows `status`, the memory of the devices' status, `shares`, what each client has of the driver's memory, `cores`,
    what it has of the cores, `traces`, where workers record what they do, and `statistics`. All workers map all five.
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
    ) -> None:
        self._loop = loop
        self._status = status
        self._shares = shares
        self._cores = cores
        self._traces = traces
        self._statistics = statistics
        self._setup = setup
        self._compile_relay = CompileRelay(loop, statistics)
        self._shared_cache = SharedCacheServer(program_cache.cache_limit_bytes())
        statistics.set(layout.CACHE_LIMIT, program_cache.cache_limit_bytes())
        self._workers: dict[int, _Worker] = {}  # by pid
        status.keep_from_children()  # compile processes map no shared memory; workers map it themselves

    def __len__(self) -> int:
        return len(self._workers)

    def start(self, channel: Channel, hello: bytes) -> None:
        """Start a worker for a client, or reject the client if that fails. Takes ownership of `channel`."""
        try:
            client_pidfd = channel.open_peer_pidfd()
        except OSError as error:
            self._reject(channel, error)
            return
        control_fd = channel.detach()  # a fork closes channels in the child
        try:
            started = self._fork(control_fd, hello, client_pidfd)
        except (OSError, GeneralFailure) as error:
            if client_pidfd is not None:
                os.close(client_pidfd)
            self._reject(Channel.adopt(control_fd), error)
        else:
            os.close(control_fd)
            self._watch_or_end(started)

    def _fork(self, control_fd: int, hello: bytes, client_pidfd: int | None) -> _Worker:
        """Fork a worker. Raises as `fork_child`; the caller then still owns the fds."""
        with ExitStack() as undo, ExitStack() as worker_ends:
            link, cache_end = self._shared_cache.connect()
            undo.callback(self._shared_cache.close, link)
            cache_fd = cache_end.detach()
            worker_ends.callback(os.close, cache_fd)
            compile_link, compile_end = Channel.pair()
            undo.callback(compile_link.close)
            compile_fd = compile_end.detach()
            worker_ends.callback(os.close, compile_fd)
            slot = self._shares.take()
            undo.callback(self._shares.release, slot)
            memories = (self._shares.memory, self._cores.memory, self._traces.memory)
            shares, cores, traces = (memory.fileno() for memory in memories)
            statistics = self._statistics.fileno()
            fds = WorkerFds(control_fd, self._status.fileno(), shares, cores, traces, cache_fd, compile_fd, statistics)
            run = partial(worker.main, hello, fds, slot, self._setup, self._statistics)
            with self._statistics.inherited():
                # Without a supervisor nobody would end the worker if it is stopped and its client exits.
                process = fork_child(run, fds, at_parent_exit=signal.SIGCONT)
            undo.pop_all()
        link.worker_pid = process.pid
        vlog("driver", "worker %d serves a new client", process.pid)
        return _Worker(process, link, compile_link, client_pidfd, slot)

    def _reject(self, channel: Channel, error: OSError | GeneralFailure) -> None:
        self._statistics.add(layout.REJECTED_CLIENTS)
        _reject(channel, error)

    def reject_surplus(self, channel: Channel, text: str) -> None:
        """Reject a client because the driver has as many as it may have. Takes ownership of `channel`."""
        self._statistics.add(layout.REJECTED_CLIENTS)
        _log.warning("client rejected: %s", text)
        reject(channel, ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, text)

    def _watch_or_end(self, started: _Worker) -> None:
        """Watch a worker. If that fails, end it: its client, which may have its reply already, sees a hang-up."""
        try:
            self._watch(started)
        except OSError as error:
            _log.error("worker %d is ended, because it cannot be watched: %s", started.process.pid, error.strerror)
            started.process.send(signal.SIGKILL)
            self._on_exit(started)

    def _watch(self, started: _Worker) -> None:
        self._workers[started.process.pid] = started
        self._loop.add_reader(started.process.fileno(), lambda: self._on_exit(started))
        self._loop.add_reader(started.cache_link.channel.fileno(), lambda: self._serve_cache(started))
        self._loop.add_reader(started.compile_link.fileno(), lambda: self._relay_compilation(started))
        if started.client_pidfd is not None:
            self._loop.add_reader(started.client_pidfd, lambda: self._on_client_exit(started))

    def _serve_cache(self, linked: _Worker) -> None:
        if not self._shared_cache.serve(linked.cache_link):
            self._close_cache_link(linked)
        self._publish_cache()

    def _publish_cache(self) -> None:
        cache, statistics = self._shared_cache, self._statistics
        statistics.set(layout.CACHE_PROGRAMS, cache.program_count)
        statistics.set(layout.CACHE_BYTES, cache.used_bytes)
        statistics.set(layout.CACHE_LOOKUPS, cache.lookups)
        statistics.set(layout.CACHE_HITS, cache.hits)

    def _close_cache_link(self, linked: _Worker) -> None:
        """Close a worker's link to the shared program cache. Idempotent. The worker goes on without it."""
        self._loop.remove_reader(linked.cache_link.channel.fileno())
        self._shared_cache.close(linked.cache_link)

    def _relay_compilation(self, linked: _Worker) -> None:
        linked.has_compiled = True
        if not self._compile_relay.relay(linked.compile_link):
            self._close_compile_link(linked)

    def _close_compile_link(self, linked: _Worker) -> None:
        """Close a worker's link to the compile server. Idempotent. The worker compiles its models itself then."""
        self._loop.remove_reader(linked.compile_link.fileno())
        linked.compile_link.close()

    # -- ending -------------------------------------------------------------------------------------------------------

    def _on_client_exit(self, served: _Worker) -> None:
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
        status = ended.process.reap()
        vlog("driver", "worker %d has ended with status %d", ended.process.pid, status)
        if ended.was_killed:
            _log.info("worker %d was killed after its client had exited", ended.process.pid)
        elif status:
            self._statistics.add(layout.DEAD_WORKERS)
            _log.error("worker %d ended with status %d", ended.process.pid, status)

    def end_all(self) -> None:
        """Send SIGTERM to all workers, and SIGKILL to those that have not exited after STOP_TIMEOUT_S. Blocks."""
        self._compile_relay.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for running in self._workers.values():
                running.process.send(number)
            deadline = time.monotonic() + STOP_TIMEOUT_S
            while self._workers and time.monotonic() < deadline:
                self._loop.run_once(deadline)


def _reject(channel: Channel, error: OSError | GeneralFailure) -> None:
    """Reject a client for which no worker could be started."""
    if isinstance(error, OSError):
        status, reason = ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, error.strerror or str(error)
    else:
        status, reason = ErrorStatus.GENERAL_FAILURE, str(error)
    text = f"no worker could be started: {reason}"
    _log.warning("client rejected: %s", text)
    reject(channel, status, text)
