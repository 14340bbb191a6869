"""Files in the formats of other tools: perf_analyzer's CSV and its export of all requests, and HdrHistogram's .hgrm."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nnfmq.measure.load_measurement import MeasuredLoad

__all__ = ["csv_text", "hgrm_text", "named_parts", "profile_export", "ratio_text", "result_names", "time_text"]

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
        times = [f"{result['latency_ns'][name] / 1000:.1f}" for name in _PERCENTILES]
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
