"""What is recorded of each request, and by the sampler between requests. Data only; times in ns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["CAUSES", "RequestRecord", "StressSample", "to_records"]

CAUSES = {
    "cpu-client": "other tasks on the client's CPU",
    "cpu-worker": "other tasks on the worker's CPU",
    "memory": "memory pressure",
    "throttling": "a CPU limit (cpu.max)",
    "compilation": "a compilation in the driver",
    "gc": "garbage collection in the client",
    "page-faults": "page faults of new memory",
    "stops": "stopped by a signal",
}
"""Name → description."""


class RequestRecord(NamedTuple):
    """A request: begin on the monotonic clock, stages, and what the counters increased by.

    `burst`, `queue`, `driver` and `engine` are those of `Burst.last`, -1 in other modes. The application's own time is
    `latency - burst`. `client_...` is the thread that executes; `worker_delay` is that of the worker's thread that
    waited longest for a CPU; the other counters of the worker are those of all its threads.
    """

    begin: int
    latency: int
    burst: int = -1
    queue: int = -1
    driver: int = -1
    engine: int = -1
    client_cpu: int = 0
    client_system: int = 0
    client_delay: int = 0
    client_minor_faults: int = 0
    client_major_faults: int = 0
    worker_cpu: int = 0
    worker_delay: int = 0
    worker_minor_faults: int = 0
    worker_major_faults: int = 0
    gc: int = 0

    @property
    def end(self) -> int:
        """The time when the request was done."""
        return self.begin + self.latency


class StressSample(NamedTuple):
    """The state of one client and its worker, read between two times.

    `time` is before the first counter was read, `read` after the last one: with CPU hogs beside the sampler that may
    take milliseconds. All from `client_throttled` on are totals that only increase. `compiling` is CPU time of the
    driver's compilations (`CompilerUsage`), `compiling_client` and `compiling_worker` the part of it on the CPUs of the
    client and of the worker. `memory_stall` is the time in which some task of the machine waited for memory (PSI).
    """

    time: int
    read: int
    is_client_stopped: bool = False
    is_worker_stopped: bool = False
    client_throttled: int = 0
    worker_throttled: int = 0
    compiling: int = 0
    compiling_client: int = 0
    compiling_worker: int = 0
    memory_stall: int = 0


def to_records(rows: npt.NDArray[np.int64]) -> Sequence[RequestRecord]:
    """Return the records of an array with a row for each request."""
    return [RequestRecord(*row) for row in rows.tolist()]
