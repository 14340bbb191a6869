"""RESIZE_BILINEAR and RESIZE_NEAREST_NEIGHBOR: an image scaled to another height and width.

The positions and weights of the input pixels are computed in float32 at preparation. The products of a bilinear pixel
are added in TFLite's order, so that results are bit-exact. Quantized results are rounded by adding 0.5 and truncating;
int8 is computed as uint8, because truncation rounds negative numbers the other way.

    C1 the image has rank 4; only its batch may be 0      C2 height and width are positive
    C3 align_corners and half_pixel_centers are not both set
    C4 an axis has at most 2^24 pixels, the integers that float32 represents exactly
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from msgspec import Struct

from nnfmq.hal.types import OperationType
from nnfmq.operations.declaration import (
    BOOL,
    F16,
    F32,
    FLOAT16,
    FLOAT32,
    Q8,
    Q8S,
    V1_0,
    V1_2,
    V1_3,
    Array,
    Declaration,
    Overload,
    Plan,
    Run,
    Shape,
    Tensor,
    Variant,
    attribute,
    data,
    overload,
)
from nnfmq.operations.kernel_adapters import fp16_via_fp32
from nnfmq.operations.quantization import EXACT_FLOAT32
from nnfmq.operations.shapes import require

_ONE, _HALF = np.float32(1), np.float32(0.5)


def resize_shape(
    input: Shape, *, width: float, height: float, align_corners: bool = False, half_pixel_centers: bool = False
) -> Shape:
    """Return the shape with the given height and width: sizes if int, scale factors if float."""
    message = f"image shape {input}, rank 4 without dimensions of 0 other than the batch is required"
    require(len(input) == 4 and 0 not in input[1:], "C1", message)
    require(not (align_corners and half_pixel_centers), "C3", "align_corners and half_pixel_centers are both set")
    batch, rows, columns, channels = input
    return batch, _new_size(rows, height), _new_size(columns, width), channels


def _new_size(dimension: int, size: float) -> int:
    scaled = size if isinstance(size, int) else float(np.float32(dimension) * np.float32(size))
    require(scaled >= 1, "C2", f"a size of {dimension} becomes {scaled}, at least 1 is required")
    message = f"a size of {dimension} becomes {scaled}, at most {EXACT_FLOAT32} is allowed"
    require(max(scaled, dimension) <= EXACT_FLOAT32, "C4", message)
    return math.floor(scaled)


def _scale(size: int, new_size: int, align_corners: bool) -> np.float32:
    """Return the step in input pixels for one output pixel."""
    if align_corners and new_size > 1:
        return np.float32(size - 1) / np.float32(new_size - 1)
    return np.float32(size) / np.float32(new_size)


class InterpolationTaps(Struct, frozen=True):
    """Linear interpolation along one axis: for each output position two input positions and their weights."""

    lower: Array
    upper: Array
    lower_weight: Array
    upper_weight: Array

    @classmethod
    def of(cls, size: int, new_size: int, align_corners: bool, half_pixel_centers: bool) -> InterpolationTaps:
        """Return the taps that scale an axis from `size` to `new_size`."""
        positions, scale = np.arange(new_size, dtype=np.float32), _scale(size, new_size, align_corners)
        positions_in_input = (positions + _HALF) * scale - _HALF if half_pixel_centers else positions * scale
        lower = np.clip(np.floor(positions_in_input), 0, size - 1).astype(np.intp)
        upper = np.minimum(np.ceil(positions_in_input), size - 1).astype(np.intp)
        fraction = positions_in_input - lower.astype(np.float32)
        return cls(lower, upper, _ONE - fraction, fraction)


def plan_bilinear(
    input: Tensor,
    *,
    output: Tensor,
    width: float,
    height: float,
    align_corners: bool = False,
    half_pixel_centers: bool = False,
) -> Run:
    """Plan a weighted sum of four input pixels for each output pixel."""
    (_, old_rows, old_columns, _), (_, rows, columns, _) = input.shape, output.shape
    vertical = InterpolationTaps.of(old_rows, rows, align_corners, half_pixel_centers)
    horizontal = InterpolationTaps.of(old_columns, columns, align_corners, half_pixel_centers)
    return partial(bilinear, vertical=vertical, horizontal=horizontal)


def bilinear(image: Array, *, vertical: InterpolationTaps, horizontal: InterpolationTaps) -> Array:
    """Interpolate a float32 NHWC image."""
    above = image.take(vertical.lower, axis=1) * vertical.lower_weight[:, None, None]
    below = image.take(vertical.upper, axis=1) * vertical.upper_weight[:, None, None]
    left, right = horizontal.lower_weight[:, None], horizontal.upper_weight[:, None]
    result: Array = above.take(horizontal.lower, axis=2) * left
    result += below.take(horizontal.lower, axis=2) * left
    result += above.take(horizontal.upper, axis=2) * right
    result += below.take(horizontal.upper, axis=2) * right
    return result


def plan_quantized_bilinear(input: Tensor, *, output: Tensor, **attributes: float) -> Run:
    """Plan the same on quantized values, rounded half up; int8 as uint8."""
    run, flip = plan_bilinear(input, output=output, **attributes), np.uint8(0x80 if input.dtype == np.int8 else 0)  # type: ignore[arg-type]

    def rounded(image: Array) -> Array:
        reals = run((image.view(np.uint8) ^ flip).astype(np.float32)) + _HALF
        quantized: Array = reals.astype(np.uint8) ^ flip
        return quantized.view(output.dtype)

    return rounded


def plan_nearest(
    input: Tensor,
    *,
    output: Tensor,
    width: float,
    height: float,
    align_corners: bool = False,
    half_pixel_centers: bool = False,
) -> Run:
    """Plan one input pixel for each output pixel."""
    pairs = zip(input.shape[1:3], output.shape[1:3], strict=True)
    rows, columns = (nearest_positions(*pair, align_corners, half_pixel_centers) for pair in pairs)
    return lambda image: image.take(rows, axis=1).take(columns, axis=2)


def nearest_positions(size: int, new_size: int, align_corners: bool, half_pixel_centers: bool) -> Array:
    """Return the input position of each output position along one axis: rounded if `align_corners`, else floored."""
    scale = _scale(size, new_size, align_corners)
    positions = np.arange(new_size, dtype=np.float32) + (_HALF if half_pixel_centers else np.float32(0))
    scaled = positions * scale
    # Rounded half away from zero, by the fraction: scaled + 0.5 could round up to the next integer by itself.
    chosen = np.floor(scaled) + (scaled - np.floor(scaled) >= _HALF if align_corners else 0)
    result: Array = np.clip(chosen, 0, size - 1).astype(np.intp)
    return result


def _overloads(arities: dict[int, int]) -> tuple[Overload, ...]:
    """Return the overloads by size and by scale; the second needs HAL 1.2 at least."""
    flags = (attribute("nchw", BOOL), attribute("align_corners", BOOL), attribute("half_pixel_centers", BOOL))
    return (
        overload(data("input"), attribute("width"), attribute("height"), *flags, level=V1_3, also=arities),
        overload(
            data("input"),
            attribute("width", "S"),
            attribute("height", "S"),
            *flags,
            level=V1_3,
            also={count: max(level, V1_2) for count, level in arities.items()},
        ),
    )


def _variants(plan: Plan, halves: Plan, quantized: Plan, since: int) -> tuple[Variant, ...]:
    return (
        Variant({"T": F32, "S": FLOAT32}, since, plan),
        Variant({"T": F16, "S": FLOAT16}, V1_2, halves),
        Variant({"T": Q8, "S": FLOAT32}, V1_2, quantized),
        Variant({"T": Q8S, "S": FLOAT32}, V1_3, quantized),
    )


DECLARATIONS = (
    Declaration(
        OperationType.RESIZE_BILINEAR,
        since=V1_0,
        overloads=_overloads({3: V1_0, 4: V1_2, 5: V1_3}),
        variants=_variants(plan_bilinear, fp16_via_fp32(plan_bilinear), plan_quantized_bilinear, V1_0),
        shape=resize_shape,
        images=("input",),
        zero_sized=True,
        same_quantization=True,
    ),
    Declaration(
        OperationType.RESIZE_NEAREST_NEIGHBOR,
        since=V1_2,
        overloads=_overloads({4: V1_2, 5: V1_3}),
        variants=_variants(plan_nearest, plan_nearest, plan_nearest, V1_2),
        shape=resize_shape,
        images=("input",),
        zero_sized=True,
        same_quantization=True,
    ),
)
