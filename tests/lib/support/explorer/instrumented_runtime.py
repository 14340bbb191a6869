"""The instrumented environment of the Python core: memory, atomic operations, futex and clock that stop at each step.

`Machine` compiles the Python core's source (with a bug, if a test seeds one), and replaces its regions, addresses,
system calls and clock by instrumented objects. Each access becomes an operation, a plain tuple, that is passed to the
current `Run`, which returns the result from the history that it replays or stops the program with `Stopped`. The
queue's algorithm is not repeated here, nor is `futex.py`, which runs over a modelled system call.

Operations:  ("load", place, is_acquire)  ("copy", place: a byte of payload)  ("store", place, value, is_release)
             ("or" | "and", place, operand)  ("wait", place, expected, has_deadline, mask)  ("wake", place, mask)
             ("clock",)  ("death", process: go on once it is dead)  ("resolve",: the bytes behind the copies)
"""

from __future__ import annotations

import ctypes
import linecache
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from errno import ETIMEDOUT
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from nnfmq.queue import _pycore, futex, layout
from nnfmq.queue.event_flag import PeerDeathFlag

Op = tuple[Any, ...]

LIMIT_NS = 10**9  # the deadline of a call that has one; the clock shows less until it passes
_WAKE_OP, _WAIT_BITSET, _WAKE_BITSET = 5, 9, 10
_WORD_BYTES = {"B": 1, "H": 2, "I": 4, "Q": 8}


class Stopped(BaseException):
    """The program has reached an operation whose result is not in the history."""


@dataclass(frozen=True)
class SeededBug:
    """One change to `_pycore.py` or `futex.py`: `old`, which must be there exactly once, becomes `new`."""

    old: str
    new: str
    module: str = "_pycore"


@dataclass(frozen=True)
class QueueShape:
    """A queue of the scenario. Its counters start at `start` records, as if it had been in use.

    After an overflow of an unsynchronized one, the reader keeps `history` records.
    """

    quantum: int
    count: int
    start: int = 0
    unsynchronized: bool = False
    history: int = 0


class Run:
    """One run of a call: operations return the results in `history`, and the next one stops the program."""

    __slots__ = ("copies", "expired", "has_deadline", "history", "position", "ticks", "waits_for")

    def __init__(self, history: Sequence[Any], has_deadline: bool) -> None:
        self.history = history
        self.has_deadline = has_deadline
        self.position = self.ticks = self.copies = 0
        self.expired = False
        self.waits_for: Op | None = None

    def perform(self, op: Op) -> Any:
        """Return the operation's result from the history, or stop."""
        if self.waits_for is not None:
            raise Stopped  # a `finally` on the way out
        if self.position == len(self.history):
            self.waits_for = op
            raise Stopped
        self.position += 1
        return self.history[self.position - 1]

    def copy(self, place: int) -> int:
        """Return a byte of a record, or the index of a load that is done later."""
        self.copies += 1
        return int(self.perform(("copy", place)))

    def clock(self) -> int:
        """Return the time: the number of readings, so that polling ends, plus LIMIT_NS after the deadline."""
        self.ticks += 1
        if self.has_deadline and not self.expired:
            self.expired = self.perform(("clock",))
        return self.ticks + LIMIT_NS * self.expired

    def slept(self, error: int) -> int:
        """Record how a sleep ended, and return it."""
        self.expired = self.expired or error == ETIMEDOUT
        return error


