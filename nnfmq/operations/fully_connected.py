"""FULLY_CONNECTED: a matrix product with bias and fused activation.

C1 weights are a matrix, not empty   C2 the count of input elements is a multiple of the input size
C3 bias has one value per unit
"""

from __future__ import annotations

import math

import numpy as np

from nnfmq.hal.types import OperationType
from nnfmq.operations.declaration import (
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
    Run,
    Shape,
    Tensor,
    Variant,
    attribute,
    data,
    overload,
    weight,
)
from nnfmq.operations.kernel_adapters import fp16_via_fp32
from nnfmq.operations.packed_matmul import PackedMatmul, float_matmul, quantized_matmul
from nnfmq.operations.quantization import output_scale_level
from nnfmq.operations.shapes import require


def fully_connected_shape(input: Shape, weights: Shape, bias: Shape, *, activation: int) -> Shape:
    """Return (batch, units); the input is flattened to rows as long as those of `weights`."""
    filled = len(weights) == 2 and 0 not in weights
    require(filled, "C1", f"weights have shape {weights}, required is (units, input size)")
    units, length = weights
    count = math.prod(input)
    require(len(input) >= 2 and count % length == 0, "C2", f"input {input} does not divide into rows of {length}")
    require(bias == (units,), "C3", f"bias has shape {bias}, required is ({units},)")
    return count // length, units


def plan_float(input: Tensor, weights: Tensor, bias: Tensor, *, output: Tensor, activation: int) -> Run:
    """Plan the product in float32."""
    return product_of_rows(float_matmul(weights.array.T, bias.array, output, activation), weights.shape[1])


def plan_quantized(input: Tensor, weights: Tensor, bias: Tensor, *, output: Tensor, activation: int) -> Run:
    """Plan the exact integer product and its requantization."""
    matmul = quantized_matmul(input, weights, bias, output, activation)
    return product_of_rows(matmul, weights.shape[1])


def product_of_rows(matmul: PackedMatmul, length: int) -> Run:
    """Return the product of the input as rows of `length` elements."""

    def run(input: Array) -> Array:
        rows = input.reshape(-1, length)
        out = np.empty((len(rows), matmul.matrix.shape[1]), matmul.dtype)
        matmul.store(rows, out)
        return out

    return run


DECLARATIONS = (
    Declaration(
        OperationType.FULLY_CONNECTED,
        since=V1_0,
        overloads=(overload(data("input"), weight("weights"), weight("bias", "B"), attribute("activation")),),
        variants=(
            Variant({"T": F32, "B": F32}, V1_0, plan_float),
            Variant({"T": Q8, "B": I32}, V1_0, plan_quantized),
            Variant({"T": Q8S, "B": I32}, V1_3, plan_quantized),
            Variant({"T": F16, "B": F16}, V1_2, fp16_via_fp32(plan_float)),
        ),
        shape=fully_connected_shape,
        zero_sized=True,
        level=output_scale_level,
    ),
)
