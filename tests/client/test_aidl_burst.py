"""An AIDL burst, through the client library and message by message, against a real session in this process."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support import models
from support.executors import LIMIT_S, Held, floats, until

from nnfmq.base.memory import Memory
from nnfmq.client.burst.aidl import AidlBurst
from nnfmq.client.burst.channel import TokenAllocator
from nnfmq.client.connection.client import Client
from nnfmq.client.connection.connection import Connection
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.driver.execution.prepared_model import DriverPreparedModel
from nnfmq.driver.session.session import Session
from nnfmq.hal.errors import BadState, DeadObject, DeviceUnavailable, ErrorStatus, InvalidArgument
from nnfmq.hal.timing import NO_TIMING
from nnfmq.hal.types import (
    BufferToken,
    DataLocation,
    DeviceStatus,
    ExecutionConfig,
    ExtensionNameAndPrefix,
    LoopTimeoutDurationNs,
    MeasureTiming,
    OutputShape,
    Request,
    RequestArgument,
    TokenValuePair,
)
from nnfmq.serialize import messages

ADD = models.add_model()
SUM = [11.0, 22.0, 33.0, 44.0]
TOKENS_2 = pytest.mark.parametrize("position", [0, 1])


@pytest.fixture
def burst(adding: PreparedModel) -> Iterator[AidlBurst]:
    with adding.aidl_burst() as burst:
        yield burst


@pytest.fixture
def pools(resources: ExitStack) -> tuple[Memory, Memory]:
    return make_pools(resources, [1, 2, 3, 4], [10, 20, 30, 40])


def make_pools(resources: ExitStack, *values: Sequence[float]) -> tuple[Memory, Memory]:
    """Return the memories of a request, with the inputs in the first one."""
    source, sink = (resources.enter_context(Memory.create(size)) for size in models.pool_bytes(ADD))
    for number, row in enumerate(values):
        np.frombuffer(source.view, np.float32, 4, offset=64 * number)[:] = row
    return source, sink


def request_of(pools: tuple[Memory, ...]) -> Request:
    return models.request_for(ADD, pools)


def charged_bytes(real: tuple[Connection, Session]) -> int:
    return real[1].quota.charged_bytes


# ------------------------------------------------------------------------------------------------ executing


def test_BUR_19_an_execution_writes_its_outputs_and_returns_their_shapes(
    burst: AidlBurst, pools: tuple[Memory, Memory]
) -> None:
    outcome = burst.execute_synchronously(request_of(pools))
    assert outcome == ((OutputShape((4,)),), NO_TIMING)
    assert floats(pools[1]) == SUM


def test_BUR_19_a_burst_returns_the_same_as_a_synchronous_execution(
    burst: AidlBurst, adding: PreparedModel, pools: tuple[Memory, Memory]
) -> None:
    request = request_of(pools)
    assert burst.execute_synchronously(request) == adding.execute_request(request)
    for wrong in (replace(request, inputs=request.inputs[1:]), replace(request, outputs=())):
        for execute in (burst.execute_synchronously, adding.execute_request):
            with pytest.raises(InvalidArgument, match="N-REQ"):
                execute(wrong)


def test_TIM_2_a_measured_execution_has_both_times(burst: AidlBurst, pools: tuple[Memory, Memory]) -> None:
    timing = burst.execute_synchronously(request_of(pools), ExecutionConfig(MeasureTiming.YES)).timing
    assert 0 < timing.time_on_device_ns <= timing.time_in_driver_ns


def test_BUR_20_EXE_14_the_configuration_is_used(
    burst: AidlBurst, pools: tuple[Memory, Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(burst._model, "extensions", {"com.example.none"})
    names = (ExtensionNameAndPrefix("com.example.none", 1),)
    hint = TokenValuePair(1 << 16, b"anything")
    burst.execute_synchronously(request_of(pools), ExecutionConfig(hints=(hint,), extensions=names))
    with pytest.raises(InvalidArgument, match="N-VAL-22"):
        burst.execute_synchronously(request_of(pools), ExecutionConfig(hints=(hint, hint), extensions=names))
    with pytest.raises(InvalidArgument, match="loop timeout 15000000001"):
        burst.execute_synchronously(
            request_of(pools), ExecutionConfig(loop_timeout_ns=LoopTimeoutDurationNs.MAXIMUM + 1)
        )


def test_an_execution_past_its_deadline_does_no_work(
    burst: AidlBurst, pools: tuple[Memory, Memory], real: tuple[Connection, Session]
) -> None:
    connection, _ = real
    reply = connection.exchange(
        execute_message(connection, burst, pools, deadline_ns=1), messages.Executed, fds_of(pools)
    )
    assert reply.status in (ErrorStatus.MISSED_DEADLINE_PERSISTENT, ErrorStatus.MISSED_DEADLINE_TRANSIENT)
    assert floats(pools[1]) == [0.0] * 4


def execute_message(connection: Connection, burst: AidlBurst, pools: tuple[Memory, ...], **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "call": connection.next_call_id(),
        "burst_id": burst._burst_id,
        "request": messages.request_to_data(request_of(pools)),
        "tokens": (-1, -1),
        "config": messages.config_to_data(ExecutionConfig()),
        "deadline_ns": -1,
    }
    return messages.ExecuteAidlBurst(**{**fields, **changes})


def fds_of(pools: tuple[Memory, ...]) -> list[int]:
    return [pool.fileno() for pool in pools]


@pytest.mark.parametrize("deadline_ns", [-2, -(2**63)])
def test_N_RQX_14_a_deadline_below_minus_one_is_rejected_and_the_memory_closed(
    deadline_ns: int, burst: AidlBurst, pools: tuple[Memory, Memory], real: tuple[Connection, Session]
) -> None:
    connection, _ = real
    before = len(os.listdir("/proc/self/fd"))
    reply = connection.exchange(
        execute_message(connection, burst, pools, deadline_ns=deadline_ns), messages.Executed, fds_of(pools)
    )
    assert reply.status is ErrorStatus.INVALID_ARGUMENT
    assert str(deadline_ns) in reply.message
    assert len(os.listdir("/proc/self/fd")) == before


# ------------------------------------------------------------------------------------------------ tokens


@TOKENS_2
@pytest.mark.parametrize("token", [-2, -(2**63)])
def test_N_REQ_6_BUR_19_a_token_below_minus_one_is_rejected(
    position: int, token: int, burst: AidlBurst, pools: tuple[Memory, Memory]
) -> None:
    tokens = [-1, -1]
    tokens[position] = token
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InvalidArgument, match=rf"{token} \(N-REQ-6\)"):
        burst.execute_synchronously(request_of(pools), tokens=tokens)
    assert len(os.listdir("/proc/self/fd")) == before
    assert floats(pools[1]) == [0.0] * 4


@pytest.mark.parametrize("tokens", [(), (0,), (0, 1, 2), (-1, -1, -1)])
def test_N_REQ_7_not_one_token_for_each_pool_is_rejected(
    tokens: tuple[int, ...], burst: AidlBurst, pools: tuple[Memory, Memory], real: tuple[Connection, Session]
) -> None:
    before, held = len(os.listdir("/proc/self/fd")), charged_bytes(real)
    with pytest.raises(InvalidArgument, match=rf"2 pools.*{len(tokens)} memory tokens \(N-REQ-7\)"):
        burst.execute_synchronously(request_of(pools), tokens=tokens)
    assert (len(os.listdir("/proc/self/fd")), charged_bytes(real)) == (before, held)


@pytest.mark.parametrize("token", [-2, -(2**63)])
def test_N_REQ_8_releasing_an_invalid_token_is_rejected(token: int, burst: AidlBurst) -> None:
    with pytest.raises(InvalidArgument, match=str(token)):
        burst.release_memory_resource(token)


@pytest.mark.parametrize("token", [-1, 0, 2**63 - 1])
def test_BUR_19_releasing_an_unknown_token_does_nothing(token: int, burst: AidlBurst) -> None:
    for _ in range(2):
        burst.release_memory_resource(token)


def test_BUR_19_a_token_names_its_first_memory_until_it_is_released(
    burst: AidlBurst, pools: tuple[Memory, Memory], resources: ExitStack
) -> None:
    others = make_pools(resources, [5] * 4, [6] * 4)
    tokens = (7, 8)
    burst.execute_synchronously(request_of(pools), tokens=tokens)
    pools[1].view[:16] = bytes(16)
    burst.execute_synchronously(request_of(others), tokens=tokens)
    assert (floats(pools[1]), floats(others[1])) == (SUM, [0.0] * 4)
    burst.release_memory_resource(7)
    burst.execute_synchronously(request_of(others), tokens=tokens)
    assert (floats(pools[1]), floats(others[1])) == ([11.0] * 4, [0.0] * 4)
    burst.release_memory_resource(8)
    burst.execute_synchronously(request_of(others), tokens=tokens)
    assert floats(others[1]) == [11.0] * 4


def test_a_request_is_validated_against_the_memory_of_its_token(
    burst: AidlBurst, pools: tuple[Memory, Memory], resources: ExitStack
) -> None:
    small = resources.enter_context(Memory.create(8))
    with pytest.raises(InvalidArgument):
        burst.execute_synchronously(request_of((pools[0], small)), tokens=(0, 1))
    with pytest.raises(InvalidArgument):
        burst.execute_synchronously(request_of(pools), tokens=(0, 1))
    burst.execute_synchronously(request_of(pools), tokens=(0, 2))
    assert floats(pools[1]) == SUM


def test_BUR_19_one_token_in_two_places_is_one_memory(burst: AidlBurst, resources: ExitStack) -> None:
    source, sink = make_pools(resources, [1, 2, 3, 4], [10, 20, 30, 40])
    both = resources.enter_context(Memory.create(192))
    both.view[:80] = source.view[:80]
    request = request_of((both, sink))
    place = request.outputs[0]
    moved = replace(place, location=replace(place.location, offset=128))
    burst.execute_synchronously(replace(request, outputs=(moved,)), tokens=(3, 3))
    assert np.frombuffer(both.view, np.float32, 4, offset=128).tolist() == SUM
    assert floats(sink) == [0.0] * 4


def test_memory_without_a_token_is_closed_after_each_execution(
    burst: AidlBurst, pools: tuple[Memory, Memory], real: tuple[Connection, Session]
) -> None:
    before = charged_bytes(real)
    for _ in range(3):
        burst.execute_synchronously(request_of(pools), tokens=(-1, -1))
        assert charged_bytes(real) == before


def test_cached_memory_is_mapped_once_and_its_token_is_never_reused(
    burst: AidlBurst, pools: tuple[Memory, Memory], real: tuple[Connection, Session], resources: ExitStack
) -> None:
    assert [burst.cache_memory(pool) for pool in (*pools, *pools)] == [0, 1, 0, 1]
    before = charged_bytes(real)
    for _ in range(3):
        burst.execute_synchronously(request_of(pools))
        assert charged_bytes(real) == before + sum(pool.size_bytes for pool in pools)
    for token in (0, 1):
        burst.release_memory_resource(token)
    assert charged_bytes(real) == before
    other = resources.enter_context(Memory.create(16))
    assert burst.cache_memory(other) == 2


def test_a_memory_that_was_closed_or_dropped_is_released_at_the_next_execution(
    burst: AidlBurst, pools: tuple[Memory, Memory], real: tuple[Connection, Session]
) -> None:
    before = charged_bytes(real)
    passing = Memory.create(16)
    burst.cache_memory(passing)
    burst.execute_synchronously(request_of((pools[0], passing)))
    assert charged_bytes(real) == before + 16
    passing.close()
    burst.execute_synchronously(request_of(pools))
    assert charged_bytes(real) == before


def test_a_managed_buffer_needs_no_token(
    burst: AidlBurst, client: Client, adding: PreparedModel, pools: tuple[Memory, Memory]
) -> None:
    with client.device("reference").allocate(outputs=[(adding, 0)]) as buffer:
        request = request_of(pools)
        place = RequestArgument(location=DataLocation(1))
        request = replace(request, outputs=(place,), pools=(pools[0], BufferToken(buffer.token)))
        for tokens in (None, (0, -1), (0, -1)):
            burst.execute_synchronously(request, tokens=tokens)
            assert buffer.array().tolist() == SUM


def test_a_table_of_tokens_keeps_no_memory_alive() -> None:
    table, memory = TokenAllocator(), Memory.create(1)
    token = table.add(memory)
    assert table.expired() == []
    memory.close()
    del memory
    gc.collect()
    assert table.expired() == [token]
    table.free(token)
    assert table.expired() == []


# ------------------------------------------------------------------------------------------------ exclusive use


@pytest.fixture
def held(adding: PreparedModel, real: tuple[Connection, Session]) -> Iterator[Held]:
    """Makes the driver's executions wait. A test requests this fixture before `burst`."""
    held = Held(ADD)
    real[1].models.insert(DriverPreparedModel(ADD, held), adding.model_id)  # type: ignore[arg-type]
    yield held
    held.go.set()


