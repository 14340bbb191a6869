"""CAST between numbers, FILL and RANK."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.one_result import result_of, tensor

from nnfmq.hal.types import Operand, OperandType, OperationType

TYPES = {
    "float32": OperandType.TENSOR_FLOAT32,
    "float16": OperandType.TENSOR_FLOAT16,
    "int32": OperandType.TENSOR_INT32,
    "uint8": OperandType.TENSOR_QUANT8_ASYMM,
}
MOST = (1 << 31) - 1


def cast(values: list[float], source: str, target: str) -> list[float]:
    input = tensor(values, source, *((0.5, 77) if source == "uint8" else ()))
    output = Operand(TYPES[target], (), *((2.0, 33) if target == "uint8" else ()))
    found: list[float] = result_of(OperationType.CAST, [input], output).tolist()
    return found


@pytest.mark.parametrize("source", TYPES)
@pytest.mark.parametrize("target", TYPES)
def test_numbers_that_both_types_hold_are_kept_and_quantization_is_ignored(source: str, target: str) -> None:
    assert cast([0, 1, 77, 255], source, target) == [0, 1, 77, 255]


@pytest.mark.parametrize("source", ["float32", "float16"])
def test_a_cast_from_floats_rounds_toward_0(source: str) -> None:
    assert cast([-1.75, -0.5, 0.5, 1.75], source, "int32") == [-1, 0, 0, 1]


@pytest.mark.parametrize("source", ["float32", "float16", "int32"])
def test_a_cast_to_codes_saturates(source: str) -> None:
    assert cast([-1, -1000, 256, 1000], source, "uint8") == [0, 0, 255, 255]


@pytest.mark.parametrize("target", ["int32", "uint8"])
def test_what_integers_cannot_hold_becomes_the_nearest_they_can_and_nan_0(target: str) -> None:
    least, most = (0, 255) if target == "uint8" else (-MOST - 1, MOST)

    assert cast([np.inf, -np.inf, 3e9, -3e9, np.nan], "float32", target) == [most, least, most, least, 0]


def test_a_cast_to_half_rounds_to_even_and_overflows_to_infinity() -> None:
    assert cast([2049, 2051, 70000], "int32", "float16") == [2048, 2052, np.inf]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (OperandType.TENSOR_BOOL8, np.uint8),
        (OperandType.TENSOR_QUANT8_ASYMM_SIGNED, np.int8),
        (OperandType.TENSOR_QUANT8_SYMM, np.int8),
        (OperandType.TENSOR_QUANT16_ASYMM, np.uint16),
        (OperandType.TENSOR_QUANT16_SYMM, np.int16),
    ],
)
def test_other_types_are_cast_to_themselves_bit_by_bit(kind: OperandType, dtype: Any) -> None:
    scale = 0.0 if kind == OperandType.TENSOR_BOOL8 else 0.5
    array = np.array([np.iinfo(dtype).min, 3, np.iinfo(dtype).max], dtype)

    found = result_of(OperationType.CAST, [(Operand(kind, (3,), scale), array)], Operand(kind, (), scale))

    np.testing.assert_array_equal(found, array, strict=True)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("kind", "scalar", "value"),
    [
        (TYPES["float32"], OperandType.FLOAT32, np.float32(0.1)),
        (TYPES["float16"], OperandType.FLOAT16, np.float16(0.1)),
        (TYPES["int32"], OperandType.INT32, np.int32(-(1 << 31))),
    ],
)
def test_fill_repeats_its_value(kind: OperandType, scalar: OperandType, value: Any, known: bool) -> None:
    dimensions = np.array([2, 3], np.int32)
    arguments = [(Operand(TYPES["int32"], (2,)), dimensions.tobytes()), (Operand(scalar), value.tobytes())]

    found = result_of(OperationType.FILL, arguments, Operand(kind), known=known)

    np.testing.assert_array_equal(found, np.full((2, 3), value), strict=True)


def test_fill_may_make_an_empty_tensor() -> None:
    found = result_of(OperationType.FILL, [tensor([2, 0], "int32"), 1.0], Operand(TYPES["float32"]))

    assert found.shape == (2, 0)


@pytest.mark.parametrize("shape", [(1,), (2, 3), (1, 1, 1, 1, 1, 1)])
@pytest.mark.parametrize("known", [True, False])
def test_rank_counts_dimensions(shape: tuple[int, ...], known: bool) -> None:
    found = result_of(OperationType.RANK, [tensor(np.zeros(shape))], Operand(OperandType.INT32), known=known)

    assert (found.shape, found.tolist()) == ((), len(shape))
