"""Measure models on nnfmq, LiteRT, ONNX Runtime and OpenVINO, and the overhead of a burst: all sections in one run.

Every runner has a separate process, their trials are interleaved, and only one runner computes at any time. The times
include writing the input and reading the output, for all runners. A baseline that is not installed is reported as
missing. The machine should do nothing else meanwhile. docs/explanation/performance.md describes the method.

    python tools/model_bench.py --models FOLDER --json > performance.json    # most of an hour
    python tools/model_bench.py --models FOLDER --sections models,cost --only mobilenet_v1_0.25_128_quant
    python tools/model_bench.py --models FOLDER --quick
    python tools/model_bench.py --report performance.json --results docs/explanation/performance

*models* compares the device `compiled` over a burst, and called in process, with the baselines in process.
*transformers* does so with generated models: transformer blocks, and products with large weights. *cost* compares the
burst with the same engine in process, and in another process, while all poll. *compiling* measures a burst while
another client of the same driver has a model compiled. *scaling* measures generated models of one operation in many
sizes, and one model with 1, 2, ... threads. *roofline* compares the models with the ceilings of one CPU. A metric of a
runner is p50, p99 or p99.9 of its executions in all rounds together, in µs.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench_support import (
    CLIENT_WINDOW,
    SERVER_WINDOW,
    Report,
    add_common_options,
    parser_for,
    positive,
    progress,
    receive_result,
    run,
    set_time_limit,
    some_of,
    started_processes,
)
from generated_models import KINDS, TYPES, GeneratedModel, count_model_cost, generate, generate_model
from model_bench_results import (
    BASELINES,
    BURST,
    IN_PROCESS,
    MODELS,
    SHARED,
    TRANSFORMERS,
    ModelBenchmark,
    compiling_row,
    cost_row,
    draw,
    format_threads,
    max_output_difference,
    model_row,
    roofline_row,
    runner_name,
    scaling_exponent,
    tables,
    targets_of,
)
from model_bench_runners import (
    SUSTAINED,
    TRIALS_PER_ROUND,
    Measurements,
    RunnerJob,
    Trial,
    batched,
    child_main,
    load_source,
    metrics_of,
    run_interleaved,
)

from nnfmq.base.packages import installed_version
from nnfmq.cli.console import open_client
from nnfmq.driver.cache.programs import cache_disabled
from nnfmq.hal.errors import NnfmqError
from nnfmq.lab import placement
from nnfmq.lab.bench.report import cpu_model
from nnfmq.lab.bench.runner_protocol import BenchmarkFailed
from nnfmq.lab.placement import wait_until_idle

# ---- sections


POLLING_US = 100_000
SIZES, CHANNELS = (8, 16, 32, 64, 128), (8, 16, 64, 256)
AT_SIZE, AT_CHANNELS = 16, 32
COST_COUNT, SCALING_COUNT, COMPILING_COUNT = 500, 300, 3000  # steps of a runner in each round
THREADS = 2  # of the runners that are compared
COMPILING = ("mobilenet_v1_0.25_128_quant", "mobilenet_v2_1.0_224_quant")  # the executed model, the compiled model
THREADS_MODEL = "mobilenet_v1_0.75_192_quant"


@dataclass(frozen=True, slots=True)
class BenchmarkPlan:
    """The models, the folder of their files, and the number of rounds and steps."""

    folder: Path
    models: tuple[ModelBenchmark, ...]
    rounds: int
    divisor: int  # of all counts: 1, more in a quick run
    limit_s: int
    advance: Callable[[str], object]

    def path(self, file: str) -> Path:
        """Return the .tflite file of a model."""
        return self.folder / f"{file}.tflite"

    def trial(self, count: int, trials: int = TRIALS_PER_ROUND) -> Trial:
        """Return one of `trials` trials that together have `count` steps, or fewer in a quick run."""
        fewer = max(10, count // self.divisor // trials)
        return Trial(fewer, min(50, max(3, fewer // 10)))

    def series_values(self, values: Sequence[int]) -> Sequence[int]:
        """Return the values of a series; in a quick run only the first two."""
        return values if self.divisor == 1 else values[:2]


# ---- placement


def compute_cpus(threads: int) -> tuple[int, ...]:
    """Return the CPUs on which `threads` threads compute."""
    return tuple(sorted(placement.ALLOWED)[:threads])


def client_cpu_set(threads: int) -> tuple[int, ...]:
    """Return the CPU for a burst's client: the next one after the computing CPUs, or all if there is none."""
    allowed = sorted(placement.ALLOWED)
    return (allowed[threads],) if len(allowed) > threads else tuple(allowed)


