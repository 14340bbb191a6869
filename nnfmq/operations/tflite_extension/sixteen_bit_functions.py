"""Functions of one 16-bit value, SOFTMAX, and conversions of 16-bit tensors.

LOGISTIC and TANH read the input in Q3.12 and interpolate a table of 1 / (1 + e^-x) in steps of 1/24, of 16 bits. The
other functions are a LookupTable. SOFTMAX tabulates e^x from -10 to 0 and 1 / (1 + x) from 0 to 1; its results
represent 0 to 1 as 0 to 32767.

    C1 the functions of a LookupTable have a positive scale     Q1 range of the real multiplier of SOFTMAX
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np

from nnfmq.hal.tflite_codes import TfliteOperation
from nnfmq.hal.types import OperandType
from nnfmq.hal.types import OperationType as Op
from nnfmq.operations import fixed_point, quantize_cast, softmax
from nnfmq.operations.fixed_point import Ints, ints
from nnfmq.operations.kernel_adapters import dequantize_array
from nnfmq.operations.quantization import dtype_range
from nnfmq.operations.shapes import normalize_axis, same_shape
from nnfmq.operations.signature import (
    F16,
    F32,
    FLOAT32,
    I32,
    Q8,
    Q8S,
    Q16S,
    V1_2,
    Array,
    Declaration,
    Plan,
    Run,
    Tensor,
    attribute,
    data,
    overload,
)
from nnfmq.operations.tflite_extension.declaring import conversions, function_of_one, own_code, variants_of
from nnfmq.operations.tflite_extension.sixteen_bits import (
    INT16_MAX,
    INT16_MIN,
    LookupTable,
    find,
    saturated,
    sixteen_bit,
)

_STEPS_PER_UNIT = 24  # of the table of the logistic function
_INTEGER_BITS = 3
_LOWEST_EXPONENT = 10.0  # e^-10 counts as 0


@cache
def _logistic_table() -> Ints:
    """Return 1 / (1 + e^-x) for x = 0, 1/24, 2/24 ... as 16 bits after the binary point.

    The values are shifted by half of the error of linear interpolation in the middle of the next step; the last is 1.
    """
    now, middle, after = (65536 / (1 + np.exp(-(np.arange(256) + offset) / _STEPS_PER_UNIT)) for offset in (0, 0.5, 1))
    table = ints(np.rint(now - ((now + after) / 2 - middle) / 2))
    table[-1] = 65535
    return table


def _to_table_steps(scale: float) -> tuple[int, int]:
    """Return multiplier and right shift from quantized values to 1/512 of the table's steps."""
    exponent = math.log2(scale)
    left_shift = 15 - _INTEGER_BITS + round(exponent)
    if abs(exponent - round(exponent)) < 1e-3 and left_shift in (0, 1):
        return 3 << left_shift, 0
    multiplier, shift = scale * 4096 * 3, 0
    while multiplier <= 32767 / 2 and shift <= 30:
        shift, multiplier = shift + 1, multiplier * 2
    return int(multiplier), shift


def plan_logistic(input: Tensor, *, output: Tensor) -> Run:
    """Plan LOGISTIC; the result represents 0 to 1 as 0 to 32767."""
    multiplier, shift = _to_table_steps(input.scale)
    table = _logistic_table()

    def run(x: Array) -> Array:
        steps = _shifted(ints(x) * multiplier, shift)
        sums = _interpolated(table, np.abs(steps), 9, INT16_MAX << 10)
        mirrored = np.where(steps >= 0, sums + (1 << 9), (1 << 25) - sums + (1 << 9) - 1)
        return (mirrored >> 10).astype(np.int16)

    return run


def plan_tanh(input: Tensor, *, output: Tensor) -> Run:
    """Plan TANH; the result represents -1 to 1 as -32767 to 32767."""
    multiplier, shift = _to_table_steps(input.scale)
    table = _logistic_table()

    def run(x: Array) -> Array:
        steps = _shifted(ints(x) * multiplier, shift)
        sums = _interpolated(table, np.abs(steps), 8, 0xFFFF << 8)
        middle, half = 1 << 23, 1 << 7
        mirrored = np.where(steps >= 0, sums - middle + half, middle - sums + half - 1)
        return (mirrored >> 8).astype(np.int16)

    return run


def _shifted(x: Ints, shift: int) -> Ints:
    return (x + (1 << shift >> 1)) >> shift


def _interpolated(table: Ints, steps: Ints, bits: int, beyond: int) -> Ints:
    """Return 2^bits times the table at `steps` / 2^bits; `beyond` its end."""
    index = np.minimum(steps >> bits, 254)
    low, high = table[index], table[index + 1]
    return np.where(steps >> bits >= 255, beyond, (low << bits) + (steps & (1 << bits) - 1) * (high - low))


def plan_softmax(input: Tensor, *, output: Tensor, beta: float, axis: int = -1) -> Run:
    """Plan SOFTMAX along `axis`."""
    position = normalize_axis(axis, len(input.shape))
    step = _LOWEST_EXPONENT / 65535
    multiplier = fixed_point.quantize_multiplier(float(np.float32(input.scale) * np.float32(beta)) / step)
    powers, inverses = _softmax_tables()

    def run(x: Array) -> Array:
        rows = ints(np.moveaxis(x, position, -1))
        scaled = fixed_point.multiply(rows - rows.max(axis=-1, keepdims=True), *multiplier)
        exponentials = powers(saturated(scaled + INT16_MAX))
        sums = exponentials.sum(axis=-1, keepdims=True)
        bits = fixed_point.bit_length(sums)
        normalized = ((sums << (31 - bits)) + (1 << 13)) >> 14
        reciprocals = inverses(saturated(normalized - (1 << 15) - (1 << 16)))
        right_shift = bits - 1
        results = (exponentials * reciprocals + (np.int64(1) << (right_shift - 1))) >> right_shift
        return np.moveaxis(np.clip(results, 0, INT16_MAX).astype(np.int16), -1, position)

    return run


