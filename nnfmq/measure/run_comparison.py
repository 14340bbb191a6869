"""Comparison of two runs, or of two runners in one run: ratios with confidence intervals.

A metric of a result is the median of its blocks. The interval of a ratio is a bootstrap over the blocks: both results'
blocks are drawn with replacement many times, and the middle 95 % of the ratios is the interval. It holds for noise
within the runs. Two runs at different times differ by more, so a change below a tolerance is not a regression.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nnfmq.hal.errors import InvalidArgument

__all__ = ["METRICS", "Interval", "bootstrap_ratio", "compare_runners", "compare_with_baseline"]

METRICS = {"p50": False, "p99": False, "throughput_per_s": True}
"""Name → whether more is better."""
RESAMPLES = 2000
CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A ratio, and the ends of its confidence interval."""

    ratio: float
    low: float
    high: float


def bootstrap_ratio(values: Sequence[float], reference: Sequence[float], seed: int = 0) -> Interval:
    """Return the ratio of the medians of `values` and `reference`, with its interval. Neither may be empty."""
    random = np.random.default_rng(seed)

    def medians(blocks: Sequence[float]) -> np.ndarray[Any, Any]:
        array = np.asarray(blocks, np.float64)
        return np.asarray(np.median(array[random.integers(0, len(array), (RESAMPLES, len(array)))], axis=1))

    ratios = medians(values) / medians(reference)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(ratios, (tail, 100 - tail))
    return Interval(float(np.median(values) / np.median(reference)), float(low), float(high))


def compare_with_baseline(
    report: Mapping[str, Any], baseline: Mapping[str, Any], tolerance_percent: float
) -> list[dict[str, Any]]:
    """Return a row for each metric of each result that the baseline has too; `outcome` is in words.

    A change is a "regression" or an "improvement" if its whole interval is beyond the tolerance.

    Raises:
        InvalidArgument: If the baseline is no report, or has none of the results.
    """
    try:
        earlier = {_key(result): result for result in baseline["results"]}
        pairs = [(result, earlier[_key(result)]) for result in report["results"] if _key(result) in earlier]
        rows = [row for new, old in pairs for row in _rows(new, old, tolerance_percent)]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgument("the baseline is no report of nnfmq bench --json") from error
    if not pairs:
        has = "; ".join(_text(key) for key in earlier) or "nothing"
        raise InvalidArgument(f"the baseline has other runners, clients or rates: {has}")
    return rows


def _key(result: Mapping[str, Any]) -> tuple[str, int, float | None]:
    return result["runner"], result["clients"], result["rate"]


def _text(key: tuple[str, int, float | None]) -> str:
    runner, clients, rate = key
    return f"{runner}, {clients} clients" + ("" if rate is None else f", {rate:g}/s")


def _rows(new: Mapping[str, Any], old: Mapping[str, Any], tolerance_percent: float) -> list[dict[str, Any]]:
    rows = []
    for metric, more_is_better in METRICS.items():
        if more_is_better and new["rate"] is not None:
            continue  # the throughput of an open loop is given
        interval = bootstrap_ratio(_values(new, metric), _values(old, metric))
        outcome = _outcome(interval, tolerance_percent / 100, more_is_better)
        rows.append(_row(new, metric) | {**interval._asdict(), "outcome": outcome})
    return rows


def _values(result: Mapping[str, Any], metric: str) -> list[float]:
    return [block[metric] for block in result["blocks"]]


def _row(result: Mapping[str, Any], metric: str) -> dict[str, Any]:
    return {"runner": result["runner"], "clients": result["clients"], "rate": result["rate"], "metric": metric}


def _outcome(interval: Interval, tolerance: float, more_is_better: bool) -> str:
    is_more, is_less = interval.low > 1 + tolerance, interval.high < 1 - tolerance
    if is_less if more_is_better else is_more:
        return "regression"
    return "improvement" if is_more or is_less else "no change"


def compare_runners(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the p50 and p99 of each other runner over those of the first one at the same level, with intervals."""
    rows = []
    for result in results:
        first = next(each for each in results if _key(each)[1:] == _key(result)[1:])
        if result is first:
            continue
        for metric in ("p50", "p99"):
            interval = bootstrap_ratio(_values(result, metric), _values(first, metric))
            rows.append(_row(result, metric) | {"over": first["runner"], **interval._asdict()})
    return rows
