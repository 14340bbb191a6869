"""The cost of hosting a runtime: a burst of each model on LiteRT and ONNX Runtime, beside the runtime in the process.

Five models, for ONNX Runtime exported from the same files, on one and two threads. Every runner has a process of its
own and is measured in turn with the others, as `nnfmq bench` does; all write their inputs and read their outputs, and
of the ways to call a runtime the fastest one is taken. *burst* has the default window, in which the client polls before
it sleeps; *burst, polling* polls all the while. What hosting adds is the difference of p50 to the runtime in the
process. Its limit is 6 µs and the time of one copy of the inputs and outputs, states among both, which is measured in a
cache of this process; it is for one thread: with two, on two CPUs, the client takes one of them from the runtime. The
machine should do nothing else. A run takes eight minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench_support import (
    REPORTED_PERCENTILES,
    Metrics,
    Report,
    Table,
    Tables,
    format_metrics,
    format_threads,
    missed_targets,
    model_file,
    percentiles,
    positive,
    some_of,
    targets_table,
    upper_limit,
)

import nnfmq
from nnfmq.cli.profile import random_inputs
from nnfmq.lab.bench.measurement import LoadPlan, MeasuredLoad, measure_plan
from nnfmq.lab.bench.onnx_export import export_to_onnx
from nnfmq.lab.bench.runner import OpenedFile
from nnfmq.lab.bench.steps import Array, Step
from nnfmq.lab.child_processes import BenchmarkFailed
from nnfmq.lab.listening_driver import started_daemon

RUNTIMES = {"litert": "LiteRT", "onnxruntime": "ONNX Runtime"}
"""The runner in the process, by the device that hosts the same runtime."""
MODELS = (
    "digits", "tts_float", "mobilenet_v1_0.25_128_quant", "mobilenet_v1_0.25_128", "mobilenet_v2_1.0_224_quant",
)  # fmt: skip
BURST, POLLING = "burst", "burst, polling"
LIMIT_US = 6.0
_OWN_FILES = Path(nnfmq.__file__).parent / "data"
_POLLING_US = 100_000
_COPIES = 200


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--runtimes", type=some_of(RUNTIMES), default=tuple(RUNTIMES), help="some of them, by commas")
    parser.add_argument("--models", type=some_of(MODELS), default=MODELS, help="some of them, by commas")
    parser.add_argument("--threads", type=_numbers, default=(1, 2), help="default: 1,2")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each runner of a model (default: 5)")
    parser.add_argument("--count", type=positive, help="executions of each runner, in place of --seconds: for tests")
    parser.set_defaults(model=None)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(positive(each) for each in text.split(","))


def measure(options: argparse.Namespace, folder: Path) -> Report:
    """Return the report, as --json prints it. `folder` is for the driver's files and the ONNX files.

    Raises:
        BenchmarkFailed: If the driver or a runner fails, or a model is missing.
    """
    rows = []
    with started_daemon(folder) as daemon:
        for runtime in options.runtimes:
            for name in options.models:
                path = _file_for(runtime, name, options, folder)
                rows += [_measured(runtime, name, path, threads, daemon.socket, options) for threads in options.threads]
    targets = [_target(row, runner) for row in rows if row["threads"] == 1 for runner in (POLLING, BURST)]
    conditions = {"seconds": options.seconds, "count": options.count}
    return {"conditions": conditions, "rows": rows, "targets": targets, "missed": missed_targets(targets)}


def _file_for(runtime: str, name: str, options: argparse.Namespace, folder: Path) -> Path:
    """Return the model's .tflite file, or for ONNX Runtime an .onnx file that is exported from it."""
    own = _OWN_FILES / f"{name}.tflite"
    path = own if own.exists() else model_file(options, f"models/{name}.tflite", name)
    if runtime == "litert":
        return path
    exported = folder / f"{name}.onnx"
    exported.write_bytes(export_to_onnx(nnfmq.load(path).model).proto.SerializeToString())
    return exported


