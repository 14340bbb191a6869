"""The report of `nnfmq bench` as a JSON-compatible dict, from which tables, files and page are made as well.

A result is one runner at one level of the load. Its blocks are equal parts of the measured time, from which confidence
intervals are computed. Times are in ns.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.lab.bench.measurement import LoadLevel, LoadMeasurements, LoadPlan, MeasuredLoad
from nnfmq.lab.bench.runner import LoadResult
from nnfmq.lab.bench.steps import STAGES
from nnfmq.lab.conditions import machine_text
from nnfmq.lab.page import (
    TIME_LINES,
    conditions_list,
    html_table,
    latency_page,
    legend,
    percentile_chart,
    time_chart,
)
from nnfmq.lab.statistics import heading_of, percentile, percentile_steps, shown_percentiles, summary

__all__ = [
    "BLOCKS",
    "CANNOT_TELL",
    "CLOCK",
    "METRICS",
    "OTHERS_MAX",
    "Interval",
    "bootstrap_ratio",
    "build_report",
    "compare_runners",
    "compare_with_baseline",
    "csv_text",
    "hgrm_text",
    "named_parts",
    "notes",
    "outcome_of",
    "profile_export",
    "ratio_text",
    "render_page",
    "require_same_model",
    "result_names",
    "result_of",
    "time_text",
    "timeline_of",
]

BLOCKS = 20  # of a result
_POINTS = 100  # of a time line
CLOCK = "time.monotonic_ns, around the call; in an open loop from the intended start"
"""What a latency is the difference of."""
_BLOCK_PERCENTS = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "max": 100.0}


def build_report(plan: LoadPlan, found: LoadMeasurements, conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report; `conditions` are those of `lab.conditions` and of the command."""
    return {
        "model": str(plan.model),
        "conditions": dict(conditions),
        "load": {
            "duration_s": plan.seconds,
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
        "wall_ns": wall_ns,
        "throughput_per_s": latencies.size * 1e9 / wall_ns,
        "latency_ns": summary(latencies),
        "wait_ns": None if load.level.rate is None else summary(waits),
        "stages_ns": dict(zip(STAGES, stages_ns, strict=True)) if stages_ns else None,
        "cpu_ns": {
            "client": sum(trial.client_cpu_ns for trial in load.trials),
            "driver": sum(trial.driver_cpu_ns for trial in load.trials),
        },
        "pss_bytes": load.pss_bytes,
        "processes": load.processes,
        "is_stable": load.is_stable,
        "others_cpu_share": load.others_ns / max(load.elapsed_ns, 1),
        "warm_up": [{"p50_ns": window.latency_ns, "throughput_per_s": window.per_second} for window in load.windows],
        "blocks": [block for trial in load.trials for block in _blocks(trial, max(1, BLOCKS // rounds))],
        "percentiles": [list(step) for step in percentile_steps(latencies)],
        "timeline": timeline_of(load.trials),
    }


def _blocks(trial: LoadResult, count: int) -> list[dict[str, float]]:
    """Return the metrics of equal parts of a trial's time; parts without a request are left out."""
    width_ns = trial.wall_ns / count
    edges = np.searchsorted(trial.intended, [width_ns * number for number in range(count)])
    found = []
    for first, end in pairwise([*edges.tolist(), trial.intended.size]):
        if end > first:
            ordered = np.sort(trial.latencies[first:end])
            metrics: dict[str, float] = {
                f"{name}_ns": percentile(ordered, each) for name, each in _BLOCK_PERCENTS.items()
            }
            found.append(metrics | {"throughput_per_s": (end - first) * 1e9 / width_ns})
    return found


def timeline_of(trials: Sequence[LoadResult], count_of_points: int = _POINTS) -> list[dict[str, float]]:
    """Return p50, p99 and max by time; the trials follow each other without the time between them."""
    points, begin_ns, total_ns = [], 0, sum(trial.wall_ns for trial in trials)
    for trial in trials:
        count = max(1, round(count_of_points * trial.wall_ns / total_ns))
        width_ns = trial.wall_ns / count
        edges = [*np.searchsorted(trial.intended, [width_ns * n for n in range(count)]).tolist(), trial.intended.size]
        for number, (first, end) in enumerate(pairwise(edges)):
            if end > first:
                ordered = np.sort(trial.latencies[first:end])
                metrics = {f"{name}_ns": percentile(ordered, _BLOCK_PERCENTS[name]) for name in ("p50", "p99", "max")}
                at_ns = round(begin_ns + (number + 0.5) * width_ns)
                points.append({"at_ns": at_ns, **metrics, "requests": end - first})
        begin_ns += trial.wall_ns
    return points


# ----------------------------------------------------------------------------------------------------------------------
# Files in the formats of other tools: perf_analyzer's CSV and its export of all requests, and HdrHistogram's .hgrm.


_CSV_REST = (
    "Inferences/Second", "Client Send", "Network+Server Send/Recv", "Server Queue", "Server Compute Input",
    "Server Compute Infer", "Server Compute Output", "Client Recv", "p50 latency", "p90 latency", "p95 latency",
    "p99 latency",
)  # fmt: skip
_PERCENTILES = ("p50", "p90", "p95", "p99")


def result_names(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each result: its runner, and the clients and the rate if they differ among the results."""
    has_clients, has_rates = (len({result[name] for result in results}) > 1 for name in ("clients", "rate"))
    return [
        ", ".join(
            [result["runner"], *([_clients(result)] if has_clients else []), *([_rate(result)] if has_rates else [])]
        )
        for result in results
    ]


def _clients(result: Mapping[str, Any]) -> str:
    return "1 client" if result["clients"] == 1 else f"{result['clients']} clients"


def _rate(result: Mapping[str, Any]) -> str:
    return f"{result['rate']:g}/s"


def time_text(duration_ns: float) -> str:
    """Return µs for a table, without decimals from 1000 µs on."""
    return f"{duration_ns / 1000:,.1f}" if duration_ns < 999_950 else f"{duration_ns / 1000:,.0f}"


def ratio_text(ratio: float) -> str:
    """Return a ratio for a table: three decimals, or one from 10 on."""
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:,.1f}"


def named_parts(path: Path, names: Sequence[str]) -> list[Path]:
    """Return a path for each name: `path` for the first, and for the others `path` with the name before its suffix."""
    others = (re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-") for name in names[1:])
    return [path, *(path.with_name(f"{path.stem}-{other}{path.suffix}") for other in others)]


def csv_text(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the results of one runner in the columns of perf_analyzer, in µs.

    A burst's queues are "Network+Server Send/Recv", what the driver does besides the model is "Server Compute Input",
    and the engine is "Server Compute Infer". Parts that were not measured are empty.
    """
    is_rate = any(result["rate"] is not None for result in results)
    lines = [",".join(["Request Rate" if is_rate else "Concurrency", *_CSV_REST])]
    for result in results:
        first = f"{result['rate']:g}" if is_rate else str(result["clients"])
        found = (result["latency_ns"][name] for name in _PERCENTILES)
        times = ["" if value is None else f"{value / 1000:.1f}" for value in found]
        lines.append(",".join([first, f"{result['throughput_per_s']:.2f}", *_stage_cells(result["stages_ns"]), *times]))
    return "\n".join(lines) + "\n"


def _stage_cells(stages_ns: Mapping[str, float] | None) -> list[str]:
    if stages_ns is None:
        return [""] * 7
    queue, driver, engine = (f"{stages_ns[name] / 1000:.1f}" for name in ("queue", "driver", "engine"))
    return ["", queue, "", driver, engine, "", ""]


def hgrm_text(result: Mapping[str, Any]) -> str:
    """Return the percentiles of one result as HdrHistogram prints them, in ms."""
    return "\n".join(_hgrm_lines(result)) + "\n"


def _hgrm_lines(result: Mapping[str, Any]) -> Iterator[str]:
    yield f"{'Value':>12} {'Percentile':>14} {'TotalCount':>10} {'1/(1-Percentile)':>14}"
    yield ""
    for share, value_ns, count in result["percentiles"]:
        rest = f"{1 / (1 - share):14.2f}" if share < 1 else ""
        yield f"{value_ns / 1e6:12.6f} {share:2.12f} {count:10d} {rest}".rstrip()
    latency_ns = result["latency_ns"]
    yield f"#[Mean    = {latency_ns['mean'] / 1e6:12.6f}, StdDeviation   = {latency_ns['std'] / 1e6:12.6f}]"
    yield f"#[Max     = {latency_ns['max'] / 1e6:12.6f}, Total count    = {result['requests']:12d}]"


def profile_export(loads: Sequence[MeasuredLoad], version: str | None) -> str:
    """Return every request of one runner, as JSON in the form of perf_analyzer's export.

    Time stamps are ns from the begin of the first trial of each level. In an open loop a request's time stamp is its
    intended start.
    """
    experiments = [
        {
            "experiment": _experiment(load),
            "requests": list(_requests(load)),
            "window_boundaries": list(itertools.accumulate((trial.wall_ns for trial in load.trials), initial=0)),
        }
        for load in loads
    ]
    return json.dumps({"experiments": experiments, "version": version or "unknown", "service_kind": "nnfmq"})


def _experiment(load: MeasuredLoad) -> dict[str, Any]:
    if load.level.rate is None:
        return {"mode": "concurrency", "value": load.level.clients}
    return {"mode": "request_rate", "value": load.level.rate}


def _requests(load: MeasuredLoad) -> Iterator[dict[str, Any]]:
    begin_ns = 0
    for trial in load.trials:
        for intended, latency in zip(trial.intended.tolist(), trial.latencies.tolist(), strict=True):
            yield {"timestamp": begin_ns + intended, "response_timestamps": [begin_ns + intended + latency]}
        begin_ns += trial.wall_ns


# ----------------------------------------------------------------------------------------------------------------------
# Comparison of two runs, or of two runners in one run: ratios with confidence intervals.
#
# A metric of a result is the median of its blocks. The interval of a ratio is a bootstrap over the blocks: both
# results' blocks are drawn with replacement many times, and the middle 95 % of the ratios is the interval. It holds for
# noise within the runs. Two runs at different times differ by more, so a change below a tolerance is not a regression.


CANNOT_TELL = "cannot tell"
OTHERS_MAX = 0.05
"""Of a CPU: a machine on which other programs use more is not stable."""
METRICS = {"p50": False, "p99": False, "throughput_per_s": True}
"""Name → whether more is better."""
RESAMPLES = 2000
CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A ratio, and the ends of its confidence interval."""

    ratio: float
    low: float
    high: float


def bootstrap_ratio(values: Sequence[float], reference: Sequence[float], seed: int = 0) -> Interval:
    """Return the ratio of the medians of `values` and `reference`, with its interval. Neither may be empty."""
    random = np.random.default_rng(seed)

    def medians(blocks: Sequence[float]) -> np.ndarray[Any, Any]:
        array = np.asarray(blocks, np.float64)
        return np.asarray(np.median(array[random.integers(0, len(array), (RESAMPLES, len(array)))], axis=1))

    ratios = medians(values) / medians(reference)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(ratios, (tail, 100 - tail))
    return Interval(float(np.median(values) / np.median(reference)), float(low), float(high))


def compare_with_baseline(
    report: Mapping[str, Any], baseline: Mapping[str, Any], tolerance_percent: float
) -> list[dict[str, Any]]:
    """Return a row for each metric of each result that the baseline has too; `outcome` is in words.

    A change is a "regression" or an "improvement" if its whole interval is beyond the tolerance. Of runs that were not
    stable after the warm-up, beside other programs, or on another CPU, one cannot be told from chance, nor that there
    is none unless the whole interval is within the tolerance: CANNOT_TELL.

    Raises:
        InvalidArgument: If the baseline is no report, or that of another model, or has none of the results.
    """
    require_same_model(report, baseline)
    try:
        is_other_cpu = report["conditions"]["cpu"] != baseline["conditions"]["cpu"]
        earlier = {_key(result): result for result in baseline["results"]}
        pairs = [(result, earlier[_key(result)]) for result in report["results"] if _key(result) in earlier]
        rows = [row for new, old in pairs for row in _rows(new, old, tolerance_percent, is_other_cpu)]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgument("the baseline is no report of nnfmq bench --json") from error
    if not pairs:
        has = "; ".join(_text(key) for key in earlier) or "nothing"
        raise InvalidArgument(f"the baseline has other runners, clients or rates: {has}")
    return rows


def require_same_model(report: Mapping[str, Any], baseline: Any) -> None:
    """Require that a baseline is of the model of a report, of which `model_identity` is enough.

    Raises:
        InvalidArgument: If it is not, or is no report.
    """
    try:
        model, digest = str(baseline["model"]), str(baseline["model_sha256"])
    except (KeyError, TypeError) as error:
        raise InvalidArgument("the baseline is no report of nnfmq bench --json") from error
    if digest != report["model_sha256"]:
        raise InvalidArgument(
            f"the baseline is of another model: {model} with SHA-256 {digest[:12]}…, not {report['model']} with "
            f"{report['model_sha256'][:12]}…; measure this one with --json, and compare later runs with that"
        )


def _key(result: Mapping[str, Any]) -> tuple[str, int, float | None]:
    return result["runner"], result["clients"], result["rate"]


def _text(key: tuple[str, int, float | None]) -> str:
    runner, clients, rate = key
    return f"{runner}, {clients} clients" + ("" if rate is None else f", {rate:g}/s")


def _rows(
    new: Mapping[str, Any], old: Mapping[str, Any], tolerance_percent: float, is_other_cpu: bool
) -> list[dict[str, Any]]:
    rows = []
    is_uncertain = is_other_cpu or any(
        each["is_stable"] is False or each["others_cpu_share"] > OTHERS_MAX for each in (new, old)
    )
    for metric, more_is_better in METRICS.items():
        if more_is_better and new["rate"] is not None:
            continue  # the throughput of an open loop is given
        interval = bootstrap_ratio(_values(new, metric), _values(old, metric))
        outcome = outcome_of(
            interval, tolerance_percent / 100, more_is_better=more_is_better, is_certain=not is_uncertain
        )
        rows.append(_row(new, metric) | {**interval._asdict(), "outcome": outcome})
    return rows


def _values(result: Mapping[str, Any], metric: str) -> list[float]:
    key = metric if metric.endswith("_per_s") else f"{metric}_ns"
    return [block[key] for block in result["blocks"]]


def _row(result: Mapping[str, Any], metric: str) -> dict[str, Any]:
    return {"runner": result["runner"], "clients": result["clients"], "rate": result["rate"], "metric": metric}


def outcome_of(interval: Interval, tolerance: float, *, more_is_better: bool, is_certain: bool) -> str:
    """Return "regression" or "improvement" if the whole interval is beyond the tolerance (a share), or "no change".

    `is_certain` is False if a run was disturbed, or the runs are not comparable. Then only an interval that is all
    within the tolerance tells something, and every other one is CANNOT_TELL.
    """
    if not is_certain and not 1 - tolerance <= interval.low <= interval.high <= 1 + tolerance:
        return CANNOT_TELL
    is_more, is_less = interval.low > 1 + tolerance, interval.high < 1 - tolerance
    if is_less if more_is_better else is_more:
        return "regression"
    return "improvement" if is_more or is_less else "no change"


def compare_runners(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the p50 and p99 of each other runner over those of the first one at the same level, with intervals."""
    rows = []
    for result in results:
        first = next(each for each in results if _key(each)[1:] == _key(result)[1:])
        if result is first:
            continue
        for metric in ("p50", "p99"):
            interval = bootstrap_ratio(_values(result, metric), _values(first, metric))
            rows.append(_row(result, metric) | {"over": first["runner"], **interval._asdict()})
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# What the terminal and the page say in words.


_SUSTAINED = 0.95  # of the rate; with less a runner is overloaded


def notes(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the remarks on a report in words, for the terminal and for the page."""
    for runner, reason in report["missing"].items():
        yield f"{runner} is missing: {reason}"
    for name, result in zip(result_names(report["results"]), report["results"], strict=True):
        if result["is_stable"] is False:
            yield f"{name}: not stable after {len(result['warm_up'])} windows of warm-up."
        if result["others_cpu_share"] > OTHERS_MAX:
            yield f"{name}: other programs used {100 * result['others_cpu_share']:.0f} % of a CPU meanwhile."
        if result["rate"] is not None and result["throughput_per_s"] < _SUSTAINED * result["rate"]:
            done, wanted = result["throughput_per_s"], result["rate"]
            yield f"{name}: overloaded, {done:,.0f} of {wanted:g} requests/s; its latency grows with the duration."
        if result["unsent"]:
            yield f"{name}: {result['unsent']:,} requests were not sent, and are not in the percentiles."
    if any(row["outcome"] == CANNOT_TELL for row in report.get("baseline", ())):
        yield (
            f"{CANNOT_TELL}: a run was not stable, beside other programs, or on another CPU; measure both on an idle "
            "machine."
        )
    if report["threshold"] is not None:
        yield _threshold_text(report["threshold"])
    yield f"{_load_text(report)}."
    yield machine_text(report["conditions"])


def _load_text(report: Mapping[str, Any]) -> str:
    """Return the load in words; numbers that differ among the results are part of their names."""
    load, results = report["load"], report["results"]
    clients, rates = ({result[name] for result in results} for name in ("clients", "rate"))
    rate = f"{next(iter(rates)):g}/s, " if len(rates) == 1 and None not in rates else ""
    loop = "closed loop" if rates == {None} else f"open loop, {rate}{load['distribution']} arrivals"
    count = ", ".join(f"{number}" for number in sorted(clients))
    amount = f"{load['duration_s']:g} s" if load["count"] is None else f"{load['count']:,} requests"
    parts = f" in {load['rounds']} parts" if load["rounds"] > 1 else ""
    return f"Clients: {count}, {loop}; {amount}{parts}"


def _threshold_text(threshold: Mapping[str, Any]) -> str:
    limit = f"{heading_of(threshold['percentile'])} of at most {threshold['limit_ns'] / 1e6:g} ms"
    within = threshold["within"]
    if within is None:
        return f"No load has a {limit}."
    clients = "1 client" if within["clients"] == 1 else f"{within['clients']} clients"
    rate = "" if within["rate"] is None else f", {within['rate']:g} requests/s"
    return f"The last load with a {limit}: {clients}{rate}."


# ----------------------------------------------------------------------------------------------------------------------
# The page.


_COLUMNS = ("p50", "p90", "p95", "p99", "p99_9", "max")
_HEADINGS = ("", *map(heading_of, _COLUMNS), "requests/s", "CPU s", "PSS MiB", "stable")


def render_page(report: Mapping[str, Any]) -> str:
    """Return the page of a report of `build_report`."""
    title = f"Latency of {report['model'].rsplit('/', 1)[-1]}"
    results, paragraphs = report["results"], (f"<p>{escape(line)}</p>" for line in notes(report))
    parts = [*_result_table(results), *_ratio_tables(report), *paragraphs, *_charts(results)]
    parts += conditions_list(report, {f"load: {key}": value for key, value in report["load"].items()})
    return latency_page(title, parts)


def _result_table(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = []
    for name, result in zip(result_names(results), results, strict=True):
        times = shown_percentiles(result, _COLUMNS, time_text)
        cpu_s = (result["cpu_ns"]["client"] + result["cpu_ns"]["driver"]) / 1e9
        stable = {True: "yes", False: "no", None: "-"}[result["is_stable"]]
        use = [f"{result['throughput_per_s']:,.0f}", f"{cpu_s:.2f}", f"{result['pss_bytes'] / 2**20:,.1f}", stable]
        rows.append([name, *times, *use])
    yield "<p>Latencies in µs. In an open loop they count from the intended start of each request.</p>"
    yield html_table(_HEADINGS, rows)


def _ratio_tables(report: Mapping[str, Any]) -> Iterator[str]:
    for key, title in (("baseline", "Beside the baseline"), ("ratios", "Beside the first runner")):
        compared = report.get(key, ())
        rows = [
            [f"{name}: {row['metric']}", *map(ratio_text, (row["ratio"], row["low"], row["high"])),
             row.get("outcome", "")]
            for name, row in zip(result_names(compared), compared, strict=True)
        ]  # fmt: skip
        if rows:
            yield f"<h2>{title}</h2>"
            yield html_table(("", "ratio", "95 % interval from", "to", ""), rows)


def _charts(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "<h2>Latency by percentile</h2>"
    yield legend(result_names(results))
    yield f'<div class="wide">{percentile_chart(results)}</div>'
    yield "<h2>Latency by time</h2>"
    yield legend(TIME_LINES)
    charts = (
        f"<figure>{time_chart(result['timeline'])}<figcaption>{escape(name)}</figcaption></figure>"
        for name, result in zip(result_names(results), results, strict=True)
    )
    yield f'<div class="charts">{"".join(charts)}</div>'
