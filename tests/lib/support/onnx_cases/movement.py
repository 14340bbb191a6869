"""Data movement."""

from __future__ import annotations

import numpy as np

from nnfmq.hal.types import Operand, OperandType, OperationType
from support.one_result import results_of
from support.onnx_runtime import by_onnx, channels_first, channels_last
from support.oracles import FLOAT, NUMBERS, Array, Builder, Case, Draw, Listed, integers


def int64(values: object) -> Array:
    """Return indexes in the type that ONNX requires."""
    return np.asarray(values, np.int64)


def gather(draw: Draw) -> Case:
    """Build GATHER along any axis."""
    argument = draw.tensor(draw.shape(draw.below(1, 4)))
    axis = draw.below(-argument[1].ndim, argument[1].ndim)
    places = draw.rng.integers(0, argument[1].shape[axis], draw.shape(draw.below(1, 3)))
    return Case(
        lambda: results_of(OperationType.GATHER, [argument, axis, integers(places)], [argument[0]]),
        lambda: by_onnx("Gather", [argument[1], int64(places)], axis=axis),
    )


def embedding_lookup(draw: Draw) -> Case:
    """Build EMBEDDING_LOOKUP, which is Gather along the first axis."""
    values = draw.tensor(draw.shape(3))
    places = draw.rng.integers(0, values[1].shape[0], draw.below(1, 9)).astype(np.int32)
    lookups = Operand(OperandType.TENSOR_INT32, places.shape), places
    return Case(
        lambda: results_of(OperationType.EMBEDDING_LOOKUP, [lookups, values], [values[0]]),
        lambda: by_onnx("Gather", [values[1], places]),
    )


def pad(draw: Draw) -> Case:
    """Build PAD_V2 with a float or a quantized value."""
    argument = draw.tensor(draw.shape(draw.below(1, 5)))
    paddings, value = draw.rng.integers(0, 4, (argument[1].ndim, 2)), draw.tensor((1,))[1][0]
    return Case(
        lambda: results_of(OperationType.PAD_V2, [argument, integers(paddings), value.item()], [argument[0]]),
        lambda: by_onnx("Pad", [argument[1], int64(paddings.T.ravel()), np.asarray(value)]),
    )


def mirror_pad(draw: Draw) -> Case:
    """Build MIRROR_PAD that leaves the edge out; ONNX has no mode that repeats it."""
    argument = draw.tensor(draw.shape(draw.below(1, 5)))
    paddings = np.array([[draw.below(0, extent) for _ in range(2)] for extent in argument[1].shape])
    return Case(
        lambda: results_of(OperationType.MIRROR_PAD, [argument, integers(paddings), 0], [argument[0]]),
        lambda: by_onnx("Pad", [argument[1], int64(paddings.T.ravel())], mode="reflect"),
    )


def strided_slice(draw: Draw) -> Case:
    """Build STRIDED_SLICE without masks: strides of both signs, and ends as they may be written."""
    argument = draw.tensor(draw.shape(draw.below(1, 5)))
    axes = []
    for extent in argument[1].shape:
        stride = draw.below(1, 4) * (1 - 2 * draw.below(0, 2))
        first, last = sorted(draw.below(0, extent) for _ in range(2))
        begin, end = (first, last + 1) if stride > 0 else (last, first - 1)
        # -1 as an end would mean the last element: the position before the first element is therefore relative to the
        # other end.
        end = -extent - 1 if end == -1 else end - extent if end < extent and draw.truth() else end
        axes.append((begin - extent if draw.truth() else begin, end, stride))
    begins, ends, strides = (list(part) for part in zip(*axes, strict=True))
    rest = [integers(begins), integers(ends), integers(strides), 0, 0, 0]
    numbered = [int64(part) for part in (begins, ends, range(len(axes)), strides)]
    return Case(
        lambda: results_of(OperationType.STRIDED_SLICE, [argument, *rest], [argument[0]]),
        lambda: by_onnx("Slice", [argument[1], *numbered]),
    )


def cut(draw: Draw) -> Case:
    """Build SLICE."""
    argument = draw.tensor(draw.shape(draw.below(1, 6), 4))
    begins = [draw.below(0, extent) for extent in argument[1].shape]
    sizes = [draw.below(1, e - b + 1) for e, b in zip(argument[1].shape, begins, strict=True)]
    ends = np.add(begins, sizes)
    return Case(
        lambda: results_of(OperationType.SLICE, [argument, integers(begins), integers(sizes)], [argument[0]]),
        lambda: by_onnx("Slice", [argument[1], int64(begins), int64(ends)]),
    )


