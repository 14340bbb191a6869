"""The words and figures of `nnfmq profile`: its tables for a terminal, and what table and page both say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from nnfmq.cli.console import microseconds, table

__all__ = ["arena_table", "computed_by", "figure", "kilobytes", "operations_table", "percent", "summary", "value_name"]

_PEAKS = {"float32": "GFLOP/s", "quantized": "GOP/s", "memory": "GB/s", "cache": "GB/s"}


def operations_table(report: Mapping[str, Any], sort: str, *, wide: bool) -> Any:
    """Return the table, with more columns where it is `wide`."""
    more: tuple[str, ...] = (">min µs", ">KB", ">threads") if wide else ()
    listing = table(">", "operation", ">p50 µs", ">share", ">Gop/s", ">of peak", ">GB/s", *more, "computed by")
    listing.columns[1].no_wrap, listing.padding = True, (0, 1, 0, 0)  # all of it fits 80 columns
    rows = report["operations"]
    if sort == "time":
        rows = sorted(rows, key=lambda row: -row["p50_ns"])
    for row in rows:
        extra = (_time(row["min_ns"]), kilobytes(row["bytes"]), str(row["threads"])) if wide else ()
        rates = figure(row["giga_operations_per_s"]), percent(row["share_of_peak"]), figure(row["gigabytes_per_s"])
        times = _time(row["p50_ns"]), percent(row["share"])
        listing.add_row(str(row["number"]), row["operation"], *times, *rates, *extra, computed_by(row))
    return listing


def _time(duration_ns: int) -> str:
    """Return µs without decimals from 1000 on: rows fit a screen of 80 columns up to a second."""
    return microseconds(duration_ns) if duration_ns < 999_950 else f"{duration_ns / 1000:,.0f}"


def computed_by(row: Mapping[str, Any]) -> str:
    """Say who computed an operation, and with which tiles."""
    if row["computed_by"] == "kernel":
        counts = Counter(_kernel(kernel) for kernel in row["kernels"])
        return " + ".join(name if count == 1 else f"{count} {name}" for name, count in counts.items())
    return {"reference": "the reference", "view": "nobody (a view)"}[row["computed_by"]]


def _kernel(kernel: Mapping[str, Any]) -> str:
    tile = "" if kernel["tile"] is None else " " + "×".join(map(str, kernel["tile"]))
    return f"{kernel['kind'].removesuffix('Kernel')}{tile}"


def figure(value: float | None) -> str:
    """Return a rate; `-` where there is none."""
    return "-" if value is None else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def percent(share: float | None) -> str:
    """Return a share; `-` where there is none."""
    return "-" if share is None else f"{share:.1%}"


def kilobytes(count: int | None) -> str:
    """Return thousands of bytes; `-` where they are not known."""
    return "-" if count is None else f"{count / 1000:,.1f}"


def arena_table(arena: Mapping[str, Any]) -> Any:
    """Return where the values of one arena lie."""
    title = f"arena of operations {arena['first_operation']} to {arena['last_operation']}"
    listing = table("value", "made by", ">offset", ">bytes", ">from", ">to", title=title)
    for value in sorted(arena["values"], key=lambda value: (value["from_operation"], value["offset"])):
        last = f"{value['to_operation']}{'+' if value['is_read_later'] else ''}"
        numbers = f"{value['offset']:,}", f"{value['bytes']:,}", str(value["from_operation"]), last
        listing.add_row(value_name(value), value["made_by"], *numbers)
    return listing


def value_name(value: Mapping[str, Any]) -> str:
    """Name what lies in an arena."""
    if value["operand"] is None:
        return "between kernels"
    return f"operand {value['operand']}{' in NHWC' if value['form'] == 'nhwc' else ''}"


def summary(report: Mapping[str, Any]) -> list[str]:
    """Return the sentences below the table."""
    return [_conditions(report), _comparison(report), *_peaks(report), *_arenas(report)]


def _conditions(report: Mapping[str, Any]) -> str:
    target = f" ({report['target']})" if report["device"] == "compiled" else ""
    inputs = report["inputs"] if isinstance(report["inputs"], str) else ", ".join(report["inputs"])
    threads = "1 thread" if report["threads"] == 1 else f"{report['threads']} threads"
    return f"{report['device']}{target} in this process, {threads}, {report['runs']} runs; inputs: {inputs}."


def _comparison(report: Mapping[str, Any]) -> str:
    whole, parts = report["whole_ns"], report["parts_ns"]
    share = parts["p50"] / whole["p50"]
    return (
        f"Whole model: {microseconds(whole['p50'])} µs (min {microseconds(whole['min'])}). The sum of its parts: "
        f"{microseconds(parts['p50'])} µs (min {microseconds(parts['min'])}), {share:.0%} of that, less what timing "
        f"costs: {report['overhead_ns'] / 1000:.2f} µs each."
    )


def _peaks(report: Mapping[str, Any]) -> Iterator[str]:
    peaks = report["peaks"]
    if peaks is None:
        yield "No peaks of this machine: they are measured by generated code, which needs llvmlite."
        return
    figures = ", ".join(f"{name} {_pair(peaks[name])} {unit}" for name, unit in _PEAKS.items())
    threads = "1 thread" if report["team"] == 1 else f"1 / {report['team']} threads"
    yield f"Peaks of {threads}: {figures}."


def _pair(peak: Mapping[str, float]) -> str:
    alone, team = f"{peak['one_thread']:.0f}", f"{peak['all_threads']:.0f}"
    return alone if alone == team else f"{alone} / {team}"


def _arenas(report: Mapping[str, Any]) -> Iterator[str]:
    for arena in report["arenas"]:
        if arena["values_bytes"]:
            share = arena["bytes"] / arena["values_bytes"]
            numbers = f"{arena['first_operation']} to {arena['last_operation']}"
            sizes = f"{arena['bytes']:,} bytes for values of {arena['values_bytes']:,} ({share:.0%})"
            yield f"Arena of operations {numbers}: {sizes}."