def _burst(plan: BenchmarkPlan, source: Path | GeneratedModel, threads: int, window_us: int | None = None) -> RunnerJob:
    return RunnerJob(BURST, source, compute_cpus(threads), client_cpu_set(threads), window_us, limit_s=plan.limit_s)


def _in_process(plan: BenchmarkPlan, source: Path | GeneratedModel, threads: int) -> RunnerJob:
    return RunnerJob(IN_PROCESS, source, compute_cpus(threads), limit_s=plan.limit_s)


def thread_counts() -> range:
    """Return the numbers of threads with which runners are compared: 1, and 2 if two CPUs are allowed."""
    return range(1, min(THREADS, len(placement.ALLOWED)) + 1)


# ---- models


def models(plan: BenchmarkPlan) -> list[dict[str, Any]]:
    """Compare all runners on each model, with one thread and with two."""
    return [_model(plan, model, plan.path(model.file)) for model in plan.models]


def transformers(plan: BenchmarkPlan) -> list[dict[str, Any]]:
    """Compare the runners on generated transformer blocks, and the engine in process on products."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="nnfmq-bench-") as folder:
        for model in TRANSFORMERS:
            path = Path(folder) / f"{model.file}.tflite"
            path.write_bytes(generate(model.file))
            rows.append(_model(plan, model, path))
            path.unlink()
    return rows


def _model(plan: BenchmarkPlan, model: ModelBenchmark, path: Path) -> dict[str, Any]:
    jobs = {}
    for threads in thread_counts():
        if model.subject == BURST:
            jobs[runner_name(BURST, threads)] = _burst(plan, path, threads)
        jobs[runner_name(IN_PROCESS, threads)] = _in_process(plan, path, threads)
        for kind in BASELINES:
            jobs[runner_name(kind, threads)] = RunnerJob(kind, path, compute_cpus(threads), limit_s=plan.limit_s)
    trial = plan.trial(model.count)
    found = run_interleaved(jobs, trial, plan.rounds, lambda name: plan.advance(f"{model.name}: {name}"))
    metrics, subject = found.metrics(), found.outputs[runner_name(IN_PROCESS, 1)]
    runners = {
        name: values | found.details[name] | {"output_difference": max_output_difference(found.outputs[name], subject)}
        for name, values in metrics.items()
    }
    conditions = {
        "count": TRIALS_PER_ROUND * trial.count,
        "rounds": plan.rounds,
        "is_quantized": subject[0].dtype.kind != "f",
    }
    by_round = found.metrics_by_round()
    comparisons = [model_row(model, metrics, threads, by_round) for threads in thread_counts()]
    return {"model": model.name, "comparisons": comparisons, **conditions, "runners": runners, "missing": found.missing}


# ---- cost


def cost(plan: BenchmarkPlan) -> list[dict[str, Any]]:
    """Compare the burst with the same engine in another process, and in process, with the same threads and CPUs.

    All poll. Only numbers of threads that leave a CPU for the client are measured.
    """
    rows = []
    for model in plan.models:
        for threads in range(1, min(THREADS, len(placement.ALLOWED) - 1) + 1):
            found = _polling(
                plan, plan.path(model.file), threads, COST_COUNT, f"cost of {model.name}", with_shared=True
            )
            differences = found.differences_us(BURST, SHARED)
            by_round = [statistics.median(each) for each in batched(differences, TRIALS_PER_ROUND)]
            cost_us = statistics.median(differences)
            rows.append(cost_row(model.name, threads, found.metrics(), cost_us, by_round))
    return rows


def _polling(
    plan: BenchmarkPlan,
    source: Path | GeneratedModel,
    threads: int,
    count: int,
    label: str,
    with_shared: bool = False,
) -> Measurements:
    """Measure a burst and the engine in process, and in another process; whoever waits polls."""
    jobs = {BURST: _burst(plan, source, threads, POLLING_US), IN_PROCESS: _in_process(plan, source, threads)}
    if with_shared:
        cpus = compute_cpus(threads), client_cpu_set(threads)
        jobs[SHARED] = RunnerJob(SHARED, source, *cpus, limit_s=plan.limit_s)
    return run_interleaved(jobs, plan.trial(count), plan.rounds, lambda name: plan.advance(f"{label}: {name}"))


# ---- compiling


def compiling(plan: BenchmarkPlan) -> list[dict[str, Any]]:
    """Measure a burst without load, and while another client's model is compiled by the same driver on other CPUs."""
    executed, compiled = (plan.path(name) for name in COMPILING)
    trial, allowed = plan.trial(COMPILING_COUNT, trials=1), sorted(placement.ALLOWED)
    own, others = ((allowed[0],), (allowed[1],)) if len(allowed) < 4 else ((allowed[0],), (allowed[2],))
    client = own if len(allowed) < 4 else (allowed[1],)
    samples: dict[str, list[list[int]]] = {"unloaded": [], "under_load": []}
    preparations = 0
    with _serving_driver() as address:
        job = RunnerJob(BURST, executed, own, client, connect=address, limit_s=plan.limit_s)
        other = RunnerJob("compiling", compiled, others, others, connect=address, limit_s=plan.limit_s)
        entries = [(child_main, (job,)), (_compiling_main, (other,))]
        with started_processes(entries, duplex=True) as (burst, compiler):
            pids = [pid for end in (burst, compiler) for pid in receive_result(end, plan.limit_s).pids]
            for _ in range(plan.rounds):
                plan.advance("a burst, unloaded")
                wait_until_idle(pids)
                samples["unloaded"].append(_run_trial(burst, trial, plan.limit_s))
                plan.advance("a burst under load")
                compiler.send(True)
                receive_result(compiler, plan.limit_s)  # compiling has begun
                samples["under_load"].append(_run_trial(burst, trial, plan.limit_s))
                compiler.send(False)
                preparations += receive_result(compiler, plan.limit_s)
    metrics = {name: metrics_of(rounds) for name, rounds in samples.items()}
    by_round = [
        {name: metrics_of([rounds[number]]) for name, rounds in samples.items()} for number in range(plan.rounds)
    ]
    row = compiling_row(COMPILING[0], COMPILING[1], metrics["unloaded"], metrics["under_load"], by_round)
    return [row | {"count": trial.count, "rounds": plan.rounds, "preparations": preparations}]


