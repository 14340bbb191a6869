"""Run crash tests: start their clients, watch them and the driver, and report the first outcome that counts.

A test ends when all of its clients have reported success, at the first other outcome, or at its deadline, which is the
duration and a grace period after its start: then it hangs. Each test of the suite's own driver gets a new one. A
message of a client decides only the outcome of its test.
"""

from __future__ import annotations

import random
import select
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from multiprocess import Pipe

from nnfmq.client.connection.connect import connect
from nnfmq.client.connection.device import Device
from nnfmq.hal.errors import DeadObject, NnfmqError
from nnfmq.hal.types import DeviceStatus
from nnfmq.lab.child_processes import BenchmarkFailed, started_child
from nnfmq.lab.listening_driver import started_daemon
from nnfmq.lab.mlts.crash_client import WorkloadContext, run_client, serve_client
from nnfmq.lab.mlts.crash_tests import (
    ClientMessage,
    ClientState,
    ClientTask,
    CrashOutcome,
    CrashTest,
    KilledClients,
)
from nnfmq.lab.mlts.driver_watch import DriverWatch, Observation, RunningDriver
from nnfmq.lab.mlts.stress_models import ModelCost, affordable, survey

__all__ = [
    "ClientChild",
    "ClientThread",
    "CrashClient",
    "CrashOptions",
    "CrashResult",
    "driver_for",
    "list_devices",
    "received_messages",
    "run_crash_test",
    "run_suite",
    "survey_device",
]


# ----------------------------------------------------------------------------------------------------------------------
# Clients of a crash test, in processes of their own or on threads of this one.
#
# Both kinds send messages over a connection, which the runner polls. A process ends by itself when the runner is
# killed, because its connection is closed.


_CLIENT_END_S = 5.0


def received_messages(connection: Any) -> tuple[list[ClientMessage], bool]:
    """Return the messages that have arrived, without blocking, and whether the client's end is closed."""
    messages = []
    try:
        while connection.poll():
            messages.append(connection.recv())
    except (EOFError, OSError):  # OSError: it died while it sent one
        return messages, True
    return messages, False


class CrashClient(Protocol):
    """A client of a crash test. Close it: that ends it if it still runs."""

    connection: Any

    def kill(self) -> None:
        """End the client now."""
        ...

    def exit_text(self) -> str:
        """Return the end of the client as text; "" if it ended normally. Blocks a moment."""
        ...

    def close(self) -> None:
        """End the client and release its resources. Idempotent."""
        ...


class ClientChild:
    """A client in a process of its own; what it prints is appended to a file."""

    def __init__(self, task: ClientTask, log: Path) -> None:
        self._resources = ExitStack()
        self._process = self._resources.enter_context(started_child(serve_client, task, log))
        self.connection = self._process.connection

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def exit_text(self) -> str:
        """Return the signal or exit status; a process that does not exit after its last message is killed."""
        status = self._process.wait(_CLIENT_END_S)
        if status is None:
            self._process.kill()
            return f"did not exit within {_CLIENT_END_S:g} s after it had closed its connection"
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"exited with status {status}" if status else ""

    def close(self) -> None:
        """Kill and reap the process."""
        self._process.kill()
        self._resources.close()


class ClientThread:
    """A client in this process. `kill` closes its connection to the driver, which ends all of its calls."""

    def __init__(self, task: ClientTask) -> None:
        self.connection, self._sink = Pipe(duplex=False)
        self._lock = threading.Lock()
        self._context: WorkloadContext | None = None
        self._is_killed = False
        self._thread = threading.Thread(target=self._run, args=(task,), daemon=True)
        self._thread.start()

    def _run(self, task: ClientTask) -> None:
        try:
            context = WorkloadContext.open(task)
            with self._lock:
                self._context = context
                if self._is_killed:
                    context.close()
            try:
                run_client(context, self._send)
            finally:
                context.close()
        except (NnfmqError, OSError) as error:
            self._send(ClientMessage(ClientState.FAILURE, f"{type(error).__name__}: {error}"))
        finally:
            self._sink.close()

    def _send(self, message: ClientMessage) -> None:
        with suppress(BrokenPipeError):
            self._sink.send(message)

    def kill(self) -> None:
        """Close the client's connection."""
        with self._lock:
            self._is_killed = True
            if self._context is not None:
                self._context.close()

    def exit_text(self) -> str:
        """Return "": a thread has no exit status."""
        return ""

    def close(self) -> None:
        """Close the connections and wait for the thread."""
        self.kill()
        self._thread.join(_CLIENT_END_S)
        self.connection.close()


