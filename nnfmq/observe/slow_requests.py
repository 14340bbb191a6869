"""Why the slowest requests of a trace were slow: their stages, what these usually take, and causes from evidence.

    client write → request wake-up → decode → bind → queue for cores → engine start → engine → reply → result wake-up
    → client read

The client's slices have the first and the last, the driver's slices the others; the wake-ups are the times between. If
the trace has only the driver's side, the client's stages are missing, except the request's wake-up. A request's
operations are the slices on the thread of its engine, within it.

A request's excess is what it took beyond the median of all. A thread explains no more of it than its own stages took
beyond their medians: while the worker computes, it does not matter what the client's thread waits for. (OBS-7)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median_low
from typing import NamedTuple

from nnfmq.observe.causes import (
    COMPILERS,
    Cause,
    ExcessDivision,
    holders_text,
    named,
    stop_cause,
    time_text,
    wait_cause,
)
from nnfmq.observe.machine_record import CpuHolder, Stop
from nnfmq.observe.trace_files import Slice, Trace
from nnfmq.observe.trace_layout import BURST_OF, PAUSED, STANDARD_NAMES, TURN, WAKE_UP, worker_of

__all__ = [
    "STAGES",
    "Explanation",
    "RequestStages",
    "Stage",
    "ThreadEvidence",
    "explain",
    "models_of_bursts",
    "requests_of",
]

STAGES = (
    "client write",
    "request wake-up",
    "decode",
    "bind",
    "queue for cores",
    "engine start",
    "engine",
    "reply",
    "result wake-up",
    "client read",
)
_CLIENT_STAGES = ("client write", "result wake-up", "client read")
_REQUEST, _DECODE, _ENGINE, _EXECUTE, _WRITE, _WAIT, _READ, _BIND = STANDARD_NAMES[:8]
_OPERATION = "[NN_LC_PCO]"
_SLOWEST_OPERATIONS = 3

Thread = tuple[int, int]
"""Pid and thread."""


class _Interval(NamedTuple):
    """From when to when a stage was."""

    begin_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.begin_ns

    def inside(self, begin_ns: int, end_ns: int) -> int:
        """Return how much of it is between two times."""
        return max(0, min(self.end_ns, end_ns) - max(self.begin_ns, begin_ns))


@dataclass(slots=True)
class RequestStages:
    """The stages of one request, the threads that executed it, and the engine's slice.

    Attributes:
        request: The request id.
        begin_ns: When the first of its slices begins.
        total_ns: From the begin to the end of the client's `execute`; if only the driver is traced, from when the
            client sent it, if that is known, to the end of the driver's `request`.
        intervals: The stages that the trace has.
        threads: Its threads by side, `client` and `worker`.
        engine: The engine's slice.
        driver: The driver's slice.
    """

    request: int
    begin_ns: int
    total_ns: int
    intervals: dict[str, _Interval]
    threads: dict[str, Thread]
    engine: Slice | None = None
    driver: Slice | None = None

    @property
    def stages(self) -> dict[str, int]:
        """The durations of the stages."""
        return {name: interval.duration_ns for name, interval in self.intervals.items()}

    @property
    def end_ns(self) -> int:
        """When the last of its slices ends."""
        return self.begin_ns + self.total_ns


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage or an operation of a slow request.

    Attributes:
        name: Its name.
        duration_ns: How long it took.
        share: Which share of the request that is.
        typical_ns: The median of all requests.
        off_cpu_ns: For how long its thread was meanwhile stopped, paused, or without a CPU, as far as that is known.
    """

    name: str
    duration_ns: int
    share: float
    typical_ns: int
    off_cpu_ns: int = 0

    @property
    def excess_ns(self) -> int:
        """By how much it exceeds the median."""
        return self.duration_ns - self.typical_ns


@dataclass(slots=True)
class ThreadEvidence:
    """The evidence of one thread of a slow request: times that explain a part of its excess, in ns.

    Attributes:
        side: `client` or `worker`.
        thread: Pid and thread.
        stopped_ns: How it was kept from running, and for how long.
        paused_ns: For how long it paused for workers of clients of a higher class.
        waited_ns: For how long it was runnable without a CPU.
        holders: Who had the CPU meanwhile.
        unknown_ns: For how long it at least did neither, and did not run.
    """

    side: str
    thread: Thread
    stopped_ns: dict[str, int] = field(default_factory=dict)
    paused_ns: int = 0
    waited_ns: int = 0
    holders: list[CpuHolder] = field(default_factory=list)
    unknown_ns: int = 0

    @property
    def off_cpu_ns(self) -> int:
        """All of it."""
        return sum(self.stopped_ns.values()) + self.paused_ns + self.waited_ns + self.unknown_ns


