"""Telemetry that the settings ask for: `$NNFMQ_TELEMETRY` and `$NNFMQ_TELEMETRY_INTERVAL_S`."""

from __future__ import annotations

import atexit

from nnfmq import settings
from nnfmq.telemetry.telemetry_callbacks import register
from nnfmq.telemetry.telemetry_logger import TelemetryLogger
from nnfmq.telemetry.telemetry_sinks import open_sink

__all__ = ["report_as_configured"]


def report_as_configured() -> None:
    """Write the telemetry of this process as the settings ask, until the process exits.

    Raises:
        InvalidArgument: If a setting is not valid.
        OSError: If the file cannot be opened.
    """
    target = settings.TELEMETRY.value()
    assert target is not None
    logger = TelemetryLogger(open_sink(target), settings.TELEMETRY_INTERVAL_S.value())
    atexit.register(logger.close)  # called after that of the registration, which is registered later
    register(logger)
