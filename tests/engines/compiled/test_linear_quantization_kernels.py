"""Kernels of QUANTIZE_LINEAR, QLINEAR_ADD and QLINEAR_MUL have the interpreter's results, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.compiled import assert_kernels_agree, assert_kernels_agree_on
from support.small_models import one_operation

from nnfmq.hal.extensions import NAME, PREFIX, TfliteOperation, operation_code
from nnfmq.hal.types import ExtensionNameAndPrefix, Model, Operand, OperandType

pytestmark = pytest.mark.instruction_sets

F32 = OperandType.TENSOR_FLOAT32
KINDS = {np.uint8: OperandType.TENSOR_QUANT8_ASYMM, np.int8: OperandType.TENSOR_QUANT8_ASYMM_SIGNED}
EDGES = [*np.arange(-9, 9, 0.25), np.nan, np.inf, -np.inf, 3e38, -3e38, 1e9, -1e9, 127.5, 255.5, -128.5, -0.0]


def model(name: str, arguments: list[Any], output: Operand) -> Model:
    found = one_operation(operation_code(TfliteOperation[name]), arguments, output)
    return replace(found, extensions=(ExtensionNameAndPrefix(NAME, PREFIX),))


@pytest.mark.parametrize("adds_first", [False, True])
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("scale", [1.0, 0.25, 0.0371])
def test_floats_are_quantized(scale: float, dtype: Any, adds_first: bool) -> None:
    values = np.float32(EDGES).reshape(1, -1)
    output = Operand(KINDS[dtype], values.shape, scale, 3)
    found = model("QUANTIZE_LINEAR", [Operand(F32, values.shape), adds_first], output)
    assert_kernels_agree_on(found, [[values], [values * np.float32(scale)]])


@pytest.mark.parametrize("shapes", [((2, 5, 19), (2, 5, 19)), ((4, 33), (1,)), ((3, 1), (1, 70))])
@pytest.mark.parametrize("scales", [(0.25, 0.125, 0.5), (0.0371, 0.0173, 0.02), (1e30, 1e-30, 1e-30)])
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("name", ["QLINEAR_ADD", "QLINEAR_MUL"])
def test_quantized_values_are_added_and_multiplied(name: str, dtype: Any, scales: Any, shapes: Any) -> None:
    zeros = (3, 77, 101) if dtype is np.uint8 else (-5, 77, -101)
    shape = np.broadcast_shapes(*shapes)
    first, second, output = (
        Operand(KINDS[dtype], dimensions, scale, zero)
        for dimensions, scale, zero in zip((*shapes, shape), scales, zeros, strict=True)
    )
    assert_kernels_agree(model(name, [first, second], output))
