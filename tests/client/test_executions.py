"""Asynchronous, fenced and reusable executions as the application uses them, against a real session."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from support import control_flow_models, models
from support.descriptors import no_more_descriptors
from support.executors import LIMIT_S, Held, until
from support.protocol import ProtocolPeer

from nnfmq.base.channel import open_fence_pair
from nnfmq.base.fence import Fence
from nnfmq.base.memory import Memory
from nnfmq.client.connection.connection import Connection
from nnfmq.client.connection.device import Device
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.client.waiting import Future as ReplyFuture
from nnfmq.driver.execution.prepared_model import DriverPreparedModel
from nnfmq.driver.session.session import Session
from nnfmq.hal.errors import (
    DeadObject,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    MissedDeadlineTransient,
    OutputInsufficientSize,
    ProtocolError,
    ResourceExhaustedTransient,
)
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.timing import NO_TIMING
from nnfmq.hal.types import ExecutionConfig, FenceState, MeasureTiming, OutputShape, Priority
from nnfmq.serialize import messages
from nnfmq.serialize.control_protocol import PeerRole

Start = Callable[..., Future[Any]]
Real = tuple[Connection, Session]
ADD = models.add_model()
ONE, TEN = np.array([1, 2, 3, 4], np.float32), np.array([10, 20, 30, 40], np.float32)
SUM = [11, 22, 33, 44]
ACTIVE, SIGNALED, ERROR, _ = FenceState


@pytest.fixture
def own(resources: ExitStack) -> Fence:
    return resources.enter_context(Fence.create())


@pytest.fixture
def held(real: Real, adding: PreparedModel) -> Iterator[Held]:
    """The model's executions wait until they are released."""
    held = Held(ADD)
    real[1].models.insert(DriverPreparedModel(ADD, held), adding.model_id)  # type: ignore[arg-type]
    yield held
    held.go.set()


# ------------------------------------------------------------------------------------------------ with a callback


def test_EXE_5_an_execution_runs_while_its_caller_continues(adding: PreparedModel, held: Held) -> None:
    given = ONE.copy()
    pending = adding.execute_async(given, TEN)
    given[:] = 0  # the execution uses a copy
    assert held.begun.wait(LIMIT_S)
    assert not pending.done()
    assert not pending.wait(timeout=0.001)
    with pytest.raises(MissedDeadlineTransient, match="the execution continues"):
        pending.result(timeout=0)
    held.go.set()
    assert pending.wait(LIMIT_S)
    assert pending.done()
    assert [pending.result()[0].tolist(), pending.result()[0].tolist()] == [SUM, SUM]


def test_TIM_6_a_measured_execution_has_times(adding: PreparedModel) -> None:
    adding.execute_async(ONE, TEN, measure=True).result(LIMIT_S)
    assert 0 < adding.last_timing.time_on_device_ns <= adding.last_timing.time_in_driver_ns


def test_EXE_8_many_executions_run_concurrently(adding: PreparedModel) -> None:
    pending = [adding.execute_async(ONE * number, TEN) for number in range(50)]
    for number, one in enumerate(pending):
        assert one.result(LIMIT_S)[0].tolist() == (ONE * number + TEN).tolist()


def test_many_threads_wait_for_one_execution(adding: PreparedModel, held: Held, start: Start) -> None:
    pending = adding.execute_async(ONE, TEN)
    waiting = [start(pending.result, LIMIT_S) for _ in range(5)]
    held.go.set()
    assert [future.result(LIMIT_S)[0].tolist() for future in waiting] == [SUM] * 5


def test_SHP_1_SHP_5_outputs_of_unknown_size_are_returned_whole(device: Device) -> None:
    pending = device.prepare(models.unsized_relu_model((4,))).execute_async(np.array([-1, 2, -3, 4], np.float32))
    assert pending.result(LIMIT_S)[0].tolist() == [0, 2, 0, 4]


def test_an_execution_whose_result_is_not_read_leaves_nothing(adding: PreparedModel, held: Held, real: Real) -> None:
    before = len(os.listdir("/proc/self/fd"))
    adding.execute_async(ONE, TEN)
    held.go.set()
    until(lambda: gc.collect() >= 0 and len(os.listdir("/proc/self/fd")) == before)


@pytest.mark.parametrize("given", [(ONE,), (ONE, TEN[:3]), (ONE, np.zeros(4, np.complex64))])
def test_arrays_that_do_not_fit_are_rejected_immediately(given: tuple[Any, ...], adding: PreparedModel) -> None:
    for execute in (adding.execute_async, adding.execute_fenced):
        with pytest.raises(InvalidArgument):
            execute(*given)


