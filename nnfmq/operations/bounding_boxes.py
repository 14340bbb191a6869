"""AXIS_ALIGNED_BBOX_TRANSFORM, GENERATE_PROPOSALS, and functions on boxes shared with `detection`.

A box is (x1, y1, x2, y2). Everything is computed in float32 on private copies (`kernel_adapters.dequantized`), with
sums in TFLite's order, so that 16-bit box coordinates are bit-exact. Boxes of equal score keep their order, which
TFLite leaves undefined. Ids starting with X are shared by the operations on boxes:

    X1 quantized boxes and image sizes have scale 0.125 and zero point 0
    X2 x1 ≤ x2 and y1 ≤ y2                     X3 a batch index is that of an image
    X4 scores keep their scale and zero point  X5 shapes agree on the number of boxes, classes and images
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from nnfmq.hal.types import OperandType, OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Array, Plan, Run, Shape, Tensor
from nnfmq.operations.kernel_adapters import dequantized
from nnfmq.operations.shapes import DATA_DEPENDENT, require

BOXES, SIGNED_BOXES = OperandType.TENSOR_QUANT16_ASYMM, OperandType.TENSOR_QUANT16_SYMM


def plan_boxes(
    kernel: Callable[..., Any], *, boxes: tuple[int, ...], box_outputs: tuple[int, ...] = (), keeps_scores: bool = False
) -> Plan:
    """Plan `kernel` in float32; `boxes` and `box_outputs` are the positions of arrays of boxes (X1)."""

    def plan(*tensors: Tensor, output: Any, **attributes: Any) -> Run:
        outputs = output if isinstance(output, tuple) else (output,)
        for tensor in (*(tensors[i] for i in boxes), *(outputs[i] for i in box_outputs)):
            require_box_scale(tensor)
        if keeps_scores:
            first, actual = (tensors[0].scale, tensors[0].zero_point), (outputs[0].scale, outputs[0].zero_point)
            require(first == actual, "X4", f"output scores have scale and zero point {actual}, input scores {first}")
        return partial(kernel, **attributes)

    return dequantized(plan)


def require_box_scale(tensor: Tensor) -> None:
    """Require that boxes are floats or have scale 0.125 and zero point 0 (X1)."""
    actual = (tensor.scale, tensor.zero_point)
    require(actual in ((0, 0), (0.125, 0)), "X1", f"boxes have scale and zero point {actual}, required is (0.125, 0)")


def require_ordered(boxes: Array) -> None:
    """Require that boxes (..., 4) have x1 ≤ x2 and y1 ≤ y2 (X2). NaN is rejected too."""
    ordered = bool(np.all(boxes[..., :2] <= boxes[..., 2:]))
    require(ordered, "X2", "a box has x2 < x1 or y2 < y1")


def require_batches(batches: Array, count: int) -> None:
    """Require that batch indices name one of `count` images (X3)."""
    known = bool(np.all((batches >= 0) & (batches < count)))
    require(known, "X3", f"a batch index is outside [0, {count})")


def transformed(boxes: Array, deltas: Array, heights: Array, widths: Array) -> Array:
    """Move and scale boxes (..., 4) by deltas (dx, dy, dw, dh) relative to their sizes, and clip them to the image."""
    low, high = boxes[..., :2], boxes[..., 2:]
    sizes, centers = high - low, (low + high) / np.float32(2)
    new_sizes = np.exp(deltas[..., 2:]) * sizes
    new_centers = centers + deltas[..., :2] * sizes
    half = new_sizes / np.float32(2)
    limits = np.stack([widths, heights, widths, heights], axis=-1)
    corners = np.concatenate([new_centers - half, new_centers + half], axis=-1)
    result: Array = np.minimum(np.maximum(corners, np.float32(0)), limits)
    return result


def overlaps(box: Array, others: Array) -> Array:
    """Return intersection over union of `box` with each of `others`; NaN if neither has an area."""
    low, high = np.maximum(box[:2], others[:, :2]), np.minimum(box[2:], others[:, 2:])
    common = np.prod(np.maximum(high - low, np.float32(0)), axis=1)
    result: Array = common / (np.prod(box[2:] - box[:2]) + np.prod(others[:, 2:] - others[:, :2], axis=1) - common)
    return result


def hard_suppression(scores: Array, boxes: Array, threshold: float, limit: int | None) -> Array:
    """Return the indices of boxes, best first, that overlap no better box by `threshold` or more; at most `limit`."""
    left, chosen = np.argsort(-scores, kind="stable"), list[np.int64]()
    while len(left) and (limit is None or len(chosen) < limit):
        best, left = left[0], left[1:]
        chosen.append(best)
        left = left[~(overlaps(boxes[best], boxes[left]) >= threshold)]
    return np.array(chosen, np.int64)


def transform_shape(boxes: Shape, deltas: Shape, batches: Shape, image_info: Shape) -> Shape:
    """Return the deltas' shape, (boxes, 4 · classes)."""
    ranks = (len(boxes), len(deltas), len(batches), len(image_info))
    require(ranks == (2, 2, 1, 2), "X5", f"ranks are {ranks}, required are (2, 2, 1, 2)")
    whole = deltas[1] > 0 and deltas[1] % 4 == 0 and boxes[1] == 4 and image_info[1] == 2 and image_info[0] > 0
    agree = boxes[0] == deltas[0] == batches[0]
    require(whole and agree, "X5", f"boxes {boxes}, deltas {deltas}, batches {batches}, image info {image_info}")
    return deltas


