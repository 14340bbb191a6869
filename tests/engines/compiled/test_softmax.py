"""SOFTMAX by generated kernels, against the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
from support.compiled import assert_kernels_agree
from support.small_models import one_operation

from nnfmq.engines import interpreter
from nnfmq.engines.compiled.program import prepare
from nnfmq.hal.types import Model, Operand, OperandType, OperationType

SHAPES = [
    ((1, 1001), -1),
    ((3, 2), 1),
    ((1, 1), 1),
    ((200, 63), -1),
    ((2, 5, 3, 7), 1),
    ((4, 70, 9), 1),
    ((100, 2), 0),
    ((64,), 0),
    ((2, 8000), -1),
]
F32, Q8, Q8S = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED


def softmax(kind: str, shape: tuple[int, ...], axis: int, beta: float, scale: float) -> Model:
    if kind == "float":
        source = out = Operand(F32, shape)
    else:
        code, lowest = (Q8, 0) if kind == "uint8" else (Q8S, -128)
        source, out = Operand(code, shape, scale, 5), Operand(code, shape, 1 / 256, lowest)
    return one_operation(OperationType.SOFTMAX, [source, beta, axis], out)


@pytest.mark.parametrize("scale", [0.007, 0.1, 2.0])
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("kind", ["uint8", "int8"])
def test_softmax_of_codes_is_the_interpreter_s(kind: str, shape: tuple[int, ...], axis: int, scale: float) -> None:
    assert_kernels_agree(softmax(kind, shape, axis, 1.0, scale))


@pytest.mark.parametrize("beta", [0.1, 1.0, 30.0])
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_softmax_of_floats_is_the_interpreter_s(shape: tuple[int, ...], axis: int, beta: float) -> None:
    assert_kernels_agree(softmax("float", shape, axis, beta, 0.0))


@pytest.mark.parametrize("kind", ["uint8", "int8"])
def test_rows_of_equal_and_of_extreme_codes_are_the_interpreter_s(kind: str) -> None:
    """The least and the greatest sums that a row can have."""
    model = softmax(kind, (3, 4000), -1, 1.0, 0.5)
    codes = np.full((3, 4000), 7, "u1" if kind == "uint8" else "i1")
    codes[1], codes[2] = np.iinfo(codes.dtype).min, np.iinfo(codes.dtype).max
    codes[1, 5] = np.iinfo(codes.dtype).max
    results = []
    for program in (prepare(model), interpreter.prepare(model)):
        results.append(np.empty_like(codes))
        program.execute([codes], [results[-1]])

    np.testing.assert_array_equal(*results)
