"""The plots of docs/explanation/performance.md, drawn by matplotlib from a report of model_bench.py.

A runner has the same colour in all plots; a dashed line is a target. The same report gives the same files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from model_bench_metrics import BASELINES, BURST, IN_PROCESS, format_threads, runner_name

WIDTH, HEIGHT = 9.0, 4.2
_BASELINE_COLORS = dict(zip(BASELINES, ("#d9822b", "#8a5fb0", "#4f8f4f"), strict=True))
COLORS = {BURST: "#0b6e99", IN_PROCESS: "#7fbcd2", **_BASELINE_COLORS}
_TARGET_LINE = {"color": "#b03030", "linestyle": "--", "linewidth": 1.2}
_KINDS = ("#0b6e99", "#d9822b", "#8a5fb0", "#4f8f4f")

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


def draw(report: Mapping[str, Any], folder: Path, form: str) -> dict[str, str]:
    """Draw the plots that the report has data for into `folder`; return the names of the files by plot."""
    import matplotlib as mpl

    mpl.use("Agg")
    files = {}
    with mpl.rc_context(_SETTINGS):
        for name, make in _PLOTS.items():
            chart = make(report)
            if chart is not None:
                files[name] = f"{name}.{form}"
                metadata = {"Date": None} if form == "svg" else {"Software": None}
                chart.savefig(folder / files[name], format=form, metadata=metadata, bbox_inches="tight", dpi=110)
    return files


def _axes(columns: int = 1, height: float = HEIGHT, rows: int = 1) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure  # pyplot would keep a reference to every figure

    chart = Figure(figsize=(WIDTH, height), layout="constrained")
    made = chart.subplots(rows, columns, squeeze=False)
    return chart, list(made.flat)


def _short(name: str) -> str:
    short = name.removeprefix("mobilenet_").replace("_quant", "\nuint8")
    return short.replace("_int8_per_channel", "") + "\nint8 per channel" if "per_channel" in short else short


def _models(report: Mapping[str, Any]) -> Any:
    """Draw bars of p50 over the best baseline's, above each other by number of threads; the target of each model."""
    rows = [row for row in report.get("models", []) if row["comparisons"][0]["best_baseline"]]
    if not rows:
        return None
    counts = [row["threads"] for row in rows[0]["comparisons"]]
    chart, panels = _axes(rows=len(counts), height=HEIGHT * (0.3 + 0.7 * len(counts)))
    for index, (axes, threads) in enumerate(zip(panels, counts, strict=True)):
        _draw_runners(axes, rows, index)
        axes.set_xticks(range(len(rows)), [_short(row["model"]) for row in rows])
        axes.set_ylabel(f"p50 / best baseline's p50\n{format_threads(threads)}; less is faster")
        axes.grid(axis="x", visible=False)
    handles, labels = panels[0].get_legend_handles_labels()
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


def _cost(report: Mapping[str, Any]) -> Any:
    rows = report.get("cost", [])
    if not rows:
        return None
    chart, (axes,) = _axes(height=0.5 + 0.42 * len(rows))
    labels = [f"{row['model']}, {row['threads']} thr." for row in rows]
    bars = axes.barh(labels, [row["targets"][0]["value"] for row in rows], color=COLORS[BURST], height=0.6)
    axes.bar_label(bars, fmt=" %.1f µs", fontsize=8)
    axes.margins(x=0.15)  # space for labels, also of bars left of 0
    axes.axvline(rows[0]["targets"][0]["limit"], label="target", **_TARGET_LINE)
    axes.invert_yaxis()
    axes.set_xlabel("burst p50 minus p50 of the same engine in another process, µs")
    axes.grid(axis="y", visible=False)
    return chart


def _latency_against(what: str) -> Callable[[Mapping[str, Any]], Any]:
    """Return the function that draws latency by `what`: over the burst (line) and in process (dotted)."""

    def make(report: Mapping[str, Any]) -> Any:
        found = report.get("scaling")
        if not found:
            return None
        chart, (axes,) = _axes()
        for color, series in zip(_KINDS, found[what], strict=False):
            values = [point[what] for point in series["points"]]
            name = f"{series['operation']}, {series['type']}"
            axes.plot(values, [p["burst_us"] for p in series["points"]], "o-", color=color, label=f"{name}: burst")
            axes.plot(values, [p["in_process_us"] for p in series["points"]], ".:", color=color,
                      label=f"{name}: in process")  # fmt: skip
        _logarithmic(axes, values)
        fixed = found["at"]["channels" if what == "size" else "size"]
        axes.set_xlabel(
            f"width and height in pixels, {fixed} channels" if what == "size" else f"channels, {fixed} × {fixed} pixels"
        )
        axes.set_ylabel("p50, µs")
        chart.legend(loc="outside right upper", frameon=False)
        return chart

    return make


def _logarithmic(axes: Any, values: Sequence[float]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _roofline(report: Mapping[str, Any]) -> Any:
    found = report.get("roofline")
    if not found:
        return None
    chart, (axes,) = _axes()
    intensities = [row["intensity"] for row in found["models"]]
    low, high = min(intensities) / 2, max(intensities) * 3
    ceilings = found["ceilings"]
    roofs = (("float32", ceilings["float32_operations_per_s"], _KINDS[0]),
             ("quantized", ceilings["quantized_operations_per_s"], _KINDS[1]))  # fmt: skip
    for name, ceiling, color in roofs:
        if ceiling is not None:
            axes.axhline(ceiling / 1e9, color=color, linewidth=1.2, label=f"{name}, from registers")
    for name, style in (("cache", "-."), ("memory", ":")):
        slope = ceilings[f"{name}_bytes_per_s"] / 1e9
        axes.plot([low, high], [low * slope, high * slope], style, color="#777777", label=f"from {name}")
    for number, row in enumerate(found["models"], 1):
        color = _KINDS[1] if row["is_quantized"] else _KINDS[0]
        place = row["intensity"], row["operations_per_s"] / 1e9
        label = f"{number}  {_short(row['model'])}".replace("\n", " ")
        axes.plot(*place, "o", color=color, markersize=12, label=label)
        axes.annotate(str(number), place, ha="center", va="center", color="white", fontsize=8, fontweight="bold")
    rates = [row["operations_per_s"] / 1e9 for row in found["models"]]
    tops = [ceiling / 1e9 for _, ceiling, _ in roofs if ceiling is not None]
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(min(rates) / 3, max(tops) * 2))
    axes.set_xlabel("operations per byte")
    axes.set_ylabel("G operations / s, one thread")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    chart.legend(loc="outside right upper", frameon=False)
    return chart


_PLOTS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "models": _models,
    "cost": _cost,
    "size": _latency_against("size"),
    "channels": _latency_against("channels"),
    "roofline": _roofline,
}
