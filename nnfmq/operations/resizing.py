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
from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Array, Plan, Run, Shape, Tensor
from nnfmq.operations.fixed_point import Ints, ints
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


_UNIT = 1 << 10  # of a position


def plan_fixed_point_bilinear(
    input: Tensor,
    *,
    output: Tensor,
    width: float,
    height: float,
    align_corners: bool = False,
    half_pixel_centers: bool = False,
) -> Run:
    """Plan RESIZE_BILINEAR of INT8 and 16 bits as TFLite defines it: positions have 10 bits after the binary point."""
    (_, old_rows, old_columns, _), (_, rows, columns, _) = input.shape, output.shape
    vertical = _FixedPointTaps.of(old_rows, rows, align_corners, half_pixel_centers)
    horizontal = _FixedPointTaps.of(old_columns, columns, align_corners, half_pixel_centers)

    def run(image: Array) -> Array:
        pixels = horizontal.apply(vertical.apply(ints(image), 1), 2)
        rounded: Array = (np.sign(pixels) * ((np.abs(pixels) + (1 << 19)) >> 20)).astype(output.dtype)
        return rounded

    return run


class _FixedPointTaps(Struct, frozen=True):
    """Two input positions for each output position, and the weight of the second in 1/1024."""

    lower: Ints
    upper: Ints
    fraction: Ints

    @classmethod
    def of(cls, size: int, new_size: int, align_corners: bool, half_pixel_centers: bool) -> _FixedPointTaps:
        steps, spans = (size - 1, new_size - 1) if align_corners and new_size > 1 else (size, new_size)
        scale = (_UNIT * steps + spans // 2) // spans
        position = np.arange(new_size, dtype=np.int64) * scale
        if half_pixel_centers:
            position += scale // 2 - _UNIT // 2
        lower = np.maximum(position, 0) // _UNIT
        upper = np.minimum(_toward_zero(position + _UNIT - 1), size - 1)
        return cls(np.minimum(lower, size - 1), upper, position - _UNIT * lower)

    def apply(self, image: Ints, axis: int) -> Ints:
        """Return 1024 times the interpolated image along `axis`."""
        shape = [1] * image.ndim
        shape[axis] = len(self.fraction)
        fraction = self.fraction.reshape(shape)
        return image.take(self.lower, axis=axis) * (_UNIT - fraction) + image.take(self.upper, axis=axis) * fraction


def _toward_zero(position: Ints) -> Ints:
    result: Ints = np.sign(position) * (np.abs(position) // _UNIT)
    return result


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


def _overloads(arities: dict[int, int]) -> tuple[op.Overload, ...]:
    """Return the overloads by size and by scale; the second needs HAL 1.2 at least."""
    flags = (
        op.attribute("nchw", op.BOOL),
        op.attribute("align_corners", op.BOOL),
        op.attribute("half_pixel_centers", op.BOOL),
    )
    return (
        op.overload(
            op.data("input"), op.attribute("width"), op.attribute("height"), *flags, level=op.V1_3, also=arities
        ),
        op.overload(
            op.data("input"),
            op.attribute("width", "S"),
            op.attribute("height", "S"),
            *flags,
            level=op.V1_3,
            also={count: max(level, op.V1_2) for count, level in arities.items()},
        ),
    )


def _variants(plan: Plan, halves: Plan, quantized: Plan, since: int) -> tuple[op.Variant, ...]:
    return (
        op.Variant({"T": op.F32, "S": op.FLOAT32}, since, plan),
        op.Variant({"T": op.F16, "S": op.FLOAT16}, op.V1_2, halves),
        *op.types_since(op.V1_2, quantized, op.Q8, op.Q8S, S=op.FLOAT32),
    )


_SIZES = (op.FLOAT32, op.FLOAT16)  # types of scale factors


def _of_16_bits(plan: Plan) -> tuple[op.Variant, ...]:
    return (*op.of_types(plan, op.Q16S, S=op.INT32), *op.of_types(plan, op.Q16S, S=op.FLOAT32))


DECLARATIONS = (
    op.Declaration(
        OperationType.RESIZE_BILINEAR,
        since=op.V1_0,
        overloads=_overloads({3: op.V1_0, 4: op.V1_2, 5: op.V1_3}),
        variants=_variants(plan_bilinear, fp16_via_fp32(plan_bilinear), plan_quantized_bilinear, op.V1_0),
        shape=resize_shape,
        images=("input",),
        zero_sized=True,
        same_quantization=True,
        extended=(
            # TFLite rounds INT8 like 16 bits, and UINT8 as the HAL does.
            op.tflite(*(op.Variant({"T": op.Q8S, "S": size}, op.V1_2, plan_fixed_point_bilinear) for size in _SIZES)),
            op.sixteen_bits(*_of_16_bits(plan_fixed_point_bilinear)),
        ),
    ),
    op.Declaration(
        OperationType.RESIZE_NEAREST_NEIGHBOR,
        since=op.V1_2,
        overloads=_overloads({4: op.V1_2, 5: op.V1_3}),
        variants=_variants(plan_nearest, plan_nearest, plan_nearest, op.V1_2),
        shape=resize_shape,
        images=("input",),
        zero_sized=True,
        same_quantization=True,
        extended=(op.sixteen_bits(*_of_16_bits(plan_nearest)),),
    ),
)
