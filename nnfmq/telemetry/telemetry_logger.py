"""TelemetryLogger: aggregate records, and write at most one line per interval to a sink (OBS-4).

The first record is written immediately; what comes during the quiet interval after it is aggregated. `close` ends the
interval and writes what is left, so that short programs lose nothing.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from types import TracebackType
from typing import Self

from nnfmq.hal.errors import InvalidArgument
from nnfmq.telemetry.telemetry_aggregation import Aggregator, aggregate_of, entry_fields
from nnfmq.telemetry.telemetry_records import TelemetryRecord
from nnfmq.telemetry.telemetry_sinks import TelemetrySink

__all__ = ["DEFAULT_INTERVAL_S", "TelemetryLogger"]

DEFAULT_INTERVAL_S = 1.0
_CLOSE_TIMEOUT_S = 5.0
_log = logging.getLogger("nnfmq.telemetry")


class TelemetryLogger:
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
