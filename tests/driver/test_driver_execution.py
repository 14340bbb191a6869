"""Reusable executions, with messages over a socketpair: binding once, exclusive runs, and what they keep alive."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support import models
from support.executors import LIMIT_S, until
from support.protocol import ProtocolPeer
from support.sessions import (
    ADD,
    HELD_ID,
    NONE,
    PooledRequest,
    Running,
    create_endless_request,
    create_request,
    hold,
    prepare,
)

from nnfmq.base.fence import Fence
from nnfmq.driver.execution import prepared_model
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.types import DataLocation, ExecutionConfig, FenceState, MeasureTiming, OutputShape
from nnfmq.serialize import messages
from nnfmq.serialize.messages import (
    CreateExecution,
    Executed,
    ExecutionCreated,
    FencedLaunched,
    ReleaseExecution,
    RunExecution,
    RunExecutionFenced,
)

INVALID, TRANSIENT = ErrorStatus.INVALID_ARGUMENT, ErrorStatus.MISSED_DEADLINE_TRANSIENT
SUM = [11.0, 22.0, 33.0, 44.0]
NEVER = 2**63 - 1


@pytest.fixture
def adding(resources: ExitStack) -> PooledRequest:
    return create_request(resources, ADD, [1, 2, 3, 4], [10, 20, 30, 40])


def create(client: ProtocolPeer, pooled: PooledRequest, model_id: int, config: Any = None) -> int:
    client.send(pooled.call(CreateExecution, 40, model_id, config), pooled.fds)
    created = client.receive(ExecutionCreated)
    assert (created.call, created.status) == (40, NONE), created
    return created.execution_id


def rejected(client: ProtocolPeer, pooled: PooledRequest, model_id: int, config: Any = None) -> ErrorStatus:
    client.send(pooled.call(CreateExecution, 40, model_id, config), pooled.fds)
    created = client.receive(ExecutionCreated)
    assert created.execution_id == 0
    return created.status


def run(client: ProtocolPeer, execution_id: int, deadline_ns: int = -1) -> Executed:
    client.send(RunExecution(41, execution_id, deadline_ns))
    return client.receive(Executed)


def launch(
    client: ProtocolPeer, execution_id: int, *fences: Fence, deadline_ns: int = -1, duration_ns: int = -1
) -> Any:
    """Return the reply to a fenced run, and its fence, which the caller owns, or None."""
    call = RunExecutionFenced(42, execution_id, deadline_ns, duration_ns, len(fences))
    client.send(call, [fence.fileno() for fence in fences])
    launched, fds = client.receive_with_fds(FencedLaunched)
    return launched, Fence.adopt(fds[0]) if fds else None


def test_RUX_1_a_request_is_sent_once_and_each_run_reads_its_memory_again(
    greeted: ProtocolPeer, adding: PooledRequest
) -> None:
    execution_id = create(greeted, adding, prepare(greeted))
    assert run(greeted, execution_id).status is NONE
    assert adding.result() == SUM
    np.frombuffer(adding.pools[0].view, np.float32, 1)[:] = 100
    reply = run(greeted, execution_id)
    assert messages.shapes_from_data(reply.shapes) == (OutputShape((4,)),)
    assert (reply.status, reply.time_in_driver_ns) == (NONE, -1)
    assert adding.result() == [110.0, *SUM[1:]]


def test_RUX_1_a_reusable_execution_is_validated_and_bound_once(
    greeted: ProtocolPeer, adding: PooledRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    execution_id = create(greeted, adding, prepare(greeted))

    def bind(*_: object, **__: object) -> None:
        raise AssertionError("bound again")

    monkeypatch.setattr(prepared_model.DriverPreparedModel, "bind", bind)
    assert [run(greeted, execution_id).status for _ in range(10)] == [NONE] * 10


def test_RUX_1_a_reusable_execution_is_run_fenced_and_synchronously(
    greeted: ProtocolPeer, adding: PooledRequest, resources: ExitStack
) -> None:
    own = resources.enter_context(Fence.create())
    execution_id = create(greeted, adding, prepare(greeted), ExecutionConfig(MeasureTiming.YES))
    launched, fence = launch(greeted, execution_id, own)
    with fence:
        own.signal()
        assert fence.wait(LIMIT_S) is FenceState.SIGNALED
        assert adding.result() == SUM
    greeted.send(messages.GetExecutionInfo(43, launched.callback_id))
    info = greeted.receive(messages.FencedExecutionInfo)
    assert 0 < info.fenced_on_device_ns <= info.fenced_in_driver_ns < info.launched_in_driver_ns
    assert run(greeted, execution_id).time_in_driver_ns > 0


@pytest.mark.parametrize("field", ["inputs", "outputs"])
def test_RUX_2_N_REQ_1_N_REQ_2_a_request_is_validated_when_the_execution_is_created(
    field: str, greeted: ProtocolPeer, adding: PooledRequest, running: Running
) -> None:
    incomplete = replace(adding.request, **{field: getattr(adding.request, field)[1:]})
    assert rejected(greeted, PooledRequest(incomplete, adding.pools), prepare(greeted)) is INVALID
    assert rejected(greeted, adding, 12345) is INVALID
    assert running.session.executions.values() == []


@pytest.mark.parametrize("timeout_ns", [-2, 15_000_000_001])
def test_RUX_2_N_RQX_14_CF_5_a_loop_timeout_out_of_range_is_rejected(
    timeout_ns: int, greeted: ProtocolPeer, adding: PooledRequest
) -> None:
    assert rejected(greeted, adding, prepare(greeted), ExecutionConfig(loop_timeout_ns=timeout_ns)) is INVALID


def test_RUX_2_SHP_4_N_FEN_3_a_short_output_is_reported_at_each_run(
    greeted: ProtocolPeer, resources: ExitStack
) -> None:
    pooled = create_request(resources, models.relu_model((4,)))
    output = replace(pooled.request.outputs[0], location=DataLocation(1, 0, 15))
    short = PooledRequest(replace(pooled.request, outputs=(output,)), pooled.pools)
    execution_id = create(greeted, short, prepare(greeted, models.unsized_relu_model((4,))))
    for _ in range(2):
        reply = run(greeted, execution_id)
        assert reply.status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
        assert messages.shapes_from_data(reply.shapes) == (OutputShape((4,), False),)


def test_FEN_7_N_RQX_8_a_fenced_run_rejects_outputs_that_are_not_fully_specified(
    greeted: ProtocolPeer, resources: ExitStack
) -> None:
    pooled = create_request(resources, models.relu_model((4,)), [1, 2, 3, 4])
    execution_id = create(greeted, pooled, prepare(greeted, models.unsized_relu_model((4,))))
    launched, fence = launch(greeted, execution_id)
    assert (launched.status, fence) == (INVALID, None)
    assert run(greeted, execution_id).status is NONE


def test_RUX_3_a_second_run_is_rejected_until_the_first_has_finished(
    greeted: ProtocolPeer, running: Running, adding: PooledRequest
) -> None:
    held = hold(running)
    execution_id = create(greeted, adding, HELD_ID)
    greeted.send(RunExecution(41, execution_id, -1))
    assert held.begun.wait(LIMIT_S)
    greeted.send(RunExecution(50, execution_id, -1))
    second = greeted.receive(Executed)
    assert (second.call, second.status) == (50, INVALID)
    assert "RUX-3" in second.message
    assert launch(greeted, execution_id)[0].status is INVALID
    held.go.set()
    first = greeted.receive(Executed)
    assert (first.call, first.status, adding.result()) == (41, NONE, SUM)
    assert run(greeted, execution_id).status is NONE


def test_RUX_3_a_fenced_run_is_in_progress_from_its_launch(
    greeted: ProtocolPeer, adding: PooledRequest, resources: ExitStack
) -> None:
    own = resources.enter_context(Fence.create())
    execution_id = create(greeted, adding, prepare(greeted))
    _, fence = launch(greeted, execution_id, own)
    with fence:
        assert run(greeted, execution_id).status is INVALID
        own.signal()
        assert fence.wait(LIMIT_S) is FenceState.SIGNALED
    for _ in range(20):  # immediately after the fence is signaled
        _, fence = launch(greeted, execution_id)
        with fence:
            assert fence.wait(LIMIT_S) is FenceState.SIGNALED


def test_RUX_4_the_deadline_is_that_of_the_run(greeted: ProtocolPeer, running: Running, adding: PooledRequest) -> None:
    held = hold(running)
    execution_id = create(greeted, adding, HELD_ID)
    assert run(greeted, execution_id, deadline_ns=1).status is ErrorStatus.MISSED_DEADLINE_PERSISTENT  # QOS-2
    assert not held.begun.is_set()
    ends_ns = time.monotonic_ns() + 30_000_000
    greeted.send(RunExecution(41, execution_id, ends_ns))
    assert held.begun.wait(LIMIT_S)
    until(lambda: time.monotonic_ns() > ends_ns)
    held.go.set()
    assert greeted.receive(Executed).status is TRANSIENT
    assert run(greeted, execution_id, deadline_ns=NEVER).status is NONE
    assert adding.result() == SUM


def test_RUX_4_deadline_and_duration_are_those_of_the_fenced_run(
    greeted: ProtocolPeer, adding: PooledRequest, resources: ExitStack
) -> None:
    own = resources.enter_context(Fence.create())
    execution_id = create(greeted, adding, prepare(greeted))
    _, fence = launch(greeted, execution_id, own, deadline_ns=time.monotonic_ns() + 20_000_000)
    with fence:
        assert fence.wait(LIMIT_S) is FenceState.ERROR
    assert run(greeted, execution_id).status is NONE


@pytest.mark.parametrize("limits", [{"deadline_ns": -2}, {"duration_ns": -2}], ids=["deadline", "duration"])
def test_N_RQX_14_a_limit_below_minus_one_is_rejected(
    limits: dict[str, int], greeted: ProtocolPeer, adding: PooledRequest
) -> None:
    execution_id = create(greeted, adding, prepare(greeted))
    assert launch(greeted, execution_id, **limits)[0].status is INVALID
    assert run(greeted, execution_id, deadline_ns=-2).status is INVALID
    assert run(greeted, execution_id).status is NONE


def test_CF_4_N_QOS_6_an_endless_loop_is_ended_at_each_run(greeted: ProtocolPeer, resources: ExitStack) -> None:
    loop, pooled = create_endless_request(resources)
    config = ExecutionConfig(loop_timeout_ns=1_000_000)
    execution_id = create(greeted, pooled, prepare(greeted, loop), config)
    assert [run(greeted, execution_id).status for _ in range(2)] == [TRANSIENT] * 2


def test_LIFE_2_a_reusable_execution_outlives_its_model_and_releases_everything(
    greeted: ProtocolPeer, running: Running, adding: PooledRequest
) -> None:
    quota, before = running.session.quota, len(os.listdir("/proc/self/fd"))
    model_id = prepare(greeted)
    execution_id = create(greeted, adding, model_id)
    greeted.send(messages.ReleaseModel(45, model_id))
    greeted.receive(messages.Reply)
    assert run(greeted, execution_id).status is NONE
    assert quota.charged_bytes > sum(pool.size_bytes for pool in adding.pools)  # the charge of the model is added
    statuses = []
    for call in (46, 47):
        greeted.send(ReleaseExecution(call, execution_id))
        statuses.append(greeted.receive(messages.Reply).status)
    assert statuses == [NONE, INVALID]
    until(lambda: (quota.charged_bytes, len(os.listdir("/proc/self/fd"))) == (0, before))
    for reply in (run(greeted, execution_id), launch(greeted, execution_id)[0]):
        assert reply.status is INVALID
        assert f"no execution {execution_id}" in reply.message


def test_LIFE_2_a_reusable_execution_can_be_released_during_a_run(
    greeted: ProtocolPeer, running: Running, adding: PooledRequest
) -> None:
    held = hold(running)
    execution_id = create(greeted, adding, HELD_ID)
    greeted.send(RunExecution(41, execution_id, -1))
    assert held.begun.wait(LIMIT_S)
    greeted.send(ReleaseExecution(46, execution_id))
    assert greeted.receive(messages.Reply).status is NONE
    assert running.session.quota.charged_bytes > 0
    held.go.set()
    assert greeted.receive(Executed).status is NONE
    assert adding.result() == SUM
    until(lambda: running.session.quota.charged_bytes == 0)
