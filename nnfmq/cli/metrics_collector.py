"""A driver's statistics as Prometheus metrics, for `nnfmq metrics`.

Each scrape takes one sample. Counts and times are the driver's totals since it started, by program, model, version and
device: no label changes when a client or its worker is started again, and what clients that have left have counted
remains. The series are bounded by the rows of the statistics area.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from nnfmq.cli.limits import limits_json
from nnfmq.cli.statistics import DriverSample, build_parts
from nnfmq.observe.driver_statistics import TIMES, ModelCounts, ModelKey

if TYPE_CHECKING:
    from nnfmq.observe.driver_statistics import ClientStatistics
    from nnfmq.serving.request_counts import RequestCounts

__all__ = ["DriverCollector", "RequestCollector"]

_CLIENT = ("client",)
_MODEL = ("client", "model", "version", "device")
_MEANINGS = {
    "client": "Time of executions from the call to its return, as clients say",
    "queue": "The part of it between client and driver, as clients say",
    "driver": "Time of executions in the driver, from the request to the result",
    "engine": "The part of it in the engine",
}


class _RunningTotals:
    """Counters of one driver, which do not go back."""

    def __init__(self, driver_pid: int) -> None:
        self.driver_pid = driver_pid
        self.models: dict[ModelKey, ModelCounts] = {}
        self.waits: Counter[tuple[str, str]] = Counter()  # by program, and polled or slept
        self.cpu_ns: Counter[str] = Counter()  # by program
        self._bursts: dict[tuple[int, int], tuple[int, int]] = {}  # as last seen, by worker and burst
        self._workers: dict[int, int] = {}

    def update(self, sample: DriverSample) -> None:
        """Take what has been counted since the last sample."""
        # A slot whose worker was killed during a change is left out until the driver has repaired it.
        totals, before = sample.statistics.totals(), self.models
        self.models = {
            key: before[key] + counts.since(before[key]) if key in before else counts for key, counts in totals.items()
        }
        self._add_waits(sample)
        self._add_cpu(sample)

    def _add_waits(self, sample: DriverSample) -> None:
        seen = {}
        for client in sample.statistics.clients:
            for burst in client.bursts:
                row = client.worker_pid, burst.id
                polled, slept = self._bursts.get(row, (0, 0))
                self.waits[client.program, "polled"] += max(burst.polled - polled, 0)
                self.waits[client.program, "slept"] += max(burst.slept - slept, 0)
                seen[row] = burst.polled, burst.slept
        self._bursts = seen

    def _add_cpu(self, sample: DriverSample) -> None:
        seen = {}
        for client in sample.statistics.clients:
            usage = sample.usage.get(client.worker_pid)
            if usage is not None:
                self.cpu_ns[client.program] += max(usage.cpu_ns - self._workers.get(client.worker_pid, 0), 0)
                seen[client.worker_pid] = usage.cpu_ns
        self._workers = seen


class DriverCollector:
    """A collector for a registry of prometheus_client. Thread-safe.

    `read` returns a sample, or None if no driver runs; then the only metric is nnfmq_up 0.
    """

    def __init__(self, read: Callable[[], DriverSample | None]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._totals = _RunningTotals(0)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; blocks while the driver is read."""
        with self._lock:
            sample = self._read()
            yield GaugeMetricFamily("nnfmq_up", "Whether the driver runs", 0 if sample is None else 1)
            if sample is None:
                return
            if sample.statistics.pid != self._totals.driver_pid:
                self._totals = _RunningTotals(sample.statistics.pid)
            self._totals.update(sample)
            yield from _driver_metrics(sample)
            yield from _limit_metrics(sample)
            yield from _served_metrics(sample)
            yield from _client_metrics(sample)
            yield from self._model_metrics()
            yield from self._running_metrics()

    def _running_metrics(self) -> Iterator[Metric]:
        waits = CounterMetricFamily("nnfmq_burst_waits", "Waits for requests of bursts", labels=(*_CLIENT, "how"))
        for labels, count in self._totals.waits.items():
            waits.add_metric(labels, count)
        cpu = CounterMetricFamily("nnfmq_worker_cpu_seconds", "CPU time of the clients' workers", labels=_CLIENT)
        for program, used_ns in self._totals.cpu_ns.items():
            cpu.add_metric((program,), used_ns / 1e9)
        yield from (waits, cpu)

    def _model_metrics(self) -> Iterator[Metric]:
        executions = CounterMetricFamily("nnfmq_executions", "Executions that succeeded", labels=_MODEL)
        failures = CounterMetricFamily("nnfmq_failures", "Executions that ended with an error", labels=_MODEL)
        times = {name: HistogramMetricFamily(f"nnfmq_{name}_seconds", _MEANINGS[name], labels=_MODEL) for name in TIMES}
        for key, counts in self._totals.models.items():
            labels = (key.program, key.name, str(key.version) if key.version else "", key.device)
            executions.add_metric(labels, counts.executions)
            failures.add_metric(labels, counts.failures)
            for name, family in times.items():
                histogram = getattr(counts, name)
                buckets = [(f"{bound:.9g}", float(count)) for bound, count in histogram.below_powers_of_two()]
                sum_s = getattr(counts, f"{name}_ns") / 1e9
                family.add_metric(labels, [*buckets, ("+Inf", float(histogram.total))], sum_s)
        yield from (executions, failures, *times.values())


