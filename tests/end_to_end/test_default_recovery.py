"""What happens to an application that knows nothing of drivers when its driver dies: it goes on, and is told."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import LIMIT_S, InThread, Process, kill_worker, one, running_daemon, until
from support.execution_modes import fenced, in_a_task, of_a_pool, reusable
from support.failing_device import DEVICE, DIE, failing_driver, four
from support.models import add_model, null_model, request_for
from support.partitioned import Runtime, three_drivers
from support.plans import linear_plan
from support.small_models import two_adds
from support.stateful_models import stream

import nnfmq
from nnfmq.client.connection.recovery import RestartLimit
from nnfmq.client.model.cpu_fallback import CpuFallback


@pytest.fixture
def client() -> Iterator[nnfmq.Client]:
    with nnfmq.connect(embedded=True) as client:
        yield client


@pytest.fixture
def model(client: nnfmq.Client) -> Iterator[nnfmq.PreparedModel]:
    with client.prepare(null_model()) as model:
        assert isinstance(model, nnfmq.PreparedModel)
        yield model


def is_over_queues(burst: Any, value: float = 1) -> bool:
    """Execute once; return whether the device has done it, over the burst's queues."""
    assert burst.execute(one(value)) == (one(value),)
    return bool(burst.last.driver_ns > 0)


# ------------------------------------------------------------------------------------------------ the embedded driver


def test_a_burst_is_answered_at_once_and_returns_to_the_device(
    client: nnfmq.Client, model: nnfmq.PreparedModel, caplog: pytest.LogCaptureFixture
) -> None:
    before = client.driver_pid
    with model.burst() as burst, caplog.at_level(logging.WARNING, "nnfmq.client"):
        assert is_over_queues(burst)
        kill_worker(client)
        assert "driver has died, connects again" in repr(client)
        for described in (model, burst):
            assert "driver has died, the CPU executes until" in repr(described)
        assert burst.execute(one(2)) == (one(2),)
        until(lambda: is_over_queues(burst, 3), "the device executes again")
        for described in (client, model, burst):
            assert "died" not in repr(described)
        assert client.driver_pid != before
        assert client.recovery == (1, 1)
        assert model.cpu_executions > 0
        assert caplog.text.count("the CPU executes instead while the model is prepared again") == 1
        assert caplog.text.count("connected again") == 1


def test_a_burst_whose_driver_dies_while_it_waits_is_answered_by_the_cpu(
    client: nnfmq.Client, model: nnfmq.PreparedModel
) -> None:
    with model.burst() as burst:
        for value in (1, 2):
            with Process(client.worker_pid) as driver:
                driver.stop()
                executing = InThread.start(partial(burst.execute, one(value)))
                until(lambda: burst.channel.results.waiters, "the call waits")
                driver.kill()
            assert executing.wait().value == (one(value),)
            until(lambda: is_over_queues(burst), "the device executes again")


def test_a_burst_that_is_configured_while_no_driver_runs_moves_to_the_next_one(
    client: nnfmq.Client, model: nnfmq.PreparedModel
) -> None:
    kill_worker(client)
    with model.burst() as burst, model.burst_pool(2) as pool, model.aidl_burst() as aidl:
        assert burst.execute(one(1)) == pool.execute(one(1)) == (one(1),)
        until(lambda: is_over_queues(burst), "the device executes again")
        with pool.acquire() as lent:
            until(lambda: is_over_queues(lent), "the device executes again")
        aidl.close()


def over_an_aidl_burst(model: nnfmq.PreparedModel, value: Any) -> Any:
    with (
        nnfmq.Memory.create(4) as given,
        nnfmq.Memory.create(4) as result,
        model.aidl_burst() as burst,
    ):
        given.view[:] = value.tobytes()
        burst.execute_synchronously(request_for(null_model(), [given, result]))
        return (np.frombuffer(bytes(result.view), np.float32),)


