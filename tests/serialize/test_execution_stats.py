"""The stage slots beside a burst's result ring."""

from __future__ import annotations

import struct
import time

import pytest

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.timing import NO_TIMING, Timing
from nnfmq.queue import layout
from nnfmq.serialize import execution_stats
from nnfmq.serialize.execution_stats import StatsArea


def test_the_area_is_as_large_as_the_queue_reserves() -> None:
    assert (execution_stats.STATS_WORDS, execution_stats.STATS_BYTES) == (layout.STATS_WORDS, layout.STATS_BYTES)


def test_each_side_reads_the_words_that_the_other_wrote() -> None:
    area = bytearray(256)
    begun = time.monotonic_ns()
    StatsArea.over(memoryview(area)).record(5, 10, 20, 30, 40, Timing(7, 9))
    times = StatsArea.over(memoryview(area).toreadonly()).read()
    assert (times.sequence, times.request_received_ns, times.memory_ready_ns) == (5, 10, 20)
    assert (times.engine_begin_ns, times.engine_end_ns, times.engine_ns) == (30, 40, 10)
    assert times.timing == Timing(7, 9)
    assert begun <= times.result_sent_ns <= time.monotonic_ns()
    assert times.driver_ns == times.result_sent_ns - 10


def test_a_word_is_a_native_u64_at_eight_times_its_index() -> None:
    area = bytearray(256)
    StatsArea.over(memoryview(area)).record(2**63, 1, 0, 2, 3)
    assert struct.unpack_from("=QQQQQ", area) == (2**63, 1, 0, 2, 3)
    assert struct.unpack_from("=QQQ", area, 8 * execution_stats.TIME_ON_DEVICE_NS) == (2**64 - 1, 2**64 - 1, 0)


def test_reserved_words_stay_zero() -> None:
    area = bytearray(256)
    StatsArea.over(memoryview(area)).record(1, 2, 7, 3, 4, Timing(5, 6))
    assert area[8 * execution_stats.RESERVED :] == bytes(256 - 8 * execution_stats.RESERVED)


def test_durations_that_were_not_measured_are_read_as_no_time() -> None:
    slots = StatsArea.over(None)
    slots.record(1, 2, 0, 3, 4)
    assert slots.read().timing == NO_TIMING


def test_executions_and_failures_are_counted() -> None:
    slots = StatsArea.over(None)
    slots.count_failure()
    slots.record(3, 0, 0, 0, 0)
    assert (slots.read().executions, slots.read().failures) == (2, 1)


def test_the_driver_counts_failures_privately_whatever_the_peer_writes() -> None:
    slots = StatsArea.over(memoryview(bytearray(b"\xff" * 256)))
    slots.count_failure()
    slots.count_failure()
    assert slots.read().failures == 2


def test_durations_are_written_again_when_they_change() -> None:
    slots = StatsArea.over(None)
    for timing in (Timing(5, 6), NO_TIMING, Timing(7, 8)):
        slots.record(1, 0, 0, 0, 0, timing)
        assert slots.read().timing == timing


def test_a_queue_without_an_area_gets_private_words() -> None:
    assert StatsArea.over(None).read().sequence == 0


def test_an_area_that_is_too_short_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match="256 bytes, this area 255"):
        StatsArea.over(memoryview(bytearray(255)))


def test_close_is_idempotent_and_releases_the_memory() -> None:
    area = bytearray(256)
    with memoryview(area) as view:
        slots = StatsArea.over(view)
        slots.close()
        slots.close()
    area.extend(b"no view of it is left, or this would raise")