def _run_trial(connection: Connection, trial: Trial, limit_s: int) -> list[int]:
    connection.send(trial)
    times: list[int] = receive_result(connection, limit_s)[0]
    return times


@contextmanager
def _serving_driver() -> Iterator[str]:
    """Run `nnfmq serve` in a temporary folder, without its program cache; yield the socket's path."""
    with cache_disabled(), tempfile.TemporaryDirectory(prefix="nnfmq-bench-") as folder:
        socket = Path(folder) / "driver.sock"
        command = [sys.executable, "-P", "-m", "nnfmq", "serve", "--socket", str(socket)]
        driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert driver.stdout is not None
        try:
            if not driver.stdout.readline():
                raise BenchmarkFailed(f"nnfmq serve ended with {driver.wait()}")
            yield str(socket)
        finally:
            driver.terminate()
            driver.wait()
            driver.stdout.close()


@dataclass(frozen=True, slots=True)
class _Compiler:
    """The first message of the client that compiles."""

    pids: tuple[int, ...]


def _compiling_main(connection: Connection, job: RunnerJob) -> None:
    """Compile repeatedly between a True and a False from the parent. Entry point of a client process.

    Sends None when compiling begins, and the number of compilations at the end.
    """
    set_time_limit(job.limit_s)
    try:
        with open_client(job.connect) as client:
            placement.pin_to(client.worker_pid, job.cpus)
            placement.pin_to(0, job.client_cpus)
            device, model = client.device("compiled"), load_source(job.source)
            device.prepare(model, preference=SUSTAINED).close()
            connection.send(_Compiler((client.worker_pid,)))
            while _is_started(connection):
                set_time_limit(job.limit_s)
                connection.send(None)
                count = 0
                while not connection.poll():
                    device.prepare(model, preference=SUSTAINED).close()
                    count += 1
                connection.recv()
                connection.send(count)
    except EOFError:
        pass  # the parent has closed the connection: the benchmark is done
    except (NnfmqError, OSError) as error:
        connection.send(BenchmarkFailed(f"{type(error).__name__}: {error}"))
    finally:
        connection.close()


