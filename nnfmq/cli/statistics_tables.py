"""Tables of a driver's statistics, for `nnfmq status` and `nnfmq top`: what fits into a terminal of a given width."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from nnfmq.cli.console import microseconds

if TYPE_CHECKING:
    from nnfmq.cli.served_models import ServedActivity
    from nnfmq.cli.statistics_sample import Activity, BurstActivity, ClientActivity, DriverSample, ModelActivity
    from nnfmq.observe.driver_statistics import ModelStatistics
    from nnfmq.serialize.repository_protocol import ModelEntry

WIDE = 80
"""Columns that a table with everything needs."""
_MIB = 1 << 20
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))

Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Headings, with `>` before those of numbers; and the cells of each row."""


def size_text(size_bytes: int | None) -> str:
    """Return a size in MiB; `-` if it is unknown."""
    if size_bytes is None:
        return "-"
    return f"{size_bytes / _MIB:,.0f} MiB" if size_bytes >= 10 * _MIB else f"{size_bytes / _MIB:.1f} MiB"


def rate_text(per_s: float) -> str:
    """Return a rate per second with three digits or all that count."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def share_text(share: float | None) -> str:
    """Return a share in percent; `-` if it is unknown."""
    return "-" if share is None else f"{share * 100:.0f} %"


def duration_text(duration_ns: int) -> str:
    """Return a duration in its two largest units: `3 d 4 h`, `12 s`."""
    seconds = duration_ns // 1_000_000_000
    for index, (size, unit) in enumerate(_UNITS):
        if seconds >= size:
            smaller, smaller_unit = _UNITS[index + 1] if index + 1 < len(_UNITS) else (1, "s")
            return f"{seconds // size} {unit} {seconds % size // smaller} {smaller_unit}"
    return f"{seconds} s"


def _microseconds(duration_ns: int | None) -> str:
    return microseconds(-1 if duration_ns is None else duration_ns)


def client_rows(activity: Activity, width: int) -> Rows:
    """Return the table of clients."""
    columns: list[tuple[str, Callable[[ClientActivity], str], bool]] = [
        (">pid", lambda row: str(row.client.pid), True),
        ("client", lambda row: row.name, True),
        (">per s", lambda row: rate_text(row.per_s), True),
        (">failed", lambda row: f"{row.client.failures:,}", False),
        (">calls", lambda row: str(row.client.open_calls), False),
        (">CPU", lambda row: share_text(row.cpu_share), True),
        (">memory", lambda row: size_text(None if row.usage is None else row.usage.resident_bytes), False),
        (">charged", lambda row: size_text(row.client.charged_bytes), False),
    ]
    return _rows(columns, activity.clients, width)


def model_rows(activity: Activity, width: int) -> Rows:
    """Return the table of models. Latencies are those in the driver, in µs."""
    columns: list[tuple[str, Callable[[ModelActivity], str], bool]] = [
        (">pid", lambda row: str(row.client_pid), False),
        ("model", lambda row: _model_text(row.model), True),
        ("device", lambda row: row.model.device, False),
        (">per s", lambda row: rate_text(row.per_s), True),
        (">p50 µs", lambda row: _microseconds(row.latency.quantile_ns(0.5)), True),
        (">p99 µs", lambda row: _microseconds(row.latency.quantile_ns(0.99)), True),
        (">engine", lambda row: share_text(row.engine_share), False),
        (">failed", lambda row: f"{row.model.failures:,}", False),
    ]
    return _rows(columns, activity.models, width)


def burst_rows(activity: Activity, width: int) -> Rows:
    """Return the table of bursts. `polled` is how many of the waits for requests ended while the driver polled."""
    columns: list[tuple[str, Callable[[BurstActivity], str], bool]] = [
        (">pid", lambda row: str(row.client_pid), False),
        (">burst", lambda row: str(row.burst.id), True),
        ("model", lambda row: f"model {row.burst.model_id}" if row.model is None else _model_text(row.model), True),
        (">per s", lambda row: rate_text(row.per_s), True),
        (">in flight", lambda row: str(row.burst.in_flight), False),
        (">polled", lambda row: share_text(row.polled_share), True),
        (">sleeps", lambda row: f"{row.slept:,}", False),
        (">failed", lambda row: f"{row.burst.failures:,}", False),
    ]
    return _rows(columns, activity.bursts, width)


def _model_text(model: ModelStatistics) -> str:
    """Return a model's name; of one of the model repository its path there, NAME/VERSION."""
    return f"{model.name}/{model.version}" if model.version else model.name


