"""What `nnfmq top`, `nnfmq status` and `nnfmq metrics` show: a driver's statistics, with the use of its processes.

An `Activity` compares two samples: rates, times and CPU time are those of the time between them. Of one sample alone it
has the counts and times since the driver started, and no rates.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nnfmq.base.processes import ProcessUsage, command_name, pid_namespace, process_usage
from nnfmq.cli.console import share_text, short_microseconds
from nnfmq.client.connection.defaults import DEFAULT_TIMEOUT_S
from nnfmq.hal.client_class import ClientClass
from nnfmq.observe.driver_statistics import TIMES, ModelCounts, ModelKey
from nnfmq.observe.statistics_layout import LatencyHistogram

if TYPE_CHECKING:
    from nnfmq.client.connection.client import Client
    from nnfmq.observe.driver_statistics import BurstStatistics, ClientStatistics, DriverStatistics, ModelStatistics
    from nnfmq.serialize.repository_protocol import ModelEntry

__all__ = [
    "Activity",
    "BurstActivity",
    "ClientActivity",
    "DriverSample",
    "ModelActivity",
    "ServedActivity",
    "ServedModels",
    "TimesActivity",
    "build_parts",
    "burst_rows",
    "client_rows",
    "driver_json",
    "driver_lines",
    "duration_text",
    "failure_lines",
    "model_rows",
    "pid_text",
    "rate_text",
    "read_served_models",
    "served_activities",
    "served_activity_rows",
    "served_rows",
    "size_text",
    "take_sample",
    "times_rows",
]

_QUANTILES = {"p50_ns": 0.5, "p90_ns": 0.9, "p99_ns": 0.99, "p99_9_ns": 0.999, "max_ns": 1.0}


@dataclass(frozen=True, slots=True)
class DriverSample:
    """Statistics of a driver without its reader's own connection, and what its processes use, by pid.

    `names` has the programs of the clients, and `served` the models by name, if somebody has asked for them.
    """

    statistics: DriverStatistics
    usage: dict[int, ProcessUsage] = field(repr=False)
    names: dict[int, str] = field(repr=False)
    served: ServedModels = field(default_factory=lambda: ServedModels(), repr=False)  # noqa: PLW0108  defined below


def take_sample(client: Client, timeout: float = DEFAULT_TIMEOUT_S) -> DriverSample:
    """Return what the client's driver counts now, without this client itself; blocks up to `timeout` seconds."""
    statistics = client.statistics(timeout=timeout)
    own_pid = 0 if client.is_embedded else client.worker_pid
    others = tuple(other for other in statistics.clients if other.worker_pid != own_pid)
    sees_pids = statistics.pid_namespace in (0, pid_namespace())  # otherwise they are those of other processes here
    statistics = replace(statistics, clients=others)
    if not sees_pids:
        return DriverSample(statistics, {}, {})
    pids = [statistics.pid, statistics.compile_server_pid, *(other.worker_pid for other in others)]
    usage = {pid: used for pid in pids if pid and (used := process_usage(pid)) is not None}
    return DriverSample(statistics, usage, {other.pid: command_name(other.pid) for other in others})


@dataclass(frozen=True, slots=True)
class ModelActivity:
    """A model's executions between two samples."""

    client_pid: int
    model: ModelStatistics
    seconds: float | None
    """The time between the samples; None if there is one."""
    counts: ModelCounts

    @property
    def per_s(self) -> float | None:
        """Executions that succeeded per second."""
        return _rate(self.counts.executions, self.seconds)

    @property
    def engine_share(self) -> float | None:
        """Which part of the time in the driver the engine took; None without executions."""
        return self.counts.engine_ns / self.counts.driver_ns if self.counts.driver_ns > 0 else None

    def as_json(self) -> dict[str, Any]:
        """Return it as printed in JSON."""
        model = self.model
        return {
            "client_pid": self.client_pid,
            "id": model.id,
            "name": model.name,
            "version": model.version or None,
            "device": model.device,
            "executions": model.executions,
            "failures": model.failures,
            "per_s": _rounded(self.per_s),
            "failures_per_s": _rounded(_rate(self.counts.failures, self.seconds)),
            **_times_json(self.counts),
            "engine_share": None if self.engine_share is None else round(self.engine_share, 4),
        }


def _rate(count: int, seconds: float | None) -> float | None:
    return None if seconds is None else count / seconds


def _rounded(per_s: float | None) -> float | None:
    return None if per_s is None else round(per_s, 3)


