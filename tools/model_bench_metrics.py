"""The targets of model_bench.py, and the arithmetic of its report. Data and pure functions.

A metric of a runner is p50, p99 or p99.9 of its executions in all rounds together, in µs. Targets are those of
queue_bench_cases.py: a limit for a metric, or for its ratio to the metric of the best baseline or another runner.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from queue_bench_cases import Metrics, Target, evaluate_target

BURST, IN_PROCESS, SHARED = "nnfmq burst", "nnfmq in process", "nnfmq shared memory"
BASELINES = ("LiteRT", "ONNX Runtime", "OpenVINO")
COST_US, COMPILING_RATIO = 5.0, 1.5
TAIL_RATIOS = {"p99": 1.3, "p99.9": 2.0}
"""Limits of every model's tail over that of the baseline whose tail is the shortest."""


def format_threads(threads: int) -> str:
    """Return a number of threads in words."""
    return f"{threads} thread{'s' if threads > 1 else ''}"


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
"""Models that transformer_models.py generates."""


Rounds = Sequence[Mapping[str, Metrics]]
"""The metrics of every runner by round; the noise of a target is computed from them."""


def model_row(
    model: ModelBenchmark, metrics: Mapping[str, Metrics], threads: int, by_round: Rounds = ()
) -> dict[str, Any]:
    """Return a model's targets with `threads` threads: p50, p99 and p99.9 of its subject over the best baseline's."""
    baselines = tuple(runner_name(kind, threads) for kind in BASELINES)
    subject, what = runner_name(model.subject, threads), model.subject.removeprefix("nnfmq ")
    limits = {"p50": model.targets[threads - 1], **TAIL_RATIOS}
    targets = [
        Target(f"{metric} of {what} / best baseline", subject, metric, limit, "×", baselines)
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
        "targets": [evaluate_target(target, metrics, by_round) for target in targets],
    }


def cost_row(
    name: str, threads: int, metrics: Mapping[str, Metrics], cost_us: float, costs_us: Sequence[float] = ()
) -> dict[str, Any]:
    """Return the cost of a burst over the engine in another process; `cost_us` is the median, `costs_us` by round.

    The transfer is what that process costs over the engine in process. A burst cannot be faster than the same engine
    and the same transfer without it: a negative value is noise, so it is not measured.
    """
    target = Target("cost of the burst, p50", "burst", "cost", COST_US, "µs")
    by_round = [{"burst": {"cost": each}} for each in costs_us]
    evaluated = evaluate_target(target, {"burst": {"cost": cost_us}}, by_round)
    return {
        "model": name,
        "threads": threads,
        "burst_us": metrics[BURST]["p50"],
        "in_process_us": metrics[IN_PROCESS]["p50"],
        "transfer_us": metrics[SHARED]["p50"] - metrics[IN_PROCESS]["p50"],
        "targets": [evaluated | {"met": None} if cost_us < 0 else evaluated],
    }


def compiling_row(
    name: str, compiled: str, unloaded: Metrics, under_load: Metrics, by_round: Rounds = ()
) -> dict[str, Any]:
    """Return the target for p99 of a burst while another client's model is compiled, over p99 without that load."""
    target = Target(
        "p99 while another model is compiled / unloaded",
        "under_load",
        "p99",
        COMPILING_RATIO,
        "×",
        ("unloaded",),
    )
    metrics = {"under_load": under_load, "unloaded": unloaded}
    return {
        "model": name,
        "compiled": compiled,
        "metrics": metrics,
        "targets": [evaluate_target(target, metrics, by_round)],
    }


def roofline_row(name: str, work: Any, p50_us: float, ceilings: Mapping[str, float | None]) -> dict[str, Any]:
    """Return operations per second and per byte, and the share of the roofline bound at that intensity."""
    ceiling = ceilings["quantized_operations_per_s" if work.is_quantized else "float32_operations_per_s"]
    rate = work.operations / p50_us * 1e6
    cache = ceilings["cache_bytes_per_s"]
    roof = None if ceiling is None or cache is None else min(ceiling, work.intensity * cache)
    return {
        "model": name,
        "is_quantized": work.is_quantized,
        "operations": work.operations,
        "bytes": work.bytes,
        "intensity": work.intensity,
        "p50_us": p50_us,
        "operations_per_s": rate,
        "roofline_share": None if roof is None else rate / roof,
    }


def scaling_exponent(sizes: Sequence[float], times: Sequence[float]) -> float:
    """Return the exponent e for which time grows as size^e between the last two sizes; 1 is proportional."""
    return math.log(times[-1] / times[-2]) / math.log(sizes[-1] / sizes[-2])


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
    compared = [found for section in ("models", "transformers") for found in report.get(section, [])]
    rows = [row for found in compared for row in found["comparisons"]]
    rows += [row for section in ("cost", "compiling") for row in report.get(section, [])]
    return [(_label(row), target) for row in rows for target in row["targets"]]


def _label(row: Mapping[str, Any]) -> str:
    return runner_name(row["model"], row["threads"]) if "threads" in row else str(row["model"])
