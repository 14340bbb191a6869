"""The cost of the workers' sandbox, or of an address layout of their own: a worker's start and memory, executions.

Two drivers run, with the two values of a setting. In each round a client of each connects and executes a LOGISTIC of
one float over a burst, in blocks that alternate. Elapsed times are from `connect` to its return, and of an execution;
CPU times are those of the worker, of all its threads. Private memory is what the worker has written to and shares with
no other process (Private_Dirty) after its first execution. A difference is the median of the rounds, each with the
values of one round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench_support import Report, Table, Tables, positive
from queue_candidates import null_model

import nnfmq
from nnfmq.base import settings
from nnfmq.lab.listening_driver import started_daemon
from nnfmq.lab.placement import memory_of

SETTINGS: Mapping[str, tuple[settings.Setting[Any], tuple[str, str]]] = {
    "sandbox": (settings.SANDBOX, ("on", "off")),
    "worker-start": (settings.WORKER_START, ("exec", "fork")),
}
COSTS = ("start, elapsed, ms", "start, CPU, ms", "private memory, MiB", "burst, elapsed, µs", "burst, CPU, µs")
_START_S = 60.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--of", choices=SETTINGS, default="sandbox", help="the setting that differs")
    parser.add_argument("--rounds", type=positive, default=20, help="interleaved rounds (default: 20)")
    parser.add_argument("--blocks", type=positive, default=10, help="of each driver in a round (default: 10)")
    parser.add_argument("--calls", type=positive, default=200, help="in a block (default: 200)")
    parser.add_argument("--quick", action="store_true", help="2 rounds, 2 blocks of 5: for tests")


def measure(options: argparse.Namespace, folder: Path) -> Report:
    """Return the report, as --json prints it. `folder` is for the drivers' files.

    Raises:
        BenchmarkFailed: If a driver fails.
        PermissionError: If this user may not read how much memory a worker in its sandbox has: only root may.
    """
    setting, values = SETTINGS[options.of]
    if options.quick:
        options.rounds, options.blocks, options.calls = 2, 2, 5
    with ExitStack() as stack:
        sockets = {}
        for value in values:
            (own := folder / value).mkdir()
            daemon = stack.enter_context(started_daemon(own, {setting.variable: value}))
            sockets[value] = daemon.socket
        rounds = [_round(sockets, number, options) for number in range(options.rounds)]
    conditions = {name: getattr(options, name) for name in ("of", "rounds", "blocks", "calls")}
    return {"conditions": conditions, "rounds": rounds, "missed": []}


def _round(sockets: Mapping[str, str], number: int, options: argparse.Namespace) -> Mapping[str, Sequence[float]]:
    """Return the COSTS of each driver."""
    names = list(sockets)[:: 1 if number % 2 else -1]
    with ExitStack() as stack:
        starts, bursts, workers, private = {}, {}, {}, {}
        for name in names:
            begin = time.monotonic_ns()
            client = stack.enter_context(nnfmq.connect(sockets[name], timeout=_START_S, recover=False))
            workers[name] = client.worker_pid
            starts[name] = (time.monotonic_ns() - begin) / 1e6, cpu_ns(client.worker_pid) / 1e6
            model = stack.enter_context(client.device("reference").prepare(null_model()))
            bursts[name] = stack.enter_context(model.burst())
            bursts[name].execute([1.0])
            private[name] = private_bytes(client.worker_pid) / (1 << 20)
        elapsed: dict[str, list[int]] = {name: [] for name in names}
        before = {name: cpu_ns(workers[name]) for name in names}
        for _ in range(options.blocks):
            for name in names:
                elapsed[name] += _timed(bursts[name], options.calls)
        used = {name: (cpu_ns(workers[name]) - before[name]) / len(elapsed[name]) / 1e3 for name in names}
    return {
        name: (*starts[name], private[name], statistics.median(elapsed[name]) / 1e3, used[name]) for name in sockets
    }


def private_bytes(pid: int) -> int:
    """Return how much memory of a process is written to and not shared."""
    found = memory_of(pid)
    assert found is not None  # its client is connected
    return found.private_dirty


def cpu_ns(pid: int) -> int:
    """Return the CPU time of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


def _timed(burst: nnfmq.Burst, count: int) -> list[int]:
    clock, times = time.perf_counter_ns, []
    for _ in range(count):
        begin = clock()
        burst.execute([1.0])
        times.append(clock() - begin)
    return times


def tables(report: Report) -> Tables:
    """Return the medians over the rounds, and of the differences the quartiles, too."""
    rows = []
    names = list(report["rounds"][0])
    for place, what in enumerate(COSTS):
        first, second = ([each[name][place] for each in report["rounds"]] for name in names)
        differences = [one - other for one, other in zip(first, second, strict=True)]
        low, middle, high = statistics.quantiles(differences, n=4)
        values = (statistics.median(first), statistics.median(second), middle, low, high)
        rows.append([what, *(f"{value:.2f}" for value in values)])
    headings = ("what", *(f">{name}" for name in names), ">difference", ">its lower quartile", ">its upper quartile")
    return {"costs": Table("costs", headings, rows)}
