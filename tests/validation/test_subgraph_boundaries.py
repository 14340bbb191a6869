"""validate_model: what IF and WHILE may hand to their subgraphs (REQUIREMENTS N-VAL-17 to N-VAL-20, MOD-11, CF-7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from support.control_flow_models import COUNT, REAL, TRUTH, branching, counting, named, output
from support.small_models import with_main, with_operand, with_operation

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import (
    ChannelQuant,
    DataLocation,
    ExtensionNameAndPrefix,
    LifeTime,
    Model,
    OperandType,
    OperationType,
    Subgraph,
)
from nnfmq.validation import validate_model

Q8 = OperandType.TENSOR_QUANT8_ASYMM
UNKNOWN = [(), (0,)]


def rejected(model: Model, rule: str, message: str = "", **options: Any) -> None:
    with pytest.raises(InvalidArgument, match=rf"{message}.*\({rule}\)$"):
        validate_model(model, **options)


def in_subgraph(model: Model, number: int, index: int, **changes: Any) -> Model:
    """Return the model with fields of one operand of a referenced subgraph changed."""
    subgraph = model.referenced[number]
    operands = list(subgraph.operands)
    operands[index] = replace(operands[index], **changes)
    return with_subgraph(model, number, operands=tuple(operands))


def with_subgraph(model: Model, number: int, **changes: Any) -> Model:
    referenced = list(model.referenced)
    referenced[number] = replace(referenced[number], **changes)
    return replace(model, referenced=tuple(referenced))


def without_first_input(model: Model, number: int) -> Model:
    """Make the first input of a subgraph a temporary; it is never written, but its list is looked at first."""
    subgraph = model.referenced[number]
    operand = replace(subgraph.operands[0], lifetime=LifeTime.CONSTANT_COPY, location=DataLocation(0, 0, 8))
    return with_subgraph(
        replace(model, operand_values=model.operand_values + bytes(8)),
        number,
        operands=(operand, *subgraph.operands[1:]),
        input_indexes=subgraph.input_indexes[1:],
    )


@pytest.mark.parametrize("make", [branching, counting])
def test_VAL_2_control_flow_needs_1_3(make: Callable[[], Model]) -> None:
    assert validate_model(make()) == 4


# -- operands of an extension's type, whose owner checks them ----------------------------------------------------------


def with_extension(data: bytes) -> Model:
    """Return IF whose last input is of an unknown extension's type, with `data`, and without in both branches."""
    model, kind = branching(), OperandType(7 << 16)
    model = with_operand(model, 4, type=kind, dimensions=(), extension_data=data)
    for number in (0, 1):
        model = in_subgraph(model, number, 1, type=kind, dimensions=())
        operation = replace(model.referenced[number].operations[0], type=OperationType(7 << 16))
        model = with_subgraph(model, number, operations=(operation,))
    return replace(model, extensions=(ExtensionNameAndPrefix("com.example.one", 7),))


def test_VAL_5_whether_an_unknown_type_is_a_scalar_is_not_known() -> None:
    assert validate_model(with_extension(b"")) == 4


def test_N_VAL_18_EXT_4_operands_with_other_bytes_are_not_of_one_kind() -> None:
    rejected(with_extension(b"\0"), "N-VAL-18")


# -- MOD-11: how subgraphs are named ----------------------------------------------------------------------------------


def test_N_VAL_7_a_subgraph_that_is_not_there_is_rejected() -> None:
    rejected(with_operand(branching(), 1, location=DataLocation(0, 2, 0)), "N-VAL-7")


def test_N_VAL_17_subgraphs_that_call_one_another_are_rejected() -> None:
    model = branching()
    branch = model.referenced[0]
    recursive = with_subgraph(model, 0, operands=(*branch.operands, named(1)))
    other = model.referenced[1]

    rejected(with_subgraph(recursive, 1, operands=(*other.operands, named(0))), "N-VAL-17")


def test_N_VAL_17_a_subgraph_that_no_operation_calls_is_legal() -> None:
    model = branching()

    assert validate_model(replace(model, referenced=(*model.referenced, model.referenced[0]))) == 4


# -- N-VAL-18: IF -----------------------------------------------------------------------------------------------------


BOTH = pytest.mark.parametrize(("make", "rule"), [(branching, "N-VAL-18"), (counting, "N-VAL-19")])


