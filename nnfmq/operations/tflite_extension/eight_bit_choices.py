"""MAXIMUM, MINIMUM, SELECT, TOPK_V2 and comparisons of 8-bit tensors as TFLite defines them.

MAXIMUM, MINIMUM and SELECT take stored values, whatever their scales. TOPK_V2, of all types, puts the first of equal
values first. Comparisons are between real values with 8 bits after the binary point, so that unequal ones may be equal.

    B1 dimensions are equal or 1     C1 the operands of SELECT have one shape     C4 k is in [1, last dimension]
    Q2 the scales of comparisons are below 1
"""

from __future__ import annotations

from functools import partial

import numpy as np

from nnfmq.hal.tflite_codes import WIDE_TYPES, TfliteOperation
from nnfmq.hal.types import OperationType as Op
from nnfmq.operations import comparison, fixed_point, gather_topk, min_max_select
from nnfmq.operations.fixed_point import Ints, ints
from nnfmq.operations.kernel_adapters import lut8, stateless
from nnfmq.operations.quantization import all_quantized_values
from nnfmq.operations.signature import (
    F16,
    F32,
    I32,
    Q8,
    Q8S,
    Array,
    Run,
    Tensor,
)
from nnfmq.operations.tflite_extension.declaring import as_tflite
from nnfmq.operations.tflite_extension.sixteen_bits import find

_FRACTION_BITS = 8  # of compared values


def plan_comparison(ufunc: np.ufunc, first: Tensor, second: Tensor, *, output: Tensor) -> Run:
    """Plan the comparison of real values in fixed point, with a table for each operand."""
    values, others = _fixed_point_values(first), _fixed_point_values(second)
    return lambda a, b: comparison.compare(ufunc, lut8(values, a), lut8(others, b))


def _fixed_point_values(tensor: Tensor) -> Ints:
    """Return the real value of each stored one, indexed by its bits."""
    centered = ints(all_quantized_values(tensor)) - tensor.zero_point
    return fixed_point.multiply(centered << _FRACTION_BITS, *fixed_point.quantize_multiplier_below_one(tensor.scale))


def topk(array: Array, *, k: int) -> tuple[Array, Array]:
    """Return the `k` largest values of each row, descending, and their indices. Of equal values, the first is first."""
    values, from_end = gather_topk.topk(array[..., ::-1], k)
    return values, (array.shape[-1] - 1 - from_end).astype(np.int32)


_BYTES = (Q8, Q8S)
_CHOICES = {
    Op.MAXIMUM: stateless(np.maximum),
    Op.MINIMUM: stateless(np.minimum),
    Op.SELECT: stateless(min_max_select.select),
}

DECLARATIONS = (
    *(
        as_tflite(TfliteOperation[f"Q8_{code.name}"], find(min_max_select.DECLARATIONS, code), plan, _BYTES)
        for code, plan in _CHOICES.items()
    ),
    as_tflite(
        TfliteOperation.TOPK_V2,
        find(gather_topk.DECLARATIONS, Op.TOPK_V2),
        stateless(topk),
        (F32, F16, I32, *_BYTES, *WIDE_TYPES),
    ),
    *(
        as_tflite(
            TfliteOperation[f"Q8_{code.name}"],
            find(comparison.DECLARATIONS, code),
            partial(plan_comparison, ufunc),
            _BYTES,
        )
        for code, ufunc in comparison.COMPARISONS.items()
    ),
)
