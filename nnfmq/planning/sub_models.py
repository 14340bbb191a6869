"""Models of some operations of a larger model: the sub-models of steps, and the slices that devices are asked about.

A sub-model has the operands of its operations in the order of the source, and of the source's constants, pools,
referenced subgraphs and extensions only what these operations use. Pools are shared with the source, not copied.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

from msgspec import Struct
from msgspec.structs import replace

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import extension_prefix, is_extension
from nnfmq.hal.feature_levels import FeatureLevel
from nnfmq.hal.types import LifeTime, Model, Operand, Operation, Pool, Subgraph, element_bytes, is_scalar
from nnfmq.operations.control_flow import FIRST_OUTER_INPUT, callee_indexes, reachable_subgraphs
from nnfmq.planning.plan import MAIN, subgraph_of
from nnfmq.validation.models import operand_level, operation_level, validate_model

__all__ = ["MetaModel", "ModelSlice", "NeededLevels", "extract_model", "has_unknown_size", "subgraph_as_model"]

_ALIGNMENT = 16  # of constants in `Model.operand_values`: kernels read them in place


def extract_model(
    model: Model, subgraph: int, operations: Collection[int], inputs: Sequence[int], outputs: Sequence[int]
) -> Model:
    """Return a model of `operations` of a subgraph of `model`.

    Args:
        model: A valid model.
        subgraph: MAIN or the index of a referenced subgraph plus 1.
        operations: Indexes of operations, in the order of execution.
        inputs: The operands that become inputs of the new model: all that the operations read and do not write, except
            constants and omitted ones.
        outputs: The operands that become its outputs; the operations write them.
    """
    return _Extraction(model).extract(subgraph_of(model, subgraph), operations, inputs, outputs)


def subgraph_as_model(model: Model, subgraph: int) -> Model:
    """Return a model whose main subgraph is the given one: `model` itself for MAIN."""
    if subgraph == MAIN:
        return model
    graph = subgraph_of(model, subgraph)
    return extract_model(model, subgraph, range(len(graph.operations)), graph.input_indexes, graph.output_indexes)


def has_unknown_size(operand: Operand) -> bool:
    """Return whether an operand is a tensor whose rank or one of whose dimensions is unknown.

    An omitted operand has no size. A type of an unknown extension without dimensions may be a scalar.
    """
    if operand.lifetime == LifeTime.NO_VALUE or is_scalar(operand.type):
        return False
    if not operand.dimensions:
        return not is_extension(operand.type) or bool(element_bytes(operand.type))
    return 0 in operand.dimensions


class _Extraction:
    """One new model under construction: what it uses of the source, and the new indexes and offsets of that."""

    def __init__(self, source: Model) -> None:
        self._source = source
        self._values = bytearray()
        self._offsets: dict[tuple[int, int], int] = {}  # offset and length in the source's operand values
        self._pools: dict[int, int] = {}
        self._subgraphs: dict[int, int] = {}
        self._prefixes: set[int] = set()

    def extract(
        self, source: Subgraph, operations: Collection[int], inputs: Sequence[int], outputs: Sequence[int]
    ) -> Model:
        """Return the model. Call it once."""
        main = self._part(source, [source.operations[index] for index in operations], inputs, outputs)
        referenced = self._referenced()
        extensions = tuple(e for e in self._source.extensions if e.prefix in self._prefixes)
        pools: tuple[Pool, ...] = tuple(self._source.pools[index] for index in self._pools)
        return replace(
            self._source,
            main=main,
            referenced=referenced,
            operand_values=bytes(self._values),
            pools=pools,
            extensions=extensions,
        )

    def _referenced(self) -> tuple[Subgraph, ...]:
        """Return the subgraphs that are called; copying one may add those that it calls itself."""
        copied: list[Subgraph] = []
        while len(copied) < len(self._subgraphs):
            source = self._source.referenced[list(self._subgraphs)[len(copied)]]
            copied.append(self._part(source, source.operations, source.input_indexes, source.output_indexes))
        return tuple(copied)

    def _part(
        self, source: Subgraph, operations: Sequence[Operation], inputs: Sequence[int], outputs: Sequence[int]
    ) -> Subgraph:
        used = {index for operation in operations for index in (*operation.inputs, *operation.outputs)}
        used.update(inputs, outputs)
        indexes = {index: position for position, index in enumerate(sorted(used))}
        lifetimes = dict.fromkeys(inputs, LifeTime.SUBGRAPH_INPUT) | dict.fromkeys(outputs, LifeTime.SUBGRAPH_OUTPUT)
        return Subgraph(
            tuple(self._operand(source.operands[index], lifetimes.get(index)) for index in indexes),
            tuple(self._operation(operation, indexes) for operation in operations),
            tuple(indexes[index] for index in inputs),
            tuple(indexes[index] for index in outputs),
        )

    def _operation(self, operation: Operation, indexes: dict[int, int]) -> Operation:
        self._note_extension(operation.type)
        inputs, outputs = (tuple(indexes[index] for index in side) for side in (operation.inputs, operation.outputs))
        return Operation(operation.type, inputs, outputs)

    def _operand(self, operand: Operand, lifetime: LifeTime | None) -> Operand:
        self._note_extension(operand.type)
        if operand.lifetime == LifeTime.CONSTANT_COPY:
            return self._moved(operand, offset=self._offset(operand.location.offset, operand.location.length))
        if operand.lifetime == LifeTime.CONSTANT_REFERENCE:
            return self._moved(operand, pool_index=_new_index(self._pools, operand.location.pool_index))
        if operand.lifetime == LifeTime.SUBGRAPH:
            return self._moved(operand, offset=_new_index(self._subgraphs, operand.location.offset))
        return operand if lifetime in (None, operand.lifetime) else replace(operand, lifetime=lifetime)

    def _moved(self, operand: Operand, **changes: int) -> Operand:
        moved = replace(operand.location, **changes)
        return operand if moved == operand.location else replace(operand, location=moved)

    def _offset(self, offset: int, length: int) -> int:
        found = self._offsets.get((offset, length))
        if found is None:
            self._values += bytes(-len(self._values) % _ALIGNMENT)
            found = self._offsets[offset, length] = len(self._values)
            self._values += self._source.operand_values[offset : offset + length]
        return found

    def _note_extension(self, code: int) -> None:
        if is_extension(code):
            self._prefixes.add(extension_prefix(code))


def _new_index(indexes: dict[int, int], old: int) -> int:
    return indexes.setdefault(old, len(indexes))


# ----------------------------------------------------------------------------------------------------------------------
# MetaModel: the slice of a model that the interface version of a device can express, for asking the device about it.
#
# A slice has the operations that a feature level knows with the types of their operands. Where an operation is missing,
# what it writes becomes an input of the slice, and what it reads an output. Before HAL 1.2 inputs and outputs of a
# model must have a known size (MOD-5), so an operation with one of unknown size is dropped as well, which may again
# make others illegal. IF and WHILE with an operand of unknown size are in no slice: no version of the HAL allows them
# (N-VAL-20).


_NO_LEVEL = max(FeatureLevel) + 1


class ModelSlice(Struct, frozen=True):
    """A slice as a model of its own; `operations[i]` is the index in the source of the slice's operation i."""

    model: Model
    operations: tuple[int, ...]

    def supported_in_source(self, supported: Sequence[bool], count: int) -> list[bool]:
        """Return the support of the slice's operations as that of all `count` operations of the source."""
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
        """Return the slice of the subgraph that feature level `level` can express; None if that is nothing."""
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
