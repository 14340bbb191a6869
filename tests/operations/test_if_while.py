"""The declarations of IF and WHILE: which argument lists they accept. What they do is tested with the interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.control_flow_models import REAL, branching, counting
from support.small_models import with_main, with_operand, with_operation

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import LifeTime, Model, OperandType, OperationType
from nnfmq.operations import REGISTRY
from nnfmq.operations.declaration import match
from nnfmq.validation import validate_model

IF, WHILE = OperationType.IF, OperationType.WHILE


@pytest.mark.parametrize("make", [branching, counting])
@pytest.mark.parametrize("more", [0, 1, 7])
def test_any_number_of_operands_of_any_type_is_handed_on(make: Callable[[], Model], more: int) -> None:
    model = make()
    declaration = REGISTRY[model.main.operations[0].type]
    inputs = [model.main.operands[index] for index in model.main.operations[0].inputs]
    outputs = [model.main.operands[index] for index in model.main.operations[0].outputs]

    found = match(declaration, inputs + [REAL, inputs[0]] * more, outputs + [inputs[-1], inputs[0]] * more)

    assert len(found.parameters) == len(inputs) + 2 * more
    assert found.level == 4


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (with_operand(branching(), 0, type=OperandType.TENSOR_FLOAT32), r"operation 0 \(IF\): .*\(S2\)$"),
        (with_operation(branching(), 0, inputs=(0, 3, 2, 3, 4)), r"operation 0 \(IF\): .*\(S2\)$"),
        (with_operation(branching(), 0, inputs=(0, 1, 4, 3, 4)), r"operation 0 \(IF\): .*\(S2\)$"),
        (with_operation(counting(), 0, inputs=(2, 1, 2, 3, 4, 5)), r"operation 0 \(WHILE\): .*\(S2\)$"),
        (with_operation(counting(), 0, inputs=(0, 2, 2, 3, 4, 5)), r"operation 0 \(WHILE\): .*\(S2\)$"),
    ],
)
def test_S2_arguments_in_another_order_are_rejected(model: Model, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        validate_model(model)


def test_S5_the_condition_may_not_be_omitted() -> None:
    model = with_operand(branching(), 0, lifetime=LifeTime.NO_VALUE)

    with pytest.raises(InvalidArgument, match=r"operation 0 \(IF\): argument 0 \(condition\) .*\(S5\)$"):
        validate_model(with_main(model, input_indexes=(3, 4)))
