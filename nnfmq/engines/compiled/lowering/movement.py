"""Lowering rules of data movement: slices, joins, padding, permutations, block operations, gathers, and resizing.

All but RESIZE_BILINEAR are strided copies: the rules describe source and target as `StridedView`s of one shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nnfmq.engines.compiled.kernels.bilinear_resize import BilinearResize
from nnfmq.engines.compiled.kernels.movement import (
    PADDING_OFFSET,
    AffineRequant,
    CopyRegion,
    StridedView,
    copy_region,
    estimate_copy_ns,
    plan_strided_copy,
    plan_transpose,
)
from nnfmq.engines.compiled.kernels.one_hot import OneHot
from nnfmq.engines.compiled.kernels.repetition import MAX_REPETITIONS, RepeatedElements
from nnfmq.engines.compiled.lowering import KernelLaunch, LoweringRule
from nnfmq.engines.compiled.target import Target
from nnfmq.hal.extensions import Scheme, TfliteOperation, extended_code, extended_operations, operation_code
from nnfmq.hal.types import OperationType
from nnfmq.operations.declaration import Array, Shape, Tensor
from nnfmq.operations.fixed_point import INT32_MAX, Ints, ints
from nnfmq.operations.padding import MirrorMode
from nnfmq.operations.reshape_concat import concat_requant_lut
from nnfmq.operations.resizing import InterpolationTaps, nearest_positions
from nnfmq.operations.slicing import slice_ranges

__all__ = [
    "RULES",
    "interleave_subconvolutions",
    "lower_concatenation",
    "permute_axes",
    "repeated",
    "repetitions",
]

_ELEMENT_BYTES = (1, 2, 4, 8)
_MAX_REGIONS = 64  # each has a separate loop nest in the code
_MAX_SLOPE, _MAX_SHIFT, _MAX_OFFSET = 1 << 21, 22, 1 << 30  # 255 slopes plus the offset fit 31 bits
_MAX_SCRATCH_BYTES = 1 << 24
_ROW_GROUP_BYTES = 1 << 14  # of a work item of ONE_HOT


def _launch(
    regions: Sequence[CopyRegion], tensor: Tensor, target: Target, constants: Sequence[bytes] = ()
) -> KernelLaunch | None:
    """Return the launch that copies `regions` of elements like `tensor`'s, or None if no copy kernel can."""
    element_bytes = tensor.dtype.itemsize
    if element_bytes not in _ELEMENT_BYTES or not 0 < len(regions) <= _MAX_REGIONS:
        return None
    transpose = plan_transpose(regions[0], element_bytes, target) if len(regions) == 1 else None
    if transpose is not None:
        kernel, params = transpose
        return KernelLaunch(kernel, (params,), regions[0].bytes // (2 * element_bytes))
    copy = plan_strided_copy(regions)
    return KernelLaunch(copy, tuple(constants), estimate_copy_ns(copy))


def _launch_view(
    source: StridedView, output: Tensor, target: Target, constants: Sequence[bytes] = ()
) -> KernelLaunch | None:
    """Return the launch that fills the output with the elements of a view of the first input."""
    element_bytes = output.dtype.itemsize
    region = copy_region(source, StridedView.contiguous(source.shape, element_bytes), element_bytes)
    return _launch([region], output, target, constants)


def _index_table(positions: Array, stride: int) -> bytes:
    """Return the constant with the byte offsets of `positions`; negative positions are padding."""
    indexes = ints(positions)
    return np.where(indexes < 0, np.int64(PADDING_OFFSET), indexes * stride).astype("<i8").tobytes()


# -- joins and slices -------------------------------------------------------------------------------------------------


def lower_concatenation(*inputs: Tensor, output: Tensor, target: Target, axis: int) -> KernelLaunch | None:
    """Lower CONCATENATION. Quantized inputs of another scale are requantized by an affine map or a table."""
    axis %= len(output.shape)
    element_bytes, joined = output.dtype.itemsize, StridedView.of(output)
    regions: list[CopyRegion] = []
    constants: list[bytes] = []
    start = 0
    for number, tensor in enumerate(inputs):
        lut = concat_requant_lut(tensor, output) if element_bytes == 1 else None
        lut_arg = None if lut is None else len(inputs) + 1 + len(constants)
        if lut is not None:
            constants.append(lut.tobytes())
        affine = None if lut is None else _lut_as_affine(lut, tensor.scale / output.scale)
        part = joined.slice(axis, range(start, start + tensor.shape[axis]))
        if 0 not in tensor.shape:
            regions.append(
                copy_region(
                    StridedView.of(tensor),
                    part,
                    element_bytes,
                    source_arg=number,
                    target_arg=len(inputs),
                    lut_arg=lut_arg,
                    affine=affine,
                )
            )
        start += tensor.shape[axis]
    return _launch(regions, output, target, constants)


def _lut_as_affine(lut: Array, scale: float) -> AffineRequant | None:
    """Return an affine map equal to a requantization table with entries about `scale` apart, if 32 bits hold one.

    For a slope near scale · 2^shift, each entry v of value x bounds the offset: v <= (x · slope + offset) / 2^shift <
    v + 1, with no lower bound if v is saturated at 0, and no upper bound if at 255. Any offset within all bounds fits.
    """
    flip = 0x80 if lut.dtype.kind == "i" else 0
    values = ints(lut.view(np.uint8)[np.arange(256) ^ flip] ^ flip)
    shift = min(_MAX_SHIFT, max(0, int(np.log2(_MAX_SLOPE / 2 / scale))))
    estimate = round(scale * (1 << shift))
    for slope in range(max(0, estimate - 2), min(_MAX_SLOPE, estimate + 2) + 1):
        scaled = ints(np.arange(256)) * slope
        low = int(np.where(values > 0, (values << shift) - scaled, -_MAX_OFFSET).max())
        high = int(np.where(values < 255, (values + 1 << shift) - 1 - scaled, _MAX_OFFSET).min())
        if -_MAX_OFFSET <= low <= high:
            return AffineRequant(slope, low, shift, bool(flip))
    return None


def _pack(*inputs: Tensor, output: Tensor, target: Target, axis: int) -> KernelLaunch | None:
    """Lower PACK."""
    element_bytes, packed = output.dtype.itemsize, StridedView.of(output)
    regions = []
    for number, tensor in enumerate(inputs):
        source, part = StridedView.of(tensor).repeat(axis, 1), packed.slice(axis, range(number, number + 1))
        regions.append(copy_region(source, part, element_bytes, source_arg=number, target_arg=len(inputs)))
    return _launch(regions, output, target)


def _split(
    input: Tensor, *, output: Tensor | tuple[Tensor, ...], target: Target, axis: int, count: int
) -> KernelLaunch | None:
    """Lower SPLIT."""
    outputs = output if isinstance(output, tuple) else (output,)
    axis %= len(input.shape)
    extent, view = input.shape[axis] // count, StridedView.of(input)
    regions = [
        copy_region(
            view.slice(axis, range(n * extent, (n + 1) * extent)),
            StridedView.of(part),
            input.dtype.itemsize,
            target_arg=1 + n,
        )
        for n, part in zip(range(count), outputs, strict=True)
    ]
    return _launch(regions, input, target)


def _slice(input: Tensor, *, output: Tensor, target: Target, begin: Array, size: Array) -> KernelLaunch | None:
    """Lower SLICE."""
    return _launch_view(StridedView.of(input).subview(begin.tolist(), output.shape), output, target)


def _strided_slice(
    input: Tensor,
    *,
    output: Tensor,
    target: Target,
    begin: Array,
    end: Array,
    strides: Array,
    begin_mask: int,
    end_mask: int,
    shrink_mask: int,
) -> KernelLaunch | None:
    """Lower STRIDED_SLICE."""
    view = StridedView.of(input)
    for axis, positions in enumerate(slice_ranges(input.shape, begin, end, strides, begin_mask, end_mask)):
        view = view.slice(axis, positions)
    return _launch_view(view, output, target)


# -- padding ----------------------------------------------------------------------------------------------------------


def _pad(input: Tensor, *, output: Tensor, target: Target, paddings: Array) -> KernelLaunch | None:
    """Lower PAD: the padding value is 0, or the zero point of quantized values."""
    return _pad_v2(input, output=output, target=target, paddings=paddings, value=output.zero_point)


def _pad_v2(input: Tensor, *, output: Tensor, target: Target, paddings: Array, value: float) -> KernelLaunch | None:
    """Lower PAD_V2: the padding axis by axis, each inside what the axes before it left, then the input."""
    inside, element = StridedView.of(output), np.array(value).astype(output.dtype).tobytes()
    regions = []
    for axis, (before, after) in enumerate(paddings.tolist()):
        extent = inside.shape[axis]
        borders = (range(before), range(extent - after, extent))
        regions += [_filled(inside.slice(axis, p), element, constant=2, target_arg=1) for p in borders if len(p)]
        inside = inside.slice(axis, range(before, extent - after))
    regions.append(copy_region(StridedView.of(input), inside, output.dtype.itemsize))
    return _launch(regions, output, target, () if _is_repeated_byte(element) else (element,))


def _fill(*, output: Tensor, target: Target, dimensions: Array, value: float) -> KernelLaunch | None:
    """Lower FILL."""
    element = np.array(value).astype(output.dtype).tobytes()
    region = _filled(StridedView.of(output), element, constant=1, target_arg=0)
    return _launch([region], output, target, () if _is_repeated_byte(element) else (element,))


def _filled(part: StridedView, element: bytes, *, constant: int, target_arg: int) -> CopyRegion:
    """Return the region that fills `part`: with a byte, or by reading the argument `constant` with stride 0."""
    if _is_repeated_byte(element):
        return copy_region(None, part, len(element), fill_byte=element[0], target_arg=target_arg)
    repeated = StridedView(0, part.shape, (0,) * len(part.shape), part.index_tables)
    return copy_region(repeated, part, len(element), source_arg=constant, target_arg=target_arg)


def _is_repeated_byte(element: bytes) -> bool:
    return len(set(element)) == 1


def _mirror_pad(input: Tensor, *, output: Tensor, target: Target, paddings: Array, mode: int) -> KernelLaunch | None:
    """Lower MIRROR_PAD: a gather along each axis that has padding."""
    style: Any = "reflect" if mode == MirrorMode.REFLECT else "symmetric"
    pairs = zip(input.shape, paddings.tolist(), strict=True)
    positions = {axis: np.pad(np.arange(e), pair, style) for axis, (e, pair) in enumerate(pairs) if any(pair)}
    return _gather_axes(input, output, target, positions)


def _gather_axes(input: Tensor, output: Tensor, target: Target, positions: Mapping[int, Array]) -> KernelLaunch | None:
    """Return the launch that gathers `positions` along the given axes."""
    view, constants = StridedView.of(input), []
    for axis, indices in positions.items():
        constants.append(_index_table(indices, view.strides[axis]))
        view = view.gather(axis, len(indices), 1 + len(constants))
    return _launch_view(view, output, target, constants)


# -- permutations -----------------------------------------------------------------------------------------------------


def _transpose(
    input: Tensor, *, output: Tensor, target: Target, permutation: Array | None = None
) -> KernelLaunch | None:
    """Lower TRANSPOSE; without a permutation the axes are reversed."""
    order = range(len(input.shape))[::-1] if permutation is None else permutation.tolist()
    return _launch_view(StridedView.of(input).permute(order), output, target)


def permute_axes(shape: Shape, permutation: Sequence[int], dtype: np.dtype[Any], target: Target) -> KernelLaunch:
    """Return the launch that permutes the axes of an array of `shape`."""
    permuted = Tensor(tuple(shape[axis] for axis in permutation), dtype)
    launch = _launch_view(StridedView.contiguous(shape, dtype.itemsize).permute(permutation), permuted, target)
    assert launch is not None, "tensors have elements of 1, 2 or 4 bytes here"
    return launch


def _reverse(input: Tensor, *, output: Tensor, target: Target, axis: Array) -> KernelLaunch | None:
    """Lower REVERSE."""
    number = int(axis[0])
    view = StridedView.of(input).slice(number, range(input.shape[number] - 1, -1, -1))
    return _launch_view(view, output, target)


def _tile(input: Tensor, *, output: Tensor, target: Target, multiples: Array) -> KernelLaunch | None:
    """Lower TILE."""
    view = StridedView.of(input)
    for axis, count in reversed(list(enumerate(multiples.tolist()))):
        view = view.repeat(axis, count)
    return _launch_view(view, output, target)


def _channel_shuffle(input: Tensor, *, output: Tensor, target: Target, groups: int, axis: int) -> KernelLaunch | None:
    """Lower CHANNEL_SHUFFLE."""
    axis %= len(input.shape)
    view = StridedView.of(input).split(axis, groups, input.shape[axis] // groups)
    permutation = list(range(len(view.shape)))
    permutation[axis], permutation[axis + 1] = axis + 1, axis
    return _launch_view(view.permute(permutation), output, target)


# -- blocks -----------------------------------------------------------------------------------------------------------


def _depth_to_space(input: Tensor, *, output: Tensor, target: Target, block: int) -> KernelLaunch | None:
    """Lower DEPTH_TO_SPACE."""
    view = StridedView.of(input).split(3, block, block, input.shape[3] // (block * block))
    return _launch_view(view.permute((0, 1, 3, 2, 4, 5)), output, target)


def interleave_subconvolutions(
    shape: Shape, crop: tuple[int, int], output: Tensor, target: Target
) -> KernelLaunch | None:
    """Return the launch that interleaves the results of subconvolutions to the image of a transposed convolution.

    `shape` of the results is (batch, rows, columns, stride_h, stride_w, channels). `crop` rows and columns are cut off
    at the top and left, and what is beyond the output at the bottom and right.
    """
    element_bytes = output.dtype.itemsize
    results, image, (batch, height, width, channels) = (
        StridedView.contiguous(shape, element_bytes),
        StridedView.of(output),
        output.shape,
    )
    stride_h, stride_w = shape[3:5]
    if not any(crop) and (height, width) == (shape[1] * stride_h, shape[2] * stride_w):
        return _launch_view(results.permute((0, 1, 3, 2, 4, 5)), output, target)
    regions = []
    for i in range(stride_h):
        for j in range(stride_w):
            rows = range((i - crop[0]) % stride_h, height, stride_h)
            columns = range((j - crop[1]) % stride_w, width, stride_w)
            pixels = image.slice(1, rows).slice(2, columns)
            first = ((rows.start + crop[0]) // stride_h, (columns.start + crop[1]) // stride_w)
            part = results.subview((0, *first, i, j, 0), (batch, len(rows), len(columns), 1, 1, channels))
            regions.append(copy_region(part, pixels.split(3, 1, 1, channels), element_bytes))
    return _launch(regions, output, target)


def _space_to_depth(input: Tensor, *, output: Tensor, target: Target, block: int) -> KernelLaunch | None:
    """Lower SPACE_TO_DEPTH."""
    _, height, width, _ = input.shape
    view = StridedView.of(input).split(2, width // block, block).split(1, height // block, block)
    return _launch_view(view.permute((0, 1, 3, 2, 4, 5)), output, target)


def _batch_to_space(input: Tensor, *, output: Tensor, target: Target, block: Array) -> KernelLaunch | None:
    """Lower BATCH_TO_SPACE_ND."""
    rows, columns = block.tolist()
    view = StridedView.of(input).split(0, rows, columns, input.shape[0] // (rows * columns))
    return _launch_view(view.permute((2, 3, 0, 4, 1, 5)), output, target)


def _space_to_batch(
    input: Tensor, *, output: Tensor, target: Target, block: Array, paddings: Array
) -> KernelLaunch | None:
    """Lower SPACE_TO_BATCH_ND; with padding, rows and columns are gathered."""
    (rows, columns), ((top, _), (left, _)) = block.tolist(), paddings.tolist()
    batch, height, width, channels = input.shape
    _, output_height, output_width, _ = output.shape
    view = StridedView.of(input)
    if not paddings.any():
        view = view.split(2, output_width, columns).split(1, output_height, rows)
        return _launch_view(view.permute((2, 4, 0, 1, 3, 5)), output, target)
    positions = [
        _block_positions(*axis) for axis in ((height, top, output_height, rows), (width, left, output_width, columns))
    ]
    constants = [_index_table(table, stride) for table, stride in zip(positions, view.strides[1:3], strict=True)]
    padding_run = np.full(channels, output.zero_point).astype(output.dtype).tobytes()
    regions = []
    for i in range(rows):
        for j in range(columns):
            part = view.gather(1, output_height, 2, 8 * i * output_height).gather(
                2, output_width, 3, 8 * j * output_width
            )
            starts = (batch * (i * columns + j), 0, 0, 0)
            images = StridedView.of(output).subview(starts, input.shape[:1] + output.shape[1:])
            regions.append(copy_region(part, images, output.dtype.itemsize, padding_arg=4))
    return _launch(regions, output, target, [*constants, padding_run])


def _block_positions(extent: int, padding: int, count: int, block: int) -> Ints:
    """Return positions in an input dimension, ordered by position in the block, then block; -1 in the padding."""
    positions = ints(np.arange(count * block)) - padding
    return np.where(positions < extent, positions, -1).reshape(count, block).T.reshape(-1)


# -- gathers and resizing ---------------------------------------------------------------------------------------------


def _gather(input: Tensor, *, output: Tensor, target: Target, axis: int, indices: Array) -> KernelLaunch | None:
    """Lower GATHER. The indices are known, and were checked, at preparation."""
    axis %= len(input.shape)
    if math.prod(input.shape[axis + 1 :]) == 1 and (times := repetitions(input, axis, indices)) > 1:
        return repeated(input, output=output, target=target, times=times)
    return _gather_axes(input, output, target, {axis: indices.reshape(-1)})


def repetitions(input: Tensor, axis: int, indices: Array) -> int:
    """Return how often indices repeat each element along an axis, one after the other; 0 if they do anything else."""
    extent = input.shape[axis]
    times = indices.size // extent if 0 not in input.shape else 0
    is_known = times <= MAX_REPETITIONS and input.dtype.itemsize in _ELEMENT_BYTES
    return times if is_known and np.array_equal(indices.reshape(-1), np.arange(extent).repeat(times)) else 0


def repeated(input: Tensor, *, output: Tensor, target: Target, times: int, row_times: int = 1) -> KernelLaunch:
    """Return the launch that repeats each element, and each row if `row_times` is not 1."""
    kernel = RepeatedElements(math.prod(input.shape), input.dtype.itemsize, times)
    if row_times > 1:
        kernel = replace(kernel, row_times=row_times, length=input.shape[-1])
    return KernelLaunch(kernel, (kernel.params(),), math.prod(output.shape) * input.dtype.itemsize // 16)


def _embedding_lookup(values: Tensor, *, output: Tensor, target: Target, lookups: Array) -> KernelLaunch | None:
    """Lower EMBEDDING_LOOKUP. The lookups are known, and were checked, at preparation."""
    return _gather_axes(values, output, target, {0: lookups})


def _resize_nearest(
    input: Tensor,
    *,
    output: Tensor,
    target: Target,
    width: float,
    height: float,
    align_corners: bool = False,
    half_pixel_centers: bool = False,
) -> KernelLaunch | None:
    """Lower RESIZE_NEAREST_NEIGHBOR."""
    flags = (align_corners, half_pixel_centers)
    positions = {axis: nearest_positions(input.shape[axis], output.shape[axis], *flags) for axis in (1, 2)}
    return _gather_axes(input, output, target, positions)


def _resize_bilinear(
    input: Tensor,
    *,
    output: Tensor,
    target: Target,
    width: float,
    height: float,
    align_corners: bool = False,
    half_pixel_centers: bool = False,
) -> KernelLaunch | None:
    """Lower RESIZE_BILINEAR of float32 and quantized values."""
    if input.dtype.itemsize == 2 or 0 in input.shape:
        return None
    is_float, is_signed = input.dtype.kind == "f", input.dtype.kind == "i"
    batch, old_height, old_width, channels = input.shape
    _, new_height, new_width, _ = output.shape
    kernel = BilinearResize(batch, old_height, old_width, channels, new_height, new_width, is_float, is_signed)
    if kernel.scratch_bytes(target) > _MAX_SCRATCH_BYTES:
        return None
    flags = (align_corners, half_pixel_centers)
    row_bytes = old_width * channels * input.dtype.itemsize
    rows = _interpolation_tables(InterpolationTaps.of(old_height, new_height, *flags), row_bytes)
    columns = _interpolation_tables(InterpolationTaps.of(old_width, new_width, *flags), 4 * channels)
    estimated_ns = 2 * batch * new_height * (old_width + new_width) * max(1, channels // target.lanes)
    return KernelLaunch(kernel, (*rows, *columns), estimated_ns)


def _interpolation_tables(taps: InterpolationTaps, stride: int) -> tuple[bytes, bytes]:
    """Return the pairs of byte offsets and the pairs of weights of each output position."""
    offsets = np.stack([taps.lower, taps.upper], axis=1).astype("<i8") * stride
    weights = np.stack([taps.lower_weight, taps.upper_weight], axis=1).astype("<f4")
    return offsets.tobytes(), weights.tobytes()


def _one_hot(
    indices: Tensor, on: Tensor, off: Tensor, *, output: Tensor, target: Target, depth: Array, axis: int
) -> KernelLaunch | None:
    """Lower ONE_HOT along the last axis."""
    element_bytes, length, rank = output.dtype.itemsize, output.shape[-1], len(output.shape)
    if axis % rank != rank - 1 or element_bytes not in _ELEMENT_BYTES or not 0 < length <= INT32_MAX:
        return None
    count, row_bytes = math.prod(indices.shape), length * element_bytes
    kernel = OneHot(count, length, element_bytes, max(1, _ROW_GROUP_BYTES // row_bytes))
    return KernelLaunch(kernel, (), count * row_bytes // 16)


def _unless_empty(rule: Callable[..., KernelLaunch | None]) -> LoweringRule:
    """Return a rule that declines empty inputs and element sizes that no copy has."""

    def checked_rule(*inputs: Tensor, **attributes: Any) -> KernelLaunch | None:
        declines = inputs[0].dtype.itemsize not in _ELEMENT_BYTES or any(0 in tensor.shape for tensor in inputs)
        return None if declines else rule(*inputs, **attributes)

    return checked_rule


_COPY_RULES: Mapping[OperationType, Callable[..., KernelLaunch | None]] = {
    OperationType.PACK: _pack,
    OperationType.SPLIT: _split,
    OperationType.SLICE: _slice,
    OperationType.STRIDED_SLICE: _strided_slice,
    OperationType.PAD: _pad,
    OperationType.PAD_V2: _pad_v2,
    OperationType.MIRROR_PAD: _mirror_pad,
    OperationType.TRANSPOSE: _transpose,
    OperationType.REVERSE: _reverse,
    OperationType.TILE: _tile,
    OperationType.CHANNEL_SHUFFLE: _channel_shuffle,
    OperationType.DEPTH_TO_SPACE: _depth_to_space,
    OperationType.SPACE_TO_DEPTH: _space_to_depth,
    OperationType.BATCH_TO_SPACE_ND: _batch_to_space,
    OperationType.SPACE_TO_BATCH_ND: _space_to_batch,
    OperationType.GATHER: _gather,
    OperationType.EMBEDDING_LOOKUP: _embedding_lookup,
    OperationType.RESIZE_NEAREST_NEIGHBOR: _resize_nearest,
    operation_code(TfliteOperation.ONE_HOT): _one_hot,
}

_MOVEMENT_RULES: Mapping[OperationType, LoweringRule] = {
    OperationType.CONCATENATION: lower_concatenation,
    OperationType.FILL: _fill,
    **{code: _unless_empty(rule) for code, rule in _COPY_RULES.items()},
}

RULES: Mapping[OperationType, LoweringRule] = {
    **_MOVEMENT_RULES,
    OperationType.RESIZE_BILINEAR: _resize_bilinear,
    **{
        extended_code(code, scheme): _MOVEMENT_RULES[code]
        for code, scheme in extended_operations()
        if scheme in (Scheme.SIXTEEN_BITS, Scheme.WIDER) and code in _MOVEMENT_RULES
    },
}
