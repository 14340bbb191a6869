"""A driver's statistics as Prometheus metrics, for `nnfmq metrics`.

Each scrape takes one sample. Its series are bounded by the rows of the statistics area: 64 clients with 16 models. Rows
of one client that have the same name, version and device are one series; what they counted is added up from sample to
sample, so that a series does not go back when one of its models or bursts is released.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from nnfmq.cli.statistics import DriverSample
from nnfmq.observe.statistics_layout import LatencyHistogram

if TYPE_CHECKING:
    from nnfmq.observe.driver_statistics import ClientStatistics, ModelStatistics

__all__ = ["DriverCollector"]

_CLIENT = ("client", "pid")
_MODEL = (*_CLIENT, "model", "version", "device")


class _Labels(NamedTuple):
    """The labels of a series; those of a client have no model."""

    client: str
    pid: str
    model: str = ""
    version: str = ""
    device: str = ""


@dataclass(slots=True)
class _Totals:
    """The sums of one series: counters in the order of `_counters`, and the latencies."""

    counters: list[int] = field(default_factory=lambda: [0] * 4)
    latency: LatencyHistogram = field(default_factory=LatencyHistogram)


def _counters(model: ModelStatistics) -> tuple[int, ...]:
    return model.executions, model.failures, model.driver_ns, model.engine_ns


class _RunningTotals:
    """Sums of what the rows counted, for each series that has a row now."""

    def __init__(self) -> None:
        self.models: dict[_Labels, _Totals] = {}
        self.waits: dict[_Labels, list[int]] = {}  # polled, slept
        self._rows: dict[tuple[int, int], ModelStatistics] = {}  # as last seen, by worker and model
        self._burst_rows: dict[tuple[int, int], tuple[int, int]] = {}

    def update(self, sample: DriverSample) -> None:
        """Add what has been counted since the last sample, and forget the series that have no row any more."""
        clients = {_client_labels(sample, client): client for client in sample.statistics.clients}
        rows = {
            (client.worker_pid, model.id): (_model_labels(labels, model), model)
            for labels, client in clients.items()
            for model in client.models
        }
        for key, (labels, model) in rows.items():
            self._add(self.models.setdefault(labels, _Totals()), model, self._rows.get(key))
        kept = {labels for labels, _ in rows.values()}
        self.models = {labels: totals for labels, totals in self.models.items() if labels in kept}
        self._rows = {key: model for key, (_, model) in rows.items()}
        self._update_waits(clients)

    @staticmethod
    def _add(totals: _Totals, model: ModelStatistics, before: ModelStatistics | None) -> None:
        earlier = (0,) * 4 if before is None else _counters(before)
        for index, (now, then) in enumerate(zip(_counters(model), earlier, strict=True)):
            totals.counters[index] += max(now - then, 0)
        totals.latency += model.latency if before is None else model.latency.since(before.latency)

    def _update_waits(self, clients: dict[_Labels, ClientStatistics]) -> None:
        rows = {}
        for labels, client in clients.items():
            waits = self.waits.setdefault(labels, [0, 0])
            for burst in client.bursts:
                key = (client.worker_pid, burst.id)
                polled, slept = self._burst_rows.get(key, (0, 0))
                waits[0] += max(burst.polled - polled, 0)
                waits[1] += max(burst.slept - slept, 0)
                rows[key] = (burst.polled, burst.slept)
        self._burst_rows = rows
        self.waits = {labels: waits for labels, waits in self.waits.items() if labels in clients}


def _model_labels(labels: _Labels, model: ModelStatistics) -> _Labels:
    version = str(model.version) if model.version else ""  # of the model repository; others have none
    return labels._replace(model=model.name, version=version, device=model.device)


def _client_labels(sample: DriverSample, client: ClientStatistics) -> _Labels:
    return _Labels(sample.names.get(client.pid, ""), str(client.pid))


class DriverCollector:
    """A collector for a registry of prometheus_client. Thread-safe.

    `read` returns a sample, or None if no driver runs; then the only metric is nnfmq_up 0.
    """

    def __init__(self, read: Callable[[], DriverSample | None]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._totals = _RunningTotals()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; blocks while the driver is read."""
        with self._lock:
            sample = self._read()
            yield GaugeMetricFamily("nnfmq_up", "Whether the driver runs", 0 if sample is None else 1)
            if sample is None:
                self._totals = _RunningTotals()
                return
            self._totals.update(sample)
            yield from _driver_metrics(sample)
            yield from _client_metrics(sample)
            yield from self._model_metrics()
            waits = CounterMetricFamily("nnfmq_burst_waits", "Waits for requests of bursts", labels=(*_CLIENT, "how"))
            for labels, (polled, slept) in self._totals.waits.items():
                waits.add_metric((*labels[:2], "polled"), polled)
                waits.add_metric((*labels[:2], "slept"), slept)
            yield waits

    def _model_metrics(self) -> Iterator[Metric]:
        executions = CounterMetricFamily("nnfmq_executions", "Executions that succeeded", labels=_MODEL)
        failures = CounterMetricFamily("nnfmq_failures", "Executions that ended with an error", labels=_MODEL)
        engine = CounterMetricFamily("nnfmq_engine_seconds", "Time of executions in the engine", labels=_MODEL)
        latency = HistogramMetricFamily(
            "nnfmq_execution_seconds", "Time of executions in the driver, from the request to the result", labels=_MODEL
        )
        for labels, totals in self._totals.models.items():
            succeeded, failed, driver_ns, engine_ns = totals.counters
            executions.add_metric(labels, succeeded)
            failures.add_metric(labels, failed)
            engine.add_metric(labels, engine_ns / 1e9)
            buckets = [(f"{bound:.9g}", float(count)) for bound, count in totals.latency.below_powers_of_two()]
            latency.add_metric(labels, [*buckets, ("+Inf", float(totals.latency.total))], driver_ns / 1e9)
        yield from (executions, failures, engine, latency)


