"""Interleave the trials of model_bench.py's runners: one runner computes, the processes of all others sleep.

The runtimes' threads poll for some time after a run, and would compete with the next runner. So a trial begins only
when no runner's process has used the CPU in two consecutive polls. A round is several trials of each runner, so that a
period in which the machine is slower affects all of them, and the order is rotated. A baseline that is not installed is
reported as missing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from bench_processes import receive_result, started_processes
from model_bench_jobs import RunnerJob, Trial
from model_bench_runners import child_main
from queue_bench_cases import REPORTED_PERCENTILES

from nnfmq.measure.failures import RunnerUnavailable
from nnfmq.measure.load_measurement import rotated
from nnfmq.measure.percentiles import percentile
from nnfmq.measure.process_memory import wait_until_idle

Advance = Callable[[str], object]
T = TypeVar("T")
Samples = list[list[int]]
"""Times in ns, by trial or by round."""
TRIALS_PER_ROUND = 5  # of each runner


@dataclass(slots=True)
class Measurements:
    """Times in ns by runner and trial; details and first outputs by runner; the reason for each missing runner."""

    samples: dict[str, Samples] = field(default_factory=dict)
    details: dict[str, dict[str, Any]] = field(default_factory=dict)
    outputs: dict[str, list[Any]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics of all executions of each runner, in µs."""
        return {name: metrics_of(trials) for name, trials in self.samples.items()}

    def metrics_by_round(self) -> list[dict[str, dict[str, float]]]:
        """Return the metrics of each runner in each round, in µs."""
        rounds = {name: _by_round(trials) for name, trials in self.samples.items()}
        count = min(map(len, rounds.values()), default=0)
        return [{name: metrics_of([each[number]]) for name, each in rounds.items()} for number in range(count)]

    def differences_us(self, first: str, second: str) -> list[float]:
        """Return p50 of one runner's trials minus p50 of another's, in pairs that are adjacent in time."""
        pairs = zip(self.samples[first], self.samples[second], strict=True)
        return [(percentile(sorted(a), 50) - percentile(sorted(b), 50)) / 1000 for a, b in pairs]


def batched(values: Sequence[T], size: int) -> list[Sequence[T]]:
    """Return `values` in consecutive parts of `size`; the last may be shorter."""
    return [values[first : first + size] for first in range(0, len(values), size)]


def _by_round(trials: Samples) -> Samples:
    return [[*itertools.chain(*batch)] for batch in batched(trials, TRIALS_PER_ROUND)]


def metrics_of(samples: Samples) -> dict[str, float]:
    """Return the percentiles of all times together, in µs."""
    ordered = sorted(itertools.chain(*samples))
    return {name: percentile(ordered, percent) / 1000 for name, percent in REPORTED_PERCENTILES.items()}


def run_interleaved(
    jobs: Mapping[str, RunnerJob], trials: Mapping[str, Trial] | Trial, rounds: int, advance: Advance
) -> Measurements:
    """Run `rounds` rounds of TRIALS_PER_ROUND trials of all runners.

    Raises:
        BenchmarkFailed: If a runner fails, or does not become idle.
    """
    measured, present = Measurements(), {}
    with ExitStack() as stack:
        for name, job in jobs.items():  # one after the other, because preparing occupies a CPU and its time is reported
            (connection,) = stack.enter_context(started_processes([(child_main, (job,))], duplex=True))
            try:
                present[name] = connection, receive_result(connection, job.limit_s)
            except RunnerUnavailable as reason:
                measured.missing[name] = str(reason)
        pids = [pid for _, ready in present.values() for pid in ready.pids]
        for name, (_, ready) in present.items():
            measured.outputs[name], measured.samples[name] = ready.outputs, []
        for number in range(rounds * TRIALS_PER_ROUND):
            for name in rotated(list(jobs), number):
                advance(name)
                if name in present:
                    trial = trials if isinstance(trials, Trial) else trials[name]
                    wait_until_idle(pids)
                    times, measured.details[name] = _run_trial(present[name][0], trial, jobs[name].limit_s)
                    measured.samples[name].append(times)
    return measured


def _run_trial(connection: Connection, trial: Trial, limit_s: int) -> Any:
    connection.send(trial)
    return receive_result(connection, limit_s)


@contextmanager
def progress(total: int, no_color: bool) -> Iterator[Advance]:
    """Yield a function to call with a runner's name before its trial; the bar is on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    screen = Console(stderr=True, no_color=no_color or None)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda name: bar.update(task, advance=1, description=name)
