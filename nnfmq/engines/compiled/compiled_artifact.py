"""What is kept of a compiled program, and the way back, without lowering or packing again what kernels compute.

A program's parts are arrays: the plan of its segments, as msgpack, all constants in one, and object code. A restored
program takes its segments from there as they are, and prepares only the operations that no kernel computes, over the
shapes that were known. The parts are of this build, of this target, and of this very model: whoever keeps them answers
for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from nnfmq.engines.compiled.executor import CompiledPartition
from nnfmq.engines.compiled.jit import LoadedCode
from nnfmq.engines.compiled.memory_plan import ArraySpec, PartitionPlan, PlannedLaunch
from nnfmq.engines.compiled.target import Target
from nnfmq.engines.compiled.thread_pool import Parallelism, ThreadPool
from nnfmq.engines.execution import ExecutionFrame, StepFunction
from nnfmq.engines.interpreter import Program, SubgraphPreparation, load_constant
from nnfmq.hal.types import Model, Operation, Subgraph
from nnfmq.operations.signature import Array

__all__ = ["CachedPreparation", "CompiledArtifact", "load_partitions"]


class _Step(msgspec.Struct, frozen=True, array_like=True):
    function: str
    arg_count: int
    work_items: int
    parallelism: Parallelism


class _Output(msgspec.Struct, frozen=True, array_like=True):
    index: int
    offset: int
    dtype: str
    shape: tuple[int, ...]


class _Segment(msgspec.Struct, frozen=True, array_like=True):
    """A PartitionPlan, and the numbers of its first and its last operation."""

    first: int
    last: int
    steps: tuple[_Step, ...]
    inputs: tuple[int, ...]
    outputs: tuple[_Output, ...]
    regions: bytes
    offsets: bytes
    arena_bytes: int
    scratch_bytes: int


class _Program(msgspec.Struct, frozen=True, array_like=True):
    """All segments, and what preparing found out that other operations ask for."""

    segments: tuple[_Segment, ...]
    required: tuple[int, ...]
    shapes: tuple[tuple[int, ...] | None, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Program)


class CompiledArtifact(msgspec.Struct, frozen=True):
    """What a program's segments are made of. `groups` has each with the numbers of its first and last operation."""

    groups: Sequence[tuple[int, int, PartitionPlan]]
    constants: Array
    code: Sequence[Array]

    def to_arrays(self, required: Sequence[int], shapes: Sequence[tuple[int, ...] | None]) -> tuple[Array, ...]:
        """Return them for `RestoredPreparation`: the plan, the constants, then object code.

        `required` are the operands that may not be omitted, `shapes` those known of all operands.
        """
        segments = tuple(_segment(first, last, plan) for first, last, plan in self.groups)
        saved = _Program(segments, tuple(required), tuple(shapes))
        return np.frombuffer(_encoder.encode(saved), np.uint8), self.constants, *self.code


def _segment(first: int, last: int, plan: PartitionPlan) -> _Segment:
    steps = tuple(_Step(s.function, s.arg_count, s.work_items, s.parallelism) for s in plan.launches)
    outputs = tuple(_Output(index, offset, value.dtype.str, value.shape) for index, offset, value in plan.outputs)
    words = plan.relocation_bases.tobytes(), plan.relocation_offsets.tobytes()
    return _Segment(first, last, steps, plan.inputs, outputs, *words, plan.arena_bytes, plan.scratch_bytes)


def _plan(saved: _Segment) -> PartitionPlan:
    steps = tuple(PlannedLaunch(s.function, s.arg_count, s.work_items, s.parallelism) for s in saved.steps)
    outputs = tuple((o.index, o.offset, ArraySpec(np.dtype(o.dtype), o.shape)) for o in saved.outputs)
    words = np.frombuffer(saved.regions, np.int64), np.frombuffer(saved.offsets, np.int64)
    return PartitionPlan(steps, saved.inputs, outputs, *words, saved.arena_bytes, saved.scratch_bytes)


def load_partitions(
    parts: CompiledArtifact, target: Target, pool: ThreadPool, first_slot: int
) -> list[CompiledPartition]:
    """Return the segments, over code that is linked into this process as long as one of them lives."""
    if not parts.groups:
        return []
    code = LoadedCode([code.tobytes() for code in parts.code], target)
    plans = [plan for _, _, plan in parts.groups]
    return [CompiledPartition(plan, parts.constants, code, pool, first_slot + n) for n, plan in enumerate(plans)]


class CachedPreparation(SubgraphPreparation):
    """The way from a subgraph, and a program's parts, to that program again."""

    def __init__(
        self,
        model: Model,
        subgraph: Subgraph,
        programs: dict[int, Program],
        arrays: Sequence[Array],
        target: Target,
        pool: ThreadPool,
    ) -> None:
        plan, constants, *code = self._arrays = tuple(arrays)
        self._saved = saved = _decoder.decode(plan.data)
        self._generated = frozenset(n for s in saved.segments for n in range(s.first, s.last + 1))
        super().__init__(model, subgraph, programs)
        self._parts = CompiledArtifact([(s.first, s.last, _plan(s)) for s in saved.segments], constants, code)
        self._target, self._pool = target, pool
        self._shapes = list(saved.shapes)
        self._required.update(saved.required)
        self._read.update(index for s in saved.segments for index in s.inputs)
        self.extra_slots = len(saved.segments)

    def load_constants(self) -> ExecutionFrame:
        """Return those that are read as they are: all others have been packed."""
        others = (o for n, o in enumerate(self.subgraph.operations) if n not in self._generated)
        read = {index for operation in others for index in operation.inputs}
        read.update(index for segment in self._saved.segments for index in segment.inputs)
        operands = enumerate(self.subgraph.operands)
        return [load_constant(self._model, operand) if index in read else None for index, operand in operands]

    def program(self) -> Program:
        """Bind the operations that no kernel computes."""
        program = super().program()
        program.compiled_ops, program.prepacked = self._generated, (self._arrays,)
        return program

    def prepare_step(self, number: int, operation: Operation) -> Any:
        """Return the step of an operation, None for one that is in a segment."""
        return None if number in self._generated else super().prepare_step(number, operation)

    def group_steps(self, steps: Sequence[Any]) -> list[tuple[int, StepFunction]]:
        """Put the segments where their operations were."""
        segments = load_partitions(self._parts, self._target, self._pool, len(self.subgraph.operands))
        ends = [last for _, last, _ in self._parts.groups]
        others = [(number, step) for number, step in enumerate(steps) if step is not None]
        return sorted([*others, *zip(ends, segments, strict=True)], key=lambda numbered: numbered[0])
