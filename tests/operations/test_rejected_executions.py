"""Arguments that violate an operation's constraints fail the execution, in the model or in the request (N-OPF).

The rows of REQUIREMENTS 3.8, by their ids. Each example runs twice: shapes and scalars in the model, then everything an
input of unknown rank, so that only the execution can detect it. Other files test each constraint.
"""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from support.executed import executed
from support.rejected_operations import CASES, F32, Q8, TWO, Argument, Array, Op
from support.small_models import one_operation, with_main, with_operand

from nnfmq.engines import interpreter
from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.types import DataLocation, LifeTime, Operand, OperandType, OperationType, Request, RequestArgument
from nnfmq.lab.conformance.testmodels import BytesPool
from nnfmq.validation import validate_model, validate_request


@pytest.mark.parametrize("unknown", [False, True], ids=["known", "unknown"])
@pytest.mark.parametrize(
    ("rule", "code", "arguments", "outputs"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_what_an_operation_cannot_work_with_fails_the_execution(
    rule: str, code: OperationType, arguments: list[Argument], outputs: list[Operand], unknown: bool
) -> None:
    with pytest.raises(GeneralFailure, match=rf"\({code.name}\): .*\({rule}\)$"):
        executed(code, arguments, outputs, unknown=unknown)


def test_N_OPF_6_an_output_of_another_type_is_rejected() -> None:
    model = one_operation(Op.ADD, [TWO, TWO, 0], replace(Q8, dimensions=(2,)))

    with pytest.raises(InvalidArgument, match=r"\(S4\)$"):
        validate_model(model)


@pytest.mark.parametrize("dimensions", [(3,), (2, 1), (1,)])
def test_N_OPF_6_an_output_of_another_shape_is_rejected(dimensions: tuple[int, ...]) -> None:
    model = one_operation(Op.ADD, [TWO, TWO, 0], replace(F32, dimensions=dimensions))
    validate_model(model)

    with pytest.raises(GeneralFailure, match=r"\(ADD\): .*\(R4\)$"):
        interpreter.prepare(model)


def test_N_OPF_9_an_omitted_operand_that_is_required_is_rejected() -> None:
    model = one_operation(Op.ADD, [TWO, TWO, 0], TWO)
    omitted = with_main(with_operand(model, 1, lifetime=LifeTime.NO_VALUE), input_indexes=(0,))

    with pytest.raises(InvalidArgument, match=r"\(S5\)$"):
        validate_model(omitted)


def test_N_OPF_9_a_request_may_not_leave_out_what_the_operation_needs() -> None:
    program = interpreter.prepare(one_operation(Op.ADD, [TWO, TWO, 0], TWO))

    with pytest.raises(InvalidArgument, match="received nothing"):
        program.execute([np.ones(2, np.float32), None], [bytearray(8)])


def test_N_OPF_11_a_constant_of_more_dimensions_than_an_array_can_have_is_rejected() -> None:
    model = one_operation(Op.RELU, [(replace(F32, dimensions=(1,) * 65), bytes(4))], F32)
    validate_model(model)  # the HAL knows no limit

    with pytest.raises(GeneralFailure, match=r"a constant has 65 dimensions, .*\(R5\)$"):
        interpreter.prepare(model)


# -- N-OPF-12: a scalar's buffer is shorter than its type -------------------------------------------------------------

SOFTMAX = one_operation(Op.SOFTMAX, [replace(F32, dimensions=(1, 2)), Operand(OperandType.FLOAT32)], F32)


@pytest.mark.parametrize("length", [0, 1, 3, 5])
def test_N_OPF_12_a_constant_scalar_of_too_few_bytes_is_rejected(length: int) -> None:
    model = one_operation(Op.SOFTMAX, [replace(F32, dimensions=(1, 2)), 1.0], F32)
    place = DataLocation(0, 0, length)

    with pytest.raises(InvalidArgument, match=r"N-VAL-3|N-VAL-4"):
        validate_model(with_operand(replace(model, operand_values=bytes(8)), 1, location=place))


@pytest.mark.parametrize("length", [1, 3, 5])
def test_N_OPF_12_a_request_s_scalar_of_too_few_bytes_is_rejected(length: int) -> None:
    inputs = [RequestArgument(location=DataLocation(0, at, size)) for at, size in ((0, 8), (8, length))]
    outputs = (RequestArgument(location=DataLocation(0, 16, 8)),)
    validate_model(SOFTMAX)

    with pytest.raises(InvalidArgument, match=r"input 1: .* bytes given, .*\(N-RQX-5\)$"):
        validate_request(SOFTMAX, Request(tuple(inputs), outputs, (BytesPool(bytes(64)),)))


@pytest.mark.parametrize("value", [np.array(1, np.float16), np.ones(2, np.float32), np.array(1, np.uint8)])
def test_N_OPF_12_the_engine_takes_scalars_of_their_very_type_alone(value: Array) -> None:
    program = interpreter.prepare(SOFTMAX)

    with pytest.raises(InvalidArgument, match="input operand 1 is float32"):
        program.execute([np.ones((1, 2), np.float32), value], [bytearray(8)])