class View:
    """Stands in for a memoryview of shared memory; each access of an item is a step."""

    __slots__ = ("region", "size", "start", "stop")
    readonly = False

    def __init__(self, region: Region, start: int, stop: int, size: int = 1) -> None:
        self.region, self.start, self.stop, self.size = region, start, stop, size

    def cast(self, kind: str) -> View:
        return View(self.region, self.start, self.stop, _WORD_BYTES[kind])

    def release(self) -> None:
        """Do nothing: closing is not explored."""

    def __len__(self) -> int:
        return (self.stop - self.start) // self.size

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            start, stop, _ = key.indices(len(self))
            return View(self.region, self.start + start, self.start + max(start, stop))
        return self.region.run.perform(("load", self._place(key), _has_label()))

    def __setitem__(self, key: Any, value: Any) -> None:
        run, is_release = self.region.run, _has_label()
        if isinstance(key, slice):
            target = self[key]
            assert len(target) == len(value), "memoryview rejects this"
            for at, byte in zip(range(target.start, target.stop), value, strict=True):
                run.perform(("store", self.region.places[at, 1], byte, is_release))
            return
        run.perform(("store", self._place(key), value, is_release))

    def __bytes__(self) -> bytes:
        run, places = self.region.run, self.region.places
        return bytes(run.copy(places[at, 1]) for at in range(self.start, self.stop))

    tobytes = __bytes__

    def __radd__(self, left: bytes) -> bytes:
        return left + bytes(self)

    def _place(self, index: int) -> int:
        return self.region.places[self.start + index * self.size, self.size]


class Region(View):
    """The memory of one queue; `places` maps (offset, size) of every word and byte to its index in the state."""

    __slots__ = ("machine", "places")

    def __init__(self, machine: Machine, size: int) -> None:
        super().__init__(self, 0, size)
        self.machine = machine
        self.places: dict[tuple[int, int], int] = {}

    @property
    def run(self) -> Run:
        return self.machine.run


def _has_label() -> bool:
    """Return whether the line of the Python core that is being executed has a SYNC label."""
    frame = sys._getframe(2)
    return "# SYNC" in linecache.getline(frame.f_code.co_filename, frame.f_lineno)