def _driver_metrics(sample: DriverSample) -> Iterator[Metric]:
    statistics, cache = sample.statistics, sample.statistics.cache
    yield GaugeMetricFamily("nnfmq_uptime_seconds", "How long the driver has run", statistics.uptime_ns / 1e9)
    yield GaugeMetricFamily("nnfmq_clients", "Clients of the driver", len(statistics.clients))
    yield CounterMetricFamily(
        "nnfmq_rejected_clients", "Clients rejected for their number or want of a worker", statistics.rejected_clients
    )
    deaths = CounterMetricFamily("nnfmq_dead_workers", "Workers that have died", labels=("cause",))
    for cause, count in statistics.deaths.items():
        deaths.add_metric((cause,), count)
    yield deaths
    build = GaugeMetricFamily("nnfmq_build_info", "What the driver is", labels=("version", "core", "python", "machine"))
    build.add_metric((statistics.version, *build_parts(statistics)), 1)
    yield build
    meaning = "Whether nnfmq was upgraded under the driver, which should be restarted"
    yield GaugeMetricFamily("nnfmq_upgraded", meaning, int(statistics.was_upgraded))
    yield GaugeMetricFamily("nnfmq_cache_programs", "Compiled programs that workers share", cache.programs)
    yield GaugeMetricFamily("nnfmq_cache_bytes", "Their size", cache.size_bytes)
    yield CounterMetricFamily("nnfmq_cache_lookups", "How often workers looked for a program", cache.lookups)
    yield CounterMetricFamily("nnfmq_cache_hits", "How often there was one", cache.hits)
    yield CounterMetricFamily("nnfmq_compile_requests", "Requests to the compile server", statistics.compile_requests)
    runs = statistics.compile_server_pid != 0
    yield GaugeMetricFamily("nnfmq_compile_server_up", "Whether the compile server runs", int(runs))


def _limit_metrics(sample: DriverSample) -> Iterator[Metric]:
    """Yield the limits of the driver, each in its unit, and how much of them is used, as far as somebody counts it."""
    families = (
        GaugeMetricFamily("nnfmq_limit", "A limit of the driver, in its unit", labels=("limit", "of", "unit")),
        GaugeMetricFamily("nnfmq_limit_used", "What is used of it: the most of any", labels=("limit", "of", "unit")),
    )
    for row in limits_json(sample.statistics):
        labels = (row["name"], row["of"], row["unit"] or "")
        for family, value in zip(families, (row["limit"], row["use"]), strict=True):
            if value is not None and row["limit"] is not None:
                family.add_metric(labels, value)
    yield from families


def _served_metrics(sample: DriverSample) -> Iterator[Metric]:
    """Yield the states of the models that the driver serves by name, if it does."""
    states = GaugeMetricFamily("nnfmq_model_state", "1 for the state of a served model", labels=("model", "state"))
    versions = GaugeMetricFamily("nnfmq_model_version", "The version that is served, 0 for none", labels=("model",))
    meaning = "The version that could not be prepared, 0 for none; `nnfmq status` has the reason"
    failed = GaugeMetricFamily("nnfmq_model_failed_version", meaning, labels=("model",))
    for entry in sample.served.entries or ():
        for state in type(entry.state):
            states.add_metric((entry.name, state.value), int(state is entry.state))
        versions.add_metric((entry.name,), entry.version)
        failed.add_metric((entry.name,), entry.failed_version)
    yield from (states, versions, failed)


def _client_metrics(sample: DriverSample) -> Iterator[Metric]:
    """Yield what clients have now; a series is the sum of all clients that run the same program."""
    gauges: dict[str, tuple[str, Callable[[ClientStatistics], int | None]]] = {
        "nnfmq_requests_in_flight": ("Requests that are handled now", lambda client: client.in_flight),
        "nnfmq_queued_calls": ("Calls that wait", lambda client: max(client.open_calls - client.running_calls, 0)),
        "nnfmq_charged_bytes": ("What is charged to the clients' quotas", lambda client: client.charged_bytes),
        "nnfmq_quota_bytes": ("The clients' memory quotas", lambda client: client.quota_bytes),
        "nnfmq_worker_resident_bytes": ("Resident memory of the workers", lambda client: _resident(sample, client)),
    }
    for name, (meaning, value) in gauges.items():
        sums: Counter[str] = Counter()
        for client in sample.statistics.clients:
            found = value(client)
            if found is not None:
                sums[client.program] += found
        family = GaugeMetricFamily(name, meaning, labels=_CLIENT)
        for program, total in sums.items():
            family.add_metric((program,), total)
        yield family


def _resident(sample: DriverSample, client: ClientStatistics) -> int | None:
    usage = sample.usage.get(client.worker_pid)
    return None if usage is None else usage.resident_bytes


class RequestCollector:
    """A collector of the requests that a gateway has served, by model and version. `counts` are its server's."""

    def __init__(self, counts: RequestCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        labels = ("model", "version")
        requests = CounterMetricFamily("nnfmq_gateway_requests", "Requests to models", labels=(*labels, "result"))
        seconds = CounterMetricFamily("nnfmq_gateway_request_seconds", "Time of requests that succeeded", labels=labels)
        waits = CounterMetricFamily("nnfmq_gateway_wait_seconds", "The part of it before executions", labels=labels)
        for model, version in self._counts.keys():  # noqa: SIM118  (no mapping)
            counts, values = self._counts.of(model, version), (model, str(version))
            requests.add_metric((*values, "success"), counts.successes)
            requests.add_metric((*values, "failure"), counts.failures)
            seconds.add_metric(values, counts.success_ns / 1e9)
            waits.add_metric(values, counts.wait_ns / 1e9)
        yield from (requests, seconds, waits)
