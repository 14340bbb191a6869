"""The order of messages: what the tables allow passes at both ends, everything else is refused and changes nothing."""

from __future__ import annotations

import sys

import pytest

from nnfmq.hal.errors import ErrorStatus, ProtocolError
from nnfmq.hal.types import MeasureTiming
from nnfmq.serialize import control_protocol, messages
from nnfmq.serialize.connection_state import Conversation
from nnfmq.serialize.control_protocol import Role, State
from nnfmq.serialize.messages import Message

CLIENT, DRIVER = Role.CLIENT, Role.DRIVER
OK, FAILED = ErrorStatus.NONE, ErrorStatus.GENERAL_FAILURE
HELLO = messages.Hello(1, "aidl-4", "test")
HELLO_REPLY = messages.HelloReply(1, "aidl-4", "nnfmq", 1, "twin")
PREPARE = messages.PrepareModel(3, "reference", 0, 0, -1, b"")
EXECUTE = messages.Execute(4, 1, messages.RequestData((), (), ()), messages.ConfigData(MeasureTiming.NO, -1), -1)


@pytest.fixture
def opened() -> Conversation:
    """Return a conversation after both hellos."""
    conversation = Conversation()
    conversation.note(HELLO, CLIENT)
    conversation.note(HELLO_REPLY, DRIVER)
    return conversation


def test_a_conversation_begins_with_a_hello_from_each_side() -> None:
    conversation = Conversation()
    states = [conversation.state]
    conversation.note(HELLO, CLIENT)
    states.append(conversation.state)
    conversation.note(HELLO_REPLY, DRIVER)
    assert [*states, conversation.state] == [State.NEW, State.GREETED, State.OPEN]


def test_a_refused_client_has_nothing_more_to_say() -> None:
    conversation = Conversation()
    conversation.note(HELLO, CLIENT)
    conversation.note(messages.Refused(FAILED, ""), DRIVER)
    with pytest.raises(ProtocolError, match="client may not send ListDevices while the connection is closed"):
        conversation.note(messages.ListDevices(1), CLIENT)


@pytest.mark.parametrize(
    ("sender", "message"),
    [(CLIENT, messages.ListDevices(1)), (CLIENT, messages.Goodbye()), (DRIVER, HELLO_REPLY), (DRIVER, HELLO)],
)
def test_nothing_goes_before_the_hello(sender: Role, message: Message) -> None:
    with pytest.raises(ProtocolError, match="while the connection is new"):
        Conversation().note(message, sender)


@pytest.mark.parametrize(("sender", "message"), [(CLIENT, HELLO), (DRIVER, HELLO_REPLY), (DRIVER, messages.Goodbye())])
def test_what_is_not_in_the_table_is_refused_and_changes_nothing(
    opened: Conversation, sender: Role, message: Message
) -> None:
    with pytest.raises(ProtocolError):
        opened.note(message, sender)
    assert opened.state is State.OPEN


def test_an_answer_ends_its_call(opened: Conversation) -> None:
    opened.note(messages.ListDevices(1), CLIENT)
    assert opened.pending(CLIENT) == (messages.ListDevices,)
    opened.note(messages.DeviceList(1, ()), DRIVER)
    assert opened.pending(CLIENT) == ()


def test_a_call_s_body_is_not_kept(opened: Conversation) -> None:
    body = bytes(1000)
    before = sys.getrefcount(body)
    opened.note(messages.PrepareModel(1, "reference", 0, 0, -1, body), CLIENT)
    assert opened.pending(CLIENT) == (messages.PrepareModel,)
    assert sys.getrefcount(body) == before


def test_a_call_that_could_not_be_sent_is_forgotten(opened: Conversation) -> None:
    opened.note(EXECUTE, CLIENT)
    opened.note(messages.ListDevices(5), CLIENT)
    opened.forget(EXECUTE, CLIENT)
    assert opened.pending(CLIENT) == (messages.ListDevices,)
    with pytest.raises(ProtocolError, match="not open"):
        opened.note(messages.Executed(4, OK, ""), DRIVER)


