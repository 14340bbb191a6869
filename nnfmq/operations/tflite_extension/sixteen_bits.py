"""What the operations on 16-bit tensors share: their declarations, multipliers and tables.

TFLite quantizes such tensors symmetrically: the zero point is 0. `sixteen_bit` makes the declaration of an operation
Q16_X from that of the HAL's X. A 64-bit accumulator is multiplied by 16 bits of the multiplier and rounded once, half
up; a 32-bit one as in `fixed_point`. LookupTable is TFLite's table of 513 values with linear interpolation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from nnfmq.hal.tflite_codes import TfliteOperation
from nnfmq.hal.types import OperandType, OperationType
from nnfmq.operations import fixed_point
from nnfmq.operations.fixed_point import Ints, ints
from nnfmq.operations.signature import F32, Q16S, V1_0, V1_2, Array, Declaration, Overload, Plan, Tensor, Variant
from nnfmq.operations.tflite_extension.any_rank import SHAPES_OF_ANY_RANK
from nnfmq.operations.tflite_extension.declaring import own_code

INT16_MIN, INT16_MAX = -(1 << 15), (1 << 15) - 1
_STEPS = 512  # of a LookupTable

Types = dict[str, OperandType]


def find(declarations: Iterable[Declaration], code: OperationType) -> Declaration:
    """Return the declaration of `code`."""
    return next(declaration for declaration in declarations if declaration.code == code)


def sixteen_bit(source: Declaration, plan: Plan | None = None, types: Iterable[Types] = ({},)) -> Declaration:
    """Return the declaration of Q16_X, X being `source`: it has the same parameters and shape rule.

    There is a variant for each of `types`, the types of other variables than T. Without `plan`, it is computed like
    float32: it then only moves elements.
    """
    if plan is None:
        plan = next(variant.plan for variant in source.variants if variant.types["T"] == F32)
    overloads = (Overload(o.parameters, dict.fromkeys(o.arities, V1_2)) for o in source.overloads)
    return replace(
        source,
        code=own_code(TfliteOperation[f"Q16_{source.name}"]),
        since=V1_2,
        overloads=tuple(overloads),
        variants=tuple(Variant({"T": Q16S, **others}, V1_2, plan) for others in types),
        shape=SHAPES_OF_ANY_RANK.get(source.name, source.shape),
        same_quantization=False,
        level=lambda inputs, output: V1_0,
    )


def multiply_wide(x: Ints, multiplier: Ints | int, shift: Ints | int) -> Ints:
    """Return x * multiplier / 2^31 * 2^shift, with 16 bits of the multiplier and one rounding; |x| is below 2^47."""
    total_shift = 15 - ints(shift)
    result: Ints = (x * reduced_multiplier(multiplier) + (np.int64(1) << (total_shift - 1))) >> total_shift
    return result


def reduced_multiplier(multiplier: Ints | int) -> Ints:
    """Return the upper 16 bits of multipliers, rounded and saturated."""
    reduced: Ints = np.minimum((ints(multiplier) + (1 << 15)) >> 16, INT16_MAX)
    return reduced


def rescaling(real: float) -> Callable[[Array], Ints]:
    """Return the function that multiplies by `real`, and rounds twice. Requires Q1 of `real`."""
    multiplier, shift = fixed_point.quantize_multiplier(real)
    return lambda x: fixed_point.multiply(ints(x), multiplier, shift)


def float_ratio(input: Tensor, output: Tensor) -> float:
    """Return the quotient of the scales, rounded to float32 as in most of TFLite's functions of one value."""
    return float(np.float32(input.scale) / np.float32(output.scale))


def saturated(x: Ints) -> Array:
    """Return x as int16, clamped to its range."""
    return np.clip(x, INT16_MIN, INT16_MAX).astype(np.int16)


def rounded(x: Array) -> Array:
    """Return floats rounded to integers, halves away from zero."""
    result: Array = np.copysign(np.floor(np.abs(x) + x.dtype.type(0.5)), x)
    return result


class LookupTable(Struct, frozen=True):
    """A function of an int16 value as 513 int16 values, between which it is linear."""

    values: Ints

    @classmethod
    def of(cls, function: Callable[[Array], Array], input: Tensor, output: Tensor) -> LookupTable:
        """Tabulate a function of real numbers, in float32 as TFLite does."""
        return cls.sampled(function, input.scale, 0, output.scale, np.float32)

    @classmethod
    def sampled(
        cls, function: Callable[[Array], Array], scale: float, zero_point: int, output_scale: float, dtype: Any
    ) -> LookupTable:
        """Tabulate a function of real numbers with the input's scale and zero point, computed in `dtype`.

        The values are shifted by half of the error in the middle of each step.
        """
        low, high = (dtype(scale) * dtype(limit - zero_point) for limit in (INT16_MIN, INT16_MAX))
        factor = dtype(1 << 16) / (dtype(output_scale) * dtype(INT16_MAX) - dtype(output_scale) * dtype(INT16_MIN))
        step = (high - low) / dtype(_STEPS)
        starts = low + np.arange(_STEPS + 1).astype(dtype) * step
        with np.errstate(all="ignore"):
            exact = function(starts) * factor
            middles = rounded(function(starts[:-1] + step / dtype(2)) * factor)
            last = rounded(function(np.array([high], dtype)) * factor)
            samples = rounded(exact[:-1])
            interpolated = rounded((exact[1:] + samples) / dtype(2))
            corrected = samples - rounded((interpolated - middles) / dtype(2))
        entries = np.clip(np.concatenate([corrected, last]), INT16_MIN, INT16_MAX)
        return cls(ints(np.nan_to_num(entries, nan=0)))

    def __call__(self, x: Array) -> Ints:
        """Return the values for int16 values."""
        wide = ints(x)
        index = 256 + (wide >> 7)
        base = self.values[index]
        slope = ints((self.values[index + 1] - base).astype(np.int16))
        result: Ints = base + ((slope * (wide & 0x7F) + 64) >> 7)
        return result
