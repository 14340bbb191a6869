"""The client's end of the control channel, against a driver that sends whatever a test wants."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from support.connections import open_connection
from support.drivers import InThread
from support.executors import LIMIT_S, until
from support.forking import fork
from support.protocol import ProtocolPeer

from nnfmq.base import watcher
from nnfmq.base.channel import NO_WAIT
from nnfmq.base.deadlines import deadline_after
from nnfmq.base.memory import Memory
from nnfmq.client.connection.connection import Connection
from nnfmq.client.connection.garbage import CloserUse
from nnfmq.client.connection.late_sends import LATE_MAX
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.hal.errors import (
    DeadObject,
    DeviceUnavailable,
    ErrorStatus,
    InvalidArgument,
    MissedDeadlineTransient,
    NnfmqError,
)
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.queue import MessageQueue, PeerDeathFlag
from nnfmq.serialize import control_protocol, messages

NONE = ErrorStatus.NONE
GREETING = messages.HelloReply(control_protocol.PROTOCOL, "AIDL v4", "fake", 4711, 4712, "python")
SECOND_NS = 1_000_000_000
Start = Callable[..., Future[Any]]


def soon(seconds: float = LIMIT_S) -> int:
    return time.monotonic_ns() + round(seconds * SECOND_NS)


def listing(connection: Connection, start: Start, deadline_ns: int | None = None) -> Future[messages.DeviceList]:
    message = messages.ListDevices(connection.next_call_id())
    return start(connection.exchange, message, messages.DeviceList, (), deadline_ns)


def preparing(connection: Connection, start: Start, deadline_ns: int | None) -> Future[messages.PreparedModelReady]:
    message = messages.PrepareModel(connection.next_call_id(), "reference", 1, 1, -1, b"")
    return start(connection.call, message, messages.PreparedModelReady, (), deadline_ns)


def assert_alive(connection: Connection, driver: ProtocolPeer, start: Start) -> None:
    reply = listing(connection, start)
    driver.send(messages.DeviceList(driver.receive(messages.ListDevices).call, ()))
    assert reply.result(LIMIT_S).devices == ()


# ------------------------------------------------------------------------------------------------ opening


def test_a_client_sends_hello_and_keeps_the_reply(connection: Connection) -> None:
    assert connection.wait_until_ready() == GREETING
    assert connection.is_open


def test_a_driver_that_rejects_the_client_is_unavailable_for_its_reason(driver: ProtocolPeer, start: Start) -> None:
    opening = start(open_connection, driver.other, soon())
    driver.receive(messages.Hello)
    driver.send(messages.Refused(ErrorStatus.DEVICE_UNAVAILABLE, "not for you"))
    error = opening.exception(LIMIT_S)
    assert isinstance(error, DeviceUnavailable)
    assert "the driver rejected the client: not for you" in str(error)


@pytest.mark.parametrize("status", ErrorStatus)
def test_every_status_of_a_rejection_is_an_error(status: ErrorStatus, driver: ProtocolPeer, start: Start) -> None:
    opening = start(open_connection, driver.other, soon())
    driver.receive(messages.Hello)
    driver.send(messages.Refused(status, "not for you"))
    assert "not for you" in str(opening.exception(LIMIT_S))
    assert isinstance(opening.exception(), NnfmqError)


def test_hello_is_sent_before_the_driver_is_watched_and_nothing_is_received_until_then(driver: ProtocolPeer) -> None:
    connection = Connection.start(driver.other, soon())  # type: ignore[attr-defined]
    try:
        driver.receive(messages.Hello)
        driver.send(GREETING)
        assert not connection.has_started
        connection.watch()
        assert connection.wait_until_ready(soon()) == GREETING
    finally:
        connection.close()


def test_a_hang_up_before_hello_is_sent_does_not_delay_the_start(
    driver: ProtocolPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread is there yet that could notice the end, and sets the event for which a failed send waits."""
    thread_use = CloserUse()  # the thread that it starts waits
    monkeypatch.setattr(threading.Event, "wait", lambda *_: pytest.fail("it waits"))
    driver.close()
    connection = Connection.start(driver.other, soon())  # type: ignore[attr-defined]
    monkeypatch.undo()
    try:
        connection.watch()
        with pytest.raises(DeviceUnavailable):
            connection.wait_until_ready(soon())
    finally:
        connection.close()
    thread_use.end()


