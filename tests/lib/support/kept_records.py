"""Telemetry records, as an application's callback gets them."""

from __future__ import annotations

from typing import Any

from nnfmq import telemetry
from nnfmq.telemetry import CompilationRecord, ExecutionRecord


class Records:
    """A callback that keeps its records."""

    def __init__(self) -> None:
        self.all: list[Any] = []

    def __call__(self, record: telemetry.TelemetryRecord) -> None:
        self.all.append(record)

    @property
    def compilations(self) -> list[CompilationRecord]:
        return [record for record in self.all if isinstance(record, CompilationRecord)]

    @property
    def executions(self) -> list[ExecutionRecord]:
        return [record for record in self.all if isinstance(record, ExecutionRecord)]
