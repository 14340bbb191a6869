"""Tables of `nnfmq stress` for the terminal: scenarios, worst requests with their causes, the confusion matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nnfmq.cli.console import table

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_matrix", "print_scenarios"]

_PERCENTILES = ("p50", "p99", "p99.9", "max")
_FEW_PERCENTILES = ("p99", "max")
_WIDE = 72
_UNEXPECTED_MAX = 10  # lines; --json has all


def print_scenarios(screen: Console, report: Mapping[str, Any]) -> None:
    """Print the scenarios, then the worst requests of each with causes and evidence."""
    is_wide = screen.width >= _WIDE
    screen.print(_scenarios(report["scenarios"], _PERCENTILES if is_wide else _FEW_PERCENTILES, is_wide=is_wide))
    for scenario in report["scenarios"]:
        for line in _worst(scenario):
            screen.print(line)


def _scenarios(scenarios: Sequence[Mapping[str, Any]], names: Sequence[str], *, is_wide: bool) -> Any:
    more = (">requests",) if is_wide else ()
    listing = table("µs", *(f">{name}" for name in names), *more, ">slow")
    listing.padding = (0, 1, 0, 0)
    for each in scenarios:
        if "reason" in each:
            listing.add_row(each["scenario"], *["-"] * (len(names) + len(more) + 1))
            continue
        times = [_time(each["latency_ns"][name]) for name in names]
        requests = (f"{each['requests']:,}",) if is_wide else ()
        listing.add_row(each["scenario"], *times, *requests, f"{each['slow_requests']:,}")
    return listing


def _time(duration_ns: float) -> str:
    return f"{duration_ns / 1000:,.1f}" if duration_ns < 999_950 else f"{duration_ns / 1000:,.0f}"


def _worst(scenario: Mapping[str, Any]) -> Iterator[str]:
    if "reason" in scenario:
        yield f"{scenario['scenario']} is missing: {scenario['reason']}"
        return
    causes = ", ".join(f"{name} {time / 1e6:,.0f} ms" for name, time in scenario["causes_ns"].items())
    if scenario["worst"]:
        others = f"; other programs used {scenario['others_cpu_ns'] / 1e6:,.0f} ms of CPU time"
        yield f"{scenario['scenario']}: {causes or 'no cause'}{others if 'cpu-' in causes else ''}"
    for request in scenario["worst"]:
        stages = request["stages_ns"]
        parts = "".join(f", {name} {time / 1e6:.1f}" for name, time in (stages or {}).items())
        yield f"  {request['latency_ns'] / 1e6:,.1f} ms at {request['at_s']:.2f} s{parts}"
        for cause in request["causes"] or ({"name": "unknown", "evidence": "no counter explains it"},):
            yield f"    {cause['name']}: {cause['evidence']}"


def print_matrix(screen: Console, report: Mapping[str, Any]) -> None:
    """Print the confusion matrix of the self-test: a line for each disturbance, the causes named, and how often.

    What was named without having been brought about follows, with its evidence.
    """
    listing = table("disturbances", ">right", "named in runs")
    listing.padding = (0, 1, 0, 0)
    for row in report["rows"]:
        named = ", ".join(f"{name} {count}" for name, count in row["named"].items())
        listing.add_row(" + ".join(row["disturbances"]) or "none", f"{row['right']}/{row['runs']}", named)
    screen.print(listing)
    for name, reason in report["skipped"].items():
        screen.print(f"{name} was left out: {reason}")
    if report["repeated"]:
        screen.print(
            f"Other programs used the CPUs: {report['repeated']} runs without a disturbance were repeated, and "
            f"{report['excluded']} excluded."
        )
    for found in report["unexpected"][:_UNEXPECTED_MAX]:
        beside = " + ".join(found["disturbances"]) or "none"
        screen.print(
            f"{found['cause']} named beside {beside}, {found['explained_ns'] / 1e6:,.1f} ms: {found['evidence']}"
        )
    if len(report["unexpected"]) > _UNEXPECTED_MAX:
        screen.print(f"and {len(report['unexpected']) - _UNEXPECTED_MAX} more (--json)")
    screen.print(f"{100 * report['right_share']:.1f} % of the runs with disturbances are right.")