def _is_started(connection: Connection) -> bool:
    set_time_limit(0)  # no limit during the other runner's trial
    return bool(connection.recv())


# ---- scaling


def scaling(plan: BenchmarkPlan) -> dict[str, Any]:
    """Return latency by image size and by channels, for models of one operation, and by number of threads."""
    return {
        "size": [_series(plan, kind, dtype, "size", plan.series_values(SIZES)) for kind in KINDS for dtype in TYPES],
        "channels": [
            _series(plan, kind, dtype, "channels", plan.series_values(CHANNELS)) for kind in KINDS for dtype in TYPES
        ],
        "at": {"size": AT_SIZE, "channels": AT_CHANNELS},
        "threads": [_threads(plan, model) for model in plan.models if model.file == THREADS_MODEL],
    }


def _series(plan: BenchmarkPlan, kind: str, dtype: str, what: str, values: Sequence[int]) -> dict[str, Any]:
    points = [_point(plan, kind, dtype, what, value) for value in values]
    pixels = [value**2 if what == "size" else value for value in values]
    exponents = {
        runner: scaling_exponent(pixels, [point[runner] for point in points])
        for runner in ("burst_us", "in_process_us")
    }
    return {"operation": kind, "type": dtype, "points": points, "exponents": exponents}


def _point(plan: BenchmarkPlan, kind: str, dtype: str, what: str, value: int) -> dict[str, Any]:
    size, channels = (value, AT_CHANNELS) if what == "size" else (AT_SIZE, value)
    label = f"{kind}, {dtype}, {what} {value}"
    metrics = _polling(plan, generate_model(kind, dtype, size, channels), 1, SCALING_COUNT, label).metrics()
    return {what: value, "burst_us": metrics[BURST]["p50"], "in_process_us": metrics[IN_PROCESS]["p50"]}


def _threads(plan: BenchmarkPlan, model: ModelBenchmark) -> dict[str, Any]:
    path, counts = plan.path(model.file), range(1, len(placement.ALLOWED) + 1)
    kinds = {BURST: _burst, IN_PROCESS: _in_process}
    jobs = {runner_name(kind, n): make(plan, path, n) for n in counts for kind, make in kinds.items()}
    found = run_interleaved(jobs, plan.trial(SCALING_COUNT), plan.rounds, lambda name: plan.advance(f"threads: {name}"))
    metrics = found.metrics()
    points = [
        {
            "threads": n,
            "burst_us": metrics[runner_name(BURST, n)]["p50"],
            "in_process_us": metrics[runner_name(IN_PROCESS, n)]["p50"],
        }
        for n in counts
    ]
    return {"model": model.name, "points": points}


