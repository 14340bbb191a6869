"""Operations that move or choose elements of 16-bit tensors. TFLite moves the stored values, whatever their scales.

TOPK_V2 puts the first of equal values first.
"""

from __future__ import annotations

import numpy as np

from nnfmq.hal.types import OperationType as Op
from nnfmq.operations import (
    gather_topk,
    min_max_select,
    padding,
    permute,
    reduce_argmax,
    reshape_concat,
    resizing,
    slicing,
    space_depth_batch,
)
from nnfmq.operations.signature import FLOAT32, INT32, Array, Run, Tensor
from nnfmq.operations.tflite_extension.sixteen_bits import find, sixteen_bit


def plan_topk(input: Tensor, *, output: tuple[Tensor, Tensor], k: int) -> Run:
    """Plan the `k` largest of each row and their indices."""

    def run(array: Array) -> tuple[Array, Array]:
        order = np.argsort(-array.astype(np.int32), axis=-1, kind="stable")[..., :k]
        return np.take_along_axis(array, order, axis=-1), order.astype(np.int32)

    return run


_SOURCES = (
    (reshape_concat, Op.RESHAPE, Op.SQUEEZE, Op.EXPAND_DIMS, Op.CONCATENATION, Op.PACK),
    (slicing, Op.SLICE, Op.STRIDED_SLICE, Op.SPLIT),
    (permute, Op.TRANSPOSE, Op.REVERSE, Op.TILE),
    (padding, Op.PAD, Op.MIRROR_PAD),
    (space_depth_batch, Op.SPACE_TO_BATCH_ND, Op.BATCH_TO_SPACE_ND),
    (gather_topk, Op.GATHER, Op.EMBEDDING_LOOKUP),
    (min_max_select, Op.MAXIMUM, Op.MINIMUM, Op.SELECT),
    (reduce_argmax, Op.REDUCE_MAX, Op.REDUCE_MIN),
)

DECLARATIONS = (
    *(sixteen_bit(find(module.DECLARATIONS, code)) for module, *codes in _SOURCES for code in codes),
    sixteen_bit(find(padding.DECLARATIONS, Op.PAD_V2), types=({"V": INT32},)),
    sixteen_bit(find(resizing.DECLARATIONS, Op.RESIZE_NEAREST_NEIGHBOR), types=({"S": INT32}, {"S": FLOAT32})),
    sixteen_bit(find(gather_topk.DECLARATIONS, Op.TOPK_V2), plan_topk),
)
