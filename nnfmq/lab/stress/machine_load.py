"""Load of the machine while the clients execute: processes that compute, take memory, or have models compiled.

Such a process imports little, so that several are soon ready. At the end of its load it waits until it is killed: the
exit of an interpreter, and that of a client's worker, would be a load of its own.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from nnfmq.base.processes import set_name
from nnfmq.lab.child_processes import BenchmarkFailed, FunctionProcess, started_child

__all__ = ["LoadGroup", "MachineLoad", "started_loads"]

_READY_S = 120.0
_CHURN_BYTES = 64 << 20
_VARIANTS = 40  # of a seed, before those of the next one
_CGROUPS = "/sys/fs/cgroup"


class MachineLoad(NamedTuple):
    """A load: `cpu` computes, `churn` takes and returns memory, `fill` takes half of the available memory.

    `compilation` is another client, which prepares models.

    `cpu` is its CPU (None: any); begin and end are after the begin of the trial, in s.
    """

    kind: str
    cpu: int | None
    begin_s: float
    end_s: float


class LoadGroup:
    """Processes that wait for the begin of a trial."""

    def __init__(self, loads: Sequence[MachineLoad], processes: Sequence[FunctionProcess]) -> None:
        self._loads = loads
        self._processes = processes

    def begin(self, begin_ns: int) -> None:
        """Tell the processes the begin of the trial on the monotonic clock."""
        for load, process in zip(self._loads, self._processes, strict=True):
            process.send(tuple(begin_ns + round(seconds * 1e9) for seconds in (load.begin_s, load.end_s)))


@contextmanager
def started_loads(loads: Sequence[MachineLoad], socket: str, seed: int) -> Iterator[LoadGroup]:
    """Start a process for each load, and yield them when all are ready; at exit they are killed and reaped.

    `socket` is the driver's, for compilations, which differ for each `seed`.

    Raises:
        BenchmarkFailed: If a process does not become ready.
    """
    with ExitStack() as stack:
        started = [started_child(_load, load, socket, seed, name=f"the load {load.kind}") for load in loads]
        processes = [stack.enter_context(each) for each in started]
        for process in processes:
            stack.callback(process.kill)
        for process in processes:
            _wait_until_ready(process)
        yield LoadGroup(loads, processes)


def _wait_until_ready(process: FunctionProcess) -> None:
    try:
        process.receive(_READY_S)
    except BenchmarkFailed as error:
        raise BenchmarkFailed(f"{process.name} did not start: {error}") from None


# ----------------------------------------------------------------------------------------------------------------------
# The process of a load.


def _load(connection: Any, load: MachineLoad, socket: str, seed: int) -> None:
    set_name(f"nnfmq-{load.kind}")
    if load.cpu is not None:
        os.sched_setaffinity(0, {load.cpu})
    run = {"cpu": _compute, "churn": _churn, "fill": _fill}.get(load.kind) or _compilation(socket, seed)
    connection.send("ready")
    begin_ns, until_ns = connection.recv()
    time.sleep(max(0, begin_ns - time.monotonic_ns()) / 1e9)
    run(until_ns)
    connection.recv()  # nothing comes: until the end


def _compute(until_ns: int) -> None:
    while time.monotonic_ns() < until_ns:
        pass


def _churn(until_ns: int) -> None:
    while time.monotonic_ns() < until_ns:
        bytearray(_CHURN_BYTES)[::4096] = b"\1" * (_CHURN_BYTES // 4096)


def _fill(until_ns: int) -> None:
    pieces: list[bytearray] = []
    count = _available_bytes() // 2 // _CHURN_BYTES
    while len(pieces) < count and time.monotonic_ns() < until_ns:
        pieces.append(bytearray(_CHURN_BYTES))
        pieces[-1][::4096] = b"\1" * (_CHURN_BYTES // 4096)
    time.sleep(max(0, until_ns - time.monotonic_ns()) / 1e9)


def _available_bytes() -> int:
    """Return the memory that this process could take without swapping: of the machine, and within its cgroups."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    values = dict(line.split(":", 1) for line in lines)
    found = [1024 * int(values["MemAvailable"].split()[0])]
    group = PurePosixPath(Path("/proc/self/cgroup").read_text(encoding="utf-8").rpartition("::")[2].strip() or "/")
    for each in (group, *group.parents):
        folder = Path(f"{_CGROUPS}{each}")
        with suppress(OSError, ValueError):  # the root has no limit, and `max` is none
            found.append(int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text()))
    return max(0, min(found))


def _compilation(socket: str, seed: int) -> Callable[[int], None]:
    """Return a load that compiles the packaged model for another batch each time, so that no cache has it."""
    from nnfmq.client.connection.connect import connect
    from nnfmq.data import example_path
    from nnfmq.importers import load as load_model

    client, path = connect(socket), example_path("digits.tflite")
    batches = itertools.count(2 + seed * _VARIANTS)
    models = (load_model(path, shapes={0: (batch, 8, 8, 1)}) for batch in batches)

    def load(until_ns: int) -> None:
        for model in models:
            if time.monotonic_ns() >= until_ns:
                break
            client.prepare(model, preference="sustained_speed", progress=lambda done, total: None).close()

    return load
