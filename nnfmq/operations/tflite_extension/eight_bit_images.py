"""AVERAGE_POOL_2D, RESIZE_BILINEAR and L2_NORMALIZATION of INT8 as TFLite defines them. For UINT8 the HAL does so.

The first two are computed as those of 16 bits. L2_NORMALIZATION multiplies by the inverse norm with 7 more bits.
"""

from __future__ import annotations

import numpy as np

from nnfmq.hal.tflite_codes import TfliteOperation
from nnfmq.hal.types import OperationType as Op
from nnfmq.operations import fixed_point, l2_lrn_instance_norm, pool_2d, resizing
from nnfmq.operations.fixed_point import ints
from nnfmq.operations.l2_lrn_instance_norm import inverse_square_root
from nnfmq.operations.quantization import require_quantization
from nnfmq.operations.signature import Q8S, Array, Run, Tensor
from nnfmq.operations.tflite_extension.declaring import as_tflite
from nnfmq.operations.tflite_extension.eight_bit_functions import clamped
from nnfmq.operations.tflite_extension.sixteen_bit_images import plan_average, plan_bilinear
from nnfmq.operations.tflite_extension.sixteen_bits import find

_EXTRA_BITS = 7  # the output represents -1 to 1 as -128 to 127


def plan_l2_normalization(input: Tensor, *, output: Tensor, axis: int = -1) -> Run:
    """Plan the normalization."""
    require_quantization(output, 1 / 128, 0)

    def run(stored: Array) -> Array:
        centered = ints(stored) - input.zero_point
        multiplier, right = inverse_square_root(np.sum(np.square(centered), axis=axis, keepdims=True))
        return clamped(fixed_point.multiply(centered, multiplier, _EXTRA_BITS - right), output)

    return run


DECLARATIONS = (
    as_tflite(
        TfliteOperation.Q8_L2_NORMALIZATION,
        find(l2_lrn_instance_norm.DECLARATIONS, Op.L2_NORMALIZATION),
        plan_l2_normalization,
        (Q8S,),
    ),
    as_tflite(TfliteOperation.Q8_AVERAGE_POOL_2D, find(pool_2d.DECLARATIONS, Op.AVERAGE_POOL_2D), plan_average, (Q8S,)),
    as_tflite(
        TfliteOperation.Q8_RESIZE_BILINEAR, find(resizing.DECLARATIONS, Op.RESIZE_BILINEAR), plan_bilinear, (Q8S,)
    ),
)
