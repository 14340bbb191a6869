"""The random source of random graphs, and the oracle of single operations.

All values are derived from the raw bits of PCG64, whose stream NumPy guarantees (NEP 19), and not from NumPy's
distributions, which may change. So a seed gives the same graph everywhere. The ranges are those of AOSP's random graph
generator: floats in [-2, 2), so that sums and products stay small; int32 in [0, 255]; quantized values in their whole
range; scales in [0.1, 2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import FusedActivationFunc, Operand, OperandType, OperationType, is_scalar
from nnfmq.lab.conformance.testmodels import Array
from nnfmq.operations import REGISTRY
from nnfmq.operations.declaration import NUMPY_TYPES, Match, Role, Shape, match
from nnfmq.operations.preparation import prepare, tensor_of

__all__ = [
    "Discard",
    "GraphLimits",
    "OperationCall",
    "Quantization",
    "RandomSource",
    "Sign",
    "compute",
    "convert_results",
    "expected_outputs",
    "fit_output_scale",
    "in_float32",
    "reals",
]

Item = TypeVar("Item")

_MAX_REAL = 2.0
_MAX_INTEGER = 255
_SCALES = (0.1, 2.0)


class Sign(Enum):
    """The sign that an operation requires of an argument's real values."""

    ANY = "any"
    NOT_NEGATIVE = "not negative"
    NOT_ZERO = "not zero"
    POSITIVE = "positive"

    def is_satisfied(self, reals: Array) -> bool:
        """Return True if all values have this sign."""
        if self is Sign.NOT_ZERO:
            return bool(np.all(reals != 0))
        if self is Sign.POSITIVE:
            return bool(np.all(reals > 0))
        return self is Sign.ANY or bool(np.all(reals >= 0))


class Discard(Exception):
    """The sample exceeds the limits, or its result cannot be evaluated. The caller generates another one."""


class GraphLimits(Struct, frozen=True):
    """Limits of a dimension, of the elements of a tensor, and of the multiply-accumulates of an operation."""

    dimension: int
    elements: int = 10_000
    macs: int = 1 << 22


class Quantization(Struct, frozen=True):
    """Scale, exact in float32, and zero point."""

    scale: float = 0.0
    zero_point: int = 0


class RandomSource:
    """A stream of random choices."""

    def __init__(self, seed: Sequence[int], limits: GraphLimits) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(list(seed)))
        self.limits = limits

    def fractions(self, count: int) -> Array:
        """Return `count` float64 numbers in [0, 1)."""
        raw = np.asarray(self._bits.random_raw(count), np.uint64)
        return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def real(self, low: float, high: float) -> float:
        """Return a number in [low, high), exact in float32."""
        return float(np.float32(low + (high - low) * self.fractions(1)[0]))

    def integer(self, low: int, high: int) -> int:
        """Return an integer from `low` to `high`, both included."""
        return low + int(self.fractions(1)[0] * (high - low + 1))

    def chance(self, probability: float = 0.5) -> bool:
        """Return True with this probability."""
        return bool(self.fractions(1)[0] < probability)

    def choice(self, items: Sequence[Item]) -> Item:
        """Return one of the items."""
        return items[self.integer(0, len(items) - 1)]

    def permutation(self, count: int) -> list[int]:
        """Return a permutation of 0 to `count` - 1."""
        return [int(position) for position in np.argsort(self.fractions(count), kind="stable")]

    def dimension(self, max_dimension: int) -> int:
        """Return a dimension from 1 to `max_dimension`.

        In half of the cases it is log-uniform, so that small dimensions are frequent.
        """
        if self.chance():
            return self.integer(1, max_dimension)
        return max(1, min(max_dimension, int((max_dimension + 1) ** float(self.fractions(1)[0]))))

    def shape(self, rank: int, max_elements: int | None = None) -> Shape:
        """Return dimensions whose product is within the limit; in half of the cases of similar size."""
        remaining = self.limits.elements if max_elements is None else max_elements
        even = 2 * math.ceil(remaining ** (1 / rank))
        max_dimension = min(self.limits.dimension, even) if self.chance() else self.limits.dimension
        dimensions = [1] * rank
        for axis in self.permutation(rank):
            dimensions[axis] = self.dimension(max(1, min(max_dimension, remaining)))
            remaining //= dimensions[axis]
        return tuple(dimensions)

    def activation(self) -> int:
        """Return the code of a fused activation; in half of the cases none, because the others clamp results."""
        return 0 if self.chance() else self.integer(1, max(FusedActivationFunc))

    def divisor(self, number: int, max_divisor: int | None = None) -> int:
        """Return one of the divisors of `number`, up to `max_divisor`."""
        limit = number if max_divisor is None else min(max_divisor, number)
        return self.choice([d for d in range(1, limit + 1) if number % d == 0])

    def quantization(self, type: OperandType) -> Quantization:
        """Return a scale and zero point for a tensor of this type; none for types that have none."""
        if type in FIXED_QUANTIZATION:
            return FIXED_QUANTIZATION[type]
        scale = self.real(*_SCALES)
        if type not in ASYMMETRIC:
            return Quantization(scale)
        zero = 0 if self.chance(1 / 8) else self.integer(0, 254)  # HAL 1.1 can only pad with 0
        return Quantization(scale, zero - (128 if type == OperandType.TENSOR_QUANT8_ASYMM_SIGNED else 0))

    def values(self, type: OperandType, shape: Shape, sign: Sign, zero_point: int) -> Array:
        """Return an array of this type; `sign` is that of the values minus the zero point."""
        dtype = NUMPY_TYPES[type]
        fractions = self.fractions(math.prod(shape)).reshape(shape)
        if dtype.kind == "f":
            return _reals(fractions, sign).astype(dtype)
        low, high = _bounds(type, dtype, sign, zero_point)
        integers: Array = (low + np.floor(fractions * (high - low + 1))).astype(dtype)
        if sign is Sign.NOT_ZERO and type != OperandType.TENSOR_BOOL8:
            integers[integers == zero_point] += 1
        return integers


