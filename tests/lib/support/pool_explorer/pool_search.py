"""The search over all reachable states of a caller and its workers, and the checks on them.

Plain accesses follow the access before them in one step: whether two threads' race is decided by what each knows of,
not by which comes first. The search is breadth first, so the schedule of a violation is among the shortest.
Violations are: a data race, a wrong result, and a state from which no schedule ends all threads (a lost wake-up, a
deadlock). The last check does not rely on futexes that return without a wake-up.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.explorer import graph
from support.pool_explorer.pool_memory import DataRaceError, Machine, State, Uses, Words, World
from support.pool_explorer.replay import DONE, Access, Call, Library, Node, Program, SeededBug, build

__all__ = ["Launches", "PoolReport", "PoolScenario", "PoolViolation", "explore_pool"]

_EAGAIN = 11
_PARTS = ("open", "compute", "close")

Thread = tuple[Node, int | None]
"""Where it is, and the futex word on which it sleeps."""
Whole = tuple[State, tuple[Thread, ...], int]
"""Memory, the threads, and how often a futex may still return without a wake-up."""
Step = tuple[str, Whole, bool]
"""What happened, the state after it, and whether it may be counted on."""


class PoolViolation(AssertionError):
    """A schedule under which the pool violates its specification."""

    def __init__(self, what: str, schedule: Sequence[str] = ()) -> None:
        super().__init__("\n  ".join([what, *schedule]))
        self.what, self.schedule = what, tuple(schedule)


@dataclass(frozen=True)
class Launches:
    """A run of `count` launches (at most 2) of `items` work items (at most 4)."""

    items: int
    count: int = 1
    parallelism: int = 2

    def __str__(self) -> str:
        return f"{self.count} x {self.items}{'' if self.parallelism == 2 else ' unwoken'}"


@dataclass(frozen=True)
class PoolScenario:
    """Runs of launches, one after the other, by a caller with `workers`; then the pool is stopped."""

    workers: int
    runs: tuple[Launches, ...]
    spins: tuple[int, int, int] = (1, 1, 1)
    """Of an idle worker, of a worker during a run, and of the caller that awaits a worker."""
    spurious: int = 0
    """How often a futex returns without a wake-up."""

    @property
    def workers_spin_during_runs(self) -> bool:
        """Whether it matters to the workers that a run is in progress."""
        return self.spins[1] > self.spins[0]

    def __str__(self) -> str:
        runs = ", ".join(map(str, self.runs)) or "none"
        returns = f", {self.spurious} spurious return" if self.spurious else ""
        return f"{self.workers} worker{'s' if self.workers > 1 else ''}, items: {runs}{returns}"


@dataclass(frozen=True)
class PoolReport:
    """The statistics of an exploration without violation."""

    scenario: PoolScenario
    machine: Machine
    states: int
    steps: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.scenario!s:52} {self.machine.value:10} {self.states:9,} states {self.steps:10,} steps "
            f"{self.seconds:6.1f} s"
        )


def explore_pool(
    folder: Path, scenario: PoolScenario, machine: Machine, bugs: Sequence[SeededBug] = (), limit: int = 1_000_000
) -> PoolReport:
    """Explore all schedules; raise PoolViolation with the first one that violates the specification.

    `folder` is empty, for the compiled header.
    """
    start = time.perf_counter()
    library, uses = build(folder, scenario.workers, scenario.spins, bugs), Uses()
    if machine is not Machine.VALUES:
        _Search(library, scenario, Machine.VALUES, uses).walk(limit)
    search = _Search(library, scenario, machine, uses)
    search.walk(limit)
    search.check_that_all_can_end()
    return PoolReport(scenario, machine, len(search.states), sum(map(len, search.after)), time.perf_counter() - start)


def _caller(library: Library, scenario: PoolScenario) -> Program:
    calls: list[Call] = []
    total = 0
    for number, run in enumerate(scenario.runs, 1):
        state = run.items, run.count, run.parallelism
        is_whole = run.count > 1 or scenario.workers_spin_during_runs
        calls += [Call(f"explored_{part}", number, state) for part in (("run",) if is_whole else _PARTS)]
        total += number * run.count
        calls.append(Call("explored_check", total, (min(one.items for one in scenario.runs), 0, 0)))
    calls.append(Call("explored_stop", 0, (0, 0, 0)))

    def fold(progress: int, result: int, state: tuple[int, ...]) -> int:
        if result:
            raise PoolViolation(f"{result} items have a wrong sum")
        return progress + 1

    return Program("caller", library, 0, lambda at: calls[at] if at < len(calls) else None, fold)


def _worker(library: Library, number: int) -> Program:
    def fold(progress: Any, result: int, state: tuple[int, ...]) -> tuple[int, ...] | None:
        return state if result else None

    def next_call(state: Any) -> Call | None:
        return None if state is None else Call("explored_step", number, state)

    return Program(f"worker {number}", library, (0, 0, 0), next_call, fold)


class _Search:
    def __init__(self, library: Library, scenario: PoolScenario, machine: Machine, uses: Uses) -> None:
        self.programs = [_caller(library, scenario), *(_worker(library, n + 1) for n in range(scenario.workers))]
        self.words = Words(len(self.programs), machine, {0: scenario.workers}, uses)
        self.states: list[Whole] = []
        self.after: list[tuple[int, ...]] = []
        self.came_by: list[tuple[int, str]] = []
        self._spurious = scenario.spurious

    def walk(self, limit: int) -> None:
        """Find all states."""
        memory: State = ((), (), (), tuple((0, ()) for _ in self.programs))
        threads: tuple[Thread, ...] = tuple((program.root, None) for program in self.programs)
        for i in range(len(self.programs)):
            world = World(self.words, memory)
            threads = self._settled(world, threads, i)
            memory = world.frozen()
        first: Whole = (memory, threads, self._spurious)
        numbers = {first: 0}
        self.states.append(first)
        self.came_by.append((-1, "start"))
        waiting = deque([0])
        while waiting:
            number = waiting.popleft()
            following: list[int] = []
            for label, state, is_sure in self._steps(number):
                known = numbers.get(state)
                if known is None:
                    known = numbers[state] = len(self.states)
                    self.states.append(state)
                    self.came_by.append((number, label))
                    waiting.append(known)
                if is_sure:
                    following.append(known)
            self.after.append(tuple(following))
            assert len(self.states) <= limit, f"more than {limit} states"

    def _steps(self, number: int) -> Iterator[Step]:
        label, self._at = "", number
        memory, threads, spurious = self.states[number]
        try:
            for i, (node, asleep) in enumerate(threads):
                label = self._label(i, node.access)
                if asleep is None:
                    for result, world, others in self._results(memory, threads, i, node.access):
                        yield f"{label} -> {result}", self._whole(world, others, i, result, spurious), True
                elif spurious:
                    awake = self._with(threads, i, (node, None))
                    world = World(self.words, memory)
                    yield f"{label}: without a wake-up", self._whole(world, awake, i, 0, spurious - 1), False
        except (PoolViolation, DataRaceError) as violation:
            what = f"data race: {violation}" if isinstance(violation, DataRaceError) else str(violation)
            raise PoolViolation(what, (*self.schedule(number), label)) from None

    def _results(
        self, memory: State, threads: tuple[Thread, ...], i: int, access: Access
    ) -> Iterator[tuple[int, World, tuple[Thread, ...]]]:
        """Yield the results that an access may have, the world after each, and the threads after it."""
        if access.kind == DONE:
            return
        self._use(i, access)
        world = World(self.words, memory)
        if access.kind == "wait":
            yield from self._wait(world, threads, i, access)
        elif access.kind == "wake":
            yield 0, world, self._woken(world, threads, access)
        elif access.kind == "store":
            world.store(i, access)
            yield 0, world, threads
        elif access.kind in ("add", "exchange"):
            old = world.newest(access.place)
            world.change(i, access, old + access.operand if access.kind == "add" else access.operand)
            yield old, world, threads
        else:
            for k, value in list(world.readable(i, access)):
                one = World(self.words, memory)
                if access.kind == "load" or value != access.expected:
                    one.read(i, access, k)
                    yield value, one, threads
            if access.kind == "compare" and world.newest(access.place) == access.expected:
                world.change(i, access, access.operand)
                yield access.expected, world, threads

    def _wait(
        self, world: World, threads: tuple[Thread, ...], i: int, access: Access
    ) -> Iterator[tuple[int, World, tuple[Thread, ...]]]:
        world.read_newest(i, access.place)  # the kernel compares with what memory has now
        if world.newest(access.place) != access.expected:
            yield _EAGAIN, world, threads
        else:
            yield 0, world, self._with(threads, i, (threads[i][0], access.place))

    def _woken(self, world: World, threads: tuple[Thread, ...], access: Access) -> tuple[Thread, ...]:
        sleepers = [k for k, (_, asleep) in enumerate(threads) if asleep == access.place]
        assert len(sleepers) <= access.operand, "not modelled: which one of several sleepers is woken"
        for k in sleepers:
            world.read_newest(k, access.place)
            threads = self._with(threads, k, (self.programs[k].advance(threads[k][0], 0), None))
        return threads

    def _whole(self, world: World, threads: tuple[Thread, ...], i: int, result: int, spurious: int) -> Whole:
        node, asleep = threads[i]
        if asleep is None:
            threads = self._with(threads, i, (self.programs[i].advance(node, result), None))
        for k, (moved, before) in enumerate(zip(threads, self.states[self._at][1], strict=True)):
            if moved is not before:
                threads = self._settled(world, threads, k)
        return world.frozen(), threads, spurious

    def _settled(self, world: World, threads: tuple[Thread, ...], i: int) -> tuple[Thread, ...]:
        """Let thread `i` make its plain accesses up to its next other one."""
        node, asleep = threads[i]
        while asleep is None and node.access.kind in ("read", "write"):
            self._use(i, node.access)
            if node.access.kind == "read":
                node = self.programs[i].advance(node, world.load_plain(i, node.access))
            else:
                world.store_plain(i, node.access)
                node = self.programs[i].advance(node, 0)
        return self._with(threads, i, (node, asleep))

    def _use(self, i: int, access: Access) -> None:
        if self.words.machine is Machine.VALUES:
            self.words.uses.add(i, access)

    @staticmethod
    def _with(threads: tuple[Thread, ...], i: int, thread: Thread) -> tuple[Thread, ...]:
        return (*threads[:i], thread, *threads[i + 1 :])

    def _label(self, i: int, access: Access) -> str:
        return f"{self.programs[i].name}: {access.order} {access.kind} of {access.place} ({access.operand})"

    def schedule(self, number: int) -> tuple[str, ...]:
        """Return the steps that led to a state."""
        steps: list[str] = []
        while number > 0:
            number, label = self.came_by[number]
            steps.append(label)
        return tuple(reversed(steps))

    def check_that_all_can_end(self) -> None:
        """Raise PoolViolation if some state has no path to the end of all threads."""
        ends = [all(node.access.kind == DONE for node, _ in threads) for _, threads, _ in self.states]
        assert any(ends), "no schedule ends"
        bad = graph.cut_off(self.after, ends)
        if bad:
            stuck = next((number for number in bad if not self.after[number]), bad[0])
            raise PoolViolation("nothing can end this", self.schedule(stuck))
