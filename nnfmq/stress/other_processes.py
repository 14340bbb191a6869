"""CPU time of the processes that take no part in a trial: whether the machine was as idle as the trial assumes."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import suppress

from nnfmq.measure.cpu_pinning import cpu_ns
from nnfmq.observe.process_usage import descendants

__all__ = ["OtherProcesses"]


class OtherProcesses:
    """Measures the CPU time of all processes but `roots`, this one, and what these have started.

    Kernel threads count. What a process used that has exited since does not, nor that of processes in other pid
    namespaces. Making one, and `used_ns`, take about 1 ms for 100 processes.
    """

    def __init__(self, roots: Collection[int]) -> None:
        self._roots = {os.getpid(), *roots}
        self._before = dict(self._times())

    def used_ns(self) -> int:
        """Return the CPU time in ns that they have used since this object was made."""
        return sum(max(0, used - self._before.get(pid, 0)) for pid, used in self._times())

    def _times(self) -> Iterator[tuple[int, int]]:
        own = self._roots.union(*map(descendants, self._roots))
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) not in own:
                with suppress(OSError):  # it has exited
                    yield int(name), cpu_ns(int(name))