ASYMMETRIC = (OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED)
FIXED_QUANTIZATION = {
    OperandType.TENSOR_QUANT16_ASYMM: Quantization(0.125),
    **dict.fromkeys(
        (type for type in OperandType if "QUANT" not in type.name or "PER_CHANNEL" in type.name), Quantization()
    ),
}
"""Types whose scale is fixed: 0.125 for boxes, none for the others."""


def _reals(fractions: Array, sign: Sign) -> Array:
    low = 0.0 if sign in (Sign.NOT_NEGATIVE, Sign.POSITIVE) else -_MAX_REAL
    reals: Array = low + (_MAX_REAL - low) * fractions
    if sign in (Sign.POSITIVE, Sign.NOT_ZERO):
        reals[np.abs(reals) < 2.0**-12] = 2.0**-12
    return reals


def _bounds(type: OperandType, dtype: np.dtype[Any], sign: Sign, zero_point: int) -> tuple[int, int]:
    if type == OperandType.TENSOR_BOOL8:
        return 0, 1
    if type == OperandType.TENSOR_INT32:
        return int(sign in (Sign.POSITIVE, Sign.NOT_ZERO)), _MAX_INTEGER
    info = np.iinfo(dtype)
    low = info.min + (type == OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL)
    low = {Sign.NOT_NEGATIVE: zero_point, Sign.POSITIVE: zero_point + 1}.get(sign, low)
    return int(low), int(info.max)


# ----------------------------------------------------------------------------------------------------------------------
# The oracle: expected outputs of a single operation, computed in float32 where possible.
#
# An operation on float16 or quantized tensors is compared with the result of the reference for the same real values in
# float32, rounded to the output's type once. If no float32 form is equivalent (conversions between types, and
# HASHTABLE_LOOKUP, whose misses are zero bytes), it is compared with the reference's own result.


_NOT_CONVERTED = {
    OperationType.CAST,
    OperationType.DEQUANTIZE,
    OperationType.HASHTABLE_LOOKUP,
    OperationType.QUANTIZE,
}


class OperationCall(Struct, frozen=True):
    """An operation with its arguments (None: omitted) and outputs, whose dimensions may be unknown."""

    code: OperationType
    operands: tuple[Operand, ...]
    arrays: tuple[Array | None, ...]
    outputs: tuple[Operand, ...]

    def matched(self) -> Match:
        """Return the matching overload and variant. Raises InvalidArgument if there is none."""
        return match(REGISTRY[self.code], self.operands, self.outputs)


def compute(call: OperationCall) -> tuple[Array, ...]:
    """Return the outputs as the reference computes them. Raises the operation's errors."""
    matched = call.matched()
    pairs = list(zip(matched.parameters, call.operands, call.arrays, strict=True))
    tensors = [None if a is None else tensor_of(o, a.shape, None if p.role is Role.DATA else a) for p, o, a in pairs]
    with np.errstate(all="ignore"):
        prepared = prepare(matched, tensors, call.outputs)
        results = prepared.run(*(a for p, _, a in pairs if p.role is Role.DATA))
    arrays = results if isinstance(results, tuple) else (results,)
    return tuple(np.ascontiguousarray(array).reshape(np.shape(array)) for array in arrays)


