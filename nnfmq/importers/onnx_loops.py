"""Loop and Scan: their parts, how often they iterate, and their iterations one after the other.

Both have a body, whose inputs are carried values and, in a Scan, elements of sequences; its outputs are the carried
values of the next iteration, and elements of the sequences that the node returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers.onnx_operators.onnx_composition import Composition
from nnfmq.importers.onnx_operators.onnx_movement import axis_of
from nnfmq.importers.onnx_values import Node, Value

__all__ = ["Iterations", "Sequenced", "iterations_of", "trip_count", "unrolled"]

Convert: TypeAlias = Callable[[Mapping[str, Value]], "list[Value | None]"]
"""Converts the body once, with these values by name, and returns its results; None is a result with a problem."""
Evaluate: TypeAlias = Callable[[Sequence[Any], Mapping[str, Value]], "dict[str, Value | None] | None"]
"""Computes nodes whose inputs are constants; None if they are not."""
_MAX_EVALUATED = 4096  # iterations, to count them
_FIRST_OPSET = 9  # of Scan in its present form


class Sequenced(Struct, frozen=True):
    """A sequence that a Scan reads or writes, along `axis`; its elements have one dimension less."""

    axis: int
    is_reversed: bool


class Iterations(Struct, frozen=True):
    """The parts of a Loop or Scan.

    `limit` is the largest number of iterations; None if there is none, or if it is `computed_limit`. `begins` is the
    condition of the first one, None if the model computes it.
    """

    body: Any
    limit: int | None
    begins: bool | None
    carried: tuple[Value, ...]
    sequences: tuple[tuple[Value, Sequenced], ...] = ()
    results: tuple[Sequenced, ...] = ()
    computed_limit: Value | None = None

    @property
    def is_scan(self) -> bool:
        """Whether the body has neither a counter nor a condition."""
        return bool(self.sequences)

    @property
    def carried_names(self) -> list[str]:
        """The names of the body's inputs that are carried values."""
        first = 0 if self.is_scan else 2
        return [info.name for info in self.body.input[first : first + len(self.carried)]]

    @property
    def next_names(self) -> list[str]:
        """The names of the body's outputs that are the carried values of the next iteration."""
        first = 0 if self.is_scan else 1
        return [info.name for info in self.body.output[first : first + len(self.carried)]]


def iterations_of(node: Node) -> Iterations:
    """Return the parts of a Loop or Scan.

    Raises:
        InvalidArgument: If its inputs do not fit its body.
    """
    return _scan(node) if node.operator == "Scan" else _loop(node)


def _loop(node: Node) -> Iterations:
    body = node.attributes["body"]
    limit, computed = None, node.value(0) if node.given(0) else None
    if computed is not None and computed.array is not None:
        limit, computed = int(computed.array.reshape(-1)[0]), None
    begins: bool | None = True
    if node.given(1):
        condition = node.value(1).array
        begins = None if condition is None else bool(condition.reshape(-1)[0])
    carried = tuple(node.value(position) for position in range(2, len(node.inputs)))
    results = len(body.output) - 1 - len(carried)
    if len(body.input) != 2 + len(carried) or results < 0 or len(node.output_names) > len(carried) + results:
        raise InvalidArgument(f"{len(carried)} values do not fit its body")
    return Iterations(body, limit, begins, carried, (), (Sequenced(0, False),) * results, computed)


def _scan(node: Node) -> Iterations:
    if node.opset < _FIRST_OPSET:
        raise InvalidArgument(f"opset {node.opset} is not supported: it has another meaning")
    body, count = node.attributes["body"], node.attribute("num_scan_inputs", 0)
    first = len(node.inputs) - count
    if not 0 < count <= len(node.inputs) or len(body.input) != len(node.inputs) or len(body.output) < first:
        raise InvalidArgument(f"{len(node.inputs)} inputs, of which {count} are sequences, do not fit its body")
    values = [node.value(position) for position in range(len(node.inputs))]
    axes, directions = (node.attribute(f"scan_input_{name}", (0,) * count) for name in ("axes", "directions"))
    sequences = tuple(
        (value, Sequenced(axis_of(axis, len(value.shape)), bool(direction)))
        for value, axis, direction in zip(values[first:], axes, directions, strict=True)
    )
    lengths = {value.shape[sequenced.axis] for value, sequenced in sequences}
    if len(lengths) != 1:
        raise InvalidArgument(f"sequences of {sorted(lengths)} elements")
    outputs = len(body.output) - first
    axes, directions = (node.attribute(f"scan_output_{name}", (0,) * outputs) for name in ("axes", "directions"))
    results = tuple(Sequenced(axis, bool(direction)) for axis, direction in zip(axes, directions, strict=True))
    return Iterations(body, lengths.pop(), True, tuple(values[:first]), sequences, results)


