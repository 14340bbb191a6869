"""Kernels along one axis, compared with the interpreter: SOFTMAX, L2_NORMALIZATION, ARGMAX and ARGMIN."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from support.compiled import assert_kernels_agree, outputs_of
from support.small_models import one_operation

from nnfmq.engines import interpreter
from nnfmq.engines.compiled.partition import prepare
from nnfmq.hal.types import Model, Operand, OperandType, OperationType

pytestmark = pytest.mark.instruction_sets

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
I32 = OperandType.TENSOR_INT32
ENGINES = (prepare, interpreter.prepare)


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
def test_quantized_softmax_matches_the_interpreter(kind: str, shape: tuple[int, ...], axis: int, scale: float) -> None:
    assert_kernels_agree(softmax(kind, shape, axis, 1.0, scale))


@pytest.mark.parametrize("beta", [0.1, 1.0, 30.0])
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_float_softmax_matches_the_interpreter(shape: tuple[int, ...], axis: int, beta: float) -> None:
    assert_kernels_agree(softmax("float", shape, axis, beta, 0.0))


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_log_softmax_matches_the_interpreter(shape: tuple[int, ...], axis: int) -> None:
    assert_kernels_agree(
        one_operation(OperationType.LOG_SOFTMAX, [Operand(F32, shape), 1.5, axis], Operand(F32, shape))
    )


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_float_l2_normalization_matches_the_interpreter(shape: tuple[int, ...], axis: int) -> None:
    assert_kernels_agree(
        one_operation(OperationType.L2_NORMALIZATION, [Operand(F32, shape), axis], Operand(F32, shape))
    )


@pytest.mark.parametrize("zero_point", [0, 128, 251])
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("code", [Q8, Q8S])
def test_quantized_l2_normalization_matches_the_interpreter(
    code: OperandType, shape: tuple[int, ...], axis: int, zero_point: int
) -> None:
    least = -128 if code == Q8S else 0
    source, out = Operand(code, shape, 0.3, zero_point + least), Operand(code, shape, 1 / 128, 128 + least)
    assert_kernels_agree(one_operation(OperationType.L2_NORMALIZATION, [source, axis], out))


@pytest.mark.parametrize("code", [Q8, Q8S])
def test_l2_normalization_of_short_slices_matches_the_interpreter(code: OperandType) -> None:
    """The sums of squares start at 0, and their norms need different shifts."""
    least = -128 if code == Q8S else 0
    rows = np.zeros((600, 7), np.int64)
    rows[:, 0], rows[:, 3] = np.arange(600) % 31, np.arange(600) // 31
    codes = (rows * [1, 1, 1, -1, 1, 1, 1] + 100 + least).astype(np.int8 if code == Q8S else np.uint8)
    source, out = Operand(code, codes.shape, 0.3, 100 + least), Operand(code, codes.shape, 1 / 128, 128 + least)
    model = one_operation(OperationType.L2_NORMALIZATION, [source, 1], out)
    found, expected = (outputs_of(engine(model), model, [codes])[0] for engine in ENGINES)

    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("values", [[0.0, -0.0, 0.0], [1e-9, 0.0, 0.0], [np.nan, 1.0, 2.0], [3e38, 3e38, 1.0]])
def test_l2_normalization_of_special_floats_matches_the_interpreter(values: list[float]) -> None:
    model = one_operation(OperationType.L2_NORMALIZATION, [Operand(F32, (1, 3)), 1], Operand(F32, (1, 3)))
    with np.errstate(all="ignore"):
        found, expected = (outputs_of(engine(model), model, [np.float32([values])])[0] for engine in ENGINES)

    np.testing.assert_allclose(found, expected, rtol=1e-6)


INDEXED = {
    "float": Operand(F32),
    "int32": Operand(I32),
    "uint8": Operand(Q8, (), 0.1, 3),
    "int8": Operand(Q8S, (), 0.1, 3),
}


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("kind", INDEXED)
@pytest.mark.parametrize("code", [OperationType.ARGMAX, OperationType.ARGMIN])
def test_argmin_and_argmax_match_the_interpreter(
    code: OperationType, kind: str, shape: tuple[int, ...], axis: int
) -> None:
    left = tuple(n for place, n in enumerate(shape) if place != axis % len(shape)) or (1,)
    assert_kernels_agree(one_operation(code, [replace(INDEXED[kind], dimensions=shape), axis], Operand(I32, left)))


@pytest.mark.parametrize("code", [OperationType.ARGMAX, OperationType.ARGMIN])
def test_the_first_of_equal_floats_or_of_nans_is_the_result(code: OperationType) -> None:
    rows = np.ones((6, 37), np.float32)
    rows[0], rows[1, 5:], rows[2, [9, 20]], rows[3, [30, 36]] = np.inf, -0.0, np.nan, -np.inf
    rows[1, :5], rows[4, 2], rows[5, 36] = 0.0, -np.nan, 1 if code is OperationType.ARGMAX else 0.5
    model = one_operation(code, [Operand(F32, rows.shape), 1], Operand(I32, (6,)))
    found, expected = (outputs_of(engine(model), model, [rows])[0] for engine in ENGINES)

    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", ["uint8", "int8"])
def test_softmax_of_equal_and_of_extreme_values_matches_the_interpreter(kind: str) -> None:
    """Slices with the smallest and the largest sum of exponentials."""
    model = softmax(kind, (3, 4000), -1, 1.0, 0.5)
    codes = np.full((3, 4000), 7, "u1" if kind == "uint8" else "i1")
    codes[1], codes[2] = np.iinfo(codes.dtype).min, np.iinfo(codes.dtype).max
    codes[1, 5] = np.iinfo(codes.dtype).max
    found, expected = (outputs_of(engine(model), model, [codes])[0] for engine in ENGINES)

    np.testing.assert_array_equal(found, expected)
