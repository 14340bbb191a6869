"""Clients of one driver that share the cores, beside as many processes of LiteRT with one thread each.

*throughput*: all clients execute again and again for some seconds; the two runtimes alternate. *deadlines*: all clients
execute once, at the same time, each with another deadline, in an order that changes. The misses are compared with those
of the best order, which is computed: as if each execution took one core for the time that it takes one in *throughput*,
and nothing else took time. LiteRT has no deadlines; an execution that ends later counts as a miss. A step writes the
input, executes the model and reads the output. All clients of a trial begin at the same time of the monotonic clock.
8 clients take two minutes.
"""

from __future__ import annotations

import argparse
import itertools
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
from nnfmq.hal.errors import MissedDeadline
from nnfmq.hal.types import ExecutionPreference
from nnfmq.lab.bench.peers import PeerJob, opened_peer
from nnfmq.lab.bench.steps import random_input
from nnfmq.lab.child_processes import FunctionProcess, set_time_limit, started_child
from nnfmq.lab.listening_driver import started_daemon

# ---- clients


Step = Callable[[float | None], object]
"""Executes once; its argument is a timeout in seconds, which a runtime without deadlines ignores."""
_CONNECT_S = 60.0
_SUSTAINED = ExecutionPreference.SUSTAINED_SPEED  # machine code, without a baseline program that runs first
_WARM_UP = 5
_SEED = 7


@dataclass(frozen=True, slots=True)
class ClientJob:
    """A client's runtime, `nnfmq` or `LiteRT`, and its model; `socket` is the driver's. Sent to its process."""

    runtime: str
    model: Path
    socket: str
    limit_s: int


@dataclass(frozen=True, slots=True)
class Stream:
    """A trial: execute again and again from `begin_ns` for some seconds. The reply has the times of the steps in ns."""

    begin_ns: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Single:
    """A trial: execute once at `begin_ns`, with a timeout in seconds. The reply is the time in ns, None if missed."""

    begin_ns: int
    timeout_s: float | None


def client_main(connection: Connection, job: ClientJob) -> None:
    """Send "ready", then the reply to each trial that the parent sends. Entry point."""
    set_time_limit(job.limit_s)
    with _RUNTIMES[job.runtime](job) as step, np.errstate(all="ignore"):
        for _ in range(_WARM_UP):
            step(None)
        connection.send("ready")
        while True:
            set_time_limit(0)  # no limit while others compute; the connection closes when the benchmark ends
            trial = connection.recv()
            set_time_limit(job.limit_s)
            connection.send(_run(trial, step))


def _run(trial: Stream | Single, step: Step) -> Any:
    time.sleep(max(0, trial.begin_ns - time.monotonic_ns()) / 1e9)
    return _stream(trial, step) if isinstance(trial, Stream) else _single(trial, step)


def _stream(trial: Stream, step: Step) -> list[int]:
    clock, times = time.monotonic_ns, []
    end = trial.begin_ns + round(trial.seconds * 1e9)
    while (begin := clock()) < end:
        step(None)
        times.append(clock() - begin)
    return times


def _single(trial: Single, step: Step) -> int | None:
    try:
        step(trial.timeout_s)
    except MissedDeadline:
        return None
    return time.monotonic_ns() - trial.begin_ns


@contextmanager
def _nnfmq(job: ClientJob) -> Iterator[Step]:
    """The device `compiled` of the driver, over a burst; arrays are written to and read from its memory."""
    with (
        nnfmq.connect(job.socket, timeout=_CONNECT_S) as client,
        client.device("compiled").prepare(
            nnfmq.load(job.model), preference=_SUSTAINED, timeout=job.limit_s
        ) as prepared,
        prepared.burst() as burst,
    ):
        random = np.random.default_rng(_SEED)
        inputs = [random_input(info, random) for info in prepared.inputs]
        writes, outputs = list(zip(burst.inputs, inputs, strict=True)), burst.outputs

        def step(timeout_s: float | None) -> object:
            for buffer, array in writes:
                buffer[...] = array
            burst.execute(out=outputs, timeout=timeout_s)
            return [array.copy() for array in outputs]

        yield step


@contextmanager
def _litert(job: ClientJob) -> Iterator[Step]:
    """LiteRT with its default delegate, XNNPACK, and one thread, as each of many processes should have."""
    model, random = nnfmq.load(job.model), np.random.default_rng(_SEED)
    inputs = [random_input(info, random) for info in model.inputs]
    with opened_peer("LiteRT", PeerJob(job.model, model, 1)) as runner:
        (execute,) = runner.variants.values()
        yield lambda _timeout_s: execute(inputs)


