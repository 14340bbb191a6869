"""Removal of the parts of a model that do not affect its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from nnfmq.hal.types import LifeTime, Model, Operand, Subgraph
from nnfmq.hal.unused_operands import without_unused_operands

__all__ = ["without_dead_parts"]


def without_dead_parts(model: Model) -> Model:
    """Return a valid model without unused operands, subgraphs that nothing calls, and pools without constants.

    If there are none, that is `model` itself. All operations remain, and so do the bytes of `operand_values`, of which
    many would be copied to save few.
    """
    main, *referenced = (without_unused_operands(subgraph) for subgraph in (model.main, *model.referenced))
    called = _called(main, referenced)
    kept = [main, *(referenced[index] for index in called)]
    pools = sorted({pool for subgraph in kept for pool in _numbers(subgraph, LifeTime.CONSTANT_REFERENCE)})
    if len(called) < len(referenced) or len(pools) < len(model.pools):
        subgraph_numbers = {index: number for number, index in enumerate(called)}
        pool_numbers = {index: number for number, index in enumerate(pools)}
        kept = [_renumbered(subgraph, subgraph_numbers, pool_numbers) for subgraph in kept]
    elif all(new is old for new, old in zip(kept, (model.main, *model.referenced), strict=True)):
        return model
    return replace(model, main=kept[0], referenced=tuple(kept[1:]), pools=tuple(model.pools[index] for index in pools))


def _called(main: Subgraph, referenced: Sequence[Subgraph]) -> list[int]:
    """Return the indexes of the referenced subgraphs that `main` calls, directly or through others, in order."""
    found: set[int] = set()
    unvisited = [main]
    while unvisited:
        new = _numbers(unvisited.pop(), LifeTime.SUBGRAPH) - found
        found |= new
        unvisited += [referenced[index] for index in new]
    return sorted(found)


def _numbers(subgraph: Subgraph, lifetime: LifeTime) -> set[int]:
    """Return the subgraphs or pools that operands refer to."""
    return {_number(operand) for operand in subgraph.operands if operand.lifetime == lifetime}


def _number(operand: Operand) -> int:
    is_subgraph = operand.lifetime == LifeTime.SUBGRAPH
    return operand.location.offset if is_subgraph else operand.location.pool_index


def _renumbered(subgraph: Subgraph, subgraphs: Mapping[int, int], pools: Mapping[int, int]) -> Subgraph:
    """Return a subgraph whose operands refer to subgraphs and pools by other indexes."""

    def moved(operand: Operand) -> Operand:
        if operand.lifetime == LifeTime.SUBGRAPH:
            return replace(operand, location=replace(operand.location, offset=subgraphs[operand.location.offset]))
        if operand.lifetime == LifeTime.CONSTANT_REFERENCE:
            return replace(operand, location=replace(operand.location, pool_index=pools[operand.location.pool_index]))
        return operand

    return replace(subgraph, operands=tuple(map(moved, subgraph.operands)))
