"""Lowering rules of operations of the built-in extension: 16-bit tensors that are moved, and DYNAMIC_QUANTIZE."""

from __future__ import annotations

import math
from collections.abc import Mapping

from nnfmq.engines.compiled.kernels.normalization_kernels import plan_axis_loop
from nnfmq.engines.compiled.kernels.row_quantization import RowQuantization
from nnfmq.engines.compiled.lowering import KernelLaunch, LoweringRule, data_movement_rules
from nnfmq.engines.compiled.target import Target
from nnfmq.hal.tflite_codes import SIXTEEN_BIT, TfliteOperation, operation_code
from nnfmq.hal.types import OperationType
from nnfmq.operations.signature import Tensor

__all__ = ["RULES", "VIEWS"]

VIEWS = tuple(SIXTEEN_BIT[code] for code in (OperationType.EXPAND_DIMS, OperationType.RESHAPE, OperationType.SQUEEZE))
"""The operations on 16-bit tensors that only change the shape."""

_INTERPOLATING = (OperationType.RESIZE_BILINEAR,)  # its kernel has no 16-bit elements


def _dynamic_quantize(
    input: Tensor, *, output: Tensor, target: Target, row_length: int, asymmetric: bool
) -> KernelLaunch | None:
    """Lower DYNAMIC_QUANTIZE."""
    count = math.prod(input.shape)
    length = row_length or math.prod(input.shape[1:])
    axis_loop = plan_axis_loop((count // length, length), 1, 2 * target.lanes)
    return KernelLaunch(RowQuantization(axis_loop, bool(asymmetric)), (), count // 2)


RULES: Mapping[OperationType, LoweringRule] = {
    **{
        SIXTEEN_BIT[code]: rule
        for code, rule in data_movement_rules.RULES.items()
        if code in SIXTEEN_BIT and code not in _INTERPOLATING
    },
    operation_code(TfliteOperation.DYNAMIC_QUANTIZE): _dynamic_quantize,
}
