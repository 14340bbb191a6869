"""The results of model_bench.py: targets, the arithmetic of the report, tables and a plot.

Targets are limits for a metric of a runner, or for its ratio to the metric of the best baseline or of another runner.
matplotlib draws the plot: a dashed line is a target. The same report gives the same files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench_support import (
    REPORTED_PERCENTILES,
    Metrics,
    Report,
    Table,
    Tables,
    Target,
    evaluate_target,
    format_metric,
    format_metrics,
    target_columns,
)

# ---- targets and arithmetic


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
"""Models that generated_models.py makes."""
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


# ---- tables


def tables(report: Report) -> Tables:
    """Return the tables of the sections that the report has."""
    made: Tables = {}
    for name, make in _TABLES.items():
        if report.get(name):
            made |= make(report[name])
    return made


def _models(rows: Sequence[Report]) -> Tables:
    return _compared("models", rows)


def _transformers(rows: Sequence[Report]) -> Tables:
    return _compared("transformers", rows)


def _compared(name: str, rows: Sequence[Report]) -> Tables:
    metrics = [column for metric in ("p50", *TAIL_RATIOS) for column in (f">{metric}", ">target", "")]
    ratios = [
        [
            row["model"], row["subject"], str(row["threads"]),
            *(column for target in row["targets"] for column in target_columns(target)),
            *(format_metric(row[each]) for each in ("subject_us", "baseline_us")), row["best_baseline"] or "-",
        ]
        for found in rows
        for row in found["comparisons"]
    ]  # fmt: skip
    runners = [
        [found["model"], runner, *format_metrics(metrics_of_runner, list(REPORTED_PERCENTILES)),
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


def _cost(rows: Sequence[Report]) -> Tables:
    heads = ("model", ">threads", ">cost", ">target", "", ">burst µs", ">in process µs", ">transfer µs")
    names = ("burst_us", "in_process_us", "transfer_us")
    lines = [
        [row["model"], str(row["threads"]), *target_columns(row["targets"][0]), *format_metrics(row, names)]
        for row in rows
    ]
    return {"cost": Table("cost of the burst", heads, lines)}


def _compiling(rows: Sequence[Report]) -> Tables:
    heads = ("burst of", "while this is compiled", ">p99 / unloaded", ">target", "", ">p99 µs", ">unloaded µs")
    lines = [
        [row["model"], row["compiled"], *target_columns(row["targets"][0]),
         *(format_metric(row["metrics"][name]["p99"]) for name in ("under_load", "unloaded"))]
        for row in rows
    ]  # fmt: skip
    return {"compiling": Table("while another model is compiled", heads, lines)}


def _scaling(found: Report) -> Tables:
    made: Tables = {}
    for what in ("size", "channels"):
        values = [str(point[what]) for point in found[what][0]["points"]]
        heads = ("operation", "type", *(f">{what} {value}" for value in values), ">exponent")
        lines = [
            [row["operation"], row["type"], *(format_metric(point["burst_us"]) for point in row["points"]),
             f"{row['exponents']['burst_us']:.2f}"]
            for row in found[what]
        ]  # fmt: skip
        at = f"{found['at']['channels']} channels" if what == "size" else f"{found['at']['size']} pixels square"
        made[f"scaling-{what}"] = Table(f"burst µs by {what}, {at}", heads, lines)
    threads = [
        [series["model"], str(point["threads"]), *format_metrics(point, ("burst_us", "in_process_us"))]
        for series in found["threads"]
        for point in series["points"]
    ]
    if threads:
        made["scaling-threads"] = Table("by threads", ("model", ">threads", ">burst µs", ">in process µs"), threads)
    return made


def _roofline(found: Report) -> Tables:
    ceilings = [
        [name.removesuffix("_per_s").replace("_", " "), "-" if ceiling is None else f"{ceiling / 1e9:.1f}"]
        for name, ceiling in found["ceilings"].items()
    ]
    heads = ("model", ">M operations", ">MB", ">operations / byte", ">G operations / s", ">share of the roofline")
    return {
        "ceilings": Table("ceilings of one CPU", ("one CPU", ">G / s"), ceilings),
        "roofline": Table("roofline", heads, [_roofline_columns(row) for row in found["models"]]),
    }


def _roofline_columns(row: Report) -> list[str]:
    metrics = (row["operations"] / 1e6, row["bytes"] / 1e6, row["intensity"], row["operations_per_s"] / 1e9)
    share = "-" if row["roofline_share"] is None else f"{row['roofline_share']:.0%}"
    return [row["model"], *map(format_metric, metrics), share]


_TABLES: dict[str, Callable[[Any], Tables]] = {
    "models": _models,
    "transformers": _transformers,
    "cost": _cost,
    "compiling": _compiling,
    "scaling": _scaling,
    "roofline": _roofline,
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
