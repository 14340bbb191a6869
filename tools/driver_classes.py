"""Latency of an interactive client beside two batch clients that never pause, and the throughput of these beside it.

A round has four trials, in an order that changes, with the same three clients of one driver, whose classes change while
it runs. *alone*: the interactive client executes at a fixed rate, and nobody else does. *batch*: the two batch clients
execute again and again, and nobody else does. *classes*: all three do, with their classes. *equal*: all three do, and
all are normal: what happens without classes. Each latency counts from the time at which the request was due, so that
one that is late makes the next ones late, too (open loop).

*left* is the throughput that the interactive client leaves: that of *batch*, without the part of the cores' time that
its process and its worker use when it is alone. The machine's other load is measured before each round, while all
clients wait.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from bench_support import (
    GRACE_S,
    REPORTED_PERCENTILES,
    Report,
    Table,
    Tables,
    lower_limit,
    missed_targets,
    model_file,
    percentiles,
    positive,
    targets_table,
    upper_limit,
)

import nnfmq
from nnfmq.base.processes import process_usage
from nnfmq.hal.types import ExecutionPreference
from nnfmq.lab.bench.steps import random_input
from nnfmq.lab.child_processes import FunctionProcess, set_time_limit, started_child
from nnfmq.lab.listening_driver import started_daemon

MODEL = "models/mobilenet_v1_0.75_192_quant.tflite"
P99_LIMIT, LEFT_LIMIT, JAIN_LIMIT = 1.5, 0.7, 0.95
TRIALS = ("alone", "batch", "classes", "equal")
_COMPILED = "compiled"
_CONNECT_S = 60.0
_WARM_UP = 20
_SEED = 7
_BEGIN_NS = 50_000_000  # from the messages to the clients to the beginning of a trial
_REST_S = 0.3  # for the machine's other load


# ---- clients


@dataclass(frozen=True, slots=True)
class ClientJob:
    """A client's model, and the driver's socket. Sent to its process."""

    model: Path
    socket: str
    limit_s: int
    device: str = _COMPILED


@dataclass(frozen=True, slots=True)
class Trial:
    """Execute from `begin_ns` for some seconds, in a class: at a rate, or again and again if that is None.

    The reply has the latencies in ns, and the CPU time of the client and its worker, in ns.
    """

    client_class: str
    begin_ns: int
    seconds: float
    rate: float | None


def client_main(connection: Connection, job: ClientJob) -> None:
    """Send "ready", then the reply to each trial that the parent sends. Entry point."""
    set_time_limit(job.limit_s)
    with _opened(job) as (client, step):
        for _ in range(_WARM_UP):
            step()
        connection.send("ready")
        while True:
            set_time_limit(0)  # no limit while others compute; the connection closes when the benchmark ends
            trial = connection.recv()
            set_time_limit(job.limit_s)
            client.set_client_class(trial.client_class)
            before = _cpu_ns(client)
            latencies = _run(trial, step)
            connection.send((latencies, _cpu_ns(client) - before))


def _cpu_ns(client: nnfmq.Client) -> int:
    used = (process_usage(os.getpid()), process_usage(client.worker_pid))
    return sum(each.cpu_ns for each in used if each is not None)


@contextmanager
def _opened(job: ClientJob) -> Iterator[tuple[nnfmq.Client, Callable[[], object]]]:
    """A device of the driver, over a burst; arrays are written to and read from its memory."""
    with (
        nnfmq.connect(job.socket, timeout=_CONNECT_S) as client,
        client.device(job.device).prepare(
            nnfmq.load(job.model) if job.device == _COMPILED else job.model,
            preference=ExecutionPreference.SUSTAINED_SPEED,
            timeout=job.limit_s,
        ) as prepared,
        prepared.burst() as burst,
    ):
        chance = np.random.default_rng(_SEED)
        writes = list(zip(burst.inputs, [random_input(info, chance) for info in prepared.inputs], strict=True))

        def step() -> object:
            for buffer, array in writes:
                buffer[...] = array
            burst.execute(out=burst.outputs)
            return [array.copy() for array in burst.outputs]

        yield client, step


def _run(trial: Trial, step: Callable[[], object]) -> list[int]:
    time.sleep(max(0, trial.begin_ns - time.monotonic_ns()) / 1e9)
    return _again_and_again(trial, step) if trial.rate is None else _at_a_rate(trial, trial.rate, step)


def _again_and_again(trial: Trial, step: Callable[[], object]) -> list[int]:
    clock, times = time.monotonic_ns, []
    end = trial.begin_ns + round(trial.seconds * 1e9)
    while (begin := clock()) < end:
        step()
        times.append(clock() - begin)
    return times


def _at_a_rate(trial: Trial, rate: float, step: Callable[[], object]) -> list[int]:
    clock, times = time.monotonic_ns, []
    for number in range(round(rate * trial.seconds)):
        due = trial.begin_ns + round(number / rate * 1e9)
        time.sleep(max(0, due - clock()) / 1e9)
        step()
        times.append(clock() - due)
    return times


# ---- measuring


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--rounds", type=positive, default=10, help="interleaved rounds (default: 10)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of one trial (default: 4)")
    parser.add_argument("--rate", type=float, default=50.0, help="of the interactive client, per s (default: 50)")
    parser.add_argument("--batch", type=positive, default=2, help="batch clients (default: 2)")
    parser.add_argument("--model", type=Path, help=f"of all clients (default: {MODEL} in $NNFMQ_DATA)")
    parser.add_argument("--batch-model", type=Path, help="of the batch clients (default: the same)")
    parser.add_argument("--batch-device", default=_COMPILED, help="of the batch clients, such as litert")
    parser.add_argument("--quick", action="store_true", help="1 round of 0.2 s: for tests")
    parser.add_argument("--limit", type=positive, default=120, metavar="S", help="time limit of each step in seconds")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the report, as --json prints it. `folder` is for the driver's files.

    Raises:
        BenchmarkFailed: If the driver or a client fails, or a step takes longer than its limit.
    """
    if options.quick:
        options.rounds, options.seconds = 1, 0.2
    model = model_file(options, MODEL, "the benchmark")
    batch_model = options.batch_model or model
    with ExitStack() as stack:
        daemon = stack.enter_context(started_daemon(folder))
        jobs = [ClientJob(model, daemon.socket, options.limit)]
        jobs += [ClientJob(batch_model, daemon.socket, options.limit, options.batch_device)] * options.batch
        clients = [stack.enter_context(started_child(client_main, job, name="client")) for job in jobs]
        for client in clients:
            client.receive(options.limit + GRACE_S)
        rounds = [_round(clients, number, options) for number in range(options.rounds)]
    targets = _targets(rounds)
    conditions = {
        "model": model.name, "batch_model": batch_model.name, "batch_clients": options.batch,
        "batch_device": options.batch_device, "rate": options.rate,
        "rounds": options.rounds, "seconds": options.seconds,
        "other_load_in_cores": [each["other_load"] for each in rounds],
    }  # fmt: skip
    return {"conditions": conditions, "rounds": rounds, "targets": targets, "missed": missed_targets(targets)}


