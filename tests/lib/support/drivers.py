"""Real processes for tests: drivers, applications, and their state as the kernel reports it.

A process is watched by a pidfd, so its exit is an event and its pid cannot be reused meanwhile. A driver is made busy
with SIGSTOP: a stopped driver reads no calls and sends no replies until it is resumed. All waits have a deadline.
`until` polls, because the kernel offers no event for a stop, a thread's sleep or an entry that disappears from /proc;
nothing else here polls.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn, Self

import numpy as np
import numpy.typing as npt
import pytest

import nnfmq
from nnfmq.base.paths import models_socket
from nnfmq.hal.errors import NnfmqError
from support.places import ROOT

LIMIT_S = 30.0
APPS = ROOT / "tests" / "end_to_end" / "apps"
DEAD_WITHIN_NS = 100_000_000  # from a process's death to the error at the other end

Shared = Callable[[AbstractContextManager[Any]], Any]
"""The fixture `shared`: enters a context for the tests of a module, and returns what it gives."""

_LOOKS_OFTEN = Path(__file__).parent / "looks_often"
_GONE = (FileNotFoundError, ProcessLookupError)
_SHARED_MEMORY = ("/memfd:", "/dev/shm/")


def until(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Poll `condition` until it is true, less often the longer it takes; fail with `what` at the limit."""
    begin = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - begin
        if waited_s > limit_s:
            pytest.fail(f"not within {limit_s:g} s: {what}", pytrace=False)
        time.sleep(min(0.001 + waited_s / 20, 0.01))


def at_least_once(attempt: Callable[[], bool], what: str, attempts: int = 20) -> None:
    """Fail with `what` unless an attempt returns True: during some of them another process may have had the CPU."""
    if not any(attempt() for _ in range(attempts)):
        pytest.fail(f"in none of {attempts} attempts: {what}", pytrace=False)


class Process:
    """A process, held by a pidfd. Close it, or use `with`; that does not affect the process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> int:
        """Send SIGKILL; return the time (monotonic, ns)."""
        now = time.monotonic_ns()
        self.send(signal.SIGKILL)
        return now

    def stop(self) -> None:
        """Stop all threads of the process, so that it reads nothing from any queue until `resume`."""
        self.send(signal.SIGSTOP)
        until(lambda: set(self.states()) == {"T"}, f"process {self.pid} stops")

    def resume(self) -> None:
        """Continue the stopped process."""
        self.send(signal.SIGCONT)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Keep the process stopped for the duration of the block."""
        self.stop()
        try:
            yield
        finally:
            with suppress(ProcessLookupError):  # killed meanwhile
                self.resume()

    def wait_for_end(self, limit_s: float = LIMIT_S) -> None:
        """Wait until the process has exited; fail at the limit."""
        if not self.has_exited(limit_s):
            pytest.fail(f"process {self.pid} still runs after {limit_s:g} s", pytrace=False)

    def has_exited(self, wait_s: float = 0.0) -> bool:
        """Wait up to `wait_s` for the process to exit; return whether it has."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(wait_s * 1000))

    def states(self) -> list[str]:
        """Return each thread's state as in /proc: R running, S sleeping, T stopped, ..."""
        return [thread_state(int(task), self.pid) for task in os.listdir(f"/proc/{self.pid}/task")]

    def descriptors(self) -> list[str]:
        """Return the targets of the process's fds, sorted, without the inode numbers of pipes and sockets."""
        folder = Path(f"/proc/{self.pid}/fd")
        found = []
        for entry in os.listdir(folder):
            with suppress(*_GONE):
                found.append(os.readlink(folder / entry).split(":[")[0])
        return sorted(found)

    def shared_mappings(self) -> list[str]:
        """Return the process's mappings of shared memory."""
        lines = Path(f"/proc/{self.pid}/maps").read_text().splitlines()
        return [line for line in lines if any(part in line for part in _SHARED_MEMORY)]

    def children(self) -> list[int]:
        """Return the pids of the process's children."""
        found: list[int] = []
        with suppress(*_GONE):
            for task in os.listdir(f"/proc/{self.pid}/task"):
                found += map(int, Path(f"/proc/{self.pid}/task/{task}/children").read_text().split())
        return sorted(found)

    def descendants(self) -> list[int]:
        """Return the pids of all descendants."""
        found = []
        for process in opened(self.children()):
            with process:
                found += [process.pid, *process.descendants()]
        return found

    def close(self) -> None:
        """Close the pidfd."""
        fd, self._pidfd = self._pidfd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def opened(pids: Iterable[int]) -> Iterator[Process]:
    """Yield those of the processes that still exist. The caller closes them."""
    for pid in pids:
        try:
            process = Process(pid)
        except ProcessLookupError:
            continue
        yield process


def thread_state(thread_id: int, pid: int | None = None) -> str:
    """Return the state of a thread of `pid`, default this process."""
    try:
        stat = Path(f"/proc/{pid or os.getpid()}/task/{thread_id}/stat").read_text()
    except _GONE:
        return "X"
    return stat.rpartition(")")[2].split()[0]


