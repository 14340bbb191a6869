"""Operations of MediaPipe's models: landmarks and crops, and pools that remember where the maximum was.

A transformation is a matrix of 4x4 for column vectors (x, y, 0, 1); only its first two rows are used.

C1 landmarks have 2 or 3 coordinates; the matrix has 16 elements
C2 an index of a landmark exists, and there is at least one
C3 sizes and scales are positive
"""

from __future__ import annotations

import math

import numpy as np

from nnfmq.hal.extensions import TfliteOperation
from nnfmq.hal.types import PaddingScheme
from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Array, Run, Shape, Tensor
from nnfmq.operations.kernel_adapters import stateless
from nnfmq.operations.shapes import require, require_size, window_dimension
from nnfmq.operations.tflite_extension import declare

__all__ = [
    "DECLARATIONS",
    "cropped_shape",
    "landmarks_to_matrix",
    "matrix_shape",
    "plan_max_pool",
    "plan_transform_tensor",
    "plan_unpool",
    "pool_shapes",
    "transform_landmarks",
    "transformed_shape",
    "unpool_shape",
]


def _require_matrix(matrix: Shape) -> None:
    require(math.prod(matrix) == 16, "C1", f"the matrix has shape {matrix}")


def transformed_shape(landmarks: Shape, matrix: Shape, *, dimensions: int) -> Shape:
    """Return the shape of the landmarks."""
    _require_matrix(matrix)
    fits = dimensions in (2, 3) and len(landmarks) > 0 and landmarks[-1] % dimensions == 0
    require(fits, "C1", f"landmarks of shape {landmarks} with {dimensions} coordinates")
    return landmarks


def transform_landmarks(landmarks: Array, matrix: Array, *, dimensions: int) -> Array:
    """Return the landmarks with x and y transformed."""
    points = landmarks.reshape(-1, dimensions)
    rows = matrix.reshape(4, 4)
    result = points.copy()
    for axis in (0, 1):
        result[:, axis] = points[:, 0] * rows[axis, 0] + points[:, 1] * rows[axis, 1] + rows[axis, 3]
    return result.reshape(landmarks.shape)


def cropped_shape(image: Shape, matrix: Shape, *, size: Array) -> Shape:
    """Return the shape of the crop, of `size` (height, width)."""
    _require_matrix(matrix)
    extents = [int(extent) for extent in size.reshape(-1)]
    fits = len(image) == 4 and image[0] == 1 and len(extents) == 2 and min(extents) > 0
    require(fits, "C3", f"a crop of {extents[:8]} of an image of shape {image}")
    shape = (1, *extents, image[3])
    require_size(shape, 4)
    return shape


def plan_transform_tensor(image: Tensor, matrix: Tensor, *, output: Tensor, size: Array) -> Run:
    """Plan bilinear samples of the image at the transformed centers of the crop's pixels, zeros outside of it."""
    _, height, width, _ = image.shape
    out_y, out_x = (index.astype(np.float32) for index in np.indices(output.shape[1:3]))

    def run(pixels: Array, transformation: Array) -> Array:
        rows = transformation.reshape(4, 4)
        x, y = (row[0] * out_x + row[1] * out_y + (row[3] + (row[0] + row[1] - 1) / 2) for row in rows[:2])
        inside = (x >= 0) & (x <= width - 1) & (y >= 0) & (y <= height - 1)
        x, y = np.where(inside, x, 0), np.where(inside, y, 0)
        left, top = x.astype(np.intp), y.astype(np.intp)
        right, bottom = np.minimum(left + 1, width - 1), np.minimum(top + 1, height - 1)
        along, down = (x - left)[..., None], (y - top)[..., None]
        upper = (1 - along) * pixels[0, top, left] + along * pixels[0, top, right]
        lower = (1 - along) * pixels[0, bottom, left] + along * pixels[0, bottom, right]
        samples = np.where(inside[..., None], (1 - down) * upper + down * lower, 0)
        return samples.astype(np.float32).reshape(output.shape)

    return run


