"""The device of each operation: by performance figures, by what devices support, and by the rules for IF and WHILE."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from support.control_flow_models import branching, counting, nested
from support.planned import FakeDevice, cpu, figures, only
from support.sketches import VECTOR, Sketch, chain
from support.small_models import I32, with_operand

from nnfmq.hal.capabilities import Capabilities, PerformanceInfo, with_performance
from nnfmq.hal.errors import DeadObject, GeneralFailure, InvalidArgument
from nnfmq.hal.types import (
    ExecutionPreference,
    ExtensionNameAndPrefix,
    Model,
    Operand,
    OperationType,
)
from nnfmq.planning.device_assignment import INTERPRETED, DeviceAssignment, PlanOptions
from nnfmq.planning.plan import MAIN

ADD, MUL, RELU, EXP, LESS = (
    OperationType.ADD,
    OperationType.MUL,
    OperationType.RELU,
    OperationType.EXP,
    OperationType.LESS,
)
IF, WHILE = OperationType.IF, OperationType.WHILE
LOW_POWER = ExecutionPreference.LOW_POWER


def chosen(model: Model, *devices: FakeDevice, subgraph: int = MAIN, **options: Any) -> tuple[int, ...]:
    return DeviceAssignment(model, devices, PlanOptions(**options)).of(subgraph)


@pytest.mark.parametrize("preference", list(ExecutionPreference))
def test_PART_1_the_best_figure_wins_power_for_LOW_POWER_and_else_time(preference: ExecutionPreference) -> None:
    fast = FakeDevice("acme-fast", capabilities=figures(0.2, 0.9))
    frugal = FakeDevice("acme-frugal", capabilities=figures(0.9, 0.2))

    assert chosen(chain(RELU), frugal, fast, cpu(), preference=preference) == (int(preference != LOW_POWER),)


@pytest.mark.parametrize(
    ("first", "second", "winner"),
    [(0.5, 0.5, 0), (0.5, 0.4, 1), (1.0, 1.0, 2), (1.0, 0.9, 1), (1.1, 2.0, 2), (0.9, 1.0, 0)],
)
def test_PART_1_a_tie_goes_to_the_CPU_and_otherwise_to_the_first(first: float, second: float, winner: int) -> None:
    devices = [FakeDevice(f"acme-{n}", capabilities=figures(time)) for n, time in enumerate((first, second))]

    assert chosen(chain(RELU), *devices, cpu()) == (winner,)


def test_PART_1_a_tie_goes_to_the_CPU_wherever_it_stands() -> None:
    assert chosen(chain(RELU), FakeDevice("acme-a", capabilities=figures(1.0)), cpu()) == (1,)
    assert chosen(chain(RELU), cpu(), FakeDevice("acme-a", capabilities=figures(1.0))) == (0,)


def test_PART_1_only_supporting_devices_count() -> None:
    fast = FakeDevice("acme-fast", only(RELU), capabilities=figures(0.1))

    assert chosen(chain(RELU, EXP, RELU), fast, cpu()) == (0, 1, 0)


def test_PART_1_the_type_of_the_first_input_decides() -> None:
    sketch = Sketch()
    x, indexes, axis = sketch.input(), sketch.input(Operand(I32, (4,))), sketch.constant(0)
    sketch.operation(OperationType.GATHER, [x, axis, indexes], sketch.output())
    sketch.operation(ADD, [indexes, indexes, axis], sketch.output(Operand(I32, (4,))))
    model = sketch.model()
    integers = FakeDevice("acme-int", capabilities=with_performance(figures(2.0), [I32], PerformanceInfo(0.1, 0.1)))

    assert chosen(model, integers, cpu()) == (1, 0)


def test_PART_1_a_type_without_figures_loses_to_every_figure() -> None:
    silent = FakeDevice("acme-silent", capabilities=Capabilities())
    slow = FakeDevice("acme-slow", capabilities=figures(1e30))

    assert chosen(chain(RELU), silent, slow) == (1,)
    assert chosen(chain(RELU), silent) == (0,)


@pytest.mark.parametrize(("is_relaxed", "winners"), [(False, (1, 1, 1)), (True, (0, 0, 1))])
def test_PART_1_relaxed_models_have_figures_of_their_own_for_float32(
    is_relaxed: bool, winners: tuple[int, ...]
) -> None:
    good, bad = PerformanceInfo(0.1, 0.1), PerformanceInfo(5.0, 5.0)
    capabilities = replace(
        figures(5.0), relaxed_float32_to_float16_scalar=good, relaxed_float32_to_float16_tensor=good,
        if_performance=bad, while_performance=bad,
    )  # fmt: skip
    device = FakeDevice("acme-half", capabilities=capabilities)
    sketch = Sketch()
    x, number, shape = sketch.input(), sketch.constant(1.0), sketch.constant((Operand(I32, (1,)), b"\4\0\0\0"))
    sketch.operation(RELU, [x], sketch.output())
    sketch.operation(OperationType(5 << 16 | 1), [number, x], sketch.output())  # its first input is a scalar
    sketch.operation(OperationType.FILL, [shape, number], sketch.output())
    model = sketch.model(extensions=(ExtensionNameAndPrefix("com.acme.half", 5),))

    found = chosen(replace(model, relax_computation_float32_to_float16=is_relaxed), device, cpu())

    assert found == winners


def test_PART_1_the_scalar_and_the_tensor_figure_of_relaxed_models_differ() -> None:
    good = PerformanceInfo(0.1, 0.1)
    device = FakeDevice("acme-half", capabilities=replace(figures(5.0), relaxed_float32_to_float16_scalar=good))
    model = replace(chain(RELU), relax_computation_float32_to_float16=True)

    assert chosen(model, device, cpu()) == (1,)


def test_PART_1_an_operation_without_inputs_has_no_figure() -> None:
    sketch = Sketch()
    x = sketch.input()
    sketch.operation(OperationType(5 << 16 | 1), [], sketch.output())
    sketch.operation(RELU, [x], sketch.output())
    model = sketch.model(extensions=(ExtensionNameAndPrefix("com.acme.half", 5),))

    assert chosen(model, FakeDevice("acme-a"), FakeDevice("acme-b", capabilities=figures(0.1))) == (0, 1)


# -- answers of devices ------------------------------------------------------------------------------------------------


class Broken(FakeDevice):
    """A device that fails, or answers for the wrong number of operations."""

    answer: Exception | list[bool] = GeneralFailure("out of order")

    def supported_operations(self, model: Model) -> Sequence[bool]:
        super().supported_operations(model)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "logged"),
    [
        (GeneralFailure("out of order"), "it failed: out of order"),
        (DeadObject("the driver died"), "it failed: the driver died"),
        ([True], "it replied for 1 operations of 2"),
        ([True] * 3, "it replied for 3 operations of 2"),
        ([], "it replied for 0 operations of 2"),
    ],
)
def test_PART_1_a_device_that_fails_or_miscounts_supports_nothing(
    answer: Exception | list[bool], logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    device = Broken("acme-broken", capabilities=figures(0.1))
    device.answer = answer

    with caplog.at_level(logging.WARNING, "nnfmq.plan"):
        assert chosen(chain(RELU, EXP), device, cpu()) == (1, 1)
    assert [record.getMessage() for record in caplog.records] == [
        f"device 'acme-broken' is not used: {'asked which operations it supports, ' * ('failed' in logged)}{logged}"
    ]


def test_a_mistake_of_the_program_is_not_taken_for_a_failing_device() -> None:
    device = Broken("acme-broken")
    device.answer = ZeroDivisionError()

    with pytest.raises(ZeroDivisionError):
        chosen(chain(RELU), device, cpu())


def test_PART_1_each_device_is_asked_once_for_each_subgraph() -> None:
    device, other = FakeDevice("acme-a", only(ADD)), cpu()

    choice = DeviceAssignment(branching(), [device, other], PlanOptions())
    for _ in range(2):
        assert [choice.of(subgraph) for subgraph in (0, 1, 2)] == [(INTERPRETED,), (0,), (1,)]

    assert [len(device.asked), len(other.asked)] == [3, 2]  # the runtime interprets IF, whatever the CPU device answers


def test_PART_1_the_message_names_operations_that_nobody_supports_and_who_was_asked() -> None:
    devices = FakeDevice("acme-a", only(RELU)), FakeDevice("acme-b", only(RELU), feature_level=1)

    with pytest.raises(InvalidArgument) as caught:
        chosen(chain(RELU, EXP, RELU, EXP), *devices)

    assert str(caught.value) == (
        "no device can execute operations 1 (EXP of TENSOR_FLOAT32), 3 (EXP of TENSOR_FLOAT32); asked: acme-a, acme-b"
    )


def test_PART_1_the_message_stays_short_for_a_large_model_and_a_large_operation() -> None:
    sketch = Sketch()
    parts = [sketch.input() for _ in range(7)]
    for _ in range(9):
        sketch.operation(
            OperationType.CONCATENATION, [*parts, sketch.constant(0)], sketch.output(replace(VECTOR, dimensions=(28,)))
        )

    with pytest.raises(InvalidArgument) as caught:
        chosen(sketch.model(), FakeDevice("acme-a", only(RELU)))

    message = str(caught.value)
    assert (
        "4 (CONCATENATION of TENSOR_FLOAT32, TENSOR_FLOAT32, TENSOR_FLOAT32, TENSOR_FLOAT32, TENSOR_FLOAT32, … 3 more)"
        in message
    )
    assert "5 (" not in message
    assert "… 4 more; asked: acme-a" in message


def test_PART_1_an_explicit_list_without_the_CPU_gets_a_remedy() -> None:
    with pytest.raises(InvalidArgument, match=r"Add nnapi-reference to the list of devices, or choose no devices$"):
        chosen(chain(EXP), FakeDevice("acme-a", only(RELU)), is_explicit=True)


@pytest.mark.parametrize("code", [OperationType(5 << 16 | 1), OperationType.OEM_OPERATION])
def test_PART_1_with_the_CPU_only_operations_of_vendors_have_no_device(code: OperationType) -> None:
    sketch = Sketch()
    sketch.operation(code, [sketch.input()], sketch.output())
    model = sketch.model(extensions=(ExtensionNameAndPrefix("com.acme.dsp", 5),))

    with pytest.raises(InvalidArgument, match="Operations of extensions need a device of their vendor"):
        chosen(model, cpu(supports=lambda _graph, operation: operation.type < 10_000), is_explicit=True)
    assert chosen(model, FakeDevice("acme-dsp", only(code)), cpu(supports=only(RELU))) == (0,)


def test_the_message_names_the_subgraph_of_an_operation() -> None:
    with pytest.raises(
        InvalidArgument, match=r"operation 0 \(MUL of .*\) of referenced subgraph 1; asked: acme-a, nnapi"
    ):
        chosen(branching(), FakeDevice("acme-a", only(ADD)), cpu(supports=only(ADD)))


# -- IF and WHILE ------------------------------------------------------------------------------------------------------


def with_control_flow(capabilities: Capabilities, figure: float) -> Capabilities:
    info = PerformanceInfo(figure, figure)
    return replace(capabilities, if_performance=info, while_performance=info)


@pytest.mark.parametrize(
    ("own", "inner", "winner"),
    [(0.5, 1.4, 0), (0.5, 1.5, INTERPRETED), (0.5, 1.6, INTERPRETED), (1.9, 0.05, 0), (2.0, 0.0, INTERPRETED)],
)
def test_PART_1_the_figure_of_IF_is_its_own_and_the_mean_of_its_branches(own: float, inner: float, winner: int) -> None:
    """The CPU's figure is 1 + (1 + 1) / 2 = 2. Something else has to take a branch, or the CPU would take it all."""
    device = FakeDevice("acme-a", capabilities=with_control_flow(figures(inner), own))
    helper = FakeDevice("acme-b", only(ADD), capabilities=figures(0.0))

    assert chosen(branching(), device, cpu(), helper) == (winner,)


