"""The time of a model's calls: over a burst, `execute`, and `execute_async`, awaited and by its `result`.

One application calls models of some 10, 100 and 1000 µs, chains of LOGISTIC that are as long as it takes, on the device
`compiled` of a listening driver. In each round every call is made in blocks that alternate, each time in another order,
so that a disturbance of the machine affects all of them; the first calls of a block are not counted. Ratios are those
of a percentile of one round to that of the burst in it. A run takes a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from bench_support import (
    REPORTED_PERCENTILES,
    Report,
    Table,
    Tables,
    missed_targets,
    percentiles,
    positive,
    targets_table,
    upper_limit,
)

import nnfmq
from nnfmq.hal.types import ExecutionPreference
from nnfmq.lab.listening_driver import started_daemon

CALLS = ("burst", "execute", "execute_async, result", "execute_async, awaited")
LIMIT = 3.0  # of a call's p50 over the burst's, for the model of LIMIT_US
LIMIT_US = 100
_SUSTAINED = ExecutionPreference.SUSTAINED_SPEED  # machine code, without a baseline program that runs first
_ELEMENTS = 2048
_TRIALS = 50  # of a model whose length is being found
_CONNECT_S = 60.0
Call = Callable[[], Awaitable[object]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--rounds", type=positive, default=10, help="interleaved rounds (default: 10)")
    parser.add_argument("--blocks", type=positive, default=20, help="of each call in a round (default: 20)")
    parser.add_argument("--calls", type=positive, default=20, help="in a block (default: 20)")
    parser.add_argument(
        "--warm-up", type=int, default=5, metavar="N", help="calls of a block before those (default: 5)"
    )
    parser.add_argument("--quick", action="store_true", help="1 round, 2 blocks of 5, the model of 10 µs: for tests")


# ---- measuring


def measure(options: argparse.Namespace, folder: Path) -> Report:
    """Return the report, as --json prints it. `folder` is for the driver's files.

    Raises:
        BenchmarkFailed: If the driver fails.
    """
    durations: tuple[int, ...] = (10, 100, 1000)
    if options.quick:
        options.rounds, options.blocks, options.calls, durations = 1, 2, 5, durations[:1]
    with ExitStack() as stack:
        daemon = stack.enter_context(started_daemon(folder))
        client = stack.enter_context(nnfmq.connect(daemon.socket, timeout=_CONNECT_S))
        models = {str(each): asyncio.run(_measured(client.device("compiled"), each, options)) for each in durations}
    targets = _targets(models)
    conditions = {name: getattr(options, name) for name in ("rounds", "blocks", "calls", "warm_up")}
    return {"conditions": conditions, "models": models, "targets": targets, "missed": missed_targets(targets)}


async def _measured(device: nnfmq.Device, duration_us: int, options: argparse.Namespace) -> Report:
    """Return the percentiles of each call of a model of this duration in µs, by round."""
    array = np.linspace(-1, 1, _ELEMENTS, dtype=np.float32)
    with _model_of(device, duration_us, array) as model, model.burst() as burst:
        calls = _calls(model, burst, array)
        rounds = [await _round(calls, options) for _ in range(options.rounds)]
    return {"rounds": rounds}


def _model_of(device: nnfmq.Device, duration_us: int, array: np.ndarray[Any, Any]) -> nnfmq.PreparedModel:
    length = 4
    for _ in range(3):  # the engine's time is not quite proportional
        with device.prepare(chain(length), preference=_SUSTAINED) as model, model.burst() as burst:
            times = []
            for _ in range(_TRIALS):
                burst.execute(array)
                times.append(burst.last.engine_ns)
        length = max(1, round(length * duration_us * 1e3 / statistics.median(times)))
    return device.prepare(chain(length), preference=_SUSTAINED)


def chain(length: int) -> nnfmq.ModelBuilder:
    """Return a finished model of so many LOGISTIC, one after the other."""
    builder = nnfmq.ModelBuilder()
    tensors = [builder.add_operand("TENSOR_FLOAT32", (_ELEMENTS,)) for _ in range(length + 1)]
    for before, after in itertools.pairwise(tensors):
        builder.add_operation("LOGISTIC", [before], [after])
    builder.identify_inputs_and_outputs(tensors[:1], tensors[-1:])
    builder.finish()
    return builder


def _calls(model: nnfmq.PreparedModel, burst: nnfmq.Burst, array: np.ndarray[Any, Any]) -> Mapping[str, Call]:
    async def over_a_burst() -> object:
        return burst.execute(array)

    async def execute() -> object:
        return model.execute(array)

    async def result() -> object:
        return model.execute_async(array).result()

    async def awaited() -> object:
        return await model.execute_async(array)

    return dict(zip(CALLS, (over_a_burst, execute, result, awaited), strict=True))


async def _round(calls: Mapping[str, Call], options: argparse.Namespace) -> Report:
    times: dict[str, list[int]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(options.blocks):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            for _ in range(options.warm_up):
                await calls[name]()
            times[name] += await _timed(calls[name], options.calls)
    return {name: percentiles(found, 1e3) for name, found in times.items()}


async def _timed(call: Call, count: int) -> list[int]:
    clock, times = time.perf_counter_ns, []
    for _ in range(count):
        begin = clock()
        await call()
        times.append(clock() - begin)
    return times


# ---- results


def _ratios(rounds: Sequence[Report], name: str, metric: str = "p50") -> list[float]:
    return [each[name][metric] / each["burst"][metric] for each in rounds]


def _targets(models: Mapping[str, Report]) -> list[Report]:
    found = models.get(str(LIMIT_US))
    if found is None:
        return []
    return [
        upper_limit(f"{name}, {LIMIT_US} µs: p50 over the burst's", ratios, statistics.median(ratios), LIMIT, "×")
        for name in CALLS[1:]
        for ratios in [_ratios(found["rounds"], name)]
    ]


def tables(report: Report) -> Tables:
    """Return the targets, and medians of the percentiles and ratios over the rounds."""
    names = list(REPORTED_PERCENTILES)
    rows = []
    for duration, found in report["models"].items():
        for call in CALLS:
            times = [statistics.median(each[call][name] for each in found["rounds"]) for name in names]
            ratios = [statistics.median(_ratios(found["rounds"], call, name)) for name in names]
            rows.append([duration, call, *(f"{value:.1f}" for value in times), *(f"{value:.2f}" for value in ratios)])
    headings = (">model, µs", "call", *(f">{name}, µs" for name in names), *(f">{name}, × burst" for name in names))
    return {"targets": targets_table(report["targets"]), "calls": Table("calls", headings, rows)}
