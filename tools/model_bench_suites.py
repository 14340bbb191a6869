"""What model_bench.py measures, section by section. Each returns its part of the report.

*models* compares our device over a burst, and called in process, with the peers in process. *cost* compares the burst
with the same engine in process while both ends poll, each on a core of its own. *compiling* looks at a burst while
another client of the same driver has a model compiled. *growth* makes models of one operation in many sizes, and runs
one model with 1, 2, ... threads. *roofline* says how near the models come to what a core can do.
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cpu_pinning as placement
from bench_processes import Failed, received, started
from latency_client import CLIENT_WINDOW, SERVER_WINDOW
from model_bench_metrics import (
    BURST,
    IN_PROCESS,
    PEERS,
    Benchmark,
    apart,
    compiling_row,
    cost_row,
    growth_exponent,
    model_row,
    named,
    roofline_row,
)
from model_bench_runners import SUSTAINED, Described, Job, Turn, child_main, loaded
from model_bench_scheduler import TURNS, Advance, Gathered, figures_of, take_turns, wait_until_quiet
from model_work import KINDS, TYPES, generated, model_cost

from nnfmq.cli.console import open_client
from nnfmq.hal.errors import NnfmqError
from nnfmq.service.caching.program_cache import cache_disabled

POLLING_US = 100_000.0
SIZES, CHANNELS = (8, 16, 32, 64, 128), (8, 16, 64, 256)
AT_SIZE, AT_CHANNELS = 16, 32
GROWTH_COUNT, COMPILING_COUNT = 300, 3000
THREADS = 2  # of the parties that are compared
COMPILING = ("mobilenet_v1_0.25_128_quant", "mobilenet_v2_1.0_224_quant")  # what is executed, what is compiled
SCALING = "mobilenet_v1_0.75_192_quant"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure, on which models, and where their files are."""

    folder: Path
    models: tuple[Benchmark, ...]
    rounds: int
    divisor: int  # of all counts: 1, or more for a trial
    limit_s: int
    advance: Advance

    def path(self, file: str) -> Path:
        """Return the .tflite file of a model."""
        return self.folder / f"{file}.tflite"

    def turn(self, count: int, turns: int = TURNS) -> Turn:
        """Return one of so many turns that together have so many steps, fewer in a trial."""
        fewer = max(10, count // self.divisor // turns)
        return Turn(fewer, min(50, max(3, fewer // 10)))

    def some(self, values: Sequence[int]) -> Sequence[int]:
        """Return the values of a series, in a trial the first two."""
        return values if self.divisor == 1 else values[:2]


# ---- where parties run


def cores(threads: int) -> tuple[int, ...]:
    """Return the cores on which `threads` threads compute."""
    return tuple(sorted(placement.ALLOWED)[:threads])


def client_cores(threads: int) -> tuple[int, ...]:
    """Return where a burst's client runs: on a core beside those, or where the kernel likes if there is none."""
    allowed = sorted(placement.ALLOWED)
    return (allowed[threads],) if len(allowed) > threads else tuple(allowed)


def _burst(plan: Plan, source: Path | Described, threads: int, window_us: float | None = None) -> Job:
    return Job(BURST, source, cores(threads), client_cores(threads), window_us, limit_s=plan.limit_s)


def _in_process(plan: Plan, source: Path | Described, threads: int) -> Job:
    return Job(IN_PROCESS, source, cores(threads), limit_s=plan.limit_s)


def most_threads() -> int:
    """Return how many threads parties are compared with: two, where there are two cores."""
    return min(THREADS, len(placement.ALLOWED))


# ---- models


def models(plan: Plan) -> list[dict[str, Any]]:
    """Compare everybody on each model, with one thread and with two."""
    return [_model(plan, model) for model in plan.models]


def _model(plan: Plan, model: Benchmark) -> dict[str, Any]:
    path, jobs = plan.path(model.file), {}
    for threads in sorted({1, most_threads()}, reverse=True):
        jobs[named(BURST, threads)] = _burst(plan, path, threads)
        jobs[named(IN_PROCESS, threads)] = _in_process(plan, path, threads)
        for kind in PEERS:
            jobs[named(kind, threads)] = Job(kind, path, cores(threads), limit_s=plan.limit_s)
    turn = plan.turn(model.count)
    found = take_turns(jobs, turn, plan.rounds, lambda name: plan.advance(f"{model.name}: {name}"))
    figures, ours = found.figures(), found.outputs[named(IN_PROCESS, 1)]
    parties = {
        name: values | found.details[name] | {"apart": apart(found.outputs[name], ours)}
        for name, values in figures.items()
    }
    conditions = {"count": TURNS * turn.count, "rounds": plan.rounds, "is_quantized": ours[0].dtype.kind != "f"}
    return model_row(model, figures, most_threads()) | conditions | {"parties": parties, "missing": found.missing}


# ---- cost


def cost(plan: Plan) -> list[dict[str, Any]]:
    """Compare the burst with the same engine in process, both polling, with the same threads on the same cores.

    Only numbers of threads that leave a core for the client.
    """
    rows = []
    for model in plan.models:
        for threads in range(1, min(THREADS, len(placement.ALLOWED) - 1) + 1):
            found = _pair(plan, plan.path(model.file), threads, model.count, f"cost of {model.name}")
            figures, cost_us = found.figures(), statistics.median(found.differences_us(BURST, IN_PROCESS))
            rows.append(cost_row(model.name, threads, figures[BURST], figures[IN_PROCESS], cost_us))
    return rows


def _pair(plan: Plan, source: Path | Described, threads: int, count: int, label: str) -> Gathered:
    """Return what the turns of burst and engine gave, both polling."""
    jobs = {BURST: _burst(plan, source, threads, POLLING_US), IN_PROCESS: _in_process(plan, source, threads)}
    return take_turns(jobs, plan.turn(count), plan.rounds, lambda name: plan.advance(f"{label}: {name}"))


# ---- compiling


def compiling(plan: Plan) -> list[dict[str, Any]]:
    """Measure a burst alone, and while another client's model is compiled, in one driver, on cores apart."""
    executed, compiled = (plan.path(name) for name in COMPILING)
    turn, allowed = plan.turn(COMPILING_COUNT, turns=1), sorted(placement.ALLOWED)
    own, others = ((allowed[0],), (allowed[1],)) if len(allowed) < 4 else ((allowed[0],), (allowed[2],))
    client = own if len(allowed) < 4 else (allowed[1],)
    samples: dict[str, list[list[int]]] = {"alone": [], "beside": []}
    preparations = 0
    with _driver() as address:
        job = Job(BURST, executed, own, client, connect=address, limit_s=plan.limit_s)
        other = Job("compiling", compiled, others, others, connect=address, limit_s=plan.limit_s)
        targets = [(child_main, (job,)), (_compiling_main, (other,))]
        with started(targets, duplex=True) as (burst, compiler):
            pids = [pid for end in (burst, compiler) for pid in received(end, plan.limit_s).pids]
            for _ in range(plan.rounds):
                plan.advance("a burst alone")
                wait_until_quiet(pids)
                samples["alone"].append(_turn(burst, turn, plan.limit_s))
                plan.advance("a burst beside a compilation")
                compiler.send(True)
                received(compiler, plan.limit_s)  # it has begun
                samples["beside"].append(_turn(burst, turn, plan.limit_s))
                compiler.send(False)
                preparations += received(compiler, plan.limit_s)
    figures = {name: figures_of(rounds) for name, rounds in samples.items()}
    row = compiling_row(COMPILING[0], COMPILING[1], figures["alone"], figures["beside"])
    return [row | {"count": turn.count, "rounds": plan.rounds, "preparations": preparations}]


def _turn(connection: Connection, turn: Turn, limit_s: int) -> list[int]:
    connection.send(turn)
    times: list[int] = received(connection, limit_s)[0]
    return times


@contextmanager
def _driver() -> Iterator[str]:
    """Run `nnfmq serve` in a folder of its own, without its cache; yields where it listens."""
    with cache_disabled(), tempfile.TemporaryDirectory(prefix="nnfmq-bench-") as folder:
        socket = Path(folder) / "driver.sock"
        command = [sys.executable, "-P", "-m", "nnfmq", "serve", "--socket", str(socket)]
        driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert driver.stdout is not None
        try:
            if not driver.stdout.readline():
                raise Failed(f"nnfmq serve ended with {driver.wait()}")
            yield str(socket)
        finally:
            driver.terminate()
            driver.wait()
            driver.stdout.close()


@dataclass(frozen=True, slots=True)
class _Compiler:
    """What the client that compiles says first."""

    pids: tuple[int, ...]


def _compiling_main(connection: Connection, job: Job) -> None:
    """Let the driver compile again and again, between a True and a False; say that it began, and then how often."""
    signal.alarm(job.limit_s)
    try:
        with open_client(job.connect) as client:
            placement.pin_to(client.driver_pid, job.cpus)
            placement.pin_to(0, job.client_cpus)
            device, model = client.device("compiled"), loaded(job.source)
            device.prepare(model, preference=SUSTAINED).close()
            connection.send(_Compiler((client.driver_pid,)))
            while _asked(connection):
                signal.alarm(job.limit_s)
                connection.send(None)
                count = 0
                while not connection.poll():
                    device.prepare(model, preference=SUSTAINED).close()
                    count += 1
                connection.recv()
                connection.send(count)
    except EOFError:
        pass  # the benchmark is over
    except (NnfmqError, OSError) as error:
        connection.send(Failed(f"{type(error).__name__}: {error}"))
    finally:
        connection.close()


def _asked(connection: Connection) -> bool:
    signal.alarm(0)  # the other party's turn may take long
    return bool(connection.recv())


# ---- growth


def growth(plan: Plan) -> dict[str, Any]:
    """Return latency against image size and channels, of models of one operation, and against threads."""
    return {
        "size": [_series(plan, kind, dtype, "size", plan.some(SIZES)) for kind in KINDS for dtype in TYPES],
        "channels": [_series(plan, kind, dtype, "channels", plan.some(CHANNELS)) for kind in KINDS for dtype in TYPES],
        "at": {"size": AT_SIZE, "channels": AT_CHANNELS},
        "threads": [_threads(plan, model) for model in plan.models if model.file == SCALING],
    }


def _series(plan: Plan, kind: str, dtype: str, what: str, values: Sequence[int]) -> dict[str, Any]:
    points = [_point(plan, kind, dtype, what, value) for value in values]
    pixels = [value**2 if what == "size" else value for value in values]
    exponents = {
        party: growth_exponent(pixels, [point[party] for point in points]) for party in ("burst_us", "in_process_us")
    }
    return {"operation": kind, "type": dtype, "points": points, "exponents": exponents}


def _point(plan: Plan, kind: str, dtype: str, what: str, value: int) -> dict[str, Any]:
    size, channels = (value, AT_CHANNELS) if what == "size" else (AT_SIZE, value)
    label = f"{kind}, {dtype}, {what} {value}"
    figures = _pair(plan, generated(kind, dtype, size, channels), 1, GROWTH_COUNT, label).figures()
    return {what: value, "burst_us": figures[BURST]["p50"], "in_process_us": figures[IN_PROCESS]["p50"]}


def _threads(plan: Plan, model: Benchmark) -> dict[str, Any]:
    path, counts = plan.path(model.file), range(1, len(placement.ALLOWED) + 1)
    kinds = {BURST: _burst, IN_PROCESS: _in_process}
    jobs = {named(kind, n): make(plan, path, n) for n in counts for kind, make in kinds.items()}
    found = take_turns(jobs, plan.turn(GROWTH_COUNT), plan.rounds, lambda name: plan.advance(f"threads: {name}"))
    figures = found.figures()
    points = [
        {
            "threads": n,
            "burst_us": figures[named(BURST, n)]["p50"],
            "in_process_us": figures[named(IN_PROCESS, n)]["p50"],
        }
        for n in counts
    ]
    return {"model": model.name, "points": points}


# ---- roofline


def roofline(plan: Plan) -> dict[str, Any]:
    """Return the peaks of one core, and how near the models come to them with one thread, in process."""
    plan.advance("the machine's peaks")
    peaks = _peaks(plan.limit_s)
    jobs = {model.name: _in_process(plan, plan.path(model.file), 1) for model in plan.models}
    turns = {model.name: plan.turn(model.count // 4) for model in plan.models}
    found = take_turns(jobs, turns, plan.rounds, lambda name: plan.advance(f"roofline: {name}"))
    rows = [
        roofline_row(
            model.name, model_cost(loaded(plan.path(model.file)).model), found.figures()[model.name]["p50"], peaks
        )
        for model in plan.models
    ]
    return {"peaks": peaks, "models": rows}


def _peaks(limit_s: int) -> Mapping[str, float | None]:
    with started([(_peaks_main, (limit_s,))]) as (connection,):
        peaks: Mapping[str, float | None] = received(connection, limit_s)
    return peaks


PEAKS = {
    "float32_operations": "float32",
    "code_operations": "quantized",
    "memory_bytes": "memory",
    "cache_bytes": "cache",
}
"""What the report calls the peaks that the engine measures."""


def _peaks_main(connection: Connection, limit_s: int) -> None:
    signal.alarm(limit_s)
    from nnfmq.engines.compiled.roofline import measure_ceilings
    from nnfmq.engines.compiled.thread_pool import ThreadPool

    placement.pin_to(0, cores(1))
    peaks = measure_ceilings(ThreadPool(0))
    connection.send({f"{name}_per_s": 1e9 * peaks[kind].one_thread for name, kind in PEAKS.items()})
    connection.close()


SECTIONS: dict[str, Callable[[Plan], Any]] = {
    "models": models,
    "cost": cost,
    "compiling": compiling,
    "growth": growth,
    "roofline": roofline,
}
"""By the names that --sections takes."""

NEEDS_TWO_CORES = frozenset(("cost", "compiling", "growth"))


def turns_of(name: str, plan: Plan) -> int:
    """Return how often a section advances the progress bar."""
    threads = len({1, most_threads()})
    pairs = {"cost": len(plan.models) * min(THREADS, len(placement.ALLOWED) - 1)}
    pairs["growth"] = len(KINDS) * len(TYPES) * sum(len(plan.some(values)) for values in (SIZES, CHANNELS))
    pairs["growth"] += len(placement.ALLOWED) * any(model.file == SCALING for model in plan.models)
    turns = TURNS * plan.rounds
    if name in pairs:
        return 2 * pairs[name] * turns
    return {
        "models": len(plan.models) * threads * (2 + len(PEERS)) * turns,
        "compiling": 2 * plan.rounds,
        "roofline": 1 + len(plan.models) * turns,
    }[name]


def polling_windows() -> dict[str, str]:
    """Return which windows the sections poll for."""
    from nnfmq.queue.hybrid_polling import DEFAULT_WINDOW_US

    default = f"default ({DEFAULT_WINDOW_US} µs; {CLIENT_WINDOW} and {SERVER_WINDOW} change it)"
    return {
        "models, compiling, threads": default,
        "cost, growth": f"{POLLING_US:g} µs: both ends poll for as long as they wait",
    }
