"""The search over all reachable states of threads, memory and external events, and the checks on them.

A state is memory, each thread's node with its delayed accesses, the dead processes, and the number of signals left. The
search is breadth first, so the schedule of a violation is among the shortest. It finds two kinds: a result that `fold`
rejects or an unexpected exception, immediately; and, when all states are known, a state from which no schedule ends all
needed threads: a lost wake-up, a deadlock, a wait that outlives the peer. The second check does not rely on external
events: a signal, or the death of a process that has work left.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EAGAIN, EINTR, ETIMEDOUT
from typing import Any

from support.explorer import graph
from support.explorer.instrumented_runtime import Machine, Op, QueueShape, SeededBug
from support.explorer.models import PENDING, Copy, Model, Stale, Store
from support.explorer.program import END, Node, Program, Thread, Violation

Memory = tuple[int, ...]
Sleep = tuple[int, int, bool]
"""Place, mask, whether it has a deadline."""
ThreadState = tuple[Node, Sleep | None, tuple[Store, ...], tuple[Copy, ...], tuple[Stale, ...]]
State = tuple[Memory, tuple[ThreadState, ...], frozenset[str], int]
Step = tuple[str, State, bool]
"""What happened, the state after it, and whether it may be counted on."""

DEAD = Node(0, None, (), END)


@dataclass(frozen=True)
class Scenario:
    """Queues, threads and external events: one of `mortal` is killed at any step; `signals` sleeps are interrupted."""

    name: str
    shapes: tuple[QueueShape, ...]
    threads: tuple[Thread, ...]
    mortal: tuple[str, ...] = ()
    signals: int = 0
    atomics: str = "libatomic"


@dataclass(frozen=True)
class Report:
    """The statistics of an exploration without violation.

    `schedules` is None if a thread may repeat itself indefinitely. `steps_after_death` is a survivor's longest path
    from the setting of its peer death flag to its end, in its own steps; None if no process dies.
    """

    scenario: str
    model: Model
    states: int
    transitions: int
    histories: int
    schedules: int | None
    steps_after_death: int | None
    seconds: float

    def __str__(self) -> str:
        schedules = "unbounded" if self.schedules is None else f"{self.schedules:.1e}"
        return (
            f"{self.scenario:52} {self.model.value:10} {self.states:9,} states {self.transitions:10,} steps "
            f"{schedules:>9} schedules {self.seconds:6.1f} s"
            + ("" if self.steps_after_death is None else f", at most {self.steps_after_death} steps after a death")
        )


def explore(scenario: Scenario, model: Model, bugs: tuple[SeededBug, ...] = (), limit: int = 5_000_000) -> Report:
    """Explore all schedules of `scenario`; raise Violation with the first schedule that violates the specification."""
    with _no_collections():
        return _explored(scenario, model, bugs, limit)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Spare the collector millions of states, none of which is garbage; it would look at all of them time and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _explored(scenario: Scenario, model: Model, bugs: tuple[SeededBug, ...], limit: int) -> Report:
    start = time.perf_counter()
    search = _Search(scenario, model, bugs)
    search.walk(limit)
    search.check_that_all_can_end()
    return Report(
        scenario.name,
        model,
        len(search.states),
        sum(map(len, search.after)) + sum(map(len, search.by_fate.values())),
        sum(program.node_count for program in search.programs),
        search.count_schedules(),
        search.longest_end() if scenario.mortal else None,
        time.perf_counter() - start,
    )


def outcomes(scenario: Scenario, model: Model) -> set[tuple[Any, ...]]:
    """Return all that the threads' progress can be when all have ended, for trying the models themselves."""
    search = _Search(scenario, model, ())
    search.walk(100_000)
    return {tuple(thread[0].progress for thread in state[1]) for state in search.states if search.is_finished(state)}


