"""Shape arithmetic shared by several operations: filter windows, broadcasting, axes.

Shape rules take shapes as tuples and attributes by the names of the declaration. They raise GeneralFailure through
`require` if a constraint is violated; its id comes last in the message. Ids starting with W, B, A and R are shared and
explained here; those starting with C belong to one operation. All sums are Python ints, so nothing overflows.

    W1 padding scheme is SAME or VALID      W4 padding is smaller than the dilated filter
    W2 strides, dilations, sizes > 0        W5 the output size is positive
    W3 padding is not negative              B1 dimensions are equal or 1       B2 at most 4 dimensions
    W6 the padded image fits 32 bits as float32
    A1 axis in [-rank, rank)                R1 the operation takes tensors of this rank
    R2 the size in bytes fits 32 bits       R5 at most 32 dimensions, the limit of NumPy 1

A dimension that depends on the data (the count of remaining boxes) is DATA_DEPENDENT in a rule's result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec import Struct

from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.types import PaddingScheme
from nnfmq.operations.declaration import Shape

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


class WindowDimension(Struct, frozen=True):
    """A filter window along one axis, as XLA's WindowDimension: `count` positions, `stride` apart.

    `size` is the kernel's; the window moves over padding_low + input + padding_high elements.
    """

    size: int
    stride: int
    dilation: int
    padding_low: int
    padding_high: int
    count: int

    @property
    def effective_kernel_size(self) -> int:
        """The dilated kernel size: input elements from the first tap to the last, inclusive."""
        return (self.size - 1) * self.dilation + 1


def window_dimension(
    input_size: int, size: int, stride: int, dilation: int, padding: tuple[int, int] | int
) -> WindowDimension:
    """Return the window along one axis; `padding` is a PaddingScheme or (low, high)."""
    message = f"stride {stride}, dilation {dilation}, filter size {size}; all must be positive"
    require(stride > 0 and dilation > 0 and size > 0, "W2", message)
    kernel_size = (size - 1) * dilation + 1
    low, high = padding if isinstance(padding, tuple) else _scheme_padding(input_size, kernel_size, stride, padding)
    require(low >= 0 and high >= 0, "W3", f"padding ({low}, {high}) is negative")
    message = f"padding ({low}, {high}) must be smaller than the dilated filter size {kernel_size}"
    require(kernel_size > low and kernel_size > high, "W4", message)
    count = (input_size - kernel_size + stride + low + high) // stride
    require(count > 0, "W5", f"input size {input_size} is too small for a filter of {kernel_size}")
    return WindowDimension(size, stride, dilation, low, high, count)


def _scheme_padding(input_size: int, kernel_size: int, stride: int, scheme: int) -> tuple[int, int]:
    known = scheme in (PaddingScheme.SAME, PaddingScheme.VALID)
    require(known, "W1", f"padding scheme {scheme}, allowed are 1 (SAME) and 2 (VALID)")
    if scheme == PaddingScheme.VALID:
        return 0, 0
    total = max((-(-input_size // stride) - 1) * stride + kernel_size - input_size, 0)
    return total // 2, total - total // 2


def windows(
    input_sizes: Shape,
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
    """Return the windows along height and width, with implicit (`padding_scheme`) or explicit padding."""
    vertical = (padding_top, padding_bottom) if padding_scheme is None else padding_scheme
    horizontal = (padding_left, padding_right) if padding_scheme is None else padding_scheme
    return (
        window_dimension(input_sizes[0], sizes[0], stride_height, dilation_height, vertical),
        window_dimension(input_sizes[1], sizes[1], stride_width, dilation_width, horizontal),
    )


def padded_shape(image: Shape, rows: WindowDimension, columns: WindowDimension) -> Shape:
    """Return the shape of an NHWC image with the windows' padding.

    W6 limits it, because a client can ask for any padding through the dilation.
    """
    batch, height, width, channels = image
    height += rows.padding_low + rows.padding_high
    width += columns.padding_low + columns.padding_high
    shape = (batch, height, width, channels)
    require(4 * math.prod(shape) < 1 << 32, "W6", f"a padded image of shape {shape} needs 2^32 bytes or more")
    return shape


def broadcast_shapes_up_to_rank_4(first: Shape, second: Shape, **_: object) -> Shape:
    """Return the right-aligned broadcast of two shapes of rank 4 or less; dimension 0 broadcasts with 1."""
    require(max(len(first), len(second)) <= 4, "B2", f"ranks {len(first)} and {len(second)}, at most 4 is allowed")
    return broadcast_shapes(first, second)


def broadcast_shapes(first: Shape, second: Shape, **_: object) -> Shape:
    """Return the right-aligned broadcast of two shapes."""
    rank = max(len(first), len(second))
    pairs = zip((1,) * (rank - len(first)) + first, (1,) * (rank - len(second)) + second, strict=True)
    return tuple(_broadcast_dimension(a, b) for a, b in pairs)


def _broadcast_dimension(first: int, second: int) -> int:
    require(first == second or 1 in (first, second), "B1", f"dimensions {first} and {second} do not broadcast")
    return second if first == 1 else first


def same_shape(first: Shape, *_: Shape, **__: object) -> Shape:
    """Return the first shape."""
    return first


def same_shape_up_to_rank_4(first: Shape, *_: Shape, **__: object) -> Shape:
    """Return the first shape, of rank 4 or less."""
    require_rank(first, range(1, 5), "input")
    return first


def normalize_axis(axis: int, rank: int) -> int:
    """Return `axis` as a non-negative index (A1)."""
    require(-rank <= axis < rank, "A1", f"axis {axis} is outside [-{rank}, {rank})")
    return axis % rank


def require_max_rank(shape: Shape, name: str) -> None:
    """Require that `shape` has no more dimensions than a NumPy array can have (R5)."""
    message = f"{name} has {len(shape)} dimensions, at most {MAX_DIMENSIONS} are allowed"
    require(len(shape) <= MAX_DIMENSIONS, "R5", message)


def require_size(shape: Shape, element_bytes: int) -> None:
    """Require that an array of `shape` fits 32 bits; the product is checked from left to right (R2, R5)."""
    require_max_rank(shape, "an output")
    total, dimensions = element_bytes, [dimension for dimension in shape if dimension != DATA_DEPENDENT]
    for dimension in dimensions:
        total *= dimension
        require(total < 1 << 32, "R2", f"an output of shape {shape} needs 2^32 bytes or more")
    # NumPy ignores dimensions of 0 when it checks whether the size overflows, so the others must fit by themselves.
    countable = math.prod(filter(None, dimensions)) * element_bytes < 1 << 63
    require(countable, "R2", f"an empty output of shape {shape} has dimensions that do not fit 64 bits")
