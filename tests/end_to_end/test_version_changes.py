"""A model changes its version while it executes: no result is lost, computed twice, or of a wrong version.

Each version adds its number to the input, so that a result shows which version computed it.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.drivers import LIMIT_S, InThread, Process, one, until, wait_until_waiting
from support.fake_repository import FakeRepository
from support.models import plus_model, pool_bytes, request_for
from support.small_models import INPUT, OUTPUT, TEMPORARY, graph, scalar

import nnfmq
from nnfmq.client.burst.burst import Burst
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.hal.types import LifeTime, Model, Operand, OperandType, Operation, OperationType, Request
from nnfmq.observe.driver_statistics import ClientStatistics
from nnfmq.recording.reader import RecordingFile
from nnfmq.recording.writer import ExecutionRecorder

VERSIONS = 25
Call = Callable[[float], float]
"""Executes the model with a number, and returns the result."""


@pytest.fixture
def model(repository: FakeRepository, client: nnfmq.Client) -> Iterator[nnfmq.ServedModel]:
    with client.model("plus") as model:
        yield model


def publish(repository: FakeRepository, model: nnfmq.ServedModel, version: int) -> None:
    """Publish a version, and return when the model executes it."""
    repository.publish(model.name, version, plus_model(version))
    until(lambda: model.version == version, f"the model executes version {version}")


def value_of(outputs: Any) -> float:
    return float(outputs[0][0])


def own_statistics(client: nnfmq.Client) -> ClientStatistics:
    """Return what the driver counts for a client."""
    (found,) = [row for row in client.statistics().clients if row.worker_pid == client.worker_pid]
    return found


def executions(client: nnfmq.Client) -> int:
    """Return how many executions the driver has counted for a client."""
    return own_statistics(client).executions


def running_sum(factor: float) -> Model:
    """Return a model of x and a state: the output is the state plus `factor` times x, and the next state as well."""
    operands = [Operand(OperandType.TENSOR_FLOAT32, (1,)) for _ in range(6)]
    lifetimes = (INPUT, INPUT, LifeTime.CONSTANT_COPY, TEMPORARY, OUTPUT, OUTPUT)
    none, constant = scalar(0), np.array([factor], np.float32).tobytes()
    operands = [replace(operand, lifetime=lifetime) for operand, lifetime in zip(operands, lifetimes, strict=True)]
    operands.append(none[0])
    operations = [
        Operation(OperationType.MUL, (0, 2, 6), (3,)),
        Operation(OperationType.ADD, (3, 1, 6), (4,)),
        Operation(OperationType.ADD, (3, 1, 6), (5,)),
    ]
    return graph(operands, operations, {2: constant, 6: none[1]})


# ------------------------------------------------------------------------------------------------ under load


def over_a_burst(stack: ExitStack, model: nnfmq.ServedModel) -> Call:
    burst = stack.enter_context(model.burst())
    return lambda value: value_of(burst.execute(one(value)))


def in_place(stack: ExitStack, model: nnfmq.ServedModel) -> Call:
    burst = stack.enter_context(model.burst())
    given, result = burst.inputs[0], burst.outputs[0]

    def call(value: float) -> float:
        given[0] = value
        burst.execute(out=burst.outputs)
        return float(result[0])

    return call


def over_a_pool(stack: ExitStack, model: nnfmq.ServedModel) -> Call:
    pool = stack.enter_context(model.burst_pool(2))
    return lambda value: value_of(pool.execute(one(value)))


def as_a_request(stack: ExitStack, model: nnfmq.ServedModel) -> Call:
    burst = stack.enter_context(model.request_burst())
    hal_model = plus_model(1)
    source, sink = (stack.enter_context(nnfmq.Memory.create(size)) for size in pool_bytes(hal_model))
    given, result = np.frombuffer(source.view, np.float32), np.frombuffer(sink.view, np.float32)
    request: Request = request_for(hal_model, [source, sink])

    def call(value: float) -> float:
        given[0] = value
        burst.execute_request(request)
        return float(result[0])

    return call


def in_a_task(stack: ExitStack, model: nnfmq.ServedModel) -> Call:
    burst, runner = stack.enter_context(model.burst()), stack.enter_context(asyncio.Runner())
    return lambda value: value_of(runner.run(burst.execute_async(one(value))))


def synchronously(_stack: ExitStack, model: nnfmq.ServedModel) -> Call:
    return lambda value: value_of(model.execute(one(value)))


def asynchronously(_stack: ExitStack, model: nnfmq.ServedModel) -> Call:
    return lambda value: value_of(model.execute_async(one(value)).result(LIMIT_S))


def fenced(_stack: ExitStack, model: nnfmq.ServedModel) -> Call:
    def call(value: float) -> float:
        with model.execute_fenced(one(value)) as launched:
            return value_of(launched.result(LIMIT_S))

    return call


def computed_once(_stack: ExitStack, model: nnfmq.ServedModel) -> Call:
    def call(value: float) -> float:
        with model.create_execution() as execution:
            return value_of(execution.compute(one(value)))

    return call


def with_a_new_reusable_execution(_stack: ExitStack, model: nnfmq.ServedModel) -> Call:
    def call(value: float) -> float:
        with model.create_reusable_execution() as execution:
            return value_of(execution.compute(one(value)))

    return call


def with_a_new_burst(_stack: ExitStack, model: nnfmq.ServedModel) -> Call:
    def call(value: float) -> float:
        with model.burst() as burst:
            return value_of(burst.execute(one(value)))

    return call


MODES = [
    over_a_burst, in_place, over_a_pool, as_a_request, in_a_task, synchronously, asynchronously, fenced, computed_once,
    with_a_new_reusable_execution, with_a_new_burst,
]  # fmt: skip


class _User:
    """A thread that executes a model until it is told to end, and checks each result."""

    def __init__(self, model: nnfmq.ServedModel, mode: Callable[..., Call]) -> None:
        self._model, self._mode = model, mode
        self.calls = 0
        self.wrong: list[str] = []
        self.seen: list[int] = []
        self.is_ended = threading.Event()

    def run(self) -> None:
        with ExitStack() as stack:
            call = self._mode(stack, self._model)
            while not self.is_ended.is_set():
                self._call_once(call)

    def _call_once(self, call: Call) -> None:
        value = float(self.calls % 1000)
        before = self._model.version
        version = call(value) - value
        after = self._model.version
        self.calls += 1
        if not before <= version <= after:
            self.wrong.append(f"version {version} of a call that began at {before} and ended at {after}")
        self.seen.append(int(version))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
def test_each_request_is_executed_once_by_a_version_that_was_served_during_the_call(
    mode: Callable[..., Call], repository: FakeRepository, client: nnfmq.Client, model: nnfmq.ServedModel
) -> None:
    before = executions(client)
    users = [_User(model, mode) for _ in range(2)]
    running = [InThread.start(user.run) for user in users]
    for version in range(2, VERSIONS + 1):
        publish(repository, model, version)
        for user in users:
            calls = user.calls
            until(lambda user=user, calls=calls: user.calls > calls, "the model executes")
    for user in users:
        user.is_ended.set()
    errors = [thread.wait().error for thread in running]
    assert errors == [None, None]
    for user in users:
        assert not user.wrong
        assert len(set(user.seen)) > VERSIONS // 2
        assert user.seen == sorted(user.seen)
    until(lambda: executions(client) - before == sum(user.calls for user in users), "each execution is counted once")


def test_many_tasks_execute_while_the_version_changes(
    repository: FakeRepository, client: nnfmq.Client, model: nnfmq.ServedModel
) -> None:
    before, calls, ended = executions(client), itertools.count(), threading.Event()

    async def user(burst: Burst) -> list[int]:
        seen = []
        while not ended.is_set():
            value = float(next(calls) % 1000)
            result = value_of(await burst.execute_async(one(value)))
            seen.append(int(result - value))
            assert seen[-1] == burst.version
        return seen

    async def users() -> list[list[int]]:
        with ExitStack() as stack:
            bursts = [stack.enter_context(model.burst()) for _ in range(8)]
            return await asyncio.gather(*map(user, bursts))

    running = InThread.start(lambda: asyncio.run(users()))
    for version in range(2, VERSIONS + 1):
        publish(repository, model, version)
    ended.set()
    seen = running.wait().value
    assert all(versions == sorted(versions) for versions in seen)
    assert max(versions[-1] for versions in seen if versions) > VERSIONS // 2
    count = sum(map(len, seen))
    assert count == next(calls)
    until(lambda: executions(client) - before == count, "each execution is counted once")


# ------------------------------------------------------------------------------------------------ one move


def test_a_burst_keeps_its_memory_and_its_inputs(
    repository: FakeRepository, client: nnfmq.Client, model: nnfmq.ServedModel
) -> None:
    with model.burst() as burst:
        burst.execute(one(5))
        given, result = burst.inputs[0], burst.outputs[0]
        publish(repository, model, 2)
        assert burst.execute() == (one(7),)
        assert burst.inputs[0] is given
        assert burst.outputs[0] is result
        assert result == one(7)


def test_memories_of_requests_keep_their_slots(
    repository: FakeRepository, client: nnfmq.Client, model: nnfmq.ServedModel
) -> None:
    hal_model = plus_model(1)
    with ExitStack() as stack:
        source, sink = (stack.enter_context(nnfmq.Memory.create(size)) for size in pool_bytes(hal_model))
        burst = stack.enter_context(model.burst())
        request = request_for(hal_model, [source, sink])
        for version in (1, 2, 3):
            if version > 1:
                publish(repository, model, version)
            burst.execute_request(request)
            assert np.frombuffer(sink.view, np.float32)[0] == version
            assert burst.version == version
            assert burst.execute(one(5)) == (one(5 + version),)
        burst.free_memory(source)


def test_the_states_of_a_burst_go_on_in_the_new_version(repository: FakeRepository, client: nnfmq.Client) -> None:
    state = StateInfo(TensorInfo("sum", (1,), "float32"))
    info = TensorInfo("x", (1,), "float32")
    changes = {"inputs": (info,), "outputs": (info,), "states": (state,)}
    repository.publish("sum", 1, running_sum(1), **changes)
    with client.model("sum") as model, model.burst() as burst:
        assert [value_of(burst.execute(one(5))) for _ in range(2)] == [5, 10]
        assert value_of(model.execute(one(1))) == 1
        repository.publish("sum", 2, running_sum(100), **changes)
        until(lambda: model.version == 2, "the model moves")
        assert value_of(burst.execute(one(5))) == 10 + 500  # the sum goes on; the new version weighs its inputs
        assert value_of(model.execute(one(1))) == 1 + 100
        assert burst.version == 2


def test_a_late_result_of_the_old_version_is_not_that_of_the_new_one(
    repository: FakeRepository, client: nnfmq.Client, model: nnfmq.ServedModel
) -> None:
    with model.burst() as burst, Process(client.worker_pid) as worker:
        burst.execute(one(0))
        with worker.stopped(), pytest.raises(nnfmq.MissedDeadline):
            burst.execute(one(1), timeout=0.01)
        publish(repository, model, 2)
        assert burst.execute(one(5)) == (one(7),)
        assert burst.execute(one(6)) == (one(8),)


def test_an_execution_in_progress_ends_on_the_old_version(
    repository: FakeRepository, client: nnfmq.Client, model: nnfmq.ServedModel
) -> None:
    """The worker is stopped while the burst's request is in its queue, so the new version is requested after it."""
    with model.burst() as burst, Process(client.worker_pid) as worker:
        burst.execute(one(0))
        with worker.stopped():
            running = InThread.start(lambda: burst.execute(one(5)))
            wait_until_waiting(burst)
            repository.publish("plus", 2, plus_model(2))
        assert running.wait().value == (one(6),)
        until(lambda: model.version == 2, "the model moves")
        assert burst.execute(one(5)) == (one(7),)


