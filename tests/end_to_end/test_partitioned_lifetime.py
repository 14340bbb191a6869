"""Drivers of a model on several devices are killed or stopped, and objects are closed in every order."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from support.control_flow_models import counting
from support.drivers import DEAD_WITHIN_NS, LIMIT_S, Daemon, InThread, Process, app, kill_worker, until
from support.partitioned import MODES, Runtime, error_of
from support.plans import control_flow_plan, linear_plan
from support.small_models import two_adds

import nnfmq

A = np.array([[1, 2], [3, 4]], np.float32)
B = np.array([[10, 20], [30, 40]], np.float32)
EXPECTED = (A + 2 * B).tolist()
PLAN = linear_plan(two_adds(), [0], [1])


@pytest.fixture
def workers(runtime: Runtime) -> Iterator[list[Process]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Process(client.worker_pid)) for client in runtime.clients]


def kill(runtime: Runtime, workers: list[Process], index: int) -> None:
    """Kill a worker, and wait until its client knows."""
    workers[index].kill()
    until(lambda: not runtime.clients[index]._connection.is_open, "the client knows")


class Prepared:
    """One way to execute, whose objects exist before a driver dies."""

    def __init__(self, mode: str, model: Any, stack: ExitStack) -> None:
        if mode == "burst":
            burst = stack.enter_context(model.burst())
            self.execute = burst.execute
        elif mode in ("reusable", "once"):
            make = {"reusable": model.create_reusable_execution, "once": model.create_execution}[mode]
            self.execute = stack.enter_context(make()).compute
        else:
            self.execute = lambda *inputs: MODES[mode](model, *inputs)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_PART_6_LIFE_4_the_steps_of_a_dead_driver_are_executed_on_the_CPU(
    runtime: Runtime, workers: list[Process], mode: str, index: int
) -> None:
    with ExitStack() as stack:
        way = Prepared(mode, runtime.prepare(PLAN), stack)
        if mode != "once":
            assert way.execute(A, B)[0].tolist() == EXPECTED
        kill(runtime, workers, index)
        for _ in range(1 if mode == "once" else 2):
            assert way.execute(A, B)[0].tolist() == EXPECTED


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_LIFE_4_without_a_fallback_a_dead_driver_is_reported(
    runtime: Runtime, workers: list[Process], mode: str, index: int
) -> None:
    with ExitStack() as stack:
        way = Prepared(mode, runtime.prepare(PLAN, cpu=None), stack)
        kill(runtime, workers, index)
        with pytest.raises(nnfmq.DeadObject):
            way.execute(A, B)


@pytest.mark.parametrize("has_fallback", [True, False])
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_LIFE_4_a_driver_that_is_killed_in_the_middle_of_its_step_ends_the_step_immediately(
    runtime: Runtime, workers: list[Process], mode: str, index: int, has_fallback: bool
) -> None:
    with ExitStack() as stack:
        way = Prepared(mode, runtime.prepare(PLAN, cpu=("reference",) if has_fallback else None), stack)
        workers[index].stop()
        call = InThread.start(lambda: way.execute(A, B))
        until(lambda: _waits_for(runtime, index, mode), "the execution waits for the stopped driver")
        killed_ns = workers[index].kill()
        call.wait()
        if has_fallback:
            assert call.value[0].tolist() == EXPECTED
        else:
            assert isinstance(call.error, nnfmq.DeadObject)
            assert call.ended_ns - killed_ns < 50 * DEAD_WITHIN_NS  # at once, were this machine idle


def _waits_for(runtime: Runtime, index: int, mode: str) -> bool:
    """Return whether something of this process waits for the driver."""
    connection = runtime.clients[index]._connection
    if mode == "burst":
        return any(channel.results.waiters for channel in connection._bursts.values())  # type: ignore[attr-defined]
    return bool(connection._pending_calls)


@pytest.mark.parametrize("mode", MODES)
def test_a_stopped_driver_delays_its_step_and_nothing_else(runtime: Runtime, workers: list[Process], mode: str) -> None:
    with ExitStack() as stack:
        way = Prepared(mode, runtime.prepare(PLAN), stack)
        other = runtime.prepare(linear_plan(two_adds(), [0, 1]))
        with workers[1].stopped():
            call = InThread.start(lambda: way.execute(A, B))
            until(lambda: _waits_for(runtime, 1, mode), "the execution waits for the stopped driver")
            assert other.execute(A, B)[0].tolist() == EXPECTED
            assert call.is_running
        assert call.wait().value[0].tolist() == EXPECTED


def test_LIFE_4_both_drivers_and_the_CPU_s_are_dead(runtime: Runtime, workers: list[Process]) -> None:
    model = runtime.prepare(PLAN)
    for index in range(2):
        kill(runtime, workers, index)
    kill_worker(runtime.cpu_client)
    for mode in MODES:
        with pytest.raises(nnfmq.DeadObject):
            MODES[mode](model, A, B)


def test_LIFE_2_a_model_may_be_closed_while_it_executes(runtime: Runtime, workers: list[Process]) -> None:
    model = runtime.prepare(PLAN)
    with workers[1].stopped():
        pending = model.execute_async(A, B)
        call = InThread.start(lambda: model.execute(A, B))
        until(lambda: len(runtime.clients[1]._connection._pending_calls) > 1, "both executions wait")
        model.close()
        assert all(step.handle.is_open for step in model.steps)
    assert pending.result(LIMIT_S)[0].tolist() == EXPECTED
    assert call.wait().value[0].tolist() == EXPECTED
    until(lambda: not any(step.handle.is_open for step in model.steps), "the steps are released")
    for mode in MODES:
        with pytest.raises(nnfmq.InvalidArgument, match="closed"):
            MODES[mode](model, A, B)


def test_LIFE_2_bursts_and_executions_outlive_their_model(runtime: Runtime) -> None:
    model = runtime.prepare(PLAN)
    with model.burst() as burst, model.create_reusable_execution() as execution:
        model.close()
        model.close()
        assert burst.execute(A, B)[0].tolist() == EXPECTED
        assert execution.compute(A, B)[0].tolist() == EXPECTED
    assert not any(step.handle.is_open for step in model.steps)
    assert repr(model).startswith("<PartitionedModel on 'first, second', closed")


def test_closed_bursts_and_executions_say_so(runtime: Runtime) -> None:
    model = runtime.prepare(PLAN)
    burst, execution = model.burst(), model.create_reusable_execution()
    burst.execute(A, B)
    burst.close()
    execution.close()
    assert burst.last.latency_ns > 0
    for call in (lambda: burst.execute(A, B), lambda: execution.compute(A, B)):
        with pytest.raises(nnfmq.InvalidArgument, match="closed"):
            call()
    assert burst.inputs == execution.inputs == burst.outputs == execution.outputs == ()
    assert "closed" in repr(burst) and "closed" in repr(execution)


def test_a_model_that_nobody_closes_leaves_no_memory_behind(runtime: Runtime) -> None:
    """The leak check of every test finds what is left; closing the client releases the steps."""
    model = runtime.prepare(PLAN)
    model.execute(A, B)
    runtime._resources.pop_all()  # nor does anything refer to it any more
    del model
    gc.collect()
    for client in runtime.clients:
        client.close()


def test_a_burst_keeps_the_constants_of_a_model_that_nothing_refers_to(runtime: Runtime) -> None:
    arrays = np.array([1, 2], np.float32), np.array([2], np.int32), np.array([10, 20], np.float32)
    burst = runtime.prepare(control_flow_plan(counting())).burst()
    kept = runtime._resources.pop_all()
    del kept
    gc.collect()
    with burst:
        assert burst.execute(*arrays)[0].tolist() == [21, 42]
    for client in runtime.clients:
        client.close()


def test_LIFE_9_executions_in_many_threads_share_a_model_and_leave_nothing(runtime: Runtime) -> None:
    model = runtime.prepare(PLAN)
    wrong: list[Any] = []

    def work(k: int) -> None:
        for round in range(10):
            x = A + 10 * k + round
            for result in (model.execute(x, B), model.execute_async(x, B).result(LIMIT_S)):
                if result[0].tolist() != (x + 2 * B).tolist():
                    wrong.append(result)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert wrong == []


def test_PART_10_a_pool_lends_bursts_of_a_plan_and_survives_the_death_of_a_driver(
    runtime: Runtime, workers: list[Process]
) -> None:
    model = runtime.prepare(PLAN)
    with model.burst_pool(2) as pool:
        assert pool.execute(A, B)[0].tolist() == EXPECTED
        with pool.acquire() as first, pool.acquire() as second:
            assert first.execute(A, B)[0].tolist() == second.execute(A, B)[0].tolist() == EXPECTED
            waiting = InThread.start(lambda: pool.execute(A, B))
            waiting.wait_until_asleep()
            kill(runtime, workers, 0)
        assert waiting.wait().value[0].tolist() == EXPECTED


def test_PART_10_a_pool_without_fallback_reports_the_death_of_a_driver(
    runtime: Runtime, workers: list[Process]
) -> None:
    with runtime.prepare(PLAN, cpu=None).burst_pool(1) as pool, pool.acquire():
        waiting = InThread.start(lambda: pool.execute(A, B))
        waiting.wait_until_asleep()
        kill(runtime, workers, 1)
        assert isinstance(waiting.wait().error, nnfmq.DeadObject)


class Interrupted(Exception):
    """Raised by the signal handler."""


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("mode", ["synchronous", "burst", "reusable"])
def test_a_signal_during_a_step_does_not_mix_up_results(
    runtime: Runtime, workers: list[Process], mode: str, index: int
) -> None:
    def handle(_number: int, _frame: object) -> None:
        raise Interrupted

    def interrupt() -> None:
        until(lambda: _waits_for(runtime, index, mode), "the execution waits for the stopped driver")
        signal.pthread_kill(main, signal.SIGUSR1)

    model, main = runtime.prepare(PLAN), threading.get_ident()
    previous = signal.signal(signal.SIGUSR1, handle)
    try:
        with ExitStack() as stack:
            way = Prepared(mode, model, stack)
            with workers[index].stopped():
                sender = InThread.start(interrupt)
                with pytest.raises(Interrupted):
                    way.execute(A + 5, B + 5)
                sender.wait()
            if mode == "reusable":
                with pytest.raises(nnfmq.BadState, match="interrupted"):
                    way.execute(A, B)
                way = Prepared(mode, model, stack)
            for k in range(5):
                assert way.execute(A + k, B)[0].tolist() == (A + k + 2 * B).tolist()
    finally:
        signal.signal(signal.SIGUSR1, previous)


@pytest.mark.parametrize("mode", ["burst", "reusable"])
def test_BUR_16_a_second_concurrent_execution_is_rejected(runtime: Runtime, workers: list[Process], mode: str) -> None:
    with ExitStack() as stack:
        way = Prepared(mode, runtime.prepare(PLAN), stack)
        with workers[1].stopped():
            call = InThread.start(lambda: way.execute(A, B))
            until(lambda: _waits_for(runtime, 1, mode), "the execution waits for the stopped driver")
            with pytest.raises(nnfmq.BadState):
                way.execute(A, B)
        assert call.wait().value[0].tolist() == EXPECTED


def test_PART_11_a_fenced_execution_continues_after_it_is_closed(runtime: Runtime) -> None:
    model = runtime.prepare(PLAN)
    with nnfmq.Fence.create() as gate:
        execution = model.execute_fenced(A, B, wait_for=[gate])
        with model.execute_fenced(B, A, wait_for=[execution.fence]) as after:
            execution.close()
            execution.close()
            assert not after.done()
            gate.signal()
            assert after.result(LIMIT_S)[0].tolist() == (B + 2 * A).tolist()


@pytest.mark.parametrize("is_loop", [False, True])
def test_PART_11_FEN_5_a_fence_in_error_is_rejected_or_puts_the_execution_in_error(
    runtime: Runtime, is_loop: bool
) -> None:
    model = runtime.prepare(control_flow_plan(counting()) if is_loop else PLAN)
    arrays = (np.ones(2, np.float32), np.array([1], np.int32), np.ones(2, np.float32)) if is_loop else (A, B)
    with nnfmq.Fence.create() as gate:
        with model.execute_fenced(*arrays, wait_for=[gate]) as execution:
            with pytest.raises(nnfmq.MissedDeadlineTransient, match="continues"):
                execution.result(0.01)
            with pytest.raises(nnfmq.GeneralFailure, match="not done"):
                execution.info()
            gate.fail()
            assert execution.wait(LIMIT_S) is nnfmq.hal.types.FenceState.ERROR
            with pytest.raises(nnfmq.GeneralFailure, match="a fence that the execution waited for is in error"):
                execution.result(LIMIT_S)
        with pytest.raises(nnfmq.InvalidArgument, match="in error"):
            model.execute_fenced(*arrays, wait_for=[gate])
    with pytest.raises(nnfmq.InvalidArgument, match="no fence"):
        model.execute_fenced(*arrays, wait_for=[0])


def test_PART_11_the_fences_of_an_application_that_dies_are_in_error(runtime: Runtime) -> None:
    """The driver of the first step waits for a fence whose creator has gone."""
    model = runtime.prepare(PLAN)
    gate = nnfmq.Fence.create()
    with model.execute_fenced(A, B, wait_for=[gate]) as execution:
        gate.close()
        assert isinstance(error_of(lambda: execution.result(LIMIT_S)), nnfmq.GeneralFailure)


def test_TIM_1_times_are_measured_on_one_device_only(runtime: Runtime) -> None:
    model = runtime.prepare(PLAN)
    measured = nnfmq.hal.types.ExecutionConfig(nnfmq.hal.types.MeasureTiming.YES)
    empty = nnfmq.hal.types.Request((), ())
    with model.burst() as burst:
        calls: list[Callable[[], Any]] = [
            lambda: model.execute(A, B, measure=True),
            lambda: model.execute_async(A, B, measure=True),
            lambda: model.execute_fenced(A, B, measure=True),
            lambda: model.create_reusable_execution(measure=True),
            lambda: model.create_execution(measure=True),
            lambda: burst.execute(A, B, measure=True),
            lambda: asyncio.run(burst.execute_async(A, B, measure=True)),
            lambda: burst.execute_request(empty, measured),
            lambda: model.execute_request(empty, measured),
            lambda: model.execute_request_async(empty, measured),
            lambda: model.execute_request_fenced(empty, measured),
            lambda: model.create_reusable_request(empty, measured),
        ]
        for call in calls:
            with pytest.raises(nnfmq.InvalidArgument, match=r"`measure` needs a model on one device.*client\.device"):
                call()


def test_LIFE_3_LIFE_8_drivers_release_the_steps_of_an_application_that_is_killed(drivers: list[Daemon]) -> None:
    with app("partitioned", *(driver.path for driver in drivers[:2])) as program, ExitStack() as stack:
        workers = [stack.enter_context(Process(int(pid))) for pid in program.line().split()]
        assert [worker.has_exited() for worker in workers] == [False, False]
        program.popen.kill()
        assert program.wait() == -signal.SIGKILL
        for worker in workers:
            worker.wait_for_end()


@pytest.mark.parametrize("mode", MODES)
def test_LIFE_6_a_step_continues_in_the_driver_that_replaces_a_dead_one(drivers: list[Daemon], mode: str) -> None:
    with ExitStack() as stack:
        runtime = Runtime(drivers, stack, recover=True)
        way = Prepared(mode, runtime.prepare(PLAN, cpu=None), stack)
        if mode != "once":
            assert way.execute(A, B)[0].tolist() == EXPECTED
        workers = [stack.enter_context(Process(client.worker_pid)) for client in runtime.clients]
        kill(runtime, workers, 1)
        assert way.execute(A, B)[0].tolist() == EXPECTED
