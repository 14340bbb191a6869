"""Box transforms, proposals and detection: by loops over their definitions, and at their corners."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.executed import executed, model_of

from nnfmq.engines import interpreter
from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.types import Operand, OperandType, OperationType
from nnfmq.operations import REGISTRY
from nnfmq.operations.bounding_boxes import hard_suppression, overlaps
from nnfmq.operations.declaration import NUMPY_TYPES, V1_2, V1_3, match
from nnfmq.operations.kernel_adapters import dequantize_array
from nnfmq.operations.preparation import tensor_of

Array = npt.NDArray[Any]

F32, I32 = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_INT32
UINT8, UINT16 = OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT16_ASYMM
TRANSFORM, NMS = OperationType.AXIS_ALIGNED_BBOX_TRANSFORM, OperationType.BOX_WITH_NMS_LIMIT
PROPOSALS, POSTPROCESSING = OperationType.GENERATE_PROPOSALS, OperationType.DETECTION_POSTPROCESSING
FLOATS, NMS_OUTPUTS = Operand(F32), [Operand(F32), Operand(F32), Operand(I32), Operand(I32)]
BOXES = np.array([[0, 0, 10, 10], [1, 0, 11, 10], [20, 20, 30, 30], [0, 0, 10, 10], [21, 20, 31, 30]], np.float64)


def floats(array: Any) -> tuple[Operand, Array]:
    return Operand(F32), np.array(array, np.float32)


def integers(array: Any) -> tuple[Operand, Array]:
    return Operand(I32), np.array(array, np.int32)


def scalars(*values: float | bool) -> list[tuple[Operand, Array]]:
    kinds = {bool: (OperandType.BOOL, "u1"), int: (OperandType.INT32, "i4"), float: (OperandType.FLOAT32, "f4")}
    return [(Operand(kinds[type(v)][0]), np.array(v, kinds[type(v)][1])) for v in values]


def iou(a: Array, b: Array) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    common = max(width, 0.0) * max(height, 0.0)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)]
    return float(common / (sum(areas) - common))


def random_boxes(rng: np.random.Generator, *shape: int) -> Array:
    low = rng.integers(0, 24, (*shape, 2))
    return np.concatenate([low, low + rng.integers(2, 12, (*shape, 2))], axis=-1).astype(np.float64)


def test_overlap_is_intersection_over_union() -> None:
    boxes = random_boxes(np.random.default_rng(1), 40)

    np.testing.assert_allclose(overlaps(boxes[0], boxes), [iou(boxes[0], box) for box in boxes])


@pytest.mark.parametrize("limit", [None, 0, 1, 4])
@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.5, 1.1])
def test_no_two_boxes_that_are_kept_overlap_and_each_that_is_dropped_has_a_better_one(
    threshold: float, limit: int | None
) -> None:
    rng = np.random.default_rng(2)
    boxes, scores = random_boxes(rng, 30), rng.permutation(30) / 30
    kept: list[int] = []
    for index in sorted(range(30), key=lambda i: -scores[i]):
        if all(iou(boxes[index], boxes[better]) < threshold for better in kept):
            kept.append(index)

    assert hard_suppression(scores, boxes, threshold, limit).tolist() == kept[:limit]


def test_boxes_move_by_their_size_and_stay_in_their_image() -> None:
    boxes, deltas = np.array([[2, 4, 6, 12], [0, 0, 8, 8]]), np.array([[0.5, -0.25, 0, 0.5], [1, 1, 1, -1]])
    expected = []
    for (x1, y1, x2, y2), (dx, dy, dw, dh), (height, width) in zip(boxes, deltas, [(16, 20), (9, 10)], strict=True):
        x, y = (x1 + x2) / 2 + dx * (x2 - x1), (y1 + y2) / 2 + dy * (y2 - y1)
        w, h = (x2 - x1) * math.exp(dw) / 2, (y2 - y1) * math.exp(dh) / 2
        clip = [(x - w, width), (y - h, height), (x + w, width), (y + h, height)]
        expected.append([min(max(value, 0), most) for value, most in clip])
    arguments = [floats(boxes), floats(deltas), integers([1, 0]), floats([[9, 10], [16, 20]])]

    (found,) = executed(TRANSFORM, arguments, [FLOATS])

    np.testing.assert_allclose(found, expected, rtol=1e-6)


def nms(scores: Any, boxes: Any, batches: Any, **changes: Any) -> list[Array]:
    given = {"score": 0.1, "limit": -1, "kernel": 0, "iou": 0.5, "sigma": 0.5, "nms_score": 0.1, **changes}
    arguments = [floats(scores), floats(boxes), integers(batches), *scalars(*given.values())]
    return executed(NMS, arguments, NMS_OUTPUTS)


def one_class(scores: list[float]) -> Array:
    """Return scores of the background and one class."""
    return np.stack([np.ones(len(scores)), scores], axis=1)


def test_hard_suppression_drops_what_overlaps_a_better_box() -> None:
    rated, boxes, classes, batches = nms(one_class([0.9, 0.8, 0.7, 0.6, 0.95]), np.tile(BOXES, 2), [0] * 5)

    np.testing.assert_allclose(rated, [0.95, 0.9])
    np.testing.assert_array_equal(boxes, BOXES[[4, 0]])
    assert (classes.tolist(), batches.tolist()) == ([1, 1], [0, 0])


def test_linear_suppression_lowers_scores_by_the_overlap() -> None:
    overlap = iou(BOXES[0], BOXES[1])

    rated, *_ = nms(one_class([0.9, 0.8]), np.tile(BOXES[:2], 2), [0, 0], kernel=1)

    np.testing.assert_allclose(rated, [0.9, 0.8 * (1 - overlap)], rtol=1e-6)


def test_gaussian_suppression_lowers_scores_even_below_the_overlap_threshold() -> None:
    overlap = iou(BOXES[0], BOXES[1])

    rated, *_ = nms(
        one_class([0.9, 0.8]), np.tile(BOXES[:2], 2), [0, 0], kernel=2, iou=0.99, sigma=0.25, nms_score=0.01
    )

    np.testing.assert_allclose(rated, [0.9, 0.8 * math.exp(-(overlap**2) / 0.25)], rtol=1e-6)


def test_results_are_ordered_by_image_class_and_score_and_limited_for_each_image() -> None:
    scores = np.array([[0, 0.3, 0.9], [0, 0.8, 0.2], [0, 0.7, 0.6], [0, 0.5, 0.4]])
    boxes = np.tile(BOXES[[0, 2, 0, 2]], 3)

    rated, _, classes, batches = nms(scores, boxes, [2, 2, 5, 5], limit=3)

    np.testing.assert_allclose(rated, [0.8, 0.3, 0.9, 0.7, 0.5, 0.6])
    assert classes.tolist() == [1, 1, 2, 1, 1, 2]
    assert batches.tolist() == [2, 2, 2, 5, 5, 5]


def test_of_boxes_with_equal_scores_the_first_goes_first() -> None:
    rated, boxes, *_ = nms(one_class([0.5, 0.5, 0.5]), np.tile(BOXES[[2, 0, 1]], 2), [0, 0, 0])

    assert rated.tolist() == [0.5, 0.5]
    np.testing.assert_array_equal(boxes, BOXES[[2, 0]])


@pytest.mark.parametrize("unknown", [False, True])
def test_no_detections_give_outputs_of_dimension_0(unknown: bool) -> None:
    arguments = [floats(one_class([0.5])), floats(np.tile(BOXES[:1], 2)), integers([0])]

    found = executed(NMS, [*arguments, *scalars(0.9, -1, 0, 0.5, 0.5, 0.1)], NMS_OUTPUTS, unknown=unknown)

    assert [array.shape for array in found] == [(0,), (0, 4), (0,), (0,)]


def test_R4_a_declared_count_that_the_data_does_not_give_is_rejected() -> None:
    arguments = [floats(one_class([0.5, 0.4])), floats(np.tile(BOXES[[0, 2]], 2)), integers([0, 0])]
    arguments = [(Operand(o.type, a.shape), a) for o, a in arguments] + scalars(0.1, -1, 0, 0.5, 0.5, 0.1)
    outputs = [Operand(F32, (3,)), Operand(F32, (0, 4)), Operand(I32, (0,)), Operand(I32, (0,))]
    program = interpreter.prepare(model_of(NMS, arguments, outputs, range(3, 9)))

    with pytest.raises(GeneralFailure, match=r"the output has shape \(2,\), declared is \(3,\) \(R4\)$"):
        program.execute([array for _, array in arguments[:3]], [bytearray(64)] * 4)


@pytest.mark.parametrize("kind", [F32, I32, UINT16])
def test_what_becomes_an_address_is_copied_first(kind: OperandType) -> None:
    shared = np.ones((2, 4), NUMPY_TYPES[kind])

    private = dequantize_array(shared, tensor_of(Operand(kind, (2, 4), 0.125 * (kind == UINT16)), (2, 4)))

    assert not np.shares_memory(private, shared)


@pytest.mark.parametrize(("deltas", "level"), [(UINT8, V1_2), (OperandType.TENSOR_QUANT8_ASYMM_SIGNED, V1_3)])
def test_a_transform_by_int8_deltas_needs_1_3(deltas: OperandType, level: int) -> None:
    boxes, batches = Operand(UINT16, (1, 4), 0.125), Operand(I32, (1,))
    inputs = [boxes, Operand(deltas, (1, 4), 0.5), batches, Operand(UINT16, (1, 2), 0.125)]

    assert match(REGISTRY[TRANSFORM], inputs, [boxes]).level == level


def proposals(scores: Any, deltas: Any, anchors: Any, **changes: Any) -> list[Array]:
    given = {"down": 8.0, "across": 4.0, "pre": 0, "post": 0, "iou": 0.5, "least": 1.0, "nchw": False, **changes}
    arguments = [floats(scores), floats(deltas), floats(anchors), floats([[30, 40]] * len(scores))]
    return executed(PROPOSALS, [*arguments, *scalars(*given.values())], [FLOATS, FLOATS, Operand(I32)])


ANCHORS = np.array([[0.0, 0.0, 4.0, 8.0], [-8, -8, 8, 8]])


def test_anchors_are_at_every_pixel_and_clipped_to_the_image() -> None:
    scores = np.linspace(0.9, 0.1, 12).reshape(1, 2, 3, 2)

    rated, boxes, batches = proposals(scores, np.zeros((1, 2, 3, 8)), ANCHORS, iou=1.1)

    expected = [
        [max(x1 + 4 * column, 0), max(y1 + 8 * row, 0), x2 + 4 * column, y2 + 8 * row]
        for row in range(2)
        for column in range(3)
        for x1, y1, x2, y2 in ANCHORS
    ]
    np.testing.assert_allclose(rated, scores.ravel(), rtol=1e-6)
    np.testing.assert_array_equal(boxes, expected)
    assert batches.tolist() == [0] * 12


@pytest.mark.parametrize(
    ("changes", "count"), [({"pre": 5}, 5), ({"post": 2}, 2), ({"pre": -1, "post": -1}, 12), ({"least": 7.9}, 6)]
)
def test_proposals_are_limited_before_and_after_suppression_and_by_their_size(
    changes: dict[str, Any], count: int
) -> None:
    scores = np.linspace(0.9, 0.1, 12).reshape(1, 2, 3, 2)

    rated, _, _ = proposals(scores, np.zeros((1, 2, 3, 8)), ANCHORS, **{"iou": 1.1, **changes})

    assert len(rated) == count


def test_each_image_has_its_own_proposals() -> None:
    scores = np.array([0.3, 0.9, 0.5, 0.1]).reshape(2, 1, 1, 2)

    rated, _, batches = proposals(scores, np.zeros((2, 1, 1, 8)), ANCHORS, iou=0.9)

    np.testing.assert_allclose(rated, [0.9, 0.3, 0.5, 0.1])
    assert batches.tolist() == [0, 0, 1, 1]


CENTERS = np.array([[5.0, 5, 10, 10], [5, 6, 10, 10], [25, 25, 10, 10]])  # y, x, height, width


def postprocessed(scores: Any, *, regular: bool, **changes: Any) -> list[Array]:
    given = {"limit": 3, "classes": 2, "per_class": 2, "score": 0.2, "iou": 0.5, "background": False, **changes}
    arguments = [floats([scores]), floats(np.zeros((1, 3, 4))), floats(CENTERS)]
    attributes = scalars(1.0, 1.0, 1.0, 1.0, regular, *given.values())
    return executed(POSTPROCESSING, [*arguments, *attributes], [FLOATS, FLOATS, Operand(I32), Operand(I32)])


SCORES = [[0, 0.9, 0.3], [0, 0.8, 0.85], [0, 0.1, 0.6]]


def test_regular_suppression_takes_each_class_alone() -> None:
    rated, boxes, classes, count = postprocessed(SCORES, regular=True)

    np.testing.assert_allclose(rated, [[0.9, 0.85, 0.6]])
    np.testing.assert_array_equal(boxes[0], [[0, 0, 10, 10], [0, 1, 10, 11], [20, 20, 30, 30]])
    assert (classes.tolist(), count.tolist()) == ([[0, 1, 1]], [3])


def test_fast_suppression_takes_the_best_class_and_reports_several() -> None:
    rated, _, classes, count = postprocessed(SCORES, regular=False, background=True)

    np.testing.assert_allclose(rated, [[0.9, 0.3, 0.6, 0.1, 0, 0]])
    assert (classes.tolist(), count.tolist()) == ([[1, 2, 2, 1, 0, 0]], [4])


def test_deltas_are_divided_by_their_scales() -> None:
    arguments = [floats([[[0, 0.9]]]), floats([[[1, 2, 3, 4]]]), floats([[5, 6, 8, 16]])]
    attributes = scalars(10.0, 20.0, 5.0, 8.0, True, 1, 1, 1, 0.1, 0.5, False)

    _, boxes, _, _ = executed(POSTPROCESSING, [*arguments, *attributes], [FLOATS, FLOATS, Operand(I32), Operand(I32)])

    y, x, h, w = 5 + 8 * 0.1, 6 + 16 * 0.1, 4 * math.exp(0.6), 8 * math.exp(0.5)
    np.testing.assert_allclose(boxes[0, 0], [y - h, x - w, y + h, x + w], rtol=1e-6)


@pytest.mark.parametrize(
    ("constraint", "changes"),
    [
        ("X2", {"boxes": np.array([[5, 0, 4, 9, 0, 0, 1, 1]])}),
        ("X2", {"boxes": np.full((1, 8), np.nan)}),
        ("C2", {"batches": [-1]}),
        ("C2", {"scores": np.full((2, 2), 0.5), "boxes": np.tile(BOXES[:2], 2), "batches": [1, 0]}),
    ],
)
def test_N_OPF_7_malformed_boxes_are_rejected(constraint: str, changes: dict[str, Any]) -> None:
    given = {"scores": one_class([0.5]), "boxes": np.tile(BOXES[:1], 2), "batches": [0], **changes}

    with pytest.raises(GeneralFailure, match=rf"\({constraint}\)$"):
        nms(**given)


@pytest.mark.parametrize(
    ("constraint", "boxes", "batch"), [("X2", [4, 0, 2, 4], 0), ("X3", [0, 0, 4, 4], 1), ("X3", [0, 0, 4, 4], -1)]
)
def test_N_OPF_7_a_transform_of_malformed_boxes_is_rejected(constraint: str, boxes: list[float], batch: int) -> None:
    arguments = [floats([boxes]), floats(np.zeros((1, 4))), integers([batch]), floats([[9, 9]])]

    with pytest.raises(GeneralFailure, match=rf"\({constraint}\)$"):
        executed(TRANSFORM, arguments, [FLOATS])


def test_N_OPF_7_malformed_anchors_are_rejected() -> None:
    with pytest.raises(GeneralFailure, match=r"\(X2\)$"):
        proposals(np.ones((1, 1, 1, 1)), np.zeros((1, 1, 1, 4)), np.array([[4, 0, 2, 4]]))
