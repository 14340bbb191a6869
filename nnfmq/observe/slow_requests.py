"""Why requests were slow: the stages of each request of a trace, beside what they usually take.

    client write → request wake-up → decode → bind → queue for cores → engine → reply → result wake-up → client read

The client's slices have the first and the last, the driver's slices the others; the wake-ups are the times between. If
the trace has only the driver's side, the client's stages are missing. A request's operations are the slices on the
thread of its engine, within it. (OBS-7)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from nnfmq.observe.trace_layout import STANDARD_NAMES
from nnfmq.observe.trace_model import CpuWait, Slice, Trace

__all__ = ["STAGES", "Explanation", "RequestStages", "Stage", "explain", "requests_of"]

STAGES = (
    "client write",
    "request wake-up",
    "decode",
    "bind",
    "queue for cores",
    "engine",
    "reply",
    "result wake-up",
    "client read",
)
_REQUEST, _DECODE, _ENGINE, _EXECUTE, _WRITE, _WAIT, _READ, _BIND = STANDARD_NAMES[:8]
_OPERATION = "[NN_LC_PCO]"
_SLOWEST_OPERATIONS = 3


@dataclass(slots=True)
class RequestStages:
    """The stages of one request in ns, the slices from which they come, and its slowest operations.

    Attributes:
        request: The request id.
        begin_ns: When the first of its slices begins.
        total_ns: From the begin to the end of the client's `execute`, or of the driver's `request`.
        stages: Those that the trace has.
        threads: Its threads: (pid, thread).
        engine: The engine's slice.
    """

    request: int
    begin_ns: int
    total_ns: int
    stages: dict[str, int]
    threads: tuple[tuple[int, int], ...]
    engine: Slice | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage or an operation of a slow request: its time, its share, and the median of all requests."""

    name: str
    duration_ns: int
    share: float
    typical_ns: int

    @property
    def excess_ns(self) -> int:
        """By how much it exceeds the median."""
        return self.duration_ns - self.typical_ns


@dataclass(slots=True)
class Explanation:
    """A slow request, its stages, its slowest operations, and how long its threads waited for a CPU around it."""

    request: RequestStages
    stages: list[Stage]
    operations: list[Stage] = field(default_factory=list)
    waits: list[CpuWait] = field(default_factory=list)

    @property
    def abnormal(self) -> Stage:
        """The stage that exceeds its median by most."""
        return max(self.stages, key=lambda stage: stage.excess_ns)


def requests_of(trace: Trace) -> list[RequestStages]:
    """Return the stages of each request that the trace has completely, on at least one side."""
    slices: dict[int, dict[str, Slice]] = defaultdict(dict)
    for one in trace.slices:
        if one.request:
            slices[one.request][one.name] = one
    found = (_stages(request, by_name) for request, by_name in slices.items())
    return [request for request in found if request is not None]


def _stages(request: int, by_name: dict[str, Slice]) -> RequestStages | None:
    driver, execute = by_name.get(_REQUEST), by_name.get(_EXECUTE)
    write, wait, read, engine = (by_name.get(name) for name in (_WRITE, _WAIT, _READ, _ENGINE))
    if driver is None and execute is None:
        return None
    stages: dict[str, int] = {}
    if write is not None:  # the driver may have the request before the client's call that wakes it has returned
        end_ns = write.end_ns if driver is None else min(write.end_ns, driver.begin_ns)
        stages["client write"] = max(0, end_ns - write.begin_ns)
    if driver is not None and wait is not None:
        stages["request wake-up"] = max(0, driver.begin_ns - wait.begin_ns)
    if driver is not None:
        reply_end_ns = driver.end_ns if wait is None else min(driver.end_ns, wait.end_ns)
        stages |= _driver_stages(driver, engine, by_name.get(_DECODE), by_name.get(_BIND), reply_end_ns)
    elif wait is not None:
        stages["driver"] = wait.duration_ns
    if driver is not None and wait is not None:
        stages["result wake-up"] = max(0, wait.end_ns - max(driver.end_ns, wait.begin_ns))
    if read is not None:
        stages["client read"] = read.duration_ns
    whole = execute or driver
    assert whole is not None
    threads = tuple(dict.fromkeys((one.pid, one.thread) for one in (execute, driver) if one is not None))
    return RequestStages(request, whole.begin_ns, whole.duration_ns, stages, threads, engine)


def _driver_stages(
    driver: Slice, engine: Slice | None, decode: Slice | None, bind: Slice | None, reply_end_ns: int
) -> dict[str, int]:
    """Return the driver's stages. The reply ends when the client has seen it, perhaps before the driver's slice."""
    stages = {"decode": decode.duration_ns if decode else 0, "bind": bind.duration_ns if bind else 0}
    if engine is not None:
        ready_ns = max(one.end_ns if one else driver.begin_ns for one in (decode, bind))
        stages["queue for cores"] = max(0, engine.begin_ns - ready_ns)
        stages["engine"] = engine.duration_ns
        stages["reply"] = max(0, reply_end_ns - engine.end_ns)
    return stages


def explain(trace: Trace, count: int) -> list[Explanation]:
    """Return the slowest `count` requests, the slowest first, each with the usual times beside."""
    requests = requests_of(trace)
    medians = _medians(requests)
    operations = _Operations(trace.slices)
    slowest = sorted(requests, key=lambda request: -request.total_ns)[:count]
    return [_explanation(trace, request, medians, operations) for request in slowest]


def _medians(requests: Iterable[RequestStages]) -> dict[str, int]:
    times: dict[str, list[int]] = defaultdict(list)
    for request in requests:
        for name, duration_ns in request.stages.items():
            times[name].append(duration_ns)
    return {name: median_low(found) for name, found in times.items()}


def _explanation(trace: Trace, request: RequestStages, medians: dict[str, int], operations: _Operations) -> Explanation:
    total_ns = max(request.total_ns, 1)
    stages = [Stage(name, ns, ns / total_ns, medians[name]) for name, ns in request.stages.items()]
    waits = [
        wait
        for wait in trace.waits
        if (wait.pid, wait.thread) in request.threads
        and wait.begin_ns < request.begin_ns + request.total_ns
        and wait.end_ns > request.begin_ns
    ]
    return Explanation(request, stages, operations.slowest(request.engine, total_ns), waits)


class _Operations:
    """The operations of a trace by thread, and their medians."""

    def __init__(self, slices: Sequence[Slice]) -> None:
        self._threads: dict[tuple[int, int], list[Slice]] = defaultdict(list)
        times: dict[tuple[int, str], list[int]] = defaultdict(list)
        for one in slices:
            if one.name.startswith(_OPERATION):
                self._threads[one.pid, one.thread].append(one)
                times[one.pid, one.name].append(one.duration_ns)
        self._medians = {key: median_low(found) for key, found in times.items()}

    def slowest(self, engine: Slice | None, total_ns: int) -> list[Stage]:
        """Return the slowest operations within the engine's slice."""
        if engine is None:
            return []
        found = self._threads.get((engine.pid, engine.thread), [])
        first = bisect_left(found, engine.begin_ns, key=lambda one: one.begin_ns)
        last = bisect_right(found, engine.end_ns, key=lambda one: one.begin_ns)
        within = [one for one in found[first:last] if one.end_ns <= engine.end_ns]
        within.sort(key=lambda one: -one.duration_ns)
        return [
            Stage(
                one.name.removeprefix(_OPERATION),
                one.duration_ns,
                one.duration_ns / total_ns,
                self._medians[one.pid, one.name],
            )
            for one in within[:_SLOWEST_OPERATIONS]
        ]
