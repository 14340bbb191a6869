"""The statistics of a driver as values, read from its statistics area.

The area is another process's memory. What is read from it is displayed and summed, nothing else; text is stripped of
control characters, because clients choose the names of their models and others print them on terminals.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from nnfmq.observe import statistics_layout as layout
from nnfmq.observe.recorder_core import snapshot
from nnfmq.observe.statistics_layout import WORD_BYTES, LatencyHistogram

__all__ = [
    "BurstStatistics",
    "CacheStatistics",
    "ClientCalls",
    "ClientStatistics",
    "DriverStatistics",
    "ModelStatistics",
    "client_calls",
    "read_statistics",
]

_ATTEMPTS = 100  # a change takes some microseconds, unless its writer was killed
_SLOTS_MAX = 4096


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """The executions of one prepared model, of all modes.

    Attributes:
        id: The driver's id of the model, unique within its client.
        name: What its client calls it.
        version: That of a model of the model repository; 0 of another model.
        device: The device that prepared it.
        executions: Executions that succeeded.
        failures: Executions that ended with an error.
        driver_ns: The sum of their times from receiving the request to the result.
        engine_ns: The sum of their times in the engine.
        latency: Their times in the driver.
    """

    id: int
    name: str
    version: int
    device: str
    executions: int
    failures: int
    driver_ns: int
    engine_ns: int
    latency: LatencyHistogram = field(repr=False)


@dataclass(frozen=True, slots=True)
class BurstStatistics:
    """The executions of one burst over queues.

    Attributes:
        id: The driver's id of the burst, unique within its client.
        model_id: The id of its model.
        executions: Executions that succeeded.
        failures: Executions that ended with an error.
        received: Request packets that were read.
        polled: Waits for a request that ended while the driver polled.
        slept: Waits for which the driver slept.
    """

    id: int
    model_id: int
    executions: int
    failures: int
    received: int
    polled: int
    slept: int

    @property
    def in_flight(self) -> int:
        """The number of requests that were read and not completed, 0 or 1."""
        return min(max(self.received - self.executions - self.failures, 0), 1)


@dataclass(frozen=True, slots=True)
class ClientStatistics:
    """One client of the driver.

    Attributes:
        worker_pid: The process that serves it.
        pid: Its process.
        uid: Its user.
        started_ns: When it connected, on the monotonic clock.
        executions: Executions of all its models that succeeded, released models included.
        failures: Executions that ended with an error.
        open_calls: Calls that are queued or running; executions of bursts are not among them.
        charged_bytes: What is charged to its memory quota.
        quota_bytes: Its memory quota.
        models: Its prepared models; those that have no row are summed in one whose id is OTHER_MODELS_ID.
        bursts: Its bursts over queues, as far as they have rows.
        client_class: Its class, a `ClientClass`.
    """

    worker_pid: int
    pid: int
    uid: int
    started_ns: int
    executions: int
    failures: int
    open_calls: int
    charged_bytes: int
    quota_bytes: int
    models: tuple[ModelStatistics, ...]
    bursts: tuple[BurstStatistics, ...]
    client_class: int = 0


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """The compiled programs that the workers of a driver share; all 0 in an embedded driver."""

    programs: int
    size_bytes: int
    limit_bytes: int
    lookups: int
    hits: int


@dataclass(frozen=True, slots=True)
class DriverStatistics:
    """A driver and its clients.

    Attributes:
        pid: The driver's process.
        version: Its release of nnfmq; empty if it is embedded.
        started_ns: When it started, on the monotonic clock.
        read_ns: When this was read.
        memory_limit_bytes: What all clients may have together; 0 if it is embedded.
        compile_server_pid: The process that compiles; 0 if none runs.
        compile_requests: Requests to it.
        rejected_clients: Clients that were rejected, because there were too many or no worker could be started.
        dead_workers: Workers that have died: killed, by the kernel for their memory too, or crashed. Their clients
            recover in another worker, if they recover.
        cache: The programs that clients share.
        clients: The clients, in the order of their slots.
    """

    pid: int
    version: str
    started_ns: int
    read_ns: int
    memory_limit_bytes: int
    compile_server_pid: int
    compile_requests: int
    rejected_clients: int
    dead_workers: int
    cache: CacheStatistics
    clients: tuple[ClientStatistics, ...]

    @property
    def uptime_ns(self) -> int:
        """How long the driver has run."""
        return max(self.read_ns - self.started_ns, 0)


class ClientCalls(NamedTuple):
    """A client of the driver: its process, that which serves it, and how many of its calls are queued or running."""

    pid: int
    worker_pid: int
    open_calls: int


def read_statistics(area: memoryview) -> DriverStatistics:
    """Return what an area contains now. A slot whose owner was killed during a change is left out until it is repaired.

    Raises:
        ValueError: If it is no statistics area of this layout.
    """
    header, words = _header(area)
    slots = words[layout.HEADER_SLOTS]
    clients = tuple(client for slot in range(slots) if (client := _client(area, slot)) is not None)
    return DriverStatistics(
        pid=words[layout.DRIVER_PID],
        version=_text(header, layout.DRIVER_VERSION, layout.DRIVER_VERSION_WORDS),
        started_ns=words[layout.DRIVER_START],
        read_ns=time.monotonic_ns(),
        memory_limit_bytes=words[layout.MEMORY_LIMIT],
        compile_server_pid=words[layout.COMPILE_SERVER_PID],
        compile_requests=words[layout.COMPILE_REQUESTS],
        rejected_clients=words[layout.REJECTED_CLIENTS],
        dead_workers=words[layout.DEAD_WORKERS],
        cache=CacheStatistics(
            words[layout.CACHE_PROGRAMS],
            words[layout.CACHE_BYTES],
            words[layout.CACHE_LIMIT],
            words[layout.CACHE_LOOKUPS],
            words[layout.CACHE_HITS],
        ),
        clients=clients,
    )


def client_calls(area: memoryview) -> list[ClientCalls]:
    """Return the open calls of each client now, from its words alone: some 9 µs, not the copies of `read_statistics`.

    The words of a client that connects meanwhile may be those of its predecessor.

    Raises:
        ValueError: If it is no statistics area of this layout.
    """
    _, header = _header(area)
    count = header[layout.HEADER_SLOTS]
    words = area[: layout.area_bytes(count)].cast("Q")
    return [
        ClientCalls(words[at + layout.CLIENT_PID], words[at + layout.WORKER_PID], words[at + layout.OPEN_CALLS])
        for at in map(layout.slot_at, range(count))
        if words[at + layout.STATE] == layout.USED
    ]


def _header(area: memoryview) -> tuple[bytes, tuple[int, ...]]:
    """Return a copy of the header, and its words. Raises ValueError if it is no statistics area of this layout."""
    header = bytes(area[: layout.HEADER_WORDS * WORD_BYTES])
    if len(header) < layout.HEADER_WORDS * WORD_BYTES:
        raise ValueError(f"{len(header)} bytes are less than their header")
    words = struct.unpack(f"<{layout.HEADER_WORDS}Q", header)
    slots = words[layout.HEADER_SLOTS]
    if words[layout.HEADER_MAGIC] != layout.MAGIC or slots > _SLOTS_MAX or len(area) < layout.area_bytes(slots):
        raise ValueError("they have another layout; install the same nnfmq release on both sides")
    return header, words


def _client(area: memoryview, slot: int) -> ClientStatistics | None:
    begin = layout.slot_at(slot) * WORD_BYTES
    view = area[begin : begin + layout.SLOT_BYTES]
    if view[: (layout.STATE + 1) * WORD_BYTES].cast("Q")[layout.STATE] != layout.USED:
        return None  # without a copy: most slots are free
    data = next((copy for _ in range(_ATTEMPTS) if (copy := snapshot(view)) is not None), None)
    if data is None:
        return None
    words = struct.unpack(f"<{layout.SLOT_WORDS}Q", data)
    if words[layout.STATE] != layout.USED:
        return None
    return ClientStatistics(
        worker_pid=words[layout.WORKER_PID],
        pid=words[layout.CLIENT_PID],
        uid=words[layout.CLIENT_UID],
        started_ns=words[layout.CLIENT_START],
        executions=words[layout.CLIENT_EXECUTIONS],
        failures=words[layout.CLIENT_FAILURES],
        open_calls=words[layout.OPEN_CALLS],
        charged_bytes=words[layout.CHARGED_BYTES],
        quota_bytes=words[layout.QUOTA_BYTES],
        models=tuple(_model(data, words, at) for at in _used_rows(words, layout.MODELS_AT, layout.MODEL_WORDS)),
        bursts=tuple(_burst(words, at) for at in _used_rows(words, layout.BURSTS_AT, layout.BURST_WORDS)),
        client_class=words[layout.CLIENT_CLASS],
    )


def _used_rows(words: tuple[int, ...], begin: int, row_words: int) -> list[int]:
    """Return where the used rows of a table begin; the first word of a row is its id."""
    count = layout.MODELS_MAX if begin == layout.MODELS_AT else layout.BURSTS_MAX
    return [at for at in range(begin, begin + count * row_words, row_words) if words[at]]


def _model(data: bytes, words: tuple[int, ...], at: int) -> ModelStatistics:
    histogram = at + layout.HISTOGRAM
    return ModelStatistics(
        id=words[at + layout.MODEL_ID],
        name=_text(data, at + layout.MODEL_NAME, layout.MODEL_NAME_WORDS),
        version=words[at + layout.MODEL_VERSION],
        device=_text(data, at + layout.DEVICE_NAME, layout.DEVICE_NAME_WORDS),
        executions=words[at + layout.EXECUTIONS],
        failures=words[at + layout.FAILURES],
        driver_ns=words[at + layout.DRIVER_NS],
        engine_ns=words[at + layout.ENGINE_NS],
        latency=LatencyHistogram(words[histogram : histogram + layout.BUCKETS]),
    )


def _burst(words: tuple[int, ...], at: int) -> BurstStatistics:
    fields = (
        layout.BURST_ID,
        layout.BURST_MODEL_ID,
        layout.BURST_EXECUTIONS,
        layout.BURST_FAILURES,
        layout.RECEIVED,
        layout.POLLED,
        layout.SLEPT,
    )
    return BurstStatistics(*(words[at + word] for word in fields))


def _text(data: bytes, word: int, words: int) -> str:
    text = layout.text_from_words(data[word * WORD_BYTES : (word + words) * WORD_BYTES])
    return "".join(character if character.isprintable() else "�" for character in text)
