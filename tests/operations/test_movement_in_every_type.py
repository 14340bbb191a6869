"""Operations that move elements: every declared type against a definition in plain Python, and every way to call them.

A definition gets the arrays and the value of 0 in their type; controls are written into it once more, by hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.executed import Argument, executed

from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.types import Operand, OperandType, is_scalar
from nnfmq.operations import gather, padding, permute, reshape_concat, resizing, slicing, space_depth_batch
from nnfmq.operations.declaration import NUMPY_TYPES, Declaration, Overload, Parameter, Role, Variant, match
from nnfmq.operations.preparation import prepare, tensor_of

Array = npt.NDArray[Any]
Definition = Callable[..., Any]

FAMILIES = (permute, space_depth_batch, gather, padding, resizing, reshape_concat, slicing)
DECLARATIONS = {d.name: d for family in FAMILIES for d in family.DECLARATIONS if d.name != "RESIZE_BILINEAR"}
ZERO_POINTS = {OperandType.TENSOR_QUANT8_ASYMM: 7, OperandType.TENSOR_QUANT8_ASYMM_SIGNED: -3}
HITS = Operand(OperandType.TENSOR_QUANT8_ASYMM, (), 1.0, 0)


@dataclass(frozen=True)
class Example:
    """Arguments in order: a tuple is the shape of an array, anything else a control's value."""

    arguments: tuple[Any, ...]
    definition: Definition
    outputs: int = 1


def filled(shape: tuple[int, ...], pick: Callable[..., Any], like: Array) -> Array:
    """Return an array with `pick(*index)` in each place."""
    result = np.empty(shape, like.dtype)
    for index in np.ndindex(*shape):
        result[index] = pick(*index)
    return result


