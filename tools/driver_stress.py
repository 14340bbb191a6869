"""Stress one driver with clients that make random calls, and check that nothing fails or leaks.

    python tools/driver_stress.py                         # 8 processes with 4 threads each, 5 minutes
    python tools/driver_stress.py --processes 2 --seconds 10 --json
    python tools/driver_stress.py --kill                  # also kills clients at random times

The clients connect, prepare, execute, create bursts, release and disconnect. Each output is compared with NumPy's, and
each call has a list of statuses that it may end with. One more client, the canary, makes the same calls but stays
connected, so that its worker lives during the whole run. Before and after, the tool counts file descriptors, threads,
processes and shared mappings of the supervisor and of the canary's worker, and the worker's private memory. The exit
status is 0 only if all outputs were right, every status was expected, no worker died, the counts are equal, and the
private memory has not increased by 32 MiB or more.
"""

from __future__ import annotations

import argparse
import os
import random
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import nnfmq
from nnfmq.base.processes import descendants
from nnfmq.cli.console import console, print_json, table
from nnfmq.driver.session.session import POOL_THREADS
from nnfmq.hal.types import (
    DataLocation,
    LifeTime,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
    Priority,
    Subgraph,
)
from nnfmq.lab.child_processes import BenchmarkFailed, FunctionProcess, started_child
from nnfmq.lab.listening_driver import started_daemon
from nnfmq.lab.placement import memory_of

# ---- one client process


LIMIT_S = 60.0
_FUNCTIONS: dict[OperationType, Callable[[Any, Any], Any]] = {
    OperationType.ADD: lambda a, b: a + b,
    OperationType.MUL: lambda a, b: a * b,
    OperationType.SUB: lambda a, b: a - b,
}
_SIZES = (1, 7, 1000, 50_000)  # elements; the largest does not fit into a socket's buffer


@dataclass
class Tally:
    """One thread's calls by kind, expected statuses by kind and name, and failures."""

    calls: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def binary_model(code: OperationType, count: int) -> Model:
    """Return a model of one operation on two float32 vectors of `count` elements."""
    tensor = OperandType.TENSOR_FLOAT32
    ends = (LifeTime.SUBGRAPH_INPUT, LifeTime.SUBGRAPH_INPUT, LifeTime.SUBGRAPH_OUTPUT)
    vectors = [Operand(tensor, (count,), lifetime=lifetime) for lifetime in ends]
    none = Operand(OperandType.INT32, lifetime=LifeTime.CONSTANT_COPY, location=DataLocation(0, 0, 4))
    operands = (vectors[0], vectors[1], none, vectors[2])
    run_client = Subgraph(operands, (Operation(code, (0, 1, 2), (3,)),), (0, 1), (3,))
    return Model(run_client, operand_values=struct.pack("<i", 0))