def trip_count(loop: Iterations, read_names: Callable[[Any], Sequence[str]], evaluate: Evaluate) -> int | None:
    """Return how often a loop iterates; None if that depends on the model's inputs.

    Raises:
        InvalidArgument: If it never ends, or takes longer to count than is supported.
    """
    if loop.is_scan:
        return loop.limit
    if loop.begins is False:
        return 0
    if loop.begins is None or loop.computed_limit is not None:
        return None
    nodes, names = _condition_nodes(loop, read_names)
    counter, condition = (info.name for info in loop.body.input[:2])
    given = {condition: Value.of(np.array(True))}
    starts = dict(zip(loop.carried_names, loop.carried, strict=True))
    given.update({name: value for name, value in starts.items() if name in names})
    following = dict(zip(loop.carried_names, loop.next_names, strict=True))
    is_constant = counter not in names and not starts.keys() & names
    for iteration in range(_MAX_EVALUATED):
        if loop.limit is not None and iteration >= loop.limit:
            return loop.limit
        given[counter] = Value.of(np.array(iteration, np.int64))
        found = evaluate(nodes, given)
        if found is None:
            return None
        value = found.get(loop.body.output[0].name)
        if value is None or value.array is None:
            return None
        if not value.array.reshape(-1)[0]:
            return iteration + 1
        if is_constant and loop.limit is not None:
            return loop.limit
        latest = {name: found.get(following[name]) for name in names if name in following}
        given.update({name: each for name, each in latest.items() if each is not None})
    raise InvalidArgument(f"it iterates more than {_MAX_EVALUATED} times, or indefinitely")


def _condition_nodes(loop: Iterations, read_names: Callable[[Any], Sequence[str]]) -> tuple[list[Any], set[str]]:
    """Return the nodes of the body on which its condition depends, in its order, and the names that they read."""
    following = dict(zip(loop.carried_names, loop.next_names, strict=True))
    wanted, size = {loop.body.output[0].name}, 0
    while size != len(wanted):
        size = len(wanted)
        wanted.update(following[name] for name in wanted & following.keys())
        for proto in reversed(loop.body.node):
            if not wanted.isdisjoint(proto.output):
                wanted.update(read_names(proto))
    return [proto for proto in loop.body.node if not wanted.isdisjoint(proto.output)], wanted


def unrolled(node: Node, loop: Iterations, count: int, convert: Convert) -> list[Value] | None:
    """Return the outputs of a node whose body is converted `count` times; None if there is a problem in it."""
    compose, carried = Composition(node), list(loop.carried)
    rows: list[list[Value]] = [[] for _ in loop.results]
    for iteration in range(count):
        found = convert(_given(compose, loop, carried, iteration, count))
        values = [value for value in found if value is not None]
        if len(values) != len(found):
            return None
        values = values if loop.is_scan else values[1:]
        carried = values[: len(carried)]
        for row, value in zip(rows, values[len(carried) :], strict=True):
            row.append(value)
    used = [node.used(len(carried) + place) for place in range(len(rows))]
    if any(used) and not count:
        return _without_iterations(compose, loop, carried, convert)
    node.builder.reserve(8 * sum(value.size for row in rows for value in row if value.array is not None))
    joined = [_stacked(compose, row, sequenced) for row, sequenced in zip(rows, loop.results, strict=True) if row]
    return [*carried, *joined]


def _without_iterations(
    compose: Composition, loop: Iterations, carried: list[Value], convert: Convert
) -> list[Value] | None:
    """Return the outputs of a Loop that does not iterate; an iteration would have the shapes of what it collects."""
    if loop.is_scan:
        raise InvalidArgument("it does not iterate, so that a result has no elements: that is not supported")
    found = convert(_given(compose, loop, carried, 0, 1))
    values = [value for value in found if value is not None][1 + len(carried) :]
    if len(values) != len(loop.results):
        return None
    return [*carried, *(Value.of(np.zeros((0, *value.shape), value.dtype)) for value in values)]


def _given(
    compose: Composition, loop: Iterations, carried: Sequence[Value], iteration: int, count: int
) -> dict[str, Value]:
    """Return the inputs of the body in one iteration."""
    given = dict(zip(loop.carried_names, carried, strict=True))
    if not loop.is_scan:
        counter, condition = loop.body.input[:2]
        given[counter.name] = Value.of(np.array(iteration, np.int64))
        given[condition.name] = Value.of(np.array(True))
    for info, (value, sequenced) in zip(loop.body.input[len(given) :], loop.sequences, strict=False):
        at = count - 1 - iteration if sequenced.is_reversed else iteration
        element = compose.part(value, sequenced.axis, at, at + 1)
        shape = value.shape[: sequenced.axis] + value.shape[sequenced.axis + 1 :]
        given[info.name] = compose.reshape(element, *shape)
    return given


def _stacked(compose: Composition, row: Sequence[Value], sequenced: Sequenced) -> Value:
    """Return the elements of all iterations as one tensor."""
    ordered = row[::-1] if sequenced.is_reversed else row
    axis = axis_of(sequenced.axis, len(row[0].shape) + 1)
    if all(value.array is not None for value in ordered):
        return Value.of(np.stack([np.asarray(value.array) for value in ordered], axis))
    parts = [compose.reshape(value, *value.shape[:axis], 1, *value.shape[axis:]) for value in ordered]
    return parts[0] if len(parts) == 1 else compose("Concat", *parts, axis=axis)
