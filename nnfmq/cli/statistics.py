"""Samples of a driver's statistics, with the use of its processes, and what happened between two of them.

`nnfmq status`, `nnfmq client`, `nnfmq top` and `nnfmq metrics` show them; `statistics_tables` has the tables.
An `Activity` compares two samples: rates, times and CPU time are those of the time between them. Of one sample alone it
has the counts and times since the driver started, and no rates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nnfmq.base.processes import ProcessUsage, pid_namespace, process_usage
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
    "driver_json",
    "read_served_models",
    "served_activities",
    "take_sample",
]

_QUANTILES = {"p50_ns": 0.5, "p90_ns": 0.9, "p99_ns": 0.99, "p99_9_ns": 0.999, "max_ns": 1.0}


class ServedModels(NamedTuple):
    """The list of a driver's model repository, None if the driver has none; and why the list is missing, or nothing."""

    entries: list[ModelEntry] | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class DriverSample:
    """Statistics of a driver without its reader's own connection, and what its processes use, by pid.

    `served` has the models by name, if somebody has asked for them.
    """

    statistics: DriverStatistics
    usage: dict[int, ProcessUsage] = field(repr=False)
    served: ServedModels = field(default_factory=ServedModels, repr=False)


def take_sample(client: Client, timeout: float = DEFAULT_TIMEOUT_S) -> DriverSample:
    """Return a sample of the client's driver, without this client itself; blocks up to `timeout` seconds."""
    statistics = client.statistics(timeout=timeout)
    own_pid = 0 if client.is_embedded else client.worker_pid
    others = tuple(other for other in statistics.clients if other.worker_pid != own_pid)
    sees_pids = statistics.pid_namespace in (0, pid_namespace())  # otherwise they are those of other processes here
    statistics = replace(statistics, clients=others)
    if not sees_pids:
        return DriverSample(statistics, {})
    pids = [statistics.pid, statistics.compile_server_pid, *(other.worker_pid for other in others)]
    usage = {pid: used for pid in pids if pid and (used := process_usage(pid)) is not None}
    return DriverSample(statistics, usage)


@dataclass(frozen=True, slots=True)
class ModelActivity:
    """A model's executions between two samples."""

    client: ClientStatistics
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
        """The engine's part of the time in the driver; None without executions."""
        return self.counts.engine_ns / self.counts.driver_ns if self.counts.driver_ns > 0 else None

    def as_json(self) -> dict[str, Any]:
        """Return it as printed in JSON."""
        model = self.model
        return {
            "client_id": self.client.worker_pid,
            "id": model.id,
            "name": model.name,
            "version": model.version or None,
            "device": model.device,
            "executions": model.executions,
            "failures": model.failures,
            "per_s": _rounded(self.per_s),
            "failures_per_s": _rounded(_rate(self.counts.failures, self.seconds)),
            "times": _times_json(self.counts),
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
    """The times of a model's executions between two samples, of all clients that run the same program.

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

    client: ClientStatistics
    burst: BurstStatistics
    model: ModelStatistics | None
    """Its model; None if that was released."""
    per_s: float | None
    polled: int
    slept: int

    @property
    def polled_share(self) -> float | None:
        """The part of the waits that ended while the driver polled; None without waits."""
        waits = self.polled + self.slept
        return self.polled / waits if waits else None

    def as_json(self) -> dict[str, Any]:
        """Return it as printed in JSON."""
        burst, share = self.burst, self.polled_share
        return {
            "client_id": self.client.worker_pid,
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
            "id": client.worker_pid,
            "pid": client.pid,
            "uid": client.uid,
            "name": self.name,
            "class": self.class_name,
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
    """The work of a driver between two samples; without an earlier one, since the driver started.

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
        per_s = _rate(max(executions, 0), self.seconds)
        usage = self.now.usage.get(client.worker_pid)
        return ClientActivity(client, client.program, per_s, self.cpu_share(client.worker_pid), usage)

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
            yield ModelActivity(client, model, self.seconds, counts)

    def _bursts(self, client: ClientStatistics) -> Iterable[BurstActivity]:
        before = self._clients_before.get(client.worker_pid)
        earlier = {} if before is None else {burst.id: burst for burst in before.bursts}
        models = {model.id: model for model in client.models}
        for burst in client.bursts:
            old = earlier.get(burst.id)
            executions = burst.executions - (0 if old is None else old.executions)
            yield BurstActivity(
                client,
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


def build_parts(statistics: DriverStatistics) -> tuple[str, str, str]:
    """Return a driver's queue core, Python and machine; what is unknown is empty."""
    core, python, machine = (*statistics.build.split(), "", "", "")[:3]
    return core, python, machine


# ----------------------------------------------------------------------------------------------------------------------
# The models that a driver serves by name, and what its clients execute of them, for `nnfmq status` and `nnfmq top`.


_Key = tuple[str, int]  # name and version


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
    """The executions of one version of a served model by all clients between two samples.

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
            "times": _times_json(self.counts),
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