def test_a_timeout_during_the_move_leaves_a_burst_that_moves_later(
    repository: FakeRepository, client: nnfmq.Client, model: nnfmq.ServedModel
) -> None:
    with model.burst() as burst, Process(client.worker_pid) as worker:
        burst.execute(one(0))
        publish(repository, model, 2)
        with worker.stopped(), pytest.raises(nnfmq.MissedDeadline):
            burst.execute(one(1), timeout=5.5)  # closing the old queues waits for 5 s
        assert burst.execute(one(5)) == (one(7),)


def test_a_task_that_is_cancelled_during_the_move_leaves_a_burst_that_has_moved(
    repository: FakeRepository, client: nnfmq.Client, model: nnfmq.ServedModel
) -> None:
    async def execute(burst: Burst) -> None:
        task = asyncio.create_task(burst.execute_async(one(1)))
        await asyncio.sleep(0)  # it begins
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await burst.execute_async(one(5)) == (one(7),)

    with model.burst() as burst:
        burst.execute(one(0))
        before = executions(client)
        publish(repository, model, 2)
        asyncio.run(execute(burst))
        assert (burst.version, value_of(burst.execute(one(6)))) == (2, 8)
        until(lambda: executions(client) == before + 2, "the cancelled execution was not sent")


def test_a_burst_of_a_closed_model_keeps_its_version(
    repository: FakeRepository, client: nnfmq.Client, model: nnfmq.ServedModel
) -> None:
    with model.burst() as burst:
        burst.execute(one(0))
        publish(repository, model, 2)
        model.close()
        assert burst.execute(one(5)) == (one(6),)
        assert burst.version == 1