def process_name(pid: int) -> str:
    """Return a process's name, which tells the role of one of a driver; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except _GONE:
        return ""


class InThread:
    """A call that runs on a thread of this process, its result or exception, and the time of its end."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.value: Any = None
        self.error: BaseException | None = None
        self.ended_ns = 0

    @classmethod
    def start(cls, call: Callable[[], Any]) -> Self:
        """Start `call` on a new thread."""
        started = cls(call)
        started._thread.start()
        return started

    def _run(self) -> None:
        try:
            self.value = self._call()
        except (NnfmqError, OSError) as error:
            self.error = error
        self.ended_ns = time.monotonic_ns()

    @property
    def thread_id(self) -> int:
        """The kernel's id of the thread."""
        return self._thread.native_id or 0

    @property
    def is_running(self) -> bool:
        """Whether the call has not returned."""
        return self._thread.is_alive()

    def wait_until_asleep(self) -> None:
        """Wait until the kernel reports that the thread sleeps; fail if the call returns before."""
        until(lambda: not self.is_running or thread_state(self.thread_id) == "S", "the call sleeps")
        if not self.is_running:
            pytest.fail(f"the call has returned: {self.value!r}, {self.error!r}", pytrace=False)

    def wait(self, limit_s: float = LIMIT_S) -> Self:
        """Wait until the call has returned; fail at the limit."""
        self._thread.join(limit_s)
        if self._thread.is_alive():
            pytest.fail(f"the call still runs after {limit_s:g} s", pytrace=False)
        return self


@contextmanager
def aborting(barrier: threading.Barrier) -> Iterator[None]:
    """Break a barrier if a block fails, so that the other thread does not wait for it."""
    try:
        yield
    except BaseException:
        barrier.abort()
        raise


def wait_until_waiting(burst: nnfmq.Burst) -> None:
    """Wait until a thread of this process waits for a result of `burst`."""
    until(lambda: burst.channel.results.waiters > 0, "the client waits for its result")


