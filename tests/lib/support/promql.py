"""The part of PromQL that the documentation uses, evaluated over two scrapes: independent arithmetic for tests.

`rate` is the increase between the scrapes per second, without Prometheus' extrapolation to the ends of the range;
`histogram_quantile` interpolates linearly within a bucket, as Prometheus does.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

Labels = frozenset[tuple[str, str]]
Scrape = Mapping[tuple[str, Labels], float]
Vector = dict[Labels, float]

_TOKENS = re.compile(r'"[^"]*"|\[\w+\]|[\w.:]+|!=|=~|[(){},=/]')


def queries_of(page: Path) -> list[str]:
    """Return the queries in the code blocks of a page, one in each line."""
    blocks = re.findall(r"^```promql\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


class Query:
    """A query, evaluated by recursive descent. `seconds` is the time between the scrapes `before` and `after`."""

    def __init__(self, text: str, before: Scrape, after: Scrape, seconds: float) -> None:
        self._tokens = _TOKENS.findall(text)
        self._before, self._after, self._seconds = before, after, seconds

    def evaluate(self) -> Vector:
        """Return the value of each series of the result."""
        left = self._term()
        while self._tokens:
            self._take("/")
            right = self._term()
            left = {labels: value / right[labels] for labels, value in left.items() if labels in right}
        return left

    def _take(self, expected: str = "") -> str:
        token = self._tokens.pop(0)
        assert not expected or token == expected, f"{token} where {expected} is expected"
        return str(token)

    def _term(self) -> Vector:
        name = self._take()
        if name == "sum":
            return self._sum()
        self._take("(")
        if name == "histogram_quantile":
            fraction = float(self._take())
            self._take(",")
            found = _quantiles(fraction, self._term())
        else:
            assert name == "rate", name
            found = self._rate()
        self._take(")")
        return found

    def _sum(self) -> Vector:
        names: list[str] = []
        if self._tokens[0] == "by":
            self._take("by")
            self._take("(")
            while (token := self._take()) != ")":
                names += [token] * (token != ",")
        self._take("(")
        sums: defaultdict[Labels, float] = defaultdict(float)
        for labels, value in self._term().items():
            sums[frozenset(pair for pair in labels if pair[0] in names)] += value
        self._take(")")
        return dict(sums)

    def _rate(self) -> Vector:
        name, wanted = self._take(), []
        if self._tokens[0] == "{":
            self._take("{")
            while self._tokens[0] != "}":
                wanted.append((self._take(), self._take(), self._take().strip('"')))
                if self._tokens[0] == ",":
                    self._take(",")
            self._take("}")
        self._take()  # the range
        return {
            labels: (value - self._before.get((name, labels), 0)) / self._seconds
            for (metric, labels), value in self._after.items()
            if metric == name and all(_matches(dict(labels), *each) for each in wanted)
        }


def _matches(labels: dict[str, str], name: str, operator: str, text: str) -> bool:
    value = labels.get(name, "")
    if name == "le":
        return float(value) == float(text)
    return {"=": value == text, "!=": value != text}[operator]


def _quantiles(fraction: float, buckets: Vector) -> Vector:
    """Return the quantile of each histogram, whose buckets count what is at most `le`."""
    histograms: defaultdict[Labels, dict[float, float]] = defaultdict(dict)
    for labels, count in buckets.items():
        (bound,) = [float(value) for name, value in labels if name == "le"]
        histograms[frozenset(pair for pair in labels if pair[0] != "le")][bound] = count
    return {labels: _quantile(fraction, sorted(counts.items())) for labels, counts in histograms.items()}


def _quantile(fraction: float, counts: list[tuple[float, float]]) -> float:
    rank, lower, below = fraction * counts[-1][1], 0.0, 0.0
    for upper, count in counts:
        if count >= rank:
            return lower + (upper - lower) * (rank - below) / (count - below)
        lower, below = upper, count
    raise AssertionError("the last bucket counts everything")
