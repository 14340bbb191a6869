"""Arguments that an operation cannot work with end in an error, never in a crash (REQUIREMENTS 3.8, N-OPF-*)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.small_models import graph, one_operation, vector, with_main, with_operand

from nnfmq.engines import interpreter
from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.types import LifeTime, Operand, OperandType, Operation, OperationType
from nnfmq.validation import validate_model

F32, I32, Q8 = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_INT32, OperandType.TENSOR_QUANT8_ASYMM
Op = OperationType


def f(*dimensions: int) -> Operand:
    return Operand(F32, dimensions)


def q(*dimensions: int, scale: float = 1.0, zero_point: int = 0) -> Operand:
    return Operand(Q8, dimensions, scale, zero_point)


def weights(*dimensions: int) -> tuple[Operand, bytes]:
    count = 1
    for extent in dimensions:
        count *= extent
    return f(*dimensions), bytes(4 * count)


def i(*values: int) -> tuple[Operand, bytes]:
    return vector(values)


def conv(stride: int = 1, activation: int = 0, channels: int = 2) -> list[Any]:
    return [f(1, 4, 4, 2), weights(3, 3, 3, channels), weights(3), 2, stride, stride, activation]


CASES: list[tuple[str, str, OperationType, list[Any], Operand]] = [
    ("1_axis", "A1", Op.CONCATENATION, [f(2, 2), f(2, 2), 2], f(2, 4)),
    ("1_axis_below", "A1", Op.ARGMAX, [f(2, 2), -3], Operand(I32, (2,))),
    ("1_gather_axis", "A1", Op.GATHER, [f(3, 2), 2, i(0)], f(3, 2)),
    ("2_reshape_count", "C1", Op.RESHAPE, [f(2, 3), i(4, 2)], f(4, 2)),
    ("2_reshape_two_minus_1", "C2", Op.RESHAPE, [f(2, 3), i(-1, -1)], f(2, 3)),
    ("2_squeeze", "C3", Op.SQUEEZE, [f(2, 1), i(0)], f(1)),
    ("2_slice", "C2", Op.SLICE, [f(3, 3), i(1, 1), i(3, 1)], f(3, 1)),
    ("2_stride_0", "C3", Op.STRIDED_SLICE, [f(3), i(0), i(3), i(0), 0, 0, 0], f(3)),
    ("3_stride", "W2", Op.CONV_2D, conv(stride=0), f(1, 2, 2, 3)),
    ("3_channels", "C2", Op.CONV_2D, conv(channels=1), f(1, 2, 2, 3)),
    ("4_activation", "Q5", Op.CONV_2D, conv(activation=4), f(1, 2, 2, 3)),
    ("5_logistic_scale", "Q6", Op.LOGISTIC, [q(2)], q(2, scale=0.5)),
    ("8_tile_negative", "C3", Op.TILE, [f(2), i(-1)], f(2)),
    ("8_fill_negative", "C1", Op.FILL, [i(-2), 1.0], f(2)),
    ("8_pad_negative", "C1", Op.PAD, [f(2), (Operand(I32, (1, 2)), b"\xff" * 8)], f(2)),
    ("11_size", "R2", Op.TILE, [f(65536), i(65536)], Operand(F32, (0,))),
]


@pytest.mark.parametrize(
    ("rule", "code", "arguments", "output"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_N_OPF_1_to_11_what_an_operation_cannot_work_with_is_refused(
    rule: str, code: OperationType, arguments: list[Any], output: Operand
) -> None:
    model = one_operation(code, arguments, output)

    validate_model(model)

    with pytest.raises(GeneralFailure, match=rf"\({code.name}\): {rule}: "):
        interpreter.prepare(model)


def test_N_OPF_11_a_constant_of_more_dimensions_than_an_array_can_have_is_refused() -> None:
    model = one_operation(Op.RELU, [(f(*[1] * 65), bytes(4))], f(0))
    validate_model(model)  # the HAL knows no limit

    with pytest.raises(GeneralFailure, match="R5: a constant has 65 dimensions"):
        interpreter.prepare(model)


def test_N_OPF_10_a_projection_of_no_rows_at_all_is_refused() -> None:
    hashes = Operand(F32, (2, 2)), bytes(16)
    open_input = one_operation(Op.LSH_PROJECTION, [hashes, Operand(I32), None, 2], Operand(I32, (4,)))
    validate_model(open_input)

    with pytest.raises(GeneralFailure, match=r"\(LSH_PROJECTION\): R1: "):
        interpreter.prepare(open_input).execute([np.array(1, np.int32)], [bytearray(16)])


def test_N_OPF_6_an_output_of_another_type_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="S4"):
        validate_model(one_operation(Op.ADD, [f(2), f(2), 0], q(2)))


def test_N_OPF_8_topk_of_more_than_there_is_is_refused() -> None:
    operands = [replace(o, lifetime=LifeTime.SUBGRAPH_OUTPUT) for o in (f(4), Operand(I32, (4,)))]
    model = graph(
        [replace(f(3), lifetime=LifeTime.SUBGRAPH_INPUT), Operand(OperandType.INT32), *operands],
        [Operation(Op.TOPK_V2, (0, 1), (2, 3))],
        {1: (4).to_bytes(4, "little")},
    )
    validate_model(model)

    with pytest.raises(GeneralFailure, match="TOPK_V2"):
        interpreter.prepare(model)


def test_N_OPF_9_an_omitted_operand_that_is_required_is_refused() -> None:
    model = one_operation(Op.ADD, [f(2), f(2), 0], f(2))
    omitted = with_main(with_operand(model, 1, lifetime=LifeTime.NO_VALUE), input_indexes=(0,))

    with pytest.raises(InvalidArgument, match="S5"):
        validate_model(omitted)
