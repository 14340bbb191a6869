"""Examples of operations on images and boxes with random arguments mutated: rejected or computed, never anything else.

Whatever a client sends ends in an error of the HAL or in outputs of a legal shape.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.executed import Argument, executed
from support.image_examples import CASES, arguments_of, outputs_of
from support.tiers import IS_DEEP

from nnfmq.hal.errors import NnfmqError
from nnfmq.hal.types import Operand, OperandType, is_scalar

INTEGERS = st.sampled_from([0, 1, 2, 3, 5, -1, -2, 1 << 16, 1 << 30, (1 << 31) - 1, -(1 << 31)])
REALS = st.sampled_from([0.0, 1.0, -1.0, 0.5, 100.0, 1e-38, 3e38, float("nan"), float("inf"), -float("inf")])
SCALES = st.sampled_from([1e-30, 0.125, 0.25, 1.0, 1e30])


def mutated_value(draw: Any, array: npt.NDArray[Any]) -> Any:
    if array.dtype.kind == "f":
        return draw(REALS)
    info = np.iinfo(array.dtype)
    return min(max(draw(INTEGERS), int(info.min)), int(info.max))


def mutated(draw: Any, operand: Operand, array: npt.NDArray[Any]) -> Argument:
    """Return the argument with a value, an extent, its rank or its scale changed."""
    if is_scalar(operand.type):
        return operand, np.array(mutated_value(draw, array)).astype(array.dtype)
    how = draw(st.sampled_from(("value", "extent", "rank", "scale")))
    if how == "value" and array.size:
        changed = array.copy()
        changed.reshape(-1)[draw(st.integers(0, array.size - 1))] = mutated_value(draw, array)
        return operand, changed
    if how == "scale":
        return (replace(operand, scale=draw(SCALES)) if operand.scale else operand), array
    if operand.channel_quant is not None:
        return operand, array
    shape = list(array.shape)
    if how == "rank":
        shape = shape[1:] if draw(st.booleans()) else [1, *shape]
    if how == "extent" and shape:
        axis = draw(st.integers(0, len(shape) - 1))
        shape[axis] = max(shape[axis] + draw(st.sampled_from((-9, -1, 1))), 0)
    return operand, np.resize(array, shape) if 0 not in shape else np.empty(shape, array.dtype)


@st.composite
def mutated_examples(draw: Any) -> tuple[Any, list[Argument], list[Operand], bool]:
    declaration, overload, variant, nchw = draw(st.sampled_from([case.values for case in CASES]))
    arguments = arguments_of(declaration, overload, variant, nchw)
    for position in draw(st.lists(st.integers(0, len(arguments) - 1), min_size=1, max_size=3)):
        arguments[position] = mutated(draw, *arguments[position])
    return declaration.code, arguments, outputs_of(declaration, variant), draw(st.booleans())


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # mutated values of float16
@given(mutated_examples())
@settings(max_examples=400, deadline=None, derandomize=not IS_DEEP)  # the deep run searches at random
def test_mutated_arguments_are_rejected_or_computed(example: tuple[Any, list[Argument], list[Operand], bool]) -> None:
    code, arguments, outputs, unknown = example
    try:
        found = executed(code, arguments, outputs, unknown=unknown)
    except NnfmqError:
        return

    assert len(found) == len(outputs)


def test_mutated_arguments_include_every_kind_of_operand() -> None:
    kinds = {operand.type for case in CASES for operand, _ in arguments_of(*case.values)}

    assert {OperandType.TENSOR_QUANT16_ASYMM, OperandType.TENSOR_QUANT16_SYMM, OperandType.BOOL} <= kinds