def _driver_metrics(sample: DriverSample) -> Iterator[Metric]:
    statistics, cache = sample.statistics, sample.statistics.cache
    yield GaugeMetricFamily("nnfmq_uptime_seconds", "How long the driver has run", statistics.uptime_ns / 1e9)
    yield GaugeMetricFamily("nnfmq_clients", "Clients of the driver", len(statistics.clients))
    yield CounterMetricFamily("nnfmq_rejected_clients", "Clients that were rejected", statistics.rejected_clients)
    yield CounterMetricFamily("nnfmq_dead_workers", "Workers that were killed or crashed", statistics.dead_workers)
    limit = statistics.memory_limit_bytes
    yield GaugeMetricFamily("nnfmq_memory_limit_bytes", "What all clients may have together", limit)
    yield GaugeMetricFamily("nnfmq_cache_programs", "Compiled programs that workers share", cache.programs)
    yield GaugeMetricFamily("nnfmq_cache_bytes", "Their size", cache.size_bytes)
    yield CounterMetricFamily("nnfmq_cache_lookups", "How often workers looked for a program", cache.lookups)
    yield CounterMetricFamily("nnfmq_cache_hits", "How often there was one", cache.hits)
    yield CounterMetricFamily("nnfmq_compile_requests", "Requests to the compile server", statistics.compile_requests)
    runs = statistics.compile_server_pid != 0
    yield GaugeMetricFamily("nnfmq_compile_server_up", "Whether the compile server runs", int(runs))


def _client_metrics(sample: DriverSample) -> Iterator[Metric]:
    calls = GaugeMetricFamily("nnfmq_open_calls", "Calls that are queued or running", labels=_CLIENT)
    charged = GaugeMetricFamily("nnfmq_charged_bytes", "What is charged to the client's quota", labels=_CLIENT)
    quota = GaugeMetricFamily("nnfmq_quota_bytes", "The client's memory quota", labels=_CLIENT)
    cpu = CounterMetricFamily("nnfmq_worker_cpu_seconds", "CPU time of the client's worker", labels=_CLIENT)
    resident = GaugeMetricFamily("nnfmq_worker_resident_bytes", "Resident memory of the worker", labels=_CLIENT)
    for client in sample.statistics.clients:
        labels = _client_labels(sample, client)[:2]
        calls.add_metric(labels, client.open_calls)
        charged.add_metric(labels, client.charged_bytes)
        quota.add_metric(labels, client.quota_bytes)
        usage = sample.usage.get(client.worker_pid)
        if usage is not None:
            cpu.add_metric(labels, usage.cpu_ns / 1e9)
            resident.add_metric(labels, usage.resident_bytes)
    yield from (calls, charged, quota, cpu, resident)
