"""TelemetryLogger: aggregate records, and write at most one line per interval to a sink (OBS-4).

The first record is written immediately; what comes during the quiet interval after it is aggregated. `close` ends the
interval and writes what is left, so that short programs lose nothing.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

from nnfmq.base import settings
from nnfmq.base.ownership import Closable
from nnfmq.hal.errors import InvalidArgument
from nnfmq.telemetry.callbacks import register
from nnfmq.telemetry.records import CompilationRecord, DataClass, TelemetryMode, TelemetryRecord
from nnfmq.telemetry.sinks import TelemetrySink, open_sink

__all__ = [
    "DEFAULT_INTERVAL_S",
    "KEYS_MAX",
    "NO_DURATIONS",
    "AggregateKey",
    "AggregateValue",
    "Aggregator",
    "DurationSummary",
    "TelemetryLogger",
    "aggregate_of",
    "entry_fields",
    "report_from_environment",
]


# ----------------------------------------------------------------------------------------------------------------------
# Aggregation of records: those that differ only in their times become one entry with counts, sums and limits (OBS-4).
#
# Times are in whole ms (compilations) and whole µs (executions), rounded down, as in Android's statistics.


KEYS_MAX = 1024
"""Entries that an aggregator keeps; records with further keys are dropped and counted."""


class AggregateKey(NamedTuple):
    """The fields of a record without its times. Keys can be compared and ordered. A compilation has the mode SYNC."""

    is_execution: bool
    model_arch_hash: str
    device_id: str
    execution_mode: TelemetryMode
    error_code: int
    input_data_class: DataClass
    output_data_class: DataClass
    fallback_to_cpu: bool
    introspection_used: bool
    cache_used: bool
    has_control_flow: bool
    has_dynamic_temporaries: bool


@dataclass(frozen=True, slots=True)
class DurationSummary:
    """Number, sum, minimum, maximum and sum of squares of durations; minimum and maximum are 0 if there are none."""

    count: int = 0
    sum: int = 0
    minimum: int = 0
    maximum: int = 0
    sum_squared: int = 0

    @classmethod
    def of(cls, *durations: int) -> DurationSummary:
        """Return the summary of some durations."""
        if not durations:
            return NO_DURATIONS
        squares = sum(duration * duration for duration in durations)
        return cls(len(durations), sum(durations), min(durations), max(durations), squares)

    def combined(self, other: DurationSummary) -> DurationSummary:
        """Return the summary of the durations of both."""
        if not self.count or not other.count:
            return self if self.count else other
        return DurationSummary(
            self.count + other.count,
            self.sum + other.sum,
            min(self.minimum, other.minimum),
            max(self.maximum, other.maximum),
            self.sum_squared + other.sum_squared,
        )


NO_DURATIONS = DurationSummary()


@dataclass(frozen=True, slots=True)
class AggregateValue:
    """The number of records, and summaries of their times; records without a time are in `count` alone."""

    count: int = 0
    compilation_time_ms: DurationSummary = NO_DURATIONS
    duration_runtime_us: DurationSummary = NO_DURATIONS
    duration_driver_us: DurationSummary = NO_DURATIONS
    duration_hardware_us: DurationSummary = NO_DURATIONS

    def combined(self, other: AggregateValue) -> AggregateValue:
        """Return the value of the records of both."""
        return AggregateValue(
            self.count + other.count,
            self.compilation_time_ms.combined(other.compilation_time_ms),
            self.duration_runtime_us.combined(other.duration_runtime_us),
            self.duration_driver_us.combined(other.duration_driver_us),
            self.duration_hardware_us.combined(other.duration_hardware_us),
        )


def aggregate_of(record: TelemetryRecord) -> tuple[AggregateKey, AggregateValue]:
    """Return the key of a record, and its value: a count of 1 and its times."""
    if isinstance(record, CompilationRecord):
        times = {"compilation_time_ms": _summary(record.compilation_time_ns, 1_000_000)}
    else:
        times = {
            "duration_runtime_us": _summary(record.duration_runtime_ns, 1000),
            "duration_driver_us": _summary(record.duration_driver_ns, 1000),
            "duration_hardware_us": _summary(record.duration_hardware_ns, 1000),
        }
    key = AggregateKey(
        not isinstance(record, CompilationRecord),
        record.model_arch_hash,
        record.device_id,
        TelemetryMode.SYNC if isinstance(record, CompilationRecord) else record.mode,
        record.error_code,
        record.input_data_class,
        record.output_data_class,
        isinstance(record, CompilationRecord) and record.fallback_to_cpu,
        record.introspection_used,
        record.cache_used,
        record.has_control_flow,
        record.has_dynamic_temporaries,
    )
    return key, AggregateValue(1, **times)


def _summary(duration_ns: int, unit_ns: int) -> DurationSummary:
    return NO_DURATIONS if duration_ns < 0 else DurationSummary.of(duration_ns // unit_ns)


class Aggregator:
    """Entries in the order in which their keys came. Not thread-safe."""

    def __init__(self) -> None:
        self._entries: dict[AggregateKey, AggregateValue] = {}
        self.dropped = 0
        """Records that were left out because there were KEYS_MAX other keys."""

    def push(self, key: AggregateKey, value: AggregateValue) -> None:
        """Add a value to the entry of `key`, a new one if there is none."""
        known = self._entries.get(key)
        if known is not None:
            self._entries[key] = known.combined(value)
        elif len(self._entries) < KEYS_MAX:
            self._entries[key] = value
        else:
            self.dropped += value.count

    def pop(self) -> tuple[AggregateKey, AggregateValue]:
        """Remove and return the oldest entry. Raises KeyError if there is none."""
        if not self._entries:
            raise KeyError("the aggregator is empty")
        key = next(iter(self._entries))
        return key, self._entries.pop(key)

    def is_empty(self) -> bool:
        """Return True if there is no entry."""
        return not self._entries


def entry_fields(key: AggregateKey, value: AggregateValue) -> dict[str, Any]:
    """Return an entry as a line of JSON has it: names of modes and classes, and only the times that there are."""
    fields: dict[str, Any] = {"kind": "execution" if key.is_execution else "compilation"} | key._asdict()
    del fields["is_execution"]
    if not key.is_execution:
        del fields["execution_mode"]
    for name, field in fields.items():
        if isinstance(field, TelemetryMode | DataClass):
            fields[name] = field.name
    fields["count"] = value.count
    names = ("compilation_time_ms", "duration_runtime_us", "duration_driver_us", "duration_hardware_us")
    for name in names:
        summary: DurationSummary = getattr(value, name)
        if summary.count:
            parts = ("count", "sum", "minimum", "maximum", "sum_squared")
            fields[name] = {part: getattr(summary, part) for part in parts}
    return fields


# ----------------------------------------------------------------------------------------------------------------------
# TelemetryLogger: aggregate records, and write at most one line per interval to a sink (OBS-4).


DEFAULT_INTERVAL_S = 1.0
_CLOSE_TIMEOUT_S = 5.0
_log = logging.getLogger("nnfmq.telemetry")


class TelemetryLogger(Closable):
    """A callback for `register`: call it with records. Owns the sink, and a thread. Close it, or use `with`."""

    def __init__(self, sink: TelemetrySink, interval_s: float = DEFAULT_INTERVAL_S) -> None:
        """Start the thread.

        Args:
            sink: Where the lines go; closed by `close`.
            interval_s: The least time between two lines, in seconds. Entries of different keys take turns.
        """
        if not 0 <= interval_s <= 86400 * 365:  # written so that NaN is rejected as well
            raise InvalidArgument(f"an interval of telemetry is 0 or more seconds, not {interval_s}")
        self._sink = sink
        self._interval_s = interval_s
        self._aggregator = Aggregator()
        self._changed = threading.Condition()
        self._is_closing = False
        self._pid = os.getpid()
        self.lost_lines = 0
        """Lines that the sink did not take."""
        self._thread = threading.Thread(target=self._write_lines, name="nnfmq-telemetry-log", daemon=True)
        self._thread.start()

    def __call__(self, record: TelemetryRecord) -> None:
        """Take a record. Does not block."""
        with self._changed:
            self._aggregator.push(*aggregate_of(record))
            self._changed.notify()

    @property
    def dropped_records(self) -> int:
        """Records that were left out because there were too many different ones."""
        return self._aggregator.dropped

    def _write_lines(self) -> None:
        while (line := self._next_line()) is not None:
            try:
                self._sink.write(line)
            except OSError as error:
                self.lost_lines += 1
                if self.lost_lines == 1:  # the first one says why; `close` says how many
                    _log.warning("telemetry is lost: %s", error)
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing, self._interval_s)

    def _next_line(self) -> str | None:
        """Wait for an entry and return it as a line; None when the logger is closed and no entry is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or not self._aggregator.is_empty())
            if self._aggregator.is_empty():
                return None
            return json.dumps(entry_fields(*self._aggregator.pop()))

    def close(self) -> None:
        """Write what is left, at most for 5 s, and close the sink. Idempotent. Does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            is_first, self._is_closing = not self._is_closing, True
            self._changed.notify()
        if not is_first:
            return
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():  # the sink blocks; it stays open for the thread, which ends with the process
            _log.warning("telemetry is not complete: its sink takes more than %g s", _CLOSE_TIMEOUT_S)
            return
        self._sink.close()
        if self.lost_lines or self.dropped_records:
            text = "telemetry lacks %d lines that could not be written, and %d records of too many kinds"
            _log.warning(text, self.lost_lines, self.dropped_records)


def report_from_environment(sink: str) -> None:
    """Write the telemetry of this process to `sink`, a file or `unix:PATH`, until the process exits.

    Raises:
        InvalidArgument: If the interval is not allowed.
        OSError: If the file cannot be opened.
    """
    logger = TelemetryLogger(open_sink(sink), settings.TELEMETRY_INTERVAL_S.value())
    atexit.register(logger.close)  # called after that of the registration, which is registered later
    register(logger)
