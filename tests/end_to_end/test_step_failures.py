"""A step of a plan fails: on its device, on the CPU as well, for lack of memory, or because a loop does not end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.control_flow_models import counting
from support.drivers import LIMIT_S
from support.partitioned import LYING, MODES, STATUSES, Runtime, device_failing_with, error_of
from support.plans import control_flow_plan, linear_plan
from support.small_models import F32, nothing_left_model, two_adds, with_operand

import nnfmq
from nnfmq.hal.types import (
    DataLocation,
    LifeTime,
    Model,
    Operand,
    Operation,
    OperationType,
    OutputShape,
    Request,
    RequestArgument,
)

A = np.array([[1, 2], [3, 4]], np.float32)
B = np.array([[10, 20], [30, 40]], np.float32)
EXPECTED = (A + 2 * B).tolist()
FAILING = device_failing_with("GENERAL_FAILURE")
RECOVERABLE = [status for status in STATUSES if status != "INVALID_ARGUMENT"]


def warnings_of(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("devices", [(FAILING, "reference"), ("reference", FAILING), (FAILING, FAILING)])
def test_PART_6_a_step_that_fails_on_its_device_is_executed_on_the_CPU(
    runtime: Runtime, mode: str, devices: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    model = runtime.prepare(linear_plan(two_adds(), [0], [1]), devices=devices)
    for _ in range(2):
        assert MODES[mode](model, A, B)[0].tolist() == EXPECTED
    wanted = "the whole model" if "fenced" in mode else f"step {devices.index(FAILING)} failed on {FAILING}"
    assert wanted in warnings_of(caplog)
    assert "as it is told" in warnings_of(caplog)


@pytest.mark.parametrize("status", RECOVERABLE)
def test_PART_6_each_failure_of_a_device_has_the_fallback(runtime: Runtime, status: str) -> None:
    model = runtime.prepare(linear_plan(two_adds(), [0], [1]), devices=("reference", device_failing_with(status)))
    assert model.execute(A, B)[0].tolist() == EXPECTED


@pytest.mark.parametrize("mode", MODES)
def test_PART_6_the_whole_model_is_executed_on_the_CPU_if_the_step_fails_there_too(
    runtime: Runtime, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan = linear_plan(two_adds(), [0], [1])
    model = runtime.prepare(plan, devices=("reference", FAILING), cpu=(FAILING, "reference"))
    a = A.copy()
    if "fenced" in mode:  # its first fallback is that of the whole model
        model = runtime.prepare(plan, devices=("reference", FAILING))
    assert MODES[mode](model, a, B)[0].tolist() == EXPECTED
    assert "executing the whole model on the CPU" in warnings_of(caplog)
    assert a.tolist() == A.tolist()


@pytest.mark.parametrize("mode", MODES)
def test_PART_6_the_error_of_the_whole_model_on_the_CPU_is_the_result(runtime: Runtime, mode: str) -> None:
    last = device_failing_with("RESOURCE_EXHAUSTED_PERSISTENT")
    model = runtime.prepare(linear_plan(two_adds(), [0], [1]), devices=("reference", FAILING), cpu=(FAILING, last))
    if "fenced" in mode:
        model = runtime.prepare(linear_plan(two_adds(), [0], [1]), devices=("reference", FAILING), cpu=(last,))
    with pytest.raises(nnfmq.ResourceExhaustedPersistent, match="as it is told"):
        MODES[mode](model, A, B)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("status", STATUSES)
def test_PART_6_without_a_fallback_the_first_failure_is_the_result(runtime: Runtime, status: str, mode: str) -> None:
    devices = ("reference", device_failing_with(status))
    model = runtime.prepare(linear_plan(two_adds(), [0], [1]), devices=devices, cpu=None)
    error = error_of(lambda: MODES[mode](model, A, B))
    wanted = "GENERAL_FAILURE" if "fenced" in mode and status == "INVALID_ARGUMENT" else status
    assert error.status.name == wanted


@pytest.mark.parametrize("mode", [mode for mode in MODES if "fenced" not in mode])
def test_PART_6_an_invalid_argument_has_no_fallback(runtime: Runtime, mode: str) -> None:
    devices = ("reference", device_failing_with("INVALID_ARGUMENT"))
    model = runtime.prepare(linear_plan(two_adds(), [0], [1]), devices=devices)
    with pytest.raises(nnfmq.InvalidArgument, match="as it is told"):
        MODES[mode](model, A, B)


@pytest.mark.parametrize("mode", MODES)
def test_PART_6_a_step_of_a_loop_that_fails_is_executed_on_the_CPU_in_each_round(runtime: Runtime, mode: str) -> None:
    model = runtime.prepare(control_flow_plan(counting()), devices=("reference", FAILING))
    total, x, rounds = np.array([1, 2], np.float32), np.array([10, 20], np.float32), np.array([3], np.int32)
    assert MODES[mode](model, total, rounds, x)[0].tolist() == [31, 62]


@pytest.mark.parametrize("mode", MODES)
def test_PART_6_the_whole_model_can_follow_a_loop_that_has_begun(runtime: Runtime, mode: str) -> None:
    """The second operation of the body fails on its device and on the CPU, after the first one has been executed."""
    model = runtime.prepare(control_flow_plan(counting()), devices=("reference", FAILING), cpu=(FAILING, "reference"))
    total, x, rounds = np.array([1, 2], np.float32), np.array([10, 20], np.float32), np.array([3], np.int32)
    for _ in range(2):
        assert MODES[mode](model, total, rounds, x)[0].tolist() == [31, 62]
    assert total.tolist() == [1, 2]


@pytest.mark.parametrize("mode", MODES)
def test_PART_6_a_step_that_fails_on_the_CPU_device_makes_the_whole_model_run_there(
    runtime: Runtime, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The plan itself has chosen the CPU device for the second step: the same step is not tried there again."""
    plan = linear_plan(two_adds(), [0], [1], devices=("first", "nnapi-reference"))
    model = runtime.prepare(plan, devices=("reference", FAILING))
    assert MODES[mode](model, A, B)[0].tolist() == EXPECTED
    assert "step 1 failed" not in warnings_of(caplog)
    assert "executing the whole model on the CPU" in warnings_of(caplog)


