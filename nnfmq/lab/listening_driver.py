"""A listening driver (`nnfmq serve`) for the benchmarks and the stress test."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nnfmq.lab.child_processes import BenchmarkFailed

START_S = 120.0
STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class Daemon:
    """A driver that listens at `socket`; `pid` is the supervisor's. Its log is in the file `log`."""

    pid: int
    socket: str
    log: Path


@contextmanager
def started_daemon(folder: Path, environment: Mapping[str, str] | None = None) -> Iterator[Daemon]:
    """Run `nnfmq serve` with its socket, its log and its cache directory in `folder`.

    `environment` is added to that of this process. At exit the driver gets SIGTERM, and SIGKILL 30 s later.

    Raises:
        BenchmarkFailed: If the driver does not start.
    """
    path, log = folder / "driver.sock", folder / "log"
    command = [sys.executable, "-P", "-m", "nnfmq", "serve", "--socket", str(path)]
    added = {"XDG_CACHE_HOME": str(folder / "cache"), **(environment or {})}
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file, text=True, env=os.environ | added
        )
        try:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], START_S)
            if not ready or "listening" not in process.stdout.readline():
                raise BenchmarkFailed(f"the driver did not start: {log.read_text()}")
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
    if process.stdout is not None:
        process.stdout.close()
