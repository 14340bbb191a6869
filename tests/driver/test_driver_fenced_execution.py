"""Fenced executions, with messages over a socketpair: waiting, states of their fence, and rejected launches."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from msgspec.structs import replace
from support import models
from support.executors import LIMIT_S, prepared, until
from support.protocol import ProtocolPeer
from support.sessions import (
    ADD,
    HELD_ID,
    NONE,
    PooledRequest,
    Running,
    assert_alive,
    create_endless_request,
    create_request,
    hold,
    prepare,
)

from nnfmq.base import watcher
from nnfmq.base.fence import Fence
from nnfmq.driver.session import session
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.types import ExecutionConfig, FenceState, MeasureTiming, Model
from nnfmq.serialize import messages
from nnfmq.serialize.messages import (
    ExecuteFenced,
    FencedExecutionInfo,
    FencedLaunched,
    GetExecutionInfo,
    ReleaseCallback,
)

ACTIVE, SIGNALED, ERROR, _ = FenceState
INVALID, TRANSIENT = ErrorStatus.INVALID_ARGUMENT, ErrorStatus.MISSED_DEADLINE_TRANSIENT
SUM = [11.0, 22.0, 33.0, 44.0]
NEVER = 2**63 - 1
TIMED = ExecutionConfig(MeasureTiming.YES)


@pytest.fixture
def adding(resources: ExitStack) -> PooledRequest:
    return create_request(resources, ADD, [1, 2, 3, 4], [10, 20, 30, 40])


@pytest.fixture
def own(resources: ExitStack) -> Fence:
    """A fence that the application created."""
    return resources.enter_context(Fence.create())


class Client:
    """Launches fenced executions and keeps the replies."""

    def __init__(self, peer: ProtocolPeer, resources: ExitStack) -> None:
        self.peer = peer
        self._resources = resources

    def _send_launch(
        self,
        pooled: PooledRequest,
        model_id: int,
        *fences: Any,
        config: Any = None,
        deadline_ns: int = -1,
        duration_ns: int = -1,
    ) -> None:
        call = pooled.call(
            ExecuteFenced, 30, model_id, config,
            deadline_ns=deadline_ns, duration_ns=duration_ns, fence_count=len(fences),
        )  # fmt: skip
        self.peer.send(call, [*pooled.fds, *(f if isinstance(f, int) else f.fileno() for f in fences)])

    def launch(self, *arguments: Any, **rest: Any) -> tuple[Fence, int]:
        """Return the fence and the callback of a launch that must succeed."""
        self._send_launch(*arguments, **rest)
        launched, fds = self.peer.receive_with_fds(FencedLaunched)
        assert (launched.call, launched.status, len(fds)) == (30, NONE, 1), launched
        return self._resources.enter_context(Fence.adopt(fds[0])), launched.callback_id

    def rejected(self, *arguments: Any, **rest: Any) -> FencedLaunched:
        """Return the reply to a launch that must fail, without a fence or callback."""
        self._send_launch(*arguments, **rest)
        launched = self.peer.receive(FencedLaunched)
        assert (launched.callback_id, launched.fence_count) == (0, 0)
        assert launched.status is not NONE
        return launched

    def info(self, callback_id: int) -> FencedExecutionInfo:
        self.peer.send(GetExecutionInfo(31, callback_id))
        return self.peer.receive(FencedExecutionInfo)


@pytest.fixture
def client(greeted: ProtocolPeer, resources: ExitStack) -> Client:
    return Client(greeted, resources)


def times(info: FencedExecutionInfo) -> tuple[int, ...]:
    return (
        info.launched_on_device_ns, info.launched_in_driver_ns, info.fenced_on_device_ns, info.fenced_in_driver_ns,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ waiting


def test_FEN_1_an_execution_that_waits_for_nothing_runs_and_signals(
    client: Client, adding: PooledRequest, running: Running
) -> None:
    fence, callback_id = client.launch(adding, prepare(client.peer))
    assert fence.wait(LIMIT_S) is SIGNALED
    assert adding.result() == SUM
    info = client.info(callback_id)
    assert (info.status, times(info)) == (NONE, (-1, -1, -1, -1))
    assert not running.session.launched


def test_FEN_3_FEN_8_work_begins_when_every_fence_is_signaled(
    client: Client, adding: PooledRequest, own: Fence, resources: ExitStack
) -> None:
    other = resources.enter_context(Fence.create())
    event = resources.enter_context(Fence.adopt(os.eventfd(0, os.EFD_CLOEXEC)))
    signalled = resources.enter_context(Fence.create())
    signalled.signal()
    fence, _ = client.launch(adding, prepare(client.peer), own, signalled, other, event)
    for number, signal in enumerate([other.signal, lambda: os.eventfd_write(event.fileno(), 1), own.signal]):
        assert_alive(client.peer)
        assert (fence.state, adding.result()) == (ACTIVE, [0.0] * 4), number
        signal()
    assert fence.wait(LIMIT_S) is SIGNALED
    assert adding.result() == SUM


def test_FEN_3_a_waiting_execution_occupies_no_thread_of_the_pool(
    client: Client, adding: PooledRequest, own: Fence, running: Running
) -> None:
    model_id = prepare(client.peer)
    waiting = [client.launch(adding, model_id, own)[0] for _ in range(session.POOL_THREADS + 3)]
    free, _ = client.launch(adding, model_id)
    assert free.wait(LIMIT_S) is SIGNALED
    assert len(running.session.launched) == len(waiting)
    own.signal()
    assert [fence.wait(LIMIT_S) for fence in waiting] == [SIGNALED] * len(waiting)


def test_FEN_3_a_launch_is_replied_to_while_the_pool_is_busy(
    client: Client, adding: PooledRequest, running: Running
) -> None:
    held = hold(running)
    fences = [client.launch(adding, HELD_ID)[0] for _ in range(session.POOL_THREADS + 2)]
    held.go.set()
    assert {fence.wait(LIMIT_S) for fence in fences} == {SIGNALED}


def test_FEN_12_executions_are_chained_by_their_fences(
    client: Client, own: Fence, resources: ExitStack, adding: PooledRequest
) -> None:
    """Each execution adds its first input to the output of the previous one."""
    model_id = prepare(client.peer)
    fence, memory = own, adding.pools[1]
    links = [adding]
    first, _ = client.launch(adding, model_id, own)
    fence = first
    for _ in range(5):
        link = create_request(resources, ADD, [1, 1, 1, 1])
        before = replace(link.request.inputs[1], location=replace(adding.request.outputs[0].location, pool_index=2))
        request = replace(link.request, inputs=(link.request.inputs[0], before), pools=(*link.request.pools, memory))
        links.append(PooledRequest(request, (*link.pools, memory)))
        fence, _ = client.launch(links[-1], model_id, fence)
        memory = link.pools[1]
    assert fence.state is ACTIVE
    own.signal()
    assert fence.wait(LIMIT_S) is SIGNALED
    assert links[-1].result() == [value + 5 for value in SUM]


# ------------------------------------------------------------------------------------------------ failures


def test_FEN_5_N_FEN_6_a_fence_that_fails_later_fails_the_execution_immediately(
    client: Client, adding: PooledRequest, own: Fence, resources: ExitStack, running: Running
) -> None:
    other = resources.enter_context(Fence.create())
    fence, callback_id = client.launch(adding, prepare(client.peer), other, own)
    own.fail()
    assert fence.wait(LIMIT_S) is ERROR
    info = client.info(callback_id)
    assert info.status is ErrorStatus.GENERAL_FAILURE
    assert "in error" in info.message
    other.signal()
    assert_alive(client.peer)
    assert adding.result() == [0.0] * 4
    assert not running.session.launched


def test_FEN_5_a_fence_whose_signaler_is_dead_fails_the_execution_and_its_dependents(
    client: Client, adding: PooledRequest, own: Fence
) -> None:
    model_id = prepare(client.peer)
    first, _ = client.launch(adding, model_id, own)
    second, _ = client.launch(adding, model_id, first)
    own.close()
    assert second.wait(LIMIT_S) is ERROR
    assert first.state is ERROR


def test_FEN_5_N_RQX_15_a_fence_that_is_in_error_already_is_rejected(
    client: Client, adding: PooledRequest, own: Fence
) -> None:
    own.fail()
    rejected = client.rejected(adding, prepare(client.peer), own)
    assert rejected.status is INVALID
    assert "N-RQX-15" in rejected.message


@pytest.mark.parametrize("make", [os.pipe, lambda: (os.memfd_create("none"), os.dup(0))], ids=["pipe", "memfd"])
def test_N_RQX_15_N_REQ_3_an_fd_that_is_not_a_fence_is_rejected(
    make: Callable[[], tuple[int, int]], client: Client, adding: PooledRequest, running: Running
) -> None:
    fds = make()
    model_id = prepare(client.peer)
    held = running.session.quota.charged_bytes
    before = len(os.listdir("/proc/self/fd"))
    rejected = client.rejected(adding, model_id, fds[0])
    assert rejected.status is INVALID
    assert "no fence" in rejected.message
    until(lambda: (len(os.listdir("/proc/self/fd")), running.session.quota.charged_bytes) == (before, held))
    os.close(fds[0])
    os.close(fds[1])


def test_FEN_6_the_deadline_ends_the_wait(client: Client, adding: PooledRequest, own: Fence) -> None:
    ends_ns = time.monotonic_ns() + 30_000_000
    fence, callback_id = client.launch(adding, prepare(client.peer), own, deadline_ns=ends_ns)
    assert fence.wait(LIMIT_S) is ERROR
    assert time.monotonic_ns() >= ends_ns
    assert client.info(callback_id).status is TRANSIENT
    own.signal()
    assert_alive(client.peer)
    assert adding.result() == [0.0] * 4


@pytest.mark.parametrize("limit", ["deadline_ns", "duration_ns"])
def test_FEN_6_deadline_and_duration_end_the_wait_for_a_thread_as_well(
    limit: str, client: Client, adding: PooledRequest, running: Running
) -> None:
    held = hold(running)
    busy = [client.launch(adding, HELD_ID)[0] for _ in range(session.POOL_THREADS)]
    now_ns = time.monotonic_ns() if limit == "deadline_ns" else 0
    fence, callback_id = client.launch(adding, prepared_beside(running), **{limit: now_ns + 50_000_000})
    assert fence.wait(LIMIT_S) is ERROR
    assert client.info(callback_id).status is TRANSIENT
    assert {fence.state for fence in busy} == {ACTIVE}
    held.go.set()
    assert {fence.wait(LIMIT_S) for fence in busy} == {SIGNALED}


def prepared_beside(running: Running) -> int:
    """Return a model prepared outside the session."""
    return running.session.models.insert(prepared(ADD))


def test_FEN_6_the_deadline_ends_the_execution(client: Client, adding: PooledRequest, running: Running) -> None:
    held, ends_ns = hold(running), time.monotonic_ns() + 30_000_000
    fence, callback_id = client.launch(adding, HELD_ID, deadline_ns=ends_ns)
    assert held.begun.wait(LIMIT_S)
    until(lambda: time.monotonic_ns() > ends_ns)
    held.go.set()
    assert fence.wait(LIMIT_S) is ERROR
    assert client.info(callback_id).status is TRANSIENT
    assert adding.result() == [0.0] * 4


def test_FEN_6_the_duration_is_measured_from_the_last_fence(
    client: Client, own: Fence, adding: PooledRequest, running: Running
) -> None:
    duration_ns = 200_000_000
    fence, _ = client.launch(adding, prepare(client.peer), own, duration_ns=duration_ns)
    began_ns = time.monotonic_ns()
    until(lambda: time.monotonic_ns() > began_ns + duration_ns)
    assert fence.state is ACTIVE
    own.signal()
    assert fence.wait(LIMIT_S) is SIGNALED
    held = hold(running)
    late, callback_id = client.launch(adding, HELD_ID, duration_ns=20_000_000)
    assert held.begun.wait(LIMIT_S)
    began_ns = time.monotonic_ns()
    until(lambda: time.monotonic_ns() > began_ns + 20_000_000)
    held.go.set()
    assert late.wait(LIMIT_S) is ERROR
    assert client.info(callback_id).status is TRANSIENT


@pytest.mark.parametrize(
    "limits", [{"deadline_ns": 2**63 - 1}, {"duration_ns": 2**63 - 1}], ids=["deadline", "duration"]
)
def test_QOS_4_QOS_6_N_QOS_5_the_longest_limits_have_no_effect(
    limits: dict[str, int], client: Client, adding: PooledRequest, own: Fence
) -> None:
    fence, _ = client.launch(adding, prepare(client.peer), own, **limits)
    own.signal()
    assert fence.wait(LIMIT_S) is SIGNALED


def test_QOS_2_a_deadline_that_has_passed_is_rejected_without_execution(client: Client, adding: PooledRequest) -> None:
    rejected = client.rejected(adding, prepare(client.peer), deadline_ns=1)
    assert rejected.status is ErrorStatus.MISSED_DEADLINE_PERSISTENT
    assert adding.result() == [0.0] * 4


@pytest.mark.parametrize("changes", [{"deadline_ns": -2}, {"duration_ns": -2}], ids=["deadline", "duration"])
def test_N_RQX_14_a_limit_below_minus_one_is_rejected(
    changes: dict[str, int], client: Client, adding: PooledRequest
) -> None:
    assert client.rejected(adding, prepare(client.peer), **changes).status is INVALID


@pytest.mark.parametrize("timeout_ns", [-2, 15_000_000_001])
def test_N_RQX_14_CF_5_a_loop_timeout_out_of_range_is_rejected(
    timeout_ns: int, client: Client, adding: PooledRequest
) -> None:
    config = ExecutionConfig(loop_timeout_ns=timeout_ns)
    assert client.rejected(adding, prepare(client.peer), config=config).status is INVALID


def test_CF_4_N_QOS_6_an_endless_loop_puts_the_fence_in_error(client: Client, resources: ExitStack) -> None:
    loop, pooled = create_endless_request(resources)
    config = ExecutionConfig(loop_timeout_ns=1_000_000)
    fence, callback_id = client.launch(pooled, prepare(client.peer, loop), config=config)
    assert fence.wait(LIMIT_S) is ERROR
    assert client.info(callback_id).status is TRANSIENT


def test_FEN_10_N_REQ_5_an_operation_that_fails_puts_the_fence_in_error(client: Client, resources: ExitStack) -> None:
    model = models.gather_model()
    pooled = create_request(resources, model)
    index = pooled.request.inputs[1].location
    pooled.pools[0].view[index.offset : index.offset + 4] = (99).to_bytes(4, "little")
    fence, callback_id = client.launch(pooled, prepare(client.peer, model), config=TIMED)
    assert fence.wait(LIMIT_S) is ERROR
    info = client.info(callback_id)
    assert (info.status, times(info)) == (ErrorStatus.GENERAL_FAILURE, (-1, -1, -1, -1))  # TIM-3


OPEN_OUTPUTS = {
    "N-FEN-1 of unknown extent": models.unsized_relu_model((4,)),
    "N-FEN-2 without elements": models.unsized_relu_model((4, 4)),
}


@pytest.mark.parametrize("model", OPEN_OUTPUTS.values(), ids=OPEN_OUTPUTS.keys())
def test_FEN_7_N_RQX_8_N_FEN_1_N_FEN_2_an_output_that_is_not_fully_specified_is_rejected(
    model: Model, client: Client, resources: ExitStack
) -> None:
    known = models.relu_model(model.main.operands[0].dimensions)
    rejected = client.rejected(create_request(resources, known), prepare(client.peer, model))
    assert rejected.status is INVALID
    assert "N-RQX-8" in rejected.message


def test_N_FEN_5_a_short_output_is_rejected(client: Client, adding: PooledRequest) -> None:
    output = replace(adding.request.outputs[0], location=replace(adding.request.outputs[0].location, length=15))
    rejected = client.rejected(
        PooledRequest(replace(adding.request, outputs=(output,)), adding.pools), prepare(client.peer)
    )
    assert rejected.status is INVALID


@pytest.mark.parametrize("field", ["inputs", "outputs"])
def test_FEN_2_N_REQ_1_N_REQ_2_a_request_without_all_arguments_is_rejected(
    field: str, client: Client, adding: PooledRequest
) -> None:
    incomplete = replace(adding.request, **{field: getattr(adding.request, field)[1:]})
    assert client.rejected(PooledRequest(incomplete, adding.pools), prepare(client.peer)).status is INVALID


# ------------------------------------------------------------------------------------------------ execution info


def test_FEN_9_N_FEN_7_execution_info_before_the_end_is_a_general_failure(
    client: Client, adding: PooledRequest, own: Fence
) -> None:
    fence, callback_id = client.launch(adding, prepare(client.peer), own)
    info = client.info(callback_id)
    assert (info.status, times(info)) == (ErrorStatus.GENERAL_FAILURE, (-1, -1, -1, -1))
    own.signal()
    assert fence.wait(LIMIT_S) is SIGNALED
    assert client.info(callback_id).status is NONE


def test_TIM_7_times_are_measured_from_the_call_and_from_the_last_fence(
    client: Client, adding: PooledRequest, own: Fence
) -> None:
    fence, callback_id = client.launch(adding, prepare(client.peer), own, config=TIMED)
    waited_ns, began_ns = 20_000_000, time.monotonic_ns()
    until(lambda: time.monotonic_ns() > began_ns + waited_ns)
    own.signal()
    assert fence.wait(LIMIT_S) is SIGNALED
    launched_device, launched, fenced_device, fenced = times(client.info(callback_id))
    assert 0 < launched_device == fenced_device <= fenced
    assert launched >= fenced + waited_ns


def test_a_callback_is_released_once_and_its_execution_continues(
    client: Client, adding: PooledRequest, own: Fence, running: Running
) -> None:
    fence, callback_id = client.launch(adding, prepare(client.peer), own)
    statuses = []
    for call in (32, 33):
        client.peer.send(ReleaseCallback(call, callback_id))
        statuses.append(client.peer.receive(messages.Reply).status)
    assert statuses == [NONE, INVALID]
    assert client.info(callback_id).status is INVALID
    own.signal()
    assert fence.wait(LIMIT_S) is SIGNALED
    assert running.session.fenced_callbacks.values() == []


# ------------------------------------------------------------------------------------------------ lifetimes


def test_LIFE_2_an_execution_outlives_its_model_and_releases_everything(
    client: Client, adding: PooledRequest, own: Fence, running: Running
) -> None:
    model_id = prepare(client.peer)
    before = len(os.listdir("/proc/self/fd"))
    fence, _ = client.launch(adding, model_id, own)
    client.peer.send(messages.ReleaseModel(40, model_id))
    client.peer.receive(messages.Reply)
    own.signal()
    assert fence.wait(LIMIT_S) is SIGNALED
    assert adding.result() == SUM
    until(lambda: len(os.listdir("/proc/self/fd")) == before)  # the test's own ends excepted: one more, and one less
    assert running.session.quota.charged_bytes == 0


def test_LIFE_3_a_client_s_hang_up_cancels_its_waiting_executions(
    client: Client, adding: PooledRequest, own: Fence, running: Running
) -> None:
    fence, _ = client.launch(adding, prepare(client.peer), own, deadline_ns=NEVER)
    client.peer.close()
    assert running.ends()
    assert fence.wait(LIMIT_S) is ERROR
    until(lambda: not watcher._watcher._timers and not watcher._watcher._readers)


def test_launched_executions_count_as_pending_calls(
    client: Client, adding: PooledRequest, own: Fence, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running.session, "_calls_max", 3)
    model_id = prepare(client.peer)
    waiting = []
    for _ in range(3):
        until(lambda: running.session._open_calls == 0)  # the call that launched it counts until it has ended
        waiting.append(client.launch(adding, model_id, own)[0])
    rejected = client.rejected(adding, model_id, own)
    assert rejected.status is ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
    own.signal()
    assert {fence.wait(LIMIT_S) for fence in waiting} == {SIGNALED}
    until(lambda: running.session._open_calls == 0)
    fence, _ = client.launch(adding, model_id)
    assert fence.wait(LIMIT_S) is SIGNALED
