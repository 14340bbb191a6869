"""DETERMINANT: a number for each square matrix of an array.

C1 the last two dimensions are equal
"""

from __future__ import annotations

import numpy as np

from nnfmq.hal.tflite_codes import TfliteOperation
from nnfmq.operations.kernel_adapters import stateless
from nnfmq.operations.shapes import require
from nnfmq.operations.signature import V1_2, Array, Declaration, Shape, data, overload
from nnfmq.operations.tflite_extension.declaring import float_variants, own_code


def determinant_shape(input: Shape) -> Shape:
    """Return the shape of the matrices' array; (1,) for one matrix."""
    require(len(input) >= 2 and input[-1] == input[-2], "C1", f"matrices of shape {input} are not square")
    return input[:-2] or (1,)


def determinant(input: Array) -> Array:
    """Return the determinants, computed in float64."""
    with np.errstate(all="ignore"):
        found = np.linalg.det(input.astype(np.float64)).astype(input.dtype)
    result: Array = np.reshape(found, determinant_shape(input.shape))
    return result


DECLARATIONS = (
    Declaration(
        own_code(TfliteOperation.DETERMINANT),
        since=V1_2,
        overloads=(overload(data("input"), level=V1_2),),
        variants=float_variants(stateless(determinant)),
        shape=determinant_shape,
    ),
)
