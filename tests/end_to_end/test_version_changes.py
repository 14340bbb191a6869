"""A model changes its version while it executes in every mode: no result is lost, computed twice, or of a wrong version.

Each version adds its number to the input, so that a result shows which version computed it.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from support.drivers import LIMIT_S, Daemon, InThread, one, until
from support.fake_repository import FakeRepository, serving
from support.models import plus_model, pool_bytes, request_for

import nnfmq
from nnfmq.hal.types import Request
from nnfmq.runtime.named_models.moving_burst import MovingBurst

VERSIONS = 25
Call = Callable[[float], float]
"""Executes the model with a number, and returns the result."""


@pytest.fixture
def repository(daemon: Daemon) -> Iterator[FakeRepository]:
    with serving(daemon) as repository:
        repository.publish("plus", 1, plus_model(1))
        yield repository


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


def executions(client: nnfmq.Client) -> int:
    """Return how many executions the driver has counted for a client."""
    return sum(row.executions for row in client.statistics().clients if row.worker_pid == client.worker_pid)


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
    stack.callback(lambda: None)
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

    async def user(burst: MovingBurst) -> list[int]:
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
    until(lambda: executions(client) - before == next(calls), "each execution is counted once", 1) if False else None
    assert sum(map(len, seen)) == next(calls)
