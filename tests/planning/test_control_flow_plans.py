"""Plans with IF and WHILE: interpreted or not, the order of their steps, the values that they bind, and the results."""

from __future__ import annotations

import struct

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
    nested,
    output,
    rotating,
)
from support.planned import FakeDevice, cpu, only, run_plan
from support.small_models import scalar, with_operand

from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.types import LifeTime, Model, Operand, OperandType, Operation, OperationType
from nnfmq.planning.partitioning import PlanOptions, make_plan
from nnfmq.planning.plan import ExecutionStep, GotoStep, IfStep, OperandKey, WhileStep

ADD, MUL, SUB, LESS, RELU, EXP = (
    OperationType.ADD,
    OperationType.MUL,
    OperationType.SUB,
    OperationType.LESS,
    OperationType.RELU,
    OperationType.EXP,
)
IF, WHILE = OperationType.IF, OperationType.WHILE
X, Y = np.array([1, 2], np.float32), np.array([10, 20], np.float32)
YES, NO = np.array([1], np.uint8), np.array([0], np.uint8)


def keys(subgraph: int, *operands: int) -> tuple[OperandKey, ...]:
    return tuple(OperandKey(subgraph, operand) for operand in operands)


def n_rounds(n: int) -> np.ndarray:
    return np.array([n], np.int32)


# -- IF ----------------------------------------------------------------------------------------------------------------


def test_PART_4_an_IF_is_a_step_then_both_branches_each_with_a_jump_to_the_end() -> None:
    plan = make_plan(branching(), [FakeDevice("acme-a", only(ADD)), cpu()])

    branch, then, end, otherwise, again = plan.steps
    assert branch == IfStep(
        subgraph=0,
        operation=0,
        condition=OperandKey(0, 0),
        then_step=1,
        else_step=3,
        inputs=keys(0, 3, 4),
        outputs=keys(0, 5),
        then_inputs=keys(1, 0, 1),
        then_outputs=keys(1, 3),
        else_inputs=keys(2, 0, 1),
        else_outputs=keys(2, 3),
    )
    assert end == again == GotoStep(5)
    assert isinstance(then, ExecutionStep)
    assert isinstance(otherwise, ExecutionStep)
    assert [(step.device, step.subgraph) for step in (then, otherwise)] == [(0, 1), (1, 2)]
    assert (then.inputs, then.outputs) == (keys(1, 0, 1), keys(1, 3))
    assert (plan.temporaries, plan.constants) == ((), ())
    assert not plan.is_simple


@pytest.mark.parametrize(("condition", "expected"), [(YES, X + Y), (NO, X * Y)])
def test_PART_4_an_interpreted_IF_computes_one_branch(condition: np.ndarray, expected: np.ndarray) -> None:
    plan = make_plan(branching(), [FakeDevice("acme-a", only(ADD)), cpu()])

    np.testing.assert_array_equal(run_plan(plan, [condition, X, Y])[0], expected)


def test_PART_4_and_PART_3_an_IF_that_a_device_takes_is_one_of_its_operations() -> None:
    plan = make_plan(branching(), [FakeDevice("acme-a"), cpu()])

    assert plan.is_simple
    assert plan.execution_steps[0].device == 0


def test_PART_4_a_device_gets_an_IF_together_with_its_neighbours_and_the_subgraphs() -> None:
    """EXP of the result goes to the CPU; the step of the device has the IF and both branches."""
    model = branching()
    operands = (*model.main.operands[:5], replace(REAL, lifetime=LifeTime.TEMPORARY_VARIABLE), output(REAL))
    operations = (*model.main.operations, Operation(EXP, (5,), (6,)))
    model = replace(model, main=replace(model.main, operands=operands, operations=operations, output_indexes=(6,)))

    plan = make_plan(model, [FakeDevice("acme-a", only(IF, ADD, MUL)), cpu()])

    first, second = plan.execution_steps
    assert [(first.device, first.operations), (second.device, second.operations)] == [(0, (0,)), (1, (1,))]
    assert [graph.operations[0].type for graph in first.model.referenced] == [ADD, MUL]
    assert not second.model.referenced
    np.testing.assert_allclose(run_plan(plan, [NO, X, Y])[0], np.exp(X * Y), rtol=1e-6)


def test_PART_4_everything_on_the_CPU_is_a_simple_plan() -> None:
    assert make_plan(branching(), [cpu()]).is_simple
    assert make_plan(counting(), [FakeDevice("acme-a", only(RELU)), cpu()]).is_simple


