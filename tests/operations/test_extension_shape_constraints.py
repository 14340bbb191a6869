"""The shape rules of the built-in extension's operations accept an example, and name what a change violates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.types import PaddingScheme
from nnfmq.operations import binary_arithmetic
from nnfmq.operations.declaration import Tensor
from nnfmq.operations.shapes import DATA_DEPENDENT
from nnfmq.operations.tflite_extension import (
    blockwise,
    dynamic_sizes,
    indexing,
    matrices,
    mediapipe,
    segments,
    suppression,
    volumes,
)


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def number(value: float, dtype: Any = np.int32) -> Any:
    return np.array([value], dtype)


HUGE = 1 << 30  # elements of 4 bytes: 2^32 bytes
SAME = int(PaddingScheme.SAME)
WINDOW = {"padding_scheme": SAME, "stride_width": 2, "stride_height": 2, "filter_width": 2, "filter_height": 2}
VOLUME = {"padding_scheme": SAME, "activation": 0} | {
    f"{what}_{axis}": 1 for what in ("stride", "dilation") for axis in volumes._AXES
}

Rule = tuple[Callable[..., Any], dict[str, Any], Any]
RULES: dict[str, Rule] = {
    "BLOCKWISE_MATMUL": (
        blockwise.blockwise_shape,
        {"input": (5, 3, 30), "weights": (4, 2, 8), "scales": (4, 2), "zero_points": None, "bias": None, "bits": 4,
         "rounds_input": True},
        (5, 3, 4),
    ),
    "MAX_POOL_WITH_ARGMAX": (mediapipe.pool_shapes, {"input": (1, 4, 6, 3)} | WINDOW, ((1, 2, 3, 3),) * 2),
    "MAX_UNPOOL": (
        mediapipe.unpool_shape,
        {"input": (1, 2, 3, 3), "positions": (1, 2, 3, 3)} | WINDOW,
        (1, 4, 6, 3),
    ),
    "RANGE": (dynamic_sizes.range_shape, {"start": number(1), "limit": number(7), "delta": number(2)}, (3,)),
    "WHERE": (dynamic_sizes.where_shape, {"condition": (4, 5)}, (DATA_DEPENDENT, 2)),
    "UNIQUE": (dynamic_sizes.unique_shape, {"input": (4,)}, ((DATA_DEPENDENT,), (4,))),
    "BATCH_GATHER": (
        indexing.batch_gather_shape,
        {"input": (2, 5, 3), "indices": (2, 4), "axis": 1, "batch_dims": 1},
        (2, 4, 3),
    ),
    "GATHER_ND": (indexing.gather_nd_shape, {"input": (4, 5, 3), "indices": (7, 2)}, (7, 3)),
    "SCATTER_ND": (
        indexing.scatter_nd_shape,
        {"indices": (7, 1), "updates": (7, 3), "shape": ints(4, 3)},
        (4, 3),
    ),
    "SCATTER_ND_UPDATE": (
        indexing.scatter_nd_update_shape,
        {"input": (4, 3), "indices": (7, 1), "updates": (7, 3), "reduction": 0},
        (4, 3),
    ),
    "SPARSE_TO_DENSE": (
        indexing.sparse_to_dense_shape,
        {"indices": (7, 2), "values": (7,), "default": (1,), "shape": ints(4, 3)},
        (4, 3),
    ),
    "ONE_HOT": (
        indexing.one_hot_shape,
        {"indices": (4, 3), "on": (1,), "off": (1,), "depth": number(5), "axis": 1},
        (4, 5, 3),
    ),
    "DYNAMIC_UPDATE_SLICE": (
        indexing.dynamic_update_slice_shape,
        {"input": (4, 3), "update": (2, 3), "start": (2,)},
        (4, 3),
    ),
    "REVERSE_SEQUENCE": (
        indexing.reverse_sequence_shape,
        {"input": (4, 3, 2), "lengths": (3,), "sequence_axis": 0, "batch_axis": 1},
        (4, 3, 2),
    ),
    "TRANSFORM_LANDMARKS": (
        mediapipe.transformed_shape,
        {"landmarks": (1, 6), "matrix": (4, 4), "dimensions": 3},
        (1, 6),
    ),
    "TRANSFORM_TENSOR": (
        mediapipe.cropped_shape,
        {"image": (1, 8, 9, 3), "matrix": (1, 16), "size": ints(4, 5)},
        (1, 4, 5, 3),
    ),
    "LANDMARKS_TO_TRANSFORM_MATRIX": (
        mediapipe.matrix_shape,
        {"landmarks": (1, 12), "subset": ints(2, 3), "left": 0, "right": 1, "height": 8, "width": 9,
         "scale_x": 1.5, "scale_y": 1.5},
        (1, 4, 4),
    ),
    "SEGMENT_SUM": (segments.segment_sum_shape, {"input": (4, 3), "ids": ints(0, 0, 2, 5)}, (6, 3)),
    "UNSORTED_SEGMENT": (
        segments.unsorted_segment_shape,
        {"input": (4, 3, 2), "ids": (4, 3), "count": number(6), "reduction": 3},
        (6, 2),
    ),
    "MATRIX_SET_DIAG": (segments.matrix_set_diag_shape, {"matrix": (2, 4, 3), "diagonal": (2, 3)}, (2, 4, 3)),
    "RFFT2D": (matrices.rfft2d_shape, {"input": (2, 8, 8), "lengths": ints(4, 8)}, (2, 4, 5)),
    "CONV_3D": (
        volumes.conv_3d_shape,
        {"input": (1, 4, 5, 6, 3), "filter": (2, 2, 2, 3, 7), "bias": (7,)} | VOLUME,
        (1, 4, 5, 6, 7),
    ),
    "CONV_3D_TRANSPOSE": (
        volumes.conv_3d_transpose_shape,
        {"filter": (2, 2, 2, 7, 3), "input": (1, 4, 5, 6, 3), "bias": (7,), "shape": ints(1, 4, 5, 6, 7)} | VOLUME,
        (1, 4, 5, 6, 7),
    ),
}  # fmt: skip

VIOLATIONS: list[tuple[str, str, dict[str, Any]]] = [
    ("BLOCKWISE_MATMUL", "C3", {"input": ()}),
    ("MAX_POOL_WITH_ARGMAX", "C2", {"input": (4, 6, 3)}),
    ("MAX_POOL_WITH_ARGMAX", "C2", {"input": (1, 4, 6, 3, 1)}),
    ("MAX_UNPOOL", "C2", {"input": (1, 2, 3, 3, 1), "positions": (1, 2, 3, 3, 1)}),
    ("MAX_UNPOOL", "C2", {"positions": (1, 2, 3, 4)}),
    *(("MAX_UNPOOL", "C1", {name: 0}) for name in WINDOW),
    ("MAX_UNPOOL", "C1", {"padding_scheme": 3}),
    ("MAX_UNPOOL", "R2", {"filter_height": HUGE}),
    ("RANGE", "C1", {"delta": number(0)}),
    ("RANGE", "C1", {"delta": number(0), "limit": number(1)}),
    ("RANGE", "C1", {"delta": number(-2)}),
    ("RANGE", "C1", {"limit": number(-7)}),
    ("RANGE", "C1", {"limit": number(np.inf, np.float32)}),
    ("RANGE", "C1", {"start": number(np.nan, np.float32)}),
    ("RANGE", "R2", {name: number(value, np.float32) for name, value in (("start", 1), ("limit", 1e12), ("delta", 1))}),
    ("WHERE", "R1", {"condition": ()}),
    ("WHERE", "R1", {"condition": (1,) * 9}),
    ("UNIQUE", "R1", {"input": (4, 5)}),
    ("BATCH_GATHER", "C2", {"batch_dims": -1, "indices": (2, 5, 4)}),
    ("BATCH_GATHER", "C2", {"batch_dims": 2, "indices": (2, 5)}),
    ("BATCH_GATHER", "C2", {"indices": (3, 4)}),
    ("GATHER_ND", "C2", {"indices": ()}),
    ("GATHER_ND", "C2", {"indices": (7, 0)}),
    ("GATHER_ND", "C2", {"indices": (7, 4)}),
    ("SCATTER_ND", "C3", {"shape": ints(-4, 3)}),
    ("SCATTER_ND", "C3", {"shape": np.array([[4, 3]], np.int32)}),
    ("SCATTER_ND", "R2", {"shape": ints(HUGE, 3)}),
    ("SCATTER_ND", "C2", {"indices": (), "updates": (4, 3)}),
    ("SCATTER_ND", "C2", {"indices": (7, 0), "updates": (7, 4, 3)}),
    ("SCATTER_ND", "C2", {"indices": (7, 3), "updates": (7,)}),
    ("SCATTER_ND", "C2", {"updates": (7, 4)}),
    ("SCATTER_ND_UPDATE", "C2", {"indices": (), "updates": (4, 3)}),
    ("SCATTER_ND_UPDATE", "C2", {"indices": (7, 0), "updates": (7, 4, 3)}),
    ("SCATTER_ND_UPDATE", "C2", {"indices": (7, 3), "updates": (7,)}),
    ("SPARSE_TO_DENSE", "C2", {"indices": (7, 1, 1), "shape": ints(4)}),
    ("SPARSE_TO_DENSE", "C2", {"indices": (7, 3)}),
    ("SPARSE_TO_DENSE", "C2", {"values": (6,)}),
    ("SPARSE_TO_DENSE", "C2", {"default": (2,)}),
    ("ONE_HOT", "C2", {"on": (2,)}),
    ("ONE_HOT", "C2", {"off": (2,)}),
    ("ONE_HOT", "C2", {"on": (2,), "off": (2,)}),
    ("ONE_HOT", "C3", {"depth": number(-1)}),
    ("DYNAMIC_UPDATE_SLICE", "C2", {"update": (2,)}),
    ("DYNAMIC_UPDATE_SLICE", "C2", {"start": (1,)}),
    ("DYNAMIC_UPDATE_SLICE", "C2", {"update": (2, 4)}),
    ("REVERSE_SEQUENCE", "R5", {"input": (4, 3, *[1] * 70)}),
    ("REVERSE_SEQUENCE", "C2", {"batch_axis": 0, "lengths": (4,)}),
    ("REVERSE_SEQUENCE", "C2", {"lengths": (4,)}),
    ("TRANSFORM_LANDMARKS", "C1", {"matrix": (4, 3)}),
    ("TRANSFORM_LANDMARKS", "C1", {"dimensions": 6}),
    ("TRANSFORM_LANDMARKS", "C1", {"landmarks": ()}),
    ("TRANSFORM_LANDMARKS", "C1", {"landmarks": (1, 7)}),
    ("TRANSFORM_TENSOR", "C1", {"matrix": (4, 3)}),
    ("TRANSFORM_TENSOR", "C3", {"image": (1, 8, 9, 3, 1)}),
    ("TRANSFORM_TENSOR", "C3", {"image": (2, 8, 9, 3)}),
    ("TRANSFORM_TENSOR", "C3", {"size": ints(4, 5, 6)}),
    ("TRANSFORM_TENSOR", "C3", {"size": ints(4, 0)}),
    ("TRANSFORM_TENSOR", "R2", {"size": ints(1 << 15, 1 << 15)}),
    ("LANDMARKS_TO_TRANSFORM_MATRIX", "C2", {"subset": ints()}),
    ("LANDMARKS_TO_TRANSFORM_MATRIX", "C2", {"left": -1}),
    ("LANDMARKS_TO_TRANSFORM_MATRIX", "C2", {"subset": ints(2, 4)}),
    *(("LANDMARKS_TO_TRANSFORM_MATRIX", "C3", {name: 0}) for name in ("height", "width", "scale_x", "scale_y")),
    ("SEGMENT_SUM", "C2", {"ids": ints(0, 0, 2)}),
    ("SEGMENT_SUM", "C1", {"ids": ints(0, 2, 1, 5)}),
    ("SEGMENT_SUM", "C1", {"ids": ints(-1, 0, 2, 5)}),
    ("SEGMENT_SUM", "R2", {"ids": ints(0, 0, 2, HUGE)}),
    ("UNSORTED_SEGMENT", "C3", {"reduction": -1}),
    ("UNSORTED_SEGMENT", "C3", {"reduction": 4}),
    ("UNSORTED_SEGMENT", "C2", {"ids": ()}),
    ("UNSORTED_SEGMENT", "C2", {"ids": (4, 2)}),
    ("UNSORTED_SEGMENT", "C2", {"ids": (4, 3, 2, 1)}),
    ("UNSORTED_SEGMENT", "C1", {"count": number(-1)}),
    ("MATRIX_SET_DIAG", "C2", {"matrix": (3,), "diagonal": (3,)}),
    ("MATRIX_SET_DIAG", "C2", {"diagonal": (2, 4)}),
    ("RFFT2D", "R1", {"input": (8,)}),
    ("RFFT2D", "C1", {"lengths": ints(4, 8, 8)}),
    ("RFFT2D", "C1", {"lengths": ints(4, 6)}),
    ("RFFT2D", "C1", {"lengths": ints(0, 8)}),
    ("RFFT2D", "C1", {"lengths": ints(4, 1 << 25)}),
    ("RFFT2D", "R2", {"lengths": ints(1 << 20, 1 << 20)}),
    ("CONV_3D", "C1", {"input": (1, 4, 5, 6, 3, 1)}),
    ("CONV_3D", "C1", {"input": (1, 4, 5, 6, 3, 1), "filter": (2, 2, 2, 3, 7, 1), "bias": (7, 1)}),
    ("CONV_3D", "C1", {"input": (1, 4, 5, 6, 2)}),
    ("CONV_3D", "C1", {"bias": (6,)}),
    ("CONV_3D_TRANSPOSE", "C1", {"input": (1, 4, 5, 6, 3, 1)}),
    ("CONV_3D_TRANSPOSE", "C1", {"filter": (2, 2, 2, 7, 3, 1)}),
    ("CONV_3D_TRANSPOSE", "C1", {"shape": ints(1, 4, 5, 6, 7, 1)}),
    ("CONV_3D_TRANSPOSE", "C1", {"input": (1, 4, 5, 6, 3, 1), "filter": (2, 2, 2, 7, 3, 1)}),
    ("CONV_3D_TRANSPOSE", "C1", {"input": (1, 4, 5, 6, 3, 1), "filter": (2, 2, 2, 7, 3, 1),
                                 "shape": ints(1, 4, 5, 6, 7, 1)}),
    ("CONV_3D_TRANSPOSE", "C1", {"input": (1, 4, 5, 6, 2)}),
    ("CONV_3D_TRANSPOSE", "C1", {"bias": (6,)}),
    ("CONV_3D_TRANSPOSE", "C1", {"shape": ints(2, 4, 5, 6, 7)}),
    ("CONV_3D_TRANSPOSE", "C1", {"shape": ints(1, 4, 5, 6, 8)}),
    ("CONV_3D_TRANSPOSE", "C1", {"shape": ints(1, 0, 5, 6, 7), "input": (1, 0, 5, 6, 3)}),
    ("CONV_3D_TRANSPOSE", "C2", {"shape": ints(1, 4, 5, 7, 7)}),
    ("CONV_3D_TRANSPOSE", "R2", {"shape": ints(1, 1 << 12, 1 << 12, 1 << 12, 7),
                                 "input": (1, 1 << 12, 1 << 12, 1 << 12, 3)}),
]  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_the_example_of_a_rule_has_its_shape(name: str) -> None:
    rule, arguments, expected = RULES[name]
    assert rule(**arguments) == expected


@pytest.mark.parametrize(("name", "constraint", "changes"), VIOLATIONS)
def test_a_change_that_violates_a_constraint_names_it(name: str, constraint: str, changes: dict[str, Any]) -> None:
    rule, arguments, _ = RULES[name]
    with pytest.raises(GeneralFailure, match=rf"\({constraint}\)$"):
        rule(**arguments | changes)


BOXES: list[Any] = [(6, 4), (6,), (1,), (1,), ()]


@pytest.mark.parametrize(
    ("constraint", "position", "shape", "limit"),
    [
        ("C1", 0, (6, 4, 1), 3),
        ("C1", 0, (6, 5), 3),
        ("C1", 1, (5,), 3),
        ("C1", 3, (2,), 3),
        ("C2", 0, (6, 4), -1),
        ("R2", 0, (6, 4), HUGE),
    ],
)
def test_boxes_that_do_not_fit_name_the_constraint(
    constraint: str, position: int, shape: tuple[int, ...], limit: int
) -> None:
    assert suppression.suppression_shape(*BOXES, limit=number(3)) == ((3,), (3,), (1,))
    shapes = [*BOXES[:position], shape, *BOXES[position + 1 :]]
    with pytest.raises(GeneralFailure, match=rf"\({constraint}\)$"):
        suppression.suppression_shape(*shapes, limit=number(limit))


def test_a_negative_decay_of_scores_is_rejected() -> None:
    boxes, scores = np.zeros((1, 4), np.float32), np.ones(1, np.float32)
    numbers = [number(value, np.float32) for value in (0.5, 0.1, -1.0)]
    with pytest.raises(GeneralFailure, match=r"\(C2\)$"):
        suppression.suppressed(boxes, scores, *numbers, limit=number(1))


def test_a_divisor_of_0_is_rejected() -> None:
    tensor = Tensor((3,), np.dtype(np.int8), 0.5, 7)
    divide = binary_arithmetic.plan_tflite_div(tensor, tensor, output=tensor, activation=0)
    assert divide(np.int8([9, 9, 5]), np.int8([8, 11, 6])).tolist() == [11, 8, 11]
    with pytest.raises(GeneralFailure, match=r"\(C2\)$"):
        divide(np.int8([9, 9, 5]), np.int8([8, 7, 6]))


def test_an_id_beyond_the_number_of_segments_is_rejected() -> None:
    rows, ids = Tensor((3, 2), np.dtype(np.float32)), Tensor((3,), np.dtype(np.int32))
    output = Tensor((4, 2), np.dtype(np.float32))
    add = segments.plan_unsorted_segment(rows, ids, output=output, count=number(4), reduction=0)
    assert add(np.ones((3, 2), np.float32), ints(1, 1, -1)).sum() == 4
    with pytest.raises(GeneralFailure, match=r"\(C1\)$"):
        add(np.ones((3, 2), np.float32), ints(1, 4, -1))


def test_a_padded_volume_of_2_to_the_32_bytes_is_rejected() -> None:
    filter, input, bias, output = (
        Tensor(shape, np.dtype(np.float32))
        for shape in ((1, 1, 1, 1, 3), (1, 1024, 1024, 1023, 3), (1,), (1, 1024, 1024, 1023, 1))
    )
    with pytest.raises(GeneralFailure, match=r"\(R2\)$"):
        volumes.plan_conv_3d_transpose(filter, input, bias, output=output, shape=ints(*output.shape), **VOLUME)
