"""Measure models on nnfmq, LiteRT, ONNX Runtime and OpenVINO, interleaved.

Every runner has a separate process, their trials are interleaved, and only one runner computes at any time. The times
include writing the input and reading the output, for all runners. A baseline that is not installed is reported as
missing. The machine should do nothing else meanwhile. docs/explanation/performance.md describes the method.

    python tools/model_bench.py --models FOLDER --json > performance.json    # most of an hour
    python tools/model_bench.py --models FOLDER --sections models --only mobilenet_v1_0.25_128_quant
    python tools/model_bench.py --models FOLDER --minutes 5
    python tools/model_bench.py --models FOLDER --quick
    python tools/model_bench.py --models FOLDER --against-ref REVISION
    python tools/model_bench.py --report performance.json --results docs/explanation/performance

*models* compares the device `compiled` over a burst, and called in process, with the baselines in process.
*transformers* does so with generated models: transformer blocks, and products with large weights. A metric of a runner
is p50, p99 or p99.9 of its executions in all rounds together, in µs; a percentile that fewer than ten executions exceed
is not reported. Targets are limits for the ratio of a metric to that of the best baseline; its interval is that of the
ratios of the rounds. The same report gives the same tables and the same plot. After Ctrl-C, what has been measured is
printed. With `--against-ref`, compared_versions.py measures two versions of nnfmq instead.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from bench_support import (
    CLIENT_WINDOW,
    GRACE_S,
    MIN_ROUNDS,
    REPORTED_PERCENTILES,
    SERVER_WINDOW,
    Metrics,
    Report,
    Table,
    Tables,
    Target,
    add_common_options,
    format_metric,
    format_threads,
    interval_limit,
    parser_for,
    percentiles,
    positive,
    progress,
    ratio_columns,
    run,
    some_of,
)
from compared_versions import VersionsPlan, compare_versions, version_tables
from generated_models import generate

import nnfmq
from nnfmq.base import settings
from nnfmq.base.packages import installed_version
from nnfmq.hal.preparation import require_machine_code
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import ExecutionPreference
from nnfmq.lab import placement
from nnfmq.lab.bench.measurement import rotated
from nnfmq.lab.bench.peers import PEERS, PeerJob, opened_peer
from nnfmq.lab.bench.steps import Array, Runner, fastest_variant, make_step, random_input, states_of, timed
from nnfmq.lab.child_processes import FunctionProcess, RunnerUnavailable, set_time_limit, started_child
from nnfmq.lab.placement import wait_until_idle

# ---- models and their targets


BURST, IN_PROCESS = "nnfmq burst", "nnfmq in process"
BASELINES = ("LiteRT", "ONNX Runtime", "OpenVINO")
TAIL_RATIOS = {"p99": 1.3, "p99.9": 2.0}
"""Limits of every model's tail over that of the baseline whose tail is the shortest."""


def runner_name(kind: str, threads: int) -> str:
    """Return the name of a runner with this number of threads."""
    return f"{kind}, {format_threads(threads)}"


@dataclass(frozen=True, slots=True)
class ModelBenchmark:
    """One model: its file (without .tflite), and the limits for p50 over the best baseline's, by number of threads.

    `subject` is the runner that is compared with the baselines, `count` the number of steps of a runner in each round.
    """

    file: str
    targets: tuple[float, float]
    subject: str = BURST
    count: int = 2000

    @property
    def name(self) -> str:
        """The model's name in tables."""
        return self.file.rpartition("/")[2]

    @property
    def runners(self) -> tuple[str, ...]:
        """The kinds of runners that are measured."""
        return (*dict.fromkeys((self.subject, IN_PROCESS)), *BASELINES)


