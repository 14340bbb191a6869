"""RESIZE_BILINEAR; RESIZE_NEAREST_NEIGHBOR only moves pixels and is there."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nnfmq.engines.compiled.kernels.bilinear_resize import BilinearResize
from nnfmq.engines.compiled.lowering import KernelLaunch, LoweringRule
from nnfmq.engines.compiled.target import Target
from nnfmq.hal.types import OperationType
from nnfmq.operations.resizing import InterpolationTaps
from nnfmq.operations.signature import Tensor

__all__ = ["RULES"]

_MOST_SCRATCH_BYTES = 1 << 24


def resize_bilinear(
    input: Tensor,
    *,
    output: Tensor,
    target: Target,
    width: float,
    height: float,
    align_corners: bool = False,
    half_pixel_centers: bool = False,
) -> KernelLaunch | None:
    """RESIZE_BILINEAR of float32 and codes."""
    if input.dtype.itemsize == 2 or 0 in input.shape:
        return None
    is_float = input.dtype.kind == "f"
    batch, old_rows, old_columns, channels = input.shape
    _, new_rows, new_columns, _ = output.shape
    signed = input.dtype.kind == "i"
    kernel = BilinearResize(batch, old_rows, old_columns, channels, new_rows, new_columns, is_float, signed)
    if kernel.scratch_bytes(target) > _MOST_SCRATCH_BYTES:
        return None
    flags = (align_corners, half_pixel_centers)
    rows = _table(InterpolationTaps.of(old_rows, new_rows, *flags), old_columns * channels * input.dtype.itemsize)
    columns = _table(InterpolationTaps.of(old_columns, new_columns, *flags), 4 * channels)
    work = 2 * batch * new_rows * (old_columns + new_columns) * max(1, channels // target.lanes)
    return KernelLaunch(kernel, (*rows, *columns), work)


def _table(taps: InterpolationTaps, step: int) -> tuple[bytes, bytes]:
    """Return pairs of offsets and pairs of weights."""
    offsets = np.stack([taps.lower, taps.upper], axis=1).astype("<i8") * step
    weights = np.stack([taps.lower_weight, taps.upper_weight], axis=1).astype("<f4")
    return offsets.tobytes(), weights.tobytes()


RULES: Mapping[OperationType, LoweringRule] = {OperationType.RESIZE_BILINEAR: resize_bilinear}
