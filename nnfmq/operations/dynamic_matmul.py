"""Products of weights of 8 bits with floats that are quantized at run time, as ONNX and TFLite define them.

ONNX's quantizer makes DynamicQuantizeLinear, MatMulInteger or ConvInteger, a conversion to float32, a factor and an
offset of a product. The sums are exact integers. The factor is input scale · weight scale in float32, of all channels
or of each. The bias is added in float32; or, as for convolutions, first divided by the factor and rounded down, and
added to the sums.

The weights of TFLite's operators with a float input ("hybrid") have no zero point. Each row, or each image of a
convolution, has a scale of its own, and a zero point if the file says so. The rest is the same.

The sums themselves, of an input that is given as bytes, are what MatMulInteger and ConvInteger return.

    C1 a sum has at most 16,512 products, so that 32 bits have all sums
    C2 TFLite's weights have the zero point 0
    C3 sums have no activation
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct

from nnfmq.hal.extensions import MAX_DYNAMIC_PRODUCTS, Scheme
from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Array, Plan, Run, Tensor
from nnfmq.operations.fixed_point import ints
from nnfmq.operations.packed_matmul import PackedMatmul, bound_accumulator, pack_exact_matrix
from nnfmq.operations.quantization import float_activation_range, linear_steps
from nnfmq.operations.shapes import require

__all__ = [
    "DynamicMatmul",
    "DynamicWeights",
    "Quantize",
    "dynamic",
    "exact",
    "exact_matmul",
    "hybrid",
    "packed_weights",
    "product_of_rows",
    "require_symmetric",
    "weight_scales",
]

Quantize: TypeAlias = Callable[[Array], tuple[Array, Any]]
"""Returns the steps of floats less their zero points, and their scale or scales, which broadcast with the results."""

_MAX_BIAS = np.float32(1 << 30)
_HIGHEST = 255


class DynamicMatmul(Struct, frozen=True):
    """A product whose sums `matmul` computes from the input's steps, and what makes floats of the sums."""

    matmul: PackedMatmul
    scales: Array
    bias: Array
    limits: tuple[float, float]
    rounds_bias: bool
    quantize: Quantize

    @classmethod
    def of(
        cls,
        filter: Tensor,
        bias: Tensor,
        activation: int,
        row: int,
        rounds_bias: bool = False,
        quantize: Quantize = linear_steps,
        is_depthwise: bool = False,
    ) -> DynamicMatmul:
        """Pack a filter, whose first dimension is the output channels, and the last one if it `is_depthwise`.

        `row` is the count of positions of a row.
        """
        rows = (
            filter.array.reshape(-1, filter.shape[-1]).T if is_depthwise else filter.array.reshape(filter.shape[0], -1)
        )
        weights = rows.T.astype(np.int64) - filter.zero_point
        require(len(weights) <= MAX_DYNAMIC_PRODUCTS, "C1", f"sums of {len(weights)} products")
        _, exact = bound_accumulator(weights, _HIGHEST)
        matrix = np.ascontiguousarray(weights, dtype=exact)
        matmul = PackedMatmul(matrix, _store, np.dtype(exact), row)
        limits = float_activation_range(activation)
        return cls(matmul, weight_scales(filter), bias.array.copy(), limits, rounds_bias, quantize)

    def run(self, product: Run, input: Array) -> Array:
        """Return the floats that `product` makes of the steps of `input`, channels last."""
        steps, scale = self.quantize(input)
        sums = product(steps)
        with np.errstate(all="ignore"):  # of infinities
            factors: Array = scale * self.scales
            if self.rounds_bias:
                found = (sums.astype(np.float64) + _rounded_bias(self.bias, factors)).astype(np.float32) * factors
            else:
                found = sums.astype(np.float32) * factors + self.bias
        low, high = map(np.float32, self.limits)
        limited: Array = np.minimum(np.maximum(found, low), high)
        return limited