def test_each_version_is_a_model_of_its_own_for_observers(
    repository: FakeRepository, client: nnfmq.Client, tmp_path: Path
) -> None:
    path = tmp_path / "moves.nnrec"
    with ExecutionRecorder.start(path), client.model("plus") as model, model.burst() as burst:
        assert burst.execute(one(5)) == (one(6),)
        publish(repository, model, 2)
        assert burst.execute(one(5)) == (one(7),)
        assert burst.version == 2
        assert model.execute(one(6)) == (one(8),)
    with RecordingFile(path) as recording:
        assert [execution.row.model for execution in recording.executions] == [0, 1, 1]
        assert all(recorded.data >= 0 for recorded in recording.models)  # with the model itself


def test_a_closed_burst_stays_closed(
    repository: FakeRepository, client: nnfmq.Client, model: nnfmq.ServedModel
) -> None:
    burst = model.burst()
    burst.close()
    publish(repository, model, 2)
    with pytest.raises(nnfmq.InvalidArgument, match="closed"):
        burst.execute(one(1))


def test_reusable_executions_keep_their_version(
    repository: FakeRepository, client: nnfmq.Client, model: nnfmq.ServedModel
) -> None:
    with ExitStack() as stack:
        execution = stack.enter_context(model.create_reusable_execution())
        burst = stack.enter_context(model.aidl_burst())
        publish(repository, model, 2)
        assert execution.compute(one(5)) == (one(6),)
        hal_model = plus_model(1)
        source, sink = (stack.enter_context(nnfmq.Memory.create(size)) for size in pool_bytes(hal_model))
        np.frombuffer(source.view, np.float32)[0] = 5
        burst.execute_synchronously(request_for(hal_model, [source, sink]))
        assert np.frombuffer(sink.view, np.float32)[0] == 6


