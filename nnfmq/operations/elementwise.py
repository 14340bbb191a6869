"""ADD and MUL: broadcast arithmetic with a fused activation.

ADD of codes brings both inputs to a common scale with 20 extra bits (a table of 256 for each), adds, and scales the
sum; MUL scales the product of the centred codes. INT32 wraps around and has no activation.

    C1 INT32 has activation NONE
"""

from __future__ import annotations

from functools import partial

import numpy as np

from nnfmq.hal.types import OperationType
from nnfmq.operations import fixed_point
from nnfmq.operations.fixed_point import Ints, ints
from nnfmq.operations.policies import half
from nnfmq.operations.quantization import Multipliers, code_range, float_range, requantizer, require_activation
from nnfmq.operations.shapes import broadcast, require
from nnfmq.operations.signature import (
    F16,
    F32,
    I32,
    Q8,
    Q8S,
    V1_0,
    V1_2,
    V1_3,
    Array,
    Declaration,
    Plan,
    Run,
    Tensor,
    Variant,
    control,
    data,
    form,
)


def plan_float(ufunc: np.ufunc, first: Tensor, second: Tensor, *, output: Tensor, activation: int) -> Run:
    """Plan a float ufunc and its activation."""
    low, high = float_range(activation)

    def run(a: Array, b: Array) -> Array:
        result: Array = ufunc(a, b)
        return result if activation == 0 else np.clip(result, np.float32(low), np.float32(high))

    return run


def plan_int32(ufunc: np.ufunc, first: Tensor, second: Tensor, *, output: Tensor, activation: int) -> Run:
    """Plan wrapping INT32 arithmetic."""
    require(activation == 0, "C1", f"activation {activation} with INT32, only NONE is allowed")
    return ufunc


def plan_quantized_add(first: Tensor, second: Tensor, *, output: Tensor, activation: int) -> Run:
    """Plan ADD of codes."""
    require_activation(activation)
    low, high = code_range(activation, output)
    common = 2.0 * max(first.scale, second.scale)
    addends, others = _scaled_codes(first, common), _scaled_codes(second, common)
    multiplier, shift = fixed_point.quantize_multiplier_below_one(common / ((1 << 20) * output.scale))

    def run(a: Array, b: Array) -> Array:
        sums = np.add(addends.take(a.view(np.uint8)), others.take(b.view(np.uint8)))
        codes = fixed_point.multiply(sums, multiplier, shift)
        codes += output.zero_point
        return np.clip(codes, low, high, out=codes).astype(output.dtype)

    return run


def _scaled_codes(tensor: Tensor, common: float) -> Ints:
    """Return each code's value in units of common / 2^20, by the bits of the code."""
    multiplier, shift = fixed_point.quantize_multiplier_below_one(tensor.scale / common)
    codes = ints(np.arange(256, dtype=np.uint8).view(tensor.dtype))
    return fixed_point.multiply((codes - tensor.zero_point) << 20, multiplier, shift)


def plan_quantized_mul(first: Tensor, second: Tensor, *, output: Tensor, activation: int) -> Run:
    """Plan MUL of codes."""
    real = float(np.float32(first.scale) * np.float32(second.scale)) / output.scale
    fixed_point.quantize_multiplier_below_one(real)
    finish = requantizer(Multipliers.of([real]), ints([0]), 1 << 16, output, activation)

    def run(a: Array, b: Array) -> Array:
        products = np.subtract(a, first.zero_point, dtype=np.int32) * np.subtract(b, second.zero_point, dtype=np.int32)
        out = np.empty(products.shape, output.dtype)
        finish(products, out)
        return out

    return run


def _arithmetic(code: OperationType, ufunc: np.ufunc, in_integers: Plan) -> Declaration:
    return Declaration(
        code,
        since=V1_0,
        forms=(form(data("first"), data("second"), control("activation")),),
        variants=(
            Variant({"T": F32}, V1_0, partial(plan_float, ufunc)),
            Variant({"T": Q8}, V1_0, in_integers),
            Variant({"T": F16}, V1_2, half(partial(plan_float, ufunc))),
            Variant({"T": Q8S}, V1_3, in_integers),
            Variant({"T": I32}, V1_3, partial(plan_int32, ufunc)),
        ),
        shape=broadcast,
        zero_sized=True,
    )


DECLARATIONS = (
    _arithmetic(OperationType.ADD, np.add, plan_quantized_add),
    _arithmetic(OperationType.MUL, np.multiply, plan_quantized_mul),
)
