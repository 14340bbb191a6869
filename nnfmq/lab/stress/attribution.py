"""Name the causes of slow requests from records. Pure arithmetic, without I/O and without knowledge of disturbances.

The *usual* latency is the first decile: a disturbance that affects most requests would raise the median. A request is
slow if it exceeds the usual latency by a factor and by an amount. What exceeds it is the *excess*. Evidence divides it
among causes (`observe.causes`): time stopped, time throttled, CPU time of compile processes, time waiting for a CPU,
time in the garbage collector, faults. Time counts once: a throttled thread also waits for a CPU, so the throttled time
is subtracted from that wait. If nothing explains a fifth of the excess, the request has no named cause. The causes of a
load are named by the sums of what explains all of its slow requests.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter

from nnfmq.lab.statistics import percentile
from nnfmq.lab.stress.records import RequestRecord, StressSample
from nnfmq.observe.causes import NAMED_SHARE, Cause, ExcessDivision, named, stop_cause, time_text, wait_cause

__all__ = [
    "NAMED_MIN_NS",
    "SlowRequest",
    "Thresholds",
    "WhoHadCpu",
    "largest_part",
    "named_causes",
    "slow_requests",
    "worst_requests",
]

_PAGE_FAULTS_MIN = 16  # more than usual: fewer are noise of any program
_MINOR_FAULT_NS = 250  # of a page of 4 KiB, on a fast machine
_STALL_SHARE = 0.1
_USUAL = 10  # percent
NAMED_MIN_NS = 10_000_000
"""A cause is named for a load if it explains as much in total: every machine has requests that take longer."""
_LOAD_SHARE = 1 / 30
_TIME, _READ = attrgetter("time"), attrgetter("read")
_TOTALS = StressSample._fields[StressSample._fields.index("client_throttled") :]
WhoHadCpu = Callable[[str, RequestRecord, int], tuple[str, int]]
"""Says in words who had the CPU for which a side, `client` or `worker`, waited for so many ns in a request.

And for how many of these the process had it that measures.
"""
_MEASUREMENT = "measurement"


def _nobody_looked(_side: str, _record: RequestRecord, _waited_ns: int) -> tuple[str, int]:
    return "", 0


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Slow: more than `factor` times the usual, and `excess` ns above it. A cause explains a `share` of the excess."""

    factor: float = 3.0
    excess: int = 2_000_000
    share: float = NAMED_SHARE


@dataclass(frozen=True, slots=True)
class SlowRequest:
    """A slow request, what exceeds the usual latency, and its causes, the largest first; none if evidence lacks.

    `parts` are all pieces of evidence, also those that explain too little of this request to be a cause of it.
    """

    record: RequestRecord
    excess: int
    causes: tuple[Cause, ...]
    parts: tuple[Cause, ...] = ()


@dataclass(frozen=True, slots=True)
class _Usual:
    """First deciles of all requests."""

    latency: int
    client_cpu: int
    worker_cpu: int
    client_minor_faults: int
    worker_minor_faults: int

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> _Usual:
        names = ("latency", "client_cpu", "worker_cpu", "client_minor_faults", "worker_minor_faults")
        return cls(*(percentile(sorted(getattr(record, name) for record in records), _USUAL) for name in names))


@dataclass(frozen=True, slots=True)
class _Between:
    """The sampler's readings during a request."""

    client_stopped: Mapping[str, int] = field(default_factory=dict)
    worker_stopped: Mapping[str, int] = field(default_factory=dict)
    client_throttled: int = 0
    worker_throttled: int = 0
    compiling: int = 0
    compiling_client: int = 0
    compiling_worker: int = 0
    memory_stall: int = 0


def slow_requests(
    records: Sequence[RequestRecord],
    samples: Sequence[StressSample],
    thresholds: Thresholds | None = None,
    who_had_cpu: WhoHadCpu = _nobody_looked,
) -> list[SlowRequest]:
    """Return the slow requests with their causes, in the order of `records`.

    `samples` are in order of time.
    """
    if not records:
        return []
    limits, usual, found = thresholds or Thresholds(), _Usual.of(records), []
    for record in records:
        excess = round(record.latency - usual.latency)
        if record.latency > limits.factor * usual.latency and excess > limits.excess:
            parts = tuple(_parts(record, _between(samples, record), usual, excess, who_had_cpu))
            found.append(SlowRequest(record, excess, named(parts, excess, limits.share), parts))
    return found


