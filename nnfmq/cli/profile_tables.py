"""Tables of `nnfmq profile` for the terminal, and the texts that tables and page share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from nnfmq.cli.console import microseconds, table

__all__ = ["arena_table", "computed_by", "kilobytes", "operations_table", "percent", "rate", "summary", "value_name"]

_CEILING_UNITS = {
    "float32": "GFLOP/s",
    "quantized": "GOP/s",
    "tiles": "GOP/s",
    "memory": "GB/s",
    "cache": "GB/s",
    "outputs": "G requantized and stored/s",
}


def operations_table(report: Mapping[str, Any], sort: str, *, wide: bool) -> Any:
    """Return the table of operations; `wide` adds columns."""
    more: tuple[str, ...] = (">of bound", ">min µs", ">KB", ">threads") if wide else ()
    listing = table(">", "operation", ">p50 µs", ">share", ">Gop/s", ">of peak", ">GB/s", *more, "computed by")
    listing.columns[1].no_wrap, listing.padding = True, (0, 1, 0, 0)  # so that it fits 80 columns
    rows = report["operations"]
    if sort == "time":
        rows = sorted(rows, key=lambda row: -row["p50_ns"])
    for row in rows:
        numbers = percent(row["share_of_bound"]), _time(row["min_ns"]), kilobytes(row["bytes"]), str(row["threads"])
        extra = numbers if wide else ()
        rates = rate(row["giga_operations_per_s"]), percent(row["share_of_peak"]), rate(row["gigabytes_per_s"])
        times = _time(row["p50_ns"]), percent(row["share"])
        listing.add_row(str(row["number"]), row["operation"], *times, *rates, *extra, computed_by(row))
    return listing


def _time(duration_ns: int) -> str:
    """Return µs, without decimals from 1000 µs on, so that a row fits 80 columns."""
    return microseconds(duration_ns) if duration_ns < 999_950 else f"{duration_ns / 1000:,.0f}"


def computed_by(row: Mapping[str, Any]) -> str:
    """Return the kernels and tiles of an operation, or the reference, or that it is fused or a view."""
    if row["computed_by"] == "kernel":
        counts = Counter(_kernel(kernel) for kernel in row["kernels"])
        return " + ".join(name if count == 1 else f"{count} {name}" for name, count in counts.items())
    if row["computed_by"] == "fused":
        return f"with operation {row['fused_into']}"
    return {"reference": "the reference", "view": "none (a view)"}[row["computed_by"]]


def _kernel(kernel: Mapping[str, Any]) -> str:
    tile = "" if kernel["tile"] is None else " " + "×".join(map(str, kernel["tile"]))
    return f"{kernel['kind'].removesuffix('Kernel')}{tile}"


def rate(value: float | None) -> str:
    """Return a rate; `-` for None."""
    return "-" if value is None else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def percent(share: float | None) -> str:
    """Return a share as a percentage; `-` for None."""
    return "-" if share is None else f"{share:.1%}"


def kilobytes(count: int | None) -> str:
    """Return thousands of bytes; `-` for None."""
    return "-" if count is None else f"{count / 1000:,.1f}"


def arena_table(arena: Mapping[str, Any]) -> Any:
    """Return the table of one arena: each value's producer, offset, size and live range."""
    title = f"arena of operations {arena['first_operation']} to {arena['last_operation']}"
    listing = table("value", "producer", ">offset", ">bytes", ">from", ">to", title=title)
    for value in sorted(arena["values"], key=lambda value: (value["from_operation"], value["offset"])):
        last = f"{value['to_operation']}{'+' if value['is_read_later'] else ''}"
        numbers = f"{value['offset']:,}", f"{value['bytes']:,}", str(value["from_operation"]), last
        listing.add_row(value_name(value), value["producer"], *numbers)
    return listing


def value_name(value: Mapping[str, Any]) -> str:
    """Return the name of a value in an arena."""
    if value["operand"] is None:
        return "between kernels"
    return f"operand {value['operand']}{' in NHWC' if value['layout'] == 'nhwc' else ''}"


def summary(report: Mapping[str, Any]) -> list[str]:
    """Return the lines below the table."""
    return [_conditions(report), _comparison(report), *_ceilings(report), *_arenas(report)]


def _conditions(report: Mapping[str, Any]) -> str:
    target = f" ({report['target']})" if report["device"] == "compiled" else ""
    inputs = report["inputs"] if isinstance(report["inputs"], str) else ", ".join(report["inputs"])
    threads = "1 thread" if report["threads"] == 1 else f"{report['threads']} threads"
    return f"{report['device']}{target} in this process, {threads}, {report['runs']} runs; inputs: {inputs}."


def _comparison(report: Mapping[str, Any]) -> str:
    run, steps = report["run_ns"], report["steps_ns"]
    share = steps["p50"] / run["p50"]
    return (
        f"Whole model: {microseconds(run['p50'])} µs (min {microseconds(run['min'])}). Sum of its steps: "
        f"{microseconds(steps['p50'])} µs (min {microseconds(steps['min'])}), {share:.0%} of that, without the "
        f"overhead of timing, {report['overhead_ns'] / 1000:.2f} µs each."
    )


def _ceilings(report: Mapping[str, Any]) -> Iterator[str]:
    ceilings = report["ceilings"]
    if ceilings is None:
        yield "The machine's peaks were not measured: that needs generated code, and so llvmlite."
        return
    values = ", ".join(
        f"{name} {_pair(ceilings[name])} {unit}" for name, unit in _CEILING_UNITS.items() if name in ceilings
    )
    count = report["ceiling_threads"]
    threads = "1 thread" if count == 1 else f"1 / {count} threads"
    yield f"Measured peaks, {threads}: {values}."


def _pair(ceiling: Mapping[str, float]) -> str:
    one, all_threads = f"{ceiling['one_thread']:.0f}", f"{ceiling['all_threads']:.0f}"
    return one if one == all_threads else f"{one} / {all_threads}"


def _arenas(report: Mapping[str, Any]) -> Iterator[str]:
    for arena in report["arenas"]:
        if arena["values_bytes"]:
            share = arena["bytes"] / arena["values_bytes"]
            numbers = f"{arena['first_operation']} to {arena['last_operation']}"
            sizes = f"{arena['bytes']:,} bytes for values of {arena['values_bytes']:,} ({share:.0%})"
            yield f"Arena of operations {numbers}: {sizes}."
