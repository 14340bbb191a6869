"""After a call that ended early, the next one over the same memory waits until the driver has ended that run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from support.drivers import LIMIT_S, Daemon, InThread, Process, interrupted_after, one, until
from support.forking import fork
from support.models import null_model
from support.sessions import create_endless_request

import nnfmq
from nnfmq.client.execution.reusable import Execution
from nnfmq.hal.types import DataLocation, Request, RequestArgument
from nnfmq.serialize import messages

SOON_S = 0.02
EXECUTING = (messages.Execute, messages.RunExecution, messages.RunExecutionFenced, messages.ExecuteAidlBurst)


class Driven:
    """A null model in a driver, the calls that its client sends, and the driver's worker."""

    def __init__(self, daemon: Daemon, interface: str, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
        self.client = client = stack.enter_context(nnfmq.connect(daemon.path, timeout=LIMIT_S, interface=interface))
        self.model = stack.enter_context(client.device("reference").prepare(null_model()))
        self.worker = stack.enter_context(Process(client.worker_pid))
        self.connection, send = client.connection, client.connection._send
        self._sent: list[type[messages.Message]] = []
        patch.setattr(
            self.connection, "_send", lambda message, *rest: (self._sent.append(type(message)), send(message, *rest))
        )

    @property
    def executions_sent(self) -> int:
        return sum(kind in EXECUTING for kind in self._sent)


@pytest.fixture(params=["AIDL v4", "HIDL 1.3", "HIDL 1.0"])
def driven(
    request: pytest.FixtureRequest, daemon: Daemon, resources: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> Driven:
    """Return a driver whose interface version has reusable executions, has none, and has no deadlines."""
    return Driven(daemon, request.param, resources, monkeypatch)


newest = pytest.mark.parametrize("driven", ["AIDL v4"], indirect=True)
fenced = pytest.mark.parametrize("driven", ["AIDL v4", "HIDL 1.3"], indirect=True)


@pytest.fixture
def execution(driven: Driven) -> Iterator[Execution]:
    with driven.model.create_reusable_execution() as made:
        made.compute(one(1))
        yield made


def end_early(driven: Driven, execution: Execution, how: str) -> None:
    """End a call before the stopped driver has its run."""
    if how == "deadline":
        with pytest.raises(nnfmq.MissedDeadlineTransient):
            execution.compute(one(2), timeout=SOON_S)
    else:
        with interrupted_after(SOON_S):
            execution.compute(one(2), timeout=LIMIT_S)


@pytest.mark.parametrize("how", ["deadline", "signal"])
def test_RUX_3_nothing_is_written_or_sent_while_the_driver_may_have_the_late_run(
    driven: Driven, execution: Execution, how: str
) -> None:
    with driven.worker.stopped():
        end_early(driven, execution, how)
        sent = driven.executions_sent
        for call in (execution.compute, execution.compute_fenced):
            with pytest.raises(nnfmq.MissedDeadlineTransient, match="before the driver had ended the run before"):
                call(one(3), timeout=SOON_S)
        assert driven.executions_sent == sent
        assert execution.inputs[0][0] == 2
        call_without_timeout = InThread.start(lambda: execution.compute(one(4)))
        call_without_timeout.wait_until_asleep()
        assert driven.executions_sent == sent
    assert call_without_timeout.wait().value == (one(4),)
    assert execution.compute(one(5)) == (one(5),)


@fenced
def test_RUX_3_a_launch_that_ended_early_is_waited_for_until_its_fence_is_not_active(
    driven: Driven, execution: Execution
) -> None:
    """The run waits for a fence of the application, so that it certainly runs when the next one is attempted."""
    with nnfmq.Fence.create() as gate:
        with driven.worker.stopped(), interrupted_after(SOON_S):
            execution.compute_fenced(one(2), wait_for=[gate])
        with pytest.raises(nnfmq.MissedDeadlineTransient, match="before the driver had ended the run before"):
            execution.compute(one(3), timeout=1)
        gate.signal()
        assert execution.compute(one(4), timeout=LIMIT_S) == (one(4),)


@fenced
@pytest.mark.parametrize("reply_is_first", [True, False])
def test_LIFE_2_an_execution_with_a_late_launch_can_be_closed(driven: Driven, reply_is_first: bool) -> None:
    """The checks around each test see that no fence stays open here, and no callback in the driver."""
    with nnfmq.Fence.create() as gate:
        with driven.model.create_reusable_execution() as execution:
            with driven.worker.stopped():
                with interrupted_after(SOON_S):
                    execution.compute_fenced(one(2), wait_for=[gate])
                if not reply_is_first:
                    execution.close()
            until(lambda: not driven.connection._pending_calls, "the late reply is there")
        gate.signal()
    assert driven.model.execute(one(3)) == (one(3),)


@newest
def test_RUX_3_a_run_that_is_late_in_the_driver_itself_is_waited_for(driven: Driven, resources: ExitStack) -> None:
    """A loop ends at the driver's next check after the deadline, later than the client's call."""
    loop, endless = create_endless_request(resources)
    model = resources.enter_context(driven.client.device("reference").prepare(loop))
    bound = resources.enter_context(model.create_reusable_request(endless.request))
    for _ in range(5):
        with pytest.raises(nnfmq.MissedDeadline):
            bound.compute(timeout=0.03)


@newest
def test_BUR_16_an_AIDL_burst_waits_for_its_late_execution(driven: Driven, resources: ExitStack) -> None:
    memory = resources.enter_context(nnfmq.Memory.create(8))
    places = [RequestArgument(location=DataLocation(0, offset, 4)) for offset in (0, 4)]
    request = Request((places[0],), (places[1],), (memory,))
    values = np.frombuffer(memory.view, np.float32)
    with driven.model.aidl_burst() as burst:
        burst.execute_synchronously(request)
        with driven.worker.stopped():
            with pytest.raises(nnfmq.MissedDeadlineTransient):
                burst.execute_synchronously(request, timeout=SOON_S)
            sent = driven.executions_sent
            with pytest.raises(nnfmq.MissedDeadlineTransient, match="before the driver had ended the run before"):
                burst.execute_synchronously(request, timeout=SOON_S)
            assert driven.executions_sent == sent
        values[0] = 3
        burst.execute_synchronously(request, timeout=LIMIT_S)
    assert values[1] == 3
    del values


def test_a_late_run_whose_driver_dies_is_over(driven: Driven, execution: Execution) -> None:
    with driven.worker.stopped():
        end_early(driven, execution, "deadline")
        driven.worker.kill()
    assert execution.compute(one(3), timeout=LIMIT_S) == (one(3),)


@newest
def test_a_forked_child_waits_for_no_late_run(driven: Driven, execution: Execution) -> None:
    with driven.worker.stopped():
        end_early(driven, execution, "deadline")
        assert in_child(lambda: execution.compute(one(3), timeout=1)) == "DeadObject"
    assert execution.compute(one(4)) == (one(4),)


def in_child(call: Callable[[], Any]) -> str:
    """Return the name of the error that a call raises in a forked child."""
    reader, writer = os.pipe()
    pid = fork()
    if pid == 0:
        try:
            call()
        except nnfmq.NnfmqError as error:
            os.write(writer, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        name = pipe.read().decode()
    os.waitpid(pid, 0)
    return name
