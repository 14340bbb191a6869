"""Shape arithmetic that several operations share: windows, broadcasting, axes. Plain ints, no arrays.

Shape rules get shapes as tuples and controls by the names of the declaration, and raise GeneralFailure through
`require`, whose first words are the constraint's id. Ids starting with W, B, A and R are shared and explained here;
those starting with C belong to one operation. All sums are Python ints, so nothing overflows.

    W1 padding scheme is SAME or VALID      W4 padding is smaller than the dilated filter
    W2 strides, dilations, extents > 0      W5 the output has a positive extent
    W3 padding is not negative              B1 extents are equal or 1          B2 at most 4 dimensions
    W6 the padded image fits 32 bits as float32
    A1 axis in [-rank, rank)                R1 the rank is one the operation takes
    R2 the size fits 32 bits                R5 at most 32 dimensions, which every numpy takes

An extent that comes with the data (how many boxes are left) is DATA_DEPENDENT in a rule's result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.types import PaddingScheme
from nnfmq.operations.signature import Shape

DATA_DEPENDENT = -1
MAX_DIMENSIONS = 32


def require(condition: bool, constraint: str, message: str) -> None:
    """Raise GeneralFailure with `message` and the constraint's id, unless `condition` holds."""
    if not condition:
        raise GeneralFailure(f"{message} ({constraint})")


def require_rank(shape: Shape, ranks: Iterable[int], name: str) -> None:
    """Require that `shape` has one of `ranks` (R1)."""
    allowed = tuple(ranks)
    require(len(shape) in allowed, "R1", f"{name} has rank {len(shape)}, allowed are {allowed}")


@dataclass(frozen=True, slots=True)
class WindowDimension:
    """How a filter moves along one axis: `count` positions, each `stride` further, over `head` + input + `tail`."""

    size: int
    stride: int
    dilation: int
    padding_low: int
    padding_high: int
    count: int

    @property
    def effective_kernel_size(self) -> int:
        """Input elements from the filter's first to its last tap, inclusive."""
        return (self.size - 1) * self.dilation + 1


def window_dimension(
    extent: int, size: int, stride: int, dilation: int, padding: tuple[int, int] | int
) -> WindowDimension:
    """Compute the window along one axis; `padding` is a scheme's code or (head, tail)."""
    require(stride > 0 and dilation > 0 and size > 0, "W2", f"stride {stride}, dilation {dilation}, filter {size}")
    reach = (size - 1) * dilation + 1
    head, tail = padding if isinstance(padding, tuple) else _scheme_padding(extent, reach, stride, padding)
    require(head >= 0 and tail >= 0, "W3", f"padding ({head}, {tail}) is negative")
    require(reach > head and reach > tail, "W4", f"padding ({head}, {tail}) is not smaller than the filter's {reach}")
    count = (extent - reach + stride + head + tail) // stride
    require(count > 0, "W5", f"extent {extent} is too small for a filter of {reach}")
    return WindowDimension(size, stride, dilation, head, tail, count)


def _scheme_padding(extent: int, reach: int, stride: int, scheme: int) -> tuple[int, int]:
    require(scheme in (PaddingScheme.SAME, PaddingScheme.VALID), "W1", f"padding scheme {scheme} is not 1 or 2")
    if scheme == PaddingScheme.VALID:
        return 0, 0
    needed = max((-(-extent // stride) - 1) * stride + reach - extent, 0)
    return needed // 2, needed - needed // 2


def windows(
    extents: Shape,
    sizes: Shape,
    *,
    stride_width: int,
    stride_height: int,
    padding_scheme: int | None = None,
    padding_left: int = 0,
    padding_right: int = 0,
    padding_top: int = 0,
    padding_bottom: int = 0,
    dilation_width: int = 1,
    dilation_height: int = 1,
) -> tuple[WindowDimension, WindowDimension]:
    """Return the windows along height and width, from either form of padding."""
    vertical = (padding_top, padding_bottom) if padding_scheme is None else padding_scheme
    horizontal = (padding_left, padding_right) if padding_scheme is None else padding_scheme
    return (
        window_dimension(extents[0], sizes[0], stride_height, dilation_height, vertical),
        window_dimension(extents[1], sizes[1], stride_width, dilation_width, horizontal),
    )


def padded_shape(image: Shape, rows: WindowDimension, columns: WindowDimension) -> Shape:
    """Return the shape of an NHWC image with the windows' padding (W6: dilation lets a client ask for any)."""
    batch, height, width, channels = image
    shape = (
        batch,
        rows.padding_low + height + rows.padding_high,
        columns.padding_low + width + columns.padding_high,
        channels,
    )
    require(4 * math.prod(shape) < 1 << 32, "W6", f"a padded image of shape {shape} needs more than 2^32 bytes")
    return shape


def broadcast_shapes_up_to_rank_4(first: Shape, second: Shape, **_: object) -> Shape:
    """Return the right-aligned broadcast of two shapes of rank 4 or less; an extent of 0 goes with 1."""
    require(max(len(first), len(second)) <= 4, "B2", f"ranks {len(first)} and {len(second)}, at most 4 is allowed")
    return broadcast_shapes(first, second)


def broadcast_shapes(first: Shape, second: Shape, **_: object) -> Shape:
    """Return the right-aligned broadcast of two shapes."""
    rank = max(len(first), len(second))
    pairs = zip((1,) * (rank - len(first)) + first, (1,) * (rank - len(second)) + second, strict=True)
    return tuple(_common_extent(a, b) for a, b in pairs)


def _common_extent(first: int, second: int) -> int:
    require(first == second or 1 in (first, second), "B1", f"extents {first} and {second} do not broadcast")
    return second if first == 1 else first


def same_shape(first: Shape, *_: Shape, **__: object) -> Shape:
    """Return the first shape: the rule of elementwise operations."""
    return first


def same_shape_up_to_rank_4(first: Shape, *_: Shape, **__: object) -> Shape:
    """Return the first shape, of rank 4 or less."""
    require_rank(first, range(1, 5), "input")
    return first


def normalize_axis(axis: int, rank: int) -> int:
    """Return `axis` counted from the front (A1)."""
    require(-rank <= axis < rank, "A1", f"axis {axis} is outside [-{rank}, {rank})")
    return axis % rank


def require_max_rank(shape: Shape, name: str) -> None:
    """Require that `shape` has no more dimensions than an array can have (R5)."""
    message = f"{name} has {len(shape)} dimensions, at most {MAX_DIMENSIONS} are allowed"
    require(len(shape) <= MAX_DIMENSIONS, "R5", message)


def require_size(shape: Shape, element_bytes: int) -> None:
    """Require that an array of `shape` fits 32 bits; the product is checked from left to right (R2, R5)."""
    require_max_rank(shape, "an output")
    total, extents = element_bytes, [extent for extent in shape if extent != DATA_DEPENDENT]
    for extent in extents:
        total *= extent
        require(total < 1 << 32, "R2", f"an output of shape {shape} needs more than 2^32 bytes")
    # numpy leaves zeros out where it looks for an overflow
    countable = math.prod(filter(None, extents)) * element_bytes < 1 << 63
    require(countable, "R2", f"an empty output of shape {shape} has extents that do not fit 64 bits")