def test_a_rejection_before_hello_is_received(driver: ProtocolPeer, start: Start) -> None:
    """The supervisor rejects a client without reading, and hangs up."""
    driver.send(messages.Refused(ErrorStatus.DEVICE_UNAVAILABLE, "full"))
    opening = start(open_connection, driver.other, soon())
    assert isinstance(opening.exception(LIMIT_S), NnfmqError)


def test_a_driver_that_hangs_up_before_it_replies_is_unavailable(driver: ProtocolPeer, start: Start) -> None:
    opening = start(open_connection, driver.other, soon())
    driver.receive(messages.Hello)
    driver.close()
    assert isinstance(opening.exception(LIMIT_S), DeviceUnavailable)


def test_a_driver_that_never_replies_misses_the_deadline(driver: ProtocolPeer) -> None:
    deadline_ns = soon(0.03)
    with pytest.raises(MissedDeadlineTransient):
        open_connection(driver.other, deadline_ns)  # type: ignore[attr-defined]
    assert time.monotonic_ns() >= deadline_ns
    driver.receive(messages.Hello)
    assert driver.is_hung_up()


@pytest.mark.parametrize(
    "message",
    [messages.DeviceList(1, ()), messages.GetMemories(1, 1, (0,))],
    ids=lambda message: type(message).__name__,
)
def test_another_reply_to_hello_closes_the_connection(
    message: messages.Message, driver: ProtocolPeer, start: Start
) -> None:
    opening = start(open_connection, driver.other, soon())
    driver.receive(messages.Hello)
    driver.send(message)
    assert isinstance(opening.exception(LIMIT_S), DeviceUnavailable)


# ------------------------------------------------------------------------------------------------ calls


def test_a_reply_to_hello_that_takes_long_to_decode_is_not_decoded(driver: ProtocolPeer, start: Start) -> None:
    opening = start(open_connection, driver.other, soon())
    driver.receive(messages.Hello)
    driver.send_bytes(b"\x93" * (1 << 20))  # in a file
    error = opening.exception(LIMIT_S)
    assert isinstance(error, DeviceUnavailable) and "is not taken here" in str(error)


def test_replies_are_matched_by_call_id_in_any_order(
    connection: Connection, driver: ProtocolPeer, start: Start
) -> None:
    waiting = {}
    for _ in range(3):
        future = listing(connection, start)
        waiting[driver.receive(messages.ListDevices).call] = future
    for call in reversed(waiting):
        info = messages.DeviceInfo(f"number {call}", 2, "1", 8, 0, ())
        driver.send(messages.DeviceList(call, (info,)))
    for call, future in waiting.items():
        assert future.result(LIMIT_S).devices[0].name == f"number {call}"


@pytest.mark.parametrize("status", [s for s in ErrorStatus if s not in (NONE, ErrorStatus.DEAD_OBJECT)])
def test_an_error_reply_is_raised_with_its_text(
    status: ErrorStatus, connection: Connection, driver: ProtocolPeer, start: Start
) -> None:
    message = messages.ReleaseModel(connection.next_call_id(), 7)
    call = start(connection.call, message, messages.Reply)
    driver.send(messages.Reply(driver.receive(messages.ReleaseModel).call, status, "what went wrong"))
    error = call.exception(LIMIT_S)
    assert isinstance(error, NnfmqError)
    assert error.status is status
    assert "what went wrong" in str(error)


def test_exchange_returns_the_reply_whatever_its_status(
    connection: Connection, driver: ProtocolPeer, start: Start
) -> None:
    pending = start(connection.exchange, messages.ReleaseModel(connection.next_call_id(), 7), messages.Reply)
    driver.send(messages.Reply(driver.receive(messages.ReleaseModel).call, ErrorStatus.INVALID_ARGUMENT, "no"))
    assert pending.result(LIMIT_S).status is ErrorStatus.INVALID_ARGUMENT


@pytest.mark.parametrize("order", ["reply first", "callback first"])
def test_PREP_3_a_preparation_waits_for_its_callback_before_or_after_the_reply(
    order: str, connection: Connection, driver: ProtocolPeer, start: Start
) -> None:
    waiting = preparing(connection, start, soon())
    call = driver.receive(messages.PrepareModel).call
    replies = [messages.Reply(call, NONE, ""), messages.PreparedModelReady(call, NONE, "", 9)]
    for reply in replies if order == "reply first" else reversed(replies):
        driver.send(reply)
    assert waiting.result(LIMIT_S).model_id == 9