def test_QOS_2_a_deadline_that_has_passed_is_raised_by_result(adding: PreparedModel) -> None:
    with pytest.raises(MissedDeadline):
        adding.execute_async(ONE, TEN, timeout=0).result(LIMIT_S)


def test_N_REQ_1_a_rejection_by_the_driver_is_raised_by_result(adding: PreparedModel, resources: ExitStack) -> None:
    request = models.request_for(ADD, [resources.enter_context(Memory.create(100)) for _ in range(2)])
    pending = adding.execute_request_async(type(request)((), request.outputs, request.pools))
    with pytest.raises(InvalidArgument, match="N-REQ-1"):
        pending.result(LIMIT_S)


def test_a_HAL_request_is_executed_asynchronously(adding: PreparedModel, resources: ExitStack) -> None:
    pools = [resources.enter_context(Memory.create(100)) for _ in range(2)]
    request = models.request_for(ADD, pools)
    outcome = adding.execute_request_async(request, ExecutionConfig(MeasureTiming.YES)).result(LIMIT_S)
    assert outcome.shapes == (OutputShape((4,)),)
    assert outcome.timing.time_in_driver_ns > 0


def test_SHP_5_a_short_output_of_a_request_is_reported_with_its_shape(device: Device, resources: ExitStack) -> None:
    model = device.prepare(models.unsized_relu_model((4,)))
    pools = [resources.enter_context(Memory.create(size)) for size in (16, 8)]
    sized = models.request_for(models.relu_model((4,)), pools)
    place = type(sized.outputs[0].location)(1, 0, 8)
    request = type(sized)(sized.inputs, (type(sized.outputs[0])(False, place),), sized.pools)
    with pytest.raises(OutputInsufficientSize) as caught:
        model.execute_request_async(request).result(LIMIT_S)
    assert caught.value.output_shapes == (OutputShape((4,), False),)


