"""BOX_WITH_NMS_LIMIT and DETECTION_POSTPROCESSING: non-maximum suppression (NMS) of scored boxes.

Class 0 is the background and never detected. Of boxes with equal scores the first one comes first; TFLite leaves that
undefined. X1 to X5 are explained there.

BOX_WITH_NMS_LIMIT         C1 the kernel is 0 (hard), 1 (linear) or 2 (gaussian)   C2 batch indices ascend from 0
DETECTION_POSTPROCESSING   C3 scales are positive   C4 thresholds are not negative   C5 limits are positive
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np

from nnfmq.hal.types import OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations.bounding_boxes import BOXES, hard_suppression, overlaps, plan_boxes, require_ordered
from nnfmq.operations.declaration import Array, Shape
from nnfmq.operations.shapes import DATA_DEPENDENT, require

Decay: TypeAlias = Callable[[Array], Array]  # overlaps with a better box -> factors of the scores
Suppression: TypeAlias = Callable[[Array, Array], tuple[Array, Array]]  # scores and boxes -> scores and indices kept


def nms_shape(scores: Shape, boxes: Shape, batches: Shape, *, kernel: int, **_: object) -> tuple[Shape, ...]:
    """Return the shapes of scores, boxes, classes and batch indices; their count depends on the data."""
    require(kernel in _DECAYS, "C1", f"kernel {kernel}, allowed are 0, 1 and 2")
    ranks = (len(scores), len(boxes), len(batches))
    require(ranks == (2, 2, 1), "X5", f"ranks are {ranks}, required are (2, 2, 1)")
    agree = boxes == (scores[0], 4 * scores[1]) and batches[0] == scores[0] and scores[1] > 1
    require(agree, "X5", f"scores {scores} (of 2 classes or more), boxes {boxes}, batches {batches}")
    return (DATA_DEPENDENT,), (DATA_DEPENDENT, 4), (DATA_DEPENDENT,), (DATA_DEPENDENT,)


def box_with_nms_limit(
    scores: Array,
    boxes: Array,
    batches: Array,
    *,
    score_threshold: float,
    limit: int,
    kernel: int,
    iou_threshold: float,
    sigma: float,
    nms_score_threshold: float,
) -> tuple[Array, Array, Array, Array]:
    """Return scores (decayed by better boxes), boxes, classes and batch indices, ordered by image, class and score."""
    boxes = boxes.reshape(*scores.shape, 4)
    require_ordered(boxes)
    require(bool(np.all(np.diff(batches, prepend=0) >= 0)), "C2", "batch indices are negative or do not ascend")
    decay = partial(_DECAYS[kernel], iou_threshold, sigma)
    suppress = partial(soft_suppression, decay, nms_score_threshold, limit)
    nothing = np.empty(0, np.int64)
    found = [(scores[:0, 0], nothing, nothing)]
    for batch in np.unique(batches):
        first, stop = np.searchsorted(batches, [batch, batch + 1])
        rated, rows, classes = detected(scores[first:stop], boxes[first:stop], score_threshold, limit, suppress)
        by_class = np.argsort(classes, kind="stable")
        found.append((rated[by_class], rows[by_class] + first, classes[by_class]))
    rated, rows, classes = (np.concatenate(part) for part in zip(*found, strict=True))
    return rated, boxes[rows, classes], classes.astype(np.int32), batches[rows]


def detected(
    scores: Array, boxes: Array, threshold: float, limit: int, suppress: Suppression
) -> tuple[Array, Array, Array]:
    """Return scores, rows and classes of the best `limit` (< 0: all) of scores (rows, classes) above `threshold`.

    `suppress` is called for each class except the background; boxes are (rows, classes, 4).
    """
    found = []
    for number in range(1, scores.shape[1]):
        candidates = np.flatnonzero(scores[:, number] > threshold)
        rated, kept = suppress(scores[candidates, number], boxes[candidates, number])
        found.append((rated, candidates[kept], np.full(len(kept), number)))
    rated, rows, classes = (np.concatenate(part) for part in zip(*found, strict=True))
    best = np.argsort(-rated, kind="stable")[: None if limit < 0 else limit]
    return rated[best], rows[best], classes[best]


def soft_suppression(decay: Decay, threshold: float, limit: int, scores: Array, boxes: Array) -> tuple[Array, Array]:
    """Return the decayed scores and the indices of at most `limit` boxes (< 0: all), best first.

    In each step, take the best box, decay the scores of the others and drop those below `threshold`.
    """
    scores, left, chosen = scores.copy(), np.arange(len(scores)), list[np.int64]()
    while len(left) and (limit < 0 or len(chosen) < limit):
        best = left[np.argmax(scores[left])]
        chosen.append(best)
        left = left[left != best]
        scores[left] *= decay(overlaps(boxes[best], boxes[left]))
        left = left[~(scores[left] < threshold)]
    kept = np.array(chosen, np.int64)
    return scores[kept], kept


def _hard(threshold: float, sigma: float, overlap: Array) -> Array:
    return np.where(overlap < threshold, np.float32(1), np.float32(0))


def _linear(threshold: float, sigma: float, overlap: Array) -> Array:
    return np.where(overlap < threshold, np.float32(1), np.float32(1) - overlap)


def _gaussian(threshold: float, sigma: float, overlap: Array) -> Array:
    result: Array = np.exp(-overlap * overlap / np.float32(sigma))
    return result


_DECAYS: dict[int, Callable[[float, float, Array], Array]] = {0: _hard, 1: _linear, 2: _gaussian}


def postprocessing_shape(
    scores: Shape,
    deltas: Shape,
    anchors: Shape,
    *,
    regular_nms: bool,
    limit: int,
    classes_per_detection: int,
    limit_per_class: int,
    score_threshold: float,
    iou_threshold: float,
    background_in_label: bool,
    **scales: float,
) -> tuple[Shape, ...]:
    """Return the shapes of scores, boxes, classes and counts; unused entries are 0."""
    ranks = (len(scores), len(deltas), len(anchors))
    require(ranks == (3, 3, 2), "X5", f"ranks are {ranks}, required are (3, 3, 2)")
    agree = deltas[:2] == scores[:2] and anchors == (scores[1], 4) and deltas[2] >= 4 and scores[2] > 1
    require(agree, "X5", f"scores {scores} (of 2 classes or more), deltas {deltas}, anchors {anchors}")
    require(all(scale > 0 for scale in scales.values()), "C3", f"scales are {scales}, all must be positive")
    thresholds = (score_threshold, iou_threshold)
    require(min(thresholds) >= 0, "C4", f"score and overlap thresholds are {thresholds}, they must not be negative")
    per = limit_per_class if regular_nms else classes_per_detection
    require(limit > 0 and per > 0, "C5", f"limit {limit}, limit per class or detection {per}; both must be positive")
    count = limit if regular_nms else limit * classes_per_detection
    return (scores[0], count), (scores[0], count, 4), (scores[0], count), (scores[0],)


def detection_postprocessing(
    scores: Array, deltas: Array, anchors: Array, *, scale_y: float, scale_x: float, scale_h: float, scale_w: float,
    regular_nms: bool, limit: int, classes_per_detection: int, limit_per_class: int, score_threshold: float,
    iou_threshold: float, background_in_label: bool,
) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    """Return scores, boxes (y1, x1, y2, x2), classes and the count of detections of each image."""
    count = limit if regular_nms else limit * classes_per_detection
    images = len(scores)
    rated, boxes = np.zeros((images, count), np.float32), np.zeros((images, count, 4), np.float32)
    classes, counts = np.zeros((images, count), np.int32), np.zeros(images, np.int32)
    for image in range(images):
        candidates = decoded(anchors, deltas[image], np.array([scale_y, scale_x, scale_h, scale_w], np.float32))
        if regular_nms:
            kept = _regular_nms(scores[image], candidates, score_threshold, iou_threshold, limit, limit_per_class)
        else:
            kept = _fast_nms(scores[image], candidates, score_threshold, iou_threshold, limit, classes_per_detection)
        found = len(kept[0])
        rated[image, :found], boxes[image, :found] = kept[0], candidates[kept[1]]
        classes[image, :found], counts[image] = kept[2] - (not background_in_label), found
    return rated, boxes, classes, counts


def decoded(anchors: Array, deltas: Array, scales: Array) -> Array:
    """Move and scale anchors (y, x, height, width) by deltas; return corners (y1, x1, y2, x2)."""
    centers = anchors[:, :2] + anchors[:, 2:] * deltas[:, :2] / scales[:2]
    halves = anchors[:, 2:] * np.exp(deltas[:, 2:4] / scales[2:]) * np.float32(0.5)
    return np.concatenate([centers - halves, centers + halves], axis=1)


def _regular_nms(
    scores: Array, boxes: Array, score_threshold: float, iou_threshold: float, limit: int, limit_per_class: int
) -> tuple[Array, Array, Array]:
    """Suppress boxes separately for each class. Return scores, numbers of boxes and classes of the remaining ones."""

    def suppress(rated: Array, candidates: Array) -> tuple[Array, Array]:
        kept = hard_suppression(rated, candidates, iou_threshold, limit_per_class)
        return rated[kept], kept

    by_class = np.broadcast_to(boxes[:, None], (*scores.shape, 4))
    return detected(scores, by_class, score_threshold, limit, suppress)


def _fast_nms(
    scores: Array, boxes: Array, score_threshold: float, iou_threshold: float, limit: int, classes_per_detection: int
) -> tuple[Array, Array, Array]:
    """Suppress by the best score of each box. Return as `_regular_nms`, with the best classes of each remaining box."""
    best = scores[:, 1:].max(axis=1)
    candidates = np.flatnonzero(best > score_threshold)
    rows = candidates[hard_suppression(best[candidates], boxes[candidates], iou_threshold, limit)]
    classes = 1 + np.argsort(-scores[rows, 1:], axis=1, kind="stable")[:, :classes_per_detection]
    return scores[rows[:, None], classes].ravel(), np.repeat(rows, classes.shape[1]), classes.ravel()


_nms_plan = plan_boxes(box_with_nms_limit, boxes=(1,), box_outputs=(1,), keeps_scores=True)
_postprocessing_plan = plan_boxes(detection_postprocessing, boxes=())

DECLARATIONS = (
    op.Declaration(
        OperationType.BOX_WITH_NMS_LIMIT,
        since=op.V1_2,
        overloads=(
            op.overload(
                *(op.data("scores"), op.data("boxes", "X"), op.data("batches", op.I32)),
                *(op.attribute("score_threshold", "S"), op.attribute("limit"), op.attribute("kernel")),
                *(
                    op.attribute("iou_threshold", "S"),
                    op.attribute("sigma", "S"),
                    op.attribute("nms_score_threshold", "S"),
                ),
                level=op.V1_2,
            ),
        ),
        variants=(
            op.Variant({"T": op.F32, "X": op.F32, "S": op.FLOAT32}, op.V1_2, _nms_plan),
            op.Variant({"T": op.F16, "X": op.F16, "S": op.FLOAT16}, op.V1_2, _nms_plan),
            *op.types_since(op.V1_2, _nms_plan, op.Q8, op.Q8S, X=BOXES, S=op.FLOAT32),
        ),
        shape=nms_shape,
        outputs=("T", "X", op.I32, op.I32),
        zero_sized=True,
    ),
    op.Declaration(
        OperationType.DETECTION_POSTPROCESSING,
        since=op.V1_2,
        overloads=(
            op.overload(
                *(op.data("scores"), op.data("deltas"), op.data("anchors")),
                *(op.attribute(name, "S") for name in ("scale_y", "scale_x", "scale_h", "scale_w")),
                *(op.attribute("regular_nms", op.BOOL), op.attribute("limit"), op.attribute("classes_per_detection")),
                *(
                    op.attribute("limit_per_class"),
                    op.attribute("score_threshold", "S"),
                    op.attribute("iou_threshold", "S"),
                ),
                op.attribute("background_in_label", op.BOOL),
                level=op.V1_2,
            ),
        ),
        variants=(
            op.Variant({"T": op.F32, "S": op.FLOAT32}, op.V1_2, _postprocessing_plan),
            op.Variant({"T": op.F16, "S": op.FLOAT16}, op.V1_2, _postprocessing_plan),
        ),
        shape=postprocessing_shape,
        outputs=("T", "T", op.I32, op.I32),
    ),
)
