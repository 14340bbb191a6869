"""Percentiles of measured times. They are nearest-rank, so each is a measured value, not an interpolation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["PERCENTILES", "REPORTED", "distribution", "percentile", "percentile_steps", "summary"]

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99.9": 99.9, "max": 100.0}
REPORTED = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p99.9": 99.9, "max": 100.0}
"""Those of `nnfmq bench`."""
_STEPS_PER_HALF = 5  # as HdrHistogram writes them


def percentile(ordered: Sequence[int] | npt.NDArray[np.int64], percent: float) -> int:
    """Return the nearest-rank percentile of `ordered`, which must be sorted and not empty."""
    # The product is rounded because 99.9 / 100 is not exact: of 1000 values p99.9 is the 999th, not the 1000th.
    rank = math.ceil(round(len(ordered) * percent / 100.0, 9))
    return int(ordered[max(0, rank - 1)])


def distribution(samples: Iterable[int]) -> dict[str, int]:
    """Return p50, p90, p99, p99.9 and max of `samples` (at least one), in the unit of the samples."""
    ordered = sorted(samples)
    return {name: percentile(ordered, percent) for name, percent in PERCENTILES.items()}


def summary(samples: npt.NDArray[np.int64], percents: Mapping[str, float] = REPORTED) -> dict[str, float]:
    """Return the percentiles, minimum, mean and standard deviation of `samples` (at least one), in their unit."""
    ordered = np.sort(samples)
    found: dict[str, Any] = {name: percentile(ordered, percent) for name, percent in percents.items()}
    return found | {"min": int(ordered[0]), "mean": float(ordered.mean()), "std": float(ordered.std())}


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