@pytest.mark.parametrize("mode", [mode for mode in MODES if "fenced" not in mode])  # it has no shapes to report
def test_PART_12_VAL_7_results_that_break_the_rules_are_a_failure_of_the_step(
    runtime: Runtime, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan = linear_plan(two_adds(), [0], [1])
    model = runtime.prepare(plan, devices=(LYING, "reference"))
    assert MODES[mode](model, A, B)[0].tolist() == EXPECTED
    assert "step 0 failed on test-lying" in warnings_of(caplog)
    with pytest.raises(nnfmq.ProtocolError, match="reports the shape 7x7x7") as caught:
        MODES[mode](runtime.prepare(plan, devices=(LYING, "reference"), cpu=None), A, B)
    assert caught.value.status is nnfmq.ErrorStatus.GENERAL_FAILURE


LIMITED: dict[str, Callable[..., Any]] = {
    "synchronous": lambda model, *inputs: model.execute(*inputs, loop_timeout=0.05),
    "asynchronous": lambda model, *inputs: model.execute_async(*inputs, loop_timeout=0.05).result(LIMIT_S),
    "fenced": lambda model, *inputs: closing(model.execute_fenced(*inputs, loop_timeout=0.05), "result"),
    "reusable": lambda model, *inputs: closing(model.create_reusable_execution(loop_timeout=0.05), "compute", *inputs),
    "once": lambda model, *inputs: closing(model.create_execution(loop_timeout=0.05), "compute", *inputs),
    "burst": lambda model, *inputs: closing(model.burst(), "execute", *inputs),  # with the default of 2 s
}


def closing(made: Any, method: str, *arguments: Any) -> Any:
    with made:
        return getattr(made, method)(*arguments)


@pytest.mark.parametrize("mode", LIMITED)
def test_PART_4_a_loop_that_exceeds_its_time_has_no_fallback(
    runtime: Runtime, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = runtime.prepare(control_flow_plan(counting()))
    arrays = np.array([1, 2], np.float32), np.array([2**31 - 1], np.int32), np.array([10, 20], np.float32)
    with pytest.raises(nnfmq.MissedDeadlineTransient, match="a loop was still running after"):
        LIMITED[mode](model, *arrays)
    assert warnings_of(caplog) == ""


def unsized(model: Model) -> Model:
    """Return the model of two ADDs with a temporary of unknown extents."""
    return with_operand(model, 3, dimensions=(0, 0))


def large_adds(side: int = 64) -> Model:
    """Return ADD(ADD(x, y), y) of `side` * `side` floats, which are 16 KiB by default."""
    model = two_adds()
    for index in (0, 1, 3, 4):
        model = with_operand(model, index, dimensions=(side, side))
    return model


@pytest.mark.parametrize("devices", [("reference", "reference"), (FAILING, FAILING)])
@pytest.mark.parametrize("mode", MODES)
def test_PART_9_SHP_6_a_temporary_of_unknown_size_grows_and_its_step_is_repeated(
    runtime: Runtime, mode: str, devices: tuple[str, str]
) -> None:
    model = runtime.prepare(linear_plan(unsized(large_adds()), [0], [1]), devices=devices)
    x, y = np.arange(64 * 64, dtype=np.float32).reshape(64, 64), np.full((64, 64), 3, np.float32)
    for _ in range(2):
        assert MODES[mode](model, x, y)[0].tolist() == (x + 6).tolist()


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_SHP_6_an_output_of_unknown_size_grows_with_the_temporary_before_it(runtime: Runtime, mode: str) -> None:
    hal_model = unsized(large_adds())
    for index in (0, 1, 4):
        hal_model = with_operand(hal_model, index, dimensions=(0, 0))
    model = runtime.prepare(linear_plan(hal_model, [0], [1]))
    for shape in ((2, 3), (70, 50), (1, 1)):
        x, y = np.full(shape, 2, np.float32), np.full(shape, 3, np.float32)
        (result,) = MODES[mode](model, x, y)
        assert result.tolist() == (x + 2 * y).tolist()


def with_pools(inputs: np.ndarray, output_bytes: int, stack: ExitStack) -> Request:
    """Return a request whose inputs are in one memory, one after the other, and whose output has so many bytes."""
    source = stack.enter_context(nnfmq.Memory.create(inputs.nbytes))
    source.view[:] = inputs.tobytes()
    sink = stack.enter_context(nnfmq.Memory.create(max(output_bytes, 1)))
    each = inputs.nbytes // 2
    places = [RequestArgument(location=DataLocation(0, i * each, each)) for i in range(2)]
    output = RequestArgument(location=DataLocation(1, 0, output_bytes))
    return Request(tuple(places), (output,), (source, sink))


REQUESTS: dict[str, Callable[..., Any]] = {
    "synchronous": lambda model, request: model.execute_request(request),
    "asynchronous": lambda model, request: model.execute_request_async(request).result(LIMIT_S),
    "burst": lambda model, request: closing(model.burst(), "execute_request", request),
}


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_PART_9_an_output_of_the_application_that_is_too_small_is_reported_with_the_shapes(
    runtime: Runtime, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    hal_model = with_operand(unsized(large_adds()), 4, dimensions=(0, 0))
    model = runtime.prepare(linear_plan(hal_model, [0], [1]))
    inputs = np.stack([np.full((64, 64), 2, np.float32), np.full((64, 64), 3, np.float32)])
    with ExitStack() as stack:
        request = with_pools(inputs, 100, stack)
        with pytest.raises(nnfmq.OutputInsufficientSize) as caught:
            REQUESTS[mode](model, request)
        assert caught.value.output_shapes == (OutputShape((64, 64), False),)
        assert warnings_of(caplog) == ""
        request = with_pools(inputs, 64 * 64 * 4, stack)
        assert REQUESTS[mode](model, request).shapes == (OutputShape((64, 64)),)
        (_, sink) = request.pools
        assert set(np.frombuffer(sink.view, np.float32)) == {8.0}


@pytest.mark.parametrize("mode", REQUESTS)
@pytest.mark.parametrize("devices", [("reference", "reference"), ("reference", FAILING)])
def test_PART_5_a_HAL_request_is_executed_in_steps(runtime: Runtime, mode: str, devices: tuple[str, str]) -> None:
    hal_model = two_adds()
    model = runtime.prepare(linear_plan(hal_model, [0], [1]), devices=devices)
    with ExitStack() as stack:
        request = with_pools(np.stack([A, B]), 16, stack)
        assert REQUESTS[mode](model, request).shapes == ()
        source, sink = request.pools
        assert np.frombuffer(sink.view, np.float32).tolist() == (A + 2 * B).ravel().tolist()
        assert bytes(source.view) == np.stack([A, B]).tobytes()


def test_PART_11_a_fenced_HAL_request_is_executed_in_steps(runtime: Runtime) -> None:
    hal_model = two_adds()
    model = runtime.prepare(linear_plan(hal_model, [0], [1]))
    with ExitStack() as stack:
        request = with_pools(np.stack([A, B]), 16, stack)
        execution = stack.enter_context(model.execute_request_fenced(request))
        assert execution.result(LIMIT_S).fenced.time_in_driver_ns == -1
        assert np.frombuffer(request.pools[1].view, np.float32).tolist() == (A + 2 * B).ravel().tolist()


def boxes_then_relu() -> Model:
    """Return RELU of the scores that BOX_WITH_NMS_LIMIT leaves over: none at all for small scores."""
    model = nothing_left_model()
    operands = list(model.main.operands)
    operands[9] = replace(operands[9], lifetime=LifeTime.TEMPORARY_VARIABLE)
    operands.append(Operand(F32, (0,), lifetime=LifeTime.SUBGRAPH_OUTPUT))
    operations = (*model.main.operations, Operation(OperationType.RELU, (9,), (len(operands) - 1,)))
    outputs = tuple(i for i, operand in enumerate(operands) if operand.lifetime is LifeTime.SUBGRAPH_OUTPUT)
    main = replace(model.main, operands=tuple(operands), operations=operations, output_indexes=outputs)
    return replace(model, main=main)


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_PART_6_a_result_without_elements_that_a_step_needs_makes_the_whole_model_run_on_the_CPU(
    runtime: Runtime, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan = linear_plan(boxes_then_relu(), [0], [1])
    boxes, splits = np.zeros((2, 8), np.float32), np.zeros((2,), np.int32)
    model = runtime.prepare(plan)
    MODES[mode](model, np.full((2, 2), 0.95, np.float32), boxes, splits)
    assert warnings_of(caplog) == ""
    results = MODES[mode](model, np.full((2, 2), 0.1, np.float32), boxes, splits)
    assert [result.size for result in results] == [0] * 4
    assert "has no elements" in warnings_of(caplog)
    with pytest.raises(nnfmq.GeneralFailure, match="has no elements"):
        MODES[mode](runtime.prepare(plan, cpu=None), np.full((2, 2), 0.1, np.float32), boxes, splits)
