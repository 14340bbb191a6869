"""Trailing arguments with default values are removed: AOSP's cases, and what the operations' declarations say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from support.rebuilt import rebuilt
from support.small_models import F32, I32, one_operation, with_operand
from support.vts_models import FOLDER

from nnfmq.hal.types import LifeTime, Model, Operand, OperandType, OperationType
from nnfmq.lab.conformance import testmodels
from nnfmq.model_builder import simplification
from nnfmq.model_builder.simplification import prepare_for_compilation, without_default_arguments
from nnfmq.operations import HAL_DECLARATIONS
from nnfmq.operations.declaration import Declaration, Overload
from nnfmq.validation import validate_model

AOSP_CASES = """
AVERAGE_POOL_2D          V1_2/avg_pool_v1_2                    nhwc                           11 10
AVERAGE_POOL_2D          V1_2/avg_pool_v1_2                    nchw                           11 11
AVERAGE_POOL_2D          V1_2/avg_pool_v1_2                    nhwc_5                          8  7
CONV_2D                  V1_2/conv2d_dilation                  nhwc                           13 10
CONV_2D                  V1_2/conv2d_dilation                  nchw                           13 11
CONV_2D                  V1_2/conv2d_dilation                  valid_padding_nhwc             10  7
DEPTH_TO_SPACE           V1_2/depth_to_space_v1_2              nhwc                            3  2
L2_NORMALIZATION         V1_2/l2_normalization_axis            dim4_axis3_neg                  2  1
L2_POOL_2D               V1_2/l2_pool_v1_2                     nhwc                           11 10
L2_POOL_2D               V1_2/l2_pool_v1_2                     nhwc_2                          8  7
LOCAL_RESPONSE_NORMALIZATION V1_2/local_response_normalization_v1_2 axis_dim2_axis1_neg        6  5
MAX_POOL_2D              V1_2/max_pool_v1_2                    nhwc                           11 10
MAX_POOL_2D              V1_2/max_pool_v1_2                    nhwc_4                          8  7
RESIZE_BILINEAR          V1_3/resize_bilinear_v1_3             align_corners_2x2_to_1x1        6  5
RESIZE_BILINEAR          V1_2/resize_bilinear_v1_2             shape_nhwc                      4  3
SOFTMAX                  V1_2/softmax_v1_2                     axis_quant8_dim1_axis0_neg      3  2
SPACE_TO_DEPTH           V1_2/space_to_depth_v1_2              nhwc                            3  2
BATCH_TO_SPACE_ND        V1_2/batch_to_space_v1_2              nhwc                            3  2
SPACE_TO_BATCH_ND        V1_2/space_to_batch_v1_2              nhwc                            4  3
RESIZE_NEAREST_NEIGHBOR  V1_3/resize_nearest_neighbor_v1_3     align_corners_2x2_to_1x1        6  5
"""
"""Operation, spec, example, arguments before and after, of AOSP's TestRemoveDefaultArguments.

