"""NodeDriver: the actor that owns the driver of one node, for all replicas of that node.

Each node has one such actor for each set of models. It starts the driver, watches it by its pidfd and starts it again
(`driver_process`). Ray starts the actor again if it dies; the driver exits with it, and the next one listens at the
same socket. Replicas are clients of the driver and tell the actor their pid; an actor that was started again finds them
in the driver's statistics. When the last of them has exited, as their pidfds say, the actor and its driver end after a
pause.

Models that come from Ray's object store are written once for each node, into a directory of this actor.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import select
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nnfmq.base.paths import make_cache_directory, make_runtime_directory
from nnfmq.base.threads import Thread
from nnfmq.client.connection.connect import connect
from nnfmq.hal.errors import InvalidArgument, NnfmqError
from nnfmq.serving.driver_process import DriverProcess, DriverState
from nnfmq.serving.ray.object_models import ObjectModel, object_models, write_version
from nnfmq.serving.socket_files import remove_left_files, remove_socket_files, unique_socket

__all__ = ["NodeDriver", "ReplicaDriver", "node_driver"]

NAMESPACE = "nnfmq"
_IDLE_S = 30.0
_RAY, _OWN = "ray", "serve"  # the sockets' names begin so
_NODE_CHARACTERS = 12  # of the node's id in them
_CALLS = 16  # at a time; each takes a thread only while it runs
_log = logging.getLogger("nnfmq.serving")


class NodeDriver:
    """Owns the driver of this node. An actor; its methods block.

    Args:
        key: Identifies the node and the models; part of the socket's name.
        models: The directory of the models; None = those that `add_model` writes into a directory of the actor.
        options: Further options of `nnfmq serve`.
        environment: Added to the driver's environment.
        idle_s: How long the driver runs on when no replica uses it.
    """

    def __init__(
        self,
        key: str,
        models: str | None,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        idle_s: float = _IDLE_S,
    ) -> None:
        make_runtime_directory()
        _remove_files_of_dead_nodes()
        self._own_models = _own_directory(key) if models is None else None
        directory = self._own_models or Path(models or "")
        self._socket = unique_socket(_RAY, key)
        self._lock = threading.Lock()
        self._users: dict[int, int] = {}  # pid to pidfd
        self._idle_s = idle_s
        self._changed_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._driver = DriverProcess(self._socket, directory, options=options, environment=environment)
        Thread(target=self._watch_users, name="nnfmq-replica-watch", daemon=True).start()

    def attach(self, pid: int) -> str:
        """Return the driver's socket for a replica with this pid, once the driver accepts clients."""
        with self._lock:
            if pid not in self._users:
                self._users[pid] = os.pidfd_open(pid)
                os.eventfd_write(self._changed_fd, 1)
        return self._driver.wait_until_running().socket

    def state(self) -> DriverState:
        """Return the state of the driver."""
        return self._driver.state

    def pid(self) -> int:
        """Return the pid of this actor."""
        return os.getpid()

    def add_model(self, name: str, version: int, data: bytes) -> None:
        """Write a model file into this actor's directory, unless it is there already.

        Raises:
            InvalidArgument: If the models are in a directory of the user, or the version exists with another content.
        """
        if self._own_models is None:
            raise InvalidArgument("this driver serves a directory: put the model there")
        with self._lock:
            write_version(self._own_models, ObjectModel(name, version, data))

    # ------------------------------------------------------------------------------------------------ end

    def _watch_users(self) -> None:
        """Sleep until replicas attach or exit; end this actor when there has been none for a while."""
        while True:
            with self._lock:
                pidfds = dict(self._users)
            ready = self._wait([*pidfds.values(), self._changed_fd], None if pidfds else self._idle_s)
            if not ready and not self._find_users():
                break
            with self._lock:
                for pid, pidfd in pidfds.items():
                    if pidfd in ready:
                        os.close(self._users.pop(pid))
        self._end()

    def _find_users(self) -> bool:
        """Add the driver's clients to the users, without this process and the repository; return whether there are any.

        A driver that does not reply has none: a replica that needs it starts this actor again.
        """
        try:
            found = _clients(self._driver.wait_until_running())
        except NnfmqError as error:
            _log.warning("the driver's clients are unknown: %s", error)
            return False
        with self._lock:
            for pid in set(found) - self._users.keys():  # a replica may have attached meanwhile
                with suppress(ProcessLookupError):
                    self._users[pid] = os.pidfd_open(pid)
            return bool(self._users)

    def _wait(self, fds: Sequence[int], timeout_s: float | None) -> set[int]:
        """Wait until one of `fds` is readable; return those that are, none after a timeout."""
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)}
        if self._changed_fd in ready:
            os.eventfd_read(self._changed_fd)
        return ready

    def _end(self) -> None:
        _log.info("no replica of this node uses the driver any more; it ends")
        self._driver.close()
        remove_socket_files(self._socket)
        if self._own_models is not None:
            shutil.rmtree(self._own_models)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def node_driver(
    models: str | None,
    names: Sequence[str] = (),
    *,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    idle_s: float = _IDLE_S,
) -> Any:
    """Return a handle of the actor that owns the driver of this node for these models; starts it if there is none.

    `models` is the directory of the models. If it is None, they come from the object store and have these names.
    """
    node = ray.get_runtime_context().get_node_id()
    what = repr((models, sorted(names), list(options), sorted((environment or {}).items())))
    key = f"{node[:_NODE_CHARACTERS]}-{hashlib.sha256(what.encode()).hexdigest()[:8]}"
    actor = ray.remote(NodeDriver).options(
        name=f"driver-{node}-{key}",
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",  # it would end with the replica that made it
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        max_concurrency=_CALLS,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    return actor.remote(key, models, tuple(options), dict(environment or {}), idle_s)


def _own_directory(key: str) -> Path:
    """Return the directory for models from the object store. It outlives the actor, so that a restart finds them."""
    directory = make_cache_directory() / f"{_RAY}-{key}"
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


def _remove_files_of_dead_nodes() -> None:
    """Remove what drivers of this machine's earlier nodes have left. One of another cluster may listen: it is kept."""
    alive = {node["NodeID"][:_NODE_CHARACTERS] for node in ray.nodes() if node["Alive"]}
    try:
        remove_left_files(_RAY, lambda key: key[:_NODE_CHARACTERS] in alive)
    except OSError as error:
        _log.warning("files of nodes that have ended are not removed: %s", error)


def _clients(driver: DriverState) -> list[int]:
    """Return the pids of a driver's clients that are neither this process nor a child of the driver."""
    with connect(driver.socket) as client:
        pids = {found.pid for found in client.statistics().clients} - {os.getpid()}
    return [pid for pid in pids if _parent(pid) != driver.pid]


def _parent(pid: int) -> int:
    """Return the parent of a process; 0 if it has exited."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


# ----------------------------------------------------------------------------------------------------------------------
# ReplicaDriver: how a replica finds the driver of its node; without a cluster it starts one of its own.


_ATTEMPTS = 50  # to reach an actor that ends because nobody uses it, or starts again
_PAUSE_S = 0.1


class ReplicaDriver:
    """Finds the driver that serves `models`: a directory, or a mapping as for `app`. Close it."""

    def __init__(self, models: str | os.PathLike[str] | Mapping[str, Any], options: Sequence[str]) -> None:
        self._directory = None if isinstance(models, Mapping) else os.fspath(models)
        self._objects = object_models(models) if isinstance(models, Mapping) else []
        self._options = tuple(options)
        self._process: DriverProcess | None = None
        self._socket = Path()  # of that process
        self._temporary: tempfile.TemporaryDirectory[str] | None = None  # is removed at exit, too

    async def find(self) -> Path:
        """Return the socket of a driver that accepts clients.

        Raises:
            RayActorError: If the node's actor cannot be started.
            MissedDeadline: If the driver does not start; the message says why.
        """
        try:
            serve.get_replica_context()
        except RayServeException:
            return await asyncio.to_thread(self._start_own)
        for _ in range(_ATTEMPTS):
            try:
                return await self._attach()
            except RayActorError:
                await asyncio.sleep(_PAUSE_S)
        return await self._attach()

    async def _attach(self) -> Path:
        names = [f"{model.name}/{model.version}" for model in self._objects]
        actor = node_driver(self._directory, names, options=self._options)
        for model in self._objects:
            await actor.add_model.remote(*model)
        return Path(await actor.attach.remote(os.getpid()))

    def _start_own(self) -> Path:
        directory = self._directory
        if directory is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="nnfmq-models-", ignore_cleanup_errors=True)
            directory = self._temporary.name
            for model in self._objects:
                write_version(Path(directory), model)
        make_runtime_directory()
        remove_left_files(_OWN, lambda key: Path("/proc", key.partition("-")[0]).exists())
        socket = self._socket = unique_socket(_OWN, f"{os.getpid()}-{time.monotonic_ns()}")
        self._process = DriverProcess(socket, Path(directory), options=self._options)
        self._process.wait_until_running()
        return socket

    def close(self) -> None:
        """End a driver of this process. Idempotent."""
        if self._process is not None:
            self._process.close()
            remove_socket_files(self._socket)
        if self._temporary is not None:
            self._temporary.cleanup()
