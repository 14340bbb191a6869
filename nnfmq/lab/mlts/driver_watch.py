"""Notice that the driver has crashed or hangs, also if no call of a test shows it.

Three observers: the liveness checker, a client of the same driver that executes a small model all the time; the process
table, in which the driver and the workers of all clients that run must exist; and the driver's log. An observation has
the outcome that it means for the test, and a reason.
"""

from __future__ import annotations

import os
import re
import select
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from nnfmq.base.processes import children
from nnfmq.client.connection.client import Client
from nnfmq.client.connection.connect import connect
from nnfmq.hal.errors import DeadObject, DeviceUnavailable, MissedDeadline, NnfmqError
from nnfmq.lab.mlts.crash_tests import CrashOutcome
from nnfmq.lab.mlts.stress_models import inputs_for, open_model

_PAUSE_S = 0.05  # between two executions of the liveness checker
CRASH_LINES = re.compile(
    r"(worker \d+|the compile server) ended with status|an internal error ends|the compile server has died|"
    r"Fatal Python error"
)
"""Lines of the driver's log that report the death of one of its processes."""


@dataclass(frozen=True, slots=True)
class RunningDriver:
    """A driver under test: socket, pid, log file, if it is known, and whether it has no clients but the test's."""

    socket: str
    pid: int
    log: Path | None = None
    is_own: bool = False


@dataclass(frozen=True, slots=True)
class Observation:
    """An event that decides the outcome of a test."""

    outcome: CrashOutcome
    reason: str


class DriverLog:
    """Lines that are appended to the driver's log, from now on. Without a file there are none."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._offset = path.stat().st_size if path is not None else 0
        self._rest = b""

    def new_lines(self) -> list[str]:
        """Return the complete lines since the last call."""
        if self._path is None:
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]


class WatchedProcess:
    """A process in the process table, held by a pidfd. Close it."""

    def __init__(self, pid: int, label: str) -> None:
        self.pid = pid
        self.label = label
        self._pidfd = os.pidfd_open(pid)

    def has_exited(self, wait_s: float = 0.0) -> bool:
        """Wait up to `wait_s` for the exit; return whether the process has exited."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(wait_s * 1000))

    def close(self) -> None:
        """Close the pidfd. Idempotent."""
        fd, self._pidfd = self._pidfd, -1
        if fd >= 0:
            os.close(fd)


class LivenessChecker:
    """A thread with a client of its own, which executes a model on the device until `stop`."""

    def __init__(self, connect_to: str, device: str, model: str, limit_s: float) -> None:
        self._target = (connect_to, device, model)
        self._limit_s = limit_s
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._client: Client | None = None
        self.observation: Observation | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.observation = self._check()
        finally:
            with self._lock:
                client, self._client = self._client, None
            if client is not None:
                client.close()

    def _check(self) -> Observation | None:
        connect_to, device, model = self._target
        try:
            client = connect(connect_to, embedded=False, timeout=self._limit_s, recover=False)
            with self._lock:
                self._client = client
            execute_until_stopped(client, device, model, self._limit_s, self._stop)
        except NnfmqError as error:
            return None if self._stop.is_set() else observation_of(error, "the liveness checker")
        return None

    def stop(self) -> None:
        """End the thread; a call in progress ends with the connection. Blocks a moment. Idempotent."""
        self._stop.set()
        self._thread.join(self._limit_s)
        with self._lock:
            if self._client is not None:
                self._client.close()
        self._thread.join(self._limit_s)


def execute_until_stopped(client: Client, device: str, model: str, limit_s: float, stop: threading.Event) -> None:
    """Execute a model once, and again until `stop` is set. Raises NnfmqError."""
    loaded = open_model(model)
    with client.device(device, timeout=limit_s).prepare(loaded, timeout=limit_s) as prepared:
        inputs = inputs_for(prepared)
        with prepared.burst(timeout=limit_s) as burst:
            first = [np.array(output) for output in burst.execute(*inputs, timeout=limit_s)]
            while not stop.wait(_PAUSE_S):
                burst.reset_state()
                found = burst.execute(*inputs, timeout=limit_s)
                if not all(np.allclose(a, b, 1e-3, 1e-3) for a, b in zip(first, found, strict=True)):
                    raise NnfmqError("an execution with the same inputs has another result")


