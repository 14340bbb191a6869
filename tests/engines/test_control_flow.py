"""IF and WHILE in the interpreter: the selected subgraph, its inputs and outputs, and the end of loops."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.control_flow_models import (
    COUNT,
    REAL,
    TRUTH,
    Parts,
    branching,
    counting,
    inputs,
    named,
    output,
)
from support.small_models import scalar, with_main, with_operand

from nnfmq.driver.devices.registry import load_devices
from nnfmq.engines import interpreter, steps
from nnfmq.engines.program import Program
from nnfmq.hal.errors import (
    GeneralFailure,
    InvalidArgument,
    MissedDeadlineTransient,
)
from nnfmq.hal.types import (
    ExtensionNameAndPrefix,
    LifeTime,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
    OutputShape,
)
from nnfmq.validation import validate_model

IF, WHILE, ADD = OperationType.IF, OperationType.WHILE, OperationType.ADD
X, Y = np.array([1, 2], np.float32), np.array([10, 20], np.float32)
YES, NO = np.array([1], np.uint8), np.array([0], np.uint8)


def prepared(model: Model, **options: Any) -> Program:
    validate_model(model, **options)
    return interpreter.prepare(model)


def result(program: Program, *given: Any, **limits: Any) -> list[float]:
    out = np.zeros(2, np.float32)
    program.execute(given, [out], **limits)
    return out.tolist()


def count(n: int) -> Any:
    return np.array([n], np.int32)


@pytest.mark.parametrize(("condition", "expected"), [(1, [11, 22]), (255, [11, 22]), (0, [10, 40])])
def test_CF_1_the_condition_selects_the_branch(condition: int, expected: list[float]) -> None:
    program = prepared(branching())

    assert result(program, np.array([condition], np.uint8), X, Y) == expected


def test_one_program_runs_the_branch_that_each_request_selects() -> None:
    program = prepared(branching())

    assert [result(program, c, X, Y) for c in (YES, NO, YES)] == [[11, 22], [10, 40], [11, 22]]


def test_CF_6_a_branch_receives_constants() -> None:
    parts = Parts()
    branches = [named(parts.binary(ADD)), named(parts.binary(OperationType.MUL))]
    operands = [TRUTH, *branches, *inputs(REAL), REAL, output(REAL)]
    model = parts.model(operands, [Operation(IF, (0, 1, 2, 3, 4), (5,))], c0=b"\0", c4=Y.tobytes())

    assert result(prepared(model), X) == [10, 40]


def test_both_branches_may_be_the_same_subgraph_and_it_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = branching()
    model = with_operand(model, 2, location=model.main.operands[1].location)
    original, copied = interpreter.load_constant, []

    def spying(model: Model, operand: Operand) -> Any:
        copied.append(operand)
        return original(model, operand)

    monkeypatch.setattr(interpreter, "load_constant", spying)

    program = prepared(model)

    assert [result(program, c, X, Y) for c in (YES, NO)] == [[11, 22], [11, 22]]
    assert len(copied) == len(model.main.operands) + len(model.referenced[0].operands)


@pytest.mark.parametrize(("n", "expected"), [(0, [10, 20]), (1, [11, 22]), (5, [15, 30]), (-3, [10, 20])])
def test_CF_2_a_loop_runs_while_its_condition_is_true(n: int, expected: list[float]) -> None:
    assert result(prepared(counting()), Y, count(n), X) == expected


def test_a_loop_returns_as_many_of_its_state_operands_as_it_has_outputs() -> None:
    model = counting()
    operands = (*model.main.operands, output(COUNT))
    model = with_main(
        model, operands=operands, output_indexes=(6, 7), operations=(Operation(WHILE, tuple(range(6)), (6, 7)),)
    )
    outputs = [np.zeros(2, np.float32), np.zeros(1, np.int32)]

    prepared(model).execute([Y, count(3), X], outputs)

    assert [out.tolist() for out in outputs] == [[13, 26], [3]]


def nested() -> Model:
    """Return IF(condition, sum, n, x): `counting`'s loop in the then-subgraph, sum + x in the else-subgraph."""
    parts = Parts()
    loop = counting(parts)
    parts.subgraphs.append(loop.main)
    none, raw = scalar(0)
    operands = [*inputs(REAL, COUNT, REAL), none, output(REAL)]
    other = parts.add(operands, [Operation(ADD, (0, 2, 3), (4,))], c3=raw)
    operands = [*inputs(TRUTH), named(2), named(other), *inputs(REAL, COUNT, REAL), output(REAL)]
    return parts.model(operands, [Operation(IF, (0, 1, 2, 3, 4, 5), (6,))])


