"""SVG charts of `nnfmq bench`'s page: latency by percentile, and latency by time.

A chart is 480 units wide, so that its text is readable on a phone. Colours are CSS classes of the page. Both axes of
latency are logarithmic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

__all__ = ["COLOURS", "percentile_chart", "time_chart"]

COLOURS = 8
_WIDTH, _HEIGHT = 480, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 40
_TICKS = (0.0, 0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)
ToPixels = Callable[[float, float], tuple[float, float]]
Points = Sequence[tuple[float, float]]


def _svg(label: str, body: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(body)}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def duration_text(duration_ns: float) -> str:
    """Return a round duration in the unit that fits it."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if duration_ns >= size:
            return f"{duration_ns / size:g} {unit}"
    return f"{duration_ns:g} ns"


def percentile_chart(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a chart with a line for each result; on the x axis equal distances divide the rest of requests by ten."""
    lines = [_percentile_points(result["percentiles"]) for result in results]
    x_end = max(x for line in lines for x, _ in line) or 1.0
    ticks = [(_nines(share), f"{100 * share:g} %") for share in _TICKS if _nines(share) <= x_end]
    return _svg("latency by percentile", _chart(lines, (0.0, x_end), ticks, "percentile of requests"))


def _nines(share: float) -> float:
    return -math.log10(1 - share)


def _percentile_points(steps: Sequence[Sequence[float]]) -> Points:
    """Return points of a staircase; the largest value is at the share of the last request but one."""
    count = steps[-1][2]
    last = 1 - 1 / (count + 1)
    return [(_nines(min(share, last)), value) for share, value, _ in steps]


def time_chart(timeline: Sequence[Mapping[str, float]]) -> str:
    """Return a chart of one result with lines for p50, p99 and max over the seconds of the measurement."""
    lines = [[(point["s"], point[f"{name}_ns"]) for point in timeline] for name in ("p50", "p99", "max")]
    x_end = max(point["s"] for point in timeline) * 1.02
    step = _round_step(x_end)
    ticks = [(number * step, f"{number * step:g} s") for number in range(int(x_end / step) + 1)]
    return _svg("latency by time", _chart(lines, (0.0, x_end), ticks, "time of the start"))


def _round_step(end: float) -> float:
    """Return a round distance for at most six ticks up to `end`."""
    power = 10.0 ** math.floor(math.log10(end))
    return next(power * part for part in (0.2, 0.5, 1.0, 2.0) if end / (power * part) <= 6)


def _chart(
    lines: Sequence[Points], x_range: tuple[float, float], ticks: Sequence[tuple[float, str]], x_label: str
) -> Iterator[str]:
    y_range = _log_range([y for line in lines for _, y in line])
    floor = _HEIGHT - _BOTTOM

    def to_pixels(x: float, y: float) -> tuple[float, float]:
        right = (x - x_range[0]) / (x_range[1] - x_range[0])
        up = (math.log10(max(y, 1.0)) - y_range[0]) / (y_range[1] - y_range[0])
        return _LEFT + right * (_WIDTH - _LEFT - _RIGHT), floor - up * (floor - _TOP)

    yield from _y_axis(y_range, to_pixels)
    for x, text in ticks:
        at, _ = to_pixels(x, 1.0)
        yield f'<path class="grid" d="M{at:.1f} {_TOP}V{floor}"/>{_text(at, floor + 15, text)}'
    yield _text((_LEFT + _WIDTH) / 2, _HEIGHT - 6, x_label)
    for number, line in enumerate(lines):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (to_pixels(*point) for point in line))
        yield f'<polyline class="line c{min(number, COLOURS - 1)}" points="{points}"/>'


def _log_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the logarithms between which the values are, at least a factor of two apart."""
    low, high = math.log10(max(1.0, min(values))), math.log10(max(1.0, *values))
    margin = max(0.04 * (high - low), (math.log10(2) - (high - low)) / 2)
    return low - margin, high + margin


def _y_axis(y_range: tuple[float, float], to_pixels: ToPixels) -> Iterator[str]:
    """Draw lines at 1, 2 and 5 times the powers of ten, or at the powers alone if these are many."""
    low, high = y_range
    parts = (1, 2, 5) if high - low < 2.5 else (1,)
    for power in range(math.floor(low), math.ceil(high) + 1):
        for part in parts:
            value = part * 10.0**power
            if low <= math.log10(value) <= high:
                _, y = to_pixels(0.0, value)
                yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
                yield _text(_LEFT - 5, y + 4, duration_text(value), "end")
