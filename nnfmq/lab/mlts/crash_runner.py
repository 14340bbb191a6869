"""Run crash tests: start their clients, watch them and the driver, and report the first outcome that counts.

A test ends when all of its clients have reported success, at the first other outcome, or at its deadline, which is the
duration and a grace period after its start: then it hangs. Each test of the suite's own driver gets a new one. A
message of a client decides only the outcome of its test.
"""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from nnfmq.client.connection.connect import connect
from nnfmq.client.connection.device import Device
from nnfmq.hal.errors import DeadObject, NnfmqError
from nnfmq.lab.mlts.crash_client import WorkloadContext, run_client
from nnfmq.lab.mlts.crash_tests import (
    LINE_BYTES_MAX,
    ClientMessage,
    ClientState,
    ClientTask,
    CrashOutcome,
    CrashTest,
    KilledClients,
    decode_message,
    encode,
)
from nnfmq.lab.mlts.driver_watch import DriverWatch, Observation, RunningDriver
from nnfmq.lab.mlts.stress_models import ModelCost, affordable, survey

__all__ = [
    "ClientChild",
    "ClientMessages",
    "ClientThread",
    "CrashClient",
    "CrashOptions",
    "CrashResult",
    "OwnDriver",
    "driver_for",
    "list_devices",
    "own_driver",
    "run_crash_test",
    "run_suite",
    "survey_device",
]


# ----------------------------------------------------------------------------------------------------------------------
# The processes of a crash test: client processes, clients in this process, and the suite's own driver.
#
# Both kinds of clients send messages over a pipe, which the runner polls. Processes run in sessions of their own, so
# that Ctrl-C reaches the runner alone, which ends them. They end by themselves when the runner is killed: a client
# because its stdin is closed, the driver see `driver_program`.


DRIVER_START_S = 60.0
_DRIVER_END_S = 10.0  # it gives its workers 4 s
_CLIENT_END_S = 5.0


class ClientMessages:
    """The receiving end of a client's messages. Owns the fd; close it."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._received = b""
        self.is_closed = False
        """Whether the client has closed its end: it sends no more messages."""

    def fileno(self) -> int:
        """Return the fd, to poll it."""
        return self._fd

    def read(self) -> list[ClientMessage]:
        """Return the complete messages that have arrived, without blocking.

        Raises:
            msgspec.DecodeError: If the client wrote something else.
            DeadObject: If a message is too long.
        """
        with suppress(BlockingIOError):
            while data := os.read(self._fd, 65536):
                self._received += data
                if len(self._received) > LINE_BYTES_MAX:
                    raise DeadObject(f"a client sent a message of more than {LINE_BYTES_MAX} bytes")
            self.is_closed = True
        *lines, self._received = self._received.split(b"\n")
        return [decode_message(line) for line in lines]

    def close(self) -> None:
        """Close the fd. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class CrashClient(Protocol):
    """A client of a crash test. Close it: that ends it if it still runs."""

    pipe: ClientMessages

    def kill(self) -> None:
        """End the client now."""
        ...

    def exit_text(self) -> str:
        """Return how the client ended; "" if it ended normally. Blocks a moment."""
        ...

    def close(self) -> None:
        """End the client and release its resources. Idempotent."""
        ...


