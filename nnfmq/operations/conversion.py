"""QUANTIZE and DEQUANTIZE: between real values and 8-bit codes."""

from __future__ import annotations

import numpy as np

from nnfmq.hal.types import OperationType
from nnfmq.operations.policies import table
from nnfmq.operations.quantization import type_range
from nnfmq.operations.shapes import same, same_up_to_4
from nnfmq.operations.signature import (
    F16,
    F32,
    PC,
    Q8,
    Q8S,
    S8,
    V1_0,
    V1_2,
    V1_3,
    Array,
    Declaration,
    Run,
    Tensor,
    Variant,
    data,
    form,
)


def plan_quantize(input: Tensor, *, output: Tensor) -> Run:
    """Plan clamp(zero point + round half away(value / scale)), divided in float32; NaN becomes the zero point."""
    low, high = type_range(output)
    scale = np.float32(output.scale)

    def run(values: Array) -> Array:
        quotients = (values.astype(np.float32, copy=False) / scale).astype(np.float64)
        codes = np.copysign(np.floor(np.abs(quotients) + 0.5), quotients) + output.zero_point
        return np.clip(np.where(np.isnan(codes), output.zero_point, codes), low, high).astype(output.dtype)

    return run


def _real_values(codes: Array, input: Tensor, output: Tensor) -> Array:
    centred = codes.astype(np.int32) - input.zero_point
    return (centred.astype(np.float32) * np.float32(input.scale)).astype(output.dtype)


def plan_dequantize_per_channel(input: Tensor, *, output: Tensor) -> Run:
    """Plan code · scale of its channel."""
    quant = input.channel_quant
    assert quant is not None, "validated: a per-channel operand has its scales"
    shape = [1] * len(input.shape)
    shape[quant.channel_dim] = len(quant.scales)
    scales = np.asarray(quant.scales, np.float32).reshape(shape)

    def run(codes: Array) -> Array:
        return (codes.astype(np.float32) * scales).astype(output.dtype)

    return run


_dequantize = table(_real_values)

DECLARATIONS = (
    Declaration(
        OperationType.QUANTIZE,
        since=V1_2,
        forms=(form(data("input"), level=V1_2),),
        variants=(
            Variant({"T": F32, "O": Q8}, V1_2, plan_quantize),
            Variant({"T": F16, "O": Q8}, V1_2, plan_quantize),
            Variant({"T": F32, "O": Q8S}, V1_3, plan_quantize),
            Variant({"T": F16, "O": Q8S}, V1_3, plan_quantize),
        ),
        shape=same,
        outputs=("O",),
        zero_sized=True,
    ),
    Declaration(
        OperationType.DEQUANTIZE,
        since=V1_0,
        forms=(form(data("input")),),
        variants=(
            Variant({"T": Q8, "O": F32}, V1_0, _dequantize),
            Variant({"T": Q8, "O": F16}, V1_2, _dequantize),
            Variant({"T": S8, "O": F32}, V1_2, _dequantize),
            Variant({"T": S8, "O": F16}, V1_2, _dequantize),
            Variant({"T": PC, "O": F32}, V1_2, plan_dequantize_per_channel),
            Variant({"T": PC, "O": F16}, V1_2, plan_dequantize_per_channel),
            Variant({"T": Q8S, "O": F32}, V1_3, _dequantize),
            Variant({"T": Q8S, "O": F16}, V1_3, _dequantize),
        ),
        shape=same_up_to_4,
        outputs=("O",),
        zero_sized=True,
    ),
)
