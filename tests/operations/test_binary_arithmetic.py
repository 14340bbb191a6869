"""Arithmetic and functions of one element: the corners that the HAL's definitions name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.one_result import result_of, tensor

from nnfmq.hal.types import Operand, OperandType, OperationType

F32, F16, I32 = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16, OperandType.TENSOR_INT32
UINT8, INT8 = OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED
LEAST, MOST = -(1 << 31), (1 << 31) - 1
NONE, RELU, RELU1, RELU6 = range(4)


def int32(code: OperationType, first: list[int], second: list[int]) -> list[int]:
    arguments = [tensor(first, "int32"), tensor(second, "int32"), NONE]
    return [int(value) for value in result_of(code, arguments, Operand(I32))]


@pytest.mark.parametrize(
    ("code", "first", "second", "expected"),
    [
        (OperationType.ADD, MOST, 1, LEAST),
        (OperationType.SUB, LEAST, 1, MOST),
        (OperationType.MUL, 1 << 30, 6, LEAST),
        (OperationType.DIV, LEAST, -1, LEAST),
    ],
)
def test_int32_arithmetic_wraps_around(code: OperationType, first: int, second: int, expected: int) -> None:
    assert int32(code, [first], [second]) == [expected]


def test_int32_division_rounds_down() -> None:
    assert int32(OperationType.DIV, [7, -7, 7, -7, 6], [2, 2, -2, -2, 3]) == [3, -4, -4, 3, 2]


def test_int32_division_by_0_gives_0() -> None:
    assert int32(OperationType.DIV, [7, 0, -7], [0, 0, 0]) == [0, 0, 0]


def test_float_division_by_0_gives_infinity() -> None:
    found = result_of(OperationType.DIV, [tensor([1.0, -1.0]), tensor([0.0]), NONE], Operand(F32))

    assert found.tolist() == [np.inf, -np.inf]


@pytest.mark.parametrize("code", [OperationType.SUB, OperationType.DIV])
@pytest.mark.parametrize(
    ("activation", "expected"), [(NONE, [-9, -0.5, 9]), (RELU, [0, 0, 9]), (RELU1, [-1, -0.5, 1]), (RELU6, [0, 0, 6])]
)
def test_an_activation_clamps_the_result(code: OperationType, activation: int, expected: list[float]) -> None:
    neutral = 0.0 if code == OperationType.SUB else 1.0

    found = result_of(code, [tensor([-9.0, -0.5, 9.0]), tensor([neutral]), activation], Operand(F32))

    assert found.tolist() == expected


@pytest.mark.parametrize("zero", [0, -128])
def test_a_difference_of_quantized_values_rounds_ties_away_from_zero(zero: int) -> None:
    kind, dtype = (UINT8, "uint8") if zero == 0 else (INT8, "int8")
    first = tensor([zero, zero + 5, zero + 250], dtype, 1.0, zero)
    second = tensor([zero + 5, zero, zero + 5], dtype, 1.0, zero)

    found = result_of(OperationType.SUB, [first, second, NONE], Operand(kind, (), 10.0, zero + 120))

    assert [int(code) - zero for code in found] == [119, 121, 145]  # -0.5, 0.5 and 24.5 about 120


def test_a_difference_of_quantized_values_of_different_scales_is_the_rounded_difference_of_their_values() -> None:
    rng = np.random.default_rng(5)
    first, second = rng.integers(0, 256, (2, 500)).astype(np.uint8)
    reals = (first.astype(float) - 7) * 0.25 - (second.astype(float) - 200) * 0.03125
    arguments = [tensor(first, "uint8", 0.25, 7), tensor(second, "uint8", 0.03125, 200), NONE]

    found = result_of(OperationType.SUB, arguments, Operand(UINT8, (), 0.3125, 11))

    units = reals / 0.3125
    away = np.copysign(np.floor(np.abs(units) + 0.5), units)
    np.testing.assert_array_equal(found, np.clip(away + 11, 0, 255))


@pytest.mark.parametrize(
    ("base", "exponent", "expected"), [(2.0, 10.0, 1024.0), (-2.0, 3.0, -8.0), (0.0, 0.0, 1.0), (4.0, -0.5, 0.5)]
)
def test_a_power_is_its_definition(base: float, exponent: float, expected: float) -> None:
    assert result_of(OperationType.POW, [tensor([base]), tensor([exponent])], Operand(F32)).tolist() == [expected]


def test_a_root_of_a_negative_base_is_not_a_number() -> None:
    assert np.isnan(result_of(OperationType.POW, [tensor([-1.0]), tensor([0.5])], Operand(F32)))


@pytest.mark.parametrize(
    ("code", "values", "expected"),
    [
        (OperationType.ABS, [-3, 0, 5, LEAST], [3, 0, 5, LEAST]),
        (OperationType.NEG, [-3, 0, 5, LEAST], [3, 0, -5, LEAST]),
    ],
)
def test_the_least_int32_has_no_opposite(code: OperationType, values: list[int], expected: list[int]) -> None:
    assert result_of(code, [tensor(values, "int32")], Operand(I32)).tolist() == expected


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("code", "values", "expected"),
    [
        (OperationType.ABS, [-1.5, 0.25, -np.inf], [1.5, 0.25, np.inf]),
        (OperationType.NEG, [-1.5, 0.25], [1.5, -0.25]),
        (OperationType.FLOOR, [-1.5, 0.75, 2.0], [-2.0, 0.0, 2.0]),
        (OperationType.EXP, [0.0, -np.inf], [1.0, 0.0]),
        (OperationType.LOG, [1.0, 0.0], [0.0, -np.inf]),
        (OperationType.SIN, [0.0], [0.0]),
        (OperationType.SQRT, [6.25, 0.0], [2.5, 0.0]),
        (OperationType.RSQRT, [0.25, 16.0, 0.0], [2.0, 0.25, np.inf]),
    ],
)
def test_functions_of_one_element_have_their_exact_values(
    code: OperationType, values: list[float], expected: list[float], dtype: str
) -> None:
    output = Operand(F32 if dtype == "float32" else F16)

    assert result_of(code, [tensor(values, dtype)], output).tolist() == expected


def test_sine_is_accurate_far_from_the_origin() -> None:
    found = result_of(OperationType.SIN, [tensor([1.0, 100.0, -1000.0])], Operand(F32))

    np.testing.assert_allclose(found, [0.8414709848, -0.5063656411, -0.8268795405], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("dtype", "zero"), [("uint8", 0), ("int8", -128)])
def test_rsqrt_of_quantized_values_rounds_and_gives_the_largest_code_where_there_is_no_root(
    dtype: str, zero: int
) -> None:
    kind = UINT8 if dtype == "uint8" else INT8
    input = tensor([zero + code for code in (9, 10, 11, 14, 26)], dtype, 1.0, zero + 10)

    found = result_of(OperationType.RSQRT, [input], Operand(kind, (), 0.01, zero + 20))

    # 1/√1 and 1/√4 and 1/√16 in hundredths, from a zero point of 20
    assert [int(code) - zero for code in found] == [255, 255, 120, 70, 45]


def values_of(dtype: str) -> Any:
    return np.arange(256, dtype=np.uint8).view(dtype)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_rsqrt_of_every_code_is_within_a_unit_of_its_value(dtype: str) -> None:
    kind, zero = (UINT8, 0) if dtype == "uint8" else (INT8, -128)
    codes = values_of(dtype)

    found = result_of(OperationType.RSQRT, [tensor(codes, dtype, 0.5, zero)], Operand(kind, (), 1 / 64, zero))

    positive = codes.astype(int) > zero
    reals = 64 / np.sqrt((codes[positive].astype(float) - zero) * 0.5)
    np.testing.assert_array_equal(found[positive].astype(int) - zero, np.floor(reals + 0.5))
