"""Convolutions, pools, products of matrices, resizing, regions and boxes."""

from __future__ import annotations

from typing import Any

import numpy as np

from nnfmq.hal.types import Operand, OperandType, OperationType
from support.one_result import results_of
from support.onnx_cases.movement import int64
from support.onnx_runtime import by_onnx, channels_last
from support.oracles import FLOAT, Argument, Array, Builder, Case, Draw, Listed

F32 = OperandType.TENSOR_FLOAT32


def floats(array: Array) -> Argument:
    """Return an argument of TENSOR_FLOAT32."""
    return Operand(F32, array.shape), array.astype(np.float32)


def window(draw: Draw, extents: list[int], dilations: list[int]) -> list[int]:
    """Return paddings (left, right, top, bottom), less than a filter of (height, width) spans."""
    tall, wide = ((extent - 1) * dilation + 1 for extent, dilation in zip(extents, dilations, strict=True))
    return [draw.below(0, span) for span in (wide, wide, tall, tall)]


def onnx_pads(paddings: list[int]) -> list[int]:
    """Return ONNX's top, left, bottom, right of the HAL's left, right, top, bottom."""
    left, right, top, bottom = paddings
    return [top, left, bottom, right]


def convolution(code: str) -> Builder:
    """Build CONV_2D, DEPTHWISE_CONV_2D or GROUPED_CONV_2D with explicit paddings, channels first or last."""

    def build(draw: Draw) -> Case:
        groups = 1 if code == "CONV_2D" else draw.below(2, 5)
        each = 1 if code == "DEPTHWISE_CONV_2D" else draw.below(1, 4)
        many, first = draw.below(1, 4), draw.truth()
        extents, strides = [draw.below(1, 4), draw.below(1, 4)], [draw.below(1, 3), draw.below(1, 3)]
        dilations = [1, 1] if code == "GROUPED_CONV_2D" else [draw.below(1, 3), draw.below(1, 3)]
        paddings, units = window(draw, extents, dilations), groups * many
        image = draw.tensor((draw.below(1, 3), groups * each, draw.below(6, 10), draw.below(6, 10)), -1, 1)[1]
        filter, bias = draw.tensor((units, each, *extents), -1, 1)[1], draw.tensor((units,))
        hal_filter = np.moveaxis(filter, 0, -1)[0][None] if code == "DEPTHWISE_CONV_2D" else channels_last(filter)
        controls: list[Any] = [*paddings, strides[1], strides[0]]
        controls += {"CONV_2D": [], "DEPTHWISE_CONV_2D": [many], "GROUPED_CONV_2D": [groups]}[code]
        controls += [0, first, *([] if code == "GROUPED_CONV_2D" else [dilations[1], dilations[0]])]
        data = [floats(image if first else channels_last(image)), floats(np.ascontiguousarray(hal_filter)), bias]

        def run_onnx() -> list[Array]:
            (found,) = by_onnx(
                "Conv", [image, filter, bias[1]], group=groups, pads=onnx_pads(paddings), strides=strides,
                dilations=dilations,
            )  # fmt: skip
            return [found if first else channels_last(found)]

        return Case(lambda: results_of(OperationType[code], [*data, *controls], [Operand(F32)]), run_onnx)

    return build


def transposed_convolution(draw: Draw) -> Case:
    """Build TRANSPOSE_CONV_2D with explicit paddings."""
    depth, units = draw.below(1, 4), draw.below(1, 4)
    extents, strides = [draw.below(2, 5), draw.below(2, 5)], [draw.below(1, 4), draw.below(1, 4)]
    paddings = [draw.below(0, 2) for _ in range(4)]
    image = draw.tensor((draw.below(1, 3), depth, draw.below(2, 6), draw.below(2, 6)), -1, 1)[1]
    filter, bias = draw.tensor((depth, units, *extents), -1, 1)[1], draw.tensor((units,))
    hal_filter = floats(np.ascontiguousarray(filter.transpose(1, 2, 3, 0)))
    rest = [*paddings, strides[1], strides[0], 0, True]
    return Case(
        lambda: results_of(OperationType.TRANSPOSE_CONV_2D, [floats(image), hal_filter, bias, *rest], [Operand(F32)]),
        lambda: by_onnx("ConvTranspose", [image, filter, bias[1]], pads=onnx_pads(paddings), strides=strides),
    )