def test_CF_6_a_loop_runs_inside_a_branch() -> None:
    program = prepared(nested())

    assert [result(program, c, Y, count(3), X) for c in (YES, NO)] == [[13, 26], [11, 22]]


def test_results_of_control_flow_feed_later_operations_and_are_released() -> None:
    model = counting()
    none, _ = scalar(0)
    none = replace(none, lifetime=LifeTime.CONSTANT_COPY, location=model.main.operands[3].location)
    operands = (*model.main.operands[:6], REAL, none, output(REAL))
    operations = (*model.main.operations, Operation(ADD, (6, 5, 7), (8,)))
    model = with_main(model, operands=operands, operations=operations, output_indexes=(8,))

    assert result(prepared(model), Y, count(2), X) == [13, 26]


# -- timeout and cancellation ----------------------------------------------------------------------------------------

FOREVER = count(2**31 - 1)


def test_CF_4_a_loop_longer_than_the_timeout_raises_missed_deadline() -> None:
    with pytest.raises(MissedDeadlineTransient, match="1000000 ns"):
        result(prepared(counting()), Y, FOREVER, X, loop_timeout_ns=1_000_000)


def test_CF_4_a_loop_shorter_than_the_timeout_completes() -> None:
    assert result(prepared(counting()), Y, count(0), X, loop_timeout_ns=0) == [10, 20]


def test_CF_4_the_default_timeout_of_a_loop_is_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0, 1_999_999_999, 2_000_000_000])
    monkeypatch.setattr(steps, "time", SimpleNamespace(monotonic_ns=lambda: next(ticks)))

    with pytest.raises(MissedDeadlineTransient, match="2000000000 ns"):
        result(prepared(counting()), Y, FOREVER, X)


@pytest.mark.parametrize("timeout", [15_000_000_001, -1])
def test_CF_5_a_timeout_above_the_maximum_is_rejected(timeout: int) -> None:
    with pytest.raises(InvalidArgument, match=str(timeout)):
        result(prepared(counting()), Y, count(1), X, loop_timeout_ns=timeout)


def test_CF_5_the_maximum_is_accepted() -> None:
    assert result(prepared(counting()), Y, count(1), X, loop_timeout_ns=15_000_000_000) == [11, 22]


def test_a_timeout_inside_a_branch_ends_the_execution() -> None:
    with pytest.raises(MissedDeadlineTransient):
        result(prepared(nested()), YES, Y, FOREVER, X, loop_timeout_ns=1_000_000)


def test_QOS_3_a_deadline_ends_a_loop_between_its_operations() -> None:
    deadline = time.monotonic_ns() + 1_000_000

    with pytest.raises(MissedDeadlineTransient, match="deadline"):
        result(prepared(counting()), Y, FOREVER, X, deadline_ns=deadline)


def test_a_cancelled_loop_ends() -> None:
    polls = iter([False] * 9 + [True])

    with pytest.raises(GeneralFailure, match="cancelled"):
        result(prepared(counting()), Y, FOREVER, X, is_cancelled=lambda: next(polls))


# -- shapes that come with the data -----------------------------------------------------------------------------------


