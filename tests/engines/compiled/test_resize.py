"""RESIZE_BILINEAR kernels: bit-exact with the interpreter, floats included."""

from __future__ import annotations

import pytest
from support.compiled import assert_kernels_agree
from support.small_models import one_operation

from nnfmq.hal.types import Operand, OperandType, OperationType

pytestmark = pytest.mark.instruction_sets

TYPES = {
    "float32": (OperandType.TENSOR_FLOAT32, 0.0, 0),
    "uint8": (OperandType.TENSOR_QUANT8_ASYMM, 0.5, 100),
    "int8": (OperandType.TENSOR_QUANT8_ASYMM_SIGNED, 0.25, -7),
}
SIZES = [
    ((5, 7), (10, 14)),
    ((9, 8), (4, 13)),
    ((1, 1), (6, 3)),
    ((33, 17), (5, 1)),
    ((7, 20), (19, 41)),
]


@pytest.mark.parametrize("channels", [1, 3, 21])
@pytest.mark.parametrize(("aligned", "half"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("old", "new"), SIZES)
@pytest.mark.parametrize("kind", TYPES)
def test_resize_bilinear_matches_the_interpreter(
    kind: str, old: tuple[int, int], new: tuple[int, int], aligned: bool, half: bool, channels: int
) -> None:
    type, scale, zero_point = TYPES[kind]
    images = [Operand(type, (2, *size, channels), scale, zero_point) for size in (old, new)]
    arguments = [images[0], new[1], new[0], False, aligned, half]

    assert_kernels_agree(one_operation(OperationType.RESIZE_BILINEAR, arguments, images[1]), tolerance=0)
