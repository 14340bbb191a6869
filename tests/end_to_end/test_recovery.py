"""A driver that comes late, and clients that recover after their driver has died at any stage of a call."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import (
    LIMIT_S,
    Daemon,
    InThread,
    Process,
    kill_worker,
    one,
    running_daemon,
    until,
    wait_until_waiting,
)
from support.execution_modes import fenced, in_a_task, of_a_pool, reusable
from support.failing_device import DEVICE, DIE, failing_driver, four
from support.forking import fork
from support.models import add_model, null_model, pool_bytes, relu_model, request_for
from support.small_models import one_operation
from support.stateful_models import stream

import nnfmq
from nnfmq.client.model.cpu_fallback import CpuFallback
from nnfmq.hal.types import DeviceStatus, Model, Operand, OperandType, OperationType


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "d.sock"


@pytest.fixture
def client(daemon: Daemon) -> Iterator[nnfmq.Client]:
    """Return a client that recovers."""
    with nnfmq.connect(daemon.path, timeout=LIMIT_S, recover=True) as client:
        yield client


@pytest.fixture
def model(client: nnfmq.Client) -> Iterator[nnfmq.PreparedModel]:
    with client.device("reference").prepare(null_model()) as model:
        yield model


def executes(client: nnfmq.Client) -> bool:
    with client.device("reference").prepare(null_model()) as model, model.burst() as burst:
        return bool(model.execute(one(3)) == burst.execute(one(3)) == (one(3),))


def quantized_model() -> Model:
    """Return a RELU of four quantized numbers that are at least 0: it returns its input."""
    tensor = Operand(OperandType.TENSOR_QUANT8_ASYMM, (4,), scale=1.0)
    return one_operation(OperationType.RELU, [tensor], tensor)


def only(folder: Path, name: str) -> dict[str, str]:
    """Return the environment of a driver whose only device has this name."""
    (folder / "devices.toml").write_text(f'[[device]]\nname = "{name}"\n')
    return {**os.environ, "NNFMQ_DEVICES": str(folder / "devices.toml")}


# ------------------------------------------------------------------------------------------------ late


def test_DEV_11_connect_waits_for_a_driver_that_does_not_listen_yet(path: Path) -> None:
    connecting = InThread.start(lambda: nnfmq.connect(path, wait=True, timeout=LIMIT_S))
    connecting.wait_until_asleep()
    with running_daemon(path), connecting.wait().value as client:
        assert not client.is_embedded
        assert executes(client)


def test_DEV_11_no_driver_within_the_timeout_raises_unavailable(path: Path) -> None:
    with pytest.raises(nnfmq.DeviceUnavailable, match=f"no driver listens at {path}"):
        nnfmq.connect(path, wait=True, timeout=0.05)


def test_DEV_11_a_waiting_connect_starts_no_embedded_driver(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.delenv("NNFMQ_SOCKET", raising=False)
    with pytest.raises(nnfmq.DeviceUnavailable):
        nnfmq.connect(wait=True, timeout=0.05)
    with pytest.raises(nnfmq.InvalidArgument):
        nnfmq.connect(embedded=True, wait=True)


# ------------------------------------------------------------------------------------------------ before a call


def test_LIFE_6_without_recovery_everything_of_a_dead_driver_stays_dead(daemon: Daemon) -> None:
    with daemon.connect() as client:
        device = client.device("reference")
        model = device.prepare(null_model())
        burst = model.burst()
        kill_worker(client)
        calls = (
            lambda: model.execute(one(1)), lambda: model.execute_async(one(1)), lambda: burst.execute(one(1)),
            device.capabilities, model.burst, client.devices, lambda: client.device("reference"),
        )  # fmt: skip
        for call in calls:
            with pytest.raises(nnfmq.DeadObject, match="gone"):
                call()
        burst.close()
        model.close()


def test_LIFE_6_a_client_whose_worker_was_killed_recovers_at_the_next_call(client: nnfmq.Client) -> None:
    before = client.worker_pid
    assert executes(client)
    kill_worker(client)
    assert client.devices()
    assert client.worker_pid != before
    assert executes(client)


CALLS: dict[str, Callable[[nnfmq.Client, nnfmq.Device], Any]] = {
    "devices": lambda client, _device: client.devices(),
    "device": lambda client, _device: client.device("reference"),
    "statistics": lambda client, _device: client.statistics().clients,
    "set_device_status": lambda client, _device: (
        client.set_device_status("sample-partial", DeviceStatus.AVAILABLE) or True
    ),
    "capabilities": lambda _client, device: device.capabilities(),
    "supported_operations": lambda _client, device: device.supported_operations(null_model()) == [True],
    "prepare": lambda _client, device: device.prepare(null_model()).execute(one(1)) == (one(1),),
    "Client.prepare": lambda client, _device: client.prepare(null_model()).execute(one(1)) == (one(1),),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_LIFE_6_each_call_of_a_client_or_device_recovers(
    call: Callable[[nnfmq.Client, nnfmq.Device], Any], client: nnfmq.Client
) -> None:
    device = client.device("reference")
    kill_worker(client)
    assert call(client, device)


def over_a_burst(model: nnfmq.PreparedModel, value: Any) -> Any:
    with model.burst() as burst:
        return burst.execute(value)


MODES: list[Callable[[nnfmq.PreparedModel, Any], Any]] = [
    lambda model, value: model.execute(value),
    lambda model, value: model.execute_async(value).result(LIMIT_S),
    fenced,
    over_a_burst,
    of_a_pool,
    reusable,
    in_a_task,
]
MODE_IDS = ["execute", "execute_async", "fenced", "burst", "burst_pool", "reusable", "await"]


@pytest.mark.parametrize("execute", MODES, ids=MODE_IDS)
def test_LIFE_6_a_model_is_prepared_again_at_its_next_execution(
    execute: Callable[[nnfmq.PreparedModel, Any], Any], client: nnfmq.Client, model: nnfmq.PreparedModel
) -> None:
    assert execute(model, one(1)) == (one(1),)
    for value in (2, 3):
        kill_worker(client)
        assert execute(model, one(value)) == (one(value),)
        assert execute(model, one(value)) == (one(value),)


def test_LIFE_6_bursts_pools_and_reusable_executions_go_on(client: nnfmq.Client, model: nnfmq.PreparedModel) -> None:
    with (
        model.burst() as burst,
        model.burst_pool(2) as pool,
        model.create_reusable_execution() as execution,
        model.aidl_burst() as aidl,
        nnfmq.Memory.create(4) as given,
        nnfmq.Memory.create(4) as result,
    ):
        request = request_for(null_model(), [given, result])
        for value in (1, 2, 3):
            assert burst.execute(one(value)) == (one(value),)
            assert burst.last.driver_ns > 0
            assert pool.execute(one(value)) == (one(value),)
            assert execution.compute(one(value)) == (one(value),)
            with execution.compute_fenced(one(value)) as launched:
                assert launched.result(LIMIT_S) == (one(value),)
            given.view[:] = one(value).tobytes()
            for execute in (aidl.execute_synchronously, burst.execute_request):
                result.view[:] = bytes(4)
                execute(request)
                assert bytes(result.view) == one(value).tobytes()
            kill_worker(client)
        assert burst.last.driver_ns > 0  # of the dead driver
        assert burst.execute() == (one(3),)  # the inputs are still in the burst's memory


def test_LIFE_6_a_burst_s_own_arrays_are_the_same_after_a_recovery(
    client: nnfmq.Client, model: nnfmq.PreparedModel
) -> None:
    with model.burst() as burst:
        (given,), (result,) = burst.inputs, burst.outputs
        for value in (1, 2, 3):
            given[...] = value
            assert burst.execute(out=burst.outputs)[0] is result
            assert result.tolist() == [value]
            kill_worker(client)


def test_LIFE_6_a_recovered_model_is_released_in_the_new_driver(client: nnfmq.Client) -> None:
    with client.device("reference").prepare(null_model()) as model:
        kill_worker(client)
        assert model.execute(one(1)) == (one(1),)
        assert len(own_models(client)) == 1
    assert own_models(client) == ()
    with pytest.raises(nnfmq.InvalidArgument, match="closed"):
        model.execute(one(1))


def own_models(client: nnfmq.Client) -> tuple[Any, ...]:
    (found,) = (other.models for other in client.statistics().clients if other.worker_pid == client.worker_pid)
    return tuple(found)


def test_LIFE_6_a_model_that_was_closed_is_not_prepared_again(client: nnfmq.Client, model: nnfmq.PreparedModel) -> None:
    burst, execution = model.burst(), model.create_reusable_execution()
    model.close()
    kill_worker(client)
    for call in (burst.execute, execution.compute):
        with pytest.raises(nnfmq.DeadObject):
            call(one(1))
    burst.close()
    execution.close()
    assert client.devices()
    assert own_models(client) == ()


def test_LIFE_6_states_survive_the_driver(client: nnfmq.Client, tmp_path: Path) -> None:
    (tmp_path / "stream.tflite").write_bytes(stream())
    steps = np.random.default_rng(3).uniform(-1, 1, (5, 1, 3)).astype(np.float32)
    with client.device("reference").prepare(tmp_path / "stream.tflite") as model, model.burst() as burst:
        expected = [model.execute(step) for step in steps]
        model.reset_state()
        for step, right in zip(steps, expected, strict=True):
            kill_worker(client)
            np.testing.assert_array_equal(model.execute(step), right)
            np.testing.assert_array_equal(burst.execute(step), right)


def test_LIFE_6_a_model_is_prepared_again_from_its_cache(
    client: nnfmq.Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with client.device("compiled").prepare(relu_model((1,)), cache_dir=tmp_path) as model:
        saved = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
        assert saved
        kill_worker(client)
        with caplog.at_level(logging.INFO, "nnfmq.client"):
            before = model.execute(one(1))
        assert "from scratch" not in caplog.text
        assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == saved
        assert before == model.execute(one(1))


def test_LIFE_6_buffers_stay_dead_because_their_contents_are_lost(
    client: nnfmq.Client, model: nnfmq.PreparedModel
) -> None:
    device = client.device("reference")
    with device.allocate(inputs=[(model, 0)]) as buffer:
        buffer.copy_from(one(5))
        kill_worker(client)
        with pytest.raises(nnfmq.DeadObject):
            model.execute(buffer)
        assert model.execute(one(6)) == (one(6),)
        with pytest.raises(nnfmq.InvalidArgument, match="another client"):  # its token may be another buffer's now
            model.execute(buffer)
        with pytest.raises(nnfmq.DeadObject):
            buffer.array()
        with device.allocate(inputs=[(model, 0)]) as another:
            another.copy_from(one(7))
            assert model.execute(another) == (one(7),)


# ------------------------------------------------------------------------------------------------ in a call


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with failing_driver(tmp_path_factory.mktemp("site")) as daemon:
        yield daemon


@pytest.fixture
def killing(failing: Daemon) -> Iterator[nnfmq.PreparedModel]:
    """Return a model whose executions kill the driver if their first value is DIE."""
    with (
        nnfmq.connect(failing.path, timeout=LIMIT_S, recover=True) as client,
        client.device(DEVICE).prepare(add_model()) as model,
    ):
        yield model


def test_LIFE_6_an_execution_in_which_the_driver_is_killed_is_repeated_once(
    client: nnfmq.Client, model: nnfmq.PreparedModel
) -> None:
    for execute in (model.execute, lambda value: model.execute_async(value).result(LIMIT_S)):
        with Process(client.worker_pid) as worker:
            worker.stop()
            executing = InThread.start(lambda: execute(one(4)))  # noqa: B023
            executing.wait_until_asleep()
            worker.kill()
        assert executing.wait().value == (one(4),)


@pytest.mark.parametrize("is_async", [False, True])
def test_LIFE_6_an_execution_that_kills_each_driver_is_not_repeated_for_ever(
    killing: nnfmq.PreparedModel, is_async: bool
) -> None:
    def execute() -> Any:
        if is_async:
            return killing.execute_async(four(DIE), four(1)).result(LIMIT_S)
        return killing.execute(four(DIE), four(1))

    with pytest.raises(nnfmq.DeadObject):
        execute()
    assert killing.execute(four(2), four(1))[0].tolist() == [103] * 4


def test_BUR_17_a_packet_that_has_left_is_never_sent_again(killing: nnfmq.PreparedModel) -> None:
    with killing.burst() as burst:
        for _ in range(2):
            with pytest.raises(nnfmq.DeadObject):
                burst.execute(four(DIE), four(1))
            assert burst.execute(four(2), four(1))[0].tolist() == [103] * 4
            with pytest.raises(nnfmq.DeadObject):
                asyncio.run(burst.execute_async(four(DIE), four(1)))
            assert asyncio.run(burst.execute_async(four(3), four(1)))[0].tolist() == [104] * 4


def test_BUR_17_a_burst_whose_driver_is_killed_while_it_waits_raises_and_then_goes_on(
    client: nnfmq.Client, model: nnfmq.PreparedModel
) -> None:
    with model.burst() as burst:
        before = client.worker_pid
        with Process(before) as worker:
            worker.stop()
            executing = InThread.start(lambda: burst.execute(one(1)))
            wait_until_waiting(burst)
            worker.kill()
        assert isinstance(executing.wait().error, nnfmq.DeadObject)
        assert client.worker_pid == before  # it has not connected again yet
        assert burst.execute(one(2)) == (one(2),)


def test_BUR_17_a_packet_of_a_hal_request_that_has_left_is_not_sent_again(killing: nnfmq.PreparedModel) -> None:
    sizes = pool_bytes(add_model())
    with (
        killing.request_burst() as burst,
        nnfmq.Memory.create(sizes[0]) as given,
        nnfmq.Memory.create(sizes[1]) as result,
    ):
        request = request_for(add_model(), [given, result])
        given.view[:4] = np.float32(DIE).tobytes()
        with pytest.raises(nnfmq.DeadObject):
            burst.execute_request(request)
        given.view[:4] = np.float32(1).tobytes()
        burst.execute_request(request)
        assert np.frombuffer(result.view[:4], np.float32)[0] == 101


def test_LIFE_6_a_preparation_in_which_the_driver_is_killed_is_repeated(client: nnfmq.Client) -> None:
    device = client.device("reference")
    with Process(client.worker_pid) as worker:
        worker.stop()
        preparing = InThread.start(lambda: device.prepare(null_model()))
        preparing.wait_until_asleep()
        worker.kill()
    with preparing.wait().value as model:
        assert model.execute(one(1)) == (one(1),)


# ------------------------------------------------------------------------------------------------ in the recovery


def test_LIFE_6_a_driver_that_is_killed_while_the_model_is_prepared_again_is_replaced_too(
    client: nnfmq.Client, model: nnfmq.PreparedModel
) -> None:
    killed: list[int] = []
    again = model.handle.prepare_again
    assert again is not None

    def prepare(deadline_ns: int | None, wait: bool) -> Any:
        client.devices()  # connects
        if not killed:
            killed.append(client.worker_pid)
            kill_worker(client)
        return again(deadline_ns, wait)

    model.handle.prepare_again = prepare
    kill_worker(client)
    assert model.execute(one(3)) == (one(3),)
    assert killed


def test_LIFE_6_several_threads_recover_one_model_once(client: nnfmq.Client, model: nnfmq.PreparedModel) -> None:
    preparations: list[int] = []
    again, go = model.handle.prepare_again, threading.Event()
    assert again is not None

    def prepare(deadline_ns: int | None, wait: bool) -> Any:
        preparations.append(threading.get_ident())
        assert go.wait(LIMIT_S)
        return again(deadline_ns, wait)

    model.handle.prepare_again = prepare
    kill_worker(client)
    threads = [InThread.start(lambda i=i: model.execute(one(i))) for i in range(6)]  # type: ignore[misc]
    for thread in threads:
        thread.wait_until_asleep()
    go.set()
    assert [thread.wait().value for thread in threads] == [(one(i),) for i in range(6)]
    assert len(preparations) == 1
    assert len(own_models(client)) == 1


def test_LIFE_6_several_threads_connect_once(client: nnfmq.Client) -> None:
    kill_worker(client)
    threads = [InThread.start(lambda: (client.devices(), client.worker_pid)[1]) for _ in range(4)]
    assert {thread.wait().value for thread in threads} == {client.worker_pid}


def test_LIFE_6_the_call_s_deadline_ends_the_recovery(client: nnfmq.Client, model: nnfmq.PreparedModel) -> None:
    go, again = threading.Event(), model.handle.prepare_again
    assert again is not None

    def slowly(deadline_ns: int | None, wait: bool) -> Any:
        assert go.wait(LIMIT_S)
        return again(deadline_ns, wait)

    model.handle.prepare_again = slowly
    kill_worker(client)
    patient = InThread.start(lambda: model.execute(one(1)))
    patient.wait_until_asleep()
    with pytest.raises(nnfmq.MissedDeadline):
        model.execute(one(2), timeout=0.05)
    go.set()
    assert patient.wait().value == (one(1),)


def test_LIFE_6_a_thread_goes_on_with_the_recovery_of_one_whose_deadline_has_passed(
    client: nnfmq.Client, model: nnfmq.PreparedModel
) -> None:
    stopped: list[Process] = []
    again = model.handle.prepare_again
    assert again is not None

    def prepare(deadline_ns: int | None, wait: bool) -> Any:
        client.devices()
        if deadline_ns is not None:  # that of the impatient thread
            worker = Process(client.worker_pid)
            worker.stop()
            stopped.append(worker)
        return again(deadline_ns, wait)

    model.handle.prepare_again = prepare
    kill_worker(client)
    impatient = InThread.start(lambda: model.execute(one(1), timeout=0.3))
    until(lambda: bool(stopped), "the impatient thread prepares")
    patient = InThread.start(lambda: model.execute(one(2)))
    patient.wait_until_asleep()
    assert isinstance(impatient.wait().error, nnfmq.MissedDeadline)
    stopped[0].resume()
    stopped[0].close()
    assert patient.wait().value == (one(2),)


# ------------------------------------------------------------------------------------------------ other drivers


def test_LIFE_6_an_embedded_driver_is_replaced_by_another_and_the_dead_one_reaped() -> None:
    with (
        nnfmq.connect(embedded=True, recover=True) as client,
        client.device("reference").prepare(null_model()) as model,
    ):
        before = client.driver_pid
        with model.burst() as burst:
            for value in (1, 2):
                kill_worker(client)
                assert model.execute(one(value)) == (one(value),)
                assert burst.execute(one(value)) == (one(value),)
        assert client.is_embedded
        assert client.driver_pid != before
        assert executes(client)


def test_LIFE_6_a_model_waits_for_the_next_daemon(path: Path) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(running_daemon(path))
        client = stack.enter_context(nnfmq.connect(path, timeout=LIMIT_S, recover=True))
        model = stack.enter_context(client.device("reference").prepare(null_model()))
        first.end()
        until(lambda: not client._connection.is_open, "the client knows")
        executing = InThread.start(lambda: model.execute(one(1), timeout=LIMIT_S))
        executing.wait_until_asleep()
        stack.enter_context(running_daemon(path))
        assert executing.wait().value == (one(1),)
        model.close()
        client.close()


def test_LIFE_6_a_device_that_the_next_driver_lacks_stays_unavailable(folder: Path, path: Path) -> None:
    with running_daemon(path) as first:
        client = nnfmq.connect(path, timeout=LIMIT_S, recover=True)
        device = client.device("sample-quant")
        model = device.prepare(quantized_model())
        value = np.full(4, 7, np.uint8)
        assert model.execute(value)[0].tolist() == [7] * 4
        burst = model.burst()
        first.end()
    until(lambda: not client._connection.is_open, "the client knows")
    calls: list[Callable[[], Any]] = [
        lambda: client.device("sample-quant"), device.capabilities, lambda: model.execute(value), model.burst,
        lambda: burst.execute(value), lambda: model.execute_async(value).result(LIMIT_S),
    ]  # fmt: skip
    with running_daemon(path, environment=only(folder, "reference")) as second:
        for call in calls:
            with pytest.raises(nnfmq.DeviceUnavailable, match="'sample-quant' has changed"):
                call()
        assert executes(client)
        second.end()
    until(lambda: not client._connection.is_open, "the client knows")
    with running_daemon(path):
        for call in calls:
            with pytest.raises(nnfmq.DeviceUnavailable, match="'sample-quant' has changed"):
                call()
        with nnfmq.connect(path) as another:
            another.device("sample-quant")
        burst.close()
        model.close()
        client.close()


def test_LIFE_6_a_device_with_another_status_is_the_same_device(daemon: Daemon, client: nnfmq.Client) -> None:
    client.device("sample-partial")
    with daemon.connect() as administrator:
        administrator.set_device_status("sample-partial", DeviceStatus.BUSY)
        kill_worker(client)
        assert client.device("sample-partial").info.status is DeviceStatus.BUSY
        administrator.set_device_status("sample-partial", DeviceStatus.AVAILABLE)


def test_LIFE_6_without_a_driver_calls_raise_and_may_be_tried_again(path: Path) -> None:
    with running_daemon(path) as daemon:
        client = nnfmq.connect(path, timeout=LIMIT_S, recover=True)
        model = client.device("reference").prepare(null_model())
        daemon.end()
    until(lambda: not client._connection.is_open, "the client knows")
    for _ in range(2):
        with pytest.raises(nnfmq.DeviceUnavailable, match="no driver listens"):
            client.devices(timeout=0.05)
        with pytest.raises(nnfmq.DeviceUnavailable, match="no driver listens"):
            model.execute(one(1), timeout=0.05)
    with running_daemon(path):
        assert model.execute(one(1)) == (one(1),)
        model.close()
        client.close()
    for call in (client.devices, lambda: model.execute(one(1))):
        with pytest.raises((nnfmq.DeadObject, nnfmq.InvalidArgument), match="closed"):
            call()


def test_PART_6_a_model_with_a_fallback_waits_for_no_driver_and_returns_to_the_next_one(path: Path) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(running_daemon(path))
        cpu = stack.enter_context(nnfmq.connect(embedded=True))
        client = stack.enter_context(nnfmq.connect(path, timeout=LIMIT_S, recover=True))
        model = stack.enter_context(client.device("reference").prepare(null_model()))
        model.fallback = CpuFallback(lambda: cpu.device("reference"), null_model())
        burst = stack.enter_context(model.burst())
        first.end()
        until(lambda: not client._connection.is_open, "the client knows")
        assert model.execute(one(1)) == (one(1),)
        assert burst.execute(one(2)) == (one(2),)
        assert burst.last.driver_ns == 0  # not over the queues
        assert not model.handle.is_open
        stack.enter_context(running_daemon(path))
        until(lambda: burst.execute(one(3)) == (one(3),) and burst.last.driver_ns > 0, "the device executes again")
        assert model.handle.is_open
        burst.close()
        model.close()
        client.close()


@pytest.mark.parametrize("is_driver_dead", [False, True])
def test_LIFE_6_a_client_that_is_closed_does_not_recover(
    is_driver_dead: bool, client: nnfmq.Client, model: nnfmq.PreparedModel
) -> None:
    burst = model.burst()
    if is_driver_dead:
        kill_worker(client)
    client.close()
    for call in (client.devices, lambda: model.execute(one(1)), lambda: burst.execute(one(1)), model.burst):
        with pytest.raises(nnfmq.BadState):
            call()
    burst.close()


def test_LIFE_6_a_forked_child_does_not_recover(client: nnfmq.Client, model: nnfmq.PreparedModel) -> None:
    for kill_first in (False, True):
        if kill_first:
            kill_worker(client)
        child = fork()
        if not child:
            errors = 0
            for call in (client.devices, lambda: model.execute(one(1)), model.burst):
                try:
                    call()
                except nnfmq.DeadObject:
                    errors += 1
            os._exit(0 if errors == 3 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert model.execute(one(1)) == (one(1),)


def test_LIFE_6_a_client_that_is_closed_while_it_recovers_keeps_no_driver() -> None:
    client = nnfmq.connect(embedded=True, recover=True)
    kill_worker(client)
    started, go, again = threading.Event(), threading.Event(), client._connect_again
    assert again is not None

    def slowly(deadline_ns: int | None, is_closed: Any) -> nnfmq.Client:
        fresh = again(deadline_ns, is_closed)
        started.set()
        go.wait(LIMIT_S)
        return fresh

    client._connect_again = slowly
    recovering = InThread.start(client.devices)
    assert started.wait(LIMIT_S)
    client.close()
    go.set()
    assert isinstance(recovering.wait().error, nnfmq.BadState)
    assert not client._connection.is_open
    assert client._process is None  # and the leak check finds none
