"""Variable tensors: states, which are inputs and outputs behind all others, in the order of their use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.both_runners import Ours, Theirs
from support.stateful_models import X, handle, streaming_window, two_rnns
from support.tflite_files import Operator, Tensor, ints, writer

from nnfmq.hal.errors import InvalidArgument, UnsupportedModel
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.types import LifeTime
from nnfmq.importers import load


def test_states_come_last_in_the_order_in_which_operators_use_them() -> None:
    loaded = load(two_rnns())
    states = [state.tensor for state in loaded.states]
    assert [info.name for info in (*loaded.inputs, *loaded.outputs, *states)] == ["x", "y", "early", "late"]
    assert {(info.shape, info.dtype) for info in (*loaded.inputs, *loaded.outputs, *states)} == {((1, 2), "float32")}


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
    assert loaded.states == ()


# -- resource variables


RESOURCE = Tensor("handle", (), "RESOURCE")
VALUE = Tensor("v", (2,), "INT32")
START = Operator("CALL_ONCE", (), (), "CallOnceOptions", {"InitSubgraphIndex": 1})
READ = Operator("READ_VARIABLE", (0,), (2,), "ReadVariableOptions")
ADD = ("AddOptions", {"FusedActivationFunction": 0})
SUM = Operator("ADD", (1, 2), (3,), *ADD)


def initial(*more: Tensor, operators: list[Operator] | None = None, value: int = 1) -> Any:
    """Return a subgraph that assigns tensor `value` to the variable `a`; tensor 1 is 7, 8."""
    tensors = [RESOURCE, Tensor("c", (2,), "INT32", ints(7, 8)), *more]
    assign = Operator("ASSIGN_VARIABLE", (0, value), (), "AssignVariableOptions")
    return writer.Subgraph(tensors, [handle("a"), *(operators or []), assign], (), ())


def model_of(*operators: Operator, start: Any = None, outputs: tuple[int, ...] = (3,)) -> bytes:
    """Return a model over tensors 0: the handle of `a`, 1: x, 2: the variable's value, 3: y, 4: z; all are INT32."""
    tensors = [RESOURCE, *(Tensor(name, (2,), "INT32") for name in "xvyz")]
    data: bytes = writer.write(tensors, operators, (1,), outputs, more=[initial() if start is None else start])
    return data


def assign(value: int) -> Operator:
    return Operator("ASSIGN_VARIABLE", (0, value), (), "AssignVariableOptions")


def test_variables_with_initial_values_give_litert_s_results_step_after_step() -> None:
    run, theirs, random = Ours(load(streaming_window())), Theirs(streaming_window()), np.random.default_rng(1)
    assert [state.tensor.name for state in run.loaded.states] == ["a", "b"]
    for _ in range(50):
        x = random.integers(-128, 127, (1, 1, 3)).astype(np.int8)
        np.testing.assert_array_equal(run([x]), theirs([x]))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(model_of(START, handle("a"), READ, SUM, assign(1)), id="an input"),
        pytest.param(model_of(START, handle("a"), READ, SUM, assign(3)), id="an output"),
        pytest.param(model_of(START, handle("a"), READ, SUM), id="never assigned"),
        pytest.param(
            model_of(START, handle("a"), READ, Operator("SUB", (1, 2), (3,), "SubOptions"), assign(1), outputs=(3, 2)),
            id="the variable itself is an output",
        ),
        pytest.param(
            model_of(
                handle("a"),
                START,
                assign(1),
                READ,
                Operator("ADD", (2, 2), (4,), *ADD),
                assign(4),
                Operator("READ_VARIABLE", (0,), (3,), "ReadVariableOptions"),
            ),
            id="assigned twice and read in between",
        ),
        pytest.param(
            model_of(
                START, handle("a"), READ, SUM, assign(3),
                start=initial(
                    Tensor("n", (1,), "INT32", ints(2)), Tensor("five", (), "INT32", ints(5)), VALUE,
                    operators=[Operator("FILL", (2, 3), (4,), "FillOptions")], value=4,
                ),
            ),
            id="an initial value that is computed",
        ),
    ],
)  # fmt: skip
def test_a_variable_may_be(content: bytes) -> None:
    run, theirs, random = Ours(load(content)), Theirs(content), np.random.default_rng(1)
    for _ in range(4):
        x = random.integers(-100, 100, 2).astype(np.int32)
        for found, expected in zip(run([x]), theirs([x]), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_a_model_with_variables_is_not_resized_and_the_variables_alone_are_at_fault() -> None:
    content = model_of(START, handle("a"), READ, SUM, assign(3))
    with pytest.raises(
        UnsupportedModel, match=r"operator 1 \(VAR_HANDLE\): its variable has a shape that the file"
    ) as e:
        load(content, shapes={"x": (1,)})
    assert [problem.operator for problem in e.value.problems] == ["VAR_HANDLE"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            model_of(handle("a"), READ, SUM),
            r"\(READ_VARIABLE\): the variable 'a' is read before a value is assigned",
        ),
        (
            model_of(READ, SUM),
            r"\(READ_VARIABLE\): its variable is not the result of a VAR_HANDLE",
        ),
        (
            model_of(START, handle("a"), READ, SUM, assign(3), start=initial(
                Tensor("wide", (3,), "INT32", ints(1, 2, 3)), value=2)),
            r"\(ASSIGN_VARIABLE\): the variable 'a' gets a value of another type or shape",
        ),
        (
            model_of(START, handle("a"), READ, SUM, start=initial(VALUE, value=2)),
            r"\(CALL_ONCE\): its subgraph assigns tensor 2 \('v'\), which is not a constant",
        ),
        (
            model_of(START, handle("a"), READ, SUM, start=initial(
                VALUE, operators=[Operator("TANH", (1,), (2,))], value=2)),
            r"\(CALL_ONCE\): its subgraph has operator 1 \(TANH\), which is not computed",
        ),
        (
            model_of(Operator("CALL_ONCE", (), (), "CallOnceOptions", {"InitSubgraphIndex": 2}),
                     Operator("ADD", (1, 1), (3,), *ADD)),
            r"\(CALL_ONCE\): subgraph 2 is not in 0..1",
        ),
        (
            model_of(START, handle("a"), READ, START, SUM),
            r"operator 3 \(CALL_ONCE\): it initializes the variable 'a' after it was used",
        ),
    ],
)  # fmt: skip
def test_what_a_variable_may_not_be_is_listed(content: bytes, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        load(content)
