"""MEAN, REDUCE_ALL, REDUCE_ANY, REDUCE_MAX, REDUCE_MIN, REDUCE_PROD, REDUCE_SUM, ARGMAX and ARGMIN.

A shape without remaining dimensions becomes (1,). ARGMAX and ARGMIN return the first of equal elements, or the first
NaN, which the HAL leaves undefined. Quantized values keep scale and zero point.

    C1 axes are a vector
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from nnfmq.hal.types import OperandType, OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations import fixed_point
from nnfmq.operations.declaration import Array, Plan, Run, Shape, Tensor
from nnfmq.operations.fixed_point import ints, multiply_wide, saturated, to_int16
from nnfmq.operations.kernel_adapters import float_variants
from nnfmq.operations.quantization import clamped, multiplied
from nnfmq.operations.shapes import normalize_axis, require, require_rank

Axes: TypeAlias = tuple[int, ...]
Kernel: TypeAlias = Callable[[Array, Axes], Any]  # reduces over the axes; the plan reshapes the result


def reduced_axes(axes: Array, rank: int) -> Axes:
    """Return the axes as sorted non-negative indexes without duplicates."""
    require(axes.ndim == 1, "C1", f"axes have shape {axes.shape}, a vector is required")
    return tuple(sorted({normalize_axis(int(axis), rank) for axis in axes}))


def reduction_shape(input: Shape, *, axes: Array, keep_dimensions: int) -> Shape:
    """Return the input's shape without the axes, or with 1 in their place if dimensions are kept; at least (1,)."""
    require_rank(input, range(1, 5), "input")
    return reduced(input, axes=axes, keep_dimensions=keep_dimensions)


def reduced(input: Shape, *, axes: Array, keep_dimensions: int) -> Shape:
    """Return the same as `reduction_shape` for any rank of the input."""
    gone = reduced_axes(axes, len(input))
    if keep_dimensions > 0:
        return tuple(1 if axis in gone else dimension for axis, dimension in enumerate(input))
    return tuple(dimension for axis, dimension in enumerate(input) if axis not in gone) or (1,)


def index_shape(input: Shape, *, axis: int) -> Shape:
    """Return the input's shape without the axis; (1,) if no dimension remains."""
    axis = normalize_axis(axis, len(input))
    return input[:axis] + input[axis + 1 :] or (1,)


def mean(input: Array, axes: Axes) -> Any:
    """Return the mean of floats, whose sum has no rounding errors of float32, which would add up."""
    return np.mean(input, axis=axes, dtype=np.float64).astype(input.dtype)