def test_LIFE_5_a_call_ends_at_its_deadline_and_its_late_reply_is_dropped(
    connection: Connection, driver: ProtocolPeer, start: Start
) -> None:
    deadline_ns = soon(0.03)
    assert isinstance(listing(connection, start, deadline_ns).exception(LIMIT_S), MissedDeadlineTransient)
    assert time.monotonic_ns() >= deadline_ns
    driver.send(messages.DeviceList(driver.receive(messages.ListDevices).call, ()))
    assert_alive(connection, driver, start)


def test_a_model_that_is_ready_after_the_deadline_is_released(
    connection: Connection, driver: ProtocolPeer, start: Start
) -> None:
    waiting = preparing(connection, start, soon(0.03))
    call = driver.receive(messages.PrepareModel).call
    assert isinstance(waiting.exception(LIMIT_S), MissedDeadlineTransient)
    driver.send(messages.Reply(call, NONE, ""))
    driver.send(messages.PreparedModelReady(call, NONE, "", 9))
    release = driver.receive(messages.ReleaseModel)
    assert release.model_id == 9
    driver.send(messages.Reply(release.call, NONE, ""))
    assert_alive(connection, driver, start)


def test_a_model_that_fails_after_the_deadline_needs_no_release(
    connection: Connection, driver: ProtocolPeer, start: Start
) -> None:
    waiting = preparing(connection, start, soon(0.03))
    call = driver.receive(messages.PrepareModel).call
    assert isinstance(waiting.exception(LIMIT_S), MissedDeadlineTransient)
    driver.send(messages.Reply(call, NONE, ""))
    driver.send(messages.PreparedModelReady(call, ErrorStatus.GENERAL_FAILURE, "", 0))
    assert_alive(connection, driver, start)


def test_a_burst_that_is_configured_after_the_deadline_is_closed(
    connection: Connection, driver: ProtocolPeer, start: Start, resources: ExitStack
) -> None:
    memory = resources.enter_context(Memory.create(8))
    nothing = messages.MQDescriptorData((), 24, 1)
    message = messages.ConfigureBurst(connection.next_call_id(), 1, nothing, nothing)
    waiting = start(connection.call, message, messages.BurstConfigured, [memory.fileno()] * 2, soon(0.03))
    call = driver.receive(messages.ConfigureBurst).call
    assert isinstance(waiting.exception(LIMIT_S), MissedDeadlineTransient)
    driver.send(messages.BurstConfigured(call, NONE, "", 5))
    closing = driver.receive(messages.CloseBurst)
    assert closing.burst_id == 5
    driver.send(messages.Reply(closing.call, NONE, ""))
    assert_alive(connection, driver, start)


# ------------------------------------------------------------------------------------------------ memories


class Provider:
    """The part of a burst that the connection uses."""

    def __init__(self, memories: dict[int, Memory]) -> None:
        self.peer = watcher.DeathRecipients(PeerDeathFlag())
        self._memories = memories

    def get_memories(self, slots: Sequence[int]) -> list[Memory]:
        if not set(slots) <= set(self._memories):
            raise InvalidArgument(f"no slot of {slots}")
        return [self._memories[slot] for slot in slots]


def test_get_memories_is_replied_to_with_the_memories(
    connection: Connection, driver: ProtocolPeer, resources: ExitStack
) -> None:
    memories = {slot: resources.enter_context(Memory.create(slot + 1)) for slot in (4, 7)}
    provider = Provider(memories)
    connection.add_burst(3, provider)
    driver.send(messages.GetMemories(1, 3, (7, 4)))
    with driver.channel.receive(soon()) as frame:
        reply = control_protocol.decode(frame.data, sender=control_protocol.PeerRole.CLIENT, fds=len(frame.fds))
        assert reply == messages.Memories(1, NONE, "", (messages.MemoryData(8), messages.MemoryData(5)))
        assert [os.fstat(fd).st_size for fd in frame.fds] == [8, 5]


def fill(connection: Connection) -> int:
    """Send until the socket of a driver that does not read is full; return the number of messages."""
    for number in itertools.count():
        try:
            connection.send(messages.FreeMemory(1, number), NO_WAIT)
        except MissedDeadlineTransient:
            return number
    raise AssertionError


def hear_those(driver: ProtocolPeer, count: int) -> None:
    assert [driver.receive(messages.FreeMemory).slot for _ in range(count)] == list(range(count))