def served_activity_rows(rows: list[ServedActivity], width: int) -> Rows:
    """Return the table of what all clients execute of the models that a driver serves by name."""
    columns: list[tuple[str, Callable[[ServedActivity], str], bool]] = [
        ("served model", lambda row: row.name, True),
        (">version", lambda row: str(row.version or "-"), True),
        ("state", lambda row: row.state or "-", False),
        (">per s", lambda row: rate_text(row.per_s), True),
        (">p50 µs", lambda row: _microseconds(row.latency.quantile_ns(0.5)), False),
        (">p99 µs", lambda row: _microseconds(row.latency.quantile_ns(0.99)), True),
        (">bursts", lambda row: str(row.bursts), False),
        (">failed", lambda row: f"{row.failures:,}", False),
    ]
    return _rows(columns, rows, width)


def served_rows(entries: Iterable[ModelEntry]) -> Rows:
    """Return the table of the models that a driver serves by name."""
    headings = ("served model", ">version", "state", "device", "since")
    return headings, [
        (entry.name, str(entry.version or "-"), entry.state.value, entry.device or "-", _time_text(entry.changed_s))
        for entry in entries
    ]


def _time_text(clock_s: float) -> str:
    """Return a time of day since the epoch; `-` if it is 0, unknown."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(clock_s)) if clock_s else "-"


def failure_lines(entries: Iterable[ModelEntry]) -> list[str]:
    """Return for each model of which a version is not served a line with the reason."""
    return [
        f"{entry.name}, version {entry.failed_version}: {entry.reason}"
        if entry.failed_version
        else f"{entry.name}: {entry.reason}"
        for entry in entries
        if entry.reason
    ]


def _rows(columns: list[tuple[str, Callable[[Any], str], bool]], rows: list[Any], width: int) -> Rows:
    """Return all columns, or those marked as essential if the terminal is narrow."""
    shown = [column for column in columns if column[2] or width >= WIDE]
    return tuple(heading for heading, _, _ in shown), [tuple(cell(row) for _, cell, _ in shown) for row in rows]


def driver_lines(sample: DriverSample) -> list[tuple[str, str]]:
    """Return what a driver is and has, as names and texts."""
    statistics, cache = sample.statistics, sample.statistics.cache
    usage = sample.usage.get(statistics.pid)
    charged = sum(client.charged_bytes for client in statistics.clients)
    limit = statistics.memory_limit_bytes
    server = sample.usage.get(statistics.compile_server_pid)
    lines = [
        ("driver", f"pid {statistics.pid}, up {duration_text(statistics.uptime_ns)}"),
        ("version", statistics.version or "that of this command"),
        ("memory", f"{size_text(None if usage is None else usage.resident_bytes)} resident"),
        ("charged", f"{size_text(charged)}{f' of {size_text(limit)}' if limit else ''}"),
        ("clients", f"{len(statistics.clients)}, {statistics.rejected_clients} rejected so far"),
        ("workers", f"{statistics.dead_workers} died so far"),
        ("compiler", f"{'runs' if statistics.compile_server_pid else 'not running'}"),
        ("programs", f"{cache.programs} shared, {size_text(cache.size_bytes)} of {size_text(cache.limit_bytes)}"),
        ("lookups", f"{cache.lookups:,}, {cache.hits:,} found"),
    ]
    if server is not None:
        lines[5] = ("compiler", f"pid {statistics.compile_server_pid}, {size_text(server.resident_bytes)} resident")
    return lines
