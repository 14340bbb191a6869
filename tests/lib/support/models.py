"""Small models in the HAL's types, for tests that are not about importing files.

Each function returns a complete, valid Model, whose constants are in its operand_values. `request_for` lays a model's
arguments out in pools. Nothing here computes: the tests contain the expected results.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from nnfmq.hal.types import (
    DataLocation,
    FusedActivationFunc,
    LifeTime,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
    PaddingScheme,
    Pool,
    Request,
    RequestArgument,
    Subgraph,
    operand_bytes,
)

Shape = tuple[int, ...]


class _Builder:
    """Collects operands, constants and operations of one model."""

    def __init__(self) -> None:
        self._operands: list[Operand] = []
        self._values = bytearray()
        self._operations: list[Operation] = []

    def tensor(self, shape: Shape, lifetime: LifeTime = LifeTime.TEMPORARY_VARIABLE) -> int:
        return self._add(Operand(OperandType.TENSOR_FLOAT32, shape, lifetime=lifetime))

    def input(self, shape: Shape) -> int:
        return self.tensor(shape, LifeTime.SUBGRAPH_INPUT)

    def integer_input(self, shape: Shape) -> int:
        return self._add(Operand(OperandType.TENSOR_INT32, shape, lifetime=LifeTime.SUBGRAPH_INPUT))

    def output(self, shape: Shape) -> int:
        return self.tensor(shape, LifeTime.SUBGRAPH_OUTPUT)

    def scalar(self, value: int) -> int:
        return self._constant(OperandType.INT32, (), struct.pack("<i", value))

    def float_scalar(self, value: float) -> int:
        return self._constant(OperandType.FLOAT32, (), struct.pack("<f", value))

    def integers(self, values: Sequence[int]) -> int:
        return self._constant(OperandType.TENSOR_INT32, (len(values),), struct.pack(f"<{len(values)}i", *values))

    def floats(self, shape: Shape, value: float) -> int:
        data = struct.pack("<f", value) * math.prod(shape)
        return self._constant(OperandType.TENSOR_FLOAT32, shape, data)

    def operation(self, kind: OperationType, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        self._operations.append(Operation(kind, tuple(inputs), tuple(outputs)))

    def model(self) -> Model:
        by_lifetime = {
            lifetime: tuple(i for i, operand in enumerate(self._operands) if operand.lifetime is lifetime)
            for lifetime in (LifeTime.SUBGRAPH_INPUT, LifeTime.SUBGRAPH_OUTPUT)
        }
        subgraph = Subgraph(
            tuple(self._operands),
            tuple(self._operations),
            by_lifetime[LifeTime.SUBGRAPH_INPUT],
            by_lifetime[LifeTime.SUBGRAPH_OUTPUT],
        )
        return Model(subgraph, operand_values=bytes(self._values))

    def _add(self, operand: Operand) -> int:
        self._operands.append(operand)
        return len(self._operands) - 1

    def _constant(self, kind: OperandType, shape: Shape, data: bytes) -> int:
        self._values.extend(bytes(-len(self._values) % 4))  # every constant starts at a multiple of 4 (N-VAL)
        location = DataLocation(0, len(self._values), len(data))
        self._values.extend(data)
        return self._add(Operand(kind, shape, lifetime=LifeTime.CONSTANT_COPY, location=location))


def null_model() -> Model:
    """RESHAPE of one float to one float: the smallest execution there is."""
    builder = _Builder()
    given, result = builder.input((1,)), builder.output((1,))
    builder.operation(OperationType.RESHAPE, [given, builder.integers([1])], [result])
    return builder.model()


def add_model(shape: Shape = (4,)) -> Model:
    """ADD of two float tensors."""
    builder = _Builder()
    first, second, result = builder.input(shape), builder.input(shape), builder.output(shape)
    builder.operation(OperationType.ADD, [first, second, builder.scalar(FusedActivationFunc.NONE)], [result])
    return builder.model()


def plus_model(value: float, shape: Shape = (1,)) -> Model:
    """ADD of a float tensor and a constant: each output is the input plus `value`."""
    builder = _Builder()
    given, constant, result = builder.input(shape), builder.floats(shape, value), builder.output(shape)
    builder.operation(OperationType.ADD, [given, constant, builder.scalar(FusedActivationFunc.NONE)], [result])
    return builder.model()


def add_relu_model(shape: Shape = (4,)) -> Model:
    """RELU of the ADD of two float tensors."""
    builder = _Builder()
    first, second, between, result = (
        builder.input(shape),
        builder.input(shape),
        builder.tensor(shape),
        builder.output(shape),
    )
    builder.operation(OperationType.ADD, [first, second, builder.scalar(FusedActivationFunc.NONE)], [between])
    builder.operation(OperationType.RELU, [between], [result])
    return builder.model()


def relu_model(shape: Shape = (4,)) -> Model:
    """RELU of one float tensor."""
    builder = _Builder()
    given, result = builder.input(shape), builder.output(shape)
    builder.operation(OperationType.RELU, [given], [result])
    return builder.model()


def logistics_model(count: int) -> Model:
    """`count` independent LOGISTICs, each over another number of floats: as many different kernels."""
    builder = _Builder()
    lengths = range(9, 9 + count)
    givens = [builder.input((length,)) for length in lengths]
    results = [builder.output((length,)) for length in lengths]
    for given, result in zip(givens, results, strict=True):
        builder.operation(OperationType.LOGISTIC, [given], [result])
    return builder.model()


def relus_model(count: int, shape: Shape = (1,)) -> Model:
    """`count` independent RELUs with separate inputs and outputs, for results with many shapes."""
    builder = _Builder()
    givens = [builder.input(shape) for _ in range(count)]
    results = [builder.output(shape) for _ in range(count)]
    for given, result in zip(givens, results, strict=True):
        builder.operation(OperationType.RELU, [given], [result])
    return builder.model()


def unsized_relu_model(shape: Shape = (4,)) -> Model:
    """RELU whose output has an unknown extent in the model: the request, or the execution, says how large it is."""
    builder = _Builder()
    given, result = builder.input(shape), builder.output((0,) * len(shape))
    builder.operation(OperationType.RELU, [given], [result])
    return builder.model()


def tile_model(shape: Shape = (0,)) -> Model:
    """TILE of floats by an integer for each dimension, of another input: their values decide the size."""
    builder = _Builder()
    given, multiples, result = (
        builder.input(shape),
        builder.integer_input((len(shape),)),
        builder.output((0,) * len(shape)),
    )
    builder.operation(OperationType.TILE, [given, multiples], [result])
    return builder.model()


def counting_tile_model() -> Model:
    """TILE of a state of four floats by an input, and the state plus one."""
    builder = _Builder()
    multiples, state, result, after = (
        builder.integer_input((1,)),
        builder.input((4,)),
        builder.output((0,)),
        builder.output((4,)),
    )
    builder.operation(OperationType.TILE, [state, multiples], [result])
    builder.operation(OperationType.ADD, [state, builder.floats((4,), 1.0), builder.scalar(0)], [after])
    return builder.model()


def add_and_count_model() -> Model:
    """RELU of any number of floats; and a state of four floats plus one."""
    builder = _Builder()
    given, state, result, after = builder.input((0,)), builder.input((4,)), builder.output((0,)), builder.output((4,))
    builder.operation(OperationType.RELU, [given], [result])
    builder.operation(OperationType.ADD, [state, builder.floats((4,), 1.0), builder.scalar(0)], [after])
    return builder.model()


def accumulating_model() -> Model:
    """ADD of four floats and a state of four floats: the output, and the state afterwards."""
    builder = _Builder()
    given, state, result, after = builder.input((4,)), builder.input((4,)), builder.output((4,)), builder.output((4,))
    for total in (result, after):
        builder.operation(OperationType.ADD, [given, state, builder.scalar(0)], [total])
    return builder.model()


def reduced_model() -> Model:
    """REDUCE_SUM of any number of rows of four floats to one."""
    builder = _Builder()
    given, result = builder.input((0, 4)), builder.output((1,))
    keeps = builder._constant(OperandType.BOOL, (), b"\0")
    builder.operation(OperationType.REDUCE_SUM, [given, builder.integers([0, 1]), keeps], [result])
    return builder.model()


def gather_model() -> Model:
    """GATHER from four floats by one index, which an input holds: an index out of range fails the execution."""
    builder = _Builder()
    values, index, result = builder.input((4,)), builder.integer_input((1,)), builder.output((1,))
    builder.operation(OperationType.GATHER, [values, builder.scalar(0), index], [result])
    return builder.model()


def slow_model(operations: int = 400, side: int = 128, channels: int = 32) -> Model:
    """A chain of 3x3 CONV_2Ds: each takes a few milliseconds, all together seconds."""
    builder = _Builder()
    shape = (1, side, side, channels)
    weights, bias = builder.floats((channels, 3, 3, channels), 1 / (9 * channels)), builder.floats((channels,), 0.0)
    scheme, one = builder.scalar(PaddingScheme.SAME), builder.scalar(1)
    activation = builder.scalar(FusedActivationFunc.NONE)
    last = builder.input(shape)
    for number in range(operations):
        result = builder.output(shape) if number == operations - 1 else builder.tensor(shape)
        builder.operation(OperationType.CONV_2D, [last, weights, bias, scheme, one, one, activation], [result])
        last = result
    return builder.model()


def weighty_model(value: float = 1.0, side: int = 256, summand: float | None = None) -> Model:
    """FULLY_CONNECTED with `side` * `side` weights of `value`: each output is that times the sum of the inputs.

    An ADD follows if there is a `summand`, a constant of one element.
    """
    builder = _Builder()
    given, result = builder.input((1, side)), builder.output((1, side))
    weights, bias = builder.floats((side, side), value), builder.floats((side,), 0.0)
    activation = builder.scalar(FusedActivationFunc.NONE)
    product = result if summand is None else builder.tensor((1, side))
    builder.operation(OperationType.FULLY_CONNECTED, [given, weights, bias, activation], [product])
    if summand is not None:
        builder.operation(OperationType.ADD, [product, builder.floats((1,), summand), activation], [result])
    return builder.model()


def unsupported_model() -> Model:
    """A valid model that no engine here can run: one OEM_OPERATION."""
    builder = _Builder()
    given, result = builder.input((1, 2, 2, 1)), builder.output((1, 2, 2, 1))
    builder.operation(OperationType.OEM_OPERATION, [given], [result])
    return builder.model()


def invalid_model() -> Model:
    """A model that no validation lets pass: its only operation reads an operand that does not exist."""
    builder = _Builder()
    builder.input((1,))
    result = builder.output((1,))
    builder.operation(OperationType.RELU, [99], [result])
    return builder.model()


def operands_of(model: Model, indexes: Sequence[int]) -> list[Operand]:
    """Return some operands of the main subgraph."""
    return [model.main.operands[index] for index in indexes]


def place(operands: Sequence[Operand], pool_index: int, alignment: int = 64) -> tuple[tuple[RequestArgument, ...], int]:
    """Lay operands one after the other into a pool; return the arguments and the bytes they take."""
    arguments, end = [], 0
    for operand in operands:
        start = -(-end // alignment) * alignment
        size = operand_bytes(operand)
        arguments.append(RequestArgument(location=DataLocation(pool_index, start, size)))
        end = start + size
    return tuple(arguments), max(end, 1)


def request_for(model: Model, pools: Sequence[Pool]) -> Request:
    """Return the request that reads its inputs from `pools[0]` and writes its outputs to `pools[1]`."""
    inputs, _ = place(operands_of(model, model.main.input_indexes), 0)
    outputs, _ = place(operands_of(model, model.main.output_indexes), 1)
    return Request(inputs, outputs, tuple(pools))


def pool_bytes(model: Model) -> tuple[int, int]:
    """Return the bytes that `request_for` needs in its input and its output pool."""
    _, inputs = place(operands_of(model, model.main.input_indexes), 0)
    _, outputs = place(operands_of(model, model.main.output_indexes), 1)
    return inputs, outputs
