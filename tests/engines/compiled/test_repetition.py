"""Gathers that repeat elements and rows are one kernel, with the interpreter's results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.chains import kernels_of, model_of
from support.compiled import assert_kernels_agree
from support.small_models import vector

from nnfmq.hal.types import Operand, OperandType, OperationType

pytestmark = pytest.mark.instruction_sets

KINDS = {
    "float32": Operand(OperandType.TENSOR_FLOAT32),
    "float16": Operand(OperandType.TENSOR_FLOAT16),
    "uint8": Operand(OperandType.TENSOR_QUANT8_ASYMM, (), 0.5, 3),
}


def operand(kind: str, *shape: int) -> Operand:
    found = KINDS[kind]
    return Operand(found.type, shape, found.scale, found.zero_point)


def repeated(extent: int, times: int) -> Any:
    return vector(np.arange(extent).repeat(times).tolist())


@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("shape", [(1, 2, 3, 16), (2, 5), (3, 70), (1, 1, 1, 5000)])
@pytest.mark.parametrize("kind", KINDS)
def test_elements_are_repeated(kind: str, shape: tuple[int, ...], times: int) -> None:
    x, y = operand(kind, *shape), operand(kind, *shape[:-1], shape[-1] * times)
    model = model_of(x, [(OperationType.GATHER, [[-1], len(shape) - 1, repeated(shape[-1], times)], y)])
    assert kernels_of(model) == ["RepeatedElements"]
    assert_kernels_agree(model)


@pytest.mark.parametrize("times", [(2, 2), (1, 8), (3, 1)])
@pytest.mark.parametrize("shape", [(1, 2, 3, 16), (2, 5), (2, 3, 7, 37)])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_their_elements_are_repeated_at_once(
    kind: str, shape: tuple[int, ...], times: tuple[int, int]
) -> None:
    *batch, rows, columns = shape
    between, y = (
        operand(kind, *batch, rows * times[0], columns),
        operand(kind, *batch, rows * times[0], columns * times[1]),
    )
    gathers = [
        (OperationType.GATHER, [[-1], len(shape) - 2, repeated(rows, times[0])], between),
        (OperationType.GATHER, [[0], -1, repeated(columns, times[1])], y),
    ]
    model = model_of(operand(kind, *shape), gathers)
    assert kernels_of(model) == ["RepeatedElements"]
    assert_kernels_agree(model)


@pytest.mark.parametrize("indices", [[0, 0, 1, 1, 2], [0, 1, 0, 1, 2, 2], [0, 0, 0], list(np.arange(3).repeat(9))])
def test_other_gathers_are_copies(indices: list[int]) -> None:
    x, y = operand("float32", 2, 3), operand("float32", 2, len(indices))
    model = model_of(x, [(OperationType.GATHER, [[-1], 1, vector(indices)], y)])
    assert kernels_of(model) == ["StridedCopy"]
    assert_kernels_agree(model)