def observation_of(error: NnfmqError, who: str) -> Observation:
    """Return the observation in an error of a call: a dead driver, one that hangs, or a failure."""
    if isinstance(error, DeadObject | DeviceUnavailable):
        return Observation(CrashOutcome.CRASH, f"{who}: the driver is dead: {error}")
    if isinstance(error, MissedDeadline):
        return Observation(CrashOutcome.HANG, f"{who}: the driver does not respond: {error}")
    return Observation(CrashOutcome.FAILURE, f"{who}: {type(error).__name__}: {error}")


class DriverWatch:
    """All observers of a driver during one test. Close it, or use `with`. Used by one thread.

    Args:
        driver: The driver.
        device: The device under test.
        model: The model of the liveness checker.
        limit_s: How long a call of the liveness checker may take, and how long the driver may keep the workers of
            clients that have exited.
    """

    def __init__(self, driver: RunningDriver, device: str, model: str, limit_s: float) -> None:
        self._running, self._device, self._model, self._limit_s = driver, device, model, limit_s
        self._resources = ExitStack()
        self._log = DriverLog(driver.log)
        self._before = set(children(driver.pid))
        self._known_workers: set[int] = set()
        self._driver = WatchedProcess(driver.pid, "the driver")
        self._resources.callback(self._driver.close)
        self._workers: dict[int, WatchedProcess] = {}
        self._liveness = LivenessChecker(driver.socket, device, model, limit_s)
        self._resources.callback(self._liveness.stop)

    def add_worker(self, pid: int, label: str) -> Observation | None:
        """Watch the worker of a client until `remove_worker`. Return an observation if it has exited already."""
        self._known_workers.add(pid)
        try:
            self._workers[pid] = WatchedProcess(pid, label)
        except ProcessLookupError:
            return Observation(CrashOutcome.CRASH, f"{label}: its worker, process {pid}, has exited")
        return None

    def remove_worker(self, pid: int) -> None:
        """Watch a worker no longer: its client ends, or is about to be killed. Idempotent."""
        process = self._workers.pop(pid, None)
        if process is not None:
            process.close()

    def observe(self) -> Observation | None:
        """Return the first observation, without blocking; None if the driver seems to be well."""
        for line in self._log.new_lines():
            if CRASH_LINES.search(line):
                return Observation(CrashOutcome.CRASH, f"the driver's log: {line}")
        if self._driver.has_exited():
            return Observation(CrashOutcome.CRASH, f"the driver, process {self._driver.pid}, has exited")
        return self._liveness.observation

    def exited_worker(self) -> Observation | None:
        """Return an observation if a worker that is watched has exited. Read the clients' messages, then call again.

        A client reports its result before it disconnects, so its report has arrived when its worker has exited.
        """
        for worker in self._workers.values():
            if worker.has_exited():
                text = f"{worker.label}: its worker, process {worker.pid}, has exited although the client runs"
                return Observation(CrashOutcome.CRASH, text)
        return None

    def finish(self) -> Observation | None:
        """Check the driver after all clients have exited: a new client, left processes, the log. Blocks."""
        self._liveness.stop()
        if (found := self.observe()) is not None:
            return found
        try:
            stop = threading.Event()
            stop.set()
            with connect(self._running.socket, embedded=False, timeout=self._limit_s, recover=False) as client:
                execute_until_stopped(client, self._device, self._model, self._limit_s, stop)
        except NnfmqError as error:
            return observation_of(error, "a new client")
        return self._left_workers() or self.observe()

    def _left_workers(self) -> Observation | None:
        """Wait until the workers have exited. A compile server stays; it leads a session."""
        end = time.monotonic() + self._limit_s
        while left := [pid for pid in self._new_children() if not _leads_session(pid)]:
            if time.monotonic() > end:
                pids = ", ".join(map(str, left))
                return Observation(CrashOutcome.HANG, f"{len(left)} workers without a client have not exited: {pids}")
            time.sleep(_PAUSE_S)
        return None

    def _new_children(self) -> list[int]:
        """Return the workers of the test that run; of a driver with other clients only those that are known."""
        new = set(children(self._driver.pid)) - self._before
        return sorted(new if self._running.is_own else new & self._known_workers)

    def close(self) -> None:
        """Stop the liveness checker and close all pidfds. Idempotent. Blocks a moment."""
        for pid in list(self._workers):
            self.remove_worker(pid)
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _leads_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return True  # it has exited
