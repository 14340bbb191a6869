"""The order of messages: both ends accept what the tables allow, and reject everything else without any change."""

from __future__ import annotations

import sys

import pytest

from nnfmq.hal.errors import ErrorStatus, ProtocolError
from nnfmq.hal.types import MeasureTiming
from nnfmq.serialize import control_protocol, messages
from nnfmq.serialize.control_protocol import ConnectionState, PeerRole, Phase
from nnfmq.serialize.messages import Message

CLIENT, DRIVER = PeerRole.CLIENT, PeerRole.DRIVER
OK, FAILED = ErrorStatus.NONE, ErrorStatus.GENERAL_FAILURE
HELLO = messages.Hello(1, "aidl-4", "test")
HELLO_REPLY = messages.HelloReply(1, "aidl-4", "nnfmq", 1, 2, "python")
PREPARE = messages.PrepareModel(3, "reference", 0, 0, -1, b"")
EXECUTE = messages.Execute(4, 1, messages.RequestData((), (), ()), messages.ConfigData(MeasureTiming.NO, -1), -1)


@pytest.fixture
def opened() -> ConnectionState:
    """Return the state of a connection after both hellos."""
    connection_state = ConnectionState()
    connection_state.process_message(HELLO, CLIENT)
    connection_state.process_message(HELLO_REPLY, DRIVER)
    return connection_state


def test_a_connection_begins_with_a_hello_from_each_side() -> None:
    connection_state = ConnectionState()
    states = [connection_state.phase]
    connection_state.process_message(HELLO, CLIENT)
    states.append(connection_state.phase)
    connection_state.process_message(HELLO_REPLY, DRIVER)
    assert [*states, connection_state.phase] == [Phase.NEW, Phase.GREETED, Phase.OPEN]


def test_a_rejected_client_may_send_no_more_messages() -> None:
    connection_state = ConnectionState()
    connection_state.process_message(HELLO, CLIENT)
    connection_state.process_message(messages.Refused(FAILED, ""), DRIVER)
    with pytest.raises(ProtocolError, match="client may not send ListDevices while the connection is closed"):
        connection_state.process_message(messages.ListDevices(1), CLIENT)


@pytest.mark.parametrize(
    ("sender", "message"),
    [(CLIENT, messages.ListDevices(1)), (CLIENT, messages.Goodbye()), (DRIVER, HELLO_REPLY), (DRIVER, HELLO)],
)
def test_no_message_may_precede_the_hello(sender: PeerRole, message: Message) -> None:
    with pytest.raises(ProtocolError, match="while the connection is new"):
        ConnectionState().process_message(message, sender)


@pytest.mark.parametrize(("sender", "message"), [(CLIENT, HELLO), (DRIVER, HELLO_REPLY), (DRIVER, messages.Goodbye())])
def test_a_message_outside_the_table_is_rejected_and_changes_nothing(
    opened: ConnectionState, sender: PeerRole, message: Message
) -> None:
    with pytest.raises(ProtocolError):
        opened.process_message(message, sender)
    assert opened.phase is Phase.OPEN


def test_a_reply_ends_its_call(opened: ConnectionState) -> None:
    opened.process_message(messages.ListDevices(1), CLIENT)
    assert opened.pending_calls(CLIENT) == (messages.ListDevices,)
    opened.process_message(messages.DeviceList(1, ()), DRIVER)
    assert opened.pending_calls(CLIENT) == ()


def test_a_call_s_body_is_not_kept(opened: ConnectionState) -> None:
    body = bytes(1000)
    before = sys.getrefcount(body)
    opened.process_message(messages.PrepareModel(1, "reference", 0, 0, -1, body), CLIENT)
    assert opened.pending_calls(CLIENT) == (messages.PrepareModel,)
    assert sys.getrefcount(body) == before


def test_a_call_that_could_not_be_sent_is_cancelled(opened: ConnectionState) -> None:
    opened.process_message(EXECUTE, CLIENT)
    opened.process_message(messages.ListDevices(5), CLIENT)
    opened.cancel_call(EXECUTE, CLIENT)
    assert opened.pending_calls(CLIENT) == (messages.ListDevices,)
    with pytest.raises(ProtocolError, match="not pending"):
        opened.process_message(messages.Executed(4, OK, ""), DRIVER)