def split(draw: Draw) -> Case:
    """Build SPLIT in equal parts."""
    count, shape = draw.below(1, 4), list(draw.shape(draw.below(1, 6), 4))
    axis = draw.below(-len(shape), len(shape))
    shape[axis] *= count
    argument = draw.tensor(tuple(shape))
    return Case(
        lambda: results_of(OperationType.SPLIT, [argument, axis, count], [argument[0]] * count),
        lambda: by_onnx("Split", [argument[1]], count, axis=axis, num_outputs=count),
    )


def tile(draw: Draw) -> Case:
    """Build TILE."""
    argument = draw.tensor(draw.shape(draw.below(1, 6), 4))
    times = draw.rng.integers(1, 4, argument[1].ndim)
    return Case(
        lambda: results_of(OperationType.TILE, [argument, integers(times)], [argument[0]]),
        lambda: by_onnx("Tile", [argument[1], int64(times)]),
    )


def transpose(draw: Draw) -> Case:
    """Build TRANSPOSE."""
    argument = draw.tensor(draw.shape(draw.below(1, 5)))
    order = draw.rng.permutation(argument[1].ndim)
    return Case(
        lambda: results_of(OperationType.TRANSPOSE, [argument, integers(order)], [argument[0]]),
        lambda: by_onnx("Transpose", [argument[1]], perm=order.tolist()),
    )


def concatenation(draw: Draw) -> Case:
    """Build CONCATENATION of tensors of one scale and zero point."""
    shape = draw.shape(draw.below(1, 5))
    axis = draw.below(0, len(shape))
    operand = draw.operand(shape)
    shapes = [(*shape[:axis], draw.below(1, 5), *shape[axis + 1 :]) for _ in range(draw.below(1, 5))]
    parts = [(operand, draw.tensor(part)[1]) for part in shapes]
    return Case(
        lambda: results_of(OperationType.CONCATENATION, [*parts, axis], [operand]),
        lambda: by_onnx("Concat", [array for _, array in parts], axis=axis),
    )


def largest(draw: Draw) -> Case:
    """Build TOPK_V2 of different numbers: of equal ones the HAL puts the last first, ONNX the first."""
    shape = (*draw.shape(2, 3), draw.below(1, 9))
    operand = draw.operand(shape)
    low = -128 if draw.dtype == "int8" else 0
    numbers = (draw.rng.permutation(int(np.prod(shape))).reshape(shape) + low).astype(draw.dtype)
    k = draw.below(1, shape[-1] + 1)
    outputs = [operand, Operand(OperandType.TENSOR_INT32)]

    def run_onnx() -> list[Array]:
        values, places = by_onnx("TopK", [numbers.astype(np.float32), int64([k])], 2)
        return [values.astype(numbers.dtype), places.astype(np.int32)]

    return Case(lambda: results_of(OperationType.TOPK_V2, [(operand, numbers), k], outputs), run_onnx)


def to_depth(name: str, code: str) -> Builder:
    """Build SPACE_TO_DEPTH or DEPTH_TO_SPACE, channels last in the HAL."""

    def build(draw: Draw) -> Case:
        block, (batch, height, width, depth) = draw.below(1, 4), draw.shape(4, 3)
        times = (1, block, block, 1) if name == "SpaceToDepth" else (1, 1, 1, block * block)
        argument = draw.tensor(tuple(np.multiply((batch, height, width, depth), times).tolist()))
        first = channels_first(argument[1])
        return Case(
            lambda: results_of(OperationType[code], [argument, block], [argument[0]]),
            lambda: [channels_last(by_onnx(name, [first], blocksize=block)[0])],
        )

    return build


CASES: list[Listed] = [
    ("Gather", NUMBERS, gather),
    ("Gather", NUMBERS, embedding_lookup),
    ("Pad", ("float32", "uint8", "int8"), pad),
    ("Pad, reflect", NUMBERS, mirror_pad),
    ("Slice", ("float32", "uint8", "int8"), strided_slice),
    ("Slice", NUMBERS, cut),
    ("Split", NUMBERS, split),
    ("Tile", NUMBERS, tile),
    ("Transpose", ("float32", "uint8", "int8"), transpose),
    ("Concat", ("float32", "uint8", "int8"), concatenation),
    ("TopK", NUMBERS, largest),
    ("SpaceToDepth", FLOAT, to_depth("SpaceToDepth", "SPACE_TO_DEPTH")),
    ("DepthToSpace", FLOAT, to_depth("DepthToSpace", "DEPTH_TO_SPACE")),
]
