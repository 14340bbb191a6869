"""Models with IF and WHILE, from small subgraphs: for tests of engines and validation, which also mutate them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from nnfmq.hal.types import DataLocation, LifeTime, Model, Operand, OperandType, Operation, OperationType, Subgraph
from support.small_models import F32, I32, graph, scalar

B8 = OperandType.TENSOR_BOOL8
TRUTH = Operand(B8, (1,))
REAL = Operand(F32, (2,))
COUNT = Operand(I32, (1,))


def inputs(*operands: Operand) -> list[Operand]:
    return [replace(operand, lifetime=LifeTime.SUBGRAPH_INPUT) for operand in operands]


def output(operand: Operand) -> Operand:
    return replace(operand, lifetime=LifeTime.SUBGRAPH_OUTPUT)


def named(index: int) -> Operand:
    """Return the operand that names a referenced subgraph."""
    return Operand(OperandType.SUBGRAPH, lifetime=LifeTime.SUBGRAPH, location=DataLocation(0, index, 0))


class Parts:
    """Referenced subgraphs with their constants in the one `operand_values` of the model to be."""

    def __init__(self) -> None:
        self._values = bytearray()
        self.subgraphs: list[Subgraph] = []

    def add(self, operands: Sequence[Operand], operations: Sequence[Operation], **constants: Any) -> int:
        """Append a subgraph; `constants` maps "c3" (operand 3) to bytes. Return its index."""
        stored = {int(name[1:]): value for name, value in constants.items()}
        self.subgraphs.append(self._relocated(graph(operands, operations, stored)))
        return len(self.subgraphs) - 1

    def binary(self, code: OperationType, operand: Operand = REAL) -> int:
        """Append a subgraph that applies ADD, SUB or MUL to its two inputs."""
        none, raw = scalar(0)
        operands = [*inputs(operand, operand), none, output(operand)]
        return self.add(operands, [Operation(code, (0, 1, 2), (3,))], c2=raw)

    def model(self, operands: Sequence[Operand], operations: Sequence[Operation], **constants: Any) -> Model:
        """Return the model whose main subgraph this is."""
        stored = {int(name[1:]): value for name, value in constants.items()}
        main = self._relocated(graph(operands, operations, stored))
        return Model(main, tuple(self.subgraphs), bytes(self._values))

    def _relocated(self, part: Model) -> Subgraph:
        moved = []
        for operand in part.main.operands:
            if operand.lifetime == LifeTime.CONSTANT_COPY:
                place = replace(operand.location, offset=operand.location.offset + len(self._values))
                operand = replace(operand, location=place)
            moved.append(operand)
        self._values += part.operand_values
        return replace(part.main, operands=tuple(moved))


def branching(then: OperationType = OperationType.ADD, otherwise: OperationType = OperationType.MUL) -> Model:
    """Return IF(operand 0, x, y): operands 1 and 2 name the branches, 3 and 4 are x and y, 5 is the output."""
    parts = Parts()
    branches = [named(parts.binary(then)), named(parts.binary(otherwise))]
    condition, x, y = inputs(TRUTH, REAL, REAL)
    operands = [condition, *branches, x, y, output(REAL)]
    return parts.model(operands, [Operation(OperationType.IF, (0, 1, 2, 3, 4), (5,))])


def nested(depth: int, then: OperationType = OperationType.ADD, otherwise: OperationType = OperationType.MUL) -> Model:
    """Return a model of `depth` nested IFs: `then` of x and y if its first input is true, else `otherwise`.

    The inner IFs are in the then-branch, with a constant as condition. Operands are those of `branching`.
    """
    parts = Parts()
    inner, other = parts.binary(then), parts.binary(otherwise)
    step = [Operation(OperationType.IF, (0, 1, 2, 3, 4), (5,))]
    for _ in range(depth - 1):
        inner = parts.add([TRUTH, named(inner), named(other), *inputs(REAL, REAL), output(REAL)], step, c0=b"\1")
    truth, x, y = inputs(TRUTH, REAL, REAL)
    return parts.model([truth, named(inner), named(other), x, y, output(REAL)], step)


def counting(parts: Parts | None = None) -> Model:
    """Return a WHILE that adds x to a sum while i < n: i starts at 0, the sum as an input does.

    Operands: 0 condition model, 1 body model, 2 sum, 3 i (constant), 4 n, 5 x, 6 the sum as output.
    """
    parts = parts or Parts()
    operands = [
        named(_less(parts)),
        named(_add_and_count(parts)),
        *inputs(REAL),
        COUNT,
        *inputs(COUNT, REAL),
        output(REAL),
    ]
    return parts.model(operands, [Operation(OperationType.WHILE, (0, 1, 2, 3, 4, 5), (6,))], c3=struct.pack("<i", 0))


def _less(parts: Parts) -> int:
    operands = [*inputs(REAL, COUNT, COUNT, REAL), output(TRUTH)]
    return parts.add(operands, [Operation(OperationType.LESS, (1, 2), (4,))])


def _add_and_count(parts: Parts) -> int:
    none, raw = scalar(0)
    operands = [*inputs(REAL, COUNT, COUNT, REAL), output(REAL), output(COUNT), COUNT, none]
    operations = [
        Operation(OperationType.ADD, (0, 3, 7), (4,)),
        Operation(OperationType.ADD, (1, 6, 7), (5,)),
    ]
    return parts.add(operands, operations, c6=struct.pack("<i", 1), c7=raw)


def rotating() -> Model:
    """Return a WHILE of n rounds of a, b, c = b, c, a + c. Two of these are views of inputs of the body.

    Inputs are a, b, c and n; outputs are a, b and c.
    """
    parts, (none, zero) = Parts(), scalar(0)
    operands = [*inputs(REAL, REAL, REAL, COUNT, COUNT), output(TRUTH)]
    less = parts.add(operands, [Operation(OperationType.LESS, (3, 4), (5,))])
    shape, one = Operand(I32, (1,)), COUNT
    operands = [*inputs(REAL, REAL, REAL, COUNT, COUNT), *map(output, (REAL, REAL, REAL, COUNT)), shape, one, none]
    body = [
        Operation(OperationType.RESHAPE, (1, 9), (5,)),
        Operation(OperationType.RESHAPE, (2, 9), (6,)),
        Operation(OperationType.ADD, (0, 2, 11), (7,)),
        Operation(OperationType.ADD, (3, 10, 11), (8,)),
    ]
    rotate = parts.add(operands, body, c9=struct.pack("<i", 2), c10=struct.pack("<i", 1), c11=zero)
    operands = [named(less), named(rotate), *inputs(REAL, REAL, REAL), COUNT, *inputs(COUNT), *map(output, [REAL] * 3)]
    loop = Operation(OperationType.WHILE, tuple(range(7)), (7, 8, 9))
    return parts.model(operands, [loop], c5=struct.pack("<i", 0))
