"""Messages about shared programs: each is read from the array that it is on the wire, and nothing else is."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nnfmq.base.channel import INLINE_BYTES
from nnfmq.driver.cache.shared import (
    STORED_FILES_MAX,
    ClassChanged,
    Found,
    Invalidate,
    Lookup,
    NotFound,
    Publish,
    Release,
    Sender,
    SetClass,
    SharedCacheMessage,
    Store,
    decode,
    encode,
    fd_count,
)
from nnfmq.hal.client_class import ClientClass
from nnfmq.hal.errors import ProtocolError

WORKER, SUPERVISOR = Sender.WORKER, Sender.SUPERVISOR
NAME = "0123456789abcdef" * 4
SAMPLES: list[tuple[Sender, SharedCacheMessage, list[Any], int]] = [
    (WORKER, Lookup(7, NAME), ["Lookup", 7, NAME], 0),
    (WORKER, Publish(0, NAME), ["Publish", 0, NAME], 1),
    (WORKER, Release(2**63 - 1), ["Release", 2**63 - 1], 0),
    (WORKER, Invalidate(1), ["Invalidate", 1], 0),
    (WORKER, Store(9, ((NAME, 1), (f"kernels/{NAME}", 70))), ["Store", 9, [[NAME, 1], [f"kernels/{NAME}", 70]]], 2),
    (WORKER, SetClass(8, 4711, ClientClass.BATCH), ["SetClass", 8, 4711, 1], 0),
    (SUPERVISOR, ClassChanged(8, "no"), ["ClassChanged", 8, "no"], 0),
    (SUPERVISOR, Found(7), ["Found", 7], 1),
    (SUPERVISOR, NotFound(7), ["NotFound", 7], 0),
]
IDS = [type(message).__name__ for _, message, _, _ in SAMPLES]
sampled = pytest.mark.parametrize(("sender", "message", "wire", "fds"), SAMPLES, ids=IDS)


@sampled
def test_a_message_is_encoded_as_an_array_and_decoded(
    sender: Sender, message: SharedCacheMessage, wire: list[Any], fds: int
) -> None:
    assert msgspec.msgpack.decode(encode(message)) == wire
    assert decode(msgspec.msgpack.encode(wire), sender=sender, fds=fds) == message
    assert decode(encode(message), sender=sender, fds=None) == message
    assert fd_count(message) == fds


@sampled
def test_a_truncated_or_extended_message_is_rejected(
    sender: Sender, message: SharedCacheMessage, wire: list[Any], fds: int
) -> None:
    data = encode(message)
    for count in range(len(data)):
        with pytest.raises(ProtocolError):
            decode(data[:count], sender=sender, fds=fds)
    for longer in (data + b"\0", msgspec.msgpack.encode([*wire, 0])):
        with pytest.raises(ProtocolError):
            decode(longer, sender=sender, fds=fds)


@sampled
def test_a_wrong_number_of_fds_is_rejected(
    sender: Sender, message: SharedCacheMessage, wire: list[Any], fds: int
) -> None:
    for count in {0, 1, 2} - {fds}:
        with pytest.raises(ProtocolError, match=f"came with {count} file descriptors instead of {fds}"):
            decode(msgspec.msgpack.encode(wire), sender=sender, fds=count)


@sampled
def test_a_message_of_the_other_end_is_rejected(
    sender: Sender, message: SharedCacheMessage, wire: list[Any], fds: int
) -> None:
    other = SUPERVISOR if sender is WORKER else WORKER
    with pytest.raises(ProtocolError, match=f"the {other.value} may not send"):
        decode(msgspec.msgpack.encode(wire), sender=other, fds=fds)


@pytest.mark.parametrize(
    "wire",
    [
        ["Lookup", -1, NAME],
        ["Lookup", 2**63, NAME],
        ["Lookup", 1, NAME[1:]],
        ["Lookup", 1, NAME + "0"],
        ["Lookup", 1, NAME[1:] + "\n"],
        ["Lookup", 1, NAME.upper()],
        ["Lookup", 1, "../" + NAME[3:]],
        ["Lookup", 1, "kernels/" + NAME[1:]],
        ["Lookup", 1, "other/" + NAME],
        ["Lookup", 1, "kernels/../" + NAME],
        ["Lookup", "1", NAME],
        ["SharedCacheMessage", 1],
        ["Nothing", 1],
        {"type": "Release", "ref_id": 1},
        None,
    ],
    ids=str,
)
def test_invalid_messages_are_rejected(wire: Any) -> None:
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode(wire), sender=WORKER, fds=0)


@pytest.mark.parametrize(
    "files",
    [[], [[NAME, 0]], [[NAME, -1]], [[NAME]], [["../" + NAME, 1]], [[NAME, 1]] * (STORED_FILES_MAX + 1)],
    ids=["none", "empty", "negative", "no size", "elsewhere", "too many"],
)
def test_invalid_files_are_not_stored(files: list[Any]) -> None:
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode(["Store", 1, files]), sender=WORKER, fds=2)


def test_the_largest_request_to_store_fits_into_a_frame() -> None:
    largest = Store(2**63 - 1, ((f"kernels/{NAME}", 2**63 - 1),) * STORED_FILES_MAX)
    assert len(encode(largest)) <= INLINE_BYTES
