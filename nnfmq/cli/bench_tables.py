"""Tables of `nnfmq bench` for the terminal: latencies, what they cost, ratios, and the conditions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nnfmq.cli.console import table
from nnfmq.lab.bench.report import ratio_text, result_names, time_text

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_report"]

_PERCENTILES = ("p50", "p90", "p95", "p99", "p99.9", "max")
_FEW_PERCENTILES = ("p50", "p99", "max")
_WIDE = 72  # columns for all percentiles
_SUSTAINED = 0.95  # of the rate; with less a runner is overloaded


def print_report(screen: Console, report: Mapping[str, Any]) -> None:
    """Print the report on a console; with fewer columns there are fewer percentiles."""
    names = _PERCENTILES if screen.width >= _WIDE else _FEW_PERCENTILES
    screen.print(_latencies(report["results"], names))
    screen.print(_costs(report["results"], is_wide=screen.width >= _WIDE))
    for key, title in (("ratios", "beside the first runner"), ("baseline", "beside the baseline")):
        if report.get(key):
            screen.print(_ratios(report[key], title))
    for line in _notes(report):
        screen.print(line)


def _latencies(results: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Any:
    listing = _narrow(
        table("µs", *(f">{name}" for name in names), ">requests/s" if len(names) > len(_FEW_PERCENTILES) else ">per s")
    )
    for name, result in zip(result_names(results), results, strict=True):
        times = [time_text(result["latency_ns"][each]) for each in names]
        listing.add_row(name, *times, f"{result['throughput_per_s']:,.0f}")
    return listing


def _narrow(listing: Any) -> Any:
    listing.padding = (0, 1, 0, 0)  # so that it fits 80 columns
    return listing


def _costs(results: Sequence[Mapping[str, Any]], *, is_wide: bool) -> Any:
    more = (">client", ">driver", ">µs each") if is_wide else ()
    listing = _narrow(table("", ">CPU s", *more, ">PSS MiB", ">processes"))
    for name, result in zip(result_names(results), results, strict=True):
        client_s, driver_s = result["cpu_s"]["client"], result["cpu_s"]["driver"]
        each_us = (client_s + driver_s) * 1e6 / result["requests"]
        parts = (f"{client_s:.2f}", f"{driver_s:.2f}", f"{each_us:,.1f}") if is_wide else ()
        pss = f"{result['pss_bytes'] / 2**20:,.1f}"
        listing.add_row(name, f"{client_s + driver_s:.2f}", *parts, pss, str(result["processes"]))
    return listing


def _ratios(rows: Sequence[Mapping[str, Any]], title: str) -> Any:
    listing = _narrow(table("", ">ratio", ">95 % interval", "", title=title))
    for name, row in zip(result_names(rows), rows, strict=True):
        interval = f"{ratio_text(row['low'])}–{ratio_text(row['high'])}"
        listing.add_row(f"{name}: {row['metric']}", ratio_text(row["ratio"]), interval, row.get("outcome", ""))
    return listing


def _notes(report: Mapping[str, Any]) -> Iterator[str]:
    for runner, reason in report["missing"].items():
        yield f"{runner} is missing: {reason}"
    for name, result in zip(result_names(report["results"]), report["results"], strict=True):
        if result["is_stable"] is False:
            yield f"{name}: not stable after {len(result['warm_up'])} windows of warm-up."
        if result["rate"] is not None and result["throughput_per_s"] < _SUSTAINED * result["rate"]:
            done, wanted = result["throughput_per_s"], result["rate"]
            yield f"{name}: overloaded, {done:,.0f} of {wanted:g} requests/s; its latency grows with the duration."
        if result["unsent"]:
            yield f"{name}: {result['unsent']:,} requests were not sent, and are not in the percentiles."
    if report["threshold"] is not None:
        yield _threshold(report["threshold"])
    yield f"{_load(report)}; {report['conditions']['core']} core; {report['conditions']['cpu']}."


def _load(report: Mapping[str, Any]) -> str:
    """Return the load in words; numbers that differ among the results are part of their names."""
    load, results = report["load"], report["results"]
    clients, rates = ({result[name] for result in results} for name in ("clients", "rate"))
    rate = f"{next(iter(rates)):g}/s, " if len(rates) == 1 and None not in rates else ""
    loop = "closed loop" if rates == {None} else f"open loop, {rate}{load['distribution']} arrivals"
    count = ", ".join(f"{number}" for number in sorted(clients))
    amount = f"{load['seconds']:g} s" if load["count"] is None else f"{load['count']:,} requests"
    parts = f" in {load['rounds']} parts" if load["rounds"] > 1 else ""
    return f"Clients: {count}, {loop}; {amount}{parts}"


def _threshold(threshold: Mapping[str, Any]) -> str:
    limit = f"{threshold['percentile']} of at most {threshold['limit_ns'] / 1e6:g} ms"
    within = threshold["within"]
    if within is None:
        return f"No load has a {limit}."
    clients = "1 client" if within["clients"] == 1 else f"{within['clients']} clients"
    rate = "" if within["rate"] is None else f", {within['rate']:g} requests/s"
    return f"The last load with a {limit}: {clients}{rate}."