def test_PART_4_an_interpreted_IF_goes_before_all_devices_and_what_reads_its_result_comes_after() -> None:
    """x + y is ready as well as the IF; the operations after both wait for the IF."""
    model = branching()
    none = scalar(0)[0]
    temporary = replace(REAL, lifetime=LifeTime.TEMPORARY_VARIABLE)
    place = replace(none, lifetime=LifeTime.CONSTANT_COPY, location=model.referenced[0].operands[2].location)
    operands = (*model.main.operands[:5], temporary, temporary, place, output(REAL))
    operations = (
        Operation(ADD, (3, 4, 7), (6,)),
        *model.main.operations,
        Operation(ADD, (5, 6, 7), (8,)),
    )
    model = replace(model, main=replace(model.main, operands=operands, operations=operations, output_indexes=(8,)))

    plan = make_plan(model, [FakeDevice("acme-a", only(ADD)), cpu()])

    kinds = [type(step).__name__ for step in plan.steps]
    assert kinds == ["IfStep", "ExecutionStep", "GotoStep", "ExecutionStep", "GotoStep", "ExecutionStep"]
    assert plan.execution_steps[-1].operations == (0, 2)
    assert plan.temporaries == keys(0, 5)
    np.testing.assert_array_equal(run_plan(plan, [NO, X, Y])[0], X * Y + X + Y)


def test_PART_4_two_calls_of_one_subgraph_have_steps_of_their_own() -> None:
    parts = Parts()
    add, mul = named(parts.binary(ADD)), named(parts.binary(MUL))
    condition, other, x, y = inputs(TRUTH, TRUTH, REAL, REAL)
    between = replace(REAL, lifetime=LifeTime.TEMPORARY_VARIABLE)
    operands = [condition, other, add, mul, x, y, between, output(REAL)]
    operations = [Operation(IF, (0, 2, 3, 4, 5), (6,)), Operation(IF, (1, 2, 3, 6, 5), (7,))]
    plan = make_plan(parts.model(operands, operations), [FakeDevice("acme-a", only(ADD)), cpu()])

    assert len(plan.steps) == 10
    first, second = (plan.steps[index] for index in (0, 5))
    assert isinstance(first, IfStep)
    assert isinstance(second, IfStep)
    assert (first.then_outputs, second.then_step, second.else_step) == (second.then_outputs, 6, 8)
    assert plan.temporaries == keys(0, 6)
    for conditions, expected in (((YES, YES), X + Y + Y), ((NO, YES), X * Y + Y), ((NO, NO), X * Y * Y)):
        np.testing.assert_array_equal(run_plan(plan, [*conditions, X, Y])[0], expected)


def test_PART_4_an_IF_may_have_the_same_subgraph_as_both_branches() -> None:
    parts = Parts()
    add = named(parts.binary(ADD))
    condition, x, y = inputs(TRUTH, REAL, REAL)
    model = parts.model([condition, add, add, x, y, output(REAL)], [Operation(IF, (0, 1, 2, 3, 4), (5,))])

    plan = make_plan(model, [FakeDevice("acme-a", only(ADD)), cpu()])

    assert [step.subgraph for step in plan.execution_steps] == [1, 1]
    for condition_value in (YES, NO):
        np.testing.assert_array_equal(run_plan(plan, [condition_value, X, Y])[0], X + Y)


def test_PART_4_a_branch_may_take_several_steps() -> None:
    parts = Parts()
    inner = [*inputs(REAL), replace(REAL, lifetime=LifeTime.TEMPORARY_VARIABLE), output(REAL)]
    two = named(parts.add(inner, [Operation(RELU, (0,), (1,)), Operation(EXP, (1,), (2,))]))
    one = named(parts.add([*inputs(REAL), output(REAL)], [Operation(EXP, (0,), (1,))]))
    condition, x = inputs(TRUTH, REAL)
    model = parts.model([condition, two, one, x, output(REAL)], [Operation(IF, (0, 1, 2, 3), (4,))])

    plan = make_plan(model, [FakeDevice("acme-a", only(RELU)), cpu()])

    branch = plan.steps[0]
    assert isinstance(branch, IfStep)
    assert (branch.then_step, branch.else_step, plan.steps[3]) == (1, 4, GotoStep(6))
    assert plan.temporaries == keys(1, 1)
    np.testing.assert_allclose(run_plan(plan, [YES, -X])[0], [1, 1])
    np.testing.assert_allclose(run_plan(plan, [NO, -X])[0], np.exp(-X), rtol=1e-6)