def test_buffers_of_the_driver_are_those_of_one_version(
    repository: FakeRepository, client: nnfmq.Client, model: nnfmq.ServedModel
) -> None:
    with client.device("reference").allocate(inputs=[(model, 0)]) as buffer:
        buffer.copy_from(one(5))
        assert model.execute(buffer) == (one(6),)
        publish(repository, model, 2)
        with pytest.raises(nnfmq.InvalidArgument, match="not allocated for input 0 of this model"):
            model.execute(buffer)
        assert model.execute(one(5)) == (one(7),)


def test_the_old_version_is_released_in_the_driver(
    repository: FakeRepository, client: nnfmq.Client, model: nnfmq.ServedModel
) -> None:
    for version in range(2, 6):
        publish(repository, model, version)
    until(lambda: len(own_statistics(client).models) == 1, "one version is prepared")
    until(lambda: "nnfmq-versions" not in {thread.name for thread in threading.enumerate()}, "the thread has ended")


def test_an_old_version_is_kept_while_a_call_has_its_location(
    repository: FakeRepository, client: nnfmq.Client, model: nnfmq.ServedModel
) -> None:
    locations = [model.handle.location]  # as a call has it that was interrupted before it sent its request
    publish(repository, model, 2)
    publish(repository, model, 3)
    until(lambda: len(own_statistics(client).models) == 2, "the version between is released")
    connection, old_id = model.connection, locations[0].require_id()
    late = nnfmq.PreparedModel(connection, old_id, model.inputs, model.outputs, model.device)
    assert late.execute(one(5)) == (one(6),)
    locations.clear()
    until(lambda: len(own_statistics(client).models) == 1, "the old version is released")
    with pytest.raises(nnfmq.InvalidArgument, match="there is no model"):
        late.execute(one(5))


def test_a_request_in_flight_keeps_its_location(
    repository: FakeRepository, client: nnfmq.Client, model: nnfmq.ServedModel
) -> None:
    with Process(client.worker_pid) as worker:
        with worker.stopped():
            pending = model.execute_async(one(5))
            running = InThread.start(lambda: model.execute(one(6)))
            running.wait_until_asleep()
            old = weakref.ref(model.handle.location)
            model.handle.location = replace(model.handle.location)  # as after a move
            assert old() is not None
        assert pending.result(LIMIT_S) == (one(6),)
        assert running.wait().value == (one(7),)
        until(lambda: old() is None, "no call has it any more")