def concatenating() -> Model:
    """Return a WHILE whose state grows by x in each iteration, with operands of unknown shape at its boundary."""
    parts = Parts()
    grown = replace(REAL, dimensions=(0,))
    condition = parts.add(
        [*inputs(grown, COUNT, COUNT, REAL), output(TRUTH)], [Operation(OperationType.LESS, (1, 2), (4,))]
    )
    none, raw = scalar(0)
    operands = [*inputs(grown, COUNT, COUNT, REAL), output(grown), output(COUNT), COUNT, none]
    operations = [
        Operation(OperationType.CONCATENATION, (0, 3, 7), (4,)),
        Operation(ADD, (1, 6, 7), (5,)),
    ]
    body = parts.add(operands, operations, c6=b"\1\0\0\0", c7=raw)
    outer = [named(condition), named(body), *inputs(REAL), COUNT, *inputs(COUNT, REAL), output(grown)]
    return parts.model(outer, [Operation(WHILE, (0, 1, 2, 3, 4, 5), (6,))], c3=bytes(4))


@pytest.mark.parametrize("n", [0, 1, 4])
def test_CF_3_the_shape_of_a_state_may_change_with_each_iteration(n: int) -> None:
    program = prepared(concatenating(), allow_unspecified_boundaries=True)
    out = np.zeros(2 + 2 * n, np.float32)

    assert program.execute([Y, count(n), X], [out]) == (OutputShape((2 + 2 * n,)),)
    assert out.tolist() == [10, 20] + [1, 2] * n


def test_R4_an_output_that_contradicts_its_declaration_fails() -> None:
    model = with_operand(concatenating(), 6, dimensions=(4,))
    program = prepared(model, allow_unspecified_boundaries=True)

    assert program.execute([Y, count(1), X], [None]) == (OutputShape((4,)),)
    with pytest.raises(GeneralFailure, match=r"operation 0 \(WHILE\): an output has shape \(6,\), .*\(R4\)$"):
        program.execute([Y, count(2), X], [None])


def test_C1_a_condition_with_several_elements_fails() -> None:
    program = prepared(with_operand(branching(), 0, dimensions=(0,)), allow_unspecified_boundaries=True)

    assert result(program, YES, X, Y) == [11, 22]
    with pytest.raises(GeneralFailure, match=r"operation 0 \(IF\): the condition has shape \(2,\) \(C1\)$"):
        result(program, np.ones(2, np.uint8), X, Y)


def test_C2_an_argument_that_does_not_fit_the_subgraph_fails() -> None:
    model = with_operand(with_operand(branching(), 3, dimensions=(0,)), 5, dimensions=())
    program = prepared(model, allow_unspecified_boundaries=True)

    with pytest.raises(GeneralFailure, match=r"operation 0 \(IF\): input operand 0 .*\(C2\)$"):
        program.execute([YES, np.ones(3, np.float32), Y], [None])


def test_C3_TST_9_a_loop_without_iterations_has_no_output_of_an_omitted_argument() -> None:
    program = prepared(counting())

    with pytest.raises(GeneralFailure, match=r"operation 0 \(WHILE\): an output would be .* omitted \(C3\)$"):
        result(program, None, count(0), X)


def test_a_failure_inside_a_subgraph_names_both_operations() -> None:
    model = branching()
    loose = tuple(replace(o, dimensions=()) if o.type == REAL.type else o for o in model.referenced[0].operands)
    model = replace(model, referenced=(replace(model.referenced[0], operands=loose), model.referenced[1]))
    model = with_operand(with_operand(model, 3, dimensions=()), 5, dimensions=())
    program = prepared(model, allow_unspecified_boundaries=True)

    with pytest.raises(GeneralFailure, match=r"operation 0 \(IF\): operation 0 \(ADD\): .*\(B1\)$"):
        program.execute([YES, np.ones(3, np.float32), Y], [None])


# -- operands without a value -----------------------------------------------------------------------------------------


def squeezing() -> Model:
    """Return IF(condition, x, axes) with SQUEEZE in both branches; axes may be omitted."""
    parts = Parts()
    wide, axes = replace(REAL, dimensions=(2, 1)), COUNT
    operands = [*inputs(wide, axes), output(REAL)]
    branches = [parts.add(operands, [Operation(OperationType.SQUEEZE, (0, 1), (2,))]) for _ in range(2)]
    outer = [*inputs(TRUTH), *map(named, branches), *inputs(wide, axes), output(REAL)]
    return parts.model(outer, [Operation(IF, (0, 1, 2, 3, 4), (5,))])


