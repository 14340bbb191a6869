"""The statistics of a driver as values, read from its statistics area.

The area is another process's memory. What is read from it is displayed and summed, nothing else; text is stripped of
control characters, because clients choose the names of their models and others print them on terminals.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from nnfmq.hal.summaries import printable
from nnfmq.observe import statistics_layout as layout
from nnfmq.observe.limits import LIMITS
from nnfmq.observe.recorder_core import snapshot
from nnfmq.observe.statistics_layout import WORD_BYTES, LatencyHistogram
from nnfmq.observe.statistics_past import is_plausible

__all__ = [
    "BurstStatistics",
    "CacheStatistics",
    "ClientCalls",
    "ClientStatistics",
    "DriverStatistics",
    "ModelCounts",
    "ModelStatistics",
    "client_calls",
    "read_statistics",
]

_ATTEMPTS = 100  # a change takes some microseconds, unless its writer was killed
_SLOTS_MAX = 4096


@dataclass(frozen=True, slots=True)
class ModelCounts:
    """Executions of a model, in all modes, and how long they took. Two can be added.

    Attributes:
        executions: Executions that succeeded.
        failures: Executions that ended with an error.
        client_ns: The sum of their times in the client, as it says.
        queue_ns: The sum of their times in the queues, as the client says.
        driver_ns: The sum of their times in the driver.
        engine_ns: The sum of their times in the engine.
        client: Their times from the call to its return. The client measures them, and only it is responsible for them.
        queue: The part of these between client and driver: both queues, including wake-ups.
        driver: Their times from receiving the request to the result.
        engine: The part of these in the engine.
    """

    executions: int = 0
    failures: int = 0
    client_ns: int = 0
    queue_ns: int = 0
    driver_ns: int = 0
    engine_ns: int = 0
    client: LatencyHistogram = field(default=LatencyHistogram(), repr=False)
    queue: LatencyHistogram = field(default=LatencyHistogram(), repr=False)
    driver: LatencyHistogram = field(default=LatencyHistogram(), repr=False)
    engine: LatencyHistogram = field(default=LatencyHistogram(), repr=False)

    def __add__(self, other: ModelCounts) -> ModelCounts:
        return ModelCounts(*(getattr(self, name) + getattr(other, name) for name in _COUNTS))

    def since(self, earlier: ModelCounts) -> ModelCounts:
        """Return the counts after `earlier`; a number that has gone back was read in another order, and is 0."""
        numbers = (max(getattr(self, name) - getattr(earlier, name), 0) for name in _COUNTS[:6])
        histograms = (getattr(self, name).since(getattr(earlier, name)) for name in TIMES)
        return ModelCounts(*numbers, *histograms)


TIMES = ("client", "queue", "driver", "engine")
"""The times that executions have, each with a histogram, from the outermost to the innermost."""
_COUNTS = tuple(each.name for each in fields(ModelCounts))


class ModelKey(NamedTuple):
    """The key by which counts of all clients are added up, those that have left included."""

    program: str
    name: str
    version: int
    device: str


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """One prepared model; or, with the id 0, all models of the same name that are released.

    Attributes:
        id: The driver's id of the model, unique within its client.
        name: What its client calls it.
        version: That of a model of the model repository; 0 of another model.
        device: The device that prepared it.
        program: The name of its client's program.
        counts: Its executions.
    """

    id: int
    name: str
    version: int
    device: str
    program: str
    counts: ModelCounts

    @property
    def executions(self) -> int:
        """Executions that succeeded."""
        return self.counts.executions

    @property
    def failures(self) -> int:
        """Executions that ended with an error."""
        return self.counts.failures

    @property
    def key(self) -> ModelKey:
        """The key by which its counts are added up; models that have no name of their own have one key."""
        name = NO_NAME if self.id and self.name == f"model {self.id}" else self.name
        return ModelKey(self.program, name, self.version, self.device)


NO_NAME = "(no name)"


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
        running_calls: Those that are running.
        charged_bytes: What is charged to its memory quota.
        quota_bytes: Its memory quota.
        models: Its prepared models; those that have no row are summed in one whose id is OTHER_MODELS_ID.
        bursts: Its bursts over queues, as far as they have rows.
        client_class: Its class, a `ClientClass`.
        program: The name of its program when it connected.
        past: What its released models have counted.
        model_count: How many models it has, whether or not they have rows.
        burst_count: How many bursts over queues.
        thread_count: How many threads of its worker bursts and files of hosted runtimes have.
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
    program: str = ""
    past: tuple[ModelStatistics, ...] = ()
    running_calls: int = 0
    model_count: int = 0
    burst_count: int = 0
    thread_count: int = 0

    @property
    def in_flight(self) -> int:
        """The number of requests that are handled now: calls, and packets of bursts."""
        return self.running_calls + sum(burst.in_flight for burst in self.bursts)


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
        dead_workers: Workers that have died. Their clients recover in another worker, if they recover.
        deaths: How many of them by each cause: `killed`, by the kernel for their memory or by somebody; `crashed`, in
            code of a device or of nnfmq; `sandbox`, because of a system call that no worker makes; `ended` by
            themselves, because an execution took too long, or of an internal error.
        build: The driver's queue core, its Python and machine; empty if it is embedded.
        clients_max: How many clients it serves at most, those that only read its statistics aside.
        serves_several: Whether it serves several users; who does not administer it sees what is his own then.
        lacks_capabilities: Whether it serves one user because it lacks capabilities to serve several.
        was_upgraded: Whether nnfmq was upgraded under it: it goes on with what it has loaded, and should be restarted.
        pid_namespace: The inode of its PID namespace, in which all pids here are; 0 if it is unknown. A client in
            another one, such as another container, has the pid 0.
        cache: The programs that clients share.
        clients: The clients, in the order of their slots.
        limits: The value of each of `limits.LIMITS`, in its unit; 0: none. Empty for an embedded driver.
        past: What the models of clients that have left have counted.
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
    past: tuple[ModelStatistics, ...] = ()
    deaths: Mapping[str, int] = field(default_factory=dict)
    build: str = ""
    clients_max: int = 1
    limits: tuple[int, ...] = ()
    serves_several: bool = False
    lacks_capabilities: bool = False
    pid_namespace: int = 0
    was_upgraded: bool = False

    def totals(self) -> dict[ModelKey, ModelCounts]:
        """Return the counts since the driver started, of clients and models that are gone, too."""
        found: dict[ModelKey, ModelCounts] = {}
        rows = [*self.past, *(model for client in self.clients for model in (*client.models, *client.past))]
        for model in rows:
            found[model.key] = found[model.key] + model.counts if model.key in found else model.counts
        return found

    @property
    def uptime_ns(self) -> int:
        """The time for which the driver has run."""
        return max(self.read_ns - self.started_ns, 0)


class ClientCalls(NamedTuple):
    """A client of the driver: its process, that which serves it, and how many of its calls are queued or running."""

    pid: int
    worker_pid: int
    open_calls: int


def read_statistics(area: memoryview) -> DriverStatistics:
    """Return the statistics in an area. A slot whose owner was killed during a change is left out until it is repaired.

    Raises:
        ValueError: If it is no statistics area of this layout.
    """
    header, words = _header(area)
    slots = words[layout.HEADER_SLOTS]
    clients = tuple(client for slot in range(slots) if (client := _client(area, slot)) is not None)
    return DriverStatistics(
        pid=words[layout.DRIVER_PID],
        version=_text(memoryview(header).cast("Q"), layout.DRIVER_VERSION, layout.DRIVER_VERSION_WORDS),
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
        past=_past_clients(area, words),
        deaths={cause: words[layout.DEATHS + index] for index, cause in enumerate(layout.DEATH_CAUSES)},
        build=_text(memoryview(header).cast("Q"), layout.DRIVER_BUILD, layout.DRIVER_BUILD_WORDS),
        clients_max=words[layout.CLIENTS_LIMIT],
        limits=words[layout.LIMITS : layout.LIMITS + len(LIMITS)] if words[layout.LIMITS] else (),
        serves_several=words[layout.SERVED_USERS] == layout.SEVERAL_USERS,
        lacks_capabilities=words[layout.SERVED_USERS] == layout.LACKS_CAPABILITIES,
        pid_namespace=words[layout.PID_NAMESPACE],
        was_upgraded=bool(words[layout.UPGRADED]),
    )


def _past_clients(area: memoryview, header: tuple[int, ...]) -> tuple[ModelStatistics, ...]:
    """Return the rows of past clients, which the supervisor changes one word after the other."""
    begin, count = layout.slot_at(header[layout.HEADER_SLOTS]), header[layout.HEADER_PAST]
    data = bytes(area[begin * WORD_BYTES : (begin + count * layout.PAST_WORDS) * WORD_BYTES])
    return _past(memoryview(data).cast("Q"), count)


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
    past = words[layout.HEADER_PAST]
    is_known = words[layout.HEADER_MAGIC] == layout.MAGIC and max(slots, past) <= _SLOTS_MAX
    if not is_known or len(area) < layout.area_bytes(slots, past):
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
    words = memoryview(data).cast("Q")
    if words[layout.STATE] != layout.USED:
        return None
    models, released = [], []
    for row in range(layout.MODELS_MAX):
        at, calls = layout.MODELS_AT + row * layout.MODEL_WORDS, layout.CALLS_AT + row * layout.CALLS_WORDS
        if words[at + layout.MODEL_ID]:
            models.append(_model(words, at, calls))
        elif words[at + layout.EXECUTIONS] or words[at + layout.FAILURES]:
            released.append(_model(words, at, calls))
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
        models=tuple(models),
        bursts=tuple(_burst(words, at) for at in _used_bursts(words)),
        program=_text(words, layout.CLIENT_PROGRAM, layout.CLIENT_PROGRAM_WORDS),
        running_calls=words[layout.RUNNING_CALLS],
        past=(*released, *_past(words[layout.PAST_AT :], layout.PAST_MODELS_MAX)),
        client_class=words[layout.CLIENT_CLASS],
        model_count=words[layout.MODEL_COUNT],
        burst_count=words[layout.BURST_COUNT],
        thread_count=words[layout.THREAD_COUNT],
    )


def _used_bursts(words: memoryview) -> list[int]:
    """Return the offsets of the used rows of bursts; the first word of a row is its id."""
    end = layout.BURSTS_AT + layout.BURSTS_MAX * layout.BURST_WORDS
    return [at for at in range(layout.BURSTS_AT, end, layout.BURST_WORDS) if words[at]]


def _past(words: memoryview, rows: int) -> tuple[ModelStatistics, ...]:
    """Return the used rows of a table of the past."""
    begins = [row * layout.PAST_WORDS for row in range(rows) if words[row * layout.PAST_WORDS + layout.MODEL_ID]]
    return tuple(replace(_model(words, at, at + layout.PAST_CALLS), id=0) for at in begins)


def _model(words: memoryview, at: int, calls_at: int) -> ModelStatistics:
    model_id = words[at + layout.MODEL_ID]
    name = _text(words, at + layout.MODEL_NAME, layout.MODEL_NAME_WORDS)
    return ModelStatistics(
        id=model_id,
        name=name or (f"model {model_id}" if calls_at - at != layout.PAST_CALLS and model_id else NO_NAME),
        version=words[at + layout.MODEL_VERSION],
        device=_text(words, at + layout.DEVICE_NAME, layout.DEVICE_NAME_WORDS),
        program=_text(words, at + layout.PROGRAM, layout.PROGRAM_WORDS),
        counts=_counts(words[at : at + layout.MODEL_WORDS].tolist(), words[calls_at:][: layout.CALLS_WORDS].tolist()),
    )


def _counts(model: list[int], calls: list[int]) -> ModelCounts:
    """Return the executions of a row; without what its client says, if that cannot be."""
    if not is_plausible(model, calls):
        calls = [0] * layout.CALLS_WORDS
    return ModelCounts(
        executions=model[layout.EXECUTIONS],
        failures=model[layout.FAILURES],
        client_ns=calls[layout.CLIENT_NS],
        queue_ns=calls[layout.QUEUE_NS],
        driver_ns=model[layout.DRIVER_NS],
        engine_ns=model[layout.ENGINE_NS],
        client=_histogram(calls, layout.CLIENT_HISTOGRAM),
        queue=_histogram(calls, layout.QUEUE_HISTOGRAM),
        driver=_histogram(model, layout.DRIVER_HISTOGRAM),
        engine=_histogram(model, layout.ENGINE_HISTOGRAM),
    )


def _histogram(words: list[int], at: int) -> LatencyHistogram:
    return LatencyHistogram(tuple(words[at : at + layout.BUCKETS]))


def _burst(words: memoryview, at: int) -> BurstStatistics:
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


def _text(area: memoryview, word: int, words: int) -> str:
    return printable(layout.text_from_words(area[word : word + words].tobytes()))
