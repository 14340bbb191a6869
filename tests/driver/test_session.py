"""One client's session, with messages over a socketpair: the replies, their order, and the end."""

from __future__ import annotations

import fcntl
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support import bursts, control_flow_models, models
from support.bursts import BurstClient
from support.descriptors import no_more_descriptors
from support.drivers import thread_state
from support.executors import LIMIT_S, Held, floats, until
from support.model_mutations import FAMILIES, mutants
from support.protocol import ProtocolPeer
from support.sessions import (
    HELLO,
    NONE,
    Running,
    assert_alive,
    encoded,
    prepare,
    prepare_message,
    replace_message,
    statuses_of,
)
from support.small_models import two_adds

from nnfmq.base import watcher
from nnfmq.base.channel import NO_WAIT, Channel
from nnfmq.base.file_memory import SLICE_BYTES
from nnfmq.base.memory import Memory
from nnfmq.driver.devices import device
from nnfmq.driver.execution.prepared_model import DriverPreparedModel
from nnfmq.driver.process.children import ClientProcess
from nnfmq.driver.session import model_calls, session
from nnfmq.engines import interpreter
from nnfmq.hal.errors import ErrorStatus, MissedDeadlineTransient
from nnfmq.hal.types import (
    ExecutionConfig,
    MeasureTiming,
    Model,
    OutputShape,
    Priority,
    Request,
)
from nnfmq.queue import MessageQueue, core_name
from nnfmq.serialize import control_protocol, messages
from nnfmq.serialize.models import decoded_model_bytes, encode_model

ADD = models.add_model()
SUM = [11.0, 22.0, 33.0, 44.0]
UNKNOWN = 12345
NO_LIMIT = -1
ONE_POOL = (messages.MemoryData(64),)  # the described pool of a model
RESIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@pytest.fixture
def client(running: Running) -> ProtocolPeer:
    """The client's end after the handshake."""
    running.client.send(HELLO)
    running.client.receive(messages.HelloReply)
    return running.client


# ------------------------------------------------------------------------------------------------ handshake


def test_hello_is_replied_to(running: Running) -> None:
    running.client.send(HELLO)
    reply = running.client.receive(messages.HelloReply)
    assert reply.protocol == control_protocol.PROTOCOL
    assert reply.driver_name == "driver under test"
    assert reply.driver_pid == reply.worker_pid == os.getpid()
    assert reply.core == core_name


@pytest.mark.parametrize("version", [0, control_protocol.PROTOCOL + 1, 2**32 - 1])
def test_another_protocol_version_is_rejected_with_both_versions_and_the_remedy(version: int, running: Running) -> None:
    running.client.send(messages.Hello(version, "AIDL v4", "old"))
    rejected = running.client.receive(messages.Refused)
    assert rejected.status is not NONE
    assert f"protocol {control_protocol.PROTOCOL}, the client {version}" in rejected.message
    assert "install the same" in rejected.message
    assert running.client.is_hung_up()
    assert running.ends()


@pytest.mark.parametrize("interface", ["", "HIDL 1.4", "AIDL v9"])
def test_an_unknown_interface_version_is_rejected_with_the_list_of_known_ones(interface: str, running: Running) -> None:
    running.client.send(messages.Hello(control_protocol.PROTOCOL, interface, "new"))
    rejected = running.client.receive(messages.Refused)
    assert rejected.status is ErrorStatus.GENERAL_FAILURE
    assert repr(interface) in rejected.message
    assert "HIDL 1.0" in rejected.message and "AIDL v4" in rejected.message
    assert running.client.is_hung_up()
    assert running.ends()


@pytest.mark.parametrize("interface", ["HIDL 1.0", "HIDL 1.3", "AIDL v1"])
def test_the_driver_uses_the_client_s_interface_version(interface: str, running: Running) -> None:
    running.client.send(messages.Hello(control_protocol.PROTOCOL, interface, "test"))
    assert running.client.receive(messages.HelloReply).interface == interface


