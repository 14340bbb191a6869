"""Aggregation and rate limit of telemetry: what the tests of Android's TelemetryStatsd demand (OBS-4).

Two things differ: closing the logger writes what is left, and durations keep their unit in their name.
"""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import replace
from typing import Any

import pytest
from support.recordings import execution, preparation

from nnfmq.hal.errors import ErrorStatus, InvalidArgument
from nnfmq.telemetry import TelemetryLogger, TelemetryMode
from nnfmq.telemetry.logger import (
    KEYS_MAX,
    NO_DURATIONS,
    AggregateValue,
    Aggregator,
    DurationSummary,
    aggregate_of,
    entry_fields,
)
from nnfmq.telemetry.records import compilation_record, execution_record

LONG_S = 86400.0
LIMIT_S = 60.0
COMPILATION = compilation_record(preparation())
EXECUTION = execution_record(COMPILATION, execution(time_on_device_ns=350_999, time_in_driver_ns=350_000))
KEY, _ = aggregate_of(EXECUTION)


def summary(*durations: int) -> DurationSummary:
    """Return a summary as the definitions of its fields give it."""
    squares = [duration**2 for duration in durations]
    return DurationSummary(len(durations), sum(durations), min(durations), max(durations), sum(squares))


def compiled(*times_ms: int) -> AggregateValue:
    return AggregateValue(len(times_ms), compilation_time_ms=summary(*times_ms))


def test_OBS_4_keys_compare_and_have_an_order() -> None:
    assert aggregate_of(EXECUTION)[0] == KEY
    assert KEY._replace(error_code=ErrorStatus.DEAD_OBJECT) > KEY


def test_OBS_4_values_combine_to_counts_sums_and_limits() -> None:
    assert compiled(50, 100, 150).combined(compiled(75)) == compiled(50, 75, 100, 150)


def test_OBS_4_an_empty_value_changes_nothing_on_either_side() -> None:
    assert AggregateValue().combined(compiled(75)) == compiled(75)
    assert compiled(50, 100, 150).combined(AggregateValue()) == compiled(50, 100, 150)
    assert DurationSummary.of() == NO_DURATIONS
    assert DurationSummary.of(3, 1, 2) == summary(1, 2, 3)


def test_OBS_4_an_aggregator_is_empty_at_first_and_after_its_last_entry() -> None:
    aggregator = Aggregator()
    assert aggregator.is_empty()
    with pytest.raises(KeyError):
        aggregator.pop()
    aggregator.push(KEY, AggregateValue())
    assert not aggregator.is_empty()
    assert aggregator.pop() == (KEY, AggregateValue())
    assert aggregator.is_empty()


def test_OBS_4_equal_keys_are_one_entry_and_entries_leave_in_the_order_of_their_keys() -> None:
    other = KEY._replace(execution_mode=TelemetryMode.ASYNC)
    aggregator = Aggregator()
    for key, count in ((KEY, 2), (other, 3), (KEY, 6)):
        aggregator.push(key, AggregateValue(count))
    assert aggregator.pop() == (KEY, AggregateValue(8))
    assert aggregator.pop() == (other, AggregateValue(3))
    assert aggregator.is_empty()


def test_OBS_4_the_number_of_keys_is_limited() -> None:
    aggregator = Aggregator()
    for number in range(KEYS_MAX + 3):
        aggregator.push(KEY._replace(device_id=str(number)), AggregateValue(2))
    aggregator.push(KEY._replace(device_id="0"), AggregateValue(1))
    assert aggregator.dropped == 6
    assert aggregator.pop()[1] == AggregateValue(3)


def test_OBS_4_a_compilation_has_its_time_alone() -> None:
    key, value = aggregate_of(replace(COMPILATION, compilation_time_ns=10_999_999, fallback_to_cpu=True))
    assert (key.is_execution, key.execution_mode, key.fallback_to_cpu) == (False, TelemetryMode.SYNC, True)
    assert value == AggregateValue(1, compilation_time_ms=summary(10))


def test_OBS_4_an_execution_has_its_three_durations() -> None:
    key, value = aggregate_of(EXECUTION)
    assert (key.is_execution, key.model_arch_hash, key.fallback_to_cpu) == (True, COMPILATION.model_arch_hash, False)
    durations = AggregateValue(
        1, duration_runtime_us=summary(100), duration_driver_us=summary(350), duration_hardware_us=summary(350)
    )
    assert value == durations