MODELS = (
    ModelBenchmark("mobilenet_v1_0.25_128", (0.95, 0.95)),
    ModelBenchmark("mobilenet_v1_0.25_128_quant", (0.50, 0.60)),
    ModelBenchmark("mobilenet_v1_0.75_192_quant", (0.47, 0.50)),
    ModelBenchmark("mobilenet_v2_1.0_224_quant", (0.47, 0.50)),
    ModelBenchmark("micro/mobilenet_v2_int8_per_channel_224", (0.80, 0.85)),
    ModelBenchmark("tts_float", (0.80, 0.80)),
)
TRANSFORMERS = (
    *(
        ModelBenchmark(f"block_{width}x{length}_{dtype}", (1.0, 1.0), BURST, count)
        for width, length, count in ((256, 1, 2000), (256, 128, 500), (768, 1, 2000), (768, 128, 100))
        for dtype in ("float32", "int8")
    ),
    *(
        ModelBenchmark(f"product_{size}x{rows}_{dtype}", (1.0, 1.0), IN_PROCESS, count)
        for size, counts in (("768x3072", (2000, 1000, 300)), ("4096x4096", (300, 200, 40)))
        for rows, count in zip((1, 8, 128), counts, strict=True)
        for dtype in ("float32", "int8")
    ),
)
"""Models that generated_models.py makes."""
Rounds = Sequence[Mapping[str, Metrics]]
"""The metrics of every runner by round; the interval of a target is computed from them."""


def model_row(
    model: ModelBenchmark, metrics: Mapping[str, Metrics], threads: int, by_round: Rounds = ()
) -> dict[str, Any]:
    """Return a model's targets with `threads` threads: p50, p99 and p99.9 of its subject over the best baseline's."""
    baselines = tuple(runner_name(kind, threads) for kind in BASELINES)
    subject, what = runner_name(model.subject, threads), model.subject.removeprefix("nnfmq ")
    limits = {"p50": model.targets[threads - 1], **TAIL_RATIOS}
    targets = [
        _ratio_target(f"{metric} of {what} / best baseline", subject, metric, limit, baselines, metrics, by_round)
        for metric, limit in limits.items()
    ]
    measured = [name for name in baselines if name in metrics]
    return {
        "model": model.name,
        "threads": threads,
        "best_baseline": min(measured, key=lambda name: metrics[name]["p50"]).partition(",")[0] if measured else None,
        "subject": model.subject,
        "subject_us": metrics[subject]["p50"],
        "baseline_us": min((metrics[name]["p50"] for name in measured), default=None),
        "targets": targets,
    }


def _ratio_target(
    text: str, subject: str, metric: str, limit: float, baselines: tuple[str, ...], metrics: Mapping[str, Metrics],
    by_round: Rounds,
) -> dict[str, Any]:  # fmt: skip
    target = Target(text, subject, metric, limit, "×", baselines)
    ratios = [ratio for each in by_round if (ratio := target.value(each)) is not None]
    return interval_limit(text, ratios, target.value(metrics), limit)


