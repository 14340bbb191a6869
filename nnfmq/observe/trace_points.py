"""The trace points of this process: they write slices to one ring while `TRACING.recorder` is not None.

Hot paths look at `TRACING.recorder`, which costs a few nanoseconds, and use its `ring`; others use `recorded`. A name
is AOSP's tag, `[NN_<layer>_<phase>]`, and a detail; `phase_table` has the layers and the phases. (OBS-7)
"""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Iterable
from time import monotonic_ns, thread_time_ns
from typing import TYPE_CHECKING

from nnfmq.hal.client_class import ClientClass
from nnfmq.observe.trace_layout import BURST_OF, PAUSED, RAN, STANDARD_NAMES, WAITED

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from nnfmq.observe.trace_core import StepTrace

__all__ = ["TRACING", "TraceRecorder", "recorded"]

_SCHEDSTAT = "/proc/thread-self/schedstat"


class TraceRecorder:
    """Writes this process's slices to a ring in `region`, which it borrows until `close`. Thread-safe.

    `ring` is for hot paths; ids of names come from `id_of`.
    """

    def __init__(self, region: Buffer, label: str) -> None:
        from nnfmq.observe.trace_core import TraceRing  # few processes record

        self.ring = TraceRing(region, os.getpid(), label.encode("utf-8", "replace"))
        self._ids = {name: number for number, name in enumerate(STANDARD_NAMES, 1)}
        self._lock = threading.Lock()
        # By thread: when it was sampled, and for how long it had run and waited until then.
        self._times: dict[int, tuple[int, int, int]] = {}

    def id_of(self, name: str) -> int:
        """Return the id of a name, a new one if the ring does not have it; 0 if it is full of names."""
        with self._lock:
            known = self._ids.get(name)
            if known is None:
                known = self._ids[name] = self.ring.add_name(name.encode("utf-8", "replace")[:0xFFFF])
        return known

    def ids_of(self, names: Iterable[str]) -> bytes:
        """Return the id of each name as u32; 0, which records nothing, for an empty one."""
        return array("I", (self.id_of(name) if name else 0 for name in names)).tobytes()

    def steps(self, names: Iterable[str]) -> StepTrace:
        """Return a recorder of steps with these names."""
        from nnfmq.observe.trace_core import StepTrace  # as above

        return StepTrace(self.ring, self.ids_of(names))

    def slice(self, name: str, begin_ns: int, end_ns: int, request: int = 0) -> None:
        """Record a slice of this thread."""
        self.ring.slice(self.id_of(name), request, begin_ns, end_ns)

    def pauses(self, found: Iterable[tuple[int, int, int]]) -> None:
        """Record pauses of this thread: begin, end, and the class for which it paused."""
        for begin_ns, end_ns, for_class in found:
            self.slice(f"{PAUSED} for {ClientClass(for_class).name.lower()} clients", begin_ns, end_ns)

    def burst(self, model: str, request: int) -> None:
        """Record what the client calls the model of a burst, whose request with the number 0 has the id `request`."""
        now_ns = monotonic_ns()
        self.slice(f"{BURST_OF}{model}", now_ns, now_ns, request)

    def sample_times(self) -> None:
        """Record for how long this thread has run, and waited for a CPU (schedstat), since the last sample of it."""
        try:
            with open(_SCHEDSTAT, "rb") as file:
                waited_ns = int(file.read().split()[1])
        except (OSError, IndexError, ValueError):  # a kernel without CONFIG_SCHED_INFO
            return
        # Not from schedstat, which counts the time of a thread that runs up to the last tick only.
        thread, now_ns, ran_ns = threading.get_ident(), monotonic_ns(), thread_time_ns()
        then_ns, ran_before_ns, waited_before_ns = self._times.get(thread, (0, 0, 0))
        self._times[thread] = now_ns, ran_ns, waited_ns
        if then_ns:
            self.ring.slice(self._ids[WAITED], waited_ns - waited_before_ns, then_ns, now_ns)
            self.ring.slice(self._ids[RAN], ran_ns - ran_before_ns, then_ns, now_ns)

    def close(self) -> None:
        """Release the region. Idempotent."""
        self.ring.close()


class _Tracing:
    """The recorder of this process, `recorder`; None if it records nowhere."""

    __slots__ = ("recorder",)

    def __init__(self) -> None:
        self.recorder: TraceRecorder | None = None

    def start(self, recorder: TraceRecorder) -> None:
        """Record to `recorder` from now on; a previous one is closed."""
        previous, self.recorder = self.recorder, recorder
        if previous is not None:
            previous.close()

    def stop(self) -> None:
        """Record nothing any more, and close the recorder. Idempotent."""
        previous, self.recorder = self.recorder, None
        if previous is not None:
            previous.close()

    def forget(self) -> None:
        """Record nothing in a forked child: the ring has one writer, the parent."""
        self.recorder = None


TRACING = _Tracing()
os.register_at_fork(after_in_child=TRACING.forget)


class recorded:
    """`with recorded(name):` records what the block took, if this process records at its end."""

    __slots__ = ("_begin_ns", "_name", "_request")

    def __init__(self, name: str, request: int = 0) -> None:
        self._name = name
        self._request = request

    def __enter__(self) -> None:
        self._begin_ns = monotonic_ns()

    def __exit__(self, *_: object) -> None:
        if TRACING.recorder is not None:
            TRACING.recorder.slice(self._name, self._begin_ns, monotonic_ns(), self._request)
