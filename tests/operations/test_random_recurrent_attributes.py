"""Examples of the recurrent operations with random arguments mutated: rejected or computed, never anything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.by_name import Use
from support.tiers import IS_DEEP

from nnfmq.hal.errors import NnfmqError
from nnfmq.hal.types import OperandType, OperationType
from nnfmq.operations import REGISTRY, lstm, quantized_lstm, rnn_svdf
from nnfmq.operations.declaration import NUMPY_TYPES, Parameter, Role, Variant

TIME, BATCH, INPUT, CELLS, MEMORY = 3, 2, 5, 4, 2
CODES = [d.code for family in (lstm, quantized_lstm, rnn_svdf) for d in family.DECLARATIONS]
EXTENTS = st.lists(st.integers(0, 6), max_size=4).map(tuple)
NUMBERS = st.sampled_from([0, 1, 2, -1, 127, -128, 1e-38, 3e38, float("nan"), float("inf"), -float("inf")])
SCALES = st.sampled_from([1e-30, 2.0**-15, 2.0**-11, 1 / 128, 1.0, 1e30])
EXAMPLES = [  # the largest count of merged outputs
    (code, variant, len(REGISTRY[code].outputs) - code.name.startswith("BIDIRECTIONAL"))
    for code in CODES
    for variant in REGISTRY[code].variants
]
QUANTIZATIONS: dict[OperationType, dict[str, tuple[float, int]]] = {
    OperationType.QUANTIZED_16BIT_LSTM: {
        **dict.fromkeys(("TENSOR_QUANT8_ASYMM", "output1"), (1 / 128, 128)),
        **dict.fromkeys(("TENSOR_QUANT16_SYMM", "output0"), (2.0**-11, 0)),
        "TENSOR_INT32": (2.0**-14, 0),
    },
    OperationType.QUANTIZED_LSTM: {
        **dict.fromkeys(("TENSOR_QUANT8_ASYMM_SIGNED", "TENSOR_QUANT8_SYMM", "output0", "output2"), (1 / 128, 0)),
        **dict.fromkeys(("TENSOR_QUANT16_SYMM", "output1"), (2.0**-11, 0)),
    },
}


def shape_of(name: str, code: OperationType) -> tuple[int, ...]:
    """Return a legal shape of the parameter `name`: cells and outputs are as many, filters too."""
    if name in ("input", "aux_input"):
        return (TIME, BATCH, INPUT) if "SEQUENCE" in code.name else (BATCH, INPUT)
    if "norm" in name or "bias" in name or "cell_to_" in name:
        return (CELLS,)
    if "recurrent" in name or "projection" in name:
        return (CELLS, CELLS)
    if "weights_time" in name:
        return (CELLS, MEMORY)
    if "weights" in name:
        return (CELLS, INPUT)
    return (BATCH, CELLS * MEMORY) if code == OperationType.SVDF else (BATCH, CELLS)


def type_of(parameter: Parameter, variant: Variant) -> OperandType:
    found = variant.types[parameter.type] if isinstance(parameter.type, str) else parameter.type
    assert found is not None
    return found


def legal_value(parameter: Parameter, variant: Variant, code: OperationType) -> Any:
    shape = () if parameter.role is Role.ATTRIBUTE else shape_of(parameter.name, code)
    return np.ones(shape, NUMPY_TYPES[type_of(parameter, variant)])


def mutated_value(draw: Any, parameter: Parameter, legal: Any) -> Any:
    """Return another number, in another shape if the parameter is a tensor, or None if it is optional."""
    if parameter.optional and draw(st.booleans()):
        return None
    number = draw(NUMBERS)
    if legal.dtype.kind in "iu":
        info = np.iinfo(legal.dtype)
        number = 0 if np.isnan(number) else int(min(max(number, int(info.min)), int(info.max)))
    return np.full(draw(EXTENTS) if legal.shape else (), number).astype(legal.dtype)


def use_of(code: OperationType, variant: Variant, count: int, draw: Any = None) -> Use:
    """Return an example whose numbers are all 1; with `draw`, up to three arguments are mutated."""
    parameters = REGISTRY[code].overloads[0].parameters
    values = {p.name: legal_value(p, variant, code) for p in parameters}
    places: dict[str, tuple[float, int]] = dict(QUANTIZATIONS.get(code, {}))
    known = True
    if draw is not None:
        known = draw(st.booleans())
        for parameter in draw(st.lists(st.sampled_from(parameters), max_size=3)):
            values[parameter.name] = mutated_value(draw, parameter, legal_value(parameter, variant, code))
            if type_of(parameter, variant).name in places and draw(st.booleans()):
                places[parameter.name] = (draw(SCALES), 0)
    return Use(code, values, count, first_type=variant.types["T"], quantization=places, known=known)


@st.composite
def mutated_uses(draw: Any) -> Use:
    code, variant, _ = draw(st.sampled_from(EXAMPLES))
    declaration = REGISTRY[code]
    return use_of(
        code, variant, draw(st.sampled_from(sorted(declaration.output_counts) or [len(declaration.outputs)])), draw
    )


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # mutated values of float16
@given(mutated_uses())
@settings(max_examples=400, deadline=None, derandomize=not IS_DEEP)  # the deep run searches at random
def test_mutated_arguments_are_rejected_or_computed(use: Use) -> None:
    try:
        found = use.run()
    except NnfmqError:
        return

    assert len(found) == len(use.outputs)


@pytest.mark.parametrize(("code", "variant", "count"), EXAMPLES)
def test_the_examples_are_legal_before_they_are_mutated(code: OperationType, variant: Variant, count: int) -> None:
    assert len(use_of(code, variant, count).run()) == count
