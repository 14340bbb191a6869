"""What `nnfmq top`, `nnfmq status` and `nnfmq metrics` show: a driver's statistics, with the use of its processes.

An `Activity` compares two samples: rates, latencies and CPU time are those of the time between them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nnfmq.observe.latency_histogram import LatencyHistogram
from nnfmq.observe.process_usage import ProcessUsage, command_name, process_usage
from nnfmq.runtime.defaults import DEFAULT_TIMEOUT_S

if TYPE_CHECKING:
    from nnfmq.observe.driver_statistics import (
        BurstStatistics,
        ClientStatistics,
        DriverStatistics,
        ModelStatistics,
    )
    from nnfmq.runtime.client import Client

_QUANTILES = {"p50_ns": 0.5, "p90_ns": 0.9, "p99_ns": 0.99}


@dataclass(frozen=True, slots=True)
class DriverSample:
    """Statistics of a driver without its reader's own connection, and what its processes use, by pid.

    `names` has the programs of the clients.
    """

    statistics: DriverStatistics
    usage: dict[int, ProcessUsage] = field(repr=False)
    names: dict[int, str] = field(repr=False)


def take_sample(client: Client, timeout: float = DEFAULT_TIMEOUT_S) -> DriverSample:
    """Return what the client's driver counts now, without this client itself; blocks up to `timeout` seconds."""
    statistics = client.statistics(timeout=timeout)
    others = tuple(other for other in statistics.clients if other.pid != os.getpid() or client.is_embedded)
    statistics = replace(statistics, clients=others)
    pids = [statistics.pid, statistics.compile_server_pid, *(other.worker_pid for other in others)]
    usage = {pid: used for pid in pids if pid and (used := process_usage(pid)) is not None}
    return DriverSample(statistics, usage, {other.pid: command_name(other.pid) for other in others})


@dataclass(frozen=True, slots=True)
class ModelActivity:
    """A model's executions between two samples."""

    client_pid: int
    model: ModelStatistics
    per_s: float
    failures_per_s: float
    latency: LatencyHistogram
    engine_share: float | None
    """Which part of the time in the driver the engine took; None without executions."""

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
            "per_s": round(self.per_s, 3),
            "failures_per_s": round(self.failures_per_s, 3),
            **{name: self.latency.quantile_ns(fraction) for name, fraction in _QUANTILES.items()},
            "engine_share": None if self.engine_share is None else round(self.engine_share, 4),
        }


@dataclass(frozen=True, slots=True)
class BurstActivity:
    """A burst's executions and waits between two samples."""

    client_pid: int
    burst: BurstStatistics
    model: ModelStatistics | None
    """Its model; None if that was released."""
    per_s: float
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
            "per_s": round(self.per_s, 3),
            "polled": self.polled,
            "slept": self.slept,
            "polled_share": None if share is None else round(share, 4),
        }


@dataclass(frozen=True, slots=True)
class ClientActivity:
    """A client between two samples. CPU and memory are those of its worker; None if that cannot be read."""

    client: ClientStatistics
    name: str
    per_s: float
    cpu_share: float | None
    """CPU time per time: 1 is one core."""
    usage: ProcessUsage | None

    def as_json(self) -> dict[str, Any]:
        """Return it as printed in JSON."""
        client, usage = self.client, self.usage
        return {
            "pid": client.pid,
            "uid": client.uid,
            "name": self.name,
            "worker_pid": client.worker_pid,
            "executions": client.executions,
            "failures": client.failures,
            "per_s": round(self.per_s, 3),
            "open_calls": client.open_calls,
            "charged_bytes": client.charged_bytes,
            "quota_bytes": client.quota_bytes,
            "cpu_share": None if self.cpu_share is None else round(self.cpu_share, 4),
            "resident_bytes": None if usage is None else usage.resident_bytes,
            "threads": None if usage is None else usage.threads,
            "models": len(client.models),
            "bursts": len(client.bursts),
        }


class Activity:
    """What happened in a driver between two samples; without an earlier one, since each client connected."""

    def __init__(self, now: DriverSample, before: DriverSample | None = None) -> None:
        self.now = now
        self._before = before
        earlier = () if before is None else before.statistics.clients
        self._clients_before = {client.worker_pid: client for client in earlier}
        self.clients = [self._client(client) for client in now.statistics.clients]
        self.models = [row for client in now.statistics.clients for row in self._models(client)]
        self.bursts = [row for client in now.statistics.clients for row in self._bursts(client)]

    @property
    def per_s(self) -> float:
        """Successful executions per second, of all clients."""
        return sum(client.per_s for client in self.clients)

    def _seconds(self, client: ClientStatistics) -> float:
        """Return the time that the rates of a client are about."""
        begin_ns = client.started_ns
        if self._before is not None and client.worker_pid in self._clients_before:
            begin_ns = self._before.statistics.read_ns
        return max(self.now.statistics.read_ns - begin_ns, 1) / 1e9

    def _client(self, client: ClientStatistics) -> ClientActivity:
        before = self._clients_before.get(client.worker_pid)
        executions = client.executions - (0 if before is None else before.executions)
        name = self.now.names.get(client.pid, "")
        per_s = max(executions, 0) / self._seconds(client)
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
        seconds = self._seconds(client)
        for model in client.models:
            old = earlier.get(model.id)
            executions = model.executions - (0 if old is None else old.executions)
            failures = model.failures - (0 if old is None else old.failures)
            driver_ns = model.driver_ns - (0 if old is None else old.driver_ns)
            engine_ns = model.engine_ns - (0 if old is None else old.engine_ns)
            yield ModelActivity(
                client.pid,
                model,
                max(executions, 0) / seconds,
                max(failures, 0) / seconds,
                model.latency if old is None else model.latency.since(old.latency),
                engine_ns / driver_ns if driver_ns > 0 else None,
            )

    def _bursts(self, client: ClientStatistics) -> Iterable[BurstActivity]:
        before = self._clients_before.get(client.worker_pid)
        earlier = {} if before is None else {burst.id: burst for burst in before.bursts}
        models = {model.id: model for model in client.models}
        seconds = self._seconds(client)
        for burst in client.bursts:
            old = earlier.get(burst.id)
            executions = burst.executions - (0 if old is None else old.executions)
            yield BurstActivity(
                client.pid,
                burst,
                models.get(burst.model_id),
                max(executions, 0) / seconds,
                max(burst.polled - (0 if old is None else old.polled), 0),
                max(burst.slept - (0 if old is None else old.slept), 0),
            )

    def as_json(self) -> dict[str, Any]:
        """Return everything as printed in JSON."""
        return {
            "driver": driver_json(self.now, self.cpu_share(self.now.statistics.pid)),
            "per_s": round(self.per_s, 3),
            "clients": [client.as_json() for client in self.clients],
            "models": [model.as_json() for model in self.models],
            "bursts": [burst.as_json() for burst in self.bursts],
        }


def driver_json(sample: DriverSample, cpu_share: float | None = None) -> dict[str, Any]:
    """Return the driver's part of the JSON."""
    statistics, cache = sample.statistics, sample.statistics.cache
    usage = sample.usage.get(statistics.pid)
    server = sample.usage.get(statistics.compile_server_pid)
    return {
        "pid": statistics.pid,
        "version": statistics.version or None,
        "uptime_ns": statistics.uptime_ns,
        "clients": len(statistics.clients),
        "rejected_clients": statistics.rejected_clients,
        "dead_workers": statistics.dead_workers,
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