class StressClient:
    """One thread's connection, prepared models and bursts, and the random choice of its next call."""

    def __init__(self, path: str, seed: int, *, stays_connected: bool = False) -> None:
        self._path = path
        self._stays_connected = stays_connected  # never disconnects before `run` ends
        self._random = random.Random(seed)
        self._numbers = np.random.default_rng(seed)
        self._client: nnfmq.Client | None = None
        self._models: list[tuple[nnfmq.PreparedModel, OperationType, int]] = []
        self._bursts: list[tuple[nnfmq.Burst, OperationType, int]] = []
        self.tally = Tally()

    def call_at_random(self) -> None:
        """Make one random call. A status that is not expected for it is recorded as a failure."""
        if self._client is None:
            self._call_checked("connect", self._connect, (nnfmq.ResourceExhausted,))
        elif not self._models or self._random.random() < 0.05:
            self._call_checked("prepare", self._prepare, (nnfmq.MissedDeadline,))
        else:
            kind, work, expected = self._random.choices(
                (
                    ("execute", self._execute, (nnfmq.MissedDeadline,)),
                    ("burst", self._burst, (nnfmq.MissedDeadline,)),
                    ("configure", self._configure, ()),
                    ("close burst", self._close_burst, ()),
                    ("release", self._release, ()),
                    ("disconnect", self._disconnect, ()),
                ),
                (40, 40, 8, 5, 4, 0 if self._stays_connected else 1),
            )[0]
            self._call_checked(kind, work, expected)

    @property
    def worker_pid(self) -> int:
        """The pid of the worker that serves this connection."""
        assert self._client is not None
        return self._client.worker_pid

    def prepare_concurrently(self) -> None:
        """Prepare models concurrently, so that the worker starts all threads that it may have."""
        assert self._client is not None
        device = self._client.device("reference", timeout=LIMIT_S)
        model = binary_model(next(iter(_FUNCTIONS)), _SIZES[0])
        with ThreadPoolExecutor(_CONCURRENT_CALLS) as pool:
            for prepared in pool.map(lambda _: device.prepare(model, timeout=LIMIT_S), range(_CONCURRENT_CALLS)):
                prepared.close()

    def release_all(self) -> None:
        """Close all bursts and prepared models, but not the connection."""
        for burst, _, _ in self._bursts:
            with suppress(nnfmq.NnfmqError):
                burst.close()
        for model, _, _ in self._models:
            model.close()
        self._models, self._bursts = [], []

    def _call_checked(self, kind: str, work: Callable[[], None], expected: tuple[type[Exception], ...]) -> None:
        self.tally.calls[kind] += 1
        try:
            work()
        except expected as error:
            self.tally.statuses[f"{kind}: {type(error).__name__}"] += 1
        except nnfmq.NnfmqError as error:
            self.tally.failures.append(f"{kind}: {type(error).__name__}: {error}")
            self._disconnect()

    def _connect(self) -> None:
        self._client = nnfmq.connect(self._path, timeout=LIMIT_S)

    def _prepare(self) -> None:
        assert self._client is not None
        code, count = self._random.choice(list(_FUNCTIONS)), self._random.choice(_SIZES)
        timeout = self._random.choice((LIMIT_S, LIMIT_S, 0.0001))
        priority = self._random.choice(list(Priority))
        device = self._client.device("reference", timeout=LIMIT_S)
        self._models.append(
            (device.prepare(binary_model(code, count), priority=priority, timeout=timeout), code, count)
        )

    def _execute(self) -> None:
        model, code, count = self._random.choice(self._models)
        timeout = self._random.choice((LIMIT_S, LIMIT_S, LIMIT_S, 0.0005))
        self._check("execute", code, count, lambda a, b: model.execute(a, b, timeout=timeout))

    def _burst(self) -> None:
        if not self._bursts:
            self._configure()
        burst, code, count = self._random.choice(self._bursts)
        timeout = self._random.choice((LIMIT_S, LIMIT_S, LIMIT_S, 0.0001))
        for _ in range(self._random.randint(1, 20)):
            self._check("burst", code, count, lambda a, b: burst.execute(a, b, timeout=timeout))

    def _check(self, kind: str, code: OperationType, count: int, execute: Callable[[Any, Any], Any]) -> None:
        a, b = self._numbers.standard_normal((2, count), np.float32)
        (found,) = execute(a, b)
        if not np.array_equal(found, _FUNCTIONS[code](a, b)):
            self.tally.failures.append(f"{kind}: wrong output of {code.name} of {count}")

    def _configure(self) -> None:
        model, code, count = self._random.choice(self._models)
        self._bursts.append((model.burst(timeout=LIMIT_S), code, count))
        if len(self._bursts) > 4:
            self._close_burst()

    def _close_burst(self) -> None:
        if self._bursts:
            self._bursts.pop(self._random.randrange(len(self._bursts)))[0].close()

    def _release(self) -> None:
        self._models.pop(self._random.randrange(len(self._models)))[0].close()  # its bursts stay valid

    def _disconnect(self) -> None:
        self.release_all()
        if self._client is not None:
            self._client.close()
        self._client = None

    def run(self, until: float) -> None:
        """Make random calls until `until` (monotonic clock, seconds), then disconnect."""
        while time.monotonic() < until:
            self.call_at_random()
        self._disconnect()