class DynamicWeights(Struct, frozen=True):
    """Matrices of weights side by side, (elements, channels) without zero points, and a scale for each channel."""

    matrix: Array
    scales: Array

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> DynamicWeights:
        """Pack weights (channels, elements)."""
        weights = np.concatenate([tensor.array.astype(np.int64) - tensor.zero_point for tensor in tensors]).T
        require(len(weights) <= MAX_DYNAMIC_PRODUCTS, "C1", f"sums of {len(weights)} products")
        _, exact = bound_accumulator(weights, _HIGHEST)
        scales = [np.broadcast_to(weight_scales(tensor), tensor.shape[0]) for tensor in tensors]
        return cls(np.ascontiguousarray(weights, dtype=exact), np.concatenate(scales))

    def product(self, rows: Array, quantize: Quantize) -> Array:
        """Return the products of rows that `quantize` makes bytes of."""
        steps, scale = quantize(rows)
        sums = steps.astype(self.matrix.dtype) @ self.matrix
        with np.errstate(all="ignore"):  # of infinities
            products: Array = sums.astype(np.float32) * (scale * self.scales)
        return products


def packed_weights(tensors: Sequence[Tensor]) -> Array | DynamicWeights:
    """Return a copy of weights (channels, elements) side by side: floats (elements, channels), or bytes."""
    if tensors[0].dtype.kind == "f":
        return np.ascontiguousarray(np.concatenate([tensor.array for tensor in tensors]).T)
    return DynamicWeights.of(tensors)


def product_of_rows(rows: Array, weights: Array | DynamicWeights, quantize: Quantize | None) -> Array:
    """Return rows times weights; unless `quantize` is None, as the bytes that it makes of them represent the rows."""
    if isinstance(weights, DynamicWeights):
        assert quantize is not None, "only operations that quantize rows have such weights"
        return weights.product(rows, quantize)
    if quantize is not None:
        steps, scale = quantize(rows)
        rows = steps * scale
    products: Array = rows @ weights
    return products


def _store(sums: Array, out: Array) -> None:
    np.copyto(out, sums)


def _rounded_bias(bias: Array, factors: Array) -> Array:
    """Return the bias in units of the sums, rounded down, limited to ±2³⁰; NaN becomes the lowest number."""
    found = np.floor(bias / factors)
    limited: Array = np.minimum(np.where(found > -_MAX_BIAS, found, -_MAX_BIAS), _MAX_BIAS)
    return limited


def weight_scales(filter: Tensor) -> Array:
    """Return the scale of each output channel, or one scale."""
    if filter.channel_quant is None:
        return np.array([filter.scale], np.float32)
    return np.array(filter.channel_quant.scales, np.float32)


def require_symmetric(filter: Tensor) -> None:
    """Require that weights have no zero point (C2)."""
    require(filter.zero_point == 0, "C2", f"the weights have the zero point {filter.zero_point}")


def dynamic(plan: Plan, **changes: Any) -> op.Extended:
    """Declare an operation of float32 with weights of 8 bits and a bias of float32."""
    variants = tuple(
        op.Variant({"T": op.F32, "F": weights, "B": op.F32}, op.V1_2, plan) for weights in (op.Q8, op.Q8S, op.PC)
    )
    return op.Extended(Scheme.DYNAMIC, variants, changes=changes)


def exact_matmul(input: Tensor, filter: Tensor, bias: Tensor, activation: int, row: int) -> PackedMatmul:
    """Pack a filter, whose first dimension is the output channels, for sums of products as INT32, plus a bias."""
    require(activation == 0, "C3", f"activation code {activation}")
    matrix, sums, _ = pack_exact_matrix(filter.array.reshape(filter.shape[0], -1).T, filter.zero_point, input)
    require(len(matrix) <= MAX_DYNAMIC_PRODUCTS, "C1", f"sums of {len(matrix)} products")
    addend = np.tile(ints(bias.array) - input.zero_point * sums, row)

    def store(found: Array, out: Array) -> None:
        np.copyto(out, found.astype(np.int64) + addend, casting="unsafe")

    return PackedMatmul(matrix, store, np.dtype(np.int32), row)


def exact(plan: Plan, **changes: Any) -> op.Extended:
    """Declare sums of products of bytes as INT32."""
    variants = tuple(op.Variant({"T": op.Q8, "F": weights, "B": op.I32}, op.V1_2, plan) for weights in (op.Q8, op.Q8S))
    return op.Extended(Scheme.EXACT, variants, changes={"outputs": ("B",), **changes})


def hybrid(plan: Plan, **changes: Any) -> op.Extended:
    """Declare an operation of float32 with weights of INT8, whose zero point is 0, and a bias of float32."""
    variants = tuple(op.Variant({"T": op.F32, "F": weights, "B": op.F32}, op.V1_2, plan) for weights in (op.Q8S, op.PC))
    return op.Extended(Scheme.HYBRID, variants, changes=changes)