def _measured(runtime: str, name: str, path: Path, threads: int, socket: str, options: argparse.Namespace) -> Report:
    print(f"runtimes: {name} on {RUNTIMES[runtime]}, {format_threads(threads)}", file=sys.stderr, flush=True)
    settings = {"threads": threads}
    with nnfmq.connect(socket) as client:
        opened = client.device(runtime).load(path, runtime_options=settings)
        inputs = random_inputs(opened.inputs, 1)
        outputs = [np.zeros(info.shape, info.dtype) for info in opened.outputs]
        states = [np.zeros(state.tensor.shape, state.tensor.dtype) for state in opened.states]
    plan = LoadPlan(
        model=path, inputs=[inputs], runners=(BURST, POLLING, RUNTIMES[runtime]), seconds=options.seconds,
        count=options.count, device=runtime, threads=threads, connect=socket,
        hosted=OpenedFile(settings, opened.inputs, opened.outputs, opened.states),
        own={POLLING: partial(_polling, socket, runtime, settings)},
    )  # fmt: skip
    if options.count is not None:
        plan = replace(plan, warm_up=1, seconds=60.0)
    found = measure_plan(plan)
    if found.missing:
        raise BenchmarkFailed("; ".join(f"{name}: {reason}" for name, reason in found.missing.items()))
    loads = {load.runner: load for load in found.loads}
    return {
        "runtime": runtime, "model": name, "threads": threads,
        "copy_us": _copy_us([*inputs, *outputs, *states, *states]),
        "runners": {name: _metrics(loads[name]) for name in plan.runners},
        "added_us": {each: _added(loads[each], loads[RUNTIMES[runtime]]) for each in (BURST, POLLING)},
    }  # fmt: skip


def _polling(socket: str, runtime: str, settings: dict[str, Any], path: Path) -> Step:
    """Return the step of a burst that never sleeps; its client ends with the process, which this runner has alone."""
    device = nnfmq.connect(socket, recover=False).device(runtime)
    prepared = device.prepare(path, runtime_options=settings)
    execute = prepared.burst(polling_window_us=_POLLING_US).execute
    return lambda inputs: execute(*inputs)


def _metrics(load: MeasuredLoad) -> Metrics:
    return percentiles((int(each) for trial in load.trials for each in trial.latencies), 1e3)


def _added(burst: MeasuredLoad, own: MeasuredLoad) -> list[float]:
    """Return the difference of p50 in µs, of each round."""
    pairs = zip(burst.trials, own.trials, strict=True)
    return [float(np.median(with_us.latencies) - np.median(without.latencies)) / 1e3 for with_us, without in pairs]


def _copy_us(arrays: Sequence[Array]) -> float:
    targets, times = [np.empty_like(array) for array in arrays], []
    for _ in range(_COPIES):
        begin = time.perf_counter_ns()
        for target, array in zip(targets, arrays, strict=True):
            target[...] = array
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return statistics.median(times)


# ---- results


def _target(row: Report, runner: str) -> Report:
    """Return the target of a model on one thread: what this runner adds to p50."""
    values = row["added_us"][runner]
    text = f"{row['model']}, {RUNTIMES[row['runtime']]}: what a {runner} adds to p50"
    return upper_limit(text, values, statistics.median(values), LIMIT_US + row["copy_us"], "µs")


def tables(report: Report) -> Tables:
    """Return the targets, and the percentiles of each runner with what hosting adds."""
    names = list(REPORTED_PERCENTILES)
    rows = []
    for row in report["rows"]:
        for runner, metrics in row["runners"].items():
            added = row["added_us"].get(runner)
            more = "" if added is None else f"{statistics.median(added):.1f}"
            noise = "" if added is None else f"{max(added) - min(added):.1f}"
            where = runner if added is not None else "in the process"
            start = [row["model"], RUNTIMES[row["runtime"]], str(row["threads"]), where]
            rows.append([*start, *format_metrics(metrics, names), more, noise, f"{row['copy_us']:.1f}"])
    headings = (
        "model",
        "runtime",
        ">threads",
        "runner",
        *(f">{name}, µs" for name in names),
        ">added to p50",
        ">noise",
        ">copy",
    )
    return {"targets": targets_table(report["targets"]), "runtimes": Table("hosted runtimes", headings, rows)}
