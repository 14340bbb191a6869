"""Asynchronous executions, with messages over a socketpair: the order of reply and callback, and their contents."""

from __future__ import annotations

import time
from contextlib import ExitStack

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
    prepare_message,
)

from nnfmq.driver.session.session import POOL_THREADS
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.types import DataLocation, ExecutionConfig, MeasureTiming, OutputShape, Priority, Request
from nnfmq.serialize import messages
from nnfmq.serialize.messages import ExecuteAsynchronously, ExecutionFinished

INVALID = ErrorStatus.INVALID_ARGUMENT
MISSED = {ErrorStatus.MISSED_DEADLINE_TRANSIENT, ErrorStatus.MISSED_DEADLINE_PERSISTENT}
SUM = [11.0, 22.0, 33.0, 44.0]
NEVER = 2**63 - 1


@pytest.fixture
def adding(resources: ExitStack) -> PooledRequest:
    return create_request(resources, ADD, [1, 2, 3, 4], [10, 20, 30, 40])


def begin(
    client: ProtocolPeer,
    pooled: PooledRequest,
    model_id: int,
    call: int = 30,
    deadline_ns: int = -1,
    config: object = None,
) -> None:
    client.send(pooled.call(ExecuteAsynchronously, call, model_id, config, deadline_ns=deadline_ns), pooled.fds)


def rejected(client: ProtocolPeer, call: int = 30) -> ExecutionFinished:
    """Return the callback of a call that failed at its launch: it comes first, and the reply repeats its status."""
    finished, reply = client.receive(ExecutionFinished), client.receive(messages.Reply)
    assert (finished.call, reply.call, reply.status) == (call, call, finished.status)
    assert (finished.shapes, finished.time_on_device_ns, finished.time_in_driver_ns) == ((), -1, -1)
    return finished


def test_EXE_5_a_launch_is_replied_to_immediately_and_its_callback_is_called_once(
    greeted: ProtocolPeer, running: Running, adding: PooledRequest
) -> None:
    held = hold(running)
    begin(greeted, adding, HELD_ID)
    assert greeted.receive(messages.Reply) == messages.Reply(30, NONE, "")
    assert held.begun.wait(LIMIT_S)
    assert_alive(greeted)  # and no other message was sent
    held.go.set()
    finished = greeted.receive(ExecutionFinished)
    assert (finished.call, finished.status) == (30, NONE)
    assert messages.shapes_from_data(finished.shapes) == (OutputShape((4,)),)
    assert (finished.time_on_device_ns, finished.time_in_driver_ns) == (-1, -1)
    assert adding.result() == SUM
    assert_alive(greeted)


def test_EXE_5_a_launch_is_replied_to_immediately_while_the_pool_is_busy(
    greeted: ProtocolPeer, running: Running, adding: PooledRequest
) -> None:
    held, calls = hold(running), range(30, 32 + POOL_THREADS)
    for call in calls:
        begin(greeted, adding, HELD_ID, call)
        assert greeted.receive(messages.Reply).call == call
    held.go.set()
    assert sorted(greeted.receive(ExecutionFinished).call for _ in calls) == list(calls)


def test_TIM_6_the_driver_s_time_runs_from_the_call_to_the_callback(
    greeted: ProtocolPeer, running: Running, adding: PooledRequest
) -> None:
    held, model_id = hold(running), prepare(greeted)
    for call in range(40, 40 + POOL_THREADS):
        begin(greeted, adding, HELD_ID, call)
        greeted.receive(messages.Reply)
    begin(greeted, adding, model_id, config=ExecutionConfig(MeasureTiming.YES))
    greeted.receive(messages.Reply)
    began_ns = time.monotonic_ns()
    while (waited_ns := time.monotonic_ns() - began_ns) < 2_000_000:
        pass
    held.go.set()
    received = {message.call: message for message in (greeted.receive(ExecutionFinished) for _ in range(5))}
    assert 0 < received[30].time_on_device_ns < received[30].time_in_driver_ns  # TIM-4
    assert received[30].time_in_driver_ns >= waited_ns


BAD_REQUESTS = {
    "N-REQ-1 an input removed": lambda request: replace(request, inputs=request.inputs[1:]),
    "N-REQ-1 the other one": lambda request: replace(request, inputs=request.inputs[:1]),
    "N-REQ-2 the output removed": lambda request: replace(request, outputs=()),
    "N-RQX-2 no such pool": lambda request: replace(request, inputs=(moved(request, 7), request.inputs[1])),
}


def moved(request: Request, pool_index: int) -> object:
    return replace(request.inputs[0], location=replace(request.inputs[0].location, pool_index=pool_index))


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_N_REQ_1_N_REQ_2_callback_and_reply_of_an_invalid_request_have_the_same_status(
    case: str, greeted: ProtocolPeer, adding: PooledRequest
) -> None:
    model_id = prepare(greeted)
    begin(greeted, PooledRequest(BAD_REQUESTS[case](adding.request), adding.pools), model_id)  # type: ignore[no-untyped-call]
    assert rejected(greeted).status is INVALID
    assert_alive(greeted)


