"""Detections and hashes: LSH_PROJECTION, and DETECTION_POSTPROCESSING, which is a custom operator of TFLite."""

from __future__ import annotations

from typing import Any

import numpy as np
from flatbuffers import flexbuffers

from nnfmq.hal.types import Operand, OperandType, OperationType
from support.by_name import Use
from support.litert import by_litert
from support.one_result import results_of
from support.oracles import FLOAT, TYPES, Argument, Array, Case, Draw, Listed

F32, I32 = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_INT32


def floats(values: Any) -> Argument:
    """Return an argument of TENSOR_FLOAT32."""
    array = np.asarray(values, np.float32)
    return Operand(F32, array.shape), array


def projection(draw: Draw) -> Case:
    """Build LSH_PROJECTION: dense with weights, or sparse without them."""
    seeds, argument = draw.rng.uniform(0, 1, draw.shape(2)).astype(np.float32), draw.tensor(draw.shape(2, 9))
    weights = draw.rng.normal(0, 1, (argument[1].shape[0],)).astype(np.float32) if draw.truth() else None
    output = Operand(I32, (len(seeds) if weights is None else seeds.size,))
    values = {"seeds": seeds, "input": argument[1], "weights": weights, "type": 3 if weights is None else 2}
    scale = {"input": (argument[0].scale, argument[0].zero_point)}
    use = Use(OperationType.LSH_PROJECTION, values, 1, first_type=TYPES[draw.dtype], quantization=scale)
    feeds = [floats(seeds), argument, *([] if weights is None else [floats(weights)])]
    options = {"Type": 1 if weights is None else 2}
    return Case(use.run, lambda: by_litert("LSH_PROJECTION", feeds, [output], "LSHProjectionOptions", options))


def postprocessing(draw: Draw) -> Case:
    """Build DETECTION_POSTPROCESSING of one image. TFLite counts boxes, each with all its classes; the HAL detections.

    Only what was detected is compared: TFLite leaves the rest as it was.
    """
    count, classes, regular = draw.below(1, 20), draw.below(1, 5), draw.truth()
    scales = dict(zip(("y_scale", "x_scale", "h_scale", "w_scale"), (10.0, 10.0, 5.0, 5.0), strict=True))
    limit, each, per_class = draw.below(1, 9), draw.below(1, classes + 1), draw.below(1, 9)
    least, overlap = draw.real(0.1, 0.5), draw.real(0.2, 0.8)
    scores = draw.rng.random((1, count, classes + 1)).astype(np.float32)
    deltas = draw.rng.normal(0, 1, (1, count, draw.below(4, 7))).astype(np.float32)
    anchors = np.concatenate([draw.rng.uniform(0, 1, (count, 2)), draw.rng.uniform(0.5, 1, (count, 2))], axis=1)
    data, rows = [floats(scores), floats(deltas), floats(anchors)], limit if regular else limit * each
    rest = [*scales.values(), regular, limit, each, per_class, least, overlap, False]
    options: dict[str, Any] = {
        "max_detections": limit,
        "max_classes_per_detection": each,
        "detections_per_class": per_class,
    }
    options |= {"use_regular_nms": regular, "num_classes": classes} | scales
    custom = _flexible(options | {"nms_score_threshold": least, "nms_iou_threshold": overlap})

    def run_nnfmq() -> list[Array]:
        outputs = [Operand(F32), Operand(F32), Operand(I32), Operand(I32)]
        rated, boxes, kinds, counts = results_of(OperationType.DETECTION_POSTPROCESSING, [*data, *rest], outputs)
        found = int(counts[0])
        return [rated[0, :found], boxes[0, :found], kinds[0, :found]]

    def run_litert() -> list[Array]:
        outputs = [Operand(F32, shape) for shape in ((1, rows, 4), (1, rows), (1, rows), (1,))]
        argument = [data[1], data[0], data[2]]
        boxes, kinds, rated, counts = by_litert("TFLite_Detection_PostProcess", argument, outputs, custom=custom)
        found = int(counts[0]) * (1 if regular else each)
        return [rated[0, :found], boxes[0, :found], kinds[0, :found].astype(np.int32)]

    return Case(run_nnfmq, run_litert)


def _flexible(values: dict[str, Any]) -> bytes:
    """Return a map in the FlexBuffers encoding of custom options."""
    return bytes(flexbuffers.Dumps(values))


CASES: list[Listed] = [
    ("LSH_PROJECTION", (*FLOAT, "int32", "uint8"), projection),
    ("TFLite_Detection_PostProcess", FLOAT, postprocessing),
]
