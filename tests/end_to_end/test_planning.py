"""Plans for the devices of real drivers: what they are asked, and the steps as models that they prepare and execute."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytest
from support.control_flow_models import branching, counting
from support.drivers import LIMIT_S, Daemon, Process
from support.planned import Array, run_plan
from support.sketches import VECTOR, Sketch, chain

import nnfmq
from nnfmq.hal.capabilities import Capabilities
from nnfmq.hal.feature_levels import FeatureLevel, interface_name
from nnfmq.hal.types import ExecutionPreference, Model, Operand, OperandType, OperationType
from nnfmq.planning.partitioning import PlanOptions, make_plan
from nnfmq.planning.plan import ExecutionPlan, ExecutionStep, GotoStep, IfStep, WhileStep

ADD, EXP, FLOOR, HARD_SWISH, LOGISTIC, RELU = (
    OperationType.ADD,
    OperationType.EXP,
    OperationType.FLOOR,
    OperationType.HARD_SWISH,
    OperationType.LOGISTIC,
    OperationType.RELU,
)
BYTES = Operand(OperandType.TENSOR_QUANT8_ASYMM, (4,), 1 / 256)
VALUES = np.array([-1.5, 0, 0.5, 2.5], np.float32)


@dataclass
class DriverDevice:
    """A device of a driver, as planning sees it."""

    device: nnfmq.Device
    feature_level: FeatureLevel
    is_cpu: bool = False

    @property
    def name(self) -> str:
        return self.device.info.name

    @property
    def version_string(self) -> str:
        return self.device.info.version

    @cached_property
    def capabilities(self) -> Capabilities:
        return self.device.capabilities()

    def supported_operations(self, model: Model) -> Sequence[bool]:
        return self.device.supported_operations(model)


def devices_of(
    client: nnfmq.Client, *names: str, level: FeatureLevel = FeatureLevel.AIDL_V4, cpu: bool = True
) -> list[DriverDevice]:
    """Return devices of a driver; its `reference` is the CPU device."""
    found = [DriverDevice(client.device(name), level) for name in names]
    return [*found, DriverDevice(client.device("reference"), level, is_cpu=True)] if cpu else found


def run_on_devices(plan: ExecutionPlan, devices: Sequence[DriverDevice], *inputs: Array) -> list[Array]:
    """Return the outputs: each step is prepared and executed on its device."""

    def run_step(step: ExecutionStep, arrays: Sequence[Array | None]) -> Sequence[Array]:
        given = [array for array in arrays if array is not None]
        with devices[step.device].device.prepare(step.model) as prepared:
            return [array.copy() for array in prepared.execute(*given)]

    return run_plan(plan, inputs, run_step)


def quantizing() -> Model:
    """Return LOGISTIC(QUANTIZE(x + x)) as DEQUANTIZE: operations 0 to 3 of float, float, uint8, uint8."""
    sketch = Sketch()
    x, none = sketch.input(), sketch.constant(0)
    total, small, squashed = sketch.temporary(), sketch.temporary(BYTES), sketch.temporary(BYTES)
    sketch.operation(ADD, [x, x, none], total)
    sketch.operation(OperationType.QUANTIZE, [total], small)
    sketch.operation(LOGISTIC, [small], squashed)
    sketch.operation(OperationType.DEQUANTIZE, [squashed], sketch.output())
    return sketch.model()


@pytest.mark.parametrize(
    ("preference", "chosen"),
    [
        (ExecutionPreference.FAST_SINGLE_ANSWER, ["sample-minimal", "sample-float_fast", "reference", "reference"]),
        (ExecutionPreference.LOW_POWER, ["sample-minimal", "sample-float_slow", "reference", "reference"]),
    ],
)
def test_PART_1_and_PART_3_devices_of_a_driver_share_a_model_by_their_capabilities(
    client: nnfmq.Client, preference: ExecutionPreference, chosen: list[str]
) -> None:
    """The figures are those of docs/how-to/devices.md: sample-quant ties with the CPU for power, and is slower."""
    devices = devices_of(client, "sample-float_fast", "sample-float_slow", "sample-quant", "sample-minimal")

    plan = make_plan(quantizing(), devices, PlanOptions(preference))

    assert [plan.devices[step.device] for step in plan.execution_steps for _ in step.operations] == chosen
    found = run_on_devices(plan, devices, VALUES)[0]
    with client.device("reference").prepare(quantizing()) as whole:
        np.testing.assert_array_equal(found, whole.execute(VALUES)[0])


def test_PART_3_a_device_that_takes_everything_prepares_the_model_itself(client: nnfmq.Client) -> None:
    devices = devices_of(client, "sample-float_fast")

    plan = make_plan(chain(RELU, FLOOR), devices)

    assert plan.is_simple
    np.testing.assert_array_equal(run_on_devices(plan, devices, VALUES)[0], [0, 0, 0, 2])


@pytest.mark.parametrize(("level", "operations"), [(1, (0, 3)), (3, (0, 1, 3)), (4, (0, 1, 2, 3))])
def test_PART_2_a_driver_with_an_older_interface_is_asked_about_a_slice(
    level: int, operations: tuple[int, ...], daemon: Daemon, client: nnfmq.Client, resources: ExitStack
) -> None:
    """Asked about the whole model, the driver would reject it."""
    name = interface_name(FeatureLevel(level))
    old = resources.enter_context(nnfmq.connect(daemon.path, timeout=LIMIT_S, interface=name))
    model = chain(RELU, EXP, HARD_SWISH, FLOOR)
    devices = [*devices_of(old, "sample-float_fast", level=FeatureLevel(level), cpu=False), *devices_of(client)]

    plan = make_plan(model, devices)

    on_it = [operation for step in plan.execution_steps if step.device == 0 for operation in step.operations]
    assert tuple(on_it) == operations
    if level < FeatureLevel.V1_3:
        with pytest.raises(nnfmq.InvalidArgument, match="N-VAL-21"):
            devices[0].supported_operations(model)
    with client.device("reference").prepare(model) as whole:
        np.testing.assert_array_equal(run_on_devices(plan, devices, VALUES)[0], whole.execute(VALUES)[0])


def test_PART_4_a_driver_takes_no_IF_whose_branches_it_does_not_support(client: nnfmq.Client) -> None:
    devices = devices_of(client, "sample-minimal")
    condition, x, y = np.array([True]), np.float32([1, 2]), np.float32([10, 20])

    plan = make_plan(branching(), devices)

    assert [type(step) for step in plan.steps] == [IfStep, ExecutionStep, GotoStep, ExecutionStep, GotoStep]
    assert [plan.devices[step.device] for step in plan.execution_steps] == ["sample-minimal", "reference"]
    np.testing.assert_array_equal(run_on_devices(plan, devices, condition, x, y)[0], x + y)
    np.testing.assert_array_equal(run_on_devices(plan, devices, ~condition, x, y)[0], x * y)


def test_PART_4_steps_of_a_loop_are_executed_in_turn_by_two_devices(client: nnfmq.Client) -> None:
    devices = devices_of(client, "sample-minimal")
    start, x = np.float32([1, 2]), np.float32([10, 20])

    plan = make_plan(counting(), devices)

    assert isinstance(plan.steps[0], WhileStep)
    assert {plan.devices[step.device] for step in plan.execution_steps} == {"sample-minimal", "reference"}
    np.testing.assert_array_equal(run_on_devices(plan, devices, start, np.int32([3]), x)[0], start + 3 * x)


def test_PART_1_a_device_whose_driver_was_killed_supports_nothing(client: nnfmq.Client, resources: ExitStack) -> None:
    dead = resources.enter_context(nnfmq.connect(embedded=True, wait_ready=True, recover=False))
    devices = [*devices_of(dead, "sample-float_fast", cpu=False), *devices_of(client)]
    assert devices[0].capabilities  # read while the driver lives, as the runtime does once
    with Process(dead.driver_pid) as driver:
        driver.kill()

        plan = make_plan(chain(RELU, EXP), devices)

    assert plan.is_simple
    assert plan.devices[plan.execution_steps[0].device] == "reference"


def test_PART_5_a_step_carries_the_constants_that_it_uses_to_its_driver(client: nnfmq.Client) -> None:
    sketch = Sketch()
    x, none, between = sketch.input(), sketch.constant(0), sketch.temporary()
    ones, twos = (sketch.constant((VECTOR, np.full(4, value, np.float32).tobytes())) for value in (1, 2))
    sketch.operation(ADD, [x, ones, none], between)
    sketch.operation(OperationType.MUL, [between, twos, none], sketch.output())
    devices = devices_of(client, "sample-minimal")

    plan = make_plan(sketch.model(), devices)

    assert [step.operations for step in plan.execution_steps] == [(0,), (1,)]
    np.testing.assert_array_equal(run_on_devices(plan, devices, VALUES)[0], (VALUES + 1) * 2)
