"""Functions of whole models: the hash of the architecture, the alignment of constants, removal of unused operands."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from msgspec.structs import replace

from nnfmq.hal.hosted import is_hosted
from nnfmq.hal.types import Model, Subgraph

__all__ = ["aligned_offset", "alignment_for", "model_architecture_hash", "round_up", "without_unused_operands"]


def model_architecture_hash(model: Model) -> str:
    """Return a SHA-256 of operands and operations without the values of constants, in hexadecimal.

    Retraining a model does not change it. Equal text means an equal sequence of operand types, dimensions,
    quantizations, lifetimes and operations in each subgraph. Of a hosted model the sizes of its files count, not the
    description of the call, which has the files' names and the options of the runtime.
    """
    import hashlib  # it loads OpenSSL, and only observers want this

    digest, call = hashlib.sha256(), _hosted_call(model)
    for subgraph in (model.main, *model.referenced):
        for index, operand in enumerate(subgraph.operands):
            dimensions = () if index == call else operand.dimensions
            digest.update(_numbers((operand.type, operand.lifetime, operand.zero_point, *dimensions)))
            digest.update(struct.pack("<d", operand.scale))
            channels = operand.channel_quant
            if channels is not None:
                digest.update(_numbers((channels.channel_dim, len(channels.scales))))
                digest.update(struct.pack(f"<{len(channels.scales)}d", *channels.scales))
        for operation in subgraph.operations:
            digest.update(_numbers((operation.type,)) + _numbers(operation.inputs) + _numbers(operation.outputs))
        digest.update(_numbers(subgraph.input_indexes) + _numbers(subgraph.output_indexes))
    return digest.hexdigest()


def _hosted_call(model: Model) -> int | None:
    """Return the index of the operand that describes the call of a hosted model; None for another model."""
    if not is_hosted(model):
        return None
    return next((operation.inputs[0] for operation in model.main.operations if operation.inputs), None)


def _numbers(values: Sequence[int]) -> bytes:
    """Return a count and the values, so that sequences of different lengths differ."""
    return struct.pack(f"<{len(values) + 1}q", len(values), *values)


# ----------------------------------------------------------------------------------------------------------------------
# The alignment of constants in a model's `operand_values` and pools.
#
# Source: the HAL's utilities, roundUp and getAlignmentForLength.


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not less than `value`."""
    return -(-value // multiple) * multiple


def alignment_for(size_bytes: int) -> int:
    """Return the alignment of a value of `size_bytes`: 1 below 2 bytes, 2 for 2 and 3 bytes, otherwise 4."""
    return 1 if size_bytes < 2 else 2 if size_bytes < 4 else 4


def aligned_offset(end: int, size_bytes: int) -> int:
    """Return the offset of the next value, of `size_bytes`, where the values so far take `end` bytes."""
    return round_up(end, alignment_for(size_bytes))


# ----------------------------------------------------------------------------------------------------------------------
# Removal of the operands of a subgraph that nothing uses.


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