def run_client(results: Any, path: str, seed: int, seconds: int, threads: int) -> None:
    """Run the threads for that time and send their tallies added up. Entry point of a client process."""
    until = time.monotonic() + seconds
    clients = [StressClient(path, seed * 1000 + number) for number in range(threads)]
    running = [threading.Thread(target=client.run, args=(until,)) for client in clients]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    tallies = [client.tally for client in clients]
    calls = sum((tally.calls for tally in tallies), Counter())
    statuses = sum((tally.statuses for tally in tallies), Counter())
    failures = [failure for tally in tallies for failure in tally.failures]
    results.send({"calls": dict(calls), "statuses": dict(statuses), "failures": failures})


# ---- the program


TIMEOUT_S = 120.0
_WARM_UPS_MAX = 100
_CONCURRENT_CALLS = 32
MAX_INCREASE_KIB = 32 * 1024  # of the canary's worker; the memory that malloc keeps differs from run to run


class StressFailed(Exception):
    """The run has no result, because a client or the canary's worker ended early."""


@dataclass
class Totals:
    """The calls, expected statuses and failures of all clients, and the number of killed clients."""

    calls: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    killed: int = 0

    def add(self, report: dict[str, Any]) -> None:
        """Add one client's report."""
        self.calls.update(report["calls"])
        self.statuses.update(report["statuses"])
        self.failures += report["failures"]


def count_resources(pid: int) -> dict[str, Any]:
    """Return the numbers of file descriptors, descendants and shared mappings of a process, and its threads' names."""
    folder = Path(f"/proc/{pid}")
    maps = (folder / "maps").read_text()
    return {
        "descriptors": len(os.listdir(folder / "fd")),
        "threads": _thread_names(pid),
        "processes": len(descendants(pid)),
        "shared mappings": sum("/memfd:" in line or "/dev/shm/" in line for line in maps.splitlines()),
    }