def test_OBS_4_a_failure_counts_without_times() -> None:
    assert aggregate_of(replace(COMPILATION, error_code=2, compilation_time_ns=-1))[1] == AggregateValue(1)
    failed = execution_record(COMPILATION, execution(status=2))
    key, value = aggregate_of(failed)
    assert (key.error_code, value) == (2, AggregateValue(1))


def test_OBS_4_a_line_has_names_and_only_the_times_that_there_are() -> None:
    fields = entry_fields(*aggregate_of(EXECUTION))
    assert (fields["kind"], fields["execution_mode"], fields["input_data_class"]) == ("execution", "SYNC", "FLOAT32")
    assert fields["duration_driver_us"] == {
        "count": 1, "sum": 350, "minimum": 350, "maximum": 350, "sum_squared": 122500,
    }  # fmt: skip
    assert "compilation_time_ms" not in fields
    fields = entry_fields(*aggregate_of(COMPILATION))
    assert (fields["kind"], fields["compilation_time_ms"]["sum"]) == ("compilation", 1)
    assert not {"execution_mode", "duration_runtime_us", "is_execution"} & set(fields)


# ---------------------------------------------------------------------------------------------------- the logger


class Collected:
    """A sink that keeps its lines, and says when there are some."""

    def __init__(self, error: OSError | None = None) -> None:
        self.lines: list[dict[str, Any]] = []
        self.is_closed = False
        self._error = error
        self._changed = threading.Condition()

    def write(self, line: str) -> None:
        with self._changed:
            self.lines.append(json.loads(line))
            self._changed.notify_all()
        if self._error is not None:
            raise self._error

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.lines) >= count, LIMIT_S)

    def close(self) -> None:
        self.is_closed = True


def failures() -> list[Any]:
    """Return records of as many keys as there are statuses."""
    return [replace(EXECUTION, error_code=int(status)) for status in ErrorStatus]


def test_OBS_4_a_logger_without_records_ends_immediately() -> None:
    sink = Collected()
    TelemetryLogger(sink, LONG_S).close()
    assert (sink.lines, sink.is_closed) == ([], True)


def test_OBS_4_closing_ends_the_quiet_interval() -> None:
    sink = Collected()
    with TelemetryLogger(sink, LONG_S) as logger:
        logger(EXECUTION)
        sink.wait_for(1)
    logger.close()
    assert (len(sink.lines), sink.is_closed) == (1, True)


def test_OBS_4_in_the_quiet_interval_nothing_is_written_and_everything_is_aggregated() -> None:
    sink = Collected()
    with TelemetryLogger(sink, LONG_S) as logger:
        logger(EXECUTION)
        sink.wait_for(1)
        for record in failures() * 3:
            logger(record)
        assert len(sink.lines) == 1
    assert [line["count"] for line in sink.lines] == [1] + [3] * len(ErrorStatus)  # written by `close`


def test_OBS_4_without_an_interval_all_is_written() -> None:
    sink = Collected()
    with TelemetryLogger(sink, 0.0) as logger:
        for record in failures():
            logger(record)
        sink.wait_for(len(ErrorStatus))
    assert [line["error_code"] for line in sink.lines] == [int(status) for status in ErrorStatus]


def test_OBS_4_a_sink_that_fails_loses_its_lines_alone(caplog: pytest.LogCaptureFixture) -> None:
    sink = Collected(OSError("no more paper"))
    with TelemetryLogger(sink, 0.0) as logger:
        for record in failures():
            logger(record)
        sink.wait_for(len(ErrorStatus))
    assert logger.lost_lines == len(ErrorStatus)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "telemetry is lost: no more paper",
        f"telemetry lacks {len(ErrorStatus)} lines that could not be written, and 0 records of too many kinds",
    ]


def test_OBS_4_a_sink_that_blocks_does_not_keep_the_process(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nnfmq.telemetry.logger._CLOSE_TIMEOUT_S", 0.01)
    released = threading.Event()
    sink = Collected()
    sink.write = lambda _line: released.wait(LIMIT_S)  # type: ignore[method-assign, return-value]
    with caplog.at_level(logging.WARNING), TelemetryLogger(sink, 0.0) as logger:
        logger(EXECUTION)
    assert "its sink takes more than" in caplog.text
    assert not sink.is_closed
    released.set()
    logger._thread.join(LIMIT_S)


@pytest.mark.parametrize("interval_s", [-1.0, float("nan"), 1e10])
def test_OBS_4_another_interval_is_rejected(interval_s: float) -> None:
    with pytest.raises(InvalidArgument, match="0 or more seconds"):
        TelemetryLogger(Collected(), interval_s)
