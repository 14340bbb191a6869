"""Figures and the console."""

from __future__ import annotations

import io
import sys

import pytest

from nnfmq.cli.output import console, distribution, microseconds, percentile, shape_text


@pytest.mark.parametrize(("percent", "expected"), [(50, 50), (90, 90), (99, 99), (99.9, 100), (100, 100), (0, 1)])
def test_percentiles_are_nearest_rank(percent: float, expected: int) -> None:
    assert percentile(range(1, 101), percent) == expected


def test_one_sample_is_every_percentile() -> None:
    assert distribution([7]) == {"p50": 7, "p90": 7, "p99": 7, "p99.9": 7, "max": 7}


def test_the_distribution_does_not_depend_on_the_order() -> None:
    assert distribution([3, 1, 2]) == {"p50": 2, "p90": 3, "p99": 3, "p99.9": 3, "max": 3}


@pytest.mark.parametrize(("given", "expected"), [(1234567, "1,234.6"), (0, "0.0"), (-1, "-")])
def test_times_are_printed_in_microseconds(given: int, expected: str) -> None:
    assert microseconds(given) == expected


@pytest.mark.parametrize(("shape", "expected"), [((1, 2), "1x2"), ((), "scalar")])
def test_shapes_are_printed_with_x(shape: tuple[int, ...], expected: str) -> None:
    assert shape_text(shape) == expected


def test_a_character_that_stdout_lacks_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    console(no_color=True).print("µs")
    sys.stdout.flush()
    assert raw.getvalue() == b"?s\n"