def test_BUR_16_a_second_execution_is_rejected_by_the_client_and_by_the_driver(
    held: Held,
    burst: AidlBurst,
    pools: tuple[Memory, Memory],
    real: tuple[Connection, Session],
    start: Callable[..., Future[Any]],
) -> None:
    connection, _ = real
    waiting = start(burst.execute_synchronously, request_of(pools))
    assert held.begun.wait(LIMIT_S)
    with pytest.raises(BadState, match="another thread"):
        burst.execute_synchronously(request_of(pools))
    reply = connection.exchange(execute_message(connection, burst, pools), messages.Executed, fds_of(pools))
    assert reply.status is ErrorStatus.GENERAL_FAILURE
    held.go.set()
    assert waiting.result(LIMIT_S).shapes == (OutputShape((4,)),)


def test_BUR_21_memory_that_is_released_while_an_execution_uses_it_stays_until_its_end(
    held: Held,
    burst: AidlBurst,
    pools: tuple[Memory, Memory],
    real: tuple[Connection, Session],
    start: Callable[..., Future[Any]],
) -> None:
    before = charged_bytes(real)
    waiting = start(burst.execute_synchronously, request_of(pools), tokens=(0, 1))
    assert held.begun.wait(LIMIT_S)
    for token in (0, 1):
        burst.release_memory_resource(token)
    assert charged_bytes(real) > before
    held.go.set()
    waiting.result(LIMIT_S)
    assert floats(pools[1]) == SUM
    burst.execute_synchronously(request_of(pools), tokens=(-1, -1))  # so that the first one has ended in the driver
    assert charged_bytes(real) == before


