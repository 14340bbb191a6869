"""A segment: consecutive operations of a model that kernels compute, as one step of the interpreter's loop.

A segment reads arrays that are there when it begins, writes its values into an arena, and leaves in the scope those
that others read. What depends on where things lie, the tables of addresses, belongs to an execution: it is made at the
first run and kept as long as the inputs are the same arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nnfmq.engines.compiled.arena import ALIGNMENT, Life, aligned, places
from nnfmq.engines.compiled.kernels.kernel import Kernel, name_of
from nnfmq.engines.compiled.objects import Linker
from nnfmq.engines.compiled.target import Target
from nnfmq.engines.compiled.team import STEP_WORDS, Team
from nnfmq.engines.execution import NO_LIMITS, Scope
from nnfmq.operations.signature import Array, Shape

__all__ = ["Call", "Place", "Segment", "SegmentPlan", "Value", "plan_segment"]

_SHARED_FROM_NS = 3000
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
        return self.work >= _SHARED_FROM_NS and self.kernel.units > 1


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
class SegmentPlan:
    """What a segment does, with no address in it. `regions` and `offsets` give each word of the tables, in order."""

    calls: tuple[Call, ...]
    inputs: tuple[int, ...]
    outputs: tuple[tuple[int, int, Value], ...]
    regions: Array
    offsets: Array
    arena_bytes: int
    scratch_bytes: int
    places: tuple[Place, ...]


def plan_segment(
    calls: Sequence[Call],
    values: dict[int, Value],
    aliases: dict[int, int],
    inputs: Sequence[int],
    outputs: Sequence[int],
    target: Target,
) -> SegmentPlan:
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
    offsets, total = places([Life(values[index].bytes, begins[index], ends[index]) for index in made])
    place = dict(zip(made, offsets, strict=True))
    words = [_words(call, root, place, inputs) for call in calls]
    regions = np.array([region for table in words for region, _ in table], np.int64)
    within = np.array([offset for table in words for _, offset in table], np.int64)
    scratch = aligned(max((call.kernel.scratch_bytes(target) for call in calls), default=0) + ALIGNMENT)
    left = tuple((index, place[root(index)], values[index]) for index in outputs)
    map_of_arena = tuple(Place(index, values[index], place[index], begins[index], ends[index]) for index in made)
    return SegmentPlan(tuple(calls), tuple(inputs), left, regions, within, aligned(total), scratch, map_of_arena)


def _words(call: Call, root: Any, place: dict[int, int], inputs: Sequence[int]) -> list[tuple[int, int]]:
    operands = [root(index) for index in (*call.inputs, *call.outputs)]
    found = [
        (_ARENA, place[index]) if index in place else (_FIRST_INPUT + inputs.index(index), 0) for index in operands
    ]
    return found + [(_CONSTANTS, offset) for offset in call.constants]


class Segment:
    """The step. Any number of executions use it at once; `slot` is where in the scope each keeps its state."""

    def __init__(self, plan: SegmentPlan, constants: Array, linker: Linker, team: Team, slot: int) -> None:
        self.plan = plan
        self._constants, self._linker, self._team, self._slot = constants, linker, team, slot
        self._functions = [linker.address(name_of(call.kernel)) for call in plan.calls]
        self.steps = len(plan.calls)

    def __call__(self, scope: Scope) -> None:
        """Compute all of it, or as far as the execution's limits allow. Raises what they raise."""
        state: _State | None = scope[self._slot]
        if state is None:
            state = scope[self._slot] = _State(self)
        steps = state.steps(scope)
        limits, team = scope[-1], self._team
        if limits is NO_LIMITS:
            team.run(steps, 0, self.steps, state.scratch, self.plan.scratch_bytes)
        else:
            for number in range(self.steps):
                limits.check()
                team.run(steps, number, number + 1, state.scratch, self.plan.scratch_bytes)
        for index, array in state.outputs:
            scope[index] = array

    def stepping(self, scope: Scope) -> Callable[[int, int], None]:
        """Return what runs steps `first` to before `last`, for who looks at each; no limits are looked at.

        This was called with `scope` before. What is returned holds as long as the scope's arrays are the same, and
        does not give the scope what others read: `leave` does.
        """
        state: _State = scope[self._slot]
        run, steps, stride = self._team.run, state.steps(scope), self.plan.scratch_bytes
        return lambda first, last: run(steps, first, last, state.scratch, stride)

    def leave(self, scope: Scope) -> None:
        """Give the scope what others read, as a call does at its end."""
        state: _State = scope[self._slot]
        for index, array in state.outputs:
            scope[index] = array

    def tables(self, bases: Array) -> tuple[Array, Array]:
        """Return the tables of addresses over `bases`, the regions' addresses, and the records of the steps."""
        tables = bases[self.plan.regions] + self.plan.offsets
        steps = np.empty((self.steps, STEP_WORDS), np.int64)
        at = tables.ctypes.data
        for number, (call, function) in enumerate(zip(self.plan.calls, self._functions, strict=True)):
            steps[number] = function, at, call.kernel.units, call.is_shared
            at += 8 * (len(call.inputs) + len(call.outputs) + len(call.constants))
        return tables, steps

    @property
    def constants_address(self) -> int:
        """Where the constants lie."""
        return int(self._constants.ctypes.data)

    @property
    def threads(self) -> int:
        """How many areas of scratch memory an execution needs."""
        return self._team.helpers + 1


class _State:
    """What one execution has of a segment: an arena, and tables that name it."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        plan = segment.plan
        memory = np.empty(plan.arena_bytes + segment.threads * plan.scratch_bytes + ALIGNMENT, np.uint8)
        skip = -memory.ctypes.data % ALIGNMENT
        self._arena = memory[skip:]
        self._address = memory.ctypes.data + skip
        self.scratch = self._address + plan.arena_bytes
        self.outputs = [(index, self._view(offset, value)) for index, offset, value in plan.outputs]
        self._seen: list[Any] = [None] * len(plan.inputs)
        self._held: list[Array] = []
        self._tables = np.empty(0, np.int64)
        self._steps: Array | None = None
        self._steps_at = 0

    def _view(self, offset: int, value: Value) -> Array:
        return self._arena[offset : offset + value.bytes].view(value.dtype).reshape(value.shape)

    def steps(self, scope: Scope) -> int:
        """Return the address of the steps over the inputs that are in `scope`."""
        inputs = self._segment.plan.inputs
        same = self._steps is not None and all(
            scope[index] is seen for index, seen in zip(inputs, self._seen, strict=True)
        )
        if not same:
            self._seen = [scope[index] for index in inputs]
            self._held = [np.ascontiguousarray(array) for array in self._seen]
            if any(held is not seen for held, seen in zip(self._held, self._seen, strict=True)):
                self._seen = [None] * len(inputs)  # copied: what the copy shows is looked at anew each time
            bases = [self._address, self._segment.constants_address, *(array.ctypes.data for array in self._held)]
            self._tables, self._steps = self._segment.tables(np.array(bases, np.int64))
            self._steps_at = int(self._steps.ctypes.data)
        return self._steps_at
