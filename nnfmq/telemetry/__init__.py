"""Telemetry: a record of each compilation and each execution of this process, for the application or a collector.

    from nnfmq import telemetry
    with telemetry.register(print):
        ...

`register` calls a function with each record. `TelemetryLogger` is such a function: it aggregates records, and writes
lines of JSON to a sink at a limited rate. `$NNFMQ_TELEMETRY` does that without a change to the application.
"""

from nnfmq.telemetry.callbacks import TelemetryRegistration, register
from nnfmq.telemetry.logger import TelemetryLogger
from nnfmq.telemetry.records import CompilationRecord, DataClass, ExecutionRecord, TelemetryMode, TelemetryRecord
from nnfmq.telemetry.sinks import FileSink, SocketSink, TelemetrySink

__all__ = [
    "CompilationRecord",
    "DataClass",
    "ExecutionRecord",
    "FileSink",
    "SocketSink",
    "TelemetryLogger",
    "TelemetryMode",
    "TelemetryRecord",
    "TelemetryRegistration",
    "TelemetrySink",
    "register",
]
