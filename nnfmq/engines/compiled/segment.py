"""A segment: consecutive operations of a model that kernels compute, as one step of the interpreter's loop.

A segment reads arrays that are there when it begins, writes its values into an arena, and leaves in the scope those
that others read. What depends on where things lie, arena and tables of addresses, belongs to an execution from its
first run to its end; the next execution gets what the last one had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from nnfmq.engines import idle_trim
from nnfmq.engines.compiled.jit import Kernel, LoadedCode, symbol_name
from nnfmq.engines.compiled.memory_plan import ALIGNMENT, LiveRange, aligned, places
from nnfmq.engines.compiled.target import Target
from nnfmq.engines.compiled.thread_pool import RECORD_WORDS, Parallelism, ThreadPool
from nnfmq.engines.execution import DEFAULT_RUN_OPTIONS, ExecutionFrame
from nnfmq.operations.signature import Array, Shape

__all__ = ["Call", "CompiledPartition", "PartitionPlan", "Place", "PlannedLaunch", "Value", "plan_partition"]

_SHARED_FROM_NS = 3000
_WAKING_FROM_NS = 80_000  # who sleeps takes half of that to come
_IDLE_MOST = 4  # states that a segment keeps: as many executions run at once, but for bursts, which keep their own
_ARENA, _CONSTANTS, _FIRST_INPUT = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Value:
    """An operand's dtype and shape."""

    dtype: np.dtype[Any]
    shape: Shape

    @property
    def bytes(self) -> int:
        """How much memory it takes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def permuted(self, order: Sequence[int]) -> Value:
        """Return it with its axes in another order."""
        return Value(self.dtype, tuple(self.shape[axis] for axis in order))


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel over operands, by their indexes; its constants' places in the segment's; whose work it does."""

    kernel: Kernel
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: tuple[int, ...]
    work: int
    operation: int = -1

    @property
    def is_shared(self) -> bool:
        """Whether it is worth sharing out among threads."""
        return self.work >= _SHARED_FROM_NS and self.kernel.work_items > 1


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operand, or what kernels make for each other, lies in the arena from call `begin` to call `end`.

    `end` is the number of calls for what others read after the segment. Of a twin in NHWC `index` is ~operand.
    """

    index: int
    value: Value
    offset: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class PlannedLaunch:
    """A call's function, by its name, the words of its table, its units, and how threads share them."""

    function: str
    words: int
    units: int
    sharing: Parallelism

    @classmethod
    def of(cls, call: Call, sharing: Parallelism) -> Self:
        """Return what remains of a call once its operands have places."""
        words, units = len(call.inputs) + len(call.outputs) + len(call.constants), call.kernel.work_items
        return cls(symbol_name(call.kernel), words, units, sharing)


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """What a segment does, with no address in it. `regions` and `offsets` give each word of the tables, in order.

    `calls` and `places` are for who looks into it; a plan that comes from a cache has none.
    """

    steps: tuple[PlannedLaunch, ...]
    inputs: tuple[int, ...]
    outputs: tuple[tuple[int, int, Value], ...]
    regions: Array
    offsets: Array
    arena_bytes: int
    scratch_bytes: int
    calls: tuple[Call, ...] = ()
    places: tuple[Place, ...] = ()


def plan_partition(
    calls: Sequence[Call],
    values: dict[int, Value],
    aliases: dict[int, int],
    inputs: Sequence[int],
    outputs: Sequence[int],
    target: Target,
) -> PartitionPlan:
    """Give every value a place. `aliases` name the operand whose memory another one has."""

    def root(index: int) -> int:
        while index in aliases:
            index = aliases[index]
        return index

    begins, ends = {}, {}
    for number, call in enumerate(calls):
        begins.update({root(index): number for index in call.outputs})
        ends.update({root(index): number for index in (*call.inputs, *call.outputs)})
    ends.update({root(index): len(calls) for index in outputs})
    made = list(begins)
    offsets, total = places([LiveRange(values[index].bytes, begins[index], ends[index]) for index in made])
    place = dict(zip(made, offsets, strict=True))
    regions_of_inputs = {index: _FIRST_INPUT + number for number, index in enumerate(inputs)}
    words = [_words(call, root, place, regions_of_inputs) for call in calls]
    regions = np.array([region for table in words for region, _ in table], np.int64)
    within = np.array([offset for table in words for _, offset in table], np.int64)
    scratch = aligned(max((call.kernel.scratch_bytes(target) for call in calls), default=0) + ALIGNMENT)
    left = tuple((index, place[root(index)], values[index]) for index in outputs)
    map_of_arena = tuple(Place(index, values[index], place[index], begins[index], ends[index]) for index in made)
    steps = tuple(map(PlannedLaunch.of, calls, _sharing(calls)))
    sizes = aligned(total), scratch
    return PartitionPlan(steps, tuple(inputs), left, regions, within, *sizes, tuple(calls), map_of_arena)


def _sharing(calls: Sequence[Call]) -> list[Parallelism]:
    """Return how each call is shared. Near the end nobody is woken any more: who wakes would find nothing to do."""
    found, left_ns = [], 0
    for call in reversed(calls):
        left_ns += call.work * call.is_shared
        rings = Parallelism.PARALLEL_WAKE if left_ns >= _WAKING_FROM_NS else Parallelism.PARALLEL
        found.append(rings if call.is_shared else Parallelism.SERIAL)
    return found[::-1]


def _words(call: Call, root: Any, place: dict[int, int], inputs: dict[int, int]) -> list[tuple[int, int]]:
    operands = [root(index) for index in (*call.inputs, *call.outputs)]
    found = [(_ARENA, place[index]) if index in place else (inputs[index], 0) for index in operands]
    return found + [(_CONSTANTS, offset) for offset in call.constants]