@dataclass(slots=True)
class Explanation:
    """A slow request, its excess, its stages, its slowest operations, and the causes with their evidence."""

    request: RequestStages
    excess_ns: int
    stages: list[Stage]
    operations: list[Stage] = field(default_factory=list)
    causes: tuple[Cause, ...] = ()
    threads: list[ThreadEvidence] = field(default_factory=list)

    @property
    def abnormal(self) -> Stage | None:
        """The stage that exceeds its median by most; None if none does."""
        worst = max(self.stages, key=lambda stage: stage.excess_ns)
        return worst if worst.excess_ns > 0 else None


# ----------------------------------------------------------------------------------------------------------------------
# Stages.


def requests_of(trace: Trace) -> list[RequestStages]:
    """Return the stages of each request that the trace has completely, on at least one side.

    The client may begin to record before the worker does: what it sent until then has no stages that explain anything.
    """
    slices: dict[int, dict[str, Slice]] = defaultdict(dict)
    turns: dict[Thread, list[Slice]] = defaultdict(list)
    for one in trace.slices:
        if one.request:
            slices[one.request][one.name] = one
        elif one.name == TURN:
            turns[one.pid, one.thread].append(one)
    found = (_stages(request, by_name, turns) for request, by_name in slices.items())
    requests = [request for request in found if request is not None]
    first_ns: dict[int, int] = {}  # by worker
    for request in requests:
        if request.driver is not None:
            worker, begin_ns = worker_of(request.request), request.driver.begin_ns
            first_ns[worker] = min(begin_ns, first_ns.get(worker, begin_ns))
    return [
        request
        for request in requests
        if request.driver is not None or request.begin_ns >= first_ns.get(worker_of(request.request), 0)
    ]


def models_of_bursts(trace: Trace) -> dict[int, str]:
    """Return what clients call the models of their bursts, by the id of each burst's request with the number 0."""
    return {
        one.request: one.name.removeprefix(BURST_OF)
        for one in trace.slices
        if one.request and one.name.startswith(BURST_OF)
    }


def _stages(request: int, by_name: Mapping[str, Slice], turns: Mapping[Thread, list[Slice]]) -> RequestStages | None:
    driver, execute = by_name.get(_REQUEST), by_name.get(_EXECUTE)
    if driver is None and execute is None:
        return None
    intervals = dict(_client_begin(by_name, driver))
    wait, read, engine = by_name.get(_WAIT), by_name.get(_READ), by_name.get(_ENGINE)
    if driver is not None:
        reply_end_ns = driver.end_ns if wait is None else min(driver.end_ns, wait.end_ns)
        own_turns = turns.get((driver.pid, driver.thread), [])
        intervals |= _driver_intervals(driver, engine, by_name, reply_end_ns, own_turns)
    elif wait is not None:
        intervals["driver"] = _Interval(wait.begin_ns, wait.end_ns)
    if driver is not None and wait is not None:
        intervals["result wake-up"] = _Interval(min(max(driver.end_ns, wait.begin_ns), wait.end_ns), wait.end_ns)
    if read is not None:
        intervals["client read"] = _Interval(read.begin_ns, read.end_ns)
    whole = execute or driver
    assert whole is not None
    begin_ns = (
        intervals["request wake-up"].begin_ns if execute is None and "request wake-up" in intervals else whole.begin_ns
    )
    sides = (("client", execute), ("worker", driver))
    threads = {side: (one.pid, one.thread) for side, one in sides if one is not None}
    return RequestStages(request, begin_ns, whole.end_ns - begin_ns, intervals, threads, engine, driver)


def _client_begin(by_name: Mapping[str, Slice], driver: Slice | None) -> Iterator[tuple[str, _Interval]]:
    write, wait = by_name.get(_WRITE), by_name.get(_WAIT) or by_name.get(WAKE_UP)
    if write is not None:  # the driver may have the request before the client's call that wakes it has returned
        end_ns = write.end_ns if driver is None else min(write.end_ns, driver.begin_ns)
        yield "client write", _Interval(write.begin_ns, max(write.begin_ns, end_ns))
    if driver is not None and wait is not None:
        yield "request wake-up", _Interval(min(wait.begin_ns, driver.begin_ns), driver.begin_ns)