@pytest.mark.parametrize(("own", "inner", "winner"), [(0.9, 1.0, 0), (1.0, 1.0, INTERPRETED), (2.0, 0.6, 0)])
def test_PART_1_the_figure_of_WHILE_is_its_own_with_condition_and_body(own: float, inner: float, winner: int) -> None:
    """The CPU's figure is 1 + 1 for the condition + 2 for the body = 4: with `own` 1 and `inner` 1 it is a tie."""
    device = FakeDevice("acme-a", capabilities=with_control_flow(figures(inner), own))
    helper = FakeDevice("acme-b", only(ADD), capabilities=figures(0.0))

    assert chosen(counting(), device, cpu(), helper) == (winner,)


def test_PART_4_an_IF_goes_only_to_a_device_that_supports_all_of_its_branches() -> None:
    """Though a driver claims an IF that calls a MUL that it does not support."""

    class Boasting(FakeDevice):
        def supported_operations(self, model: Model) -> list[bool]:
            return [self.supports(model.main, operation) for operation in model.main.operations]

    device = Boasting("acme-a", only(IF, ADD))

    assert chosen(branching(), device, cpu()) == (INTERPRETED,)
    assert chosen(branching(), Boasting("acme-a", only(IF, ADD, MUL)), cpu()) == (0,)


