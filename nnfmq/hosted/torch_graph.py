"""The graph of an exported program: its inputs and outputs, their sizes, and the inputs that it changes in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.hosted import Dimension, HostedTensor

__all__ = ["Place", "changed_inputs", "symbol_sizes"]

_RETURN_THEIR_INPUT = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
_NORMALIZATIONS = ("batch_norm", "instance_norm")


class Place(Struct, frozen=True):
    """An input or output: its place in the graph, its name, and torch's fake tensor, or something else."""

    index: int
    name: str
    value: Any

    @property
    def dtype(self) -> str:
        """The element type. Raises InvalidArgument if this is no tensor."""
        dtype = getattr(self.value, "dtype", None)
        if dtype is None:
            raise InvalidArgument(f"{self.name or self.index!r} is {self.value!r:.80}: only tensors cross")
        return str(dtype).removeprefix("torch.")

    def described(self, known: Mapping[Any, int]) -> HostedTensor:
        """Return the declaration, with known sizes of symbols; open sizes have the names of the program's symbols."""
        dtype = self.dtype  # there is no shape if this is no tensor
        sizes = (size if isinstance(size, int) else size.node.expr.subs(known) for size in self.value.shape)
        return HostedTensor(
            self.name, dtype, tuple(int(size) if getattr(size, "is_Integer", True) else str(size) for size in sizes)
        )


def symbol_sizes(
    places: Sequence[Place], shapes: Sequence[Sequence[Dimension]], ranges: Mapping[Any, Any]
) -> dict[Any, int]:
    """Return the size of each symbol if inputs have these shapes, whose sizes may be open.

    `ranges` has the sizes for which the program was exported.

    Raises:
        InvalidArgument: If a symbol has two sizes, or one for which the program was not exported.
    """
    known: dict[Any, int] = {}
    sizes = [
        (place.name, size.node.expr, given)
        for place, shape in zip(places, shapes, strict=True)
        for size, given in zip(place.value.shape, shape, strict=True)
        if not isinstance(size, int) and isinstance(given, int)
    ]
    for name, expression, given in sorted(sizes, key=lambda size: not size[1].is_symbol):
        expected = known.setdefault(expression, given) if expression.is_symbol else expression.subs(known)
        if getattr(expected, "is_number", True) and expected != given:
            raise InvalidArgument(f"input {name!r}: a size is {given}, but {expression} is {expected}")
        limits = ranges.get(expression)
        if limits is not None and not limits.lower <= given <= limits.upper:
            raise InvalidArgument(
                f"input {name!r}: {expression} is {given}; the program is for {limits.lower} to {limits.upper}"
            )
    return known


# ----------------------------------------------------------------------------------------------------------------------
# What a program changes in place: an export for training says nothing of it, as of ReLU in place.


def changed_inputs(module: Any) -> set[Any]:
    """Return the placeholders of a graph whose tensors its operations write, also through views of them."""
    origins: dict[Any, frozenset[Any]] = {}
    changed: set[Any] = set()
    for node in module.graph.nodes:
        if node.op == "placeholder":
            origins[node] = frozenset((node,))
        elif node.op == "call_function":
            written, viewed = _accesses(module, node)
            for argument in written:
                changed |= origins.get(argument, frozenset())
            origins[node] = frozenset().union(*(origins.get(argument, frozenset()) for argument in viewed))
    return changed


def _accesses(module: Any, node: Any) -> tuple[list[Any], list[Any]]:
    """Return the nodes whose tensors a node writes, and those that its results may be views of."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # a function of Python, such as getitem, or control flow, whose graphs may write
        inner = [getattr(module, argument.target) for argument in node.all_input_nodes if argument.op == "get_attr"]
        writes = any(changed_inputs(graph) for graph in inner if hasattr(graph, "graph"))
        return (node.all_input_nodes if writes else []), node.all_input_nodes
    name = schema.name.partition("::")[2]
    written, viewed = [], []
    for position, declared in enumerate(schema.arguments):
        given = node.args[position] if position < len(node.args) else node.kwargs.get(declared.name)
        nodes = [one for one in (given if isinstance(given, (list, tuple)) else [given]) if hasattr(one, "op")]
        if declared.alias_info is not None:
            viewed += nodes
            written += nodes if declared.alias_info.is_write else []
        elif name in _RETURN_THEIR_INPUT:
            viewed += nodes
        elif name in _NORMALIZATIONS and declared.name in ("running_mean", "running_var"):
            written += nodes if _is_training(node) else []
    return written, viewed


def _is_training(node: Any) -> bool:
    """Return whether a normalization updates the statistics that it has as arguments."""
    names = [declared.name for declared in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return bool(given.get("training", given.get("use_input_stats", True)))