# ----------------------------------------------------------------------------------------------------------------------
# Run crash tests: start their clients, watch them and the driver, and report the first outcome that counts.


GRACE_S = 20.0
MIN_SPARE_S = 0.5  # a process that is killed lives at least this long
_POLL_MS = 50
_DETAIL_S = 1.0
_WITHOUT_CACHE = {"NNFMQ_CACHE_MIB": "0"}
_STACKS = {"PYTHONFAULTHANDLER": "1"}  # a worker that dies by a signal writes its stacks to the log


@dataclass(frozen=True, slots=True)
class CrashOptions:
    """The options of crash tests.

    Attributes:
        duration_s: The duration of each test; None: MLTS's.
        grace_s: How long after its duration a test is a hang; also the limit of the driver's replies.
        driver: A driver that runs already; None: a new one for each test.
        dump_to: The folder for random graphs that fail, and for the logs of tests that do.
        seed: The first seed of random graphs.
        variables: Environment variables for new drivers.
    """

    duration_s: float | None = 10.0
    grace_s: float = GRACE_S
    driver: RunningDriver | None = None
    dump_to: str = ""
    seed: int = 0
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CrashResult:
    """The outcome of a test on a device; the numbers of steps of its clients, and of clients killed on purpose."""

    device: str
    test: CrashTest
    outcome: CrashOutcome
    reason: str = ""
    duration_ns: int = 0
    codes: dict[str, int] = field(default_factory=dict)
    killed: int = 0

    @property
    def has_failed(self) -> bool:
        """Return True if the outcome is not the expected one; an unsupported test has not failed."""
        return self.outcome not in (self.test.expected, CrashOutcome.UNSUPPORTED)

    def as_json(self) -> dict[str, Any]:
        """Return the fields; the test as its name and target."""
        fields = asdict(self)
        fields["test"], fields["target"] = self.test.name, self.test.target
        return fields


@contextmanager
def driver_for(test: CrashTest | None, options: CrashOptions, folder: Path) -> Iterator[RunningDriver]:
    """Yield the driver that runs already, or a new one; without a program cache if the test is about compilation."""
    if options.driver is not None:
        yield options.driver
        return
    without_cache = _WITHOUT_CACHE if test is not None and test.needs_compiler else {}
    variables = {"XDG_STATE_HOME": str(folder)} | _STACKS | without_cache | options.variables
    with ExitStack() as stack:
        try:
            driver = stack.enter_context(started_daemon(folder, variables))
        except BenchmarkFailed as error:
            raise DeadObject(str(error)) from None
        yield RunningDriver(driver.socket, driver.pid, driver.log, is_own=True)


def list_devices(options: CrashOptions) -> list[str]:
    """Return the names of the devices that are AVAILABLE. Blocks. Raises the errors of `connect`."""
    with _folder() as folder, driver_for(None, options, folder) as driver, connect(driver.socket) as client:
        return [info.name for info in client.devices() if info.status is DeviceStatus.AVAILABLE]


def survey_device(device: str, names: Sequence[str], options: CrashOptions) -> list[ModelCost]:
    """Return the models that a device supports, and their costs. Blocks. Raises the errors of `connect`."""
    with ExitStack() as stack:
        folder = stack.enter_context(_folder())
        driver = stack.enter_context(driver_for(None, options, folder))

        def open_device() -> Device:
            client = stack.enter_context(connect(driver.socket, embedded=False))
            return client.device(device)

        return survey(open_device, names)


