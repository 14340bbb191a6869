"""MAX_POOL_WITH_ARGMAX and MAX_UNPOOL: pools that remember where the maximum was, and their inverse.

A position is row · filter width + column within the window, as a float with 0.1 added, which MediaPipe's models expect.

C1 strides and filter sizes are positive; the padding scheme is SAME (1) or VALID (2)
C2 the input and the positions are images of the same shape
"""

from __future__ import annotations

import numpy as np

from nnfmq.hal.tflite_codes import TfliteOperation
from nnfmq.hal.types import PaddingScheme
from nnfmq.operations.shapes import require, require_size, window_dimension
from nnfmq.operations.signature import F32, V1_2, Array, Declaration, Run, Shape, Tensor, attribute, data, overload
from nnfmq.operations.tflite_extension.declaring import own_code, variants_of

_ATTRIBUTES = ("padding_scheme", "stride_width", "stride_height", "filter_width", "filter_height")


def pool_shapes(input: Shape, **window: int) -> tuple[Shape, Shape]:
    """Return the shape of the pooled image, twice."""
    require(len(input) == 4, "C2", f"the input has rank {len(input)}, an image is required")
    scheme = window["padding_scheme"]
    rows = window_dimension(input[1], window["filter_height"], window["stride_height"], 1, scheme)
    columns = window_dimension(input[2], window["filter_width"], window["stride_width"], 1, scheme)
    shape = (input[0], rows.count, columns.count, input[3])
    return shape, shape


def plan_max_pool(input: Tensor, *, output: tuple[Tensor, Tensor], **window: int) -> Run:
    """Plan a pass over the taps of the window; of equal values the first one counts."""
    scheme, (_, out_rows, out_columns, _) = window["padding_scheme"], output[0].shape
    width, height = window["filter_width"], window["filter_height"]
    rows = window_dimension(input.shape[1], height, window["stride_height"], 1, scheme)
    columns = window_dimension(input.shape[2], width, window["stride_width"], 1, scheme)
    borders = ((0, 0), (rows.padding_low, height), (columns.padding_low, width), (0, 0))

    def run(image: Array) -> tuple[Array, Array]:
        padded = np.pad(image, borders, constant_values=-np.inf)
        best = np.full(output[0].shape, np.finfo(np.float32).min, np.float32)
        where = np.zeros(output[1].shape, np.float32)
        for tap in range(height * width):
            y, x = divmod(tap, width)
            stop_y, stop_x = y + rows.stride * out_rows, x + columns.stride * out_columns
            values = padded[:, y : stop_y : rows.stride, x : stop_x : columns.stride]
            better = values > best
            best[better] = values[better]
            where[better] = tap
        return best, where + np.float32(0.1)

    return run


def unpool_shape(input: Shape, positions: Shape, **window: int) -> Shape:
    """Return the shape of the image, larger by the size of the window."""
    require(len(input) == 4 and input == positions, "C2", f"the input is {input}, the positions are {positions}")
    require(min(window[name] for name in _ATTRIBUTES) > 0, "C1", f"the window is {window}")
    known = window["padding_scheme"] in (PaddingScheme.SAME, PaddingScheme.VALID)
    require(known, "C1", f"padding scheme {window['padding_scheme']}")
    shape = (input[0], input[1] * window["filter_height"], input[2] * window["filter_width"], input[3])
    require_size(shape, 4)
    return shape


def plan_unpool(input: Tensor, positions: Tensor, *, output: Tensor, **window: int) -> Run:
    """Plan an image of zeros with the values at their positions; those outside of it are left out."""
    _, height, width, _ = output.shape
    strides, sizes = ((window[f"{kind}_height"], window[f"{kind}_width"]) for kind in ("stride", "filter"))
    paddings = [
        max((extent - 1) * stride + size - whole, 0) // 2
        for extent, stride, size, whole in zip(input.shape[1:3], strides, sizes, (height, width), strict=True)
    ]
    batch, in_y, in_x, channel = np.indices(input.shape, sparse=True)

    def run(image: Array, places: Array) -> Array:
        result = np.zeros(output.shape, output.dtype)
        taps = np.clip(np.nan_to_num(places), 0, 1 << 24).astype(np.int64)
        y = in_y * strides[0] - paddings[0] + taps // sizes[1]
        x = in_x * strides[1] - paddings[1] + taps % sizes[1]
        inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
        batches, channels = (np.broadcast_to(index, image.shape)[inside] for index in (batch, channel))
        result[batches, y[inside], x[inside], channels] = image[inside]
        return result

    return run


DECLARATIONS = (
    Declaration(
        own_code(TfliteOperation.MAX_POOL_WITH_ARGMAX),
        since=V1_2,
        overloads=(overload(data("input"), *map(attribute, _ATTRIBUTES), level=V1_2),),
        variants=variants_of((F32,), plan_max_pool),
        shape=pool_shapes,
        outputs=("T", "T"),
    ),
    Declaration(
        own_code(TfliteOperation.MAX_UNPOOL),
        since=V1_2,
        overloads=(overload(data("input"), data("positions"), *map(attribute, _ATTRIBUTES), level=V1_2),),
        variants=variants_of((F32,), plan_unpool),
        shape=unpool_shape,
    ),
)