def named_causes(slow: Sequence[SlowRequest]) -> dict[str, int]:
    """Return the causes of a load's slow requests, and the time in ns that each explains, the largest first.

    What explains a small part of each of many requests counts, too: a CPU limit, for one, makes requests so slow that
    anything else is less than a fifth of each. Causes of less than 10 ms, or less than a thirtieth of all excess, are
    not named: every machine has some. What the measurement takes itself is none of the load's.
    """
    explained: Counter[str] = Counter()
    for request in slow:
        for cause in request.parts:
            if cause.name != _MEASUREMENT:
                explained[cause.name] += cause.explained
    minimum = max(NAMED_MIN_NS, _LOAD_SHARE * sum(request.excess for request in slow))
    return {name: time for name, time in explained.most_common() if time >= minimum}


def largest_part(slow: Sequence[SlowRequest], name: str) -> Cause:
    """Return the evidence `name` of the request of which it explains most. Some request must have it."""
    parts = (part for request in slow for part in request.parts if part.name == name)
    return max(parts, key=lambda part: part.explained)


def worst_requests(slow: Sequence[SlowRequest], count: int) -> list[SlowRequest]:
    """Return the slowest request of each largest cause and of those without one, then others, up to `count`."""
    ordered = sorted(slow, key=lambda request: -request.record.latency)
    firsts: dict[str, SlowRequest] = {}
    for request in ordered:
        firsts.setdefault(request.causes[0].name if request.causes else "", request)
    chosen = list(firsts.values())
    chosen += [request for request in ordered if request not in chosen][: max(0, count - len(chosen))]
    return sorted(chosen[:count], key=lambda request: -request.record.latency)


# ---- the sampler's evidence


def _between(samples: Sequence[StressSample], record: RequestRecord) -> _Between:
    """Return the increases between the last sample before the request and the first one after it.

    A sample is before the request if all of it was read before, and after it if nothing was read before its end.
    """
    first = max(0, bisect_right(samples, record.begin, key=_READ) - 1)
    last = min(len(samples) - 1, bisect_left(samples, record.end, key=_TIME))
    if not samples or first >= last:
        return _Between()
    before, after = samples[first], samples[last]
    during = samples[first : last + 1]
    return _Between(
        _stopped(during, record, "client_stop"),
        _stopped(during, record, "worker_stop"),
        *(getattr(after, name) - getattr(before, name) for name in _TOTALS),
    )


def _stopped(during: Sequence[StressSample], record: RequestRecord, name: str) -> Mapping[str, int]:
    """Return the time of the request between a sample that saw a process stopped and the next sample, by how."""
    found: Counter[str] = Counter()
    for sample, following in pairwise(during):
        if how := getattr(sample, name):
            found[how] += max(0, min(following.time, record.end) - max(sample.time, record.begin))
    return +found


# ---- the division of the excess


def _parts(
    record: RequestRecord, seen: _Between, usual: _Usual, excess: int, who_had_cpu: WhoHadCpu
) -> Iterator[Cause]:
    division = ExcessDivision(excess)
    yield from _stops(seen, division)
    yield from _throttling(record, seen, division)
    yield from _waits(record, seen, division, who_had_cpu)
    yield from _collections(record, division)
    yield from _page_faults(record, usual, division)
    yield from _backlog(record, division)  # what delayed the request before, and this one with it, is named already
    yield from _memory(record, seen, division)


def _stops(seen: _Between, division: ExcessDivision) -> Iterator[Cause]:
    sides = {"client": seen.client_stopped, "worker": seen.worker_stopped}
    total = sum(sum(times.values()) for times in sides.values())
    if total:
        yield stop_cause(sides, division.take(total))


def _throttling(record: RequestRecord, seen: _Between, division: ExcessDivision) -> Iterator[Cause]:
    """Explain the waits for a CPU up to the time for which the thread's cgroup was throttled.

    A throttled thread waits for a CPU, as the scheduler counts (Linux 6.18). So one that did not wait was not throttled
    in this request: its cgroup was before it or after it, or while the thread had nothing to do.
    """
    client = min(_waited(record, record.client_delay), seen.client_throttled)
    worker = min(_waited(record, record.worker_delay), seen.worker_throttled)
    if total := client + worker:
        who = " and ".join(_who((client, worker)))
        text = f"the {who} waited {time_text(total)} while throttled by a CPU limit (cpu.stat, schedstat)"
        yield Cause("throttling", division.take(total), text)


