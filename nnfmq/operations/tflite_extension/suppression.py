"""NON_MAX_SUPPRESSION: the best boxes that overlap no better one, with scores that decay by the overlap.

Boxes are (y1, x1, y2, x2), corners in any order. The results have a fixed length; after the count of boxes they are 0.

C1 there is one score for each box, and each threshold is one number
C2 the limit is not negative, and the decay not below 0
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from nnfmq.hal.extensions import TfliteOperation
from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Array, Shape
from nnfmq.operations.kernel_adapters import stateless
from nnfmq.operations.shapes import require, require_size
from nnfmq.operations.tflite_extension import declare


def suppression_shape(boxes: Shape, scores: Shape, *thresholds: Shape, limit: Any) -> tuple[Shape, Shape, Shape]:
    """Return the shapes of indexes, scores and count."""
    fits = len(boxes) == 2 and boxes[1] == 4 and scores == boxes[:1] and all(t in ((), (1,)) for t in thresholds)
    require(fits, "C1", f"boxes {boxes}, scores {scores}, thresholds {thresholds}")
    count = int(np.asarray(limit).reshape(-1)[0])
    require(count >= 0, "C2", f"a limit of {count} boxes")
    require_size((count,), 4)
    return (count,), (count,), (1,)


def suppressed(
    boxes: Array, scores: Array, overlap: Array, threshold: Array, sigma: Array, *, limit: Any
) -> tuple[Array, Array, Array]:
    """Return indexes and scores of the remaining boxes, best first, and their count."""
    count = int(np.asarray(limit).reshape(-1)[0])
    most, least, decay = (float(value.reshape(-1)[0]) for value in (overlap, threshold, sigma))
    require(decay >= 0, "C2", f"a decay of {decay}")
    low, high = np.minimum(boxes[:, :2], boxes[:, 2:]), np.maximum(boxes[:, :2], boxes[:, 2:])
    queue = [(-score, index, 0) for index, score in enumerate(scores) if score > least]
    heapq.heapify(queue)
    kept: list[tuple[int, Any]] = []
    while queue and len(kept) < count:
        negative, index, compared = heapq.heappop(queue)
        others = [other for other, _ in kept[compared:][::-1]]
        score = _decayed(-negative, _overlaps(low, high, index, others), most, least, decay)
        if score == -negative:
            kept.append((index, score))
        elif score > least:
            heapq.heappush(queue, (-score, index, len(kept)))
    indexes, rated = np.zeros(count, np.int32), np.zeros(count, np.float32)
    for position, (index, score) in enumerate(kept):
        indexes[position], rated[position] = index, score
    return indexes, rated, np.array([len(kept)], np.int32)


def _decayed(score: Any, overlaps: Array, most: float, least: float, decay: float) -> Any:
    """Return a score after the overlaps with better boxes; -inf if one is too large."""
    for overlap in overlaps:
        if overlap >= most:
            return np.float32(-np.inf)
        if decay > 0:
            score = np.float32(score * np.exp(np.float32(-0.5 / decay) * overlap * overlap))
            if score <= least:
                break
    return score


def _overlaps(low: Array, high: Array, index: int, others: list[int]) -> Array:
    """Return intersection over union of one box with others; 0 for a box without area."""
    areas = np.prod(high - low, axis=1)
    shared = np.prod(
        np.maximum(np.minimum(high[index], high[others]) - np.maximum(low[index], low[others]), 0), axis=-1
    )
    union = areas[index] + areas[others] - shared
    empty = (areas[index] <= 0) | (areas[others] <= 0)
    result: Array = np.where(empty, np.float32(0), shared / np.where(empty, np.float32(1), union))
    return result


DECLARATIONS = (
    declare(
        TfliteOperation.NON_MAX_SUPPRESSION,
        *(op.data("boxes"), op.data("scores"), op.attribute("limit", op.I32)),
        *(op.data("overlap"), op.data("threshold"), op.data("sigma")),
        variants=op.of_types(stateless(suppressed), op.F32),
        shape=suppression_shape,
        outputs=(op.I32, "T", op.I32),
    ),
)
