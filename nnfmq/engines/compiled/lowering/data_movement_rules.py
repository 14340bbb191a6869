"""Operations that only move elements: parts, borders, orders, blocks, joins, and what is found by index."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nnfmq.engines.compiled.kernels.strided_copy import (
    PADDING_OFFSET,
    AffineRequant,
    CopyRegion,
    estimate_copy_ns,
    plan_strided_copy,
)
from nnfmq.engines.compiled.kernels.transpose import plan_transpose
from nnfmq.engines.compiled.lowering import KernelLaunch, LoweringRule
from nnfmq.engines.compiled.lowering.views import StridedView, piece
from nnfmq.engines.compiled.target import Target
from nnfmq.hal.types import OperationType
from nnfmq.operations.fixed_point import Ints, ints
from nnfmq.operations.padding import MirrorMode
from nnfmq.operations.reshape_concat import concat_requant_lut
from nnfmq.operations.resizing import nearest_positions
from nnfmq.operations.signature import Array, Shape, Tensor
from nnfmq.operations.slicing import taken_ranges

__all__ = ["RULES", "concatenation", "moved", "side_by_side", "turned"]

_SIZES = (1, 2, 4)
_MOST_PIECES = 64  # a piece is a loop nest of its own
_MOST_SLOPE, _MOST_SHIFT, _MOST_OFFSET = 1 << 21, 22, 1 << 30  # 255 slopes and the offset fit 31 bits


def moved(
    pieces: Sequence[CopyRegion], tensor: Tensor, target: Target, constants: Sequence[bytes] = ()
) -> KernelLaunch | None:
    """Return the kernel of pieces that move elements like `tensor`'s."""
    size = tensor.dtype.itemsize
    if size not in _SIZES or not 0 < len(pieces) <= _MOST_PIECES:
        return None
    square = plan_transpose(pieces[0], size, target) if len(pieces) == 1 else None
    if square is not None:
        return KernelLaunch(square[0], (square[1],), pieces[0].bytes // (2 * size))
    kernel = plan_strided_copy(pieces)
    return KernelLaunch(kernel, tuple(constants), estimate_copy_ns(kernel))


def _one(
    source: StridedView, output: Tensor, target: Target, constants: Sequence[bytes] = (), **rest: int
) -> KernelLaunch | None:
    """Return the kernel that fills the output with the elements of one view of the same shape."""
    size = output.dtype.itemsize
    return moved(
        [piece(source, StridedView.contiguous(source.shape, size), size, (0, 1), **rest)], output, target, constants
    )


def _offsets(positions: Array, step: int) -> bytes:
    """Return a table of offsets; positions below 0 are nowhere."""
    numbers = ints(positions)
    return np.where(numbers < 0, np.int64(PADDING_OFFSET), numbers * step).astype("<i8").tobytes()


# -- joins and parts ---------------------------------------------------------------------------------------------------


def concatenation(*inputs: Tensor, output: Tensor, target: Target, axis: int) -> KernelLaunch | None:
    """CONCATENATION; codes of another scale go along a line, or through a table."""
    axis %= len(output.shape)
    size, whole = output.dtype.itemsize, StridedView.of(output)
    pieces: list[CopyRegion] = []
    constants: list[bytes] = []
    start = 0
    for number, tensor in enumerate(inputs):
        codes = concat_requant_lut(tensor, output) if size == 1 else None
        place = None if codes is None else len(inputs) + 1 + len(constants)
        if codes is not None:
            constants.append(codes.tobytes())
        line = None if codes is None else _line_of(codes, tensor.scale / output.scale)
        into = whole.taken(axis, range(start, start + tensor.shape[axis]))
        if 0 not in tensor.shape:
            pieces.append(piece(StridedView.of(tensor), into, size, (number, len(inputs)), codes=place, line=line))
        start += tensor.shape[axis]
    return moved(pieces, output, target, constants)


def _line_of(codes: Array, scale: float) -> AffineRequant | None:
    """Return the line on which 256 codes lie (in the order of their bits, about `scale` apart), if 32 bits hold one."""
    flip = 0x80 if codes.dtype.kind == "i" else 0
    values = ints(codes.view(np.uint8)[np.arange(256) ^ flip] ^ flip)
    shift = min(_MOST_SHIFT, max(0, int(np.log2(_MOST_SLOPE / 2 / scale))))
    middle = round(scale * (1 << shift))
    for slope in range(max(0, middle - 2), min(_MOST_SLOPE, middle + 2) + 1):
        scaled = ints(np.arange(256)) * slope
        least = int(np.where(values > 0, (values << shift) - scaled, -_MOST_OFFSET).max())
        most = int(np.where(values < 255, (values + 1 << shift) - 1 - scaled, _MOST_OFFSET).min())
        if -_MOST_OFFSET <= least <= most:
            return AffineRequant(slope, least, shift, bool(flip))
    return None


def pack(*inputs: Tensor, output: Tensor, target: Target, axis: int) -> KernelLaunch | None:
    """PACK."""
    size, whole = output.dtype.itemsize, StridedView.of(output)
    pieces = []
    for number, tensor in enumerate(inputs):
        parts = StridedView.of(tensor).repeated(axis, 1)
        pieces.append(piece(parts, whole.taken(axis, range(number, number + 1)), size, (number, len(inputs))))
    return moved(pieces, output, target)


def split(
    input: Tensor, *, output: Tensor | tuple[Tensor, ...], target: Target, axis: int, count: int
) -> KernelLaunch | None:
    """SPLIT."""
    outputs = output if isinstance(output, tuple) else (output,)
    axis %= len(input.shape)
    extent, size, whole = input.shape[axis] // count, input.dtype.itemsize, StridedView.of(input)
    parts = [whole.taken(axis, range(n * extent, (n + 1) * extent)) for n in range(count)]
    into = [StridedView.of(one) for one in outputs]
    return moved(
        [piece(p, v, size, (0, 1 + n)) for n, (p, v) in enumerate(zip(parts, into, strict=True))], input, target
    )


def slice_(input: Tensor, *, output: Tensor, target: Target, begin: Array, size: Array) -> KernelLaunch | None:
    """SLICE."""
    return _one(StridedView.of(input).boxed(begin.tolist(), output.shape), output, target)


def strided_slice(
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
    """STRIDED_SLICE."""
    view = StridedView.of(input)
    for axis, positions in enumerate(taken_ranges(input.shape, begin, end, strides, begin_mask, end_mask)):
        view = view.taken(axis, positions)
    return _one(view, output, target)


# -- borders -----------------------------------------------------------------------------------------------------------


def pad(input: Tensor, *, output: Tensor, target: Target, paddings: Array) -> KernelLaunch | None:
    """PAD: with 0, which is the zero point in codes."""
    return pad_v2(input, output=output, target=target, paddings=paddings, value=output.zero_point)


def pad_v2(input: Tensor, *, output: Tensor, target: Target, paddings: Array, value: float) -> KernelLaunch | None:
    """PAD_V2: the border axis by axis, each within what earlier ones leave, and the input."""
    size, whole = output.dtype.itemsize, StridedView.of(output)
    element = np.array(value).astype(output.dtype).tobytes()
    even = len(set(element)) == 1

    def filled(part: StridedView) -> CopyRegion:
        if even:
            return piece(None, part, size, (None, 1), fill=element[0])
        return piece(StridedView(0, part.shape, (0,) * len(part.shape), part.tables), part, size, (2, 1))

    pieces = []
    for axis, (head, tail) in enumerate(paddings.tolist()):
        extent = whole.shape[axis]
        borders = (range(head), range(extent - tail, extent))
        pieces += [filled(whole.taken(axis, positions)) for positions in borders if len(positions)]
        whole = whole.taken(axis, range(head, extent - tail))
    return moved(
        [*pieces, piece(StridedView.of(input), whole, size, (0, 1))], output, target, () if even else (element,)
    )


def mirror_pad(input: Tensor, *, output: Tensor, target: Target, paddings: Array, mode: int) -> KernelLaunch | None:
    """MIRROR_PAD: a table of positions for each axis that has a border."""
    style: Any = "reflect" if mode == MirrorMode.REFLECT else "symmetric"
    pairs = zip(input.shape, paddings.tolist(), strict=True)
    chosen = {axis: np.pad(np.arange(e), pair, style) for axis, (e, pair) in enumerate(pairs) if any(pair)}
    return _looked_up(input, output, target, chosen)


def _looked_up(input: Tensor, output: Tensor, target: Target, positions: Mapping[int, Array]) -> KernelLaunch | None:
    """Take the positions along each axis that has some."""
    view, constants = StridedView.of(input), []
    for axis, chosen in positions.items():
        constants.append(_offsets(chosen, view.steps[axis]))
        view = view.tabled(axis, len(chosen), 1 + len(constants))
    return _one(view, output, target, constants)


# -- orders ------------------------------------------------------------------------------------------------------------


def transpose(
    input: Tensor, *, output: Tensor, target: Target, permutation: Array | None = None
) -> KernelLaunch | None:
    """TRANSPOSE."""
    order = range(len(input.shape))[::-1] if permutation is None else permutation.tolist()
    return _one(StridedView.of(input).permuted(order), output, target)


def turned(shape: Shape, order: Sequence[int], dtype: np.dtype[Any], target: Target) -> KernelLaunch:
    """Return the kernel that puts the axes of an array of `shape` into another order."""
    made = Tensor(tuple(shape[axis] for axis in order), dtype)
    lowered = _one(StridedView.contiguous(shape, dtype.itemsize).permuted(order), made, target)
    assert lowered is not None, "no other sizes come here"
    return lowered


def reverse(input: Tensor, *, output: Tensor, target: Target, axis: Array) -> KernelLaunch | None:
    """REVERSE."""
    number = int(axis[0])
    return _one(StridedView.of(input).taken(number, range(input.shape[number] - 1, -1, -1)), output, target)


def tile(input: Tensor, *, output: Tensor, target: Target, multiples: Array) -> KernelLaunch | None:
    """TILE."""
    view = StridedView.of(input)
    for axis, times in reversed(list(enumerate(multiples.tolist()))):
        view = view.repeated(axis, times)
    return _one(view, output, target)


def channel_shuffle(input: Tensor, *, output: Tensor, target: Target, groups: int, axis: int) -> KernelLaunch | None:
    """CHANNEL_SHUFFLE."""
    axis %= len(input.shape)
    view = StridedView.of(input).split(axis, groups, input.shape[axis] // groups)
    order = list(range(len(view.shape)))
    order[axis], order[axis + 1] = axis + 1, axis
    return _one(view.permuted(order), output, target)


# -- blocks ------------------------------------------------------------------------------------------------------------


def depth_to_space(input: Tensor, *, output: Tensor, target: Target, block: int) -> KernelLaunch | None:
    """DEPTH_TO_SPACE."""
    view = StridedView.of(input).split(3, block, block, input.shape[3] // (block * block))
    return _one(view.permuted((0, 1, 3, 2, 4, 5)), output, target)


def side_by_side(shape: Shape, heads: tuple[int, int], output: Tensor, target: Target) -> KernelLaunch | None:
    """Return the kernel that makes an image of cells (batch, rows, columns, places down, places across, channels).

    So many rows and columns at the heads are left out, and what reaches beyond the output.
    """
    size = output.dtype.itemsize
    cells, whole, (batch, height, width, channels) = (
        StridedView.contiguous(shape, size),
        StridedView.of(output),
        output.shape,
    )
    down, across = shape[3:5]
    if not any(heads) and (height, width) == (shape[1] * down, shape[2] * across):
        return _one(cells.permuted((0, 1, 3, 2, 4, 5)), output, target)
    pieces = []
    for i in range(down):
        for j in range(across):
            rows, columns = range((i - heads[0]) % down, height, down), range((j - heads[1]) % across, width, across)
            into = whole.taken(1, rows).taken(2, columns)
            first = ((rows.start + heads[0]) // down, (columns.start + heads[1]) // across)
            part = cells.boxed((0, *first, i, j, 0), (batch, len(rows), len(columns), 1, 1, channels))
            pieces.append(piece(part, into.split(3, 1, 1, channels), size, (0, 1)))
    return moved(pieces, output, target)


def space_to_depth(input: Tensor, *, output: Tensor, target: Target, block: int) -> KernelLaunch | None:
    """SPACE_TO_DEPTH."""
    _, height, width, _ = input.shape
    view = StridedView.of(input).split(2, width // block, block).split(1, height // block, block)
    return _one(view.permuted((0, 1, 3, 2, 4, 5)), output, target)


def batch_to_space(input: Tensor, *, output: Tensor, target: Target, block: Array) -> KernelLaunch | None:
    """BATCH_TO_SPACE_ND."""
    rows, columns = block.tolist()
    view = StridedView.of(input).split(0, rows, columns, input.shape[0] // (rows * columns))
    return _one(view.permuted((2, 3, 0, 4, 1, 5)), output, target)


def space_to_batch(
    input: Tensor, *, output: Tensor, target: Target, block: Array, paddings: Array
) -> KernelLaunch | None:
    """SPACE_TO_BATCH_ND; rows and columns of the padding are nowhere in the tables."""
    (rows, columns), ((top, _), (left, _)) = block.tolist(), paddings.tolist()
    batch, height, width, channels = input.shape
    _, tall, wide, _ = output.shape
    view = StridedView.of(input)
    if not paddings.any():
        view = view.split(2, wide, columns).split(1, tall, rows)
        return _one(view.permuted((2, 4, 0, 1, 3, 5)), output, target)
    size = output.dtype.itemsize
    tables = [_blocked(*axis) for axis in ((height, top, tall, rows), (width, left, wide, columns))]
    constants = [_offsets(table, step) for table, step in zip(tables, view.steps[1:3], strict=True)]
    filler = np.full(channels, output.zero_point).astype(output.dtype).tobytes()
    pieces = []
    for i in range(rows):
        for j in range(columns):
            part = view.tabled(1, tall, 2, 8 * i * tall).tabled(2, wide, 3, 8 * j * wide)
            into = StridedView.of(output).boxed(
                (batch * (i * columns + j), 0, 0, 0), input.shape[:1] + output.shape[1:]
            )
            pieces.append(piece(part, into, size, (0, 1), filler=4))
    return moved(pieces, output, target, [*constants, filler])


def _blocked(extent: int, head: int, count: int, block: int) -> Ints:
    """Return positions in the input by place in a block and block; below 0 in the padding."""
    positions = ints(np.arange(count * block)) - head
    return np.where(positions < extent, positions, -1).reshape(count, block).T.reshape(-1)


# -- by index ----------------------------------------------------------------------------------------------------------


def gather(input: Tensor, *, output: Tensor, target: Target, axis: int, indices: Array) -> KernelLaunch | None:
    """GATHER. Indices are known, and were checked, at preparation."""
    return _looked_up(input, output, target, {axis % len(input.shape): indices.reshape(-1)})


def embedding_lookup(values: Tensor, *, output: Tensor, target: Target, lookups: Array) -> KernelLaunch | None:
    """EMBEDDING_LOOKUP, likewise."""
    return _looked_up(values, output, target, {0: lookups})


def resize_nearest(
    input: Tensor,
    *,
    output: Tensor,
    target: Target,
    width: float,
    height: float,
    align_corners: bool = False,
    half_pixel_centers: bool = False,
) -> KernelLaunch | None:
    """RESIZE_NEAREST_NEIGHBOR."""
    flags = (align_corners, half_pixel_centers)
    chosen = {axis: nearest_positions(input.shape[axis], output.shape[axis], *flags) for axis in (1, 2)}
    return _looked_up(input, output, target, chosen)


def _filled(rule: Callable[..., KernelLaunch | None]) -> LoweringRule:
    """Decline empty inputs and other sizes of elements once for all rules."""

    def checked(*inputs: Tensor, **rest: Any) -> KernelLaunch | None:
        declined = inputs[0].dtype.itemsize not in _SIZES or any(0 in tensor.shape for tensor in inputs)
        return None if declined else rule(*inputs, **rest)

    return checked


_RULES: Mapping[OperationType, Callable[..., KernelLaunch | None]] = {
    OperationType.PACK: pack,
    OperationType.SPLIT: split,
    OperationType.SLICE: slice_,
    OperationType.STRIDED_SLICE: strided_slice,
    OperationType.PAD: pad,
    OperationType.PAD_V2: pad_v2,
    OperationType.MIRROR_PAD: mirror_pad,
    OperationType.TRANSPOSE: transpose,
    OperationType.REVERSE: reverse,
    OperationType.TILE: tile,
    OperationType.CHANNEL_SHUFFLE: channel_shuffle,
    OperationType.DEPTH_TO_SPACE: depth_to_space,
    OperationType.SPACE_TO_DEPTH: space_to_depth,
    OperationType.BATCH_TO_SPACE_ND: batch_to_space,
    OperationType.SPACE_TO_BATCH_ND: space_to_batch,
    OperationType.GATHER: gather,
    OperationType.EMBEDDING_LOOKUP: embedding_lookup,
    OperationType.RESIZE_NEAREST_NEIGHBOR: resize_nearest,
}

RULES: Mapping[OperationType, LoweringRule] = {
    OperationType.CONCATENATION: concatenation,
    **{code: _filled(rule) for code, rule in _RULES.items()},
}
