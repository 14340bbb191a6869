"""SubgraphMerging: several finished models as the subgraphs of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from nnfmq.hal.alignment import round_up
from nnfmq.hal.extension_codes import Code, extension_code, extension_prefix, extension_type, is_extension
from nnfmq.hal.types import LifeTime, Model, Operand, Pool, Subgraph
from nnfmq.model_builder.operand_types import OperandTypes

_ALIGNMENT = 4  # of constants within each model, and so of its constants as a whole


@dataclass(slots=True)
class SubgraphMerging:
    """Collects the subgraphs, constants and pools of models that IF and WHILE of another model call.

    A model that is added twice is there once. `types` has the extension codes of the model that calls them.
    """

    types: OperandTypes
    subgraphs: list[Subgraph] = field(default_factory=list)
    values: bytearray = field(default_factory=bytearray)
    pools: list[Pool] = field(default_factory=list)
    _models: list[tuple[Model, int]] = field(default_factory=list)

    def add(self, model: Model) -> int:
        """Return the index of the main subgraph of a finished model among `subgraphs`."""
        known = next((index for added, index in self._models if added is model), None)
        if known is not None:
            return known
        first = len(self.subgraphs)
        self.values += bytes(round_up(len(self.values), _ALIGNMENT) - len(self.values))
        relocation = _Relocation(len(self.values), self._pool_indexes(model), first + 1, self._prefixes(model))
        self.subgraphs += [relocation.moved(subgraph) for subgraph in (model.main, *model.referenced)]
        self.values += model.operand_values
        self._models.append((model, first))
        return first

    def _pool_indexes(self, model: Model) -> list[int]:
        """Return the index of each pool of a model among `pools`, to which it adds those that are new."""
        indexes = []
        for pool in model.pools:
            if not any(pool is known for known in self.pools):
                self.pools.append(pool)
            indexes.append(next(index for index, known in enumerate(self.pools) if known is pool))
        return indexes

    def _prefixes(self, model: Model) -> dict[int, int]:
        return {entry.prefix: self.types.prefix(entry.name) for entry in model.extensions}


@dataclass(frozen=True, slots=True)
class _Relocation:
    """The locations of a model's constants, pools and referenced subgraphs in another one, and its prefixes there."""

    values_offset: int
    pools: list[int]
    first_referenced: int
    prefixes: Mapping[int, int]

    def moved(self, subgraph: Subgraph) -> Subgraph:
        """Return a subgraph that refers to the other model's parts."""
        operations = tuple(replace(operation, type=self._code(operation.type)) for operation in subgraph.operations)
        return replace(subgraph, operands=tuple(map(self._operand, subgraph.operands)), operations=operations)

    def _operand(self, operand: Operand) -> Operand:
        location = operand.location
        if operand.lifetime == LifeTime.CONSTANT_COPY:
            location = replace(location, offset=self.values_offset + location.offset)
        elif operand.lifetime == LifeTime.CONSTANT_REFERENCE:
            location = replace(location, pool_index=self.pools[location.pool_index])
        elif operand.lifetime == LifeTime.SUBGRAPH:
            location = replace(location, offset=self.first_referenced + location.offset)
        return replace(operand, type=self._code(operand.type), location=location)

    def _code(self, code: Code) -> Code:
        if not is_extension(code):
            return code
        return type(code)(extension_code(self.prefixes[extension_prefix(code)], extension_type(code)))
