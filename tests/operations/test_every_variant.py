"""Elementwise operations, reductions and their like: what holds for every declared combination of types, by examples.

An example is argument shapes and controls; every variant of the declaration is run with it, on random values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.one_result import result_of

from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.types import CLAMPS, ChannelQuant, Operand, OperandType, is_scalar
from nnfmq.operations import (
    activation,
    binary_arithmetic,
    comparison,
    fill_rank,
    min_max_select,
    quantize_cast,
    reduction,
    softmax,
    unary,
)
from nnfmq.operations.declaration import AIDL_V3, NUMPY_TYPES, V1_3, Declaration, Parameter, Role, Variant, match
from nnfmq.operations.preparation import prepare, tensor_of

Array = npt.NDArray[Any]

FAMILIES = (
    activation,
    comparison,
    quantize_cast,
    binary_arithmetic,
    fill_rank,
    reduction,
    min_max_select,
    softmax,
    unary,
)
DECLARATIONS = {d.code.name: d for family in FAMILIES for d in family.DECLARATIONS}
UINT8, INT8 = OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED
PER_CHANNEL = OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL
PLAIN = (
    OperandType.TENSOR_FLOAT32,
    OperandType.TENSOR_FLOAT16,
    OperandType.TENSOR_INT32,
    OperandType.TENSOR_BOOL8,
)


@dataclass(frozen=True)
class Example:
    """Shapes of the DATA arguments, values of the controls, and the quantization that the output must have."""

    shapes: tuple[tuple[int, ...], ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    output: tuple[float, int] | None = None  # scale, zero point of a uint8 output


PAIR = ((2, 1, 3), (4, 1))
ONE = ((2, 3),)
REDUCED = {"axes": [0, -1], "keep_dimensions": 0}
KEPT = {"axes": [1], "keep_dimensions": 1}

EXAMPLES: dict[str, Example] = {
    **dict.fromkeys(("ADD", "SUB", "MUL", "DIV"), Example(PAIR, {"activation": 0})),
    **dict.fromkeys(("POW", "PRELU", "MAXIMUM", "MINIMUM"), Example(((1, 2, 1, 1, 3), (4, 1)))),
    **dict.fromkeys(("EQUAL", "NOT_EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL"), Example(PAIR)),
    **dict.fromkeys(("LOGICAL_AND", "LOGICAL_OR"), Example(((1, 2, 1, 1, 3), (4, 1)))),
    "LOGICAL_NOT": Example(ONE),
    "SELECT": Example(((2, 3), (2, 3), (2, 3))),
    **dict.fromkeys(("ABS", "NEG", "EXP", "LOG", "SIN", "SQRT", "RSQRT", "FLOOR"), Example(ONE)),
    **dict.fromkeys((*(code.name for code in CLAMPS), "HARD_SWISH", "QUANTIZE", "DEQUANTIZE", "CAST"), Example(ONE)),
    "LOGISTIC": Example(ONE, output=(1 / 256, 0)),
    "TANH": Example(ONE, output=(1 / 128, 128)),
    "ELU": Example(ONE, {"alpha": 0.5}),
    "SOFTMAX": Example(ONE, {"beta": 1.5, "axis": -1}, (1 / 256, 0)),
    "LOG_SOFTMAX": Example(((2, 3, 1, 1, 4),), {"beta": 1.5, "axis": 1}),
    **dict.fromkeys(("MEAN", "REDUCE_ALL", "REDUCE_MAX", "REDUCE_PROD"), Example(((2, 3, 4),), REDUCED)),
    **dict.fromkeys(("REDUCE_ANY", "REDUCE_MIN", "REDUCE_SUM"), Example(((2, 3, 4),), KEPT)),
    **dict.fromkeys(("ARGMAX", "ARGMIN"), Example(((2, 3, 1, 1, 4),), {"axis": -4})),
    "FILL": Example((), {"dimensions": [2, 3], "value": 7}),
    "RANK": Example(((2, 3, 4),)),
}

VARIANTS = [
    pytest.param(declaration, variant, id="-".join((name, *(t.name for t in variant.types.values()))))
    for name, declaration in DECLARATIONS.items()
    for variant in declaration.variants
]


def parameters_of(declaration: Declaration) -> tuple[Parameter, ...]:
    return declaration.overloads[0].parameters


def typed(parameter: Parameter | str | OperandType | None, variant: Variant) -> OperandType:
    column = parameter.type if isinstance(parameter, Parameter) else parameter
    assert column is not None
    return variant.types[column] if isinstance(column, str) else column


def operand(kind: OperandType, shape: tuple[int, ...], scale: float = 0.5, zero_point: int = 131) -> Operand:
    """Return an operand with a quantization that means the same for uint8 and int8."""
    if kind in PLAIN or is_scalar(kind):
        return Operand(kind, shape)
    if kind == PER_CHANNEL:
        return Operand(kind, shape, channel_quant=ChannelQuant(tuple(1.0 + i for i in range(shape[1])), 1))
    zero = {UINT8: zero_point, INT8: zero_point - 128, OperandType.TENSOR_QUANT16_ASYMM: 131}.get(kind, 0)
    return Operand(kind, shape, scale, zero)


def values(kind: OperandType, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    dtype = NUMPY_TYPES[kind]
    if dtype.kind == "f":
        return rng.integers(1, 40, shape).astype(dtype) / dtype.type(8)  # exact in float16, and a real root
    if kind == OperandType.TENSOR_BOOL8:
        return rng.integers(0, 2, shape).astype(dtype)
    if kind == INT8:
        return values(UINT8, shape, rng).view(np.int8) ^ np.int8(-128)
    return rng.integers(*((-50, 50) if dtype.kind == "i" else (0, 256)), shape).astype(dtype)


def arguments_of(declaration: Declaration, variant: Variant, *, shapes: Any = None) -> list[tuple[Operand, Array]]:
    example, rng = EXAMPLES[declaration.name], np.random.default_rng(1)
    remaining = iter(example.shapes if shapes is None else shapes)
    arguments = []
    for parameter in parameters_of(declaration):
        kind = typed(parameter, variant)
        is_control = parameter.role is Role.ATTRIBUTE
        array = np.array(example.attributes[parameter.name], NUMPY_TYPES[kind]) if is_control else None
        array = values(kind, next(remaining), rng) if array is None else array
        arguments.append((operand(kind, array.shape), array))
    return arguments


def output_of(declaration: Declaration, variant: Variant) -> Operand:
    scale, zero_point = EXAMPLES[declaration.name].output or (0.5, 131)
    return operand(typed(declaration.outputs[0], variant), (), scale, zero_point)


def result(declaration: Declaration, variant: Variant, *, shapes: Any = None, known: bool = True) -> Array:
    arguments: list[Any] = list(arguments_of(declaration, variant, shapes=shapes))
    for position, parameter in enumerate(parameters_of(declaration)):
        if known and parameter.role is Role.ATTRIBUTE:
            arguments[position] = (arguments[position][0], arguments[position][1].tobytes())
    return result_of(declaration.code, arguments, output_of(declaration, variant), known=known)


def variant_of(declaration: Declaration, kind: OperandType) -> Variant:
    return next(v for v in declaration.variants if kind in v.types.values())


def of_type(kind: OperandType) -> list[Any]:
    """Return the declarations that have a variant of `kind`; CAST is not one that its quantization says anything of."""
    found = [d for d in DECLARATIONS.values() if d.name != "CAST" and any(kind in v.types.values() for v in d.variants)]
    return [pytest.param(declaration, id=declaration.name) for declaration in found]


def test_every_declaration_of_these_families_has_an_example() -> None:
    assert set(EXAMPLES) == set(DECLARATIONS)


@pytest.mark.parametrize(("declaration", "variant"), VARIANTS)
def test_the_result_has_the_shape_of_the_rule_and_the_type_that_is_declared(
    declaration: Declaration, variant: Variant
) -> None:
    arguments, output = arguments_of(declaration, variant), output_of(declaration, variant)
    found = match(declaration, [given for given, _ in arguments], [output])
    pairs = list(zip(found.parameters, arguments, strict=True))
    tensors = [tensor_of(g, a.shape, a if p.role is Role.ATTRIBUTE else None) for p, (g, a) in pairs]

    with np.errstate(all="ignore"):
        special = prepare(found, tensors, [output])
        computed = special.run(*(array for p, (_, array) in pairs if p.role is Role.DATA))

    assert (computed.shape, computed.dtype) == (special.shapes[0], NUMPY_TYPES[output.type])


@pytest.mark.parametrize(("declaration", "variant"), VARIANTS)
def test_SHP_1_shapes_and_attributes_that_come_with_the_request_change_nothing(
    declaration: Declaration, variant: Variant
) -> None:
    np.testing.assert_array_equal(result(declaration, variant, known=False), result(declaration, variant), strict=True)


@pytest.mark.parametrize(("declaration", "variant"), VARIANTS)
def test_N_OPF_10_an_empty_input_is_computed_or_rejected_as_declared(
    declaration: Declaration, variant: Variant
) -> None:
    shapes = EXAMPLES[declaration.name].shapes
    empty = [(0, *shape[1:]) if len(shape) == max(map(len, shapes)) else shape for shape in shapes]

    if declaration.zero_sized or not shapes:
        assert result(declaration, variant, shapes=empty, known=False).size == 0 or not shapes
    else:
        with pytest.raises(GeneralFailure, match=r"an input has a dimension of 0 \(R3\)$"):
            result(declaration, variant, shapes=empty, known=False)


@pytest.mark.parametrize("declaration", of_type(INT8))
def test_SUP_5_signed_codes_give_the_unsigned_result_less_128(declaration: Declaration) -> None:
    unsigned = result(declaration, variant_of(declaration, UINT8))
    signed = result(declaration, variant_of(declaration, INT8))

    assert (signed.view(np.uint8) ^ 128 if signed.dtype == np.int8 else signed).tolist() == unsigned.tolist()


@pytest.mark.parametrize("declaration", of_type(INT8))
def test_VAL_2_signed_codes_need_hal_1_3_and_for_rsqrt_aidl_v3(declaration: Declaration) -> None:
    variant = variant_of(declaration, INT8)
    operands = [given for given, _ in arguments_of(declaration, variant)]

    found = match(declaration, operands, [output_of(declaration, variant)])

    assert found.level == (AIDL_V3 if declaration.name == "RSQRT" else max(V1_3, declaration.since))


@pytest.mark.parametrize("declaration", of_type(OperandType.TENSOR_FLOAT16))
def test_half_precision_gives_the_float32_result_rounded(declaration: Declaration) -> None:
    single = result(declaration, variant_of(declaration, OperandType.TENSOR_FLOAT32))
    half = result(declaration, variant_of(declaration, OperandType.TENSOR_FLOAT16))

    np.testing.assert_array_equal(half, single.astype(half.dtype))