def max_output_difference(outputs: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the largest difference of outputs: in quantized steps, or relative to the largest float."""
    worst = 0.0
    for found, correct in zip(outputs, expected, strict=True):
        distance = float(np.abs(np.asarray(found, np.float64) - np.asarray(correct, np.float64)).max())
        scale = float(np.abs(correct).max()) if np.asarray(correct).dtype.kind == "f" else 1.0
        worst = max(worst, distance / scale if scale else distance)
    return worst


def targets_of(report: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return every target of a report with the label of its row."""
    rows = [row for section in SECTIONS for found in report.get(section, ()) for row in found["comparisons"]]
    return [(runner_name(row["model"], row["threads"]), target) for row in rows for target in row["targets"]]


# ---- sections


THREADS = 2  # of the runners that are compared
QUICK_DIVISOR = 100


@dataclass(frozen=True, slots=True)
class BenchmarkPlan:
    """The models, the folder of their files, and the number of rounds and steps.

    With `model_s`, a model is measured for that many seconds, in as many rounds as fit, at least MIN_ROUNDS.
    """

    folder: Path
    models: tuple[ModelBenchmark, ...]
    rounds: int
    divisor: int  # of all counts: 1, more in a quick run
    limit_s: int
    advance: Callable[[str], object]
    model_s: float | None = None

    def trial(self, count: int) -> Trial:
        """Return one of the trials that together have `count` steps, or fewer in a quick run."""
        fewer = max(10, count // self.divisor // TRIALS_PER_ROUND)
        return Trial(fewer, min(50, max(3, fewer // 10)), None if self.model_s is None else TRIAL_S)


def models(plan: BenchmarkPlan) -> Iterator[dict[str, Any]]:
    """Compare all runners on each model, with one thread and with two."""
    for model in plan.models:
        yield _model(plan, model, plan.folder / f"{model.file}.tflite")


def transformers(plan: BenchmarkPlan) -> Iterator[dict[str, Any]]:
    """Compare the runners on generated transformer blocks, and the engine in process on products."""
    with tempfile.TemporaryDirectory(prefix="nnfmq-bench-") as folder:
        for model in TRANSFORMERS:
            path = Path(folder) / f"{model.file}.tflite"
            path.write_bytes(generate(model.file))
            yield _model(plan, model, path)
            path.unlink()


def _model(plan: BenchmarkPlan, model: ModelBenchmark, path: Path) -> dict[str, Any]:
    jobs = {
        runner_name(kind, threads): RunnerJob(
            kind, path, compute_cpus(threads), client_cpus(threads) if kind == BURST else (), plan.limit_s
        )
        for threads in thread_counts()
        for kind in model.runners
    }
    trial = plan.trial(model.count)
    found = run_interleaved(
        jobs, trial, plan.rounds, lambda name: plan.advance(f"{model.name}: {name}"), model_s=plan.model_s
    )
    metrics, subject = found.metrics(), found.outputs[runner_name(IN_PROCESS, 1)]
    runners = {
        name: values | found.details[name] | {"output_difference": max_output_difference(found.outputs[name], subject)}
        for name, values in metrics.items()
    }
    by_round = found.metrics_by_round()
    conditions = {
        "executions": {name: sum(map(len, trials)) for name, trials in found.samples.items()},
        "rounds": len(by_round),
        "is_quantized": subject[0].dtype.kind != "f",
    }
    comparisons = [model_row(model, metrics, threads, by_round) for threads in thread_counts()]
    return {"model": model.name, "comparisons": comparisons, **conditions, "runners": runners, "missing": found.missing,
            "interrupted": found.is_interrupted}  # fmt: skip


def compute_cpus(threads: int) -> tuple[int, ...]:
    """Return the CPUs on which `threads` threads compute."""
    return tuple(sorted(placement.ALLOWED)[:threads])


def client_cpus(threads: int) -> tuple[int, ...]:
    """Return the CPU for a burst's client: the next one after the computing CPUs, or all if there is none."""
    allowed = sorted(placement.ALLOWED)
    return (allowed[threads],) if len(allowed) > threads else tuple(allowed)


def thread_counts() -> range:
    """Return the numbers of threads with which runners are compared: 1, and 2 if two CPUs are allowed."""
    return range(1, min(THREADS, len(placement.ALLOWED)) + 1)


SECTIONS: dict[str, Callable[[BenchmarkPlan], Iterator[dict[str, Any]]]] = {
    "models": models,
    "transformers": transformers,
}
"""By the names that --sections takes."""


def count_trials(name: str, plan: BenchmarkPlan) -> int:
    """Return how often a section advances the progress bar."""
    rounds = plan.rounds if plan.model_s is None else MIN_ROUNDS
    return (
        sum(len(model.runners) for model in compared_in(name, plan)) * len(thread_counts()) * TRIALS_PER_ROUND * rounds
    )


def compared_in(name: str, plan: BenchmarkPlan) -> Sequence[ModelBenchmark]:
    """Return the models of a section."""
    return {"models": plan.models, "transformers": TRANSFORMERS}[name]


# ---- interleaved trials


Samples = list[list[int]]
"""Times in ns, by trial or by round."""
TRIALS_PER_ROUND = 5  # of each runner: a period in which the machine is slower affects all of them
TRIAL_S = 0.03  # at most, if the time of a model is limited: many short trials, because the interval is of rounds


@dataclass(slots=True)
class Measurements:
    """Times in ns by runner and trial; details and first outputs by runner; the reason for each missing runner."""

    samples: dict[str, Samples] = field(default_factory=dict)
    details: dict[str, dict[str, Any]] = field(default_factory=dict)
    outputs: dict[str, list[Any]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    is_interrupted: bool = False

    def metrics(self) -> dict[str, Metrics]:
        """Return the metrics of all executions of each runner, in µs, without those of too few executions."""
        found = {}
        for name, trials in self.samples.items():
            count = sum(map(len, trials))
            known = {metric: percent for metric, percent in REPORTED_PERCENTILES.items()
                     if count * (1000 - 10 * percent) >= 1000 * EXCEEDING or percent <= 50}  # fmt: skip
            found[name] = percentiles(itertools.chain(*trials), 1000, known)
        return found

    def metrics_by_round(self) -> list[dict[str, Metrics]]:
        """Return the metrics of each runner in each round, in µs."""
        count = min(map(len, self.samples.values()), default=0)
        rounds = (slice(first, first + TRIALS_PER_ROUND) for first in range(0, count, TRIALS_PER_ROUND))
        return [{name: metrics_of(trials[part]) for name, trials in self.samples.items()} for part in rounds]


EXCEEDING = 10
"""So many executions exceed a percentile that is reported: p99 needs 1,000 executions, p99.9 10,000."""


def metrics_of(samples: Samples) -> Metrics:
    """Return the percentiles of all times together, in µs."""
    return percentiles(itertools.chain(*samples), 1000)


def run_interleaved(
    jobs: Mapping[str, RunnerJob], trial: Trial, rounds: int, advance: Callable[[str], object], *,
    model_s: float | None = None,
) -> Measurements:  # fmt: skip
    """Run `rounds` rounds of TRIALS_PER_ROUND trials of all runners, each time beginning with another one.

    With `model_s`, there are as many rounds as fit in so many seconds, preparation included, but at least MIN_ROUNDS.
    If the user interrupts it after a whole round, the rounds until then are the result.

    Raises:
        BenchmarkFailed: If a runner fails, or does not become idle.
    """
    end = None if model_s is None else time.monotonic() + model_s
    measured, present = Measurements(), {}
    with ExitStack() as stack:
        for name, job in jobs.items():  # one after the other, because preparing occupies a CPU and its time is reported
            runner = stack.enter_context(started_child(child_main, job, name=name))
            try:
                present[name] = runner, runner.receive(job.limit_s + GRACE_S)
            except RunnerUnavailable as reason:
                measured.missing[name] = str(reason)
        for name, (_, ready) in present.items():
            measured.outputs[name], measured.samples[name] = ready.outputs, []
        for number in itertools.count():
            if number >= rounds if end is None else number >= MIN_ROUNDS and time.monotonic() > end:
                return measured
            try:
                _run_round(number, jobs, present, trial, measured, advance)
            except KeyboardInterrupt:
                if not number:
                    raise
                for trials in measured.samples.values():
                    del trials[number * TRIALS_PER_ROUND :]
                measured.is_interrupted = True
                return measured
    raise AssertionError("a loop without an end")


def _run_round(
    number: int, jobs: Mapping[str, RunnerJob], present: Mapping[str, tuple[FunctionProcess, Ready]], trial: Trial,
    measured: Measurements, advance: Callable[[str], object],
) -> None:  # fmt: skip
    """Run TRIALS_PER_ROUND trials of all runners.

    A trial begins only when no runner's process has used the CPU in two consecutive polls: the runtimes' threads poll
    for some time after a run, and would compete with the next runner.
    """
    pids = [pid for _, ready in present.values() for pid in ready.pids]
    for trial_number in range(number * TRIALS_PER_ROUND, (number + 1) * TRIALS_PER_ROUND):
        for name in rotated(list(jobs), trial_number):
            advance(name)
            if name in present:
                wait_until_idle(pids)
                present[name][0].send(trial)
                times, measured.details[name] = present[name][0].receive(jobs[name].limit_s + GRACE_S)
                measured.samples[name].append(times)


# ---- runners, each in a process of its own


_SEED = 7
_SUSTAINED = ExecutionPreference.SUSTAINED_SPEED  # machine code, without a baseline program that runs first


@dataclass(frozen=True, slots=True)
class RunnerJob:
    """One runner; sent to its process. It computes on `cpus`, one thread per CPU."""

    kind: str
    source: Path
    cpus: tuple[int, ...]
    client_cpus: tuple[int, ...] = ()
    limit_s: int = 120


@dataclass(frozen=True, slots=True)
class Trial:
    """A request to a runner: `count` steps that are timed, after `warm_up` steps that are not.

    There are fewer steps, but at least one, if `count` take longer than `limit_s`.
    """

    count: int
    warm_up: int
    limit_s: float | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """The first message of a runner: its processes, its details, and the outputs of its first step."""

    pids: tuple[int, ...]
    details: dict[str, Any]
    outputs: list[Array]


def inputs_for(infos: Sequence[TensorInfo]) -> list[Array]:
    """Return random arrays, the same for every runner."""
    random = np.random.default_rng(_SEED)
    return [random_input(info, random) for info in infos]


def child_main(connection: Connection, job: RunnerJob) -> None:
    """Report that the runner is ready, then run the requested trials and send their times in ns. Entry point.

    It is pinned to its CPUs before it creates threads, which decides their number.
    """
    set_time_limit(job.limit_s)
    placement.pin_to(0, job.client_cpus or job.cpus)
    with RUNNERS[job.kind](job, nnfmq.load(job.source)) as runner:
        _serve(connection, job, runner)


def _serve(connection: Connection, job: RunnerJob, runner: Runner) -> None:
    inputs = inputs_for(nnfmq.load(job.source).inputs)
    outputs = [np.array(array) for array in next(iter(runner.variants.values()))(inputs)]
    connection.send(Ready((os.getpid(), *runner.pids), runner.details, outputs))
    step = None
    while True:
        set_time_limit(0)  # no limit while other runners compute; the connection closes when the benchmark ends
        trial = connection.recv()
        set_time_limit(job.limit_s)
        with np.errstate(all="ignore"):
            if step is None:
                step, runner.details["api_variant"] = fastest_variant(runner.variants, inputs)
            step_ns = statistics.median(timed(step, inputs, trial.warm_up))
            count = (
                trial.count if trial.limit_s is None else min(trial.count, max(1, int(trial.limit_s * 1e9 / step_ns)))
            )
            connection.send((timed(step, inputs, count), runner.details))


@contextmanager
def _in_process(job: RunnerJob, model: Any) -> Iterator[Runner]:
    """The compiling engine, called directly."""
    from nnfmq.engines.compiled.partition import prepare
    from nnfmq.engines.compiled.thread_pool import default_thread_pool

    inputs, states = inputs_for(model.inputs), states_of(model)
    input_buffers = [*(array.copy() for array in inputs), *states]
    output_buffers = [*(np.zeros(i.shape, i.dtype) for i in model.outputs), *map(np.zeros_like, states)]
    begin = time.perf_counter()
    program = prepare(model.model)
    details = {"prepare_s": time.perf_counter() - begin, "threads": default_thread_pool().worker_count + 1}
    execution = program.bind(input_buffers, output_buffers)
    try:
        yield Runner({"bound": make_step(len(inputs), input_buffers, output_buffers, execution.run)}, (), details)
    finally:
        default_thread_pool().stop()


@contextmanager
def _burst(job: RunnerJob, model: Any) -> Iterator[Runner]:
    """The device `compiled` of a driver process, over a burst; arrays are written to and read from its memory."""
    with ExitStack() as stack:
        client = stack.enter_context(nnfmq.connect(embedded=True, recover=False))
        placement.pin_to(client.worker_pid, job.cpus)  # the size of its thread pool follows its affinity
        device = client.device("compiled")
        begin = time.perf_counter()
        prepared = stack.enter_context(device.prepare(model, preference=_SUSTAINED, timeout=job.limit_s))
        require_machine_code(prepared.device, prepared.program, prepared.compiled_operations)
        details = {"prepare_s": time.perf_counter() - begin, "threads": len(job.cpus)}
        # When a burst is created, each process decides by the number of its allowed CPUs whether it polls.
        for pid in (0, client.worker_pid):
            placement.pin_process(pid, None)
        burst = stack.enter_context(prepared.burst())
        inputs = inputs_for(model.inputs)
        for buffer, array in zip(burst.inputs, inputs, strict=True):
            buffer[...] = array
        placement.pin_to(client.worker_pid, job.cpus)
        placement.pin_to(0, job.client_cpus)
        outputs = burst.outputs

        def run() -> None:
            burst.execute(out=outputs, timeout=job.limit_s)

        step = make_step(len(inputs), burst.inputs, outputs, run)
        yield Runner({"in place": step}, (client.worker_pid,), details)


def _peer(name: str, job: RunnerJob, model: Any) -> AbstractContextManager[Runner]:
    return opened_peer(name, PeerJob(job.source, model, len(job.cpus)))


RUNNERS: dict[str, Callable[[RunnerJob, Any], AbstractContextManager[Runner]]] = {
    BURST: _burst,
    IN_PROCESS: _in_process,
    **{name: partial(_peer, name) for name in PEERS},
}


# ---- the program


PACKAGES = ("ai-edge-litert", "onnxruntime", "openvino", "onnx", "llvmlite", "numpy")


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
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--rounds", type=positive, help="interleaved rounds (default: 6, of versions 20)")
    length.add_argument(
        "--minutes", type=float, metavar="M", help="measure for about so long, in as many rounds as fit, at least 6"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a hundredth of the steps: a smoke test, not a measurement"
    )
    parser.add_argument(
        "--against-ref", metavar="REVISION",
        help="compare this working tree with a commit; each is built in a folder of its own",
    )  # fmt: skip
    parser.add_argument("--limit", type=positive, default=120, metavar="S", help="time limit of a trial in seconds")
    parser.add_argument("--require-all", action="store_true", help="exit status 1 if something is not compared")
    add_common_options(parser)
    return parser


def measure(arguments: argparse.Namespace, folder: Path) -> Report:
    """Return the report, as --json prints it.

    Raises:
        BenchmarkFailed: If a runner fails.
    """
    if arguments.against_ref is not None:
        return _measured_versions(arguments, folder)
    rounds = arguments.rounds or (1 if arguments.quick else MIN_ROUNDS)
    divisor = QUICK_DIVISOR if arguments.quick else 1
    only = tuple(model for model in MODELS if model.name in arguments.only)
    plan = BenchmarkPlan(arguments.models, only, rounds, divisor, arguments.limit, lambda _: None)
    if arguments.minutes is not None:
        count = sum(len(compared_in(name, plan)) for name in arguments.sections)
        plan = replace(plan, model_s=60 * arguments.minutes / count)
    report: Report = {"conditions": _conditions(arguments.quick)} | {name: [] for name in arguments.sections}
    with progress(sum(count_trials(name, plan) for name in arguments.sections), arguments.no_color) as advance:
        _measure_sections(replace(plan, advance=advance), report, arguments.sections)
    missed = [f"{label}: {target['target']}" for label, target in targets_of(report) if target["met"] is False]
    missing = [
        f"{row['model']}: {runner}: {reason}"
        for section in arguments.sections
        for row in report[section]
        for runner, reason in row["missing"].items()
    ]
    return report | {"missed": missed, "not_compared": missing}


def _measure_sections(plan: BenchmarkPlan, report: Report, sections: Sequence[str]) -> None:
    """Add the rows of sections to the report; after Ctrl-C those that there are, and `interrupted`."""
    try:
        for name in sections:
            for row in SECTIONS[name](plan):
                report[name].append(row)
                if row["interrupted"]:
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        if not any(report[name] for name in sections):
            raise
        report["interrupted"] = True


def _measured_versions(arguments: argparse.Namespace, folder: Path) -> Report:
    files = {model.name: arguments.models / f"{model.file}.tflite" for model in MODELS if model.name in arguments.only}
    rounds = arguments.rounds or (2 if arguments.quick else 20)
    cpus = {threads: (compute_cpus(threads), client_cpus(threads)) for threads in thread_counts()}
    plan = VersionsPlan(files, cpus, rounds, arguments.minutes, arguments.quick, arguments.no_color)
    report: Report = {"conditions": _conditions(arguments.quick)}
    return report | compare_versions(arguments.against_ref, plan, folder)


def _conditions(is_quick: bool) -> dict[str, Any]:
    from nnfmq.engines.compiled.target import host_target
    from nnfmq.queue import core

    window_us = settings.BURST_SERVER_POLLING_WINDOW.default
    return {
        "target": host_target().name,
        "packages": {name: installed_version(name) for name in PACKAGES},
        "core": core.core_name,
        "cpus_used": {
            format_threads(n): {"computing": compute_cpus(n), "client": client_cpus(n)} for n in thread_counts()
        },
        "client_shares_cpus": len(placement.ALLOWED) <= max(thread_counts()),
        "polling_window": f"default ({window_us} µs; {CLIENT_WINDOW} and {SERVER_WINDOW} change it)",
        "clock": "time.perf_counter_ns, around the step: write the input, execute, read the output",
        "quick": is_quick,
    }


# ---- tables


def tables(report: Report) -> Tables:
    """Return the tables of the sections that the report has."""
    made: Tables = version_tables(report["versions"]) if "versions" in report else {}
    for name in SECTIONS:
        if report.get(name):
            made |= _compared(name, report[name])
    return made


def _compared(name: str, rows: Sequence[Report]) -> Tables:
    metrics = [column for metric in ("p50", *TAIL_RATIOS) for column in (f">{metric}", ">95 %", "")]
    ratios = [
        [
            row["model"], row["subject"], str(row["threads"]),
            *(column for target in row["targets"] for column in ratio_columns(target)),
            *(format_metric(row[each]) for each in ("subject_us", "baseline_us")), row["best_baseline"] or "-",
        ]
        for found in rows
        for row in found["comparisons"]
    ]  # fmt: skip
    runners = [
        [found["model"], runner, *(format_metric(metrics_of_runner.get(metric)) for metric in REPORTED_PERCENTILES),
         f"{metrics_of_runner['output_difference']:.2g}", metrics_of_runner["api_variant"]]
        for found in rows
        for runner, metrics_of_runner in found["runners"].items()
    ]  # fmt: skip
    heads = ("model", "runner", ">threads", *metrics, ">µs", ">best baseline µs", "best baseline")
    difference = ">difference (quantized steps, or relative)"
    runner_heads = ("model", "runner", ">p50 µs", ">p99", ">p99.9", difference, "API variant")
    return {
        name: Table(f"{name} compared with the best baseline", heads, ratios),
        f"{name}-runners": Table(f"runners of {name}", runner_heads, runners),
    }


# ---- the plot


WIDTH, HEIGHT = 9.0, 4.2
_BASELINE_COLORS = dict(zip(BASELINES, ("#d9822b", "#8a5fb0", "#4f8f4f"), strict=True))
COLORS = {BURST: "#0b6e99", IN_PROCESS: "#7fbcd2", **_BASELINE_COLORS}
_TARGET_LINE = {"color": "#b03030", "linestyle": "--", "linewidth": 1.2}
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "nnfmq",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
}


def draw(report: Report, folder: Path) -> None:
    """Draw models.svg into `folder`: p50 of each runner over the best baseline's; nothing without baselines."""
    import matplotlib as mpl

    mpl.use("Agg")
    rows = [row for row in report.get("models", []) if row["comparisons"][0]["best_baseline"]]
    if rows:
        with mpl.rc_context(_SETTINGS):
            _models_chart(rows).savefig(folder / "models.svg", metadata={"Date": None}, bbox_inches="tight")


def _short(name: str) -> str:
    short = name.removeprefix("mobilenet_").replace("_quant", "\nuint8")
    return short.replace("_int8_per_channel", "") + "\nint8 per channel" if "per_channel" in short else short


def _models_chart(rows: Sequence[Report]) -> Any:
    """Return bars of p50 over the best baseline's, above each other by number of threads; the target of each model."""
    from matplotlib.figure import Figure  # pyplot would keep a reference to every figure

    counts = [row["threads"] for row in rows[0]["comparisons"]]
    chart = Figure(figsize=(WIDTH, HEIGHT * (0.3 + 0.7 * len(counts))), layout="constrained")
    panels = chart.subplots(len(counts), squeeze=False).flat
    for index, (axes, threads) in enumerate(zip(panels, counts, strict=True)):
        _draw_runners(axes, rows, index)
        axes.set_xticks(range(len(rows)), [_short(row["model"]) for row in rows])
        axes.set_ylabel(f"p50 / best baseline's p50\n{format_threads(threads)}; less is faster")
        axes.grid(axis="x", visible=False)
    handles, labels = chart.axes[0].get_legend_handles_labels()
    chart.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    return chart


def _draw_runners(axes: Any, rows: Sequence[Mapping[str, Any]], index: int) -> None:
    """Draw each runner's bars and each model's target for the comparison at `index`."""
    kinds = (BURST, IN_PROCESS, *BASELINES)
    width = 0.8 / len(kinds)
    for number, kind in enumerate(kinds):
        places = [place - 0.4 + (number + 0.5) * width for place in range(len(rows))]
        heights = [_relative(row, row["comparisons"][index], kind) for row in rows]
        bars = axes.bar(places, heights, width * 0.94, color=COLORS[kind], label=kind)
        labels = axes.bar_label(
            bars, fmt=lambda value: f"{value:.2f}" if value else "", fontsize=7, padding=1, zorder=4
        )
        for label in labels:  # keeps the label readable if the target's line crosses it
            label.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.3})
    for place, row in enumerate(rows):
        limit = row["comparisons"][index]["targets"][0]["limit"]
        axes.hlines(limit, place - 0.4, place + 0.4, label="target" if not place else None, **_TARGET_LINE)


def _relative(row: Mapping[str, Any], comparison: Mapping[str, Any], kind: str) -> float:
    name = runner_name(kind, comparison["threads"])
    return row["runners"][name]["p50"] / comparison["baseline_us"] if name in row["runners"] else 0.0


if __name__ == "__main__":
    import model_bench  # by its name, by which child processes import it

    sys.exit(model_bench.main())