def test_PART_4_the_same_holds_for_what_is_nested_in_it() -> None:
    class Boasting(FakeDevice):
        def supported_operations(self, model: Model) -> list[bool]:
            return [self.supports(model.main, operation) for operation in model.main.operations]

    assert chosen(nested(2, MUL, ADD), Boasting("acme-a", only(IF, ADD)), cpu()) == (INTERPRETED,)
    assert chosen(nested(2, MUL, ADD), Boasting("acme-a", only(IF, ADD, MUL)), cpu()) == (0,)


def test_PART_4_an_IF_stays_whole_if_the_CPU_takes_everything_in_it() -> None:
    assert chosen(branching(), cpu()) == (0,)
    assert chosen(branching(), FakeDevice("acme-a", only(RELU)), cpu()) == (1,)


def test_PART_4_an_IF_that_the_CPU_device_does_not_take_is_interpreted_though_it_takes_all_branches() -> None:
    assert chosen(branching(), cpu(supports=only(ADD, MUL))) == (INTERPRETED,)


def test_PART_4_without_the_CPU_nobody_interprets() -> None:
    with pytest.raises(InvalidArgument, match=r"operation 0 \(IF of"):
        chosen(branching(), FakeDevice("acme-a", only(ADD, MUL)), is_explicit=True)


