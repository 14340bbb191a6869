"""Models of a few operations in sequence, for tests of what the compiling engine makes of neighbouring operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from msgspec.structs import replace

from nnfmq.engines.compiled.executor import CompiledPartition
from nnfmq.engines.compiled.memory_plan import PartitionLaunch
from nnfmq.engines.compiled.partition import prepare
from nnfmq.hal.types import Model, Operand, Operation, OperationType
from support.small_models import F32, I32, INPUT, OUTPUT, Q8, Q8S, TEMPORARY, graph, scalar

TYPES = {"float32": (F32, 0.0, 0), "uint8": (Q8, 0.5, 100), "int8": (Q8S, 0.5, -7)}

Step: TypeAlias = tuple[OperationType, Sequence[Any], Operand | list[Operand]]
"""An operation, its arguments, and its result or results.

A number is a constant, (operand, bytes), too. [n] is result n of all steps, and the model's input if n is -1.
"""


def tensor(kind: str, *shape: int) -> Operand:
    """Return an operand of one of the TYPES."""
    type, scale, zero_point = TYPES[kind]
    return Operand(type, shape, scale, zero_point)


def weights(kind: str, shape: tuple[int, ...], channels: int) -> list[tuple[Operand, bytes]]:
    """Return a random filter and bias, for an input of `tensor`."""
    random = np.random.default_rng(5)
    if kind == "float32":
        floats, bias = random.normal(size=shape).astype("<f4"), random.normal(size=channels).astype("<f4")
        return [(Operand(F32, shape), floats.tobytes()), (Operand(F32, (channels,)), bias.tobytes())]
    values = random.integers(0, 256, shape).astype("u1")
    bias = random.integers(-500, 500, channels).astype("<i4")
    bias_operand = Operand(I32, (channels,), 0.5 * 0.015625)
    return [(Operand(TYPES[kind][0], shape, 0.015625, 3), values.tobytes()), (bias_operand, bias.tobytes())]


def model_of(image: Operand, steps: Sequence[Step], outputs: Sequence[int] = ()) -> Model:
    """Return a model of one input, whose outputs are the results `outputs` and the last one."""
    results = [made if isinstance(made, list) else [made] for _, _, made in steps]
    operands = [replace(image, lifetime=INPUT), *(replace(one, lifetime=TEMPORARY) for made in results for one in made)]
    for number in (*outputs, len(operands) - 2):
        operands[1 + number] = replace(operands[1 + number], lifetime=OUTPUT)
    constants, operations, first = {}, [], 1
    for (code, arguments, _), made in zip(steps, results, strict=True):
        indexes = []
        for argument in arguments:
            if isinstance(argument, list):
                indexes.append(1 + argument[0])
                continue
            operand, constants[len(operands)] = argument if isinstance(argument, tuple) else scalar(argument)
            indexes.append(len(operands))
            operands.append(operand)
        operations.append(Operation(code, tuple(indexes), tuple(range(first, first + len(made)))))
        first += len(made)
    return graph(operands, operations, constants)


def launches_of(model: Model) -> Sequence[PartitionLaunch]:
    """Return the launches of a model that is one partition."""
    (step,) = prepare(model).steps
    assert isinstance(step.function, CompiledPartition)
    return step.function.plan.source_launches


def kernels_of(model: Model) -> list[str]:
    """Return the class of the kernel of each launch."""
    return [type(launch.kernel).__name__ for launch in launches_of(model)]


def fused_operations(model: Model) -> dict[int, tuple[int, ...]]:
    """Return which other operations the kernels of each operation compute."""
    return {launch.operation: launch.fused for launch in launches_of(model)}