class Machine:
    """Shared memory and the private words of processes, and the queue's code compiled to run on them."""

    def __init__(
        self, shapes: Sequence[QueueShape], processes: Sequence[str], bugs: Sequence[SeededBug] = (),
        atomics: str = "libatomic",
    ) -> None:  # fmt: skip
        self.run = Run((), False)
        self.initial: list[int] = []
        self.names: list[str] = []
        self.glued: set[int] = set()  # places of a process's own words: Python reads and then writes them in one go
        self.payload: set[int] = set()
        self.layouts = [layout.compute_layout(shape.quantum, shape.count) for shape in shapes]
        self.regions = [self._region(i, shape) for i, shape in enumerate(shapes)]
        self.flags = {process: self._own(f"{process}.dead", 4) for process in processes}
        self.shapes = shapes
        self.positions = {
            (p, i): self._own(f"{p}.r{i}", 8) for p in processes for i, s in enumerate(shapes) if s.unsynchronized
        }
        self.processes, self.cpu = tuple(processes), 0  # where the process runs whose call is being replayed
        self.making: View | None = None  # what a private counter is made of, while a ring is being made
        self.waiters = {(p, i): self._waiters(f"{p}.waiters{i}") for p in processes for i in range(len(shapes))}
        self._events = {self._address(i): self._event_place(i) for i in range(len(shapes))}
        self._load_code(bugs, atomics)

    # ---- places ----

    def _place(self, name: str, value: int = 0) -> int:
        self.names.append(name)
        self.initial.append(value)
        return len(self.initial) - 1

    def _region(self, number: int, shape: QueueShape) -> Region:
        place = self.layouts[number]
        assert place.event_flag is not None
        region, q, start = Region(self, place.region_bytes), f"q{number}", shape.start * shape.quantum
        region.places[place.read_counter, 8] = self._place(f"{q}.r", start)
        region.places[place.write_counter, 8] = self._place(f"{q}.w", start)
        region.places[place.event_flag, 4] = self._place(f"{q}.event")
        for i in range(place.ring_bytes):
            region.places[place.ring + i, 1] = self._place(f"{q}.ring[{i}]")
            self.payload.add(region.places[place.ring + i, 1])
        for i in (4, 6):  # the CPU hints
            region.places[place.event_flag + i, 2] = self._place(f"{q}.hint{i}")
        return region

    def _own(self, name: str, size: int) -> View:
        word = Region(self, size)
        word.places[0, size] = self._place(name)
        return View(word, 0, size, size)

    def _waiters(self, name: str) -> int:
        self.glued.add(self._place(name))
        return len(self.initial) - 1

    def _address(self, number: int) -> int:
        event_flag = self.layouts[number].event_flag
        assert event_flag is not None
        return (number + 1 << 32) + event_flag

    def _event_place(self, number: int) -> int:
        event_flag = self.layouts[number].event_flag
        assert event_flag is not None
        return self.regions[number].places[event_flag, 4]

    # ---- code ----

    def _load_code(self, bugs: Sequence[SeededBug], atomics: str) -> None:
        self.futex = _compiled(futex, bugs)
        self.futex._blocking_call = self.futex._quick_call = self._system_call
        self.pycore = _compiled(_pycore, bugs)
        for name in set(vars(self.pycore)) & {name for name in vars(futex) if not name.startswith("_")} - {"ctypes"}:
            setattr(self.pycore, name, getattr(self.futex, name))
        self.pycore.monotonic_ns = self._clock
        self.pycore.current_cpu = self._current_cpu
        self.pycore.timer_slack, self.pycore.set_timer_slack = lambda: 50_000, lambda slack_ns: None
        self.pycore.memoryview = self._memoryview
        self.pycore.ctypes = SimpleNamespace(
            c_uint32=SimpleNamespace(from_buffer=self._anchor), addressof=lambda anchor: anchor.address
        )
        self.pycore._atomics = {"libatomic": self._libatomic, "kernel": self.futex.KernelAtomic, "plain": PlainAtomic}[
            atomics
        ]()

    def _current_cpu(self) -> int:
        return self.cpu

    def _clock(self) -> int:
        return self.run.clock()

    def _memoryview(self, it: Any) -> Any:
        if isinstance(it, bytearray) and self.making is not None:
            return self.making
        return it if isinstance(it, View) else memoryview(it)

    def _anchor(self, region: Region, offset: int) -> SimpleNamespace:
        number = next(i for i, known in enumerate(self.regions) if known is region)
        return SimpleNamespace(address=(number + 1 << 32) + offset)

    def _libatomic(self) -> Any:
        atomics = self.futex.LibAtomic.__new__(self.futex.LibAtomic)
        atomics._or = lambda address, mask, order: self._change("or", address, mask, order)
        atomics._and = lambda address, mask, order: self._change("and", address, mask, order)
        return atomics

    def _change(self, kind: str, address: int, operand: int, order: int) -> int:
        assert order == 5, "the event flag word is changed with sequential consistency"
        return int(self.run.perform((kind, self._events[address], operand)))

    def _system_call(self, number: int, *arguments: Any) -> int:
        """Do what futex(2) does, by the three operations that the queue uses, and futex_waitv with one word."""
        if number == self.futex._SYS_FUTEX_WAITV:
            return self._waitv(*arguments)
        assert number == self.futex._SYS_FUTEX, f"system call {number} has no model"
        address, operation, value, limit, second, last = arguments
        if operation == _WAKE_BITSET:
            return int(self.run.perform(("wake", self._events[address], last)))
        if operation == _WAKE_OP:
            return self._wake_op(second, last)
        assert operation == _WAIT_BITSET, f"futex operation {operation} has no model"
        error = self.run.slept(self.run.perform(("wait", self._events[address], value, limit is not None, last)))
        ctypes.set_errno(error)
        return -1 if error else 0

    def _waitv(self, words: Any, count: int, flags: int, limit: object, clock: int, _: int) -> int:
        assert (count, flags, limit) == (1, 0, None), "waiting for several words is not modelled"
        place, expected = self._events[words[0].address], words[0].expected
        error = self.run.slept(self.run.perform(("wait", place, expected, False, futex.ALL_BITS)))
        ctypes.set_errno(error)
        return -1 if error else 0

    def _wake_op(self, address: int, encoded: int) -> int:
        """Do the kernel's read-modify-write: 4 bits operation, 4 comparison, 12 operand (signed), 12 to compare."""
        operation, operand = encoded >> 28 & 0xF, encoded >> 12 & 0xFFF
        mask = 1 << operand if operation & 8 else (operand ^ 0x800) - 0x800 & futex.ALL_BITS
        kind, mask = {2: ("or", mask), 3: ("and", futex.ALL_BITS & ~mask)}[operation & 7]
        self.run.perform((kind, self._events[address], mask))
        return 0


