"""Executions as objects through a driver process: when they may be computed, over new interfaces and old ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.drivers import LIMIT_S, Daemon, InThread, Process, until
from support.models import add_model, unsized_relu_model

import nnfmq
from nnfmq.base.fence import Fence
from nnfmq.client.execution.reusable import Execution
from nnfmq.serialize import messages

INTERFACES = ["AIDL v4", "AIDL v3", "HIDL 1.3", "HIDL 1.0"]
ONE, TEN, SUM, TWENTY = [1, 2, 3, 4], [10, 20, 30, 40], [11, 22, 33, 44], [20, 40, 60, 80]


@pytest.fixture(params=INTERFACES)
def interface_client(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[nnfmq.Client]:
    """Return a client with one of the interface versions."""
    with nnfmq.connect(daemon.path, timeout=LIMIT_S, interface=request.param) as interface_client:
        yield interface_client


@pytest.fixture
def adding(interface_client: nnfmq.Client) -> Iterator[nnfmq.PreparedModel]:
    with interface_client.device("reference").prepare(add_model()) as made:
        yield made


def computed(execution: Execution, *inputs: list[int]) -> list[float]:
    """Return the sum of two lists."""
    (found,) = execution.compute(*inputs, timeout=LIMIT_S)
    result: list[float] = found.tolist()
    return result


def test_RUX_5_API_12_a_reusable_execution_runs_repeatedly_over_every_interface(
    interface_client: nnfmq.Client, adding: nnfmq.PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent_types: list[type[messages.Message]] = []
    send = interface_client.connection._send
    monkeypatch.setattr(
        interface_client.connection,
        "_send",
        lambda message, *rest: (sent_types.append(type(message)), send(message, *rest)),
    )
    with adding.create_reusable_execution() as execution:
        for _ in range(2):
            assert computed(execution, ONE, TEN) == SUM
            assert computed(execution, TEN, TEN) == TWENTY
    kept = {messages.CreateExecution, messages.RunExecution}
    sent = set(sent_types) & {*kept, messages.Execute}
    assert sent == (kept if interface_client.interface == "AIDL v4" else {messages.Execute})


def test_RUX_5_an_execution_that_is_not_reusable_is_computed_once(adding: nnfmq.PreparedModel) -> None:
    with adding.create_execution() as execution:
        with pytest.raises(nnfmq.InvalidArgument, match="was given"):
            execution.compute(ONE)  # a mistake is not yet a computation
        assert computed(execution, ONE, TEN) == SUM
        for _ in range(2):
            with pytest.raises(nnfmq.BadState, match="not reusable"):
                execution.compute(TEN, TEN)
            with pytest.raises(nnfmq.BadState, match="not reusable"):
                execution.compute_fenced(TEN, TEN)
        assert execution.outputs[0].tolist() == SUM
    assert adding.execute(TEN, TEN)[0].tolist() == TWENTY


@pytest.mark.parametrize("interface_client", INTERFACES[:3], indirect=True)  # 1.0 has no deadlines
def test_RUX_5_a_run_that_missed_its_deadline_counts_as_the_only_run(adding: nnfmq.PreparedModel) -> None:
    with adding.create_execution() as execution:
        with pytest.raises(nnfmq.MissedDeadline):
            execution.compute(ONE, TEN, timeout=0)
        with pytest.raises(nnfmq.BadState, match="not reusable"):
            execution.compute(ONE, TEN)


@pytest.mark.parametrize("reusable", [False, True], ids=["once", "reusable"])
def test_RUX_5_a_running_execution_is_not_computed_again(
    interface_client: nnfmq.Client, adding: nnfmq.PreparedModel, reusable: bool
) -> None:
    with adding.create_reusable_execution() if reusable else adding.create_execution() as execution:
        with Process(interface_client.worker_pid) as worker, worker.stopped():
            running = InThread.start(lambda: computed(execution, ONE, TEN))
            until(lambda: bool(interface_client.connection._pending_calls), "the run is in progress")
            with pytest.raises(nnfmq.BadState, match="one run at a time"):
                execution.compute(TEN, TEN)
        assert running.wait().value == SUM
        if reusable:
            assert computed(execution, TEN, TEN) == TWENTY


@pytest.mark.parametrize("reusable", [False, True], ids=["once", "reusable"])
@pytest.mark.parametrize("interface_client", INTERFACES[:3], indirect=True)
def test_RUX_5_a_fenced_run_counts_as_the_only_run_too(adding: nnfmq.PreparedModel, reusable: bool) -> None:
    with adding.create_reusable_execution() if reusable else adding.create_execution() as execution:
        with Fence.create() as own, execution.compute_fenced(ONE, TEN, wait_for=[own]) as launched:
            for call in (execution.compute, execution.compute_fenced):
                with pytest.raises(nnfmq.BadState, match="one run at a time"):
                    call(TEN, TEN)
            own.signal()
            assert launched.result(LIMIT_S)[0].tolist() == SUM
        if reusable:
            assert computed(execution, TEN, TEN) == TWENTY
        else:
            with pytest.raises(nnfmq.BadState, match="not reusable"):
                execution.compute(TEN, TEN)


def test_RUX_5_an_execution_that_is_sent_again_needs_its_model(
    interface_client: nnfmq.Client, adding: nnfmq.PreparedModel
) -> None:
    with adding.create_reusable_execution() as reusable, adding.create_execution() as single:
        adding.close()
        if interface_client.interface == "AIDL v4":
            assert computed(reusable, ONE, TEN) == SUM
        else:
            with pytest.raises(nnfmq.InvalidArgument, match="closed"):
                reusable.compute(ONE, TEN)
        with pytest.raises(nnfmq.InvalidArgument, match="closed"):
            single.compute(ONE, TEN)


def test_an_execution_of_unknown_shapes_takes_those_of_its_outputs(client: nnfmq.Client) -> None:
    with client.device("reference").prepare(unsized_relu_model()) as model, model.create_execution() as execution:
        assert computed(execution, ONE) == ONE
