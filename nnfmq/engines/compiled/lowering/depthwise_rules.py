"""Lowering rule of DEPTHWISE_CONV_2D: float32, or 8 bits summed in integers. None if an accumulator might overflow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from nnfmq.engines.compiled.kernels.dot_product import Float32
from nnfmq.engines.compiled.kernels.dwconv import plan_dwconv
from nnfmq.engines.compiled.kernels.dwconv_int8 import DwConvInt8Kernel
from nnfmq.engines.compiled.kernels.dwconv_int8_plan import plan_dwconv_int8
from nnfmq.engines.compiled.kernels.requantize import NO_REQUANTIZATION
from nnfmq.engines.compiled.kernels.tap_interleaving import RowDot
from nnfmq.engines.compiled.lowering import KernelLaunch, LoweringRule
from nnfmq.engines.compiled.lowering.weighted_operation import (
    Q8,
    WeightedOp,
    choose_epilogue,
    image_and_windows,
    is_float,
    weight_range,
    with_folded_zero_point,
)
from nnfmq.engines.compiled.target import Target
from nnfmq.hal.types import OperationType
from nnfmq.operations.quantization import float_activation_range
from nnfmq.operations.signature import Array, Shape, Tensor

__all__ = ["RULES"]


def depthwise(
    input: Tensor,
    filter: Tensor,
    bias: Tensor,
    *,
    output: Tensor,
    target: Target,
    depth_multiplier: int,
    activation: int,
    **conv_params: int,
) -> KernelLaunch | None:
    """DEPTHWISE_CONV_2D."""
    if 0 in input.shape:
        return None
    batch, height, width, channels, rows, columns = image_and_windows(input, filter, conv_params)
    image, taps_shape = (batch, height, width, channels), (rows.size, columns.size, filter.shape[3])
    if is_float(input, filter, output):
        micro_kernel = Float32(*float_activation_range(activation))
        kernel = plan_dwconv(image, depth_multiplier, rows, columns, micro_kernel, target)
        biases = np.asarray(bias.array, np.float32)[kernel.packed_channel_map]
        constants = (lambda: kernel.pack(filter.array.reshape(taps_shape)), biases.tobytes(), kernel.params())
        return KernelLaunch(kernel, constants, kernel.macs // 12)
    if input.dtype not in Q8 or output.dtype not in Q8:
        return None
    dot = RowDot.of(target, weight_range(filter), input.dtype.kind == "i", NO_REQUANTIZATION)
    planned = plan_dwconv_int8(image, depth_multiplier, rows, columns, dot, target)
    op = WeightedOp(None, input, filter, bias, output, target, activation)
    return _depthwise_launch(op, planned, taps_shape)


def _depthwise_launch(op: WeightedOp, planned: DwConvInt8Kernel, taps_shape: Shape) -> KernelLaunch | None:
    """Return the launch of a quantized depthwise convolution, or None if an accumulator may overflow."""
    channel_map, taps = planned.packed_channel_map, math.prod(taps_shape[:2])

    def weights() -> Array:
        return op.weights().reshape(taps, -1)

    epilogue = choose_epilogue(op, channel_map, taps, lambda: weights().T, planned.dot.can_prescale)
    if epilogue is None:
        return None

    def folded_epilogue() -> bytes:
        weight_sums = weights().sum(axis=0, dtype=np.int64)[channel_map]
        return with_folded_zero_point(op, epilogue, weight_sums, planned.dot.lhs_is_signed(op.target))

    kernel = replace(planned, dot=replace(planned.dot, requantization=epilogue.requantization))
    prescale = np.int16(epilogue.requantization.multiplier.weight_prescale)
    constants = (
        lambda: kernel.pack(weights().reshape(taps_shape) * prescale),
        folded_epilogue,
        kernel.params(),
    )
    return KernelLaunch(kernel, constants, kernel.macs // 32)


RULES: Mapping[OperationType, LoweringRule] = {OperationType.DEPTHWISE_CONV_2D: depthwise}
