"""SOFTMAX."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from nnfmq.engines.compiled.kernels.softmax import (
    LONGEST_CODES,
    LONGEST_FLOATS,
    plan_code_softmax,
    plan_float_softmax,
)
from nnfmq.engines.compiled.lowering.lowered import Lowered, Rule
from nnfmq.engines.compiled.target import Target
from nnfmq.hal.types import OperationType
from nnfmq.operations.shapes import normal_axis
from nnfmq.operations.signature import Tensor
from nnfmq.operations.softmax import exponential_tables

__all__ = ["RULES"]


def softmax(input: Tensor, *, output: Tensor, target: Target, beta: float, axis: int = -1) -> Lowered | None:
    """SOFTMAX."""
    axis = normal_axis(axis, len(input.shape))
    rows, length, inner = math.prod(input.shape[:axis]), input.shape[axis], math.prod(input.shape[axis + 1 :])
    count = rows * length * inner
    if input.dtype == np.dtype("<f4"):
        if length > LONGEST_FLOATS:
            return None
        kernel = plan_float_softmax(rows, length, inner, float(np.float32(beta)), target)
        return Lowered(kernel, (), count)
    if input.dtype.itemsize != 1 or length > LONGEST_CODES:
        return None
    tables = tuple(table.astype("<i4").tobytes() for table in exponential_tables(input.scale, beta))
    of_codes = plan_code_softmax(rows, length, inner, input.dtype.kind == "i", target)
    return Lowered(of_codes, tables, 2 * count)


RULES: Mapping[OperationType, Rule] = {OperationType.SOFTMAX: softmax}