@cache
def _softmax_tables() -> tuple[LookupTable, LookupTable]:
    """Return e^x from -10 to 0 and 1 / (1 + x) from 0 to 1; the results represent 1 as 32768."""
    unit = 2 / 65535
    powers = LookupTable.sampled(np.exp, _LOWEST_EXPONENT / 65535, INT16_MAX, unit, np.float64)
    inverses = LookupTable.sampled(lambda x: 1 / (1 + x), 1 / 65535, INT16_MIN, unit, np.float64)
    return powers, inverses


def plan_softmax_of_8_bits(input: Tensor, *, output: Tensor, beta: float) -> Run:
    """Plan SOFTMAX along the last axis from 8 to 16 bits; 0 to 1 is represented as -32768 to 32767."""
    exponentials, summands = softmax.exponential_tables(input.scale, beta)

    def run(x: Array) -> Array:
        rows = ints(x)
        below = rows.max(axis=-1, keepdims=True) - rows
        scale, bits = softmax.reciprocal_of_sums(summands.take(below).sum(axis=-1, keepdims=True))
        shares = fixed_point.rounding_shift(fixed_point.high_mul(exponentials.take(below), scale), bits + 15)
        return saturated(shares + INT16_MIN)

    return run


def via_table(function: Callable[[Array], Array], extreme: int | None = None) -> Plan:
    """Return the plan of a function of reals as a LookupTable.

    `extreme` is the stored value for reals that are not positive, if the function is not defined for them.
    """

    def plan(input: Tensor, *, output: Tensor) -> Run:
        def total(x: Array) -> Array:
            if extreme is None:
                return function(x)
            limit = np.float32(extreme) * np.float32(output.scale)
            return np.where(x > 0, function(x), limit)

        table = LookupTable.of(total, input, output)
        return lambda x: table(x).astype(np.int16)

    return plan


def _exp(x: Array) -> Array:
    return _rounded_once(np.exp, x)


def _log(x: Array) -> Array:
    return _rounded_once(np.log, x)


def _rounded_once(function: Callable[[Array], Array], x: Array) -> Array:
    """Return a function in float64, rounded to float32: NumPy's own in float32 are less exact."""
    with np.errstate(all="ignore"):
        return function(x.astype(np.float64)).astype(np.float32)


def _rsqrt(x: Array) -> Array:
    result: Array = np.float32(1) / np.sqrt(x)
    return result


def plan_sqrt(input: Tensor, *, output: Tensor) -> Run:
    """Plan the square root, rounded toward zero as in TFLite; that of a negative value is 0."""

    def run(x: Array) -> Array:
        roots = np.sqrt(np.maximum(dequantize_array(x, input), np.float32(0)))
        return saturated(ints(roots / np.float32(output.scale)))

    return run


def plan_dequantize(input: Tensor, *, output: Tensor) -> Run:
    """Plan the real values."""
    return lambda x: dequantize_array(x, input).astype(output.dtype)


def plan_cast(input: Tensor, *, output: Tensor) -> Run:
    """Plan the stored values in another type: those of INT32 wrap around, those of floats saturate, and NaN is high."""

    def run(x: Array) -> Array:
        if x.dtype.kind == "f" and output.dtype.kind != "f":
            low, high = dtype_range(output)
            x = np.clip(np.where(np.isnan(x), np.float32(high), x), low, high)
        return x.astype(output.dtype)

    return run


def _function(operation: TfliteOperation, plan: Plan) -> Declaration:
    return function_of_one(operation, variants_of((Q16S,), plan))


def _conversion(operation: TfliteOperation, plan: Plan, *pairs: tuple[OperandType, OperandType]) -> Declaration:
    return function_of_one(operation, conversions(plan, pairs))


DECLARATIONS = (
    _function(TfliteOperation.Q16_LOGISTIC, plan_logistic),
    _function(TfliteOperation.Q16_TANH, plan_tanh),
    sixteen_bit(find(softmax.DECLARATIONS, Op.SOFTMAX), plan_softmax, ({"S": FLOAT32},)),
    Declaration(
        own_code(TfliteOperation.SOFTMAX_TO_Q16),
        since=V1_2,
        overloads=(overload(data("input"), attribute("beta", FLOAT32), level=V1_2),),
        variants=conversions(plan_softmax_of_8_bits, ((Q8S, Q16S), (Q8, Q16S))),
        shape=same_shape,
        outputs=("O",),
    ),
    _function(TfliteOperation.Q16_EXP, via_table(_exp)),
    _function(TfliteOperation.Q16_LOG, via_table(_log, INT16_MIN)),
    _function(TfliteOperation.Q16_RSQRT, via_table(_rsqrt, INT16_MAX)),
    _function(TfliteOperation.Q16_SQRT, plan_sqrt),
    _conversion(TfliteOperation.Q16_QUANTIZE, quantize_cast.plan_quantize, (F32, Q16S), (F16, Q16S)),
    _conversion(TfliteOperation.Q16_DEQUANTIZE, plan_dequantize, (Q16S, F32), (Q16S, F16)),
    _conversion(TfliteOperation.Q16_CAST, plan_cast, (Q16S, F32), (Q16S, F16), (Q16S, I32), (F32, Q16S), (I32, Q16S)),
)