MODES: list[Callable[[nnfmq.PreparedModel, Any], Any]] = [
    lambda model, value: model.execute(value),
    lambda model, value: model.execute_async(value).result(LIMIT_S),
    in_a_task,
    fenced,
    of_a_pool,
    reusable,
    over_an_aidl_burst,
]


def test_each_mode_is_answered_at_once_and_returns_to_the_device(
    client: nnfmq.Client, model: nnfmq.PreparedModel
) -> None:
    for value, execute in enumerate(MODES):
        kill_worker(client)
        assert execute(model, one(value)) == (one(value),)
        until(lambda: model.handle.is_open, "the model is prepared again")
        before = model.cpu_executions
        assert execute(model, one(value)) == (one(value),)
        assert model.cpu_executions == before
        client._recovery.limit = RestartLimit()  # so many deaths would be a crash loop


def test_states_are_carried_from_the_device_to_the_cpu_and_back(client: nnfmq.Client, tmp_path: Path) -> None:
    (tmp_path / "stream.tflite").write_bytes(stream())
    steps = np.random.default_rng(3).uniform(-1, 1, (6, 1, 3)).astype(np.float32)
    with client.prepare(tmp_path / "stream.tflite") as model, model.burst() as burst:
        expected = [model.execute(step)[0] for step in steps]
        model.reset_state()
        for index, (step, right) in enumerate(zip(steps, expected, strict=True)):
            if index == 2:
                kill_worker(client)
            if index == 4:
                until(lambda: "died" not in repr(model), "the model is prepared again")
            np.testing.assert_allclose(model.execute(step)[0], right, rtol=1e-6)
            np.testing.assert_allclose(burst.execute(step)[0], right, rtol=1e-6)
        assert burst.last.driver_ns > 0


def test_recover_False_raises_dead_object_at_once_and_starts_nothing() -> None:
    with nnfmq.connect(embedded=True, recover=False) as client, client.prepare(null_model()) as model:
        assert isinstance(model, nnfmq.PreparedModel)
        assert model.fallback is not None
        with model.burst() as burst, model.create_reusable_execution() as execution:
            assert is_over_queues(burst)
            kill_worker(client)
            calls = [
                lambda: burst.execute(one(1)), lambda: model.execute(one(1)), lambda: execution.compute(one(1)),
                lambda: model.execute_async(one(1)), model.burst, client.devices,
                lambda: asyncio.run(burst.execute_async(one(1))), lambda: model.execute_fenced(one(1)),
            ]  # fmt: skip
            for call in calls:
                with pytest.raises(nnfmq.DeadObject):
                    call()
            for described in (client, model, burst):
                assert "driver has died" in repr(described)
                assert "again" not in repr(described)
            assert not model.fallback.is_used
            assert client.recovery == (0, 0)


def test_a_client_that_is_closed_while_a_model_is_prepared_again_keeps_no_driver(
    client: nnfmq.Client, model: nnfmq.PreparedModel
) -> None:
    again, go, started = client._connect_again, threading.Event(), threading.Event()
    assert again is not None

    def slowly(deadline_ns: int | None, is_closed: Any) -> nnfmq.Client:
        fresh = again(deadline_ns, is_closed)
        started.set()
        assert go.wait(LIMIT_S)
        return fresh

    client._connect_again = slowly
    kill_worker(client)
    assert model.execute(one(1)) == (one(1),)
    assert started.wait(LIMIT_S)
    closing = InThread.start(client.close)
    until(lambda: client._is_closed, "the client is closed")
    go.set()
    closing.wait()
    until(lambda: client._process is None and not client.connection.is_open, "no driver is left")
    assert "closed" in repr(client)


# ------------------------------------------------------------------------------------------------ other drivers


