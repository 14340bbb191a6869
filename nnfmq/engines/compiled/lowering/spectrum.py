"""Lowering rules of RFFT2D of rows, and of REAL, IMAG and COMPLEX_ABS."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from nnfmq.engines.compiled.kernels.spectrum import MIN_LENGTH, ComplexPart, Part, RealFft
from nnfmq.engines.compiled.lowering import KernelLaunch, LoweringRule
from nnfmq.engines.compiled.target import Target
from nnfmq.hal.extensions import TfliteOperation, operation_code
from nnfmq.hal.types import OperationType
from nnfmq.operations.declaration import Array, Tensor

__all__ = ["RULES"]

_MAX_SCRATCH_BYTES = 1 << 20  # of a group of rows: it fits a second-level cache
_CHUNK = 1 << 12  # complex numbers of a work item


def _rfft2d(input: Tensor, *, output: Tensor, target: Target, lengths: Array) -> KernelLaunch | None:
    """Lower RFFT2D of images that become one row."""
    height, length = map(int, lengths.reshape(-1))
    if height > 1 or length < MIN_LENGTH or 0 in input.shape:
        return None
    images, (rows, columns) = math.prod(input.shape[:-2]), input.shape[-2:]
    kernel = RealFft(images, rows * columns, min(columns, length), length, target.lanes // 2)
    if kernel.scratch_bytes(target) > _MAX_SCRATCH_BYTES:
        return None
    estimated_ns = images * length * length.bit_length() // 8
    return KernelLaunch(kernel, (kernel.positions(), kernel.factors(), kernel.last_factors()), estimated_ns)


def _part(part: Part, input: Tensor, *, output: Tensor, target: Target) -> KernelLaunch | None:
    """Lower REAL, IMAG and COMPLEX_ABS."""
    count = math.prod(input.shape)
    return KernelLaunch(ComplexPart(part, count, _CHUNK), (), count // 4) if count else None


RULES: Mapping[OperationType, LoweringRule] = {
    operation_code(TfliteOperation.RFFT2D): _rfft2d,
    operation_code(TfliteOperation.REAL): partial(_part, "real"),
    operation_code(TfliteOperation.IMAG): partial(_part, "imaginary"),
    operation_code(TfliteOperation.COMPLEX_ABS): partial(_part, "absolute"),
}
