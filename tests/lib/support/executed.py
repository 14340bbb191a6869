"""One operation with any number of outputs, through validation and the interpreter.

An argument is an (operand, array) pair; those whose positions are in `constants` are stored in the model, the others
are inputs. With `unknown=True` everything is an input, of unknown rank where it is a tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from nnfmq.engines import interpreter
from nnfmq.hal.types import LifeTime, Model, Operand, Operation, OperationType, is_scalar
from nnfmq.operations.declaration import NUMPY_TYPES
from nnfmq.validation import validate_model
from support.small_models import graph

Array = npt.NDArray[Any]
Argument = tuple[Operand, Array]

_MOST_BYTES = 1 << 18


def model_of(
    code: OperationType, arguments: Sequence[Argument], outputs: Sequence[Operand], constants: Collection[int]
) -> Model:
    """Return a model of one operation."""
    given = [
        operand if position in constants else replace(operand, lifetime=LifeTime.SUBGRAPH_INPUT)
        for position, (operand, _) in enumerate(arguments)
    ]
    results = [replace(output, lifetime=LifeTime.SUBGRAPH_OUTPUT) for output in outputs]
    count = len(given)
    operation = Operation(code, tuple(range(count)), tuple(range(count, count + len(results))))
    return graph([*given, *results], [operation], {i: arguments[i][1].tobytes() for i in sorted(constants)})


def executed(
    code: OperationType,
    arguments: Sequence[Argument],
    outputs: Sequence[Operand],
    constants: Collection[int] | None = None,
    *,
    unknown: bool = False,
) -> list[Array]:
    """Return the outputs; of `outputs` only type and quantization count. All scalars are constant by default."""
    given = [(replace(o, dimensions=_dimensions(o, a, unknown)), a) for o, a in arguments]
    if constants is None:
        constants = [i for i, (operand, _) in enumerate(given) if is_scalar(operand.type)]
    model = model_of(code, given, [replace(output, dimensions=()) for output in outputs], [] if unknown else constants)
    validate_model(model)
    buffers = [bytearray(_MOST_BYTES) for _ in outputs]
    inputs = [array for i, (_, array) in enumerate(given) if unknown or i not in constants]
    shapes = interpreter.prepare(model).execute(inputs, buffers)
    return [
        np.frombuffer(buffer, NUMPY_TYPES[output.type], int(np.prod(shape.dimensions))).reshape(shape.dimensions)
        for buffer, output, shape in zip(buffers, outputs, shapes, strict=True)
    ]


def _dimensions(operand: Operand, array: Array, unknown: bool) -> tuple[int, ...]:
    """Return the argument's dimensions in the model; per-channel scales need a known rank."""
    is_open = is_scalar(operand.type) or (unknown and operand.channel_quant is None)
    return () if is_open else array.shape
