"""Operations on images and boxes: one example of real values each, run in every form, type and layout.

The values are whole multiples of every scale used, so that each type computes the same numbers up to its own rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.executed import executed
from support.image_examples import (
    CASES,
    DECLARATIONS,
    EXAMPLES,
    INT8,
    UINT8,
    arguments_of,
    constants_of,
    outputs_of,
)

from nnfmq.hal.types import OperationType
from nnfmq.operations.declaration import NUMPY_TYPES, Declaration, Overload, Role, Variant, match
from nnfmq.operations.preparation import prepare, tensor_of
from nnfmq.operations.shapes import DATA_DEPENDENT

Array = npt.NDArray[Any]


def results(declaration: Declaration, overload: Overload, variant: Variant, nchw: bool, **changes: Any) -> list[Array]:
    arguments, outputs = arguments_of(declaration, overload, variant, nchw), outputs_of(declaration, variant)
    found = executed(declaration.code, arguments, outputs, constants_of(overload), **changes)
    turn_back = nchw and declaration.image_outputs
    return [np.transpose(array, (0, 2, 3, 1)) if turn_back else array for array in found]


def test_every_declaration_of_these_families_has_an_example() -> None:
    assert set(EXAMPLES) == set(DECLARATIONS)


@pytest.mark.parametrize(("declaration", "overload", "variant", "nchw"), CASES)
def test_every_type_and_layout_computes_the_numbers_of_float32(
    declaration: Declaration, overload: Overload, variant: Variant, nchw: bool
) -> None:
    reals = results(declaration, overload, declaration.variants[0], False)

    found = results(declaration, overload, variant, nchw)

    for output, got, want in zip(outputs_of(declaration, variant), found, reals, strict=True):
        rounding = 0.004 * (1 + np.abs(want)) if "FLOAT16" in output.type.name else 1e-6 + 1.01 * output.scale
        real = (got.astype(np.float64) - output.zero_point) * (output.scale or 1)
        assert got.shape == want.shape
        assert np.all(np.abs(real - want) <= rounding)


@pytest.mark.parametrize(("declaration", "overload", "variant", "nchw"), CASES)
def test_the_result_has_the_shapes_of_the_rule_and_the_types_that_are_declared(
    declaration: Declaration, overload: Overload, variant: Variant, nchw: bool
) -> None:
    arguments, outputs = arguments_of(declaration, overload, variant, nchw), outputs_of(declaration, variant)
    found = match(declaration, [operand for operand, _ in arguments], outputs)
    tensors = [tensor_of(operand, array.shape, array) for operand, array in arguments]
    special = prepare(found, tensors, outputs)

    arrays = (a for (_, a), p in zip(arguments, overload.parameters, strict=True) if p.role is Role.DATA)
    with np.errstate(all="ignore"):  # as the interpreter does
        computed = special.run(*arrays)

    found_arrays = computed if isinstance(computed, tuple) else (computed,)
    for array, shape, output in zip(found_arrays, special.shapes, outputs, strict=True):
        assert array.dtype == NUMPY_TYPES[output.type]
        assert len(array.shape) == len(shape)
        assert all(rule in (DATA_DEPENDENT, extent) for rule, extent in zip(shape, array.shape, strict=True))


@pytest.mark.parametrize(("declaration", "overload", "variant", "nchw"), CASES)
def test_arguments_of_unknown_rank_that_come_with_the_request_give_the_same_bits(
    declaration: Declaration, overload: Overload, variant: Variant, nchw: bool
) -> None:
    known = results(declaration, overload, variant, nchw)

    unknown = results(declaration, overload, variant, nchw, unknown=True)

    for first, second in zip(known, unknown, strict=True):
        np.testing.assert_array_equal(first, second)


COUPLED = [
    case
    for case in CASES
    if {INT8} & set(case.values[2].types.values()) and case.values[0].code != OperationType.BATCH_MATMUL
]


@pytest.mark.parametrize(("declaration", "overload", "variant", "nchw"), COUPLED)
def test_SUP_5_int8_results_are_the_uint8_ones_less_128(
    declaration: Declaration, overload: Overload, variant: Variant, nchw: bool
) -> None:
    types = {column: UINT8 if kind == INT8 else kind for column, kind in variant.types.items()}
    unsigned = next(v for v in declaration.variants if v.types == types)

    signed_results = results(declaration, overload, variant, nchw)

    for first, second in zip(signed_results, results(declaration, overload, unsigned, nchw), strict=True):
        np.testing.assert_array_equal(first.astype(np.int64) + 128 * (first.dtype == np.int8), second)
