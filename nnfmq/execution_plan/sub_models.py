"""Models of some operations of a larger model: the sub-models of steps, and the slices that devices are asked about.

A sub-model has the operands of its operations in the order of the source, and of the source's constants, pools,
referenced subgraphs and extensions only what these operations use. Pools are shared with the source, not copied.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from nnfmq.execution_plan.plan import MAIN, subgraph_of
from nnfmq.hal.extension_codes import extension_prefix, is_extension
from nnfmq.hal.types import LifeTime, Model, Operand, Operation, Pool, Subgraph, element_bytes, is_scalar

__all__ = ["extract_model", "has_unknown_size", "subgraph_as_model"]

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
