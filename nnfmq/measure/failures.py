"""Errors of measurements: a runner that cannot run here, and a measurement that has no result."""

from __future__ import annotations


class RunnerUnavailable(Exception):
    """A runner cannot run on this machine, or cannot execute this model; the message gives the reason."""


class BenchmarkFailed(Exception):
    """A measurement has no result: a child process reported an error, or ended early, or did not become idle."""
