"""Calls of `execute` in quick succession, over a burst of the model's own: deaths, limits, signals and fork."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from support.drivers import LIMIT_S, Daemon, InThread, Process, interrupted_after, kill_worker, one, until
from support.forking import fork
from support.models import null_model

import nnfmq
from nnfmq.client.burst.own import OwnBurst
from nnfmq.client.model import prepared_model

SOON_S = 0.02
Call = Callable[[nnfmq.PreparedModel, float], object]
FORMS: dict[str, Call] = {
    "execute": lambda model, value: model.execute(one(value))[0],
    "execute_async": lambda model, value: model.execute_async(one(value)).result(LIMIT_S)[0],
}


@pytest.fixture(autouse=True)
def _calm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_model, "_QUICK_NS", 10**10)  # however slow the machine is; it has run longer


def own_burst(model: nnfmq.PreparedModel) -> OwnBurst:
    """Execute until the model has a burst of its own, which this returns."""

    def is_configured() -> bool:
        assert model.execute(one(1))[0] == one(1)
        return any(burst._is_configured for burst in model._own_burst.values())

    until(is_configured, "the model has a burst")
    (burst,) = model._own_burst.values()
    return burst


@pytest.fixture
def worker(client: nnfmq.Client) -> Iterator[Process]:
    with Process(client.worker_pid) as process:
        yield process


@pytest.fixture
def quick(model: nnfmq.PreparedModel) -> nnfmq.PreparedModel:
    """The null model, which has a burst of its own."""
    own_burst(model)
    return model


def wait_until_sent(burst: OwnBurst, before: int) -> None:
    until(lambda: burst._channel.requests.counters()[0] > before, "the packet is sent")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_recovering", [True, False], ids=["recovers", "does not"])
def test_LIFE_6_the_death_of_the_driver_in_an_execution_is_that_of_one_over_the_control_channel(
    daemon: Daemon, form: str, is_recovering: bool
) -> None:
    with (
        nnfmq.connect(daemon.path, timeout=LIMIT_S, recover=is_recovering) as client,
        client.device("reference").prepare(null_model()) as model,
        Process(client.worker_pid) as worker,
    ):
        burst = own_burst(model)
        sent = burst._channel.requests.counters()[0]
        with worker.stopped():
            call = InThread.start(lambda: FORMS[form](model, 3))
            wait_until_sent(burst, sent)
            worker.kill()
        found = call.wait()
        if is_recovering:
            assert found.value == one(3)
            own_burst(model)
        else:
            assert isinstance(found.error, nnfmq.DeadObject)
        del burst


def test_between_calls_the_death_of_the_driver_is_noticed(recovering: nnfmq.Client) -> None:
    with recovering.device("reference").prepare(null_model()) as model:
        own_burst(model)
        kill_worker(recovering)
        assert not any(not burst.is_closed for burst in model._own_burst.values())
        assert model.execute(one(4))[0] == one(4)


def test_after_a_timeout_each_execution_gets_its_own_result(worker: Process, quick: nnfmq.PreparedModel) -> None:
    with worker.stopped(), pytest.raises(nnfmq.MissedDeadlineTransient):
        quick.execute(one(2), timeout=SOON_S)
    for form in FORMS.values():
        assert form(quick, 3) == one(3)


def test_a_deadline_that_has_passed_is_the_driver_s_error(quick: nnfmq.PreparedModel) -> None:
    with pytest.raises(nnfmq.MissedDeadline):
        quick.execute(one(2), timeout=0)
    with pytest.raises(nnfmq.MissedDeadline):
        quick.execute_async(one(2), timeout=0).result(LIMIT_S)
    assert quick.execute(one(3), timeout=LIMIT_S)[0] == one(3)


def test_after_a_signal_handler_that_raises_each_execution_gets_its_own_result(
    worker: Process, quick: nnfmq.PreparedModel
) -> None:
    with worker.stopped(), interrupted_after(SOON_S):
        quick.execute(one(2), timeout=LIMIT_S)
    for form in FORMS.values():
        assert form(quick, 3) == one(3)


def test_a_model_that_is_closed_ends_its_execution_first(worker: Process, quick: nnfmq.PreparedModel) -> None:
    (burst,) = quick._own_burst.values()
    sent = burst._channel.requests.counters()[0]
    with worker.stopped():
        pending = quick.execute_async(one(5))
        wait_until_sent(burst, sent)
        burst.close()  # as `close` does, which then waits for the driver
        assert not pending.done()
    assert pending.result(LIMIT_S)[0] == one(5)


def test_a_forked_child_cannot_use_the_burst_and_leaves_it_to_its_parent(quick: nnfmq.PreparedModel) -> None:
    pid = fork()
    if not pid:
        status = 1
        try:
            quick.execute(one(2))
        except nnfmq.DeadObject:
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    for form in FORMS.values():
        assert form(quick, 3) == one(3)
