"""Schedules of replays: intended starts, and lanes as many as executions overlapped."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.recordings import execution

from nnfmq.hal.errors import ErrorStatus, InvalidArgument
from nnfmq.lab.replay import LANES_MAX, ORIGINAL_SPEED, ReplaySpeed, parse_speed, schedule_lanes
from nnfmq.recording.format import ExecutionRow
from nnfmq.recording.reader import RecordedExecution


def recorded(*spans: tuple[int, int]) -> list[RecordedExecution]:
    """Return executions that were called at the first number and ended at the second, in µs."""
    mode = execution().mode
    return [
        RecordedExecution(
            number,
            ExecutionRow(0, mode, ErrorStatus.NONE, begin * 1000, begin * 1000, end * 1000, -1, -1, -1, None, None),
        )
        for number, (begin, end) in enumerate(spans)
    ]


def scheduled(spans: Sequence[tuple[int, int]], speed: ReplaySpeed = ORIGINAL_SPEED) -> list[list[tuple[int, int]]]:
    """Return number and offset in µs of each execution in each lane; -1 = no time."""
    lanes = schedule_lanes(recorded(*spans), speed)
    return [[(s.execution.record, -1 if s.offset_ns is None else s.offset_ns // 1000) for s in lane] for lane in lanes]


@pytest.mark.parametrize(
    ("text", "speed"),
    [("original", ReplaySpeed("factor", 1.0)), ("max", ReplaySpeed("max")), ("2.5", ReplaySpeed("factor", 2.5))],
)
def test_a_speed_is_parsed(text: str, speed: ReplaySpeed) -> None:
    assert parse_speed(text) == speed


@pytest.mark.parametrize("text", ["", "fast", "0", "-1", "nan", "inf", "1e7"])
def test_another_text_is_no_speed(text: str) -> None:
    with pytest.raises(InvalidArgument, match="give `original`, `max`, or a factor"):
        parse_speed(text)


def test_executions_one_after_the_other_have_one_lane() -> None:
    assert scheduled([(100, 200), (200, 300), (350, 400)]) == [[(0, 0), (1, 100), (2, 250)]]


def test_executions_that_overlap_have_lanes_of_their_own() -> None:
    assert scheduled([(0, 100), (50, 80), (60, 200), (90, 120), (100, 130)]) == [
        [(0, 0), (4, 100)],
        [(1, 50), (3, 90)],
        [(2, 60)],
    ]


def test_the_order_is_that_of_the_calls_and_not_of_the_file() -> None:
    assert scheduled([(50, 60), (0, 100)]) == [[(1, 0)], [(0, 50)]]


@pytest.mark.parametrize(
    ("speed", "offsets"),
    [
        (ReplaySpeed("factor", 2.0), [0, 500, 1000]),
        (ReplaySpeed("factor", 0.5), [0, 2000, 4000]),
        (ReplaySpeed("rate", 4000.0), [0, 250, 500]),
        (ReplaySpeed("max"), [-1, -1, -1]),
    ],
)
def test_the_speed_decides_the_offsets(speed: ReplaySpeed, offsets: list[int]) -> None:
    assert scheduled([(0, 10), (1000, 1010), (2000, 2010)], speed) == [list(enumerate(offsets))]


def test_lanes_are_limited() -> None:
    lanes = scheduled([(number, 10_000) for number in range(LANES_MAX + 10)])
    assert len(lanes) == LANES_MAX
    assert sorted(number for lane in lanes for number, _ in lane) == list(range(LANES_MAX + 10))


def test_no_executions_have_no_lanes() -> None:
    assert schedule_lanes([], ORIGINAL_SPEED) == []
