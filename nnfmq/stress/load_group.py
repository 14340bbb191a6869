"""Start processes that load the machine, tell them when, and end them."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from nnfmq.measure.failures import BenchmarkFailed
from nnfmq.measure.runner_group import runner_environment

__all__ = ["LoadGroup", "MachineLoad", "started_loads"]

_READY_S = 120.0
_END_S = 30.0


class MachineLoad(NamedTuple):
    """A load of `load_process.LOADS`, its CPU (None: any), and its begin and end after the begin of the trial, in s."""

    kind: str
    cpu: int | None
    begin_s: float
    end_s: float


class LoadGroup:
    """Processes that wait for the begin of a trial."""

    def __init__(self, loads: Sequence[MachineLoad], processes: Sequence[subprocess.Popen[str]]) -> None:
        self._loads = loads
        self._processes = processes

    def begin(self, begin_ns: int) -> None:
        """Tell the processes the begin of the trial on the monotonic clock."""
        for load, process in zip(self._loads, self._processes, strict=True):
            assert process.stdin is not None
            times = (begin_ns + round(seconds * 1e9) for seconds in (load.begin_s, load.end_s))
            print(*times, file=process.stdin, flush=True)


@contextmanager
def started_loads(loads: Sequence[MachineLoad], socket: str, seed: int) -> Iterator[LoadGroup]:
    """Start a process for each load, and yield them when all are ready; at exit they are killed and reaped.

    Raises:
        BenchmarkFailed: If a process does not become ready.
    """
    processes: list[subprocess.Popen[str]] = []
    try:
        for load in loads:
            cpu = "-" if load.cpu is None else str(load.cpu)
            command = [sys.executable, "-P", "-m", "nnfmq.stress.load_process", load.kind, cpu, socket, str(seed)]
            processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                    env=runner_environment(),
                )
            )
        for load, process in zip(loads, processes, strict=True):
            _wait_until_ready(load, process)
        yield LoadGroup(loads, processes)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate(timeout=_END_S)


def _wait_until_ready(load: MachineLoad, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], _READY_S)
    if not readable or process.stdout.readline() != "ready\n":
        raise BenchmarkFailed(f"the load {load.kind} did not start")
