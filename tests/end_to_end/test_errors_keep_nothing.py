"""Errors keep no objects: what a caller drops is closed at once, whatever has failed, not at the next collection.

An error refers to the frames that it has passed, and these to their callers'. A frame that refers to the error is part
of a cycle, which keeps all local variables of all callers until the garbage collector finds it.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import numpy as np
import pytest
from support.drivers import LIMIT_S, Daemon, kill_worker, one, until
from support.execution_modes import fenced, of_a_pool, reusable
from support.models import null_model

import nnfmq
from nnfmq.client.burst.burst import Burst
from nnfmq.client.connection.device import Device
from nnfmq.client.model.cpu_fallback import CpuFallback

Execute = Callable[[nnfmq.PreparedModel, Any], Any]


class Local:
    """What the caller of an execution has."""


def over_a_burst(model: nnfmq.PreparedModel, value: Any) -> Any:
    with model.burst() as burst:
        return burst.execute(value)


def in_a_task(model: nnfmq.PreparedModel, value: Any) -> None:
    """Await an execution; its error ends here, because asyncio's own frames keep what leaves `asyncio.run`."""

    async def main() -> None:
        with suppress(nnfmq.NnfmqError):
            await model.execute_async(value)

    asyncio.run(main())


def in_a_task_over_a_burst(model: nnfmq.PreparedModel, value: Any) -> None:
    async def main() -> None:
        with suppress(nnfmq.NnfmqError), model.burst() as burst:
            await burst.execute_async(value)

    asyncio.run(main())


MODES: dict[str, Execute] = {
    "synchronous": lambda model, value: model.execute(value),
    "asynchronous": lambda model, value: model.execute_async(value).result(LIMIT_S),
    "in a task": in_a_task,
    "fenced": fenced,
    "of a pool": of_a_pool,
    "reusable": reusable,
    "burst": over_a_burst,
    "burst in a task": in_a_task_over_a_burst,
}


@pytest.fixture(autouse=True)
def _without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def cpu(daemon: Daemon) -> Iterator[nnfmq.Client]:
    with daemon.connect() as client:
        yield client


@pytest.fixture
def client(daemon: Daemon) -> Iterator[nnfmq.Client]:
    with daemon.connect(recover=True) as client:
        yield client


def local_of(call: Callable[[], object]) -> weakref.ref[Local]:
    """Call a function that may raise an NnfmqError; return a reference to a variable of the caller."""

    def application() -> weakref.ref[Local]:
        local = Local()
        with suppress(nnfmq.NnfmqError):
            call()
        return weakref.ref(local)

    return application()


def is_collected(reference: weakref.ref[Local]) -> bool:
    """Return whether it is freed without the garbage collector; other threads may still leave the calls."""
    until(lambda: reference() is None, limit_s=1, what="the caller's variable is freed")
    return True


@pytest.mark.parametrize("execute", MODES.values(), ids=MODES)
@pytest.mark.parametrize("recovers", [True, False])
def test_a_caller_s_variables_are_freed_after_the_driver_s_death(
    execute: Execute, recovers: bool, daemon: Daemon, cpu: nnfmq.Client
) -> None:
    with (
        daemon.connect(recover=recovers) as client,
        client.device("reference").prepare(null_model()) as model,
        client.device("reference").prepare(null_model()) as with_fallback,
        client.device("reference").prepare(null_model()) as without_cpu,
    ):
        with_fallback.fallback = CpuFallback(lambda: cpu.device("reference"), null_model(), survives_driver=recovers)
        without_cpu.fallback = CpuFallback(no_device, null_model(), survives_driver=recovers)
        for each in (with_fallback, without_cpu, model):
            kill_if_alive(client)
            assert is_collected(local_of(partial(execute, each, one(1))))


def no_device() -> NoReturn:
    raise nnfmq.DeviceUnavailable("no CPU")


def kill_if_alive(client: nnfmq.Client) -> None:
    if client.connection.is_open:
        kill_worker(client)


@pytest.mark.parametrize("execute", MODES.values(), ids=MODES)
def test_a_caller_s_variables_are_freed_after_a_wrong_input(execute: Execute, client: nnfmq.Client) -> None:
    with client.device("reference").prepare(null_model()) as model:
        assert is_collected(local_of(partial(execute, model, np.zeros(3, np.float32))))


@pytest.mark.parametrize("in_task", [False, True])
def test_a_caller_s_variables_are_freed_if_the_next_driver_dies_as_well(
    in_task: bool, client: nnfmq.Client, cpu: nnfmq.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the second death follows from one of the operating system, which has a traceback of its own."""

    def die(burst: Burst, deadline_ns: int | None) -> NoReturn:
        try:
            raise BrokenPipeError("the socket")
        except BrokenPipeError as error:
            raise nnfmq.DeadObject("the next driver") from error

    with client.device("reference").prepare(null_model()) as model:
        model.fallback = CpuFallback(lambda: cpu.device("reference"), null_model())
        with model.burst() as burst:
            assert burst.execute(one(1)) == (one(1),)
            kill_worker(client)
            model.handle.recover_now(None, wait=True)
            monkeypatch.setattr(Burst, "_replace_channel", die)
            execute = (lambda: run_in_task(burst)) if in_task else (lambda: burst.execute(one(2)))
            assert is_collected(local_of(execute))
            assert model.cpu_executions == 1


def run_in_task(burst: Any) -> Any:
    async def main() -> Any:
        return await burst.execute_async(one(2))

    return asyncio.run(main())


def test_a_caller_s_variables_are_freed_if_no_driver_can_be_started(
    client: nnfmq.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client.device("reference").prepare(null_model()) as model:
        kill_worker(client)
        client._connect_again = lambda _deadline_ns, _wait: no_device()
        for call in (client.devices, lambda: model.execute(one(1)), model.burst):
            assert is_collected(local_of(call))


def test_a_caller_s_variables_are_freed_if_no_device_can_prepare_the_model(
    client: nnfmq.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise nnfmq.GeneralFailure("the device declines")

    monkeypatch.setattr(Device, "prepare", refuse)
    assert is_collected(local_of(lambda: client.prepare(null_model())))