def test_PART_4_constants_that_an_interpreted_operation_binds_are_listed_once() -> None:
    parts = Parts()
    add, mul = named(parts.binary(ADD)), named(parts.binary(MUL))
    (x,) = inputs(REAL)
    operands = [TRUTH, add, mul, x, REAL, output(REAL), output(REAL)]
    operations = [Operation(IF, (0, 1, 2, 3, 4), (5,)), Operation(IF, (0, 1, 2, 4, 3), (6,))]
    constant = struct.pack("<2f", 10, 20)
    model = parts.model(operands, operations, c0=b"\1", c4=constant)

    plan = make_plan(model, [FakeDevice("acme-a", only(ADD)), cpu()])

    assert plan.constants == keys(0, 0, 4)
    np.testing.assert_array_equal(run_plan(plan, [X])[0], X + Y)


def test_PART_4_an_omitted_operand_of_an_IF_is_bound_as_an_omitted_one() -> None:
    """The branches do not read their second input."""
    parts = Parts()
    absent = Operand(OperandType.TENSOR_FLOAT32, (2,))
    add = parts.add([*inputs(REAL, absent), output(REAL)], [Operation(RELU, (0,), (2,))])
    mul = parts.add([*inputs(REAL, absent), output(REAL)], [Operation(EXP, (0,), (2,))])
    condition, x = inputs(TRUTH, REAL)
    omitted = replace(absent, lifetime=LifeTime.NO_VALUE)
    operands = [condition, named(add), named(mul), x, omitted, output(REAL)]
    model = parts.model(operands, [Operation(IF, (0, 1, 2, 3, 4), (5,))])

    plan = make_plan(model, [FakeDevice("acme-a", only(RELU)), cpu()])

    branch = plan.steps[0]
    assert isinstance(branch, IfStep)
    assert branch.inputs == keys(0, 3, 4)
    assert plan.constants == ()
    np.testing.assert_array_equal(run_plan(plan, [YES, -X])[0], [0, 0])


# -- WHILE -------------------------------------------------------------------------------------------------------------


def test_PART_4_a_WHILE_is_a_step_then_the_condition_a_jump_back_the_body_and_a_jump_back() -> None:
    plan = make_plan(counting(), [FakeDevice("acme-a", only(ADD)), cpu()])

    loop, condition, back, body, again = plan.steps
    assert loop == WhileStep(
        subgraph=0,
        operation=0,
        condition=OperandKey(1, 4),
        condition_step=1,
        body_step=3,
        exit_step=5,
        inputs=keys(0, 2, 3, 4, 5),
        outputs=keys(0, 6),
        condition_inputs=keys(1, 0, 1, 2, 3),
        body_inputs=keys(2, 0, 1, 2, 3),
        body_outputs=keys(2, 4, 5),
    )
    assert back == again == GotoStep(0)
    assert isinstance(condition, ExecutionStep)
    assert isinstance(body, ExecutionStep)
    assert [(step.device, step.subgraph) for step in (condition, body)] == [(1, 1), (0, 2)]
    assert plan.temporaries == (OperandKey(1, 4), *keys(2, 4, 5))
    assert plan.constants == keys(0, 3)


@pytest.mark.parametrize("rounds", [0, 1, 2, 7])
def test_PART_4_an_interpreted_WHILE_runs_its_body_while_the_condition_is_true(rounds: int) -> None:
    plan = make_plan(counting(), [FakeDevice("acme-a", only(ADD)), cpu()])

    np.testing.assert_array_equal(run_plan(plan, [Y, n_rounds(rounds), X])[0], Y + rounds * X)