def _times_json(counts: ModelCounts) -> dict[str, Any]:
    """Return for each of the times how many there are, and their percentiles that enough executions support."""
    return {name: _histogram_json(getattr(counts, name)) for name in TIMES}


def _histogram_json(times: LatencyHistogram) -> dict[str, int | None]:
    return {
        "count": times.total,
        **{name: times.supported_ns(fraction) for name, fraction in _QUANTILES.items()},
    }


@dataclass(frozen=True, slots=True)
class TimesActivity:
    """How long the executions of a model took between two samples, of all clients that run the same program.

    Clients that have left, and models that were released, count, too.
    """

    key: ModelKey
    counts: ModelCounts

    def as_json(self) -> dict[str, Any]:
        """Return it as printed in JSON."""
        return {
            "client": self.key.program,
            "model": self.key.name,
            "version": self.key.version or None,
            "device": self.key.device,
            "executions": self.counts.executions,
            "failures": self.counts.failures,
            "times": _times_json(self.counts),
        }


@dataclass(frozen=True, slots=True)
class BurstActivity:
    """A burst's executions and waits between two samples."""

    client_pid: int
    burst: BurstStatistics
    model: ModelStatistics | None
    """Its model; None if that was released."""
    per_s: float | None
    polled: int
    slept: int

    @property
    def polled_share(self) -> float | None:
        """Which part of the waits ended while the driver polled; None without waits."""
        waits = self.polled + self.slept
        return self.polled / waits if waits else None

    def as_json(self) -> dict[str, Any]:
        """Return it as printed in JSON."""
        burst, share = self.burst, self.polled_share
        return {
            "client_pid": self.client_pid,
            "id": burst.id,
            "model_id": burst.model_id,
            "model": None if self.model is None else self.model.name,
            "executions": burst.executions,
            "failures": burst.failures,
            "in_flight": burst.in_flight,
            "per_s": _rounded(self.per_s),
            "polled": self.polled,
            "slept": self.slept,
            "polled_share": None if share is None else round(share, 4),
        }


@dataclass(frozen=True, slots=True)
class ClientActivity:
    """A client between two samples. CPU and memory are those of its worker; None if that cannot be read."""

    client: ClientStatistics
    name: str
    per_s: float | None
    cpu_share: float | None
    """CPU time per time: 1 is one core."""
    usage: ProcessUsage | None

    @property
    def class_name(self) -> str:
        """The class of the client; `-` if it is unknown."""
        return next((each.name.lower() for each in ClientClass if each == self.client.client_class), "-")

    def as_json(self) -> dict[str, Any]:
        """Return it as printed in JSON."""
        client, usage = self.client, self.usage
        return {
            "pid": client.pid,
            "uid": client.uid,
            "name": self.name,
            "class": self.class_name,
            "worker_pid": client.worker_pid,
            "executions": client.executions,
            "failures": client.failures,
            "per_s": _rounded(self.per_s),
            "open_calls": client.open_calls,
            "running_calls": client.running_calls,
            "in_flight": client.in_flight,
            "charged_bytes": client.charged_bytes,
            "quota_bytes": client.quota_bytes,
            "cpu_share": None if self.cpu_share is None else round(self.cpu_share, 4),
            "resident_bytes": None if usage is None else usage.resident_bytes,
            "threads": None if usage is None else usage.threads,
            "models": client.model_count,
            "bursts": client.burst_count,
        }


