"""MetaModel: the slice of a model that the interface version of a device can express, for asking the device about it.

A slice has the operations that a feature level knows with the types of their operands. Where an operation is missing,
what it writes becomes an input of the slice, and what it reads an output. Before HAL 1.2 inputs and outputs of a model
must have a known size (MOD-5), so an operation with one of unknown size is dropped as well, which may again make others
illegal. IF and WHILE with an operand of unknown size are in no slice: no version of the HAL allows them (N-VAL-20).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from msgspec.structs import replace

from nnfmq.execution_plan.plan import MAIN, subgraph_of
from nnfmq.execution_plan.sub_models import extract_model, has_unknown_size, subgraph_as_model
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.feature_levels import FeatureLevel
from nnfmq.hal.types import LifeTime, Model, Operation, Subgraph
from nnfmq.operations.called_subgraphs import callee_indexes, reachable_subgraphs
from nnfmq.operations.if_while import FIRST_OUTER_INPUT
from nnfmq.validation.model_validation import operand_level, operation_level, validate_model

__all__ = ["MetaModel", "ModelSlice", "NeededLevels"]

_NO_LEVEL = max(FeatureLevel) + 1


@dataclass(frozen=True, slots=True)
class ModelSlice:
    """A slice as a model of its own; `operations[i]` is the index in the source of the slice's operation i."""

    model: Model
    operations: tuple[int, ...]

    def supported_in_source(self, supported: Sequence[bool], count: int) -> list[bool]:
        """Return what a device supports of the slice as what it supports of all `count` operations of the source."""
        found = [False] * count
        for index, is_supported in zip(self.operations, supported, strict=True):
            found[index] = bool(is_supported)
        return found


