"""ROI_ALIGN and ROI_POOLING: a grid of bins from each region of interest of an image.

Regions and batch indices are copied and validated, because they decide what is read. ROI_ALIGN averages bilinear
samples in each bin. Sample positions are accumulated in float32, as in TFLite, so that quantized results are bit-exact;
for quantized images the weights are multiples of 1/255 and sums are integers. float16 is computed in float32 and
rounded once; TFLite rounds each step. X1 to X3 are explained in `bounding_boxes`.

    C1 the image has rank 4 and no dimension of 0  C2 regions have shape (count, 4), batch indices (count,)
    C3 output sizes and strides are positive       C4 sampling ratios are not negative
    C5 a region is inside its image                C6 a region's samples fit 32 bits     Q7 ROI_POOLING
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct

from nnfmq.hal.types import OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations import fixed_point
from nnfmq.operations.bounding_boxes import BOXES, require_batches, require_box_scale, require_ordered
from nnfmq.operations.declaration import Array, Plan, Run, Shape, Tensor
from nnfmq.operations.kernel_adapters import dequantize_array, fp16_via_fp32
from nnfmq.operations.quantization import dtype_range
from nnfmq.operations.shapes import require

_BLOCK_ELEMENTS = 1 << 18  # samples times channels that are gathered at a time
_WEIGHT_UNIT = np.float32(1) / np.float32(255)

Pooled: TypeAlias = Callable[[Array, Array], Array]  # image (height, width, channels), scaled region -> bins


def roi_shape(
    input: Shape,
    regions: Shape,
    batches: Shape,
    *,
    height: int,
    width: int,
    height_stride: float,
    width_stride: float,
    height_ratio: int = 0,
    width_ratio: int = 0,
) -> Shape:
    """Return (regions, height, width, channels)."""
    require(len(input) == 4 and 0 not in input, "C1", f"image {input} must have rank 4 and no dimension of 0")
    fits = len(regions) == 2 and regions[1] == 4 and batches == (regions[0],)
    require(fits, "C2", f"regions {regions} and batch indices {batches}, required are (count, 4) and (count,)")
    sizes = (height, width, height_stride, width_stride)
    require(all(size > 0 for size in sizes), "C3", f"output sizes and strides are {sizes}, all must be positive")
    require(
        min(height_ratio, width_ratio) >= 0,
        "C4",
        f"sampling ratios {height_ratio} and {width_ratio} must not be negative",
    )
    return regions[0], height, width, input[3]


def _plan_roi(
    pooled: Pooled, input: Tensor, regions: Tensor, output: Tensor, height_stride: float, width_stride: float
) -> Run:
    """Return a Run that copies and validates the regions, then pools each of them."""
    require_box_scale(regions)
    scale = np.float32(1) / np.array([width_stride, height_stride] * 2, np.float32)
    dimensions = np.array([input.shape[2], input.shape[1]] * 2)

    def run(images: Array, boxes: Array, batches: Array) -> Array:
        scaled, indices = dequantize_array(boxes, regions) * scale, batches.copy()
        require_batches(indices, len(images))
        require_ordered(scaled)
        inside = bool(np.all((scaled >= 0) & (scaled <= dimensions)))
        require(inside, "C5", f"a region is not inside its image of {input.shape[1]} x {input.shape[2]}")
        out = np.empty(output.shape, output.dtype)
        for bins, image, region in zip(out, indices, scaled, strict=True):
            bins[...] = pooled(images[image], region)
        return out

    return run


class SamplePoints(Struct, frozen=True):
    """Sample positions along one axis, (bins, samples): between pixels `low` and `high`, at `fraction`."""

    low: Array
    high: Array
    fraction: Array
    inside: Array
    ratio: int

    def taps(self) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """Return the two pixels that each sample reads, with their weights."""
        return (self.low, np.float32(1) - self.fraction), (self.high, self.fraction)

    def block(self, start: int, stop: int) -> SamplePoints:
        """Return the samples of bins `start` to `stop`."""
        part = slice(start, stop)
        return SamplePoints(self.low[part], self.high[part], self.fraction[part], self.inside[part], self.ratio)


def sample_points(start: np.float32, end: np.float32, count: int, dimension: int, ratio: int) -> SamplePoints:
    """Return `ratio` samples (0: one for each pixel of its length) in each of `count` bins from `start` to `end`."""
    step = np.maximum(end - start, np.float32(1)) / np.float32(count)
    ratio = ratio or int(np.ceil(step))
    _require_few_samples(count * (ratio + 1))
    size = step / np.float32(ratio)
    edges = step * np.arange(count + 1, dtype=np.float32) + start
    steps = np.full((count, ratio + 1), size)  # one more: it may be inside the bin because of rounding
    steps[:, 0] = edges[:-1] + size / np.float32(2)
    samples = np.add.accumulate(steps, axis=1)
    low = np.floor(samples)
    beyond = low >= dimension - 1
    whole = np.where(beyond, dimension - 1, low).astype(np.int64)
    fraction = np.where(beyond, np.float32(0), samples - low)
    return SamplePoints(whole, np.where(beyond, whole, whole + 1), fraction, samples < edges[1:, None], ratio)


def _sampled_bins(image: Array, rows: SamplePoints, columns: SamplePoints, zero_point: int | None) -> Array:
    """Return the weighted sums of the samples, (rows, columns, channels), some rows at a time.

    Sums are float32 if `zero_point` is None, else exact sums of values minus zero point, with weights in 1/255.
    """
    step = max(1, _BLOCK_ELEMENTS // (rows.low.shape[1] * columns.low.size * image.shape[2]))
    count = len(rows.low)
    return np.concatenate(
        [_weighted(image, rows.block(i, i + step), columns, zero_point) for i in range(0, count, step)]
    )


def _weighted(image: Array, rows: SamplePoints, columns: SamplePoints, zero_point: int | None) -> Array:
    counted = rows.inside[:, :, None, None] & columns.inside
    sums: Any = 0
    for ys, down in rows.taps():
        for xs, across in columns.taps():
            weights, bins = down[:, :, None, None] * across * counted, image[ys[:, :, None, None], xs]
            if zero_point is not None:
                weights = np.floor((weights / _WEIGHT_UNIT).astype(np.float64) + 0.5).astype(np.int64)
                bins = np.subtract(bins, zero_point, dtype=np.int64)
            sums = sums + np.einsum("iyjx,iyjxc->ijc", weights, bins)
    result: Array = sums
    return result


def _region_samples(
    region: Array, output: Tensor, input: Tensor, ratios: tuple[int, int]
) -> tuple[SamplePoints, SamplePoints]:
    _, height, width, _ = output.shape
    rows = sample_points(region[1], region[3], height, input.shape[1], ratios[0])
    columns = sample_points(region[0], region[2], width, input.shape[2], ratios[1])
    _require_few_samples(rows.low.size * columns.low.size)
    return rows, columns


def _require_few_samples(count: int) -> None:
    require(4 * count < 1 << 32, "C6", f"{count} samples in a region need 2^32 bytes or more as float32")


def plan_align(
    input: Tensor,
    regions: Tensor,
    batches: Tensor,
    *,
    output: Tensor,
    height: int,
    width: int,
    height_stride: float,
    width_stride: float,
    height_ratio: int,
    width_ratio: int,
) -> Run:
    """Plan the average of samples in float32."""

    def pooled(image: Array, region: Array) -> Array:
        rows, columns = _region_samples(region, output, input, (height_ratio, width_ratio))
        sums = _sampled_bins(image, rows, columns, None)
        return sums / np.float32(rows.ratio * columns.ratio)

    return _plan_roi(pooled, input, regions, output, height_stride, width_stride)


def plan_quantized_align(
    input: Tensor,
    regions: Tensor,
    batches: Tensor,
    *,
    output: Tensor,
    height: int,
    width: int,
    height_stride: float,
    width_stride: float,
    height_ratio: int,
    width_ratio: int,
) -> Run:
    """Plan the average of quantized samples: weights in 1/255, exact integer sums, requantized."""
    unit = np.float32(input.scale) * _WEIGHT_UNIT / np.float32(output.scale)
    low, high = dtype_range(output)

    def pooled(image: Array, region: Array) -> Array:
        rows, columns = _region_samples(region, output, input, (height_ratio, width_ratio))
        pair = fixed_point.quantize_multiplier_below_one(float(unit / np.float32(rows.ratio * columns.ratio)))
        sums = _sampled_bins(image, rows, columns, input.zero_point)
        return np.clip(fixed_point.multiply(sums, *pair) + output.zero_point, low, high)

    return _plan_roi(pooled, input, regions, output, height_stride, width_stride)


def plan_pooling(
    input: Tensor,
    regions: Tensor,
    batches: Tensor,
    *,
    output: Tensor,
    height: int,
    width: int,
    height_stride: float,
    width_stride: float,
) -> Run:
    """Plan the maximum of each bin's pixels, floats or quantized; a bin without pixels has the zero point."""
    same = (input.scale, input.zero_point) == (output.scale, output.zero_point)
    require(same, "Q7", f"scale and zero point are not the input's ({input.scale}, {input.zero_point})")

    def pooled(image: Array, region: Array) -> Array:
        corners = np.floor(region.astype(np.float64) + 0.5)
        down = _bin_bounds(corners[1], corners[3], height, input.shape[1])
        across = _bin_bounds(corners[0], corners[2], width, input.shape[2])
        rows = _maxima(image, down, output.zero_point)
        return _maxima(rows.swapaxes(0, 1), across, output.zero_point).swapaxes(0, 1)

    return _plan_roi(pooled, input, regions, output, height_stride, width_stride)


