"""Reductions and indexes of extremes: axes, what is left of a shape, values that plain arithmetic would get wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.one_result import result_of, tensor, truths
from support.small_models import vector

from nnfmq.hal.types import Operand, OperandType, OperationType

F32, F16, I32, B8 = (
    OperandType.TENSOR_FLOAT32,
    OperandType.TENSOR_FLOAT16,
    OperandType.TENSOR_INT32,
    OperandType.TENSOR_BOOL8,
)
UINT8, INT8 = OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED
CUBE = np.arange(24).reshape(2, 3, 4)


def reduced(code: OperationType, input: Any, axes: list[int], keep: bool = False, kind: OperandType = F32) -> Any:
    flag: Any = int(keep) if code == OperationType.MEAN else keep
    scale, zero_point = input[0].scale, input[0].zero_point
    return result_of(code, [input, vector(axes), flag], Operand(kind, (), scale, zero_point))


@pytest.mark.parametrize(
    ("axes", "keep", "shape"),
    [
        ([0], False, (3, 4)),
        ([0], True, (1, 3, 4)),
        ([-1, 0], False, (3,)),
        ([2, 2, -1], True, (2, 3, 1)),
        ([0, 1, 2], False, (1,)),
        ([0, 1, 2], True, (1, 1, 1)),
    ],
)
@pytest.mark.parametrize(
    ("code", "function"),
    [
        (OperationType.MEAN, np.mean),
        (OperationType.REDUCE_SUM, np.sum),
        (OperationType.REDUCE_MAX, np.max),
        (OperationType.REDUCE_MIN, np.min),
    ],
)
def test_axes_count_from_either_end_and_each_once(
    code: OperationType, function: Any, axes: list[int], keep: bool, shape: tuple[int, ...]
) -> None:
    found = reduced(code, tensor(CUBE), axes, keep)

    assert found.shape == shape
    assert found.ravel().tolist() == function(CUBE, axis=tuple({axis % 3 for axis in axes})).ravel().tolist()


def test_no_axes_leave_the_input_as_it_is() -> None:
    arguments = [tensor([[1.0, 2.0]]), tensor([], "int32"), False]

    assert result_of(OperationType.REDUCE_SUM, arguments, Operand(F32), known=False).tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize(("dtype", "kind", "zero"), [("uint8", UINT8, 0), ("int8", INT8, -128)])
def test_a_mean_of_quantized_values_is_truncated_as_the_unsigned_one(dtype: str, kind: OperandType, zero: int) -> None:
    codes = [[zero + 126, zero + 127], [zero + 0, zero + 255], [zero + 2, zero + 2]]

    found = reduced(OperationType.MEAN, tensor(codes, dtype, 0.5, zero + 3), [1], kind=kind)

    assert [int(code) - zero for code in found] == [126, 127, 2]


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ([2.0, 3.0, -4.0], -24.0),
        ([0.0, np.inf, 2.0], np.nan),
        ([np.nan, 0.0, 1.0], np.nan),
        ([np.nan, 1.0, 1.0], np.nan),
        ([3e38, 3e38, 0.0], 0.0),
        ([3e38, 3e38, 1e-38], np.inf),
        ([3e20, 3e20, 1e-20], 9e20),
        ([1e-30, 1e-30, np.inf], np.inf),
    ],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_product_is_that_of_real_numbers_and_0_times_infinity_is_nan(
    factors: list[float], expected: float, axis: int
) -> None:
    values = np.array([factors, [1.0, 2.0, 3.0]], np.float32)

    found = reduced(OperationType.REDUCE_PROD, tensor(values if axis else values.T), [axis])

    np.testing.assert_allclose(found, np.array([expected, 6.0]).astype(np.float32), rtol=1e-6)


def test_many_large_factors_do_not_turn_a_0_into_nan() -> None:
    values = np.array([[3e38] * 20 + [0.0]], np.float32)

    assert reduced(OperationType.REDUCE_PROD, tensor(values), [1]).tolist() == [0.0]


@pytest.mark.parametrize(
    ("code", "expected"), [(OperationType.REDUCE_ALL, [0, 1, 0]), (OperationType.REDUCE_ANY, [1, 1, 0])]
)
def test_logical_reductions_take_every_byte_but_0_for_true_and_give_1(code: OperationType, expected: list[int]) -> None:
    input = truths([[0, 2], [1, 255], [0, 0]])

    assert reduced(code, input, [1], kind=B8).tolist() == expected


def test_a_sum_of_halves_does_not_stall_where_half_precision_would() -> None:
    found = reduced(OperationType.REDUCE_SUM, tensor(np.ones(4096), "float16"), [0], kind=F16)

    assert found.tolist() == [4096.0]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "uint8", "int8"])
@pytest.mark.parametrize(("code", "expected"), [(OperationType.ARGMAX, [1, 0]), (OperationType.ARGMIN, [0, 1])])
def test_the_first_of_equal_elements_is_the_extreme(code: OperationType, expected: list[int], dtype: str) -> None:
    input = tensor([[1, 7, 7, 1], [9, 2, 2, 9]], dtype, *((1.0, 0) if "t8" in dtype else ()))

    assert result_of(code, [input, -1], Operand(I32)).tolist() == expected


@pytest.mark.parametrize("code", [OperationType.ARGMAX, OperationType.ARGMIN])
@pytest.mark.parametrize(
    ("shape", "axis", "expected"), [((5,), 0, (1,)), ((2, 3, 4), 1, (2, 4)), ((2, 1, 1, 1, 3), -5, (1, 1, 1, 3))]
)
def test_the_axis_of_an_index_is_gone(
    code: OperationType, shape: tuple[int, ...], axis: int, expected: tuple[int, ...]
) -> None:
    assert result_of(code, [tensor(np.zeros(shape)), axis], Operand(I32)).shape == expected
