"""The rows of queue_bench.py as data: candidates, conditions and targets; and the evaluation of targets.

A metric of a candidate is the median over its rounds: of each round's p50, p99 and p99.9 of all round trips, in µs, or
of another value that a round measures. A target is a limit for a metric, or for its ratio to a baseline's metric in the
same row. If a target has several baselines, the fastest of them counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from queue_bench_server import DEFAULT_NS, POLLING_NS, Sample

from nnfmq.measure.percentiles import percentile

REPORTED_PERCENTILES = {"p50": 50.0, "p99": 99.0, "p99.9": 99.9}
ICEORYX = ("iceoryx2 pub-sub", "iceoryx2 request-response")
Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Target:
    """A limit for `metric` of `candidate`, or for its ratio to the fastest of the baselines `per`.

    The baseline's metric is `per_metric`, or the same one if that is empty.
    """

    text: str
    candidate: str
    metric: str
    limit: float
    unit: str
    per: tuple[str, ...] = ()
    per_metric: str = ""
    is_at_least: bool = False
    is_strict: bool = False

    def value(self, metrics: Mapping[str, Metrics]) -> float | None:
        """Return the metric or ratio; None if the candidate or all baselines are missing."""
        if self.candidate not in metrics:
            return None
        value = metrics[self.candidate][self.metric]
        if not self.per:
            return value
        below = [metrics[name][self.per_metric or self.metric] for name in self.per if name in metrics]
        return _ratio(value, min(below), self.is_inverse) if below else None

    @property
    def is_inverse(self) -> bool:
        """Whether the ratio is a speed-up: the baseline's time divided by the candidate's."""
        return bool(self.per) and self.is_at_least and self.metric in REPORTED_PERCENTILES

    def is_met(self, value: float) -> bool:
        """Return whether `value` is within the limit."""
        if self.is_at_least:
            return value >= self.limit
        return value < self.limit if self.is_strict else value <= self.limit


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the report. Its candidates are measured in turn in each round of `count` round trips."""

    name: str
    title: str
    candidates: tuple[str, ...]
    targets: tuple[Target, ...]
    placement: str = "apart"
    window_ns: int = POLLING_NS
    count: int = 20_000
    work_ns: int = 0
    think_ns: int = 0
    idle_s: float = 0
    rounds: int | None = None


SLOWER = {"os.pipe": 10, "multiprocessing.Pipe": 10, "pyzmq": 10, "grpc": 20, "os.pipe stream": 2}
"""Divisors of the round trips per round, for slow candidates."""


def _faster(candidate: str, times: float, per: tuple[str, ...]) -> Target:
    return Target(f"faster than {candidate}", "nnfmq", "p50", times, "×", per, is_at_least=True)


def _at_most(text: str, candidate: str, metric: str, limit: float, unit: str) -> Target:
    return Target(text, candidate, metric, limit, unit)


