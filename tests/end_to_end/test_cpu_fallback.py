"""Executions that the CPU device makes after a model's own device has failed, in every mode, on real drivers (4.5)."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import LIMIT_S, Daemon, Process, running_daemon, short_folder, until
from support.failing_device import DEVICE, DIE, EXHAUST, FAIL, MISS, failing_driver, four
from support.forking import fork
from support.models import add_model, pool_bytes, request_for
from support.stateful_models import stream

import nnfmq
from nnfmq.base.fence import Fence
from nnfmq.client import fallback_thread
from nnfmq.client.connection.device import Device
from nnfmq.client.model.cpu_fallback import CpuFallback
from nnfmq.hal.types import DataLocation, FenceState, Request, RequestArgument

ONE = four(1)
Execute = Callable[[nnfmq.PreparedModel, Any], float]


class Cpu:
    """The CPU device: one of a driver that is connected when it is first needed."""

    def __init__(self, driver: Daemon) -> None:
        self.driver = driver
        self.client: nnfmq.Client | None = None
        self.openings = 0
        self.error: nnfmq.NnfmqError | None = None

    def device(self) -> Device:
        self.openings += 1
        if self.error is not None:
            raise self.error
        if self.client is None or not self.client.connection.is_open:
            self.close()
            self.client = self.driver.connect()
        return self.client.device("reference")

    def close(self) -> None:
        if self.client is not None:
            self.client.close()


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with failing_driver(tmp_path_factory.mktemp("site")) as daemon:
        yield daemon


@pytest.fixture
def client(driver: Daemon) -> Iterator[nnfmq.Client]:
    with driver.connect() as client:
        yield client


@pytest.fixture(scope="module")
def cpu_driver() -> Iterator[Daemon]:
    with short_folder() as folder, running_daemon(folder / "cpu.sock") as daemon:
        yield daemon


@pytest.fixture
def cpu(cpu_driver: Daemon) -> Iterator[Cpu]:
    cpu = Cpu(cpu_driver)
    yield cpu
    until(lambda: not any(t.name == "nnfmq-cpu" for t in threading.enumerate()), "no preparation goes on")
    cpu.close()


@pytest.fixture
def model(client: nnfmq.Client, cpu: Cpu) -> Iterator[nnfmq.PreparedModel]:
    """Return the sum of two inputs on the failing device, with a fallback."""
    with client.device(DEVICE).prepare(add_model()) as model:
        model.fallback = CpuFallback(cpu.device, add_model())
        yield model


# ------------------------------------------------------------------------------------------------ modes


def first(outputs: tuple[Any, ...]) -> float:
    (output,) = outputs
    assert output.shape == (4,) and len(set(output.tolist())) == 1
    return float(output[0])


def synchronously(model: nnfmq.PreparedModel, value: Any) -> float:
    return first(model.execute(value, ONE))


def into_an_array(model: nnfmq.PreparedModel, value: Any) -> float:
    out = [np.zeros(4, np.float32)]
    assert model.execute(value, ONE, out=out)[0] is out[0]
    return float(out[0][0])


def asynchronously(model: nnfmq.PreparedModel, value: Any) -> float:
    return first(model.execute_async(value, ONE).result(LIMIT_S))


def as_a_reusable_execution(model: nnfmq.PreparedModel, value: Any) -> float:
    with model.create_reusable_execution() as execution:
        results = {first(execution.compute(value, ONE)) for _ in range(2)}
        return results.pop() if len(results) == 1 else np.nan


def as_an_execution_for_once(model: nnfmq.PreparedModel, value: Any) -> float:
    with model.create_execution() as execution:
        return first(execution.compute(value, ONE))


def with_pools(model: nnfmq.PreparedModel, value: Any, execute: Callable[[Request], object]) -> float:
    """Execute a HAL request over memories of the test."""
    with ExitStack() as stack:
        inputs, outputs = (stack.enter_context(nnfmq.Memory.create(size)) for size in pool_bytes(add_model()))
        request = request_for(add_model(), [inputs, outputs])
        for argument, array in zip(request.inputs, (value, ONE), strict=True):
            begin = argument.location.offset
            inputs.view[begin : begin + 16] = array.tobytes()
        execute(request)
        return float(np.frombuffer(outputs.view[:4], np.float32)[0])


def as_a_request(model: nnfmq.PreparedModel, value: Any) -> float:
    return with_pools(model, value, model.execute_request)


def as_an_asynchronous_request(model: nnfmq.PreparedModel, value: Any) -> float:
    return with_pools(model, value, lambda request: model.execute_request_async(request).result(LIMIT_S))


def as_a_reusable_request(model: nnfmq.PreparedModel, value: Any) -> float:
    def execute(request: Request) -> None:
        with model.create_reusable_request(request) as execution:
            execution.compute()

    return with_pools(model, value, execute)


def over_an_aidl_burst(model: nnfmq.PreparedModel, value: Any) -> float:
    def execute(request: Request) -> None:
        with model.aidl_burst() as burst:
            burst.execute_synchronously(request)

    return with_pools(model, value, execute)


def over_a_burst(model: nnfmq.PreparedModel, value: Any) -> float:
    with model.burst() as burst:
        return first(burst.execute(value, ONE))


def over_a_burst_in_place(model: nnfmq.PreparedModel, value: Any) -> float:
    with model.burst() as burst:
        for target, array in zip(burst.inputs, (value, ONE), strict=True):
            target[...] = array
        assert burst.execute(out=burst.outputs) is burst.outputs
        return first(burst.outputs)


def over_a_burst_in_a_task(model: nnfmq.PreparedModel, value: Any) -> float:
    async def execute() -> float:
        with model.burst() as burst:
            return first(await burst.execute_async(value, ONE, timeout=LIMIT_S if value[0] != MISS else None))

    return asyncio.run(execute())


def in_a_task(model: nnfmq.PreparedModel, value: Any) -> float:
    async def execute() -> float:
        return first(await model.execute_async(value, ONE))

    return asyncio.run(execute())


def over_a_pool_of_bursts(model: nnfmq.PreparedModel, value: Any) -> float:
    with model.burst_pool(2) as pool:
        return first(pool.execute(value, ONE))


def as_a_request_over_a_burst(model: nnfmq.PreparedModel, value: Any) -> float:
    def execute(request: Request) -> None:
        with model.request_burst() as burst:
            burst.execute_request(request)

    return with_pools(model, value, execute)


MODES: list[Execute] = [
    synchronously,
    into_an_array,
    asynchronously,
    as_a_reusable_execution,
    as_an_execution_for_once,
    as_a_request,
    as_an_asynchronous_request,
    as_a_reusable_request,
    over_an_aidl_burst,
    over_a_burst,
    over_a_burst_in_place,
    over_a_burst_in_a_task,
    in_a_task,
    over_a_pool_of_bursts,
    as_a_request_over_a_burst,
]


@pytest.mark.parametrize("execute", MODES)
def test_PART_6_an_execution_that_the_device_fails_to_is_executed_on_the_cpu(
    execute: Execute, model: nnfmq.PreparedModel, cpu: Cpu
) -> None:
    assert execute(model, four(2)) == 103
    assert cpu.openings == 0
    assert execute(model, four(FAIL)) == FAIL + 1
    assert execute(model, four(3)) == 104  # the device is tried again
    assert execute(model, four(EXHAUST)) == EXHAUST + 1
    assert cpu.openings == 1


@pytest.mark.parametrize("execute", [mode for mode in MODES if "reusable" not in mode.__name__])
def test_PART_6_the_death_of_the_driver_in_an_execution_is_a_failure_as_any_other(
    execute: Execute, model: nnfmq.PreparedModel, client: nnfmq.Client
) -> None:
    assert execute(model, four(DIE)) == DIE + 1
    until(lambda: not client.connection.is_open, "the client knows")
    for value in (4, FAIL, DIE):
        assert execute(model, four(value)) == value + 1


@pytest.mark.parametrize("execute", MODES)
def test_PART_6_a_model_whose_driver_has_died_before_is_executed_on_the_cpu(
    execute: Execute, model: nnfmq.PreparedModel, client: nnfmq.Client
) -> None:
    with Process(client.worker_pid) as worker:
        worker.kill()
    until(lambda: not client.connection.is_open, "the client knows")
    assert [execute(model, four(value)) for value in (4, FAIL, DIE)] == [5, FAIL + 1, DIE + 1]


def test_PART_6_a_reusable_execution_outlives_its_driver_on_the_cpu(model: nnfmq.PreparedModel) -> None:
    with model.create_reusable_execution() as execution:
        assert first(execution.compute(four(2), ONE)) == 103
        assert first(execution.compute(four(DIE), ONE)) == DIE + 1
        assert first(execution.compute(four(2), ONE)) == 3


@pytest.mark.parametrize("execute", MODES)
def test_PART_6_without_a_fallback_the_device_s_error_is_raised(execute: Execute, client: nnfmq.Client) -> None:
    with client.device(DEVICE).prepare(add_model()) as model:
        assert model.fallback is None
        with pytest.raises(nnfmq.GeneralFailure, match="as the test wants"):
            execute(model, four(FAIL))
        assert execute(model, four(2)) == 103


def test_PART_6_a_burst_executes_on_the_cpu_and_then_on_the_device_again(model: nnfmq.PreparedModel) -> None:
    with model.burst() as burst:
        assert first(burst.execute(four(2), ONE)) == 103
        assert first(burst.execute(four(FAIL), ONE, measure=True)) == FAIL + 1
        assert burst.last.latency_ns > 0
        assert burst.last.timing.time_in_driver_ns > 0  # of the CPU
        assert first(burst.execute(four(3), ONE)) == 104
        assert burst.last.driver_ns > 0  # of the device


@pytest.mark.parametrize("is_async", [False, True])
def test_PART_6_a_burst_whose_driver_dies_goes_on_on_the_cpu(model: nnfmq.PreparedModel, is_async: bool) -> None:
    with model.burst() as burst:

        def execute(*inputs: Any, **options: Any) -> float:
            if is_async:
                return first(asyncio.run(burst.execute_async(*inputs, **options)))
            return first(burst.execute(*inputs, **options))

        assert execute(four(2), ONE) == 103
        assert execute(four(DIE), ONE) == DIE + 1
        assert execute() == DIE + 1  # the inputs are those in the burst's memory
        burst.inputs[0][...] = 5
        assert execute(out=burst.outputs) == 6
        assert burst.outputs[0].tolist() == [6] * 4
        with pytest.raises(nnfmq.InvalidArgument, match="input"):
            execute(np.zeros(5, np.float32), ONE)
        with pytest.raises(nnfmq.InvalidArgument, match="out"):
            execute(ONE, ONE, out=[])


def test_PART_6_a_burst_without_inputs_has_none_on_the_cpu_either(
    model: nnfmq.PreparedModel, client: nnfmq.Client
) -> None:
    with model.burst() as burst, Process(client.worker_pid) as worker:
        worker.kill()
        until(lambda: not client.connection.is_open, "the client knows")
        with pytest.raises(nnfmq.InvalidArgument, match="never written"):
            burst.execute()


def test_PART_6_a_burst_that_is_closed_stays_closed(model: nnfmq.PreparedModel, client: nnfmq.Client, cpu: Cpu) -> None:
    burst = model.burst()
    burst.close()
    for execute in (burst.execute, lambda *inputs: asyncio.run(burst.execute_async(*inputs))):
        with pytest.raises(nnfmq.InvalidArgument, match="closed"):
            execute(ONE, ONE)
    with Process(client.worker_pid) as worker:
        worker.kill()
    until(lambda: not client.connection.is_open, "the client knows")
    for execute in (burst.execute, lambda *inputs: asyncio.run(burst.execute_async(*inputs))):
        with pytest.raises(nnfmq.DeadObject):
            execute(ONE, ONE)
    assert cpu.openings == 0


def test_PART_6_the_error_of_a_burst_without_memory_has_no_other_inputs(model: nnfmq.PreparedModel) -> None:
    with model.request_burst() as burst, pytest.raises(nnfmq.InvalidArgument, match="without memory"):
        burst.execute(ONE, ONE)


def test_BUR_16_a_second_call_is_rejected_while_the_cpu_executes(model: nnfmq.PreparedModel, cpu: Cpu) -> None:
    may_open = threading.Event()

    def held() -> Device:
        assert may_open.wait(LIMIT_S)
        return cpu.device()

    model.fallback = CpuFallback(held, add_model())
    with model.burst() as burst:

        async def main() -> None:
            task = asyncio.create_task(burst.execute_async(four(FAIL), ONE))
            while not any(thread.name == fallback_thread.THREAD_NAME for thread in threading.enumerate()):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for _ in range(2):  # the cancelled task does not release what the fallback thread uses
                with pytest.raises(nnfmq.BadState):
                    burst.execute(ONE, ONE)
            may_open.set()

        asyncio.run(main())
        until(lambda: not burst._claims, "the fallback thread is done")
        assert burst.outputs[0].tolist() == [FAIL + 1] * 4
        assert first(burst.execute(four(2), ONE)) == 103


def test_PART_6_states_are_those_of_the_execution_that_succeeded(
    client: nnfmq.Client, cpu: Cpu, tmp_path: Path
) -> None:
    (tmp_path / "stream.tflite").write_bytes(stream())
    loaded = nnfmq.load(tmp_path / "stream.tflite")
    steps = np.random.default_rng(3).uniform(-1, 1, (6, 1, 3)).astype(np.float32)
    with client.device("reference").prepare(loaded) as model, client.device("reference").prepare(loaded) as other:
        expected = [other.execute(step)[0] for step in steps]
        model.fallback = CpuFallback(cpu.device, loaded)
        with model.burst() as burst, model.create_reusable_execution() as execution:
            results = []
            for i, step in enumerate(steps):
                if i == 3:
                    with Process(client.worker_pid) as worker:
                        worker.kill()
                    until(lambda: not client.connection.is_open, "the client knows")
                results.append((model.execute(step)[0], burst.execute(step)[0], execution.compute(step)[0]))
        for result, right in zip(results, expected, strict=True):
            for array in result:
                np.testing.assert_allclose(array, right, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------ what is not executed


@pytest.mark.parametrize("execute", [synchronously, asynchronously])
def test_PART_6_an_application_s_mistake_is_not_executed_on_the_cpu(
    execute: Execute, model: nnfmq.PreparedModel, cpu: Cpu
) -> None:
    with pytest.raises(nnfmq.InvalidArgument):
        execute(model, np.zeros(5, np.float32))
    assert cpu.openings == 0


def test_PART_6_the_application_s_own_deadline_is_not_executed_on_the_cpu(model: nnfmq.PreparedModel, cpu: Cpu) -> None:
    with pytest.raises(nnfmq.MissedDeadline):
        model.execute(four(2), ONE, timeout=0)
    with pytest.raises(nnfmq.MissedDeadline):
        model.execute_async(four(2), ONE, timeout=0).result()
    assert cpu.openings == 0
    assert first(model.execute(four(MISS), ONE)) == MISS + 1  # a deadline that the device alone has missed


def test_PART_6_a_deadline_also_ends_the_execution_on_the_cpu(model: nnfmq.PreparedModel, cpu: Cpu) -> None:
    deadline_ns = time.monotonic_ns() + 200_000_000

    def slow() -> Device:
        until(lambda: time.monotonic_ns() > deadline_ns + 100_000_000, "the deadline has passed")
        return cpu.device()

    model.fallback = CpuFallback(slow, add_model())
    with pytest.raises(nnfmq.MissedDeadline):
        model.execute(four(FAIL), ONE, timeout=0.2)
    with pytest.raises(nnfmq.MissedDeadline):
        model.execute_async(four(FAIL), ONE, timeout=0.001).result()


@pytest.mark.parametrize("execute", [synchronously, asynchronously])
def test_PART_6_the_device_s_error_is_raised_if_the_cpu_cannot_be_used(
    execute: Execute, model: nnfmq.PreparedModel, cpu: Cpu, caplog: pytest.LogCaptureFixture
) -> None:
    cpu.error = nnfmq.ResourceExhaustedTransient("no processes left")
    with caplog.at_level(logging.WARNING, "nnfmq.client"), pytest.raises(nnfmq.GeneralFailure, match="test wants"):
        execute(model, four(FAIL))
    assert "no processes left" in caplog.text


@pytest.mark.parametrize("close", ["model", "client"])
def test_PART_6_what_is_closed_is_not_executed_on_the_cpu(
    close: str, model: nnfmq.PreparedModel, client: nnfmq.Client, cpu: Cpu
) -> None:
    (model if close == "model" else client).close()
    for execute in (synchronously, asynchronously):
        with pytest.raises(nnfmq.BadState, match="closed"):
            execute(model, four(2))
    assert cpu.openings == 0


def test_PART_6_a_client_that_is_closed_while_an_execution_is_pending_starts_no_cpu(
    model: nnfmq.PreparedModel, client: nnfmq.Client, cpu: Cpu
) -> None:
    with Process(client.worker_pid) as worker, worker.stopped():
        pending = model.execute_async(four(2), ONE)
        client.close()
        with pytest.raises(nnfmq.DeadObject, match="closed"):
            pending.result(LIMIT_S)
    assert cpu.openings == 0


def test_PART_6_a_forked_child_does_not_execute_the_parent_s_model_on_the_cpu(
    model: nnfmq.PreparedModel, cpu: Cpu
) -> None:
    child = fork()
    if not child:
        try:
            model.execute(four(2), ONE)
        except nnfmq.DeadObject:
            os._exit(cpu.openings)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ------------------------------------------------------------------------------------------------ fences


def test_PART_6_a_fenced_execution_that_cannot_be_launched_is_launched_on_the_cpu(
    model: nnfmq.PreparedModel, client: nnfmq.Client
) -> None:
    with Process(client.worker_pid) as worker:
        worker.kill()
    until(lambda: not client.connection.is_open, "the client knows")
    with Fence.create() as begin, model.execute_fenced(four(5), ONE, wait_for=[begin]) as launched:
        assert not launched.done()
        begin.signal()
        assert launched.wait(LIMIT_S) is FenceState.SIGNALED
        assert first(launched.result(LIMIT_S)) == 6
    with model.create_reusable_execution() as execution, execution.compute_fenced(four(6), ONE) as launched:
        assert first(launched.result(LIMIT_S)) == 7


def test_PART_6_a_fenced_execution_that_was_launched_keeps_its_error(model: nnfmq.PreparedModel) -> None:
    """Others may have seen its fence: 4.5 passes the error through."""
    with model.execute_fenced(four(FAIL), ONE) as launched:
        assert launched.wait(LIMIT_S) is FenceState.ERROR
        with pytest.raises(nnfmq.GeneralFailure, match="as the test wants"):
            launched.result(LIMIT_S)


# ------------------------------------------------------------------------------------------------ managed buffers


def test_PART_6_managed_buffers_are_copied_to_the_cpu_and_back(
    model: nnfmq.PreparedModel, client: nnfmq.Client
) -> None:
    device = client.device(DEVICE)
    with (
        device.allocate(inputs=[(model, 0), (model, 1)]) as source,
        device.allocate(outputs=[(model, 0)]) as sink,
    ):
        source.copy_from(four(FAIL))
        assert model.execute(source, source, out=[sink]) == (sink,)
        assert sink.array().tolist() == [2 * FAIL] * 4
        assert sink.dimensions == (4,)
        source.copy_from(four(1))
        model.execute(source, source, out=[sink])
        assert sink.array().tolist() == [102] * 4


def test_PART_6_buffers_of_a_driver_that_died_leave_its_error(
    model: nnfmq.PreparedModel, client: nnfmq.Client, cpu: Cpu
) -> None:
    with client.device(DEVICE).allocate(inputs=[(model, 0)]) as source:
        source.copy_from(four(DIE))
        with pytest.raises(nnfmq.DeadObject):
            model.execute(source, ONE)
    assert first(model.execute(four(1), ONE)) == 2


def test_PART_6_a_fenced_request_with_managed_buffers_is_not_launched_on_the_cpu(
    model: nnfmq.PreparedModel, client: nnfmq.Client, cpu: Cpu
) -> None:
    with client.device(DEVICE).allocate(inputs=[(model, 0)]) as source, Process(client.worker_pid) as worker:
        request = request_for(add_model(), [])
        request = Request(request.inputs, request.outputs, (source.pool, source.pool))
        worker.kill()
        until(lambda: not client.connection.is_open, "the client knows")
        with pytest.raises(nnfmq.DeadObject):
            model.execute_request_fenced(request)
    assert cpu.openings == 0


def test_PART_6_a_buffer_that_was_closed_leaves_the_device_s_error(
    model: nnfmq.PreparedModel, client: nnfmq.Client, cpu: Cpu
) -> None:
    device = client.device(DEVICE)
    with device.allocate(inputs=[(model, 0), (model, 1)]) as source, device.allocate(outputs=[(model, 0)]) as sink:
        source.copy_from(four(FAIL))
        pools = (source.pool, sink.pool)
        request = Request((in_pool(0), in_pool(0)), (in_pool(1),), pools)
        model.execute_request(request)
        assert sink.array().tolist() == [2 * FAIL] * 4
        client.connection.buffers.pop(source.token)
        with pytest.raises(nnfmq.GeneralFailure, match="as the test wants"):
            model.execute_request(request)


def in_pool(index: int) -> RequestArgument:
    """Return an argument in a managed buffer."""
    return RequestArgument(location=DataLocation(index))


def test_PART_6_a_request_that_no_driver_has_checked_is_not_read_beyond_its_end(
    model: nnfmq.PreparedModel, client: nnfmq.Client
) -> None:
    with client.device(DEVICE).allocate(inputs=[(model, 0)]) as source, Process(client.worker_pid) as worker:
        too_few = Request((in_pool(0),), (in_pool(0),), (source.pool,))
        no_such_pool = Request((in_pool(0), in_pool(7)), (in_pool(9),), (source.pool,))
        worker.kill()
        until(lambda: not client.connection.is_open, "the client knows")
        for request in (too_few, no_such_pool):
            with pytest.raises(nnfmq.DeadObject):
                model.execute_request(request)


def test_PART_6_a_pool_of_bursts_outlives_its_driver_on_the_cpu(
    model: nnfmq.PreparedModel, client: nnfmq.Client
) -> None:
    with model.burst_pool(2) as pool:
        assert first(pool.execute(four(2), ONE)) == 103
        assert first(pool.execute(four(DIE), ONE)) == DIE + 1
        with pool.acquire() as one_burst, pool.acquire() as other:
            assert [first(burst.execute(four(2), ONE)) for burst in (one_burst, other)] == [3, 3]


@pytest.mark.parametrize("when", ["at the start", "in the callback"])
def test_PART_6_without_a_fallback_thread_the_device_s_error_is_raised(
    when: str, model: nnfmq.PreparedModel, client: nnfmq.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(_function: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(fallback_thread, "submit", no_thread)
    if when == "in the callback":
        with pytest.raises(nnfmq.GeneralFailure, match="as the test wants"):
            model.execute_async(four(FAIL), ONE).result(LIMIT_S)
        return
    with Process(client.worker_pid) as worker:
        worker.kill()
    until(lambda: not client.connection.is_open, "the client knows")
    with pytest.raises(nnfmq.DeadObject):
        model.execute_async(four(FAIL), ONE)


def test_PART_6_a_bug_in_the_execution_on_the_cpu_leaves_the_device_s_error(
    model: nnfmq.PreparedModel, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Device:
        raise ZeroDivisionError("a bug")

    model.fallback = CpuFallback(broken, add_model())
    with caplog.at_level(logging.ERROR, "nnfmq.client"):
        with pytest.raises(nnfmq.GeneralFailure, match="as the test wants"):
            model.execute_async(four(FAIL), ONE).result(LIMIT_S)
        until(lambda: "a bug" in caplog.text, "the bug is logged")


# ------------------------------------------------------------------------------------------------ log, death of the CPU


def test_PART_6_the_log_says_once_for_each_model_that_the_cpu_executes(
    model: nnfmq.PreparedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "nnfmq.client"):
        for value in (FAIL, EXHAUST, FAIL):
            synchronously(model, four(value))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"device '{DEVICE}' failed" in record.message
    assert "GeneralFailure: " in record.message and "as the test wants" in record.message


def test_PART_6_the_cpu_s_driver_may_die_too(model: nnfmq.PreparedModel, cpu: Cpu) -> None:
    assert synchronously(model, four(FAIL)) == FAIL + 1
    assert cpu.client is not None
    with Process(cpu.client.worker_pid) as process:
        process.kill()
        process.wait_for_end()
    until(lambda: cpu.client is not None and not cpu.client.connection.is_open, "the client knows")
    assert asynchronously(model, four(FAIL)) == FAIL + 1
    assert cpu.openings == 2


def test_PART_6_the_CPU_executes_a_burst_of_unknown_shapes_with_the_shapes_of_each_call(
    client: nnfmq.Client, cpu: Cpu
) -> None:
    with client.device(DEVICE).prepare(add_model((0,))) as model, model.burst() as burst:
        model.fallback = CpuFallback(cpu.device, add_model((0,)))
        for count, value, expected in (
            (4, 1.0, 102), (3, FAIL, FAIL + 1), (2000, FAIL, FAIL + 1), (2000, 1.0, 102),
            (5, DIE, DIE + 1), (3, 1.0, 2), (5000, 1.0, 2), (4, 1.0, 2),
        ):  # fmt: skip
            (found,) = burst.execute(np.full(count, value, np.float32), np.ones(count, np.float32))
            assert found.tolist() == [expected] * count
