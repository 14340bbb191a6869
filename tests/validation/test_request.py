"""validate_request: REQUIREMENTS 3.3, the rows that one process can check alone."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from support.small_models import two_adds, with_main, with_operand

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import BufferToken, DataLocation, OperandType, Request, RequestArgument
from nnfmq.lab.conformance.testmodels import BytesPool
from nnfmq.validation import validate_request

MODEL = two_adds()
UNKNOWN_INPUT = with_operand(MODEL, 0, dimensions=(0, 2))
UNKNOWN_OUTPUT = with_operand(MODEL, 4, dimensions=(0, 2))


def argument(pool: int, offset: int = 0, length: int = 16, **fields: Any) -> RequestArgument:
    return RequestArgument(location=DataLocation(pool, offset, length), **fields)


GOOD = Request((argument(0), argument(0, 16)), (argument(1),), (BytesPool(bytes(64)), BytesPool(bytes(64))))


def with_first_input(changed: RequestArgument) -> Request:
    return replace(GOOD, inputs=(changed, GOOD.inputs[1]))


def rejected(request: Request, rule: str, model: Any = MODEL, **options: bool) -> None:
    with pytest.raises(InvalidArgument, match=rf"\({rule}\)$"):
        validate_request(model, request, **options)


def test_EXE_1_a_request_that_fits_its_model_is_legal() -> None:
    validate_request(MODEL, GOOD)


@pytest.mark.parametrize("inputs", [(), GOOD.inputs[:1], GOOD.inputs * 2])
def test_N_REQ_1_a_wrong_count_of_inputs_is_rejected(inputs: tuple[RequestArgument, ...]) -> None:
    rejected(replace(GOOD, inputs=inputs), "N-REQ-1")


@pytest.mark.parametrize("outputs", [(), GOOD.outputs * 2])
def test_N_REQ_2_a_wrong_count_of_outputs_is_rejected(outputs: tuple[RequestArgument, ...]) -> None:
    rejected(replace(GOOD, outputs=outputs), "N-REQ-2")


@pytest.mark.parametrize("fields", [{"location": DataLocation(0, 0, 16)}, {"dimensions": (2, 2)}])
def test_N_RQX_1_an_argument_without_a_value_has_no_location_and_no_dimensions(fields: dict[str, Any]) -> None:
    rejected(with_first_input(RequestArgument(has_no_value=True, **fields)), "N-RQX-1")


def test_N_RQX_1_an_argument_without_a_value_is_legal() -> None:
    validate_request(MODEL, with_first_input(RequestArgument(has_no_value=True)))


@pytest.mark.parametrize("pool", [-1, 2, 1 << 40])
def test_N_RQX_2_a_pool_index_out_of_range_is_rejected(pool: int) -> None:
    rejected(with_first_input(argument(pool)), "N-RQX-2")


@pytest.mark.parametrize("place", [(49, 16, 0), (48, 16, 1), ((1 << 64) - 8, 16, 0), (-1, 16, 0), (0, 16, -1)])
def test_N_RQX_3_a_range_outside_its_pool_is_rejected(place: tuple[int, int, int]) -> None:
    rejected(with_first_input(RequestArgument(location=DataLocation(0, *place))), "N-RQX-3")


@pytest.mark.parametrize("length", [0, -16])
def test_N_RQX_4_a_length_of_nothing_is_rejected(length: int) -> None:
    rejected(with_first_input(argument(0, 0, length)), "N-RQX-4")


@pytest.mark.parametrize("length", [15, 17, 1])
def test_N_RQX_5_a_length_other_than_the_operands_is_rejected(length: int) -> None:
    rejected(replace(GOOD, outputs=(argument(1, 0, length),)), "N-RQX-5")


@pytest.mark.parametrize("dimensions", [(4,), (2, 2, 1), (2, 3), (4, 1), (-2, -2)])
def test_N_RQX_6_dimensions_that_contradict_the_model_are_rejected(dimensions: tuple[int, ...]) -> None:
    rejected(with_first_input(argument(0, dimensions=dimensions)), "N-RQX-6")


def test_N_RQX_6_dimensions_below_zero_are_rejected_even_where_their_product_fits() -> None:
    unknown_rank = with_operand(MODEL, 0, dimensions=())
    validate_request(unknown_rank, with_first_input(argument(0, dimensions=(2, 2))))
    rejected(with_first_input(argument(0, dimensions=(-2, -2))), "N-RQX-6", unknown_rank)


def test_N_RQX_6_UTL_3_a_dimension_over_32_bits_is_rejected_even_where_another_is_unknown() -> None:
    output = argument(1, dimensions=(0, 1 << 32))
    rejected(replace(GOOD, outputs=(output,)), "N-RQX-6", with_operand(MODEL, 4, dimensions=()))


def test_N_RQX_6_dimensions_of_a_scalar_are_rejected() -> None:
    model = with_operand(MODEL, 0, type=OperandType.FLOAT32, dimensions=())
    validate_request(model, with_first_input(argument(0, 0, 4)))
    rejected(with_first_input(argument(0, 0, 4, dimensions=(1,))), "N-RQX-6", model)


@pytest.mark.parametrize("dimensions", [(), (0, 2), (0, 0)])
def test_N_RQX_7_an_input_of_unknown_shape_is_rejected(dimensions: tuple[int, ...]) -> None:
    rejected(with_first_input(argument(0, dimensions=dimensions)), "N-RQX-7", UNKNOWN_INPUT)


def test_SHP_1_the_request_may_fill_in_what_the_model_leaves_open() -> None:
    validate_request(UNKNOWN_INPUT, with_first_input(argument(0, dimensions=(2, 2))))


def test_N_RQX_8_an_output_of_unknown_shape_is_rejected_where_it_is_not_allowed() -> None:
    rejected(GOOD, "N-RQX-8", UNKNOWN_OUTPUT, allow_unspecified_output=False)


def test_SHP_1_an_output_of_unknown_shape_may_have_a_buffer_of_any_length() -> None:
    validate_request(UNKNOWN_OUTPUT, replace(GOOD, outputs=(argument(1, 0, 5),)))


@pytest.mark.parametrize("output", [argument(0, 8), argument(0), argument(0, 31), argument(0, 17)])
def test_N_RQX_13_an_output_over_an_input_is_rejected(output: RequestArgument) -> None:
    rejected(replace(GOOD, outputs=(output,)), "N-RQX-13")


@pytest.mark.parametrize(
    ("model", "output", "level"),
    [
        (MODEL, argument(1), 1),
        (MODEL, argument(1, dimensions=(2, 2)), 1),
        (MODEL, RequestArgument(has_no_value=True), 1),
        (UNKNOWN_OUTPUT, argument(1, dimensions=(2, 2)), 1),
        (UNKNOWN_OUTPUT, argument(1), 3),
        (UNKNOWN_OUTPUT, argument(1, dimensions=(0, 2)), 3),
        (with_operand(MODEL, 4, dimensions=()), argument(1), 3),
        (with_operand(MODEL, 4, dimensions=()), argument(1, dimensions=(2, 2)), 1),
        (MODEL, RequestArgument(location=DataLocation(1, 0, 16, 48)), 5),
    ],
)
def test_VAL_3_a_request_needs_the_level_that_can_say_it(model: Any, output: RequestArgument, level: int) -> None:
    assert validate_request(model, replace(GOOD, outputs=(output,))) == level


@pytest.mark.parametrize("dimensions", [(), (0, 2), (0, 0)])
def test_VAL_3_fenced_executions_and_HAL_1_1_know_no_open_outputs(dimensions: tuple[int, ...]) -> None:
    request = replace(GOOD, outputs=(argument(1, dimensions=dimensions),))

    rejected(request, "N-RQX-8", UNKNOWN_OUTPUT, allow_unspecified_output=False)
    whole = replace(GOOD, outputs=(argument(1, dimensions=(2, 2)),))
    assert validate_request(UNKNOWN_OUTPUT, whole, allow_unspecified_output=False) == 1


def test_N_RQX_13_arguments_side_by_side_in_one_pool_and_shared_inputs_are_legal() -> None:
    validate_request(MODEL, replace(GOOD, inputs=(argument(0), argument(0)), outputs=(argument(0, 16),)))


def test_N_RQX_13_outputs_over_each_other_are_rejected() -> None:
    operands = (*MODEL.main.operands[:3], replace(MODEL.main.operands[4]), MODEL.main.operands[4])
    model = with_main(MODEL, operands=operands, output_indexes=(3, 4))

    rejected(replace(GOOD, outputs=(argument(1), argument(1, 15))), "N-RQX-13", model)


def in_buffer(token: int, place: DataLocation = DataLocation(2), **fields: Any) -> Request:  # noqa: B008  frozen
    """Return the good request with its first input in a driver-managed buffer."""
    return replace(with_first_input(RequestArgument(location=place, **fields)), pools=(*GOOD.pools, BufferToken(token)))


def test_DOM_9_an_argument_may_be_all_of_a_buffer() -> None:
    validate_request(MODEL, in_buffer(1))
    validate_request(UNKNOWN_INPUT, in_buffer(1))  # the driver knows the shape of what is in it
    validate_request(MODEL, replace(in_buffer(1), outputs=(RequestArgument(location=DataLocation(2)),)))


@pytest.mark.parametrize("token", [0, -1, -(2**31)])
def test_N_RQX_9_a_token_below_one_is_rejected(token: int) -> None:
    rejected(in_buffer(token), "N-RQX-9")


@pytest.mark.parametrize("place", [DataLocation(2, 1), DataLocation(2, 0, 16), DataLocation(2, 0, 0, 1)])
def test_N_RQX_10_a_part_of_a_buffer_is_rejected(place: DataLocation) -> None:
    rejected(in_buffer(1, place), "N-RQX-10")


def test_N_RQX_6_dimensions_that_contradict_the_model_are_rejected_of_a_buffer_too() -> None:
    rejected(in_buffer(1, dimensions=(2, 3)), "N-RQX-6")


def test_N_RQX_8_a_buffer_is_no_output_of_unknown_shape_where_that_is_not_allowed() -> None:
    request = replace(in_buffer(1), outputs=(RequestArgument(location=DataLocation(2)),))
    rejected(request, "N-RQX-8", UNKNOWN_OUTPUT, allow_unspecified_output=False)
