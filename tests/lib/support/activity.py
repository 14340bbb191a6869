"""Statistics of a driver that does not exist, for the commands that display them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

from nnfmq.hal.errors import NnfmqError
from nnfmq.observe import statistics_layout as layout
from nnfmq.observe.driver_statistics import (
    BurstStatistics,
    CacheStatistics,
    ClientStatistics,
    DriverStatistics,
    ModelCounts,
    ModelStatistics,
)
from nnfmq.observe.statistics_layout import LatencyHistogram
from nnfmq.serialize.repository_protocol import ModelEntry

NO_PID = 2**22 + 1  # above the kernel's limit: /proc has nothing about it
SECOND = 10**9
MIB = 1 << 20


def latencies(*durations_ns: int) -> LatencyHistogram:
    counts = [0] * layout.BUCKETS
    for duration in durations_ns:
        counts[layout.bucket_of(duration)] += 1
    return LatencyHistogram(tuple(counts))


def model(executions: int = 0, duration_ns: int = 4_000, **fields: Any) -> ModelStatistics:
    """Return a model whose executions took equally long, half of it in the engine."""
    counts = counted(executions, duration_ns, failures=fields.pop("failures", 0))
    return replace(ModelStatistics(1, "face.tflite", 0, "compiled", "camera.py", counts), **fields)


def counted(executions: int, duration_ns: int = 4_000, failures: int = 0) -> ModelCounts:
    """Return equally long executions, which took four times as long for the client, half of that in the queues."""
    total = executions * duration_ns
    times = (latencies(*[duration_ns * part // 2] * executions) for part in (8, 4, 2, 1))
    return ModelCounts(executions, failures, 4 * total, 2 * total, total, total // 2, *times)


def burst(executions: int = 0, **fields: Any) -> BurstStatistics:
    return replace(BurstStatistics(2, 1, executions, 0, executions, executions, 0), **fields)


def client(executions: int = 0, **fields: Any) -> ClientStatistics:
    """Return a client that connected at 1 s, with one model and one burst."""
    models, bursts = (model(executions),), (burst(executions),)
    numbers = NO_PID, NO_PID + 1, 1000, SECOND, executions, 0, 0, MIB, 100 * MIB
    made = ClientStatistics(*numbers, models, bursts, program="camera.py")
    return replace(made, **fields)


def driver(*clients: ClientStatistics, read_s: float = 11, **fields: Any) -> DriverStatistics:
    """Return a driver that started at 1 s, as read at `read_s`."""
    cache = CacheStatistics(3, 6 * MIB, 512 * MIB, 10, 7)
    made = DriverStatistics(NO_PID + 2, "1.2.3", SECOND, int(read_s * SECOND), 1000 * MIB, 0, 4, 2, 1, cache, clients)
    made = replace(made, deaths={"killed": 1, "crashed": 0}, build="compiled 3.12.1 riscv64", clients_max=64)
    return replace(made, **fields)


class FakeClient:
    """A client whose readings are given; an error among them is raised. The last one is repeated."""

    is_embedded = False
    worker_pid = NO_PID + 3

    def __init__(self, *readings: DriverStatistics | NnfmqError) -> None:
        self.readings = list(readings)
        self.is_closed = self.recovers = False
        self.served: list[ModelEntry] | NnfmqError | None = None

    def statistics(self, *, timeout: float) -> DriverStatistics:
        assert timeout > 0
        found = self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]
        if isinstance(found, NnfmqError):
            raise found
        return found

    def models(self, *, timeout: float) -> list[ModelEntry]:
        """Return the models by name, if this driver has any."""
        assert timeout > 0 and self.served is not None
        if isinstance(self.served, NnfmqError):
            raise self.served
        return self.served

    def close(self) -> None:
        self.is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