def _driver_intervals(
    driver: Slice, engine: Slice | None, by_name: Mapping[str, Slice], reply_end_ns: int, turns: Sequence[Slice]
) -> dict[str, _Interval]:
    """Return the driver's stages. The reply ends when the client has seen it, perhaps before the driver's slice."""
    intervals, ready_ns = {}, driver.begin_ns
    for stage, name in (("decode", _DECODE), ("bind", _BIND)):
        one = by_name.get(name)
        intervals[stage] = _Interval(ready_ns, ready_ns) if one is None else _Interval(one.begin_ns, one.end_ns)
        ready_ns = max(ready_ns, intervals[stage].end_ns)
    if engine is not None:
        waited_ns = sum(_Interval(one.begin_ns, one.end_ns).inside(ready_ns, engine.begin_ns) for one in turns)
        begin_ns = max(ready_ns, engine.begin_ns)
        intervals["queue for cores"] = _Interval(ready_ns, ready_ns + waited_ns)
        intervals["engine start"] = _Interval(ready_ns + waited_ns, begin_ns)
        intervals["engine"] = _Interval(engine.begin_ns, engine.end_ns)
        intervals["reply"] = _Interval(engine.end_ns, max(engine.end_ns, reply_end_ns))
    return intervals


# ----------------------------------------------------------------------------------------------------------------------
# Explanations.


def explain(trace: Trace, count: int) -> list[Explanation]:
    """Return the slowest `count` requests, the slowest first, each with the usual times and the causes."""
    requests = requests_of(trace)
    if not requests:
        return []
    context = _Context(trace, requests)
    return [_explanation(context, request) for request in sorted(requests, key=lambda one: -one.total_ns)[:count]]


class _Context:
    """The context of all requests of a trace: usual times, and operations, pauses and requests by thread."""

    def __init__(self, trace: Trace, requests: Sequence[RequestStages]) -> None:
        self.trace = trace
        self.machine = replace(trace.machine, stops=list(_certain_stops(trace)))
        self.typical_ns = median_low(request.total_ns for request in requests)
        self.medians = _medians(requests)
        self.operations = _Operations(trace.slices)
        self.pauses: dict[Thread, list[Slice]] = defaultdict(list)
        for one in trace.slices:
            if one.name.startswith(PAUSED):
                self.pauses[one.pid, one.thread].append(one)
        self.driver_slices: dict[Thread, list[Slice]] = defaultdict(list)
        for driver in sorted((r.driver for r in requests if r.driver is not None), key=lambda one: one.begin_ns):
            self.driver_slices[driver.pid, driver.thread].append(driver)

    def pauses_of(self, request: RequestStages) -> list[Slice]:
        """Return the pauses of a request's worker: in the engine, or before it if that executes as a whole."""
        driver = request.driver
        if driver is None:
            return []
        found = self.pauses.get((driver.pid, driver.thread), [])
        return [one for one in found if one.begin_ns < driver.end_ns and one.end_ns > driver.begin_ns]


def _certain_stops(trace: Trace) -> Iterator[Stop]:
    """Yield the stops, each until the process recorded something again: a sampler sees its end later."""
    pids = {stop.pid for stop in trace.machine.stops}
    recorded: dict[int, list[int]] = defaultdict(list)
    for one in trace.slices:
        if one.pid in pids:
            # A wake-up begins when the client says so, whatever the worker does.
            recorded[one.pid] += [one.end_ns] if one.name == WAKE_UP else [one.begin_ns, one.end_ns]
    for times in recorded.values():
        times.sort()
    for stop in trace.machine.stops:
        times = recorded[stop.pid]
        after = bisect_right(times, stop.begin_ns)
        yield stop._replace(end_ns=min(stop.end_ns, times[after])) if after < len(times) else stop


def _medians(requests: Iterable[RequestStages]) -> dict[str, int]:
    times: dict[str, list[int]] = defaultdict(list)
    for request in requests:
        for name, duration_ns in request.stages.items():
            times[name].append(duration_ns)
    return {name: median_low(found) for name, found in times.items()}


def _explanation(context: _Context, request: RequestStages) -> Explanation:
    excess_ns = max(0, request.total_ns - context.typical_ns)
    of_sides = {side: _excess_of_side(context, request, side) for side in request.threads}
    division, found = ExcessDivision(excess_ns, of_sides), []
    parts: list[Cause] = []
    for side in request.threads:
        evidence = _evidence(context, request, side, division)
        found.append(evidence)
        parts += _parts(context, request, evidence)
    total_ns, off_cpu = max(request.total_ns, 1), _OffCpu(context, request, found)
    stages = [
        Stage(
            name,
            interval.duration_ns,
            interval.duration_ns / total_ns,
            context.medians[name],
            off_cpu.of_stage(name, interval),
        )
        for name, interval in request.intervals.items()
    ]
    operations = [
        Stage(
            name,
            interval.duration_ns,
            interval.duration_ns / total_ns,
            typical_ns,
            off_cpu.of_operation(interval, typical_ns),
        )
        for name, interval, typical_ns in context.operations.slowest(request.engine)
    ]
    return Explanation(request, excess_ns, stages, operations, named(_joined_stops(found, parts), excess_ns), found)