class NeededLevels:
    """The feature levels that the operations of a model need, each with its operands and the subgraphs it calls."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._levels: dict[int, tuple[int, ...]] = {}
        self._unknown: dict[int, bool] = {}

    def of(self, subgraph: int) -> tuple[int, ...]:
        """Return the level of each operation of a subgraph; a level that does not exist if none allows it."""
        if subgraph not in self._levels:
            graph = subgraph_of(self._model, subgraph)
            operands = [operand_level(operand) for operand in graph.operands]
            self._levels[subgraph] = tuple(self._level(graph, operation, operands) for operation in graph.operations)
        return self._levels[subgraph]

    def _level(self, graph: Subgraph, operation: Operation, operands: Sequence[int]) -> int:
        if operation.type in FIRST_OUTER_INPUT and self.has_unknown_boundary(graph, operation):
            return _NO_LEVEL
        levels = [operands[index] for index in (*operation.inputs, *operation.outputs)]
        for callee in callee_indexes(graph, operation):
            levels += self.of(callee + 1)
        return max(operation_level(graph, operation), *levels)

    def has_unknown_boundary(self, graph: Subgraph, operation: Operation) -> bool:
        """Return whether an IF or WHILE, or one inside it, has an operand of unknown size at its boundary."""
        if any(has_unknown_size(graph.operands[index]) for index in (*operation.inputs, *operation.outputs)):
            return True
        return any(self._contains_unknown(callee) for callee in callee_indexes(graph, operation))

    def _contains_unknown(self, callee: int) -> bool:
        if callee not in self._unknown:
            graph = self._model.referenced[callee]
            boundary = (*graph.input_indexes, *graph.output_indexes)
            self._unknown[callee] = any(has_unknown_size(graph.operands[index]) for index in boundary) or any(
                self.has_unknown_boundary(graph, operation)
                for operation in graph.operations
                if operation.type in FIRST_OUTER_INPUT
            )
        return self._unknown[callee]


class MetaModel:
    """The slices of one subgraph of a model, as a model of their own.

    Args:
        model: A valid model.
        levels: What its operations need.
        subgraph: The subgraph.
        is_strict: Offer only slices that pass the full validation.
    """

    def __init__(self, model: Model, levels: NeededLevels, subgraph: int = MAIN, is_strict: bool = False) -> None:
        self._model, self._subgraph, self._is_strict = model, subgraph, is_strict
        self._graph = subgraph_of(model, subgraph)
        self._needed = levels
        self._slices: dict[int, ModelSlice | None] = {}

    @cached_property
    def _has_unknown_boundaries(self) -> bool:
        return any(
            self._needed.has_unknown_boundary(self._graph, operation)
            for operation in self._graph.operations
            if operation.type in FIRST_OUTER_INPUT
        )

    def slice(self, level: int) -> ModelSlice | None:
        """Return what feature level `level` can express of the subgraph; None if that is nothing."""
        if level not in self._slices:
            self._slices[level] = self._make_slice(level)
        return self._slices[level]

    def _make_slice(self, level: int) -> ModelSlice | None:
        kept = self._kept(level)
        if not kept:
            return None
        if len(kept) == len(self._graph.operations) and not self._has_unused_parts:
            model = subgraph_as_model(self._model, self._subgraph)
        else:
            model = extract_model(self._model, self._subgraph, kept, *_boundary(self._graph, kept))
        if level < FeatureLevel.V1_1 and model.relax_computation_float32_to_float16:
            # A permission, not a requirement: HAL 1.0 computes in float32, so it can execute the model.
            model = replace(model, relax_computation_float32_to_float16=False)
        return None if self._is_strict and not _is_valid(model, level) else ModelSlice(model, kept)

    @cached_property
    def _has_unused_parts(self) -> bool:
        """Whether there are operands or subgraphs that no operation uses: they may be newer than all operations."""
        operations = self._graph.operations
        used = {index for operation in operations for index in (*operation.inputs, *operation.outputs)}
        if len(used) < len(self._graph.operands):
            return True
        if self._subgraph != MAIN:
            return False  # the model of another subgraph has only the subgraphs that it calls
        called = set[int]().union(*(reachable_subgraphs(self._model, operation) for operation in operations))
        return len(called) < len(self._model.referenced)

    def _kept(self, level: int) -> tuple[int, ...]:
        count = len(self._graph.operations)
        if level >= max(FeatureLevel) and not self._has_unknown_boundaries:
            return tuple(range(count))
        dropped = {index for index, needed in enumerate(self._needed.of(self._subgraph)) if needed > level}
        if level < FeatureLevel.V1_2:
            _drop_unknown_boundaries(self._graph, dropped)
        return tuple(index for index in range(count) if index not in dropped)


def _is_valid(model: Model, level: int) -> bool:
    try:
        return validate_model(model) <= level
    except InvalidArgument:
        return False


def _drop_unknown_boundaries(graph: Subgraph, dropped: set[int]) -> None:
    """Add to `dropped` the operations that read an input or write an output of unknown size, until there are none."""
    unknown = {index for index, operand in enumerate(graph.operands) if has_unknown_size(operand)}
    users: dict[int, list[int]] = {}
    for position, operation in enumerate(graph.operations):
        for index in unknown.intersection((*operation.inputs, *operation.outputs)):
            users.setdefault(index, []).append(position)
    waiting = [index for index in unknown if graph.operands[index].lifetime != LifeTime.TEMPORARY_VARIABLE]
    waiting += [index for index, positions in users.items() if not dropped.isdisjoint(positions)]
    while waiting:  # each has to be an input or output of the slice: no operation may use it
        for position in users.pop(waiting.pop(), ()):
            dropped.add(position)
            operation = graph.operations[position]
            waiting += unknown.intersection((*operation.inputs, *operation.outputs))


def _boundary(graph: Subgraph, kept: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the operands that enter a slice of the operations `kept`, and those that leave it."""
    inside = set(kept)
    written = {index for position in kept for index in graph.operations[position].outputs}
    read = dict.fromkeys(index for position in kept for index in graph.operations[position].inputs)
    outside = [operation for position, operation in enumerate(graph.operations) if position not in inside]
    written_outside = {index for operation in outside for index in operation.outputs}
    read_outside = {index for operation in outside for index in operation.inputs}
    inputs = [index for index in graph.input_indexes if index in read]
    inputs += [index for index in read if index in written_outside]
    outputs = [index for index in graph.output_indexes if index in written]
    is_output = set(outputs)
    outputs += [index for index in sorted(written & read_outside) if index not in is_output]
    return inputs, outputs