@BOTH
@pytest.mark.parametrize("inputs", [(), (0, 1)])
def test_N_VAL_18_and_19_fewer_than_3_inputs_are_rejected(
    make: Callable[[], Model], rule: str, inputs: tuple[int, ...]
) -> None:
    rejected(with_operation(make(), 0, inputs=inputs), rule)


@BOTH
def test_N_VAL_18_and_19_control_flow_without_an_output_is_rejected(make: Callable[[], Model], rule: str) -> None:
    model = make()
    writer = replace(model.main.operations[0], type=OperationType.OEM_OPERATION)
    mute = replace(model.main.operations[0], outputs=())

    rejected(with_main(model, operations=(mute, writer)), rule)


@pytest.mark.parametrize(
    "change",
    [{"type": REAL.type}, {"type": OperandType.BOOL, "dimensions": ()}, {"dimensions": (2,)}, {"dimensions": (1, 3)}],
)
def test_N_VAL_18_a_condition_that_is_not_one_bool8_is_rejected(change: dict[str, Any]) -> None:
    rejected(with_operand(branching(), 0, **change), "(N-VAL-18|S2)")


def test_a_condition_of_one_element_may_have_any_rank() -> None:
    assert validate_model(with_operand(branching(), 0, dimensions=(1, 1, 1))) == 4


MISMATCHES: list[dict[str, Any]] = [
    {"type": OperandType.TENSOR_INT32},
    {"dimensions": (3,)},
    {"dimensions": (2, 1)},
    {"type": Q8, "scale": 1.0},
]


@pytest.mark.parametrize("change", MISMATCHES)
@pytest.mark.parametrize(("branch", "index"), [(0, 0), (1, 1), (0, 3), (1, 3)])
def test_N_VAL_18_an_operand_of_a_branch_that_differs_is_rejected(
    branch: int, index: int, change: dict[str, Any]
) -> None:
    rejected(_reshaped(branching(), branch, index, change), "N-VAL-18")


def _reshaped(model: Model, number: int, index: int, change: dict[str, Any]) -> Model:
    """Change one operand of a subgraph, whose operations become ones that are not declared and take all types."""
    model = in_subgraph(model, number, index, **change)
    operations = tuple(replace(o, type=OperationType.OEM_OPERATION) for o in model.referenced[number].operations)
    return with_subgraph(model, number, operations=operations)


@pytest.mark.parametrize("branch", [0, 1])
def test_N_VAL_18_CF_1_a_branch_that_takes_fewer_operands_is_rejected(branch: int) -> None:
    rejected(without_first_input(branching(), branch), "N-VAL-18")


def test_N_VAL_18_CF_1_a_branch_that_gives_more_operands_is_rejected() -> None:
    model = branching()
    branch = model.referenced[1]
    more = replace(branch.operations[0], outputs=(4,))
    changed = with_subgraph(
        model,
        1,
        operands=(*branch.operands, output(REAL)),
        operations=(*branch.operations, more),
        output_indexes=(3, 4),
    )

    rejected(changed, "N-VAL-18")


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ({"scale": 1.0}, {"scale": 2.0}),
        ({"scale": 1.0, "zero_point": 3}, {"scale": 1.0, "zero_point": 4}),
    ],
)
def test_CF_7_quantization_at_a_boundary_must_be_the_same(outer: dict[str, Any], inner: dict[str, Any]) -> None:
    model = with_operand(branching(), 3, type=Q8, **outer)
    same = _reshaped(_reshaped(model, 0, 0, {"type": Q8, **outer}), 1, 0, {"type": Q8, **outer})

    assert validate_model(same) == 4
    rejected(_reshaped(same, 1, 0, inner), "N-VAL-18")


def test_CF_7_scales_of_channels_at_a_boundary_must_be_the_same() -> None:
    kind = {"type": OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL, "channel_quant": ChannelQuant((1.0, 2.0), 0)}
    model = with_operand(branching(), 3, **kind)
    same = _reshaped(_reshaped(model, 0, 0, kind), 1, 0, kind)

    assert validate_model(same) == 4
    rejected(_reshaped(same, 1, 0, {"channel_quant": ChannelQuant((1.0, 3.0), 0)}), "N-VAL-18")


# -- N-VAL-19: WHILE --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1])
def test_N_VAL_19_CF_2_a_subgraph_that_takes_fewer_operands_is_rejected(number: int) -> None:
    rejected(without_first_input(counting(), number), "N-VAL-19")