@contextmanager
def interrupted_after(delay_s: float) -> Iterator[None]:
    """Let a signal handler raise KeyboardInterrupt in the block, and fail if the block ends without it."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, delay_s)
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGALRM, before)


def closer_threads() -> list[threading.Thread]:
    """Return the threads in which `nnfmq.compat` closes what an application has dropped."""
    return [thread for thread in threading.enumerate() if thread.name == "nnfmq-compat"]


def wait_for_closers() -> None:
    """Wait until `nnfmq.compat` has closed what was dropped before."""
    closers = closer_threads()
    until(lambda: not any(thread.is_alive() for thread in closers), "the models of nnfmq.compat are closed")


class Program:
    """A subprocess that reads and prints lines. `with` kills it at the end if it still runs."""

    def __init__(self, popen: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
        assert popen.stdin is not None and popen.stdout is not None
        self.popen = popen
        self.pid = popen.pid
        self._errors = errors
        self._stdin, self._stdout = popen.stdin, popen.stdout
        self._received = b""

    @classmethod
    def start(
        cls,
        arguments: Sequence[str | Path],
        environment: Mapping[str, str] | None = None,
        *,
        pass_fds: Sequence[int] = (),
    ) -> Self:
        """Start Python with `arguments` in a new session; it can import `support`."""
        errors = tempfile.TemporaryFile()  # noqa: SIM115  (the Program owns it)
        path = os.pathsep.join([str(ROOT / "tests" / "lib"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        try:
            popen = subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": path, **(environment or {})},
                start_new_session=True,
                pass_fds=pass_fds,
            )
        except BaseException:
            errors.close()
            raise
        return cls(popen, errors)

    def __repr__(self) -> str:
        return f"process {self.pid}, {self.popen.args!r}"

    def line(self, limit_s: float = LIMIT_S) -> str:
        """Return its next line of output, without the newline; fail at the limit or if there is no further line."""
        deadline = time.monotonic() + limit_s
        poll = select.poll()
        poll.register(self._stdout, select.POLLIN)
        while b"\n" not in self._received:
            if not poll.poll(max(0.0, (deadline - time.monotonic()) * 1000)):
                self._fail(f"{self} has printed no line within {limit_s:g} s and still runs")
            data = os.read(self._stdout.fileno(), 65536)
            if not data:
                self._fail(f"{self} {self._end_of_output()} without a further line")
            self._received += data
        line, self._received = self._received.split(b"\n", 1)
        return line.decode()

    def _end_of_output(self) -> str:
        try:
            return f"has exited with status {self.popen.wait(1)}"
        except subprocess.TimeoutExpired:
            return "has closed its standard output, and still runs,"

    def _fail(self, text: str) -> NoReturn:
        rest = f"\nits output after the last line: {self._received!r}" if self._received else ""
        pytest.fail(f"{text}{rest}\nits errors:\n{self.errors()}", pytrace=False)

    def tell(self, text: str = "") -> None:
        """Write a line to its standard input."""
        self._stdin.write(text.encode() + b"\n")
        self._stdin.flush()

    def end_input(self) -> None:
        """Close its standard input."""
        self._stdin.close()

    def errors(self) -> str:
        """Return its output to stderr so far."""
        return os.pread(self._errors.fileno(), 1 << 20, 0).decode(errors="replace")

    def interrupt(self) -> int:
        """Send SIGINT to its process group, as Ctrl-C in a terminal does; return the time (monotonic, ns)."""
        now = time.monotonic_ns()
        os.killpg(self.pid, signal.SIGINT)
        return now

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Wait for its exit and return the exit status; fail at the limit."""
        try:
            return self.popen.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._fail(f"{self} still runs after {limit_s:g} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.popen.kill()
        self.popen.wait()
        self._errors.close()
        self._stdout.close()
        with suppress(BrokenPipeError):
            self._stdin.close()


def app(name: str, *arguments: str | Path, environment: Mapping[str, str] | None = None) -> Program:
    """Start an application of tests/end_to_end/apps."""
    return Program.start(["-P", APPS / f"{name}.py", *arguments], environment)


def kill_worker(client: nnfmq.Client) -> None:
    """Kill the process that serves a client, and return when the client knows."""
    known = client.connection  # another thread of the client may have the next one soon
    with Process(client.worker_pid) as worker:
        worker.kill()
        worker.wait_for_end()
    until(lambda: not known.is_open, "the client knows")


class Daemon:
    """A running `nnfmq serve`, or the program that a test started instead."""

    def __init__(self, program: Program, path: Path) -> None:
        self.program = program
        self.path = path
        self.process = Process(program.pid)

    @classmethod
    def start(
        cls,
        path: Path,
        *,
        environment: Mapping[str, str] | None = None,
        arguments: Sequence[str | Path] | None = None,
        options: Sequence[str | Path] = (),
    ) -> Self:
        """Start the daemon at `path`, with `options` of `nnfmq serve`, and wait until it listens."""
        if arguments is None:
            arguments = ["-P", "-m", "nnfmq", "serve", "--socket", path, *options]
        program = Program.start(arguments, environment)
        try:
            assert program.line() == f"nnfmq: listening on {path}"
            return cls(program, path)
        except BaseException:
            program.__exit__(None, None, None)
            raise

    def compile_servers(self) -> list[int]:
        """Return the pids of its compile server, and of one that ends."""
        return [pid for pid in self.process.children() if process_name(pid) == "nnfmq-compilers"]

    def connect(self, *, recover: bool = False) -> nnfmq.Client:
        """Return a new client, whose worker is ready. By default its calls raise DeadObject if the worker dies."""
        return nnfmq.connect(self.path, timeout=LIMIT_S, recover=recover)

    def end(self) -> None:
        """Send SIGTERM, unless the daemon has exited: it must exit with status 0 and leave no process or file."""
        if self.process.has_exited():
            return
        with ExitStack() as stack:
            others = [stack.enter_context(process) for process in opened(self.process.descendants())]
            self.process.send(signal.SIGTERM)
            status = self.program.wait()
            for process in others:
                process.wait_for_end()
        assert (status, "Traceback" in self.program.errors()) == (0, False), self.program.errors()
        assert not self.path.exists()
        assert not models_socket(self.path).exists()

    def kill(self) -> None:
        """Send SIGKILL. The test cleans up the files that the daemon leaves."""
        self.process.kill()
        self.program.wait()

    def close(self) -> None:
        """Close the handles of a daemon that has exited."""
        self.process.close()
        self.program.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def running_daemon(
    path: Path,
    *,
    environment: Mapping[str, str] | None = None,
    arguments: Sequence[str | Path] | None = None,
    options: Sequence[str | Path] = (),
    models: Path | None = None,
) -> Iterator[Daemon]:
    """Run a daemon for the duration of the block and check that it exits properly.

    `models` is a directory whose models it serves by name, see `support.model_folders`. It looks there often, unless
    `environment` has a sitecustomize.py.
    """
    named: Sequence[str | Path] = () if models is None else ("--models", models)
    if models is not None:
        environment = _looking_often(environment or {})
    daemon = Daemon.start(path, environment=environment, arguments=arguments, options=[*options, *named])
    try:
        yield daemon
        daemon.end()
    finally:
        daemon.close()


def _looking_often(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a driver whose model repository imports `_LOOKS_OFTEN/sitecustomize.py`."""
    path = environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, [path, str(_LOOKS_OFTEN)]))}


@contextmanager
def short_folder() -> Iterator[Path]:
    """Create a folder for a socket, because the paths of pytest's folders are too long for one."""
    folder = Path(tempfile.mkdtemp(prefix="nnfmq-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def one(value: float) -> npt.NDArray[np.float32]:
    """Return an input of the null model, which is also its expected output."""
    return np.array([value], np.float32)


def shared_memory_names() -> set[str]:
    """Return the names of shared memory on this machine; a folder there is another program's, no memory."""
    with os.scandir("/dev/shm") as entries:
        return {entry.name for entry in entries if entry.is_file()}
