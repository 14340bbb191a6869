"""Statistics of measured durations: mean, standard deviation, percentiles and a histogram of 32 buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

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
    p50, p99 = (int(np.percentile(values, percent, method="inverted_cdf")) for percent in (50, 99))
    counts = np.bincount(buckets, minlength=BUCKETS)
    return LatencyBlock(
        len(values), int(values.sum()), float(values.mean()), float(values.std()), p50, p99,
        float(low), step, tuple(int(count) for count in counts),
    )  # fmt: skip
