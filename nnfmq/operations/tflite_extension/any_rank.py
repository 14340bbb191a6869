"""Shape rules of operations that the HAL limits to rank 4, without that limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nnfmq.operations import padding, permute, reduce_argmax, reshape_concat, slicing
from nnfmq.operations.signature import Array, Shape

__all__ = ["SHAPES_OF_ANY_RANK", "padded_shape_of_any_rank"]


def padded_shape_of_any_rank(input: Shape, *, paddings: Array, value: float = 0) -> Shape:
    """Return the input's shape, of any rank, plus the paddings."""
    return padding.padded(input, paddings)


SHAPES_OF_ANY_RANK: Mapping[str, Callable[..., Any]] = {
    "RESHAPE": reshape_concat.reshaped,
    "SQUEEZE": reshape_concat.squeezed,
    "CONCATENATION": reshape_concat.concatenated,
    "STRIDED_SLICE": slicing.strided,
    "PAD": padded_shape_of_any_rank,
    "PAD_V2": padded_shape_of_any_rank,
    "TRANSPOSE": permute.permuted,
    **dict.fromkeys(("MEAN", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_SUM", "REDUCE_PROD"), reduce_argmax.reduced),
}
"""By the operation's name."""
