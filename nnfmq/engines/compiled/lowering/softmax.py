"""SOFTMAX and LOG_SOFTMAX."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import numpy as np

from nnfmq.engines.compiled.kernels.normalization_kernels import plan_axis_loop
from nnfmq.engines.compiled.kernels.softmax import (
    LONGEST_CODES,
    LONGEST_FLOATS,
    FloatSoftmax,
    plan_quantized_softmax,
)
from nnfmq.engines.compiled.lowering import KernelLaunch, LoweringRule
from nnfmq.engines.compiled.target import Target
from nnfmq.hal.types import OperationType
from nnfmq.operations.shapes import normalize_axis
from nnfmq.operations.signature import Tensor
from nnfmq.operations.softmax import exponential_tables

__all__ = ["RULES"]

_FLOAT = np.dtype("<f4")


def softmax(input: Tensor, *, output: Tensor, target: Target, beta: float, axis: int = -1) -> KernelLaunch | None:
    """SOFTMAX."""
    if input.dtype == _FLOAT:
        return _of_floats(False, input, output=output, target=target, beta=beta, axis=axis)
    axis = normalize_axis(axis, len(input.shape))
    rows, length, inner = math.prod(input.shape[:axis]), input.shape[axis], math.prod(input.shape[axis + 1 :])
    if input.dtype.itemsize != 1 or length > LONGEST_CODES:
        return None
    tables = tuple(table.astype("<i4").tobytes() for table in exponential_tables(input.scale, beta))
    of_codes = plan_quantized_softmax(rows, length, inner, input.dtype.kind == "i", target)
    return KernelLaunch(of_codes, tables, 2 * rows * length * inner)


def _of_floats(
    log: bool, input: Tensor, *, output: Tensor, target: Target, beta: float, axis: int
) -> KernelLaunch | None:
    axis = normalize_axis(axis, len(input.shape))
    if input.dtype != _FLOAT or input.shape[axis] > LONGEST_FLOATS:
        return None
    lines = plan_axis_loop(input.shape, axis, target.lanes)
    return KernelLaunch(FloatSoftmax(lines, float(np.float32(beta)), log), (), math.prod(input.shape))


RULES: Mapping[OperationType, LoweringRule] = {
    OperationType.LOG_SOFTMAX: partial(_of_floats, True),
    OperationType.SOFTMAX: softmax,
}
