"""The report of `nnfmq bench` as a JSON-compatible dict, from which tables, files and page are made as well.

A result is one runner at one level of the load. Its blocks are equal parts of the measured time, from which confidence
intervals are computed. Times are in ns.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from nnfmq.installed_version import installed_version
from nnfmq.measure import cpu_pinning
from nnfmq.measure.execution_steps import STAGES
from nnfmq.measure.load_measurement import LoadMeasurements, MeasuredLoad
from nnfmq.measure.load_plan import LoadLevel, LoadPlan
from nnfmq.measure.percentiles import percentile, percentile_steps, summary
from nnfmq.measure.runner_group import LoadResult
from nnfmq.queue.core import core_name

__all__ = ["BLOCKS", "build_report", "cpu_model", "machine", "result_of"]

BLOCKS = 20  # of a result
_POINTS = 100  # of a time line
_BLOCK_PERCENTS = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "max": 100.0}


def cpu_model() -> str:
    """Return the model name of the CPU; if /proc/cpuinfo has none (as on arm64), the machine type."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def machine() -> dict[str, Any]:
    """Return the conditions that do not depend on what is measured."""
    packages = ("nnfmq", "numpy", "llvmlite", "ai-edge-litert", "onnxruntime", "openvino")
    return {
        "cpu": cpu_model(),
        "cpus_allowed": sorted(cpu_pinning.ALLOWED),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: version for name in packages if (version := installed_version(name)) is not None},
        "core": core_name,
        "load_before": [round(value, 2) for value in os.getloadavg()],
        "clock": "time.monotonic_ns, around the call; in an open loop from the intended start",
    }


def build_report(plan: LoadPlan, found: LoadMeasurements, conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report; `conditions` are those of `machine` and of the command."""
    return {
        "model": str(plan.model),
        "conditions": dict(conditions),
        "load": {
            "seconds": plan.seconds,
            "count": plan.count,
            "distribution": plan.distribution,
            "rounds": plan.rounds,
            "warm_up": plan.warm_up,
            "window_s": plan.window_s,
            "stability_percent": plan.stability,
        },
        "results": [result_of(load, plan.rounds) for load in found.loads],
        "missing": found.missing,
        "threshold": _threshold(plan, found),
    }


def _threshold(plan: LoadPlan, found: LoadMeasurements) -> dict[str, Any] | None:
    """Return the limit, and the last level of the first runner that was within it; None for no level."""
    if plan.threshold_ns is None:
        return None
    first = [load for load in found.loads if load.runner == found.loads[0].runner]
    within = [load.level for load in first if load.latency_ns(plan.percentile) <= plan.threshold_ns]
    best = _level(within[-1]) if within else None
    return {"percentile": plan.percentile, "limit_ns": plan.threshold_ns, "within": best}


def _level(level: LoadLevel) -> dict[str, Any]:
    return {"clients": level.clients, "rate": level.rate}


def result_of(load: MeasuredLoad, rounds: int) -> dict[str, Any]:
    """Return the result of one runner at one level."""
    latencies = np.concatenate([trial.latencies for trial in load.trials])
    waits = np.concatenate([trial.started - trial.intended for trial in load.trials])
    wall_ns = sum(trial.wall_ns for trial in load.trials)
    stages_ns = load.trials[-1].stages_ns
    return {
        "runner": load.runner,
        **_level(load.level),
        "details": load.details,
        "requests": int(latencies.size),
        "unsent": sum(trial.unsent for trial in load.trials),
        "wall_s": wall_ns / 1e9,
        "throughput_per_s": latencies.size * 1e9 / wall_ns,
        "latency_ns": summary(latencies),
        "wait_ns": None if load.level.rate is None else summary(waits),
        "stages_ns": dict(zip(STAGES, stages_ns, strict=True)) if stages_ns else None,
        "cpu_s": {
            "client": sum(trial.client_cpu_ns for trial in load.trials) / 1e9,
            "driver": sum(trial.driver_cpu_ns for trial in load.trials) / 1e9,
        },
        "pss_bytes": load.pss_bytes,
        "processes": load.processes,
        "is_stable": load.is_stable,
        "warm_up": [{"p50_ns": window.latency_ns, "throughput_per_s": window.per_second} for window in load.windows],
        "blocks": [block for trial in load.trials for block in _blocks(trial, max(1, BLOCKS // rounds))],
        "percentiles": [list(step) for step in percentile_steps(latencies)],
        "timeline": _timeline(load.trials),
    }


def _blocks(trial: LoadResult, count: int) -> list[dict[str, float]]:
    """Return the metrics of equal parts of a trial's time; parts without a request are left out."""
    width_ns = trial.wall_ns / count
    edges = np.searchsorted(trial.intended, [width_ns * number for number in range(count)])
    found = []
    for first, end in pairwise([*edges.tolist(), trial.intended.size]):
        if end > first:
            ordered = np.sort(trial.latencies[first:end])
            metrics: dict[str, float] = {name: percentile(ordered, each) for name, each in _BLOCK_PERCENTS.items()}
            found.append(metrics | {"throughput_per_s": (end - first) * 1e9 / width_ns})
    return found


def _timeline(trials: list[LoadResult]) -> list[dict[str, float]]:
    """Return p50, p99 and max by time; the trials follow each other without the time between them."""
    points, begin_ns, total_ns = [], 0, sum(trial.wall_ns for trial in trials)
    for trial in trials:
        count = max(1, round(_POINTS * trial.wall_ns / total_ns))
        width_ns = trial.wall_ns / count
        edges = [*np.searchsorted(trial.intended, [width_ns * n for n in range(count)]).tolist(), trial.intended.size]
        for number, (first, end) in enumerate(pairwise(edges)):
            if end > first:
                ordered = np.sort(trial.latencies[first:end])
                metrics = {f"{name}_ns": percentile(ordered, _BLOCK_PERCENTS[name]) for name in ("p50", "p99", "max")}
                points.append({"s": (begin_ns + (number + 0.5) * width_ns) / 1e9, **metrics, "requests": end - first})
        begin_ns += trial.wall_ns
    return points
