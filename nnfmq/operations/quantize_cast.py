"""QUANTIZE, DEQUANTIZE and CAST. CAST ignores scale and zero point of quantized values.

CAST from floats rounds toward zero, saturates, and converts NaN to 0. The HAL requires that of TENSOR_QUANT8_ASYMM only
and leaves the other types undefined.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np

from nnfmq.hal.extensions import Scheme
from nnfmq.hal.types import OperandType, OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Array, Plan, Run, Tensor
from nnfmq.operations.fixed_point import rounded
from nnfmq.operations.kernel_adapters import dequantize_array, via_lut8
from nnfmq.operations.quantization import dequantized_values, dtype_range
from nnfmq.operations.shapes import same_shape, same_shape_up_to_rank_4


def plan_quantize(input: Tensor, *, output: Tensor) -> Run:
    """Plan clamp(zero point + round half away(value / scale)), divided in float32; NaN becomes the zero point."""
    low, high = dtype_range(output)
    scale = np.float32(output.scale)

    def run(values: Array) -> Array:
        quotients = (values.astype(np.float32, copy=False) / scale).astype(np.float64)
        quantized = rounded(quotients) + output.zero_point
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


def _casts() -> tuple[op.Variant, ...]:
    pairs = itertools.product((op.F16, op.F32, op.I32, op.Q8), repeat=2)
    same_type = (op.B8, op.Q8S, op.S8, OperandType.TENSOR_QUANT16_ASYMM, OperandType.TENSOR_QUANT16_SYMM)
    return (
        *(op.Variant({"T": source, "O": target}, op.V1_2, plan_cast) for source, target in pairs),
        *(op.Variant({"T": type, "O": type}, op.V1_3, plan_identity) for type in same_type),
    )


# ----------------------------------------------------------------------------------------------------------------------
# 16 bits, and CAST of more types.
#
# CAST to TENSOR_BOOL8 is a comparison with 0; to a smaller integer type it keeps the low bits; from floats to integers
# of 32 and 64 bits it rounds toward zero, and numbers beyond the type become what x86 processors return for them.


def plan_sixteen_bit_dequantize(input: Tensor, *, output: Tensor) -> Run:
    """Plan the real values."""
    return lambda x: dequantize_array(x, input).astype(output.dtype)


def plan_sixteen_bit_cast(input: Tensor, *, output: Tensor) -> Run:
    """Plan the stored values in another type: those of INT32 wrap around, those of floats saturate, and NaN is high."""

    def run(x: Array) -> Array:
        if x.dtype.kind == "f" and output.dtype.kind != "f":
            low, high = dtype_range(output)
            x = np.clip(np.where(np.isnan(x), np.float32(high), x), low, high)
        return x.astype(output.dtype)

    return run


def plan_wrapping_cast(input: Tensor, *, output: Tensor) -> Run:
    """Plan a conversion of integers that keeps the low bits."""
    return partial(np.ndarray.astype, dtype=output.dtype)


def plan_truth(input: Tensor, *, output: Tensor) -> Run:
    """Plan a comparison with 0."""
    return lambda values: (values != 0).view(np.uint8)


def plan_truncating_cast(input: Tensor, *, output: Tensor) -> Run:
    """Plan a conversion of floats to integers as x86 processors compute it."""
    if output.dtype == np.uint64:
        return _to_uint64
    if output.dtype == np.int32:
        return _to_int32
    if output.dtype == np.uint32 and input.dtype != np.float16:  # which ONNX Runtime converts by way of int64
        return _to_uint32
    return lambda values: _to_int64(values).astype(output.dtype)


_SIGN = np.int64(-1 << 63)


def _to_int64(values: Array) -> Array:
    """Return floats as int64: its minimum for what it does not have."""
    real = values.astype(np.float64)
    inside = (real >= -(2.0**63)) & (real < 2.0**63)
    return np.where(inside, np.where(inside, real, 0).astype(np.int64), _SIGN)


def _to_int32(values: Array) -> Array:
    """Return floats as int32: its minimum for what it does not have."""
    wide = _to_int64(values)
    low = wide.astype(np.int32)
    return np.where(low == wide, low, np.int32(-1 << 31))


def _to_uint32(values: Array) -> Array:
    """Return floats as uint32: from 2^31 on, it is 2^31 away from an int32."""
    real = values.astype(np.float64)
    is_high = real >= 2.0**31
    bits = _to_int32(np.where(is_high, real - 2.0**31, real))
    result: Array = np.where(is_high, bits ^ np.int32(-1 << 31), bits).view(np.uint32)
    return result


def _to_uint64(values: Array) -> Array:
    """Return floats as uint64: from 2^63 on, it is 2^63 away from an int64."""
    real = values.astype(np.float64)
    is_high = real >= 2.0**63
    bits = _to_int64(np.where(is_high, real - 2.0**63, real))
    result: Array = np.where(is_high, bits ^ _SIGN, bits).view(np.uint64)
    return result


def _from_truth(input: Tensor, *, output: Tensor) -> Run:
    return lambda values: (values != 0).astype(output.dtype)


def _cast_plan(source: OperandType, target: OperandType) -> Plan:
    if source == target:
        return plan_identity
    if target == op.B8:
        return plan_truth
    if source == op.B8:
        return _from_truth
    if source in _FLOATS and target not in _FLOATS and (source == op.F64 or target in (op.I32, *op.WIDE_INTEGERS)):
        return plan_truncating_cast
    return plan_cast if {source, target} & {op.F32, op.F16} else plan_wrapping_cast


_FLOATS = (op.F32, op.F16, op.F64)


def _wider_casts() -> tuple[op.Variant, ...]:
    pairs = itertools.product((op.F32, op.F16, op.I32, op.Q8, op.Q8S, op.B8, *op.WIDE), repeat=2)
    return tuple(
        op.Variant({"T": source, "O": target}, op.V1_2, _cast_plan(source, target)) for source, target in pairs
    )


DECLARATIONS = (
    op.Declaration(
        OperationType.QUANTIZE,
        since=op.V1_2,
        overloads=(op.overload(op.data("input"), level=op.V1_2),),
        variants=(
            *op.types_since(op.V1_2, plan_quantize, op.F32, op.F16, O=op.Q8),
            *op.types_since(op.V1_3, plan_quantize, op.F32, op.F16, O=op.Q8S),
        ),
        shape=same_shape,
        outputs=("O",),
        zero_sized=True,
        extended=(op.sixteen_bits(*op.conversions(plan_quantize, (op.F32, op.Q16S), (op.F16, op.Q16S))),),
    ),
    op.Declaration(
        OperationType.DEQUANTIZE,
        since=op.V1_0,
        overloads=(op.overload(op.data("input")),),
        variants=(
            op.Variant({"T": op.Q8, "O": op.F32}, op.V1_0, _dequantize),
            op.Variant({"T": op.Q8, "O": op.F16}, op.V1_2, _dequantize),
            op.Variant({"T": op.S8, "O": op.F32}, op.V1_2, _dequantize),
            op.Variant({"T": op.S8, "O": op.F16}, op.V1_2, _dequantize),
            op.Variant({"T": op.PC, "O": op.F32}, op.V1_2, plan_dequantize_per_channel),
            op.Variant({"T": op.PC, "O": op.F16}, op.V1_2, plan_dequantize_per_channel),
            op.Variant({"T": op.Q8S, "O": op.F32}, op.V1_3, _dequantize),
            op.Variant({"T": op.Q8S, "O": op.F16}, op.V1_3, _dequantize),
        ),
        shape=same_shape_up_to_rank_4,
        outputs=("O",),
        zero_sized=True,
        extended=(
            op.sixteen_bits(
                *op.conversions(plan_sixteen_bit_dequantize, (op.Q16S, op.F32), (op.Q16S, op.F16)), shape=same_shape
            ),
        ),
    ),
    op.Declaration(
        OperationType.CAST,
        since=op.V1_2,
        overloads=(op.overload(op.data("input"), level=op.V1_2),),
        variants=_casts(),
        shape=same_shape,
        outputs=("O",),
        extended=(
            op.Extended(Scheme.WIDER, _wider_casts(), changes={"zero_sized": True}),
            op.sixteen_bits(
                *op.conversions(plan_sixteen_bit_cast, *((op.Q16S, other) for other in (op.F32, op.F16, op.I32))),
                *op.conversions(plan_sixteen_bit_cast, (op.F32, op.Q16S), (op.I32, op.Q16S)),
                zero_sized=True,
            ),
        ),
    ),
)