def test_cancelling_a_reply_or_an_unknown_call_changes_nothing(opened: ConnectionState) -> None:
    opened.process_message(EXECUTE, CLIENT)
    opened.cancel_call(messages.Memories(EXECUTE.call, OK, ""), CLIENT)  # the same number, but of a call by the driver
    opened.cancel_call(messages.ListDevices(99), CLIENT)
    assert opened.pending_calls(CLIENT) == (messages.Execute,)


def test_a_reply_to_an_unknown_call_is_rejected(opened: ConnectionState) -> None:
    with pytest.raises(ProtocolError, match="DeviceList replies to call 1, which is not pending"):
        opened.process_message(messages.DeviceList(1, ()), DRIVER)


def test_a_second_reply_is_rejected(opened: ConnectionState) -> None:
    opened.process_message(messages.ListDevices(1), CLIENT)
    opened.process_message(messages.DeviceList(1, ()), DRIVER)
    with pytest.raises(ProtocolError, match="not pending"):
        opened.process_message(messages.DeviceList(1, ()), DRIVER)


def test_a_reply_of_another_type_is_rejected_and_the_call_stays_pending(opened: ConnectionState) -> None:
    opened.process_message(EXECUTE, CLIENT)
    with pytest.raises(ProtocolError, match="DeviceList is no reply to Execute"):
        opened.process_message(messages.DeviceList(4, ()), DRIVER)
    assert opened.pending_calls(CLIENT) == (messages.Execute,)


def test_a_call_id_in_use_is_rejected(opened: ConnectionState) -> None:
    opened.process_message(messages.ListDevices(4), CLIENT)
    with pytest.raises(ProtocolError, match="Execute uses call id 4"):
        opened.process_message(EXECUTE, CLIENT)


def test_call_ids_of_both_sides_are_independent(opened: ConnectionState) -> None:
    opened.process_message(messages.ListDevices(1), CLIENT)
    opened.process_message(messages.GetMemories(1, 1, ()), DRIVER)
    assert opened.pending_calls(DRIVER) == (messages.GetMemories,)
    opened.process_message(messages.Memories(1, OK, ""), CLIENT)
    assert (len(opened.pending_calls(CLIENT)), opened.pending_calls(DRIVER)) == (1, ())


def test_replies_come_in_any_order(opened: ConnectionState) -> None:
    opened.process_message(messages.ListDevices(1), CLIENT)
    opened.process_message(EXECUTE, CLIENT)
    opened.process_message(messages.Executed(4, OK, ""), DRIVER)
    assert opened.pending_calls(CLIENT) == (messages.ListDevices,)


@pytest.mark.parametrize("reply_first", [True, False])
def test_preparing_a_model_gets_its_reply_and_its_callback_in_either_order(
    opened: ConnectionState, reply_first: bool
) -> None:
    reply, ready = messages.Reply(3, OK, ""), messages.PreparedModelReady(3, OK, "", 1)
    first, second = (reply, ready) if reply_first else (ready, reply)
    opened.process_message(PREPARE, CLIENT)
    opened.process_message(first, DRIVER)
    assert opened.pending_calls(CLIENT) == (messages.PrepareModel,)
    opened.process_message(second, DRIVER)
    assert opened.pending_calls(CLIENT) == ()


def test_PREP_3_a_second_callback_is_rejected(opened: ConnectionState) -> None:
    opened.process_message(PREPARE, CLIENT)
    opened.process_message(messages.PreparedModelReady(3, OK, "", 1), DRIVER)
    with pytest.raises(ProtocolError, match="PreparedModelReady is no reply to PrepareModel"):
        opened.process_message(messages.PreparedModelReady(3, OK, "", 1), DRIVER)


def test_PREP_1_a_failed_reply_without_its_callback_is_rejected(opened: ConnectionState) -> None:
    opened.process_message(PREPARE, CLIENT)
    with pytest.raises(ProtocolError, match="failed before its PreparedModelReady came"):
        opened.process_message(messages.Reply(3, FAILED, ""), DRIVER)