def pool(name: str, code: str) -> Builder:
    """Build a pool with explicit paddings. ONNX's LpPool is no mean: it gets no padding, and is divided."""

    def build(draw: Draw) -> Case:
        extents, strides = [draw.below(1, 4), draw.below(1, 4)], [draw.below(1, 4), draw.below(1, 4)]
        argument = draw.tensor((draw.below(1, 3), draw.below(1, 4), draw.below(4, 9), draw.below(4, 9)))
        paddings = [0] * 4 if name == "LpPool" else window(draw, extents, [1, 1])
        rest = [*paddings, strides[1], strides[0], extents[1], extents[0], 0, True]
        extra = {"p": 2} if name == "LpPool" else {}
        share = np.float32(1 / np.sqrt(np.prod(extents))) if name == "LpPool" else argument[1].dtype.type(1)

        def run_onnx() -> list[Array]:
            options: dict[str, Any] = {
                "kernel_shape": extents,
                "strides": strides,
                "pads": onnx_pads(paddings),
                **extra,
            }
            return [by_onnx(name, [argument[1]], **options)[0] * share]

        return Case(lambda: results_of(OperationType[code], [argument, *rest], [argument[0]]), run_onnx)

    return build


def gemm(draw: Draw) -> Case:
    """Build FULLY_CONNECTED."""
    rows, length, units = draw.shape(3, 12)
    data = [draw.tensor(shape, -1, 1) for shape in ((rows, length), (units, length), (units,))]
    return Case(
        lambda: results_of(OperationType.FULLY_CONNECTED, [*data, 0], [Operand(F32)]),
        lambda: by_onnx("Gemm", [array for _, array in data], transB=1),
    )


def matrices(draw: Draw) -> Case:
    """Build BATCH_MATMUL, either side transposed or not."""
    batch, (rows, length, columns) = draw.shape(draw.below(0, 3), 3), draw.shape(3, 7)
    left, right = draw.tensor((*batch, rows, length), -1, 1), draw.tensor((*batch, length, columns), -1, 1)
    turned = [draw.truth(), draw.truth()]
    data = [
        (operand, np.ascontiguousarray(np.swapaxes(array, -1, -2) if turn else array))
        for (operand, array), turn in zip((left, right), turned, strict=True)
    ]
    return Case(
        lambda: results_of(OperationType.BATCH_MATMUL, [*data, *turned], [left[0]]),
        lambda: by_onnx("MatMul", [left[1], right[1]]),
    )


def resize(mode: str, code: str) -> Builder:
    """Build RESIZE_BILINEAR or RESIZE_NEAREST_NEIGHBOR with one of the three coordinate mappings.

    Nearest neighbours only of such extents that all places are exact: what is rounded decides which one is taken.
    """
    rounding = {"asymmetric": "floor", "align_corners": "round_prefer_ceil", "half_pixel": "round_prefer_ceil"}

    def build(draw: Draw) -> Case:
        place = ("asymmetric", "align_corners", "half_pixel")[draw.below(0, 3)]
        argument = draw.tensor(draw.shape(4))
        sizes = [draw.below(2, 12), draw.below(2, 12)]
        if mode == "nearest":
            sizes = [_exact_size(draw, extent, place) for extent in argument[1].shape[2:]]
        flags = [place == "align_corners", place == "half_pixel"]
        rest = [sizes[1], sizes[0], True, *flags]
        options: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": place}
        if mode == "nearest":
            options["nearest_mode"] = rounding[place]
        whole = int64([*argument[1].shape[:2], *sizes])
        return Case(
            lambda: results_of(OperationType[code], [argument, *rest], [argument[0]]),
            lambda: by_onnx("Resize", [argument[1], None, None, whole], **options),
        )

    return build


def _exact_size(draw: Draw, extent: int, place: str) -> int:
    """Return a size to which `extent` goes by a power of two, from corner to corner where these are aligned."""
    times = 1 << draw.below(0, 3)
    return (extent - 1) * times + 1 if place == "align_corners" else extent * times


def regions(draw: Draw, extents: tuple[int, int], stride: float) -> Array:
    """Return some regions (x1, y1, x2, y2) inside an image of (height, width) cells of `stride`.

    None is thinner than a cell: it would be made a cell wide, and ONNX takes zeros where it is off the image then.
    """
    max_start = np.array(extents[::-1]) - 1.0
    starts = draw.rng.uniform(0, 1, (draw.below(1, 6), 2)) * max_start
    ends = starts + 1 + draw.rng.uniform(0, 1, starts.shape) * (max_start - starts)
    return np.asarray(np.concatenate([starts, ends], axis=1) * stride, np.float32)