ROWS = (
    Row(
        "round-trip", "round trip 512 B + 64 B, one CPU each, polling",
        ("nnfmq", "C spin", *ICEORYX, "multiprocessing.Pipe", "pyzmq", "grpc"),
        (
            Target("p50 against the same ring in C", "nnfmq", "p50", 1.4, "×", ("C spin",)),
            _faster("iceoryx2, the faster of its two kinds", 5.5, ICEORYX),
            _faster("multiprocessing.Pipe", 60, ("multiprocessing.Pipe",)),
            _faster("pyzmq ipc://", 60, ("pyzmq",)),
            _faster("gRPC on a unix socket", 60, ("grpc",)),
        ),
    ),
    Row(
        "tail", "p99 and p50, one CPU each, polling", ("nnfmq",),
        (Target("p99 / p50", "nnfmq", "p99", 1.5, "×", ("nnfmq",), "p50"),),
    ),
    Row(
        "one-cpu", "round trip, both on one CPU, default window", ("nnfmq", "C futex", "os.pipe"),
        (Target("p50 against C futex", "nnfmq", "p50", 1.1, "×", ("C futex",)), _faster("os.pipe", 1.3, ("os.pipe",))),
        placement="same", window_ns=DEFAULT_NS, count=4_000,
    ),
    Row(
        "busy-cpu", "round trip under load: a process keeps one CPU busy; default window, not pinned",
        ("nnfmq under load", "os.pipe under load"),
        (
            Target("p99 / os.pipe's", "nnfmq under load", "p99", 1, "×", ("os.pipe under load",), is_strict=True),
        ),
        placement="free", window_ns=DEFAULT_NS, count=4_000,
    ),
    Row(
        "stream", "messages of 512 bytes one way, one CPU each", ("nnfmq stream", "os.pipe stream"),
        (
            Target("messages over os.pipe's", "nnfmq stream", "per_second", 2.5, "×", ("os.pipe stream",),
                   is_at_least=True),
        ),
        count=200_000,
    ),
    Row(
        "batches", "records of 24 bytes in batches of 64 one way, one CPU each", ("nnfmq batches",),
        (
            Target("records a second", "nnfmq batches", "per_second", 5e6, "/s", is_at_least=True),
            Target("checksums are equal (1 = yes)", "nnfmq batches", "checksums_equal", 1, "", is_at_least=True),
        ),
        count=20_000,
    ),
    Row(
        "work", "200 µs of server work, one CPU each, default window", ("nnfmq with work",),
        (
            _at_most("overhead, p50", "nnfmq with work", "p50", 12, "µs"),
            _at_most("client's CPU", "nnfmq with work", "client_cpu_percent", 20, "%"),
        ),
        window_ns=DEFAULT_NS, count=2_000, work_ns=200_000,
    ),
    Row(
        "think", "200 µs of server work and 100 µs of client think time", ("nnfmq with work",),
        (_at_most("overhead, p50", "nnfmq with work", "p50", 15, "µs"),),
        window_ns=DEFAULT_NS, count=2_000, work_ns=200_000, think_ns=100_000,
    ),
    Row(
        "idle", "a process that waits, after its default window, over 5 s", ("nnfmq idle",),
        (
            _at_most("CPU seconds", "nnfmq idle", "cpu_seconds", 0.0049, "s"),
            _at_most("wake-ups", "nnfmq idle", "wake_ups", 0, ""),
        ),
        window_ns=DEFAULT_NS, count=0, idle_s=5, rounds=1,
    ),
    Row(
        "codec", "a packet of 20 records, with validation", ("codec",),
        (
            _at_most("encode", "codec", "encode request µs", 0.35, "µs"),
            _at_most("decode", "codec", "decode request µs", 0.5, "µs"),
        ),
        count=0,
    ),
    Row(
        "burst", "a whole burst execution of the null model, one CPU each, polling",
        ("burst in place", "burst copied", *ICEORYX),
        (
            _at_most("p50, arrays in place", "burst in place", "p50", 4, "µs"),
            Target("against iceoryx2's bare message", "burst in place", "p50", 1, "×", ICEORYX, is_strict=True),
        ),
    ),
    Row(
        "python", "the Python core, one CPU each, polling", ("python, libatomic", "python, FUTEX_WAKE_OP", "C spin"),
        (
            Target("with libatomic, against C", "python, libatomic", "p50", 4, "×", ("C spin",)),
            Target("with FUTEX_WAKE_OP, against C", "python, FUTEX_WAKE_OP", "p50", 8, "×", ("C spin",)),
        ),
    ),
)  # fmt: skip


def medians(rounds: Sequence[Sample]) -> Metrics:
    """Return the median of each metric over the rounds; percentiles in µs."""
    each = [_metrics_of(sample) for sample in rounds]
    return {name: statistics.median(metrics[name] for metrics in each) for name in each[0]}


def _metrics_of(sample: Sample) -> Metrics:
    ordered = sorted(sample.times_ns)
    times = (
        {name: percentile(ordered, percent) / 1000 for name, percent in REPORTED_PERCENTILES.items()} if ordered else {}
    )
    return times | sample.metrics


def report_row(row: Row, rounds: Mapping[str, Sequence[Sample]], missing: Mapping[str, str]) -> dict[str, Any]:
    """Return a row of the report, as --json prints it."""
    metrics = {candidate: medians(samples) for candidate, samples in rounds.items()}
    count = min((len(samples) for samples in rounds.values()), default=0)
    by_round = [{name: _metrics_of(samples[number]) for name, samples in rounds.items()} for number in range(count)]
    return {
        "name": row.name,
        "title": row.title,
        "targets": [evaluate_target(target, metrics, by_round) for target in row.targets],
        "candidates": {candidate: values | {"rounds": len(rounds[candidate])} for candidate, values in metrics.items()},
        "missing": dict(missing),
    }


def evaluate_target(
    target: Target, metrics: Mapping[str, Metrics], by_round: Sequence[Mapping[str, Metrics]] = ()
) -> dict[str, Any]:
    """Return a target of the report: its value, its limit, the noise, and whether the limit is met.

    `metrics` are medians over the rounds; `by_round` are those of each round. The noise is the range of the target's
    values in the rounds. `met` is None if the value is missing, or differs from the limit by less than the noise.
    """
    value = target.value(metrics)
    values = [found for each in by_round if (found := target.value(each)) is not None]
    noise = max(values) - min(values) if values else 0.0
    is_measured = value is not None and abs(value - target.limit) >= noise
    return {
        "target": target.text,
        "value": value,
        "unit": target.unit,
        "limit": target.limit,
        "noise": noise,
        "sense": "at least" if target.is_at_least else "below" if target.is_strict else "at most",
        "met": target.is_met(value) if value is not None and is_measured else None,
    }


def _ratio(value: float, per: float, is_inverse: bool) -> float:
    return per / value if is_inverse else value / per