def test_the_reply_to_get_memories_is_sent_when_the_driver_reads_again(
    connection: Connection, driver: ProtocolPeer, start: Start, resources: ExitStack
) -> None:
    memory = resources.enter_context(Memory.create(5))
    provider = Provider({4: memory})
    connection.add_burst(3, provider)
    count = fill(connection)
    driver.send(messages.GetMemories(1, 3, (4,)))
    until(lambda: any(thread.name == "nnfmq-late" for thread in threading.enumerate()))
    memory.close()
    hear_those(driver, count)
    reply, fds = driver.receive_with_fds(messages.Memories)
    assert (reply.status, [os.fstat(fd).st_size for fd in fds]) == (NONE, [5])
    os.close(fds[0])
    assert_alive(connection, driver, start)


def test_a_driver_that_asks_and_does_not_read_loses_the_connection(
    connection: Connection, driver: ProtocolPeer, start: Start
) -> None:
    reply = listing(connection, start)
    driver.receive(messages.ListDevices)
    fill(connection)
    for call in range(1, LATE_MAX + 2):
        driver.send(messages.GetMemories(call, 3, (4,)))
    error = reply.exception(LIMIT_S)
    assert isinstance(error, DeadObject)
    assert f"the driver does not read: {LATE_MAX} messages wait for it" in str(error)
    connection.close()
    until(lambda: not any(thread.name == "nnfmq-late" for thread in threading.enumerate()))


def test_release_messages_are_sent_when_the_driver_reads_again(
    connection: Connection, driver: ProtocolPeer, start: Start
) -> None:
    preparation = preparing(connection, start, soon(0.01))
    call = driver.receive(messages.PrepareModel).call
    assert isinstance(preparation.exception(LIMIT_S), MissedDeadlineTransient)
    count = fill(connection)
    driver.send(messages.Reply(call, NONE, ""))
    driver.send(messages.PreparedModelReady(call, NONE, "", 77))
    until(lambda: any(thread.name == "nnfmq-late" for thread in threading.enumerate()))
    hear_those(driver, count)
    assert driver.receive(messages.ReleaseModel).model_id == 77
    assert connection.is_open


def test_an_execution_with_a_short_output_is_resent_when_the_driver_reads_again(
    connection: Connection, driver: ProtocolPeer
) -> None:
    model = PreparedModel(connection, 1, (), (TensorInfo("open", (0,), "float32"),))
    pending = model.execute_async(timeout=LIMIT_S)
    call = driver.receive(messages.ExecuteAsynchronously).call
    count = fill(connection)
    driver.send(messages.Reply(call, NONE, ""))
    small = (messages.ShapeData((3,), False),)
    driver.send(messages.ExecutionFinished(call, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, "too small", small))
    until(lambda: any(thread.name == "nnfmq-late" for thread in threading.enumerate()))
    assert not pending.done()
    hear_those(driver, count)
    again = driver.receive(messages.ExecuteAsynchronously)
    assert again.request.outputs[0].location.length == 12
    driver.send(messages.ExecutionFinished(again.call, NONE, "", (messages.ShapeData((3,), True),)))
    driver.send(messages.Reply(again.call, NONE, ""))
    assert pending.result(LIMIT_S)[0].shape == (3,)


def test_LIFE_5_a_late_reply_is_given_up_when_the_connection_closes(
    connection: Connection, driver: ProtocolPeer
) -> None:
    provider = Provider({})
    connection.add_burst(3, provider)
    fill(connection)
    driver.send(messages.GetMemories(1, 3, (0,)))
    until(lambda: any(thread.name == "nnfmq-late" for thread in threading.enumerate()))
    connection.close()
    until(lambda: all(thread.name != "nnfmq-late" for thread in threading.enumerate()))


@pytest.mark.parametrize("burst_id", [3, 99], ids=["unknown slot", "unknown burst"])
def test_get_memories_of_unknown_slots_is_replied_to_with_an_error(
    burst_id: int, connection: Connection, driver: ProtocolPeer, start: Start
) -> None:
    provider = Provider({})
    connection.add_burst(3, provider)
    driver.send(messages.GetMemories(1, burst_id, (0,)))
    reply = driver.receive(messages.Memories)
    assert reply.status is ErrorStatus.INVALID_ARGUMENT
    assert reply.memories == ()
    assert_alive(connection, driver, start)


def test_get_memories_of_closed_memory_is_an_error_reply_and_keeps_the_connection(
    connection: Connection, driver: ProtocolPeer, start: Start
) -> None:
    memory = Memory.create(8)
    memory.close()
    provider = Provider({0: memory})
    connection.add_burst(3, provider)
    driver.send(messages.GetMemories(1, 3, (0,)))
    assert driver.receive(messages.Memories).status is ErrorStatus.INVALID_ARGUMENT
    assert_alive(connection, driver, start)


