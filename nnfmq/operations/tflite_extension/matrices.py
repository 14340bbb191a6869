"""Spectra and matrices: RFFT2D, REAL, IMAG, COMPLEX_ABS, DETERMINANT.

C1 the lengths of the transform are two powers of 2
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nnfmq.hal.extensions import TENSOR_COMPLEX64, TfliteOperation
from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Array, Shape
from nnfmq.operations.kernel_adapters import float_variants, stateless
from nnfmq.operations.shapes import require, require_size, same_shape
from nnfmq.operations.tflite_extension import declare

__all__ = ["DECLARATIONS", "determinant", "determinant_shape", "imaginary", "real", "rfft2d", "rfft2d_shape"]

_LENGTH_MAX = 1 << 24


def rfft2d_shape(input: Shape, *, lengths: Array) -> Shape:
    """Return the input's shape with the spectrum of a real image of `lengths` as last dimensions."""
    height, width = _lengths(lengths)
    require(len(input) >= 2, "R1", f"the input has rank {len(input)}, at least 2 is required")
    shape = (*input[:-2], height, width // 2 + 1)
    require_size(shape, 8)
    return shape


def _lengths(lengths: Array) -> tuple[int, int]:
    values = [int(value) for value in lengths.reshape(-1)]
    fits = len(values) == 2 and all(0 < value <= _LENGTH_MAX and value & (value - 1) == 0 for value in values)
    require(fits, "C1", f"lengths {values[:8]}, two powers of 2 are required")
    return values[0], values[1]


def rfft2d(input: Array, *, lengths: Array) -> Array:
    """Return the spectrum of images that are cut or padded with zeros to `lengths`; computed in float64."""
    spectrum: Array = np.fft.rfft2(input.astype(np.float64), _lengths(lengths)).astype(np.complex64)
    return spectrum


def _part(operation: TfliteOperation, function: Callable[[Any], Array]) -> op.Declaration:
    return declare(
        operation,
        op.data("input"),
        variants=(op.Variant({"T": TENSOR_COMPLEX64}, op.V1_2, stateless(function)),),
        shape=same_shape,
        outputs=(op.F32,),
    )


def real(input: Array) -> Array:
    """Return the real parts."""
    return np.ascontiguousarray(input.real)


def imaginary(input: Array) -> Array:
    """Return the imaginary parts."""
    return np.ascontiguousarray(input.imag)


_SPECTRAL_DECLARATIONS = (
    declare(
        TfliteOperation.RFFT2D,
        op.data("input"),
        op.attribute("lengths", op.I32),
        variants=(op.Variant({"T": op.F32}, op.V1_2, stateless(rfft2d)),),
        shape=rfft2d_shape,
        outputs=(TENSOR_COMPLEX64,),
    ),
    _part(TfliteOperation.REAL, real),
    _part(TfliteOperation.IMAG, imaginary),
    _part(TfliteOperation.COMPLEX_ABS, np.abs),
)


# ----------------------------------------------------------------------------------------------------------------------
# DETERMINANT: a number for each square matrix of an array.
#
# C1 the last two dimensions are equal


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


_MATRICES_DECLARATIONS = (
    declare(
        TfliteOperation.DETERMINANT,
        op.data("input"),
        variants=float_variants(stateless(determinant)),
        shape=determinant_shape,
    ),
)

DECLARATIONS = (*_SPECTRAL_DECLARATIONS, *_MATRICES_DECLARATIONS)
