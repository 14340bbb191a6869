"""Lowering rules of operations of the built-in extension: 16-bit tensors that are moved, functions, sums, products."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from nnfmq.engines.compiled.kernels.elementwise_kernels import plan_elementwise
from nnfmq.engines.compiled.kernels.normalization_kernels import plan_axis_loop
from nnfmq.engines.compiled.kernels.quantized_ops import Lut8
from nnfmq.engines.compiled.kernels.reducers import Reducer, RequantizedSumReducer, SignedMeanReducer
from nnfmq.engines.compiled.kernels.row_quantization import RowQuantization
from nnfmq.engines.compiled.lowering import KernelLaunch, LoweringRule, conv_matmul_rules, data_movement_rules
from nnfmq.engines.compiled.lowering.elementwise_rules import lower_unary
from nnfmq.engines.compiled.lowering.reduction_rules import lower_pool, lower_reduction
from nnfmq.engines.compiled.target import Target
from nnfmq.hal.tflite_codes import SIXTEEN_BIT, TfliteOperation, operation_code
from nnfmq.hal.types import OperationType
from nnfmq.operations.fixed_point import quantize_multiplier_of_mean
from nnfmq.operations.quantization import all_quantized_values, quantized_activation_range
from nnfmq.operations.registry import REGISTRY
from nnfmq.operations.signature import NUMPY_TYPES, Array, Tensor
from nnfmq.operations.tflite_extension import EXTENSION_FAMILIES

__all__ = ["RULES", "VIEWS"]

VIEWS = tuple(SIXTEEN_BIT[code] for code in (OperationType.EXPAND_DIMS, OperationType.RESHAPE, OperationType.SQUEEZE))
"""The operations on 16-bit tensors that only change the shape."""

_TABLES = [operation_code(TfliteOperation[name]) for name in EXTENSION_FAMILIES["eight_bit_functions"].split()]
_FUNCTIONS = ("cos", "erf", "round", "sign", *EXTENSION_FAMILIES["real_functions"].lower().split())
_INTERPOLATING = (OperationType.RESIZE_BILINEAR,)  # its kernel has no 16-bit elements


def _dynamic_quantize(
    input: Tensor, *, output: Tensor, target: Target, row_length: int, asymmetric: bool
) -> KernelLaunch | None:
    """Lower DYNAMIC_QUANTIZE."""
    count = math.prod(input.shape)
    length = row_length or math.prod(input.shape[1:])
    axis_loop = plan_axis_loop((count // length, length), 1, 2 * target.lanes)
    return KernelLaunch(RowQuantization(axis_loop, bool(asymmetric)), (), count // 2)


def _table(code: OperationType, input: Tensor, *, output: Tensor, target: Target, **attributes: Any) -> KernelLaunch:
    """Lower a function of one 8-bit value to a table of the interpreter's results."""
    plan = next(v.plan for v in REGISTRY[code].variants if NUMPY_TYPES[v.types["T"]] == input.dtype)
    assert plan is not None, "a matched variant has a plan"
    table: Array = plan(input, output=output, **attributes)(all_quantized_values(input))
    kernel = plan_elementwise(Lut8(), output.shape, [input.shape], target)
    return KernelLaunch(kernel, (table.tobytes(),), math.prod(output.shape) // 4)


def _gelu(input: Tensor, *, output: Tensor, target: Target, approximate: bool) -> KernelLaunch | None:
    """Lower GELU of float32 to a function, and that of 8 bits to a table."""
    if input.dtype.itemsize == 1:
        code = operation_code(TfliteOperation.GELU)
        return _table(code, input, output=output, target=target, approximate=approximate)
    return lower_unary("gelu", input, output=output, target=target, approximate=float(approximate))


def _requantized_sum(
    is_mean: bool, input: Tensor, *, output: Tensor, target: Target, axes: Array, keep_dimensions: int
) -> KernelLaunch | None:
    """Lower the extension's mean and sum of 8-bit tensors."""

    def reducer(input: Tensor, count: int) -> Reducer | None:
        number = quantize_multiplier_of_mean(input.scale / output.scale, max(count, 1) if is_mean else 1)
        zero_points = (input.zero_point, output.zero_point)
        return RequantizedSumReducer.of(input.dtype.kind == "i", count, zero_points, *number)

    return lower_reduction(reducer, input, output=output, target=target, axes=axes, keep_dimensions=keep_dimensions)


def _average_reducer(output: Tensor, activation: int, max_count: int) -> Reducer | None:
    return SignedMeanReducer.of(max_count, *quantized_activation_range(activation, output))


RULES: Mapping[OperationType, LoweringRule] = {
    **{
        SIXTEEN_BIT[code]: rule
        for code, rule in data_movement_rules.RULES.items()
        if code in SIXTEEN_BIT and code not in _INTERPOLATING
    },
    **{code: partial(_table, code) for code in _TABLES},
    **{operation_code(TfliteOperation[name.upper()]): partial(lower_unary, name) for name in _FUNCTIONS},
    operation_code(TfliteOperation.GELU): _gelu,
    operation_code(TfliteOperation.DYNAMIC_QUANTIZE): _dynamic_quantize,
    operation_code(TfliteOperation.Q8_AVERAGE_POOL_2D): partial(lower_pool, _average_reducer),
    operation_code(TfliteOperation.Q8_FULLY_CONNECTED): partial(conv_matmul_rules.fully_connected, rounds_once=True),
    operation_code(TfliteOperation.Q8_MEAN): partial(_requantized_sum, True),
    operation_code(TfliteOperation.Q8_REDUCE_SUM): partial(_requantized_sum, False),
}