class ClientChild:
    """A client in a process of its own, whose stderr is appended to a file."""

    def __init__(self, task: ClientTask, log: IO[bytes]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-X", "faulthandler", "-m", "nnfmq.lab.mlts.crash_client"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=_environment(), start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self.pipe = ClientMessages(os.dup(self._process.stdout.fileno()))
        self._process.stdout.close()
        with suppress(BrokenPipeError):  # it has exited, which its pipe shows
            self._process.stdin.write(encode(task))
            self._process.stdin.flush()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def exit_text(self) -> str:
        """Return the signal or exit status; a process that does not exit after its last message is killed."""
        try:
            status = self._process.wait(_CLIENT_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return f"did not exit within {_CLIENT_END_S:g} s after it had closed its output"
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"exited with status {status}" if status else ""

    def close(self) -> None:
        """Kill and reap the process."""
        self._process.kill()
        self._process.wait()
        self.pipe.close()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()


class ClientThread:
    """A client in this process. `kill` closes its connection, which ends all of its calls."""

    def __init__(self, task: ClientTask) -> None:
        fd, self._sink = os.pipe()
        self.pipe = ClientMessages(fd)
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
            os.close(self._sink)

    def _send(self, message: ClientMessage) -> None:
        with suppress(BrokenPipeError):
            os.write(self._sink, encode(message))

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
        """Close the connection and wait for the thread."""
        self.kill()
        self._thread.join(_CLIENT_END_S)
        self.pipe.close()


class OwnDriver:
    """A driver that the suite has started: socket, pid and log."""

    def __init__(self, process: subprocess.Popen[bytes], socket: Path, log: Path) -> None:
        self._process = process
        self.pid = process.pid
        self.socket = socket
        self.log = log

    def kill(self) -> None:
        """Send SIGKILL, for tests."""
        self._process.kill()


@contextmanager
def own_driver(folder: Path, variables: Mapping[str, str]) -> Iterator[OwnDriver]:
    """Start `nnfmq serve` in a folder until the block ends, with more environment variables. Blocks.

    Raises:
        DeadObject: If it does not listen in time.
    """
    socket, log = folder / "d.sock", folder / "driver.log"
    with ExitStack() as stack:
        errors = stack.enter_context(log.open("wb"))
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "nnfmq.lab.mlts.driver_program", str(socket)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            env=_environment() | dict(variables), start_new_session=True,
        )  # fmt: skip
        stack.callback(_end_driver, process)
        assert process.stdout is not None
        if not _has_line(process.stdout, DRIVER_START_S):
            text = log.read_text(errors="replace").strip()
            raise DeadObject(f"the driver does not listen within {DRIVER_START_S:g} s: {text or 'its log is empty'}")
        yield OwnDriver(process, socket, log)


def _has_line(stream: IO[bytes], limit_s: float) -> bool:
    """Wait for a line; return False if the limit passes or the stream ends."""
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    return bool(poll.poll(limit_s * 1000)) and bool(os.read(stream.fileno(), 4096))


def _end_driver(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_DRIVER_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()


def _environment() -> dict[str, str]:
    """Return an environment in which children import the same packages as this process."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


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
    """How to run crash tests.

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
    cache = {"XDG_CACHE_HOME": str(folder), "XDG_STATE_HOME": str(folder)}
    variables = (
        cache | _STACKS | (_WITHOUT_CACHE if test is not None and test.needs_compiler else {}) | options.variables
    )
    with own_driver(folder, variables) as driver:
        yield RunningDriver(str(driver.socket), driver.pid, driver.log, is_own=True)


def list_devices(options: CrashOptions) -> list[str]:
    """Return the names of the devices that are AVAILABLE. Blocks. Raises the errors of `connect`."""
    from nnfmq.hal.types import DeviceStatus

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
        handle = ClientThread(task) if test.in_process else ClientChild(task, self._log)
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
            poll.register(client.handle.pipe, select.POLLIN)
        poll.poll(_POLL_MS)

    def _receive(self, client: _Client, watch: DriverWatch) -> Observation | None:
        """Handle the messages of a client, and its end."""
        label = f"client {client.number}"
        try:
            messages = client.handle.pipe.read()
        except (msgspec.DecodeError, DeadObject) as error:
            return Observation(CrashOutcome.FAILURE, f"{label} sent an invalid message: {error}")
        for message in messages:
            if (found := self._handle(client, message, label, watch)) is not None:
                return found
        return self._ended(client, label, watch) if client.handle.pipe.is_closed else None

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
    """Return what the watch observes within a second: the driver's log tells how a worker ended."""
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
