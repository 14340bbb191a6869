"""FULLY_CONNECTED: a matrix product with bias and fused activation.

C1 weights are a matrix, not empty   C2 the count of input elements is a multiple of the input size
C3 bias has one value per unit
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from nnfmq.hal.types import OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations.convolution import require_channel_dim, sixteen_bit_variants
from nnfmq.operations.declaration import Array, Run, Shape, Tensor
from nnfmq.operations.dynamic_matmul import (
    DynamicMatmul,
    dynamic,
    exact,
    exact_matmul,
    hybrid,
    require_symmetric,
)
from nnfmq.operations.fixed_point import ints, rounded
from nnfmq.operations.kernel_adapters import fp16_via_fp32
from nnfmq.operations.packed_matmul import PackedMatmul, PackMatmul, float_matmul, pack_exact_matrix, quantized_matmul
from nnfmq.operations.quantization import (
    Epilogue,
    output_scale_level,
    quantized_activation_range,
    real_scales,
    row_steps,
)
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


def plan_product(
    pack: PackMatmul, input: Tensor, weights: Tensor, bias: Tensor, *, output: Tensor, activation: int
) -> Run:
    """Plan the product of the input as rows with the weights, in the arithmetic of `pack`."""
    matmul, length = pack(input, weights, bias, output, activation, 1), weights.shape[1]

    def run(input: Array) -> Array:
        rows = input.reshape(-1, length)
        out = np.empty((len(rows), matmul.matrix.shape[1]), matmul.dtype)
        matmul.store(rows, out)
        return out

    return run


def _rounded_once(
    input: Tensor, weights: Tensor, bias: Tensor, output: Tensor, activation: int, row: int
) -> PackedMatmul:
    """Pack weights as TFLite defines the product of 8 and 16 bits: exact sums times float64 numbers, rounded once.

    Halves are rounded away from zero. There is one number, or one for each unit.
    """
    require_channel_dim(weights, 0)
    is_zero = input.dtype.itemsize == 1 or weights.zero_point == 0
    require(is_zero, "C7", f"the weights have the zero point {weights.zero_point}")
    matrix, sums, _ = pack_exact_matrix(weights.array.T, weights.zero_point, input)
    addend = (ints(bias.array) - input.zero_point * sums).astype(np.float64)
    epilogue = _epilogue(addend, np.array(real_scales(input, weights, output)), output, activation)
    return PackedMatmul(matrix, epilogue, output.dtype, row)


def _epilogue(addend: Array, factors: Array, output: Tensor, activation: int) -> Epilogue:
    low, high = quantized_activation_range(activation, output)

    def epilogue(sums: Array, out: Array) -> None:
        scaled = np.add(sums, addend, dtype=np.float64)
        np.multiply(scaled, factors, out=scaled)
        np.copyto(out, np.clip(rounded(scaled) + output.zero_point, low, high), casting="unsafe")

    return epilogue


def _plan_dynamic(input: Tensor, weights: Tensor, bias: Tensor, *, output: Tensor, activation: int) -> Run:
    """Plan the product of an input that is quantized at run time, with one scale."""
    require_channel_dim(weights, 0)
    return _quantized_product(DynamicMatmul.of(weights, bias, activation, 1))


def _plan_hybrid(
    input: Tensor, weights: Tensor, bias: Tensor, *, output: Tensor, activation: int, asymmetric: bool
) -> Run:
    """Plan the product of rows that are quantized at run time, each with a scale of its own."""
    require_channel_dim(weights, 0)
    require_symmetric(weights)
    quantize = partial(row_steps, asymmetric=bool(asymmetric))
    return _quantized_product(DynamicMatmul.of(weights, bias, activation, 1, quantize=quantize))


def _plan_exact(input: Tensor, weights: Tensor, bias: Tensor, *, output: Tensor, activation: int) -> Run:
    """Plan the product of bytes, as INT32."""
    matmul = exact_matmul(input, weights, bias, activation, 1)

    def run(rows: Array) -> Array:
        out = np.empty(output.shape, np.int32)
        matmul.store(rows.reshape(-1, len(matmul.matrix)), out)
        return out

    return run


def _quantized_product(product: DynamicMatmul) -> Run:
    matrix = product.matmul.matrix

    def sums(steps: Array) -> Array:
        result: Array = steps.astype(matrix.dtype) @ matrix
        return result

    def run(input: Array) -> Array:
        return product.run(sums, input.reshape(-1, len(matrix)))

    return run


def _hybrid_shape(input: Shape, weights: Shape, bias: Shape, *, activation: int, asymmetric: bool) -> Shape:
    return fully_connected_shape(input, weights, bias, activation=activation)


_PARAMETERS = (op.data("input"), op.weight("weights", "F"), op.weight("bias", "B"), op.attribute("activation"))
_OF_WEIGHTS = (op.overload(*_PARAMETERS, level=op.V1_2),)
"""The parameters with weights of another type than the input's."""
_HYBRID = (op.overload(*_PARAMETERS, op.attribute("asymmetric", op.BOOL), level=op.V1_2),)

DECLARATIONS = (
    op.Declaration(
        OperationType.FULLY_CONNECTED,
        since=op.V1_0,
        overloads=(
            op.overload(op.data("input"), op.weight("weights"), op.weight("bias", "B"), op.attribute("activation")),
        ),
        variants=(
            op.Variant({"T": op.F32, "B": op.F32}, op.V1_0, partial(plan_product, float_matmul)),
            *op.types_since(op.V1_0, partial(plan_product, quantized_matmul), op.Q8, op.Q8S, B=op.I32),
            op.Variant({"T": op.F16, "B": op.F16}, op.V1_2, fp16_via_fp32(partial(plan_product, float_matmul))),
        ),
        shape=fully_connected_shape,
        zero_sized=True,
        level=output_scale_level,
        extended=(
            op.tflite(
                *(
                    op.Variant({"T": kind, "F": weights, "B": op.I32}, op.V1_2, partial(plan_product, _rounded_once))
                    for kind, weights in ((op.Q8, op.Q8), (op.Q8S, op.Q8S), (op.Q8S, op.PC))
                ),
                overloads=_OF_WEIGHTS,
            ),
            op.sixteen_bits(*sixteen_bit_variants(partial(plan_product, _rounded_once)), overloads=_OF_WEIGHTS),
            dynamic(_plan_dynamic, overloads=_OF_WEIGHTS),
            exact(_plan_exact, overloads=_OF_WEIGHTS),
            hybrid(_plan_hybrid, overloads=_HYBRID, shape=_hybrid_shape),
        ),
    ),
)
