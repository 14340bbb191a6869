"""Lowering rules of operations of the built-in extension: 16-bit tensors that are moved, tables, DYNAMIC_QUANTIZE."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from nnfmq.engines.compiled.kernels.elementwise_kernels import plan_elementwise
from nnfmq.engines.compiled.kernels.normalization_kernels import plan_axis_loop
from nnfmq.engines.compiled.kernels.quantized_ops import Lut8
from nnfmq.engines.compiled.kernels.row_quantization import RowQuantization
from nnfmq.engines.compiled.lowering import KernelLaunch, LoweringRule, data_movement_rules
from nnfmq.engines.compiled.target import Target
from nnfmq.hal.tflite_codes import SIXTEEN_BIT, TfliteOperation, operation_code
from nnfmq.hal.types import OperationType
from nnfmq.operations.quantization import all_quantized_values
from nnfmq.operations.registry import REGISTRY
from nnfmq.operations.signature import NUMPY_TYPES, Array, Tensor
from nnfmq.operations.tflite_extension import EXTENSION_FAMILIES

__all__ = ["RULES", "VIEWS"]

VIEWS = tuple(SIXTEEN_BIT[code] for code in (OperationType.EXPAND_DIMS, OperationType.RESHAPE, OperationType.SQUEEZE))
"""The operations on 16-bit tensors that only change the shape."""

_TABLES = [operation_code(TfliteOperation[name]) for name in EXTENSION_FAMILIES["eight_bit_functions"].split()]
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


RULES: Mapping[OperationType, LoweringRule] = {
    **{
        SIXTEEN_BIT[code]: rule
        for code, rule in data_movement_rules.RULES.items()
        if code in SIXTEEN_BIT and code not in _INTERPOLATING
    },
    **{code: partial(_table, code) for code in _TABLES},
    operation_code(TfliteOperation.DYNAMIC_QUANTIZE): _dynamic_quantize,
}