def _evidence(context: _Context, request: RequestStages, side: str, division: ExcessDivision) -> ThreadEvidence:
    """Return the evidence of what one thread did instead of running, and take it from the excess that is left."""
    trace, (pid, thread) = context.trace, request.threads[side]
    begin_ns, end_ns = request.begin_ns, request.end_ns
    take = partial(division.take, side=side)
    evidence = ThreadEvidence(side, (pid, thread))
    stopped_ns = context.machine.stopped_ns(pid, begin_ns, end_ns)
    evidence.stopped_ns = {how: taken for how, time_ns in stopped_ns.items() if (taken := take(time_ns))}
    if side == "worker":
        evidence.paused_ns = take(sum(one.duration_ns for one in context.pauses_of(request)))
    own = [
        times
        for times in trace.times
        if (times.pid, times.thread) == (pid, thread) and times.begin_ns < end_ns and times.end_ns > begin_ns
    ]
    evidence.waited_ns = take(sum(times.waited_ns for times in own))
    evidence.holders = context.machine.holders((pid, thread), begin_ns, end_ns, evidence.waited_ns)
    if side == "worker" and own:
        known_ns = sum(stopped_ns.values()) + sum(one.duration_ns for one in context.pauses_of(request))
        used_ns = sum(times.ran_ns + times.waited_ns for times in own) + known_ns
        handled_ns = _handled_ns(context.driver_slices[pid, thread], own[0].begin_ns, own[-1].end_ns)
        evidence.unknown_ns = take(handled_ns - used_ns)
    return evidence


def _excess_of_side(context: _Context, request: RequestStages, side: str) -> int:
    """Return by how much the stages of a side exceed their medians."""
    return sum(
        max(0, duration_ns - context.medians[name])
        for name, duration_ns in request.stages.items()
        if (name in _CLIENT_STAGES) == (side == "client")
    )


def _handled_ns(slices: Sequence[Slice], begin_ns: int, end_ns: int) -> int:
    """Return for how long a thread handled requests between two times; `slices` are these, in order."""
    first = bisect_left(slices, begin_ns, key=lambda one: one.end_ns)
    last = bisect_right(slices, end_ns, key=lambda one: one.begin_ns)
    return sum(_Interval(one.begin_ns, one.end_ns).inside(begin_ns, end_ns) for one in slices[first:last])


def _parts(context: _Context, request: RequestStages, evidence: ThreadEvidence) -> Iterator[Cause]:
    """Yield the causes that one thread's evidence shows, without stops."""
    machine = context.machine
    if evidence.paused_ns:
        yield Cause("pause", evidence.paused_ns, _pause_text(context, request, evidence))
    compiled_ns = sum(one.had_ns for one in evidence.holders if machine.processes.get(one.pid) in COMPILERS)
    if compiled_ns:
        text = f"{time_text(compiled_ns)} of the waits for a CPU of the {evidence.side} were for compile processes"
        yield Cause("compilation", compiled_ns, text)
    if evidence.waited_ns > compiled_ns:
        text = holders_text(evidence.holders, evidence.waited_ns, is_sampled=machine.is_sampled)
        yield wait_cause(evidence.side, evidence.waited_ns, evidence.waited_ns - compiled_ns, text)
    if evidence.unknown_ns:
        min_time = time_text(evidence.unknown_ns)
        text = f"the worker's listener thread neither ran nor waited for a CPU for at least {min_time}"
        reason = "it slept in the engine, for another thread of its pool or for a page"
        stopped = "" if machine.is_sampled else ", or was stopped: nobody looked, use `nnfmq trace`"
        yield Cause("off-cpu", evidence.unknown_ns, f"{text}: {reason}{stopped}")