def run_crash_test(test: CrashTest, device: str, costs: Sequence[ModelCost], options: CrashOptions) -> CrashResult:
    """Run a test on a device with the models that it can afford. Blocks for the duration, at most a grace longer.

    Raises:
        DeadObject: If the suite's own driver does not start.
    """
    if not costs:
        reason = "the device supports none of the models"
        return CrashResult(device, test, CrashOutcome.UNSUPPORTED, reason)
    begin_ns = time.monotonic_ns()
    with ExitStack() as stack:
        folder = stack.enter_context(_folder())
        driver = stack.enter_context(driver_for(test, options, folder))
        log = stack.enter_context((folder / "clients.log").open("w+b"))
        run = _Run(test, device, costs, options, driver, log)
        found = run.run()
        if options.dump_to and found.outcome is not test.expected:
            _keep_logs(Path(options.dump_to), f"{device}-{test.name}", [driver.log, Path(log.name)])
    spent_ns = time.monotonic_ns() - begin_ns
    return CrashResult(device, test, found.outcome, found.reason, spent_ns, dict(run.codes), run.killed)


def _keep_logs(folder: Path, name: str, logs: Sequence[Path | None]) -> None:
    """Copy the logs of the driver and of the clients, as far as they exist."""
    for log in logs:
        if log is not None:
            shutil.copy(log, folder / f"{name}-{log.name}")


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="nnfmq-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@dataclass(slots=True)
class _Client:
    """A client and what it has reported."""

    handle: CrashClient
    number: int
    must_die: bool
    worker_pid: int = 0
    result: ClientMessage | None = None
    is_killed: bool = False


