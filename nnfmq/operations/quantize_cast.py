"""QUANTIZE, DEQUANTIZE and CAST. CAST ignores scale and zero point of quantized values.

CAST from floats rounds toward zero, saturates, and converts NaN to 0. The HAL requires that of TENSOR_QUANT8_ASYMM only
and leaves the other types undefined.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np

from nnfmq.hal.types import OperandType, OperationType
from nnfmq.operations.declaration import (
    B8,
    F16,
    F32,
    I32,
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
    overload,
)
from nnfmq.operations.kernel_adapters import via_lut8
from nnfmq.operations.quantization import dequantized_values, dtype_range
from nnfmq.operations.shapes import same_shape, same_shape_up_to_rank_4


def plan_quantize(input: Tensor, *, output: Tensor) -> Run:
    """Plan clamp(zero point + round half away(value / scale)), divided in float32; NaN becomes the zero point."""
    low, high = dtype_range(output)
    scale = np.float32(output.scale)

    def run(values: Array) -> Array:
        quotients = (values.astype(np.float32, copy=False) / scale).astype(np.float64)
        quantized = np.copysign(np.floor(np.abs(quotients) + 0.5), quotients) + output.zero_point
        return np.clip(np.where(np.isnan(quantized), output.zero_point, quantized), low, high).astype(output.dtype)

    return run


def _real_values(quantized: Array, input: Tensor, output: Tensor) -> Array:
    return dequantized_values(input).astype(output.dtype)


def plan_dequantize_per_channel(input: Tensor, *, output: Tensor) -> Run:
    """Plan value · scale of its channel."""
    quant = input.channel_quant
    assert quant is not None, "validated: a per-channel operand has its scales"
    shape = [1] * len(input.shape)
    shape[quant.channel_dim] = len(quant.scales)
    scales = np.asarray(quant.scales, np.float32).reshape(shape)

    def run(quantized: Array) -> Array:
        return (quantized.astype(np.float32) * scales).astype(output.dtype)

    return run


def plan_cast(input: Tensor, *, output: Tensor) -> Run:
    """Plan a conversion that saturates if the result's integer type does not have all values."""
    if output.dtype.kind == "f" or np.can_cast(input.dtype, output.dtype):
        return lambda values: values.astype(output.dtype)
    return partial(saturated, dtype=output.dtype)


def plan_identity(input: Tensor, *, output: Tensor) -> Run:
    """Plan a copy."""
    return np.copy


def saturated(values: Array, *, dtype: np.dtype[Any]) -> Array:
    """Return numbers rounded toward zero and clamped to the range of an integer `dtype`; NaN becomes 0."""
    info = np.iinfo(dtype)
    wide = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=info.max, neginf=info.min)  # exact for int32 too
    result: Array = np.clip(wide, info.min, info.max).astype(dtype)
    return result


_dequantize = via_lut8(_real_values)


def _casts() -> tuple[Variant, ...]:
    pairs = itertools.product((F16, F32, I32, Q8), repeat=2)
    same_type = (B8, Q8S, S8, OperandType.TENSOR_QUANT16_ASYMM, OperandType.TENSOR_QUANT16_SYMM)
    return (
        *(Variant({"T": source, "O": target}, V1_2, plan_cast) for source, target in pairs),
        *(Variant({"T": type, "O": type}, V1_3, plan_identity) for type in same_type),
    )


DECLARATIONS = (
    Declaration(
        OperationType.QUANTIZE,
        since=V1_2,
        overloads=(overload(data("input"), level=V1_2),),
        variants=(
            Variant({"T": F32, "O": Q8}, V1_2, plan_quantize),
            Variant({"T": F16, "O": Q8}, V1_2, plan_quantize),
            Variant({"T": F32, "O": Q8S}, V1_3, plan_quantize),
            Variant({"T": F16, "O": Q8S}, V1_3, plan_quantize),
        ),
        shape=same_shape,
        outputs=("O",),
        zero_sized=True,
    ),
    Declaration(
        OperationType.DEQUANTIZE,
        since=V1_0,
        overloads=(overload(data("input")),),
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
        shape=same_shape_up_to_rank_4,
        outputs=("O",),
        zero_sized=True,
    ),
    Declaration(
        OperationType.CAST,
        since=V1_2,
        overloads=(overload(data("input"), level=V1_2),),
        variants=_casts(),
        shape=same_shape,
        outputs=("O",),
    ),
)
