"""Removal of the operands of a subgraph that nothing uses."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from nnfmq.hal.types import Subgraph

__all__ = ["without_unused_operands"]


def without_unused_operands(subgraph: Subgraph) -> Subgraph:
    """Return a subgraph without the operands that no operation has and that are no inputs or outputs.

    If there are none, that is `subgraph` itself. The others keep their order.
    """
    used = {index for operation in subgraph.operations for index in (*operation.inputs, *operation.outputs)}
    kept = sorted(used.union(subgraph.input_indexes, subgraph.output_indexes))
    if len(kept) == len(subgraph.operands):
        return subgraph
    number = {index: position for position, index in enumerate(kept)}

    def renumbered(indexes: Sequence[int]) -> tuple[int, ...]:
        return tuple(number[index] for index in indexes)

    operations = (replace(o, inputs=renumbered(o.inputs), outputs=renumbered(o.outputs)) for o in subgraph.operations)
    return Subgraph(
        tuple(subgraph.operands[index] for index in kept),
        tuple(operations),
        renumbered(subgraph.input_indexes),
        renumbered(subgraph.output_indexes),
    )