# ------------------------------------------------------------------------------------------------ closing


def test_LIFE_5_a_hang_up_fails_all_pending_and_later_calls(
    connection: Connection, driver: ProtocolPeer, start: Start
) -> None:
    waiting = [listing(connection, start) for _ in range(3)]
    for _ in waiting:
        driver.receive(messages.ListDevices)
    driver.close()
    assert [type(future.exception(LIMIT_S)) for future in waiting] == [DeadObject] * 3
    assert not connection.is_open
    assert isinstance(listing(connection, start).exception(LIMIT_S), DeadObject)


class Completions:
    """Handles the reply to a call, and keeps all that it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def set_result(self, result: object) -> None:
        self.told.append(type(result))

    def set_exception(self, error: NnfmqError) -> None:
        self.told.append(type(error))


def test_LIFE_5_a_call_is_completed_once_by_its_reply_or_by_the_end_of_the_driver(
    connection: Connection, driver: ProtocolPeer
) -> None:
    replied, pending = Completions(), Completions()
    for handler in (replied, pending):
        connection.start_call(messages.ListDevices(connection.next_call_id()), messages.DeviceList, handler)
    calls = [driver.receive(messages.ListDevices).call for _ in range(2)]
    driver.send(messages.DeviceList(calls[0], ()))
    until(lambda: bool(replied.told))
    driver.close()
    until(lambda: bool(pending.told))
    connection.close()
    assert (replied.told, pending.told) == ([messages.DeviceList], [DeadObject])


def test_LIFE_5_a_call_to_a_dead_driver_raises_when_the_connection_knows(
    connection: Connection, driver: ProtocolPeer
) -> None:
    """Otherwise a client that recovers would take the connection for one to a new driver."""
    is_busy, is_free = threading.Event(), threading.Event()

    def occupy() -> None:
        is_busy.set()
        is_free.wait(LIMIT_S)

    watcher.call_at(0, occupy)
    assert is_busy.wait(LIMIT_S)
    driver.close()
    message = messages.ListDevices(connection.next_call_id())
    call = InThread.start(lambda: connection.exchange(message, messages.DeviceList))
    call.wait_until_asleep()
    assert connection.is_open
    is_free.set()
    assert isinstance(call.wait().error, DeadObject)
    assert not connection.is_open


def test_a_hang_up_wakes_every_burst(
    connection: Connection, driver: ProtocolPeer, start: Start, resources: ExitStack
) -> None:
    peer_death = PeerDeathFlag()
    queue = resources.enter_context(MessageQueue.create(24, 8, peer_death=peer_death))
    peer = watcher.DeathRecipients(peer_death)
    peer.add(queue)
    connection.add_peer(peer)
    waiting = start(queue.receive, None, 0)
    until(lambda: queue.waiters)
    driver.close()
    assert isinstance(waiting.exception(LIMIT_S), DeadObject)


def test_a_burst_that_is_added_after_the_hang_up_is_rejected(connection: Connection, driver: ProtocolPeer) -> None:
    driver.close()
    until(lambda: not connection.is_open)
    with pytest.raises(DeadObject, match="the driver process is gone"):
        connection.add_peer(watcher.DeathRecipients(PeerDeathFlag()))


VIOLATIONS = {
    "no message": b"\xc1",
    "a client's message": control_protocol.encode(messages.ListDevices(1)),
    "a reply to no call": control_protocol.encode(messages.DeviceList(77, ())),
    "a second greeting": control_protocol.encode(GREETING),
}


@pytest.mark.parametrize("data", VIOLATIONS.values(), ids=VIOLATIONS.keys())
def test_a_protocol_violation_closes_the_connection_and_pending_calls_have_the_reason(
    data: bytes, connection: Connection, driver: ProtocolPeer, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = listing(connection, start)
    driver.receive(messages.ListDevices)
    with caplog.at_level(logging.WARNING, "nnfmq.client"):
        driver.send_bytes(data)
        error = waiting.exception(LIMIT_S)
    assert isinstance(error, DeadObject)
    assert "the connection to the driver was closed" in str(error)
    assert "connection to the driver closed" in caplog.text
    assert not connection.is_open


def test_a_reply_of_the_wrong_type_violates_the_protocol(
    connection: Connection, driver: ProtocolPeer, start: Start
) -> None:
    waiting = listing(connection, start)
    driver.send(messages.Reply(driver.receive(messages.ListDevices).call, NONE, ""))
    assert isinstance(waiting.exception(LIMIT_S), DeadObject)


def test_unexpected_fds_violate_the_protocol_and_are_closed(
    connection: Connection, driver: ProtocolPeer, start: Start
) -> None:
    waiting = listing(connection, start)
    reply = control_protocol.encode(messages.DeviceList(driver.receive(messages.ListDevices).call, ()))
    driver.send_bytes(reply, [0, 0])
    assert isinstance(waiting.exception(LIMIT_S), DeadObject)


def test_closing_sends_goodbye_hangs_up_and_fails_pending_calls(
    connection: Connection, driver: ProtocolPeer, start: Start
) -> None:
    waiting = listing(connection, start)
    driver.receive(messages.ListDevices)
    connection.close()
    connection.close()
    assert isinstance(waiting.exception(LIMIT_S), DeadObject)
    assert "closed" in str(waiting.exception())
    driver.receive(messages.Goodbye)
    assert driver.is_hung_up()


def test_closing_does_not_wait_for_a_call_that_cannot_be_sent(
    connection: Connection, driver: ProtocolPeer, start: Start
) -> None:
    """The driver does not read (it may be stopped), and another thread is blocked while it sends its call."""
    with suppress(MissedDeadlineTransient):
        while True:
            connection._channel.send(bytes(1000), (), NO_WAIT)
    stuck = listing(connection, start)
    until(lambda: bool(connection._pending_calls))
    closing = start(connection.close)
    assert closing.result(LIMIT_S) is None
    assert isinstance(stuck.exception(LIMIT_S), DeadObject)


def test_calls_in_a_forked_child_raise_and_the_parent_s_are_unaffected(
    connection: Connection, driver: ProtocolPeer, start: Start
) -> None:
    with connection._lock, connection._connection_state._lock:
        pid = fork()  # while other threads may hold locks
        if pid == 0:
            status = 70
            try:
                status = child_report(connection)
            finally:
                os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert_alive(connection, driver, start)


def child_report(connection: Connection) -> int:
    """Return 0 if a forked child behaves as specified."""
    if connection.is_open or connection._channel.fileno() != -1:
        return 1
    try:
        connection.exchange(messages.ListDevices(connection.next_call_id()), messages.DeviceList)
    except DeadObject as error:
        if f"process {os.getppid()}" not in str(error):
            return 2
    else:
        return 3
    connection.close()
    return 0 if watcher.thread() is None else 4


# ------------------------------------------------------------------------------------------------ deadlines


def test_a_timeout_of_none_is_no_limit() -> None:
    assert deadline_after(None) is None


def test_a_timeout_is_counted_from_now() -> None:
    before = time.monotonic_ns()
    assert before + 2_500_000_000 <= deadline_after(2.5) <= time.monotonic_ns() + 2_500_000_000


@pytest.mark.parametrize("timeout", [-1, -0.001, float("-inf"), float("nan")])
def test_an_invalid_timeout_is_rejected(timeout: float) -> None:
    with pytest.raises(InvalidArgument, match="0 or more seconds"):
        deadline_after(timeout)


@pytest.mark.parametrize("timeout", [1e10, 1e300, float("inf")])
def test_QOS_6_a_timeout_beyond_the_clock_s_range_is_cut_to_its_end(timeout: float) -> None:
    assert deadline_after(timeout) == 2**63 - 1


def test_QOS_6_the_end_of_the_clock_can_be_waited_for(
    connection: Connection, driver: ProtocolPeer, start: Start
) -> None:
    waiting = listing(connection, start, deadline_after(float("inf")))
    driver.send(messages.DeviceList(driver.receive(messages.ListDevices).call, ()))
    assert waiting.result(LIMIT_S).devices == ()


def test_the_end_of_a_connection_closes_no_file_that_another_thread_watches_no_more_at_that_moment(
    connection: Connection, driver: ProtocolPeer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watcher's thread finds the driver's hang-up, and the client closes meanwhile."""
    connection.wait_until_ready()
    remove, removed = watcher.remove_reader, Future[None]()

    def remove_while_another_thread_closes(watch: watcher.ReaderHandle) -> None:
        monkeypatch.setattr(watcher, "remove_reader", remove)
        with suppress(TimeoutError):  # it waits for this thread
            start(connection.close).result(0.1)
        try:
            remove(watch)
        except OSError as error:
            removed.set_exception(error)
        else:
            removed.set_result(None)

    monkeypatch.setattr(watcher, "remove_reader", remove_while_another_thread_closes)
    driver.close()
    removed.result(LIMIT_S)
