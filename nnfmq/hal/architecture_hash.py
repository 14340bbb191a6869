"""The hash that identifies a model's architecture, in telemetry and in the runtime."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from nnfmq.hal.types import Model

__all__ = ["model_architecture_hash"]


def model_architecture_hash(model: Model) -> str:
    """Return a SHA-256 of operands and operations without the values of constants, in hexadecimal.

    Retraining a model does not change it. Equal text means an equal sequence of operand types, dimensions,
    quantizations, lifetimes and operations in each subgraph.
    """
    digest = hashlib.sha256()
    for subgraph in (model.main, *model.referenced):
        for operand in subgraph.operands:
            digest.update(_numbers((operand.type, operand.lifetime, operand.zero_point, *operand.dimensions)))
            digest.update(struct.pack("<d", operand.scale))
            channels = operand.channel_quant
            if channels is not None:
                digest.update(_numbers((channels.channel_dim, len(channels.scales))))
                digest.update(struct.pack(f"<{len(channels.scales)}d", *channels.scales))
        for operation in subgraph.operations:
            digest.update(_numbers((operation.type,)) + _numbers(operation.inputs) + _numbers(operation.outputs))
        digest.update(_numbers(subgraph.input_indexes) + _numbers(subgraph.output_indexes))
    return digest.hexdigest()


def _numbers(values: Sequence[int]) -> bytes:
    """Return a count and the values, so that sequences of different lengths differ."""
    return struct.pack(f"<{len(values) + 1}q", len(values), *values)