# ------------------------------------------------------------------------------------------------ closing


def test_BUR_1_closing_a_burst_releases_its_memory(
    adding: PreparedModel, pools: tuple[Memory, Memory], real: tuple[Connection, Session]
) -> None:
    before = charged_bytes(real)
    burst = adding.aidl_burst()
    burst.execute_synchronously(request_of(pools), tokens=(0, 1))
    assert charged_bytes(real) > before
    for _ in range(2):
        burst.close()
    assert (charged_bytes(real), real[1].aidl_bursts.values()) == (before, [])
    with pytest.raises(InvalidArgument, match="closed"):
        burst.execute_synchronously(request_of(pools))


def test_a_burst_of_a_released_model_is_rejected(adding: PreparedModel, real: tuple[Connection, Session]) -> None:
    real[1].models.pop(adding.model_id)
    with pytest.raises(InvalidArgument, match="no model"):
        adding.aidl_burst()


def test_DEV_14_a_burst_of_a_busy_device_is_rejected(
    client: Client, adding: PreparedModel, burst: AidlBurst, pools: tuple[Memory, Memory]
) -> None:
    client.set_device_status("reference", DeviceStatus.BUSY)
    try:
        with pytest.raises(DeviceUnavailable):
            adding.aidl_burst()
        with pytest.raises(DeviceUnavailable):
            burst.execute_synchronously(request_of(pools))
    finally:
        client.set_device_status("reference", DeviceStatus.AVAILABLE)
    burst.execute_synchronously(request_of(pools))


def test_the_exit_of_the_driver_raises_dead_object(
    burst: AidlBurst, pools: tuple[Memory, Memory], real: tuple[Connection, Session]
) -> None:
    burst.execute_synchronously(request_of(pools), tokens=(0, 1))
    real[1].stop()
    until(lambda: not real[0].is_open)
    with pytest.raises(DeadObject):
        burst.execute_synchronously(request_of(pools))
