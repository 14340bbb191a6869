"""Pools, resizing, normalization, reductions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nnfmq.hal.types import Operand, OperationType
from support.litert import shared
from support.oracles import FLOAT, FLOAT_AND_CODES, Builder, Case, Draw, Listed, integers, like


def windowed(shape: tuple[int, ...], filters: Sequence[int], strides: Sequence[int], same: int) -> tuple[int, ...]:
    """Return the image's extents after filters and strides, each (height, width)."""
    sizes = [-(-(n if same else n - f + 1) // s) for n, f, s in zip(shape[1:3], filters, strides, strict=True)]
    return (shape[0], *sizes, shape[3])


def pool(name: str) -> Builder:
    """Build a pool with a fused activation."""

    def build(draw: Draw) -> Case:
        argument = draw.tensor((draw.below(1, 3), draw.below(4, 9), draw.below(4, 9), draw.below(1, 4)))
        same, sizes, code = draw.below(0, 2), [draw.below(1, 4) for _ in range(4)], draw.below(0, 4)
        options = dict(zip(("StrideW", "StrideH", "FilterWidth", "FilterHeight"), sizes, strict=True))
        options |= {"Padding": 1 - same, "FusedActivationFunction": code}
        output = like(argument[0], windowed(argument[1].shape, sizes[3::-1][:2], sizes[1::-1], same))
        rest = [2 - same, *sizes, code]
        return shared(name, OperationType[name], [argument], output, rest, (), "Pool2DOptions", options)

    return build


def reduction(name: str, code: OperationType) -> Builder:
    """Build a reduction over some axes."""

    def build(draw: Draw) -> Case:
        argument = draw.tensor(draw.shape(4))
        axes = np.sort(draw.rng.permutation(4)[: draw.below(1, 4)])
        keep = draw.truth()
        shape = tuple(1 if n in axes else e for n, e in enumerate(argument[1].shape) if keep or n not in axes)
        rest = [integers(axes), int(keep) if name == "MEAN" else keep]
        output = like(argument[0], shape)
        return shared(name, code, [argument], output, rest, [integers(axes)], "ReducerOptions", {"KeepDims": keep})

    return build


def resize(name: str) -> Builder:
    """Build a resizing with one of the three coordinate mappings."""

    def build(draw: Draw) -> Case:
        argument = draw.tensor(draw.shape(4))
        height, width = draw.below(1, 12), draw.below(1, 12)
        aligned, half_pixel = [(False, False), (True, False), (False, True)][draw.below(0, 3)]
        shape = (argument[1].shape[0], height, width, argument[1].shape[3])
        options = {"AlignCorners": aligned, "HalfPixelCenters": half_pixel}
        table = "ResizeBilinearOptions" if name == "RESIZE_BILINEAR" else "ResizeNearestNeighborOptions"
        rest, size = [width, height, False, aligned, half_pixel], integers([height, width])
        return shared(name, OperationType[name], [argument], like(argument[0], shape), rest, [size], table, options)

    return build


def l2_normalization(draw: Draw) -> Case:
    """Build L2_NORMALIZATION over the last axis; the quantized output has scale 1/128."""
    argument = draw.tensor(draw.shape(4, 9))
    output = argument[0]
    if draw.dtype != "float32":
        output = Operand(argument[0].type, argument[1].shape, 1 / 128, 0 if draw.dtype == "int8" else 128)
    return shared(
        "L2_NORMALIZATION", OperationType.L2_NORMALIZATION, [argument], output, [-1], (), "L2NormOptions",
        {"FusedActivationFunction": 0},
    )  # fmt: skip


def local_response_normalization(draw: Draw) -> Case:
    """Build LOCAL_RESPONSE_NORMALIZATION; TFLite supports only images, along the channels."""
    argument = draw.tensor(draw.shape(4, 9))
    radius, bias, alpha, beta = draw.below(1, 6), draw.real(0.5, 2), draw.real(0.1, 2), draw.real(0.3, 1)
    options = {"Radius": radius, "Bias": bias, "Alpha": alpha, "Beta": beta}
    name = "LOCAL_RESPONSE_NORMALIZATION"
    rest = [radius, bias, alpha, beta]
    return shared(
        name, OperationType[name], [argument], argument[0], rest, (), "LocalResponseNormalizationOptions", options
    )


CASES: list[Listed] = [
    *((name, FLOAT_AND_CODES, pool(name)) for name in ("AVERAGE_POOL_2D", "MAX_POOL_2D")),
    ("L2_POOL_2D", FLOAT, pool("L2_POOL_2D")),
    ("MEAN", FLOAT_AND_CODES, reduction("MEAN", OperationType.MEAN)),
    ("SUM", FLOAT, reduction("SUM", OperationType.REDUCE_SUM)),
    ("REDUCE_PROD", FLOAT, reduction("REDUCE_PROD", OperationType.REDUCE_PROD)),
    ("REDUCE_MAX", FLOAT_AND_CODES, reduction("REDUCE_MAX", OperationType.REDUCE_MAX)),
    ("REDUCE_MIN", FLOAT_AND_CODES, reduction("REDUCE_MIN", OperationType.REDUCE_MIN)),
    ("REDUCE_ALL", ("bool",), reduction("REDUCE_ALL", OperationType.REDUCE_ALL)),
    ("REDUCE_ANY", ("bool",), reduction("REDUCE_ANY", OperationType.REDUCE_ANY)),
    *((name, FLOAT_AND_CODES, resize(name)) for name in ("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR")),
    ("L2_NORMALIZATION", FLOAT_AND_CODES, l2_normalization),
    ("LOCAL_RESPONSE_NORMALIZATION", FLOAT, local_response_normalization),
]
