"""Data movement: slices, paddings, blocks, concatenation."""

from __future__ import annotations

from typing import Any

import numpy as np

from nnfmq.hal.types import Operand, OperandType, OperationType
from support.litert import by_litert, shared
from support.one_result import results_of
from support.oracles import (
    CODES,
    FLOAT_AND_CODES,
    NUMBERS,
    Argument,
    Builder,
    Case,
    Draw,
    Listed,
    integers,
    like,
)


def moved(name: str) -> Builder:
    """Build TRANSPOSE or TILE."""

    def build(draw: Draw) -> Case:
        argument = draw.tensor(draw.shape(3))
        shape, order = np.array(argument[1].shape), draw.rng.permutation(3)
        control = order + 1 if name == "TILE" else order
        held, extents = integers(control), shape * control if name == "TILE" else shape[order]
        return shared(name, OperationType[name], [argument], like(argument[0], extents.tolist()), [held], [held])

    return build


def pad(draw: Draw) -> Case:
    """Build PAD: with 0, or the zero point."""
    argument = draw.tensor(draw.shape(draw.below(1, 5)))
    paddings = draw.rng.integers(0, 4, (argument[1].ndim, 2))
    held, output = integers(paddings), like(argument[0], np.array(argument[1].shape) + paddings.sum(axis=1))
    return shared("PAD", OperationType.PAD, [argument], output, [held], [held], "PadOptions")


def pad_with(draw: Draw) -> Case:
    """Build PADV2 with a float or a quantized value."""
    argument = draw.tensor(draw.shape(draw.below(1, 5)))
    paddings = draw.rng.integers(0, 4, (argument[1].ndim, 2))
    value = draw.tensor((1,))[1]
    held, output = integers(paddings), like(argument[0], np.array(argument[1].shape) + paddings.sum(axis=1))
    constant = Operand(argument[0].type, (), argument[0].scale, argument[0].zero_point), value.tobytes()
    rest = [held, value[0].item()]
    return shared("PADV2", OperationType.PAD_V2, [argument], output, rest, [held, constant], "PadV2Options")


def mirror_pad(draw: Draw) -> Case:
    """Build MIRROR_PAD in both modes, up to the widest padding."""
    argument, mode = draw.tensor(draw.shape(draw.below(1, 5))), draw.below(0, 2)
    paddings = np.array([[draw.below(0, extent + mode) for _ in range(2)] for extent in argument[1].shape])
    held, output = integers(paddings), like(argument[0], np.array(argument[1].shape) + paddings.sum(axis=1))
    options = {"Mode": mode}
    rest = [held, mode]
    return shared("MIRROR_PAD", OperationType.MIRROR_PAD, [argument], output, rest, [held], "MirrorPadOptions", options)


def cut(draw: Draw) -> Case:
    """Build SLICE; a size may be -1."""
    argument = draw.tensor(draw.shape(draw.below(1, 5)))
    begins = [draw.below(0, extent) for extent in argument[1].shape]
    sizes = [draw.below(1, e - b + 1) for e, b in zip(argument[1].shape, begins, strict=True)]
    rest = [e - b for e, b in zip(argument[1].shape, begins, strict=True)]
    asked = [-1 if size == left and draw.truth() else size for size, left in zip(sizes, rest, strict=True)]
    held = [integers(begins), integers(asked)]
    return shared("SLICE", OperationType.SLICE, [argument], like(argument[0], sizes), held, held, "SliceOptions")


def strided_slice(draw: Draw) -> Case:
    """Build STRIDED_SLICE with masks, negative strides and ends beyond the tensor."""
    argument = draw.tensor(draw.shape(draw.below(1, 5)))
    axes = [_axis(draw, extent) for extent in argument[1].shape]
    begins, ends, strides, *flags = zip(*axes, strict=True)
    masks = [sum(flag << place for place, flag in enumerate(of_axes)) for of_axes in flags]
    found = argument[1][tuple(_python_slice(*axis) for axis in axes)]
    held = [integers(begins), integers(ends), integers(strides)]
    options = dict(zip(("BeginMask", "EndMask", "ShrinkAxisMask"), masks, strict=True))
    output = like(argument[0], found.shape)
    name = "STRIDED_SLICE"
    return shared(name, OperationType[name], [argument], output, [*held, *masks], held, "StridedSliceOptions", options)


def _axis(draw: Draw, extent: int) -> tuple[int, ...]:
    """Return begin, end, stride and the three masks' flags of one axis; something is left of it."""
    while True:
        begin, end = draw.below(-extent - 2, extent + 3), draw.below(-extent - 2, extent + 3)
        stride, shrinks = draw.below(1, 4) * (1 - 2 * draw.below(0, 2)), draw.below(0, 6) == 0
        if shrinks:
            begin = draw.below(0, extent)
            return begin, begin + 1, 1, 0, 0, 1
        flags = (draw.below(0, 4) == 0, draw.below(0, 4) == 0, False)
        if range(extent)[_python_slice(begin, end, stride, *flags)]:
            return begin, end, stride, *map(int, flags)