class CompiledPartition:
    """The step. Any number of executions use it at once; `slot` is where in the scope each keeps its state."""

    def __init__(self, plan: PartitionPlan, constants: Array, linker: LoadedCode, team: ThreadPool, slot: int) -> None:
        self.plan = plan
        self._constants, self._linker, self._team, self._slot = constants, linker, team, slot
        self._functions = [linker.address(step.function) for step in plan.steps]
        self.steps = len(plan.steps)
        self._idle: list[ExecutionContext] = []
        idle_trim.register(self)

    def __call__(self, scope: ExecutionFrame) -> None:
        """Compute all of it, or as far as the execution's limits allow. Raises what they raise."""
        lease: _ContextLease | None = scope[self._slot]
        if lease is None:
            lease = scope[self._slot] = _ContextLease(self, self.acquire())
        state = lease.state
        steps = state.steps(scope)
        limits, team = scope[-1], self._team
        if limits is DEFAULT_RUN_OPTIONS:
            team.run(steps, 0, self.steps, state.scratch, self.plan.scratch_bytes)
        else:
            for number in range(self.steps):
                limits.check()
                team.run(steps, number, number + 1, state.scratch, self.plan.scratch_bytes)
        self.publish_outputs(scope)

    def range_runner(self, scope: ExecutionFrame) -> Callable[[int, int], None]:
        """Return what runs steps `first` to before `last`, for who looks at each; no limits are looked at.

        This was called with `scope` before. What is returned holds as long as the scope's arrays are the same, and
        does not give the scope what others read: `leave` does.
        """
        state: ExecutionContext = scope[self._slot].state
        run, steps, stride = self._team.run, state.steps(scope), self.plan.scratch_bytes
        return lambda first, last: run(steps, first, last, state.scratch, stride)

    def publish_outputs(self, scope: ExecutionFrame) -> None:
        """Give the scope what others read, as a call does at its end."""
        state: ExecutionContext = scope[self._slot].state
        for index, array in state.outputs:
            scope[index] = array

    def records(self, tables: int) -> Array:
        """Return the records of the steps, over tables that begin at address `tables`."""
        steps = np.empty((self.steps, RECORD_WORDS), np.int64)
        for number, (step, function) in enumerate(zip(self.plan.steps, self._functions, strict=True)):
            steps[number] = function, tables, step.units, step.sharing
            tables += 8 * step.words
        return steps

    def acquire(self) -> ExecutionContext:
        """Return a state that no execution has: one that was given back, or a new one."""
        try:
            return self._idle.pop()
        except IndexError:
            return ExecutionContext(self)

    def release(self, state: ExecutionContext) -> None:
        """Take back what `acquire` returned, and keep it for the next execution, unless there are many."""
        state.forget_inputs()
        if len(self._idle) < _IDLE_MOST:
            self._idle.append(state)

    def trim(self) -> None:
        """Let go of the states that no execution has."""
        self._idle.clear()

    @property
    def constants_address(self) -> int:
        """Where the constants lie."""
        return int(self._constants.ctypes.data)

    @property
    def threads(self) -> int:
        """How many threads compute it at most."""
        return self._team.worker_count + 1

    @property
    def areas(self) -> int:
        """How many areas of scratch memory an execution needs, also once the team has as many threads as it may."""
        return self._team.scratch_slots


class _ContextLease:
    """An execution's hold on a state, which goes back to its segment with the execution."""

    __slots__ = ("_segment", "state")

    def __init__(self, segment: CompiledPartition, state: ExecutionContext) -> None:
        self._segment = segment
        self.state = state

    def __del__(self) -> None:
        self._segment.release(self.state)


class ExecutionContext:
    """What one execution has of a segment: an arena, and tables that name it.

    A new arena costs a page fault for each of its pages when it is used first, so states are used again. Nothing in
    one depends on what it was used for before but the addresses of the inputs.
    """

    def __init__(self, segment: CompiledPartition) -> None:
        plan = self._plan = segment.plan
        memory = np.empty(plan.arena_bytes + segment.areas * plan.scratch_bytes + ALIGNMENT, np.uint8)
        skip = -memory.ctypes.data % ALIGNMENT
        self._arena = memory[skip:]
        address = memory.ctypes.data + skip
        self.scratch = address + plan.arena_bytes
        self.outputs = [(index, self._view(offset, value)) for index, offset, value in plan.outputs]
        self._bases = np.array([address, segment.constants_address, *[0] * len(plan.inputs)], np.int64)
        self._tables = np.empty_like(plan.offsets)
        self._records = segment.records(self._tables.ctypes.data)
        self._records_at = int(self._records.ctypes.data)
        self.forget_inputs()

    def _view(self, offset: int, value: Value) -> Array:
        return self._arena[offset : offset + value.bytes].view(value.dtype).reshape(value.shape)

    def forget_inputs(self) -> None:
        """Keep no input, which may be a client's memory."""
        self._seen: list[Any] | None = None
        self._held: list[Array] = []

    def steps(self, scope: ExecutionFrame) -> int:
        """Return the address of the steps over the inputs that are in `scope`."""
        inputs = self._plan.inputs
        same = self._seen is not None and all(
            scope[index] is seen for index, seen in zip(inputs, self._seen, strict=True)
        )
        if not same:
            seen = [scope[index] for index in inputs]
            self._held = [np.ascontiguousarray(array) for array in seen]
            is_copied = any(held is not array for held, array in zip(self._held, seen, strict=True))
            self._seen = None if is_copied else seen  # what a copy shows is looked at anew each time
            self._bases[_FIRST_INPUT:] = [array.ctypes.data for array in self._held]
            np.add(self._bases[self._plan.regions], self._plan.offsets, out=self._tables)
        return self._records_at
