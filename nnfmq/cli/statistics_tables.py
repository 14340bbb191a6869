"""The tables and lines in which `nnfmq status` and `nnfmq top` show a driver's statistics.

A table has the columns that fit into a terminal of the given width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from nnfmq.cli.console import share_text, short_microseconds
from nnfmq.cli.statistics import build_parts
from nnfmq.hal.summaries import counted
from nnfmq.observe.driver_statistics import TIMES

if TYPE_CHECKING:
    from nnfmq.cli.statistics import Activity, DriverSample, ServedActivity
    from nnfmq.observe.driver_statistics import DriverStatistics, ModelStatistics
    from nnfmq.serialize.repository_protocol import ModelEntry

__all__ = [
    "Rows",
    "burst_rows",
    "client_rows",
    "driver_lines",
    "duration_text",
    "failure_lines",
    "model_rows",
    "pid_text",
    "rate_text",
    "served_activity_rows",
    "served_rows",
    "size_text",
    "times_rows",
]

_MIB = 1 << 20
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))

Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Headings, with `>` before those of numbers; and the cells of each row."""
_Column = tuple[str, Callable[[Any], str], int]
"""A heading, the cell of a row, and a rank: a narrow screen lacks the columns with the highest ranks; 0: never."""


def size_text(size_bytes: int | None) -> str:
    """Return a size in MiB; `-` if it is unknown."""
    if size_bytes is None:
        return "-"
    return f"{size_bytes / _MIB:,.0f} MiB" if size_bytes >= 10 * _MIB else f"{size_bytes / _MIB:.1f} MiB"


def rate_text(per_s: float | None) -> str:
    """Return a rate per second with three digits or all that count; `-` if it is unknown."""
    if per_s is None:
        return "-"
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def duration_text(duration_ns: int) -> str:
    """Return a duration in its two largest units: `3 d 4 h`, `12 s`."""
    seconds = duration_ns // 1_000_000_000
    for index, (size, unit) in enumerate(_UNITS):
        if seconds >= size:
            smaller, smaller_unit = _UNITS[index + 1] if index + 1 < len(_UNITS) else (1, "s")
            return f"{seconds // size} {unit} {seconds % size // smaller} {smaller_unit}"
    return f"{seconds} s"


def pid_text(pid: int) -> str:
    """Return a client's pid; `-` for one in another PID namespace than its driver, which gets 0."""
    return str(pid) if pid else "-"


def client_rows(activity: Activity, width: int) -> Rows:
    """Return the table of clients."""
    columns: list[_Column] = [
        (">pid", lambda row: pid_text(row.client.pid), 0),
        ("client", lambda row: row.name, 0),
        ("class", lambda row: row.class_name, 1),
        _executed(activity, lambda row: row.client.executions),
        (">failed", lambda row: f"{row.client.failures:,}", 2),
        (">calls", lambda row: str(row.client.open_calls), 3),
        *([] if activity.seconds is None else [(">CPU", lambda row: share_text(row.cpu_share), 0)]),
        (">memory", lambda row: size_text(None if row.usage is None else row.usage.resident_bytes), 4),
        (">charged", lambda row: size_text(row.client.charged_bytes), 5),
    ]
    return _rows(columns, activity.clients, width)


def model_rows(activity: Activity, width: int) -> Rows:
    """Return the table of models, with the engine's part of the time in the driver."""
    columns: list[_Column] = [
        (">pid", lambda row: pid_text(row.client.pid), 1),
        ("model", lambda row: _model_text(row.model), 0),
        ("device", lambda row: row.model.device, 3),
        _executed(activity, lambda row: row.model.executions),
        (">in engine", lambda row: share_text(row.engine_share), 0),
        (">failed", lambda row: f"{row.model.failures:,}", 2),
    ]
    return _rows(columns, activity.models, width)


def _executed(activity: Activity, count: Callable[[Any], int]) -> _Column:
    """Return the column of the rates between two samples; of one sample that of the executions."""
    if activity.seconds is None:
        return ">executed", lambda row: f"{count(row):,}", 0
    return ">per s", lambda row: rate_text(row.per_s), 0


def times_rows(activity: Activity, width: int, names: Sequence[str] = TIMES) -> Rows:
    """Return the table of how long executions took, in µs: these of the client, the queues, the driver and the engine.

    A percentile that too few executions support is `-`. A device or a client that alone tells two rows apart is always
    shown.
    """
    keys = [row.key for row in activity.times]
    models, on_devices = {key[1:3] for key in keys}, {key[1:] for key in keys}
    needs_device, needs_client = len(models) < len(on_devices), len(on_devices) < len(keys)
    rows = [(row, name, getattr(row.counts, name)) for row in activity.times for name in names]
    columns: list[_Column] = [
        ("model", lambda row: _of_first(row[1], _path_text(row[0].key.name, row[0].key.version)), 0),
        ("device", lambda row: _of_first(row[1], row[0].key.device), 0 if needs_device else 4),
        ("client", lambda row: _of_first(row[1], row[0].key.program), 0 if needs_client else 2),
        ("time, µs", lambda row: row[1], 0),
        *(
            (f">{name}", lambda row, fraction=fraction: _times_text(row[2].supported_ns(fraction)), rank)
            for name, fraction, rank in _SHOWN
        ),
    ]
    return _rows(columns, rows, width)


_SHOWN = (("p50", 0.5, 0), ("p90", 0.9, 3), ("p99", 0.99, 0), ("p99.9", 0.999, 1), ("max", 1.0, 0))


