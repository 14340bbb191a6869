"""Telemetry that the environment asks for: `$NNFMQ_TELEMETRY` and `$NNFMQ_TELEMETRY_INTERVAL_S`."""

from __future__ import annotations

import atexit
import os

from nnfmq.hal.errors import InvalidArgument
from nnfmq.telemetry.telemetry_callbacks import register
from nnfmq.telemetry.telemetry_logger import DEFAULT_INTERVAL_S, TelemetryLogger
from nnfmq.telemetry.telemetry_sinks import open_sink

__all__ = ["report_from_environment"]


def report_from_environment() -> None:
    """Write the telemetry of this process as the environment asks, until the process exits.

    Raises:
        InvalidArgument: If a variable has no valid value.
        OSError: If the file cannot be opened.
    """
    text = os.environ.get("NNFMQ_TELEMETRY_INTERVAL_S", "")
    try:
        interval_s = float(text) if text else DEFAULT_INTERVAL_S
    except ValueError:
        raise InvalidArgument(f"NNFMQ_TELEMETRY_INTERVAL_S is {text!r}; it is a number of seconds") from None
    logger = TelemetryLogger(open_sink(os.environ["NNFMQ_TELEMETRY"]), interval_s)
    atexit.register(logger.close)  # called after that of the registration, which is registered later
    register(logger)
