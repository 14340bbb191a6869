"""BLOCKWISE_MATMUL: rows of floats times weights of 2, 4 or 8 bits with a scale for each block.

A weight is (q - zero point) · scale, and a block has those of adjacent elements of a row. The bytes of a block have its
numbers in order, the lowest bits first. The last block of a unit is filled up, with any bits.

`rounds_input` is ONNX Runtime's accuracy level 4: each block of the input, too, has a scale, its largest magnitude
divided by 127. Multiplied by 127 / the largest magnitude, a float32 that is limited to finite numbers, it becomes
integers, halves rounded to the even one. The sum of a block's products is exact, then multiplied by both scales. An
infinity in a block makes results infinite, NaN makes them NaN.

    C1 numbers have 2, 4 or 8 bits
    C2 weights are (units, blocks, bytes of a block), not empty; a block has 16, 32, ... elements
    C3 the input's rows have as many blocks as the weights; the last one may be shorter
    C4 scales and zero points are (units, blocks)     C5 the bias is (units,)
    C6 an input is rounded in blocks of at most 256 elements, with integral zero points
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from nnfmq.hal.extensions import TfliteOperation
from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Array, Run, Shape, Tensor
from nnfmq.operations.shapes import require
from nnfmq.operations.tflite_extension import declare

__all__ = [
    "BLOCK_BITS",
    "DECLARATIONS",
    "MAX_ROUNDED_BLOCK",
    "MIN_BLOCK",
    "blockwise_shape",
    "input_steps",
    "unpack_bits",
]

BLOCK_BITS = (2, 4, 8)
MIN_BLOCK, MAX_ROUNDED_BLOCK = 16, 256  # sums of 256 products of 8 bits are integers that float32 has
_HIGHEST = np.float32(127)
_UNITS = 64  # whose weights are floats at the same time


def blockwise_shape(
    input: Shape,
    weights: Shape,
    scales: Shape,
    zero_points: Shape | None,
    bias: Shape | None,
    *,
    bits: int,
    rounds_input: bool,
) -> Shape:
    """Return the input's shape with the units in place of its last dimension."""
    require(bits in BLOCK_BITS, "C1", f"numbers of {bits} bits, allowed are {BLOCK_BITS}")
    filled = len(weights) == 3 and 0 not in weights
    require(filled, "C2", f"weights have shape {weights}, required is (units, blocks, bytes)")
    units, blocks, size = weights
    block = size * 8 // bits
    require(block >= MIN_BLOCK and block & (block - 1) == 0, "C2", f"blocks of {block} elements")
    fits = len(input) > 0 and -(-input[-1] // block) == blocks
    require(fits, "C3", f"an input of shape {input} for {blocks} blocks of {block}")
    for name, shape in (("scales", scales), ("zero points", zero_points)):
        require(shape in (None, (units, blocks)), "C4", f"{name} have shape {shape}, required is ({units}, {blocks})")
    require(bias in (None, (units,)), "C5", f"bias has shape {bias}, required is ({units},)")
    require(not rounds_input or block <= MAX_ROUNDED_BLOCK, "C6", f"an input rounded in blocks of {block}")
    return (*input[:-1], units)


def unpack_bits(packed: Array, bits: int) -> Array:
    """Return the numbers along the last axis of bytes, of which the lowest bits come first."""
    parts = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(*packed.shape[:-1], -1)


def input_steps(rows: Array) -> tuple[Array, Array]:
    """Return blocks (..., elements) as integral floats from -127 to 127, and their scales (..., 1).

    An infinity is the step of its sign, of an infinite scale; with NaN the scale is NaN.
    """
    with np.errstate(all="ignore"):
        largest = np.abs(rows).max(axis=-1, keepdims=True)
        scales, factors = largest / _HIGHEST, np.minimum(_HIGHEST / largest, np.finfo(np.float32).max)
        scaled = np.where(np.isinf(rows), np.copysign(_HIGHEST, rows), rows * factors)
        steps: Array = np.clip(np.rint(np.where(scales > 0, scaled, 0)), -_HIGHEST, _HIGHEST)
    return steps, scales


class _Weights(Struct, frozen=True):
    """Weights as they are stored; `zero_points` (units, blocks) are floats."""

    packed: Array
    scales: Array
    zero_points: Array
    bits: int

    def steps(self, units: slice) -> Array:
        """Return the weights of some units (units, blocks, elements) without zero points, before they are scaled."""
        found: Array = unpack_bits(self.packed[units], self.bits).astype(np.float32) - self.zero_points[units, :, None]
        return found


def _plan(
    input: Tensor,
    weights: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    bias: Tensor | None,
    *,
    output: Tensor,
    bits: int,
    rounds_input: bool,
) -> Run:
    """Plan the product; the weights stay packed, and become floats for some units at a time."""
    is_integral = zero_points is None or zero_points.dtype.kind == "u"
    require(is_integral or not rounds_input, "C6", "an input is rounded, but zero points are floats")
    zeros = np.full(scales.shape, 1 << (bits - 1), np.float32) if zero_points is None else zero_points.array
    packed = _Weights(weights.array.copy(), scales.array.copy(), zeros.astype(np.float32), bits)
    product, biases = (_rounded_product if rounds_input else _product), 0.0 if bias is None else bias.array.copy()
    units, blocks, size = weights.shape
    filled = (-1, blocks * (size * 8 // bits))

    def run(array: Array) -> Array:
        length = array.shape[-1]
        rows = np.zeros((array.size // max(length, 1), filled[1]), np.float32)
        rows[:, :length] = array.reshape(-1, length)
        parts = [product(rows, packed, slice(first, first + _UNITS)) for first in range(0, units, _UNITS)]
        with np.errstate(all="ignore"):
            found: Array = np.concatenate(parts, axis=1) + biases
        return found.reshape(output.shape).astype(np.float32, copy=False)

    return run


def _product(rows: Array, weights: _Weights, units: slice) -> Array:
    """Return the products of rows with the weights of some units, which are rounded to float32."""
    with np.errstate(all="ignore"):
        matrix = weights.steps(units) * weights.scales[units, :, None]
        product: Array = rows @ matrix.reshape(len(matrix), -1).T
    return product


def _rounded_product(rows: Array, weights: _Weights, units: slice) -> Array:
    """Return the products of rows whose blocks are rounded: sums of integers, multiplied by both scales, then added."""
    matrix = weights.steps(units).transpose(1, 2, 0)  # (blocks, elements, units)
    steps, scales = input_steps(rows.reshape(len(rows), *matrix.shape[:2]))
    with np.errstate(all="ignore"):
        sums = steps.transpose(1, 0, 2) @ matrix  # (blocks, rows, units)
        factors = scales.transpose(1, 0, 2) * weights.scales[units].T[:, None]
        product: Array = (sums * factors).sum(axis=0, dtype=np.float32)
    return product


def _variants(*zero_points: Any) -> tuple[op.Variant, ...]:
    return tuple(op.Variant({"T": op.F32, "W": op.Q8, "Z": kind}, op.V1_2, _plan) for kind in zero_points)


DECLARATIONS = (
    declare(
        TfliteOperation.BLOCKWISE_MATMUL,
        op.data("input"),
        op.weight("weights", "W"),
        op.weight("scales"),
        op.weight("zero_points", "Z", optional=True),
        op.weight("bias", optional=True),
        op.attribute("bits"),
        op.attribute("rounds_input", op.BOOL),
        variants=_variants(op.Q8, op.F32),
        shape=blockwise_shape,
        zero_sized=True,
    ),
)