def _maxima(values: Array, bins: list[slice], empty: int) -> Array:
    """Return the maximum of each of `bins` along the first axis, `empty` for empty bins."""
    maxima = np.full((len(bins), *values.shape[1:]), empty, values.dtype)
    for index, bin in enumerate(bins):
        if bin.start < bin.stop:
            maxima[index] = values[bin].max(axis=0)
    return maxima


def _bin_bounds(start: np.float64, end: np.float64, count: int, dimension: int) -> list[slice]:
    """Return the pixels of each of `count` bins from `start` to `end` inclusive, clipped to the image."""
    step = np.float32(max(end - start + 1, 1)) / np.float32(count)
    edges = step * np.arange(count + 1, dtype=np.float32) + np.float32(start)
    first = np.minimum(np.floor(edges[:-1]), dimension).astype(int)
    stop = np.minimum(np.ceil(edges[1:]), dimension).astype(int)
    return list(map(slice, first.tolist(), stop.tolist()))


def _roi_declaration(code: OperationType, ratios: tuple[str, ...], in_float: Plan, in_integers: Plan) -> op.Declaration:
    sizes = (
        op.attribute("height"),
        op.attribute("width"),
        op.attribute("height_stride", "S"),
        op.attribute("width_stride", "S"),
    )
    return op.Declaration(
        code,
        since=op.V1_2,
        overloads=(
            op.overload(
                *(op.data("input"), op.data("regions", "X"), op.data("batches", op.I32)),
                *(*sizes, *map(op.attribute, ratios), op.attribute("nchw", op.BOOL)),
                level=op.V1_2,
            ),
        ),
        variants=(
            op.Variant({"T": op.F32, "X": op.F32, "S": op.FLOAT32}, op.V1_2, in_float),
            op.Variant({"T": op.F16, "X": op.F16, "S": op.FLOAT16}, op.V1_2, fp16_via_fp32(in_float)),
            *op.types_since(op.V1_2, in_integers, op.Q8, op.Q8S, X=BOXES, S=op.FLOAT32),
        ),
        shape=roi_shape,
        images=("input",),
        zero_sized=code == OperationType.ROI_ALIGN,
    )


DECLARATIONS = (
    _roi_declaration(OperationType.ROI_ALIGN, ("height_ratio", "width_ratio"), plan_align, plan_quantized_align),
    _roi_declaration(OperationType.ROI_POOLING, (), plan_pooling, plan_pooling),
)
