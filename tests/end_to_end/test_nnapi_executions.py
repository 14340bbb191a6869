"""NNAPI's execution through a driver process: its arguments, states and results, in each of its modes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from support.control_flow_models import counting
from support.drivers import LIMIT_S, Daemon, InThread, Process, running_daemon, until
from support.hints import with_extension
from support.models import add_model, gather_model, unsized_relu_model
from support.nnapi_objects import (
    MODES,
    ONE,
    SUM,
    TEN,
    UNFENCED,
    Mode,
    adding,
    burst_compute,
    compute,
    finished,
    floats,
    start_compute,
    start_compute_with_dependencies,
)
from support.small_models import F32, I32, one_operation

import nnfmq
from nnfmq.base.fence import sync_wait
from nnfmq.base.memory import Memory
from nnfmq.client.connection.device import Device
from nnfmq.hal.types import FenceState, Operand, OperandType, OperationType
from nnfmq.nnapi import (
    BurstBuilder,
    CompilationBuilder,
    DurationCode,
    ExecutionBuilder,
    get_default_loop_timeout,
    get_maximum_loop_timeout,
)
from nnfmq.nnapi.arguments import RequestSender

EXTENSION = "com.example.hints"
BYTES = 16


@pytest.fixture
def device(client: nnfmq.Client) -> Device:
    """Return a device that supports an extension for hints."""
    return with_extension(client.device("reference"), EXTENSION)


@pytest.fixture
def execution(resources: ExitStack, compilation: CompilationBuilder) -> ExecutionBuilder:
    return resources.enter_context(ExecutionBuilder(compilation))


def memory_of(stack: ExitStack, values: list[int], size_bytes: int = 4096) -> Memory:
    """Return shared memory that begins with these floats."""
    memory = stack.enter_context(Memory.create(size_bytes))
    memory.view[: 4 * len(values)] = floats(values).tobytes()
    return memory


def content(memory: Memory, offset: int = 0) -> list[float]:
    found: list[float] = np.frombuffer(memory.view, np.float32, 4, offset).tolist()
    return found


# ---------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("mode", MODES)
def test_API_6_API_7_arguments_in_arrays_are_computed_in_each_mode(
    resources: ExitStack, compilation: CompilationBuilder, mode: Mode
) -> None:
    execution, found = adding(resources, compilation)
    mode(execution, compilation)
    assert found.tolist() == SUM


@pytest.mark.parametrize("mode", MODES)
def test_API_6_API_7_arguments_in_one_memory_are_computed_in_each_mode(
    resources: ExitStack, compilation: CompilationBuilder, execution: ExecutionBuilder, mode: Mode
) -> None:
    memory = memory_of(resources, [*ONE, *TEN])
    execution.set_input_from_memory(0, memory, 0, BYTES)
    execution.set_input_from_memory(1, memory, BYTES, BYTES)
    execution.set_output_from_memory(0, memory, 1024, BYTES)
    mode(execution, compilation)
    assert content(memory, 1024) == SUM
    assert content(memory) == ONE


def test_API_6_bytes_are_arguments_as_well(execution: ExecutionBuilder) -> None:
    found = bytearray(BYTES)
    execution.set_input(0, floats(ONE).tobytes())
    execution.set_input(1, memoryview(floats(TEN)))
    execution.set_output(0, found)
    execution.compute()
    assert np.frombuffer(found, np.float32).tolist() == SUM


def test_API_6_none_omits_an_optional_argument(resources: ExitStack, device: Device) -> None:
    tensor = Operand(F32, (4,))
    model = one_operation(OperationType.ADD, [tensor, tensor, 0], tensor)
    with ExecutionBuilder(finished(resources, model, device)) as execution:
        execution.set_input(0, None)
        execution.set_input(1, floats(ONE))
        execution.set_output(0, floats([0] * 4))
        with pytest.raises(nnfmq.NnfmqError) as raised:  # ADD needs both, and only the driver knows that
            execution.compute()
    assert "N-RQX" not in str(raised.value)


@pytest.mark.parametrize("mode", UNFENCED)
def test_API_6_dimensions_complete_those_of_the_model(resources: ExitStack, device: Device, mode: Mode) -> None:
    model = one_operation(OperationType.RELU, [Operand(F32, (0, 2))], Operand(F32, (0, 2)))
    compilation = finished(resources, model, device)
    with ExecutionBuilder(compilation) as execution:
        found = floats([9] * 6)
        execution.set_input(0, floats([-1, 2, -3, 4]), (2, 2))
        execution.set_output(0, found)
        mode(execution, compilation)
        assert execution.get_output_operand_dimensions(0) == (2, 2)
    assert found.tolist() == [0, 2, 0, 4, 9, 9]  # nothing is written behind the data


BAD_INPUTS: dict[str, Callable[[ExecutionBuilder], None]] = {
    "index 999": lambda e: e.set_input(999, floats(ONE)),
    "index -1": lambda e: e.set_input(-1, floats(ONE)),
    "output 999": lambda e: e.set_output(999, floats(ONE)),
    "output -1": lambda e: e.set_output(-1, floats(ONE)),
    "too short": lambda e: e.set_input(0, floats(ONE)[:3]),
    "too long": lambda e: e.set_input(0, floats([*ONE, 5])),
    "output too long": lambda e: e.set_output(0, floats([*ONE, 5])),
    "empty": lambda e: e.set_input(0, floats([])),
    "other type": lambda e: e.set_input(0, np.array(ONE, np.int32)),
    "no buffer": lambda e: e.set_input(0, 3),  # type: ignore[arg-type]
    "not contiguous": lambda e: e.set_input(0, floats([*ONE, *ONE])[::2]),
    "read-only output": lambda e: e.set_output(0, bytes(BYTES)),
    "other rank": lambda e: e.set_input(0, floats(ONE), (2, 2)),
    "other extent": lambda e: e.set_input(0, floats(ONE), (5,)),
    "negative extent": lambda e: e.set_input(0, floats(ONE), (-4,)),
    "an extent of 33 bits": lambda e: e.set_input(0, floats(ONE), (1 << 32,)),
}


@pytest.mark.parametrize("call", BAD_INPUTS.values(), ids=BAD_INPUTS)
def test_N_API_19_invalid_arguments_are_rejected_and_leave_them_unset(
    execution: ExecutionBuilder, call: Callable[[ExecutionBuilder], None]
) -> None:
    with pytest.raises(nnfmq.InvalidArgument) as raised:
        call(execution)
    assert not isinstance(raised.value, nnfmq.BadState)
    execution.set_input(0, floats(ONE))
    execution.set_input(1, floats(TEN))
    execution.set_output(0, floats(ONE))
    execution.compute()


def test_N_API_19_extents_whose_product_overflows_are_rejected(resources: ExitStack, device: Device) -> None:
    model = one_operation(OperationType.RELU, [Operand(F32, (0, 0))], Operand(F32, (0, 0)))
    with ExecutionBuilder(finished(resources, model, device)) as execution:
        with pytest.raises(nnfmq.InvalidArgument, match="more than"):
            execution.set_input(0, floats(ONE), (1 << 16, 1 << 16))
        with pytest.raises(nnfmq.InvalidArgument, match="more than"):
            execution.set_output(0, floats(ONE), (1 << 16, 1 << 16))
        with pytest.raises(nnfmq.InvalidArgument, match="pass its `dimensions`"):
            execution.set_input(0, floats(ONE))


def test_N_API_19_a_scalar_has_no_dimensions(resources: ExitStack, device: Device) -> None:
    tensor = Operand(F32, (4,))
    model = one_operation(OperationType.ADD, [tensor, tensor, Operand(OperandType.INT32)], tensor)
    with ExecutionBuilder(finished(resources, model, device)) as execution:
        with pytest.raises(nnfmq.InvalidArgument, match="a scalar has none"):
            execution.set_input(2, np.array(0, np.int32), (1,))
        execution.set_input(2, np.array(0, np.int32))
        execution.set_input(0, floats(ONE))
        execution.set_input(1, floats(TEN))
        execution.set_output(0, found := floats([0] * 4))
        execution.compute()
    assert found.tolist() == SUM


def test_N_API_20_an_argument_is_set_once(resources: ExitStack, execution: ExecutionBuilder) -> None:
    memory = memory_of(resources, ONE)
    execution.set_input(0, floats(ONE))
    execution.set_input_from_memory(1, memory, 0, BYTES)
    execution.set_output(0, floats(ONE))
    for index in (0, 1):
        with pytest.raises(nnfmq.BadState, match=f"input {index} was set before"):
            execution.set_input(index, floats(ONE))
        with pytest.raises(nnfmq.BadState, match=f"input {index} was set before"):
            execution.set_input_from_memory(index, memory, 0, BYTES)
    with pytest.raises(nnfmq.BadState, match="output 0 was set before"):
        execution.set_output(0, None)
    with pytest.raises(nnfmq.BadState, match="output 0 was set before"):
        execution.set_output_from_memory(0, memory, 0, BYTES)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("interface", ["AIDL v4", "HIDL 1.3"])
def test_API_12_MEM_6_N_API_21_padding_is_allowed_when_it_is_enabled(
    daemon: Daemon, mode: Mode, interface: str
) -> None:
    with nnfmq.connect(daemon.path, interface=interface, timeout=LIMIT_S) as client, ExitStack() as stack:
        compilation = finished(stack, add_model(), client.device("reference"))
        execution = stack.enter_context(ExecutionBuilder(compilation))
        memory = memory_of(stack, [*ONE, 7, 7])
        execution.enable_input_and_output_padding(True)
        found = floats([9] * 8)
        execution.set_input_from_memory(0, memory, 0, 64)
        execution.set_input(1, floats([*TEN, 0, 0]))
        execution.set_output(0, found)
        mode(execution, compilation)
        assert found.tolist() == [*SUM, 9, 9, 9, 9]


def test_N_API_21_padding_does_not_make_less_than_the_data_enough(
    resources: ExitStack, execution: ExecutionBuilder
) -> None:
    execution.enable_input_and_output_padding(True)
    with pytest.raises(nnfmq.InvalidArgument, match="15 bytes given, 16 are required"):
        execution.set_input(0, bytes(15))
    with pytest.raises(nnfmq.InvalidArgument, match="12 bytes given, 16 are required"):
        execution.set_output_from_memory(0, memory_of(resources, ONE), 0, 12)


def test_N_API_21_padding_is_enabled_before_any_argument_is_set(execution: ExecutionBuilder) -> None:
    execution.set_input(0, floats(ONE))
    with pytest.raises(nnfmq.BadState, match="call this first"):
        execution.enable_input_and_output_padding(True)
    with pytest.raises(nnfmq.InvalidArgument, match="enable_input_and_output_padding"):
        execution.set_input(1, floats([*TEN, 5]))


BAD_SPANS = {
    "offset beyond": (4096, BYTES),
    "end beyond": (4096 - 8, BYTES),
    "negative": (-4, BYTES),
    "nothing": (0, 0),
    "too short": (0, 12),
    "too long": (0, 20),
    "negative length": (16, -16),
}


@pytest.mark.parametrize("span", BAD_SPANS.values(), ids=BAD_SPANS)
def test_N_API_22_parts_outside_a_memory_or_of_another_size_are_rejected(
    resources: ExitStack, execution: ExecutionBuilder, span: tuple[int, int]
) -> None:
    memory = memory_of(resources, ONE)
    for call in (execution.set_input_from_memory, execution.set_output_from_memory):
        with pytest.raises(nnfmq.InvalidArgument):
            call(0, memory, *span)


def test_N_API_22_index_dimensions_and_memory_are_checked(resources: ExitStack, execution: ExecutionBuilder) -> None:
    memory = memory_of(resources, ONE)
    for call in (execution.set_input_from_memory, execution.set_output_from_memory):
        for index in (999, -1):
            with pytest.raises(nnfmq.InvalidArgument, match="there is no"):
                call(index, memory, 0, BYTES)
        with pytest.raises(nnfmq.InvalidArgument, match="the model has 4"):
            call(0, memory, 0, BYTES, (2, 2))
        with pytest.raises(nnfmq.InvalidArgument, match="None"):
            call(0, None, 0, BYTES)  # type: ignore[arg-type]
    memory.close()
    with pytest.raises(nnfmq.InvalidArgument, match="closed"):
        execution.set_input_from_memory(0, memory, 0, BYTES)


# ---------------------------------------------------------------------------------------------------- options


SETTERS: dict[str, Callable[[ExecutionBuilder], None]] = {
    "set_input": lambda e: e.set_input(0, floats(ONE)),
    "set_output": lambda e: e.set_output(0, floats(ONE)),
    "set_input_from_memory": lambda e: e.set_input_from_memory(0, None),  # type: ignore[arg-type]
    "set_output_from_memory": lambda e: e.set_output_from_memory(0, None),  # type: ignore[arg-type]
    "set_timeout": lambda e: e.set_timeout(1),
    "set_loop_timeout": lambda e: e.set_loop_timeout(1),
    "set_measure_timing": lambda e: e.set_measure_timing(True),
    "set_reusable": lambda e: e.set_reusable(True),
    "enable_input_and_output_padding": lambda e: e.enable_input_and_output_padding(True),
    "add_extension_attribute": lambda e: e.add_extension_attribute(EXTENSION, 1, b""),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reusable", [False, True], ids=["once", "reusable"])
def test_N_API_25_N_API_27_N_API_37_nothing_is_set_after_a_computation(
    resources: ExitStack, compilation: CompilationBuilder, mode: Mode, reusable: bool
) -> None:
    execution, _ = adding(resources, compilation)
    execution.set_reusable(reusable)
    mode(execution, compilation)
    for setter in SETTERS.values():
        with pytest.raises(nnfmq.BadState, match="a computation was started"):
            setter(execution)


def test_N_API_37_attributes_of_an_execution_need_one_device_with_the_extension(
    resources: ExitStack, client: nnfmq.Client, device: Device
) -> None:
    without = finished(resources, add_model(), client.device("reference"))
    with ExecutionBuilder(without) as execution, pytest.raises(nnfmq.InvalidArgument, match="does not support"):
        execution.add_extension_attribute(EXTENSION, 1, b"")
    execution, found = adding(resources, finished(resources, add_model(), device))
    execution.add_extension_attribute(EXTENSION, 1, b"ignored by the device")
    execution.compute()
    assert found.tolist() == SUM


@pytest.mark.parametrize("mode", MODES)
def test_API_12_a_timeout_that_has_passed_ends_the_computation(
    resources: ExitStack, compilation: CompilationBuilder, mode: Mode
) -> None:
    execution, _ = adding(resources, compilation)
    execution.set_timeout(0)
    with pytest.raises(nnfmq.MissedDeadline):
        mode(execution, compilation)
    with pytest.raises(nnfmq.BadState, match="has failed"):
        execution.get_output_operand_rank(0)


def test_API_12_invalid_limits_are_rejected(execution: ExecutionBuilder) -> None:
    for call in (execution.set_timeout, execution.set_loop_timeout):
        with pytest.raises(nnfmq.InvalidArgument, match="-1"):
            call(-1)
    execution.set_timeout(None)
    execution.set_loop_timeout(None)


def test_API_12_loop_timeouts_have_a_default_and_a_maximum(
    execution: ExecutionBuilder, caplog: pytest.LogCaptureFixture
) -> None:
    assert (get_default_loop_timeout(), get_maximum_loop_timeout()) == (2.0, 15.0)
    assert execution._config().loop_timeout_ns == 2_000_000_000
    execution.set_loop_timeout(20)
    assert execution._config().loop_timeout_ns == 15_000_000_000
    assert "reduced to the maximum" in caplog.text


@pytest.mark.parametrize("mode", MODES)
def test_API_12_a_loop_ends_by_its_timeout(resources: ExitStack, device: Device, mode: Mode) -> None:
    compilation = finished(resources, counting(), device)
    execution = resources.enter_context(ExecutionBuilder(compilation))
    execution.set_loop_timeout(0.05)
    execution.set_input(0, floats([0, 0]))
    execution.set_input(1, np.array([1 << 30], np.int32))
    execution.set_input(2, floats([0, 0]))
    execution.set_output(0, floats([0, 0]))
    with pytest.raises(nnfmq.MissedDeadline):
        mode(execution, compilation)


# ---------------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("mode", MODES)
def test_API_8_TIM_4_measured_durations_are_in_order(
    resources: ExitStack, compilation: CompilationBuilder, mode: Mode
) -> None:
    execution, _ = adding(resources, compilation)
    execution.set_measure_timing(True)
    mode(execution, compilation)
    hardware, driver, fenced_hardware, fenced_driver = map(execution.get_duration, DurationCode)
    assert 0 <= hardware <= driver
    assert 0 <= fenced_hardware <= fenced_driver <= driver
    with pytest.raises(nnfmq.InvalidArgument, match="no duration 4"):
        execution.get_duration(4)  # type: ignore[arg-type]


def test_N_API_26_durations_need_a_measured_completed_computation(
    resources: ExitStack, compilation: CompilationBuilder, device: Device
) -> None:
    execution, _ = adding(resources, compilation)
    with pytest.raises(nnfmq.BadState, match="not completed"):
        execution.get_duration(DurationCode.IN_DRIVER)
    execution.compute()
    with pytest.raises(nnfmq.BadState, match=r"set_measure_timing\(True\) was not called"):
        execution.get_duration(DurationCode.IN_DRIVER)
    gathering = finished(resources, gather_model(), device)
    with ExecutionBuilder(gathering) as failing:
        failing.set_measure_timing(True)
        failing.set_input(0, floats(ONE))
        failing.set_input(1, np.array([99], np.int32))
        failing.set_output(0, floats([0]))
        with pytest.raises(nnfmq.GeneralFailure):
            failing.compute()
        with pytest.raises(nnfmq.BadState, match="it has failed"):
            failing.get_duration(DurationCode.IN_DRIVER)


@pytest.mark.parametrize("mode", UNFENCED)
def test_N_API_28_shapes_are_known_after_completion(resources: ExitStack, device: Device, mode: Mode) -> None:
    compilation = finished(resources, unsized_relu_model(), device)
    with ExecutionBuilder(compilation) as execution:
        execution.set_input(0, floats(ONE))
        execution.set_output(0, floats([0] * 4))
        for query in (execution.get_output_operand_rank, execution.get_output_operand_dimensions):
            with pytest.raises(nnfmq.BadState, match="not completed"):
                query(0)
        mode(execution, compilation)
        assert execution.get_output_operand_rank(0) == 1
        assert execution.get_output_operand_dimensions(0) == (4,)
        for query in (execution.get_output_operand_rank, execution.get_output_operand_dimensions):
            for index in (1, -1):
                with pytest.raises(nnfmq.InvalidArgument, match=f"there is no output {index}"):
                    query(index)


@pytest.mark.parametrize("mode", UNFENCED)
def test_SHP_5_an_output_that_is_too_small_tells_the_space_it_needs(
    resources: ExitStack, device: Device, mode: Mode
) -> None:
    compilation = finished(resources, unsized_relu_model(), device)
    with ExecutionBuilder(compilation) as execution:
        found = floats([7] * 3)
        execution.set_input(0, floats(ONE))
        execution.set_output(0, found)
        with pytest.raises(nnfmq.OutputInsufficientSize):
            mode(execution, compilation)
        for query in (execution.get_output_operand_rank, execution.get_output_operand_dimensions):
            with pytest.raises(nnfmq.OutputInsufficientSize, match="needs space") as raised:
                query(0)
            (shape,) = raised.value.output_shapes
            assert (shape.dimensions, shape.is_sufficient) == ((4,), False)
        assert found.tolist() == [7, 7, 7]


@pytest.mark.parametrize("mode", UNFENCED)
def test_N_API_38_an_output_shape_that_overflows_fails(resources: ExitStack, device: Device, mode: Mode) -> None:
    model = one_operation(OperationType.FILL, [Operand(I32, (2,)), 1.0], Operand(F32, (0, 0)))
    compilation = finished(resources, model, device)
    with ExecutionBuilder(compilation) as execution:
        execution.set_input(0, np.array([1 << 17, 1 << 17], np.int32))
        execution.set_output(0, floats(ONE))
        with pytest.raises(nnfmq.GeneralFailure):
            mode(execution, compilation)


# ---------------------------------------------------------------------------------------------------- states


@pytest.mark.parametrize("mode", MODES)
def test_N_API_27_an_execution_is_computed_once(
    resources: ExitStack, compilation: CompilationBuilder, mode: Mode
) -> None:
    execution, _ = adding(resources, compilation)
    mode(execution, compilation)
    for other in MODES:
        with pytest.raises(nnfmq.BadState, match="not reusable"):
            other(execution, compilation)


def test_N_API_27_arguments_that_are_missing_can_be_set_and_computed(
    resources: ExitStack, execution: ExecutionBuilder, compilation: CompilationBuilder
) -> None:
    for mode in MODES:
        with pytest.raises(nnfmq.InvalidArgument, match="input 0, 1 was not set"):
            mode(execution, compilation)
    execution.set_input(0, floats(ONE))
    execution.set_input(1, floats(TEN))
    with pytest.raises(nnfmq.InvalidArgument, match="output 0 was not set"):
        execution.compute()
    execution.set_output(0, found := floats([0] * 4))
    execution.compute()
    assert found.tolist() == SUM


@pytest.mark.parametrize("start", [start_compute, start_compute_with_dependencies])
def test_N_API_27_nothing_is_set_or_computed_while_it_runs(
    resources: ExitStack, client: nnfmq.Client, compilation: CompilationBuilder, start: Mode
) -> None:
    execution, found = adding(resources, compilation)
    execution.set_reusable(True)
    with Process(client.worker_pid) as worker, worker.stopped():
        running = InThread.start(lambda: start(execution, compilation))
        until(lambda: bool(client.connection._pending_calls), "the computation is in progress")
        for mode in (compute, start_compute, start_compute_with_dependencies):
            with pytest.raises(nnfmq.BadState, match="is running"):
                mode(execution, compilation)
        for setter in SETTERS.values():
            with pytest.raises(nnfmq.BadState, match="a computation was started"):
                setter(execution)
        with pytest.raises(nnfmq.BadState, match="not completed"):
            execution.get_output_operand_rank(0)
    assert running.wait().error is None
    assert found.tolist() == SUM
    execution.compute()


@pytest.mark.parametrize("mode", MODES)
def test_RUX_5_a_reusable_execution_reads_its_arrays_each_time(
    resources: ExitStack, compilation: CompilationBuilder, mode: Mode
) -> None:
    execution = resources.enter_context(ExecutionBuilder(compilation))
    first, found = floats(ONE), floats([0] * 4)
    execution.set_reusable(True)
    execution.set_input(0, first)
    execution.set_input(1, floats(TEN))
    execution.set_output(0, found)
    mode(execution, compilation)
    assert found.tolist() == SUM
    first[:] = TEN
    mode(execution, compilation)
    assert found.tolist() == [20, 40, 60, 80]


def test_N_API_40_of_concurrent_computations_one_is_accepted(
    resources: ExitStack, client: nnfmq.Client, compilation: CompilationBuilder
) -> None:
    execution, found = adding(resources, compilation)
    execution.set_reusable(True)
    with Process(client.worker_pid) as worker, worker.stopped():
        calls = [InThread.start(execution.compute) for _ in range(4)]
        until(lambda: sum(call.is_running for call in calls) == 1, "three calls have been rejected")
    results = [call.wait().error for call in calls]
    assert [error for error in results if error is None] == [None]
    assert all(isinstance(error, nnfmq.BadState) for error in results if error is not None)
    assert found.tolist() == SUM


def test_API_16_a_running_execution_is_not_closed(
    resources: ExitStack, client: nnfmq.Client, compilation: CompilationBuilder, caplog: pytest.LogCaptureFixture
) -> None:
    execution, found = adding(resources, compilation)
    with Process(client.worker_pid) as worker, worker.stopped():
        event = resources.enter_context(execution.start_compute())
        with caplog.at_level(logging.ERROR, "nnfmq.nnapi"):
            execution.close()
        assert "is not closed" in caplog.text
        compilation.close()
    event.wait()
    assert found.tolist() == SUM
    for _ in range(2):
        execution.close()
    with pytest.raises(nnfmq.InvalidArgument, match="closed"):
        execution.compute()


def test_API_16_an_execution_is_closed_before_the_event_of_its_end(
    resources: ExitStack, compilation: CompilationBuilder
) -> None:
    execution, found = adding(resources, compilation)
    event = execution.start_compute_with_dependencies([])
    fd = event.get_sync_fence_fd()
    assert sync_wait(fd, LIMIT_S) is FenceState.SIGNALED
    os.close(fd)
    execution.close()
    assert found.tolist() == SUM
    event.wait()
    event.close()


@pytest.mark.parametrize("start", [compute, start_compute])
def test_an_interrupted_computation_can_be_repeated(
    resources: ExitStack, compilation: CompilationBuilder, start: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    execution, found = adding(resources, compilation)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        for name in ("execute", "start"):
            patch.setattr(RequestSender, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            start(execution, compilation)
    start(execution, compilation)
    assert found.tolist() == SUM


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode is not burst_compute])
def test_LIFE_4_the_driver_s_death_ends_a_computation(folder: Path, mode: Mode) -> None:
    with running_daemon(folder / "d.sock") as daemon, daemon.connect() as client, ExitStack() as stack:
        compilation = finished(stack, add_model(), client.device("reference"))
        execution, _ = adding(stack, compilation)
        with Process(client.worker_pid) as worker:
            worker.stop()
            running = InThread.start(lambda: mode(execution, compilation))
            until(lambda: bool(client.connection._pending_calls), "the computation is in progress")
            worker.kill()
        assert isinstance(running.wait().error, nnfmq.DeadObject)
        with pytest.raises(nnfmq.BadState, match="not reusable"):
            execution.compute()


def test_LIFE_4_the_driver_s_death_ends_a_computation_with_a_burst(folder: Path) -> None:
    with running_daemon(folder / "d.sock") as daemon, daemon.connect() as client, ExitStack() as stack:
        compilation = finished(stack, add_model(), client.device("reference"))
        execution, _ = adding(stack, compilation)
        burst = stack.enter_context(BurstBuilder(compilation))
        with Process(client.worker_pid) as worker:
            worker.stop()
            running = InThread.start(lambda: execution.burst_compute(burst))
            running.wait_until_asleep()
            worker.kill()
        assert isinstance(running.wait().error, nnfmq.DeadObject)