class _Run:
    """One run of a test: its clients, its watch, and the totals."""

    def __init__(
        self, test: CrashTest, device: str, costs: Sequence[ModelCost], options: CrashOptions,
        driver: RunningDriver, log: IO[bytes],
    ) -> None:  # fmt: skip
        self._test, self._device, self._options, self._driver, self._log = test, device, options, driver, log
        self._duration_s = test.mlts_s if options.duration_s is None else options.duration_s
        models = affordable(costs, test)
        self._models = tuple(cost.name for cost in models)
        self._smallest = min(costs, key=lambda cost: cost.execute_s).name
        self._clients: list[_Client] = []
        self._end_ns = 0
        self.codes: Counter[str] = Counter()
        self.killed = 0

    def run(self) -> Observation:
        """Run the test; return its outcome. Blocks."""
        with DriverWatch(self._driver, self._device, self._smallest, self._options.grace_s) as watch:
            self._end_ns = time.monotonic_ns() + round(self._duration_s * 1e9)
            try:
                for number in range(self._test.processes):
                    self._start(number)
                found = self._wait(watch)
            finally:
                for client in self._clients:
                    watch.remove_worker(client.worker_pid)
                    client.handle.close()
            if found.outcome is CrashOutcome.SUCCESS:
                found = watch.finish() or found
        return found

    def _start(self, number: int) -> None:
        left_s = max(0.0, (self._end_ns - time.monotonic_ns()) / 1e9)
        test = self._test
        must_die = test.killed is KilledClients.ALL or (
            test.killed is KilledClients.SHARE and random.random() < test.killed_share and left_s > MIN_SPARE_S
        )
        kill_after_s = max(MIN_SPARE_S, random.uniform(0.25, 0.5) * self._duration_s) if must_die else None
        task = ClientTask(
            self._driver.socket, self._device, test.workload, left_s, test.threads, self._models, test.pause_s,
            test.graphs, self._options.seed, kill_after_s, self._options.dump_to, test.compiles_fully,
        )  # fmt: skip
        handle = ClientThread(task) if test.in_process else ClientChild(task, Path(self._log.name))
        self._clients.append(_Client(handle, number, must_die))

    def _wait(self, watch: DriverWatch) -> Observation:
        """Wait until all clients have ended, something else than success is observed, or the deadline passes."""
        deadline_ns = self._end_ns + round(self._options.grace_s * 1e9)
        while self._clients:
            self._poll()
            found = self._receive_all(watch) or watch.observe()
            if found is None and watch.exited_worker() is not None:
                found = self._receive_all(watch) or watch.exited_worker()
            if found is not None:
                return found
            if time.monotonic_ns() >= deadline_ns:
                silent = sum(client.result is None for client in self._clients)
                text = f"{silent} of {len(self._clients)} clients have not reported"
                return Observation(CrashOutcome.HANG, f"{text} {self._options.grace_s:g} s after the test's end")
        return Observation(CrashOutcome.SUCCESS, "")

    def _receive_all(self, watch: DriverWatch) -> Observation | None:
        for client in list(self._clients):
            if (found := self._receive(client, watch)) is not None:
                return found
        return None

    def _poll(self) -> None:
        poll = select.poll()
        for client in self._clients:
            poll.register(client.handle.connection, select.POLLIN)
        poll.poll(_POLL_MS)

    def _receive(self, client: _Client, watch: DriverWatch) -> Observation | None:
        """Handle the messages of a client, and its end."""
        label = f"client {client.number}"
        messages, is_closed = received_messages(client.handle.connection)
        for message in messages:
            if (found := self._handle(client, message, label, watch)) is not None:
                return found
        return self._ended(client, label, watch) if is_closed else None

    def _handle(self, client: _Client, message: ClientMessage, label: str, watch: DriverWatch) -> Observation | None:
        if message.state is ClientState.READY:
            client.worker_pid = message.worker_pid
            return watch.add_worker(message.worker_pid, label)
        if message.state is ClientState.KILLING:
            client.is_killed = True
            watch.remove_worker(client.worker_pid)
            return None
        client.result = message
        self.codes.update(message.codes)
        if message.state is ClientState.DRIVER_DIED:
            return Observation(CrashOutcome.CRASH, f"{label}: {message.reason}{_detail(watch)}")
        if message.state is ClientState.FAILURE:
            return Observation(CrashOutcome.FAILURE, f"{label}: {message.reason}")
        watch.remove_worker(client.worker_pid)
        return None

    def _ended(self, client: _Client, label: str, watch: DriverWatch) -> Observation | None:
        """Evaluate the end of a client: killed on purpose, after success, or a crash."""
        ending = client.handle.exit_text()
        client.handle.close()
        self._clients.remove(client)
        watch.remove_worker(client.worker_pid)
        if client.is_killed:
            self.killed += 1
            if self._test.killed is KilledClients.SHARE:
                self._start(client.number)  # another client takes its place
            return None
        if client.result is None:
            return Observation(CrashOutcome.CRASH, f"{label} {ending or 'ended'} without a result{self._last_line()}")
        if client.must_die and self._test.killed is KilledClients.ALL:
            return Observation(CrashOutcome.FAILURE, f"{label} ended before it was killed")
        if ending:
            return Observation(CrashOutcome.CRASH, f"{label} {ending} after its result")
        return None

    def _last_line(self) -> str:
        """Return the last line that clients wrote to stderr, for a reason."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        found = [line.strip() for line in lines if line.strip()]
        return f": {found[-1]}" if found else ""


def _detail(watch: DriverWatch) -> str:
    """Return the observation of the watch within a second: the driver's log tells how a worker ended."""
    end = time.monotonic() + _DETAIL_S
    while (observed := watch.observe()) is None and time.monotonic() < end:
        time.sleep(_POLL_MS / 1000)
    return "" if observed is None else f"; {observed.reason}"


Progress = Callable[[CrashTest, str], None]


def run_suite(
    tests: Sequence[CrashTest], devices: Sequence[str], names: Sequence[str], options: CrashOptions, started: Progress
) -> Iterator[CrashResult]:
    """Yield the result of each test on each device. `started` is called before each. Blocks between them.

    Raises the errors of `connect`.
    """
    for device in devices:
        costs = survey_device(device, names, options)
        for test in tests:
            started(test, device)
            try:
                yield run_crash_test(test, device, costs, options)
            except NnfmqError as error:
                yield CrashResult(device, test, CrashOutcome.CRASH, f"the driver: {error}")
