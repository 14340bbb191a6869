"""Graphs of an ONNX file: the nodes that outputs need, and the names that nodes read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

__all__ = ["live_nodes", "node_count", "read_names"]


def live_nodes(nodes: Sequence[Any], outputs: Iterable[str]) -> list[tuple[int, Any]]:
    """Return the nodes on which the outputs of a graph depend, with their indexes, in the graph's order."""
    wanted, found = set(outputs) - {""}, []
    for index, proto in reversed(list(enumerate(nodes))):
        if not wanted.isdisjoint(proto.output):
            found.append((index, proto))
            wanted.update(name for name in read_names(proto) if name)
    return found[::-1]


def node_count(graph: Any) -> int:
    """Return the number of nodes of a graph and of those in its nodes' attributes."""
    inner = (each.g for proto in graph.node for each in proto.attribute if each.HasField("g"))
    return len(graph.node) + sum(map(node_count, inner))


def read_names(proto: Any) -> Iterator[str]:
    """Yield the names that a node reads, those that the graphs in its attributes read included."""
    yield from proto.input
    for attribute in proto.attribute:
        if attribute.HasField("g"):
            yield from (info.name for info in attribute.g.output)
            for inner in attribute.g.node:
                yield from read_names(inner)
