"""ADD, SUB, MUL, DIV and POW: broadcast arithmetic, except POW with a fused activation.

Quantized ADD and SUB rescale both inputs to a common scale with 20 extra bits (a 256-entry table each), add, and
requantize the sum; SUB negates the second multiplier. MUL requantizes the product of the inputs minus zero point. INT32
wraps around and has no activation; its DIV rounds down, and division by 0 gives 0. There is no quantized DIV.

    C1 INT32 has activation NONE
"""

from __future__ import annotations

from functools import partial
from typing import TypeAlias

import numpy as np

from nnfmq.hal.types import OperationType
from nnfmq.operations import fixed_point
from nnfmq.operations.declaration import (
    F16,
    F32,
    I32,
    Q8,
    Q8S,
    V1_0,
    V1_1,
    V1_2,
    V1_3,
    Array,
    Declaration,
    Plan,
    Run,
    Tensor,
    Variant,
    attribute,
    data,
    overload,
)
from nnfmq.operations.fixed_point import Ints, ints
from nnfmq.operations.kernel_adapters import fp16_via_fp32, stateless
from nnfmq.operations.quantization import (
    OutputMultipliers,
    all_quantized_values,
    float_activation_range,
    quantized_activation_range,
    requantizer,
)
from nnfmq.operations.shapes import broadcast_shapes, broadcast_shapes_up_to_rank_4, require

Multiplier: TypeAlias = tuple[int, int]  # output multiplier and shift


def plan_float(ufunc: np.ufunc, first: Tensor, second: Tensor, *, output: Tensor, activation: int) -> Run:
    """Plan a float ufunc and its activation."""
    low, high = float_activation_range(activation)

    def run(a: Array, b: Array) -> Array:
        result: Array = ufunc(a, b)
        return result if activation == 0 else np.clip(result, np.float32(low), np.float32(high))

    return run


def plan_int32(ufunc: np.ufunc, first: Tensor, second: Tensor, *, output: Tensor, activation: int) -> Run:
    """Plan wrapping INT32 arithmetic."""
    require(activation == 0, "C1", f"activation {activation} with INT32, only 0 (NONE) is allowed")
    return ufunc


def plan_quantized_sum(sign: int, first: Tensor, second: Tensor, *, output: Tensor, activation: int) -> Run:
    """Plan first + sign · second of quantized values."""
    low, high = quantized_activation_range(activation, output)
    (one, other), (multiplier, shift) = sum_multipliers(first, second, output)
    addends, others = rescaled_values(first, one, 1), rescaled_values(second, other, sign)

    def run(a: Array, b: Array) -> Array:
        sums = np.add(addends.take(a.view(np.uint8)), others.take(b.view(np.uint8)))
        variants = fixed_point.multiply(sums, multiplier, shift)
        variants += output.zero_point
        return np.clip(variants, low, high, out=variants).astype(output.dtype)

    return run


def sum_multipliers(first: Tensor, second: Tensor, output: Tensor) -> tuple[tuple[Multiplier, Multiplier], Multiplier]:
    """Return the multipliers of both operands, to a common scale / 2^20, and that of their sum."""
    common = 2.0 * max(first.scale, second.scale)
    one, other = (fixed_point.quantize_multiplier_below_one(tensor.scale / common) for tensor in (first, second))
    return (one, other), fixed_point.quantize_multiplier_below_one(common / ((1 << 20) * output.scale))


def rescaled_values(tensor: Tensor, multiplier: Multiplier, sign: int) -> Ints:
    """Return all 256 values in the scale of the sum, ordered by the bits of the quantized values."""
    output_multiplier, shift = multiplier
    values = (ints(all_quantized_values(tensor)) - tensor.zero_point) << 20
    return fixed_point.multiply(values, sign * output_multiplier, shift)


def plan_quantized_mul(first: Tensor, second: Tensor, *, output: Tensor, activation: int) -> Run:
    """Plan MUL of quantized values."""
    real = float(np.float32(first.scale) * np.float32(second.scale)) / output.scale
    fixed_point.quantize_multiplier_below_one(real)
    epilogue = requantizer(OutputMultipliers.of([real]), ints([0]), 1 << 16, output, activation)

    def run(a: Array, b: Array) -> Array:
        products = np.subtract(a, first.zero_point, dtype=np.int32) * np.subtract(b, second.zero_point, dtype=np.int32)
        out = np.empty(products.shape, output.dtype)
        epilogue(products, out)
        return out

    return run


def _arithmetic(
    code: OperationType, since: int, ufunc: np.ufunc, in_int32: np.ufunc, variants: tuple[Variant, ...] = ()
) -> Declaration:
    return Declaration(
        code,
        since=since,
        overloads=(overload(data("first"), data("second"), attribute("activation"), level=since),),
        variants=(
            Variant({"T": F32}, since, partial(plan_float, ufunc)),
            Variant({"T": F16}, V1_2, fp16_via_fp32(partial(plan_float, ufunc))),
            Variant({"T": I32}, V1_3, partial(plan_int32, in_int32)),
            *variants,
        ),
        shape=broadcast_shapes_up_to_rank_4,
        zero_sized=True,
    )


def _quantized_variants(since: int, plan: Plan) -> tuple[Variant, ...]:
    return Variant({"T": Q8}, since, plan), Variant({"T": Q8S}, V1_3, plan)


DECLARATIONS = (
    _arithmetic(OperationType.ADD, V1_0, np.add, np.add, _quantized_variants(V1_0, partial(plan_quantized_sum, 1))),
    _arithmetic(
        OperationType.SUB, V1_1, np.subtract, np.subtract, _quantized_variants(V1_2, partial(plan_quantized_sum, -1))
    ),
    _arithmetic(OperationType.MUL, V1_0, np.multiply, np.multiply, _quantized_variants(V1_0, plan_quantized_mul)),
    _arithmetic(OperationType.DIV, V1_1, np.divide, np.floor_divide),
    Declaration(
        OperationType.POW,
        since=V1_2,
        overloads=(overload(data("base"), data("exponent"), level=V1_2),),
        variants=(
            Variant({"T": F32}, V1_2, stateless(np.power)),
            Variant({"T": F16}, V1_2, fp16_via_fp32(stateless(np.power))),
        ),
        shape=broadcast_shapes,
    ),
)
