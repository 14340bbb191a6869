"""Small legal models for tests of validation and engines, which also mutate them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from nnfmq.hal.types import (
    DataLocation,
    LifeTime,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
    Pool,
    Subgraph,
)

INPUT, OUTPUT, TEMPORARY = LifeTime.SUBGRAPH_INPUT, LifeTime.SUBGRAPH_OUTPUT, LifeTime.TEMPORARY_VARIABLE
F32, Q8, Q8S, I32 = (
    OperandType.TENSOR_FLOAT32,
    OperandType.TENSOR_QUANT8_ASYMM,
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
    OperandType.TENSOR_INT32,
)


def graph(
    operands: Sequence[Operand], operations: Sequence[Operation], constants: dict[int, bytes] | None = None, **rest: Any
) -> Model:
    """Join a model: index lists from lifetimes, `constants` (operand → bytes) as CONSTANT_COPY."""
    operands, values = list(operands), bytearray()
    for index, content in (constants or {}).items():
        place = DataLocation(0, len(values), len(content))
        operands[index] = replace(operands[index], lifetime=LifeTime.CONSTANT_COPY, location=place)
        values += content + bytes(-len(content) % 4)
    listed = [tuple(i for i, o in enumerate(operands) if o.lifetime == kind) for kind in (INPUT, OUTPUT)]
    return Model(Subgraph(tuple(operands), tuple(operations), *listed), (), bytes(values), **rest)


def scalar(value: int | float | bool) -> tuple[Operand, bytes]:
    """Return an operand and its bytes for a Python value."""
    if isinstance(value, bool):
        return Operand(OperandType.BOOL), bytes([value])
    if isinstance(value, float):
        return Operand(OperandType.FLOAT32), struct.pack("<f", value)
    return Operand(OperandType.INT32), struct.pack("<i", value)


def vector(values: Sequence[int]) -> tuple[Operand, bytes]:
    """Return an INT32 tensor operand and its bytes."""
    return Operand(I32, (len(values),)), struct.pack(f"<{len(values)}i", *values)


def with_constants(pool: Pool) -> Model:
    """Return a model that adds its input, one float, to a constant, which is all of `pool`."""
    count = pool.size_bytes // 4
    operands = [
        Operand(F32, (1,), lifetime=INPUT),
        Operand(F32, (count,), lifetime=LifeTime.CONSTANT_REFERENCE, location=DataLocation(0, 0, 4 * count)),
        scalar(0)[0],
        Operand(F32, (count,), lifetime=OUTPUT),
    ]
    model = graph(operands, [Operation(OperationType.ADD, (0, 1, 2), (3,))], {2: scalar(0)[1]})
    return replace(model, pools=(pool,))


def with_unused_operands(count: int) -> Model:
    """Return a model of `count` operands and no operation, which a driver rejects after it has decoded them."""
    return Model(Subgraph((Operand(F32, (1, 2, 3, 4), lifetime=TEMPORARY),) * count, (), (), ()))


def one_operation(code: OperationType, arguments: Sequence[Any], *outputs: Operand) -> Model:
    """Return a model of one operation.

    An Operand is an input of the model unless it is NO_VALUE, a (operand, bytes) pair or a Python value a constant, and
    None is omitted.
    """
    operands, constants = [], {}
    for index, argument in enumerate(arguments):
        if isinstance(argument, Operand):
            is_omitted = argument.lifetime == LifeTime.NO_VALUE
            operands.append(argument if is_omitted else replace(argument, lifetime=INPUT))
        elif argument is None:
            operands.append(Operand(I32, (1,), lifetime=LifeTime.NO_VALUE))
        else:
            operand, constants[index] = argument if isinstance(argument, tuple) else scalar(argument)
            operands.append(operand)
    count = len(arguments)
    operands += [replace(output, lifetime=OUTPUT) for output in outputs]
    return graph(operands, [Operation(code, tuple(range(count)), tuple(range(count, len(operands))))], constants)


def two_adds(operand_type: OperandType = F32, scale: float = 0.0, zero_point: int = 0) -> Model:
    """Return ADD(ADD(input 0, input 1), input 1): operands 0, 1 inputs, 2 activation, 3 temporary, 4 output."""
    tensor = Operand(operand_type, (2, 2), scale, zero_point)
    lifetimes = (INPUT, INPUT, TEMPORARY, TEMPORARY, OUTPUT)
    operands = [replace(tensor, lifetime=lifetime) for lifetime in lifetimes]
    operands[2], none = scalar(0)
    operations = [Operation(OperationType.ADD, (0, 1, 2), (3,)), Operation(OperationType.ADD, (3, 1, 2), (4,))]
    return graph(operands, operations, {2: none})


def nothing_left_model() -> Model:
    """Return a BOX_WITH_NMS_LIMIT of two boxes and a threshold of 0.9: without larger scores its outputs are empty."""
    types = [Operand(F32, (2, 2)), Operand(F32, (2, 8)), Operand(I32, (2,))]
    operands = [replace(operand, lifetime=INPUT) for operand in types]
    constants = {}
    for value in (0.9, -1, 0, 0.5, 0.5, 0.1):  # score threshold, results at most, kernel: hard, its parameters
        operand, constants[len(operands)] = scalar(value)
        operands.append(operand)
    shapes = [(F32, (0,)), (F32, (0, 4)), (I32, (0,)), (I32, (0,))]
    operands += [Operand(kind, shape, lifetime=OUTPUT) for kind, shape in shapes]
    return graph(operands, [Operation(OperationType.BOX_WITH_NMS_LIMIT, tuple(range(9)), (9, 10, 11, 12))], constants)


def with_operand(model: Model, index: int, **changes: Any) -> Model:
    """Return the model with fields of one operand changed."""
    operands = list(model.main.operands)
    operands[index] = replace(operands[index], **changes)
    return replace(model, main=replace(model.main, operands=tuple(operands)))


def with_operation(model: Model, index: int, **changes: Any) -> Model:
    """Return the model with fields of one operation changed."""
    operations = list(model.main.operations)
    operations[index] = replace(operations[index], **changes)
    return replace(model, main=replace(model.main, operations=tuple(operations)))


def with_main(model: Model, **changes: Any) -> Model:
    """Return the model with fields of its main subgraph changed."""
    return replace(model, main=replace(model.main, **changes))