class Activity:
    """What happened in a driver between two samples; without an earlier one, since the driver started.

    A client that has connected between them, and a model that was prepared, count from 0.
    """

    def __init__(self, now: DriverSample, before: DriverSample | None = None) -> None:
        self.now = now
        self._before = before
        earlier = () if before is None else before.statistics.clients
        self._clients_before = {client.worker_pid: client for client in earlier}
        self.clients = [self._client(client) for client in now.statistics.clients]
        self.models = [row for client in now.statistics.clients for row in self._models(client)]
        self.bursts = [row for client in now.statistics.clients for row in self._bursts(client)]
        self.times = self._times()

    @property
    def per_s(self) -> float | None:
        """Successful executions per second, of all clients, those that have left between the samples included."""
        return _rate(sum(row.counts.executions for row in self.times), self.seconds)

    @property
    def seconds(self) -> float | None:
        """The time that the rates are about."""
        if self._before is None:
            return None
        return max(self.now.statistics.read_ns - self._before.statistics.read_ns, 1) / 1e9

    def _times(self) -> list[TimesActivity]:
        """Return the times of each model that was executed between the samples, by model, device and program."""
        earlier = {} if self._before is None else self._before.statistics.totals()
        rows = []
        for key, counts in self.now.statistics.totals().items():
            found = counts.since(earlier[key]) if key in earlier else counts
            if found.executions or found.failures or found.client.total:
                rows.append(TimesActivity(key, found))
        return sorted(rows, key=lambda row: (row.key.name, row.key.version, row.key.device, row.key.program))

    def _client(self, client: ClientStatistics) -> ClientActivity:
        before = self._clients_before.get(client.worker_pid)
        executions = client.executions - (0 if before is None else before.executions)
        name = self.now.names.get(client.pid, "") or client.program
        per_s = _rate(max(executions, 0), self.seconds)
        usage = self.now.usage.get(client.worker_pid)
        return ClientActivity(client, name, per_s, self.cpu_share(client.worker_pid), usage)

    def cpu_share(self, pid: int) -> float | None:
        """Return the CPU time per time that a process used between the samples; None if that is unknown."""
        if self._before is None or pid not in self.now.usage or pid not in self._before.usage:
            return None
        used_ns = self.now.usage[pid].cpu_ns - self._before.usage[pid].cpu_ns
        elapsed_ns = self.now.statistics.read_ns - self._before.statistics.read_ns
        return max(used_ns, 0) / max(elapsed_ns, 1)

    def _models(self, client: ClientStatistics) -> Iterable[ModelActivity]:
        before = self._clients_before.get(client.worker_pid)
        earlier = {} if before is None else {model.id: model for model in before.models}
        for model in client.models:
            old = earlier.get(model.id)
            counts = model.counts if old is None else model.counts.since(old.counts)
            yield ModelActivity(client.pid, model, self.seconds, counts)

    def _bursts(self, client: ClientStatistics) -> Iterable[BurstActivity]:
        before = self._clients_before.get(client.worker_pid)
        earlier = {} if before is None else {burst.id: burst for burst in before.bursts}
        models = {model.id: model for model in client.models}
        for burst in client.bursts:
            old = earlier.get(burst.id)
            executions = burst.executions - (0 if old is None else old.executions)
            yield BurstActivity(
                client.pid,
                burst,
                models.get(burst.model_id),
                _rate(max(executions, 0), self.seconds),
                max(burst.polled - (0 if old is None else old.polled), 0),
                max(burst.slept - (0 if old is None else old.slept), 0),
            )

    def as_json(self) -> dict[str, Any]:
        """Return everything as printed in JSON."""
        return {
            "driver": driver_json(self.now, self.cpu_share(self.now.statistics.pid)),
            "per_s": _rounded(self.per_s),
            "clients": [client.as_json() for client in self.clients],
            "models": [model.as_json() for model in self.models],
            "bursts": [burst.as_json() for burst in self.bursts],
            "times": [row.as_json() for row in self.times],
        }


def driver_json(sample: DriverSample, cpu_share: float | None = None) -> dict[str, Any]:
    """Return the driver's part of the JSON."""
    statistics, cache = sample.statistics, sample.statistics.cache
    usage = sample.usage.get(statistics.pid)
    server = sample.usage.get(statistics.compile_server_pid)
    return {
        "pid": statistics.pid,
        "version": statistics.version or None,
        "was_upgraded": statistics.was_upgraded,
        "uptime_ns": statistics.uptime_ns,
        "clients": len(statistics.clients),
        "rejected_clients": statistics.rejected_clients,
        "dead_workers": statistics.dead_workers,
        "deaths": dict(statistics.deaths),
        "build": statistics.build or None,
        "clients_max": statistics.clients_max,
        "serves_several": statistics.serves_several,
        "lacks_capabilities": statistics.lacks_capabilities,
        "cpu_share": None if cpu_share is None else round(cpu_share, 4),
        "resident_bytes": None if usage is None else usage.resident_bytes,
        "memory_limit_bytes": statistics.memory_limit_bytes or None,
        "charged_bytes": sum(client.charged_bytes for client in statistics.clients),
        "compile_server": {
            "pid": statistics.compile_server_pid or None,
            "resident_bytes": None if server is None else server.resident_bytes,
            "requests": statistics.compile_requests,
        },
        "cache": {
            "programs": cache.programs,
            "size_bytes": cache.size_bytes,
            "limit_bytes": cache.limit_bytes,
            "lookups": cache.lookups,
            "hits": cache.hits,
        },
    }


# ----------------------------------------------------------------------------------------------------------------------
# The models that a driver serves by name, and what its clients execute of them, for `nnfmq status` and `nnfmq top`.