@pytest.mark.parametrize("change", MISMATCHES)
@pytest.mark.parametrize(("number", "index"), [(0, 0), (0, 3), (1, 3), (1, 4)])
def test_N_VAL_19_an_operand_of_a_loop_that_differs_is_rejected(
    number: int, index: int, change: dict[str, Any]
) -> None:
    rejected(_reshaped(counting(), number, index, change), "N-VAL-19")


def test_N_VAL_19_a_state_that_comes_back_as_another_type_is_rejected() -> None:
    rejected(_reshaped(counting(), 1, 5, {"type": OperandType.TENSOR_FLOAT32}), "N-VAL-19")


@pytest.mark.parametrize("change", [{"type": OperandType.TENSOR_INT32}, {"dimensions": (2,)}])
def test_N_VAL_19_a_condition_model_that_does_not_give_one_bool8_is_rejected(change: dict[str, Any]) -> None:
    rejected(_reshaped(counting(), 0, 4, change), "N-VAL-19")


def test_N_VAL_19_CF_2_CF_7_a_condition_model_with_two_outputs_is_rejected() -> None:
    model = counting()
    condition = model.referenced[0]
    more = replace(condition.operations[0], outputs=(5,))
    changed = with_subgraph(
        model,
        0,
        operands=(*condition.operands, output(TRUTH)),
        operations=(*condition.operations, more),
        output_indexes=(4, 5),
    )

    rejected(changed, "N-VAL-19")


def test_N_VAL_19_CF_2_CF_7_more_outputs_than_the_body_gives_are_rejected() -> None:
    model = counting()
    operands = (*model.main.operands, output(COUNT), output(REAL))

    changed = with_operation(with_main(model, operands=operands, output_indexes=(6, 7, 8)), 0, outputs=(6, 7, 8))
    counts = "4 inputs, 2 outputs of the body model, 3 outputs"
    rejected(changed, "N-VAL-19", rf"operation 0 \(WHILE\): {counts}; each count may be at most the one before it")


def test_N_VAL_19_CF_2_CF_7_a_body_that_gives_more_than_it_takes_is_rejected() -> None:
    model = counting()
    body = model.referenced[1]
    count = len(body.operands)
    extra = [replace(body.operations[0], outputs=(count + i,)) for i in range(3)]
    changed = with_subgraph(
        model,
        1,
        operands=(*body.operands, *(output(REAL) for _ in extra)),
        operations=(*body.operations, *extra),
        output_indexes=(*body.output_indexes, *range(count, count + 3)),
    )

    counts = "4 inputs, 5 outputs of the body model, 1 outputs"
    rejected(changed, "N-VAL-19", rf"operation 0 \(WHILE\): {counts}; each count may be at most the one before it")


# -- N-VAL-20: sizes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dimensions", UNKNOWN)
@pytest.mark.parametrize(
    ("make", "number", "index"),
    [
        (branching, None, 0),
        (branching, None, 3),
        (branching, None, 5),
        (branching, 0, 0),
        (branching, 1, 3),
        (counting, 0, 0),
        (counting, 1, 4),
    ],
)
def test_N_VAL_20_an_operand_at_a_boundary_of_unknown_size_is_for_frameworks_only(
    make: Callable[[], Model], number: int | None, index: int, dimensions: Any
) -> None:
    if number is None:
        model = with_operand(make(), index, dimensions=dimensions)
    else:
        model = in_subgraph(make(), number, index, dimensions=dimensions)

    rejected(model, "N-VAL-20")
    assert validate_model(model, allow_unspecified_boundaries=True) == 4


@pytest.mark.parametrize("dimensions", [(3,), (0, 0)])
def test_known_dimensions_of_an_unspecified_operand_must_agree(dimensions: tuple[int, ...]) -> None:
    rejected(in_subgraph(branching(), 0, 0, dimensions=dimensions), "N-VAL-(18|20)", allow_unspecified_boundaries=True)


def test_an_omitted_outer_operand_needs_no_size() -> None:
    model = with_operand(branching(), 4, lifetime=LifeTime.NO_VALUE, dimensions=())

    assert validate_model(with_main(model, input_indexes=(0, 3))) == 4


def test_rules_hold_in_referenced_subgraphs_as_well() -> None:
    model = branching()
    wrong = with_operand(model, 5, dimensions=(3,)).main
    moved = Subgraph(wrong.operands, wrong.operations, wrong.input_indexes, wrong.output_indexes)

    with pytest.raises(
        InvalidArgument, match=r"^referenced subgraph 2, operation 0 \(IF\): then-model, output 0 .*\(N-VAL-18\)$"
    ):
        validate_model(replace(model, referenced=(*model.referenced, moved)))
