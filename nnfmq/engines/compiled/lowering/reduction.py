"""Lowering rules of pooling, reductions, and operations along one axis (arg-min/max, L2 normalization, softmax)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from nnfmq.engines.compiled.kernels.normalization import (
    MAX_FLOAT_SOFTMAX_SIZE,
    MAX_QUANTIZED_L2_NORM_SIZE,
    MAX_QUANTIZED_SOFTMAX_SIZE,
    ArgMinMax,
    FloatL2Norm,
    FloatSoftmax,
    QuantizedL2Norm,
    plan_axis_loop,
    plan_quantized_softmax,
)
from nnfmq.engines.compiled.kernels.reduction import (
    PARTIAL_RESULTS,
    FloatMeanReducer,
    FloatMinMaxReducer,
    FloatRmsReducer,
    FloatSumReducer,
    QuantizedMeanReducer,
    QuantizedMinMaxReducer,
    Reducer,
    plan_pool,
    plan_reduction,
)
from nnfmq.engines.compiled.lowering import KernelLaunch, LoweringRule
from nnfmq.engines.compiled.target import Target
from nnfmq.hal.types import OperationType
from nnfmq.operations.declaration import Array, Tensor
from nnfmq.operations.quantization import dtype_range, float_activation_range, quantized_activation_range
from nnfmq.operations.reduction import reduced_axes
from nnfmq.operations.shapes import normalize_axis, windows
from nnfmq.operations.softmax import exponential_tables

__all__ = ["RULES", "lower_pool", "lower_reduction"]

_FLOAT, _QUANTIZED = np.dtype("<f4"), (np.dtype("u1"), np.dtype("i1"))


# -- pooling ----------------------------------------------------------------------------------------------------------


def lower_pool(
    choose_reducer: Callable[[Tensor, int, int], Reducer | None],
    input: Tensor,
    *,
    output: Tensor,
    target: Target,
    filter_width: int,
    filter_height: int,
    activation: int,
    **conv_params: int,
) -> KernelLaunch | None:
    """Lower a pool by the reducer that is chosen for the output, the activation and the size of the filter."""
    batch, height, width, channels = input.shape
    rows, columns = windows((height, width), (filter_height, filter_width), **conv_params)
    reducer = choose_reducer(output, activation, rows.size * columns.size)
    if reducer is None:
        return None
    kernel = plan_pool((batch, height, width, channels), rows, columns, reducer, target)
    elements = batch * rows.count * columns.count * rows.size * columns.size * channels
    return KernelLaunch(kernel, (), elements * reducer.item_bytes // 32)


def _average_reducer(output: Tensor, activation: int, max_count: int) -> Reducer | None:
    if output.dtype == _FLOAT:
        return FloatMeanReducer(*float_activation_range(activation))
    if output.dtype not in _QUANTIZED:
        return None
    bounds = quantized_activation_range(activation, output)
    return QuantizedMeanReducer.of(output.dtype.kind == "i", max_count, True, *bounds)


def _l2_reducer(output: Tensor, activation: int, max_count: int) -> Reducer | None:
    return FloatRmsReducer(*float_activation_range(activation)) if output.dtype == _FLOAT else None


def _max_reducer(output: Tensor, activation: int, max_count: int) -> Reducer | None:
    if output.dtype == _FLOAT:
        return FloatMinMaxReducer(True, *float_activation_range(activation))
    if output.dtype not in _QUANTIZED:
        return None
    return QuantizedMinMaxReducer(output.dtype.kind == "i", True, *quantized_activation_range(activation, output))


# -- reductions -------------------------------------------------------------------------------------------------------


def lower_reduction(
    choose_reducer: Callable[[Tensor, int], Reducer | None],
    input: Tensor,
    *,
    output: Tensor,
    target: Target,
    axes: Array,
    keep_dimensions: int,
) -> KernelLaunch | None:
    """Lower a reduction; `choose_reducer` gets the input and the number of elements of each result."""
    reduced = reduced_axes(axes, len(input.shape))
    reducer = choose_reducer(input, math.prod(input.shape[axis] for axis in reduced))
    if reducer is None or 0 in input.shape:
        return None
    kernel = plan_reduction(input.shape, reduced, reducer, target)
    return KernelLaunch(kernel, (), math.prod(input.shape) * reducer.item_bytes // 32)


def _mean_reducer(input: Tensor, count: int) -> Reducer | None:
    if input.dtype == _FLOAT:
        return FloatMeanReducer()
    if input.dtype not in _QUANTIZED:
        return None
    return QuantizedMeanReducer.of(input.dtype.kind == "i", count, False, *dtype_range(input))


def _min_max_reducer(is_max: bool, input: Tensor, count: int) -> Reducer | None:
    if input.dtype == _FLOAT:
        return FloatMinMaxReducer(is_max)
    if input.dtype not in _QUANTIZED:
        return None
    return QuantizedMinMaxReducer(input.dtype.kind == "i", is_max, *dtype_range(input))


def _sum_reducer(input: Tensor, count: int) -> Reducer | None:
    return FloatSumReducer() if input.dtype == _FLOAT else None


# -- along one axis ---------------------------------------------------------------------------------------------------


def _arg_min_max(is_max: bool, input: Tensor, *, output: Tensor, target: Target, axis: int) -> KernelLaunch | None:
    """Lower ARGMAX and ARGMIN."""
    letters = {_FLOAT: "f4", np.dtype("<i4"): "i4", _QUANTIZED[0]: "u1", _QUANTIZED[1]: "i1"}
    element_type = letters.get(input.dtype)
    if element_type is None:
        return None
    lanes = 2 * target.lanes
    axis_loop = plan_axis_loop(input.shape, normalize_axis(axis, len(input.shape)), lanes, lanes)
    return KernelLaunch(ArgMinMax(axis_loop, element_type, is_max), (), math.prod(input.shape) // 4)


def _l2_normalization(input: Tensor, *, output: Tensor, target: Target, axis: int = -1) -> KernelLaunch | None:
    """Lower L2_NORMALIZATION."""
    axis, estimated_ns = normalize_axis(axis, len(input.shape)), math.prod(input.shape) // 2
    if input.dtype == _FLOAT:
        axis_loop = plan_axis_loop(input.shape, axis, 2 * target.lanes, PARTIAL_RESULTS)
        return KernelLaunch(FloatL2Norm(axis_loop), (), estimated_ns)
    if input.dtype not in _QUANTIZED or input.shape[axis] > MAX_QUANTIZED_L2_NORM_SIZE:
        return None
    # Each slice has its own multiplier, so lanes must not be slices.
    axis_loop = plan_axis_loop(input.shape, axis, 1, 2 * target.lanes)
    return KernelLaunch(QuantizedL2Norm(axis_loop, input.dtype.kind == "i", input.zero_point), (), estimated_ns)


def _softmax(input: Tensor, *, output: Tensor, target: Target, beta: float, axis: int = -1) -> KernelLaunch | None:
    """Lower SOFTMAX."""
    if input.dtype == _FLOAT:
        return _float_softmax(False, input, output=output, target=target, beta=beta, axis=axis)
    axis = normalize_axis(axis, len(input.shape))
    outer, axis_size, inner = math.prod(input.shape[:axis]), input.shape[axis], math.prod(input.shape[axis + 1 :])
    if input.dtype.itemsize != 1 or axis_size > MAX_QUANTIZED_SOFTMAX_SIZE:
        return None
    tables = tuple(table.astype("<i4").tobytes() for table in exponential_tables(input.scale, beta))
    kernel = plan_quantized_softmax(outer, axis_size, inner, input.dtype.kind == "i", target)
    return KernelLaunch(kernel, tables, 2 * outer * axis_size * inner)


def _float_softmax(
    is_log: bool, input: Tensor, *, output: Tensor, target: Target, beta: float, axis: int
) -> KernelLaunch | None:
    """Lower LOG_SOFTMAX, and SOFTMAX of float32."""
    axis = normalize_axis(axis, len(input.shape))
    if input.dtype != _FLOAT or input.shape[axis] > MAX_FLOAT_SOFTMAX_SIZE:
        return None
    axis_loop = plan_axis_loop(input.shape, axis, target.lanes, PARTIAL_RESULTS)
    return KernelLaunch(FloatSoftmax(axis_loop, float(np.float32(beta)), is_log), (), math.prod(input.shape))


RULES: Mapping[OperationType, LoweringRule] = {
    OperationType.ARGMAX: partial(_arg_min_max, True),
    OperationType.ARGMIN: partial(_arg_min_max, False),
    OperationType.AVERAGE_POOL_2D: partial(lower_pool, _average_reducer),
    OperationType.L2_POOL_2D: partial(lower_pool, _l2_reducer),
    OperationType.L2_NORMALIZATION: _l2_normalization,
    OperationType.LOG_SOFTMAX: partial(_float_softmax, True),
    OperationType.MAX_POOL_2D: partial(lower_pool, _max_reducer),
    OperationType.MEAN: partial(lower_reduction, _mean_reducer),
    OperationType.REDUCE_MAX: partial(lower_reduction, partial(_min_max_reducer, True)),
    OperationType.REDUCE_MIN: partial(lower_reduction, partial(_min_max_reducer, False)),
    OperationType.REDUCE_SUM: partial(lower_reduction, _sum_reducer),
    OperationType.SOFTMAX: _softmax,
}
