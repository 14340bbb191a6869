"""The end of a warm-up."""

from __future__ import annotations

import pytest

from nnfmq.lab.statistics import WarmUpWindow, are_stable


def windows(*pairs: tuple[float, float]) -> list[WarmUpWindow]:
    return [WarmUpWindow(*pair) for pair in pairs]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([(100, 10), (100, 10)], False),  # too few
        ([(100, 10), (100, 10), (100, 10)], True),
        ([(900, 1), (95, 10), (100, 10), (105, 10)], True),  # only the last three count
        ([(85, 10), (100, 10), (115, 10)], False),  # the latency differs by 15 %
        ([(100, 8), (100, 10), (100, 12)], False),  # the throughput differs by 20 %
    ],
)
def test_the_last_three_windows_must_be_within_ten_percent(found: list[tuple[float, float]], expected: bool) -> None:
    assert are_stable(windows(*found), 10) is expected