def _waited(record: RequestRecord, delay: int) -> int:
    """Return the time of a request for which a thread waited; the scheduler counts also what was before the request."""
    return min(delay, record.latency)


def _who(times: tuple[int, int]) -> Iterator[str]:
    yield from (name for name, time in zip(("client", "worker"), times, strict=True) if time)


def _waits(record: RequestRecord, seen: _Between, division: ExcessDivision, who_had_cpu: WhoHadCpu) -> Iterator[Cause]:
    """Divide the waits for a CPU among compile processes, up to their CPU time there, and other tasks.

    A stopped thread does not wait for a CPU, but a throttled one does, as the scheduler counts (Linux 6.18).
    """
    compiled, measured, details = 0, 0, []
    for name, delay, throttled, used in (
        ("client", record.client_delay, seen.client_throttled, seen.compiling_client),
        ("worker", record.worker_delay, seen.worker_throttled, seen.compiling_worker),
    ):
        waited = max(0, _waited(record, delay) - throttled)
        behind = division.take(min(waited, used))
        compiled += behind
        if behind:
            details.append(f"{name} {time_text(waited)}")
        holders, own = who_had_cpu(name, record, waited) if waited > behind else ("", 0)
        measured += (of_measurement := division.take(min(own, waited - behind)))
        if explained := division.take(waited - behind - of_measurement):
            yield wait_cause(name, waited, explained, holders)
    if compiled:
        text = f"compilations used {time_text(seen.compiling)} of CPU time; waits for a CPU: {', '.join(details)}"
        yield Cause("compilation", compiled, text)
    if measured:
        yield Cause(_MEASUREMENT, measured, f"this command's own process had the CPU for {time_text(measured)}")


def _collections(record: RequestRecord, division: ExcessDivision) -> Iterator[Cause]:
    if record.gc:
        text = f"{time_text(record.gc)} in the client's garbage collector (gc.callbacks)"
        yield Cause("gc", division.take(record.gc), text)


def _page_faults(record: RequestRecord, usual: _Usual, division: ExcessDivision) -> Iterator[Cause]:
    """Explain more CPU time than usual by faults: by system time, or the least time of so many faults.

    The kernel counts system time in ticks, too coarsely for a few faults. A fault of a huge page takes a thousand times
    as long as that of a small one, so the number of faults alone would explain too little.
    """
    for name, cpu, system, page_faults in (
        ("client", record.client_cpu - usual.client_cpu - record.gc, record.client_system,
         record.client_minor_faults - usual.client_minor_faults),
        ("worker", record.worker_cpu - usual.worker_cpu, 0,
         record.worker_minor_faults - usual.worker_minor_faults),
    ):  # fmt: skip
        if page_faults >= _PAGE_FAULTS_MIN:
            explained = division.take(min(cpu, max(system, page_faults * _MINOR_FAULT_NS)))
            yield Cause(
                "page-faults", explained, f"{name}: {page_faults:,.0f} minor faults, {time_text(cpu)} more CPU time"
            )


def _backlog(record: RequestRecord, division: ExcessDivision) -> Iterator[Cause]:
    if explained := division.take(record.late):
        yield Cause("backlog", explained, f"sent {time_text(record.late)} late, when the request before had ended")


def _memory(record: RequestRecord, seen: _Between, division: ExcessDivision) -> Iterator[Cause]:
    """Explain time off the CPU that nothing else explains by pages that had to be read or reclaimed."""
    page_faults = record.client_major_faults + record.worker_major_faults
    off_cpu = record.latency - record.late - record.client_cpu - record.client_delay
    if record.worker_major_faults:
        off_cpu = max(off_cpu, record.latency - record.late - record.worker_cpu - record.worker_delay)
    stall = seen.memory_stall if seen.memory_stall >= _STALL_SHARE * record.latency else 0
    if explained := division.take(off_cpu if page_faults else min(stall, off_cpu)):
        yield Cause(
            "memory", explained, f"{page_faults:,} major faults, memory stalls (PSI) {time_text(seen.memory_stall)}"
        )