Two of its 22 tests are missing, DEPTHWISE_CONV_2D with 14 and 11 arguments, because the data lack their spec: OVERLOADS
has both.
"""
CASES = [tuple(line.split()) for line in AOSP_CASES.strip().splitlines()]


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no test data in {FOLDER}")
@pytest.mark.parametrize(("operation", "spec", "example", "before", "after"), CASES)
def test_API_4_the_arguments_of_AOSPs_examples_are_removed(
    operation: str, spec: str, example: str, before: str, after: str
) -> None:
    model = named_model(spec, f"{spec.partition('/')[2]}_{example}")
    (original,) = model.main.operations
    with rebuilt(model) as builder:
        built = builder.model
    (finished,) = built.main.operations
    assert (original.type.name, len(original.inputs)) == (operation, int(before))
    assert (finished.type.name, len(finished.inputs)) == (operation, int(after))
    assert validate_model(built) <= validate_model(model)  # no newer version is needed
    assert prepare_for_compilation(model).main.operations[0].inputs == original.inputs[: int(after)]


def named_model(spec: str, name: str) -> Model:
    lines = (line for _, line in testmodels.lines(FOLDER / f"{spec}.jsonl.gz"))
    return testmodels.read(next(line for line in lines if line["name"] == name)).model


# -- against the declarations -----------------------------------------------------------------------------------------


def scalar_tails(declaration: Declaration) -> Iterator[tuple[Overload, int]]:
    """Yield each overload with optional scalars at its end, and the fewest arguments that it takes."""
    for overload in declaration.overloads:
        fewest = min(overload.arities)
        tail = overload.parameters[fewest:]
        if tail and all(parameter.type in (OperandType.BOOL, OperandType.INT32) for parameter in tail):
            yield overload, fewest


def test_API_4_the_operations_are_those_with_optional_scalars_at_the_end() -> None:
    declared = {code for code, declaration in HAL_DECLARATIONS.items() if any(scalar_tails(declaration))}
    assert declared == set(simplification._OPTIONAL)
    assert len(declared) == 14


OVERLOADS = [
    pytest.param(code, overload, fewest, id=f"{code.name}-{len(overload.parameters)}")
    for code in sorted(simplification._OPTIONAL)
    for overload, fewest in scalar_tails(HAL_DECLARATIONS[code])
]


def argument(name: str, kind: object) -> object:
    """Return an argument for `one_operation`: a default if the parameter may have one, otherwise anything."""
    if kind == OperandType.BOOL:
        return False
    if kind == OperandType.INT32:
        return -1 if name == "axis" else 1
    return 1.0 if kind == OperandType.FLOAT32 else Operand(F32 if isinstance(kind, str) else I32, (1, 2, 2, 1))


def with_defaults(code: OperationType, overload: Overload) -> Model:
    arguments = [argument(parameter.name, parameter.type) for parameter in overload.parameters]
    return one_operation(code, arguments, Operand(F32, (1, 2, 2, 1)))


def argument_count(model: Model) -> int:
    changed = without_default_arguments(model.main, model.operand_values)
    return len(changed.operations[0].inputs)


@pytest.mark.parametrize(("code", "overload", "fewest"), OVERLOADS)
def test_API_4_all_defaults_are_removed_down_to_the_shortest_list(
    code: OperationType, overload: Overload, fewest: int
) -> None:
    assert argument_count(with_defaults(code, overload)) == fewest


@pytest.mark.parametrize(("code", "overload", "fewest"), OVERLOADS)
def test_API_4_another_value_keeps_the_arguments_up_to_it(code: OperationType, overload: Overload, fewest: int) -> None:
    for position in range(fewest, len(overload.parameters)):
        model = with_defaults(code, overload)
        location = model.main.operands[position].location
        values = bytearray(model.operand_values)
        values[location.offset] = 3 if values[location.offset] != 3 else 2
        kept = argument_count(replace(model, operand_values=bytes(values)))
        assert kept in overload.arities
        assert kept >= position + 1
        assert not any(position < shorter < kept for shorter in overload.arities)  # no legal list is shorter


@pytest.mark.parametrize("lifetime", [LifeTime.SUBGRAPH_INPUT, LifeTime.CONSTANT_REFERENCE, LifeTime.NO_VALUE])
@pytest.mark.parametrize(("code", "overload", "fewest"), OVERLOADS)
def test_API_4_only_a_constant_in_operand_values_is_removed(
    code: OperationType, overload: Overload, fewest: int, lifetime: LifeTime
) -> None:
    count = len(overload.parameters)
    model = with_operand(with_defaults(code, overload), count - 1, lifetime=lifetime)
    assert argument_count(model) == count


@pytest.mark.parametrize(("code", "overload", "fewest"), OVERLOADS)
def test_API_4_a_list_without_defaults_is_returned_itself(code: OperationType, overload: Overload, fewest: int) -> None:
    model = with_defaults(code, Overload(overload.parameters[:fewest], {fewest: 1}))
    assert without_default_arguments(model.main, model.operand_values) is model.main


def test_API_4_arguments_of_other_operations_are_kept() -> None:
    model = one_operation(OperationType.ADD, [Operand(F32, (1,)), Operand(F32, (1,)), 0], Operand(F32, (1,)))
    assert without_default_arguments(model.main, model.operand_values) is model.main
