"""validate_model: one test for each family of REQUIREMENTS N-MOD and N-VAL that exists now."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest
from msgspec.structs import replace
from support.small_models import (
    F32,
    I32,
    INPUT,
    OUTPUT,
    Q8,
    Q8S,
    TEMPORARY,
    one_operation,
    two_adds,
    vector,
    with_main,
    with_operand,
    with_operation,
)

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import LAST_OPERATION_OF_LEVEL
from nnfmq.hal.types import (
    ChannelQuant,
    DataLocation,
    LifeTime,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
)
from nnfmq.lab.conformance.testmodels import BytesPool
from nnfmq.validation import validate_model

NOT_FINITE = (float("nan"), float("inf"))
BEFORE = (DataLocation(0, -1, 1), DataLocation(0, 1, -1))  # would end inside
PC = OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL
ADD = OperationType.ADD


def rejected(model: Model, rule: str, message: str = "") -> None:
    with pytest.raises(InvalidArgument, match=rf"{message}.*\(({rule})\)$"):
        validate_model(model)


def weighted(operand_type: OperandType, dimensions: tuple[int, ...], **fields: Any) -> Model:
    """Return two ADDs and an unused constant of `operand_type` in a pool: operand 5."""
    model = two_adds()
    operand = Operand(operand_type, dimensions, lifetime=LifeTime.CONSTANT_REFERENCE, **fields)
    return replace(with_main(model, operands=(*model.main.operands, operand)), pools=(BytesPool(bytes(64)),))


def per_channel(quant: ChannelQuant | None, dimensions: tuple[int, ...] = (2, 3)) -> Model:
    return weighted(PC, dimensions, location=DataLocation(0, 0, 6), channel_quant=quant)


def subgraphs(*references: int) -> Model:
    """Return a model whose referenced subgraph i refers to subgraph references[i]."""
    model = two_adds()
    graphs = [
        replace(
            model.main,
            operands=(
                *model.main.operands,
                Operand(OperandType.SUBGRAPH, (), lifetime=LifeTime.SUBGRAPH, location=DataLocation(0, target, 0)),
            ),
        )
        for target in references
    ]
    leaf = model.main
    return replace(model, referenced=(*graphs, leaf))


def test_a_legal_model_needs_the_first_feature_level() -> None:
    assert validate_model(two_adds()) == 1


def test_N_MOD_1_an_operand_read_before_it_is_written_is_rejected() -> None:
    model = two_adds()

    rejected(with_main(model, operations=model.main.operations[::-1]), "N-MOD-1")


@pytest.mark.parametrize("code", [-1, 16, 9999, 10002])
def test_N_MOD_2_an_unknown_operand_type_is_rejected(code: int) -> None:
    rejected(with_operand(two_adds(), 0, type=cast(OperandType, code)), "N-MOD-2")


def test_N_MOD_3_a_scalar_with_dimensions_is_rejected() -> None:
    rejected(with_operand(two_adds(), 2, dimensions=(0,)), "N-MOD-3")


@pytest.mark.parametrize(
    ("operand_type", "scale"),
    [(F32, 1.0), (Q8, 0.0), (Q8, -1.0), (I32, -1.0), *((kind, value) for kind in (Q8, I32) for value in NOT_FINITE)],
)
def test_N_MOD_4_a_bad_scale_is_rejected(operand_type: OperandType, scale: float) -> None:
    rejected(two_adds(operand_type, scale), "N-MOD-4")


@pytest.mark.parametrize(
    ("operand_type", "zero_point"),
    [
        (F32, 1),
        (I32, 1),
        (Q8, -1),
        (Q8, 256),
        (Q8S, -129),
        (Q8S, 128),
        (OperandType.TENSOR_QUANT8_SYMM, 1),
        (OperandType.TENSOR_QUANT8_SYMM, -1),
        (OperandType.TENSOR_QUANT16_ASYMM, 65536),
        (OperandType.TENSOR_QUANT16_ASYMM, -1),
        (OperandType.TENSOR_QUANT16_SYMM, 1),
    ],
)
def test_N_MOD_5_a_bad_zero_point_is_rejected(operand_type: OperandType, zero_point: int) -> None:
    rejected(two_adds(operand_type, 0.0 if operand_type in (F32, I32) else 1.0, zero_point), "N-MOD-5")


@pytest.mark.parametrize("lifetime", [kind for kind in LifeTime if kind not in (TEMPORARY, LifeTime.SUBGRAPH)])
def test_N_MOD_6_a_temporary_of_another_lifetime_is_rejected(lifetime: LifeTime) -> None:
    with pytest.raises(InvalidArgument):
        validate_model(with_operand(two_adds(), 3, lifetime=lifetime))


@pytest.mark.parametrize("code", [-1, 7, 1 << 20])
def test_N_MOD_6_a_lifetime_that_is_none_is_rejected(code: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"operand 3: unknown lifetime code {code} \(N-MOD-6\)"):
        validate_model(with_operand(two_adds(), 3, lifetime=cast(LifeTime, code)))


@pytest.mark.parametrize(
    "changes",
    [
        {"input_indexes": (0,)},
        {"input_indexes": (0, 3)},  # as many as there are, but not those
        {"output_indexes": ()},
        {"input_indexes": (0, 1, 3)},
        {"output_indexes": (4, 3)},
    ],
)
def test_N_MOD_7_index_lists_that_do_not_mirror_the_lifetimes_are_rejected(changes: dict[str, Any]) -> None:
    rejected(with_main(two_adds(), **changes), "N-MOD-7")


@pytest.mark.parametrize("target", [0, 2, 3])
def test_N_MOD_9_a_second_writer_is_rejected(target: int) -> None:
    said = "a second time" if target == 3 else f"whose lifetime is {two_adds().main.operands[target].lifetime.name}"
    rejected(
        with_operation(two_adds(), 1, outputs=(target,)), "N-MOD-9", rf"^operation 1 writes operand {target},? {said}"
    )


@pytest.mark.parametrize("index", [0, 1, 4])
def test_N_MOD_10_an_operand_of_a_type_that_the_operation_does_not_take_is_rejected(index: int) -> None:
    model = with_operand(two_adds(), index, type=OperandType.TENSOR_BOOL8)

    rejected(model, "S2|S4")


@pytest.mark.parametrize("code", [-1, max(LAST_OPERATION_OF_LEVEL.values()) + 1, 9999, 10001])
def test_N_MOD_11_an_unknown_operation_is_rejected(code: int) -> None:
    rejected(with_operation(two_adds(), 0, type=cast(OperationType, code)), "N-MOD-11")


@pytest.mark.parametrize("index", [5, -1])
def test_N_MOD_12_an_input_index_outside_the_operands_is_rejected(index: int) -> None:
    rejected(with_operation(two_adds(), 0, inputs=(0, index, 2)), "N-MOD-12")


@pytest.mark.parametrize("index", [5, -1])
def test_N_MOD_13_an_output_index_outside_the_operands_is_rejected(index: int) -> None:
    rejected(with_operation(two_adds(), 0, outputs=(index,)), "N-MOD-13")


def test_N_MOD_14_an_operand_without_a_writer_is_rejected() -> None:
    model = two_adds()
    fresh = replace(model.main.operands[3])
    starved = with_main(model, operands=(*model.main.operands, fresh))

    rejected(with_operation(starved, 0, outputs=(5,)), "N-MOD-1")


@pytest.mark.parametrize("number", [0, 1])
def test_N_MOD_16_a_model_without_one_of_its_operations_is_rejected(number: int) -> None:
    model = two_adds()
    left = tuple(operation for i, operation in enumerate(model.main.operations) if i != number)

    rejected(with_main(model, operations=left), "N-MOD-1|N-VAL-16")


def test_N_MOD_17_an_operation_without_one_of_its_inputs_is_rejected() -> None:
    rejected(with_operation(two_adds(), 0, inputs=(0, 1)), "S1")


def test_N_MOD_18_an_operation_without_its_output_is_rejected() -> None:
    with pytest.raises(InvalidArgument):
        validate_model(with_operation(two_adds(), 1, outputs=()))


def test_N_MOD_19_an_operation_with_one_more_input_is_rejected() -> None:
    rejected(with_operation(two_adds(), 0, inputs=(0, 1, 2, 2)), "S1")


def test_N_MOD_20_an_operation_with_one_more_output_is_rejected() -> None:
    model = two_adds()
    wider = with_main(model, operands=(*model.main.operands, replace(model.main.operands[3])))

    rejected(with_operation(wider, 0, outputs=(3, 5)), "S3")


def test_N_MOD_23_two_operations_that_feed_each_other_are_rejected() -> None:
    rejected(with_operation(two_adds(), 0, inputs=(0, 4, 2)), "N-MOD-1")


@pytest.mark.parametrize("fields", [{"type": OperandType.SUBGRAPH}, {"lifetime": LifeTime.SUBGRAPH}])
def test_N_VAL_1_type_and_lifetime_SUBGRAPH_go_together(fields: dict[str, Any]) -> None:
    rejected(with_operand(two_adds(), 2, **fields), "N-VAL-1")


@pytest.mark.parametrize("dimensions", [(), (0, 4)])
def test_N_VAL_2_a_constant_of_unknown_shape_is_rejected(dimensions: tuple[int, ...]) -> None:
    rejected(weighted(F32, dimensions, location=DataLocation(0, 0, 16)), "N-VAL-2")


@pytest.mark.parametrize("extent", [-1, 1 << 32])
def test_N_VAL_3_an_dimension_over_32_bits_is_rejected_whatever_the_others_are(extent: int) -> None:
    rejected(with_operand(two_adds(), 3, dimensions=(0, extent)), "N-VAL-3", rf"^operand 3: dimension {extent},")


@pytest.mark.parametrize("length", [0, 15, 17, 32])
def test_N_VAL_3_a_constant_of_another_length_is_rejected(length: int) -> None:
    rejected(weighted(F32, (4,), location=DataLocation(0, 0, length)), "N-VAL-3")


@pytest.mark.parametrize("dimensions", [(1 << 30, 1), (1 << 16, 1 << 16), (1 << 31, 2, 0), (1 << 40,), (-1, 2)])
def test_N_VAL_3_a_size_over_32_bits_is_rejected_also_if_a_later_dimension_is_0(dimensions: tuple[int, ...]) -> None:
    rejected(with_operand(two_adds(), 3, dimensions=dimensions), "N-VAL-3")


@pytest.mark.parametrize(
    "place", [DataLocation(1, 0, 4), DataLocation(0, 4, 4), DataLocation(0, (1 << 64) - 2, 4), *BEFORE]
)
def test_N_VAL_4_a_copied_constant_outside_the_operand_values_is_rejected(place: DataLocation) -> None:
    rejected(with_operand(two_adds(), 2, location=place), "N-VAL-4")


@pytest.mark.parametrize(
    "place",
    [
        DataLocation(1, 0, 16),
        DataLocation(-1, 0, 16),
        DataLocation(0, 52, 16),
        DataLocation(0, (1 << 64) - 8, 16),
        *BEFORE,
    ],
)
def test_N_VAL_5_a_constant_outside_its_pool_is_rejected(place: DataLocation) -> None:
    rejected(weighted(F32, (4,), location=place), "N-VAL-5")


@pytest.mark.parametrize("place", [DataLocation(*p) for p in itertools.product((0, 1), repeat=3) if any(p)])
@pytest.mark.parametrize("index", [0, 3, 4])
def test_N_VAL_6_a_location_where_there_is_no_constant_is_rejected(index: int, place: DataLocation) -> None:
    rejected(with_operand(two_adds(), index, location=place), "N-VAL-6")


@pytest.mark.parametrize(
    "place",
    [
        DataLocation(1, 1, 0),
        DataLocation(0, 1, 4),
        DataLocation(1, 1, 1),
        DataLocation(0, 2, 0),
        DataLocation(0, -1, 0),
    ],
)
def test_N_VAL_7_a_reference_to_no_subgraph_is_rejected(place: DataLocation) -> None:
    model = subgraphs(1)
    operands = model.referenced[0].operands
    changed = replace(model.referenced[0], operands=(*operands[:-1], replace(operands[-1], location=place)))

    rejected(replace(model, referenced=(changed, model.referenced[1])), "N-VAL-7")


def test_N_VAL_8_padding_of_an_operand_is_rejected() -> None:
    rejected(with_operand(two_adds(), 2, location=DataLocation(0, 0, 4, 4)), "N-VAL-8")


@pytest.mark.parametrize(
    "quant",
    [
        None,
        ChannelQuant((1.0, 1.0), 2),
        ChannelQuant((1.0, 1.0), -1),
        ChannelQuant((1.0,), 0),
        ChannelQuant((1.0, 0.0), 0),
        ChannelQuant((1.0, float("inf")), 0),
    ],
)
def test_N_VAL_9_wrong_channel_quantization_is_rejected(quant: ChannelQuant | None) -> None:
    rejected(per_channel(quant), "N-VAL-9")


@pytest.mark.parametrize("dim", [-1, 2])
def test_N_VAL_9_a_channel_dimension_that_is_none_is_named(dim: int) -> None:
    rejected(per_channel(ChannelQuant((1.0, 1.0, 1.0), dim)), "N-VAL-9", rf"^operand 5: channelDim {dim},")


def test_N_VAL_9_channels_of_an_unknown_dimension_are_rejected() -> None:
    operand = Operand(PC, (0, 3), lifetime=INPUT, channel_quant=ChannelQuant((), 0))
    main = two_adds().main
    model = with_main(two_adds(), operands=(*main.operands, operand), input_indexes=(0, 1, 5))

    rejected(model, "N-VAL-9", "^operand 5: 0 scales for 0 channels")


def test_N_VAL_9_channel_quantization_of_another_type_is_rejected() -> None:
    rejected(with_operand(two_adds(), 0, channel_quant=ChannelQuant((1.0, 1.0), 0)), "N-VAL-9")


def test_MOD_7_right_channel_quantization_needs_HAL_1_2() -> None:
    assert validate_model(per_channel(ChannelQuant((1.0, 2.0), 0))) == 3


def test_N_VAL_13_an_empty_pool_is_rejected() -> None:
    rejected(replace(two_adds(), pools=(BytesPool(b""),)), "N-VAL-13")


def test_N_VAL_14_an_index_listed_twice_is_rejected() -> None:
    rejected(with_main(two_adds(), input_indexes=(0, 0)), "N-VAL-14")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"operands": ()}, "a subgraph without operands"),
        ({"operations": ()}, "a subgraph without operations"),
        ({"input_indexes": (0, 5)}, ".*5"),
        ({"input_indexes": (0, -1)}, ".*-1 is not an operand"),
    ],
)
def test_N_VAL_15_an_empty_graph_or_an_index_outside_is_rejected(changes: dict[str, Any], said: str) -> None:
    rejected(with_main(two_adds(), **changes), "N-VAL-15", rf"^{said}")


@pytest.mark.parametrize("lifetime", [TEMPORARY, OUTPUT])
def test_N_VAL_16_an_operand_that_no_operation_writes_is_rejected(lifetime: LifeTime) -> None:
    model = two_adds()
    unwritten = with_main(model, operands=(*model.main.operands, Operand(F32, (1,), lifetime=lifetime)))
    outputs = (4, 5) if lifetime == OUTPUT else (4,)

    rejected(with_main(unwritten, output_indexes=outputs), "N-VAL-16")


@pytest.mark.parametrize("references", [(0,), (1, 0), (1, 2, 0)])
def test_N_VAL_17_a_cycle_among_subgraphs_is_rejected(references: tuple[int, ...]) -> None:
    rejected(subgraphs(*references), "N-VAL-17")


def test_N_VAL_17_a_long_chain_of_subgraphs_is_legal() -> None:
    assert validate_model(subgraphs(*range(1, 3001))) == 4


def test_N_VAL_25_an_omitted_operand_that_is_not_optional_is_rejected() -> None:
    rejected(with_main(with_operand(two_adds(), 1, lifetime=LifeTime.NO_VALUE), input_indexes=(0,)), "S5")


def test_MOD_12_an_omitted_operand_that_is_optional_is_legal() -> None:
    model = one_operation(OperationType.SQUEEZE, [Operand(F32, (1, 2)), None], Operand(F32, (2,)))

    assert validate_model(model) == 2


def test_VAL_6_an_unused_input_is_legal() -> None:
    model = two_adds()
    operands = (*model.main.operands, Operand(F32, (1,), lifetime=INPUT))

    assert validate_model(with_main(model, operands=operands, input_indexes=(0, 1, 5))) == 1


@pytest.mark.parametrize(
    ("model", "level"),
    [
        (two_adds(OperandType.TENSOR_FLOAT16), 3),
        (two_adds(Q8S, 1.0), 4),
        (two_adds(I32), 4),
        (with_operand(two_adds(), 3, dimensions=()), 3),
        (replace(two_adds(), relax_computation_float32_to_float16=True), 2),
        (one_operation(OperationType.RESHAPE, [Operand(I32, (2,)), vector([2])], Operand(I32, (2,))), 6),
        (one_operation(OperationType.SOFTMAX, [Operand(F32, (2, 2)), 1.0], Operand(F32, (2, 2))), 1),
        (one_operation(OperationType.SOFTMAX, [Operand(F32, (2,)), 1.0], Operand(F32, (2,))), 3),
        (one_operation(OperationType.SOFTMAX, [Operand(F32, (2, 2)), 1.0, 1], Operand(F32, (2, 2))), 3),
    ],
)
def test_VAL_2_the_level_is_the_highest_that_anything_needs(model: Model, level: int) -> None:
    assert validate_model(model) == level


def test_VAL_2_an_oem_operation_is_checked_for_structure_only() -> None:
    model = with_operation(two_adds(), 0, type=OperationType.OEM_OPERATION)

    assert validate_model(model) == 1


def test_messages_name_the_operation_and_what_was_given() -> None:
    model = with_operation(two_adds(), 1, inputs=(3, 1))

    with pytest.raises(InvalidArgument, match=r"operation 1 \(ADD\): 2 arguments given, allowed are \[3\] \(S1\)"):
        validate_model(model)


def test_N_MOD_20_operations_are_compared_with_their_declared_outputs() -> None:
    operation = Operation(ADD, (0, 1, 2), (3, 4))

    rejected(with_main(two_adds(), operations=(operation,)), "S3")


@pytest.mark.parametrize("index", range(5))
def test_N_MOD_15_a_model_without_one_of_its_operands_is_rejected(index: int) -> None:
    main = two_adds().main
    operands = main.operands[:index] + main.operands[index + 1 :]

    def renumbered(indexes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(i - (i > index) for i in indexes if i != index)

    operations = tuple(replace(o, inputs=renumbered(o.inputs), outputs=renumbered(o.outputs)) for o in main.operations)
    lists = {"input_indexes": renumbered(main.input_indexes), "output_indexes": renumbered(main.output_indexes)}
    with pytest.raises(InvalidArgument):
        validate_model(with_main(two_adds(), operands=operands, operations=operations, **lists))


@pytest.mark.parametrize(("index", "dimensions", "level"), [(3, (0, 2), 1), (3, (), 3), (0, (0, 2), 1), (4, (2, 0), 1)])
def test_MOD_5_unknown_dimensions_are_legal_as_in_the_vectors_of_HAL_1_0_and_an_unknown_rank_needs_1_2(
    index: int, dimensions: tuple[int, ...], level: int
) -> None:
    assert validate_model(with_operand(two_adds(), index, dimensions=dimensions)) == level


UNRANKED = Operand(F32, (), lifetime=INPUT)
UNRANKED_OEM = Operand(OperandType.TENSOR_OEM_BYTE, (), lifetime=INPUT)


@pytest.mark.parametrize("unused", [UNRANKED, UNRANKED_OEM], ids=["base", "OEM"])
def test_MOD_5_an_unknown_rank_needs_1_2_even_if_no_operation_reads_the_operand(unused: Operand) -> None:
    main = two_adds().main
    model = with_main(two_adds(), operands=(*main.operands, unused), input_indexes=(*main.input_indexes, 5))
    assert validate_model(model) == 3


def test_MOD_13_relaxed_computation_needs_HAL_1_1() -> None:
    assert validate_model(replace(two_adds(), relax_computation_float32_to_float16=True)) == 2


@pytest.mark.parametrize("fields", [{"scale": -1.0}, {"zero_point": 300}, {"scale": 2.0, "zero_point": -5}])
def test_MOD_14_quantization_of_an_oem_operand_is_not_checked(fields: dict[str, Any]) -> None:
    oem = Operand(OperandType.TENSOR_OEM_BYTE, (3,), lifetime=INPUT, **fields)
    main = two_adds().main
    model = with_main(two_adds(), operands=(*main.operands, oem), input_indexes=(*main.input_indexes, 5))

    assert validate_model(model) == 1


def test_an_argument_of_a_type_that_the_operation_never_takes_is_named_with_those_that_it_takes() -> None:
    model = two_adds(OperandType.TENSOR_BOOL8, 0.0)
    types = "TENSOR_FLOAT16, TENSOR_FLOAT32, TENSOR_INT32, TENSOR_QUANT8_ASYMM, TENSOR_QUANT8_ASYMM_SIGNED"
    with pytest.raises(InvalidArgument) as rejected:
        validate_model(model)
    assert f"argument 0 (first) has type TENSOR_BOOL8, allowed are {types} (S2)" in str(rejected.value)


def test_argument_types_that_do_not_fit_together_are_compared_with_the_nearest_that_do() -> None:
    model = with_operand(two_adds(Q8, 1.0), 1, type=OperandType.TENSOR_QUANT8_ASYMM_SIGNED)
    nearest = "TENSOR_QUANT8_ASYMM, TENSOR_QUANT8_ASYMM, INT32"
    with pytest.raises(InvalidArgument, match=rf"not allowed together; the nearest that are: \({nearest}\) \(S2\)"):
        validate_model(model)