def _thread_names(pid: int) -> list[str]:
    return sorted((task / "comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir())


def stress(options: argparse.Namespace) -> dict[str, Any]:
    """Run the stress test and return its report. Blocks until it is done.

    Raises:
        BenchmarkFailed: If the driver does not start.
        StressFailed: If a client process fails.
    """
    with tempfile.TemporaryDirectory(prefix="nnfmq-") as name:
        folder = Path(name)
        with started_daemon(folder) as daemon:
            canary = StressClient(daemon.socket, options.seed, stays_connected=True)
            canary.call_at_random()  # the first call connects
            worker = canary.worker_pid
            _warm_up(canary)
            before, kib_before = _stable_counts(daemon.pid, worker, None), _private_kib(worker)
            total = _run_clients(options, daemon.socket, canary)
            canary.release_all()
            after, kib_after = _stable_counts(daemon.pid, worker, before), _private_kib(worker)
            total.add({"calls": {}, "statuses": canary.tally.statuses, "failures": canary.tally.failures})
            canary.run(0)  # a time in the past: only disconnects
        worker_deaths = [line for line in daemon.log.read_text().splitlines() if "ended with status" in line]
    return {
        "calls": dict(total.calls), "statuses": dict(total.statuses), "killed": total.killed,
        "failures": total.failures, "worker_deaths": worker_deaths, "before": before, "after": after,
        "worker_private_kib": [kib_before, kib_after],
        "ok": not (total.failures or worker_deaths) and before == after and kib_after - kib_before < MAX_INCREASE_KIB,
    }  # fmt: skip


def _private_kib(pid: int) -> int:
    memory = memory_of(pid)
    if memory is None:
        raise StressFailed("the canary's worker has died")
    return memory.private_dirty // 1024


def _warm_up(canary: StressClient) -> None:
    """Make all kinds of calls once, so that resources which a worker creates only once exist before the counting."""
    for _ in range(200):
        canary.call_at_random()
    for _ in range(_WARM_UPS_MAX):  # a worker starts a further thread only if all others are busy
        canary.prepare_concurrently()
        if sum(name.startswith("nnfmq-session-") for name in _thread_names(canary.worker_pid)) == POOL_THREADS:
            break
    canary.release_all()


def _stable_counts(supervisor: int, worker: int, wanted: dict[str, Any] | None) -> dict[str, Any]:
    """Return the counts, as soon as they are `wanted` (None = those of a second before), or 10 s have passed.

    The wait is needed because the supervisor reaps a worker some time after its exit, and a worker closes a burst some
    time after its model.
    """
    end, last = time.monotonic() + 10, wanted
    while True:
        found = {"supervisor": count_resources(supervisor), "worker": count_resources(worker)}
        if found == last or time.monotonic() > end:
            return found
        if wanted is None:
            last = found
        time.sleep(0.05 if wanted else 1.0)


def _run_clients(options: argparse.Namespace, path: str, canary: StressClient) -> Totals:
    total, until = Totals(), time.monotonic() + options.seconds
    chance = random.Random(options.seed)
    with ExitStack() as stack:

        def started(number: int, seconds: int) -> FunctionProcess:
            words = path, options.seed * 100_000 + number + 1, seconds, options.threads
            return stack.enter_context(started_child(run_client, *words))

        clients = {number: started(number, options.seconds) for number in range(options.processes)}
        while time.monotonic() < until:
            canary.call_at_random()
            if options.kill and chance.random() < 0.01:
                number = chance.choice(list(clients))
                clients[number].kill()
                total.killed += 1
                left = max(1, int(until - time.monotonic()))
                clients[number] = started(number + options.processes * total.killed, left)
        for client in clients.values():
            total.add(client.receive(TIMEOUT_S))
    return total


def _print(report: dict[str, Any], no_color: bool) -> None:
    out = console(no_color)
    calls = table("call", ">times", "expected statuses")
    for kind, count in sorted(report["calls"].items()):
        statuses = ((name.partition(": "), times) for name, times in report["statuses"].items())
        expected = [f"{status} {times}" for (of, _, status), times in statuses if of == kind]
        calls.add_row(kind, str(count), ", ".join(expected))
    out.print(calls)
    resources = table("resource", "process", ">before", ">after")
    for where in ("supervisor", "worker"):
        for what, before in report["before"][where].items():
            resources.add_row(what, where, *map(_count_text, (before, report["after"][where][what])))
    kib_before, kib_after = report["worker_private_kib"]
    resources.add_row("private memory, KiB", "worker", str(kib_before), str(kib_after))
    out.print(resources)
    for text in (*report["failures"][:20], *report["worker_deaths"]):
        out.print(f"[red]failure[/] {text}", highlight=False, soft_wrap=True)
    summary = "No failures and no leaks." if report["ok"] else "There were failures or leaks."
    out.print(f"{summary} Clients killed by the test: {report['killed']}.")


def _count_text(held: int | list[str]) -> str:
    return str(len(held) if isinstance(held, list) else held)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stress test and print its report; return 0 without failures, else 1."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--threads", type=int, default=4, help="threads of each process")
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kill", action="store_true", help="also kill clients at random times")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-color", action="store_true")
    options = parser.parse_args(arguments)
    try:
        report = stress(options)
    except (BenchmarkFailed, StressFailed, nnfmq.NnfmqError) as error:
        print(f"driver_stress: error: {error}", file=sys.stderr)
        return 1
    if options.json:
        print_json(report)
    else:
        _print(report, options.no_color)
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    import driver_stress  # by its name, by which child processes import it

    sys.exit(driver_stress.main())
