"""The causes of a slow request, each from evidence: what `nnfmq why` and `nnfmq stress` have in common.

What a request took beyond the usual is its *excess*. Each piece of evidence explains a part of it, no more than is
left: time counts once, so a cause never explains more than the request took. A cause is named if it explains a fifth of
the excess. Pure arithmetic: it does not know what disturbed the machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from nnfmq.observe.machine_record import STOPS, CpuHolder

__all__ = [
    "CAUSES",
    "COMPILERS",
    "NAMED_SHARE",
    "SIDES",
    "UNKNOWN",
    "Cause",
    "ExcessDivision",
    "holders_text",
    "named",
    "stop_cause",
    "wait_cause",
]

CAUSES: Final = MappingProxyType(
    {
        "cpu-client": "other tasks on the client's CPU",
        "cpu-worker": "other tasks on the worker's CPU",
        "memory": "memory pressure",
        "throttling": "a CPU limit (cpu.max)",
        "compilation": "a compilation in the driver",
        "gc": "garbage collection in the client",
        "page-faults": "page faults of new memory",
        "stops": "stopped by a signal, a debugger or its control group",
        "pause": "the worker paused for a client of a higher class",
        "off-cpu": "the worker neither ran nor waited for a CPU",
        "backlog": "the requests before it took longer than the time between two starts",
        "measurement": "this command itself, which records who uses the CPUs",
    }
)
"""Name → description."""
UNKNOWN: Final = "unknown"
SIDES: Final = MappingProxyType({"client": "the application's thread", "worker": "the worker's listener thread"})
"""A side of a request → the thread that executes it there."""
COMPILERS: Final = ("nnfmq-compilers", "nnfmq-compiler")
NAMED_SHARE: Final = 0.2
_SHOWN = 3  # who had a CPU


class Cause(NamedTuple):
    """A cause, a key of CAUSES, the part of the excess that it explains, in ns, and the numbers that show it."""

    name: str
    explained: int
    evidence: str


class ExcessDivision:
    """Divides a request's excess among the evidence: what explains it is taken first, and no more than is left.

    `excess_ns` is that of the request; `of_sides`, if it is known, that of what happened on each side of SIDES.
    """

    def __init__(self, excess_ns: int, of_sides: Mapping[str, int] = MappingProxyType({})) -> None:
        self.left_ns = max(excess_ns, 0)
        self._of_sides = dict(of_sides)

    def take(self, time_ns: float, side: str = "") -> int:
        """Return how much of the excess so much time explains, on this side if it is of one, and subtract it."""
        left_ns = min(self.left_ns, self._of_sides.get(side, self.left_ns))
        taken = min(left_ns, max(round(time_ns), 0))
        self.left_ns -= taken
        if side in self._of_sides:
            self._of_sides[side] -= taken
        return taken


def named(parts: Iterable[Cause], excess_ns: int, share: float = NAMED_SHARE) -> tuple[Cause, ...]:
    """Return the causes that explain enough of an excess to be named, the largest first."""
    return tuple(sorted((p for p in parts if p.explained >= max(share * excess_ns, 1)), key=lambda p: -p.explained))


def stop_cause(stopped_ns: Mapping[str, Mapping[str, int]], explained_ns: int) -> Cause:
    """Return the cause of stops; `stopped_ns` has for each side how it was stopped, a key of STOPS, and how long."""
    texts = [
        f"the {side} was {STOPS[how]} for at least {time_text(time_ns)}"
        for side, hows in stopped_ns.items()
        for how, time_ns in hows.items()
    ]
    return Cause("stops", explained_ns, "; ".join(texts))


def wait_cause(side: str, waited_ns: int, explained_ns: int, holders: str) -> Cause:
    """Return the cause of a wait for a CPU on a side of SIDES; `holders` says who had it (`holders_text`)."""
    text = f"{SIDES[side]} waited {time_text(waited_ns)} for a CPU (schedstat)"
    return Cause(f"cpu-{side}", explained_ns, f"{text}; {holders}" if holders else text)


def holders_text(holders: Sequence[CpuHolder], waited_ns: int, *, is_sampled: bool) -> str:
    """Return the holders of a CPU meanwhile, in words; also the time of which they are not known."""
    if not is_sampled:
        return "who had it was not recorded"
    if not holders:
        return "who had it is not known: no process used much of it"
    texts = [f"{holder.name} had it for {time_text(holder.had_ns)}" for holder in holders[:_SHOWN]]
    unknown_ns = waited_ns - sum(holder.had_ns for holder in holders)
    if unknown_ns * 5 > waited_ns:
        texts.append(f"nobody known for {time_text(unknown_ns)}")
    return ", ".join(texts)


def time_text(duration_ns: float) -> str:
    """Return a duration in ms, or in µs if it is below 1 ms."""
    return f"{duration_ns / 1e6:,.1f} ms" if duration_ns >= 1e6 else f"{duration_ns / 1e3:.0f} µs"
