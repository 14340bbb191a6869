"""Loop and Scan as WHILE: a body and a condition that are subgraphs, with the shapes of the first iteration.

The arguments of both are the carried values, the sequences that the node returns, a counter, the loop's condition, and
what does not change. An iteration writes its elements of the sequences, which have their final size from the beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.tflite_codes import WIDE_TYPES, TfliteOperation, operation_code
from nnfmq.hal.types import DataLocation, LifeTime, Operand, OperandType
from nnfmq.importers.graph_builder import GraphBuilder
from nnfmq.importers.onnx_loops import Iterations
from nnfmq.importers.onnx_operators.onnx_composition import Composition
from nnfmq.importers.onnx_operators.onnx_movement import axis_of
from nnfmq.importers.onnx_values import Node, Value

__all__ = ["VaryingShape", "WhileLoop"]

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
