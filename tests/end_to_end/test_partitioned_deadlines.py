"""A timeout of a model on several devices is that of all its steps: too short, long enough, and with dead drivers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from support.control_flow_models import counting
from support.drivers import LIMIT_S, Daemon, InThread, Process, until
from support.partitioned import Runtime, device_failing_with
from support.plans import control_flow_plan, linear_plan
from support.small_models import two_adds, with_operand

import nnfmq
from nnfmq.base.deadlines import CLOCK_MAX_NS
from nnfmq.client.connection.connection import Connection
from nnfmq.hal.types import DataLocation, ExecutionConfig, FenceState, Request, RequestArgument
from nnfmq.serialize import messages

A = np.array([[1, 2], [3, 4]], np.float32)
B = np.array([[10, 20], [30, 40]], np.float32)
EXPECTED = (A + 2 * B).tolist()
PLAN = linear_plan(two_adds(), [0], [1])
ENDLESS = np.array([1, 2], np.float32), np.array([2**31 - 1], np.int32), np.array([10, 20], np.float32)
FAILING = device_failing_with("GENERAL_FAILURE")


@pytest.fixture
def runtime(drivers: list[Daemon], resources: ExitStack) -> Runtime:
    return Runtime(drivers, resources)


@pytest.fixture
def workers(runtime: Runtime) -> Iterator[list[Process]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Process(client.worker_pid)) for client in runtime.clients]


class Limited:
    """One way to execute with a timeout; its objects are made before."""

    def __init__(self, mode: str, model: nnfmq.CompiledModel, stack: ExitStack) -> None:
        self._execute = getattr(self, f"_{mode}")(model, stack)

    def execute(self, *inputs: Any, timeout: float | None) -> Any:
        return self._execute(*inputs, timeout=timeout)

    def _synchronous(self, model: nnfmq.CompiledModel, _stack: ExitStack) -> Callable[..., Any]:
        return model.execute

    def _asynchronous(self, model: nnfmq.CompiledModel, _stack: ExitStack) -> Callable[..., Any]:
        return lambda *inputs, timeout: model.execute_async(*inputs, timeout=timeout).result(LIMIT_S)

    def _fenced(self, model: nnfmq.CompiledModel, _stack: ExitStack) -> Callable[..., Any]:
        def execute(*inputs: Any, timeout: float | None) -> Any:
            with model.execute_fenced(*inputs, timeout=timeout) as execution:
                return execution.result(LIMIT_S)

        return execute

    def _duration(self, model: nnfmq.CompiledModel, _stack: ExitStack) -> Callable[..., Any]:
        def execute(*inputs: Any, timeout: float | None) -> Any:
            with model.execute_fenced(*inputs, duration=timeout) as execution:
                return execution.result(LIMIT_S)

        return execute

    def _burst(self, model: nnfmq.CompiledModel, stack: ExitStack) -> Callable[..., Any]:
        return stack.enter_context(model.burst()).execute

    def _awaited_burst(self, model: nnfmq.CompiledModel, stack: ExitStack) -> Callable[..., Any]:
        burst = stack.enter_context(model.burst())
        return lambda *inputs, timeout: asyncio.run(burst.execute_async(*inputs, timeout=timeout))

    def _pool(self, model: nnfmq.CompiledModel, stack: ExitStack) -> Callable[..., Any]:
        return stack.enter_context(model.burst_pool(1)).execute

    def _reusable(self, model: nnfmq.CompiledModel, stack: ExitStack) -> Callable[..., Any]:
        return stack.enter_context(model.create_reusable_execution()).compute

    def _reusable_fenced(self, model: nnfmq.CompiledModel, stack: ExitStack) -> Callable[..., Any]:
        execution = stack.enter_context(model.create_reusable_execution())

        def execute(*inputs: Any, timeout: float | None) -> Any:
            with execution.compute_fenced(*inputs, timeout=timeout) as launched:
                return launched.result(LIMIT_S)

        return execute


WAITING = ("synchronous", "burst", "awaited_burst", "pool", "reusable")
"""Modes whose caller waits at most until the deadline, also for a driver that is stopped."""
MODES = (*WAITING, "asynchronous", "fenced", "duration", "reusable_fenced")


@pytest.mark.parametrize("devices", [("reference", "reference"), ("reference", FAILING)])
@pytest.mark.parametrize("mode", MODES)
def test_QOS_4_a_generous_timeout_changes_nothing(
    runtime: Runtime, resources: ExitStack, mode: str, devices: tuple[str, str]
) -> None:
    way = Limited(mode, runtime.prepare(PLAN, devices=devices), resources)
    for timeout in (LIMIT_S, None, 1e30):
        assert way.execute(A, B, timeout=timeout)[0].tolist() == EXPECTED


@pytest.mark.parametrize("mode", MODES)
def test_a_timeout_that_is_no_number_of_seconds_is_rejected(runtime: Runtime, resources: ExitStack, mode: str) -> None:
    way = Limited(mode, runtime.prepare(PLAN), resources)
    for timeout in (-1.0, float("nan")):
        with pytest.raises(nnfmq.InvalidArgument, match="a timeout is 0 or more seconds"):
            way.execute(A, B, timeout=timeout)
    assert way.execute(A, B, timeout=None)[0].tolist() == EXPECTED


@pytest.mark.parametrize("mode", MODES)
def test_QOS_2_an_execution_whose_deadline_has_passed_is_not_begun(
    runtime: Runtime, resources: ExitStack, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A device that fails shows that no step is executed; the fallback is not tried."""
    way = Limited(mode, runtime.prepare(PLAN, devices=(FAILING, "reference")), resources)
    for _ in range(2):
        with pytest.raises(nnfmq.MissedDeadlinePersistent, match="before the execution began"):
            way.execute(A, B, timeout=0)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert way.execute(A, B, timeout=None)[0].tolist() == EXPECTED


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("mode", WAITING)
def test_QOS_3_a_step_that_takes_too_long_ends_the_execution_at_the_deadline(
    runtime: Runtime,
    workers: list[Process],
    resources: ExitStack,
    mode: str,
    index: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    way = Limited(mode, runtime.prepare(PLAN), resources)
    assert way.execute(A + 1, B, timeout=None)[0].tolist() == (A + 1 + 2 * B).tolist()
    with workers[index].stopped():
        for _ in range(2):
            with pytest.raises(nnfmq.MissedDeadlineTransient):
                way.execute(A + 2, B, timeout=0.05)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert way.execute(A, B, timeout=None)[0].tolist() == EXPECTED


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("mode", ["asynchronous", "fenced", "duration", "reusable_fenced"])
def test_QOS_3_a_driver_that_continues_after_the_deadline_reports_it(
    runtime: Runtime, workers: list[Process], resources: ExitStack, mode: str, index: int
) -> None:
    way = Limited(mode, runtime.prepare(PLAN), resources)
    connection = runtime.clients[index]._connection
    with workers[index].stopped():
        end_ns = time.monotonic_ns() + 300_000_000
        call = InThread.start(lambda: way.execute(A, B, timeout=0.2))
        until(lambda: bool(connection._pending_calls) or not call.is_running, "the execution waits for the driver")
        until(lambda: time.monotonic_ns() > end_ns, "the deadline has passed")
    assert isinstance(call.wait().error, nnfmq.MissedDeadline)


@pytest.mark.parametrize("has_fallback", [True, False])
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_LIFE_4_a_driver_that_is_killed_before_the_deadline_is_no_missed_deadline(
    runtime: Runtime, workers: list[Process], resources: ExitStack, mode: str, index: int, has_fallback: bool
) -> None:
    way = Limited(mode, runtime.prepare(PLAN, cpu=("reference",) if has_fallback else None), resources)
    workers[index].stop()
    call = InThread.start(lambda: way.execute(A, B, timeout=LIMIT_S))
    until(lambda: _waits_for(runtime, index, mode), "the execution waits for the stopped driver")
    workers[index].kill()
    call.wait()
    if has_fallback:
        assert call.value[0].tolist() == EXPECTED
    else:
        assert isinstance(call.error, nnfmq.DeadObject)


def _waits_for(runtime: Runtime, index: int, mode: str) -> bool:
    connection = runtime.clients[index]._connection
    if mode in ("burst", "pool"):
        return any(channel.results.waiters for channel in connection._bursts.values())  # type: ignore[attr-defined]
    if mode == "awaited_burst":
        return any(channel.in_flight for channel in connection._bursts.values())  # type: ignore[attr-defined]
    return bool(connection._pending_calls)


@pytest.mark.parametrize("mode", MODES)
def test_QOS_3_a_deadline_ends_a_loop_that_the_runtime_interprets(
    runtime: Runtime, resources: ExitStack, mode: str
) -> None:
    way = Limited(mode, runtime.prepare(control_flow_plan(counting())), resources)
    with pytest.raises(nnfmq.MissedDeadline) as caught:
        way.execute(*ENDLESS, timeout=0.1)
    assert "a loop was still running" not in str(caught.value)
    total, x = ENDLESS[0], ENDLESS[2]
    (result,) = way.execute(total, np.array([3], np.int32), x, timeout=LIMIT_S)
    assert result.tolist() == [31, 62]


def test_QOS_3_the_limit_of_a_loop_may_pass_before_the_deadline(runtime: Runtime) -> None:
    model = runtime.prepare(control_flow_plan(counting()))
    with pytest.raises(nnfmq.MissedDeadlineTransient, match="a loop was still running after 50000000 ns"):
        model.execute(*ENDLESS, timeout=LIMIT_S, loop_timeout=0.05)


def test_QOS_1_all_steps_have_the_same_deadline(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    exchange = Connection.exchange

    def record(self: Connection, message: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(message, messages.Execute | messages.RunExecution):
            sent.append(message.deadline_ns)
        return exchange(self, message, *arguments, **options)

    monkeypatch.setattr(Connection, "exchange", record)
    model = runtime.prepare(PLAN)
    with model.create_reusable_execution() as execution:
        for execute in (model.execute, execution.compute):
            begin_ns = time.monotonic_ns()
            execute(A, B, timeout=7.0)
            first, second = sent
            sent.clear()
            assert begin_ns + 7_000_000_000 <= first <= time.monotonic_ns() + 7_000_000_000
            assert second == first
            execute(A, B, timeout=1e30)
            assert min(sent) > CLOCK_MAX_NS // 1000
            sent.clear()


# ------------------------------------------------------------------------------------------------ fences


@pytest.mark.parametrize("is_loop", [False, True])
def test_QOS_3_a_fence_that_is_not_signaled_in_time_ends_the_execution(runtime: Runtime, is_loop: bool) -> None:
    model = runtime.prepare(control_flow_plan(counting()) if is_loop else PLAN)
    arrays = (ENDLESS[0], np.array([1], np.int32), ENDLESS[2]) if is_loop else (A, B)
    with nnfmq.Fence.create() as gate:
        with model.execute_fenced(*arrays, wait_for=[gate], timeout=0.05) as execution:
            assert execution.wait(LIMIT_S) is FenceState.ERROR
            with pytest.raises(nnfmq.MissedDeadlineTransient):
                execution.result(LIMIT_S)
        gate.signal()
        with model.execute_fenced(*arrays, wait_for=[gate], timeout=LIMIT_S) as execution:
            assert execution.wait(LIMIT_S) is FenceState.SIGNALED


def test_QOS_3_a_duration_begins_with_the_last_fence(runtime: Runtime) -> None:
    model = runtime.prepare(PLAN)
    with nnfmq.Fence.create() as gate, model.execute_fenced(A, B, wait_for=[gate], duration=LIMIT_S) as execution:
        assert not execution.done()
        gate.signal()
        assert execution.result(LIMIT_S)[0].tolist() == EXPECTED
    with nnfmq.Fence.create() as gate, model.execute_fenced(A, B, wait_for=[gate], duration=0) as execution:
        assert execution.wait(0.05) is FenceState.ACTIVE
        gate.signal()
        with pytest.raises(nnfmq.MissedDeadlinePersistent):
            execution.result(LIMIT_S)
    with model.execute_fenced(A, B, timeout=LIMIT_S, duration=0) as execution:
        assert execution.wait(LIMIT_S) is FenceState.ERROR


def test_QOS_3_the_timeout_counts_from_the_launch_beside_a_duration(runtime: Runtime) -> None:
    model = runtime.prepare(PLAN)
    with (
        nnfmq.Fence.create() as gate,
        model.execute_fenced(A, B, wait_for=[gate], timeout=0.05, duration=LIMIT_S) as execution,
    ):
        assert execution.wait(LIMIT_S) is FenceState.ERROR
        assert isinstance(InThread.start(execution.result).wait().error, nnfmq.MissedDeadlineTransient)


# ------------------------------------------------------------------------------------------------ HAL requests


class Requested:
    """A request whose arguments are in one memory, and the ways to execute it."""

    def __init__(self, stack: ExitStack) -> None:
        self._memory = stack.enter_context(nnfmq.Memory.create(48))
        self._memory.view[:32] = A.tobytes() + B.tobytes()
        places = [RequestArgument(location=DataLocation(0, offset, 16)) for offset in (0, 16, 32)]
        self.request = Request(tuple(places[:2]), tuple(places[2:]), (self._memory,))

    def result(self) -> Any:
        """Return the output, and forget it."""
        found = np.frombuffer(self._memory.view, np.float32, 4, 32).reshape(2, 2).tolist()
        self._memory.view[32:] = bytes(16)
        return found


def requested(model: nnfmq.CompiledModel, stack: ExitStack, request: Request) -> dict[str, Callable[..., Any]]:
    """Return all ways to execute a request with a timeout."""
    burst, own = stack.enter_context(model.request_burst()), stack.enter_context(model.burst())
    bound = stack.enter_context(model.create_reusable_request(request))

    def fenced(timeout: float | None) -> Any:
        with model.execute_request_fenced(request, timeout=timeout) as execution:
            return execution.result(LIMIT_S)

    def bound_fenced(timeout: float | None) -> Any:
        with bound.compute_fenced(timeout=timeout) as execution:
            return execution.result(LIMIT_S)

    return {
        "synchronous": lambda timeout: model.execute_request(request, timeout=timeout),
        "asynchronous": lambda timeout: model.execute_request_async(request, timeout=timeout).result(LIMIT_S),
        "fenced": fenced,
        "request burst": lambda timeout: burst.execute_request(request, timeout=timeout),
        "burst": lambda timeout: own.execute_request(request, timeout=timeout),
        "loop timeout": lambda timeout: burst.execute_request(
            request, ExecutionConfig(loop_timeout_ns=1_000_000_000), timeout=timeout
        ),
        "bound": lambda timeout: bound.compute(timeout=timeout),
        "bound fenced": bound_fenced,
    }


@pytest.mark.parametrize("devices", [("reference", "reference"), (FAILING, "reference"), ("reference", FAILING)])
def test_QOS_1_requests_have_deadlines_in_every_mode(
    runtime: Runtime, resources: ExitStack, devices: tuple[str, str]
) -> None:
    model, made = runtime.prepare(PLAN, devices=devices), Requested(resources)
    for mode, execute in requested(model, resources, made.request).items():
        with pytest.raises(nnfmq.MissedDeadlinePersistent):
            execute(0)
        assert made.result() == [[0, 0], [0, 0]], mode
        for timeout in (LIMIT_S, None):
            execute(timeout)
            assert made.result() == EXPECTED, mode


def test_the_same_ways_exist_for_a_model_on_one_device(runtime: Runtime, resources: ExitStack) -> None:
    made = Requested(resources)
    whole = resources.enter_context(runtime.clients[0].device("reference").prepare(two_adds()))
    for mode, execute in requested(whole, resources, made.request).items():
        with pytest.raises(nnfmq.MissedDeadline):
            execute(0)
        execute(LIMIT_S)
        assert made.result() == EXPECTED, mode


@pytest.mark.parametrize("index", [0, 1])
def test_LIFE_4_request_bursts_and_bound_requests_survive_a_driver_or_report_its_death(
    runtime: Runtime, workers: list[Process], resources: ExitStack, index: int
) -> None:
    made = Requested(resources)
    for cpu in (("reference",), None):
        ways = requested(runtime.prepare(PLAN, cpu=cpu), resources, made.request)
        for name in ("request burst", "bound"):
            ways[name](LIMIT_S)
            assert made.result() == EXPECTED
        if cpu is not None:
            survivors = ways
    workers[index].kill()
    until(lambda: not runtime.clients[index]._connection.is_open, "the client knows")
    for name in ("request burst", "bound", "bound fenced"):
        survivors[name](LIMIT_S)
        assert made.result() == EXPECTED
        with pytest.raises(nnfmq.DeadObject):
            ways[name](LIMIT_S)


def test_a_request_burst_has_no_arrays_and_takes_unknown_shapes(runtime: Runtime, resources: ExitStack) -> None:
    model = two_adds()
    for index in (0, 1, 3, 4):
        model = with_operand(model, index, dimensions=(0, 2))
    divided, made = runtime.prepare(linear_plan(model, [0], [1])), Requested(resources)
    inputs = tuple(RequestArgument(location=place.location, dimensions=(2, 2)) for place in made.request.inputs)
    with pytest.raises(nnfmq.InvalidArgument, match="a burst"):
        divided.burst()
    with divided.request_burst() as burst:
        assert repr(burst).startswith("<CompoundBurst on 'first, second', without memory: ")
        assert (burst.inputs, burst.outputs) == ((), ())
        with pytest.raises(nnfmq.InvalidArgument, match="only has execute_request"):
            burst.execute(A, B)
        request = Request(inputs, made.request.outputs, made.request.pools)
        (shape,) = burst.execute_request(request).shapes
        assert (shape.dimensions, made.result()) == ((2, 2), EXPECTED)
        for pool in request.pools:
            burst.free_memory(pool)  # type: ignore[arg-type]
        burst.execute_request(request)
        assert made.result() == EXPECTED
    for call in (lambda: burst.execute(A, B), lambda: burst.execute_request(request)):
        with pytest.raises(nnfmq.InvalidArgument, match="this burst is closed"):
            call()


def test_a_bound_request_executes_once_at_a_time_and_outlives_its_model(runtime: Runtime, resources: ExitStack) -> None:
    made, model = Requested(resources), runtime.prepare(PLAN)
    with pytest.raises(nnfmq.InvalidArgument):
        model.create_reusable_request(Request(made.request.inputs, (), made.request.pools))
    with model.create_reusable_request(made.request) as bound, nnfmq.Fence.create() as gate:
        model.close()
        with bound.compute_fenced([gate]) as execution:
            for call in (bound.compute, bound.compute_fenced):
                with pytest.raises(nnfmq.InvalidArgument, match="RUX-3"):
                    call()
            gate.signal()
            assert execution.result(LIMIT_S).launched.time_in_driver_ns == -1
        assert made.result() == EXPECTED
        bound.compute()
        assert made.result() == EXPECTED
    for call in (bound.compute, bound.compute_fenced):
        with pytest.raises(nnfmq.InvalidArgument, match="this execution is closed"):
            call()


def test_RUX_3_a_bound_request_first_waits_for_its_late_step(
    runtime: Runtime, workers: list[Process], resources: ExitStack
) -> None:
    made = Requested(resources)
    bound = resources.enter_context(runtime.prepare(PLAN).create_reusable_request(made.request))
    bound.compute(timeout=LIMIT_S)
    with workers[1].stopped():
        with pytest.raises(nnfmq.MissedDeadlineTransient):
            bound.compute(timeout=0.05)
        for call in (bound.compute, bound.compute_fenced):
            with pytest.raises(nnfmq.MissedDeadlineTransient, match="before the driver had ended the run before"):
                call(timeout=0.02)
    made.result()
    with bound.compute_fenced(timeout=LIMIT_S) as execution:
        execution.result(LIMIT_S)
    assert made.result() == EXPECTED


def test_a_bound_request_whose_late_step_may_still_write_is_not_executed_again(
    runtime: Runtime, workers: list[Process], resources: ExitStack
) -> None:
    """No driver binds a step that has a temporary of unknown size: it may execute a request beside the late one."""
    plan = linear_plan(with_operand(two_adds(), 3, dimensions=(0, 0)), [0], [1])
    bound = resources.enter_context(runtime.prepare(plan).create_reusable_request(Requested(resources).request))
    bound.compute(timeout=LIMIT_S)
    with pytest.raises(nnfmq.MissedDeadlinePersistent):
        bound.compute(timeout=0)
    bound.compute()
    with workers[1].stopped(), pytest.raises(nnfmq.MissedDeadlineTransient):
        bound.compute(timeout=0.05)
    with pytest.raises(nnfmq.BadState, match="make a new one"):
        bound.compute()


def test_BUR_19_an_AIDL_burst_is_of_one_device(runtime: Runtime) -> None:
    model = runtime.prepare(PLAN)
    with pytest.raises(nnfmq.InvalidArgument, match=r"is on first, second: use request_burst\(\)"):
        model.aidl_burst()


@pytest.mark.parametrize("is_divided", [True, False])
def test_the_result_of_an_execution_that_was_closed_early_is_an_error(
    runtime: Runtime, resources: ExitStack, is_divided: bool
) -> None:
    whole = resources.enter_context(runtime.clients[0].device("reference").prepare(two_adds()))
    execution = (runtime.prepare(PLAN) if is_divided else whole).create_reusable_execution()
    with nnfmq.Fence.create() as gate, execution.compute_fenced(A, B, wait_for=[gate]) as launched:
        execution.close()
        gate.signal()
        with pytest.raises(nnfmq.InvalidArgument, match="this execution is closed"):
            launched.result(LIMIT_S)
