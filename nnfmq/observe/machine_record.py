"""A record of the machine's other work during requests: who used the CPUs, and which processes were stopped.

`lab.machine_sampler` records it, a trace may have it (`trace_files`), and `causes` names who had the CPU for which a
thread waited. Arithmetic only: times are nanoseconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType
from typing import Final, NamedTuple

__all__ = ["STOPS", "CpuHolder", "CpuUse", "MachineRecord", "Stop"]

STOPS: Final = MappingProxyType(
    {
        "stopped": "stopped by a signal (state T)",
        "traced": "stopped by a debugger (state t)",
        "frozen": "frozen with its control group",
    }
)
"""How a process may be kept from running, in words."""

_LOOK_BACK_NS = 100_000_000  # a thread that waits has last run on the CPU on which it waits
_END = attrgetter("end_ns")


class CpuUse(NamedTuple):
    """The CPU time `used_ns` of a thread from `begin_ns` to `end_ns`, and the CPUs on which it was seen.

    `thread` is 0 if it is not known which threads of the process used it; `cpus` is empty if these are not known.
    """

    pid: int
    thread: int
    begin_ns: int
    end_ns: int
    used_ns: int
    cpus: tuple[int, ...] = ()


class Stop(NamedTuple):
    """From `begin_ns` to `end_ns` a process was kept from running; `how` is a key of STOPS."""

    pid: int
    begin_ns: int
    end_ns: int
    how: str


class CpuHolder(NamedTuple):
    """For how long a thread had the CPU for which another one waited; `name` has its process and its role.

    `thread` is 0 for all threads of a process that have no name of their own.
    """

    name: str
    pid: int
    thread: int
    had_ns: int


@dataclass(slots=True)
class MachineRecord:
    """Uses of CPUs in the order of their ends, stops, names of processes and of threads, by pid, and by pid and thread.

    `is_sampled` is False if nobody looked: then nothing is known, while an empty record of a sampler tells that no
    process used much.
    """

    uses: list[CpuUse] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)
    processes: dict[int, str] = field(default_factory=dict)
    threads: dict[tuple[int, int], str] = field(default_factory=dict)
    is_sampled: bool = False

    def name_of(self, pid: int, thread: int = 0) -> str:
        """Return the name of a process with its pid, and the role of the thread if that has a name of its own."""
        role = self.threads.get((pid, thread))
        name = f"{self.processes.get(pid, 'process')} ({pid})"
        return name if role is None else f"{name}, thread {role}"

    def between(self, begin_ns: int, end_ns: int) -> Iterator[CpuUse]:
        """Yield the uses that are at least partly between two times."""
        for number in range(bisect_left(self.uses, begin_ns, key=_END), len(self.uses)):
            if self.uses[number].begin_ns < end_ns:
                yield self.uses[number]

    def cpus_of(self, thread: int, begin_ns: int, end_ns: int) -> set[int]:
        """Return the CPUs on which a thread was seen then, or shortly before; empty if that is not known."""
        uses = self.between(begin_ns - _LOOK_BACK_NS, end_ns)
        return {cpu for use in uses if use.thread == thread for cpu in use.cpus}

    def holders(
        self, waiter: tuple[int, int], begin_ns: int, end_ns: int, waited_ns: int, cpus: Collection[int] | None = None
    ) -> list[CpuHolder]:
        """Return the holders of the CPU for which a thread waited for `waited_ns` between two times, the longest first.

        `waiter` is its pid and its id, 0 for any thread of the process. `cpus` are those on which it may run; by
        default those on which it was seen. Together the holders had it no longer than the thread waited. Who had it for
        less than a twentieth of that is left out.
        """
        pid, thread = waiter
        own = set(cpus) if cpus is not None else self.cpus_of(thread, begin_ns, end_ns)
        used = Counter[tuple[int, int]]()
        for use in self.between(begin_ns, end_ns):
            is_own = use.thread == thread if thread else use.pid == pid
            if is_own or (own and use.cpus and own.isdisjoint(use.cpus)):
                continue
            inside_ns = min(end_ns, use.end_ns) - max(begin_ns, use.begin_ns)
            key = (use.pid, use.thread) if (use.pid, use.thread) in self.threads else (use.pid, 0)
            used[key] += use.used_ns * inside_ns // max(use.end_ns - use.begin_ns, 1)
        share = min(1.0, waited_ns / max(sum(used.values()), 1))
        found = [(key, round(used_ns * share)) for key, used_ns in used.most_common()]
        return [CpuHolder(self.name_of(*key), *key, had) for key, had in found if had * 20 >= waited_ns > 0]

    def stopped_ns(self, pid: int, begin_ns: int, end_ns: int) -> dict[str, int]:
        """Return for how long a process was kept from running between two times, by how."""
        found: Counter[str] = Counter()
        for stop in self.stops:
            inside_ns = min(end_ns, stop.end_ns) - max(begin_ns, stop.begin_ns)
            if stop.pid == pid and inside_ns > 0:
                found[stop.how] += inside_ns
        return dict(found)