def _python_slice(begin: int, end: int, stride: int, from_start: int, to_end: int, shrinks: int) -> Any:
    return begin if shrinks else slice(None if from_start else begin, None if to_end else end, stride)


def gather(draw: Draw) -> Case:
    """Build GATHER along any axis, by indexes of rank 1 or 2."""
    argument = draw.tensor(draw.shape(draw.below(1, 4)))
    axis = draw.below(0, argument[1].ndim)
    places = draw.rng.integers(0, argument[1].shape[axis], draw.shape(draw.below(1, 3)))
    shape = (*argument[1].shape[:axis], *places.shape, *argument[1].shape[axis + 1 :])
    rest, held = [axis, integers(places)], [integers(places)]
    return shared(
        "GATHER",
        OperationType.GATHER,
        [argument],
        like(argument[0], shape),
        rest,
        held,
        "GatherOptions",
        {"Axis": axis},
    )


def split(draw: Draw) -> Case:
    """Build SPLIT; in TFLite the axis is the first argument."""
    count = draw.below(1, 4)
    shape = list(draw.shape(draw.below(1, 5), 4))
    axis = draw.below(0, len(shape))
    part = tuple(shape)
    shape[axis] *= count
    argument = draw.tensor(tuple(shape))
    outputs = [like(argument[0], part)] * count
    held = Operand(OperandType.TENSOR_INT32, ()), np.int32(axis).tobytes()
    return Case(
        lambda: results_of(OperationType.SPLIT, [argument, axis, count], outputs),
        lambda: by_litert("SPLIT", [held, argument], outputs, "SplitOptions", {"NumSplits": count}),
    )


def reverse(draw: Draw) -> Case:
    """Build REVERSE_V2 of one axis, as the HAL's REVERSE supports."""
    argument = draw.tensor(draw.shape(draw.below(1, 5)))
    held = [integers([draw.below(0, argument[1].ndim)])]
    return shared("REVERSE_V2", OperationType.REVERSE, [argument], argument[0], held, held, "ReverseV2Options")


def to_depth(name: str) -> Builder:
    """Build SPACE_TO_DEPTH or DEPTH_TO_SPACE."""

    def build(draw: Draw) -> Case:
        block, (batch, height, width, depth) = draw.below(1, 4), draw.shape(4, 3)
        spread, packed = (batch, height * block, width * block, depth), (batch, height, width, depth * block * block)
        first, result = (spread, packed) if name == "SPACE_TO_DEPTH" else (packed, spread)
        argument = draw.tensor(first)
        table = "SpaceToDepthOptions" if name == "SPACE_TO_DEPTH" else "DepthToSpaceOptions"
        output, options = like(argument[0], result), {"BlockSize": block}
        return shared(name, OperationType[name], [argument], output, [block], (), table, options)

    return build


