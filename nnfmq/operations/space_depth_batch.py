"""DEPTH_TO_SPACE, SPACE_TO_DEPTH, BATCH_TO_SPACE_ND and SPACE_TO_BATCH_ND: blocks of pixels to or from another axis.

Each is a reshape to rank 6, a transposition and a reshape that move the positions within a block to or from the
channels or the batch. The block's row is the slower index, before the channel or before the batch.

    C1 the image has rank 4                     C2 block sizes are positive; the ND operations have two
    C3 channels are a multiple of the block     C4 height and width (padded) are multiples of the block
    C5 the batch is a multiple of the block     C6 paddings have shape (2, 2) and are not negative
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nnfmq.hal.types import Operand, OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Array, Run, Shape, Tensor
from nnfmq.operations.kernel_adapters import stateless
from nnfmq.operations.reshape_concat import data_movement_variants
from nnfmq.operations.shapes import require


def _require_image(input: Shape) -> None:
    require(len(input) == 4, "C1", f"an image of rank {len(input)}, rank 4 is required")


def _require_block(block: int) -> None:
    require(block > 0, "C2", f"block size {block}, it must be positive")


def _block_pair(block: Array) -> tuple[int, int]:
    """Return the height and width of a block that is an array."""
    fits = block.shape == (2,) and int(block.min()) > 0
    require(fits, "C2", f"block sizes {block.tolist()}, two positive values are required")
    return int(block[0]), int(block[1])


def _require_multiples(height: int, width: int, block: tuple[int, int]) -> None:
    divides = height % block[0] == 0 and width % block[1] == 0
    require(divides, "C4", f"an image of {height} x {width} is not a multiple of blocks of {block[0]} x {block[1]}")


def _joined(split: Array, order: Shape, shape: Shape) -> Array:
    """Return the permuted array, contiguous, in another shape (reshape alone might return a strided view)."""
    return np.ascontiguousarray(split.transpose(order)).reshape(shape)


def depth_to_space_shape(input: Shape, *, block: int) -> Shape:
    """Return the shape with height and width multiplied by `block`."""
    _require_image(input)
    _require_block(block)
    batch, height, width, channels = input
    require(channels % (block * block) == 0, "C3", f"{channels} channels are not a multiple of {block} x {block}")
    return batch, height * block, width * block, channels // (block * block)


def depth_to_space(input: Array, *, block: int) -> Array:
    """Return the image in which each pixel's channels have become a block of pixels."""
    batch, height, width, channels = input.shape
    split = input.reshape(batch, height, width, block, block, channels // (block * block))
    return _joined(split, (0, 1, 3, 2, 4, 5), (batch, height * block, width * block, -1))


def space_to_depth_shape(input: Shape, *, block: int) -> Shape:
    """Return the shape with height and width divided by `block`."""
    _require_image(input)
    _require_block(block)
    batch, height, width, channels = input
    _require_multiples(height, width, (block, block))
    return batch, height // block, width // block, channels * block * block


def space_to_depth(input: Array, *, block: int) -> Array:
    """Return the image in which each block of pixels has become the channels of one pixel."""
    batch, height, width, channels = input.shape
    split = input.reshape(batch, height // block, block, width // block, block, channels)
    return _joined(split, (0, 1, 3, 2, 4, 5), (batch, height // block, width // block, -1))


def batch_to_space_shape(input: Shape, *, block: Array) -> Shape:
    """Return the shape with height and width multiplied by those of the block."""
    _require_image(input)
    rows, columns = _block_pair(block)
    batch, height, width, channels = input
    require(batch % (rows * columns) == 0, "C5", f"a batch of {batch} is not a multiple of {rows} x {columns}")
    return batch // (rows * columns), height * rows, width * columns, channels


def batch_to_space(input: Array, *, block: Array) -> Array:
    """Return images in which each block of pixels is made of one pixel of several images."""
    rows, columns = _block_pair(block)
    batch, height, width, channels = input.shape
    split = input.reshape(rows, columns, batch // (rows * columns), height, width, channels)
    return _joined(split, (2, 3, 0, 4, 1, 5), (-1, height * rows, width * columns, channels))


def space_to_batch_shape(input: Shape, *, block: Array, paddings: Array) -> Shape:
    """Return the shape with each block's pixels, after padding, in separate images."""
    _require_image(input)
    rows, columns = _block_pair(block)
    fits = paddings.shape == (2, 2) and int(paddings.min()) >= 0
    require(fits, "C6", f"paddings {paddings.tolist()}, (2, 2) values of 0 or more are required")
    batch, height, width, channels = input
    (top, bottom), (left, right) = paddings.tolist()
    height, width = top + height + bottom, left + width + right
    _require_multiples(height, width, (rows, columns))
    return batch * rows * columns, height // rows, width // columns, channels


def plan_space_to_batch(input: Tensor, *, output: Tensor, block: Array, paddings: Array) -> Run:
    """Plan the inverse of `batch_to_space` on an image padded with the real value 0."""
    rows, columns = _block_pair(block)
    batch, height, width, channels = input.shape
    (top, _), (left, _) = paddings.tolist()
    _, tall, wide, _ = output.shape

    def run(array: Array) -> Array:
        padded = np.full((batch, tall * rows, wide * columns, channels), output.zero_point, output.dtype)
        padded[:, top : top + height, left : left + width] = array
        split = padded.reshape(batch, tall, rows, wide, columns, channels)
        return _joined(split, (2, 4, 0, 1, 3, 5), (-1, tall, wide, channels))

    return run


def _space_to_batch_level(inputs: Mapping[str, Operand], output: Operand) -> int:
    source = inputs["input"]
    return op.V1_2 if source.type == op.Q8 and source.zero_point != 0 else op.V1_1


_BLOCK_OVERLOAD = op.overload(
    op.data("input"), op.attribute("block"), op.attribute("nchw", op.BOOL), level=op.V1_2, also={2: op.V1_0}
)

DECLARATIONS = (
    op.Declaration(
        OperationType.DEPTH_TO_SPACE,
        since=op.V1_0,
        overloads=(_BLOCK_OVERLOAD,),
        variants=data_movement_variants(stateless(depth_to_space), op.V1_0),
        shape=depth_to_space_shape,
        images=("input",),
        same_quantization=True,
    ),
    op.Declaration(
        OperationType.SPACE_TO_DEPTH,
        since=op.V1_0,
        overloads=(_BLOCK_OVERLOAD,),
        variants=data_movement_variants(stateless(space_to_depth), op.V1_0),
        shape=space_to_depth_shape,
        images=("input",),
        same_quantization=True,
    ),
    op.Declaration(
        OperationType.BATCH_TO_SPACE_ND,
        since=op.V1_1,
        overloads=(
            op.overload(
                op.data("input"),
                op.attribute("block", op.I32),
                op.attribute("nchw", op.BOOL),
                level=op.V1_2,
                also={2: op.V1_1},
            ),
        ),
        variants=data_movement_variants(stateless(batch_to_space), op.V1_1),
        shape=batch_to_space_shape,
        images=("input",),
        same_quantization=True,
        extended=(op.sixteen_bits(*op.of_types(stateless(batch_to_space), op.Q16S)),),
    ),
    op.Declaration(
        OperationType.SPACE_TO_BATCH_ND,
        since=op.V1_1,
        overloads=(
            op.overload(
                op.data("input"),
                op.attribute("block", op.I32),
                op.attribute("paddings", op.I32),
                op.attribute("nchw", op.BOOL),
                level=op.V1_2,
                also={3: op.V1_1},
            ),
        ),
        variants=data_movement_variants(plan_space_to_batch, op.V1_1),
        shape=space_to_batch_shape,
        images=("input",),
        same_quantization=True,
        level=_space_to_batch_level,
        extended=(op.sixteen_bits(*op.of_types(plan_space_to_batch, op.Q16S)),),
    ),
)
