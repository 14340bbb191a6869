"""Measure compilation caching: `tools/cache_bench.py MODEL... [--rounds N] [--json]`, through an embedded driver.

For each `.tflite` model it prints the medians of reading the file, preparing the model from scratch, preparing and
saving it, and preparing it from the cache, as the application sees them, and the ratio of the second to the last. Each
round measures all four, so that a disturbance of the machine affects all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import nnfmq
from nnfmq.hal.types import ExecutionPreference
from nnfmq.service.caching.program_cache import cache_disabled

ROUNDS = 11
TOKEN = bytes(32)
SUSTAINED = ExecutionPreference.SUSTAINED_SPEED  # without a baseline program that runs first

CacheTimes = dict[str, list[int]]
"""Times in ns by step, one per round."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each model and print; return 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="+", metavar="MODEL", help=".tflite files")
    parser.add_argument("--device", default="reference", help="device of the driver (default: reference)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds (default: {ROUNDS})")
    parser.add_argument("--json", action="store_true", help="print JSON: everything in ns and bytes")
    arguments = parser.parse_args(argv)
    with cache_disabled(), nnfmq.connect(embedded=True) as client:  # else the driver's own program cache is used
        device = client.device(arguments.device)
        reports = [_report(device, path, arguments.rounds) for path in arguments.models]
    if arguments.json:
        print(json.dumps({"models": reports}))
        return 0
    print(f"p50 of {arguments.rounds} rounds, ms; ratio = fresh / cache; MiB of both cache files")
    print(f"{'model':40} {'read':>8} {'fresh':>8} {'save':>8} {'cache':>8} {'ratio':>6} {'MiB':>6}")
    for report in reports:
        print(_line(report))
    return 0


def _report(device: nnfmq.Device, path: str, rounds: int) -> dict[str, Any]:
    series, size = measure(device, path, rounds)
    medians = {name: statistics.median(times) for name, times in series.items()}
    return {"model": path, "cache_bytes": size, "ratio": medians["fresh"] / medians["cache"], "ns": series}


def _line(report: dict[str, Any]) -> str:
    medians = [f"{statistics.median(times) / 1e6:8.2f}" for times in report["ns"].values()]
    name = os.path.basename(report["model"])[:40]
    return f"{name:40} {' '.join(medians)} {report['ratio']:6.2f} {report['cache_bytes'] / 2**20:6.2f}"


def measure(device: nnfmq.Device, path: str, rounds: int = ROUNDS) -> tuple[CacheTimes, int]:
    """Return the times of `read`, `fresh`, `save` and `cache` for a model in ns, and the bytes of its cache files."""
    loaded = nnfmq.load(path)
    series: CacheTimes = {"read": [], "fresh": [], "save": [], "cache": []}
    with ExitStack() as stack:
        fds = [os.memfd_create("cache") for _ in range(device.info.model_cache_files + device.info.data_cache_files)]
        for fd in fds:
            stack.callback(os.close, fd)
        model_cache, data_cache = fds[: device.info.model_cache_files], fds[device.info.model_cache_files :]

        def save() -> nnfmq.PreparedModel:
            return device.prepare(
                loaded, preference=SUSTAINED, token=TOKEN, model_cache=model_cache, data_cache=data_cache
            )

        for _ in range(rounds):
            series["read"].append(_ns(lambda: nnfmq.load(path)))
            series["fresh"].append(_prepare_ns(lambda: device.prepare(loaded, preference=SUSTAINED)))
            series["save"].append(_prepare_ns(save))
            series["cache"].append(
                _prepare_ns(lambda: device.prepare_from_cache(TOKEN, model_cache, data_cache, model=loaded))
            )
        return series, sum(os.fstat(fd).st_size for fd in fds)


def _ns(call: Callable[[], object]) -> int:
    begin_ns = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - begin_ns


def _prepare_ns(prepare: Callable[[], nnfmq.PreparedModel]) -> int:
    begin_ns = time.perf_counter_ns()
    model = prepare()
    elapsed_ns = time.perf_counter_ns() - begin_ns
    model.close()
    return elapsed_ns


if __name__ == "__main__":
    sys.exit(main())
