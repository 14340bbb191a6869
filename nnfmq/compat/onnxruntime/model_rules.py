"""Rules of ONNX Runtime for a file that nnfmq's own engine does not need: names that occur once, and a known version.

A file that breaks one goes to ONNX Runtime in the driver, which rejects it with its own text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from nnfmq.hal.errors import InvalidArgument

__all__ = ["refusal_of"]

_LATEST_IR_VERSION = 14  # of ONNX Runtime 1.32


def refusal_of(proto: Any) -> InvalidArgument | None:
    """Return an error that says which rule an onnx.ModelProto breaks; None if it breaks none."""
    if proto.ir_version > _LATEST_IR_VERSION:
        return InvalidArgument(f"Unsupported model IR version: {proto.ir_version}, max: {_LATEST_IR_VERSION}")
    for graph in _graphs(proto.graph):
        inputs = [info.name for info in graph.input]
        constants = {tensor.name for tensor in graph.initializer}.difference(inputs)
        results = [name for node in graph.node for name in node.output if name]
        for what, names in (
            ("value", [*inputs, *constants, *results]),
            ("node", [node.name for node in graph.node if node.name]),
        ):
            twice = _first_twice(names)
            if twice is not None:
                return InvalidArgument(f"Duplicate definition of the name {twice[:80]!r} of a {what}")
    return None


def _graphs(graph: Any) -> Iterator[Any]:
    """Yield a graph, and those in the attributes of its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def _first_twice(names: Iterable[str]) -> str | None:
    seen = set[str]()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
