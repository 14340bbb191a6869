"""Functions of int16 as tables, bit-exact with gemmlowp and TFLite.

gemmlowp's logistic and tanh are tables of all 65,536 inputs. "Qn" means n integer bits and 15 - n fractional ones here.
Values are int64 arrays within int16. Results are in Q0, where 32767 represents 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from msgspec import Struct

from nnfmq.operations.declaration import Array, Plan, Run, Tensor
from nnfmq.operations.fixed_point import (
    IN_16_BITS,
    INT16_MAX,
    INT16_MIN,
    Ints,
    double_reciprocal_of_one_plus,
    exp_on_negative_values,
    ints,
    rounded,
    saturated,
)

ONE_Q0 = INT16_MAX


def lut16(table: Ints, values: Ints) -> Ints:
    """Return table entries for values within int16."""
    result: Ints = table.take(values & 0xFFFF)
    return result


@cache
def logistic_table() -> Ints:
    """1 / (1 + e^-a) for a in Q3."""
    a = _all_inputs()
    positive = saturated(_double_reciprocal_of_exp(-np.abs(a), 3) << 1, IN_16_BITS)
    return np.where(a == 0, 1 << 14, np.where(a > 0, positive, ONE_Q0 - positive))


@cache
def tanh_table(integer_bits: int) -> Ints:
    """tanh(a) for a in Q`integer_bits` (0 to 6)."""
    a = _all_inputs()
    doubled = _double_reciprocal_of_exp(-np.abs(a), integer_bits + 1)  # one integer bit more reads a as 2a
    positive = saturated((doubled - (1 << 13)) << 2, IN_16_BITS)
    return np.where(a == 0, 0, np.where(a > 0, positive, -positive))


def _all_inputs() -> Ints:
    return ints(np.arange(1 << 16, dtype=np.uint16).view(np.int16))


def _double_reciprocal_of_exp(a: Ints, integer_bits: int) -> Ints:
    """2 / (1 + e^a) in Q2."""
    return double_reciprocal_of_one_plus(exp_on_negative_values(a, integer_bits, IN_16_BITS), IN_16_BITS)


# ----------------------------------------------------------------------------------------------------------------------
# TFLite's table of 513 values with linear interpolation, for a function of reals.


_STEPS = 512  # of a LookupTable


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


def via_lut16(function: Callable[[Array], Array], extreme: int | None = None) -> Plan:
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