def depth_to_space(a: Array, zero: int) -> Array:
    return filled((1, 4, 6, 2), lambda n, y, x, c: a[n, y // 2, x // 2, (y % 2 * 2 + x % 2) * 2 + c], a)


def space_to_depth(a: Array, zero: int) -> Array:
    return filled((1, 2, 3, 8), lambda n, y, x, c: a[n, y * 2 + c // 4, x * 2 + c // 2 % 2, c % 2], a)


def batch_to_space(a: Array, zero: int) -> Array:
    return filled((2, 4, 9, 1), lambda n, y, x, c: a[(y % 2 * 3 + x % 3) * 2 + n, y // 2, x // 3, c], a)


def space_to_batch(a: Array, zero: int) -> Array:
    padded = np.pad(a, ((0, 0), (1, 0), (0, 2), (0, 0)), constant_values=zero)
    return filled((12, 2, 2, 1), lambda n, y, x, c: padded[n % 2, y * 2 + n // 6, x * 3 + n // 2 % 3, c], a)


def strided(a: Array, zero: int) -> Array:
    return filled((3, 2), lambda i, j: a[1, 3 - i, 1 + 2 * j], a)


def topk(a: Array, zero: int) -> tuple[Array, Array]:
    rows = a.reshape(-1, a.shape[-1])
    order = np.array([sorted(range(len(row)), key=lambda i: (-float(row[i]), -i))[:3] for row in rows], np.int32)
    indices = order.reshape(*a.shape[:-1], 3)
    return np.array([row[i] for row, i in zip(rows, order, strict=True)], a.dtype).reshape(indices.shape), indices


def hashtable(a: Array, zero: int) -> tuple[Array, Array]:
    none = np.zeros_like(a[0])
    return np.stack([a[2], none, a[0], none, a[2], none]), np.array([1, 0, 1, 0, 1, 0], np.uint8)


def shuffled(a: Array, zero: int) -> Array:
    return np.stack([a[:, i] for i in (0, 2, 4, 1, 3, 5)], axis=1)


def mirrored(a: Array, zero: int) -> Array:
    rows = [a[i] for i in (2, 1, 0, 1, 2, 1)]
    return np.stack([np.stack([row[i] for i in (0, 1, 0)]) for row in rows])


EXAMPLES: dict[str, Example] = {
    "RESHAPE": Example(((2, 3, 4), [4, -1]), lambda a, zero: a.reshape(4, 6)),
    "SQUEEZE": Example(((1, 3, 1, 2), [-4]), lambda a, zero: a[0]),
    "EXPAND_DIMS": Example(((2, 3, 1, 1, 2), -3), lambda a, zero: a.reshape(2, 3, 1, 1, 1, 2)),
    "CONCATENATION": Example(((2, 3), (2, 1), -1), lambda a, b, zero: np.hstack([a, b])),
    "PACK": Example((1, (2, 3), (2, 3)), lambda a, b, zero: np.swapaxes(np.array([a, b]), 0, 1)),
    "PAD": Example(((2, 3), [[0, 1], [2, 0]]), lambda a, zero: np.pad(a, ((0, 1), (2, 0)), constant_values=zero)),
    "PAD_V2": Example(((2, 3), [[0, 1], [2, 0]], 9), lambda a, zero: np.pad(a, ((0, 1), (2, 0)), constant_values=9)),
    "MIRROR_PAD": Example(((3, 2), [[2, 1], [0, 1]], 0), mirrored),
    "DEPTH_TO_SPACE": Example(((1, 2, 3, 8), 2), depth_to_space),
    "SPACE_TO_DEPTH": Example(((1, 4, 6, 2), 2), space_to_depth),
    "BATCH_TO_SPACE_ND": Example(((12, 2, 3, 1), [2, 3]), batch_to_space),
    "SPACE_TO_BATCH_ND": Example(((2, 3, 4, 1), [2, 3], [[1, 0], [0, 2]]), space_to_batch),
    "SLICE": Example(((3, 4, 1, 1, 2), [1, 0, 0, 0, 1], [2, 3, -1, 1, -1]), lambda a, zero: a[1:3, :3, :, :, 1:2]),
    "STRIDED_SLICE": Example(((2, 4, 5), [-1, 9, 1], [9, 0, 4], [1, -1, 2], 0, 0, 1), strided),
    "SPLIT": Example(((2, 6), -1, 3), lambda a, zero: (a[:, :2], a[:, 2:4], a[:, 4:]), outputs=3),
    "TRANSPOSE": Example(((2, 3, 4), [2, 0, 1]), lambda a, zero: np.einsum("ijk->kij", a)),
    "REVERSE": Example(((2, 1, 1, 1, 1, 1, 3, 2), [6]), lambda a, zero: a[..., ::-1, :]),
    "TILE": Example(((2, 3), [2, 2]), lambda a, zero: np.block([[a, a], [a, a]])),
    "CHANNEL_SHUFFLE": Example(((2, 6, 3), 3, -2), shuffled),
    "GATHER": Example(((2, 3, 2), -2, [[2, 0], [1, 1]]), lambda a, zero: a[:, [[2, 0], [1, 1]]]),
    "EMBEDDING_LOOKUP": Example(([2, 0, 2], (3, 2, 2)), lambda a, zero: np.stack([a[2], a[0], a[2]])),
    "HASHTABLE_LOOKUP": Example(([9, 5, -4, -9, 9, 10], [-4, 2, 9], (3, 2)), hashtable, outputs=2),
    "TOPK_V2": Example(((2, 1, 5), 3), topk, outputs=2),
    "RESIZE_NEAREST_NEIGHBOR": Example(((1, 2, 3, 2), 6, 1, False), lambda a, zero: np.repeat(a[:, :1], 2, axis=2)),
}

VARIANTS = [
    pytest.param(declaration, variant, id=f"{name}-{variant.types['T'].name}")
    for name, declaration in DECLARATIONS.items()
    for variant in declaration.variants
]


def shortest(overload: Overload, count: int) -> tuple[Parameter, ...]:
    found = overload.expand(count)
    assert found is not None
    return found[0]


def operand(kind: OperandType, shape: tuple[int, ...] = ()) -> Operand:
    coded = kind in ZERO_POINTS
    return Operand(kind, shape, 0.5 if coded else 0.0, ZERO_POINTS.get(kind, 0))


def values(kind: OperandType, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Return values of which some are equal, for the order among them."""
    return rng.integers(0, 60, shape).astype(NUMPY_TYPES[kind])


def arguments_of(declaration: Declaration, variant: Variant, zero_sized: bool = False) -> list[Argument]:
    given, rng = EXAMPLES[declaration.name].arguments, np.random.default_rng(1)
    arguments = []
    for parameter, value in zip(shortest(declaration.overloads[0], len(given)), given, strict=True):
        kind = variant.types[parameter.type] if isinstance(parameter.type, str) else parameter.type
        assert kind is not None
        if isinstance(value, tuple):
            array = values(kind, (0, *value[1:]) if zero_sized else value, rng)
        else:
            array = np.array(value, NUMPY_TYPES[kind])
        arguments.append((operand(kind, () if is_scalar(kind) else array.shape), array))
    return arguments


def outputs_of(declaration: Declaration, variant: Variant) -> list[Operand]:
    if declaration.name == "HASHTABLE_LOOKUP":
        return [operand(variant.types["T"]), HITS]
    columns, _ = declaration.expand_outputs(EXAMPLES[declaration.name].outputs) or ((), 0)
    return [operand(variant.types[c] if isinstance(c, str) else OperandType.TENSOR_INT32) for c in columns]


def control_positions(declaration: Declaration) -> list[int]:
    parameters = shortest(declaration.overloads[0], len(EXAMPLES[declaration.name].arguments))
    return [position for position, parameter in enumerate(parameters) if parameter.role is Role.ATTRIBUTE]


def expected_of(declaration: Declaration, variant: Variant) -> list[Array]:
    arguments = arguments_of(declaration, variant)
    attributes = control_positions(declaration)
    arrays = [array for position, (_, array) in enumerate(arguments) if position not in attributes]
    expected = EXAMPLES[declaration.name].definition(*arrays, zero=ZERO_POINTS.get(variant.types["T"], 0))
    return list(expected) if isinstance(expected, tuple) else [expected]


def result(declaration: Declaration, variant: Variant, *, unknown: bool) -> list[Array]:
    arguments, outputs = arguments_of(declaration, variant), outputs_of(declaration, variant)
    return executed(declaration.code, arguments, outputs, control_positions(declaration), unknown=unknown)


def assert_equal(found: list[Array], expected: list[Array]) -> None:
    for one, other in itertools.zip_longest(found, expected):
        np.testing.assert_array_equal(one, other, strict=True)


def test_every_declaration_has_an_example() -> None:
    assert set(EXAMPLES) == set(DECLARATIONS)


@pytest.mark.parametrize(("declaration", "variant"), VARIANTS)
def test_the_result_is_the_definition(declaration: Declaration, variant: Variant) -> None:
    assert_equal(result(declaration, variant, unknown=False), expected_of(declaration, variant))


@pytest.mark.parametrize(("declaration", "variant"), VARIANTS)
def test_SHP_1_shapes_and_attributes_that_come_with_the_request_change_nothing(
    declaration: Declaration, variant: Variant
) -> None:
    assert_equal(result(declaration, variant, unknown=True), expected_of(declaration, variant))


@pytest.mark.parametrize(("declaration", "variant"), VARIANTS)
def test_the_result_has_the_shape_of_the_rule(declaration: Declaration, variant: Variant) -> None:
    arguments, outputs = arguments_of(declaration, variant), outputs_of(declaration, variant)
    found = match(declaration, [given for given, _ in arguments], outputs)
    attributes = control_positions(declaration)
    tensors = [tensor_of(o, a.shape, a if i in attributes else None) for i, (o, a) in enumerate(arguments)]

    special = prepare(found, tensors, outputs)
    computed = special.run(*(a for i, (_, a) in enumerate(arguments) if i not in attributes))

    results = computed if isinstance(computed, tuple) else (computed,)
    assert tuple(array.shape for array in results) == special.shapes


@pytest.mark.parametrize(
    ("declaration", "variant"), [(d, v) for d in DECLARATIONS.values() for v in d.variants if not d.zero_sized]
)
def test_N_OPF_10_an_empty_input_is_rejected(declaration: Declaration, variant: Variant) -> None:
    arguments, outputs = arguments_of(declaration, variant, zero_sized=True), outputs_of(declaration, variant)

    with pytest.raises(GeneralFailure, match=r"an input has a dimension of 0 \(R3\)$"):
        executed(declaration.code, arguments, outputs, unknown=True)


@pytest.mark.parametrize(
    "name", ["DEPTH_TO_SPACE", "SPACE_TO_DEPTH", "BATCH_TO_SPACE_ND", "SPACE_TO_BATCH_ND", "RESIZE_NEAREST_NEIGHBOR"]
)
def test_an_image_of_the_other_layout_gives_the_same_pixels(name: str) -> None:
    declaration = DECLARATIONS[name]
    variant = declaration.variants[0]
    (image, *rest), outputs = arguments_of(declaration, variant), outputs_of(declaration, variant)
    turned = np.ascontiguousarray(np.moveaxis(image[1], 3, 1))
    sizes = [argument for argument in rest if argument[0].type != OperandType.BOOL]
    nchw = (Operand(OperandType.BOOL), np.array(True))

    (found,) = executed(declaration.code, [(operand(variant.types["T"], turned.shape), turned), *sizes, nchw], outputs)

    np.testing.assert_array_equal(np.moveaxis(found, 1, 3), expected_of(declaration, variant)[0])