class PlainAtomic:
    """A seeded bug: the event flag word is changed by a load and a store."""

    def fetch_or(self, word: View, address: int, mask: int) -> int:
        old = word[0]
        word[0] = old | mask
        return int(old)

    def fetch_clear(self, word: View, address: int, mask: int) -> int:
        old = word[0]
        word[0] = old & ~mask
        return int(old)


def _compiled(module: ModuleType, bugs: Sequence[SeededBug]) -> Any:
    """Compile a module's source with the seeded bugs for it."""
    name, path = module.__name__.rpartition(".")[2], str(module.__file__)
    source = Path(path).read_text(encoding="utf-8")
    for bug in bugs:
        if bug.module == name:
            assert source.count(bug.old) == 1, f"{name}.py has changed: adapt the bug that replaces {bug.old!r}"
            source = source.replace(bug.old, bug.new)
    shown = f"<explored {name} {hash(source):x}>"
    linecache.cache[shown] = (len(source), None, source.splitlines(keepends=True), shown)
    compiled = ModuleType(module.__name__)
    exec(compile(source, shown, "exec"), vars(compiled))
    return compiled


class ProcessQueues:
    """The queue objects that one thread uses in a call: those of its process."""

    def __init__(self, machine: Machine, process: str, is_watched: bool) -> None:
        pycore = machine.pycore
        machine.cpu = machine.processes.index(process)
        self.machine = machine
        self.flag = PeerDeathFlag()
        self.flag.buffer = machine.flags[process]  # type: ignore[assignment]
        self.events: list[Any] = []
        for i, (region, place) in enumerate(zip(machine.regions, machine.layouts, strict=True)):
            event = pycore.EventFlagWord(region, place.event_flag, self.flag.buffer)
            if is_watched:
                event.__class__ = _watched(pycore.EventFlagWord, machine, machine.waiters[process, i])
            self.events.append(event)
        self.rings: list[Any] = [self._ring(i, process) for i in range(len(machine.regions))]

    def _ring(self, i: int, process: str) -> Any:
        machine, shape, event = self.machine, self.machine.shapes[i], self.events[i]
        machine.making = machine.positions.get((process, i))
        try:
            return machine.pycore.Ring(
                machine.regions[i], machine.layouts[i], None if shape.unsynchronized else event, shared=False,
                lifetime=event, unsynchronized=shape.unsynchronized, history_bytes=shape.history * shape.quantum,
            )  # fmt: skip
        finally:
            machine.making = None

    def in_place(self, at: int, size: int, queue: int = 0) -> tuple[View, View]:
        """Return the ring's bytes from `at` on, as a transaction has them: as far as the end, and from the start."""
        place = self.machine.layouts[queue]
        ring = self.machine.regions[queue][place.ring : place.ring + place.ring_bytes]
        first = ring[at : at + size]
        return first, ring[: size - len(first)]

    def await_death(self, process: str) -> None:
        """Block until the process is dead."""
        self.machine.run.perform(("death", process))


def _watched(event_flag_word: Any, machine: Machine, place: int) -> Any:
    """Return the class with its count of waiters, which the watcher's thread reads, made a shared word."""
    known: dict[int, Any] = vars(machine.pycore).setdefault("_watched_classes", {})
    if place not in known:
        count = property(
            lambda self: machine.run.perform(("load", place, False)),
            lambda self, value: machine.run.perform(("store", place, value, True)),
        )
        known[place] = type("WatchedEventFlagWord", (event_flag_word,), {"waiters": count, "__slots__": ()})
    return known[place]
