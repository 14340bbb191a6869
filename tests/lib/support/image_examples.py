"""One example of real values for each operation on images and boxes, as arguments of every form, type and layout.

The values are whole multiples of every scale used, so that each type stores them exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nnfmq.hal.types import ChannelQuant, Operand, OperandType
from nnfmq.operations import (
    batch_matmul,
    bounding_boxes,
    convolution,
    detection,
    fully_connected,
    keypoints,
    normalization,
    pooling,
    roi,
    transpose_conv,
)
from nnfmq.operations.declaration import NUMPY_TYPES, Declaration, Overload, Parameter, Role, Variant

Array = npt.NDArray[Any]

FAMILIES = (
    bounding_boxes, convolution, detection, fully_connected, keypoints, batch_matmul,
    normalization, pooling, roi, transpose_conv,
)  # fmt: skip
DECLARATIONS = {d.name: d for family in FAMILIES for d in family.DECLARATIONS}
UINT8, INT8 = OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED
PER_CHANNEL, UINT16 = OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL, OperandType.TENSOR_QUANT16_ASYMM
INT16, INT32 = OperandType.TENSOR_QUANT16_SYMM, OperandType.TENSOR_INT32
TO_NCHW = (0, 3, 1, 2)


def whole(*shape: int, most: int = 3, seed: int = 1) -> Array:
    return np.random.default_rng(seed).integers(-most, most + 1, shape).astype(np.float64)


GEOMETRY = {
    "padding_scheme": 1, "padding_left": 1, "padding_right": 0, "padding_top": 1, "padding_bottom": 1,
    "stride_width": 2, "stride_height": 1, "dilation_width": 1, "dilation_height": 2,
    "activation": 1, "filter_width": 2, "filter_height": 3,
}  # fmt: skip
IMAGE = whole(2, 5, 6, 4)
REGIONS = np.array([[0, 0, 4, 3], [1.5, 0.5, 5, 4.5], [2, 2, 2, 2]])
PLACES = np.array([[0, 0, 8, 8], [1, 0, 9, 8], [20, 4, 30, 12], [0, 0, 31.5, 6], [2, 2, 10, 9]])
SIZES = {"height": 2, "width": 3, "height_stride": 1.0, "width_stride": 1.0, "height_ratio": 2, "width_ratio": 0}
SCORES = (np.random.default_rng(2).permutation(40)[:15] / 64 + 1 / 8).reshape(5, 3)

EXAMPLES: dict[str, dict[str, Any]] = {
    "CONV_2D": {"input": IMAGE, "filter": whole(3, 3, 2, 4, most=1), "bias": whole(3)},
    "GROUPED_CONV_2D": {"input": IMAGE, "filter": whole(6, 3, 2, 2), "bias": whole(6), "groups": 2},
    "DEPTHWISE_CONV_2D": {
        "input": IMAGE, "filter": whole(1, 3, 2, 8), "bias": whole(8), "depth_multiplier": 2,
    },
    "TRANSPOSE_CONV_2D": {
        "input": IMAGE, "filter": whole(3, 3, 2, 4, most=1), "bias": whole(3),
        "output_shape": np.array([2, 5, 12, 3]), "padding_right": -1,
    },
    **{name: {"input": IMAGE} for name in ("AVERAGE_POOL_2D", "L2_POOL_2D", "MAX_POOL_2D")},
    "FULLY_CONNECTED": {"input": whole(3, 2, 4), "weights": whole(5, 8, most=2), "bias": whole(5)},
    "BATCH_MATMUL": {"left": whole(2, 3, 4), "right": whole(2, 3, 5), "adjoint_left": True, "adjoint_right": False},
    "L2_NORMALIZATION": {"input": IMAGE, "axis": -3},
    "LOCAL_RESPONSE_NORMALIZATION": {
        "input": IMAGE, "radius": 1, "bias": 2.0, "alpha": 0.5, "beta": 0.5, "axis": 2,
    },
    "INSTANCE_NORMALIZATION": {"input": IMAGE, "gamma": 2.0, "beta": 1.0, "epsilon": 0.5},
    "ROI_ALIGN": {"input": IMAGE, "regions": REGIONS, "batches": np.array([0, 1, 1]), **SIZES},
    "ROI_POOLING": {"input": IMAGE, "regions": REGIONS, "batches": np.array([0, 1, 1]), **SIZES},
    "HEATMAP_MAX_KEYPOINT": {"heatmap": whole(5, 6, 6, 4, most=20), "boxes": PLACES},
    "AXIS_ALIGNED_BBOX_TRANSFORM": {
        "boxes": PLACES, "deltas": whole(5, 8) / 16, "batches": np.array([0, 0, 0, 1, 1]),
        "image_info": np.array([[32, 30], [10, 28]]),
    },
    "BOX_WITH_NMS_LIMIT": {
        "scores": SCORES, "boxes": np.repeat(PLACES, 3, axis=0).reshape(5, 12), "batches": np.array([0, 0, 0, 2, 2]),
        "score_threshold": 0.25, "limit": 3, "kernel": 1, "iou_threshold": 0.5, "sigma": 0.5,
        "nms_score_threshold": 0.25,
    },
    "GENERATE_PROPOSALS": {
        "scores": np.resize(SCORES, (1, 2, 2, 3)), "deltas": whole(1, 2, 2, 12) / 16, "anchors": PLACES[:3] - 2,
        "image_info": np.array([[32, 30]]), "height_stride": 8.0, "width_stride": 4.0, "pre_nms_limit": 10,
        "post_nms_limit": 5, "iou_threshold": 0.5, "min_size": 1.0,
    },
    "DETECTION_POSTPROCESSING": {
        "scores": SCORES.reshape(1, 5, 3), "deltas": whole(1, 5, 4) / 16, "anchors": np.abs(PLACES) / 8 + 1,
        "scale_y": 1.0, "scale_x": 2.0, "scale_h": 1.0, "scale_w": 2.0, "regular_nms": False, "limit": 2,
        "classes_per_detection": 2, "limit_per_class": 3, "score_threshold": 0.25, "iou_threshold": 0.5,
        "background_in_label": False,
    },
}  # fmt: skip
QUANTIZATIONS = {"scores": (1 / 64, 16), "deltas": (1 / 16, 128)}  # of uint8; all others (0.5, 128)
OUTPUTS = {
    "L2_NORMALIZATION": (1 / 128, 128), "BOX_WITH_NMS_LIMIT": (1 / 64, 16), "GENERATE_PROPOSALS": (1 / 64, 16),
}  # fmt: skip


def cases() -> Iterator[Any]:
    """Yield each declaration with each variant, form and layout."""
    for name, declaration in DECLARATIONS.items():
        for variant in declaration.variants:
            for number, one in enumerate(declaration.overloads):
                for nchw in (False, True) if declaration.images else (False,):
                    types = "-".join(t.name.removeprefix("TENSOR_") for t in variant.types.values())
                    label = f"{name}-{types}-{number}-{'nchw' if nchw else 'nhwc'}"
                    yield pytest.param(declaration, one, variant, nchw, id=label)


CASES = list(cases())


def quantized(kind: OperandType, scale: float, zero_point: int, channels: tuple[int, int] = (0, 0)) -> Operand:
    """Return an operand of `kind`; scale and zero point are those of uint8."""
    if kind in (UINT8, INT8):
        return Operand(kind, (), scale, zero_point - 128 * (kind == INT8))
    if kind in (UINT16, INT16):
        return Operand(kind, (), 0.125)
    if kind == PER_CHANNEL:
        count, dimension = channels
        return Operand(kind, (), channel_quant=ChannelQuant((0.5,) * count, dimension))
    return Operand(kind)


def kind_of(column: Any, variant: Variant) -> OperandType:
    kind = variant.types[column] if isinstance(column, str) else column
    assert isinstance(kind, OperandType)
    return kind


def stored(operand: Operand, real: Any) -> Array:
    """Return real numbers as `operand` stores them."""
    scale = 0.5 if operand.type == PER_CHANNEL else operand.scale
    codes = np.asarray(real) / scale + operand.zero_point if scale else np.asarray(real)
    return codes.astype(NUMPY_TYPES[operand.type])


def argument(declaration: Declaration, parameter: Parameter, variant: Variant, nchw: bool) -> tuple[Operand, Array]:
    kind = kind_of(parameter.type, variant)
    if parameter.name == "nchw":
        return Operand(kind), np.array(nchw, np.uint8)
    value = {**GEOMETRY, **EXAMPLES[declaration.name]}[parameter.name]
    dimension = 3 if declaration.name == "DEPTHWISE_CONV_2D" else 0
    channels = (np.shape(value)[dimension], dimension) if kind == PER_CHANNEL else (0, 0)
    operand = quantized(kind, *QUANTIZATIONS.get(parameter.name, (0.5, 128)), channels)
    if parameter.name == "bias" and kind == INT32:
        is_per_channel = variant.types["F" if "F" in variant.types else "T"] == PER_CHANNEL
        return Operand(kind, (), 0.0 if is_per_channel else 0.25), (np.asarray(value) / 0.25).astype(np.int32)
    if nchw and parameter.name in declaration.images:
        value = value[list(TO_NCHW)] if np.ndim(value) == 1 else np.transpose(value, TO_NCHW)
    return operand, stored(operand, value)


def arguments_of(
    declaration: Declaration, overload: Overload, variant: Variant, nchw: bool
) -> list[tuple[Operand, Array]]:
    return [argument(declaration, parameter, variant, nchw) for parameter in overload.parameters]


def outputs_of(declaration: Declaration, variant: Variant) -> list[Operand]:
    quantization = OUTPUTS.get(declaration.name, (0.5, 128))
    return [quantized(kind_of(column, variant), *quantization) for column in declaration.outputs]


def constants_of(overload: Overload) -> list[int]:
    return [i for i, parameter in enumerate(overload.parameters) if parameter.role is not Role.DATA]