def space_to_batch(draw: Draw) -> Case:
    """Build SPACE_TO_BATCH_ND with paddings."""
    batch, *counts, depth = draw.shape(4, 3)
    block, before = np.array([draw.below(1, 4) for _ in range(2)]), np.array([draw.below(0, 3) for _ in range(2)])
    wanted = np.array(counts) * block
    after = np.maximum(0, np.array([draw.below(0, 3) for _ in range(2)]))
    extents = wanted - before - after
    after += np.where(extents < 1, block * 4, 0)  # a larger padded image, still of whole blocks
    extents = np.where(extents < 1, extents + block * 4, extents)
    padded = extents + before + after
    after += -padded % block
    padded = extents + before + after
    argument = draw.tensor((batch, *map(int, extents), depth))
    held = [integers(block), integers(np.stack([before, after], axis=1))]
    output = like(argument[0], (batch * int(np.prod(block)), *(padded // block), depth))
    name = "SPACE_TO_BATCH_ND"
    return shared(name, OperationType[name], [argument], output, held, held, "SpaceToBatchNDOptions")


def batch_to_space(draw: Draw) -> Case:
    """Build BATCH_TO_SPACE_ND without crops, which the HAL does not have."""
    block, (batch, height, width, depth) = [draw.below(1, 4) for _ in range(2)], draw.shape(4, 4)
    argument = draw.tensor((batch * block[0] * block[1], height, width, depth))
    output = like(argument[0], (batch, height * block[0], width * block[1], depth))
    held, crops = integers(block), integers(np.zeros((2, 2)))
    name = "BATCH_TO_SPACE_ND"
    return shared(name, OperationType[name], [argument], output, [held], [held, crops], "BatchToSpaceNDOptions")


def reshape(draw: Draw) -> Case:
    """Build RESHAPE with one inferred dimension."""
    argument = draw.tensor(draw.shape(4))
    extents = draw.rng.permutation(argument[1].shape)
    asked = extents.copy()
    asked[draw.below(0, 4)] = -1
    held = [integers(asked)]
    return shared("RESHAPE", OperationType.RESHAPE, [argument], like(argument[0], extents), held, held)


def squeeze(draw: Draw) -> Case:
    """Build SQUEEZE of some of the axes of 1."""
    axes = sorted(map(int, draw.rng.permutation(4)[: draw.below(1, 4)]))
    shape = tuple(1 if axis in axes or draw.truth() else extent for axis, extent in enumerate(draw.shape(4)))
    argument, left = draw.tensor(shape), [extent for axis, extent in enumerate(shape) if axis not in axes]
    rest, options = [integers(axes)], {"SqueezeDims": axes}
    output = like(argument[0], left)
    return shared("SQUEEZE", OperationType.SQUEEZE, [argument], output, rest, (), "SqueezeOptions", options)


def expand_dims(draw: Draw) -> Case:
    """Build EXPAND_DIMS."""
    argument = draw.tensor(draw.shape(draw.below(1, 4)))
    axis = draw.below(-argument[1].ndim - 1, argument[1].ndim + 1)
    held = Operand(OperandType.TENSOR_INT32, ()), np.int32(axis).tobytes()
    output = like(argument[0], np.expand_dims(argument[1], axis).shape)
    name = "EXPAND_DIMS"
    return shared(name, OperationType[name], [argument], output, [axis], [held], "ExpandDimsOptions")


def _alike(draw: Draw, shapes: list[tuple[int, ...]]) -> list[Argument]:
    """Return arguments of one scale and zero point."""
    parts = [draw.tensor(shape) for shape in shapes]
    return [(like(parts[0][0], array.shape), array) for _, array in parts]


def pack(draw: Draw) -> Case:
    """Build PACK; the HAL's takes the axis first."""
    shape, count = draw.shape(draw.below(1, 4)), draw.below(1, 4)
    axis = draw.below(0, len(shape) + 1)
    parts = _alike(draw, [shape] * count)
    output = like(parts[0][0], (*shape[:axis], count, *shape[axis:]))
    return Case(
        lambda: results_of(OperationType.PACK, [axis, *parts], [output]),
        lambda: by_litert("PACK", parts, [output], "PackOptions", {"ValuesCount": count, "Axis": axis}),
    )


def _joined(draw: Draw, parts: list[Argument], axis: int, output: Operand) -> Case:
    table, options = "ConcatenationOptions", {"Axis": axis}
    return shared("CONCATENATION", OperationType.CONCATENATION, parts, output, [axis], (), table, options)


def concatenation(draw: Draw) -> Case:
    """Build CONCATENATION of tensors of one scale and zero point."""
    parts, axis, shape = _parts(draw)
    alike = [(like(parts[0][0], array.shape), array) for _, array in parts]
    return _joined(draw, alike, axis, like(parts[0][0], shape))


def unequal_concatenation(draw: Draw) -> Case:
    """Build CONCATENATION of tensors with different scales and zero points."""
    parts, axis, shape = _parts(draw)
    return _joined(draw, parts, axis, draw.operand(shape))


def _parts(draw: Draw) -> tuple[list[Argument], int, tuple[int, ...]]:
    shape = draw.shape(draw.below(1, 5))
    axis = draw.below(0, len(shape))
    parts = [draw.tensor((*shape[:axis], draw.below(1, 5), *shape[axis + 1 :])) for _ in range(draw.below(1, 5))]
    length = sum(array.shape[axis] for _, array in parts)
    return parts, axis, (*shape[:axis], length, *shape[axis + 1 :])


CASES: list[Listed] = [
    *((name, NUMBERS if name == "TILE" else FLOAT_AND_CODES, moved(name)) for name in ("TRANSPOSE", "TILE")),
    ("PAD", FLOAT_AND_CODES, pad),
    ("PADV2", FLOAT_AND_CODES, pad_with),
    ("MIRROR_PAD", NUMBERS, mirror_pad),
    ("SLICE", NUMBERS, cut),
    ("STRIDED_SLICE", FLOAT_AND_CODES, strided_slice),
    ("GATHER", NUMBERS, gather),
    ("SPLIT", NUMBERS, split),
    ("REVERSE_V2", NUMBERS, reverse),
    *((name, FLOAT_AND_CODES, to_depth(name)) for name in ("SPACE_TO_DEPTH", "DEPTH_TO_SPACE")),
    ("SPACE_TO_BATCH_ND", FLOAT_AND_CODES, space_to_batch),
    ("BATCH_TO_SPACE_ND", FLOAT_AND_CODES, batch_to_space),
    ("RESHAPE", FLOAT_AND_CODES, reshape),
    ("SQUEEZE", FLOAT_AND_CODES, squeeze),
    ("EXPAND_DIMS", NUMBERS, expand_dims),
    ("PACK", NUMBERS, pack),
    ("CONCATENATION", FLOAT_AND_CODES, concatenation),
    ("CONCATENATION", CODES[:1], unequal_concatenation),
]