def test_PREP_1_a_failed_reply_after_its_callback_ends_the_call(opened: ConnectionState) -> None:
    opened.process_message(PREPARE, CLIENT)
    opened.process_message(messages.PreparedModelReady(3, FAILED, "", 0), DRIVER)
    opened.process_message(messages.Reply(3, FAILED, ""), DRIVER)
    assert opened.pending_calls(CLIENT) == ()


def test_progress_comes_any_number_of_times_between_the_two_replies(opened: ConnectionState) -> None:
    opened.process_message(PREPARE, CLIENT)
    opened.process_message(messages.Reply(3, OK, ""), DRIVER)
    opened.process_message(messages.PreparationProgress(3, 0, 2), DRIVER)
    opened.process_message(messages.PreparationProgress(3, 1, 2), DRIVER)
    assert opened.pending_calls(CLIENT) == (messages.PrepareModel,)
    opened.process_message(messages.PreparedModelReady(3, OK, "", 1), DRIVER)
    assert opened.pending_calls(CLIENT) == ()


@pytest.mark.parametrize("replies", [[], [messages.PreparedModelReady(3, OK, "", 1)]], ids=["before", "behind"])
def test_progress_of_a_preparation_that_has_not_begun_or_has_ended_is_rejected(
    opened: ConnectionState, replies: list[messages.Call]
) -> None:
    opened.process_message(PREPARE, CLIENT)
    for reply in replies:
        opened.process_message(reply, DRIVER)
    with pytest.raises(ProtocolError, match="PreparationProgress is no reply to PrepareModel"):
        opened.process_message(messages.PreparationProgress(3, 1, 2), DRIVER)


def test_progress_of_another_call_is_rejected(opened: ConnectionState) -> None:
    opened.process_message(EXECUTE, CLIENT)
    with pytest.raises(ProtocolError, match="PreparationProgress is no reply to Execute"):
        opened.process_message(messages.PreparationProgress(EXECUTE.call, 1, 2), DRIVER)


def test_a_one_way_message_leaves_nothing_pending(opened: ConnectionState) -> None:
    opened.process_message(messages.FreeMemory(1, 1), CLIENT)
    assert opened.pending_calls(CLIENT) == ()


def test_after_goodbye_the_client_sends_nothing_and_replies_still_arrive(opened: ConnectionState) -> None:
    opened.process_message(EXECUTE, CLIENT)
    opened.process_message(messages.Goodbye(), CLIENT)
    with pytest.raises(ProtocolError, match="closed"):
        opened.process_message(messages.ListDevices(1), CLIENT)
    opened.process_message(messages.Executed(4, OK, ""), DRIVER)
    assert opened.pending_calls(CLIENT) == ()
    assert opened.phase is Phase.CLOSED


def test_pending_calls_are_returned_oldest_first(opened: ConnectionState) -> None:
    opened.process_message(PREPARE, CLIENT)
    opened.process_message(EXECUTE, CLIENT)
    opened.process_message(messages.PreparedModelReady(3, OK, "", 1), DRIVER)
    assert opened.pending_calls(CLIENT) == (messages.PrepareModel, messages.Execute)


def test_call_ids_are_never_reused(opened: ConnectionState) -> None:
    numbers = [opened.next_call_id(CLIENT) for _ in range(3)]
    assert numbers == [1, 2, 3]
    assert opened.next_call_id(DRIVER) == 1


def test_every_call_in_the_table_has_replies_that_its_peer_may_send() -> None:
    wrong = [
        (kind, reply)
        for role in PeerRole
        for kind in control_protocol.message_types_of(role)
        for reply in control_protocol.REPLIES.get(kind, ())  # type: ignore[call-overload]
        if reply not in control_protocol.message_types_of(role.peer)
    ]
    assert wrong == []


def test_every_message_with_a_call_id_is_a_call_a_reply_or_a_notification() -> None:
    numbered = {k for role in PeerRole for k in control_protocol.message_types_of(role) if issubclass(k, messages.Call)}
    replies = {reply for replies in control_protocol.REPLIES.values() for reply in replies}
    assert numbered == control_protocol.REPLIES.keys() | replies | control_protocol.NOTIFICATIONS.keys()
    assert control_protocol.REPLIES.keys() & replies == set()
    assert control_protocol.NOTIFICATIONS.keys() & (control_protocol.REPLIES.keys() | replies) == set()
    assert set(control_protocol.NOTIFICATIONS.values()) <= replies