def _of_first(name: str, text: str) -> str:
    """Return a text in the first row of a model, and nothing in its other rows."""
    return text if name == TIMES[0] else ""


def _times_text(duration_ns: int | None) -> str:
    return short_microseconds(-1 if duration_ns is None else duration_ns)


def burst_rows(activity: Activity, width: int) -> Rows:
    """Return the table of bursts. `polled` is how many of the waits for requests ended while the driver polled."""
    columns: list[_Column] = [
        (">pid", lambda row: pid_text(row.client.pid), 1),
        (">burst", lambda row: str(row.burst.id), 0),
        ("model", lambda row: f"model {row.burst.model_id}" if row.model is None else _model_text(row.model), 0),
        (">per s", lambda row: rate_text(row.per_s), 0),
        (">in flight", lambda row: str(row.burst.in_flight), 3),
        (">polled", lambda row: share_text(row.polled_share), 0),
        (">sleeps", lambda row: f"{row.slept:,}", 4),
        (">failed", lambda row: f"{row.burst.failures:,}", 2),
    ]
    return _rows(columns, activity.bursts, width)


def _model_text(model: ModelStatistics) -> str:
    return _path_text(model.name, model.version)


def _path_text(name: str, version: int) -> str:
    """Return a model's name; of one of the model repository its path there, NAME/VERSION."""
    return f"{name}/{version}" if version else name


def served_activity_rows(rows: list[ServedActivity], width: int) -> Rows:
    """Return the table of what all clients execute of the models that a driver serves by name."""
    columns: list[_Column] = [
        ("served model", lambda row: row.name, 0),
        (">version", lambda row: str(row.version or "-"), 0),
        ("state", lambda row: row.state or "-", 1),
        (">per s", lambda row: rate_text(row.per_s), 0),
        (">client p50", lambda row: _times_text(row.counts.client.supported_ns(0.5)), 3),
        (">client p99", lambda row: _times_text(row.counts.client.supported_ns(0.99)), 0),
        (">bursts", lambda row: str(row.bursts), 4),
        (">failed", lambda row: f"{row.failures:,}", 2),
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
        f"not served: {entry.name}, version {entry.failed_version}: {entry.reason}"
        if entry.failed_version
        else f"not served: {entry.name}: {entry.reason}"
        for entry in entries
        if entry.reason
    ]


def _rows(columns: list[_Column], rows: list[Any], width: int) -> Rows:
    """Return the columns that fit into a terminal of so many characters, with two between columns, one at the edges."""
    shown = [(heading, [cell(row) for row in rows], rank) for heading, cell, rank in columns]
    while _width(shown) > width and (dropped := max(shown, key=lambda column: column[2]))[2]:
        shown.remove(dropped)
    return tuple(heading for heading, _, _ in shown), list(zip(*(cells for _, cells, _ in shown), strict=True))


def _width(columns: Iterable[tuple[str, list[str], int]]) -> int:
    return sum(max(map(len, (heading.lstrip(">"), *cells))) + 2 for heading, cells, _ in columns)


def _version_text(statistics: DriverStatistics) -> str:
    core, python, machine = build_parts(statistics)
    build = f", {core} core, Python {python}, {machine}" if core else ""
    upgraded = "; upgraded since, restart it" if statistics.was_upgraded else ""
    return f"{statistics.version or 'that of this command'}{build}{upgraded}"


def _deaths_text(statistics: DriverStatistics) -> str:
    causes = ", ".join(f"{count} {cause}" for cause, count in statistics.deaths.items() if count)
    return f"{statistics.dead_workers} died so far{f': {causes}' if causes else ''}"


def _user_lines(statistics: DriverStatistics) -> list[tuple[str, str]]:
    """Return the line about the users whose clients a driver serves; none if it was to serve one user."""
    if statistics.lacks_capabilities:
        return [("users", "one: it lacks CAP_SETUID and CAP_SETGID to serve several")]
    return [("users", "several; this shows what you may see")] if statistics.serves_several else []


def driver_lines(sample: DriverSample) -> list[tuple[str, str]]:
    """Return the lines about a driver itself: pid, version, memory, clients, workers; as names and texts."""
    statistics, cache = sample.statistics, sample.statistics.cache
    usage = sample.usage.get(statistics.pid)
    charged, count = sum(client.charged_bytes for client in statistics.clients), len(statistics.clients)
    limit = statistics.memory_limit_bytes
    server = sample.usage.get(statistics.compile_server_pid)
    compiler = "runs" if statistics.compile_server_pid else "not running"
    if server is not None:
        compiler = f"pid {statistics.compile_server_pid}, {size_text(server.resident_bytes)} resident"
    return [
        ("driver", f"pid {statistics.pid}, up {duration_text(statistics.uptime_ns)}"),
        ("version", _version_text(statistics)),
        (
            "memory",
            f"{size_text(None if usage is None else usage.resident_bytes)} resident; clients are charged "
            f"{size_text(charged)}{f' of {size_text(limit)}' if limit else ''}",
        ),
        ("clients", f"{count} of {statistics.clients_max}, {statistics.rejected_clients} rejected so far"),
        ("workers", _deaths_text(statistics)),
        *_user_lines(statistics),
        ("compiler", compiler),
        (
            "programs",
            f"{cache.programs} shared, {size_text(cache.size_bytes)} of {size_text(cache.limit_bytes)}; "
            f"{cache.hits:,} found in {counted(cache.lookups, 'lookup')}",
        ),
    ]