def test_forgetting_an_answer_or_what_was_never_noted_changes_nothing(opened: Conversation) -> None:
    opened.note(EXECUTE, CLIENT)
    opened.forget(messages.Memories(EXECUTE.call, OK, ""), CLIENT)  # the same number, of a call by the driver
    opened.forget(messages.ListDevices(99), CLIENT)
    assert opened.pending(CLIENT) == (messages.Execute,)


def test_an_answer_to_an_unknown_call_is_refused(opened: Conversation) -> None:
    with pytest.raises(ProtocolError, match="DeviceList answers call 1, which is not open"):
        opened.note(messages.DeviceList(1, ()), DRIVER)


def test_a_second_answer_is_refused(opened: Conversation) -> None:
    opened.note(messages.ListDevices(1), CLIENT)
    opened.note(messages.DeviceList(1, ()), DRIVER)
    with pytest.raises(ProtocolError, match="not open"):
        opened.note(messages.DeviceList(1, ()), DRIVER)


def test_an_answer_of_another_type_is_refused_and_the_call_stays_open(opened: Conversation) -> None:
    opened.note(EXECUTE, CLIENT)
    with pytest.raises(ProtocolError, match="DeviceList does not answer Execute"):
        opened.note(messages.DeviceList(4, ()), DRIVER)
    assert opened.pending(CLIENT) == (messages.Execute,)


def test_a_call_number_in_use_is_refused(opened: Conversation) -> None:
    opened.note(messages.ListDevices(4), CLIENT)
    with pytest.raises(ProtocolError, match="Execute uses call number 4"):
        opened.note(EXECUTE, CLIENT)


def test_calls_of_both_sides_do_not_share_numbers(opened: Conversation) -> None:
    opened.note(messages.ListDevices(1), CLIENT)
    opened.note(messages.GetMemories(1, 1, ()), DRIVER)
    assert opened.pending(DRIVER) == (messages.GetMemories,)
    opened.note(messages.Memories(1, OK, ""), CLIENT)
    assert (len(opened.pending(CLIENT)), opened.pending(DRIVER)) == (1, ())


def test_calls_are_answered_in_any_order(opened: Conversation) -> None:
    opened.note(messages.ListDevices(1), CLIENT)
    opened.note(EXECUTE, CLIENT)
    opened.note(messages.Executed(4, OK, ""), DRIVER)
    assert opened.pending(CLIENT) == (messages.ListDevices,)


@pytest.mark.parametrize("reply_first", [True, False])
def test_preparing_a_model_gets_its_reply_and_its_callback_in_either_order(
    opened: Conversation, reply_first: bool
) -> None:
    reply, ready = messages.Reply(3, OK, ""), messages.PreparedModelReady(3, OK, "", 1)
    first, second = (reply, ready) if reply_first else (ready, reply)
    opened.note(PREPARE, CLIENT)
    opened.note(first, DRIVER)
    assert opened.pending(CLIENT) == (messages.PrepareModel,)
    opened.note(second, DRIVER)
    assert opened.pending(CLIENT) == ()


def test_PREP_3_a_second_callback_is_refused(opened: Conversation) -> None:
    opened.note(PREPARE, CLIENT)
    opened.note(messages.PreparedModelReady(3, OK, "", 1), DRIVER)
    with pytest.raises(ProtocolError, match="PreparedModelReady does not answer PrepareModel"):
        opened.note(messages.PreparedModelReady(3, OK, "", 1), DRIVER)


def test_PREP_1_a_failed_reply_without_its_callback_is_refused(opened: Conversation) -> None:
    opened.note(PREPARE, CLIENT)
    with pytest.raises(ProtocolError, match="failed before its PreparedModelReady came"):
        opened.note(messages.Reply(3, FAILED, ""), DRIVER)


