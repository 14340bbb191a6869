"""Compiled programs in the compilation cache: the artifact, and preparation from it without lowering or packing again.

An artifact is a list of arrays: the partitions' plans as msgpack, all constants, then the kernels' object code.
Preparation from an artifact restores the partitions, and prepares only the operations without kernels, with the shapes
that were known. An artifact is valid for this build of nnfmq, one target and one model. The caller that stores it
checks that.

This module imports neither lowering rules nor kernels: a driver that links a cached program starts faster without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from nnfmq.engines.compiled.executor import CompiledPartition
from nnfmq.engines.compiled.guard_pages import Guards, guarded_copy
from nnfmq.engines.compiled.memory_plan import ArraySpec, PartitionPlan, PlannedErrors, PlannedLaunch
from nnfmq.engines.compiled.object_code import LoadedCode
from nnfmq.engines.compiled.thread_pool import default_thread_pool
from nnfmq.engines.interpreter import SubgraphPreparation, load_constant, prepare_with
from nnfmq.engines.program import ExecutionFrame, Program, StepFunction
from nnfmq.hal.types import Model, Operation, Subgraph
from nnfmq.operations.control_flow import reachable_subgraphs
from nnfmq.operations.declaration import Array

__all__ = ["CachedPreparation", "CompiledArtifact", "load_partitions", "prepare_cached"]


class _StoredOutput(msgspec.Struct, frozen=True, array_like=True):
    index: int
    offset: int
    dtype: str
    shape: tuple[int, ...]


class _StoredPartition(msgspec.Struct, frozen=True, array_like=True):
    """A PartitionPlan, and the numbers of its first and last operation."""

    first: int
    last: int
    launches: tuple[PlannedLaunch, ...]
    inputs: tuple[int, ...]
    outputs: tuple[_StoredOutput, ...]
    direct_outputs: tuple[int, ...]
    relocation_bases: bytes
    relocation_offsets: bytes
    arena_bytes: int
    scratch_bytes: int
    errors: tuple[PlannedErrors, ...]
    errors_offset: int
    guards: Guards | None

    @classmethod
    def of(cls, first: int, last: int, plan: PartitionPlan) -> _StoredPartition:
        return cls(
            first,
            last,
            plan.launches,
            plan.inputs,
            tuple(_StoredOutput(index, offset, spec.dtype.str, spec.shape) for index, offset, spec in plan.outputs),
            plan.direct_outputs,
            plan.relocation_bases.tobytes(),
            plan.relocation_offsets.tobytes(),
            plan.arena_bytes,
            plan.scratch_bytes,
            plan.errors,
            plan.errors_offset,
            plan.guards,
        )

    def plan(self) -> PartitionPlan:
        return PartitionPlan(
            self.launches,
            self.inputs,
            tuple((o.index, o.offset, ArraySpec(np.dtype(o.dtype), o.shape)) for o in self.outputs),
            self.direct_outputs,
            np.frombuffer(self.relocation_bases, np.int64),
            np.frombuffer(self.relocation_offsets, np.int64),
            self.arena_bytes,
            self.scratch_bytes,
            self.errors,
            self.errors_offset,
            self.guards,
        )


class _StoredProgram(msgspec.Struct, frozen=True, array_like=True):
    """All partitions, the guards of their constants, and results of preparation that other operations need."""

    partitions: tuple[_StoredPartition, ...]
    constant_guards: tuple[int, ...]
    required: tuple[int, ...]
    shapes: tuple[tuple[int, ...] | None, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_StoredProgram)


class CompiledArtifact(msgspec.Struct, frozen=True):
    """A program's partitions, each with the numbers of its first and last operation, their constants and their code.

    `constant_guards` are the offsets of guard pages in the constants: none but for debugging.
    """

    partitions: Sequence[tuple[int, int, PartitionPlan]]
    constants: Array
    object_code: Sequence[Array]
    constant_guards: tuple[int, ...] = ()

    def to_arrays(self, required: Sequence[int], shapes: Sequence[tuple[int, ...] | None]) -> tuple[Array, ...]:
        """Return the arrays for `CachedPreparation`: the plans, the constants, then the code.

        `required` are the operands that may not be omitted; `shapes` are all operands' shapes, None if not known.
        """
        partitions = tuple(_StoredPartition.of(first, last, plan) for first, last, plan in self.partitions)
        stored = _StoredProgram(partitions, self.constant_guards, tuple(required), tuple(shapes))
        return np.frombuffer(_encoder.encode(stored), np.uint8), self.constants, *self.object_code


def load_partitions(artifact: CompiledArtifact, first_slot: int) -> list[CompiledPartition]:
    """Return the partitions, with frame slots from `first_slot` on.

    The code is loaded into this process, and unloaded with the last of them.
    """
    if not artifact.partitions:
        return []
    pool = default_thread_pool()
    code = LoadedCode([array.tobytes() for array in artifact.object_code])
    plans = [plan for _, _, plan in artifact.partitions]
    constants, guards = artifact.constants, artifact.constant_guards
    if guards:
        constants = guarded_copy(constants, guards)
    return [CompiledPartition(plan, constants, code, pool, first_slot + n) for n, plan in enumerate(plans)]


def prepare_cached(model: Model, prepacked: Sequence[tuple[Array, ...]]) -> Program:
    """Return a Program that executes the main subgraph of `model`, without lowering or compiling anything.

    `prepacked` is `Program.prepacked` of an earlier Program of the same model, build and target: machine code of the
    main subgraph and of each that it calls, and prepacked weights.
    """
    count = 1 + len(set[int]().union(*(reachable_subgraphs(model, operation) for operation in model.main.operations)))
    program = prepare_with(partial(CachedPreparation, artifacts=iter(prepacked[:count])), model, prepacked[count:])
    program.prepacked = tuple(prepacked)
    return program


class CachedPreparation(SubgraphPreparation):
    """Prepares a program from the next of the artifacts, each the arrays of a subgraph."""

    def __init__(
        self,
        model: Model,
        subgraph: Subgraph,
        programs: dict[int, Program],
        artifacts: Iterator[tuple[Array, ...]],
    ) -> None:
        self._artifacts = artifacts
        plan, constants, *code = next(artifacts)
        self._stored = stored = _decoder.decode(plan.data)
        self._compiled_ops = frozenset(n for p in stored.partitions for n in range(p.first, p.last + 1))
        super().__init__(model, subgraph, programs)
        partitions = [(p.first, p.last, p.plan()) for p in stored.partitions]
        self._artifact = CompiledArtifact(partitions, constants, code, stored.constant_guards)
        self._shapes = list(stored.shapes)
        self._required.update(stored.required)
        self._read.update(index for partition in stored.partitions for index in partition.inputs)
        self.extra_slots = len(stored.partitions)

    def preparation_of(self, subgraph: Subgraph) -> CachedPreparation:
        """Return the preparation of a subgraph that IF or WHILE call."""
        return CachedPreparation(self._model, subgraph, self._programs, self._artifacts)

    def load_constants(self) -> ExecutionFrame:
        """Return the constants that steps read; those that kernels read are in the artifact, packed."""
        others = (o for n, o in enumerate(self.subgraph.operations) if n not in self._compiled_ops)
        read = {index for operation in others for index in operation.inputs}
        read.update(index for partition in self._stored.partitions for index in partition.inputs)
        operands = enumerate(self.subgraph.operands)
        return [load_constant(self._model, operand) if index in read else None for index, operand in operands]

    def program(self) -> Program:
        """Bind the operations without kernels, and return the program."""
        program = super().program()
        program.compiled_ops = self._compiled_ops
        return program

    def prepare_step(self, number: int, operation: Operation) -> Any:
        """Return the step of an operation, or None if a partition computes it."""
        return None if number in self._compiled_ops else super().prepare_step(number, operation)

    def group_steps(self, functions: Sequence[Any]) -> list[tuple[int, StepFunction]]:
        """Return the steps with the partitions in the places of their operations."""
        partitions = load_partitions(self._artifact, len(self.subgraph.operands))
        ends = [last for _, last, _ in self._artifact.partitions]
        others = [(number, function) for number, function in enumerate(functions) if function is not None]
        return sorted([*others, *zip(ends, partitions, strict=True)], key=lambda numbered: numbered[0])
