"""Pooling and what goes along axes: AVERAGE_POOL_2D, L2_POOL_2D, MAX_POOL_2D, MEAN, REDUCE_MAX, REDUCE_MIN, REDUCE_SUM,
ARGMAX, ARGMIN and L2_NORMALIZATION.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from nnfmq.engines.compiled.kernels.extremes import ArgMinMax
from nnfmq.engines.compiled.kernels.normalization_kernels import plan_axis_loop
from nnfmq.engines.compiled.kernels.norms import LONGEST_CODES, FloatL2Norm, QuantizedL2Norm
from nnfmq.engines.compiled.kernels.pooling import plan_pool
from nnfmq.engines.compiled.kernels.reducers import (
    FloatMeanReducer,
    FloatMinMaxReducer,
    FloatRmsReducer,
    FloatSumReducer,
    QuantizedMeanReducer,
    QuantizedMinMaxReducer,
    Reducer,
)
from nnfmq.engines.compiled.kernels.reduction_kernels import plan_reduction
from nnfmq.engines.compiled.lowering import KernelLaunch, LoweringRule
from nnfmq.engines.compiled.target import Target
from nnfmq.hal.types import OperationType
from nnfmq.operations.quantization import dtype_range, float_activation_range, quantized_activation_range
from nnfmq.operations.reduce_argmax import reduced_axes
from nnfmq.operations.shapes import normalize_axis, windows
from nnfmq.operations.signature import Array, Tensor

__all__ = ["RULES"]

_FLOAT, _CODES = np.dtype("<f4"), (np.dtype("u1"), np.dtype("i1"))


def _pool(
    combine: Callable[[Tensor, int, int], Reducer | None],
    input: Tensor,
    *,
    output: Tensor,
    target: Target,
    filter_width: int,
    filter_height: int,
    activation: int,
    **conv_params: int,
) -> KernelLaunch | None:
    batch, height, width, channels = input.shape
    rows, columns = windows((height, width), (filter_height, filter_width), **conv_params)
    combination = combine(output, activation, rows.size * columns.size)
    if combination is None:
        return None
    kernel = plan_pool((batch, height, width, channels), rows, columns, combination, target)
    cells = batch * rows.count * columns.count * rows.size * columns.size * channels
    return KernelLaunch(kernel, (), cells * combination.item_bytes // 32)


def _average(output: Tensor, activation: int, most: int) -> Reducer | None:
    if output.dtype == _FLOAT:
        return FloatMeanReducer(*float_activation_range(activation))
    if output.dtype not in _CODES:
        return None
    return QuantizedMeanReducer.of(
        output.dtype.kind == "i", most, True, *quantized_activation_range(activation, output)
    )


def _root(output: Tensor, activation: int, most: int) -> Reducer | None:
    return FloatRmsReducer(*float_activation_range(activation)) if output.dtype == _FLOAT else None


def _most(output: Tensor, activation: int, most: int) -> Reducer | None:
    if output.dtype == _FLOAT:
        return FloatMinMaxReducer(True, *float_activation_range(activation))
    if output.dtype not in _CODES:
        return None
    return QuantizedMinMaxReducer(output.dtype.kind == "i", True, *quantized_activation_range(activation, output))


def _reduce(
    combine: Callable[[Tensor, int], Reducer | None],
    input: Tensor,
    *,
    output: Tensor,
    target: Target,
    axes: Array,
    keep_dimensions: int,
) -> KernelLaunch | None:
    gone = reduced_axes(axes, len(input.shape))
    combination = combine(input, math.prod(input.shape[axis] for axis in gone))
    if combination is None or 0 in input.shape:
        return None
    kernel = plan_reduction(input.shape, gone, combination, target)
    return KernelLaunch(kernel, (), math.prod(input.shape) * combination.item_bytes // 32)


def _mean(input: Tensor, count: int) -> Reducer | None:
    if input.dtype == _FLOAT:
        return FloatMeanReducer()
    return (
        QuantizedMeanReducer.of(input.dtype.kind == "i", count, False, *dtype_range(input))
        if input.dtype in _CODES
        else None
    )


def _extreme(greatest: bool, input: Tensor, count: int) -> Reducer | None:
    if input.dtype == _FLOAT:
        return FloatMinMaxReducer(greatest)
    return (
        QuantizedMinMaxReducer(input.dtype.kind == "i", greatest, *dtype_range(input))
        if input.dtype in _CODES
        else None
    )


def _sum(input: Tensor, count: int) -> Reducer | None:
    return FloatSumReducer() if input.dtype == _FLOAT else None


def _index(greatest: bool, input: Tensor, *, output: Tensor, target: Target, axis: int) -> KernelLaunch | None:
    """ARGMAX and ARGMIN."""
    items = {_FLOAT: "f4", np.dtype("<i4"): "i4", _CODES[0]: "u1", _CODES[1]: "i1"}
    item = items.get(input.dtype)
    if item is None:
        return None
    lines = plan_axis_loop(input.shape, normalize_axis(axis, len(input.shape)), 2 * target.lanes)
    return KernelLaunch(ArgMinMax(lines, item, greatest), (), math.prod(input.shape) // 4)


def _normalization(input: Tensor, *, output: Tensor, target: Target, axis: int = -1) -> KernelLaunch | None:
    """L2_NORMALIZATION."""
    axis, work = normalize_axis(axis, len(input.shape)), math.prod(input.shape) // 2
    if input.dtype == _FLOAT:
        return KernelLaunch(FloatL2Norm(plan_axis_loop(input.shape, axis, 2 * target.lanes)), (), work)
    if input.dtype not in _CODES or input.shape[axis] > LONGEST_CODES:
        return None
    is_last = math.prod(input.shape[axis + 1 :]) == 1  # a scale for each line: lanes are not lines
    lines = plan_axis_loop(input.shape, axis, 2 * target.lanes if is_last else 1)
    return KernelLaunch(QuantizedL2Norm(lines, input.dtype.kind == "i", input.zero_point), (), work)


RULES: Mapping[OperationType, LoweringRule] = {
    OperationType.ARGMAX: partial(_index, True),
    OperationType.ARGMIN: partial(_index, False),
    OperationType.AVERAGE_POOL_2D: partial(_pool, _average),
    OperationType.L2_POOL_2D: partial(_pool, _root),
    OperationType.L2_NORMALIZATION: _normalization,
    OperationType.MAX_POOL_2D: partial(_pool, _most),
    OperationType.MEAN: partial(_reduce, _mean),
    OperationType.REDUCE_MAX: partial(_reduce, partial(_extreme, True)),
    OperationType.REDUCE_MIN: partial(_reduce, partial(_extreme, False)),
    OperationType.REDUCE_SUM: partial(_reduce, _sum),
}
