"""The alignment of constants in a model's `operand_values` and pools.

Source: the HAL's utilities, roundUp and getAlignmentForLength.
"""

from __future__ import annotations

__all__ = ["aligned_offset", "alignment_for", "round_up"]


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not less than `value`."""
    return -(-value // multiple) * multiple


def alignment_for(size_bytes: int) -> int:
    """Return the alignment of a value of `size_bytes`: 1 below 2 bytes, 2 for 2 and 3 bytes, otherwise 4."""
    return 1 if size_bytes < 2 else 2 if size_bytes < 4 else 4


def aligned_offset(end: int, size_bytes: int) -> int:
    """Return the offset of the next value, of `size_bytes`, where the values so far take `end` bytes."""
    return round_up(end, alignment_for(size_bytes))
