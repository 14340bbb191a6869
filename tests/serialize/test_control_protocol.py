"""Control messages: each is read from the map that it is on the wire, and nothing else is."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnfmq.hal.client_class import ClientClass
from nnfmq.hal.errors import ErrorStatus, InvalidArgument, ProtocolError
from nnfmq.hal.types import (
    BufferToken,
    DataLocation,
    DeviceStatus,
    DeviceType,
    ExecutionConfig,
    ExtensionNameAndPrefix,
    MeasureTiming,
    OperandType,
    OutputShape,
    Protection,
    Request,
    RequestArgument,
    TokenValuePair,
)
from nnfmq.observe.phase_table import tag_of
from nnfmq.serialize import control_protocol, messages
from nnfmq.serialize.control_protocol import REPLIES, ConnectionState, PeerRole, decode, encode, fd_count
from nnfmq.serialize.messages import Message

CLIENT, DRIVER = PeerRole.CLIENT, PeerRole.DRIVER
QUEUE = messages.MQDescriptorData(
    (
        messages.GrantorData(0, 0, 8),
        messages.GrantorData(0, 8, 8),
        messages.GrantorData(0, 16, 24576),
        messages.GrantorData(0, 24592, 4),
    ),
    24,
    1,
)
QUEUE_WIRE = [[[0, 0, 8], [0, 8, 8], [0, 16, 24576], [0, 24592, 4]], 24, 1]
FAILED = {"call": 7, "status": 4, "message": "operand 3: no"}
INVALID = ErrorStatus.INVALID_ARGUMENT
EXTENSION = messages.ExtensionData("com.example.one", (messages.OperandTypeData(0, False, 8, "int64"),))
SPEED = messages.PerformanceData(1.0, 2.0)
CAPABILITIES = messages.CapabilitiesData(
    (messages.OperandPerformanceData(OperandType.TENSOR_FLOAT32, messages.PerformanceData(0.5, 1.0)),),
    *[SPEED] * 4,
)
MEMORY, MEMORY_WIRE = messages.MemoryData(16, 4096, 1), ["memory", 16, 4096, 1]
INPUT = messages.ArgumentData(False, messages.LocationData(0, 64, 16, 0), (2, 2))
REQUEST = messages.RequestData((INPUT,), (), (messages.TokenData(-7), MEMORY))
REQUEST_WIRE = [[[False, [0, 64, 16, 0], [2, 2]]], [], [["buffer", -7], MEMORY_WIRE]]
CONFIG = messages.ConfigData(MeasureTiming.NO, -1)

# Who sends it, its fields on the wire, what it is read as, and how many descriptors come with it.
SAMPLES: list[tuple[PeerRole, dict[str, Any], Message, int]] = [
    (
        CLIENT,
        {"protocol": 1, "interface": "aidl-4", "client_name": "run.py", "client_class": None, "is_monitor": False},
        messages.Hello(1, "aidl-4", "run.py"),
        0,
    ),
    (
        CLIENT,
        {"call": 3, "worker_pid": 4711, "client_class": 1},
        messages.SetClientClass(3, 4711, ClientClass.BATCH),
        0,
    ),
    (
        DRIVER,
        {
            "protocol": 1, "interface": "aidl-4", "driver_name": "nnfmq", "driver_pid": 12, "worker_pid": 13,
            "core": "python", "pages": 0,
        },
        messages.HelloReply(1, "aidl-4", "nnfmq", 12, 13, "python", 0),
        0,
    ),
    (
        DRIVER,
        {"status": 1, "message": "protocol 9"},
        messages.Refused(ErrorStatus.DEVICE_UNAVAILABLE, "protocol 9"),
        0,
    ),
    (CLIENT, {"call": 1}, messages.ListDevices(1), 0),
    (
        DRIVER,
        {"call": 1, "devices": [["reference", 2, "1.0", 8, 0, [["com.example.one", [[0, False, 8, "int64"]]]], 1, 32]]},
        messages.DeviceList(
            1,
            (messages.DeviceInfo("reference", DeviceType.CPU, "1.0", 8, DeviceStatus.AVAILABLE, (EXTENSION,), 1, 32),),
        ),
        0,
    ),
    (
        CLIENT,
        {"call": 2, "device": "reference", "model": b"\x00\xff", "pools": [MEMORY_WIRE] * 3, "consumers": [[1, 0], []]},
        messages.GetSupportedOperations(2, "reference", b"\x00\xff", (MEMORY,) * 3, ((1, 0), ())),
        3,
    ),
    (
        DRIVER,
        {"call": 2, "supported": [True, False], "status": 0, "message": ""},
        messages.SupportedOperations(2, (True, False)),
        0,
    ),
    (
        CLIENT,
        {"call": 3, "device": "litert", "deadline_ns": -1, "file": b"{}", "pools": [MEMORY_WIRE] * 2},
        messages.DescribeFile(3, "litert", -1, b"{}", (MEMORY,) * 2),
        2,
    ),
    (
        DRIVER,
        {"call": 3, "status": 0, "message": "", "description": b"{}", "replaced": [1]},
        messages.FileDescription(3, ErrorStatus.NONE, "", b"{}", (1,)),
        1,
    ),
    (
        CLIENT,
        {
            "call": 3, "device": "reference", "preference": 99, "priority": -1, "deadline_ns": -1, "model": b"m",
            "pools": [MEMORY_WIRE], "consumers": [[1, 2]], "caches": [b"tk", 2, 1], "hints": [[0x10001, b"h"]],
            "extensions": [["com.example.one", 1]], "tells_progress": True, "name": "a.tflite",
            "version": 3,
        },
        messages.PrepareModel(
            3, "reference", 99, -1, -1, b"m", (MEMORY,), ((1, 2),), messages.CachesData(b"tk", 2, 1),
            (messages.HintData(0x10001, b"h"),), (messages.PrefixData("com.example.one", 1),), True, "a.tflite", 3,
        ),
        4,
    ),
    (
        CLIENT,
        {"call": 3, "device": "reference", "deadline_ns": -1, "caches": [b"tk", 2, 1], "name": "a.tflite"},
        messages.PrepareModelFromCache(3, "reference", -1, messages.CachesData(b"tk", 2, 1), "a.tflite"),
        3,
    ),
    (DRIVER, FAILED, messages.Reply(7, INVALID, "operand 3: no"), 0),
    (
        DRIVER, {**FAILED, "model_id": 9, "program": 3, "compiled": 31, "calls_row": 15},
        messages.PreparedModelReady(7, INVALID, "operand 3: no", 9, 3, 31, 15), 0,
    ),
    (
        DRIVER, {"call": 3, "done": 5, "total": 22, "is_kept": True},
        messages.PreparationProgress(3, 5, 22, True), 0,
    ),
    (CLIENT, {"call": 4, "model_id": 5}, messages.ReleaseModel(4, 5), 0),
    (
        CLIENT,
        {"call": 5, "model_id": 6, "request": QUEUE_WIRE, "result": QUEUE_WIRE},
        messages.ConfigureBurst(5, 6, QUEUE, QUEUE),
        2,
    ),
    (CLIENT, {"call": 3, "device": "reference"}, messages.GetCapabilities(3, "reference"), 0),
    (
        DRIVER,
        {"call": 7, "status": 0, "message": "", "capabilities": [[[3, [0.5, 1.0]]], *([[1.0, 2.0]] * 4)]},
        messages.DeviceCapabilities(7, ErrorStatus.NONE, "", CAPABILITIES),
        0,
    ),
    (
        CLIENT,
        {"call": 3, "device": "reference", "status": 1, "is_kept": True},
        messages.SetDeviceStatus(3, "reference", DeviceStatus.BUSY, True),
        0,
    ),
    (CLIENT, {"call": 3}, messages.StartTrace(3), 1),
    (CLIENT, {"call": 3}, messages.TraceDriver(3), 0),
    (
        DRIVER,
        {"call": 3, "status": 0, "message": "", "fd_count": 1},
        messages.DriverTraced(3, ErrorStatus.NONE, "", 1),
        1,
    ),
    (CLIENT, {"call": 3}, messages.GetStatistics(3), 0),
    (
        DRIVER,
        {"call": 3, "status": 0, "message": "", "memories": [MEMORY_WIRE]},
        messages.StatisticsMemory(3, ErrorStatus.NONE, "", (MEMORY,)),
        1,
    ),
    (DRIVER, {**FAILED, "burst_id": 8}, messages.BurstConfigured(7, INVALID, "operand 3: no", 8), 0),
    (DRIVER, {"call": 1, "burst_id": 8, "slots": [0, -4]}, messages.GetMemories(1, 8, (0, -4)), 0),
    (
        CLIENT,
        {"call": 1, "status": 0, "message": "", "memories": [MEMORY_WIRE, ["memory", 2**40, 0, 3]]},
        messages.Memories(1, ErrorStatus.NONE, "", (MEMORY, messages.MemoryData(2**40))),
        2,
    ),
    (CLIENT, {"burst_id": 8, "slot": -1}, messages.FreeMemory(8, -1), 0),
    (CLIENT, {"call": 6, "burst_id": 8}, messages.CloseBurst(6, 8), 0),
    (CLIENT, {"call": 6, "burst_id": 8}, messages.GetBurstError(6, 8), 0),
    (DRIVER, {**FAILED, "sequence": 9}, messages.BurstError(7, INVALID, "operand 3: no", 9), 0),
    (
        CLIENT,
        {
            "call": 9, "model_id": 5, "request": [[[False, [0, 64, 16, 0], [2, 2]]], [], [["buffer", -7], MEMORY_WIRE]],
            "config": [1, -1, [[65537, b"h"]], [["a.b", 1]]], "deadline_ns": -2,
        },
        messages.Execute(
            9,
            5,
            messages.RequestData((INPUT,), (), (messages.TokenData(-7), MEMORY)),
            messages.ConfigData(
                MeasureTiming.YES, -1, (messages.HintData(65537, b"h"),), (messages.PrefixData("a.b", 1),)
            ),
            -2,
        ),
        1,
    ),
    (CLIENT, {"call": 4, "model_id": 5}, messages.ConfigureAidlBurst(4, 5), 0),
    (
        CLIENT,
        {
            "call": 9, "burst_id": 8, "request": [[[False, [0, 64, 16, 0], [2, 2]]], [], [MEMORY_WIRE]],
            "tokens": [-2],
            "config": [0, -1, [], []], "deadline_ns": -1,
        },
        messages.ExecuteAidlBurst(
            9, 8, messages.RequestData((INPUT,), (), (MEMORY,)), (-2,), messages.ConfigData(MeasureTiming.NO, -1), -1
        ),
        1,
    ),
    (CLIENT, {"call": 6, "burst_id": 8, "token": -2}, messages.ReleaseMemoryResource(6, 8, -2), 0),
    (
        DRIVER,
        {
            "call": 7, "status": 0, "message": "", "shapes": [[[2, 2], True]], "time_on_device_ns": 5,
            "time_in_driver_ns": -1, "driver_ns": 9,
        },
        messages.Executed(7, ErrorStatus.NONE, "", (messages.ShapeData((2, 2), True),), 5, -1, 9),
        0,
    ),
    (
        CLIENT,
        {"call": 9, "model_id": 5, "request": REQUEST_WIRE, "config": [0, -1, [], []], "deadline_ns": -2},
        messages.ExecuteAsynchronously(9, 5, REQUEST, CONFIG, -2),
        1,
    ),
    (
        DRIVER,
        {**FAILED, "shapes": [[[2], False]], "time_on_device_ns": -1, "time_in_driver_ns": 6, "driver_ns": -1},
        messages.ExecutionFinished(7, INVALID, "operand 3: no", (messages.ShapeData((2,), False),), -1, 6),
        0,
    ),
    (
        CLIENT,
        {
            "call": 9, "model_id": 5, "request": REQUEST_WIRE, "config": [0, -1, [], []], "deadline_ns": -2,
            "duration_ns": 5, "fence_count": 2,
        },
        messages.ExecuteFenced(9, 5, REQUEST, CONFIG, -2, 5, 2),
        3,
    ),
    (
        DRIVER,
        {**FAILED, "callback_id": 8, "fence_count": 1},
        messages.FencedLaunched(7, INVALID, "operand 3: no", 8, 1),
        1,
    ),
    (CLIENT, {"call": 6, "callback_id": 8}, messages.GetExecutionInfo(6, 8), 0),
    (
        DRIVER,
        {
            **FAILED, "launched_on_device_ns": 1, "launched_in_driver_ns": 4, "fenced_on_device_ns": -1,
            "fenced_in_driver_ns": 3,
        },
        messages.FencedExecutionInfo(7, INVALID, "operand 3: no", 1, 4, -1, 3),
        0,
    ),
    (CLIENT, {"call": 6, "callback_id": 8}, messages.ReleaseCallback(6, 8), 0),
    (
        CLIENT,
        {"call": 9, "model_id": 5, "request": REQUEST_WIRE, "config": [0, -1, [], []]},
        messages.CreateExecution(9, 5, REQUEST, CONFIG),
        1,
    ),
    (DRIVER, {**FAILED, "execution_id": 8}, messages.ExecutionCreated(7, INVALID, "operand 3: no", 8), 0),
    (CLIENT, {"call": 9, "execution_id": 5, "deadline_ns": -2}, messages.RunExecution(9, 5, -2), 0),
    (
        CLIENT,
        {"call": 9, "execution_id": 5, "deadline_ns": -2, "duration_ns": 5, "fence_count": 2},
        messages.RunExecutionFenced(9, 5, -2, 5, 2),
        2,
    ),
    (CLIENT, {"call": 6, "execution_id": 8}, messages.ReleaseExecution(6, 8), 0),
    (
        CLIENT,
        {
            "call": 10, "device": "reference", "dimensions": [0, 2], "model_ids": [0, 5],
            "inputs": [[1, 0, 0.5]], "outputs": [],
        },
        messages.Allocate(10, "reference", (0, 2), (0, 5), (messages.RoleData(1, 0, 0.5),), ()),
        0,
    ),
    (DRIVER, {**FAILED, "buffer_id": 9, "token": 3}, messages.Allocated(7, INVALID, "operand 3: no", 9, 3), 0),
    (
        CLIENT,
        {"call": 11, "buffer_id": 9, "memory": MEMORY_WIRE, "dimensions": [2, 2]},
        messages.CopyFrom(11, 9, MEMORY, (2, 2)),
        1,
    ),
    (CLIENT, {"call": 11, "buffer_id": 9, "memory": MEMORY_WIRE}, messages.CopyTo(11, 9, MEMORY), 1),
    (CLIENT, {"call": 12, "buffer_id": 9}, messages.ReleaseBuffer(12, 9), 0),
    (DRIVER, {"message": "ends", "is_replaced": True}, messages.GoAway("ends", is_replaced=True), 0),
    (CLIENT, {}, messages.Leave(), 0),
    (CLIENT, {}, messages.Goodbye(), 0),
]  # fmt: skip
GREETINGS = [sample for sample in SAMPLES if isinstance(sample[2], messages.Greeting)]
OTHERS = [sample for sample in SAMPLES if not isinstance(sample[2], messages.Greeting)]
FIELDS = [(*sample, field) for sample in SAMPLES for field in sample[1]]
Case = tuple[PeerRole, dict[str, Any], Message, int]


def name_of(value: object) -> str | None:
    return type(value).__name__ if isinstance(value, Message) else value if isinstance(value, str) else ""


def wire(message: Message, fields: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode({"type": type(message).__name__, **fields})


every_message = pytest.mark.parametrize(("sender", "fields", "message", "fds"), SAMPLES, ids=name_of)
every_field = pytest.mark.parametrize(("sender", "fields", "message", "fds", "field"), FIELDS, ids=name_of)


def test_every_message_has_a_sample() -> None:
    sampled = {(sender, type(message)) for sender, _, message, _ in SAMPLES}
    assert sampled == {(role, kind) for role in PeerRole for kind in control_protocol.message_types_of(role)}


@every_message
def test_a_message_is_read_from_its_map(sender: PeerRole, fields: dict[str, Any], message: Message, fds: int) -> None:
    assert decode(wire(message, fields), sender=sender, fds=fds) == message


@every_message
def test_a_message_is_written_as_its_map(sender: PeerRole, fields: dict[str, Any], message: Message, fds: int) -> None:
    assert msgspec.msgpack.decode(encode(message)) == {"type": type(message).__name__, **fields}


@every_message
def test_a_message_declares_its_number_of_fds(
    sender: PeerRole, fields: dict[str, Any], message: Message, fds: int
) -> None:
    assert fd_count(message) == fds


@every_message
def test_a_message_with_one_descriptor_more_is_rejected(
    sender: PeerRole, fields: dict[str, Any], message: Message, fds: int
) -> None:
    with pytest.raises(ProtocolError, match=f"came with {fds + 1} file descriptors instead of {fds}"):
        decode(wire(message, fields), sender=sender, fds=fds + 1)


@every_message
def test_a_message_of_the_other_role_is_rejected(
    sender: PeerRole, fields: dict[str, Any], message: Message, fds: int
) -> None:
    with pytest.raises(ProtocolError, match=f"{sender.peer.value} may not send this '{type(message).__name__}'"):
        decode(wire(message, fields), sender=sender.peer, fds=fds)


@every_message
def test_a_message_truncated_at_any_byte_is_rejected(
    sender: PeerRole, fields: dict[str, Any], message: Message, fds: int
) -> None:
    data = wire(message, fields)
    assert [end for end in range(len(data)) if not is_rejected(data[:end], sender, fds)] == []


@every_message
def test_a_message_with_a_trailing_byte_is_rejected(
    sender: PeerRole, fields: dict[str, Any], message: Message, fds: int
) -> None:
    assert is_rejected(wire(message, fields) + b"\xc0", sender, fds)


@pytest.mark.parametrize(("sender", "fields", "message", "fds"), OTHERS, ids=name_of)
def test_a_message_with_an_unknown_field_is_rejected(
    sender: PeerRole, fields: dict[str, Any], message: Message, fds: int
) -> None:
    assert is_rejected(wire(message, {**fields, "extra": 1}), sender, fds)


@pytest.mark.parametrize(("sender", "fields", "message", "fds"), GREETINGS, ids=name_of)
def test_a_hello_of_a_later_protocol_is_decoded(
    sender: PeerRole, fields: dict[str, Any], message: Message, fds: int
) -> None:
    assert decode(wire(message, {**fields, "extra": {"of": "later"}}), sender=sender) == message


@every_field
def test_a_field_of_the_wrong_type_is_rejected(
    sender: PeerRole, fields: dict[str, Any], message: Message, fds: int, field: str
) -> None:
    assert is_rejected(wire(message, {**fields, field: {"a": 1}}), sender, fds)


MAY_BE_ABSENT = {
    ("GetSupportedOperations", "consumers"),
    ("PrepareModel", "consumers"),
    ("DeviceCapabilities", "capabilities"),
    ("Hello", "client_class"),
    ("Hello", "is_monitor"),
    ("FileDescription", "description"),
    ("PrepareModel", "hints"),
    ("PrepareModel", "extensions"),
    ("PrepareModel", "tells_progress"),
    ("PreparationProgress", "is_kept"),
    ("PrepareModel", "name"),
    ("PrepareModel", "version"),
    ("PrepareModelFromCache", "name"),
    ("PreparedModelReady", "program"),
    ("PreparedModelReady", "compiled"),
    ("PreparedModelReady", "calls_row"),
    ("GoAway", "is_replaced"),
    ("HelloReply", "pages"),
    ("SupportedOperations", "status"),
    ("SupportedOperations", "message"),
    ("Executed", "shapes"),
    ("Executed", "time_on_device_ns"),
    ("Executed", "time_in_driver_ns"),
    ("Executed", "driver_ns"),
    ("ExecutionFinished", "shapes"),
    ("ExecutionFinished", "time_on_device_ns"),
    ("ExecutionFinished", "time_in_driver_ns"),
    ("ExecutionFinished", "driver_ns"),
    ("FencedExecutionInfo", "launched_on_device_ns"),
    ("FencedExecutionInfo", "launched_in_driver_ns"),
    ("FencedExecutionInfo", "fenced_on_device_ns"),
    ("FencedExecutionInfo", "fenced_in_driver_ns"),
}


@every_field
def test_only_optional_fields_may_be_absent(
    sender: PeerRole, fields: dict[str, Any], message: Message, fds: int, field: str
) -> None:
    without = {name: value for name, value in fields.items() if name != field}
    may_be_absent = (type(message).__name__, field) in MAY_BE_ABSENT
    assert is_rejected(wire(message, without), sender, fds) != may_be_absent


def is_rejected(data: bytes, sender: PeerRole, fds: int) -> bool:
    try:
        decode(data, sender=sender, fds=fds)
    except ProtocolError:
        return True
    return False


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc0",
        b"\x80",
        msgspec.msgpack.encode({"type": "Execute2"}),
        msgspec.msgpack.encode({"type": 7}),
        msgspec.msgpack.encode(["Goodbye"]),
        b"\x81\xa4type\xa2\xff\xff",  # not UTF-8
        b"\x82\xa4type\xa7Goodbye\xa1x" + b"\x91" * 100_000,  # deeper than any recursion
        b"\xdf\xff\xff\xff\xff",  # 2^32-1 entries announced
    ],
)
def test_bytes_that_are_not_a_message_are_rejected(data: bytes) -> None:
    assert is_rejected(data, CLIENT, 0)


@given(st.binary(max_size=200), st.sampled_from(PeerRole))
def test_random_bytes_never_raise_anything_but_protocol_error(data: bytes, sender: PeerRole) -> None:
    assert is_rejected(data, sender, 0)


@given(st.sampled_from(SAMPLES), st.data())
def test_a_changed_byte_never_raises_anything_but_protocol_error(sample: Case, data: st.DataObject) -> None:
    sender, fields, message, fds = sample
    changed = bytearray(wire(message, fields))
    changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    assert is_rejected(changed, sender, fds) in (True, False)


def test_the_error_contains_the_received_value() -> None:
    with pytest.raises(ProtocolError, match=r"client may not send this 'Oops' message of 11 bytes"):
        decode(msgspec.msgpack.encode({"type": "Oops"}), sender=CLIENT)
    with pytest.raises(ProtocolError, match=r"these 3 bytes \(01 02 03 \.\.\.\)"):
        decode(b"\x01\x02\x03", sender=CLIENT)


BEYOND_LIMITS: list[tuple[PeerRole, str, dict[str, Any]]] = [
    (CLIENT, "ListDevices", {"call": -1}),
    (CLIENT, "ListDevices", {"call": 2**63}),
    (CLIENT, "Hello", {"protocol": 1, "interface": "i" * 257, "client_name": ""}),
    (CLIENT, "Hello", {"protocol": 1, "interface": "AIDL v4", "client_name": "", "client_class": 4}),
    (CLIENT, "SetClientClass", {"call": 1, "worker_pid": 0, "client_class": 0}),
    (CLIENT, "SetClientClass", {"call": 1, "worker_pid": 2**32, "client_class": 1}),
    (CLIENT, "GetSupportedOperations", {"call": 1, "device": "d" * 257, "model": b""}),
    (CLIENT, "FreeMemory", {"burst_id": 1, "slot": 2**31}),
    (CLIENT, "Memories", {"call": 1, "status": 9, "message": "", "sizes": []}),
    (CLIENT, "Memories", {"call": 1, "status": 0, "message": "t" * 4097, "sizes": []}),
    (DRIVER, "GetMemories", {"call": 1, "burst_id": 1, "slots": [0] * 251}),
    (DRIVER, "DeviceList", {"call": 1, "devices": [["reference", 2, "1.0", 8, 0]] * 257}),
    (DRIVER, "Executed", {"call": 1, "status": 0, "message": "", "driver_ns": -2}),
    (DRIVER, "Executed", {"call": 1, "status": 0, "message": "", "time_on_device_ns": -2}),
    (DRIVER, "Executed", {"call": 1, "status": 0, "message": "", "shapes": [[[0] * 1025, True]]}),
]


@pytest.mark.parametrize(("sender", "kind", "fields"), BEYOND_LIMITS)
def test_numbers_and_lengths_beyond_their_limits_are_rejected(
    sender: PeerRole, kind: str, fields: dict[str, Any]
) -> None:
    assert is_rejected(msgspec.msgpack.encode({"type": kind, **fields}), sender, 0)


def test_more_fds_than_linux_passes_in_one_message_are_rejected() -> None:
    fields = {"type": "Memories", "call": 1, "status": 0, "message": "", "sizes": [0] * 251}
    assert is_rejected(msgspec.msgpack.encode(fields), CLIENT, 251)


def test_a_body_over_the_limit_is_rejected_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_protocol, "MAX_BODY_BYTES", 100)
    with pytest.raises(ProtocolError, match="101 bytes from the client; the limit is 100"):
        decode(bytes(101), sender=CLIENT)


@pytest.mark.parametrize(
    "message",
    [
        messages.ListDevices(-1),
        messages.ListDevices(2**70),
        messages.Hello(1, "i" * 257, ""),
        messages.Hello(1, "aidl-4", "\udc80"),
        messages.PrepareModel(1, "reference", 1, 1, -1, b"", 251),
    ],
)
def test_a_message_that_the_peer_would_reject_is_not_sent(message: Message) -> None:
    with pytest.raises(InvalidArgument, match=f"{type(message).__name__} cannot be sent"):
        encode(message)


def test_a_long_error_text_is_truncated() -> None:
    received = decode(encode(messages.Reply(1, INVALID, "t" * 9000)), sender=DRIVER)
    assert received == messages.Reply(1, INVALID, "t" * 4096)


def test_an_error_text_with_an_undecodable_file_name_is_sent() -> None:
    received = decode(encode(messages.Refused(INVALID, "no file \udcff.tflite")), sender=DRIVER)
    assert received == messages.Refused(INVALID, "no file ?.tflite")


@pytest.mark.parametrize(
    "kind", [kind for kind in REPLIES if kind is not messages.ListDevices], ids=lambda kind: kind.__name__
)
def test_the_error_replies_to_a_call_end_it_with_its_status(kind: type[messages.Call]) -> None:
    caller = DRIVER if kind is messages.GetMemories else CLIENT
    state = ConnectionState()
    state.phase = control_protocol.Phase.OPEN
    state.process_call(kind, 7, caller)
    replies = control_protocol.error_replies(kind, 7, INVALID, "operand 3: no")
    for reply in replies:
        assert decode(encode(reply), sender=caller.peer) == reply
        assert (reply.call, reply.status, reply.message) == (7, INVALID, "operand 3: no")
        state.process_message(reply, caller.peer)
    assert tuple(map(type, replies)) == REPLIES[kind]
    assert state.pending_calls(caller) == ()


def test_every_call_declares_a_phase_that_traces_know() -> None:
    assert [kind for kind in REPLIES if tag_of(kind.trace_name("LI")) is None] == []
    assert messages.ListDevices.trace_name("LD") == "[NN_LD_PI]ListDevices"
    assert messages.StartTrace.trace_name("LI") == "[NN_LI_PU]StartTrace"


def test_a_call_without_a_phase_has_no_name_in_traces() -> None:
    with pytest.raises(AttributeError, match="trace_phase"):
        messages.Call.trace_name("LD")


def test_a_decoded_message_does_not_change_with_its_source_memory() -> None:
    shared = bytearray(
        wire(messages.Goodbye(), {"type": "GetSupportedOperations", "call": 1, "device": "", "model": b"abc"})
    )
    message = decode(memoryview(shared), sender=CLIENT)
    shared[:] = bytes(len(shared))
    assert message == messages.GetSupportedOperations(1, "", b"abc")


ARGUMENTS = (RequestArgument(False, DataLocation(1, 64, 16, 4), (2, 2)), RequestArgument(True))
SHAPES = (OutputShape((2, 0), False), OutputShape(()))


@dataclass
class StandIn:
    """A pool by what is said of it alone."""

    size_bytes: int
    offset: int
    protection: Protection

    def fileno(self) -> int:
        """Be nothing that is sent."""
        raise NotImplementedError


def test_a_request_round_trips_through_wire_data() -> None:
    memories: Any = (StandIn(80, 0, Protection.READ_WRITE), StandIn(8, 3, Protection.READ))
    pools = (memories[0], BufferToken(5), memories[1])
    data = messages.request_to_data(Request(ARGUMENTS, ARGUMENTS[1:], pools))
    first, second = [False, [1, 64, 16, 4], (2, 2)], [True, [0, 0, 0, 0], ()]
    wire = (["memory", 80, 0, 3], ["buffer", 5], ["memory", 8, 3, 1])
    assert msgspec.to_builtins(data) == [(first, second), (second,), wire]
    assert messages.request_from_data(data, memories) == Request(ARGUMENTS, ARGUMENTS[1:], pools)


def test_a_configuration_round_trips_through_wire_data() -> None:
    config = ExecutionConfig(
        MeasureTiming.YES, 5, (TokenValuePair(65537, b"h"),), (ExtensionNameAndPrefix("com.a", 1),)
    )
    data = messages.config_to_data(config)
    assert msgspec.to_builtins(data)[:2] == [1, 5]
    assert messages.config_from_data(data) == config


def test_shapes_round_trip_through_wire_data() -> None:
    data = messages.shapes_to_data(SHAPES)
    assert msgspec.to_builtins(data) == ([(2, 0), False], [(), True])
    assert messages.shapes_from_data(data) == SHAPES


def test_arguments_and_shapes_out_of_range_are_invalid_arguments() -> None:
    with pytest.raises(InvalidArgument, match="request cannot be written"):
        messages.request_to_data(Request((RequestArgument(location=DataLocation(offset=-1)),), ()))
    with pytest.raises(InvalidArgument, match="configuration cannot be written"):
        messages.config_to_data(ExecutionConfig(loop_timeout_ns=2**63))
    with pytest.raises(InvalidArgument, match="shapes cannot be written"):
        messages.shapes_to_data([OutputShape((2**32,))])


KNOWN = """
import msgspec
import nnfmq.driver.session.calls
from nnfmq.hal import capabilities, types

def is_inspected(kind):
    kind.__annotations__.update(dict.fromkeys(kind.__annotations__, "NotDefined"))
    try:
        msgspec.convert({}, kind)
    except msgspec.ValidationError:
        pass
    except NameError:
        return False
    return True

class Other(msgspec.Struct):
    value: int

kinds = (types.RequestArgument, types.DataLocation, types.OutputShape, types.ExecutionConfig, capabilities.BufferRole)
print(is_inspected(Other), *map(is_inspected, kinds))
"""


def test_LIFE_8_no_thread_is_the_first_to_convert_to_a_struct() -> None:
    """Two threads that do so concurrently crash the process: msgspec must inspect a class before threads start."""
    done = subprocess.run([sys.executable, "-c", KNOWN], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False" + " True" * 5 + "\n"