@pytest.mark.parametrize("given", [None, count(1)])
def test_an_input_that_the_request_omits_is_omitted_in_the_branch(given: Any) -> None:
    assert result(prepared(squeezing()), YES, X.reshape(2, 1), given) == [1, 2]


def test_a_branch_receives_an_operand_without_a_value() -> None:
    model = with_operand(squeezing(), 4, lifetime=LifeTime.NO_VALUE)
    model = with_main(model, input_indexes=(0, 3))

    assert result(prepared(model), YES, X.reshape(2, 1)) == [1, 2]


def test_an_omitted_input_that_a_branch_needs_fails() -> None:
    program = prepared(squeezing())

    with pytest.raises(GeneralFailure, match=r"\(IF\): input operand 0 .*\(C2\)$"):
        result(program, YES, None, None)


def test_the_condition_may_not_be_omitted() -> None:
    with pytest.raises(InvalidArgument, match="input operand 0"):
        result(prepared(branching()), None, X, Y)


# -- unsupported models------------------------------------------------------------------------------------------------


def test_SUP_4_control_flow_is_supported_if_all_called_subgraphs_are() -> None:
    model = nested()
    body = model.referenced[1]
    broken = replace(
        body, operations=(replace(body.operations[0], type=OperationType.OEM_OPERATION), *body.operations[1:])
    )

    mutated = replace(model, referenced=(model.referenced[0], broken, *model.referenced[2:]))
    with pytest.raises(
        GeneralFailure, match=r"operation 0 \(IF\): operation 0 \(WHILE\): operation 0 \(OEM_OPERATION\)"
    ):
        interpreter.prepare(mutated)


def test_SUP_4_uncalled_subgraphs_are_ignored() -> None:
    model = branching()
    other = replace(model.referenced[0].operations[0], type=OperationType.OEM_OPERATION)
    unused = replace(model.referenced[0], operations=(other,))

    interpreter.prepare(replace(model, referenced=(*model.referenced, unused)))


def test_too_deeply_nested_subgraphs_raise_an_error() -> None:
    parts = Parts()
    inner = parts.binary(ADD)
    for _ in range(2000):
        operands = [*inputs(REAL, REAL), TRUTH, named(inner), named(inner), output(REAL)]
        inner = parts.add(operands, [Operation(IF, (2, 3, 4, 0, 1), (5,))], c2=b"\1")
    operands = [*inputs(TRUTH), named(inner), named(inner), *inputs(REAL, REAL), output(REAL)]
    model = parts.model(operands, [Operation(IF, (0, 1, 2, 3, 4), (5,))])
    validate_model(model)

    with pytest.raises(InvalidArgument, match="nested 2001 deep; at most 64"):
        interpreter.prepare(model)


def test_a_condition_in_client_memory_is_read_once() -> None:
    class Flickering(np.ndarray[Any, Any]):
        reads = 0

        def item(self, *args: Any) -> Any:
            Flickering.reads += 1
            return super().item(*args)

    assert result(prepared(branching()), YES.view(Flickering), X, Y) == [11, 22]
    assert Flickering.reads == 1


def test_EXT_5_SUP_4_an_operand_of_an_unknown_type_cannot_be_passed_to_a_subgraph() -> None:
    """No operation but IF has the extension's operand, so IF alone makes the model unsupported."""
    parts, foreign = Parts(), Operand(OperandType(7 << 16))
    none, raw = scalar(0)
    operands = [*inputs(REAL, REAL, foreign), none, output(REAL)]
    branches = [named(parts.add(operands, [Operation(ADD, (0, 1, 3), (4,))], c3=raw)) for _ in range(2)]
    main = [*inputs(TRUTH), *branches, *inputs(REAL, REAL, foreign), output(REAL)]
    model = parts.model(main, [Operation(IF, (0, 1, 2, 3, 4, 5), (6,))])
    model = replace(model, extensions=(ExtensionNameAndPrefix("com.example.one", 7),))
    assert validate_model(model) == 4
    assert load_devices()["reference"]._supported(model) == [False]
    with pytest.raises(GeneralFailure, match="operands of type EXTENSION_0x70000 are not supported"):
        interpreter.prepare(model)
