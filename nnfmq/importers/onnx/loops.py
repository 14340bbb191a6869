"""Loop and Scan: their parts, how often they iterate, and their iterations one after the other.

Both have a body, whose inputs are carried values and, in a Scan, elements of sequences; its outputs are the carried
values of the next iteration, and elements of the sequences that the node returns.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import WIDE_TYPES, TfliteOperation, operation_code
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.types import DataLocation, LifeTime, Operand, OperandType
from nnfmq.importers.graph_builder import GraphBuilder
from nnfmq.importers.onnx.operators.composition import Composition
from nnfmq.importers.onnx.operators.movement import axis_of
from nnfmq.importers.onnx.values import Node, Value

__all__ = [
    "Iterations",
    "Sequenced",
    "VaryingShape",
    "WhileLoop",
    "iterations_of",
    "trip_count",
    "unrolled",
    "with_products_around",
]

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


# ----------------------------------------------------------------------------------------------------------------------
# Products of a Loop that do not depend on the iterations before: the input's part of a recurrent cell, for example.


def with_products_around(node: Node, loop: Iterations, count: int, values: dict[str, Value | None]) -> Iterations:
    """Return a loop that selects products in place of computing them: the product of all elements is around it.

    MatMul(Gather(sequence, i), weights) is Gather(MatMul(sequence, weights), i), which reads constant weights once
    instead of in each of the `count` iterations. `values` are those around the loop, and get the products.
    """
    carried = dict(zip(loop.carried_names, loop.carried, strict=True))
    scalars = {name for name, value in carried.items() if value.shape == ()}
    scalars |= set() if loop.is_scan else {loop.body.input[0].name}
    unchanged = _values_of_all_iterations(loop, carried, values)
    gathers = {proto.output[0]: proto for proto in loop.body.node if _selects_element(proto, scalars)}
    body = type(loop.body)()
    body.CopyFrom(loop.body)
    for proto in body.node:
        if proto.op_type != "MatMul" or proto.domain or proto.input[0] not in gathers:
            continue
        gather, output = gathers[proto.input[0]], proto.output[0]
        sequence, weights = (unchanged.get(name) for name in (gather.input[0], proto.input[1]))
        if sequence is not None and weights is not None and _is_product_of_rows(sequence, weights, count):
            product = f"{output} of all iterations"
            values[product] = Composition(node)("MatMul", sequence, weights)
            proto.CopyFrom(gather)
            proto.input[0], proto.output[0] = product, output
    return replace(loop, body=body)


def _values_of_all_iterations(
    loop: Iterations, carried: Mapping[str, Value], around: Mapping[str, Value | None]
) -> dict[str, Value]:
    """Return the values by name that are the same in each iteration of a body: those around it, and what it passes."""
    names = loop.carried_names
    made = {name for proto in loop.body.node for name in proto.output} | {each.name for each in loop.body.initializer}
    made |= {info.name for info in loop.body.input}
    found = {name: value for name, value in around.items() if value is not None and name not in made}
    passed = set(range(len(names))).difference(_varying(loop))
    return found | {names[position]: carried[names[position]] for position in passed}


def _selects_element(proto: Any, scalars: Container[str]) -> bool:
    """Return whether a node is Gather along axis 0 with an index of rank 0."""
    axes = [each.i for each in proto.attribute if each.name == "axis"]
    return proto.op_type == "Gather" and not proto.domain and axes in ([], [0]) and proto.input[1] in scalars


def _is_product_of_rows(sequence: Value, weights: Value, count: int) -> bool:
    """Return whether each of `count` elements of a sequence is a matrix, which constant weights multiply."""
    is_matrix = weights.array is not None and len(weights.shape) == 2 and len(sequence.shape) == 3
    return is_matrix and 0 < sequence.shape[0] <= count and sequence.shape[2] == weights.shape[0]


# ----------------------------------------------------------------------------------------------------------------------
# Loop and Scan as WHILE: a body and a condition that are subgraphs, with the shapes of the first iteration.
#
# The arguments of both are the carried values, the sequences that the node returns, a counter, the loop's condition,
# and what does not change. An iteration writes its elements of the sequences, which have their final size from the
# beginning.


_B8, _I32, _F32 = OperandType.TENSOR_BOOL8, OperandType.TENSOR_INT32, OperandType.TENSOR_FLOAT32
_MAX_COUNT = (1 << 31) - 1


class VaryingShape(InvalidArgument):
    """A carried value has another shape or type after an iteration: it cannot be a WHILE."""


@dataclass(slots=True)
class WhileLoop:
    """A loop under conversion: the node in the graph around it, and the body's builder.

    `limit` is the largest number of iterations, None if there is none; it is their number if `is_counted`.
    """

    outer: Node
    inner: Node
    loop: Iterations
    limit: int | None
    is_counted: bool
    _operands: dict[int, int] = field(default_factory=dict)  # inputs of the body → operands around it
    _carried: list[int] = field(default_factory=list)  # inputs of the body
    _counter: int = 0
    _condition: int = 0
    _bound: int | None = None  # the number of iterations if the model computes it
    _varying: list[int] = field(default_factory=list)

    def begin(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """Return the values in the body: its inputs, and `values`, which are results around it."""
        found = {name: self._passed(value) for name, value in values.items()}
        self._varying = _varying(self.loop)
        for position, (name, value) in enumerate(zip(self.loop.carried_names, self.loop.carried, strict=True)):
            if position in self._varying:
                found[name] = self._passed(value)
                self._carried.append(_operand_of(found[name]))
            else:
                found[name] = Value.of(value.array) if value.array is not None else self._passed(value)
        self._counter, self._condition = (
            self.inner.builder.operand(Operand(kind, (1,), lifetime=LifeTime.SUBGRAPH_INPUT)) for kind in (_I32, _B8)
        )
        if self.loop.computed_limit is not None:
            limit = self.loop.computed_limit
            self._bound = _operand_of(self._passed(limit, self.outer.index_operand(limit)))
        if self.loop.is_scan:
            first = len(self.loop.carried)
            for info, (value, sequenced) in zip(self.loop.body.input[first:], self.loop.sequences, strict=True):
                found[info.name] = self._element(value, sequenced.axis, sequenced.is_reversed)
        else:
            counter, condition = self.loop.body.input[:2]
            found[counter.name] = Value((), np.dtype(np.int64), self._counter)
            found[condition.name] = Value((), np.dtype(bool), self._condition)
        return found

    @property
    def names(self) -> list[str]:
        """The names of the body's results that are carried, and of its condition if there is one."""
        names = [self.loop.next_names[position] for position in self._varying]
        return names if self.loop.is_scan else [*names, self.loop.body.output[0].name]

    def end(self, outputs: Sequence[int], elements: Sequence[Value], values: Sequence[Value]) -> list[Value]:
        """Add the WHILE and return the node's outputs.

        `outputs` are the body's outputs for `names`, whose values are `values`; `elements` are those of the sequences.

        Raises:
            VaryingShape: If a carried value changes its type or shape.
        """
        self._require_same(outputs[: len(self._carried)], values)
        sequences = [self._written(value, sequenced.is_reversed) for value, sequenced in
                     zip(elements, self.loop.results, strict=True)]  # fmt: skip
        one = self.inner.add_constant(np.ones(1, np.int32))
        following = self.inner.emit(Op.ADD, [self._counter, one, self.inner.builder.int32(0)])
        goes_on = self._condition_copy() if self.loop.is_scan else outputs[-1]
        ends = [*outputs[: len(self._carried)], *(after for _, after in sequences), following, goes_on]
        for operand in ends[len(self._carried) :]:
            self.inner.builder.as_output(operand)
        begins = [*self._carried, *(before for before, _ in sequences), self._counter, self._condition]
        inputs = [*begins, *(operand for operand in self._operands if operand not in begins)]
        body = self.inner.builder.refer(inputs, ends)
        return self._emitted(body, inputs, len(self._carried) + len(sequences), elements)

    def _passed(self, value: Value, around: int | None = None) -> Value:
        """Return an input of the body for a value around it, whose operand `around` is by default."""
        around = self.outer.operand(value) if around is None else around
        operand = replace(self.outer.builder[around], lifetime=LifeTime.SUBGRAPH_INPUT, location=DataLocation())
        index = self.inner.builder.operand(operand)
        self._operands[index] = around
        return Value(value.shape, value.dtype, index)

    def _element(self, value: Value, axis: int, is_reversed: bool) -> Value:
        """Return the element of a sequence in this iteration."""
        passed = _operand_of(self._passed(value))
        found = self.inner.emit(Op.GATHER, [passed, self.inner.builder.int32(axis), self._position(is_reversed)])
        shape = value.shape[:axis] + value.shape[axis + 1 :]
        return Value(shape, value.dtype, self.inner.reshaped(found, shape))

    def _position(self, is_reversed: bool) -> int:
        """Return the index of this iteration in a sequence."""
        if not is_reversed or self.limit is None:
            return self._counter
        last = self.inner.add_constant(np.array([self.limit - 1], np.int32))
        return self.inner.emit(Op.SUB, [last, self._counter, self.inner.builder.int32(0)])

    def _written(self, value: Value, is_reversed: bool) -> tuple[int, int]:
        """Return a sequence before and after this iteration, which writes `value`; its elements are along axis 0."""
        assert self.limit is not None
        if self.limit > _MAX_COUNT:
            raise InvalidArgument(f"a result of {self.limit} elements is not supported")
        element = self.inner.operand(value)
        if self.inner.builder[element].type == _B8:
            element = self.inner.from_bool(element)
        shape = value.shape or (1,)
        kind = replace(
            self.inner.builder[element],
            dimensions=(self.limit, *shape),
            lifetime=LifeTime.SUBGRAPH_INPUT,
            location=DataLocation(),
        )
        sequence = self.inner.builder.operand(kind)
        row = self.inner.reshaped(element, (1, *shape))
        zeros = self.inner.add_constant(np.zeros(len(shape), np.int32))
        start = self.inner.emit(Op.CONCATENATION, [self._position(is_reversed), zeros, self.inner.builder.int32(0)])
        after = self.inner.emit(operation_code(TfliteOperation.DYNAMIC_UPDATE_SLICE), [sequence, row, start])
        return sequence, after

    def _condition_copy(self) -> int:
        return self.inner.emit(Op.LOGICAL_OR, [self._condition, self._condition])

    def _require_same(self, outputs: Sequence[int], values: Sequence[Value]) -> None:
        builder = self.inner.builder
        for before, after, position, value in zip(self._carried, outputs, self._varying, values, strict=False):
            kinds = [(o.type, o.dimensions, o.scale, o.zero_point) for o in (builder[before], builder[after])]
            first = self.loop.carried[position]
            if kinds[0] != kinds[1] or (first.shape, first.dtype) != (value.shape, value.dtype):
                raise VaryingShape(
                    f"a carried value is {first.dtype} of the shape {first.shape} before an iteration, and "
                    f"{value.dtype} of the shape {value.shape} after it: that is not supported"
                )

    def _emitted(self, body: int, inputs: Sequence[int], count: int, elements: Sequence[Value]) -> list[Value]:
        """Add WHILE around the body, of which the first `count` arguments are results."""
        if not count:
            raise InvalidArgument("it carries nothing and returns nothing")
        builder = self.outer.builder
        condition = self._condition_subgraph(inputs)
        arguments = [self._initial(operand) for operand in inputs]
        results = [
            builder.operand(replace(builder[argument], lifetime=LifeTime.TEMPORARY_VARIABLE, location=DataLocation()))
            for argument in arguments[:count]
        ]
        callees = [builder.callee(number) for number in (condition, body)]
        builder.operation(Op.WHILE, [*callees, *arguments], *results)
        found = list(self.loop.carried)
        for position, operand in zip(self._varying, results, strict=False):
            found[position] = Value(found[position].shape, found[position].dtype, operand)
        rows = zip(results[len(self._varying) :], elements, self.loop.results, strict=True)
        return [*found, *(self._sequence(operand, value, sequenced.axis) for operand, value, sequenced in rows)]

    def _initial(self, operand: int) -> int:
        """Return the operand around the loop for an input of the body."""
        if operand in self._operands:
            return self._operands[operand]
        if operand == self._counter:
            return self.outer.add_constant(np.zeros(1, np.int32))
        if operand == self._condition:
            given = not self.loop.is_scan and self.outer.given(1)
            start = self.outer.operand(1) if given else self.outer.add_constant(np.ones(1, bool))
            return self.outer.reshaped(start, (1,))
        sequence = self.inner.builder[operand]
        if sequence.type not in (_F32, _I32, OperandType.TENSOR_FLOAT16, *WIDE_TYPES):
            raise InvalidArgument("a sequence of quantized elements is not supported")
        return self.outer.uniform(sequence.type, sequence.dimensions, 0.0)

    def _sequence(self, operand: int, element: Value, axis: int) -> Value:
        """Return a sequence whose elements are along `axis`."""
        assert self.limit is not None
        shape = (self.limit, *element.shape)
        operand = self.outer.reshaped(operand, shape)
        operand = self.outer.to_bool(operand) if element.dtype == np.bool_ else operand
        axis = axis_of(axis, len(shape))
        order = [*range(1, axis + 1), 0, *range(axis + 1, len(shape))]
        value = Value(shape, element.dtype, operand)
        return value if axis == 0 else Composition(self.outer).transpose(value, *order)

    def _condition_subgraph(self, inputs: Iterable[int]) -> int:
        """Add the subgraph that tells whether the next iteration is computed, and return its index."""
        builder: GraphBuilder = self.outer.builder.child()
        node = Node(self.outer.name, "While", self.outer.opset, builder, [], [])
        of_body = list(inputs)
        own = [builder.operand(self.inner.builder[operand]) for operand in of_body]
        goes_on = own[of_body.index(self._condition)]
        if self._bound is None and self.limit is None:
            goes_on = node.emit(Op.LOGICAL_OR, [goes_on, goes_on])
        else:
            number = min(self.limit or 0, _MAX_COUNT)
            constant = node.add_constant(np.array([number], np.int32))
            bound = constant if self._bound is None else own[of_body.index(self._bound)]
            is_below = node.emit(Op.LESS, [own[of_body.index(self._counter)], bound], _B8)
            goes_on = is_below if self.is_counted else node.emit(Op.LOGICAL_AND, [goes_on, is_below])
        builder.as_output(goes_on)
        return builder.refer(own, [goes_on])


def _operand_of(value: Value) -> int:
    assert value.operand is not None
    return value.operand


def _varying(loop: Iterations) -> list[int]:
    """Return the positions of the carried values that an iteration changes."""
    copies: dict[str, Any] = {
        proto.output[0]: proto.input[0] for proto in loop.body.node if proto.op_type == "Identity" and proto.input
    }
    found = []
    for position, (name, result) in enumerate(zip(loop.carried_names, loop.next_names, strict=True)):
        for _ in range(len(copies)):
            result = copies.get(result, result)
        if result != name:
            found.append(position)
    return found
