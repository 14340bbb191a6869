"""Pooling and reduction kernels, compared with the interpreter."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from support.compiled import assert_kernels_agree
from support.small_models import one_operation, vector

from nnfmq.hal.types import Operand, OperandType, OperationType

pytestmark = pytest.mark.instruction_sets

KINDS = {
    "float": Operand(OperandType.TENSOR_FLOAT32),
    "uint8": Operand(OperandType.TENSOR_QUANT8_ASYMM, (), 0.0625, 110),
    "int8": Operand(OperandType.TENSOR_QUANT8_ASYMM_SIGNED, (), 0.0625, -10),
}
IMAGES = [(1, 7, 7, 64), (2, 9, 5, 3), (1, 8, 8, 1), (3, 4, 6, 40), (1, 17, 19, 130)]
FILTERS = [  # height, width, stride, padding (scheme or left, right, top, bottom), activation
    (2, 2, 2, 2, 0),
    (3, 3, 1, 1, 1),
    (3, 4, 2, 1, 3),
    (4, 1, 1, 2, 2),
    (4, 3, 3, (2, 1, 3, 0), 0),
]
SHAPES = [  # shape, axes, keep
    ((1, 7, 7, 48), (1, 2), 1),
    ((2, 5, 3, 7), (-1,), 0),
    ((3, 4, 5, 6), (0, 2), 0),
    ((3, 4, 5, 6), (1, 3), 1),
    ((300, 7), (0,), 0),
    ((5, 1001), (1,), 1),
    ((4, 33, 2), (0, 1, 2), 0),
    ((6,), (0,), 0),
    ((1, 1), (0,), 1),
    ((70000, 2), (0,), 0),
]


def tensor(kind: str, shape: tuple[int, ...]) -> Operand:
    base = KINDS[kind]
    return Operand(base.type, shape, base.scale, base.zero_point)


def windows(extent: int, size: int, stride: int, padding: int, explicit: tuple[int, int] | None) -> int:
    if explicit is not None:
        return (extent + sum(explicit) - size + stride) // stride
    return -(-(extent if padding == 1 else extent - size + 1) // stride)


@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize(
    ("code", "kind"), [*product(["AVERAGE_POOL_2D", "MAX_POOL_2D"], KINDS), ("L2_POOL_2D", "float")]
)
def test_pools_match_the_interpreter(code: str, kind: str, image: tuple[int, ...], filter: tuple[Any, ...]) -> None:
    height, width, stride, padding, activation = filter
    explicit = padding if isinstance(padding, tuple) else None
    arguments = list(explicit) if explicit else [padding]
    out = (
        image[0],
        windows(image[1], height, stride, padding, explicit and explicit[2:]),
        windows(image[2], width, stride, padding, explicit and explicit[:2]),
        image[3],
    )
    source = [tensor(kind, image), *arguments, stride, stride, width, height, activation]
    model = one_operation(OperationType[code], source, tensor(kind, out))

    assert_kernels_agree(model)


def test_the_quantized_mean_over_a_whole_image_is_exact() -> None:
    """The sums exceed 16 bits, and the integers that float32 represents exactly."""
    for size in (21, 300):
        source, out = tensor("int8", (1, size, size, 5)), tensor("int8", (1, 1, 1, 5))
        assert_kernels_agree(one_operation(OperationType.AVERAGE_POOL_2D, [source, 2, size, size, size, size, 0], out))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("code", "kind"), [*product(["MEAN", "REDUCE_MAX", "REDUCE_MIN"], KINDS), ("REDUCE_SUM", "float")]
)
def test_reductions_match_the_interpreter(
    code: str, kind: str, shape: tuple[tuple[int, ...], tuple[int, ...], int]
) -> None:
    extents, axes, keep = shape
    gone = {axis % len(extents) for axis in axes}
    kept = tuple(1 if axis in gone else n for axis, n in enumerate(extents))
    left = kept if keep else tuple(n for axis, n in enumerate(extents) if axis not in gone) or (1,)
    flag = keep if code == "MEAN" else bool(keep)
    model = one_operation(OperationType[code], [tensor(kind, extents), vector(axes), flag], tensor(kind, left))

    assert_kernels_agree(model, tolerance=1e-3 if code == "REDUCE_SUM" else 1e-5)