def quantized_mean(input: Array, axes: Axes) -> Any:
    """Return the sum of quantized values divided by their count, rounded down.

    For uint8 that truncates, as TFLite does; int8 results are equal to uint8 results - 128.
    """
    count = math.prod(input.shape[axis] for axis in axes)
    return (np.sum(input, axis=axes, dtype=np.int64) // count).astype(input.dtype)


def reduce_all(input: Array, axes: Axes) -> Any:
    """Return 1 if no byte is 0, else 0."""
    return np.all(input, axis=axes).astype(np.uint8)


def reduce_any(input: Array, axes: Axes) -> Any:
    """Return 1 if any byte is not 0, else 0."""
    return np.any(input, axis=axes).astype(np.uint8)


def reduce_max(input: Array, axes: Axes) -> Any:
    """Return the maximum."""
    return np.maximum.reduce(input, axis=axes)


def reduce_min(input: Array, axes: Axes) -> Any:
    """Return the minimum."""
    return np.minimum.reduce(input, axis=axes)


def reduce_sum(input: Array, axes: Axes) -> Any:
    """Return the sum of floats, rounded once."""
    return np.add.reduce(input, axis=axes, dtype=np.float64).astype(input.dtype)


def reduce_prod(input: Array, axes: Axes) -> Any:
    """Return the product of floats, as if no product of some of them overflowed or vanished; 0 · infinity is NaN."""
    result = np.multiply.reduce(input, axis=axes, dtype=np.float64)
    if np.isnan(result).any():  # float64 overflows, too, if there are many large factors before a 0
        vanishes = np.any(input == 0, axis=axes) & np.all(np.isfinite(input), axis=axes)
        result = np.where(vanishes, 0.0, result)
    return result.astype(input.dtype)


def reduction_plan(kernel: Kernel) -> Plan:
    """Return the plan of a reduction by `kernel`."""

    def plan(input: Tensor, *, output: Tensor, axes: Array, keep_dimensions: int) -> Run:
        reduced, shape = reduced_axes(axes, len(input.shape)), output.shape
        return lambda array: kernel(array, reduced).reshape(shape)

    return plan


def arg_index_plan(function: Callable[..., Any]) -> Plan:
    """Return the plan of ARGMAX or ARGMIN."""

    def plan(input: Tensor, *, output: Tensor, axis: int) -> Run:
        shape = output.shape
        return lambda array: function(array, axis=axis).astype(np.int32).reshape(shape)

    return plan


# ----------------------------------------------------------------------------------------------------------------------
# MEAN, REDUCE_SUM and REDUCE_PROD of 8 and of 16 bits as TFLite defines them, in fixed point; and integers.
#
# MEAN of 16 bits multiplies the sum by a multiplier that includes the division by the count. TFLite's sums and products
# of 8 bits wrap around if they are very large; here they saturate. REDUCE_PROD of 16 bits is that of 8 bits, with zero
# points of 0.
#
#     C3 the multiplier of each factor of a product is below 2^8     Q1 range of the real multiplier


def plan_sixteen_bit_mean(input: Tensor, *, output: Tensor, axes: Array, keep_dimensions: int) -> Run:
    """Plan MEAN of 16 bits."""
    reduced, shape = reduced_axes(axes, len(input.shape)), output.shape
    count = math.prod(input.shape[axis] for axis in reduced)
    real = float(np.float32(input.scale)) / float(np.float32(output.scale))
    multiplier, exponent = fixed_point.quantize_multiplier(real)
    shift = min(count.bit_length() - 1, 32, 31 + exponent)
    divided = (multiplier << shift) // count

    def run(array: Array) -> Array:
        sums = array.sum(axis=reduced, dtype=np.int64)
        return to_int16(fixed_point.multiply(sums, divided, exponent - shift)).reshape(shape)

    return run


_MAX_FACTOR = 1 << 8


def plan_tflite_mean_or_sum(is_mean: bool, input: Tensor, *, output: Tensor, axes: Array, keep_dimensions: int) -> Run:
    """Plan the mean or sum."""
    gone, shape = reduced_axes(axes, len(input.shape)), output.shape
    count = math.prod(input.shape[axis] for axis in gone)
    divisor = max(count, 1) if is_mean else 1
    multiplier, exponent = fixed_point.quantize_multiplier_of_mean(input.scale / output.scale, divisor)

    def run(array: Array) -> Array:
        sums = array.sum(axis=gone, dtype=np.int64) - input.zero_point * count
        return clamped(multiplied(sums, multiplier, exponent), output).reshape(shape)

    return run


def plan_tflite_prod(input: Tensor, *, output: Tensor, axes: Array, keep_dimensions: int) -> Run:
    """Plan the product, of which each factor is multiplied by the root of the whole scale."""
    gone, shape = reduced_axes(axes, len(input.shape)), output.shape
    count = math.prod(input.shape[axis] for axis in gone)
    real = input.scale / output.scale ** (1 / max(count, 1))
    require(real < _MAX_FACTOR, "C3", f"the multiplier is {real}, it must be below {_MAX_FACTOR}")
    scaling = fixed_point.quantize_multiplier(real)

    def run(array: Array) -> Array:
        kept = [axis for axis in range(array.ndim) if axis not in gone]
        factors = ints(array.transpose(*gone, *kept).reshape(count, -1)) - input.zero_point
        product = factors[0]
        for factor in factors[1:]:
            product = saturated(multiply_wide(product * factor, *scaling))
        return clamped(saturated(multiply_wide(product, *scaling)), output).reshape(shape)

    return run


def _integer_mean(input: Array, axes: Axes) -> Any:
    """Return the mean rounded towards zero. The sum of the quotients and that of the rests do not overflow."""
    count = math.prod(input.shape[axis] for axis in axes)
    quotients, rests = np.divmod(input, input.dtype.type(count))
    above, rest = np.divmod(np.sum(rests, axis=axes, dtype=np.int64), count)
    down = np.sum(quotients, axis=axes, dtype=input.dtype) + above.astype(input.dtype)
    return down + ((down < 0) & (rest != 0)).astype(input.dtype)


def _wrapped(reduce: Callable[..., Any]) -> Plan:
    def kernel(input: Array, axes: Axes) -> Any:
        return reduce(input, axis=axes, dtype=input.dtype)

    return reduction_plan(kernel)


def _reduction(
    code: OperationType,
    variants: tuple[op.Variant, ...],
    *extended: op.Extended,
    since: int = op.V1_2,
    keeps: OperandType = op.BOOL,
) -> op.Declaration:
    return op.Declaration(
        code,
        since=since,
        overloads=(
            op.overload(
                op.data("input"), op.attribute("axes", op.I32), op.attribute("keep_dimensions", keeps), level=since
            ),
        ),
        variants=variants,
        shape=reduction_shape,
        same_quantization=True,
        extended=extended,
    )


def _index(code: OperationType, function: Callable[..., Any]) -> op.Declaration:
    plan = arg_index_plan(function)
    return op.Declaration(
        code,
        since=op.V1_2,
        overloads=(op.overload(op.data("input"), op.attribute("axis"), level=op.V1_2),),
        variants=op.types_since(op.V1_2, plan, op.F32, op.F16, op.I32, op.Q8, op.Q8S),
        shape=index_shape,
        outputs=(op.I32,),
        extended=(op.wider(*op.of_types(plan, *op.WIDE)),),
    )


def _wider(*plans: tuple[Plan, tuple[OperandType, ...]]) -> op.Extended:
    variants = (variant for plan, types in plans for variant in op.of_types(plan, *types))
    return op.wider(*variants, shape=reduced)


def _tflite(plan: Plan) -> op.Extended:
    arguments = (op.data("input"), op.attribute("axes", op.I32), op.attribute("keep_dimensions", op.BOOL))
    return op.tflite(
        *op.of_types(plan, op.Q8, op.Q8S),
        overloads=(op.overload(*arguments, level=op.V1_2),),
        shape=reduced,
        same_quantization=False,
    )


def _sixteen_bits(plan: Plan) -> op.Extended:
    return op.sixteen_bits(*op.of_types(plan, op.Q16S), shape=reduced)


def _min_or_max(code: OperationType, kernel: Kernel) -> op.Declaration:
    plan = reduction_plan(kernel)
    return _reduction(
        code,
        op.types_since(op.V1_2, plan, op.F32, op.F16, op.Q8, op.Q8S),
        _wider((plan, (op.I32, *op.WIDE))),
        _sixteen_bits(plan),
    )


DECLARATIONS = (
    _reduction(
        OperationType.MEAN,
        (
            *float_variants(reduction_plan(mean), level=op.V1_1),
            *op.types_since(op.V1_1, reduction_plan(quantized_mean), op.Q8, op.Q8S),
        ),
        _wider((reduction_plan(_integer_mean), (op.I32, *op.WIDE_INTEGERS)), (reduction_plan(mean), (op.F64,))),
        _tflite(partial(plan_tflite_mean_or_sum, True)),
        _sixteen_bits(plan_sixteen_bit_mean),
        since=op.V1_1,
        keeps=op.INT32,
    ),
    _reduction(OperationType.REDUCE_ALL, (op.Variant({"T": op.B8}, op.V1_2, reduction_plan(reduce_all)),)),
    _reduction(OperationType.REDUCE_ANY, (op.Variant({"T": op.B8}, op.V1_2, reduction_plan(reduce_any)),)),
    _min_or_max(OperationType.REDUCE_MAX, reduce_max),
    _min_or_max(OperationType.REDUCE_MIN, reduce_min),
    _reduction(
        OperationType.REDUCE_PROD,
        float_variants(reduction_plan(reduce_prod)),
        _wider((_wrapped(np.multiply.reduce), (op.I32, *op.WIDE))),
        _tflite(plan_tflite_prod),
        _sixteen_bits(plan_tflite_prod),
    ),
    _reduction(
        OperationType.REDUCE_SUM,
        float_variants(reduction_plan(reduce_sum)),
        _wider((_wrapped(np.add.reduce), (op.I32, *op.WIDE))),
        _tflite(partial(plan_tflite_mean_or_sum, False)),
    ),
    _index(OperationType.ARGMAX, np.argmax),
    _index(OperationType.ARGMIN, np.argmin),
)