def test_LIFE_4_LIFE_5_the_exit_of_the_driver_raises_dead_object_once(
    adding: PreparedModel, held: Held, real: Real
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    pending = adding.execute_async(ONE, TEN)
    assert held.begun.wait(LIMIT_S)
    real[1].stop()
    with pytest.raises(DeadObject):
        pending.result(LIMIT_S)
    held.go.set()
    until(lambda: gc.collect() >= 0 and len(os.listdir("/proc/self/fd")) < before)
    with pytest.raises(DeadObject):
        pending.result()
    with pytest.raises(DeadObject):
        adding.execute_async(ONE, TEN)


class RecordingHandler:
    """A reply handler that keeps all replies and errors."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    def set_result(self, result: Any) -> None:
        self.received.append(result)

    def set_exception(self, error: Any) -> None:
        self.received.append(error)


def test_LIFE_5_a_reply_after_the_end_is_dropped(connection: Connection, driver: ProtocolPeer) -> None:
    handler = RecordingHandler()
    message = messages.ExecuteAsynchronously(
        connection.next_call_id(), 1, messages.RequestData((), (), ()), messages.ConfigData(MeasureTiming.NO, -1), -1
    )
    connection.start_call(message, messages.ExecutionFinished, handler)
    call = driver.receive(messages.ExecuteAsynchronously).call
    connection.close()
    assert [type(reply) for reply in handler.received] == [DeadObject]
    with pytest.raises(DeadObject):
        driver.send(messages.ExecutionFinished(call, ErrorStatus.NONE, ""))
    assert len(handler.received) == 1


def test_EXE_5_the_result_is_that_of_the_callback_and_not_of_the_reply(
    connection: Connection, driver: ProtocolPeer
) -> None:
    handler = RecordingHandler()
    message = messages.ExecuteAsynchronously(
        connection.next_call_id(), 1, messages.RequestData((), (), ()), messages.ConfigData(MeasureTiming.NO, -1), -1
    )
    connection.start_call(message, messages.ExecutionFinished, handler)
    call = driver.receive(messages.ExecuteAsynchronously).call
    rejected = messages.ExecutionFinished(call, ErrorStatus.INVALID_ARGUMENT, "no")
    driver.send(rejected)
    driver.send(messages.Reply(call, ErrorStatus.INVALID_ARGUMENT, "no"))
    until(lambda: not connection._connection_state.pending_calls(PeerRole.CLIENT))
    assert handler.received == [rejected]


def test_a_driver_that_states_impossible_shapes_breaks_the_protocol(
    connection: Connection, driver: ProtocolPeer
) -> None:
    info = TensorInfo("known", (2,), "float32")
    model = PreparedModel(connection, 1, (info,), (info,))
    pending = model.execute_async(np.zeros(2, np.float32))
    call = driver.receive(messages.ExecuteAsynchronously).call
    driver.send(messages.ExecutionFinished(call, ErrorStatus.NONE, "", (messages.ShapeData((3,), True),)))
    with pytest.raises(ProtocolError):
        pending.result(LIMIT_S)


def test_a_future_keeps_its_first_result() -> None:
    reply: ReplyFuture[int] = ReplyFuture()
    assert not reply.done()
    reply.set_result(1)
    reply.set_exception(DeadObject("late"))
    assert (reply.result(None), reply.result(0)) == (1, 1)


# ------------------------------------------------------------------------------------------------ loops


def test_CF_4_N_QOS_6_a_loop_ends_by_its_timeout_on_every_path(device: Device) -> None:
    model = device.prepare(control_flow_models.counting())
    given = np.zeros(2, np.float32), np.array([2**31 - 1], np.int32), np.zeros(2, np.float32)
    with pytest.raises(MissedDeadline):
        model.execute(*given, loop_timeout=0.001)
    with pytest.raises(MissedDeadline):
        model.execute_async(*given, loop_timeout=0.001).result(LIMIT_S)
    with model.execute_fenced(*given, loop_timeout=0.001) as launched, pytest.raises(MissedDeadline):
        launched.result(LIMIT_S)
    with model.create_reusable_execution(loop_timeout=0.001) as execution, pytest.raises(MissedDeadline):
        execution.compute(*given)


def test_CF_5_a_loop_timeout_above_the_maximum_is_limited_with_a_warning(
    adding: PreparedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert adding.execute(ONE, TEN, loop_timeout=60)[0].tolist() == SUM
    assert "reduced to the maximum of 15 s" in caplog.text


@pytest.mark.parametrize("wrong", [-1, float("nan")])
def test_an_invalid_loop_timeout_or_duration_is_rejected(wrong: float, adding: PreparedModel) -> None:
    with pytest.raises(InvalidArgument, match="loop timeout"):
        adding.execute(ONE, TEN, loop_timeout=wrong)
    with pytest.raises(InvalidArgument, match="duration"):
        adding.execute_fenced(ONE, TEN, duration=wrong)


# ------------------------------------------------------------------------------------------------ fenced


def test_FEN_3_an_execution_begins_when_the_fences_are_signaled(adding: PreparedModel, own: Fence) -> None:
    with adding.execute_fenced(ONE, TEN, wait_for=[own]) as launched:
        assert (launched.done(), launched.wait(timeout=0)) == (False, ACTIVE)
        with pytest.raises(MissedDeadlineTransient, match="the execution continues"):
            launched.result(timeout=0.001)
        with pytest.raises(GeneralFailure, match="FEN-9"):
            launched.info()
        own.signal()
        assert launched.result(LIMIT_S)[0].tolist() == SUM
        assert launched.done()


def test_FEN_12_fences_chain_executions_of_one_client(adding: PreparedModel, own: Fence, resources: ExitStack) -> None:
    chain = [resources.enter_context(adding.execute_fenced(ONE, TEN, wait_for=[own]))]
    for _ in range(5):
        chain.append(resources.enter_context(adding.execute_fenced(ONE, TEN, wait_for=[chain[-1].fence])))
    assert not chain[-1].done()
    own.signal()
    assert chain[-1].result(LIMIT_S)[0].tolist() == SUM
    assert all(launched.done() for launched in chain)


def test_TIM_7_both_times_are_reported(adding: PreparedModel, own: Fence) -> None:
    with adding.execute_fenced(ONE, TEN, wait_for=[own], measure=True) as launched:
        own.signal()
        launched.wait(LIMIT_S)
        times = launched.info()
        assert 0 < times.fenced.time_in_driver_ns <= times.launched.time_in_driver_ns
    with adding.execute_fenced(ONE, TEN) as launched:
        launched.wait(LIMIT_S)
        assert launched.info() == (NO_TIMING, NO_TIMING)


def test_FEN_5_a_fence_in_error_is_rejected_or_fails_the_execution(
    adding: PreparedModel, own: Fence, resources: ExitStack
) -> None:
    launched = resources.enter_context(adding.execute_fenced(ONE, TEN, wait_for=[own]))
    own.fail()
    with pytest.raises(GeneralFailure, match="in error"):
        launched.result(LIMIT_S)
    assert launched.wait() is ERROR
    with pytest.raises(InvalidArgument, match="N-RQX-15"):
        adding.execute_fenced(ONE, TEN, wait_for=[own])


def test_N_RQX_15_an_fd_that_is_no_fence_is_rejected(adding: PreparedModel) -> None:
    with pytest.raises(InvalidArgument, match="no fence"):
        adding.execute_fenced(ONE, TEN, wait_for=[0])


def test_FEN_6_the_driver_enforces_the_limits(adding: PreparedModel, own: Fence) -> None:
    with adding.execute_fenced(ONE, TEN, wait_for=[own], timeout=0.05) as launched:
        assert launched.wait(LIMIT_S) is ERROR
        with pytest.raises(MissedDeadline):
            launched.result()
    with adding.execute_fenced(ONE, TEN, duration=0) as late, pytest.raises(MissedDeadline):
        late.result(LIMIT_S)


def test_FEN_7_outputs_of_unknown_shape_are_rejected(device: Device) -> None:
    model = device.prepare(models.unsized_relu_model((4,)))
    with pytest.raises(InvalidArgument, match="N-RQX-8"):
        model.execute_fenced(ONE)


def test_an_execution_that_is_closed_early_continues_and_is_released(
    adding: PreparedModel, own: Fence, real: Real
) -> None:
    session = real[1]
    launched = adding.execute_fenced(ONE, TEN, wait_for=[own])
    launched.close()
    launched.close()
    until(lambda: not session.fenced_callbacks.values())
    assert len(session.launched) == 1
    with pytest.raises(InvalidArgument, match="closed"):
        launched.result()
    own.signal()
    until(lambda: not session.launched)


def test_LIFE_4_the_exit_of_the_driver_puts_the_fence_in_error(
    adding: PreparedModel, own: Fence, real: Real, resources: ExitStack
) -> None:
    waiting = resources.enter_context(adding.execute_fenced(ONE, TEN, wait_for=[own]))
    real[1].stop()
    assert waiting.wait(LIMIT_S) is ERROR
    with pytest.raises(DeadObject):
        waiting.result()


def test_a_launch_that_misses_its_deadline_is_released(
    connection: Connection, driver: ProtocolPeer, start: Start
) -> None:
    info = TensorInfo("known", (2,), "float32")
    model = PreparedModel(connection, 1, (info,), (info,))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MissedDeadline):
        model.execute_fenced(np.zeros(2, np.float32), timeout=0)
    call = driver.receive(messages.ExecuteFenced).call
    sender, fd = open_fence_pair()
    driver.send(messages.FencedLaunched(call, ErrorStatus.NONE, "", 77, 1), [fd])
    os.close(fd)
    sender.close()
    assert driver.receive(messages.ReleaseCallback).callback_id == 77
    until(lambda: len(os.listdir("/proc/self/fd")) == before)


def test_a_fence_without_a_free_fd_fails_only_the_launch(
    connection: Connection, driver: ProtocolPeer, start: Start
) -> None:
    info = TensorInfo("known", (2,), "float32")
    launching = start(PreparedModel(connection, 1, (info,), (info,)).execute_fenced, np.zeros(2, np.float32))
    call = driver.receive(messages.ExecuteFenced).call
    sender, fd = open_fence_pair()
    with no_more_descriptors():
        driver.send(messages.FencedLaunched(call, ErrorStatus.NONE, "", 77, 1), [fd])
        assert isinstance(launching.exception(LIMIT_S), ResourceExhaustedTransient)
    os.close(fd)
    sender.close()
    assert driver.receive(messages.ReleaseCallback).callback_id == 77
    assert connection.is_open


# ------------------------------------------------------------------------------------------------ reusable


def test_RUX_1_an_execution_runs_repeatedly(adding: PreparedModel) -> None:
    with adding.create_reusable_execution() as execution:
        assert execution.compute(ONE, TEN)[0].tolist() == SUM
        assert execution.compute(TEN, TEN)[0].tolist() == [20, 40, 60, 80]
        out = np.zeros(4, np.float32)
        assert execution.compute(out=[out])[0] is out  # with the inputs of the previous run
        assert out.tolist() == [20, 40, 60, 80]


def test_an_execution_without_inputs_says_how_to_give_them(adding: PreparedModel) -> None:
    with adding.create_reusable_execution() as execution:
        for compute in (execution.compute, execution.compute_fenced):
            with pytest.raises(InvalidArgument, match="never written: write them, or pass 2 arrays"):
                compute()
        assert execution.compute(ONE, TEN)[0].tolist() == execution.compute()[0].tolist() == SUM


def test_RUX_1_arrays_used_in_place_are_not_copied(adding: PreparedModel) -> None:
    with adding.create_reusable_execution(measure=True) as execution:
        execution.inputs[0][:], execution.inputs[1][:] = ONE, TEN
        assert execution.compute(out=execution.outputs) is execution.outputs
        assert execution.outputs[0].tolist() == SUM
        assert 0 < execution.last_timing.time_on_device_ns <= execution.last_timing.time_in_driver_ns


def test_RUX_1_LIFE_2_an_execution_runs_fenced_and_outlives_its_model(
    adding: PreparedModel, own: Fence, real: Real
) -> None:
    with adding.create_reusable_execution() as execution:
        adding.close()
        with execution.compute_fenced(ONE, TEN, wait_for=[own]) as launched:
            own.signal()
            assert launched.result(LIMIT_S)[0].tolist() == SUM
        assert execution.compute(TEN, TEN)[0].tolist() == [20, 40, 60, 80]
    until(lambda: not real[1].executions.values())


def test_RUX_3_a_second_run_is_rejected_and_does_not_affect_the_first(
    adding: PreparedModel, held: Held, start: Start
) -> None:
    with adding.create_reusable_execution() as execution:
        first = start(execution.compute, ONE, TEN)
        assert held.begun.wait(LIMIT_S)
        with pytest.raises(InvalidArgument, match="one run at a time"):
            execution.compute(TEN, TEN)
        held.go.set()
        assert first.result(LIMIT_S)[0].tolist() == SUM
        assert execution.compute(TEN, TEN)[0].tolist() == [20, 40, 60, 80]


def test_RUX_3_a_fenced_run_is_in_progress_after_its_object_is_closed(adding: PreparedModel, own: Fence) -> None:
    with adding.create_reusable_execution() as execution:
        launched = execution.compute_fenced(ONE, TEN, wait_for=[own])
        launched.close()
        with pytest.raises(InvalidArgument, match="one run at a time"):
            execution.compute(TEN, TEN)
        own.signal()
        until(lambda: not execution._is_fenced_run_active())
        assert execution.outputs[0].tolist() == SUM


def test_RUX_4_limits_are_those_of_the_run(adding: PreparedModel, own: Fence) -> None:
    with adding.create_reusable_execution() as execution:
        with pytest.raises(MissedDeadline):
            execution.compute(ONE, TEN, timeout=0)
        with execution.compute_fenced(ONE, TEN, wait_for=[own], timeout=0.05) as launched:
            assert launched.wait(LIMIT_S) is ERROR
        assert execution.compute(ONE, TEN)[0].tolist() == SUM


def test_a_HAL_request_is_run_repeatedly(adding: PreparedModel, resources: ExitStack) -> None:
    pools = [resources.enter_context(Memory.create(100)) for _ in range(2)]
    request = models.request_for(ADD, pools)
    with adding.create_reusable_request(request, ExecutionConfig(MeasureTiming.YES)) as execution:
        for value in (1, 2):
            np.frombuffer(pools[0].view, np.float32, 4)[:] = value
            assert execution.compute().shapes == (OutputShape((4,)),)
            assert np.frombuffer(pools[1].view, np.float32, 4).tolist() == [value] * 4
        with execution.compute_fenced() as launched:
            assert launched.result(LIMIT_S).fenced.time_in_driver_ns > 0
    with pytest.raises(InvalidArgument, match="closed"):
        execution.compute()


def test_RUX_2_an_invalid_request_is_rejected_when_the_execution_is_created(
    adding: PreparedModel, resources: ExitStack
) -> None:
    request = models.request_for(ADD, [resources.enter_context(Memory.create(100)) for _ in range(2)])
    with pytest.raises(InvalidArgument, match="N-REQ-2"):
        adding.create_reusable_request(type(request)(request.inputs, (), request.pools))


def test_LIFE_4_the_exit_of_the_driver_ends_a_run_and_it_can_be_closed(
    adding: PreparedModel, held: Held, real: Real, start: Start
) -> None:
    with adding.create_reusable_execution() as execution:
        running = start(execution.compute, ONE, TEN)
        assert held.begun.wait(LIMIT_S)
        real[1].stop()
        assert isinstance(running.exception(LIMIT_S), DeadObject)
        held.go.set()


def test_QOS_1_a_model_has_the_priority_of_its_preparation(device: Device, real: Real) -> None:
    for priority in Priority:
        model = device.prepare(ADD, priority=priority)  # N-QOS-1
        assert real[1].models.lookup(model.model_id).priority == priority
        assert model.execute(ONE, TEN)[0].tolist() == SUM