class _Search:
    def __init__(self, scenario: Scenario, model: Model, bugs: tuple[SeededBug, ...]) -> None:
        processes = tuple(dict.fromkeys(thread.process for thread in scenario.threads))
        self.scenario, self.model = scenario, model
        self.machine = Machine(scenario.shapes, processes, bugs, scenario.atomics)
        self.programs = [Program(self.machine, thread, model.defers) for thread in scenario.threads]
        self.states: list[State] = []
        self.after: list[tuple[int, ...]] = []
        self.by_fate: dict[int, tuple[int, ...]] = {}
        self.came_by: list[tuple[int, str]] = []

    # ---- walking ----

    def walk(self, limit: int) -> None:
        """Find all states."""
        roots = tuple((program.root, None, (), (), ()) for program in self.programs)
        first: State = (tuple(self.machine.initial), roots, frozenset(), self.scenario.signals)
        numbers = {first: 0}
        self.states.append(first)
        self.came_by.append((-1, "start"))
        waiting = deque([0])
        while waiting:
            number = waiting.popleft()
            sure: list[int] = []
            fate: list[int] = []
            for label, state, is_sure in self._steps(number):
                known = numbers.get(state)
                if known is None:
                    known = numbers[state] = len(self.states)
                    self.states.append(state)
                    self.came_by.append((number, label))
                    waiting.append(known)
                (sure if is_sure else fate).append(known)
            self.after.append(tuple(sure))  # in order: states are taken as they were numbered
            if fate:
                self.by_fate[number] = tuple(fate)
            assert len(self.states) <= limit, f"{self.scenario.name}: more than {limit} states"

    def _steps(self, number: int) -> Iterator[Step]:
        label = ""
        try:
            state = self.states[number]
            for i, thread in enumerate(state[1]):
                label = f"{self.programs[i].thread.name}: {thread[0].op}"
                yield from self._delayed(state, i, thread)
                if thread[1] is not None:
                    yield from self._asleep(state, i, thread, thread[1])
                else:
                    yield from _KINDS[thread[0].op[0]](self, state, i, thread, thread[0].op)
            yield from self._deaths(state)
        except Violation as violation:
            raise Violation(violation.what, (*self.schedule(number), label)) from None

    def schedule(self, number: int) -> tuple[str, ...]:
        """Return the steps that led to a state."""
        steps: list[str] = []
        while number > 0:
            number, label = self.came_by[number]
            steps.append(label)
        return tuple(reversed(steps))

    # ---- what a thread can do ----

    def _moved(self, state: State, i: int, thread: ThreadState, memory: Memory | None = None) -> State:
        threads = state[1]
        return (state[0] if memory is None else memory, (*threads[:i], thread, *threads[i + 1 :]), state[2], state[3])

    def _label(self, i: int, op: Op, result: object = "") -> str:
        place = self.machine.names[op[1]] if len(op) > 1 and isinstance(op[1], int) else ""
        rest = " ".join(str(part) for part in op[2:])
        return f"{self.programs[i].thread.name}: {op[0]} {place} {rest}" + (f" -> {result}" if result != "" else "")

    def _load(self, state: State, i: int, thread: ThreadState, op: Op) -> Iterator[Step]:
        node, _, buffer, copies, stale = thread
        _, place, is_acquire = op
        value = _seen(state[0], buffer, place)
        after, memory = self.programs[i].advance(node, value), state[0]
        if place in self.machine.glued and after.op[:2] == ("store", place):
            memory = _with(memory, place, after.op[2])  # Python changes threads at calls and jumps only
            after = self.programs[i].advance(after, None)
        moved = self._moved(state, i, (after, None, buffer, copies, () if is_acquire else stale), memory)
        yield self._label(i, op, value), moved, True

    def _store(self, state: State, i: int, thread: ThreadState, op: Op) -> Iterator[Step]:
        node, _, buffer, copies, stale = thread
        _, place, value, is_release = op
        after = self.programs[i].advance(node, None)
        if self.model.buffers and place not in self.machine.glued:
            changed = self._moved(state, i, (after, None, (*buffer, (place, value, is_release)), copies, stale))
        else:
            changed = self._moved(state, i, (after, None, buffer, copies, stale), _with(state[0], place, value))
        yield self._label(i, op), changed, True

    def _copy(self, state: State, i: int, thread: ThreadState, op: Op) -> Iterator[Step]:
        node, _, buffer, copies, stale = thread
        place = op[1]
        if not self.model.defers:
            value = _seen(state[0], buffer, place)
            after = self.programs[i].advance(node, value)
            yield self._label(i, op, value), self._moved(state, i, (after, None, buffer, copies, stale)), True
            return
        after = self.programs[i].advance(node, len(copies))
        for value in _readable(place, buffer, stale):
            copied: ThreadState = (after, None, buffer, (*copies, (place, value)), stale)
            yield (
                self._label(i, op, "later" if value == PENDING else f"{value}, early"),
                self._moved(state, i, copied),
                True,
            )

    def _resolve(self, state: State, i: int, thread: ThreadState, op: Op) -> Iterator[Step]:
        node, _, buffer, copies, stale = thread
        if all(value != PENDING for _, value in copies):
            after = self.programs[i].advance(node, tuple(value for _, value in copies))
            yield self._label(i, op), self._moved(state, i, (after, None, buffer, (), stale)), True

    def _change(self, state: State, i: int, thread: ThreadState, op: Op) -> Iterator[Step]:
        if _is_delayed(thread):
            return
        kind, place, operand = op
        old = state[0][place]
        memory = _with(state[0], place, old | operand if kind == "or" else old & operand)
        after = self.programs[i].advance(thread[0], old)
        yield self._label(i, op, old), self._moved(state, i, (after, None, (), thread[3], ()), memory), True

    def _wait(self, state: State, i: int, thread: ThreadState, op: Op) -> Iterator[Step]:
        if _is_delayed(thread):
            return
        _, place, expected, has_deadline, mask = op
        if state[0][place] != expected:
            yield self._with_result(state, i, thread, EAGAIN, "rejected")
        else:
            asleep: ThreadState = (thread[0], (place, mask, has_deadline), (), thread[3], ())
            yield self._label(i, op, "asleep"), self._moved(state, i, asleep), True

    def _with_result(self, state: State, i: int, thread: ThreadState, result: Any, what: str) -> Step:
        after = self.programs[i].advance(thread[0], result)
        moved = self._moved(state, i, (after, None, *thread[2:]))
        return self._label(i, thread[0].op, what), moved, result != EINTR

    def _wake(self, state: State, i: int, thread: ThreadState, op: Op) -> Iterator[Step]:
        if _is_delayed(thread):
            return
        woken = [k for k, other in enumerate(state[1]) if other[1] and other[1][0] == op[1] and other[1][1] & op[2]]
        changed = self._moved(state, i, (self.programs[i].advance(thread[0], len(woken)), None, (), thread[3], ()))
        for k in woken:
            sleeper = changed[1][k]
            changed = self._moved(changed, k, (self.programs[k].advance(sleeper[0], 0), None, *sleeper[2:]))
        yield self._label(i, op, f"{len(woken)} woken"), changed, True

    def _clock(self, state: State, i: int, thread: ThreadState, op: Op) -> Iterator[Step]:
        yield self._with_result(state, i, thread, False, "before the deadline")
        yield self._with_result(state, i, thread, True, "after the deadline")

    def _death(self, state: State, i: int, thread: ThreadState, op: Op) -> Iterator[Step]:
        if op[1] in state[2]:
            yield self._with_result(state, i, thread, None, f"{op[1]} is known to be dead")

    def _end(self, state: State, i: int, thread: ThreadState, op: Op) -> Iterator[Step]:
        return iter(())

    def _asleep(self, state: State, i: int, thread: ThreadState, sleep: Sleep) -> Iterator[Step]:
        if sleep[2]:
            yield self._with_result(state, i, thread, ETIMEDOUT, "timed out")
        if state[3]:
            label, changed, is_sure = self._with_result(state, i, thread, EINTR, "interrupted")
            yield label, (*changed[:3], state[3] - 1), is_sure

    # ---- what happens to it ----

    def _delayed(self, state: State, i: int, thread: ThreadState) -> Iterator[Step]:
        node, asleep, buffer, copies, stale = thread
        for k in self.model.leaving(buffer, copies):
            place, value, _ = buffer[k]
            moved = self._moved(state, i, (node, asleep, (*buffer[:k], *buffer[k + 1 :]), copies, stale))
            yield f"memory: {self.machine.names[place]} = {value}", self._arrived(moved, i, place, value), True
        for k, (place, known) in enumerate(copies):
            if known == PENDING:
                loaded = (*copies[:k], (place, state[0][place]), *copies[k + 1 :])
                moved = self._moved(state, i, (node, asleep, buffer, loaded, stale))
                yield f"memory: {self.machine.names[place]} is read", moved, True

    def _arrived(self, state: State, i: int, place: int, value: int) -> State:
        """Put a store of thread `i` into memory; readers may still see what was there."""
        memory, threads, dead, signals = state
        if self.model.defers and place in self.machine.payload:
            old = (place, memory[place])
            threads = tuple(
                (*thread[:4], tuple(sorted({*thread[4], old}))) if k != i and program.thread.reads else thread
                for k, (program, thread) in enumerate(zip(self.programs, threads, strict=True))
            )
        return _with(memory, place, value), threads, dead, signals

    def _deaths(self, state: State) -> Iterator[Step]:
        for process in self.scenario.mortal:
            if process in state[2]:
                continue
            is_finished = all(thread[0].op is END for thread in self._of(process, state))
            threads = tuple(
                # What it has stored comes to memory whatever becomes of it.
                (DEAD, None, thread[2], (), ()) if program.thread.process == process else thread
                for program, thread in zip(self.programs, state[1], strict=True)
            )
            yield f"fate: {process} dies", (state[0], threads, state[2] | {process}, state[3]), is_finished

    def _of(self, process: str, state: State) -> list[ThreadState]:
        return [
            thread for program, thread in zip(self.programs, state[1], strict=True) if program.thread.process == process
        ]

    # ---- judgement ----

    def check_that_all_can_end(self) -> None:
        """Raise Violation if some state has no path to the end of all needed threads."""
        bad = graph.cut_off(self.after, [self.is_finished(state) for state in self.states])
        if bad:
            stuck = next((number for number in bad if not self.after[number]), bad[0])
            raise Violation(f"nothing can end this: {self._standing(stuck)}", self.schedule(stuck))

    def is_finished(self, state: State) -> bool:
        """Return True if all needed threads have ended."""
        return all(
            thread[0].op is END or not program.thread.needed
            for program, thread in zip(self.programs, state[1], strict=True)
        )

    def _standing(self, number: int) -> str:
        memory, threads, _, _ = self.states[number]
        words = [f"{name} = {value}" for name, value in zip(self.machine.names, memory, strict=True) if "[" not in name]
        where = [
            f"{program.thread.name} {'sleeps in' if thread[1] else 'stands at'} {thread[0].op}"
            for program, thread in zip(self.programs, threads, strict=True)
        ]
        return ", ".join(where + words)

    def count_schedules(self) -> int | None:
        """Count the paths from the first state to an end; None if there is a cycle."""
        return graph.count_paths([sure + self.by_fate.get(number, ()) for number, sure in enumerate(self.after)])

    def longest_end(self) -> int:
        """Return the maximum number of steps of a survivor after its peer death flag is set."""
        survivors = [i for i, p in enumerate(self.programs) if p.thread.is_watched and p.thread.needed]
        return max(self._longest_end(i) for i in survivors)

    def _longest_end(self, i: int) -> int:
        place = self.machine.flags[self.programs[i].thread.process].region.places[0, 4]
        raised = [number for number, state in enumerate(self.states) if state[0][place]]
        return graph.longest_way({number: self._costs(number, i) for number in raised})

    def _costs(self, number: int, i: int) -> list[tuple[int, int]]:
        """Return the states after this one, and 1 for each that thread `i` moved on to."""
        node = self.states[number][1][i][0]
        return [(other, int(self.states[other][1][i][0] is not node)) for other in self.after[number]]


