"""Clients that prepare, execute, burst, free and disconnect at random, and a driver that must lose nothing.

    python tools/driver_stress.py                         # 8 processes with 4 threads each, 5 minutes
    python tools/driver_stress.py --processes 2 --seconds 10 --json
    python tools/driver_stress.py --kill                  # and some of the clients are killed in the middle

Each output is compared with NumPy's own. A witness, one more client that stays connected, does the same things with a
worker that lives to the end. Counted before and after, in the supervisor and in the witness's worker: descriptors,
threads, processes and shared mappings; names of ours in /dev/shm; and the worker's private memory. Exit status 0 only
if all outputs were right, no status was unexplained, no worker died, the counts are equal, and the private memory has
not grown by more than 32 MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from driver_stress_client import Actor

import nnfmq
from nnfmq.cli.console import console, print_json, table

CLIENT = Path(__file__).with_name("driver_stress_client.py")
PATIENCE_S = 120.0
GROWTH_KIB = 32 * 1024  # of the witness's worker: what malloc keeps for later differs from run to run


class StressFailed(Exception):
    """The run says nothing: the driver or a client did not even start."""


@dataclass
class Sum:
    """What all clients did together."""

    calls: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    killed: int = 0

    def add(self, report: dict[str, Any]) -> None:
        """Add one client's report."""
        self.calls.update(report["calls"])
        self.statuses.update(report["statuses"])
        self.wrong += report["wrong"]


def counts_of(pid: int) -> dict[str, int]:
    """Return what a process holds: descriptors, threads, descendants, shared mappings."""
    folder = Path(f"/proc/{pid}")
    maps = (folder / "maps").read_text()
    return {
        "descriptors": len(os.listdir(folder / "fd")),
        "threads": len(os.listdir(folder / "task")),
        "processes": len(list(_descendants(pid))),
        "shared mappings": sum("/memfd:" in line or "/dev/shm/" in line for line in maps.splitlines()),
    }


def private_kib(pid: int) -> int:
    """Return how much memory of its own a process has written to."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))


def _descendants(pid: int) -> Iterator[int]:
    for task in os.listdir(f"/proc/{pid}/task"):
        for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
            yield int(child)
            yield from _descendants(int(child))


@contextmanager
def driver(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a driver; what it logs goes to a file in `folder`."""
    path = str(folder / "d.sock")
    command = [sys.executable, "-P", "-m", "nnfmq", "serve", "--socket", path]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
            if not ready or "listening" not in process.stdout.readline():
                raise StressFailed(f"no driver: {(folder / 'log').read_text()}")
            yield process, path
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)


def stress(options: argparse.Namespace) -> dict[str, Any]:
    """Run as asked and return what was seen; blocks."""
    with tempfile.TemporaryDirectory(prefix="nnfmq-") as name:
        folder = Path(name)
        with driver(folder) as (process, path):
            witness = Actor(path, options.seed, stays=True)
            witness.act()  # connects
            worker = witness.driver_pid
            _warm(witness)
            before, kib_before = _settled(process.pid, worker, None), private_kib(worker)
            total = _run_clients(options, path, witness)
            witness.rest()
            after, kib_after = _settled(process.pid, worker, before), private_kib(worker)
            total.add({"calls": {}, "statuses": witness.tally.statuses, "wrong": witness.tally.wrong})
            witness.run(0)  # disconnects
        died = [line for line in (folder / "log").read_text().splitlines() if "ended with status" in line]
    return {
        "calls": dict(total.calls), "statuses": dict(total.statuses), "killed": total.killed,
        "wrong": total.wrong, "died": died, "before": before, "after": after,
        "worker_private_kib": [kib_before, kib_after],
        "ok": not total.wrong and not died and before == after and kib_after - kib_before < GROWTH_KIB,
    }  # fmt: skip


def _warm(witness: Actor) -> None:
    """Let the witness do all things once, so that what a worker makes only once is there before the counting."""
    for _ in range(200):
        witness.act()
    witness.crowd()
    witness.rest()


def _settled(supervisor: int, worker: int, wanted: dict[str, Any] | None) -> dict[str, Any]:
    """Return the counts, once they are `wanted` or have had their time: an ended worker is reaped a little later."""
    end = time.monotonic() + 10
    while True:
        names = sorted(name for name in os.listdir("/dev/shm") if "nnfmq" in name)
        found = {"supervisor": counts_of(supervisor), "worker": counts_of(worker), "names": names}
        if time.monotonic() > end or found == wanted:
            return found
        time.sleep(0.05 if wanted else 1.0)
        if wanted is None:
            return found


def _run_clients(options: argparse.Namespace, path: str, witness: Actor) -> Sum:
    total, until = Sum(), time.monotonic() + options.seconds
    chance = random.Random(options.seed)
    clients = {number: _client(path, number, options) for number in range(options.processes)}
    try:
        while time.monotonic() < until:
            witness.act()
            if options.kill and chance.random() < 0.01:
                number = chance.choice(list(clients))
                clients[number].kill()
                clients[number].communicate()
                total.killed += 1
                left = max(1, int(until - time.monotonic()))
                clients[number] = _client(path, number + options.processes * total.killed, options, left)
        for client in clients.values():
            output, errors = client.communicate(timeout=PATIENCE_S)
            if client.returncode:
                raise StressFailed(f"a client ended with status {client.returncode}: {errors[-2000:]}")
            total.add(json.loads(output))
    finally:
        for client in clients.values():
            client.kill()
            client.wait()
    return total


def _client(path: str, number: int, options: argparse.Namespace, seconds: int | None = None) -> subprocess.Popen[str]:
    seconds = options.seconds if seconds is None else seconds
    arguments = [path, str(options.seed * 100_000 + number + 1), str(seconds), str(options.threads)]
    command = [sys.executable, str(CLIENT), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _print(report: dict[str, Any], no_color: bool) -> None:
    out = console(no_color)
    calls = table("call", ">times", "explained statuses")
    for kind, count in sorted(report["calls"].items()):
        statuses = ((name.partition(": "), times) for name, times in report["statuses"].items())
        explained = [f"{status} {times}" for (of, _, status), times in statuses if of == kind]
        calls.add_row(kind, str(count), ", ".join(explained))
    out.print(calls)
    held = table("what is held", "where", ">before", ">after")
    for where in ("supervisor", "worker"):
        for what, count in report["before"][where].items():
            held.add_row(what, where, str(count), str(report["after"][where][what]))
    kib_before, kib_after = report["worker_private_kib"]
    held.add_row("private memory, KiB", "worker", str(kib_before), str(kib_after))
    out.print(held)
    for text in (*report["wrong"][:20], *report["died"]):
        out.print(f"[red]wrong[/] {text}", highlight=False, soft_wrap=True)
    verdict = "Nothing wrong, nothing left behind." if report["ok"] else "Not as it should be."
    out.print(f"{verdict} Clients killed on purpose: {report['killed']}.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as asked and print."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--threads", type=int, default=4, help="of each process")
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kill", action="store_true", help="kill a client now and then")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-color", action="store_true")
    options = parser.parse_args(arguments)
    try:
        report = stress(options)
    except (StressFailed, nnfmq.NnfmqError) as error:
        print(f"driver_stress: error: {error}", file=sys.stderr)
        return 1
    if options.json:
        print_json(report)
    else:
        _print(report, options.no_color)
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
