"""Variable tensors: inputs and outputs named `<name>:state`, behind all others, in the order of their use."""

from __future__ import annotations

import numpy as np
import pytest
from support.both_runners import Ours
from support.tflite_files import Operator, Tensor, floats, writer

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.types import LifeTime
from nnfmq.importers import load

X = Tensor("x", (1, 2))
WEIGHTS = Tensor("w", (2, 2), data=floats(2, 2))
BIAS = Tensor("b", (2,), data=floats(2))
VARIABLE = {"IsVariable": 1}


def two_rnns(first_state: int = 4, second_state: int = 3) -> bytes:
    """Return two RNNs in a row; the tensors 3 and 4 are variables, and the first RNN uses 4."""
    early, late = (Tensor(name, (1, 2), extra=VARIABLE) for name in ("early", "late"))
    tensors = [X, WEIGHTS, BIAS, late, early, Tensor("between", (1, 2)), Tensor("y", (1, 2))]
    operators = [
        Operator("RNN", (0, 1, 1, 2, first_state), (5,), "RNNOptions", {"FusedActivationFunction": 0}),
        Operator("RNN", (5, 1, 1, 2, second_state), (6,), "RNNOptions", {"FusedActivationFunction": 0}),
    ]
    data: bytes = writer.write(tensors, operators, (0,), (6,))
    return data


def test_states_come_last_in_the_order_in_which_operators_use_them() -> None:
    loaded = load(two_rnns())
    expected = [("early:state", True), ("late:state", True)]
    assert [(info.name, info.is_state) for info in loaded.inputs] == [("x", False), *expected]
    assert [(info.name, info.is_state) for info in loaded.outputs] == [("y", False), *expected]
    assert {(info.shape, info.dtype) for info in (*loaded.inputs, *loaded.outputs)} == {((1, 2), "float32")}


def test_a_state_is_an_input_and_an_output_of_its_operation() -> None:
    main = load(two_rnns()).model.main
    for number, operation in enumerate(main.operations):
        before, after = operation.inputs[4], operation.outputs[0]
        assert operation.type == Op.RNN
        assert (before, after) == (main.input_indexes[1 + number], main.output_indexes[1 + number])
        lifetimes = [main.operands[index].lifetime for index in (before, after)]
        assert lifetimes == [LifeTime.SUBGRAPH_INPUT, LifeTime.SUBGRAPH_OUTPUT]


def test_a_carried_state_continues_the_cell() -> None:
    run, x = Ours(load(two_rnns())), np.float32([[1, 2]])
    weights, bias = np.arange(4, dtype=np.float32).reshape(2, 2), np.float32([0, 1])
    early = late = np.zeros((1, 2), np.float32)
    for _ in range(3):
        early = x @ weights.T + early @ weights.T + bias
        late = early @ weights.T + late @ weights.T + bias
        np.testing.assert_allclose(run([x]), [late], rtol=1e-6)


def test_a_state_of_two_operators_is_rejected() -> None:
    with pytest.raises(
        InvalidArgument, match=r"operator 1 \(RNN\): tensor 4 \('early'\) is the state of two operators"
    ):
        load(two_rnns(second_state=4))


def test_a_model_without_variables_has_no_states() -> None:
    loaded = load(writer.write([X, X], [Operator("RELU", (0,), (1,))], (0,), (1,)))
    assert not any(info.is_state for info in (*loaded.inputs, *loaded.outputs))