def matrix_shape(
    landmarks: Shape, *, subset: Array, left: int, right: int, height: int, width: int, **scales: float
) -> Shape:
    """Return the shape of a transformation."""
    count = math.prod(landmarks) // 3
    indexes = [left, right, *(int(index) for index in subset.reshape(-1))]
    inside = min(indexes) >= 0 and max(indexes) < count
    require(len(indexes) > 2 and inside, "C2", f"one of {count} landmarks")
    require(height > 0 and width > 0 and scales["scale_x"] > 0 and scales["scale_y"] > 0, "C3", "a size or scale")
    return (1, 4, 4)


def landmarks_to_matrix(
    landmarks: Array, *, subset: Array, left: int, right: int, rotation: float,
    height: int, width: int, scale_x: float, scale_y: float,
) -> Array:  # fmt: skip
    """Return the transformation from a crop of `height` and `width` to the rotated box around the subset."""
    points = landmarks.reshape(-1, 3)[:, :2].astype(np.float64)
    across = points[right] - points[left]
    angle = rotation - math.atan2(across[1], across[0])
    matrix = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    rotated = points[subset.reshape(-1)] @ matrix.T
    low, high = rotated.min(axis=0), rotated.max(axis=0)
    center = matrix.T @ ((low + high) / 2)
    scale = (high - low) * [scale_x, scale_y] / [width, height]
    result = np.eye(4)
    result[:2, :2] = matrix.T * scale
    result[:2, 3] = center - result[:2, :2] @ [width / 2, height / 2]
    return result.astype(np.float32).reshape(1, 4, 4)


_LANDMARKS_DECLARATIONS = (
    declare(
        TfliteOperation.TRANSFORM_LANDMARKS,
        op.data("landmarks"),
        op.data("matrix"),
        op.attribute("dimensions"),
        variants=op.of_types(stateless(transform_landmarks), op.F32),
        shape=transformed_shape,
    ),
    declare(
        TfliteOperation.TRANSFORM_TENSOR,
        op.data("image"),
        op.data("matrix"),
        op.attribute("size", op.I32),
        variants=op.of_types(plan_transform_tensor, op.F32),
        shape=cropped_shape,
    ),
    declare(
        TfliteOperation.LANDMARKS_TO_TRANSFORM_MATRIX,
        *(op.data("landmarks"), op.attribute("subset", op.I32), op.attribute("left"), op.attribute("right")),
        *(op.attribute("rotation", op.FLOAT32), op.attribute("height"), op.attribute("width")),
        *(op.attribute("scale_x", op.FLOAT32), op.attribute("scale_y", op.FLOAT32)),
        variants=op.of_types(stateless(landmarks_to_matrix), op.F32),
        shape=matrix_shape,
    ),
)


# ----------------------------------------------------------------------------------------------------------------------
# MAX_POOL_WITH_ARGMAX and MAX_UNPOOL: pools that remember where the maximum was, and their inverse.
#
# A position is row · filter width + column within the window, as a float with 0.1 added, which MediaPipe's models
# expect.
#
# C1 strides and filter sizes are positive; the padding scheme is SAME (1) or VALID (2) C2 the input and the positions
# are images of the same shape


_ATTRIBUTES = ("padding_scheme", "stride_width", "stride_height", "filter_width", "filter_height")


def pool_shapes(input: Shape, **window: int) -> tuple[Shape, Shape]:
    """Return the shape of the pooled image, twice."""
    require(len(input) == 4, "C2", f"the input has rank {len(input)}, an image is required")
    scheme = window["padding_scheme"]
    rows = window_dimension(input[1], window["filter_height"], window["stride_height"], 1, scheme)
    columns = window_dimension(input[2], window["filter_width"], window["stride_width"], 1, scheme)
    shape = (input[0], rows.count, columns.count, input[3])
    return shape, shape


