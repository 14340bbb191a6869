"""Fenced executions between real processes: chains across drivers and applications, and the death of any of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
from support.drivers import APPS, DEAD_WITHIN_NS, LIMIT_S, Daemon, InThread, Process, Program, at_least_once, one, until
from support.models import null_model, slow_model

import nnfmq
from nnfmq import FenceState
from nnfmq.base.channel import Channel

SIGNALED, ERROR = FenceState.SIGNALED, FenceState.ERROR


@pytest.fixture
def own(resources: ExitStack) -> nnfmq.Fence:
    return resources.enter_context(nnfmq.Fence.create())


@contextmanager
def signaller() -> Iterator[tuple[Program, nnfmq.Fence]]:
    """Run a process that has a fence; yield both."""
    local, remote = Channel.pair()
    arguments = ["-P", APPS / "signals.py", str(remote.fileno())]
    with local, remote, Program.start(arguments, pass_fds=[remote.fileno()]) as program:
        remote.close()
        (fd,) = local.receive(time.monotonic_ns() + int(LIMIT_S * 1e9)).detach_fds()
        with nnfmq.Fence.adopt(fd) as fence:
            yield program, fence


def test_API_9_FEN_12_an_execution_waits_for_another_process(model: nnfmq.PreparedModel) -> None:
    with signaller() as (program, fence), model.execute_fenced(one(5), wait_for=[fence]) as launched:
        assert not launched.done()
        program.tell("signal")
        assert launched.result(LIMIT_S) == (one(5),)


def test_FEN_5_another_process_sets_its_fence_to_error(model: nnfmq.PreparedModel) -> None:
    with signaller() as (program, fence), model.execute_fenced(one(5), wait_for=[fence]) as launched:
        program.tell("fail")
        assert launched.wait(LIMIT_S) is ERROR
        with pytest.raises(nnfmq.GeneralFailure, match="in error"):
            launched.result()


def test_FEN_5_N_FEN_6_SIGKILL_of_the_signaler_is_an_error_immediately(model: nnfmq.PreparedModel) -> None:

    def is_an_error_immediately() -> bool:
        with (
            signaller() as (program, fence),
            Process(program.pid) as process,
            model.execute_fenced(one(5), wait_for=[fence]) as first,
            model.execute_fenced(one(5), wait_for=[first.fence]) as second,
        ):
            killed_ns = process.kill()
            assert second.wait(LIMIT_S) is ERROR
            ended_ns = time.monotonic_ns()
            assert first.wait(0) is ERROR
            print(f"from SIGKILL to the second fence's error: {(ended_ns - killed_ns) / 1e6:.2f} ms")
            return ended_ns - killed_ns < DEAD_WITHIN_NS

    at_least_once(is_an_error_immediately, "the second fence is in error at once")
    assert model.execute(one(3)) == (one(3),)  # the driver lives


def test_FEN_12_a_chain_runs_across_two_drivers(
    daemon: Daemon, model: nnfmq.PreparedModel, own: nnfmq.Fence, resources: ExitStack
) -> None:
    other = resources.enter_context(daemon.connect())
    remote = resources.enter_context(other.device("reference").prepare(null_model()))
    launched = resources.enter_context(model.execute_fenced(one(0), wait_for=[own]))
    for number in range(1, 6):
        prepared = remote if number % 2 else model
        launched = resources.enter_context(prepared.execute_fenced(one(number), wait_for=[launched.fence]))
    assert not launched.done()
    own.signal()
    assert launched.result(LIMIT_S) == (one(5),)


def test_FEN_12_the_death_of_a_driver_in_a_chain_fails_the_dependent_executions(
    daemon: Daemon, model: nnfmq.PreparedModel, own: nnfmq.Fence, resources: ExitStack
) -> None:
    other = resources.enter_context(daemon.connect())
    remote = resources.enter_context(other.device("reference").prepare(null_model()))
    first = resources.enter_context(remote.execute_fenced(one(1), wait_for=[own]))
    second = resources.enter_context(model.execute_fenced(one(2), wait_for=[first.fence]))
    with Process(other.worker_pid) as worker:
        worker.kill()
        assert second.wait(LIMIT_S) is ERROR
    with pytest.raises(nnfmq.DeadObject):
        first.result()
    with pytest.raises(nnfmq.GeneralFailure, match="in error"):
        second.result()


def test_LIFE_4_SIGKILL_of_the_worker_fails_a_waiting_execution(
    client: nnfmq.Client, model: nnfmq.PreparedModel, own: nnfmq.Fence, resources: ExitStack
) -> None:
    launched = resources.enter_context(model.execute_fenced(one(1), wait_for=[own]))
    with Process(client.worker_pid) as worker:
        waiting = InThread.start(launched.wait)
        waiting.wait_until_asleep()
        killed_ns = worker.kill()
        assert waiting.wait().value is ERROR
        print(f"from SIGKILL to the fence's error: {(waiting.ended_ns - killed_ns) / 1e6:.2f} ms")
    with pytest.raises(nnfmq.DeadObject):
        launched.result()


RUNS: dict[str, Callable[[nnfmq.PreparedModel, np.ndarray[Any, Any], ExitStack], Callable[[], Any]]] = {
    "EXE-5 asynchronous": lambda model, given, _: model.execute_async(given).result,
    "FEN-10 fenced": lambda model, given, stack: stack.enter_context(model.execute_fenced(given)).result,
    "RUX-1 reusable": lambda model, given, stack: (lambda execution: lambda: execution.compute(given))(
        stack.enter_context(model.create_reusable_execution())
    ),
    "RUX-1 reusable and fenced": lambda model, given, stack: (
        stack.enter_context(stack.enter_context(model.create_reusable_execution()).compute_fenced(given)).result
    ),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_LIFE_4_LIFE_5_UTL_9_SIGKILL_of_the_worker_fails_a_running_computation(
    run: Callable[..., Callable[[], Any]], client: nnfmq.Client, resources: ExitStack
) -> None:
    model = resources.enter_context(client.device("reference").prepare(slow_model()))
    with Process(client.worker_pid) as worker:
        waiting = InThread.start(run(model, np.zeros(model.inputs[0].shape, np.float32), resources))
        until(lambda: "R" in worker.states(), "the worker computes")
        worker.kill()
        assert isinstance(waiting.wait().error, nnfmq.DeadObject)


def test_LIFE_3_the_death_of_an_application_does_not_affect_another(
    model: nnfmq.PreparedModel, own: nnfmq.Fence, daemon: Daemon, resources: ExitStack
) -> None:
    launched = resources.enter_context(model.execute_fenced(one(4), wait_for=[own]))
    other = daemon.connect()
    with other, Process(other.worker_pid) as worker:
        worker.kill()
        worker.wait_for_end()
    own.signal()
    assert launched.result(LIMIT_S) == (one(4),)


def test_LIFE_9_a_thousand_executions_of_every_kind_leak_nothing_in_the_driver(
    client: nnfmq.Client, model: nnfmq.PreparedModel
) -> None:
    def some(count: int) -> None:
        with model.create_reusable_execution() as execution:
            for number in range(count):
                assert model.execute_async(one(number)).result(LIMIT_S) == (one(number),)
                with model.execute_fenced(one(number)) as launched:
                    assert launched.result(LIMIT_S) == (one(number),)
                assert execution.compute(one(number)) == (one(number),)
                with execution.compute_fenced(one(number)) as launched:
                    assert launched.result(LIMIT_S) == (one(number),)
        client.connection.close_own_bursts()  # which the model keeps for `execute_async`, for 2 s after the last call
        client.devices()  # the reply follows the release of everything before

    with Process(client.worker_pid) as worker:
        some(5)
        before = worker.descriptors()
        some(250)
        # A burst of the first executions may still have been open before.
        until(lambda: Counter(worker.descriptors()) <= Counter(before), "the driver holds no more than it held")