def in_float32(call: OperationCall) -> OperationCall | None:
    """Return the same operation on the same real values in float32, or None if there is no equivalent."""
    if call.code in _NOT_CONVERTED:
        return None
    pairs = [_real(call, number) for number in range(len(call.operands))]
    operands, arrays = tuple(operand for operand, _ in pairs), tuple(array for _, array in pairs)
    converted = OperationCall(call.code, operands, arrays, tuple(_float_operand(operand) for operand in call.outputs))
    try:
        converted.matched()
    except InvalidArgument:
        return None
    return converted


def _real(call: OperationCall, number: int) -> tuple[Operand, Array | None]:
    operand, array = call.operands[number], call.arrays[number]
    if call.code == OperationType.PAD_V2 and number == 2 and operand.type == OperandType.INT32:
        source = call.operands[0]  # the padding value has the scale and zero point of the input
        operand = replace(operand, scale=source.scale, zero_point=source.zero_point)
    elif operand.type == OperandType.TENSOR_INT32 and array is not None and _is_channel_bias(call, number):
        scales = np.array(_channel_scales(call), np.float64) * call.operands[0].scale
        return Operand(OperandType.TENSOR_FLOAT32, operand.dimensions), (array * scales).astype(np.float32)
    return _float_operand(operand), None if array is None else reals(operand, array)


def _is_channel_bias(call: OperationCall, number: int) -> bool:
    return call.matched().parameters[number].name == "bias" and bool(_channel_scales(call))


def _channel_scales(call: OperationCall) -> tuple[float, ...]:
    quant = call.operands[1].channel_quant
    return quant.scales if quant is not None else ()


def _is_converted(operand: Operand) -> bool:
    has_scale = operand.scale != 0 or operand.channel_quant is not None
    return has_scale or operand.type in (OperandType.TENSOR_FLOAT16, OperandType.FLOAT16)


def _float_operand(operand: Operand) -> Operand:
    if not _is_converted(operand):
        return operand
    return Operand(OperandType.FLOAT32 if is_scalar(operand.type) else OperandType.TENSOR_FLOAT32, operand.dimensions)


def reals(operand: Operand, array: Array) -> Array:
    """Return the real values of a tensor as float32; integers without a scale unchanged."""
    if not _is_converted(operand):
        return array
    if operand.channel_quant is not None:
        shape = [1] * array.ndim
        shape[operand.channel_quant.channel_dim] = -1
        scales = np.array(operand.channel_quant.scales, np.float64).reshape(shape)
        return np.asarray(array * scales, np.float32)
    if operand.scale:
        return np.asarray((array.astype(np.float64) - operand.zero_point) * operand.scale, np.float32)
    return array.astype(np.float32)


def convert_results(operand: Operand, values: Array) -> Array:
    """Convert float32 results to the output's type: rounded once, quantized values half away from 0 and clamped."""
    dtype = NUMPY_TYPES[operand.type]
    if not operand.scale:
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    info = np.iinfo(dtype)
    quotients = np.nan_to_num(values.astype(np.float64) / operand.scale)
    quantized = np.copysign(np.floor(np.abs(quotients) + 0.5), quotients) + operand.zero_point
    return np.asarray(np.clip(quantized, info.min, info.max), dtype)


def expected_outputs(call: OperationCall) -> tuple[Array, ...]:
    """Return the expected outputs.

    If the operation exists in float32, it is computed there from the same real values and rounded once to the outputs'
    types; otherwise it is computed in its own types.
    """
    converted = in_float32(call)
    if converted is None:
        return compute(call)
    return tuple(convert_results(o, array) for o, array in zip(call.outputs, compute(converted), strict=True))


def fit_output_scale(call: OperationCall, output: Operand) -> Operand:
    """Return the output with the scale and zero point of the results' range, as a quantization tool would choose them.

    The scale is above the product of the first two arguments' scales, as HAL 1.0 requires of products.
    """
    converted = in_float32(call)
    assert converted is not None, "every product has a float32 form"
    (result,) = compute(converted)
    low, high = min(float(result.min()), 0.0), max(float(result.max()), 0.0)
    scales = _channel_scales(call) or (call.operands[1].scale,)
    min_scale = call.operands[0].scale * max(scales) * 1.001
    scale = float(np.float32(max((high - low) / 255, min_scale)))
    info = np.iinfo(NUMPY_TYPES[output.type])
    zero_point = min(max(round(info.min - low / scale), int(info.min)), int(info.max))
    return replace(output, scale=scale, zero_point=zero_point)
