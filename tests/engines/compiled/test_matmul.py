"""BATCH_MATMUL kernels compared with the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
from support.compiled import assert_kernels_agree, assert_kernels_agree_on
from support.small_models import one_operation

from nnfmq.engines.compiled.kernels import gemm_plan
from nnfmq.hal.types import Operand, OperandType, OperationType

pytestmark = pytest.mark.instruction_sets

F32, Q8S = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_QUANT8_ASYMM_SIGNED
SIZES = [  # batch, rows, k, columns
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
def test_batch_matmul_matches_the_interpreter(
    kind: str, size: tuple[tuple[int, ...], int, int, int], adjoint_left: bool, adjoint_right: bool
) -> None:
    batch, rows, k, columns = size
    left, right = (k, rows) if adjoint_left else (rows, k), (k, columns)
    right = right[::-1] if adjoint_right else right

    def matrices(shape: tuple[int, ...], scale: float, zero_point: int) -> Operand:
        return Operand(F32, shape) if kind == "float32" else Operand(Q8S, shape, scale, zero_point)

    arguments = [matrices((*batch, *left), 0.5, -9), matrices((*batch, *right), 0.25, 14), adjoint_left, adjoint_right]
    output = matrices((*batch, rows, columns), 60.0, 3)

    assert_kernels_agree(one_operation(OperationType.BATCH_MATMUL, arguments, output))


@pytest.mark.parametrize("zero_points", [(127, 127), (-128, 127), (127, -128), (-128, -128), (0, 0)])
def test_extreme_sums_of_int8_match_the_interpreter(zero_points: tuple[int, int]) -> None:
    """Products of the largest magnitudes, and terms of the zero points of both signs."""
    left, right = (
        Operand(Q8S, shape, 1.0, zero) for shape, zero in zip([(9, 5003), (5003, 19)], zero_points, strict=True)
    )
    model = one_operation(OperationType.BATCH_MATMUL, [left, right, False, False], Operand(Q8S, (9, 19), 4e6, 5))
    limits = np.array([-128, 127], np.int8)
    arguments = [
        [np.full(left.dimensions, limits[n % 2], np.int8), np.full(right.dimensions, limits[n // 2], np.int8)]
        for n in range(4)
    ]
    assert_kernels_agree_on(model, arguments)


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_large_matrices_on_the_right_match_the_interpreter(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are so small that the matrices are streamed as large ones are, in K blocks."""
    monkeypatch.setattr(gemm_plan, "_MAX_RESIDENT_BYTES", 64)
    monkeypatch.setattr(gemm_plan, "_MAX_K_BLOCK_BYTES", 1200)
    operand, scales = (F32, (0.0, 0.0)) if kind == "float32" else (Q8S, (0.5, 100.0))
    left, right = (Operand(operand, shape, scales[0], 0) for shape in ((3, 33, 70), (3, 70, 49)))
    output = Operand(operand, (3, 33, 49), scales[1], 0)

    assert_kernels_agree(one_operation(OperationType.BATCH_MATMUL, [left, right, False, False], output))