# ---- roofline


def roofline(plan: BenchmarkPlan) -> dict[str, Any]:
    """Return the ceilings of one CPU, and each model's share of them with one thread, in process."""
    plan.advance("ceilings of the machine")
    ceilings = _measure_ceilings(plan.limit_s)
    jobs = {model.name: _in_process(plan, plan.path(model.file), 1) for model in plan.models}
    trials = {model.name: plan.trial(COST_COUNT) for model in plan.models}
    found = run_interleaved(jobs, trials, plan.rounds, lambda name: plan.advance(f"roofline: {name}"))
    rows = [
        roofline_row(
            model.name,
            count_model_cost(load_source(plan.path(model.file)).model),
            found.metrics()[model.name]["p50"],
            ceilings,
        )
        for model in plan.models
    ]
    return {"ceilings": ceilings, "models": rows}


def _measure_ceilings(limit_s: int) -> Mapping[str, float | None]:
    with started_processes([(_ceilings_main, (limit_s,))]) as (connection,):
        ceilings: Mapping[str, float | None] = receive_result(connection, limit_s)
    return ceilings


CEILINGS = {
    "float32_operations": "float32",
    "quantized_operations": "quantized",
    "memory_bytes": "memory",
    "cache_bytes": "cache",
}
"""The names of ceilings in the report, and the engine's."""


def _ceilings_main(connection: Connection, limit_s: int) -> None:
    set_time_limit(limit_s)
    from nnfmq.engines.compiled.thread_pool import ThreadPool
    from nnfmq.lab.roofline import measure_ceilings

    placement.pin_to(0, compute_cpus(1))
    ceilings = measure_ceilings(ThreadPool(0))
    connection.send({f"{name}_per_s": 1e9 * ceilings[kind].one_thread for name, kind in CEILINGS.items()})
    connection.close()


SECTIONS: dict[str, Callable[[BenchmarkPlan], Any]] = {
    "models": models,
    "transformers": transformers,
    "cost": cost,
    "compiling": compiling,
    "scaling": scaling,
    "roofline": roofline,
}
"""By the names that --sections takes."""
NEEDS_TWO_CPUS = frozenset(("cost", "compiling", "scaling"))


def count_trials(name: str, plan: BenchmarkPlan) -> int:
    """Return how often a section advances the progress bar."""
    threads = len(thread_counts())
    pairs = {"cost": len(plan.models) * min(THREADS, len(placement.ALLOWED) - 1)}
    pairs["scaling"] = len(KINDS) * len(TYPES) * sum(len(plan.series_values(values)) for values in (SIZES, CHANNELS))
    pairs["scaling"] += len(placement.ALLOWED) * any(model.file == THREADS_MODEL for model in plan.models)
    trials = TRIALS_PER_ROUND * plan.rounds
    if name in pairs:
        return (3 if name == "cost" else 2) * pairs[name] * trials
    return {
        "models": sum(_runner_count(model) for model in plan.models) * threads * trials,
        "transformers": sum(_runner_count(model) for model in TRANSFORMERS) * threads * trials,
        "compiling": 2 * plan.rounds,
        "roofline": 1 + len(plan.models) * trials,
    }[name]


def _runner_count(model: ModelBenchmark) -> int:
    return len(BASELINES) + (2 if model.subject == BURST else 1)


def polling_windows() -> dict[str, str]:
    """Return the polling window by section."""
    from nnfmq.base import settings

    window_us = settings.BURST_SERVER_POLLING_WINDOW.default
    default = f"default ({window_us} µs; {CLIENT_WINDOW} and {SERVER_WINDOW} change it)"
    return {
        "models, transformers, compiling, threads": default,
        "cost, growth": f"{POLLING_US:g} µs: both ends poll for as long as they wait",
    }


# ---- the program