def _round(clients: Sequence[FunctionProcess], number: int, options: argparse.Namespace) -> dict[str, Any]:
    print(f"classes: round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    order = list(TRIALS)
    random.Random(number).shuffle(order)
    other_load = _other_load()
    found = {name: _trial(clients, name, options) for name in order}
    cores = len(os.sched_getaffinity(0))
    left = found["batch"]["per_second"] * max(0.0, 1 - found["alone"]["cpu_share"] / cores)
    return {
        **{name: found[name] for name in TRIALS}, "other_load": other_load,
        "p99_ratio": found["classes"]["ms"]["p99"] / found["alone"]["ms"]["p99"],
        "p99_ratio_equal": found["equal"]["ms"]["p99"] / found["alone"]["ms"]["p99"],
        "of_left": found["classes"]["per_second"] / left if left else 0.0,
    }  # fmt: skip


def _trial(clients: Sequence[FunctionProcess], name: str, options: argparse.Namespace) -> dict[str, Any]:
    interactive, *batch = clients
    begin_ns, chosen = time.monotonic_ns() + _BEGIN_NS, []
    has_classes = name != "equal"
    if name != "batch":
        trial = Trial("interactive" if has_classes else "normal", begin_ns, options.seconds, options.rate)
        interactive.send(trial)
        chosen.append(interactive)
    if name != "alone":
        for client in batch:
            client.send(Trial("batch" if has_classes else "normal", begin_ns, options.seconds, None))
        chosen += batch
    replies = {client: client.receive(options.limit + options.seconds + GRACE_S) for client in chosen}
    result: dict[str, Any] = {}
    if interactive in replies:
        latencies, cpu_ns = replies[interactive]
        result |= {"ms": percentiles(latencies, 1e6), "cpu_share": cpu_ns / 1e9 / options.seconds}
    counts = [len(replies[client][0]) for client in batch if client in replies]
    if counts:
        result |= {"per_second": sum(counts) / options.seconds, "jain": jain(counts)}
    return result


def jain(shares: Sequence[float]) -> float:
    """Return Jain's index of fairness: 1 if all shares are equal, 1/n if one client has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def _other_load() -> float:
    """Return how many CPUs others use while all clients wait."""
    before = _busy_ticks()
    time.sleep(_REST_S)
    ticks = os.sysconf("SC_CLK_TCK")
    return round((_busy_ticks() - before) / ticks / _REST_S, 2)


def _busy_ticks() -> int:
    fields = list(map(int, Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]))
    user, nice, system, _idle, _wait, interrupts, soft, steal = fields[:8]
    return user + nice + system + interrupts + soft + steal


def _targets(rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    ratios = [each["p99_ratio"] for each in rounds]
    left = [100 * each["of_left"] for each in rounds]
    fair = [min(each[name]["jain"] for name in ("batch", "classes", "equal")) for each in rounds]
    return [
        upper_limit("p99 beside batch clients over that alone", ratios, statistics.median(ratios), P99_LIMIT, "×"),
        lower_limit("batch clients, of the throughput left", left, statistics.median(left), 100 * LEFT_LIMIT, "%"),
        lower_limit("Jain's index of equal clients", fair, statistics.median(fair), JAIN_LIMIT, ""),
    ]


# ---- results


def tables(report: Report) -> Tables:
    """Return the targets, and medians over the rounds."""
    names, rounds = list(REPORTED_PERCENTILES), report["rounds"]
    rows = []
    for name in TRIALS:
        each = [found[name] for found in rounds]
        times = [_median(each, "ms", percentile) for percentile in names]
        rows.append([name, *times, _median(each, "per_second"), _median(each, "jain"), _median(each, "cpu_share")])
    heads = (
        "trial", *(f">{name} ms" for name in names), ">batch per second", ">Jain's index", ">CPUs, interactive",
    )  # fmt: skip
    each_round = [
        [str(number), *(f"{found[key]:.2f}" for key in ("p99_ratio", "p99_ratio_equal", "of_left", "other_load"))]
        for number, found in enumerate(rounds, 1)
    ]
    round_heads = (">round", ">p99 over alone", ">the same if all are equal", ">of the throughput left", ">other load")
    return {
        "targets": targets_table(report["targets"]),
        "trials": Table("medians of the trials", heads, rows),
        "rounds": Table("rounds", round_heads, each_round),
    }


def _median(found: Sequence[dict[str, Any]], *keys: str) -> str:
    values: list[float] = []
    for value in found:
        for key in keys:
            value = value.get(key, {}) if isinstance(value, dict) else value
        if not isinstance(value, dict):
            values.append(value)
    return f"{statistics.median(values):.2f}" if values else "-"