@pytest.mark.parametrize("rounds", [0, 1, 3, 4])
def test_PART_4_values_of_a_loop_may_change_places(rounds: int) -> None:
    plan = make_plan(rotating(), [FakeDevice("acme-a", only(ADD)), cpu()])
    a, b, c = X, Y, X + 100
    values = run_plan(plan, [a, b, c, n_rounds(rounds)])
    for _ in range(rounds):
        a, b, c = b, c, a + c

    for found, expected in zip(values, (a, b, c), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_PART_4_a_WHILE_that_a_device_takes_is_one_of_its_operations() -> None:
    plan = make_plan(counting(), [FakeDevice("acme-a"), cpu()])

    assert plan.is_simple


def test_PART_4_an_output_of_a_WHILE_that_another_step_reads_is_a_temporary() -> None:
    model = counting()
    operands = (*model.main.operands[:6], replace(REAL, lifetime=LifeTime.TEMPORARY_VARIABLE), output(REAL))
    operations = (*model.main.operations, Operation(EXP, (6,), (7,)))
    model = replace(model, main=replace(model.main, operands=operands, operations=operations, output_indexes=(7,)))

    plan = make_plan(model, [FakeDevice("acme-a", only(ADD)), cpu()])

    assert OperandKey(0, 6) in plan.temporaries
    np.testing.assert_allclose(run_plan(plan, [-Y, n_rounds(10), X])[0], [1, 1])


# -- nested ------------------------------------------------------------------------------------------------------------


def loop_of_branches() -> Model:
    """Return a WHILE of n rounds: sum = flag ? sum + x : sum * x. Inputs are sum, n, x and the flag."""
    parts = Parts()
    add, mul = named(parts.binary(ADD)), named(parts.binary(MUL))
    state = (REAL, COUNT, COUNT, REAL, TRUTH)
    condition = parts.add([*inputs(*state), output(TRUTH)], [Operation(LESS, (1, 2), (5,))])
    none, zero = scalar(0)
    body_operands = [*inputs(*state), add, mul, COUNT, none, output(REAL), output(COUNT)]
    body_operations = [Operation(IF, (4, 5, 6, 0, 3), (9,)), Operation(ADD, (1, 7, 8), (10,))]
    body = parts.add(body_operands, body_operations, c7=struct.pack("<i", 1), c8=zero)
    start, n, x, flag = inputs(REAL, COUNT, REAL, TRUTH)
    operands = [named(condition), named(body), start, COUNT, n, x, flag, output(REAL)]
    return parts.model(operands, [Operation(WHILE, tuple(range(7)), (7,))], c3=struct.pack("<i", 0))


@pytest.mark.parametrize(("flag", "expected"), [(YES, Y + 3 * X), (NO, Y * X**3)])
def test_PART_4_an_IF_in_a_loop(flag: np.ndarray, expected: np.ndarray) -> None:
    plan = make_plan(loop_of_branches(), [FakeDevice("acme-a", only(ADD)), cpu()])

    kinds = [type(step).__name__.removesuffix("Step") for step in plan.steps]
    assert kinds == ["While", "Execution", "Goto", "If", "Execution", "Goto", "Execution", "Goto", "Execution", "Goto"]
    loop, branch = plan.steps[0], plan.steps[3]
    assert isinstance(loop, WhileStep)
    assert isinstance(branch, IfStep)
    assert branch.outputs[0] == loop.body_outputs[0]  # the IF writes a value of the loop
    assert set(loop.body_outputs) <= set(plan.temporaries)
    np.testing.assert_array_equal(run_plan(plan, [Y, n_rounds(3), X, flag])[0], expected)


def test_PART_4_an_IF_in_a_branch_shares_the_storage_of_the_outer_one() -> None:
    plan = make_plan(nested(2, ADD, MUL), [FakeDevice("acme-a", only(ADD)), cpu()])

    kinds = [type(step).__name__.removesuffix("Step") for step in plan.steps]
    assert kinds == ["If", "If", "Execution", "Goto", "Execution", "Goto", "Goto", "Execution", "Goto"]
    outer, inner = plan.steps[:2]
    assert isinstance(outer, IfStep)
    assert isinstance(inner, IfStep)
    assert (outer.then_step, inner.outputs, plan.temporaries) == (1, outer.then_outputs, ())
    assert plan.constants == (inner.condition,)
    np.testing.assert_array_equal(run_plan(plan, [YES, X, Y])[0], X + Y)
    np.testing.assert_array_equal(run_plan(plan, [NO, X, Y])[0], X * Y)


def test_PART_4_an_inner_IF_that_a_device_takes_is_not_interpreted() -> None:
    """The device lacks MUL, which only the outer else-branch needs."""
    parts = Parts()
    add = named(parts.binary(ADD))
    inner = parts.add(
        [TRUTH, add, add, *inputs(REAL, REAL), output(REAL)], [Operation(IF, (0, 1, 2, 3, 4), (5,))], c0=b"\1"
    )
    mul = parts.binary(MUL)
    condition, x, y = inputs(TRUTH, REAL, REAL)
    model = parts.model(
        [condition, named(inner), named(mul), x, y, output(REAL)], [Operation(IF, (0, 1, 2, 3, 4), (5,))]
    )

    plan = make_plan(model, [FakeDevice("acme-a", only(IF, ADD)), cpu()])

    assert [type(step) for step in plan.steps] == [IfStep, ExecutionStep, GotoStep, ExecutionStep, GotoStep]
    assert plan.execution_steps[0].model.main.operations[0].type == IF
    np.testing.assert_array_equal(run_plan(plan, [YES, X, Y])[0], X + Y)


def test_PART_4_a_subgraph_that_is_a_branch_and_a_body_has_memory_of_its_own_as_a_body() -> None:
    """The body of counting() is also the branch of an IF before the loop."""
    parts = Parts()
    model = counting(parts)
    body = named(1)
    flag = inputs(TRUTH)[0]
    temporaries = [replace(operand, lifetime=LifeTime.TEMPORARY_VARIABLE) for operand in (REAL, COUNT)]
    operands = (*model.main.operands, flag, body, body, *temporaries)
    loop = Operation(WHILE, (0, 1, 10, 11, 4, 5), (6,))
    operations = (Operation(IF, (7, 8, 9, 2, 3, 4, 5), (10, 11)), loop)
    main = replace(model.main, operands=operands, operations=operations, input_indexes=(*model.main.input_indexes, 7))

    plan = make_plan(replace(model, main=main), [FakeDevice("acme-a", only(ADD)), cpu()])

    assert set(keys(2, 4, 5)) <= set(plan.temporaries)
    np.testing.assert_array_equal(run_plan(plan, [Y, n_rounds(5), X, YES])[0], Y + 5 * X)


# -- unknown sizes, and limits -----------------------------------------------------------------------------------------


def test_PART_4_an_IF_of_unknown_size_is_interpreted_and_its_branches_are_planned_as_usual() -> None:
    model = branching()
    unknown = {"dimensions": (0,)}
    referenced = [with_operand(Model(graph), 3, **unknown).main for graph in model.referenced]
    model = with_operand(replace(model, referenced=tuple(referenced)), 5, **unknown)

    plan = make_plan(model, [FakeDevice("acme-a"), cpu()])

    assert [step.device for step in plan.execution_steps] == [0, 0]
    np.testing.assert_array_equal(run_plan(plan, [YES, X, Y])[0], X + Y)


def test_PART_4_a_branch_without_inputs_is_a_failure() -> None:
    parts = Parts()
    both = []
    for code in (ADD, MUL):
        none, zero = scalar(0)
        both.append(
            named(parts.add([REAL, none, output(REAL)], [Operation(code, (0, 0, 1), (2,))], c0=bytes(8), c1=zero))
        )
    model = parts.model([*inputs(TRUTH), *both, output(REAL)], [Operation(IF, (0, 1, 2), (3,))])

    with pytest.raises(GeneralFailure, match="would have no input"):
        make_plan(model, [FakeDevice("acme-a", only(ADD)), cpu()])


def test_a_small_model_whose_plan_would_be_huge_is_a_failure() -> None:
    """Each of 20 subgraphs calls the one before it twice: 2^20 copies of the innermost one."""
    parts = Parts()
    operands = inputs(TRUTH, REAL, REAL)
    none, zero = scalar(0)
    inner = parts.add([*operands, none, output(REAL)], [Operation(ADD, (1, 2, 3), (4,))], c3=zero)
    call = [Operation(IF, (0, 3, 3, 0, 1, 2), (4,))]
    for _ in range(20):
        inner = parts.add([*operands, named(inner), output(REAL)], call)
    model = parts.model([*operands, named(inner), output(REAL)], call)

    with pytest.raises(GeneralFailure, match="the plan would have more than 10000 steps"):
        make_plan(model, [FakeDevice("acme-a", only(ADD)), cpu()])
    assert make_plan(model, [FakeDevice("acme-a"), cpu()]).is_simple


def test_PART_4_forced_choices_hold_in_subgraphs() -> None:
    seen: set[int] = set()

    def choose(subgraph: int, operation: int, candidates: object) -> int:
        seen.add(subgraph)
        return 1 if subgraph == 0 else subgraph - 1

    plan = make_plan(branching(), [FakeDevice("acme-a"), cpu()], PlanOptions(choose=choose))

    assert [step.device for step in plan.execution_steps] == [0, 1]
    assert seen == {0, 1, 2}
