"""Comparisons, logic, MAXIMUM, MINIMUM and SELECT: operands of different scales, odd truth values, broadcasting."""

from __future__ import annotations

import numpy as np
import pytest
from support.one_result import result_of, tensor, truths

from nnfmq.hal.types import Operand, OperandType, OperationType

F32, I32, B8 = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_INT32, OperandType.TENSOR_BOOL8
UINT8, INT8 = OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED
COMPARISONS = [  # below, equal, above
    (OperationType.EQUAL, [0, 1, 0]),
    (OperationType.NOT_EQUAL, [1, 0, 1]),
    (OperationType.LESS, [1, 0, 0]),
    (OperationType.LESS_EQUAL, [1, 1, 0]),
    (OperationType.GREATER, [0, 0, 1]),
    (OperationType.GREATER_EQUAL, [0, 1, 1]),
]


@pytest.mark.parametrize(("code", "expected"), COMPARISONS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_numbers_are_compared_unconverted(code: OperationType, expected: list[int], dtype: str) -> None:
    found = result_of(code, [tensor([-2, 3, 4], dtype), tensor([3], dtype)], Operand(B8))

    assert found.tolist() == expected


@pytest.mark.parametrize(("code", "expected"), COMPARISONS)
@pytest.mark.parametrize(("dtype", "zero"), [("uint8", 0), ("int8", -128)])
def test_codes_are_compared_by_their_values(code: OperationType, expected: list[int], dtype: str, zero: int) -> None:
    first = tensor([zero + 29, zero + 30, zero + 31], dtype, 0.5, zero + 20)  # 4.5, 5.0, 5.5
    second = tensor([zero + 105], dtype, 1.0, zero + 100)  # 5.0

    assert result_of(code, [first, second], Operand(B8)).tolist() == expected


@pytest.mark.parametrize(("code", "expected"), COMPARISONS)
def test_every_byte_but_0_is_the_same_truth(code: OperationType, expected: list[int]) -> None:
    arguments = [truths([0, 2, 255]), truths([1, 1, 0])]

    assert result_of(code, arguments, Operand(B8)).tolist() == expected


@pytest.mark.parametrize("code", [OperationType.EQUAL, OperationType.LESS, OperationType.GREATER_EQUAL])
def test_nothing_compares_with_a_nan(code: OperationType) -> None:
    assert result_of(code, [tensor([np.nan]), tensor([np.nan])], Operand(B8)).tolist() == [0]


@pytest.mark.parametrize(
    ("code", "expected"), [(OperationType.LOGICAL_AND, [0, 0, 0, 1]), (OperationType.LOGICAL_OR, [0, 1, 1, 1])]
)
def test_logic_takes_every_byte_but_0_for_true_and_gives_1(code: OperationType, expected: list[int]) -> None:
    found = result_of(code, [truths([0, 0, 4, 2]), truths([0, 9, 0, 255])], Operand(B8))

    assert found.tolist() == expected


def test_logical_not_gives_0_for_every_byte_but_0() -> None:
    assert result_of(OperationType.LOGICAL_NOT, [truths([0, 1, 2, 255])], Operand(B8)).tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("first", "second", "shape"),
    [
        ((3,), (1,), (3,)),
        ((1,), (2, 1, 3), (2, 1, 3)),
        ((2, 1, 3), (4, 1), (2, 4, 3)),
        ((1,) * 6, (2, 1), (1,) * 4 + (2, 1)),
    ],
)
@pytest.mark.parametrize("code", [OperationType.LESS, OperationType.MAXIMUM, OperationType.POW, OperationType.PRELU])
def test_operands_are_aligned_at_the_right_and_stretched(
    code: OperationType, first: tuple[int, ...], second: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    output = Operand(B8 if code == OperationType.LESS else F32)

    assert result_of(code, [tensor(np.ones(first)), tensor(np.ones(second))], output).shape == shape


@pytest.mark.parametrize(
    ("code", "expected"), [(OperationType.MAXIMUM, [12, 13, 0]), (OperationType.MINIMUM, [8, 9, 0])]
)
@pytest.mark.parametrize(("dtype", "zero"), [("uint8", 0), ("int8", -128)])
def test_codes_are_brought_to_the_outputs_scale_before_they_are_chosen(
    code: OperationType, expected: list[int], dtype: str, zero: int
) -> None:
    kind = UINT8 if dtype == "uint8" else INT8
    first = tensor([zero + 104, zero + 105, zero + 0], dtype, 1.0, zero + 100)  # 4, 5, -100
    second = tensor([zero + 42, zero + 46, zero + 0], dtype, 0.5, zero + 50)  # -4, -2, -25

    found = result_of(code, [first, second], Operand(kind, (), 2.0, zero + 10))

    # 4 is 12, 5 is 12.5 and rounded up to 13; -4 is 8, -2 is 9; -100 and -25 are below the least code
    assert [int(c) - zero for c in found] == expected


@pytest.mark.parametrize(("dtype", "zero"), [("uint8", 0), ("int8", -128)])
def test_select_brings_codes_to_the_outputs_scale(dtype: str, zero: int) -> None:
    kind = UINT8 if dtype == "uint8" else INT8
    first = tensor([zero + 1, zero + 2, zero + 3], dtype, 1.5, zero)  # 1.5, 3.0, 4.5
    second = tensor([zero + 200, zero + 201, zero + 255], dtype, 1.0, zero + 200)  # 0, 1, 55

    found = result_of(OperationType.SELECT, [truths([1, 0, 2]), first, second], Operand(kind, (), 1.0, zero + 128))

    assert [int(c) - zero for c in found] == [130, 129, 133]  # 129.5 and 132.5 are rounded up


def test_select_takes_every_byte_but_0_for_the_first() -> None:
    arguments = [truths([0, 1, 2, 255]), tensor([1, 2, 3, 4], "int32"), tensor([-1, -2, -3, -4], "int32")]

    assert result_of(OperationType.SELECT, arguments, Operand(I32)).tolist() == [-1, 2, 3, 4]
