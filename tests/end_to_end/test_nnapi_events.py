"""NNAPI's events and bursts through a driver process: waiting, fences, dependencies, one burst for each compilation."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack

import numpy as np
import pytest
from support.drivers import LIMIT_S, Daemon, InThread, Process, until
from support.models import add_model, gather_model, unsized_relu_model
from support.nnapi_objects import ONE, SUM, Floats, adding, finished, floats

import nnfmq
from nnfmq.base.fence import Fence, sync_wait
from nnfmq.base.memory import Memory
from nnfmq.client.connection.device import Device
from nnfmq.hal.types import FenceState
from nnfmq.nnapi import BurstBuilder, CompilationBuilder, DurationCode, Event, ExecutionBuilder

BYTES = 16


def failing(stack: ExitStack, device: Device) -> ExecutionBuilder:
    """Return an execution that fails: its index is out of range."""
    execution = stack.enter_context(ExecutionBuilder(finished(stack, gather_model(), device)))
    execution.set_input(0, floats(ONE))
    execution.set_input(1, np.array([99], np.int32))
    execution.set_output(0, floats([0]))
    return execution


def imported(stack: ExitStack, fence: Fence) -> Event:
    return stack.enter_context(Event.create_from_sync_fence_fd(fence.fileno()))


def summing(stack: ExitStack, compilation: CompilationBuilder, memory: Memory, place: int) -> ExecutionBuilder:
    """Return an execution that adds the four floats at `place` to ONE, and stores the sum behind them."""
    execution = stack.enter_context(ExecutionBuilder(compilation))
    execution.set_input_from_memory(0, memory, place * BYTES, BYTES)
    execution.set_input(1, floats(ONE))
    execution.set_output_from_memory(0, memory, (place + 1) * BYTES, BYTES)
    return execution


def test_API_9_any_number_of_threads_wait_for_an_event(
    resources: ExitStack, client: nnfmq.Client, compilation: CompilationBuilder
) -> None:
    execution, found = adding(resources, compilation)
    with Process(client.worker_pid) as worker, worker.stopped():
        event = resources.enter_context(execution.start_compute())
        waiting = [InThread.start(event.wait) for _ in range(3)]
        for call in waiting:
            call.wait_until_asleep()
    assert [call.wait().error for call in waiting] == [None] * 3
    assert found.tolist() == SUM
    event.wait()


@pytest.mark.parametrize("is_fenced", [False, True])
def test_API_9_closing_an_event_waits_for_the_computation(
    resources: ExitStack, client: nnfmq.Client, compilation: CompilationBuilder, is_fenced: bool
) -> None:
    execution, found = adding(resources, compilation)
    with Fence.create() as own:
        if is_fenced:
            event = execution.start_compute_with_dependencies([imported(resources, own)])
            closing = InThread.start(event.close)
            closing.wait_until_asleep()
            own.signal()
        else:
            with Process(client.worker_pid) as worker, worker.stopped():
                event = execution.start_compute()
                closing = InThread.start(event.close)
                closing.wait_until_asleep()
        assert closing.wait().error is None
    assert found.tolist() == SUM
    event.close()
    event.wait()


def test_API_9_an_event_s_fence_is_a_duplicate(resources: ExitStack, compilation: CompilationBuilder) -> None:
    execution, found = adding(resources, compilation)
    with Fence.create() as own, execution.start_compute_with_dependencies([imported(resources, own)]) as event:
        fds = [event.get_sync_fence_fd() for _ in range(2)]
        assert len(set(fds)) == 2
        os.close(fds[0])
        assert sync_wait(fds[1], 0) is FenceState.ACTIVE
        own.signal()
        assert sync_wait(fds[1], LIMIT_S) is FenceState.SIGNALED
        event.wait()
    assert sync_wait(fds[1], 0) is FenceState.SIGNALED
    os.close(fds[1])
    assert found.tolist() == SUM


def test_API_9_an_imported_fence_is_a_duplicate_that_is_waited_for(resources: ExitStack) -> None:
    own = Fence.create()
    event = imported(resources, own)
    waiting = InThread.start(event.wait)
    waiting.wait_until_asleep()
    own.signal()
    assert waiting.wait().error is None
    own.close()
    event.wait()
    with Fence.create() as bad:
        event = imported(resources, bad)
        bad.fail()
        with pytest.raises(nnfmq.GeneralFailure, match="in error"):
            event.wait()


@pytest.mark.parametrize("fd", [-1, 1 << 40, None, "3"])
def test_N_API_29_what_is_no_fence_is_not_imported(fd: int) -> None:
    with pytest.raises(nnfmq.InvalidArgument):
        Event.create_from_sync_fence_fd(fd)
    with open(os.devnull) as no_fence, pytest.raises(nnfmq.InvalidArgument, match="is no fence"):
        Event.create_from_sync_fence_fd(no_fence.fileno())


def test_N_API_29_the_event_of_a_plain_start_has_no_fence(
    resources: ExitStack, compilation: CompilationBuilder
) -> None:
    execution, _ = adding(resources, compilation)
    with execution.start_compute() as event, pytest.raises(nnfmq.InvalidArgument, match="has no fence"):
        event.get_sync_fence_fd()


def test_N_API_30_a_missing_list_or_event_is_rejected(resources: ExitStack, compilation: CompilationBuilder) -> None:
    execution, found = adding(resources, compilation)
    for dependencies in (None, [None]):
        with pytest.raises(nnfmq.InvalidArgument, match="None"):
            execution.start_compute_with_dependencies(dependencies)  # type: ignore[arg-type]
    execution.compute()
    assert found.tolist() == SUM


def test_API_7_a_chain_of_fenced_computations_runs_in_order(
    resources: ExitStack, compilation: CompilationBuilder
) -> None:
    memory = resources.enter_context(Memory.create(4096))
    first, second = summing(resources, compilation, memory, 0), summing(resources, compilation, memory, 1)
    with Fence.create() as own:
        start = imported(resources, own)
        before = resources.enter_context(first.start_compute_with_dependencies([start]))
        after = resources.enter_context(second.start_compute_with_dependencies([before, start], 2 * LIMIT_S))
        memory.view[:BYTES] = floats(ONE).tobytes()
        own.signal()
        after.wait()
    assert np.frombuffer(memory.view, np.float32, 4, 2 * BYTES).tolist() == [3, 6, 9, 12]


def test_API_7_a_plain_event_is_waited_for_before_the_launch(
    resources: ExitStack, client: nnfmq.Client, compilation: CompilationBuilder
) -> None:
    memory = resources.enter_context(Memory.create(4096))
    memory.view[:BYTES] = floats(ONE).tobytes()
    first, second = summing(resources, compilation, memory, 0), summing(resources, compilation, memory, 1)
    before = resources.enter_context(first.start_compute())
    with second.start_compute_with_dependencies([before]) as after:
        after.wait()
    assert np.frombuffer(memory.view, np.float32, 4, 2 * BYTES).tolist() == [3, 6, 9, 12]


def test_FEN_5_nothing_depends_on_a_computation_that_has_failed(
    resources: ExitStack, device: Device, compilation: CompilationBuilder
) -> None:
    failed = resources.enter_context(failing(resources, device).start_compute())
    with Fence.create() as own:
        own.fail()
        for event in (failed, imported(resources, own)):
            execution, _ = adding(resources, compilation)
            with pytest.raises(nnfmq.InvalidArgument):
                execution.start_compute_with_dependencies([event])


def test_FEN_10_a_fenced_computation_that_fails_raises_its_error_when_it_is_waited_for(
    resources: ExitStack, device: Device
) -> None:
    execution = failing(resources, device)
    with execution.start_compute_with_dependencies([]) as event:
        fd = event.get_sync_fence_fd()
        resources.callback(os.close, fd)
        assert sync_wait(fd, LIMIT_S) is FenceState.ERROR
        for _ in range(2):
            with pytest.raises(nnfmq.GeneralFailure, match="index is outside"):
                event.wait()
    with pytest.raises(nnfmq.BadState, match="has failed"):
        execution.get_output_operand_rank(0)


def test_FEN_7_a_fenced_computation_needs_outputs_of_known_shape(resources: ExitStack, device: Device) -> None:
    execution = resources.enter_context(ExecutionBuilder(finished(resources, unsized_relu_model(), device)))
    execution.set_input(0, floats(ONE))
    execution.set_output(0, floats([0] * 4))
    with pytest.raises(nnfmq.InvalidArgument):
        execution.start_compute_with_dependencies([])


def test_FEN_6_the_duration_counts_from_the_last_dependency(
    resources: ExitStack, compilation: CompilationBuilder
) -> None:
    execution, _ = adding(resources, compilation)
    with execution.start_compute_with_dependencies([], 0.0) as event, pytest.raises(nnfmq.MissedDeadline):
        event.wait()


def test_API_8_the_fenced_durations_begin_with_the_end_of_the_last_dependency(
    resources: ExitStack, compilation: CompilationBuilder
) -> None:
    execution, _ = adding(resources, compilation)
    execution.set_measure_timing(True)
    with Fence.create() as own, execution.start_compute_with_dependencies([imported(resources, own)]) as event:
        end_ns = time.monotonic_ns() + 20_000_000
        until(lambda: time.monotonic_ns() > end_ns, "the dependency takes 20 ms")
        own.signal()
        event.wait()
    codes = (DurationCode.IN_DRIVER, DurationCode.FENCED_IN_DRIVER)
    total_ns, fenced_ns = (execution.get_duration(code) for code in codes)
    assert fenced_ns > 0
    assert total_ns - fenced_ns > 10_000_000


def test_API_7_before_hidl_1_3_the_call_itself_waits_for_the_fences(daemon: Daemon) -> None:
    with nnfmq.connect(daemon.path, interface="HIDL 1.2", timeout=LIMIT_S) as client, ExitStack() as stack:
        compilation = finished(stack, add_model(), client.device("reference"))
        execution, found = adding(stack, compilation)
        execution.set_measure_timing(True)
        with Fence.create() as own:
            event = imported(stack, own)
            call = InThread.start(lambda: execution.start_compute_with_dependencies([event]))
            call.wait_until_asleep()
            assert found.tolist() == [0] * 4
            own.signal()
            made: Event = call.wait().value
            with made, pytest.raises(nnfmq.InvalidArgument, match="has no fence"):
                made.get_sync_fence_fd()
        assert found.tolist() == SUM
        driver_ns = execution.get_duration(DurationCode.IN_DRIVER)
        assert driver_ns == execution.get_duration(DurationCode.FENCED_IN_DRIVER) >= 0
        execution, _ = adding(stack, compilation)
        with Fence.create() as bad:
            bad.fail()
            with pytest.raises(nnfmq.InvalidArgument, match="FEN-5"):
                execution.start_compute_with_dependencies([imported(stack, bad)])


# ---------------------------------------------------------------------------------------------------- bursts


def test_API_11_a_burst_computes_a_series_of_executions(resources: ExitStack, compilation: CompilationBuilder) -> None:
    burst = resources.enter_context(BurstBuilder(compilation))
    for _ in range(3):
        execution, found = adding(resources, compilation)
        execution.burst_compute(burst)
        assert found.tolist() == SUM


def test_N_API_31_the_execution_and_the_burst_are_of_one_finished_compilation(
    resources: ExitStack, device: Device, compilation: CompilationBuilder
) -> None:
    execution, found = adding(resources, compilation)
    other = resources.enter_context(BurstBuilder(finished(resources, add_model(), device)))
    with pytest.raises(nnfmq.InvalidArgument, match="different compilations"):
        execution.burst_compute(other)
    with pytest.raises(nnfmq.InvalidArgument, match="None"):
        execution.burst_compute(None)  # type: ignore[arg-type]
    with (
        CompilationBuilder(add_model(), [device]) as unfinished,
        pytest.raises(nnfmq.BadState, match="is not finished"),
    ):
        BurstBuilder(unfinished)
    burst = BurstBuilder(compilation)
    burst.close()
    with pytest.raises(nnfmq.InvalidArgument, match="burst is closed"):
        execution.burst_compute(burst)
    execution.compute()
    assert found.tolist() == SUM


def test_N_API_31_a_burst_computes_one_execution_at_a_time(
    resources: ExitStack, client: nnfmq.Client, compilation: CompilationBuilder
) -> None:
    burst = resources.enter_context(BurstBuilder(compilation))
    made = [adding(resources, compilation) for _ in range(2)]
    first, second = (execution for execution, _ in made)
    with Process(client.worker_pid) as worker, worker.stopped():
        running = InThread.start(lambda: first.burst_compute(burst))
        running.wait_until_asleep()
        with pytest.raises(nnfmq.BadState, match="another thread computes with this burst"):
            second.burst_compute(burst)
    assert running.wait().error is None
    second.burst_compute(burst)  # nothing was computed before
    assert [found.tolist() for _, found in made] == [SUM, SUM]


@pytest.mark.parametrize("burst_first", [False, True])
def test_N_API_39_bursts_and_memories_are_closed_in_either_order(
    resources: ExitStack, compilation: CompilationBuilder, burst_first: bool
) -> None:
    burst, memory = BurstBuilder(compilation), Memory.create(4096)
    memory.view[:BYTES] = floats(ONE).tobytes()
    summing(resources, compilation, memory, 0).burst_compute(burst)
    assert np.frombuffer(memory.view, np.float32, 4, BYTES).tolist() == [2, 4, 6, 8]
    if burst_first:
        burst.close()
        assert np.frombuffer(memory.view, np.float32, 4, BYTES).tolist() == [2, 4, 6, 8]  # it is the application's
        memory.close()
    else:
        memory.close()
        burst.close()
    execution: ExecutionBuilder
    found: Floats
    execution, found = adding(resources, compilation)
    execution.compute()
    assert found.tolist() == SUM


def test_API_10_a_memory_is_closed_while_a_computation_uses_it(
    resources: ExitStack, client: nnfmq.Client, compilation: CompilationBuilder
) -> None:
    memory = Memory.create(4096)
    memory.view[:BYTES] = floats(ONE).tobytes()
    execution = resources.enter_context(ExecutionBuilder(compilation))
    found = floats([0] * 4)
    execution.set_input_from_memory(0, memory, 0, BYTES)
    execution.set_input(1, floats(ONE))
    execution.set_output(0, found)
    with Process(client.worker_pid) as worker, worker.stopped():
        event = resources.enter_context(execution.start_compute())
        until(lambda: bool(client.connection._pending_calls), "the computation is in progress")
        memory.close()
    event.wait()
    assert found.tolist() == [2, 4, 6, 8]


def test_API_10_a_memory_that_is_closed_before_the_computation_is_reported(
    resources: ExitStack, compilation: CompilationBuilder
) -> None:
    memory = Memory.create(4096)
    execution = summing(resources, compilation, memory, 0)
    memory.close()
    with pytest.raises(nnfmq.InvalidArgument, match="memory is closed"):
        execution.compute()