_RUNTIMES: dict[str, Callable[[ClientJob], Any]] = {"nnfmq": _nnfmq, "LiteRT": _litert}


# ---- the benchmark


MODEL = "models/mobilenet_v2_1.0_224_quant.tflite"
RUNTIMES = ("nnfmq", "LiteRT")
THROUGHPUT_LIMIT, P99_LIMIT = 1.8, 1.0
FACTORS = (2.0, 1.5, 1.0)
"""Deadlines, over the times at which the executions end in the best order, one run later."""
_BEGIN_NS = 50_000_000  # from the messages to the clients to the beginning of a trial
Clients = dict[str, list[FunctionProcess]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--clients", type=positive, default=8, help="of each runtime (default: 8)")
    parser.add_argument("--rounds", type=positive, default=10, help="interleaved rounds (default: 10)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of one trial of throughput (default: 3)")
    parser.add_argument("--trials", type=positive, default=20, help="of deadlines in each round (default: 20)")
    parser.add_argument("--model", type=Path, help=f"default: {MODEL} in $NNFMQ_DATA")
    parser.add_argument("--quick", action="store_true", help="2 clients, 1 round, 0.2 s, 2 trials: for tests")
    parser.add_argument("--limit", type=positive, default=120, metavar="S", help="time limit of each step in seconds")


# ---- measuring


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the report, as --json prints it. `folder` is for the driver's files.

    Raises:
        BenchmarkFailed: If the driver or a client fails, or a step takes longer than its limit.
    """
    if options.quick:
        options.clients, options.rounds, options.seconds, options.trials = 2, 1, 0.2, 2
    model = model_file(options, MODEL, "the benchmark")
    with ExitStack() as stack:
        daemon = stack.enter_context(started_daemon(folder))
        clients: Clients = {}
        for runtime in RUNTIMES:
            job = ClientJob(runtime, model, daemon.socket, options.limit)
            clients[runtime] = [
                stack.enter_context(started_child(client_main, job, name=runtime)) for _ in range(options.clients)
            ]
            for client in clients[runtime]:
                client.receive(options.limit + GRACE_S)
        rounds = [_round(clients, number, options) for number in range(options.rounds)]
    throughput = [each["throughput"] for each in rounds]
    deadlines = [each["deadlines"] for each in rounds]
    targets = [*_throughput_targets(throughput), *_deadline_targets(deadlines)]
    return {
        "conditions": _conditions(options, model), "throughput": throughput, "deadlines": deadlines,
        "targets": targets, "missed": missed_targets(targets),
    }  # fmt: skip


def _conditions(options: argparse.Namespace, model: Path) -> dict[str, Any]:
    return {
        "model": model.name, "clients": options.clients, "rounds": options.rounds, "seconds": options.seconds,
        "trials": options.trials,
    }  # fmt: skip


def _round(clients: Clients, number: int, options: argparse.Namespace) -> dict[str, Any]:
    print(f"sharing: round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    order = RUNTIMES if number % 2 else RUNTIMES[::-1]
    throughput = {runtime: _throughput(clients[runtime], options) for runtime in order}
    cores = len(os.sched_getaffinity(0))
    run_ns = round(cores / throughput["nnfmq"]["per_second"] * 1e9)
    chance = random.Random(number)
    return {
        "throughput": throughput,
        "deadlines": {
            f"{factor:g} ×": _deadlines(clients, order, deadlines_of(run_ns, options.clients, cores, factor), cores,
                                        run_ns, options, chance)
            for factor in FACTORS
        },
    }  # fmt: skip


def _exchange(clients: Sequence[FunctionProcess], trials: Sequence[Stream | Single], limit_s: int) -> list[Any]:
    for client, trial in zip(clients, trials, strict=True):
        client.send(trial)
    return [client.receive(limit_s + GRACE_S) for client in clients]


def _throughput(clients: Sequence[FunctionProcess], options: argparse.Namespace) -> dict[str, Any]:
    trial = Stream(time.monotonic_ns() + _BEGIN_NS, options.seconds)
    found = _exchange(clients, [trial] * len(clients), options.limit)
    counts = [len(times) for times in found]
    return {
        "per_second": sum(counts) / options.seconds, "fewest": min(counts), "most": max(counts),
        "ms": percentiles(itertools.chain(*found), 1e6),
    }  # fmt: skip


def _deadlines(
    clients: Clients, order: Sequence[str], deadlines: Sequence[int], cores: int, run_ns: int,
    options: argparse.Namespace, chance: random.Random,
) -> dict[str, Any]:  # fmt: skip
    """Count the misses of all trials. The runtimes alternate; each trial gives the deadlines to other clients."""
    missed = dict.fromkeys(RUNTIMES, 0)
    for _ in range(options.trials):
        shuffled = chance.sample(deadlines, len(deadlines))
        for runtime in order:
            begin_ns = time.monotonic_ns() + _BEGIN_NS
            times = _exchange(clients[runtime], [Single(begin_ns, each / 1e9) for each in shuffled], options.limit)
            late = [took is None or took > each for took, each in zip(times, shuffled, strict=True)]
            missed[runtime] += sum(late)
    return {
        "deadlines_ms": [each / 1e6 for each in deadlines], "executions": options.trials * len(deadlines),
        "best": options.trials * best_misses(deadlines, run_ns, cores), "missed": missed,
    }  # fmt: skip


def deadlines_of(run_ns: int, count: int, cores: int, factor: float) -> list[int]:
    """Return a deadline for each of `count` executions: `factor` times the end of each, one run later.

    One run later, because an execution whose deadline is not the first may have arrived first on each core.
    """
    return [round(factor * run_ns * (2 + number // cores)) for number in range(count)]


def best_misses(deadlines: Sequence[int], run_ns: int, cores: int) -> int:
    """Return the least number of misses of executions that all take `run_ns` and can begin at once.

    Executions that take equally long are best run by their deadlines, without those that would end late.
    """
    begun = 0
    for deadline in sorted(deadlines):
        begun += (begun // cores + 1) * run_ns <= deadline
    return len(deadlines) - begun


# ---- targets


def _throughput_targets(rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    per_second = [each["nnfmq"]["per_second"] / each["LiteRT"]["per_second"] for each in rounds]
    p99 = [each["nnfmq"]["ms"]["p99"] / each["LiteRT"]["ms"]["p99"] for each in rounds]
    text = "over that of as many processes of LiteRT"
    return [
        lower_limit(f"throughput {text}", per_second, statistics.median(per_second), THROUGHPUT_LIMIT, "×"),
        upper_limit(f"p99 {text}", p99, statistics.median(p99), P99_LIMIT, "×"),
    ]


def _deadline_targets(rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    targets = []
    for name in rounds[0]:
        beyond = [(each[name]["missed"]["nnfmq"] - each[name]["best"]) / each[name]["executions"] for each in rounds]
        text = f"deadlines {name}: misses beyond those of the best order"
        targets.append(
            upper_limit(text, [100 * part for part in beyond], 100 * statistics.median(beyond), 0.0, "% of executions")
        )
    return targets


# ---- results


def tables(report: Report) -> Tables:
    """Return the targets, medians of the throughput over the rounds, and sums of executions with deadlines."""
    names = list(REPORTED_PERCENTILES)
    rates, misses = [], []
    for runtime in RUNTIMES:
        each = [found[runtime] for found in report["throughput"]]
        counts = [statistics.median(one[key] for one in each) for key in ("per_second", "fewest", "most")]
        times = [statistics.median(one["ms"][name] for one in each) for name in names]
        rates.append([runtime, *(f"{value:,.0f}" for value in counts), *(f"{value:.2f}" for value in times)])
    for name in report["deadlines"][0]:
        each = [found[name] for found in report["deadlines"]]
        sums = [sum(one[key] for one in each) for key in ("executions", "best")]
        misses.append(
            [name, *map(str, sums), *(str(sum(one["missed"][runtime] for one in each)) for runtime in RUNTIMES)]
        )
    rate_heads = (
        "runtime",
        ">per second",
        ">of the slowest client",
        ">of the fastest",
        *(f">{name} ms" for name in names),
    )
    miss_heads = ("deadlines", ">executions", ">missed in the best order", *(f">missed by {each}" for each in RUNTIMES))
    return {
        "targets": targets_table(report["targets"]),
        "throughput": Table("executions per second", rate_heads, rates),
        "deadlines": Table("deadlines", miss_heads, misses),
    }
