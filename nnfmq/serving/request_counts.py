"""RequestCounts: how many requests a ModelServer has served, by model and version, and how long they took and waited.

It counts what the driver cannot: requests that never reached it, the rows of batches, and waits for a burst.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

__all__ = ["RequestCounts", "VersionCounts"]


@dataclass(slots=True)
class VersionCounts:
    """The requests to one version of a model since the server was made.

    Attributes:
        successes: Requests that succeeded.
        success_ns: Their time in the server.
        wait_ns: The part of it until their executions began.
        rows: Their rows; one for a request to a model that does not compute batches.
        failures: Requests that ended with an error.
        failure_ns: Their time in the server.
        last_ms: When the last one ended, in milliseconds since 1970; 0 if there was none.
    """

    successes: int = 0
    success_ns: int = 0
    wait_ns: int = 0
    rows: int = 0
    failures: int = 0
    failure_ns: int = 0
    last_ms: int = 0


class RequestCounts:
    """The counts of one server. One event loop writes; another thread may read numbers of different moments."""

    def __init__(self) -> None:
        self._versions: dict[tuple[str, int], VersionCounts] = {}

    def add_success(self, model: str, version: int, begin_ns: int, wait_ns: int, rows: int) -> None:
        """Count a request that began at `begin_ns` of the monotonic clock and ends now."""
        counts = self._counts(model, version)
        counts.successes += 1
        counts.success_ns += time.monotonic_ns() - begin_ns
        counts.wait_ns += wait_ns
        counts.rows += rows

    def add_failure(self, model: str, version: int, begin_ns: int) -> None:
        """Count a request that ends now with an error."""
        counts = self._counts(model, version)
        counts.failures += 1
        counts.failure_ns += time.monotonic_ns() - begin_ns

    def _counts(self, model: str, version: int) -> VersionCounts:
        counts = self._versions.get((model, version))
        if counts is None:
            counts = self._versions[model, version] = VersionCounts()
        counts.last_ms = time.time_ns() // 1_000_000
        return counts

    def of(self, model: str, version: int) -> VersionCounts:
        """Return the counts of one version; zeros if it had no request."""
        return self._versions.get((model, version)) or VersionCounts()

    def keys(self) -> list[tuple[str, int]]:
        """Return the models and versions that had requests."""
        return list(self._versions)
