"""The goals of model_bench.py and the arithmetic of its report. Data and pure functions.

A figure of a party is the median over its rounds: of each round's p50, p99 and p99.9, in µs. Goals are those of
queue_bench_cases.py: a figure, divided by the best peer's or by another of our own, beside a limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from queue_bench_cases import Figures, Goal, judged

BURST, IN_PROCESS = "nnfmq burst", "nnfmq in process"
PEERS = ("LiteRT", "ONNX Runtime")
COST_US, COMPILING_RATIO = 5.0, 1.5


def counted(threads: int) -> str:
    """Return a number of threads in words."""
    return f"{threads} thread{'s' if threads > 1 else ''}"


def named(kind: str, threads: int) -> str:
    """Return a party's name."""
    return f"{kind}, {counted(threads)}"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One model: its file (without .tflite), steps in a round, and what our burst may take of the best peer's time."""

    file: str
    goal: float
    count: int

    @property
    def name(self) -> str:
        """What it is called in tables."""
        return self.file.rpartition("/")[2]


MODELS = (
    Benchmark("mobilenet_v1_0.25_128", 0.80, 2000),
    Benchmark("mobilenet_v1_0.25_128_quant", 0.40, 2000),
    Benchmark("mobilenet_v1_0.75_192_quant", 0.55, 300),
    Benchmark("mobilenet_v2_1.0_224_quant", 0.55, 300),
    Benchmark("micro/mobilenet_v2_int8_per_channel_224", 0.85, 300),
    Benchmark("tts_float", 1.3, 4000),
)


def model_row(model: Benchmark, figures: Mapping[str, Figures], threads: int) -> dict[str, Any]:
    """Return a model's ratio: ours over the burst, over the best peer, both with `threads`."""
    peers = tuple(named(kind, threads) for kind in PEERS)
    ours = named(BURST, threads)
    goal = Goal("burst against the best peer, p50", ours, "p50", model.goal, "×", peers)
    measured = [name for name in peers if name in figures]
    return {
        "model": model.name,
        "best_peer": min(measured, key=lambda name: figures[name]["p50"]) if measured else None,
        "p50_us": {"ours": figures[ours]["p50"], "theirs": min((figures[n]["p50"] for n in measured), default=None)},
        "goals": [judged(goal, figures)],
    }


def cost_row(name: str, threads: int, burst: Figures, engine: Figures, cost_us: float) -> dict[str, Any]:
    """Return what a burst costs over the model itself: the median of turns side by side."""
    goal = Goal("cost over the model, p50", "burst", "cost", COST_US, "µs")
    return {
        "model": name,
        "threads": threads,
        "burst_us": burst["p50"],
        "in_process_us": engine["p50"],
        "goals": [judged(goal, {"burst": {"cost": cost_us}})],
    }


def compiling_row(name: str, compiled: str, alone: Figures, beside: Figures) -> dict[str, Any]:
    """Return p99 of a burst while another client's model is compiled, over its p99 alone."""
    goal = Goal(
        "p99 while another model is compiled, against p99 alone", "beside", "p99", COMPILING_RATIO, "×", ("alone",)
    )
    figures = {"beside": beside, "alone": alone}
    return {"model": name, "compiled": compiled, "figures": figures, "goals": [judged(goal, figures)]}


def roofline_row(name: str, work: Any, p50_us: float, peaks: Mapping[str, float | None]) -> dict[str, Any]:
    """Return operations a second and for each byte, and the share of what the machine allows at that intensity."""
    peak = peaks["code_operations_per_s" if work.is_quantized else "float32_operations_per_s"]
    rate = work.operations / p50_us * 1e6
    cache = peaks["cache_bytes_per_s"]
    roof = None if peak is None or cache is None else min(peak, work.intensity * cache)
    return {
        "model": name,
        "is_quantized": work.is_quantized,
        "operations": work.operations,
        "bytes": work.bytes,
        "intensity": work.intensity,
        "p50_us": p50_us,
        "operations_per_s": rate,
        "share_of_roof": None if roof is None else rate / roof,
    }


def growth_exponent(sizes: Sequence[float], times: Sequence[float]) -> float:
    """Return the power of the size by which time grows between the last two sizes: 1 = in proportion."""
    return math.log(times[-1] / times[-2]) / math.log(sizes[-1] / sizes[-2])


def apart(outputs: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return how far outputs are from others at most: in codes, or relative to the largest float."""
    worst = 0.0
    for found, true in zip(outputs, expected, strict=True):
        distance = float(np.abs(np.asarray(found, np.float64) - np.asarray(true, np.float64)).max())
        scale = float(np.abs(true).max()) if np.asarray(true).dtype.kind == "f" else 1.0
        worst = max(worst, distance / scale if scale else distance)
    return worst


def goals_of(report: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return every goal of a report with what it is of."""
    rows = [row for section in ("models", "cost", "compiling") for row in report.get(section, [])]
    return [(_label(row), goal) for row in rows for goal in row["goals"]]


def _label(row: Mapping[str, Any]) -> str:
    return named(row["model"], row["threads"]) if "threads" in row else str(row["model"])
