"""The records of each request, and of the sampler between requests. Data only; times in ns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["DISTURBANCES", "RequestRecord", "StressSample", "to_records"]

DISTURBANCES = ("cpu-client", "cpu-worker", "memory", "throttling", "compilation", "gc", "page-faults", "stops")
"""The causes of `observe.causes` that this package can bring about."""


class RequestRecord(NamedTuple):
    """A request: begin on the monotonic clock, stages, and what the counters increased by.

    In an open loop `begin` is the intended start, and `late` the time from there until it was sent. `burst`, `queue`,
    `driver` and `engine` are those of `Burst.last`, -1 in other modes. The application's own time is `latency - burst -
    late`. `client_...` is the thread that executes; `worker_delay` is that of the worker's thread that waited longest
    for a CPU; the other counters of the worker are those of all its threads.
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
    late: int = 0

    @property
    def end(self) -> int:
        """The time when the request was done."""
        return self.begin + self.latency


class StressSample(NamedTuple):
    """The state of one client and its worker, read between two times.

    `client_stop` and `worker_stop` say how they are kept from running, keys of `machine_record.STOPS`, or empty.
    `time` is before the first counter was read, `read` after the last one: with CPU hogs beside the sampler that may
    take milliseconds. All from `client_throttled` on are totals that only increase. `compiling` is CPU time of the
    driver's compilations (`CompilerUsage`), `compiling_client` and `compiling_worker` the part of it on the CPUs of the
    client and of the worker. `memory_stall` is the time in which some task of the machine waited for memory (PSI).
    """

    time: int
    read: int
    client_stop: str = ""
    worker_stop: str = ""
    client_throttled: int = 0
    worker_throttled: int = 0
    compiling: int = 0
    compiling_client: int = 0
    compiling_worker: int = 0
    memory_stall: int = 0


def to_records(rows: npt.NDArray[np.int64]) -> Sequence[RequestRecord]:
    """Return the records of an array with a row for each request."""
    return [RequestRecord(*row) for row in rows.tolist()]
