"""Percentiles, means and histograms of measured times, and the end of a warm-up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nnfmq.observe.statistics_layout import supports

__all__ = [
    "PERCENTILES",
    "REPORTED",
    "STABLE_WINDOWS",
    "LatencyBlock",
    "WarmUpWindow",
    "are_stable",
    "distribution",
    "heading_of",
    "percentile",
    "percentile_steps",
    "shown_percentiles",
    "summarize",
    "summary",
]

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99_9": 99.9, "max": 100.0}
"""By the names that they have in JSON; `heading_of` has those for people."""
REPORTED = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p99_9": 99.9, "max": 100.0}
"""Those of `nnfmq bench`."""
_STEPS_PER_HALF = 5  # as HdrHistogram writes them


def percentile(ordered: Sequence[int] | npt.NDArray[np.int64], percent: float) -> int:
    """Return the nearest-rank percentile of `ordered`, which must be sorted and not empty."""
    # The product is rounded because 99.9 / 100 is not exact: of 1000 values p99.9 is the 999th, not the 1000th.
    rank = math.ceil(round(len(ordered) * percent / 100.0, 9))
    return int(ordered[max(0, rank - 1)])


def heading_of(name: str) -> str:
    """Return the name of a percentile as tables have it: `p99.9` for `p99_9`."""
    return name.replace("_", ".")


def distribution(samples: Iterable[int]) -> dict[str, int]:
    """Return p50, p90, p99, p99.9 and max of `samples` (at least one), in the unit of the samples."""
    ordered = sorted(samples)
    return {name: percentile(ordered, percent) for name, percent in PERCENTILES.items()}


def summary(samples: npt.NDArray[np.int64], percents: Mapping[str, float] = REPORTED) -> dict[str, float | None]:
    """Return the percentiles, minimum, mean and standard deviation of `samples` (at least one), in their unit.

    A percentile that they are too few for is None.
    """
    ordered, count = np.sort(samples), len(samples)
    found: dict[str, Any] = {
        name: percentile(ordered, percent) if supports(count, percent / 100) else None
        for name, percent in percents.items()
    }
    return found | {"min": int(ordered[0]), "mean": float(ordered.mean()), "std": float(ordered.std())}


def shown_percentiles(result: Mapping[str, Any], names: Iterable[str], text: Callable[[float], str]) -> list[str]:
    """Return texts for percentiles of a result's `latency_ns`; `-` for one that its `requests` are too few for."""
    latency_ns, count = result["latency_ns"], result["requests"]
    return [text(latency_ns[name]) if supports(count, REPORTED[name] / 100) else "-" for name in names]


def percentile_steps(samples: npt.NDArray[np.int64]) -> list[tuple[float, int, int]]:
    """Return the distribution of `samples` in HdrHistogram's steps: share, value, and number of samples up to it.

    The share is from 0 to 1. Each step halves the rest: five steps to 0.5, five to 0.75, and so on, until the step has
    the largest sample; the last share is 1.
    """
    ordered = np.sort(samples)
    count, largest, percent = len(ordered), int(ordered[-1]), 0.0
    found: list[tuple[float, int, int]] = []
    while True:
        value = percentile(ordered, percent)
        found.append((percent / 100, value, int(np.searchsorted(ordered, value, "right"))))
        if value == largest:
            break
        halvings = math.floor(math.log2(100 / (100 - percent))) + 1
        percent += 100 / (_STEPS_PER_HALF * 2**halvings)
    return found if found[-1][0] == 1 else [*found, (1.0, largest, count)]


# ----------------------------------------------------------------------------------------------------------------------
# Statistics of measured durations: mean, standard deviation, percentiles and a histogram of 32 buckets.


BUCKETS = 32


@dataclass(frozen=True, slots=True)
class LatencyBlock:
    """Durations of one kind, in ns. The bucket with index i counts those from `start_ns` + i · `step_ns` on."""

    iterations: int
    total_ns: int
    mean_ns: float
    std_dev_ns: float
    p50_ns: int
    p99_ns: int
    start_ns: float
    step_ns: float
    counts: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)


def summarize(durations_ns: Sequence[int]) -> LatencyBlock:
    """Return the statistics of at least one duration. Percentiles are nearest-rank.

    If all durations are equal, the histogram has a step of 1 ns, and all are in the first bucket.
    """
    values = np.asarray(durations_ns, np.int64)
    low, high = int(values.min()), int(values.max())
    step = max((high - low) / BUCKETS, 1.0)
    buckets = np.minimum(((values - low) / step).astype(int), BUCKETS - 1)
    ordered = np.sort(values)
    p50, p99 = (percentile(ordered, percent) for percent in (50.0, 99.0))
    counts = np.bincount(buckets, minlength=BUCKETS)
    return LatencyBlock(
        len(values), int(values.sum()), float(values.mean()), float(values.std()), p50, p99,
        float(low), step, tuple(int(count) for count in counts),
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# The end of a warm-up: when the last windows have the same latency and throughput.


STABLE_WINDOWS = 3  # as perf_analyzer has it


@dataclass(frozen=True, slots=True)
class WarmUpWindow:
    """Latency (a percentile, in ns) and requests per second in one window of a warm-up."""

    latency_ns: float
    per_second: float


def are_stable(windows: Sequence[WarmUpWindow], percent: float) -> bool:
    """Return True if latency and throughput of the last three windows are within `percent` of their mean."""
    last = windows[-STABLE_WINDOWS:]
    return len(last) == STABLE_WINDOWS and all(
        _is_within([getattr(window, name) for window in last], percent / 100) for name in ("latency_ns", "per_second")
    )


def _is_within(values: Sequence[float], share: float) -> bool:
    mean = sum(values) / len(values)
    return all(abs(value - mean) <= share * mean for value in values)