_Key = tuple[str, int]  # name and version


class ServedModels(NamedTuple):
    """The list of a driver's model repository, None if the driver has none; and why the list is missing, or nothing."""

    entries: list[ModelEntry] | None = None
    problem: str = ""


def read_served_models(client: Client, socket: str | None, timeout: float) -> ServedModels:
    """Return the models that the driver at `socket` serves by name; blocks up to `timeout` seconds."""
    from nnfmq.base.paths import client_socket, models_socket
    from nnfmq.cli import describe
    from nnfmq.hal.errors import NnfmqError

    if not models_socket(client_socket() if socket is None else Path(socket)).exists():
        return ServedModels()
    try:
        return ServedModels(client.models(timeout=timeout))
    except NnfmqError as error:
        return ServedModels(None, describe(error))


@dataclass(slots=True)
class ServedActivity:
    """What all clients execute of one version of a served model between two samples.

    `state` is empty for a version that the repository does not serve any more, or not to those that ask for none.
    """

    name: str
    version: int
    state: str = ""
    seconds: float | None = None
    failures: int = 0
    bursts: int = 0
    counts: ModelCounts = field(default_factory=ModelCounts)

    @property
    def per_s(self) -> float | None:
        """Executions that succeeded per second."""
        return _rate(self.counts.executions, self.seconds)

    def as_json(self) -> dict[str, Any]:
        """Return it as printed in JSON."""
        return {
            "name": self.name,
            "version": self.version or None,
            "state": self.state or None,
            "per_s": _rounded(self.per_s),
            **_times_json(self.counts),
            "bursts": self.bursts,
            "failures": self.failures,
            "failures_per_s": _rounded(_rate(self.counts.failures, self.seconds)),
        }


def served_activities(entries: Iterable[ModelEntry], activity: Activity) -> list[ServedActivity]:
    """Return a row for the served version of each model, and for each other version that clients use, by name."""
    seconds = activity.seconds
    served = {
        (entry.name, entry.version): ServedActivity(entry.name, entry.version, entry.state.value, seconds)
        for entry in entries
    }
    used: dict[_Key, ServedActivity] = {}
    bursts = _open_bursts(activity)
    for row in activity.models:
        key = row.model.name, row.model.version
        if not row.model.version or not (key in served or row.model.executions or row.model.failures or bursts[key]):
            continue  # not of the repository; or it has it prepared and serves it in a moment
        found = served.get(key) or used.setdefault(key, ServedActivity(*key, "", seconds))
        found.failures += row.model.failures
        found.counts += row.counts
        found.bursts = bursts[key]
    rows = [*served.values(), *used.values()]
    return sorted(rows, key=lambda row: (row.name, not row.state, -row.version))  # the served version before others


def _open_bursts(activity: Activity) -> Counter[_Key]:
    """Return the number of open bursts of each model."""
    found: Counter[_Key] = Counter()
    for client in activity.now.statistics.clients:
        models = {model.id: (model.name, model.version) for model in client.models}
        found.update(models[burst.model_id] for burst in client.bursts if burst.model_id in models)
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Tables of a driver's statistics, for `nnfmq status` and `nnfmq top`: what fits into a terminal of a given width.


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
        (">pid", lambda row: pid_text(row.client_pid), 1),
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
        (">pid", lambda row: pid_text(row.client_pid), 1),
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


def build_parts(statistics: DriverStatistics) -> tuple[str, str, str]:
    """Return a driver's queue core, Python and machine; what is unknown is empty."""
    core, python, machine = (*statistics.build.split(), "", "", "")[:3]
    return core, python, machine


def _deaths_text(statistics: DriverStatistics) -> str:
    causes = ", ".join(f"{count} {cause}" for cause, count in statistics.deaths.items() if count)
    return f"{statistics.dead_workers} died so far{f': {causes}' if causes else ''}"


def _user_lines(statistics: DriverStatistics) -> list[tuple[str, str]]:
    """Return what tells whose clients a driver serves; nothing of one that was to serve one user."""
    if statistics.lacks_capabilities:
        return [("users", "one: it lacks CAP_SETUID and CAP_SETGID to serve several")]
    return [("users", "several; this shows what you may see")] if statistics.serves_several else []


def driver_lines(sample: DriverSample) -> list[tuple[str, str]]:
    """Return what a driver is and has, as names and texts."""
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
            f"{cache.lookups:,} lookups, {cache.hits:,} found",
        ),
    ]
