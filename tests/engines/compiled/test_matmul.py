"""BATCH_MATMUL by generated kernels, against the interpreter."""

from __future__ import annotations

import pytest
from support.compiled import assert_kernels_agree
from support.small_models import one_operation

from nnfmq.hal.types import Operand, OperandType, OperationType

pytestmark = pytest.mark.instruction_sets

F32, Q8S = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_QUANT8_ASYMM_SIGNED
SIZES = [  # batch, rows, length, columns
    ((2,), 9, 16, 24),
    ((3, 2), 1, 7, 5),
    ((1,), 33, 31, 70),
    ((), 5, 64, 8),
    ((4,), 3, 1, 1),
]


@pytest.mark.parametrize("adjoint_right", [False, True])
@pytest.mark.parametrize("adjoint_left", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_products_of_matrices_are_the_interpreter_s(
    kind: str, size: tuple[tuple[int, ...], int, int, int], adjoint_left: bool, adjoint_right: bool
) -> None:
    batch, rows, length, columns = size
    left, right = (length, rows) if adjoint_left else (rows, length), (length, columns)
    right = right[::-1] if adjoint_right else right

    def matrices(shape: tuple[int, ...], scale: float, zero_point: int) -> Operand:
        return Operand(F32, shape) if kind == "float32" else Operand(Q8S, shape, scale, zero_point)

    arguments = [matrices((*batch, *left), 0.5, -9), matrices((*batch, *right), 0.25, 14), adjoint_left, adjoint_right]
    output = matrices((*batch, rows, columns), 60.0, 3)

    assert_kernels_agree(one_operation(OperationType.BATCH_MATMUL, arguments, output))
