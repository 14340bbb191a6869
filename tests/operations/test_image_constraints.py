"""Constraints of the operations on images and boxes: each is violated, and its number is in the message.

The numbers that a family's docstring explains must all be violated here or, where only data violate them, in the
family's own tests, whose names or parameters carry the number.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.executed import Argument, model_of

from nnfmq.engines import interpreter
from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.types import ChannelQuant, Operand, OperandType, OperationType
from nnfmq.operations import (
    batch_matmul,
    bounding_boxes,
    convolution,
    detection,
    keypoints,
    normalization,
    roi,
    transpose_conv,
)
from nnfmq.operations.declaration import NUMPY_TYPES

F32, I32, INT8 = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_INT32, OperandType.TENSOR_QUANT8_ASYMM_SIGNED
UINT8, UINT16 = OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT16_ASYMM
INT16 = OperandType.TENSOR_QUANT16_SYMM
PC = OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL


def f(*shape: int) -> Argument:
    return Operand(F32, shape), np.ones(shape, np.float32)


def q(*shape: int, scale: float = 0.5, zero_point: int = 0, kind: OperandType = UINT8) -> Argument:
    return Operand(kind, shape, scale, zero_point), np.ones(shape, NUMPY_TYPES[kind])


def i(*values: int) -> Argument:
    return Operand(I32, (len(values),)), np.array(values, np.int32)


def u16(*shape: int, scale: float = 0.125, zero_point: int = 0) -> Argument:
    return q(*shape, scale=scale, zero_point=zero_point, kind=UINT16)


SCALARS = {bool: (OperandType.BOOL, "u1"), int: (OperandType.INT32, "i4"), float: (OperandType.FLOAT32, "f4")}


def argument(value: Any) -> Argument:
    """Return tensors as they are and Python values as scalars."""
    if isinstance(value, tuple):
        return value
    kind, dtype = SCALARS[type(value)]
    return Operand(kind), np.array(value, dtype)


def conv(image: Argument, filter: Argument, bias: Argument, *own: Any, padding: tuple[int, ...] = (2,)) -> list[Any]:
    return [image, filter, bias, *padding, 1, 1, *own, 0, False]


def grouped_arguments(
    image: Argument, filter: Argument, bias: Argument, groups: int = 2, padding: tuple[int, ...] = (2,)
) -> list[Any]:
    return conv(image, filter, bias, groups, padding=padding)


def transposed_arguments(
    image: Argument | None = None, filter: Argument | None = None, bias: Argument | None = None, *,
    shape: Argument | None = None, scheme: int = 1, strides: tuple[int, int] = (1, 1),
    padding: tuple[int, int, int, int] | None = None,
) -> list[Any]:  # fmt: skip
    operands = [image or f(1, 4, 4, 2), filter or f(3, 2, 2, 2), bias or f(3)]
    where = padding or (shape or i(1, 4, 4, 3), scheme)
    return [*operands, *where, *strides, 0, False]


ALONG_3 = (Operand(PC, (4, 1, 1, 2), channel_quant=ChannelQuant((1.0, 1.0), 3)), np.ones((4, 1, 1, 2), np.int8))
ALONG_1 = (Operand(PC, (3, 2, 1, 2), channel_quant=ChannelQuant((1.0, 1.0), 1)), np.ones((3, 2, 1, 2), np.int8))


def bias(count: int) -> Argument:
    return Operand(I32, (count,)), np.ones(count, np.int32)


def align(
    image: Argument | None = None, boxes: Argument | None = None, extents: tuple[int, int] = (2, 2),
    strides: tuple[float, float] = (1.0, 1.0), ratios: tuple[int, ...] = (0, 0), batches: Argument | None = None,
) -> list[Any]:  # fmt: skip
    operands = [image or f(1, 4, 4, 2), boxes or f(1, 4), batches or i(0)]
    return [*operands, *extents, *strides, *ratios, False]


def nms(scores: Argument, places: Argument, kernel: int = 0, batches: Argument | None = None) -> list[Any]:
    return [scores, places, batches or i(0), 0.1, -1, kernel, 0.5, 0.5, 0.1]


def detect(
    *, scores: Argument | None = None, deltas: Argument | None = None, anchors: Argument | None = None,
    scale: float = 1.0, threshold: float = 0.1, limit: int = 1, regular: bool = True, per: int = 1,
) -> list[Any]:  # fmt: skip
    given = [scores or f(1, 3, 2), deltas or f(1, 3, 4), anchors or f(3, 4), 1.0, 1.0, 1.0, scale, regular, limit]
    return [*given, per, per, threshold, 0.5, False]


def propose(
    kind: OperandType = F32, *, anchor_scale: float = 0.125, scores: Argument | None = None,
    deltas: Argument | None = None, anchors: Argument | None = None, info: Argument | None = None,
) -> list[Any]:  # fmt: skip
    rest = [1.0, 1.0, 0, 0, 0.5, 0.0, False]
    if kind == F32:
        arrays = (scores or f(1, 2, 2, 3), deltas or f(1, 2, 2, 12), anchors or f(3, 4), info or f(1, 2))
        return [*arrays, *rest]
    return [q(1, 2, 2, 3), q(1, 2, 2, 12), q(3, 4, scale=anchor_scale, kind=INT16), info or u16(1, 2), *rest]


F_OUT, Q_OUT, INT8_OUT = [Operand(F32)], [Operand(UINT8, (), 0.5, 0)], [Operand(INT8, (), 0.5, 0)]
BOXES_OUT = [Operand(UINT16, (), 0.125)]
NMS_OUT = [Operand(F32), Operand(F32), Operand(I32), Operand(I32)]
PROPOSALS_OUT = [Operand(UINT8, (), 0.5), *BOXES_OUT, Operand(I32)]
GROUPED = (f(1, 4, 4, 4), f(4, 3, 3, 2), f(4))

VIOLATIONS: list[tuple[str, str, list[Any], list[Operand]]] = [
    ("GROUPED_CONV_2D", "C1", grouped_arguments(f(4, 4, 4), *GROUPED[1:]), F_OUT),
    ("GROUPED_CONV_2D", "C1", grouped_arguments(f(1, 4, 4, 4), f(4, 3, 2), f(4)), F_OUT),
    ("GROUPED_CONV_2D", "C2", grouped_arguments(f(1, 4, 4, 6), *GROUPED[1:]), F_OUT),
    ("GROUPED_CONV_2D", "C2", grouped_arguments(*GROUPED[:2], f(3)), F_OUT),
    ("GROUPED_CONV_2D", "C3", grouped_arguments(q(1, 4, 4, 4), ALONG_3, bias(4)), Q_OUT),
    ("GROUPED_CONV_2D", "C4", grouped_arguments(*GROUPED, groups=0), F_OUT),
    ("GROUPED_CONV_2D", "C4", grouped_arguments(*GROUPED, groups=3), F_OUT),
    ("GROUPED_CONV_2D", "W1", grouped_arguments(*GROUPED, padding=(0,)), F_OUT),
    ("GROUPED_CONV_2D", "W3", grouped_arguments(*GROUPED, padding=(0, 0, -1, 0)), F_OUT),
    ("GROUPED_CONV_2D", "W4", grouped_arguments(*GROUPED, padding=(0, 3, 0, 0)), F_OUT),
    ("TRANSPOSE_CONV_2D", "C1", transposed_arguments(f(4, 4, 2)), F_OUT),
    ("TRANSPOSE_CONV_2D", "C1", transposed_arguments(filter=f(3, 2, 2)), F_OUT),
    ("TRANSPOSE_CONV_2D", "C2", transposed_arguments(f(1, 4, 4, 3)), F_OUT),
    ("TRANSPOSE_CONV_2D", "C2", transposed_arguments(f(1, 4, 4, 0), f(3, 2, 2, 0)), F_OUT),
    ("TRANSPOSE_CONV_2D", "C2", transposed_arguments(filter=f(0, 2, 2, 2), bias=f(0)), F_OUT),
    ("TRANSPOSE_CONV_2D", "C2", transposed_arguments(bias=f(2)), F_OUT),
    ("TRANSPOSE_CONV_2D", "C3", transposed_arguments(q(1, 4, 4, 2), ALONG_1, bias(3)), Q_OUT),
    ("TRANSPOSE_CONV_2D", "C4", transposed_arguments(shape=i(1, 4, 4)), F_OUT),
    ("TRANSPOSE_CONV_2D", "C4", transposed_arguments(shape=i(1, 0, 4, 3)), F_OUT),
    ("TRANSPOSE_CONV_2D", "C5", transposed_arguments(padding=(3, 2, 0, 0)), F_OUT),
    ("TRANSPOSE_CONV_2D", "W1", transposed_arguments(scheme=3), F_OUT),
    ("TRANSPOSE_CONV_2D", "W2", transposed_arguments(strides=(1, 0)), F_OUT),
    ("TRANSPOSE_CONV_2D", "W2", transposed_arguments(strides=(0, 1), padding=(0, 0, 0, 0)), F_OUT),
    ("TRANSPOSE_CONV_2D", "W2", transposed_arguments(filter=f(3, 0, 2, 2)), F_OUT),
    ("TRANSPOSE_CONV_2D", "W2", transposed_arguments(f(1, 4, 0, 2)), F_OUT),
    ("TRANSPOSE_CONV_2D", "W3", transposed_arguments(padding=(0, 0, -1, 0)), F_OUT),
    ("TRANSPOSE_CONV_2D", "W6", transposed_arguments(padding=(0, -(1 << 20), 0, -(1 << 20))), F_OUT),
    ("CONV_2D", "C5", conv(f(1, 4, 4, 2), f(0, 1, 1, 2), f(0))[:-1], F_OUT),
    ("CONV_2D", "C5", conv(f(1, 0, 4, 2), f(1, 2, 2, 2), f(1), padding=(1, 1, 1, 1))[:-1], F_OUT),
    ("DEPTHWISE_CONV_2D", "C5", conv(f(1, 4, 4, 0), f(1, 2, 2, 0), f(0), 1)[:-1], F_OUT),
    ("FULLY_CONNECTED", "C1", [f(2, 2), f(0, 2), f(0), 0], F_OUT),
    ("L2_POOL_2D", "C2", [f(1, 0, 4, 2), 1, 1, 1, 1, 1, 1, 2, 2, 0], F_OUT),
    ("L2_POOL_2D", "C1", [f(4, 4), 2, 1, 1, 2, 2, 0], F_OUT),
    ("L2_POOL_2D", "W5", [f(1, 4, 4, 2), 2, 1, 1, 2, 5, 0], F_OUT),
    ("L2_POOL_2D", "Q5", [f(1, 4, 4, 2), 2, 1, 1, 2, 2, 4], F_OUT),
    ("BATCH_MATMUL", "R1", [f(2), f(2), False, False], F_OUT),
    ("BATCH_MATMUL", "C1", [f(2, 2), f(1, 2, 2), False, False], F_OUT),
    ("BATCH_MATMUL", "C2", [f(2, 3, 3), f(1, 3, 3), False, False], F_OUT),
    ("BATCH_MATMUL", "C3", [f(2, 3), f(2, 3), False, False], F_OUT),
    ("BATCH_MATMUL", "C3", [f(2, 3), f(3, 2), True, False], F_OUT),
    ("BATCH_MATMUL", "R3", [f(0, 3), f(3, 2), False, False], F_OUT),
    ("L2_NORMALIZATION", "R1", [f(1, 1, 1, 1, 1)], F_OUT),
    ("L2_NORMALIZATION", "A1", [f(2, 2), 2], F_OUT),
    ("L2_NORMALIZATION", "Q6", [q(2, 2)], Q_OUT),
    ("L2_NORMALIZATION", "Q6", [q(2, 2, kind=INT8)], [Operand(INT8, (), 1 / 128, 128 - 256)]),
    ("LOCAL_RESPONSE_NORMALIZATION", "R1", [f(1, 1, 1, 1, 1), 1, 1.0, 1.0, 1.0], F_OUT),
    ("LOCAL_RESPONSE_NORMALIZATION", "A1", [f(2, 2), 1, 1.0, 1.0, 1.0, -3], F_OUT),
    ("LOCAL_RESPONSE_NORMALIZATION", "C1", [f(2, 2), -1, 1.0, 1.0, 1.0], F_OUT),
    ("INSTANCE_NORMALIZATION", "C2", [f(2, 2, 2), 1.0, 1.0, 1.0, False], F_OUT),
    ("RESIZE_BILINEAR", "C1", [f(1, 4, 4, 0), 2, 2], F_OUT),
    ("RESIZE_NEAREST_NEIGHBOR", "C1", [f(1, 4, 0, 2), 2, 2, False], F_OUT),
    ("RESHAPE", "C2", [f(2, 3), i()], F_OUT),
    ("HASHTABLE_LOOKUP", "R3", [i(), i(0, 1), f(2, 2)], [Operand(F32), Operand(UINT8, (), 1.0)]),
    ("ROI_ALIGN", "C1", align(f(4, 4, 2)), F_OUT),
    ("ROI_ALIGN", "C1", align(f(1, 0, 4, 2)), F_OUT),
    ("ROI_ALIGN", "C2", align(boxes=f(1, 5)), F_OUT),
    ("ROI_ALIGN", "C2", align(batches=i(0, 0)), F_OUT),
    ("ROI_ALIGN", "C3", align(extents=(0, 2)), F_OUT),
    ("ROI_ALIGN", "C3", align(strides=(1.0, 0.0)), F_OUT),
    ("ROI_ALIGN", "C3", align(strides=(float("nan"), 1.0)), F_OUT),
    ("ROI_ALIGN", "C4", align(ratios=(-1, 0)), F_OUT),
    ("ROI_ALIGN", "X1", align(q(1, 4, 4, 2), u16(1, 4, scale=0.25)), Q_OUT),
    ("ROI_POOLING", "C1", align(f(4, 4, 2), ratios=()), F_OUT),
    ("ROI_POOLING", "C2", align(boxes=f(4), ratios=()), F_OUT),
    ("ROI_POOLING", "C3", align(extents=(2, -1), ratios=()), F_OUT),
    ("ROI_POOLING", "X1", align(q(1, 4, 4, 2), u16(1, 4, zero_point=1), ratios=()), Q_OUT),
    ("ROI_POOLING", "Q7", align(q(1, 4, 4, 2, scale=0.25), u16(1, 4), ratios=()), Q_OUT),
    ("ROI_POOLING", "R3", align(boxes=f(0, 4), batches=i(), ratios=()), F_OUT),
    ("HEATMAP_MAX_KEYPOINT", "C1", [f(1, 3, 2, 1), f(1, 4), False], F_OUT * 2),
    ("HEATMAP_MAX_KEYPOINT", "C1", [f(1, 1, 1, 1), f(1, 4), False], F_OUT * 2),
    ("HEATMAP_MAX_KEYPOINT", "C1", [f(1, 3, 3), f(1, 4), False], F_OUT * 2),
    ("HEATMAP_MAX_KEYPOINT", "C2", [f(2, 3, 3, 1), f(1, 4), False], F_OUT * 2),
    ("HEATMAP_MAX_KEYPOINT", "X1", [q(1, 3, 3, 1), u16(1, 4), False], [*Q_OUT, Operand(UINT16, (), 0.25)]),
    ("AXIS_ALIGNED_BBOX_TRANSFORM", "X5", [f(1, 4), f(1, 6), i(0), f(1, 2)], F_OUT),
    ("AXIS_ALIGNED_BBOX_TRANSFORM", "X5", [f(1, 4), f(1, 4), i(0), f(1, 3)], F_OUT),
    ("AXIS_ALIGNED_BBOX_TRANSFORM", "X5", [f(1, 4), f(4), i(0), f(1, 2)], F_OUT),
    ("AXIS_ALIGNED_BBOX_TRANSFORM", "X5", [f(1, 4), f(1, 0), i(0), f(1, 2)], F_OUT),
    ("AXIS_ALIGNED_BBOX_TRANSFORM", "X5", [f(1, 5), f(1, 4), i(0), f(1, 2)], F_OUT),
    ("AXIS_ALIGNED_BBOX_TRANSFORM", "X5", [f(0, 4), f(0, 4), i(), f(0, 2)], F_OUT),
    ("AXIS_ALIGNED_BBOX_TRANSFORM", "X5", [f(1, 4), f(2, 4), i(0, 0), f(1, 2)], F_OUT),
    ("AXIS_ALIGNED_BBOX_TRANSFORM", "X5", [f(1, 4), f(1, 4), i(0, 0), f(1, 2)], F_OUT),
    ("AXIS_ALIGNED_BBOX_TRANSFORM", "X1", [u16(1, 4), q(1, 4), i(0), u16(1, 2, scale=0.5)], BOXES_OUT),
    ("AXIS_ALIGNED_BBOX_TRANSFORM", "X1", [u16(1, 4), q(1, 4), i(0), u16(1, 2)], [Operand(UINT16, (), 1.0)]),
    ("BOX_WITH_NMS_LIMIT", "C1", nms(f(1, 2), f(1, 8), kernel=3), NMS_OUT),
    ("BOX_WITH_NMS_LIMIT", "X5", nms(f(1, 1), f(1, 4)), NMS_OUT),
    ("BOX_WITH_NMS_LIMIT", "X5", nms(f(1, 2), f(1, 4)), NMS_OUT),
    ("BOX_WITH_NMS_LIMIT", "X5", nms(f(2), f(1, 8)), NMS_OUT),
    ("BOX_WITH_NMS_LIMIT", "X5", nms(f(1, 2), f(1, 8), batches=i(0, 0)), NMS_OUT),
    ("BOX_WITH_NMS_LIMIT", "X1", nms(q(1, 2), u16(1, 8, scale=1.0)), [*Q_OUT, *BOXES_OUT, *NMS_OUT[2:]]),
    ("BOX_WITH_NMS_LIMIT", "X4", nms(q(1, 2, scale=0.25), u16(1, 8)), [*Q_OUT, *BOXES_OUT, *NMS_OUT[2:]]),
    ("GENERATE_PROPOSALS", "X5", propose(info=f(2, 2)), [*NMS_OUT[:3]]),
    ("GENERATE_PROPOSALS", "X5", propose(info=f(2)), [*NMS_OUT[:3]]),
    ("GENERATE_PROPOSALS", "X5", propose(scores=f(1, 2, 2)), [*NMS_OUT[:3]]),
    ("GENERATE_PROPOSALS", "X5", propose(deltas=f(1, 2, 2, 8)), [*NMS_OUT[:3]]),
    ("GENERATE_PROPOSALS", "X5", propose(anchors=f(2, 4)), [*NMS_OUT[:3]]),
    ("GENERATE_PROPOSALS", "X1", propose(UINT8, anchor_scale=0.25), PROPOSALS_OUT),
    ("GENERATE_PROPOSALS", "X1", propose(UINT8, info=u16(1, 2, zero_point=2)), PROPOSALS_OUT),
    ("GENERATE_PROPOSALS", "X4", propose(UINT8), [Operand(UINT8, (), 0.25), *PROPOSALS_OUT[1:]]),
    ("DETECTION_POSTPROCESSING", "X5", detect(scores=f(1, 2, 2)), NMS_OUT),
    ("DETECTION_POSTPROCESSING", "X5", detect(scores=f(1, 3, 1)), NMS_OUT),
    ("DETECTION_POSTPROCESSING", "X5", detect(scores=f(3, 2)), NMS_OUT),
    ("DETECTION_POSTPROCESSING", "X5", detect(scores=f(1, 3)), NMS_OUT),
    ("DETECTION_POSTPROCESSING", "X5", detect(deltas=f(1, 2, 4)), NMS_OUT),
    ("DETECTION_POSTPROCESSING", "X5", detect(deltas=f(1, 3, 3)), NMS_OUT),
    ("DETECTION_POSTPROCESSING", "X5", detect(anchors=f(2, 4)), NMS_OUT),
    ("DETECTION_POSTPROCESSING", "C3", detect(scale=0.0), NMS_OUT),
    ("DETECTION_POSTPROCESSING", "C4", detect(threshold=-0.5), NMS_OUT),
    ("DETECTION_POSTPROCESSING", "C5", detect(limit=0), NMS_OUT),
    ("DETECTION_POSTPROCESSING", "C5", detect(per=0), NMS_OUT),
    ("DETECTION_POSTPROCESSING", "C5", detect(per=-1, regular=False), NMS_OUT),
    ("DETECTION_POSTPROCESSING", "R2", detect(limit=1 << 30, per=1 << 30, regular=False), NMS_OUT),
]  # fmt: skip

ONLY_DATA_VIOLATE = {"bounding_boxes": {"X2", "X3"}, "detection": {"C2"}, "roi": {"C5", "C6"}}
SHARED = {"X1", "X2", "X3", "X4", "X5"}


def violation_id(code: str, constraint: str, *_: Any) -> str:
    return f"{code.lower()}_{constraint.lower()}"


@pytest.mark.parametrize(
    ("code", "constraint", "arguments", "outputs"), VIOLATIONS, ids=list(itertools.starmap(violation_id, VIOLATIONS))
)
def test_N_OPF_a_violated_constraint_is_named(
    code: str, constraint: str, arguments: list[Any], outputs: list[Operand]
) -> None:
    given = [argument(value) for value in arguments]
    inputs = [position for position, (operand, array) in enumerate(given) if is_empty(array) or operand.type == F32]
    open_ended = [(Operand(o.type, (), o.scale, o.zero_point), a) if is_empty(a) else (o, a) for o, a in given]
    model = model_of(OperationType[code], open_ended, outputs, set(range(len(given))) - set(inputs))

    with pytest.raises(GeneralFailure, match=rf"operation 0 \({code}\): .*\({constraint}\)$"):
        interpreter.prepare(model).execute([given[i][1] for i in inputs], [bytearray(1 << 16) for _ in outputs])


def is_empty(array: npt.NDArray[Any]) -> bool:
    return not array.size


@pytest.mark.parametrize(
    "family",
    [bounding_boxes, convolution, detection, keypoints, batch_matmul, normalization, roi, transpose_conv],
    ids=lambda f: f.__name__,
)
def test_every_constraint_that_a_family_explains_is_violated(family: Any) -> None:
    explained = set(re.findall(r"\b([ACQRWX]\d)\b", family.__doc__))
    codes = {declaration.name for declaration in family.DECLARATIONS}
    violated = {constraint for code, constraint, *_ in VIOLATIONS if code in codes}
    expected = explained if family is bounding_boxes else explained - SHARED

    assert expected - violated == ONLY_DATA_VIOLATE.get(family.__name__.rpartition(".")[2], set())
