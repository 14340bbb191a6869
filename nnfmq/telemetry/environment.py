"""Telemetry that the settings ask for: `telemetry` and `telemetry_interval_s`."""

from __future__ import annotations

import atexit

from nnfmq.base import settings
from nnfmq.telemetry.callbacks import register
from nnfmq.telemetry.logger import TelemetryLogger
from nnfmq.telemetry.sinks import open_sink

__all__ = ["report_from_environment"]


def report_from_environment(sink: str) -> None:
    """Write the telemetry of this process to `sink`, a file or `unix:PATH`, until the process exits.

    Raises:
        InvalidArgument: If the interval is not allowed.
        OSError: If the file cannot be opened.
    """
    logger = TelemetryLogger(open_sink(sink), settings.TELEMETRY_INTERVAL_S.value())
    atexit.register(logger.close)  # called after that of the registration, which is registered later
    register(logger)