def test_PREP_1_a_failed_reply_after_its_callback_ends_the_call(opened: Conversation) -> None:
    opened.note(PREPARE, CLIENT)
    opened.note(messages.PreparedModelReady(3, FAILED, "", 0), DRIVER)
    opened.note(messages.Reply(3, FAILED, ""), DRIVER)
    assert opened.pending(CLIENT) == ()


def test_progress_comes_any_number_of_times_between_the_two_answers(opened: Conversation) -> None:
    opened.note(PREPARE, CLIENT)
    opened.note(messages.Reply(3, OK, ""), DRIVER)
    opened.note(messages.PreparationProgress(3, 0, 2), DRIVER)
    opened.note(messages.PreparationProgress(3, 1, 2), DRIVER)
    assert opened.pending(CLIENT) == (messages.PrepareModel,)
    opened.note(messages.PreparedModelReady(3, OK, "", 1), DRIVER)
    assert opened.pending(CLIENT) == ()


@pytest.mark.parametrize("answers", [[], [messages.PreparedModelReady(3, OK, "", 1)]], ids=["before", "behind"])
def test_progress_of_a_preparation_that_has_not_begun_or_is_over_is_refused(
    opened: Conversation, answers: list[messages.Call]
) -> None:
    opened.note(PREPARE, CLIENT)
    for answer in answers:
        opened.note(answer, DRIVER)
    with pytest.raises(ProtocolError, match="PreparationProgress does not answer PrepareModel"):
        opened.note(messages.PreparationProgress(3, 1, 2), DRIVER)


def test_progress_of_another_call_is_refused(opened: Conversation) -> None:
    opened.note(EXECUTE, CLIENT)
    with pytest.raises(ProtocolError, match="PreparationProgress does not answer Execute"):
        opened.note(messages.PreparationProgress(EXECUTE.call, 1, 2), DRIVER)


def test_a_one_way_message_leaves_nothing_pending(opened: Conversation) -> None:
    opened.note(messages.FreeMemory(1, 1), CLIENT)
    assert opened.pending(CLIENT) == ()


def test_after_goodbye_the_client_is_silent_and_answers_under_way_still_come(opened: Conversation) -> None:
    opened.note(EXECUTE, CLIENT)
    opened.note(messages.Goodbye(), CLIENT)
    with pytest.raises(ProtocolError, match="closed"):
        opened.note(messages.ListDevices(1), CLIENT)
    opened.note(messages.Executed(4, OK, ""), DRIVER)
    assert opened.pending(CLIENT) == ()
    assert opened.state is State.CLOSED


def test_pending_calls_are_told_oldest_first(opened: Conversation) -> None:
    opened.note(PREPARE, CLIENT)
    opened.note(EXECUTE, CLIENT)
    opened.note(messages.PreparedModelReady(3, OK, "", 1), DRIVER)
    assert opened.pending(CLIENT) == (messages.PrepareModel, messages.Execute)


def test_call_numbers_are_never_given_twice(opened: Conversation) -> None:
    numbers = [opened.new_call(CLIENT) for _ in range(3)]
    assert numbers == [1, 2, 3]
    assert opened.new_call(DRIVER) == 1


def test_every_call_in_the_table_has_answers_that_its_peer_may_send() -> None:
    wrong = [
        (kind, answer)
        for role in Role
        for kind in control_protocol.messages_of(role)
        for answer in control_protocol.REPLIES.get(kind, ())  # type: ignore[call-overload]
        if answer not in control_protocol.messages_of(role.peer)
    ]
    assert wrong == []


def test_every_message_with_a_call_number_is_a_call_an_answer_or_a_notice() -> None:
    numbered = {k for role in Role for k in control_protocol.messages_of(role) if issubclass(k, messages.Call)}
    answers = {answer for answers in control_protocol.REPLIES.values() for answer in answers}
    assert numbered == control_protocol.REPLIES.keys() | answers | control_protocol.NOTICES.keys()
    assert control_protocol.REPLIES.keys() & answers == set()
    assert control_protocol.NOTICES.keys() & (control_protocol.REPLIES.keys() | answers) == set()
    assert set(control_protocol.NOTICES.values()) <= answers