def test_a_client_of_a_driver_that_listens_is_answered_meanwhile_and_finds_the_next_one(folder: Path) -> None:
    with running_daemon(folder / "d.sock") as first:
        client = nnfmq.connect(folder / "d.sock", timeout=LIMIT_S)
        model = client.prepare(null_model())
        burst = model.burst()
        first.end()
    with client, model, burst:
        until(lambda: not client.connection.is_open, "the client knows")
        begin = time.monotonic()
        for _ in range(3):
            assert not is_over_queues(burst)
        assert time.monotonic() - begin < 5  # the CPU's driver starts, but no call waits for the other driver's
        with running_daemon(folder / "d.sock"):
            until(lambda: is_over_queues(burst), "the device executes again")
            burst.close()
            model.close()
            client.close()


def test_a_request_that_a_burst_has_sent_reaches_no_other_driver(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with (
        failing_driver(tmp_path_factory.mktemp("site")) as daemon,
        nnfmq.connect(embedded=True) as cpu,
        daemon.connect(recover=True) as client,
        client.device(DEVICE).prepare(add_model()) as model,
    ):
        model.fallback = CpuFallback(lambda: cpu.device("reference"), add_model())
        with model.burst() as burst:
            for _ in range(2):
                assert burst.execute(four(DIE), four(1))[0].tolist() == [DIE + 1] * 4  # the CPU's; it kills a driver
                until(lambda: burst.execute(four(2), four(1))[0].tolist() == [103] * 4, "the device executes again")
            assert client.recovery == (2, 2)


def test_a_model_that_kills_each_driver_is_not_executed_for_ever(tmp_path_factory: pytest.TempPathFactory) -> None:
    with (
        failing_driver(tmp_path_factory.mktemp("site")) as daemon,
        daemon.connect(recover=True) as client,
        client.device(DEVICE).prepare(add_model()) as model,
    ):
        messages: list[str] = []
        for _ in range(10):
            with pytest.raises(nnfmq.DeadObject) as caught:
                model.execute(four(DIE), four(1))
            messages.append(str(caught.value))
        assert "each within 10 s of its start" in messages[-1]
        assert "at the earliest" in messages[-1]
        assert client.recovery.deaths < 10


def test_the_next_start_is_delayed_only_after_early_deaths() -> None:
    limit, now = RestartLimit(), time.monotonic_ns()
    for death in range(5):
        limit.require_allowed(now + death)
        limit.begin()
    for _ in range(2):  # one death, which two calls have found
        with pytest.raises(nnfmq.DeadObject, match=r"6 drivers have died .* in (1.0|0.9) s at the earliest"):
            limit.require_allowed(now + 5)
    later = time.monotonic_ns() + 20_000_000_000
    limit = RestartLimit()
    for death in range(20):  # each driver has lived for 20 s
        limit.require_allowed(later + death)


def test_a_plan_is_executed_on_the_cpu_while_a_step_has_no_driver_and_then_on_its_devices(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    a, b = np.array([[1, 2], [3, 4]], np.float32), np.array([[10, 20], [30, 40]], np.float32)
    with three_drivers(tmp_path_factory.mktemp("site")) as drivers, ExitStack() as stack:
        runtime = Runtime(drivers, stack, recover=True)
        model = runtime.prepare(linear_plan(two_adds(), [0], [1]))
        burst = stack.enter_context(model.burst())

        def is_over_bursts() -> bool:
            assert burst.execute(a, b)[0].tolist() == (a + 2 * b).tolist()
            return burst.last.driver_ns > 0

        assert is_over_bursts()
        kill_worker(runtime.clients[0])
        for described in (model, burst):
            assert "step 0: driver has died, the CPU executes until" in repr(described)
        assert not is_over_bursts()
        assert model.cpu_executions > 0
        until(is_over_bursts, "the devices execute again")
        kill_worker(runtime.clients[1])
        assert model.execute(a, b)[0].tolist() == (a + 2 * b).tolist()
        later = stack.enter_context(model.burst())
        until(lambda: "died" not in repr(model), "the step is prepared again")
        for each in (burst, later):
            until(lambda: each.execute(a, b)[0].shape == (2, 2) and each.last.driver_ns > 0, "the devices execute")  # noqa: B023
