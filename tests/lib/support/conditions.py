"""Conditions of a measurement, and what a report says of its model, with known values."""

from __future__ import annotations

from typing import Any

CONDITIONS: dict[str, Any] = {
    "date": "2026-11-30T12:00:00+00:00",
    "host": "lab",
    "cpu": "AMD EPYC",
    "cpus_allowed": [0, 1],
    "kernel": "6.12.0",
    "python": "3.13.1",
    "packages": {"nnfmq": "1.2"},
    "core": "compiled",
    "load_before": [0.25, 0.5, 1.0],
}
LINE = "nnfmq 1.2, compiled core; AMD EPYC, CPUs 0, 1; load 0.25 before; 2026-11-30T12:00:00+00:00, lab"
"""How terminals and pages print them."""
SUBJECT: dict[str, Any] = {"model": "folder/net.tflite", "model_sha256": "00c0ffee" * 8, "conditions": CONDITIONS}
