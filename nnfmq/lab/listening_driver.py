"""A listening driver (`nnfmq serve`) for benchmarks, the stress test and the crash tests."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnfmq.base.processes import child_environment
from nnfmq.lab.child_processes import BenchmarkFailed, started_child

START_S = 120.0
STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class Daemon:
    """A driver that listens at `socket`; `pid` is the supervisor's. Its log is in the file `log`."""

    pid: int
    socket: str
    log: Path

    @property
    def folder(self) -> Path:
        """The folder of the driver's files."""
        return self.log.parent


@contextmanager
def started_daemon(folder: Path, environment: Mapping[str, str] | None = None) -> Iterator[Daemon]:
    """Run `nnfmq serve` with its socket, its log and its cache directory in `folder`, in a session of its own.

    `environment` is added to that of this process. At exit, or when this process is killed, the driver gets SIGTERM; at
    exit also SIGKILL 30 s later.

    Raises:
        BenchmarkFailed: If the driver does not start.
    """
    path, log = folder / "driver.sock", folder / "driver.log"
    command = [sys.executable, "-P", "-m", "nnfmq.lab.driver_program", str(path)]
    added = {"XDG_CACHE_HOME": str(folder / "cache"), **(environment or {})}
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True,
            env=child_environment(added), start_new_session=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], START_S)
            if not ready or "listening" not in process.stdout.readline():
                text = log.read_text(errors="replace").strip() or "its log is empty"
                raise BenchmarkFailed(f"the driver did not start: {text}")
            yield Daemon(process.pid, str(path), log)
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


# ----------------------------------------------------------------------------------------------------------------------
# A folder, and a driver in it, of which nothing remains, also if the process that wants them is killed.
#
# A child process has them, and outlives this one until it has removed them.


@contextmanager
def kept_folder() -> Iterator[Path]:
    """Yield a new folder; at exit, or when this process is killed, it is removed with what is in it.

    Raises:
        BenchmarkFailed: If it cannot be made.
    """
    with started_child(_keep_folder, name="the temporary folder", cleans_up=True) as child:
        yield child.receive(START_S)


@contextmanager
def kept_daemon(environment: Mapping[str, str] | None = None) -> Iterator[Daemon]:
    """Run a driver as `started_daemon` does, in a new folder; at exit, or when this process is killed, both go.

    Raises:
        BenchmarkFailed: If the driver does not start.
    """
    with started_child(_keep_daemon, environment, name="the driver", cleans_up=True) as child:
        yield child.receive(START_S + STOP_S)


def _keep_folder(connection: Any) -> None:
    with tempfile.TemporaryDirectory(prefix="nnfmq-") as folder:
        connection.send(Path(folder))
        connection.recv()  # nothing comes: until the end


def _keep_daemon(connection: Any, environment: Mapping[str, str] | None) -> None:
    with tempfile.TemporaryDirectory(prefix="nnfmq-") as name, started_daemon(Path(name), environment) as daemon:
        connection.send(daemon)
        connection.recv()
