"""Plans of models without control flow: simple and compound ones, their steps, and what cannot be divided."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from support.planned import FakeDevice, cpu, figures, only, run_plan
from support.sketches import ANY_LENGTH, ANY_RANK, VECTOR, Sketch, chain
from support.small_models import scalar, two_adds

from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.types import Model, Operand, OperandType, OperationType
from nnfmq.planning.partitioning import PlanOptions, make_plan
from nnfmq.planning.plan import MAIN, ExecutionPlan, ExecutionStep, OperandKey
from nnfmq.validation import validate_model

ADD, RELU, FLOOR, EXP, TANH, ABS = (
    OperationType.ADD,
    OperationType.RELU,
    OperationType.FLOOR,
    OperationType.EXP,
    OperationType.TANH,
    OperationType.ABS,
)


def steps_of(plan: ExecutionPlan) -> list[tuple[int, tuple[int, ...]]]:
    """Return device and operations of each step, after checking the steps."""
    for step in plan.execution_steps:
        validate_model(step.model)
        assert len(step.model.main.operations) == len(step.operations)
    assert len(plan.execution_steps) == len(plan.steps)
    return [(step.device, step.operations) for step in plan.execution_steps]


def keys(*operands: int) -> tuple[OperandKey, ...]:
    return tuple(OperandKey(MAIN, operand) for operand in operands)


# -- simple plans ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("time", "device"), [(0.5, 0), (2.0, 1)])
def test_PART_3_one_device_for_all_operations_is_a_simple_plan(time: float, device: int) -> None:
    model = chain(RELU, EXP, FLOOR)

    plan = make_plan(model, [FakeDevice("acme-a", capabilities=figures(time)), cpu()])

    assert plan.is_simple
    assert plan.devices == ("acme-a", "nnapi-reference")
    assert plan.steps == (ExecutionStep(device, MAIN, (0, 1, 2), model, keys(0), keys(3)),)
    assert plan.execution_steps[0].model is model
    assert (plan.temporaries, plan.constants) == ((), ())


def test_PART_3_two_devices_that_share_the_operations_make_a_compound_plan() -> None:
    devices = FakeDevice("acme-a", only(RELU, FLOOR)), FakeDevice("acme-b", only(EXP, TANH))

    plan = make_plan(chain(RELU, FLOOR, EXP, TANH), devices)

    assert not plan.is_simple
    assert steps_of(plan) == [(0, (0, 1)), (1, (2, 3))]
    assert plan.temporaries == keys(2)


def test_PART_3_operations_of_the_CPU_between_others_are_a_step_of_their_own() -> None:
    plan = make_plan(chain(RELU, EXP, EXP, RELU, RELU), [FakeDevice("acme-a", only(RELU)), cpu()])

    assert steps_of(plan) == [(0, (0,)), (1, (1, 2)), (0, (3, 4))]
    assert plan.temporaries == keys(1, 3)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_PART_3_an_operation_newer_than_the_preferred_device_goes_to_the_next_one(level: int) -> None:
    """RELU is of HAL 1.0, EXP of 1.2, HARD_SWISH of 1.3; the older a device, the faster."""
    devices = [
        FakeDevice(f"acme-{n}", feature_level=n, capabilities=figures(n / 10), supports=lambda *_: True)
        for n in range(level, 5)
    ]
    winners = {1: (0, 2, 3), 2: (0, 1, 2), 3: (0, 0, 1)}[level]

    plan = make_plan(chain(RELU, EXP, OperationType.HARD_SWISH), devices)

    assert [step.device for step in plan.execution_steps for _ in step.operations] == list(winners)
    assert all(validate_model(step.model) <= devices[step.device].feature_level for step in plan.execution_steps)


def test_PART_3_the_choice_can_be_forced() -> None:
    def alternating(_subgraph: int, operation: int, _candidates: Sequence[int]) -> int:
        return operation % 2

    plan = make_plan(chain(RELU, RELU, RELU), [FakeDevice("acme-a"), cpu()], PlanOptions(choose=alternating))

    assert steps_of(plan) == [(0, (0,)), (1, (1,)), (0, (2,))]


# -- the order of steps ------------------------------------------------------------------------------------------------


def two_branches() -> Model:
    """Return RELU(x) → EXP, FLOOR(x) → TANH, and the sum of both; operations 0 to 4 in this order."""
    sketch = Sketch()
    x, none = sketch.input(), sketch.constant(0)
    left, right = [sketch.temporary(), sketch.temporary()], [sketch.temporary(), sketch.temporary()]
    sketch.operation(RELU, [x], left[0])
    sketch.operation(EXP, [left[0]], left[1])
    sketch.operation(FLOOR, [x], right[0])
    sketch.operation(TANH, [right[0]], right[1])
    sketch.operation(ADD, [left[1], right[1], none], sketch.output())
    return sketch.model()


def test_PART_5_devices_take_turns_from_the_end_of_the_list_and_each_takes_all_that_is_ready() -> None:
    late = FakeDevice("acme-late", only(EXP, TANH, ADD))
    early = FakeDevice("acme-early", only(RELU, FLOOR))

    assert steps_of(make_plan(two_branches(), [late, early])) == [(1, (0, 2)), (0, (1, 3, 4))]
    assert steps_of(make_plan(two_branches(), [early, late])) == [(0, (0, 2)), (1, (1, 3, 4))]


def test_PART_5_the_device_at_the_end_goes_first_as_soon_as_it_has_something_ready() -> None:
    first, last = FakeDevice("acme-first", only(RELU, EXP, ADD)), FakeDevice("acme-last", only(FLOOR, TANH))

    assert steps_of(make_plan(two_branches(), [first, last])) == [(1, (2, 3)), (0, (0, 1, 4))]
    assert steps_of(make_plan(two_branches(), [last, first])) == [(1, (0, 1)), (0, (2, 3)), (1, (4,))]


def test_PART_5_a_step_has_its_operations_in_the_order_of_the_source() -> None:
    """0 and 2 are ready at first, 1 becomes ready by 0."""
    plan = make_plan(
        two_branches(), [FakeDevice("acme-a", only(RELU, EXP, FLOOR)), FakeDevice("acme-b", only(TANH, ADD))]
    )

    assert steps_of(plan) == [(0, (0, 1, 2)), (1, (3, 4))]
    assert [operation.type for operation in plan.execution_steps[0].model.main.operations] == [RELU, EXP, FLOOR]


def test_PART_5_an_operation_that_reads_one_value_twice_waits_for_it_once() -> None:
    sketch = Sketch()
    x, between, none = sketch.input(), sketch.temporary(), sketch.constant(0)
    sketch.operation(RELU, [x], between)
    sketch.operation(ADD, [between, between, none], sketch.output())

    plan = make_plan(sketch.model(), [FakeDevice("acme-a", only(RELU)), FakeDevice("acme-b", only(ADD))])

    assert steps_of(plan) == [(0, (0,)), (1, (1,))]
    assert plan.execution_steps[1].inputs == keys(between)


# -- boundaries of steps -----------------------------------------------------------------------------------------------


def test_PART_5_the_boundary_of_a_step_lists_the_ends_of_the_model_before_temporaries() -> None:
    sketch = Sketch()
    none, early, first, late = sketch.constant(0), sketch.output(), sketch.temporary(), sketch.output()
    x, y, z = sketch.input(), sketch.input(), sketch.output()
    for index in (early, first, late):  # step 0 writes a temporary, and outputs, which are read by step 1 as well
        sketch.operation(RELU, [y if index == late else x], index)
    between = [sketch.temporary(), sketch.temporary()]
    sketch.operation(ADD, [late, first, none], between[0])
    sketch.operation(ADD, [between[0], early, none], between[1])
    sketch.operation(ADD, [between[1], x, none], z)
    model = sketch.model()

    plan = make_plan(model, [FakeDevice("acme-a", only(RELU)), FakeDevice("acme-b", only(ADD))])

    one, two = plan.execution_steps
    assert (one.inputs, one.outputs) == (keys(x, y), keys(early, late, first))
    assert (two.inputs, two.outputs) == (keys(x, first, early, late), keys(z))
    assert plan.temporaries == keys(first)
    for step in plan.execution_steps:
        sides = (step.inputs, step.model.main.input_indexes), (step.outputs, step.model.main.output_indexes)
        for names, indexes in sides:
            shapes = [(step.model.main.operands[i].type, step.model.main.operands[i].dimensions) for i in indexes]
            assert shapes == [(plan.operand(key).type, plan.operand(key).dimensions) for key in names]


def test_PART_5_an_output_of_the_model_can_be_the_input_of_a_step_and_is_no_temporary() -> None:
    sketch = Sketch()
    x, shared, z = sketch.input(), sketch.output(), sketch.output()
    sketch.operation(RELU, [x], shared)
    sketch.operation(EXP, [shared], z)

    plan = make_plan(sketch.model(), [FakeDevice("acme-a", only(RELU)), cpu()])

    assert [(step.inputs, step.outputs) for step in plan.execution_steps] == [
        (keys(x), keys(shared)),
        (keys(shared), keys(z)),
    ]
    assert not plan.temporaries
    values = np.array([-1, 0, 1, 2], np.float32)
    found = run_plan(plan, [values])
    np.testing.assert_array_equal(found[0], np.maximum(values, 0))
    np.testing.assert_allclose(found[1], np.exp(np.maximum(values, 0)), rtol=1e-6)


def test_PART_5_an_output_that_its_own_step_reads_as_well_is_an_output_of_that_step() -> None:
    sketch = Sketch()
    x, shared, between = sketch.input(), sketch.output(), sketch.temporary()
    sketch.operation(RELU, [x], shared)
    sketch.operation(RELU, [shared], between)
    sketch.operation(EXP, [between], sketch.output())

    plan = make_plan(sketch.model(), [FakeDevice("acme-a", only(RELU)), cpu()])

    assert plan.execution_steps[0].outputs == keys(shared, between)
    assert plan.execution_steps[0].inputs == keys(x)


# -- what cannot be divided --------------------------------------------------------------------------------------------


def test_PART_3_a_step_without_an_input_is_a_failure() -> None:
    sketch = Sketch()
    x, none, between = sketch.input(), sketch.constant(0), sketch.temporary()
    ones = sketch.constant((VECTOR, b"\0\0\x80\x3f" * 4))
    sketch.operation(RELU, [ones], between)
    sketch.operation(ADD, [x, between, none], sketch.output())

    with pytest.raises(GeneralFailure, match="a step of 1 operations on device 'acme-a' would have no input"):
        make_plan(sketch.model(), [FakeDevice("acme-a", only(RELU)), cpu()])
    assert make_plan(sketch.model(), [FakeDevice("acme-a"), cpu()]).is_simple


def test_PART_3_a_step_without_an_output_is_a_failure() -> None:
    sketch = Sketch()
    x = sketch.input()
    sketch.operation(RELU, [x], sketch.temporary())
    sketch.operation(EXP, [x], sketch.output())

    with pytest.raises(GeneralFailure, match="a step of 1 operations on device 'acme-a' would have no output"):
        make_plan(sketch.model(), [FakeDevice("acme-a", only(RELU)), cpu()])


@pytest.mark.parametrize("unknown", [ANY_LENGTH, ANY_RANK])
@pytest.mark.parametrize(("writer", "reader", "old"), [(1, 4, "acme-w"), (4, 2, "acme-r"), (3, 3, ""), (8, 4, "")])
def test_PART_5_a_value_of_unknown_size_crosses_only_between_devices_of_HAL_1_2(
    writer: int, reader: int, old: str, unknown: Operand
) -> None:
    """HAL 1.0 knows unknown extents inside a model, so it is asked about all; the division puts one at a boundary."""

    class Careless(FakeDevice):
        """Supports operations whatever the model around them is."""

        def supported_operations(self, model: Model) -> list[bool]:
            return [self.supports(model.main, operation) for operation in model.main.operations]

    devices = [Careless("acme-w", only(RELU), writer), Careless("acme-r", only(FLOOR), reader)]
    model = chain(RELU, FLOOR, between=unknown)
    if old and unknown is ANY_LENGTH:
        with pytest.raises(
            GeneralFailure, match=f"operand 1, whose size is unknown, would enter or leave device '{old}'"
        ):
            make_plan(model, devices)
    elif old:
        with pytest.raises(InvalidArgument, match="no device can execute operation"):
            make_plan(model, devices)
    else:
        plan = make_plan(model, devices)
        assert plan.temporaries == keys(1)
        assert [step.device for step in plan.execution_steps] == [0, 1]


def test_a_failure_because_of_an_unknown_size_names_both_interfaces() -> None:
    devices = [FakeDevice("acme-w", only(RELU), 2), FakeDevice("acme-r", only(FLOOR))]

    with pytest.raises(GeneralFailure, match=r"its interface is HIDL 1\.1, that needs HIDL 1\.2"):
        make_plan(chain(RELU, FLOOR, between=ANY_LENGTH), devices)


@pytest.mark.parametrize("names", [[], ["acme-a", "acme-a"]])
def test_devices_have_different_names_and_there_is_at_least_one(names: list[str]) -> None:
    with pytest.raises(InvalidArgument, match="at least one is required, each with a name of its own"):
        make_plan(chain(RELU), [FakeDevice(name) for name in names])


def test_a_plan_has_a_limited_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nnfmq.planning.partitioning.STEPS_MAX", 3)
    devices = FakeDevice("acme-a", only(RELU)), cpu()

    assert len(make_plan(chain(RELU, EXP, RELU), devices).steps) == 3
    with pytest.raises(GeneralFailure, match="the plan would have more than 3 steps"):
        make_plan(chain(RELU, EXP, RELU, EXP), devices)


# -- results -----------------------------------------------------------------------------------------------------------


def test_PART_5_the_steps_compute_what_the_model_does() -> None:
    devices = FakeDevice("acme-a", only(RELU, TANH)), FakeDevice("acme-b", only(FLOOR, ABS)), cpu()
    plan = make_plan(chain(ABS, RELU, FLOOR, EXP, TANH), devices)
    values = np.array([-1.5, 0, 0.5, 2.5], np.float32)

    assert steps_of(plan) == [(1, (0,)), (0, (1,)), (1, (2,)), (2, (3,)), (0, (4,))]
    np.testing.assert_allclose(run_plan(plan, [values])[0], np.tanh(np.exp(np.floor(np.abs(values)))), rtol=1e-6)


def test_PART_5_constants_of_a_step_have_their_values() -> None:
    model = two_adds()
    plan = make_plan(model, [FakeDevice("acme-a"), cpu()], PlanOptions(choose=lambda _s, operation, _c: operation))
    one, two = np.ones((2, 2), np.float32), np.full((2, 2), 2, np.float32)

    assert all(step.model.operand_values == scalar(0)[1] for step in plan.execution_steps)
    np.testing.assert_array_equal(run_plan(plan, [one, two])[0], one + two + two)


def test_PART_3_a_large_model_asks_each_device_once_and_its_steps_have_all_operations_once() -> None:
    codes = [(RELU, EXP, FLOOR)[position % 3] for position in range(1000)]
    devices = FakeDevice("acme-a", only(RELU)), FakeDevice("acme-b", only(FLOOR)), cpu()

    plan = make_plan(chain(*codes), devices)

    assert [len(device.asked) for device in devices] == [1, 1, 1]
    assert [operation for step in plan.execution_steps for operation in step.operations] == list(range(1000))
    assert len(plan.temporaries) == 999
    assert plan.operand(plan.temporaries[0]).type == OperandType.TENSOR_FLOAT32