def roi_align(draw: Draw) -> Case:
    """Build ROI_ALIGN, with a fixed count of samples or as many as needed."""
    argument = draw.tensor((draw.below(1, 3), draw.below(1, 4), draw.below(4, 12), draw.below(4, 12)))
    (height, width), stride, ratio = draw.shape(2, 4), 2.0 ** draw.below(0, 3), draw.below(0, 3)
    boxes = regions(draw, argument[1].shape[2:], stride)
    places = draw.rng.integers(0, len(argument[1]), len(boxes))
    batches = Operand(OperandType.TENSOR_INT32, places.shape), places.astype(np.int32)
    rest = [height, width, stride, stride, ratio, ratio, True]
    options: dict[str, Any] = {"output_height": height, "output_width": width, "sampling_ratio": ratio}
    options |= {"spatial_scale": 1 / stride, "coordinate_transformation_mode": "output_half_pixel"}
    return Case(
        lambda: results_of(OperationType.ROI_ALIGN, [argument, floats(boxes), batches, *rest], [argument[0]]),
        lambda: by_onnx("RoiAlign", [argument[1], boxes, int64(places)], **options),
    )


def roi_pooling(draw: Draw) -> Case:
    """Build ROI_POOLING, which is MaxRoiPool."""
    argument = draw.tensor((draw.below(1, 3), draw.below(1, 4), draw.below(4, 12), draw.below(4, 12)))
    (height, width), stride = draw.shape(2, 4), 2.0 ** draw.below(0, 3)
    boxes = regions(draw, argument[1].shape[2:], stride)
    places = draw.rng.integers(0, len(argument[1]), len(boxes))
    batches = Operand(OperandType.TENSOR_INT32, places.shape), places.astype(np.int32)
    rest = [height, width, stride, stride, True]
    rois = np.concatenate([places[:, None].astype(np.float32), boxes], axis=1)
    return Case(
        lambda: results_of(OperationType.ROI_POOLING, [argument, floats(boxes), batches, *rest], [argument[0]]),
        lambda: by_onnx("MaxRoiPool", [argument[1], rois], pooled_shape=[height, width], spatial_scale=1 / stride),
    )


def suppression(draw: Draw) -> Case:
    """Build BOX_WITH_NMS_LIMIT with hard suppression and no limit: one image, the background's class left out.

    Each class has the same boxes, as in ONNX. Both sides' results are brought into one order.
    """
    count, classes = draw.below(1, 12), draw.below(2, 5)
    corners = draw.rng.uniform(0, 6, (count, 2))
    boxes = np.concatenate([corners, corners + draw.rng.uniform(1, 6, (count, 2))], axis=1).astype(np.float32)
    scores = draw.rng.random((count, classes)).astype(np.float32)
    least, overlap = draw.real(0.1, 0.5), draw.real(0.2, 0.7)
    batches = Operand(OperandType.TENSOR_INT32, (count,)), np.zeros(count, np.int32)
    rest = [least, -1, 0, overlap, 1.0, 0.01]  # suppressed ones get a score of 0, which drops them
    outputs = [Operand(F32), Operand(F32), Operand(OperandType.TENSOR_INT32), Operand(OperandType.TENSOR_INT32)]

    def run_nnfmq() -> list[Array]:
        data = [floats(scores), floats(np.tile(boxes, classes)), batches]
        rated, chosen, kinds, _ = results_of(OperationType.BOX_WITH_NMS_LIMIT, [*data, *rest], outputs)
        order = np.lexsort((rated, kinds))
        return [rated[order], chosen[order], kinds[order]]

    def run_onnx() -> list[Array]:
        limits = [int64([count]), np.array([overlap], np.float32), np.array([least], np.float32)]
        (found,) = by_onnx("NonMaxSuppression", [boxes[None], scores.T[None].copy(), *limits])
        kinds, rows = found[found[:, 1] > 0][:, 1:].T
        order = np.lexsort((scores[rows, kinds], kinds))
        kinds, rows = kinds[order], rows[order]
        return [scores[rows, kinds], boxes[rows], kinds.astype(np.int32)]

    return Case(run_nnfmq, run_onnx)


CASES: list[Listed] = [
    ("Conv", FLOAT, convolution("CONV_2D")),
    ("Conv", FLOAT, convolution("GROUPED_CONV_2D")),
    ("Conv", FLOAT, convolution("DEPTHWISE_CONV_2D")),
    ("ConvTranspose", FLOAT, transposed_convolution),
    ("AveragePool", FLOAT, pool("AveragePool", "AVERAGE_POOL_2D")),
    ("MaxPool", ("float32", "uint8", "int8"), pool("MaxPool", "MAX_POOL_2D")),
    ("LpPool", FLOAT, pool("LpPool", "L2_POOL_2D")),
    ("Gemm", FLOAT, gemm),
    ("MatMul", (*FLOAT, "int32"), matrices),
    ("Resize, linear", FLOAT, resize("linear", "RESIZE_BILINEAR")),
    ("Resize, nearest", FLOAT, resize("nearest", "RESIZE_NEAREST_NEIGHBOR")),
    ("RoiAlign", FLOAT, roi_align),
    ("MaxRoiPool", FLOAT, roi_pooling),
    ("NonMaxSuppression", FLOAT, suppression),
]