def plan_max_pool(input: Tensor, *, output: tuple[Tensor, Tensor], **window: int) -> Run:
    """Plan a pass over the taps of the window; of equal values the first one counts."""
    scheme, (_, out_rows, out_columns, _) = window["padding_scheme"], output[0].shape
    width, height = window["filter_width"], window["filter_height"]
    rows = window_dimension(input.shape[1], height, window["stride_height"], 1, scheme)
    columns = window_dimension(input.shape[2], width, window["stride_width"], 1, scheme)
    borders = ((0, 0), (rows.padding_low, height), (columns.padding_low, width), (0, 0))

    def run(image: Array) -> tuple[Array, Array]:
        padded = np.pad(image, borders, constant_values=-np.inf)
        best = np.full(output[0].shape, np.finfo(np.float32).min, np.float32)
        where = np.zeros(output[1].shape, np.float32)
        for tap in range(height * width):
            y, x = divmod(tap, width)
            stop_y, stop_x = y + rows.stride * out_rows, x + columns.stride * out_columns
            values = padded[:, y : stop_y : rows.stride, x : stop_x : columns.stride]
            better = values > best
            best[better] = values[better]
            where[better] = tap
        return best, where + np.float32(0.1)

    return run


def unpool_shape(input: Shape, positions: Shape, **window: int) -> Shape:
    """Return the shape of the image, larger by the size of the window."""
    require(len(input) == 4 and input == positions, "C2", f"the input is {input}, the positions are {positions}")
    require(min(window[name] for name in _ATTRIBUTES) > 0, "C1", f"the window is {window}")
    known = window["padding_scheme"] in (PaddingScheme.SAME, PaddingScheme.VALID)
    require(known, "C1", f"padding scheme {window['padding_scheme']}")
    shape = (input[0], input[1] * window["filter_height"], input[2] * window["filter_width"], input[3])
    require_size(shape, 4)
    return shape


def plan_unpool(input: Tensor, positions: Tensor, *, output: Tensor, **window: int) -> Run:
    """Plan an image of zeros with the values at their positions; those outside of it are left out."""
    _, height, width, _ = output.shape
    strides, sizes = ((window[f"{kind}_height"], window[f"{kind}_width"]) for kind in ("stride", "filter"))
    paddings = [
        max((extent - 1) * stride + size - whole, 0) // 2
        for extent, stride, size, whole in zip(input.shape[1:3], strides, sizes, (height, width), strict=True)
    ]
    batch, in_y, in_x, channel = np.indices(input.shape, sparse=True)

    def run(image: Array, places: Array) -> Array:
        result = np.zeros(output.shape, output.dtype)
        taps = np.clip(np.nan_to_num(places), 0, 1 << 24).astype(np.int64)
        y = in_y * strides[0] - paddings[0] + taps // sizes[1]
        x = in_x * strides[1] - paddings[1] + taps % sizes[1]
        inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
        batches, channels = (np.broadcast_to(index, image.shape)[inside] for index in (batch, channel))
        result[batches, y[inside], x[inside], channels] = image[inside]
        return result

    return run


_CUSTOM_IMAGES_DECLARATIONS = (
    declare(
        TfliteOperation.MAX_POOL_WITH_ARGMAX,
        op.data("input"),
        *map(op.attribute, _ATTRIBUTES),
        variants=op.of_types(plan_max_pool, op.F32),
        shape=pool_shapes,
        outputs=("T", "T"),
    ),
    declare(
        TfliteOperation.MAX_UNPOOL,
        op.data("input"),
        op.data("positions"),
        *map(op.attribute, _ATTRIBUTES),
        variants=op.of_types(plan_unpool, op.F32),
        shape=unpool_shape,
    ),
)

DECLARATIONS = (*_LANDMARKS_DECLARATIONS, *_CUSTOM_IMAGES_DECLARATIONS)