PACKAGES = ("ai-edge-litert", "onnxruntime", "openvino", "onnx", "llvmlite", "numpy")
QUICK_DIVISOR = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status as `bench_support.run`."""
    return run(_parser().parse_args(argv), measure, tables, "model_bench", draw)


def _parser() -> argparse.ArgumentParser:
    parser = parser_for(__doc__)
    parser.add_argument(
        "--models", metavar="FOLDER", type=Path, default=Path(os.environ.get("NNFMQ_DATA", ".")) / "models",
        help="folder of the .tflite files (default: `models` in $NNFMQ_DATA)",
    )  # fmt: skip
    for option, known, what in (
        ("--only", [model.name for model in MODELS], "model"),
        ("--sections", list(SECTIONS), "section"),
    ):
        parser.add_argument(option, type=some_of(known, what), default=tuple(known), metavar="NAME,...",
                            help=f"measure only these: {', '.join(known)}")  # fmt: skip
    parser.add_argument("--rounds", type=positive, help="interleaved rounds (default: 5, --quick: 1)")
    parser.add_argument(
        "--quick", action="store_true", help="a hundredth of the steps: a smoke test, not a measurement"
    )
    parser.add_argument("--limit", type=positive, default=120, metavar="S", help="time limit of a trial in seconds")
    parser.add_argument("--require-all", action="store_true", help="exit status 1 if something is not compared")
    add_common_options(parser)
    return parser


# ---- measuring


def measure(arguments: argparse.Namespace, _: Path) -> Report:
    """Return the report, as --json prints it.

    Raises:
        BenchmarkFailed: If a runner fails.
    """
    load = os.getloadavg()
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # idle threads of a BLAS would compete for the CPUs
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    divisor = QUICK_DIVISOR if arguments.quick else 1
    only = tuple(model for model in MODELS if model.name in arguments.only)
    plan = BenchmarkPlan(arguments.models, only, rounds, divisor, arguments.limit, lambda _: None)
    chosen, skipped = _supported_sections(arguments.sections)
    with progress(sum(count_trials(name, plan) for name in chosen), arguments.no_color) as advance:
        plan = replace(plan, advance=advance)
        report: Report = {"conditions": _conditions(load, arguments.quick)}
        report |= {name: SECTIONS[name](plan) for name in chosen}
    missed = [f"{label}: {target['target']}" for label, target in targets_of(report) if target["met"] is False]
    missing = [
        f"{row['model']}: {runner}: {reason}"
        for section in ("models", "transformers")
        for row in report.get(section, [])
        for runner, reason in row["missing"].items()
    ]
    return report | {"missed": missed, "not_compared": [*skipped, *missing]}


def _supported_sections(sections: Sequence[str]) -> tuple[list[str], list[str]]:
    if placement.two_cpus() is not None:
        return list(sections), []
    skipped = [f"{name}: only one CPU is allowed, and both ends poll" for name in sections if name in NEEDS_TWO_CPUS]
    return [name for name in sections if name not in NEEDS_TWO_CPUS], skipped


def _conditions(load: tuple[float, float, float], is_quick: bool) -> dict[str, Any]:
    from nnfmq.engines.compiled.target import host_target
    from nnfmq.queue import core

    threads = max(thread_counts())
    return {
        "cpu": cpu_model(),
        "target": host_target().name,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "core": core.core_name,
        "cpus_allowed": sorted(placement.ALLOWED),
        "cpus_used": {
            format_threads(n): {"computing": compute_cpus(n), "client": client_cpu_set(n)} for n in thread_counts()
        },
        "client_shares_cpus": len(placement.ALLOWED) <= threads,
        "polling_window": polling_windows(),
        "load_before": [round(value, 2) for value in load],
        "clock": "time.perf_counter_ns, around the step: write the input, execute, read the output",
        "quick": is_quick,
    }


if __name__ == "__main__":
    import model_bench  # by its name, by which child processes import it

    sys.exit(model_bench.main())