@pytest.mark.parametrize("index", [3, 4, 5])
def test_PART_4_control_flow_with_an_operand_of_unknown_size_is_interpreted(index: int) -> None:
    model = with_operand(branching(), index, dimensions=(0,))

    assert chosen(model, FakeDevice("acme-a"), cpu()) == (INTERPRETED,)
    assert chosen(model, cpu()) == (INTERPRETED,)  # no driver accepts such a model
    with pytest.raises(InvalidArgument, match=r"operation 0 \(IF of"):
        chosen(model, FakeDevice("acme-a"), is_explicit=True)


@pytest.mark.parametrize("subgraph", [0, 1])
@pytest.mark.parametrize("index", [0, 3])
def test_PART_4_so_is_one_whose_subgraph_has_an_input_or_output_of_unknown_size(subgraph: int, index: int) -> None:
    model = branching()
    referenced = list(model.referenced)
    referenced[subgraph] = with_operand(Model(referenced[subgraph]), index, dimensions=(0,)).main

    assert chosen(replace(model, referenced=tuple(referenced)), FakeDevice("acme-a"), cpu()) == (INTERPRETED,)


# -- forced partitions -------------------------------------------------------------------------------------------------


def test_choose_replaces_the_comparison_and_sees_the_devices_that_can() -> None:
    seen: list[tuple[int, int, list[int]]] = []

    def worst(subgraph: int, operation: int, candidates: Sequence[int]) -> int:
        seen.append((subgraph, operation, list(candidates)))
        return candidates[-1]

    devices = FakeDevice("acme-a"), FakeDevice("acme-b", only(RELU)), cpu()

    assert chosen(chain(RELU, EXP), *devices, choose=worst) == (2, 2)
    assert seen == [(0, 0, [0, 1, 2]), (0, 1, [0, 2])]


def test_choose_must_name_a_device_that_can() -> None:
    with pytest.raises(InvalidArgument, match=r"operation 0 was forced to device 1; those that can: \[0, 2\]"):
        chosen(chain(EXP), FakeDevice("acme-a"), FakeDevice("acme-b", only(RELU)), cpu(), choose=lambda *_: 1)


def test_a_model_that_is_nested_too_deep_is_rejected() -> None:
    assert chosen(nested(64), FakeDevice("acme-a", only(ADD)), cpu()) == (INTERPRETED,)
    with pytest.raises(InvalidArgument, match="nested 65 deep; at most 64 are possible"):
        chosen(nested(65), FakeDevice("acme-a", only(ADD)), cpu())