@pytest.mark.parametrize(
    "message",
    [
        messages.ListDevices(1),
        prepare_message(),
        messages.ReleaseModel(1, 1),
        messages.FreeMemory(1, 1),
        messages.Goodbye(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_before_hello_ends_the_connection(message: messages.Message, running: Running) -> None:
    running.client.send(message)
    assert running.client.is_hung_up()
    assert running.ends()


def test_a_second_hello_ends_the_connection(running: Running, client: ProtocolPeer) -> None:
    client.send(HELLO)
    assert client.is_hung_up()
    assert running.ends()


# ------------------------------------------------------------------------------------------------ protocol violations


@pytest.mark.parametrize("data", [b"", b"\xc1", b"hello", control_protocol.encode(messages.ListDevices(1))[:-1]])
def test_bytes_that_are_no_message_end_the_connection(data: bytes, running: Running, client: ProtocolPeer) -> None:
    client.send_bytes(data)
    assert client.is_hung_up()
    assert running.ends()


@pytest.mark.parametrize(
    "message",
    [
        messages.DeviceList(1, ()),
        messages.GetMemories(1, 1, (0,)),
        messages.Refused(ErrorStatus.GENERAL_FAILURE, ""),
        messages.Memories(77, NONE, ""),
    ],
    ids=["a reply of the driver", "a driver's call", "a rejection by the driver", "a reply to no call"],
)
def test_a_message_that_a_client_may_not_send_ends_the_connection(
    message: messages.Message, running: Running, client: ProtocolPeer
) -> None:
    client.send(message)
    assert client.is_hung_up()
    assert running.ends()


def test_unexpected_fds_end_the_connection_and_are_closed(running: Running, client: ProtocolPeer) -> None:
    client.send_bytes(control_protocol.encode(messages.ListDevices(1)), [0, 0, 0])
    assert client.is_hung_up()
    assert running.ends()


def test_fewer_fds_than_a_message_states_end_the_connection(running: Running, client: ProtocolPeer) -> None:
    client.send_bytes(control_protocol.encode(prepare_message(pools=ONE_POOL * 2)), [0])
    assert client.is_hung_up()


def test_a_frame_that_is_cut_short_ends_the_connection(running: Running, client: ProtocolPeer) -> None:
    read, write = os.pipe()
    client.channel._send((b"\1" + (40_000).to_bytes(8, "little"),), [read], None)  # the body is a pipe
    os.close(read)
    os.close(write)
    assert client.is_hung_up()
    assert running.ends()


# ------------------------------------------------------------------------------------------------ closing


def test_a_hang_up_ends_the_session(running: Running, client: ProtocolPeer) -> None:
    client.close()
    assert running.ends()


def test_a_hang_up_is_received_once(running: Running, client: ProtocolPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection stays readable, but the watcher does not spin until the main thread has ended the session."""
    stops: list[None] = []
    with monkeypatch.context() as patch:
        patch.setattr(running.session, "stop", lambda: stops.append(None))
        client.close()
        for _ in range(3):  # the watcher looks at all that is readable before each timer
            has_run = threading.Event()
            watcher.call_at(0, has_run.set)
            assert has_run.wait(LIMIT_S)
    assert len(stops) == 1
    running.session.stop()
    assert running.ends()


def test_a_goodbye_ends_the_session(running: Running, client: ProtocolPeer) -> None:
    client.send(messages.Goodbye())
    assert client.is_hung_up()
    assert running.ends()


def test_a_session_can_be_ended_from_within_and_twice(running: Running, client: ProtocolPeer) -> None:
    running.session.stop()
    running.session.stop()
    assert client.is_hung_up()
    assert running.ends()


def has_stopped_listening(client: ProtocolPeer, running: Running) -> bool:
    """Send another call; return True once the driver's watcher waits for the client to read its replies."""
    thread = watcher.thread()
    with suppress(MissedDeadlineTransient):
        client.channel.send(control_protocol.encode(messages.ListDevices(next(NUMBERS))), (), NO_WAIT)
    return running.session._send_lock.locked() and thread is not None and thread_state(thread.native_id or 0) == "S"


NUMBERS = itertools.count(1)


def test_LIFE_a_client_s_death_is_detected_while_the_driver_waits_for_it_to_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another process keeps a copy of the socket open, so there is no hang-up, and no reply can be sent."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        monkeypatch.setattr(Channel, "open_peer_pidfd", lambda _channel: os.pidfd_open(process.pid))
        running = Running()
        try:
            running.client.send(HELLO)
            running.client.receive(messages.HelloReply)
            until(lambda: has_stopped_listening(running.client, running))
            process.kill()
            assert running.ends()
        finally:
            process.kill()
            running.close()


def test_LIFE_3_a_killed_client_that_has_not_exited_yet_ends_the_session_while_its_pool_is_copied(
    running: Running, client: ProtocolPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_calls, "_LOOK_INTERVAL_NS", 0)
    monkeypatch.setattr(ClientProcess, "was_killed", lambda _process: True)
    size = 3 * SLICE_BYTES
    with Memory.create(size) as pool:
        client.send(prepare_message(1, pools=(messages.MemoryData(size),)), [pool.fileno()])
        assert running.ends()


# ------------------------------------------------------------------------------------------------ devices and support


def test_the_devices_are_listed(client: ProtocolPeer) -> None:
    client.send(messages.ListDevices(7))
    reply = client.receive(messages.DeviceList)
    assert reply.call == 7
    assert reply.devices[0].name == "reference"
    assert all(device.version and device.feature_level > 0 for device in reply.devices)


def pooled(model: Model, resources: ExitStack) -> tuple[bytes, list[int]]:
    """Encode a model that lists a pool, and return the pool's fd beside it."""
    pool = resources.enter_context(Memory.create(64))
    return encode_model(replace(model, pools=(pool,)))[0], [pool.fileno()]


@pytest.mark.parametrize(("model", "supported"), [(ADD, (True,)), (models.unsupported_model(), (False,))])
def test_support_is_reported_for_each_operation(
    model: Model, supported: tuple[bool, ...], client: ProtocolPeer
) -> None:
    client.send(messages.GetSupportedOperations(3, "reference", encode_model(model)[0]))
    assert client.receive(messages.SupportedOperations) == messages.SupportedOperations(3, supported)


@pytest.mark.parametrize(("model", "device"), [(models.invalid_model(), "reference"), (ADD, "nonesuch")])
def test_no_operation_is_supported_of_an_invalid_model_or_by_an_unknown_device(
    model: Model, device: str, client: ProtocolPeer, resources: ExitStack
) -> None:
    data, fds = pooled(model, resources)
    client.send(messages.GetSupportedOperations(3, device, data, ONE_POOL), fds)
    reply = client.receive(messages.SupportedOperations)
    assert reply.status is ErrorStatus.INVALID_ARGUMENT
    assert reply.supported == ()
    assert reply.message


# ------------------------------------------------------------------------------------------------ preparing


def test_PREP_2_a_valid_model_is_replied_to_immediately_and_then_ready(
    client: ProtocolPeer, resources: ExitStack
) -> None:
    data, fds = pooled(ADD, resources)
    client.send(prepare_message(8, data, pools=ONE_POOL), fds)
    assert client.receive(messages.Reply) == messages.Reply(8, NONE, "")
    ready = client.receive(messages.PreparedModelReady)
    assert (ready.call, ready.status) == (8, NONE)
    assert ready.model_id > 0
    assert_alive(client)


def test_PREP_2_a_model_that_cannot_be_compiled_is_replied_to_first_and_fails_through_the_callback(
    client: ProtocolPeer,
) -> None:
    client.send(prepare_message(8, encode_model(models.unsupported_model())[0]))
    assert client.receive(messages.Reply).status is NONE
    ready = client.receive(messages.PreparedModelReady)
    assert ready.status is ErrorStatus.GENERAL_FAILURE
    assert ready.model_id == 0
    assert "OEM_OPERATION" in ready.message
    assert_alive(client)


INVALID = ErrorStatus.INVALID_ARGUMENT
BAD_PREPARATIONS = {
    "no model at all": ({"model": b"nonsense"}, INVALID),
    "N_VAL_24 a model of no bytes": ({"model": b""}, INVALID),
    "an invalid model": ({"model": encode_model(models.invalid_model())[0]}, INVALID),
    "N_MOD_21 preference below the range": ({"preference": -1}, INVALID),
    "N_MOD_21 preference above the range": ({"preference": 3}, INVALID),
    "N_MOD_22 priority below the range": ({"priority": -1}, INVALID),
    "N_MOD_22 priority above the range": ({"priority": 3}, INVALID),
    "N_VAL_23 a deadline below -1": ({"deadline_ns": -2}, INVALID),
    "QOS_2 a deadline that has passed": ({"deadline_ns": 1}, ErrorStatus.MISSED_DEADLINE_PERSISTENT),
    "an unknown device": ({"device": "nonesuch"}, INVALID),
}


@pytest.mark.parametrize(("changes", "status"), BAD_PREPARATIONS.values(), ids=BAD_PREPARATIONS.keys())
def test_PREP_1_PREP_3_an_invalid_preparation_calls_back_once_and_then_replies_with_the_same_status(
    changes: dict[str, Any], status: ErrorStatus, client: ProtocolPeer
) -> None:
    client.send(prepare_message(4, **changes))
    ready = client.receive(messages.PreparedModelReady)
    reply = client.receive(messages.Reply)
    assert (ready.call, ready.status, ready.model_id) == (4, status, 0)
    assert (reply.call, reply.status) == (4, status)
    assert ready.message == reply.message != ""
    assert_alive(client)


@pytest.mark.parametrize("rule", FAMILIES)
def test_every_invalid_model_of_the_hal_s_suite_is_an_invalid_argument_of_both_methods(
    rule: str, client: ProtocolPeer
) -> None:
    replies = [(rule, *statuses_of(client, encoded(mutant.model))) for mutant in mutants(two_adds(), rule)]

    assert set(replies) == {(rule, INVALID, INVALID, 0, INVALID)}
    assert_alive(client)


@pytest.mark.parametrize("changes", [{"device": "nonesuch"}, {"preference": -1}, {"model": b"nonsense"}])
def test_an_invalid_preparation_keeps_none_of_its_pools(
    changes: dict[str, Any], client: ProtocolPeer, resources: ExitStack, running: Running
) -> None:
    data, fds = pooled(ADD, resources)
    before = len(os.listdir("/proc/self/fd"))
    client.send(prepare_message(4, **{"model": data, "pools": ONE_POOL, **changes}), fds)
    client.receive(messages.PreparedModelReady)
    client.receive(messages.Reply)
    assert len(os.listdir("/proc/self/fd")) == before
    assert running.session.quota.charged_bytes == 0


def unsealed() -> int:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    return fd


def pipe() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


def sparse() -> int:
    fd = os.memfd_create("sparse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 60)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, RESIZE_SEALS)
    return fd


@pytest.mark.parametrize(("make", "status"), [(pipe, INVALID), (sparse, ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT)])
def test_a_model_in_memory_that_has_no_bytes_or_too_many_is_rejected(
    make: Callable[[], int], status: ErrorStatus, client: ProtocolPeer
) -> None:
    fd = make()
    announced = os.fstat(fd).st_size or 64
    client.send(prepare_message(4, pools=(messages.MemoryData(announced),)), [fd])
    os.close(fd)
    assert client.receive(messages.PreparedModelReady).status is status
    assert client.receive(messages.Reply).status is status
    assert_alive(client)


def test_PREP_8_several_models_have_different_ids(client: ProtocolPeer) -> None:
    ids = [prepare(client, ADD, call) for call in (10, 11, 12)]
    assert len(set(ids)) == 3


def test_QOS_4_a_distant_deadline_of_a_preparation_has_no_effect(client: ProtocolPeer) -> None:
    client.send(prepare_message(4, deadline_ns=time.monotonic_ns() + 60_000_000_000))
    assert client.receive(messages.Reply).status is NONE
    assert client.receive(messages.PreparedModelReady).status is NONE


@pytest.mark.parametrize("priority", [Priority.LOW, Priority.HIGH])
def test_N_QOS_1_N_QOS_3_a_model_is_prepared_with_any_priority_and_no_deadline(
    priority: Priority, client: ProtocolPeer
) -> None:
    client.send(prepare_message(priority=priority, deadline_ns=-1))
    assert client.receive(messages.Reply).status is NONE
    assert client.receive(messages.PreparedModelReady).status is NONE


def test_N_QOS_2_a_preparation_with_a_short_deadline_succeeds_or_misses_it(client: ProtocolPeer) -> None:
    client.send(prepare_message(deadline_ns=time.monotonic_ns() + 5_000_000))
    replies = [client.receive_any(), client.receive_any()]
    missed = {ErrorStatus.MISSED_DEADLINE_TRANSIENT, ErrorStatus.MISSED_DEADLINE_PERSISTENT}
    assert {reply.status for reply in replies} <= missed | {NONE}  # type: ignore[attr-defined]
    assert len({reply.status for reply in replies}) == 1  # type: ignore[attr-defined]


def test_QOS_2_a_preparation_past_its_deadline_is_persistent(client: ProtocolPeer) -> None:
    client.send(prepare_message(deadline_ns=1))
    ready, reply = client.receive(messages.PreparedModelReady), client.receive(messages.Reply)
    assert ready.status is reply.status is ErrorStatus.MISSED_DEADLINE_PERSISTENT


def test_a_model_is_released_once(client: ProtocolPeer) -> None:
    model_id = prepare(client)
    client.send(messages.ReleaseModel(20, model_id))
    assert client.receive(messages.Reply) == messages.Reply(20, NONE, "")
    client.send(messages.ReleaseModel(21, model_id))
    reply = client.receive(messages.Reply)
    assert reply.status is INVALID
    assert f"no model {model_id}" in reply.message


def test_a_model_is_charged_with_its_pools_until_it_is_released(
    client: ProtocolPeer, resources: ExitStack, running: Running
) -> None:
    data, fds = pooled(ADD, resources)
    for model_id, number in ((1, 10), (2, 11)):
        client.send(prepare_message(number, data, pools=ONE_POOL), fds)
        client.receive(messages.Reply)
        assert client.receive(messages.PreparedModelReady).model_id == model_id
        assert running.session.quota.charged_bytes == model_id * (decoded_model_bytes(data) + 64)
    for model_id in (1, 2):
        client.send(messages.ReleaseModel(20 + model_id, model_id))
        client.receive(messages.Reply)
    until(lambda: running.session.quota.charged_bytes == 0)


def test_PREP_11_a_model_beyond_the_limit_is_rejected(client: ProtocolPeer, running: Running) -> None:
    prepare(client)
    running.session.quota.limit_bytes = running.session.quota.charged_bytes + 1
    client.send(prepare_message(4))
    assert client.receive(messages.PreparedModelReady).status is ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
    assert client.receive(messages.Reply).status is ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT


FAULTS = [
    (MemoryError, ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT),
    (OverflowError, ErrorStatus.GENERAL_FAILURE),
]


def failing(error: type[Exception]) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error("unforeseen")

    return fail


@pytest.mark.parametrize("place", [(model_calls, "decode_model"), (device, "validate_model")], ids=lambda p: p[1])
@pytest.mark.parametrize(("error", "status"), FAULTS)
def test_LIFE_8_a_model_that_cannot_be_read_is_rejected(
    place: tuple[Any, str],
    error: type[Exception],
    status: ErrorStatus,
    client: ProtocolPeer,
    running: Running,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(*place, failing(error))
    client.send(prepare_message(4))
    assert client.receive(messages.PreparedModelReady).status is status
    assert client.receive(messages.Reply).status is status
    client.send(messages.GetSupportedOperations(5, "reference", encode_model(ADD)[0]))
    assert client.receive(messages.SupportedOperations).status is status
    until(lambda: running.session.quota.charged_bytes == 0)
    caplog.clear()  # the log records keep the frames alive


@pytest.mark.parametrize(("error", "status"), FAULTS)
def test_PREP_11_LIFE_8_an_unexpected_exception_while_compiling_rejects_the_model(
    error: type[Exception],
    status: ErrorStatus,
    client: ProtocolPeer,
    running: Running,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(interpreter, "prepare", failing(error))
    client.send(prepare_message(4))
    assert client.receive(messages.Reply).status is NONE
    assert client.receive(messages.PreparedModelReady).status is status
    assert running.session.quota.charged_bytes == 0
    caplog.clear()


# ------------------------------------------------------------------------------------------------ executing


@pytest.fixture
def pools(resources: ExitStack) -> tuple[Memory, Memory]:
    """Memory for ADD: its inputs, filled, and space for its output."""
    inputs, outputs = models.pool_bytes(ADD)
    source = resources.enter_context(Memory.create(inputs, one_writer=True))
    sink = resources.enter_context(Memory.create(outputs))
    np.frombuffer(source.view, np.float32, 4)[:] = [1, 2, 3, 4]
    np.frombuffer(source.view, np.float32, 4, offset=64)[:] = [10, 20, 30, 40]
    return source, sink


def memory_data(*sizes: int) -> tuple[messages.MemoryData, ...]:
    return tuple(messages.MemoryData(size) for size in sizes)


EMPTY = messages.RequestData((), (), ())


def execute_message(model_id: int, pools: tuple[Memory, ...], call: int = 30, **changes: Any) -> messages.Execute:
    request: Request = models.request_for(ADD, pools)
    return execute_request_message(model_id, request, call, **changes)


def execute_request_message(model_id: int, request: Request, call: int = 30, **changes: Any) -> messages.Execute:
    """Return an Execute; `changes` are fields of it, its request or configuration, or `memory_data`: sizes of pools."""
    if "memory_data" in changes:
        changes["pools"] = memory_data(*changes["memory_data"])
    parts: list[Any] = [
        messages.request_to_data(request),
        messages.config_to_data(ExecutionConfig()),
        messages.Execute(
            call, model_id, messages.RequestData((), (), ()), messages.ConfigData(MeasureTiming.NO, 0), -1
        ),
    ]
    data, config, message = (
        replace_message(part, **{name: changes[name] for name in part.__struct_fields__ if name in changes})
        for part in parts
    )
    return replace_message(message, request=data, config=config)


def execute(client: ProtocolPeer, model_id: int, pools: tuple[Memory, ...], **changes: Any) -> messages.Executed:
    client.send(execute_message(model_id, pools, **changes), [pool.fileno() for pool in pools])
    return client.receive(messages.Executed)


def test_an_execution_writes_its_outputs_and_returns_their_shapes(
    client: ProtocolPeer, pools: tuple[Memory, Memory]
) -> None:
    reply = execute(client, prepare(client), pools)
    assert (reply.call, reply.status) == (30, NONE)
    assert messages.shapes_from_data(reply.shapes) == (OutputShape((4,)),)
    assert (reply.time_on_device_ns, reply.time_in_driver_ns) == (-1, -1)
    assert floats(pools[1]) == SUM


def test_TIM_4_a_measured_execution_has_times(client: ProtocolPeer, pools: tuple[Memory, Memory]) -> None:
    reply = execute(client, prepare(client), pools, measure=MeasureTiming.YES)
    assert 0 < reply.time_on_device_ns <= reply.time_in_driver_ns


def test_QOS_2_an_execution_past_its_deadline_does_no_work(client: ProtocolPeer, pools: tuple[Memory, Memory]) -> None:
    reply = execute(client, prepare(client), pools, measure=MeasureTiming.YES, deadline_ns=1)
    assert reply.status is ErrorStatus.MISSED_DEADLINE_PERSISTENT
    assert (reply.shapes, reply.time_on_device_ns, reply.time_in_driver_ns) == ((), -1, -1)
    assert floats(pools[1]) == [0.0] * 4


def test_QOS_3_a_deadline_that_passes_during_an_execution_ends_it(client: ProtocolPeer, resources: ExitStack) -> None:
    slow = models.slow_model()
    sizes = models.pool_bytes(slow)
    memories = tuple(resources.enter_context(Memory.create(size)) for size in sizes)
    model_id = prepare(client, slow)
    request = models.request_for(slow, memories)
    begin = time.monotonic()
    reply = execute(
        client,
        model_id,
        memories,
        inputs=messages.request_to_data(request).inputs,
        outputs=messages.request_to_data(request).outputs,
        deadline_ns=time.monotonic_ns() + 100_000_000,
    )
    assert reply.status is ErrorStatus.MISSED_DEADLINE_TRANSIENT
    assert time.monotonic() - begin < 2


def test_N_QOS_6_a_loop_that_never_ends_is_ended_by_the_timeout_of_the_request(
    client: ProtocolPeer, resources: ExitStack
) -> None:
    loop = control_flow_models.counting()
    memories = tuple(resources.enter_context(Memory.create(size)) for size in models.pool_bytes(loop))
    model_id = prepare(client, loop)
    request = models.request_for(loop, memories)
    rounds = request.inputs[1].location
    memories[rounds.pool_index].view[rounds.offset : rounds.offset + 4] = (2**31 - 1).to_bytes(4, "little")
    begin = time.monotonic()
    reply = execute(
        client,
        model_id,
        memories,
        inputs=messages.request_to_data(request).inputs,
        outputs=messages.request_to_data(request).outputs,
        loop_timeout_ns=1_000_000,
    )
    assert reply.status is ErrorStatus.MISSED_DEADLINE_TRANSIENT
    assert time.monotonic() - begin < 2


def test_CF_5_a_loop_timeout_above_the_maximum_is_rejected(client: ProtocolPeer, pools: tuple[Memory, Memory]) -> None:
    reply = execute(client, prepare(client), pools, loop_timeout_ns=15_000_000_001)
    assert reply.status is INVALID
    assert "15000000001" in reply.message


@pytest.mark.parametrize("changes", [{"deadline_ns": -2}, {"loop_timeout_ns": -2}], ids=["deadline", "loop timeout"])
def test_N_RQX_14_a_limit_below_minus_one_is_rejected(
    changes: dict[str, int], client: ProtocolPeer, pools: tuple[Memory, Memory]
) -> None:
    reply = execute(client, prepare(client), pools, **changes)
    assert reply.status is INVALID
    assert "-2" in reply.message


def test_a_released_or_unknown_model_cannot_be_executed(
    client: ProtocolPeer, pools: tuple[Memory, Memory], running: Running
) -> None:
    model_id = prepare(client)
    client.send(messages.ReleaseModel(20, model_id))
    client.receive(messages.Reply)
    for number in (model_id, UNKNOWN):
        reply = execute(client, number, pools, call=number)
        assert reply.status is INVALID
        assert f"no model {number}" in reply.message
    until(lambda: running.session.quota.charged_bytes == 0)


@pytest.mark.parametrize("announced", [0, 97])
def test_a_pool_shorter_than_announced_is_rejected(
    announced: int, client: ProtocolPeer, pools: tuple[Memory, Memory]
) -> None:
    reply = execute(client, prepare(client), pools, memory_data=(80, announced))
    assert reply.status is INVALID


@pytest.mark.parametrize(("make", "status"), [(pipe, INVALID), (sparse, ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT)])
def test_a_pool_that_has_no_bytes_or_too_many_is_rejected(
    make: Callable[[], int], status: ErrorStatus, client: ProtocolPeer, pools: tuple[Memory, Memory]
) -> None:
    model_id, fd = prepare(client), make()
    size = os.fstat(fd).st_size
    client.send(execute_message(model_id, pools, memory_data=(80, size)), [pools[0].fileno(), fd])
    os.close(fd)
    assert client.receive(messages.Executed).status is status
    assert_alive(client)


def test_memory_beyond_the_client_s_quota_is_rejected(
    client: ProtocolPeer, pools: tuple[Memory, Memory], running: Running
) -> None:
    model_id, quota = prepare(client), running.session.quota
    held = quota.charged_bytes
    quota.limit_bytes = held + 90  # both need 96
    reply = execute(client, model_id, pools)
    assert reply.status is ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
    assert f"the limit is {held + 90}" in reply.message
    quota.limit_bytes = held + 96
    assert execute(client, model_id, pools, call=31).status is NONE
    assert quota.charged_bytes == held


def test_EXE_8_executions_run_concurrently(
    client: ProtocolPeer, pools: tuple[Memory, Memory], running: Running
) -> None:
    held = Held(ADD)
    running.session.models.insert(DriverPreparedModel(ADD, held), UNKNOWN)  # type: ignore[arg-type]
    quick = prepare(client)
    client.send(execute_message(UNKNOWN, pools, 40), [pool.fileno() for pool in pools])
    assert held.begun.wait(LIMIT_S)
    assert execute(client, quick, pools, call=41).call == 41
    held.go.set()
    assert client.receive(messages.Executed).call == 40


def test_TIM_5_TIM_6_the_driver_s_time_begins_when_the_session_receives_the_request(
    client: ProtocolPeer, pools: tuple[Memory, Memory], running: Running
) -> None:
    held, quick = Held(ADD), prepare(client)
    running.session.models.insert(DriverPreparedModel(ADD, held), UNKNOWN)  # type: ignore[arg-type]
    fds = [pool.fileno() for pool in pools]
    for call in range(40, 40 + session.POOL_THREADS):
        client.send(execute_message(UNKNOWN, pools, call), fds)
    client.send(execute_message(quick, pools, 50, measure=MeasureTiming.YES), fds)
    assert_alive(client)  # so the driver has received it
    begin = time.monotonic_ns()
    while (waited := time.monotonic_ns() - begin) < 2_000_000:
        pass
    held.go.set()
    replies = [client.receive(messages.Executed) for _ in range(session.POOL_THREADS + 1)]
    assert next(reply for reply in replies if reply.call == 50).time_in_driver_ns >= waited


def test_calls_beyond_the_limit_are_rejected_immediately_and_keep_no_fd(
    client: ProtocolPeer, pools: tuple[Memory, Memory], running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running.session, "_calls_max", 6)
    held = Held(ADD)
    fd_count = len(os.listdir("/proc/self/fd"))
    running.session.models.insert(DriverPreparedModel(ADD, held), UNKNOWN)  # type: ignore[arg-type]
    fds = [pool.fileno() for pool in pools]
    for call in range(40, 46):
        client.send(execute_message(UNKNOWN, pools, call), fds)
    mapped_bytes = session.POOL_THREADS * sum(pool.size_bytes for pool in pools)
    until(lambda: (running.session._open_calls, running.session.quota.charged_bytes) == (6, mapped_bytes))
    rejected = execute(client, UNKNOWN, pools, call=46)
    client.send(prepare_message(47, pools=ONE_POOL), fds[:1])
    client.send(messages.GetSupportedOperations(48, "reference", b"", ONE_POOL), fds[:1])
    ready, reply = client.receive(messages.PreparedModelReady), client.receive(messages.Reply)
    replies: list[Any] = [rejected, ready, reply, client.receive(messages.SupportedOperations)]
    assert [result.call for result in replies] == [46, 47, 47, 48]
    assert {result.status for result in replies} == {ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT}
    assert_alive(client)
    held.go.set()
    assert {client.receive(messages.Executed).status for _ in range(6)} == {NONE}
    until(lambda: running.session._open_calls == 0)
    until(lambda: len(os.listdir("/proc/self/fd")) == fd_count)  # also of the rejected calls
    assert execute(client, UNKNOWN, pools, call=49).status is NONE


def test_messages_of_queued_calls_are_charged_to_the_client(
    client: ProtocolPeer, pools: tuple[Memory, Memory], running: Running
) -> None:
    held, quota = Held(ADD), running.session.quota
    running.session.models.insert(DriverPreparedModel(ADD, held), UNKNOWN)  # type: ignore[arg-type]
    fds = [pool.fileno() for pool in pools]
    for call in range(40, 40 + session.POOL_THREADS):
        client.send(execute_message(UNKNOWN, pools, call), fds)
    mapped_bytes = session.POOL_THREADS * sum(pool.size_bytes for pool in pools)
    until(lambda: quota.charged_bytes == mapped_bytes)
    quota.limit_bytes = mapped_bytes + (2 << 20)
    for call in (50, 51):
        client.send(messages.GetSupportedOperations(call, "reference", bytes(1 << 20)))
    rejected = client.receive(messages.SupportedOperations)  # immediately, while the first waits
    assert (rejected.call, rejected.status) == (51, ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT)
    assert mapped_bytes + (1 << 20) <= quota.charged_bytes < quota.limit_bytes
    quota.limit_bytes = 1 << 40
    held.go.set()
    replies = [client.receive_any() for _ in range(session.POOL_THREADS + 1)]
    assert sorted(reply.call for reply in replies) == [40, 41, 42, 43, 50]  # type: ignore[attr-defined]
    until(lambda: quota.charged_bytes == 0)


# ------------------------------------------------------------------------------------------------ bursts


@pytest.fixture
def queues(resources: ExitStack) -> BurstClient:
    return resources.enter_context(BurstClient.create())


def descriptor(queue: MessageQueue) -> messages.MQDescriptorData:
    described = queue.descriptor
    grantors = tuple(messages.GrantorData(g.fd_index, g.offset, g.extent) for g in described.grantors)
    return messages.MQDescriptorData(grantors, described.quantum, described.flags)


def configure(client: ProtocolPeer, model_id: int, queues: BurstClient, **changes: Any) -> messages.BurstConfigured:
    message = messages.ConfigureBurst(50, model_id, descriptor(queues.requests), descriptor(queues.results))
    fds = [queues.requests.memory.fileno(), queues.results.memory.fileno()]
    client.send(replace_message(message, **changes), fds)
    return client.receive(messages.BurstConfigured)


def send_memories(client: ProtocolPeer, request_message: messages.GetMemories, *memories: Memory) -> None:
    sizes = memory_data(*(memory.size_bytes for memory in memories))
    client.send(messages.Memories(request_message.call, NONE, "", sizes), [memory.fileno() for memory in memories])


@pytest.fixture
def burst_id(client: ProtocolPeer, queues: BurstClient) -> int:
    return configure(client, prepare(client), queues).burst_id


ADD_PACKET = bursts.packet_for(ADD)


def status_of(packet: bytes) -> int:
    return int.from_bytes(packet[12:16], "little")


def test_a_burst_requests_memories_over_the_channel_and_replies_over_the_queue(
    client: ProtocolPeer, queues: BurstClient, burst_id: int, pools: tuple[Memory, Memory]
) -> None:
    assert burst_id > 0
    assert queues.requests.send(ADD_PACKET)
    request_message = client.receive(messages.GetMemories)
    assert (request_message.burst_id, request_message.slots) == (burst_id, (0, 1))
    send_memories(client, request_message, *pools)
    assert status_of(queues.receive()) == NONE
    assert floats(pools[1]) == SUM
    assert status_of(queues.call(ADD_PACKET)) == NONE
    assert client.has_no_message()


def test_BUR_12_a_freed_slot_is_requested_again_over_the_channel(
    client: ProtocolPeer, queues: BurstClient, burst_id: int, pools: tuple[Memory, Memory]
) -> None:
    assert queues.requests.send(ADD_PACKET)
    send_memories(client, client.receive(messages.GetMemories), *pools)
    queues.receive()
    client.send(messages.FreeMemory(burst_id, 1))
    client.send(messages.FreeMemory(burst_id, 99))
    client.send(messages.FreeMemory(UNKNOWN, 1))
    assert_alive(client)  # so that the driver has read these
    assert queues.requests.send(ADD_PACKET)
    call = client.receive(messages.GetMemories)
    assert call.slots == (1,)
    send_memories(client, call, pools[1])
    assert status_of(queues.receive()) == NONE


def test_N_BUX_5_the_result_has_the_status_of_the_client_s_reply(
    client: ProtocolPeer, queues: BurstClient, burst_id: int
) -> None:
    assert queues.requests.send(ADD_PACKET)
    request_message = client.receive(messages.GetMemories)
    client.send(messages.Memories(request_message.call, INVALID, "slot 0 was freed"))
    assert status_of(queues.receive()) == INVALID
    client.send(messages.GetBurstError(60, burst_id))
    assert client.receive(messages.BurstError) == messages.BurstError(60, INVALID, "slot 0 was freed", 1)


def test_N_BUX_5_memories_of_an_error_reply_are_closed(
    client: ProtocolPeer, queues: BurstClient, burst_id: int, pools: tuple[Memory, Memory]
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert queues.requests.send(ADD_PACKET)
    request_message = client.receive(messages.GetMemories)
    client.send(
        messages.Memories(request_message.call, INVALID, "no", memory_data(80, 16)), [pool.fileno() for pool in pools]
    )
    assert status_of(queues.receive()) == INVALID
    assert len(os.listdir("/proc/self/fd")) == before


def test_N_BUX_5_memories_without_free_fds_are_requested_again(
    client: ProtocolPeer, queues: BurstClient, burst_id: int, pools: tuple[Memory, Memory]
) -> None:
    assert queues.requests.send(ADD_PACKET)
    call = client.receive(messages.GetMemories)
    with no_more_descriptors(but=1):
        send_memories(client, call, *pools)
        result = queues.receive()
    client.send(messages.GetBurstError(60, burst_id))
    assert client.receive(messages.BurstError).status is ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
    assert status_of(result) != NONE
    assert queues.requests.send(ADD_PACKET)
    send_memories(client, client.receive(messages.GetMemories), *pools)
    assert status_of(queues.receive()) == NONE


def test_N_BUX_5_a_client_s_status_dead_object_does_not_end_the_burst(
    client: ProtocolPeer, queues: BurstClient, burst_id: int, pools: tuple[Memory, Memory]
) -> None:
    assert queues.requests.send(ADD_PACKET)
    request_message = client.receive(messages.GetMemories)
    client.send(messages.Memories(request_message.call, ErrorStatus.DEAD_OBJECT, "dead"))
    assert status_of(queues.receive()) == ErrorStatus.GENERAL_FAILURE
    assert queues.requests.send(ADD_PACKET)
    send_memories(client, client.receive(messages.GetMemories), *pools)
    assert status_of(queues.receive()) == NONE


def test_a_queue_of_more_than_a_mebibyte_is_rejected(client: ProtocolPeer, running: Running) -> None:
    model_id = prepare(client)
    held = running.session.quota.charged_bytes
    with BurstClient.create(request_records=(1 << 20) // 24 + 1) as large:
        reply = configure(client, model_id, large)
    assert reply.status is ErrorStatus.GENERAL_FAILURE
    assert "1048576 bytes at most" in reply.message
    assert running.session.quota.charged_bytes == held
    with BurstClient.create(request_records=(1 << 20) // 24) as allowed:
        client.send(replace_message(messages.CloseBurst(51, 0), burst_id=configure(client, model_id, allowed).burst_id))
        assert client.receive(messages.Reply).status is NONE


def test_N_BUX_5_memory_that_has_no_bytes_is_a_failure(
    client: ProtocolPeer, queues: BurstClient, burst_id: int, pools: tuple[Memory, Memory], running: Running
) -> None:
    assert queues.requests.send(ADD_PACKET)
    request_message = client.receive(messages.GetMemories)
    fd = pipe()
    client.send(messages.Memories(request_message.call, NONE, "", memory_data(80, 4096)), [pools[0].fileno(), fd])
    os.close(fd)
    assert status_of(queues.receive()) == ErrorStatus.GENERAL_FAILURE
    client.send(messages.GetBurstError(60, burst_id))
    assert "not a regular file or memfd" in client.receive(messages.BurstError).message


def test_N_BUX_5_fewer_memories_than_slots_are_a_failure(
    client: ProtocolPeer, queues: BurstClient, burst_id: int, pools: tuple[Memory, Memory]
) -> None:
    assert queues.requests.send(ADD_PACKET)
    send_memories(client, client.receive(messages.GetMemories), pools[0])
    assert status_of(queues.receive()) == ErrorStatus.GENERAL_FAILURE


def test_the_last_error_of_a_burst_without_failures_is_none(client: ProtocolPeer, burst_id: int) -> None:
    client.send(messages.GetBurstError(60, burst_id))
    assert client.receive(messages.BurstError) == messages.BurstError(60, NONE, "", 0)


def test_a_burst_is_closed_once(client: ProtocolPeer, burst_id: int) -> None:
    client.send(messages.CloseBurst(61, burst_id))
    assert client.receive(messages.Reply) == messages.Reply(61, NONE, "")
    client.send(messages.CloseBurst(62, burst_id))
    assert client.receive(messages.Reply).status is INVALID
    client.send(messages.GetBurstError(63, burst_id))
    assert client.receive(messages.BurstError).status is INVALID
    assert [thread for thread in threading.enumerate() if thread.name == "nnfmq-burst"] == []


def test_a_closed_burst_has_released_its_memory(
    client: ProtocolPeer, queues: BurstClient, burst_id: int, pools: tuple[Memory, Memory], running: Running
) -> None:
    assert queues.requests.send(ADD_PACKET)
    send_memories(client, client.receive(messages.GetMemories), *pools)
    queues.receive()
    memory_data = [queues.requests.memory, queues.results.memory, *pools]
    before = running.session.quota.charged_bytes
    client.send(messages.CloseBurst(61, burst_id))
    client.receive(messages.Reply)
    assert running.session.quota.charged_bytes == before - sum(memory.size_bytes for memory in memory_data)


def test_a_burst_is_closed_while_it_waits_for_memories_and_a_late_reply_is_dropped(
    client: ProtocolPeer, queues: BurstClient, burst_id: int, pools: tuple[Memory, Memory], running: Running
) -> None:
    assert queues.requests.send(ADD_PACKET)
    call = client.receive(messages.GetMemories)
    client.send(messages.CloseBurst(61, burst_id))
    assert client.receive(messages.Reply).status is NONE
    held = running.session.quota.charged_bytes
    send_memories(client, call, *pools)
    assert_alive(client)
    assert running.session.quota.charged_bytes == held


def test_a_burst_outlives_its_model_and_keeps_it_charged(
    client: ProtocolPeer, queues: BurstClient, pools: tuple[Memory, Memory], running: Running
) -> None:
    model_id = prepare(client)
    charged = running.session.quota.charged_bytes
    assert charged > 0
    burst_id = configure(client, model_id, queues).burst_id
    client.send(messages.ReleaseModel(20, model_id))
    assert client.receive(messages.Reply).status is NONE
    assert queues.requests.send(ADD_PACKET)
    send_memories(client, client.receive(messages.GetMemories), *pools)
    assert status_of(queues.receive()) == NONE
    memory_data = [queues.requests.memory, queues.results.memory, *pools]
    assert running.session.quota.charged_bytes == charged + sum(memory.size_bytes for memory in memory_data)
    client.send(messages.CloseBurst(61, burst_id))
    client.receive(messages.Reply)
    until(lambda: running.session.quota.charged_bytes == 0)


def test_N_BUX_4_a_client_that_hangs_up_during_get_memories_ends_the_session(
    client: ProtocolPeer, queues: BurstClient, burst_id: int, running: Running
) -> None:
    assert queues.requests.send(ADD_PACKET)
    client.receive(messages.GetMemories)
    client.close()
    assert running.ends()
    until(lambda: not any(thread.name == "nnfmq-burst" for thread in threading.enumerate()))


def bad_grantor(queue: MessageQueue) -> messages.MQDescriptorData:
    good = descriptor(queue)
    outside = messages.GrantorData(0, 1 << 20, good.grantors[2].extent)
    return messages.MQDescriptorData((*good.grantors[:2], outside, good.grantors[3]), good.quantum, good.flags)


def without_event_word(queue: MessageQueue) -> messages.MQDescriptorData:
    good = descriptor(queue)
    return messages.MQDescriptorData(good.grantors[:3], good.quantum, good.flags)


def other_quantum(queue: MessageQueue) -> messages.MQDescriptorData:
    good = descriptor(queue)
    return messages.MQDescriptorData(good.grantors, 8, good.flags)


@pytest.mark.parametrize("which", ["request", "result"])
@pytest.mark.parametrize("make", [bad_grantor, without_event_word, other_quantum])
def test_N_BUX_3_an_invalid_queue_is_rejected_and_nothing_of_it_is_kept(
    make: Callable[[MessageQueue], messages.MQDescriptorData],
    which: str,
    client: ProtocolPeer,
    queues: BurstClient,
    running: Running,
) -> None:
    queue = queues.requests if which == "request" else queues.results
    model_id = prepare(client)
    held = running.session.quota.charged_bytes
    reply = configure(client, model_id, queues, **{which: make(queue)})
    assert reply.status is ErrorStatus.GENERAL_FAILURE
    assert reply.burst_id == 0
    assert reply.message
    assert running.session.quota.charged_bytes == held
    assert_alive(client)


def test_a_burst_of_an_unknown_model_is_rejected(client: ProtocolPeer, queues: BurstClient, running: Running) -> None:
    reply = configure(client, UNKNOWN, queues)
    assert reply.status is INVALID
    assert running.session.quota.charged_bytes == 0


def test_a_queue_in_memory_that_its_client_could_shrink_is_rejected(client: ProtocolPeer, queues: BurstClient) -> None:
    model_id, fd = prepare(client), unsealed()
    message = messages.ConfigureBurst(50, model_id, descriptor(queues.requests), descriptor(queues.results))
    client.send(message, [queues.requests.memory.fileno(), fd])
    os.close(fd)
    assert client.receive(messages.BurstConfigured).status is INVALID
    assert_alive(client)