def _pause_text(context: _Context, request: RequestStages, evidence: ThreadEvidence) -> str:
    """Return for whom a worker paused: those that used CPUs meanwhile, as far as somebody has looked."""
    pauses, machine = context.pauses_of(request), context.machine
    classes = sorted({one.name.removeprefix(PAUSED).strip() for one in pauses} - {""})
    for_whom = " and ".join(classes) or "for a client of a higher class"
    text = f"the worker paused for {time_text(evidence.paused_ns)} {for_whom}"
    used = Counter[int]()
    for pause in pauses:
        for use in machine.between(pause.begin_ns, pause.end_ns):
            if machine.processes.get(use.pid, "").startswith("nnfmq-worker") and use.pid != evidence.thread[0]:
                inside_ns = _Interval(use.begin_ns, use.end_ns).inside(pause.begin_ns, pause.end_ns)
                used[use.pid] += use.used_ns * inside_ns // max(use.end_ns - use.begin_ns, 1)
    names = [f"{machine.name_of(pid)} computed for {time_text(time_ns)}" for pid, time_ns in used.most_common(2)]
    return "; ".join([text, *names])


def _joined_stops(found: Sequence[ThreadEvidence], parts: list[Cause]) -> list[Cause]:
    """Return the causes with that of all stops."""
    stopped = {each.side: each.stopped_ns for each in found if each.stopped_ns}
    total_ns = sum(sum(hows.values()) for hows in stopped.values())
    return [*parts, stop_cause(stopped, total_ns)] if stopped else parts


class _OffCpu:
    """Divides what threads did instead of running among stages and operations.

    When a stop or a pause was is known. Of a wait for a CPU only its length is, so that is divided among what took
    longer than usual, the longest first.
    """

    def __init__(self, context: _Context, request: RequestStages, found: Sequence[ThreadEvidence]) -> None:
        self._context, self._request = context, request
        self._left = {each.side: each.waited_ns + each.unknown_ns for each in found}
        self._in_operations = self._left.get("worker", 0)
        self._stages = self._divided()

    def _divided(self) -> dict[str, int]:
        request, medians, found = self._request, self._context.medians, {}
        for name, interval in sorted(
            request.intervals.items(), key=lambda item: medians[item[0]] - item[1].duration_ns
        ):
            side = "client" if name in _CLIENT_STAGES else "worker"
            known_ns = self._known(side, interval)
            more_ns = min(self._left.get(side, 0), max(0, interval.duration_ns - known_ns - medians[name]))
            self._left[side] = self._left.get(side, 0) - more_ns
            found[name] = known_ns + more_ns
            if name == "engine":
                self._in_operations = more_ns
        return found

    def _known(self, side: str, interval: _Interval) -> int:
        """Return for how long a side was stopped, or paused, in a interval."""
        if side not in self._request.threads:
            return 0
        pid = self._request.threads[side][0]
        stopped = self._context.machine.stopped_ns(pid, interval.begin_ns, interval.end_ns)
        pauses = self._context.pauses_of(self._request) if side == "worker" else []
        return min(
            interval.duration_ns,
            sum(stopped.values()) + sum(interval.inside(one.begin_ns, one.end_ns) for one in pauses),
        )

    def of_stage(self, name: str, _interval: _Interval) -> int:
        return self._stages[name]

    def of_operation(self, interval: _Interval, typical_ns: int) -> int:
        known_ns = self._known("worker", interval)
        more_ns = min(self._in_operations, max(0, interval.duration_ns - known_ns - typical_ns))
        self._in_operations -= more_ns
        return known_ns + more_ns


class _Operations:
    """The operations of a trace by thread, and their medians."""

    def __init__(self, slices: Sequence[Slice]) -> None:
        self._threads: dict[Thread, list[Slice]] = defaultdict(list)
        times: dict[tuple[int, str], list[int]] = defaultdict(list)
        for one in slices:
            if one.name.startswith(_OPERATION):
                self._threads[one.pid, one.thread].append(one)
                times[one.pid, one.name].append(one.duration_ns)
        self._medians = {key: median_low(found) for key, found in times.items()}

    def slowest(self, engine: Slice | None) -> list[tuple[str, _Interval, int]]:
        """Return the slowest operations within the engine's slice: name, interval, and the usual time."""
        if engine is None:
            return []
        found = self._threads.get((engine.pid, engine.thread), [])
        first = bisect_left(found, engine.begin_ns, key=lambda one: one.begin_ns)
        last = bisect_right(found, engine.end_ns, key=lambda one: one.begin_ns)
        within = [one for one in found[first:last] if one.end_ns <= engine.end_ns]
        within.sort(key=lambda one: -one.duration_ns)
        return [
            (one.name.removeprefix(_OPERATION), _Interval(one.begin_ns, one.end_ns), self._medians[one.pid, one.name])
            for one in within[:_SLOWEST_OPERATIONS]
        ]
