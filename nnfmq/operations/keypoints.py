"""HEATMAP_MAX_KEYPOINT: the subpixel position of each heatmap's maximum in its box.

A quadratic Taylor polynomial around the maximum, from its 3 x 3 pixels (mirrored at the borders), refines the position.
Everything is computed in float32. X1 and X2 are explained in `bounding_boxes`.

    C1 heatmaps (boxes, size, size, keypoints) are square, of size 2 or more     C2 boxes have shape (boxes, 4)
"""

from __future__ import annotations

from functools import partial

import numpy as np

from nnfmq.hal.types import OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations.bounding_boxes import BOXES, plan_boxes, require_ordered
from nnfmq.operations.declaration import Array, Shape
from nnfmq.operations.shapes import require

_MAX_SHIFT = np.float32(1.5)


def keypoints_shape(heatmap: Shape, boxes: Shape) -> tuple[Shape, Shape]:
    """Return the shapes of scores and of keypoints (x, y)."""
    square = len(heatmap) == 4 and heatmap[1] == heatmap[2] >= 2
    require(square, "C1", f"heatmap {heatmap} must have rank 4 and be square, of at least 2 x 2 pixels")
    require(boxes == (heatmap[0], 4), "C2", f"boxes have shape {boxes}, required is ({heatmap[0]}, 4)")
    return (heatmap[0], heatmap[3]), (heatmap[0], heatmap[3], 2)


def max_keypoints(heatmap: Array, boxes: Array, *, tolerance: float) -> tuple[Array, Array]:
    """Return scores (boxes, keypoints) and keypoints (boxes, keypoints, (x, y)) in the image of the boxes."""
    require_ordered(boxes)
    count, size, _, keypoints = heatmap.shape
    highest = np.argmax(heatmap.reshape(count, size * size, keypoints), axis=1)
    row, column = np.divmod(highest, size)
    shift, score = refine_maximum(_neighbourhood(heatmap, row, column), np.float32(tolerance))
    position = np.stack([column, row], axis=-1).astype(np.float32) + shift + np.float32(0.5)
    low, high = boxes[:, None, :2], boxes[:, None, 2:]
    return score, position / np.float32(size) * (high - low) + low


def _neighbourhood(heatmap: Array, row: Array, column: Array) -> Array:
    """Return the 3 x 3 pixels around (row, column) of each box and keypoint, (3, 3, boxes, keypoints)."""
    count, size, _, keypoints = heatmap.shape
    around = np.arange(-1, 2)[:, None, None]
    rows, columns = (_mirrored(index + around, size) for index in (row, column))
    box, keypoint = np.ogrid[:count, :keypoints]
    pixels: Array = heatmap[box, rows[:, None], columns[None], keypoint]
    return pixels


def _mirrored(indexes: Array, size: int) -> Array:
    """Return indexes from -1 to `size`, with -1 and `size` mirrored at the first and the last pixel."""
    inside = np.where(indexes < 0, 1, indexes)
    return np.where(inside >= size, size - 2, inside)


def refine_maximum(grid: Array, tolerance: np.float32) -> tuple[Array, Array]:
    """Return the shift (..., (x, y)) from the middle of `grid` to the polynomial's extremum, and its value there.

    The shift is 0 if the Hessian is nearly singular, and at most 1.5 pixels.
    """
    two, middle = np.float32(2), grid[1, 1]
    b = -np.stack([grid[1, 2] - grid[1, 0], grid[2, 1] - grid[0, 1]]) / two
    a_xx = grid[1, 0] - two * middle + grid[1, 2]
    a_yy = grid[0, 1] - two * middle + grid[2, 1]
    a_xy = (grid[2, 2] - grid[2, 0] - grid[0, 2] + grid[0, 0]) / np.float32(4)
    determinant = a_xx * a_yy - a_xy * a_xy
    singular = np.abs(determinant) < tolerance + tolerance * (a_xx * a_yy)
    solved = np.stack([a_yy * b[0] - a_xy * b[1], a_xx * b[1] - a_xy * b[0]]) / determinant
    shift = np.where(singular, np.float32(0), solved)
    longest = np.abs(shift).max(axis=0)
    x, y = np.where(longest > _MAX_SHIFT, shift * (_MAX_SHIFT / longest), shift)
    quadratic = (a_xx * x + a_xy * y) * x + (a_xy * x + a_yy * y) * y
    value = middle - b[0] * x - b[1] * y + quadratic / two
    return np.stack([x, y], axis=-1), np.where(singular, middle, value)


_plan = plan_boxes(partial(max_keypoints, tolerance=1e-5), boxes=(1,), box_outputs=(1,))
_plan_half = plan_boxes(partial(max_keypoints, tolerance=1e-3), boxes=(1,), box_outputs=(1,))

DECLARATIONS = (
    op.Declaration(
        OperationType.HEATMAP_MAX_KEYPOINT,
        since=op.V1_2,
        overloads=(
            op.overload(op.data("heatmap"), op.data("boxes", "X"), op.attribute("nchw", op.BOOL), level=op.V1_2),
        ),
        variants=(
            op.Variant({"T": op.F32, "X": op.F32}, op.V1_2, _plan),
            op.Variant({"T": op.F16, "X": op.F16}, op.V1_2, _plan_half),
            *op.types_since(op.V1_2, _plan, op.Q8, op.Q8S, X=BOXES),
        ),
        shape=keypoints_shape,
        outputs=("T", "X"),
        images=("heatmap",),
        image_outputs=False,
    ),
)