@pytest.mark.parametrize(
    ("deadline_ns", "loop_timeout_ns"), [(-2, -1), (-1, -2), (-1, 15_000_000_001)], ids=["deadline", "loop", "max"]
)
def test_N_RQX_14_a_limit_out_of_range_is_rejected(
    deadline_ns: int, loop_timeout_ns: int, greeted: ProtocolPeer, adding: PooledRequest
) -> None:
    config = ExecutionConfig(loop_timeout_ns=loop_timeout_ns)
    begin(greeted, adding, prepare(greeted), deadline_ns=deadline_ns, config=config)
    assert rejected(greeted).status is INVALID


def test_an_unknown_model_is_rejected_and_no_callback_is_kept(
    greeted: ProtocolPeer, running: Running, adding: PooledRequest
) -> None:
    begin(greeted, adding, 12345)
    assert rejected(greeted).status is INVALID
    until(lambda: running.session.quota.charged_bytes == 0)


def test_QOS_2_N_QOS_4_a_deadline_that_has_passed_is_a_persistent_miss_and_nothing_is_written(
    greeted: ProtocolPeer, adding: PooledRequest
) -> None:
    begin(greeted, adding, prepare(greeted), deadline_ns=1, config=ExecutionConfig(MeasureTiming.YES))
    assert rejected(greeted).status is ErrorStatus.MISSED_DEADLINE_PERSISTENT
    assert adding.result() == [0.0] * 4


def test_QOS_3_N_QOS_4_the_callback_reports_a_deadline_that_passes_during_the_execution(
    greeted: ProtocolPeer, running: Running, adding: PooledRequest
) -> None:
    held = hold(running)
    begin(greeted, adding, HELD_ID, deadline_ns=(ends_ns := time.monotonic_ns() + 50_000_000))
    assert greeted.receive(messages.Reply).status is NONE
    assert held.begun.wait(LIMIT_S)
    until(lambda: time.monotonic_ns() > ends_ns)
    held.go.set()
    finished = greeted.receive(ExecutionFinished)
    assert (finished.status, finished.shapes, finished.time_in_driver_ns) == (
        ErrorStatus.MISSED_DEADLINE_TRANSIENT, (), -1,
    )  # fmt: skip
    assert adding.result() == [0.0] * 4


@pytest.mark.parametrize("deadline_ns", [-1, NEVER])
def test_QOS_4_N_QOS_5_a_distant_deadline_has_no_effect(
    deadline_ns: int, greeted: ProtocolPeer, adding: PooledRequest
) -> None:
    begin(greeted, adding, prepare(greeted), deadline_ns=deadline_ns)
    assert greeted.receive(messages.Reply).status is NONE
    assert greeted.receive(ExecutionFinished).status is NONE
    assert adding.result() == SUM


def test_CF_4_N_QOS_6_an_endless_loop_is_ended_by_its_timeout(greeted: ProtocolPeer, resources: ExitStack) -> None:
    loop, pooled = create_endless_request(resources)
    begin(greeted, pooled, prepare(greeted, loop), config=ExecutionConfig(loop_timeout_ns=1_000_000))
    assert greeted.receive(messages.Reply).status is NONE
    assert greeted.receive(ExecutionFinished).status in MISSED


def test_SHP_4_N_FEN_3_a_short_output_is_reported_with_all_shapes(greeted: ProtocolPeer, resources: ExitStack) -> None:
    model = models.unsized_relu_model((4,))
    pooled = create_request(
        resources, models.relu_model((4,))
    )  # with space for the output, whose size is not in the model
    output = replace(pooled.request.outputs[0], location=DataLocation(1, 0, 15))
    begin(greeted, PooledRequest(replace(pooled.request, outputs=(output,)), pooled.pools), prepare(greeted, model))
    assert greeted.receive(messages.Reply).status is NONE
    finished = greeted.receive(ExecutionFinished)
    assert finished.status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
    assert messages.shapes_from_data(finished.shapes) == (OutputShape((4,), False),)


def test_SHP_2_all_output_shapes_are_reported_if_one_was_not_specified(
    greeted: ProtocolPeer, resources: ExitStack
) -> None:
    model = models.relus_model(3, (4,))
    operands = list(model.main.operands)
    operands[model.main.output_indexes[1]] = replace(operands[model.main.output_indexes[1]], dimensions=(0,))
    pooled = create_request(resources, model)
    begin(greeted, pooled, prepare(greeted, replace(model, main=replace(model.main, operands=tuple(operands)))))
    assert greeted.receive(messages.Reply).status is NONE
    assert messages.shapes_from_data(greeted.receive(ExecutionFinished).shapes) == (OutputShape((4,)),) * 3


