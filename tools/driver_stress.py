"""Stress one driver with clients that make random calls, and check that nothing fails or leaks.

    python tools/driver_stress.py                         # 8 processes with 4 threads each, 5 minutes
    python tools/driver_stress.py --processes 2 --seconds 10 --json
    python tools/driver_stress.py --kill                  # also kills clients at random times

The clients connect, prepare, execute, create bursts, release and disconnect. Each output is compared with NumPy's. One
more client, the canary, makes the same calls but stays connected, so that its worker lives during the whole run. Before
and after, the tool counts file descriptors, threads, processes and shared mappings of the supervisor and of the
canary's worker, nnfmq's names in /dev/shm, and the worker's private memory. The exit status is 0 only if all outputs
were right, every status was expected, no worker died, the counts are equal, and the private memory has not increased by
32 MiB or more.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from driver_stress_client import StressClient

import nnfmq
from nnfmq.cli.console import console, print_json, table
from nnfmq.measure.failures import BenchmarkFailed
from nnfmq.measure.listening_driver import started_daemon
from nnfmq.measure.process_memory import memory_of
from nnfmq.observe.process_usage import descendants

CLIENT = Path(__file__).with_name("driver_stress_client.py")
TIMEOUT_S = 120.0
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


def count_resources(pid: int) -> dict[str, int]:
    """Return the numbers of file descriptors, threads, descendants and shared mappings of a process."""
    folder = Path(f"/proc/{pid}")
    maps = (folder / "maps").read_text()
    return {
        "descriptors": len(os.listdir(folder / "fd")),
        "threads": len(os.listdir(folder / "task")),
        "processes": len(descendants(pid)),
        "shared mappings": sum("/memfd:" in line or "/dev/shm/" in line for line in maps.splitlines()),
    }


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
    canary.prepare_concurrently()
    canary.release_all()


def _stable_counts(supervisor: int, worker: int, wanted: dict[str, Any] | None) -> dict[str, Any]:
    """Return the counts, as soon as they are equal to `wanted` or 10 s have passed.

    The wait is needed because the supervisor reaps a worker some time after its exit. With None, counts once.
    """
    end = time.monotonic() + 10
    while True:
        names = sorted(name for name in os.listdir("/dev/shm") if "nnfmq" in name)
        found = {"supervisor": count_resources(supervisor), "worker": count_resources(worker), "names": names}
        if time.monotonic() > end or found == wanted:
            return found
        time.sleep(0.05 if wanted else 1.0)
        if wanted is None:
            return found


def _run_clients(options: argparse.Namespace, path: str, canary: StressClient) -> Totals:
    total, until = Totals(), time.monotonic() + options.seconds
    chance = random.Random(options.seed)
    clients = {number: _start_client(path, number, options) for number in range(options.processes)}
    try:
        while time.monotonic() < until:
            canary.call_at_random()
            if options.kill and chance.random() < 0.01:
                number = chance.choice(list(clients))
                clients[number].kill()
                clients[number].communicate()
                total.killed += 1
                left = max(1, int(until - time.monotonic()))
                clients[number] = _start_client(path, number + options.processes * total.killed, options, left)
        for client in clients.values():
            output, errors = client.communicate(timeout=TIMEOUT_S)
            if client.returncode:
                raise StressFailed(f"a client ended with status {client.returncode}: {errors[-2000:]}")
            total.add(json.loads(output))
    finally:
        for client in clients.values():
            client.kill()
            client.wait()
    return total


def _start_client(
    path: str, number: int, options: argparse.Namespace, seconds: int | None = None
) -> subprocess.Popen[str]:
    seconds = options.seconds if seconds is None else seconds
    arguments = [path, str(options.seed * 100_000 + number + 1), str(seconds), str(options.threads)]
    command = [sys.executable, str(CLIENT), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


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
        for what, count in report["before"][where].items():
            resources.add_row(what, where, str(count), str(report["after"][where][what]))
    kib_before, kib_after = report["worker_private_kib"]
    resources.add_row("private memory, KiB", "worker", str(kib_before), str(kib_after))
    out.print(resources)
    for text in (*report["failures"][:20], *report["worker_deaths"]):
        out.print(f"[red]failure[/] {text}", highlight=False, soft_wrap=True)
    summary = "No failures and no leaks." if report["ok"] else "There were failures or leaks."
    out.print(f"{summary} Clients killed by the test: {report['killed']}.")


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
    sys.exit(main())