def box_transform(boxes: Array, deltas: Array, batches: Array, image_info: Array) -> Array:
    """Apply the deltas of each class to each box, clipped to its image (height, width)."""
    require_ordered(boxes)
    require_batches(batches, len(image_info))
    sizes = image_info[batches][:, None]
    moved = transformed(
        boxes[:, None], deltas.reshape(len(boxes), deltas.shape[1] // 4, 4), sizes[..., 0], sizes[..., 1]
    )
    return moved.reshape(deltas.shape)


def proposals_shape(scores: Shape, deltas: Shape, anchors: Shape, image_info: Shape, **_: object) -> tuple[Shape, ...]:
    """Return the shapes of scores, boxes and batch indices; their count depends on the data."""
    require(len(scores) == 4, "X5", f"scores have shape {scores}, rank 4 is required")
    count = scores[3]
    agree = deltas == (*scores[:3], 4 * count) and anchors == (count, 4) and image_info == (scores[0], 2)
    require(agree, "X5", f"scores {scores}, deltas {deltas}, anchors {anchors}, image info {image_info}")
    return (DATA_DEPENDENT,), (DATA_DEPENDENT, 4), (DATA_DEPENDENT,)


def generate_proposals(
    scores: Array,
    deltas: Array,
    anchors: Array,
    image_info: Array,
    *,
    height_stride: float,
    width_stride: float,
    pre_nms_limit: int,
    post_nms_limit: int,
    iou_threshold: float,
    min_size: float,
) -> tuple[Array, Array, Array]:
    """Return scores, boxes and batch indices of the remaining anchors of all pixels, best first in each image."""
    require_ordered(anchors)
    regions = anchors_at_pixels(anchors, scores.shape[1:3], height_stride, width_stride)
    found = []
    for image, (height, width) in enumerate(image_info):
        moved = transformed(regions, deltas[image].reshape(-1, 4), height, width)
        candidates = _candidates(scores[image].ravel(), moved, pre_nms_limit, min_size, height, width)
        rated, boxes = scores[image].ravel()[candidates], moved[candidates]
        kept = hard_suppression(rated, boxes, iou_threshold, post_nms_limit if post_nms_limit > 0 else None)
        found.append((rated[kept], boxes[kept], np.full(len(kept), image, np.int32)))
    rated, boxes, batches = (np.concatenate(part) for part in zip(*found, strict=True))
    return rated, boxes, batches


def anchors_at_pixels(anchors: Array, dimensions: Shape, height_stride: float, width_stride: float) -> Array:
    """Return the anchors shifted to each pixel of an image, (height · width · anchors, 4)."""
    down = np.arange(dimensions[0], dtype=np.float32) * np.float32(height_stride)
    across = np.arange(dimensions[1], dtype=np.float32) * np.float32(width_stride)
    grid = np.broadcast_arrays(across, down[:, None])
    shifts = np.stack([*grid, *grid], axis=-1)
    result: Array = (shifts[:, :, None] + anchors).reshape(-1, 4)
    return result


def _candidates(scores: Array, boxes: Array, limit: int, min_size: float, height: float, width: float) -> Array:
    """Return the indices of the best `limit` boxes (≤ 0: all), without small ones and those centered off the image."""
    chosen = np.arange(len(scores))
    if 0 < limit < len(scores):
        chosen = np.argsort(-scores, kind="stable")[:limit]
    low, sizes = boxes[chosen, :2], boxes[chosen, 2:] - boxes[chosen, :2]
    centers = low + sizes / np.float32(2)
    inside = (centers[:, 0] < width) & (centers[:, 1] < height)
    return chosen[(sizes > min_size).all(axis=1) & inside]


_transform_plan = plan_boxes(box_transform, boxes=(0, 3), box_outputs=(0,))
_proposals_plan = plan_boxes(generate_proposals, boxes=(2, 3), box_outputs=(1,), keeps_scores=True)

DECLARATIONS = (
    op.Declaration(
        OperationType.AXIS_ALIGNED_BBOX_TRANSFORM,
        since=op.V1_2,
        overloads=(
            op.overload(
                op.data("boxes", "X"),
                op.data("deltas"),
                op.data("batches", op.I32),
                op.data("image_info", "X"),
                level=op.V1_2,
            ),
        ),
        variants=(
            op.Variant({"T": op.F32, "X": op.F32}, op.V1_2, _transform_plan),
            op.Variant({"T": op.F16, "X": op.F16}, op.V1_2, _transform_plan),
            *op.types_since(op.V1_2, _transform_plan, op.Q8, op.Q8S, X=BOXES),
        ),
        shape=transform_shape,
        outputs=("X",),
        zero_sized=True,
    ),
    op.Declaration(
        OperationType.GENERATE_PROPOSALS,
        since=op.V1_2,
        overloads=(
            op.overload(
                *(op.data("scores"), op.data("deltas"), op.data("anchors", "A"), op.data("image_info", "X")),
                *(op.attribute("height_stride", "S"), op.attribute("width_stride", "S")),
                *(op.attribute("pre_nms_limit"), op.attribute("post_nms_limit")),
                *(op.attribute("iou_threshold", "S"), op.attribute("min_size", "S"), op.attribute("nchw", op.BOOL)),
                level=op.V1_2,
            ),
        ),
        variants=(
            op.Variant({"T": op.F32, "A": op.F32, "X": op.F32, "S": op.FLOAT32}, op.V1_2, _proposals_plan),
            op.Variant({"T": op.F16, "A": op.F16, "X": op.F16, "S": op.FLOAT16}, op.V1_2, _proposals_plan),
            *op.types_since(op.V1_2, _proposals_plan, op.Q8, op.Q8S, A=SIGNED_BOXES, X=BOXES, S=op.FLOAT32),
        ),
        shape=proposals_shape,
        outputs=("T", "X", op.I32),
        images=("scores", "deltas"),
        image_outputs=False,
    ),
)