def test_SHP_3_N_REQ_5_a_failure_during_the_execution_has_no_shapes_and_no_times(
    greeted: ProtocolPeer, resources: ExitStack
) -> None:
    model, pooled = failing_gather(resources)
    begin(greeted, pooled, prepare(greeted, model), config=ExecutionConfig(MeasureTiming.YES))
    assert greeted.receive(messages.Reply).status is NONE
    finished = greeted.receive(ExecutionFinished)
    assert finished.status is ErrorStatus.GENERAL_FAILURE
    assert (finished.shapes, finished.time_on_device_ns, finished.time_in_driver_ns) == ((), -1, -1)


def failing_gather(resources: ExitStack) -> tuple[models.Model, PooledRequest]:
    """Return GATHER and a request with an index out of range."""
    model = models.gather_model()
    pooled = create_request(resources, model)
    index = pooled.request.inputs[1].location
    pooled.pools[0].view[index.offset : index.offset + 4] = (99).to_bytes(4, "little")
    return model, pooled


def test_LIFE_2_an_execution_outlives_its_model(greeted: ProtocolPeer, running: Running, adding: PooledRequest) -> None:
    held = hold(running)
    begin(greeted, adding, HELD_ID)
    greeted.receive(messages.Reply)
    greeted.send(messages.ReleaseModel(31, HELD_ID))
    assert greeted.receive(messages.Reply).call == 31
    held.go.set()
    assert greeted.receive(ExecutionFinished).status is NONE
    assert adding.result() == SUM
    until(lambda: running.session.quota.charged_bytes == 0)


def test_QOS_1_executions_of_a_model_of_high_priority_go_before_those_of_a_low_one(
    greeted: ProtocolPeer, running: Running, adding: PooledRequest
) -> None:
    gate = hold(running)
    for call in range(1, 1 + POOL_THREADS):
        begin(greeted, adding, HELD_ID, call)
        greeted.receive(messages.Reply)
    pool = running.session._pool
    until(lambda: (len(pool._threads), pool._idle, len(pool._queue)) == (POOL_THREADS, 0, 0))
    waiting = pool._queue
    for call, priority in enumerate([Priority.LOW, Priority.MEDIUM, Priority.HIGH], 50):
        begin(greeted, adding, prepared_with(running, priority), call)
        assert greeted.receive(messages.Reply).call == call
    until(lambda: [-entry[0] for entry in sorted(waiting)] == [Priority.HIGH, Priority.MEDIUM, Priority.LOW])
    gate.go.set()
    assert sorted(greeted.receive(ExecutionFinished).call for _ in range(7)) == [1, 2, 3, 4, 50, 51, 52]


def test_QOS_1_preparations_and_reusable_runs_have_their_model_s_priority_as_well(
    greeted: ProtocolPeer, running: Running, adding: PooledRequest
) -> None:
    low = prepared_with(running, Priority.LOW)
    greeted.send(adding.call(messages.CreateExecution, 20, low), adding.fds)
    execution_id = greeted.receive(messages.ExecutionCreated).execution_id
    gate = hold(running)
    for call in range(1, 1 + POOL_THREADS):
        begin(greeted, adding, HELD_ID, call)
        greeted.receive(messages.Reply)
    pool = running.session._pool
    until(lambda: (len(pool._threads), pool._idle, len(pool._queue)) == (POOL_THREADS, 0, 0))
    waiting = pool._queue
    greeted.send(messages.RunExecution(60, execution_id, -1))
    greeted.send(prepare_message(61, priority=Priority.HIGH))
    greeted.send(prepare_message(62, priority=77))  # rejected when it is its turn
    until(lambda: [-entry[0] for entry in sorted(waiting)] == [Priority.HIGH, Priority.MEDIUM, Priority.LOW])
    gate.go.set()
    received = [greeted.receive_any() for _ in range(4 + 1 + 2 + 2)]
    statuses = {type(message): message.status for message in received if message.call == 62}  # type: ignore[attr-defined]
    assert statuses == {messages.PreparedModelReady: INVALID, messages.Reply: INVALID}


def prepared_with(running: Running, priority: Priority) -> int:
    return running.session.models.insert(replace(prepared(ADD), priority=priority))


def test_EXE_8_one_model_is_executed_concurrently(greeted: ProtocolPeer, resources: ExitStack) -> None:
    model_id = prepare(greeted)
    requests = [create_request(resources, ADD, [number] * 4, [1] * 4) for number in range(40)]
    for number, pooled in enumerate(requests):
        begin(greeted, pooled, model_id, 100 + number)
    received = [greeted.receive_any() for _ in range(80)]
    assert all(message.status is NONE for message in received)  # type: ignore[attr-defined]
    assert [pooled.result() for pooled in requests] == [[number + 1.0] * 4 for number in range(40)]
