"""Closing ends what waits for a driver: a client, a model or a burst that is closed while it recovers does not hang."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from support.drivers import LIMIT_S, Daemon, InThread, Process, kill_worker, one, running_daemon, until
from support.execution_modes import fenced, in_a_task, of_a_pool, reusable
from support.models import null_model

import nnfmq
from nnfmq.client.connection import connect as connecting
from nnfmq.client.model.cpu_fallback import CpuFallback

SOON_S = 5.0
"""The longest time that a call may take that has nothing to wait for, on a busy machine; waits for a driver take 10."""


@pytest.fixture
def client(daemon: Daemon) -> Iterator[nnfmq.Client]:
    with daemon.connect(recover=True) as client:
        yield client


class Gate:
    """Where a call stops until the test lets it go on."""

    def __init__(self) -> None:
        self.reached, self.go, self.passes = threading.Event(), threading.Event(), 0

    def wait(self) -> None:
        self.passes += 1
        self.reached.set()
        assert self.go.wait(LIMIT_S)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.go.set()


def ended_soon(call: Callable[[], object]) -> None:
    """Make a call, which must take less than `SOON_S`."""
    assert InThread.start(call).wait(SOON_S).error is None


# ------------------------------------------------------------------------------------------------ waits for a driver


def test_a_call_that_waits_for_a_driver_ends_when_the_client_is_closed(
    client: nnfmq.Client, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        gate.reached.set()
        raise nnfmq.DeviceUnavailable("nobody listens")

    with client.device("reference").prepare(null_model()) as model:
        monkeypatch.setattr(connecting, "_connect_to", refuse)
        kill_worker(client)
        calls = [InThread.start(partial(model.execute, one(1), timeout=60)), InThread.start(client.devices)]
        assert gate.reached.wait(LIMIT_S)
        ended_soon(client.close)
        for call in calls:
            assert isinstance(call.wait(SOON_S).error, nnfmq.BadState)


def test_a_client_that_is_closed_after_its_driver_has_died_says_that_it_is_closed(client: nnfmq.Client) -> None:
    with client.device("reference").prepare(null_model()) as model:
        kill_worker(client)
        client.close()
        for call in (client.devices, partial(model.execute, one(1))):
            with pytest.raises(nnfmq.BadState):
                call()


def test_a_call_whose_next_driver_does_not_reply_ends_when_the_client_is_closed(
    client: nnfmq.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    again, stopped = client._connect_again, []
    assert again is not None

    def connect_to_a_stopped_one(deadline_ns: int | None, is_closed: Any) -> nnfmq.Client:
        fresh = again(deadline_ns, is_closed)
        stopped.append(Process(fresh.worker_pid))
        stopped[0].stop()
        return fresh

    monkeypatch.setattr(client, "_connect_again", connect_to_a_stopped_one)
    kill_worker(client)
    listing = InThread.start(partial(client.devices, timeout=60))
    until(lambda: client._next is not None, "the next driver is asked for its devices")
    ended_soon(client.close)
    assert listing.wait(SOON_S).error is not None
    with stopped[0] as worker:
        worker.resume()


def test_a_wait_for_a_repository_ends_when_the_client_is_closed(folder: Path) -> None:
    with pytest.raises(nnfmq.BadState, match="closed"):
        connecting._connect_repository(folder / "d.sock", None, None, lambda: True, True)


# ------------------------------------------------------------------------------------------------ the CPU's preparation


@pytest.fixture
def model(client: nnfmq.Client, daemon: Daemon, gate: Gate) -> Iterator[nnfmq.PreparedModel]:
    """A model whose driver has died, and whose preparation on the CPU stops at `gate`."""
    with daemon.connect() as cpu, client.device("reference").prepare(null_model()) as model:

        def open_device() -> Any:
            gate.wait()
            return cpu.device("reference")

        model.fallback = CpuFallback(open_device, null_model())
        kill_worker(client)
        client._connect_again = _never
        yield model
        gate.go.set()
        until(lambda: not any(t.name == "nnfmq-cpu" for t in threading.enumerate()), "the preparation has ended")


def _never(_deadline_ns: int | None, _is_closed: Any) -> NoReturn:
    raise nnfmq.DeviceUnavailable("there is no driver")


def test_a_model_that_the_cpu_still_prepares_is_closed_at_once(model: nnfmq.PreparedModel, gate: Gate) -> None:
    executing = InThread.start(partial(model.execute, one(1)))
    assert gate.reached.wait(LIMIT_S)
    ended_soon(model.close)
    assert isinstance(executing.wait(SOON_S).error, nnfmq.NnfmqError)
    fallback: Any = model.fallback
    gate.go.set()
    until(lambda: not any(t.name == "nnfmq-cpu" for t in threading.enumerate()), "the preparation has ended")
    assert not fallback.is_used


def test_a_timeout_ends_the_wait_for_the_cpu_s_preparation_which_goes_on(
    model: nnfmq.PreparedModel, gate: Gate
) -> None:
    for _ in range(3):
        with pytest.raises(nnfmq.MissedDeadline):
            model.execute(one(1), timeout=0.05)
    assert gate.reached.wait(LIMIT_S)
    executing = InThread.start(partial(model.execute, one(2), timeout=60))
    gate.go.set()
    assert executing.wait().value == (one(2),)
    assert gate.passes == 1


# ------------------------------------------------------------------------------------------------ bursts


def test_a_burst_that_is_closed_while_its_model_is_prepared_again_gets_no_new_queues(
    client: nnfmq.Client, gate: Gate
) -> None:
    with client.device("reference").prepare(null_model()) as model:
        again = model.handle.prepare_again
        assert again is not None

        def prepare_again(deadline_ns: int | None, wait: bool) -> Any:
            gate.wait()
            return again(deadline_ns, wait)

        model.handle.prepare_again = prepare_again
        burst = model.burst()
        kill_worker(client)
        executing = InThread.start(partial(burst.execute, one(1)))
        assert gate.reached.wait(LIMIT_S)
        ended_soon(burst.close)
        gate.go.set()
        assert isinstance(executing.wait().error, nnfmq.BadState)
        assert not burst.channel.burst_id
        assert "closed" in repr(burst)
        assert model.execute(one(2)) == (one(2),)


# ------------------------------------------------------------------------------------------------ at random


def over_a_burst(model: nnfmq.PreparedModel, value: Any) -> Any:
    with model.burst() as burst:
        return burst.execute(value, timeout=2)


MODES: list[Callable[[nnfmq.PreparedModel, Any], Any]] = [
    lambda model, value: model.execute(value, timeout=2),
    lambda model, value: model.execute_async(value, timeout=2).result(2),
    over_a_burst, in_a_task, fenced, of_a_pool, reusable,
]  # fmt: skip


class Storm:
    """Threads that execute in all modes, while drivers are killed and objects closed, each after a random time."""

    def __init__(self, client: nnfmq.Client, cpu: nnfmq.Client, choice: random.Random) -> None:
        self._client, self._choice = client, choice
        device = client.device("reference")
        self._models = [device.prepare(null_model()) for _ in range(2)]
        self._models[0].fallback = CpuFallback(lambda: cpu.device("reference"), null_model())
        self._end, self.wrong, self.longest_s = threading.Event(), [], 0.0  # type: ignore[var-annotated]

    def run(self) -> None:
        calls = [self._execute_often, self._execute_often, self._kill_often, self._execute_often]
        running = [InThread.start(partial(call, self._choice.random())) for call in calls]
        self._end.wait(self._choice.uniform(0, 0.5))
        closing = [*self._models, self._client]
        self._choice.shuffle(closing)
        for closed in closing:
            self._timed(closed.close)
        self._end.set()
        for call in running:
            assert call.wait().error is None

    def _timed(self, call: Callable[[], Any]) -> None:
        begin = time.monotonic()
        try:
            result = call()
            if isinstance(result, tuple) and result != (one(1),):
                self.wrong.append(result)
        except nnfmq.NnfmqError:
            pass
        self.longest_s = max(self.longest_s, time.monotonic() - begin)

    def _execute_often(self, seed: float) -> None:
        choice = random.Random(seed)
        while not self._end.is_set():
            self._timed(partial(choice.choice(MODES), choice.choice(self._models), one(1)))

    def _kill_often(self, seed: float) -> None:
        choice = random.Random(seed)
        while not self._end.wait(choice.uniform(0, 0.1)):
            try:
                with Process(self._client.worker_pid) as worker:
                    worker.kill()
            except (nnfmq.NnfmqError, ProcessLookupError):  # closed, or not connected again yet
                pass


@pytest.mark.full
@pytest.mark.parametrize("serves", [True, False])
def test_no_call_hangs_while_drivers_die_and_objects_are_closed_at_random(
    serves: bool, daemon: Daemon, folder: Path
) -> None:
    choice = random.Random(7)
    for _ in range(8 if serves else 1):
        with ExitStack() as resources:
            driver = daemon if serves else resources.enter_context(running_daemon(folder / "d.sock"))
            cpu = resources.enter_context(daemon.connect())
            storm = Storm(driver.connect(recover=True), cpu, choice)
            if not serves:
                driver.process.kill()  # `nnfmq serve` itself: no driver comes back
            storm.run()
            assert not storm.wrong
            assert storm.longest_s < 10 + SOON_S  # calls without a timeout wait up to 10 s for a driver
