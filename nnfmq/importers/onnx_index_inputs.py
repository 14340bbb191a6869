"""Inputs of an ONNX graph that are indices: their elements of int64 fit 32 bits, or an operator would reject them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["index_inputs"]

_INDICES = {
    "Gather": 1, "GatherElements": 1, "GatherND": 1, "Scatter": 1, "ScatterElements": 1, "ScatterND": 1,
}  # fmt: skip
"""The position of the indices, all of which the operator requires to be inside an extent."""
_SAME_ELEMENTS = ("Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")


def index_inputs(nodes: Iterable[Any]) -> set[str]:
    """Return the names that nodes (onnx.NodeProto) of a graph read as indices, in whatever shape."""
    found: set[str] = set()
    for proto in reversed(list(nodes)):
        if proto.op_type in _INDICES:
            found.update(proto.input[_INDICES[proto.op_type] :][:1])
        elif proto.op_type == "Concat" and not found.isdisjoint(proto.output):
            found.update(proto.input)
        elif proto.op_type in _SAME_ELEMENTS and not found.isdisjoint(proto.output):
            found.update(proto.input[:1])
    return found