_KINDS: dict[str, Callable[[_Search, State, int, ThreadState, Op], Iterator[Step]]] = {
    "load": _Search._load, "store": _Search._store, "copy": _Search._copy, "resolve": _Search._resolve,
    "or": _Search._change, "and": _Search._change, "wait": _Search._wait, "wake": _Search._wake,
    "clock": _Search._clock, "death": _Search._death, "end": _Search._end,
}  # fmt: skip
"""What a thread can do, by its operation. Not kept by the search: a cycle would keep all its states."""


def _with(memory: Memory, place: int, value: int) -> Memory:
    return (*memory[:place], value, *memory[place + 1 :])


def _seen(memory: Memory, buffer: tuple[Store, ...], place: int) -> int:
    """Return the result of a thread's load: its own newest store, else memory."""
    for stored, value, _ in reversed(buffer):
        if stored == place:
            return value
    return memory[place]


def _readable(place: int, buffer: tuple[Store, ...], stale: tuple[Stale, ...]) -> list[int]:
    """Return the possible results of a payload load now: the thread's newest store, else a later or an old value."""
    own = [value for stored, value, _ in buffer if stored == place]
    return own[-1:] or [PENDING, *(old for where, old in stale if where == place)]


def _is_delayed(thread: ThreadState) -> bool:
    return bool(thread[2]) or any(value == PENDING for _, value in thread[3])
